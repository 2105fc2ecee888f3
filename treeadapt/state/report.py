"""The report of a state that was carried over, and what it warns of.

Takes what was carried, by name, and the leaves; says in words where pieces of two
states do not go together: moments under the step count of others or of another kind,
vectors without names, nothing that fits. Reads step counts, and moments only where the
new ones do not start at zero.
See ``carry_state`` for what is carried.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from treeadapt.migrations.running import on_auto_axes
from treeadapt.patterns.glob import escape
from treeadapt.state.fields import numpy_values
from treeadapt.state.migrate_state import SavedState
from treeadapt.state.state_slices import StateLeaf
from treeadapt.text.html_table import html_table
from treeadapt.text.names import fold, listing, natural, plural, section, shorten
from treeadapt.transforms.optax_fields import (
    ADAM_FIELDS,
    SCALE_FIELDS,
    SUM_FIELDS,
    has_fields,
    is_state_class,
)
from treeadapt.transforms.state_map import Slot, below, homes_in, is_joint, map_names
from treeadapt.trees.arrays import is_array
from treeadapt.trees.casting import converted
from treeadapt.trees.describing import describe
from treeadapt.trees.views import Plan, view_tree

#: ``tx.init`` as a function of the arrays in the params, and these.
Start = tuple[Callable[[dict[str, Any]], Any], dict[str, Any]]

_SLOWEST = 0.99  # no second moment forgets faster, in one step


@dataclasses.dataclass(frozen=True)
class CarryReport:
    """What became of every leaf when a state was carried over.

    Its ``str`` is for people. Leaves are named by label path: in the new state or,
    where it says "saved", in the earlier one.

    Attributes:
        carried: saved name of each leaf that was taken from the earlier state; that of
            several, folded, if a migration made it of them, or if several groups held
            its layers. Some of their layers are named as ``blocks/{4..11}/kernel``.
        partly: carried leaves of which some layers were not: the names of these, under
            which the attributes below list them.
        retyped: carried leaves that were cast: their dtype before, and now.
        fresh: leaves as ``tx.init`` made them, because no saved leaf fits by name.
        reset: leaves as ``tx.init`` made them, because ``reset`` selects them.
        misshaped: leaves as ``tx.init`` made them, because the saved leaf has another
            shape or dtype, which the text says.
        ambiguous: leaves as ``tx.init`` made them, because several saved leaves fit
            equally well; their saved names.
        unmoved: why saved leaves could not be moved by the migration, by saved name;
            the leaves that they would fill are fresh.
        left_over: other saved names that nothing was taken from.
        warnings: what was carried and does not go together, with the cure.
    """

    carried: Mapping[str, str]
    partly: Mapping[str, tuple[str, ...]]
    retyped: Mapping[str, tuple[str, str]]
    fresh: tuple[str, ...]
    reset: tuple[str, ...]
    misshaped: Mapping[str, str]
    ambiguous: Mapping[str, tuple[str, ...]]
    unmoved: Mapping[str, str]
    left_over: tuple[str, ...]
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _repr_html_(self) -> str:
        """Return the report for a notebook."""
        moved = {name for name, old in self.carried.items() if name != old}
        title, *_ = self._lines()
        every: tuple[tuple[str, Collection[str]], ...] = (
            ("carried, of the same name", [*(self.carried.keys() - moved)]),
            ("carried, from elsewhere", moved),
            ("carried in part", self.partly),
            ("cast", self.retyped),
            ("fresh, nothing saved fits", self.fresh),
            ("fresh, of another shape or dtype", self.misshaped),
            ("fresh, several saved leaves fit", self.ambiguous),
            ("reset, as asked", self.reset),
            ("saved, but not moved", self.unmoved),
            ("saved, but not used", self.left_over),
        )
        rows = [
            (what, f"{len(names):,}", listing(fold(sorted(names, key=natural))))
            for what, names in every
            if names
        ]
        notes = [f"warning: {text}" for text in self.warnings]
        return html_table(title, ("leaves", "number", "names"), rows, notes)

    def _lines(self) -> Iterator[str]:
        parts = (self.carried, self.fresh, self.reset, self.misshaped, self.ambiguous)
        total = sum(map(len, parts)) - sum(map(len, self.partly.values()))
        some = f", {len(self.partly):,} of them in part" if self.partly else ""
        leaves = f"{len(self.carried):,} of {plural(total, 'leaf')}"
        yield f"carried {leaves} of the new state{some}"
        moved = [pair for pair in self.carried.items() if pair[0] != pair[1]]
        if moved:
            name, old = map(shorten, moved[0])
            yield f"  {len(moved):,} of them from elsewhere: {name!r} from {old!r}, ..."
        for old, new in dict.fromkeys(self.retyped.values()):
            cast = [name for name, both in self.retyped.items() if both == (old, new)]
            yield f"  {len(cast):,} of them cast from {old} to {new}: {listing(cast)}"
        titles = "fresh, nothing saved fits", "reset, as asked", "saved, but not used"
        counted = zip(titles, (self.fresh, self.reset, self.left_over), strict=True)
        for title, names in counted:
            if names:
                yield f"{title} ({len(names):,}): {listing(names)}"
        misfits = {name: f"is {text}" for name, text in self.misshaped.items()}
        for name, names in self.ambiguous.items():
            misfits[name] = f"could be any of {listing(names, limit=4)}"
        yield from section("", [f"fresh, {n!r} {text}" for n, text in misfits.items()])
        reasons: dict[str, list[str]] = {}
        for name, text in self.unmoved.items():
            reasons.setdefault(text, []).append(name)
        unmoved = [(listing(fold(n), limit=4), text) for text, n in reasons.items()]
        yield from section("", [f"not moved, {n}: {text}" for n, text in unmoved])
        for text in self.warnings:
            yield f"warning: {text}"


@dataclasses.dataclass
class NewLeaf(StateLeaf):
    """One leaf of the new state, or a piece of one, and what became of it.

    Its array may be abstract.

    Attributes:
        fate: the field of ``CarryReport`` that lists it.
        why: what that field says of it.
        source: the leaf that was carried to it; None if none was.
        is_castable: whether one would have been, had it been cast.
    """

    fate: str = "fresh"
    why: Any = None
    source: StateLeaf | None = None
    is_castable: bool = False

    @property
    def retyped(self) -> tuple[str, str] | None:
        """The dtypes of what was carried, before and now; None if these are one."""
        leaves = [self.source.value if self.source else None, self.value]
        if not all(map(is_array, leaves)) or leaves[0].dtype == leaves[1].dtype:
            return None
        return str(leaves[0].dtype), str(leaves[1].dtype)

    def carried(self) -> Any:
        """Return what was carried, in the dtype of the new state."""
        assert self.source
        value, dtype = self.source.value, getattr(self.value, "dtype", None)
        shape, is_same = np.shape(self.value), np.shape(value) == np.shape(self.value)
        if isinstance(value, jax.ShapeDtypeStruct):
            if is_same and not self.retyped:
                return value
            sharding = value.sharding if is_same else None
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        if not is_same:
            first = (0,) * (axes_of_layers(value, shape) or 0)
            value = jnp.broadcast_to(jnp.asarray(value)[first], shape)
        return converted(value, dtype) if self.retyped else value


def axes_of_layers(leaf: Any, shape: Sequence[int]) -> int | None:
    """Count the axes at the front of a leaf along which all of it is the same.

    ``per_layer`` keeps a count, say, for each layer, as often as there are layers.

    Args:
        leaf: saved, in no copy of the params.
        shape: of the new one, which may have any number of layers, or no axis of them.

    Returns:
        The number of axes whose first entry can be repeated to give that shape; None
        if the leaf differs from layer to layer, or has another shape.

    Example:
        >>> axes_of_layers(jnp.full(5, 7), (3,)), axes_of_layers(jnp.int32(7), (3,))
        (1, 0)
        >>> axes_of_layers(jnp.arange(5), (3,)) is None
        True
    """
    size, values = np.shape(leaf), numpy_values(leaf)
    for axes in range(len(size) + 1):
        ends_alike = tuple(shape)[::-1][: len(size) - axes] == size[axes:][::-1]
        if axes and (values is None or (values != values[(0,) * axes]).any()):
            return None
        if ends_alike:
            return axes
    return None


@dataclasses.dataclass
class Table:
    """Two states, leaf by leaf.

    Attributes:
        rows: the leaves of the new state, or their pieces.
        saved: those of the saved state.
        old: all leaves of the saved state, by the names that they have there.
        plans: of the new state, and of the saved one.
        num_params: how many params train.
        unclear: params of which a leaf is cut along axes that no key names.
    """

    rows: Sequence[NewLeaf]
    saved: SavedState
    old: Mapping[str, Any]
    plans: tuple[Plan, Plan]
    num_params: int
    unclear: Collection[str]

    @functools.cached_property
    def copies(self) -> Sequence[NewLeaf]:
        """The leaves of the new state that are in copies of the params."""
        return [row for row in self.rows if row.slot.is_copy]

    @functools.cached_property
    def moved(self) -> Sequence[tuple[NewLeaf, StateLeaf]]:
        """Those of them that were carried, and what they come from."""
        return [(row, row.source) for row in self.copies if row.source]

    @property
    def wholes(self) -> Iterator[list[NewLeaf]]:
        """The pieces of each leaf of the new state."""
        by_leaf = itertools.groupby(self.rows, lambda row: row.whole)
        return ([*pieces] for _, pieces in by_leaf)

    @functools.cached_property
    def pieces(self) -> Mapping[str, Collection[str]]:
        """Names of the pieces of each saved leaf."""
        pieces = _by_leaf(self.saved.leaves.values())
        return {name: pieces.get(name, {name: None}) for name in self.old}

    def some(self, name: str, pieces: Collection[str]) -> list[str]:
        """Name a saved leaf, or just some pieces of it."""
        return [name] if len(pieces) == len(self.pieces[name]) else [*pieces]

    def text(self, sources: Iterable[StateLeaf]) -> str:
        """Return the saved names of leaves, or pieces, as one text."""
        pieces = _by_leaf(sources).items()
        return ", ".join(fold(itertools.chain(*itertools.starmap(self.some, pieces))))


def _by_leaf(pieces: Iterable[StateLeaf]) -> dict[str, dict[str, None]]:
    """Return the names of saved leaves, each with the names of some of its pieces."""
    by_leaf: dict[str, dict[str, None]] = {}
    for piece in pieces:
        for name in piece.origin or (piece.whole,):
            names = by_leaf.setdefault(name, {})
            names[name if piece.origin else piece.slot.name] = None
    return by_leaf


def report_of(table: Table, start: Start | None) -> CarryReport:
    """Say what became of every leaf, and warn where leaves do not go together.

    Args:
        table: the two states.
        start: makes the first state of the new transformation; None if only the shapes
            of the params are known.
    """
    saved = table.saved
    rows = collections.defaultdict[str, dict[str, Any]](dict)
    partly: dict[str, tuple[str, ...]] = {}
    retyped: dict[str, tuple[str, str]] = {}
    for parts in table.wholes:
        leaf, sources = parts[0].whole, [row.source for row in parts if row.source]
        if sources:
            rows["carried"][leaf] = table.text(sources)
            if cast := next(filter(None, [row.retyped for row in parts]), None):
                retyped[leaf] = cast
        for fate in dict.fromkeys([row.fate for row in parts if not row.source]):
            why = {row.slot.name: row.why for row in parts if row.fate == fate}
            names = [*why] if len(why) < len(parts) else [leaf]
            rows[fate] |= dict.fromkeys(names, [*why.values()][-1])
            if sources:
                partly[leaf] = (*partly.get(leaf, ()), *names)
    used = _by_leaf([row.source for row in table.rows if row.source])
    left_over: list[str] = []
    for name, every in table.pieces.items():
        unused = [piece for piece in every if piece not in used.get(name, ())]
        if unused and name not in saved.unmoved:
            left_over += table.some(name, unused)
    return CarryReport(
        carried=rows["carried"],
        partly=partly,
        retyped=retyped,
        fresh=tuple(rows["fresh"]),
        reset=tuple(rows["reset"]),
        misshaped=rows["misshaped"],
        ambiguous=rows["ambiguous"],
        unmoved=saved.unmoved,
        left_over=tuple(left_over),
        warnings=(
            *([ambiguous_text(rows["ambiguous"])] if rows["ambiguous"] else ()),
            *_of_dtypes(table),
            *_folded(_of_counts(table)),
            *_folded(_of_meaning(table)),
            *_folded(_of_sums(table)),
            *_folded(_of_starts(table, start) if start else ()),
            *_of_small(table),
            *_of_vectors(table),
        ),
    )


def ambiguous_text(sources: Mapping[str, Sequence[str]]) -> str:
    """Say which leaves of a new state several saved ones fit, and what to do.

    Args:
        sources: the names of the saved ones, by that of the new one.
    """
    name, names = next(iter(sources.items()))
    return (
        f"{plural(len(sources), 'leaf')} of the new state may be any of several saved "
        f"ones that differ, and start again: {listing(sources)}. {name!r} could be "
        f"{listing(names)}. Give groups the labels that they had, carry with reset= "
        "what should start again, or set what you know with tree_set"
    )


class _Alike(NamedTuple):
    """A warning that may be needed several times, of states that are alike.

    Attributes:
        text: what it says; ``{alike}``, ``{reset}`` and numbers in the place of names.
        node: name of the state.
        names: the lists of names for these numbers.
    """

    text: str
    node: str
    names: tuple[Iterable[str], ...]


def _folded(warnings: Iterable[_Alike]) -> Iterator[str]:
    """Yield one text for all warnings that differ in nothing but names."""
    groups: dict[str, list[_Alike]] = {}
    for one in warnings:
        groups.setdefault(one.text, []).append(one)
    for text, group in groups.items():
        columns = zip(*(one.names for one in group), strict=True)
        names = [dict.fromkeys(itertools.chain(*column)) for column in columns]
        alike = f" ({len(group):,} alike)" if len(group) > 1 else ""
        reset = _reset(*(one.node for one in group))
        yield text.format(*map(listing, names), alike=alike, reset=reset)


def _of_dtypes(table: Table) -> Iterator[str]:
    """Warn of leaves that would have been carried, had they been cast."""
    names = [row.slot.name for row in table.rows if row.is_castable]
    if names:
        yield (
            f"{plural(len(names), 'leaf')} of another dtype than saved, started again: "
            f"{listing(names)}. To carry what was saved in this dtype, pass cast=True."
        )


def _of_small(table: Table) -> Iterator[str]:
    """Warn of second moments and the like that are cast to a narrower range."""
    rows = [row for row, _ in table.moved if row.slot.field in SCALE_FIELDS]
    names = [row.slot.name for row in rows if row.retyped and _is_narrower(row)]
    if names:
        yield (
            f"{listing(names)} were cast to a dtype in which small numbers are zero, "
            "and steps are divided by them: the first ones may be many times too long. "
            "Keep the params in a wider dtype, or start again with reset=."
        )


def _is_narrower(row: NewLeaf) -> bool:
    """Return whether the dtype of a leaf lacks small numbers that the saved one has."""
    assert row.source
    old, new = jnp.finfo(row.source.value.dtype), jnp.finfo(row.value.dtype)
    return bool(old.minexp < new.minexp)


def _counts(table: Table) -> list[tuple[Slot, StateLeaf]]:
    """Return the step counts that were carried and are not zero, with their sources."""
    return [
        (row.slot, row.source)
        for row in table.rows
        if row.source
        and not row.slot.is_copy
        and is_array(row.value)
        and jnp.issubdtype(row.value.dtype, jnp.integer)
        and (row.value.shape == () or number(row.source.value) is not None)
        and number(row.source.value) != 0
    ]


def _of_counts(table: Table) -> Iterator[_Alike]:
    """Warn of moments that are younger or older than their step count says."""
    for slot, count in _counts(table):
        steps = number(count.value)
        copies = [row for row in table.copies if row.slot.node == slot.node]
        fresh = (row.source is None or row.source.is_padded for row in copies)
        if new := [row.slot for row in itertools.compress(copies, fresh)]:
            yield _fresh_moments(slot, new, steps)
        leaves = table.saved.leaves
        pairs = [(row.slot.tail, row.source.slot.node) for row in copies if row.source]
        ages = {
            node: number(leaves.get(below(node, slot.field), count).value)
            for node in dict.fromkeys([node for _, node in pairs])
        }
        tails = [tail for tail, node in pairs if ages[node] != steps]
        if tails:
            text = (
                "moments of another age than the step count says{alike}: {0} of {1}. "
                "Keep these leaves in a group of their own, or reset all: {reset}."
            )
            yield _Alike(text, slot.node, ([slot.name], tails))


def _fresh_moments(count: Slot, new: Sequence[Slot], steps: Any) -> _Alike:
    fields = dict.fromkeys(slot.field for slot in new)
    adam = ""
    if steps is not None and fields.keys() >= ADAM_FIELDS:
        factor = first_step(steps)
        adam = f"Adam's first step there would be {factor:.1f} times its usual length. "
    seen = "not 0" if steps is None else f"{steps:,}"
    text = (
        f"fresh moments under an old step count{{alike}}: {seen} in {{0}}, but "
        f"{', '.join(fields)} of {{1}} start again. {adam}Give these leaves a group of "
        "their own in partition, whose count starts at zero, or reset the whole state: "
        "{reset}."
    )
    return _Alike(text, count.node, ([count.name], [slot.tail for slot in new]))


def _of_meaning(table: Table) -> Iterator[_Alike]:
    """Warn of moments that come from a state of another kind."""
    fields_by_pair: dict[tuple[str, str], dict[str, None]] = {}
    for row, leaf in table.moved:
        fields = fields_by_pair.setdefault((row.slot.node, leaf.slot.node), {})
        fields[row.slot.field] = None
    for (node, source), fields in fields_by_pair.items():
        classes = [*filter(has_fields, table.plans[0].classes(node or None))]
        cls, old_cls = (
            next(filter(is_state_class, plan.classes(path or None)), None)
            for plan, path in zip(table.plans, (node, source), strict=True)
        )
        if not classes or (cls and cls is old_cls):
            continue
        if cls and old_cls:
            differs = [f"is {cls.__name__}, not {old_cls.__name__}"]
        else:
            new = {row.slot.field for row in table.rows if row.slot.node == node}
            old = {*table.saved.fields.get(source, ())}
            changes = {"lacks": old - new, "adds": new - old}
            differs = [
                f"{verb} {', '.join(sorted(f))}" for verb, f in changes.items() if f
            ]
        if differs:
            text = (
                f"moments of another kind{{alike}}: {', '.join(fields)} of {{0}} from "
                f"{{1}}, where the new state {' and '.join(differs)}. The first step "
                "may be NaN or far too long. To start again: {reset}."
            )
            yield _Alike(text, node, ([node], [source]))


def _of_sums(table: Table) -> Iterator[_Alike]:
    """Warn of sums of updates that were scaled by moments, or are not any more."""
    sums = [row.slot for row, _ in table.moved if row.slot.field in SUM_FIELDS]
    if not sums:
        return
    home = homes_in({slot.array: slot.array for slot in sums})
    leaves = table.saved.leaves.items()
    moved = {name: leaf.slot.prefix for name, leaf in leaves if leaf.slot.is_copy}
    prefixes = {**table.saved.prefixes, **moved}
    before = _scales(map_names(table.saved.leaves, SCALE_FIELDS, home, prefixes))
    after = _scales([row.slot for row in table.copies])
    reported: set[str | None] = set()
    for slot in sums:
        was, now = (scales.get(slot.tail, "nothing") for scales in (before, after))
        if was == now or slot.prefix in reported:
            continue
        reported.add(slot.prefix)
        text = (
            f"sums of updates that were scaled by {was} and now are by {now}"
            "{alike}: {0}. Steps may be far too long or short. To start again: {reset}."
        )
        yield _Alike(text, slot.node, ([str(slot.prefix)],))


def _scales(slots: Iterable[Slot]) -> dict[str, str]:
    """Return the fields by which the updates of each param are scaled, as text."""
    fields_by_tail: dict[str, set[str]] = {}
    for slot in slots:
        if slot.is_copy and slot.field in SCALE_FIELDS:
            fields_by_tail.setdefault(slot.tail, set()).add(slot.field)
    return {tail: ", ".join(sorted(fields)) for tail, fields in fields_by_tail.items()}


def _of_starts(table: Table, start: Start) -> Iterator[_Alike]:
    """Warn of accumulators that are less than those of this transformation can be."""
    counts = {slot.node: number(count.value) for slot, count in _counts(table)}
    chosen: dict[str | None, tuple[NewLeaf, StateLeaf]] = {}  # one leaf of each field
    for row, source in table.moved:
        if (
            row.slot.field in SCALE_FIELDS
            and getattr(row.value, "size", False)
            and counts.get(row.slot.node) is not None
        ):
            chosen.setdefault(row.slot.prefix, (row, source))
    if not chosen:
        return
    init, arrays = start

    def least_of(arrays: dict[str, Any]) -> list[Any]:
        state = view_tree(init(arrays)).flat()
        return [jnp.min(state[row.whole]) for row, _ in chosen.values()]

    try:  # on Explicit axes, what is made of nothing could be anywhere
        starts = on_auto_axes(jax.jit(least_of), arrays)
    except TypeError:  # a mask that reads values
        return
    lows: dict[tuple[float, int], list[tuple[Slot, float]]] = {}
    for (row, source), value in zip(chosen.values(), starts, strict=True):
        first, steps = number(value), counts[row.slot.node]
        if not isinstance(first, float) or first <= 0:
            continue  # before any moment is read
        saved = numpy_values(source.value)
        least = first if saved is None else float(np.min(saved))
        if least < first * _SLOWEST**steps:  # it cannot have started there
            lows.setdefault((first, steps), []).append((row.slot, least))
    for (first, steps), slots in lows.items():
        lowest = min(least for _, least in slots)
        text = (
            f"moments below where they start{{alike}}: {{0}} start at {first:.0e} "
            f"here, and after {plural(steps, 'step')} are as low as {lowest:.0e}: "
            "another optimizer made them. The first step may be many times too long. "
            "To start again: {reset}."
        )
        for slot, _ in slots:
            yield _Alike(text, slot.node, ([str(slot.prefix)],))


def _of_vectors(table: Table) -> Iterator[str]:
    """Warn of moments that have no parameter's name (``optax.flatten``)."""
    owners = {row.slot.node for row in table.copies}
    for row in table.rows:
        is_apart = row.source and row.slot.node not in owners
        if is_apart and is_joint(row.value, table.num_params):
            yield (
                f"{row.slot.name!r} is {describe(row.value)} without the name of any "
                "parameter (optax.flatten joins them all), and was carried whole. That "
                f"is right if the same leaves train; if not, {_reset(row.slot.node)}."
            )


