"""Selectors: yes or no for every leaf of a tree, by path, class, shape and dtype.

Takes patterns, classes, lists of them and predicates, combined with ``&``, ``|`` and
``~``; gives masks, in the form in which Optax takes them and Flax nnx takes filters.
A selector is immutable and reads no leaf's value. It answers for the rows of a table of
leaves (see ``leaves``). Patterns that match neither an array nor the place of a None
are errors; in a partial tree, as nested masks show it, only those that could match
nothing in its holes either.
See ``rules`` for labels.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import jax.numpy as jnp
import jax.tree_util as jtu

from treeadapt.errors import SelectorError, UnusedRuleError
from treeadapt.layers.stacks import NO_STACKS, Stacks
from treeadapt.patterns.glob import escape, parse
from treeadapt.selection.alternatives import warn_of_alternatives
from treeadapt.selection.answers import (
    IN_AN_OPTIMIZER,
    Answers,
    no_leaf,
    require_agreement,
)
from treeadapt.selection.arguments import (
    argument_text,
    check_choice,
    checked_dtype,
    dtype_text,
    instead_text,
    keys_text,
)
from treeadapt.selection.leaves import Leaves, NotKnown, OnePath
from treeadapt.selection.repairs import Names, pattern_text, unused_message
from treeadapt.selection.tree_first import view_whole
from treeadapt.selection.whole_tree import BoundQuestion, Question
from treeadapt.text.names import shorten
from treeadapt.trees.views import TreeView, view_tree

Unused = Literal["error", "ignore"]
#: What a selector can be made of: a pattern, a class, or a list of these.
Where: TypeAlias = "Selector | str | type | Sequence[Where]"
_MISSING: Any = object()
_JAX_KEYS = jtu.DictKey | jtu.GetAttrKey | jtu.SequenceKey | jtu.FlattenedIndexKey


class Selector(Question):
    """Decides, per leaf, yes or no. Make one with ``glob``, ``leaf`` or ``node``.

    Called on a tree, it gives the mask; called with ``(path, leaf)``, it is an nnx
    filter. ``&``, ``|`` and ``~`` combine selectors, and take patterns, classes and
    lists on either side. Selectors compare by what they hold, and are hashable and
    picklable where that is.

    Attributes:
        plain: the pattern, if the selector is just one.
        may_be_empty: a selection of no array is right, if all patterns match some.

    Example:
        >>> decay = glob("**/kernel") & ~glob("head")
        >>> decay({"mlp": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)},
        ...        "head": {"kernel": jnp.ones((2, 2))}})
        {'head': {'kernel': False}, 'mlp': {'bias': False, 'kernel': True}}
    """

    for_users = frozenset({"matches", "bind"})
    plain: str | None = None
    may_be_empty: bool = False

    @property
    def typed(self) -> str:
        """How it is typed as the key of a rule."""
        return repr(self)

    def select(self, leaves: Leaves) -> list[bool]:
        """Decide each row of a table of leaves."""
        raise NotImplementedError

    def unused(self, leaves: Leaves) -> Iterator[str | type]:
        """Yield every pattern and class in it that matches no array, and no None."""
        yield from ()

    def checked(self) -> Iterator[str]:
        """Yield the patterns of which every alternative should match something."""
        yield from self.patterns()

    def unused_in(self, leaves: Leaves, *, is_used: bool) -> list[Any]:
        """Return what in it matches no array leaf, of a table that has any.

        Args:
            leaves: the table.
            is_used: it is known to match some.

        Returns:
            Patterns and classes; or the selector itself, if all of them match some, but
            it does not.
        """
        if not any(leaves.is_array):
            return []
        entries: list[Any] = list(dict.fromkeys(self.unused(leaves)))
        if entries or is_used or self.may_be_empty or leaves.holes:
            return entries
        if leaves.has_any(self.select(leaves)):
            return []
        try:
            return [] if any(self.select(leaves.nones)) else [self]
        except NotKnown:  # it may select one, if there are any
            return [] if len(leaves.nones) else [self]

    def __call__(self, tree: Any, leaf: Any = _MISSING, /) -> Any:
        """Return the mask of a tree, or answer as an nnx filter.

        Args:
            tree: any tree; or, if ``leaf`` is given, its path as a tuple of keys.
            leaf: the leaf at that path.

        Returns:
            Tree with the treedef of ``tree`` and one bool per leaf; or one bool.

        Raises:
            UnusedRuleError: a pattern matches no array leaf of a full tree.
            SelectorError: called on a number, as a schedule would be, or it asks for
                classes or sibling counts of a flat dict.
        """
        if leaf is not _MISSING:
            path = tree if isinstance(tree, str) else keys_text(tree)
            return self._at_path(path, leaf)
        return self.ask(tree)

    def matches(self, path: str) -> bool:
        """Return whether a leaf at ``path`` is selected, going by the path alone.

        Raises:
            SelectorError: the answer depends on the tree or the leaf, or ``path`` is
                not a string.

        Example:
            >>> glob("**/kernel").matches("mlp/kernel")
            True
        """
        if not isinstance(path, str):
            raise SelectorError(f"A label path is a string, got {argument_text(path)}.")
        return self._at_path(path)

    def bind(self, tree: Any) -> Selector:
        """Decide now, on the full tree, and answer by path from then on.

        Args:
            tree: the full tree, concrete or abstract.

        Returns:
            Selector that answers rightly on every smaller view of ``tree``: flat
            dicts, filtered trees, gradients, groups of a partition.

        Raises:
            UnusedRuleError: a pattern matches no array leaf.

        Example:
            >>> last = glob("layers/{-1}").bind({"layers": [1.0, 2.0]})
            >>> last({"layers/1": 2.0})
            {'layers/1': True}
        """
        return Bound(self, self.decide(view_tree(tree), reports=True))

    def decide(
        self, view: TreeView, *, reports: bool, is_part: bool = False
    ) -> Answers:
        """Decide every leaf of a tree, yes or no."""
        leaves, layers = self.table(view, is_part=is_part or not reports)
        chosen = leaves.once(self._known, self.select)
        entries = []
        if reports:
            entries = self.unused_in(leaves, is_used=leaves.has_any(chosen))
        if entries:
            names = Names(leaves.view, leaves.spread(leaves.is_array))
            lists = [self.entries] if isinstance(self, ListSelector) else []
            message = unused_message(entries, names, lists)
            raise UnusedRuleError(message, patterns=map(pattern_text, entries))
        if reports and not is_part and leaves.matcher.has_braces:
            patterns = ((0, pattern) for pattern in self.checked())
            warn_of_alternatives(leaves, patterns, "selector")
        return Answers.of_layers(
            layers, leaves.spread(chosen), lambda: leaves.spread(self._reasons(leaves))
        )

    def _reasons(self, leaves: Leaves) -> list[str]:
        """Return what decided each row, for errors; empty where nothing is to say."""
        return [""] * len(leaves)

    def __and__(self, other: Any) -> Selector:
        return _combine(And, self, other)

    def __rand__(self, other: Any) -> Selector:
        return _combine(And, other, self)

    def __or__(self, other: Any) -> Selector:
        return _combine(Or, self, other)

    def __ror__(self, other: Any) -> Selector:
        return _combine(Or, other, self)

    def __invert__(self) -> Selector:
        return Not(self)

    def __bool__(self) -> bool:
        raise SelectorError(
            f"{self!r} is neither true nor false before it is asked about a tree. "
            "Combine selectors with &, | and ~, not with `and`, `or` and `not`."
        )

    def __getstate__(self) -> dict[str, Any]:
        # What was worked out for speed stays behind.
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return {field.name: getattr(self, field.name) for field in fields}

    def _at_path(self, path: str, *leaf: Any) -> bool:
        try:
            if leaf and self.stacks:
                raise NotKnown  # the path is a stored one
            return self.select(OnePath(self.matcher, path, *leaf))[0]
        except NotKnown:
            raise SelectorError(
                f"{self!r} cannot be answered for {path!r} alone: it asks for more "
                "than the path. Decide on the full tree first: selector.bind(tree) "
                "answers by path from then on."
            ) from None


@dataclasses.dataclass(frozen=True, repr=False)
class GlobSelector(Selector):
    """Leaves at, or below, the nodes that one pattern matches."""

    plain: str

    def __post_init__(self) -> None:
        parse(self.plain)  # complains about a malformed pattern now

    def __repr__(self) -> str:
        return f"glob({self.plain!r})"

    @property
    def typed(self) -> str:
        """The pattern in quotes."""
        return repr(self.plain)

    def patterns(self) -> Iterator[str]:
        """Yield the pattern."""
        yield self.plain

    def select(self, leaves: Leaves) -> list[bool]:
        """Read the column of the pattern."""
        return leaves.matched(self.plain)

    def unused(self, leaves: Leaves) -> Iterator[str]:
        """Yield the pattern if it matches no array leaf, and no None."""
        if not leaves.is_used(self.plain):
            yield self.plain


@dataclasses.dataclass(frozen=True, repr=False)
class NodeSelector(Selector):
    """Leaves at or under a node of one class or its subclasses."""

    cls: type

    needs = frozenset({"classes"})

    def __repr__(self) -> str:
        return f"node({self.cls.__qualname__})"

    @property
    def typed(self) -> str:
        """The name of the class."""
        return self.cls.__qualname__

    def select(self, leaves: Leaves) -> list[bool]:
        """Look for the class among the classes above each leaf."""
        return leaves.under(self.cls)

    def unused(self, leaves: Leaves) -> Iterator[type]:
        """Yield the class if no array leaf is below it, no None, and no hole."""
        is_used = leaves.has_any(leaves.under(self.cls)) or leaves.holes
        if not is_used and not any(leaves.nones.under(self.cls)):
            yield self.cls


@dataclasses.dataclass(frozen=True, repr=False)
class LeafSelector(Selector):
    """Array leaves of some shape and dtype."""

    fn: Callable[[Any], bool] | None = None
    ndim: int | None = None
    dtype: Any = None
    min_size: int | None = None

    needs = frozenset({"leaf"})

    def __repr__(self) -> str:
        parts = [] if self.fn is None else [getattr(self.fn, "__qualname__", "fn")]
        dtype = None if self.dtype is None else dtype_text(self.dtype)
        options = {"ndim": self.ndim, "dtype": dtype, "min_size": self.min_size}
        parts += [f"{name}={it}" for name, it in options.items() if it is not None]
        return f"leaf({', '.join(parts)})"

    def select(self, leaves: Leaves) -> list[bool]:
        """Compare shape and dtype; a static leaf is never selected."""
        return [one is not None and self._is_met(one) for one in leaves.abstract]

    def _is_met(self, leaf: Any) -> bool:
        return (
            (self.ndim is None or len(leaf.shape) == self.ndim)
            and (self.dtype is None or bool(jnp.issubdtype(leaf.dtype, self.dtype)))
            and (self.min_size is None or math.prod(leaf.shape) >= self.min_size)
            and (self.fn is None or self._ask_fn(leaf))
        )

    def _ask_fn(self, leaf: Any) -> bool:
        try:
            return bool(self.fn(leaf))  # type: ignore[misc]
        except (AttributeError, TypeError, ValueError) as error:
            raise SelectorError(
                f"{self!r} may read shape and dtype only, so that it works on traced "
                f"and abstract arrays; for {leaf}: {str(error).rstrip('.')}."
            ) from error


class OfParts(Selector):
    """A selector that asks others: its ``parts``."""

    parts: tuple[Selector, ...]

    @functools.cached_property
    def may_be_empty(self) -> bool:  # type: ignore[override]
        """Whether any part may be."""
        return any(part.may_be_empty for part in self.parts)

    @functools.cached_property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """What any part needs."""
        return frozenset().union(*(part.needs for part in self.parts))

    @functools.cached_property
    def stacks(self) -> Stacks:  # type: ignore[override]
        """The stacks of all parts: every part sees their layers."""
        return functools.reduce(operator.or_, (p.stacks for p in self.parts), NO_STACKS)

    def patterns(self) -> Iterator[str]:
        """Yield the patterns of all parts."""
        for part in self.parts:
            yield from part.patterns()

    def checked(self) -> Iterator[str]:
        """Yield those of all parts."""
        for part in self.parts:
            yield from part.checked()

    def unused(self, leaves: Leaves) -> Iterator[str | type]:
        """Yield what matches nothing in any part."""
        for part in self.parts:
            yield from part.unused(leaves)


@dataclasses.dataclass(frozen=True, repr=False)
class ListSelector(OfParts):
    """Union of the entries minus those that start with ``!``; order does not matter."""

    entries: tuple[str | Selector, ...]

    def __post_init__(self) -> None:
        _ = self._signed  # complains about a malformed entry now

    def __repr__(self) -> str:
        return repr(list(self.entries))

    @functools.cached_property
    def _signed(self) -> list[tuple[str, Selector]]:
        """The sign of each entry, and its selector; what is chosen comes first."""
        signed = [
            ("!", GlobSelector(entry[1:]))
            if isinstance(entry, str) and entry.startswith("!")
            else ("", as_selector(entry))
            for entry in self.entries
        ]
        return sorted(signed, key=operator.itemgetter(0))

    @functools.cached_property
    def parts(self) -> tuple[Selector, ...]:  # type: ignore[override]
        """A selector for each entry, without its ``!``."""
        return tuple(part for _, part in self._signed)

    @property
    def may_be_empty(self) -> bool:  # type: ignore[override]
        """Whether it has no entry, and so none that is wrong."""
        chosen = [part.may_be_empty for sign, part in self._signed if not sign]
        return not self.entries or any(chosen)

    def select(self, leaves: Leaves) -> list[bool]:
        """Combine the entries' answers; exclusions alone start from everything."""
        chosen = tuple(part for sign, part in self._signed if not sign)
        parts: list[Selector] = [Not(part) for sign, part in self._signed if sign]
        if chosen or not parts:
            parts.append(Or(chosen))
        return _settled(parts, leaves, by=False)

    def unused(self, leaves: Leaves) -> Iterator[str | type]:
        """Yield what matches nothing in any entry, exclusions with their ``!``."""
        for sign, part in self._signed:
            for entry in part.unused(leaves):
                yield f"!{entry}" if sign else entry


