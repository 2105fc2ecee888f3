"""The report of a state that was carried over, and what it warns of.

Takes what was carried, by name, and the leaves; says in words where pieces of two
states do not go together: moments under the step count of others or of another kind,
vectors without names, nothing that fits. Reads step counts, and moments only where the
new ones do not start at zero.
What is carried is up to ``carry_state``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treeadapt.arrays import is_array
from treeadapt.carry.optax_fields import (
    ADAM_FIELDS,
    SCALE_FIELDS,
    SUM_FIELDS,
    is_state_class,
)
from treeadapt.carry.slots import Cut, Slot, below, cut_names, cuts_of
from treeadapt.convert import describe
from treeadapt.names import listing, plural
from treeadapt.paths import SEPARATOR
from treeadapt.patterns import escape
from treeadapt.trees.views import Plan

_SHOWN = 8  # leaves of one kind that the text lists
_SLOWEST = 0.99  # no second moment forgets faster, in one step


@dataclasses.dataclass(frozen=True)
class CarryReport:
    """What became of every leaf when a state was carried over.

    Its ``str`` is for people. Leaves are named by label path: in the new state or,
    where it says "saved", in the earlier one.

    Attributes:
        carried: saved name of each leaf that was taken from the earlier state.
        fresh: leaves as ``tx.init`` made them, for no saved leaf fits by name.
        reset: leaves as ``tx.init`` made them, for ``reset`` selects them.
        misshaped: leaves as ``tx.init`` made them, for the saved leaf has another shape
            or dtype, which the text tells.
        ambiguous: leaves as ``tx.init`` made them, for several saved leaves fit equally
            well; their saved names.
        left_over: saved names that nothing was taken from.
        warnings: what was carried and does not go together, with the cure.
    """

    carried: Mapping[str, str]
    fresh: tuple[str, ...]
    reset: tuple[str, ...]
    misshaped: Mapping[str, str]
    ambiguous: Mapping[str, tuple[str, ...]]
    left_over: tuple[str, ...]
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        parts = (self.carried, self.fresh, self.reset, self.misshaped, self.ambiguous)
        total = plural(sum(map(len, parts)), "leaf")
        yield f"carried {len(self.carried):,} of {total} of the new state"
        moved = [pair for pair in self.carried.items() if pair[0] != pair[1]]
        if moved:
            name, old = moved[0]
            yield f"  {len(moved):,} of them from elsewhere: {name!r} from {old!r}, ..."
        yield from _counted("fresh, nothing saved fits", self.fresh)
        yield from _counted("reset, as asked", self.reset)
        yield from _listed(
            [f"fresh, {name!r} is {text}" for name, text in self.misshaped.items()]
        )
        yield from _listed(
            [
                f"fresh, {name!r} could be any of {listing(names, limit=4)}"
                for name, names in self.ambiguous.items()
            ]
        )
        yield from _counted("saved, but not used", self.left_over)
        for text in self.warnings:
            yield f"warning: {text}"


def _counted(title: str, names: Sequence[str]) -> Iterator[str]:
    if names:
        yield f"{title} ({len(names):,}): {listing(names)}"


def _listed(lines: Sequence[str]) -> Iterator[str]:
    yield from lines[:_SHOWN]
    if len(lines) > _SHOWN:
        yield f"  and {len(lines) - _SHOWN:,} more"


@dataclasses.dataclass(kw_only=True)
class Carried:
    """What was carried.

    Attributes:
        slots: leaves of the new state.
        specs: what each of them is, an abstract or a concrete leaf, by name.
        old: the saved leaves by name.
        cuts: the saved names that stand in copies of the params.
        reset: names of leaves that must not be carried.
        sources: saved name of each leaf that was carried, by name.
    """

    slots: Sequence[Slot]
    specs: Mapping[str, Any]
    old: Mapping[str, Any]
    cuts: Mapping[str, Cut]
    reset: frozenset[str]
    sources: dict[str, str] = dataclasses.field(default_factory=dict)

    def moved(self) -> Iterator[tuple[Slot, Cut]]:
        """Yield each leaf of a copy that was carried, and where it comes from."""
        for slot in self.slots:
            if slot.prefix is not None and slot.name in self.sources:
                yield slot, self.cuts[self.sources[slot.name]]

    def value(self, name: str) -> Any:
        """Return the number that was carried to a leaf, if it is known."""
        return number(self.old[self.sources[name]])

    def is_count(self, slot: Slot) -> bool:
        """Tell whether a leaf is a step count that was carried, and is not zero."""
        spec = self.specs[slot.name]
        return (
            slot.name in self.sources
            and is_array(spec)
            and spec.shape == ()
            and jnp.issubdtype(spec.dtype, jnp.integer)
            and self.value(slot.name) != 0
        )

    def has_other_count(self, slot: Slot, count: Slot) -> bool:
        """Tell whether a moment comes from where the step count is another one."""
        if slot.name not in self.sources:
            return False
        source = below(self.cuts[self.sources[slot.name]][0], count.field)
        return source in self.old and self.value(count.name) != number(self.old[source])


def warnings_of(
    carried: Carried,
    plans: tuple[Plan, Plan],
    starts: Mapping[str, Any],
    *,
    num_params: int,
) -> tuple[str, ...]:
    """Say where what was carried does not go together.

    Args:
        carried: what was carried.
        plans: of the new and of the saved state.
        starts: the least value at which ``tx`` starts some accumulators, by name.
        num_params: how many params train.
    """
    return (
        *_of_counts(carried),
        *_of_meaning(carried, *plans),
        *_of_sums(carried),
        *_of_starts(carried, starts),
        *_of_vectors(carried, num_params),
        *_of_nothing(carried),
    )


def _of_counts(carried: Carried) -> Iterator[str]:
    """Warn of moments that are younger or older than their step count says."""
    nodes: dict[str, list[Slot]] = {}
    for slot in carried.slots:
        if slot.prefix is not None:
            nodes.setdefault(slot.node, []).append(slot)
    for slot in carried.slots:
        beside = nodes.get(slot.node)
        if slot.prefix is not None or not beside or not carried.is_count(slot):
            continue
        new = [one for one in beside if one.name not in carried.sources]
        if new:
            yield _fresh_message(slot, new, carried.value(slot.name))
        other = [one for one in beside if carried.has_other_count(one, slot)]
        if other:
            yield _age_message(slot, other)


def _of_meaning(carried: Carried, new: Plan, old: Plan) -> Iterator[str]:
    """Warn of moments that come from a state of another kind."""
    pairs: dict[tuple[str, str], dict[str, None]] = {}
    for slot, (source, _, _) in carried.moved():
        pairs.setdefault((slot.node, source), {})[slot.field] = None
    here = _fields(new.paths, {node for node, _ in pairs})
    there = _fields(carried.old, {source for _, source in pairs})
    for (node, source), moved in pairs.items():
        is_record, cls = _state_class(new, node)
        _, old_cls = _state_class(old, source)
        is_other = None not in (cls, old_cls) and cls is not old_cls
        if is_record and (is_other or here[node] != there[source]):
            lost = sorted(there[source] - here[node])
            more = sorted(here[node] - there[source])
            told = [f"lacks {', '.join(lost)}"] if lost else []
            told += [f"adds {', '.join(more)}"] if more else []
            told = told or [f"is {cls.__name__}, not {old_cls.__name__}"]
            yield (
                f"moments of another kind: {', '.join(moved)} of {node!r} from "
                f"{source!r}, where the new state {' and '.join(told)}. What a "
                "moment means depends on the fields next to it; the first step may be "
                f"NaN or many times too long. To start anew: reset={_pattern(node)!r}."
            )


def _of_sums(carried: Carried) -> Iterator[str]:
    """Warn of sums of updates that were scaled by moments, or are not any more."""
    tails = frozenset(slot.tail for slot, _ in carried.moved())
    before: dict[str, set[str]] = {}
    for _, field, tail in cut_names(
        carried.old, SCALE_FIELDS, tails.__contains__
    ).values():
        before.setdefault(tail, set()).add(field)
    after: dict[str, set[str]] = {}
    for slot in carried.slots:
        if slot.prefix is not None and slot.field in SCALE_FIELDS:
            after.setdefault(slot.tail, set()).add(slot.field)
    found: dict[tuple[str, str], tuple[set[str], set[str]]] = {}
    for slot, _ in carried.moved():
        scales = before.get(slot.tail, set()), after.get(slot.tail, set())
        if slot.field in SUM_FIELDS and scales[0] != scales[1]:
            found.setdefault((slot.node, slot.field), scales)
    for (node, field), (old, new) in found.items():
        yield (
            f"{below(node, field)!r} adds up updates that were scaled by "
            f"{', '.join(sorted(old)) or 'nothing'} and now are by "
            f"{', '.join(sorted(new)) or 'nothing'}: its first steps may be many times "
            f"too long or too short. To start it anew: reset={_pattern(node)!r}."
        )


def _of_starts(carried: Carried, starts: Mapping[str, Any]) -> Iterator[str]:
    """Warn of accumulators that are less than those of this transformation can be."""
    counts = {
        slot.node: carried.value(slot.name)
        for slot in carried.slots
        if slot.prefix is None and carried.is_count(slot)
    }
    for slot, _ in carried.moved():
        start, steps = number(starts.get(slot.name)), counts.get(slot.node)
        if not isinstance(start, float) or start <= 0 or steps is None:
            continue  # before any moment is read
        saved = known(carried.old[carried.sources[slot.name]])
        if saved is None:
            continue
        least = float(np.min(saved))
        if least < start * _SLOWEST**steps:  # it cannot have started there
            yield (
                f"{below(slot.node, slot.field)!r} starts at {start:.0e} here and is "
                f"{least:.0e} after {steps:,} steps: another optimizer made it. The "
                f"first step may be many times too long: reset={_pattern(slot.node)!r}."
            )


def _fields(names: Iterable[str], nodes: Iterable[str]) -> dict[str, set[str]]:
    """Return the names of what is right below some nodes."""
    found: dict[str, set[str]] = {node: set() for node in nodes}
    for name in names:
        for prefix, tail in cuts_of(name):
            if prefix in found:
                found[prefix].add(tail.partition(SEPARATOR)[0])
    return found


def _state_class(plan: Plan, node: str) -> tuple[bool, Any]:
    """Tell whether a node has fields, and its class if that is Optax's."""
    classes = plan.classes(node or None)
    is_record = any(
        hasattr(cls, "_fields") or dataclasses.is_dataclass(cls) for cls in classes
    )
    return is_record, next(filter(is_state_class, classes), None)


