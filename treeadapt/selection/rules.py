"""Rules: one ordered table of selectors decides what every leaf gets.

Takes ``(selector, value)`` pairs and a tree; gives ``RuleMatches``, or the labels in
the form in which Optax takes them. The first selector that selects a leaf decides. An
array leaf without a rule, an unreachable rule and, if asked, two rules for one leaf are
errors.
Labels, masks, groups, reports and errors are views of one ``RuleMatches``, so they
cannot disagree. See ``selectors`` for which leaves a selector selects, ``messages`` for
what errors say, ``files`` for rules files.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NoReturn

import jax.tree_util as jtu

from treeadapt.arrays import same_value
from treeadapt.errors import (
    OverlapError,
    RulesError,
    RulesFileError,
    SelectorError,
    StackError,
    UnmatchedPathError,
    UnusedRuleError,
)
from treeadapt.layers.stacks import (
    IN_AN_OPTIMIZER,
    NO_STACKS,
    PerLayer,
    Stacks,
    Unrolled,
    require_agreement,
)
from treeadapt.names import plural, shorten
from treeadapt.selection import files, messages
from treeadapt.selection.leaves import Leaves, NotKnown
from treeadapt.selection.repairs import entry_text
from treeadapt.selection.selectors import (
    Bound,
    GlobSelector,
    ListSelector,
    Question,
    Selector,
    Unused,
    as_selector,
    check_choice,
    select,
)
from treeadapt.selection.whole import WholeTree, look_up
from treeadapt.trees.views import TreeView, view_tree

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


_DEFAULTS: dict[str, Any] = {
    "default": MISSING,
    "unused": "error",
    "overlap": "first",
    "stacks": NO_STACKS,
}


class Rules(Question):
    """An ordered table of selectors and values; the first that matches a leaf wins.

    Called on a tree it gives the labels, in the form that Optax takes them:
    ``optax.multi_transform(transforms, Rules({...}))``. Rules are immutable and compare
    by what they hold.

    Args:
        rules: mapping from selectors to values, or ordered ``(selector, value)`` pairs.
            A selector may be a pattern, a class, or a list of these. Or other
            ``Rules``, whose options stay where none is given here.
        default: value of array leaves that no rule matches. Without one they are an
            error. Static leaves that no rule matches get ``STATIC`` in any case.
        unused: ``"error"`` (the default) or ``"ignore"`` rules that match no array
            leaf and no None, or are unreachable.
        overlap: ``"first"`` (the default) lets the first of several rules win;
            ``"error"`` refuses two rules with different values for one leaf.
        stacks: ``{"blocks": 0}`` where arrays below ``blocks`` hold layers along axis
            0: the rules then decide on layers, ``blocks/0/w`` and so on, with the
            shapes of a layer, as on the same model unrolled. The axis counts in the
            stored array, or is its name in the box of the array. A pair
            ``("blocks_{l}", 0)`` names another unrolled form; None makes an exception
            below a stack. Stacks may be nested: ``{"blocks": 0, "blocks/experts": 1}``.
            On the unrolled model itself the rules decide without the stack.

    Raises:
        RulesError: the table is malformed, or a value is None.
        StackError: ``stacks`` is malformed.
        SelectorError: a key is not a selector, or an option is not one of its choices.
        PatternError: a pattern is malformed.

    Example:
        >>> rules = Rules({"encoder": "frozen", "**": "train"})
        >>> rules({"encoder": {"kernel": jnp.ones((3, 4))}, "head": jnp.ones(4)})
        {'encoder': {'kernel': 'frozen'}, 'head': 'train'}
        >>> rules = Rules({"blocks/{0..2}": "a", "**": "b"}, stacks={"blocks": 0})
        >>> rules.match({"blocks": {"w": jnp.ones((4, 2))}}).values
        ['a', 'a', 'a', 'b']
    """

    pairs: tuple[tuple[Selector, Any], ...]
    selectors: tuple[Selector, ...]
    values: tuple[Any, ...]
    default: Any
    unused: Unused
    overlap: Overlap
    stacks: Stacks
    owners: dict[str, int]  # the first rule that is just this pattern
    others: list[tuple[int, Selector]]  # rules that are more than one, with their index
    gives = "A tree of labels"

    def __init__(
        self,
        rules: Any,
        *,
        default: Any = MISSING,
        unused: Unused | None = None,
        overlap: Overlap | None = None,
        stacks: Mapping[str, Any] | Stacks | None = None,
    ):
        if default is None:
            _refuse_none("default=")
        given = {"unused": unused, "overlap": overlap, "stacks": stacks}
        options = rules.options if isinstance(rules, Rules) else dict(_DEFAULTS)
        options |= {name: value for name, value in given.items() if value is not None}
        options |= {} if default is MISSING else {"default": default}
        check_choice("unused", options["unused"], ("error", "ignore"))
        check_choice("overlap", options["overlap"], ("first", "error"))
        if not isinstance(options["stacks"], Stacks):
            options["stacks"] = Stacks(options["stacks"])
        pairs: list[tuple[Selector, Any]] = []
        owners: dict[str, int] = {}
        others: list[tuple[int, Selector]] = []
        for index, (spec, value) in enumerate(_pairs(rules)):
            where = as_selector(spec)
            if value is None:
                _refuse_none(f"The rule {where.typed}")
            pairs.append((where, value))
            if where.plain is not None:
                owners.setdefault(where.plain, index)
            else:
                others.append((index, where))
                # With stacks of its own it makes the whole table one of layers.
                options["stacks"] |= where.stacks
        selectors, values = zip(*pairs, strict=True) if pairs else ((), ())
        needs = frozenset().union(*(where.needs for _, where in others))
        vars(self).update(options, pairs=tuple(pairs), selectors=selectors)
        vars(self).update(values=values, owners=owners, others=others, needs=needs)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"Rules are immutable: cannot set {name!r}.")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"Rules are immutable: cannot delete {name!r}.")

    def __repr__(self) -> str:
        texts = [(where.typed, repr(value)) for where, value in self.pairs]
        hashable = not any(isinstance(where, ListSelector) for where in self.selectors)
        if hashable and len(dict(texts)) == len(texts):
            table = f"{{{', '.join(f'{where}: {value}' for where, value in texts)}}}"
        else:
            table = f"[{', '.join(f'({where}, {value})' for where, value in texts)}]"
        options = [table, *(f"{k}={v!r}" for k, v in self._options().items())]
        return f"Rules({', '.join(options)})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Rules):
            return NotImplemented
        mine, theirs = ((*r.values, *r.options.values()) for r in (self, other))
        same = map(same_value, mine, theirs)  # of one length, if selectors are
        return self.selectors == other.selectors and all(same)

    def __hash__(self) -> int:
        return hash((self.pairs, self.default, self.unused, self.overlap, self.stacks))

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(Rules, **self.options), (self.pairs,)

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments that it was made with."""
        return {name: getattr(self, name) for name in _DEFAULTS}

    def __call__(self, tree: Any, leaf: Any = MISSING, /) -> Any:
        """Return the labels of a tree, as Optax calls for them.

        Args:
            tree: any tree. Where it holds ``optax.MaskedNode``, it is taken for a part
                of a larger one: a rule that could match such a place, or something
                below it, is not reported.
            leaf: refused; nnx passes it to a filter.

        Returns:
            Tree with the treedef of ``tree`` and one label per leaf.

        Raises:
            UnmatchedPathError: an array leaf matches no rule and there is no default.
            UnusedRuleError: a rule matches no array leaf, or is unreachable.
            OverlapError: two rules with different values match one leaf.
            SelectorError: called on a number, as a schedule would be, or as an nnx
                filter.
        """
        _refuse_filter(self.values, leaf)
        return self.ask(tree)

    def of_view(self, view: TreeView) -> list[Any]:
        """Return the labels of a tree, which may be a part of one."""
        matches = RuleMatches(self, *self.table(view, is_part=view.plan.has_gaps))
        return matches.check().labels()

    def answer(self, whole: WholeTree, paths: Sequence[str]) -> list[Any]:
        """Return the labels of some leaves of a whole tree; others need no rule.

        Raises:
            UnmatchedPathError, UnusedRuleError, OverlapError: as when called.
        """
        labels = super().answer(whole, paths)
        unmatched = [p for p, label in zip(paths, labels, strict=True) if label is None]
        if unmatched:
            raise UnmatchedPathError(messages.unmatched(unmatched, len(labels)))
        return labels

    def decide(self, view: TreeView, *, reports: bool) -> list[Any]:
        """Return the label of every leaf of a whole tree, None where there is none.

        Layers of one leaf that have different labels give a ``PerLayer``.

        Args:
            view: the tree.
            reports: raise for rules without a use.
        """
        matches = RuleMatches(self, *self.table(view, is_part=not reports))
        self.require_leaf_labels()
        if reports:
            matches.check_rules()
        return matches.answers

    def match(self, tree: Any) -> RuleMatches:
        """Decide every leaf; report nothing yet.

        Args:
            tree: tree, concrete or abstract, or its ``TreeView``.

        Raises:
            SelectorError: a flat dict is asked for classes or sibling counts.
        """
        view = tree if isinstance(tree, TreeView) else view_tree(tree)
        return RuleMatches(self, *self.table(view))

    def where(self, label: Any) -> Selector:
        """Return the selector of the leaves that get a label.

        Args:
            label: a value of the table, its default, or ``STATIC``.

        Raises:
            RulesError: no rule gives that label.

        Example:
            >>> rules = Rules({"encoder/head": "train", "encoder": "frozen"})
            >>> rules.where("frozen").matches("encoder/head")
            False
        """
        known = (*self.values, self.default, STATIC)
        if not any(same_value(label, value) for value in known):
            labels = [value for value in known[:-1] if value is not MISSING]
            texts = ", ".join(dict.fromkeys(map(repr, labels)))
            known_ones = f"labels are {texts}" if texts else "there are no rules"
            raise RulesError(f"No rule gives the label {label!r}; {known_ones}.")
        return Where(self, label)

    def bind(self, tree: Any) -> BoundRules:
        """Decide now, on the full tree, and answer by path from then on.

        Args:
            tree: the full tree, concrete or abstract.

        Returns:
            Rules that answer rightly on every smaller view of ``tree``.

        Raises:
            UnmatchedPathError, UnusedRuleError, OverlapError: as when called on a full
                tree.

        Example:
            >>> rules = Rules({"layers/{-1}": "train", "**": "frozen"})
            >>> rules.bind({"layers": [1.0, 2.0]})({"layers/1": 2.0})
            {'layers/1': 'train'}
        """
        matches = self.match(tree).check()
        self.require_leaf_labels()
        paths = matches.stored.plan.paths
        return BoundRules(self, dict(zip(paths, matches.answers, strict=True)))

    def require_leaf_labels(self) -> None:
        """Raise if a value cannot be a leaf of a tree.

        Raises:
            RulesError: JAX would take the value apart.
        """
        for value in (*self.values, self.default):
            if type(value) is not str and not jtu.all_leaves([value]):
                raise RulesError(
                    f"The label {entry_text(value)} is a container to JAX, and a tree "
                    "that holds it has another structure. Give it a name, or read the "
                    "values from rules.match(tree)."
                )

    def to_toml(self) -> str:
        """Write the table as a rules file, for ``load_rules``.

        A rule for a list of patterns becomes a row for each.

        Raises:
            RulesFileError: a selector is more than patterns, or a list with exclusions;
                a pattern occurs twice; or a value is not a string, number, bool or
                spec.

        Example:
            >>> print(Rules({"policy": "frozen", "**": "train"}).to_toml(), end="")
            version = 1
            <BLANKLINE>
            [rules]
            "policy" = "frozen"
            "**" = "train"
        """
        table: dict[str, Any] = {}
        for where, value in self.pairs:
            for pattern in _as_data(where):
                if pattern in table:
                    raise RulesFileError(
                        f"A rules file holds each pattern once, and {pattern!r} is in "
                        "two rules. Remove the second one: it is unreachable."
                    )
                table[pattern] = value
        if not table:
            raise RulesFileError("There are no rules to write.")
        return files.write_toml(self._options(), table)

    @functools.cached_property
    def names(self) -> list[str]:
        """What errors call each rule; an index of -1 reads the name of none."""
        texts = [shorten(where.typed) for where in self.selectors]
        return [*(f"rule {i}, {text}" for i, text in enumerate(texts, 1)), ""]

    def patterns(self) -> Iterator[str]:
        """Yield every pattern; those that are a whole rule first, in their order."""
        rest = (where.patterns() for _, where in self.others)
        return itertools.chain(self.owners, *rest)

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
        found = [last] * len(leaves)
        if asked is None:
            # Bits are in the order of plain rules: the lowest that is set in a mask is
            # the first of these that decides, and no other one need be asked.
            owners, asked = list(self.owners.values()), self.others
            bits = (1 << len(owners)) - 1
            for row, mask in enumerate(leaves.masks):
                low = mask & bits
                if low:
                    found[row] = owners[(low & -low).bit_length() - 1]
        for index, where in asked:
            rows = [row for row, best in enumerate(found) if best > index]
            if not rows:
                break
            for row, yes in zip(rows, where.select(leaves.at(rows)), strict=True):
                if yes:
                    found[row] = index
        return [-1 if index == last else index for index in found]

    def _options(self) -> dict[str, Any]:
        options = self.options | {"stacks": self.stacks.data}
        usual = {**_DEFAULTS, "stacks": {}}
        return {n: v for n, v in options.items() if not same_value(v, usual[n])}


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
        self.rules.require_leaf_labels()
        self._require_matched()
        if not self.unrolled.sizes:
            return self.values
        return require_agreement(self.answers, "A tree of labels", cure=IN_AN_OPTIMIZER)

    @functools.cached_property
    def answers(self) -> list[Any]:
        """The value of each stored leaf; ``PerLayer`` where its layers differ."""
        names = self.rules.names
        return self.unrolled.fold(
            self.values, lambda: [names[i] for i in self.deciding]
        )

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
            names = rules.names
            rows = [
                f"{self.paths[leaf]!r}: {names[first]}, and {names[second]}"
                for leaf, first, second in self.overlaps
            ]
            raise OverlapError(messages.overlap(rows))
        # The common case: every rule is one pattern and decides a leaf.
        if rules.unused == "ignore" or (
            not rules.others and len(self._won) == len(rules.pairs)
        ):
            return
        if self.unused or self.shadowed:
            shadowed = [f"{rules.names[i]}, {self.shadow(i)}" for i in self.shadowed]
            raise UnusedRuleError(
                messages.unused_rules(
                    self.unused, shadowed, self.unmatched, self.view.plan, self.is_array
                )
            )

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
        return "" if rule < 0 else self.rules.selectors[rule].typed

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
            raise UnmatchedPathError(text)