@dataclasses.dataclass(frozen=True, repr=False)
class _Composite(OfParts):
    parts: tuple[Selector, ...]

    sign = ""
    settling = False  # the answer of one part that settles a row

    def select(self, leaves: Leaves) -> list[bool]:
        """Ask parts until one settles the row."""
        return _settled(self.parts, leaves, by=self.settling)

    def __repr__(self) -> str:
        return f" {self.sign} ".join(map(self._part_text, self.parts))

    def _part_text(self, part: Selector) -> str:
        binds_looser = isinstance(part, Or) and not isinstance(self, Or)
        return f"({part!r})" if binds_looser else repr(part)


class And(_Composite):
    """Leaves that every part selects."""

    sign = "&"


class Or(_Composite):
    """Leaves that some part selects."""

    sign = "|"
    settling = True


class Not(_Composite):
    """Leaves that its one part does not select."""

    sign = "~"

    def __init__(self, part: Selector):
        object.__setattr__(self, "parts", (part,))

    def __repr__(self) -> str:
        (part,) = self.parts
        text = repr(part)
        return f"~({text})" if isinstance(part, And | Or) else f"~{text}"

    def select(self, leaves: Leaves) -> list[bool]:
        """The opposite of its part."""
        return [not answer for answer in self.parts[0].select(leaves)]


