"""Rule matches: what an ordered table decides for one tree, leaf by leaf.

Takes rules and a table of leaves; gives per leaf its path, its value and the rule that
decided. Labels, masks, groups, reports and errors are views of this, so they cannot
disagree. What is unused, shadowed or unmatched is worked out when asked for.
See ``rules`` for which rule decides, ``repairs`` for what to type instead.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import jax.tree_util as jtu

from treeadapt.errors import (
    OverlapError,
    RulesError,
    UnmatchedPathError,
    UnusedRuleError,
)
from treeadapt.names import fold, listing, plural, shorten
from treeadapt.selection.leaves import Leaves, same_value
from treeadapt.selection.repairs import entry_text, unused_lines
from treeadapt.selection.selectors import GlobSelector, NodeSelector, Selector
from treeadapt.selection.stacks import Unrolled, require_agreement
from treeadapt.trees.views import TreeView

if TYPE_CHECKING:
    from treeadapt.selection.rules import Rules


class _Sentinel(enum.Enum):
    """Two values that are equal to no other, also after copying or unpickling."""

    STATIC = enum.auto()
    MISSING = enum.auto()

    def __repr__(self) -> str:
        return self.name


#: Label of functions and other static leaves that no rule matches.
STATIC: Any = _Sentinel.STATIC
#: An argument that was not given.
MISSING: Any = _Sentinel.MISSING


@dataclasses.dataclass(frozen=True, eq=False)
class RuleMatches:
    """What rules decide for one tree; everything else is a view of this.

    Attributes:
        rules: the rules.
        leaves: the table of the tree's leaves; with ``stacks``, of its layers.
        unrolled: the layers of the tree.
    """

    rules: Rules
    leaves: Leaves
    unrolled: Unrolled

    def __post_init__(self) -> None:
        _ = self._first  # a selector that cannot answer raises now

    @property
    def view(self) -> TreeView:
        """The tree; with ``stacks``, its layers."""
        return self.leaves.view

    @property
    def stored(self) -> TreeView:
        """The tree as it is."""
        return self.unrolled.stored

    @property
    def paths(self) -> Sequence[str]:
        """The label path of each leaf."""
        return self.view.plan.paths

    @functools.cached_property
    def is_array(self) -> list[bool]:
        """Whether each leaf is an array."""
        return self.leaves.spread(self.leaves.is_array)

    @functools.cached_property
    def deciding(self) -> list[int]:
        """The index of the rule that decided each leaf; -1 where none did."""
        return self.leaves.spread(self._first)

    @functools.cached_property
    def values(self) -> list[Any]:
        """The value of each leaf; None for an array leaf without a rule or default."""
        rules = self.rules
        default = None if rules.default is MISSING else rules.default
        table = (*rules.values, default)  # an index of -1 reads the last one
        values = list(map(table.__getitem__, self._first))
        if -1 in self._first:
            for row, rule in enumerate(self._first):
                if rule < 0 and not self.leaves.is_array[row]:
                    values[row] = STATIC
        return self.leaves.spread(values)

    def labels(self) -> list[Any]:
        """Return the values of the stored leaves as labels, one leaf to JAX each.

        Raises:
            RulesError: a value is a container.
            UnmatchedPathError: an array leaf has no value.
            StackError: layers of one array have different values.
        """
        require_leaf_labels(self.rules)
        self._require_matched()
        return require_agreement(self.answers, "A tree of labels")

    @functools.cached_property
    def answers(self) -> list[Any]:
        """The value of each stored leaf; ``PerLayer`` where its layers differ."""

        def sources() -> list[str]:
            texts = rule_names(self.rules)
            return [texts[rule] for rule in self.deciding]

        return self.unrolled.fold(self.values, sources)

    @functools.cached_property
    def unmatched(self) -> tuple[str, ...]:
        """Paths of the array leaves that neither a rule nor a default gives a value."""
        if self.rules.default is not MISSING or -1 not in self._first:
            return ()
        found = zip(self.paths, self.deciding, self.is_array, strict=True)
        return tuple(path for path, rule, arr in found if rule < 0 and arr)

    @functools.cached_property
    def unused(self) -> tuple[tuple[int, Any], ...]:
        """Entries that match no array leaf: index of the rule, and the entry.

        An entry is a pattern, a class, or a whole selector whose parts match something.
        """
        if not any(self.leaves.is_array):
            return ()
        found: list[tuple[int, Any]] = []
        for index, where in enumerate(self.rules.selectors):
            entries: list[Any] = list(dict.fromkeys(where.unused(self.leaves)))
            if not entries and not (where.may_be_empty or self._is_used(index)):
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
            and self._is_used(index)
            and where.plain != "**"
            and not self._could_decide(where)
        )

    @functools.cached_property
    def overlaps(self) -> tuple[tuple[int, int, int], ...]:
        """Leaves that rules with different values match: leaf, and the two rules."""
        values, first = self.rules.values, self._first
        second = [-1] * len(first)
        for index, where in enumerate(self.rules.selectors):
            # A row is asked from the rule that decides it on, until one clashes.
            pairs = enumerate(zip(first, second, strict=True))
            rows = [row for row, (one, two) in pairs if two < 0 <= one < index]
            answers = where.select(self.leaves.at(rows)) if rows else []
            for row, yes in zip(rows, answers, strict=True):
                if yes and not same_value(values[first[row]], values[index]):
                    second[row] = index
        pairs = enumerate(zip(self.deciding, self.leaves.spread(second), strict=True))
        return tuple(
            (leaf, one, two)
            for leaf, (one, two) in pairs
            if two >= 0 and self.is_array[leaf]
        )

    def check(self) -> RuleMatches:
        """Return these matches, if rules and tree fit each other.

        Raises:
            OverlapError: ``overlap="error"`` and two rules with different values match
                one leaf.
            UnusedRuleError: a rule matches no array leaf, or is unreachable.
            UnmatchedPathError: an array leaf matches no rule and there is no default.
        """
        self.check_rules()
        self._require_matched()
        return self

    def check_rules(self) -> None:
        """Raise unless every rule has a use; leaves may lack a rule.

        Raises:
            OverlapError: ``overlap="error"`` and two rules with different values match
                one leaf.
            UnusedRuleError: a rule matches no array leaf, or is unreachable.
        """
        rules = self.rules
        if rules.overlap == "error" and self.overlaps:
            raise OverlapError(_overlap_message(self))
        # The common case: every rule is one pattern and decides a leaf.
        if rules.unused == "ignore" or (
            not rules.not_plain and len(self._won) == len(rules.pairs)
        ):
            return
        if self.unused or self.shadowed:
            raise UnusedRuleError(_unused_message(self))

    def names(self, paths: Collection[str]) -> list[str]:
        """Return paths of leaves; those of several layers of one array as one.

        Args:
            paths: of some leaves, in leaf order.
        """
        known = frozenset(paths)
        keys = [path in known or None for path in self.paths]
        return [part.path for part in self.unrolled.divide(keys)]

    def selected(self, index: int) -> list[int]:
        """Return the indices of the array leaves that a rule matches.

        Args:
            index: of the rule, whether or not it decides.
        """
        chosen = self.rules.selectors[index].select(self.leaves)
        both = map(all, zip(chosen, self.leaves.is_array, strict=True))
        members = itertools.compress(self.leaves.members, both)
        return sorted(itertools.chain.from_iterable(members))

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
        values, leaves = self.rules.values, self.selected(index)
        deciding = sorted({self.deciding[leaf] for leaf in leaves})
        earlier = _rule_name(self.rules, deciding[0])
        if all(same_value(values[index], values[rule]) for rule in deciding):
            cure = "Remove it: they give the same value."
        elif set(self.selected(deciding[0])).issubset(leaves):
            cure = f"Keep one of the two, because {earlier}, matches no other leaf."
        else:
            cure = f"Move it up, before {earlier}."
        first = listing([self.paths[leaves[0]]])
        matched = (
            f"its only leaf, {first}"
            if len(leaves) == 1
            else f"all {len(leaves):,} leaves that it matches, such as {first}"
        )
        return f"is unreachable: earlier rules already match {matched}. {cure}"

    @functools.cached_property
    def _first(self) -> list[int]:
        """For each row of the table, the index of the rule that decides; or -1."""
        return self.rules.first(self.leaves)

    @functools.cached_property
    def _won(self) -> frozenset[int]:
        """Indices of the rules that decide an array leaf."""
        return frozenset(itertools.compress(self._first, self.leaves.is_array)) - {-1}

    def _is_used(self, index: int) -> bool:
        """Whether a rule matches an array leaf, or could in a hole."""
        where, leaves = self.rules.selectors[index], self.leaves
        if index in self._won:
            return True
        if leaves.holes:
            return where.plain is None or leaves.is_used(where.plain)
        return leaves.has_any(where.select(leaves))

    def _could_decide(self, where: Selector) -> bool:
        """Whether a hole may be the place of a leaf that a rule decides."""
        if where.plain is None:
            return bool(self.leaves.holes)
        return bool(self.leaves.reached & self.leaves.matcher.bits[where.plain])

    def _require_matched(self) -> None:
        if self.unmatched:
            text = unmatched_message(self.unmatched, sum(self.is_array))
            raise UnmatchedPathError(text)


def where_text(where: Selector) -> str:
    """Write a selector as it was typed as the key of a rule."""
    if isinstance(where, GlobSelector):
        return repr(where.pattern)
    if isinstance(where, NodeSelector):
        return where.cls.__qualname__
    return repr(where)


def require_leaf_labels(rules: Rules) -> None:
    """Raise if a value of the rules cannot be a leaf of a tree.

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


def rule_names(rules: Rules) -> list[str]:
    """Return what errors call each rule; an index of -1 reads the name of none."""
    return [*(_rule_name(rules, index) for index in range(len(rules.pairs))), ""]


def _rule_name(rules: Rules, index: int) -> str:
    return f"rule {index + 1}, {shorten(where_text(rules.selectors[index]))}"


def _overlap_message(matches: RuleMatches) -> str:
    found = matches.overlaps
    lines = [f"{_leaves_match(len(found))} two rules with different values:"]
    for leaf, first, second in found[:8]:
        lines.append(
            f"  {matches.paths[leaf]!r}: {_rule_name(matches.rules, first)}, and "
            f"{_rule_name(matches.rules, second)}"
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
        named = [
            (f"{entry_text(entry)} (rule {index + 1})", entry)
            for index, entry in matches.unused
        ]
        lines += unused_lines(named, "rules", matches.view.plan, matches.is_array)
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
    name = _rule_name(matches.rules, index)
    return f"{name[0].upper()}{name[1:]}, {matches.shadow_text(index)}"


def _leaves_match(count: int) -> str:
    return f"{plural(count, 'leaf')} {'matches' if count == 1 else 'match'}"


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