def _reset(*nodes: str) -> str:
    patterns = [escape(node) if node else "**" for node in dict.fromkeys(nodes)]
    return f"reset={patterns if len(patterns) > 1 else patterns[0]!r}"


def number(leaf: Any) -> Any:
    """Return the number that an array holds, once or several times.

    ``per_layer`` keeps a count for each layer.

    Returns:
        A Python number; None if there are several, or it is not known here and now.

    Example:
        >>> number(jnp.int32(3)), number(jnp.full(2, 0.5)), number(jnp.arange(2))
        (3, 0.5, None)
    """
    values = numpy_values(leaf)
    if values is None or not values.size or (values != values.flat[0]).any():
        return None
    return values.flat[0].item()


def first_step(steps: int, *, b1: float = 0.9, b2: float = 0.999) -> float:
    """Return how long Adam's first step from zero moments is at an old step count.

    In due steps: Adam corrects the bias of moments as old as the count, which these are
    not. Under a constant gradient it gets worse before it gets better: from a count of
    1,000 the thirteenth step is 5.2 times its usual length.

    Args:
        steps: the step count before the step.
        b1: decay of the first moment.
        b2: decay of the second moment.

    Example:
        >>> [round(first_step(steps), 1) for steps in (0, 10, 1_000, 100_000)]
        [1.0, 0.5, 2.5, 3.2]
    """
    mean = (1 - b1) / (1 - b1 ** (steps + 1))
    square = (1 - b2) / (1 - b2 ** (steps + 1))
    return float(mean / square**0.5)