class Bound(BoundQuestion, Selector):
    """A selector that has decided on one full tree, and answers by path."""

    needs = frozenset({"path"})
    may_be_empty = True  # a smaller view may hold nothing that is selected

    def select(self, leaves: Leaves) -> list[bool]:
        """Look each path up."""
        answers = self.answers.by_path
        for row, path in enumerate(leaves.paths):
            # A static leaf that the bound tree did not have is not selected.
            if path not in answers and leaves.is_array[row]:
                raise no_leaf([path])
        chosen = [answers.get(path, False) for path in leaves.paths]
        return require_agreement(chosen, "A bound selector", cure=IN_AN_OPTIMIZER)

    def _at_path(self, path: str, *leaf: Any) -> bool:
        if path not in self.answers.by_path and not leaf:
            raise no_leaf([path])
        return super()._at_path(path, *leaf)


def glob(pattern: str) -> Selector:
    """Select the leaves at, or below, the nodes that a pattern matches.

    Args:
        pattern: a path pattern; one that starts with ``!`` selects everything else.

    Raises:
        PatternError: the pattern is malformed.

    Example:
        >>> glob("**/kernel")({"mlp": {"kernel": jnp.ones(2), "bias": jnp.ones(2)}})
        {'mlp': {'bias': False, 'kernel': True}}
    """
    if not isinstance(pattern, str):
        raise SelectorError(f"glob takes one pattern, got {argument_text(pattern)}.")
    return as_selector(pattern)


