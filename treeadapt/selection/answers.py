"""Answers: what was decided for the leaves of one tree, by path.

A ``Ruling`` is some layers of one array, what they get, and what decided. An array all
of whose layers get the same has just that as its answer; another one has its rulings, a
``Split``. What was bound to a tree, and the whole tree behind smaller views (see
``whole``), look paths up in ``Answers``.
Decides nothing itself (see ``selectors`` and ``decision``).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from treeadapt.errors import SelectorError, StackError
from treeadapt.layers.keys import boxes
from treeadapt.layers.region import Region
from treeadapt.layers.stacks import Unrolled
from treeadapt.text.names import first_rows, fold, listing, paths_text, plural, shorten
from treeadapt.trees.arrays import is_array, same_value
from treeadapt.trees.describing import describe
from treeadapt.trees.views import TreeView

_SHOWN = 4  # rulings that an error lists
_NO_REGIONS: Mapping[str, Region] = {}

#: What takes arrays apart, for errors about what is handed to an optimizer.
IN_AN_OPTIMIZER = (
    "Use treeadapt.partition, freeze or scale_by_rules, which take arrays apart, or "
)


class Ruling(NamedTuple):
    """What was decided for some layers of one array.

    Attributes:
        region: the layers.
        value: what they get.
        rule: what decided, for errors; may be empty.
    """

    region: Region
    value: Any
    rule: str


@dataclasses.dataclass(frozen=True)
class Split:
    """What was decided for one array, or some layers of it, where these differ.

    Attributes:
        region: all of the layers.
        rulings: of which each layer is in one.
    """

    region: Region
    rulings: tuple[Ruling, ...]

    @property
    def values(self) -> list[Any]:
        """What each layer gets, the numbers of the last axis running fastest."""
        by_layer = {n: one.value for one in self.rulings for n in one.region.layers()}
        return list(map(by_layer.__getitem__, self.region.layers()))

    def within(self, some: Region) -> Any:
        """Return what some of the layers get; one value if they agree.

        Args:
            some: of the same array; along an axis that it does not name, all of them.
        """
        rulings = []
        for one in self.rulings:
            numbers = {
                stack: [n for n in here if n in some.numbers.get(stack, here)]
                for stack, here in one.region.numbers.items()
            }
            if all(numbers.values()):
                rulings.append(one._replace(region=one.region.of_numbers(numbers)))
        return _agreed(self.region.of_numbers(some.numbers), rulings)

    def map(self, fn: Callable[[Any], Any]) -> Any:
        """Apply a function to the value of each ruling; one value if they agree."""
        rulings = [one._replace(value=fn(one.value)) for one in self.rulings]
        return _agreed(self.region, rulings)

    def __str__(self) -> str:
        """The values, each with its layers and what decided."""
        texts = [
            f"{shorten(repr(value))} for {listing([region.key])}"
            + (f" ({rule})" if rule else "")
            for region, value, rule in self.rulings[:_SHOWN]
        ]
        return "; ".join(first_rows(texts, left=len(self.rulings) - _SHOWN))


def no_leaf(paths: Sequence[str], num_asked: int = 1) -> SelectorError:
    """Return the error for array leaves of another tree than the bound one."""
    bare = f" {paths_text(paths)}" if list(paths) == [""] else ""
    return SelectorError(
        f"Bound to a tree that has no leaf at {listing(fold(paths))}.{bare} Bind to "
        "the tree as it is now: .bind(tree).",
        paths=paths,
    )


@dataclasses.dataclass(frozen=True)
class Answers:
    """What was decided for the leaves of one tree.

    Attributes:
        paths: of the leaves for which something was.
        values: what each gets; ``Split`` where its layers differ.
        static: what a static leaf gets that is not among them.
        missing: makes the error for array leaves that are not, of their paths and the
            number of leaves that were asked for.

    Example:
        >>> from treeadapt.trees.views import view_tree
        >>> answers = Answers(["w", "b"], [True, False])
        >>> answers.of(view_tree({"b": jnp.ones(2)}))
        [False]
    """

    paths: Sequence[str]
    values: list[Any]
    static: Any = False
    missing: Callable[[Sequence[str], int], Exception] = no_leaf

    @classmethod
    def of_layers(
        cls, layers: Unrolled, values: list[Any], rules: Callable[[], Sequence[str]]
    ) -> Answers:
        """Return what was decided for a tree, of what was for each of its layers.

        Of a static leaf below a stack, the first layer decides.

        Args:
            layers: the layers of the tree.
            values: what each layer gets.
            rules: gives what decided each layer, for errors.
        """
        if layers.sizes:
            values = list(_folded(layers, values, rules))
        return cls(layers.stored.plan.paths, values)

    @functools.cached_property
    def by_path(self) -> dict[str, Any]:
        """What each leaf gets, by path."""
        return dict(zip(self.paths, self.values, strict=True))

    def of(
        self,
        view: TreeView,
        paths: Sequence[str] | None = None,
        regions: Mapping[str, Region] = _NO_REGIONS,
    ) -> list[Any]:
        """Return what was decided for leaves of a smaller view, or of the tree itself.

        Only the leaves that are asked for must have been there.

        Args:
            view: the view.
            paths: of leaves of it, or keys of ``regions``; None for all leaves.
            regions: layers of arrays in the view, by key.

        Returns:
            One value a path; ``Split`` where its layers have different ones.

        Raises:
            TreeAdaptError: nothing was decided for an array leaf.
            SelectorError: it was for another number of layers than the leaf has.
        """
        if paths is None:
            paths = view.plan.paths
        if paths is self.paths and not self._splits:
            return self.values
        stored = paths
        if regions:
            stored = [regions[p].path if p in regions else p for p in paths]
        try:
            values = list(map(self.by_path.__getitem__, stored))
        except KeyError:
            leaves = view.flat()
            new = [p for p in stored if p not in self.by_path and is_array(leaves[p])]
            if new:
                raise self.missing([*dict.fromkeys(new)], len(stored)) from None
            values = [self.by_path.get(path, self.static) for path in stored]
        if not self._splits:
            return values
        leaves = view.flat()
        return [
            _part(value, leaves[region], regions.get(path))
            if isinstance(value, Split)
            else value
            for value, region, path in zip(values, stored, paths, strict=True)
        ]

    @functools.cached_property
    def _splits(self) -> bool:
        return Split in set(map(type, self.values))


def _folded(
    layers: Unrolled, values: Sequence[Any], rules: Callable[[], Sequence[str]]
) -> Iterator[Any]:
    """Yield one answer for each stored leaf of one value for each layer."""
    texts: Sequence[str] = ()
    paths, start = layers.stored.plan.paths, 0
    for path, count, along in zip(paths, layers.counts, layers.axes, strict=True):
        some = slice(start, start + count)
        of_leaf, start = values[some], start + count
        if not along or _all_same(of_leaf):  # the first one, for a static leaf
            yield of_leaf[0]
            continue
        texts = texts or rules()
        region = Region(path, along)
        keys = list(zip(map(id, of_leaf), texts[some], strict=True))
        value_of = dict(zip(keys, of_leaf, strict=True))
        rulings = [
            Ruling(region.at(places), value_of[key], key[1])
            for key, boxed in boxes(keys, region.sizes).items()
            for places in boxed
        ]
        yield Split(region, tuple(rulings))


def _part(answer: Split, leaf: Any, some: Region | None) -> Any:
    """Return the answer for a leaf, or for some of its layers."""
    if is_array(leaf):
        region = answer.region
        shape = dict(enumerate(leaf.shape))
        for each in region.along:
            if shape.get(each.axis) != len(each.numbers):
                raise SelectorError(
                    f"Bound to a tree that has {plural(len(each.numbers), 'layer')} in "
                    f"{listing([region.path])}, which is {describe(leaf)} here. Bind "
                    "to the tree as it is now: .bind(tree).",
                    paths=[region.path],
                )
    return answer if some is None else answer.within(some)


def _agreed(region: Region, rulings: Sequence[Ruling]) -> Any:
    """Return the answer for some layers: one value if all rulings have it."""
    if _all_same([one.value for one in rulings]):
        return rulings[0].value
    return Split(region, tuple(rulings))


def _all_same(values: Sequence[Any]) -> bool:
    first = values[0]
    return all(value is first or same_value(value, first) for value in values)


def require_agreement(values: list[Any], who: str, *, cure: str = "") -> list[Any]:
    """Return answers; raise if layers of one array have different ones.

    Args:
        values: one for each stored leaf.
        who: what needs one answer for each array.
        cure: what to do other than to give all layers of an array one answer.

    Raises:
        StackError: it names the layers, what decided, and what cuts arrays.
    """
    if Split in set(map(type, values)):
        split = next(value for value in values if isinstance(value, Split))
        raise StackError(
            f"The layers of {split.region.path!r} get different answers: {split}. "
            f"{who} needs one for each array. "
            f"{cure}{'g' if cure else 'G'}ive all layers of the array one answer.",
            paths=[value.region.path for value in values if isinstance(value, Split)],
        )
    return values