def _of_vectors(carried: Carried, num_params: int) -> Iterator[str]:
    """Warn of moments that have no parameter's name (``optax.flatten``)."""
    owners = {slot.node for slot in carried.slots if slot.prefix is not None}
    for slot in carried.slots:
        spec = carried.specs[slot.name]
        if (
            slot.name in carried.sources
            and slot.node not in owners
            and is_array(spec)
            and spec.ndim == 1
            and spec.size > num_params > 1
        ):
            yield (
                f"{slot.name!r} is {describe(spec)} without the name of any parameter "
                "(optax.flatten joins them all), and was carried whole. That is right "
                "only if just the same leaves train as before; if not, "
                f"reset={_pattern(slot.node)!r}."
            )


def _of_nothing(carried: Carried) -> Iterator[str]:
    copies = [slot.name for slot in carried.slots if slot.prefix is not None]
    asked = not carried.reset.isdisjoint(copies)
    if copies and carried.old and not carried.sources and not asked:
        yield (
            f"nothing was carried. The new state has names like {copies[0]!r}, the "
            f"saved one like {[*carried.old][-1]!r}. If the model was renamed, carry "
            "the flat dict of the saved state under its new names."
        )


def number(leaf: Any) -> Any:
    """Return the value of a scalar as a Python number, if it is known here and now.

    Example:
        >>> number(jnp.int32(3)), number(jax.ShapeDtypeStruct((), "int32"))
        (3, None)
    """
    values = known(leaf)
    return values.item() if values is not None and values.shape == () else None