def leaf(
    fn: Callable[[Any], bool] | None = None,
    *,
    ndim: int | None = None,
    dtype: Any = None,
    min_size: int | None = None,
) -> Selector:
    """Select array leaves by shape and dtype; all that is given must hold.

    Args:
        fn: gets each array as a ``jax.ShapeDtypeStruct``, so it works on traced and
            abstract arrays, and returns a bool.
        ndim: number of dimensions.
        dtype: dtype, or a family such as ``jnp.floating``; Python's ``float``, ``int``,
            ``complex`` and ``bool`` mean any width.
        min_size: smallest number of elements.

    Raises:
        SelectorError: an argument has the wrong type.

    Example:
        >>> leaf(ndim=2)({"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)})
        {'bias': False, 'kernel': True}
    """
    if fn is not None and not callable(fn):
        raise SelectorError(
            f"leaf(fn): fn is called with a leaf, got {argument_text(fn)}."
        )
    for name, count in (("ndim", ndim), ("min_size", min_size)):
        is_count = isinstance(count, int) and not isinstance(count, bool)
        if count is not None and not (is_count and count >= 0):
            raise SelectorError(
                f"leaf({name}=): expected a count, got {argument_text(count)}."
            )
    return LeafSelector(
        fn, ndim, None if dtype is None else checked_dtype(dtype), min_size
    )


