"""A checkpoint as what it means: one leaf in the place of the parts of each array.

Takes what a file holds, what its configuration states, and the leaves of a target;
gives the same with decoded arrays. A part that is left over is an error that names it,
because an array without its scale is another one. Reads no array but the small parts
that say a shape, an order or a table of numbers. See ``quantized_forms`` for parts.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np

from treeadapt.checkpoints.decoded_array import DecodedArray
from treeadapt.checkpoints.errors import refuse
from treeadapt.checkpoints.quantization_config import Stated, raw_advice
from treeadapt.checkpoints.quantized_forms import FLOAT8, FORMS, Form, Parts
from treeadapt.checkpoints.reading import read_ahead, read_arrays
from treeadapt.checkpoints.record import Leaf, Stored
from treeadapt.checkpoints.shard_index import in_other_shard
from treeadapt.text.names import listing

MAX_SMALL_BYTES = 2**26  # of all parts whose values are read to know the others
_INTEGERS = ("int8", "uint8", "int32")
#: Of activations, next to a weight: they go with it.
_ACTIVATIONS = (
    *("input_scale", "activation_scale", "input_global_scale", "input_zero_point"),
    "input_scale_ub",
)
#: Of a cache of keys and values: a model that does not quantise its cache has none.
_OF_CACHE = re.compile(r"(k|v|q|kv|prob|output)_scale|(k|v|q|output)_zero_point")
#: What is next to codes and may be a scale of a form that is not read.
_SCALE = re.compile(r".*(scale|zero_?point|absmax|g_idx).*", re.IGNORECASE | re.DOTALL)


def _part_names() -> re.Pattern[str]:
    """Return what the names of parts look like, but for those of plain codes."""
    endings = {ending for form in FORMS for ending in form.endings} - {"", "weight"}
    of_arrays = [re.escape(each) for each in endings if each[0] in "_."]
    of_modules = [re.escape(each) for each in endings if each[0] not in "_."]
    after = f".*(?:weight|_proj)(?:{'|'.join(sorted(of_arrays))})"
    alone = f"(?:.*[./])?(?:{'|'.join(sorted(of_modules))})" if of_modules else after
    return re.compile(f"{after}|{alone}|.*_scale_inv", re.DOTALL)


_PART = _part_names()


class _Candidate(NamedTuple):
    """Leaves that may be the parts of one array.

    Attributes:
        form: how it is stored.
        root: how all names begin.
        leaves: by the endings of their names.
    """

    form: Form
    root: str
    leaves: Mapping[str, Leaf]

    @property
    def codes(self) -> str:
        """Path of the codes."""
        return self.root + self.form.ending

    @property
    def path(self) -> str:
        """Path of the array."""
        return self.root + self.form.ending_decoded

    @property
    def parts(self) -> list[str]:
        """Paths of all parts."""
        return [self.root + ending for ending in self.leaves]


def may_be_quantized(stored: Stored) -> bool:
    """Return whether dtypes or names of leaves can be those of codes and scales."""
    codes = {*FLOAT8, *_INTEGERS}
    return any(
        (leaf.array.dtype.name in codes and leaf.array.shape) or _PART.fullmatch(path)
        for path, leaf in stored.table.items()
    )


def decoded(stored: Stored, stated: Stated, likes: Mapping[str, Any]) -> Stored:
    """Return what is stored with decoded arrays in the place of their parts.

    Args:
        stored: what a file holds.
        stated: what its configuration states.
        likes: leaves of a target by path. Where it has all parts of an array as they
            are stored, they stay.

    Raises:
        CheckpointError: parts are missing, contradict each other, or are of a method
            that is not read.
    """
    stated.require_known()
    candidates = [*_candidates(stored.table, stated)]
    as_stored = {
        path for each in candidates if _are_like(each, likes) for path in each.parts
    }
    candidates = [each for each in candidates if each.codes not in as_stored]
    small = _small_parts(stored, candidates)
    made: dict[str, tuple[_Candidate, DecodedArray]] = {}
    parts: dict[str, str] = {}
    forms: dict[str, str] = {}
    for each in candidates:
        of_array = Parts(each.form, each.root, each.leaves, small, stated)
        array, forms[each.path] = each.form.build(of_array)
        made[each.codes] = each, array
        activations = _activations(each.codes)
        names = [*each.parts, *(x for x in activations if x in stored.table)]
        parts |= dict.fromkeys(names, each.path)
    left = {
        path: leaf
        for path, leaf in stored.table.items()
        if path not in parts and path not in as_stored
    }
    optional = _require_none_left(stored, stated, left, parts)
    plain = [path for path, x in left.items() if x.array.dtype.name in FLOAT8]
    table = _with_arrays(stored, made, parts)
    return dataclasses.replace(
        stored,
        table=table,
        hash="" if made else stored.hash,
        decoded=forms,
        parts=parts,
        optional=frozenset(optional),
        plain_float8=tuple(plain),
    )


def _candidates(table: Mapping[str, Leaf], stated: Stated) -> Iterator[_Candidate]:
    """Yield what may be an array, each leaf in one of them."""
    taken: set[str] = set()
    for path, leaf in table.items():
        for form in FORMS:
            root = path.removesuffix(form.ending)
            is_codes = path.endswith(form.ending) and path not in taken
            if not is_codes or leaf.array.dtype.name not in form.dtypes:
                continue
            leaves = {x: table[root + x] for x in form.endings if root + x in table}
            is_shown = form.is_evident or stated.fields
            if is_shown and all(ending in leaves for ending in form.needs):
                yield _Candidate(form, root, leaves)
                taken |= {root + ending for ending in leaves}
                break


def _are_like(candidate: _Candidate, likes: Mapping[str, Any]) -> bool:
    """Return whether a target has all parts with the shapes that are stored."""
    shapes = (getattr(likes.get(path), "shape", None) for path in candidate.parts)
    stored = (leaf.array.shape for leaf in candidate.leaves.values())
    return all(a == tuple(b) for a, b in zip(shapes, stored, strict=True))


def _activations(codes: str) -> list[str]:
    """Return what scales of activations next to codes may be called."""
    return [_above(codes) + name for name in _ACTIVATIONS]


def _above(path: str) -> str:
    """Return the start of a path, with the separator before its last part."""
    return path[: max(path.rfind("."), path.rfind("/")) + 1]


def _small_parts(stored: Stored, candidates: Iterable[_Candidate]) -> dict[str, Any]:
    """Read the parts whose values are needed to know what is meant."""
    paths = [
        each.root + ending
        for each in candidates
        for ending in each.form.reads
        if ending in each.leaves
    ]
    arrays = [stored.table[path].array for path in paths]
    sizes = [math.prod(each.shape) * each.dtype.itemsize for each in arrays]
    if sum(sizes) > MAX_SMALL_BYTES:
        largest = paths[int(np.argmax(sizes))]
        problem = f"what says shapes and orders, {listing([largest])} above all, has"
        refuse(
            stored.path,
            f"{problem} more than {MAX_SMALL_BYTES >> 20} MiB",
            raw_advice(),
        )
    read = read_ahead(stored, read_arrays(stored, dict.fromkeys(paths)))
    return {path: np.asarray(array) for path, array in read}


def _with_arrays(
    stored: Stored,
    made: Mapping[str, tuple[_Candidate, DecodedArray]],
    parts: Mapping[str, str],
) -> dict[str, Leaf]:
    """Return the leaves, with each array in the place of its codes."""
    table: dict[str, Leaf] = {}
    by_parts = {frozenset(each.parts): each.path for each, _ in made.values()}
    for path, leaf in stored.table.items():
        if path not in made:
            if path not in parts:
                table[path] = leaf
            continue
        candidate, array = made[path]
        new = candidate.path
        if new in table or (new in stored.table and parts.get(new) != new):
            problem = f"{listing([new])} is stored twice, in codes and as it is"
            refuse(stored.path, problem, raw_advice())
        owners = frozenset(part.owner for part in candidate.leaves.values())
        spec = jax.ShapeDtypeStruct(array.shape, array.dtype)
        table[new] = Leaf(spec, key=array, owner=by_parts.get(owners, ""))
    return table


def _require_none_left(
    stored: Stored,
    stated: Stated,
    left: Mapping[str, Leaf],
    parts: Mapping[str, str],
) -> list[str]:
    """Return leaves that a model may lack, of the cache.

    Raises:
        CheckpointError: one that is left is a part of an array, or is codes.
    """
    is_quantized = bool(stated.fields or parts)
    codes = {
        path
        for path, leaf in left.items()
        if leaf.array.dtype.name in FLOAT8 and leaf.array.shape
    }
    next_to = {_above(path): path for path in (*codes, *parts.values())}
    next_to.pop("", None)
    optional = []
    for path, leaf in left.items():
        dtype, above = leaf.array.dtype.name, _above(path)
        last = path[len(above) :]
        is_lost = path in codes or (
            stated.fields and dtype in _INTEGERS and last.endswith("weight")
        )
        if is_lost and (is_quantized or _shard_of_parts(stored, path)):
            _refuse_left(stored, path, f"is {dtype}, and no scale of it is there")
        elif is_quantized and _OF_CACHE.fullmatch(last):
            optional.append(path)
        elif (is_quantized and _PART.fullmatch(path)) or last.endswith("_scale_inv"):
            problem = "is a part of a quantised array, whose other parts are not there"
            _refuse_left(stored, path, problem)
        elif above in next_to and _is_scale(stored, path, last):
            problem = f"is next to {listing([next_to[above]])}, and belongs to no form"
            _refuse_left(stored, path, f"{problem} that is read")
    return optional


def _is_scale(stored: Stored, path: str, last: str) -> bool:
    """Return whether a leaf may be a scale of what is next to it."""
    array, _, _ = path.rpartition("_scale")
    other = stored.table.get(array)
    is_of_other = other is not None and other.array.dtype.name not in FLOAT8
    dtype = stored.table[path].array.dtype.name
    return bool(_SCALE.fullmatch(last)) and not is_of_other and dtype not in FLOAT8


def _refuse_left(stored: Stored, path: str, problem: str) -> NoReturn:
    """Raise because of a part that is left, and say where the others are."""
    cure = raw_advice()
    if there := _shard_of_parts(stored, path):
        part, shard = there
        problem += f": {listing([part])} is in {listing([shard])}, as the index says"
        folder = listing([str(stored.path.parent)])
        cure = f"Read the whole folder, {folder}. {cure}"
    refuse(stored.path, f"{listing([path])} {problem}", cure)


def _shard_of_parts(stored: Stored, path: str) -> tuple[str, str] | None:
    """Return another part of the same array in another shard, and that shard."""
    names = [
        path.removesuffix(ending) + other
        for form in FORMS
        for ending in form.endings
        if path.endswith(ending)
        for other in (form.ending, *form.needs)
    ]
    others = [name for name in names if name not in stored.table]
    return in_other_shard(stored.path, others)