def known(leaf: Any) -> Any:
    """Return an array's values, or a number, in NumPy, if they are known here and now.

    None for tracers and abstract arrays, typed keys, and what other processes hold.
    """
    if isinstance(leaf, bool | int | float | complex):
        return np.asarray(leaf)
    if not is_array(leaf) or isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct):
        return None
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return None
    if isinstance(leaf, jax.Array) and not (
        leaf.is_fully_addressable or leaf.is_fully_replicated
    ):
        return None
    return np.asarray(leaf)


def _fresh_message(count: Slot, new: Sequence[Slot], steps: Any) -> str:
    fields = dict.fromkeys(slot.field for slot in new)
    tails = dict.fromkeys(slot.tail for slot in new)
    told = "not 0" if steps is None else f"{steps:,}"
    adam = ""
    if steps is not None and fields.keys() >= ADAM_FIELDS:
        factor = first_step(steps)
        adam = f"Adam's first step there would be {factor:.1f} times as long as due. "
    return (
        f"fresh moments under an old step count: {count.name!r} is {told}, but "
        f"{', '.join(fields)} of {listing(tails)} start anew. {adam}Give these leaves "
        "a group of their own in partition, whose count starts at zero, or reset the "
        f"whole state: reset={_pattern(count.node)!r}."
    )


def _age_message(count: Slot, other: Sequence[Slot]) -> str:
    tails = dict.fromkeys(slot.tail for slot in other)
    return (
        f"moments of another age than the step count {count.name!r} says: "
        f"{listing(tails)}. Keep these leaves in a group of their own, or reset the "
        f"whole state: reset={_pattern(count.node)!r}."
    )


def first_step(steps: int, *, b1: float = 0.9, b2: float = 0.999) -> float:
    """Return how long Adam's first step from zero moments is at an old step count.

    In due steps: Adam corrects the bias of moments as old as the count, which these are
    not. Under a constant gradient it gets worse before it gets better: from a count of
    1,000 the thirteenth step is 5.2 times as long as due.

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


def _pattern(node: str) -> str:
    return escape(node) if node else "**"