def node(cls: type) -> Selector:
    """Select the leaves at or under a node of a class or of its subclasses.

    Args:
        cls: class of a container, module or box (``nnx.Param``).

    Raises:
        SelectorError: ``cls`` is not a class.

    Example:
        >>> node(tuple)({"pair": (jnp.ones(1), jnp.ones(1)), "one": jnp.ones(1)})
        {'one': False, 'pair': (True, True)}
    """
    if not isinstance(cls, type):
        raise SelectorError(
            f"node takes a class, got {argument_text(cls)}. For a class by name write "
            "the pattern '**/<Name>'."
        )
    return NodeSelector(cls)


def as_selector(spec: Any) -> Selector:
    """Read a selector, or what one can be made of.

    Args:
        spec: a pattern, a class, a selector, or a list or tuple of these: the union of
            its entries minus those that start with ``!``.

    Raises:
        SelectorError: ``spec`` is something else.
        PatternError: a pattern is malformed.

    Example:
        >>> as_selector(["mlp", "!**/bias"]).matches("mlp/bias")
        False
    """
    if isinstance(spec, Selector):
        return spec
    if isinstance(spec, str):
        text = str.__str__(spec)  # of a StrEnum member or numpy.str_
        return ListSelector((text,)) if text.startswith("!") else GlobSelector(text)
    if isinstance(spec, type):
        return NodeSelector(spec)
    if isinstance(spec, list | tuple):
        is_text = [isinstance(each, str) for each in spec]
        are_keys = all(isinstance(each, str | int | _JAX_KEYS) for each in spec)
        if are_keys and not all(is_text):  # as JAX and Flax write a path
            raise SelectorError(
                f"A list holds patterns, and {shorten(repr(spec))} is the keys of one "
                f"path. Write it as a text: {escape(keys_text(spec))!r}."
            )
        texts = [str.__str__(e) if isinstance(e, str) else as_selector(e) for e in spec]
        return ListSelector(tuple(texts))
    raise SelectorError(
        "A selector is a pattern, a class, a list of these, or made by glob, leaf, "
        f"node or rules.where(label); got {argument_text(spec)}{instead_text(spec)}."
    )


def select(
    tree: Any, where: Any, *, unused: Unused = "error", cure: str = ""
) -> list[bool]:
    """Decide every leaf of a tree that is whole.

    Args:
        tree: tree, or ``TreeView``.
        where: selector, or what ``as_selector`` reads.
        unused: ``"error"`` or ``"ignore"`` patterns and classes that match no array.
        cure: as for ``require_agreement``.

    Returns:
        One bool a leaf, in leaf order.

    Raises:
        UnusedRuleError: an entry of ``where`` matches no array leaf.

    Example:
        >>> select({"a": jnp.ones(1), "b": jnp.ones(1)}, "a")
        [True, False]
    """
    check_choice("unused", unused, ("error", "ignore"))
    view = tree if isinstance(tree, TreeView) else view_whole(tree)
    answers = as_selector(where).decide(view, reports=unused == "error")
    return require_agreement(answers.of(view), "A selection of arrays", cure=cure)


def _combine(kind: type[_Composite], one: Any, two: Any) -> Any:
    if not all(isinstance(x, Selector | str | type | list | tuple) for x in (one, two)):
        return NotImplemented
    parts: list[Selector] = []
    for part in (as_selector(one), as_selector(two)):
        parts += part.parts if type(part) is kind else (part,)
    return kind(tuple(parts))


def _settled(parts: Iterable[Selector], leaves: Leaves, *, by: bool) -> list[bool]:
    """Combine answers: ``by`` settles a row, and other parts are not asked about it.

    Parts that need only patterns come first. A part that cannot answer for a path alone
    does not matter if another one settles it.
    """
    answers, unknown = [not by] * len(leaves), False
    for part in sorted(parts, key=lambda part: bool(part.needs)):
        rows = [row for row, answer in enumerate(answers) if answer is not by]
        if not rows:
            break
        try:
            selected = part.select(leaves.at(rows))
        except NotKnown:
            unknown = True
            continue
        for row, answer in zip(rows, selected, strict=True):
            answers[row] = answer
    if unknown and not all(answer is by for answer in answers):
        raise NotKnown
    return answers