class _OfRules(Question):
    """What is asked with the patterns and the stacks of rules."""

    rules: Rules

    @property
    def stacks(self) -> Stacks:  # type: ignore[override]
        """The stacks of the rules."""
        return self.rules.stacks

    def patterns(self) -> Iterator[str]:
        """Yield the patterns of all rules."""
        yield from self.rules.patterns()


@dataclasses.dataclass(frozen=True, repr=False)
class Where(_OfRules, Selector):
    """The leaves to which rules give one label."""

    rules: Rules
    label: Any

    may_be_empty = True  # the label of the default, or of rules that match nothing

    def __repr__(self) -> str:
        return f"{self.rules!r}.where({self.label!r})"

    @functools.cached_property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """What the rules need; and whether a leaf without a rule is an array."""
        return self.rules.needs | ({"leaf"} if any(self._of_unmatched) else set())

    def select(self, leaves: Leaves) -> list[bool]:
        """Find the first rule that matches each row."""
        first = self.rules.first(leaves)
        some = any(self._of_unmatched)  # otherwise arrays need not be known
        return [
            self._wanted[index]
            if index >= 0
            else some and self._of_unmatched[leaves.is_array[row]]
            for row, index in enumerate(first)
        ]

    def _reasons(self, leaves: Leaves) -> list[str]:
        return list(map(self.rules.names.__getitem__, self.rules.first(leaves)))

    def unused(self, leaves: Leaves) -> Iterator[str | type]:
        """Yield what matches nothing in any rule."""
        if self.rules.unused == "error":
            for where in self.rules.selectors:
                yield from where.unused(leaves)

    @functools.cached_property
    def _wanted(self) -> tuple[bool, ...]:
        return tuple(same_value(self.label, value) for value in self.rules.values)

    @functools.cached_property
    def _of_unmatched(self) -> tuple[bool, bool]:
        """Whether a static leaf without a rule is selected, and an array."""
        return self.label is STATIC, same_value(self.label, self.rules.default)


