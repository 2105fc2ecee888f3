"""How the leaves of a checkpoint fit those of a target.

Takes metadata and abstract or concrete leaves; gives a ``LoadReport``. Both sides are
records of the same type. Reads no file: ``save_load`` hands over what is in one.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from treeadapt.checkpoints.leaves import stored_form
from treeadapt.checkpoints.record import NUMBER, Leaf, Stored
from treeadapt.text.names import Mismatch, fold, listing, plural, section, size_text
from treeadapt.trees.arrays import is_array, is_number
from treeadapt.trees.casting import converted, is_lost
from treeadapt.trees.describing import describe

_FAMILIES = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


@dataclasses.dataclass(frozen=True, repr=False)
class LoadReport:
    """How a checkpoint and a target fit together.

    Attributes:
        restored: paths of the target that the checkpoint fills.
        kept: paths that keep what the target has: not selected, static leaves, and
            Python numbers that the checkpoint lacks.
        missing: paths of the target that the checkpoint lacks.
        unexpected: paths of the checkpoint that the target lacks.
        misshaped: paths with another shape: what is stored, and what the target has.
        retyped: paths with the same shape and another dtype, or another kind of PRNG
            key, or a number that the target's dtype cannot hold; the same.
        numbers: restored Python numbers whose value changes: what is stored, and what
            the target has.
        extra_bytes: how much more than this process needs ``load`` reads of a remote
            checkpoint, because what it needs is in short ranges; 0 with a migration.
        migration: which of several migrations fits, by its place in the list; None if
            there was no list.
        origin: of which published table its rows are, and which sizes a configuration
            gave; empty for other migrations.
        decoded: by path in the checkpoint, how an array is stored that is read as the
            numbers which its codes and scales mean.
        plain_float8: paths in the checkpoint of floats of 8 bits without scales.
        left_out: scales of a quantised cache that the target lacks.
        miscounted: how the configuration next to it says otherwise how many layers, or
            experts, there are; a published table knows under which keys.
        uncounted: keys that would say so, and that no configuration has.
        random: paths of random state, such as the keys of dropout, that keep what the
            target has, because the checkpoint has none.
        hint: a sentence with the call that loads it, if no leaf fits and one is known.
    """

    restored: tuple[str, ...]
    kept: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    misshaped: Mapping[str, tuple[str, str]]
    retyped: Mapping[str, tuple[str, str]]
    numbers: Mapping[str, tuple[Any, Any]]
    migration: int | None = None
    origin: str = ""
    extra_bytes: int = 0
    decoded: Mapping[str, str] = dataclasses.field(default_factory=dict)
    plain_float8: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    random: tuple[str, ...] = ()
    miscounted: tuple[str, ...] = ()
    uncounted: tuple[str, ...] = ()
    hint: str = ""

    @property
    def fits(self) -> bool:
        """Whether nothing is missing, unexpected, misshaped, retyped or miscounted."""
        return not (self._mismatch or self.miscounted)

    @property
    def _mismatch(self) -> Mismatch:
        pairs = {**self.misshaped, **self.retyped}
        misfits = {path: _difference(*pair) for path, pair in pairs.items()}
        return Mismatch(self.missing, self.unexpected, misfits)

    @property
    def misfits(self) -> list[str]:
        """Paths of all leaves that do not fit."""
        return self._mismatch.paths

    @property
    def misfit_lines(self) -> list[str]:
        """How the two do not fit, as lines; none if they do."""
        text = self._mismatch.text("leaf", "stored is") if self._mismatch else ""
        return [*text.splitlines(), *(f"By config.json {x}." for x in self.miscounted)]

    def __repr__(self) -> str:
        count = len(self.restored)
        lines = [f"{plural(count, 'leaf')} {'fits' if count == 1 else 'fit'}."]
        if self.kept:
            lines.append(f"{plural(len(self.kept), 'leaf')} kept from the target.")
        if self.random:
            names = listing(self.random, limit=4)
            lines.append(
                f"No random state in the checkpoint; the target keeps {names}."
            )
        lines += self.misfit_lines
        rows = [
            f"{listing([path])}: {_difference(*pair)}"
            for path, pair in self.numbers.items()
        ]
        lines += section(f"{plural(len(rows), 'number')} changed:", rows)
        if self.migration is not None:
            lines.append(f"This is by migration[{self.migration}], which alone fits.")
        if self.uncounted:
            names = listing(self.uncounted, write=str)
            lines.append(f"No configuration says {names}, which is not compared.")
        if self.origin:
            lines.append(f"The rows are {self.origin}.")
        kinds = Counter(self.decoded.values())
        lines += [f"{plural(n, 'leaf')} decoded: {kind}." for kind, n in kinds.items()]
        for paths, what in (
            (self.plain_float8, "float8 without scales"),
            (self.left_out, "left out, of a quantised cache"),
        ):
            if paths:
                lines.append(
                    f"{plural(len(paths), 'leaf')} {what}: {listing(fold(paths))}."
                )
        if self.extra_bytes:
            size = size_text(self.extra_bytes)
            lines.append(f"{size} between short ranges are read.")
        if self.hint:
            lines.append(self.hint)
        return "\n".join(lines)


def _difference(there: Any, wanted: Any) -> str:
    return f"{there}, the target has {wanted}"


def compare_with_target(
    target: Mapping[str, Any],
    chosen: Iterable[bool],
    stored: Stored,
    unexpected: Iterable[str],
    read: Callable[[Mapping[str, Any]], Iterable[tuple[str, Any]]] | None,
    *,
    cast: bool,
) -> LoadReport:
    """Compare metadata with a target.

    Args:
        target: the target's leaves, by path.
        chosen: for each leaf, whether it is to be loaded.
        stored: what the checkpoint holds.
        unexpected: paths of the checkpoint that are to be loaded and have no target.
        read: reads leaves; only 0-d ones are asked for, whose values matter. None to
            go by their kind.
        cast: whether other dtypes fit.
    """
    paths = itertools.compress(target, chosen)
    forms = {path: stored_form(target[path]) for path in paths}
    pairs = {
        path: (stored.table[path], form)
        for path, form in forms.items()
        if path in stored.table
    }
    scalars = dict.fromkeys(path for path, pair in pairs.items() if by_value(*pair))
    pairs_read = read(scalars) if read else ()
    values = {path: np.asarray(array).item() for path, array in pairs_read}
    restored: list[str] = []
    kept: list[str] = []
    missing: list[str] = []
    misfits: dict[str, dict[str, Any]] = {"misshaped": {}, "retyped": {}}
    numbers = {}
    for path, leaf in target.items():
        if path not in pairs:
            is_kept = path not in forms or not is_array(leaf)
            (kept if is_kept else missing).append(path)
            continue
        (there, form), value = pairs[path], values.get(path)
        problem = misfit(there, form, value, cast=cast)
        if problem:
            misfits[problem][path] = (_described(there, value), describe(leaf))
            continue
        restored.append(path)
        is_known = value is not None and is_number(leaf)
        if is_known and repr(type(leaf)(value)) != repr(leaf):
            numbers[path] = (value, leaf)
    return LoadReport(
        tuple(restored),
        tuple(kept),
        tuple(missing),
        tuple(unexpected),
        misfits["misshaped"],
        misfits["retyped"],
        numbers,
    )


def misfit(there: Leaf, form: Leaf | None, value: Any, *, cast: bool) -> str:
    """Return how what is stored does not fit a leaf of a target; empty if it does.

    Args:
        there: what is stored.
        form: the leaf of the target; None if it is not data.
        value: of what is stored, if that matters and is known.
        cast: whether other dtypes fit.
    """
    if form is not None and form.array.shape != there.array.shape:
        return "misshaped"
    is_taken = form is not None and _takes(form, there, value, cast=cast)
    return "" if is_taken else "retyped"


def by_value(there: Leaf, form: Leaf | None) -> bool:
    """Return whether what fits depends on the value, as it does with numbers."""
    if form is None or there.array.shape or form.array.shape:
        return False
    return NUMBER in (there.kind, form.kind)


def _takes(form: Leaf, there: Leaf, value: Any, *, cast: bool) -> bool:
    """Return whether a leaf of the target takes what is stored, of its shape."""
    wanted, dtype = form.array.dtype, there.array.dtype
    is_wider = cast and 0 <= _family(dtype) <= _family(wanted)  # never 1.5 to 1
    if value is None and NUMBER in (form.kind, there.kind):
        return is_wider or _family(wanted) == _family(dtype)
    if value is None and (form.kind or there.kind):
        # What other libraries store as integers says nothing about a kind.
        return form.kind != "" and there.kind in ("", form.kind) and wanted == dtype
    if value is None:
        return is_wider or wanted == dtype
    if not is_wider and _family(wanted) != _family(dtype):
        return False
    if form.kind == NUMBER and _family(wanted) == _family(dtype):
        return True  # Python's own hold more than files do
    array = np.asarray(value)
    with np.errstate(all="ignore"):
        cast_array = converted(array, wanted)
    if is_wider and _family(wanted) > 1:
        return not is_lost(array, cast_array)  # it may be rounded
    return bool(np.array_equal(cast_array.item(), value, equal_nan=_family(wanted) > 1))


def _family(dtype: Any) -> int:
    return next((n for n, f in enumerate(_FAMILIES) if jnp.issubdtype(dtype, f)), -1)


def _described(leaf: Leaf, value: Any = None) -> str:
    text = f"a {leaf.kind} key" if leaf.kind else describe(leaf.array)
    if leaf.kind == NUMBER:
        text = f"a number, {describe(leaf.array)}"
    return text if value is None else f"{text} {value}"
