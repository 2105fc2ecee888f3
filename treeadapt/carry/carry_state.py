"""``carry_state``: an optimizer state for today's params, filled from an earlier one.

The new state is that of ``tx.init(params)``; each of its leaves that has a counterpart
in the earlier state, of the same shape and dtype, is taken from there. The report says
of every leaf what became of it, and warns where what was carried does not go together.
Which names belong together is up to ``matching``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treeadapt.arrays import is_array
from treeadapt.carry.matching import learn_links, match_copies, match_rest
from treeadapt.carry.optax_fields import SCALE_FIELDS, STORED_FIELDS
from treeadapt.carry.report import (
    Carried,
    CarryReport,
    known,
    number,
    warnings_of,
)
from treeadapt.carry.slots import Slot, below, cut_names, find_slots, init_of_arrays
from treeadapt.convert import describe
from treeadapt.paths import SEPARATOR, unboxed
from treeadapt.selection.selectors import select
from treeadapt.transforms.adapt import with_extra_args
from treeadapt.transforms.flat import first_half, trained
from treeadapt.trees.views import TreeView, view_tree

__all__ = ["CarryReport", "carry_state"]


def carry_state(
    tx: Any, params: Any, saved: Any, *, reset: Any = None
) -> tuple[Any, CarryReport]:
    """Return a state for ``tx`` and ``params``, filled from any earlier state.

    For what changes between two runs: which leaves are frozen, how they are grouped,
    what is wrapped around the optimizer, the classes of the model, plain Optax before
    and ``adapt`` now. Moments are matched by field and parameter path. Every other
    leaf (step counts, hyperparameters) follows the moments beside it: a group that took
    leaves from an earlier group continues that group's count, and one that took none
    starts at zero. Where the leaves of one group come from several with other counts,
    its own earlier count stays, or else the smallest is taken, which makes steps
    shorter, never longer.

    A warning says where moments come from an optimizer of another kind. Optax gives
    the states of some optimizers one class and the same fields (``adam``, ``adamax``
    and ``adopt``; ``sgd`` with momentum and ``lars``): change between these with
    ``reset="**"``.

    Args:
        tx: the transformation as it is now: made by ``adapt``, ``partition`` or
            ``freeze``, or of plain Optax.
        params: the params as they are now, as ``tx.init`` takes them. If they are
            abstract, leaves that are not carried are too.
        saved: the earlier state; or its flat dict; or what a checkpoint library made
            of it, whatever its containers, and with or without ``/value`` below each
            ``nnx.Variable`` or other box. A checkpoint that holds more will do, as
            long as no second state in it fits as well.
        reset: selector of leaves of the new state that are not carried, by their label
            path: ``"inner_states/head"`` resets one group with its count,
            ``"**/hyperparams"`` takes hyperparameters from ``tx``.

    Returns:
        The state, with the structure of ``tx.init(params)``, and the report. Leaves
        that were carried are the saved objects, where they are; one that is carried
        twice (the count of a group that was divided) is copied.

    Raises:
        UnusedRuleError: a pattern in ``reset`` hits no array of the new state.
        PathCollisionError: two leaves of a state have the same path.
        TransformError: ``tx`` is not a transformation.

    Example:
        >>> from treeadapt.transforms.partition import partition
        >>> params = {"head": jnp.ones(2), "trunk": jnp.ones(3)}
        >>> rules = {"head": "a", "**": "frozen"}
        >>> state = partition({"a": optax.adam(1e-3)}, rules).init(params)
        >>> thawed = partition({"a": optax.adam(1e-3)}, {"**": "a"})
        >>> state, report = carry_state(thawed, params, state)
        >>> print(report)
        carried 3 of 5 leaves of the new state
        fresh, nothing saved fits (2): 'inner_states/a/0/mu/trunk', ...
    """
    own = _view_init(with_extra_args(tx), params)
    paths = tuple(trained(view_tree(first_half(params))))
    slots = find_slots(tx, own, params)
    assert slots is not None  # since the params are known
    old = view_tree(saved)
    asked = [False] * len(slots) if reset is None else select(own, reset)
    copies = [slot for slot in slots if slot.prefix is not None]
    tails = frozenset((*paths, *(slot.tail for slot in copies)))
    leaves = _without_boxes(old.flat(), own.plan.paths, paths)
    work = _Work(
        slots=slots,
        specs=own.flat(),
        old=leaves,
        cuts=cut_names(leaves, {slot.field for slot in copies}, tails.__contains__),
        reset=frozenset(own.plan.paths[i] for i, yes in enumerate(asked) if yes),
        copies=copies,
    )
    work.take_copies()
    work.take_rest()
    plans, starts = (own.plan, old.plan), _least_starts(tx, params, work)
    report = work.report(warnings_of(work, plans, starts, num_params=len(paths)))
    return own.rebuild(_filled(own, work, tx, params)), report


@dataclasses.dataclass(kw_only=True)
class _Work(Carried):
    """One carrying over, while it goes on.

    Attributes:
        copies: leaves of the new state that stand in copies of the params.
        misshaped: what does not fit, by name.
        ambiguous: candidates by name.
    """

    copies: Sequence[Slot]
    misshaped: dict[str, str] = dataclasses.field(default_factory=dict)
    ambiguous: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def take_copies(self) -> None:
        """Carry the leaves of copies of the params."""
        wanted = (slot for slot in self.copies if slot.name not in self.reset)
        found, self.ambiguous = match_copies(wanted, self.cuts)
        for name, source in found.items():
            self._take(name, source)

    def take_rest(self) -> None:
        """Carry all other leaves, after the copies."""
        links = learn_links(self.copies, self.sources, self.cuts)
        found, ambiguous = match_rest(self.slots, self.old, self.cuts, links)
        passed = self.reset | self._stale_values()
        for name, sources in ambiguous.items():
            if name not in passed:
                self.ambiguous[name] = sources
        for name, sources in found.items():
            if name in passed:
                continue
            source = self._choose(sources)
            if source is None:
                self.ambiguous[name] = sources
            else:
                self._take(name, source)

    def _take(self, name: str, source: str) -> None:
        misfit = _misfit(self.specs[name], self.old[source])
        if misfit:
            self.misshaped[name] = f"{misfit} (saved as {source!r})"
        else:
            self.sources[name] = source

    def _choose(self, sources: Sequence[str]) -> str | None:
        """Choose among saved leaves: all one value, or the smallest count."""
        leaves = [self.old[source] for source in sources]
        if all(_same(leaves[0], leaf) for leaf in leaves[1:]):
            return sources[0]
        counts = [number(leaf) for leaf in leaves]
        if not all(type(count) is int for count in counts):
            return None
        return sources[counts.index(min(counts))]

    def _stale_values(self) -> frozenset[str]:
        """Return stored values of line searches whose stored gradient is not whole.

        ``value_and_grad_from_state`` takes a finite value to say that it is.
        """
        value, grad = STORED_FIELDS
        return frozenset(
            below(slot.node, value)
            for slot in self.copies
            if slot.field == grad and slot.name not in self.sources
        )

    def report(self, warnings: tuple[str, ...]) -> CarryReport:
        """Say what became of every leaf."""
        names = [slot.name for slot in self.slots]
        used = frozenset(self.sources.values())
        explained = {*self.sources, *self.misshaped, *self.ambiguous, *self.reset}
        return CarryReport(
            carried={n: self.sources[n] for n in names if n in self.sources},
            fresh=tuple(n for n in names if n not in explained),
            reset=tuple(n for n in names if n in self.reset),
            misshaped=self.misshaped,
            ambiguous=self.ambiguous,
            left_over=tuple(n for n in self.old if n not in used),
            warnings=warnings,
        )


def _without_boxes(
    old: Mapping[str, Any], names: Sequence[str], paths: Sequence[str]
) -> dict[str, Any]:
    """Name saved leaves without the ``value`` of boxes; see ``unboxed``."""
    known = frozenset((*names, *paths))

    def is_known(name: str) -> bool:
        return any(name[place:] in known for place in (0, *_starts(name)))

    stored = (*old, *(name.removesuffix("/value") for name in old))
    new = unboxed(old, [name for name in stored if is_known(name)])
    return {new[name]: leaf for name, leaf in old.items()}


def _starts(name: str) -> list[int]:
    return [place + 1 for place, letter in enumerate(name) if letter == SEPARATOR]


def _view_init(tx: Any, params: Any) -> TreeView:
    """View the state that ``tx`` would make, without making it if possible."""
    try:
        if _is_abstract(view_tree(params)):
            return view_tree(jax.eval_shape(*init_of_arrays(tx, params)))
        return view_tree(jax.eval_shape(lambda: tx.init(params)))
    except TypeError:  # a mask that reads values, a state that holds no arrays
        return view_tree(tx.init(params))


def _least_starts(tx: Any, params: Any, work: _Work) -> dict[str, Any]:
    """Return the least value in some accumulators that were carried, as ``tx`` starts.

    One leaf of each field; none if the params have no values here and now.
    """
    chosen: dict[tuple[str, str], str] = {}
    for slot in work.copies:
        if slot.field in SCALE_FIELDS and slot.name in work.sources:
            chosen.setdefault((slot.node, slot.field), slot.name)
    if not chosen or _is_abstract(view_tree(params)):
        return {}
    init, arrays = init_of_arrays(tx, params)

    def least(arrays: Sequence[Any]) -> dict[str, Any]:
        state = view_tree(init(arrays)).flat()
        return {n: jnp.min(state[n]) for n in chosen.values() if state[n].size}

    try:
        return jax.jit(least)(arrays)
    except TypeError:  # a mask that reads values
        return {}


def _filled(own: TreeView, work: _Work, tx: Any, params: Any) -> list[Any]:
    """Return the leaves of the new state."""
    leaves = own.leaves
    concrete = not _is_abstract(view_tree(params))
    if concrete and len(work.sources) < len(leaves):
        leaves = view_tree(tx.init(params)).leaves
    filled = []
    taken: set[str] = set()
    for name, leaf in zip(own.plan.paths, leaves, strict=True):
        source = work.sources.get(name)
        if source is None:
            filled.append(leaf)
            continue
        filled.append(_carried(work.old[source], leaf, again=source in taken))
        taken.add(source)
    return filled


def _carried(old: Any, spec: Any, *, again: bool) -> Any:
    if is_array(spec) and not is_array(old):
        return jnp.asarray(old, spec.dtype)
    # One array in two places could not be donated.
    return jnp.array(old, copy=True) if again and isinstance(old, jax.Array) else old


def _misfit(spec: Any, old: Any) -> str | None:
    """Say why a saved leaf cannot stand in the new state; None if it can."""
    if not is_array(spec):
        fits = type(old) is type(spec)
    elif not is_array(old):
        fits = spec.shape == () and _is_number_for(spec.dtype, old)
    else:
        fits = old.shape == spec.shape and old.dtype == spec.dtype
    return None if fits else f"{describe(spec)}, but the saved one is {describe(old)}"


def _is_number_for(dtype: Any, old: Any) -> bool:
    """Tell whether a Python number (from JSON, say) can be an array of this dtype."""
    if isinstance(old, float):
        return bool(jnp.issubdtype(dtype, jnp.inexact))
    return isinstance(old, int) and bool(jnp.issubdtype(dtype, jnp.number))


def _same(one: Any, two: Any) -> bool:
    if one is two:
        return True
    values = known(one), known(two)
    return all(v is not None for v in values) and np.array_equal(*values)


def _is_abstract(view: TreeView) -> bool:
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in view.leaves)
