"""Rule matches: what an ordered table decides for one tree, leaf by leaf.

Takes rules, a tree and the index of the rule that decided each leaf; gives per leaf its
path, its value and that rule. Labels, masks, groups, reports and errors are views of
this, so they cannot disagree. What is unused, shadowed or unmatched is worked out when
asked for.
Which rule decides is up to ``rules``, what to type instead to ``repairs``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, Literal, NoReturn, Protocol

import jax.tree_util as jtu

from treeadapt.errors import (
    OverlapError,
    RulesError,
    UnmatchedPathError,
    UnusedRuleError,
)
from treeadapt.names import fold, listing, plural, shorten
from treeadapt.selection.decisions import Case, Program, Survey, all_arrays
from treeadapt.selection.repairs import entry_text, folded_advice, misses
from treeadapt.selection.selectors import Glob, Node, Report, Selector
from treeadapt.trees.views import TreeView

Overlap = Literal["first", "error"]


class _Static:
    """Type of ``STATIC``; one instance, also after copying or unpickling."""

    def __repr__(self) -> str:
        return "STATIC"

    def __reduce__(self) -> str:
        return "STATIC"


class _Missing:
    """Type of ``MISSING``, which stands for an argument that was not given."""

    def __repr__(self) -> str:
        return "MISSING"

    def __reduce__(self) -> str:
        return "MISSING"


#: Label of functions and other static leaves that no rule matches.
STATIC = _Static()
MISSING: Any = _Missing()


class Table(Protocol):
    """What matches ask of the rules that made them."""

    @property
    def selectors(self) -> tuple[Selector, ...]:
        """The selectors, in order."""

    @property
    def values(self) -> tuple[Any, ...]:
        """The values, in order."""

    @property
    def program(self) -> Program:
        """The selectors, ready to be asked."""

    default: Any
    unused: Report
    overlap: Overlap


@dataclasses.dataclass(frozen=True, eq=False)
class RuleMatches:
    """What rules decide for one tree; everything else is a view of this.

    Attributes:
        rules: the rules.
        view: the tree.
        deciding: per leaf, the index of the rule that decided; -1 where none did.
        holes: paths of places that may stand for arrays, as for ``Survey``.
    """

    rules: Table
    view: TreeView
    deciding: Sequence[int]
    holes: Sequence[str] = ()

    @property
    def paths(self) -> Sequence[str]:
        """The label path of each leaf."""
        return self.view.plan.paths

    @functools.cached_property
    def is_array(self) -> list[bool]:
        """Whether each leaf is an array."""
        return self._survey.is_array

    @functools.cached_property
    def values(self) -> list[Any]:
        """The value of each leaf; None for an array leaf without a rule or default."""
        rules = self.rules
        default = None if rules.default is MISSING else rules.default
        table = (*rules.values, default)  # an index of -1 reads the last one
        values = list(map(table.__getitem__, self.deciding))
        if not self._all_arrays:
            for index, rule in enumerate(self.deciding):
                if rule < 0 and not self.is_array[index]:
                    values[index] = STATIC
        return values

    def labels(self) -> list[Any]:
        """Return the values as labels, each of which must be one leaf to JAX.

        Raises:
            RulesError: a value is a container.
            UnmatchedPathError: an array leaf has no value.
        """
        require_leaf_labels(self.rules)
        if self.unmatched:
            raise UnmatchedPathError(_unmatched_message(self))
        return self.values

    @functools.cached_property
    def unmatched(self) -> tuple[str, ...]:
        """Paths of the array leaves that neither a rule nor a default gives a value."""
        if self.rules.default is not MISSING or -1 not in self.deciding:
            return ()
        found = zip(self.paths, self.deciding, self.is_array, strict=True)
        return tuple(path for path, rule, arr in found if rule < 0 and arr)

    @functools.cached_property
    def unused(self) -> tuple[tuple[int, Any], ...]:
        """Entries that hit no array leaf: index of the rule, and the entry.

        An entry is a pattern, a class, or a whole selector whose parts hit something.
        """
        if not self._survey.num_arrays:
            return ()
        found: list[tuple[int, Any]] = []
        for index, where in enumerate(self.rules.selectors):
            entries: list[Any] = list(dict.fromkeys(where.unused(self._survey)))
            if not entries and not (where.may_be_empty or self._hits(index)):
                entries = [where]
            found += [(index, entry) for entry in entries]
        return tuple(found)

    @functools.cached_property
    def shadowed(self) -> tuple[int, ...]:
        """Indices of the rules all of whose array leaves earlier rules already match.

        A closing ``**`` is a habit and not counted.
        """
        unused = {index for index, _ in self.unused}
        return tuple(
            index
            for index, where in enumerate(self.rules.selectors)
            if index not in self._won
            and index not in unused
            and self._hits(index)
            and where.plain != "**"
            and not self._could_decide(where)
        )

    @functools.cached_property
    def overlaps(self) -> tuple[tuple[int, int, int], ...]:
        """Leaves that rules with different values match: leaf, and the two rules."""
        values = self.rules.values

        def clash(case: Case) -> tuple[tuple[int, int], ...] | None:
            first = -1
            for index, where in enumerate(self.rules.selectors):
                answer = where.ask(case)
                if answer is None:
                    return None
                if answer and first < 0:
                    first = index
                elif answer and not same_value(values[first], values[index]):
                    return ((first, index),)
            return ()

        clashes = self.rules.program.each(self.view, clash)
        found = zip(clashes, self.is_array, strict=True)
        return tuple(
            (leaf, first, second)
            for leaf, (pairs, arr) in enumerate(found)
            for first, second in pairs
            if arr
        )

    def check(self) -> RuleMatches:
        """Return these matches, if rules and tree fit each other.

        Raises:
            OverlapError: ``overlap="error"`` and two rules with different values match
                one leaf.
            UnusedRuleError: a rule hits no array leaf, or decides none.
            UnmatchedPathError: an array leaf matches no rule and there is no default.
        """
        self.check_rules()
        if self.unmatched:
            raise UnmatchedPathError(_unmatched_message(self))
        return self

    def check_rules(self) -> None:
        """Raise unless every rule is of use; leaves without a rule are no matter.

        Raises:
            OverlapError: ``overlap="error"`` and two rules with different values match
                one leaf.
            UnusedRuleError: a rule hits no array leaf, or decides none.
        """
        rules, plan = self.rules, self.view.plan
        sure = rules.overlap == "first" and rules.program.key and self._all_arrays
        key = ("sound rules", rules.program.key, rules.unused, bool(self.holes))
        if sure and key in plan.memo:
            return
        if rules.overlap == "error" and self.overlaps:
            raise OverlapError(_overlap_message(self))
        if rules.unused == "error" and not self._all_decide and self._faults:
            raise UnusedRuleError(_unused_message(self))
        if sure:
            plan.remember(key, True)

    def selected(self, index: int) -> list[int]:
        """Return the indices of the array leaves that a rule matches.

        Args:
            index: of the rule, whether or not it decides.
        """
        return self._survey.selected(self.rules.selectors[index])

    def rule_text(self, index: int) -> str:
        """Write the rule that decided a leaf, as it was typed; empty if none did.

        Args:
            index: of the leaf.
        """
        rule = self.deciding[index]
        return "" if rule < 0 else where_text(self.rules.selectors[rule])

    def shadow_text(self, index: int) -> str:
        """Write what is wrong with a shadowed rule, and its cure.

        Args:
            index: of the rule, one of ``shadowed``.
        """
        selectors, values = self.rules.selectors, self.rules.values
        leaves = self._survey.selected(selectors[index])
        deciding = sorted({self.deciding[leaf] for leaf in leaves})
        earlier = _rule_name(self, deciding[0])
        if all(same_value(values[index], values[rule]) for rule in deciding):
            cure = "Remove it: they give the same value."
        elif set(self._survey.selected(selectors[deciding[0]])).issubset(leaves):
            cure = f"Keep one of the two, for {earlier}, matches no other leaf."
        else:
            cure = f"Move it up, before {earlier}."
        first = listing([self.paths[leaves[0]]])
        matched = (
            f"its only leaf, {first}"
            if len(leaves) == 1
            else f"all {len(leaves):,} leaves that it matches, such as {first}"
        )
        return f"is unreachable: earlier rules already match {matched}. {cure}"

    def groups(self) -> dict[Any, list[int]]:
        """Return the array leaves by label, for use as groups with names.

        Returns:
            ``{label: indices of leaves}``, labels in the order of the rules.

        Raises:
            RulesError: labels are of different types, or cannot be names.
        """
        labels = [*self.rules.values, self.rules.default]
        labels = [label for label in labels if label is not MISSING]
        kinds = dict.fromkeys(type(label).__name__ for label in labels)
        if len(kinds) > 1:
            raise RulesError(
                "Labels that name groups must be of one type; here are "
                f"{', '.join(kinds)}: {', '.join(dict.fromkeys(map(repr, labels)))}. "
                "Write them alike."
            )
        try:
            groups: dict[Any, list[int]] = {label: [] for label in labels}
        except TypeError as error:
            raise RulesError(
                f"A label that names a group is a key: {error}."
            ) from error
        pairs = zip(self.values, self.is_array, strict=True)
        for index, (value, arr) in enumerate(pairs):
            if arr and value is not None:
                groups[value].append(index)
        return {label: found for label, found in groups.items() if found}

    @functools.cached_property
    def _all_arrays(self) -> bool:
        return all_arrays(self.view.leaves)

    @functools.cached_property
    def _survey(self) -> Survey:
        return Survey(self.rules.program, self.view, self.holes)

    @functools.cached_property
    def _won(self) -> frozenset[int]:
        """Indices of the rules that decide an array leaf."""
        return frozenset(itertools.compress(self.deciding, self.is_array))

    def _hits(self, index: int) -> bool:
        """Whether a rule matches an array leaf."""
        where = self.rules.selectors[index]
        return index in self._won or self._survey.selects(where)

    def _could_decide(self, where: Selector) -> bool:
        """Whether a hole may stand for a leaf that a rule decides."""
        if not self.holes or where.plain is None:
            return bool(self.holes)
        program = self.rules.program
        reached = program.reach(self.view, self.holes)
        return bool(reached & program.bits[where.plain])

    @property
    def _all_decide(self) -> bool:
        """Whether every rule is one pattern and decides a leaf: the common case."""
        plain = all(where.plain is not None for where in self.rules.selectors)
        return plain and self._won.issuperset(range(len(self.rules.values)))

    @property
    def _faults(self) -> bool:
        return bool(self.unused or self.shadowed)


def same_value(one: Any, two: Any) -> bool:
    """Compare two values by type and content; arrays only by identity.

    Example:
        >>> same_value("a", "a"), same_value(1, True), same_value(jnp.ones(1), 1.0)
        (True, False, False)
    """
    if one is two:
        return True
    if type(one) is not type(two):
        return False
    equal = one == two
    return equal if isinstance(equal, bool) else False


def where_text(where: Selector) -> str:
    """Write a selector as it was typed as the key of a rule."""
    if isinstance(where, Glob):
        return repr(where.pattern)
    if isinstance(where, Node):
        return where.cls.__qualname__
    return repr(where)


def refuse_none(who: str) -> NoReturn:
    """Raise because ``who`` gives None for a value.

    Raises:
        RulesError: always.
    """
    raise RulesError(
        f"{who} gives None, which is not a label: JAX takes None for an empty "
        "container and the leaf would be lost. Give it a name, such as 'frozen'."
    )


def require_leaf_labels(rules: Table) -> None:
    """Raise if a value of the rules cannot stand at a leaf of a tree.

    Raises:
        RulesError: JAX would take the value apart.
    """
    for value in (*rules.values, rules.default):
        if type(value) is not str and not jtu.all_leaves([value]):
            raise RulesError(
                f"The label {entry_text(value)} is a container to JAX, and a tree that "
                "holds it has another structure. Give it a name, or read the values "
                "from rules.match(tree)."
            )


def _rule_name(matches: RuleMatches, index: int) -> str:
    where = matches.rules.selectors[index]
    return f"rule {index + 1}, {shorten(where_text(where))}"


def _overlap_message(matches: RuleMatches) -> str:
    found = matches.overlaps
    lines = [f"{_leaves_match(len(found))} two rules with different values:"]
    for leaf, first, second in found[:8]:
        lines.append(
            f"  {matches.paths[leaf]!r}: {_rule_name(matches, first)}, and "
            f"{_rule_name(matches, second)}"
        )
    if len(found) > 8:
        lines.append(f"  and {len(found) - 8:,} more")
    lines.append(
        'Exclude the leaves from one of them, ["...", "!..."], or let the first rule '
        'win with overlap="first".'
    )
    return "\n".join(lines)


def _unused_message(matches: RuleMatches) -> str:
    lines = []
    if matches.unused:
        arrays = matches._survey.num_arrays
        lines.append(f"{misses(len(matches.unused), 'rules', arrays)}:")
        named = [
            (f"{entry_text(entry)} (rule {index + 1})", entry)
            for index, entry in matches.unused
        ]
        lines += folded_advice(named, matches.view.plan, matches.is_array)
    for index in matches.shadowed[:4]:
        lines.append(_shadow_line(matches, index))
    if len(matches.shadowed) > 4:
        more = f"{len(matches.shadowed) - 4:,} more rules"
        lines.append(f"{more} are unreachable as well.")
    if matches.unmatched:
        names = listing(fold(matches.unmatched), limit=3)
        lines.append(f"{_leaves_match(len(matches.unmatched))} no rule: {names}.")
    lines.append(
        "Correct or remove these rules; or allow it: "
        'treeadapt.Rules(rules, unused="ignore").'
    )
    return "\n".join(lines)


def _shadow_line(matches: RuleMatches, index: int) -> str:
    name = _rule_name(matches, index)
    return f"{name[0].upper()}{name[1:]}, {matches.shadow_text(index)}"


def _leaves_match(count: int) -> str:
    return f"{plural(count, 'leaf')} {'matches' if count == 1 else 'match'}"


def _unmatched_message(matches: RuleMatches) -> str:
    return unmatched_message(matches.unmatched, matches._survey.num_arrays)


def unmatched_message(unmatched: Sequence[str], num_arrays: int) -> str:
    """Write the message for array leaves that no rule matches.

    Args:
        unmatched: their paths.
        num_arrays: how many array leaves there are.
    """
    verb = "matches" if len(unmatched) == 1 else "match"
    return (
        f"{len(unmatched):,} of {plural(num_arrays, 'leaf')} {verb} no rule: "
        f"{listing(fold(unmatched))}.\n"
        'Add a rule for them, end the rules with ("**", <label>), or pass '
        "default=<label>."
    )