@dataclasses.dataclass(frozen=True, repr=False)
class BoundRules(_OfRules):
    """Rules that have decided on one full tree, and answer by path.

    Attributes:
        rules: what decided.
        answers: the label of each leaf of that tree, by path.
    """

    rules: Rules
    answers: Mapping[str, Any]

    gives = "A tree of labels"

    def __repr__(self) -> str:
        return f"<{self.rules!r} bound to {plural(len(self.answers), 'path')}>"

    def __hash__(self) -> int:
        return hash((self.rules, len(self.answers)))

    def __call__(self, tree: Any, leaf: Any = MISSING, /) -> Any:
        """Return the labels of a smaller view of that tree.

        Raises:
            SelectorError: an array leaf was not there, or called on a number or as an
                nnx filter.
        """
        _refuse_filter(self.rules.values, leaf)
        return self.ask(tree)

    def of_view(self, view: TreeView) -> list[Any]:
        """Look every path of a smaller view up."""
        return look_up(self.answers, view.flat(), static=STATIC)

    def answer(self, whole: WholeTree, paths: Sequence[str]) -> list[Any]:
        """Return the labels of some leaves of a whole tree."""
        flat = whole.view.flat()
        asked = dict.fromkeys(map(whole.stored_path, paths))
        found = look_up(self.answers, {p: flat[p] for p in asked}, static=STATIC)
        known = dict(zip(asked, found, strict=True))
        return [whole.part(known, path) for path in paths]

    def where(self, label: Any) -> Selector:
        """Return the selector of the leaves that got a label, bound as well.

        Raises:
            RulesError: no rule gives that label.
        """
        chosen = functools.partial(same_value, label)
        found = {
            path: each.map(chosen) if isinstance(each, PerLayer) else chosen(each)
            for path, each in self.answers.items()
        }
        return Bound(self.rules.where(label), found)

    def bind(self, tree: Any) -> BoundRules:
        """Decide again, on another full tree."""
        return self.rules.bind(tree)


