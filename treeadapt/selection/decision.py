"""Decisions: what an ordered table of selectors and values gives every leaf of a tree.

Takes a ``RuleTable`` and a tree; gives a ``Decision``. The first selector that selects
a leaf decides. Labels, masks, specs, factors, groups of a partition, reports and errors
are views of one ``Decision``, so they cannot disagree. An array leaf without a rule, an
unreachable rule and, if asked, two rules for one leaf are errors.
See ``selectors`` for which leaves a selector selects, ``messages`` for what errors say,
``rules`` for how a table is written.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax.tree_util as jtu

from treeadapt.errors import (
    OverlapError,
    RulesError,
    UnmatchedPathError,
    UnusedRuleError,
)
from treeadapt.layers.stacks import Layers, Unrolled
from treeadapt.selection import messages
from treeadapt.selection.alternatives import (
    UnusedAlternative,
    unused_alternatives,
    warn_of_alternatives,
)
from treeadapt.selection.answers import (
    IN_AN_OPTIMIZER,
    Answers,
    Split,
    require_agreement,
)
from treeadapt.selection.arguments import turned_table
from treeadapt.selection.leaves import Leaves, NotKnown
from treeadapt.selection.repairs import Names, pattern_text
from treeadapt.selection.selectors import ListSelector, Selector, Unused
from treeadapt.selection.whole_tree import Question
from treeadapt.text.names import fold, listing, plural, shorten
from treeadapt.trees.arrays import same_value
from treeadapt.trees.describing import describe_argument
from treeadapt.trees.views import TreeView

Overlap = Literal["first", "error"]


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


class RuleTable(Question):
    """An ordered table of selectors and values.

    Attributes:
        pairs: a selector and a value for each rule; also as ``selectors`` and
            ``values``.
        default: value of array leaves that no rule matches; ``MISSING`` if they need
            one.
        unused: ``"error"`` or ``"ignore"`` rules without a use.
        overlap: ``"first"`` or ``"error"`` where rules give one leaf different values.
        expect: how many arrays should have a label.
        owners: by pattern, the first rule that is just this pattern.
        others: rules that are more than one, with their index.
    """

    pairs: tuple[tuple[Selector, Any], ...]
    selectors: tuple[Selector, ...]
    values: tuple[Any, ...]
    default: Any
    unused: Unused
    overlap: Overlap
    expect: Mapping[Any, int]
    owners: dict[str, int]
    others: list[tuple[int, Selector]]

    @functools.cached_property
    def names(self) -> list[str]:
        """What errors call each rule; an index of -1 reads the name of none."""
        texts = [shorten(where.typed) for where in self.selectors]
        return [*(f"rule {i}, {text}" for i, text in enumerate(texts, 1)), ""]

    @property
    def turned(self) -> dict[str, Any]:
        """The rules with labels for patterns, if all are texts; else none."""
        return turned_table((where.plain, value) for where, value in self.pairs)

    def patterns(self) -> Iterator[str]:
        """Yield every pattern; those that are a whole rule first, in their order."""
        rest = (where.patterns() for _, where in self.others)
        return itertools.chain(self.owners, *rest)

    def checked(self) -> Iterator[tuple[int, str]]:
        """Yield the patterns of which every alternative should match, by rule."""
        for index, where in enumerate(self.selectors):
            for pattern in where.checked():
                yield index, pattern

    def first(self, leaves: Leaves) -> list[int]:
        """Return, for each row of a table, the index of the first rule that selects it.

        Returns:
            One index a row; -1 where no rule does.
        """
        if leaves.matcher is not self.matcher:
            return self._first(leaves, enumerate(self.selectors))
        return leaves.once(self._known, self._first)

    def _first(
        self, leaves: Leaves, asked: Iterable[tuple[int, Selector]] | None = None
    ) -> list[int]:
        last = len(self.pairs)
        deciding = [last] * len(leaves)
        if asked is None:
            # Bits are in the order of plain rules: the lowest that is set in a mask is
            # the first of these that decides, and no other one need be asked.
            owners, asked = list(self.owners.values()), self.others
            bits = (1 << len(owners)) - 1
            for row, mask in enumerate(leaves.masks):
                low = mask & bits
                if low:
                    deciding[row] = owners[(low & -low).bit_length() - 1]
        for index, where in asked:
            rows = [row for row, best in enumerate(deciding) if best > index]
            if not rows:
                break
            for row, yes in zip(rows, where.select(leaves.at(rows)), strict=True):
                if yes:
                    deciding[row] = index
        return [-1 if index == last else index for index in deciding]

    def require_labels(self) -> None:
        """Raise if a value cannot be a label: a leaf of a tree, to JAX.

        Raises:
            RulesError: it is None, or a container.
        """
        for index, value in enumerate((*self.values, self.default)):
            if type(value) is str or jtu.all_leaves([value]):
                continue
            who = "default=" if index == len(self.values) else self.names[index]
            if value is None:
                raise RulesError(
                    f"None is not a label ({who}): JAX takes it for an empty "
                    "container, and the leaf would be lost. Give it a name, such as "
                    "'frozen', or read the values from rules.by_path(tree)."
                )
            raise RulesError(
                f"{describe_argument(value).capitalize()} is not a label ({who}): it "
                "is a container to JAX, and a tree that holds it has another "
                "structure. Give it a name, or read the values from "
                "rules.by_path(tree)."
            )

    def require_values(self) -> None:
        """Raise if a tree cannot hold a value where its leaf is.

        None and NamedTuples can be there: whoever calls for a tree of them, as Optax
        does for the dimension numbers of Muon, takes them for leaves.

        Raises:
            RulesError: it is another container.
        """
        if not all(map(_may_be_leaf, (*self.values, self.default))):
            self.require_labels()


@dataclasses.dataclass(frozen=True, eq=False)
class Decision:
    """What rules decided for one tree; everything else is a view of this.

    Attributes:
        rules: the rules.
        leaves: the table of the tree's leaves; with ``stacks``, of its layers.
        unrolled: the layers of the tree.
    """

    rules: RuleTable
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
        """The value of each leaf; ``MISSING`` for an array leaf that has none."""
        rules = self.rules
        table = (*rules.values, rules.default)  # an index of -1 reads the last one
        values = list(map(table.__getitem__, self._first))
        if -1 in self._first:
            for row, rule in enumerate(self._first):
                if rule < 0 and not self.leaves.is_array[row]:
                    values[row] = STATIC
        return self.leaves.spread(values)

    def labels(self) -> list[Any]:
        """Return the values of the stored leaves as labels, one leaf to JAX each.

        Raises:
            RulesError: a value is None or a container.
            UnmatchedPathError: an array leaf has no value.
            StackError: layers of one array have different values.
        """
        self.rules.require_labels()
        return self.of_arrays()

    def of_arrays(self) -> list[Any]:
        """Return the values of the stored leaves, of any type.

        Raises:
            UnmatchedPathError: an array leaf has no value.
            StackError: layers of one array have different values.
        """
        self._require_matched()
        if not self.unrolled.sizes:
            return self.values
        labels = self.answers.values
        return require_agreement(labels, "A tree of labels", cure=IN_AN_OPTIMIZER)

    @functools.cached_property
    def answers(self) -> Answers:
        """The value of each stored leaf that has one."""
        answers = self._answers(self.values, self.rules.names)
        paths, values = answers.paths, answers.values
        if self.unmatched:
            by_path = {p: v for p, v in answers.by_path.items() if not _lacks(v)}
            paths, values = [*by_path], [*by_path.values()]
        return Answers(paths, values, STATIC, self._no_rule)

    def answers_of(self, values: Sequence[Any], names: Sequence[str]) -> Answers:
        """Return the same with other values, as if the rules gave these.

        Args:
            values: one for each rule, and one for no rule.
            names: of the rules, for errors.
        """
        return self._answers([values[rule] for rule in self.deciding], names)

    def _answers(self, values: list[Any], names: Sequence[str]) -> Answers:
        return Answers.of_layers(
            self.unrolled, values, lambda: [names[rule] for rule in self.deciding]
        )

    @functools.cached_property
    def unmatched(self) -> tuple[str, ...]:
        """Paths of the array leaves that neither a rule nor a default gives a value."""
        if self.rules.default is not MISSING or -1 not in self._first:
            return ()
        leaves = zip(self.paths, self.deciding, self.is_array, strict=True)
        return tuple(path for path, rule, yes in leaves if rule < 0 and yes)

    @functools.cached_property
    def unused(self) -> tuple[tuple[int, Any], ...]:
        """Entries that match no array leaf: index of the rule, and the entry.

        An entry is a pattern, a class, or a whole selector whose parts match something.
        """
        return tuple(
            (index, entry)
            for index, where in enumerate(self.rules.selectors)
            for entry in where.unused_in(self.leaves, is_used=index in self._won)
        )

    @functools.cached_property
    def shadowed(self) -> tuple[int, ...]:
        """Indices of the rules all of whose array leaves earlier rules already match.

        A closing ``**`` is a habit and not counted.
        """
        done = self._won.union(self._won_nones, (index for index, _ in self.unused))
        return tuple(
            index
            for index, where in enumerate(self.rules.selectors)
            if index not in done
            and where.plain != "**"
            and not self.leaves.may_reach(where.plain)
            and self.leaves.has_any(where.select(self.leaves))
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
            for row in itertools.compress(rows, answers):
                if not same_value(values[first[row]], values[index]):
                    second[row] = index
        clashes = zip(self.deciding, self.leaves.spread(second), strict=True)
        return tuple(
            (leaf, one, two)
            for leaf, (one, two) in enumerate(clashes)
            if two >= 0 and self.is_array[leaf]
        )

    def check(self) -> Decision:
        """Return these matches, if rules and tree fit each other.

        Raises:
            OverlapError: ``overlap="error"`` and two rules with different values match
                one leaf.
            UnusedRuleError: a rule matches no array leaf, or is unreachable.
            UnmatchedPathError: an array leaf matches no rule and there is no default.
            RulesError: a label has another number of arrays than is expected.
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
            RulesError: a label has another number of arrays than is expected.
        """
        rules = self.rules
        if rules.overlap == "error" and self.overlaps:
            names = rules.names
            rows = [
                f"{self.paths[leaf]!r}: {names[first]}, and {names[second]}"
                for leaf, first, second in self.overlaps
            ]
            paths = [self.paths[leaf] for leaf, *_ in self.overlaps]
            raise OverlapError(messages.overlap(rows), paths=paths)
        self._check_used()
        if self.miscounted and not self.leaves.holes:
            texts, paths = zip(*self.miscounted.values(), strict=True)
            concerned = itertools.chain(*paths)
            raise RulesError("\n".join(texts), paths=concerned)

    def _check_used(self) -> None:
        rules = self.rules
        if rules.unused == "ignore":
            return
        # The common case: every rule is one pattern and decides a leaf.
        is_plain = not rules.others and len(self._won) == len(rules.pairs)
        if not is_plain and (self.unused or self.shadowed):
            shadowed = [f"{rules.names[i]}, {self.shadow(i)}" for i in self.shadowed]
            owners = dict.fromkeys(index for index, _ in self.unused)
            wheres = map(rules.selectors.__getitem__, owners)
            text = messages.unused_rules(
                self.unused,
                shadowed,
                self.unmatched,
                Names(self.view, self.is_array),
                [where.entries for where in wheres if isinstance(where, ListSelector)],
                rules.turned if len(owners) == len(rules.pairs) else {},
            )
            patterns = [pattern_text(entry) for _, entry in self.unused]
            patterns += [pattern_text(rules.selectors[i]) for i in self.shadowed]
            raise UnusedRuleError(text, paths=self.unmatched, patterns=patterns)
        if self.leaves.matcher.has_braces and not self.leaves.holes:
            warn_of_alternatives(self.leaves, rules.checked(), "rule")

    @functools.cached_property
    def miscounted(self) -> dict[Any, tuple[str, list[str]]]:
        """By label of another number of arrays than expected: a sentence, and paths."""
        lines: dict[Any, tuple[str, list[str]]] = {}
        for label, count in self.rules.expect.items():
            rows = zip(self.paths, self.values, self.is_array, strict=True)
            paths = [path for path, x, yes in rows if yes and same_value(x, label)]
            if len(paths) != count:
                verb = "has it" if len(paths) == 1 else "have it"
                names = f": {listing(fold(self.names(paths)))}" if paths else ""
                text = (
                    f"{plural(count, 'array')} should have the label {label!r}, and "
                    f"{len(paths):,} {verb}{names}. Correct the patterns, or the "
                    "number that is expected."
                )
                lines[label] = text, paths
        return lines

    @functools.cached_property
    def alternatives(self) -> list[UnusedAlternative]:
        """Alternatives of patterns that match nothing, while their pattern does."""
        if self.rules.unused == "ignore":
            return []
        return unused_alternatives(self.leaves, self.rules.checked())

    def shadow(self, index: int) -> str:
        """Write what is wrong with a shadowed rule, and its cure.

        Args:
            index: of the rule, one of ``shadowed``.
        """
        values, leaves = self.rules.values, self.selected(index)
        deciding = sorted({self.deciding[leaf] for leaf in leaves})
        earlier = self.rules.names[deciding[0]]
        if all(same_value(values[index], values[rule]) for rule in deciding):
            cure = "Remove it: they give the same value."
        elif set(self.selected(deciding[0])).issubset(leaves):
            cure = f"Keep one of the two, because {earlier}, matches no other leaf."
        else:
            cure = f"Move it up, before {earlier}."
        return messages.shadow([self.paths[leaf] for leaf in leaves], cure)

    def names(self, paths: Collection[str]) -> list[str]:
        """Return paths of leaves; those of several layers of one array as one.

        Args:
            paths: of some leaves, in leaf order.
        """
        chosen = frozenset(paths)
        keys = [path in chosen or None for path in self.paths]
        return [layers.path for layers in self.unrolled.divide(keys)]

    def divided(self, chosen: Sequence[bool] | None = None) -> Iterator[Layers]:
        """Yield all leaves, layers of one array together that one rule decided.

        Args:
            chosen: whether to yield each leaf; None for all.
        """
        rules: Sequence[int | None] = self.deciding
        if chosen is not None:
            pairs = zip(rules, chosen, strict=True)
            rules = [rule if yes else None for rule, yes in pairs]
        return self.unrolled.divide(rules)

    def selected(self, index: int) -> list[int]:
        """Return the indices of the array leaves that a rule matches.

        Args:
            index: of the rule, whether or not it decides.
        """
        chosen = self.rules.selectors[index].select(self.leaves)
        both = map(all, zip(chosen, self.leaves.is_array, strict=True))
        members = itertools.compress(self.leaves.members, both)
        return sorted(itertools.chain.from_iterable(members))

    @functools.cached_property
    def _first(self) -> list[int]:
        """For each row of the table, the index of the rule that decides; or -1."""
        return self.rules.first(self.leaves)

    @functools.cached_property
    def _won(self) -> frozenset[int]:
        """Indices of the rules that decide an array leaf."""
        return frozenset(itertools.compress(self._first, self.leaves.is_array)) - {-1}

    @functools.cached_property
    def _won_nones(self) -> frozenset[int]:
        """Indices of the rules that may decide in the place of a None."""
        nones, won = self.leaves.nones, set()
        left = list(range(len(nones)))
        for index, where in enumerate(self.rules.selectors if left else ()):
            try:
                answers = where.select(nones.at(left))
            except NotKnown:  # it may, and so may rules after it
                won.add(index)
                continue
            if any(answers):
                won.add(index)
                left = [row for row, yes in zip(left, answers, strict=True) if not yes]
        return frozenset(won)

    def _require_matched(self) -> None:
        if self.unmatched:
            text = messages.unmatched(self.unmatched, sum(self.is_array))
            raise UnmatchedPathError(text, paths=self.unmatched)

    def _no_rule(self, stored: Sequence[str], num_asked: int) -> UnmatchedPathError:
        """Return the error for stored arrays that lack a value, or layers that do.

        Args:
            stored: paths of the arrays.
            num_asked: how many arrays were asked about.
        """
        unmatched = frozenset(self.unmatched) if self.unrolled.sizes else frozenset()
        rows = [
            self.paths[row]
            for layers in self.divided([path in unmatched for path in self.paths])
            if layers.region.path in stored
            for row in layers.rows
        ]
        if rows:
            stored, num_asked = rows, sum(self.is_array)
        text = messages.unmatched(stored, num_asked)
        return UnmatchedPathError(text, paths=stored)


def _lacks(answer: Any) -> bool:
    """Return whether no rule gives an array, or some layer of it, a value."""
    if isinstance(answer, Split):
        return any(one.value is MISSING for one in answer.rulings)
    return answer is MISSING


def _may_be_leaf(value: Any) -> bool:
    is_leaf = value is None or isinstance(value, str) or hasattr(value, "_fields")
    return is_leaf or jtu.all_leaves([value])