def as_rules(rules: Any, *, default: Any = MISSING) -> Rules:
    """Read rules, or what they can be made of.

    Args:
        rules: ``Rules``, a mapping, or pairs.
        default: replaces the default, if given.

    Raises:
        RulesError: it is something else.
    """
    if isinstance(rules, Rules) and default is MISSING:
        return rules
    return Rules(rules, default=default)


def param_labels(tree: Any, rules: Any, *, default: Any = MISSING) -> Any:
    """Label every leaf of a tree with the value of the first rule that matches.

    Args:
        tree: tree of arrays or abstract arrays, any shapes; no value is read.
        rules: ``Rules``, a mapping or ordered ``(selector, label)`` pairs.
        default: label for array leaves that no rule matches.

    Returns:
        Tree with exactly the treedef of ``tree`` and one label per leaf; functions and
        other static leaves that no rule matches are labelled ``STATIC``.

    Raises:
        UnmatchedPathError: an array leaf matches no rule and no ``default`` is given.
        UnusedRuleError: a rule matches no array leaf, or is unreachable.
        OverlapError: two rules match one leaf and the rules refuse that.
        StackError: the rules have ``stacks``, and the layers of one array get different
            labels; or a stack does not fit the tree.
        PathCollisionError: two leaves have the same path.
        RulesError, SelectorError, PatternError: ``rules`` are malformed.

    Example:
        >>> params = {"encoder": {"kernel": jnp.ones((3, 4))}, "head": jnp.ones(4)}
        >>> param_labels(params, {"encoder": "frozen", "**": "train"})
        {'encoder': {'kernel': 'frozen'}, 'head': 'train'}
    """
    if isinstance(rules, BoundRules) and default is MISSING:
        view = view_tree(tree)
        labels = rules.of_view(view)
        labels = require_agreement(labels, rules.gives, cure=IN_AN_OPTIMIZER)
        return view.rebuild(labels)
    matches = as_rules(rules, default=default).match(tree).check()
    return matches.stored.rebuild(matches.labels())


def param_mask(tree: Any, where: Any, *, unused: Unused = "error") -> Any:
    """Return, for every leaf of a tree, whether it is selected.

    Args:
        tree: tree of arrays or abstract arrays, any shapes; no value is read.
        where: selector, pattern, class, or a list of these.
        unused: ``"error"`` or ``"ignore"`` patterns and classes that match no array.

    Returns:
        Tree with exactly the treedef of ``tree`` and one bool per leaf.

    Raises:
        UnusedRuleError: an entry of ``where`` matches no array leaf.
        PathCollisionError: two leaves have the same path.
        SelectorError, PatternError: ``where`` is not a selector.

    Example:
        >>> params = {"kernel": jnp.ones((3, 4)), "bias": jnp.ones(4)}
        >>> param_mask(params, ["**", "!**/bias"])
        {'bias': False, 'kernel': True}
    """
    view = tree if isinstance(tree, TreeView) else view_tree(tree)
    return view.rebuild(select(view, where, unused=unused, cure=IN_AN_OPTIMIZER))


def load_rules(path: str | os.PathLike[str], *, allow_regex: bool = False) -> Rules:
    r"""Read rules from a TOML or JSON file.

    ``version = 1`` and a table ``rules`` of quoted patterns and labels, the first that
    matches wins. A label that is a list is a ``PartitionSpec``: ``["data", ""]`` is
    ``P("data", None)``, and ``[]`` is ``P()``. ``default``, ``unused`` and ``overlap``
    as for ``Rules``; and a table ``stacks``, with ``["blocks_{l}", 0]`` for a pair and
    ``false`` for an exception.

    Args:
        path: file name, ending in ``.toml`` or ``.json``. The file is read as data:
            nothing in it is imported or run.
        allow_regex: accept ``re:`` patterns, in a file that you trust.

    Raises:
        RulesFileError: the file cannot be read, is malformed, or too large.
        PatternError: a pattern is malformed.

    Example:
        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "rules.toml"
        >>> _ = file.write_text('version = 1\n[rules]\n"policy" = "frozen"')
        >>> load_rules(file)
        Rules({'policy': 'frozen'})
    """
    document = files.RULES_FILE.read(path)
    known = ("version", "rules", "default", "unused", "overlap", "stacks")
    files.RULES_FILE.check_fields(path, document, known)
    pairs = files.parse_rules(
        path, document.pop("rules", None), allow_regex=allow_regex
    )
    if "stacks" in document:
        document["stacks"] = files.read_stacks(path, document["stacks"])
    if "default" in document:
        default = files.read_label(path, document["default"], "'default'")
        document["default"] = default
    try:
        return Rules(pairs, **document)
    except (SelectorError, StackError) as error:  # an option is malformed
        raise RulesFileError(f"Rules file {str(path)!r}: {error}") from error


def _refuse_none(who: str) -> NoReturn:
    raise RulesError(
        f"{who} gives None, which is not a label: JAX takes None for an empty "
        "container and the leaf would be lost. Give it a name, such as 'frozen'."
    )


def _refuse_filter(values: Sequence[Any], leaf: Any) -> None:
    if leaf is not MISSING:
        label = repr(values[0]) if values else "<label>"
        raise SelectorError(
            "Rules were called with a path and a leaf, as nnx calls a filter, and a "
            "filter says yes or no. Pass the selector of one label: "
            f"rules.where({shorten(label)})."
        )


def _pairs(rules: Any) -> Sequence[tuple[Any, Any]]:
    if isinstance(rules, Rules):
        return rules.pairs
    if isinstance(rules, BoundRules):
        raise RulesError(
            "Bound rules have decided, and only answer by path. Pass the table that "
            "they come from: bound.rules."
        )
    if isinstance(rules, Mapping):
        return tuple(rules.items())
    if isinstance(rules, list | tuple) and all(
        isinstance(pair, list | tuple) and len(pair) == 2 for pair in rules
    ):
        return tuple((where, value) for where, value in rules)
    raise RulesError(
        "Rules are a mapping from patterns to values, or ordered (pattern, value) "
        f'pairs: {{"encoder": "frozen", "**": "train"}}; got a {type(rules).__name__}.'
    )


def _as_data(where: Selector) -> Sequence[str]:
    """Return the rows of a rules file that say the same."""
    if isinstance(where, GlobSelector):
        text = where.plain
        return ["\\" + text if text.startswith("!") else text]
    if isinstance(where, ListSelector) and all(
        isinstance(e, str) for e in where.entries
    ):
        texts = [str(entry) for entry in where.entries]
        if len(texts) == 1 or not any(text.startswith("!") for text in texts):
            return texts
        raise RulesFileError(
            f"A rules file holds one pattern a row, and {entry_text(where)} excludes "
            "some. Write rules for what is excluded, before a rule for the rest: the "
            "first match wins."
        )
    raise RulesFileError(
        f"A rules file holds patterns; the selector {entry_text(where)} is more than "
        "that. For a class write the pattern '**/<Name>'."
    )
