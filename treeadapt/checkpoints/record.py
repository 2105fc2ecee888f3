"""What is stored: the record of a leaf and of a checkpoint, for all formats.

A checkpoint may come from anyone: counts and sizes are capped before work, its names
are data and never file names, and nothing is unpickled.
Knows no format and no tree.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treeadapt.checkpoints.errors import refuse
from treeadapt.checkpoints.remote import AnyPath
from treeadapt.errors import CheckpointError
from treeadapt.text.names import fold, listing, plural
from treeadapt.text.wording import worded
from treeadapt.trees.describing import describe
from treeadapt.trees.paths import unboxed

MAX_LEAVES = 1_000_000
MAX_RANK = 64
NUMBER = "number"
MARKS_VERSION = 1  # of what is stored next to arrays, and of the text that is hashed

_DTYPE_NAMES = (
    "bool_ int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 "
    "complex64 complex128 bfloat16 float8_e3m4 float8_e4m3 float8_e4m3b11fnuz "
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu "
    "float4_e2m1fn int2 int4 uint2 uint4"
)
_KNOWN = [getattr(jnp, name) for name in _DTYPE_NAMES.split() if hasattr(jnp, name)]

#: Dtypes that a checkpoint may hold, by name. No object, void, string or date.
DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {dtype.name: dtype for dtype in map(np.dtype, _KNOWN)}
)

#: Dtypes that no format here is written with, and what holds their numbers exactly.
#: Orbax 0.11 stores arrays by TensorStore's zarr3 driver, which lacks these.
NOT_WRITTEN = {"uint2": "uint8", "uint4": "uint8", "float8_e4m3": "float16"}

#: Formats of what is in memory: a tree of arrays, and one of shapes.
TREE, SHAPES = "tree", "tree of shapes"


def require_written(name: str, dtype: str) -> None:
    """Raise if no format is written with a dtype.

    Raises:
        CheckpointError: it is so; the message names a dtype that is.
    """
    if wider := NOT_WRITTEN.get(dtype):
        raise CheckpointError(
            f"The leaf {listing([name])} is {dtype}, which neither safetensors nor "
            f'Orbax can write. Save it as {wider}, .astype("{wider}"), and load it '
            f"into a target of {dtype} with cast=True."
        )


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What a checkpoint says of one leaf, without its value.

    Attributes:
        array: shape and dtype in the file.
        kind: what the leaf was, if an array cannot say it: ``NUMBER`` for a Python
            number, or the kind of a typed PRNG key; empty for an array.
        key: where its reader finds it: in safetensors and PyTorch's files what reads
            boxes of it, in ``.npz`` the name of a member, in ``.msgpack`` the array, in
            Orbax the keys of a tree; None in a schema and of what a migration makes; in
            a tree the leaf.
        owner: path of the leaf that this one is tied to and that is stored once; empty
            if it is not tied.
    """

    array: jax.ShapeDtypeStruct
    kind: str = ""
    key: Any = None
    owner: str = ""


@dataclasses.dataclass(frozen=True)
class Stored:
    """What a checkpoint holds, without its values.

    Attributes:
        path: the file or folder, which may be in a remote store.
        table: its leaves, by label path.
        boxed: whether another library may have written boxes as their ``value``.
        format: name of its format.
        version: by path of what is read, what changes when another comes to it.
        hash: that of its leaves when it was written; empty if it does not say.
        doubts: what its marks say and its leaves do not bear out, and what it holds
            that is no leaf.
        decoded: by path of a leaf that was stored as codes and scales, how it was.
        parts: by path of such codes and scales, the leaf that they became.
        optional: paths of scales that a model without a quantised cache lacks.
        plain_float8: paths of floats of 8 bits that have no scale.
        left_out: paths of optional leaves that nothing asked for.
    """

    path: AnyPath
    table: Mapping[str, Leaf]
    boxed: bool = False
    format: str = ""
    version: Mapping[AnyPath, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    hash: str = ""
    doubts: tuple[str, ...] = ()
    decoded: Mapping[str, str] = dataclasses.field(default_factory=dict)
    parts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    optional: frozenset[str] = frozenset()
    plain_float8: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """What messages call it."""
        if self.format in (TREE, SHAPES):
            return "the tree"
        return f"the checkpoint {listing([str(self.path)])}"

    @property
    def is_abstract(self) -> bool:
        """Whether it has no arrays to read."""
        return self.format in ("schema", SHAPES)

    @property
    def leaves(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype by label path."""
        return {path: leaf.array for path, leaf in self.table.items()}

    @property
    def ties(self) -> dict[str, str]:
        """Paths that are another path's leaf, and that path."""
        return {path: leaf.owner for path, leaf in self.table.items() if leaf.owner}

    def require_arrays(self) -> None:
        """Raise if there are no arrays to read.

        Raises:
            CheckpointError: it is a schema, or an abstract tree.
        """
        if not self.is_abstract:
            return
        seen, kind = "The tree has shapes and no arrays. Pass one with arrays", "tree"
        if self.format != SHAPES:
            name, kind = listing([str(self.path)]), "schema"
            seen = f"{name} is a schema and holds no arrays. Name a checkpoint"
        hint = f"; load({kind}) without a target gives abstract leaves"
        raise CheckpointError(f"{seen}{worded(hint, '')}.")

    @property
    def decoded_lines(self) -> list[str]:
        """How many leaves were stored as codes and scales, one line for each form."""
        counts = Counter(self.decoded.values())
        return [f"{plural(n, 'leaf')} decoded: {form}" for form, n in counts.items()]

    @property
    def left_out_text(self) -> str:
        """What is left out because nothing asked for it; empty if nothing is."""
        if not self.left_out:
            return ""
        count = plural(len(self.left_out), "scale")
        names = listing(fold(self.left_out), limit=3)
        return f"{count} of a quantised cache left out of {self.title}: {names}."

    def asked_for(self, is_named: Callable[[str], bool]) -> Stored:
        """Return it without the optional leaves that nothing names.

        Args:
            is_named: whether a row or the target has a path.
        """
        left_out = [x for x in self.table if x in self.optional and not is_named(x)]
        if not left_out:
            return self
        table = {k: v for k, v in self.table.items() if k not in {*left_out}}
        return dataclasses.replace(self, table=table, left_out=tuple(left_out))

    def without_boxes(self, model_paths: Collection[str] = ()) -> Stored:
        """Return it with the paths of the model; see ``unboxed``."""
        if not self.boxed:
            return self
        new = unboxed(self.table, model_paths)
        table = {new[path]: leaf for path, leaf in self.table.items()}
        return dataclasses.replace(self, table=table, boxed=False)


def sound_marks(path: AnyPath, marks: Any) -> dict[str, Any]:
    """Return what a file states next to its arrays, once it has the form of marks.

    Args:
        path: the file, for messages.
        marks: what should be ``{"ties": {path: owner}, "kinds": {path: kind}}``, maybe
            with a ``version`` and a ``hash``. Of another version, no more is read.

    Raises:
        CheckpointError: it has another form.
    """
    if not has_version(marks):
        return {"version": marks["version"], "ties": {}, "kinds": {}}
    for name in ("ties", "kinds"):
        table = marks.get(name) if isinstance(marks, dict) else None
        texts = table.values() if isinstance(table, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            cure = "Save it again, or remove the entry 'treeadapt'."
            refuse(path, f"its metadata for treeadapt has no table of {name}", cure)
    return {**marks}


def has_version(marks: Any) -> bool:
    """Return whether marks are of the version that is read here, as the first were."""
    return not isinstance(marks, dict) or marks.get("version", 1) == MARKS_VERSION


def marked(
    path: AnyPath, table: Mapping[str, Leaf], marks: Mapping[str, Any]
) -> Stored:
    """Return what is stored with the ties and kinds that a file states, where they fit.

    Args:
        path: of the file.
        table: its leaves, without tied ones.
        marks: as ``sound_marks`` returns them.
    """
    marked_table, doubts = dict(table), []
    if not has_version(marks):
        doubts.append(
            f"its marks for treeadapt are of version {marks['version']!r:.20}, and "
            f"this release reads version {MARKS_VERSION}, so ties and Python numbers "
            "in it are not known"
        )
    for tied, owner in marks["ties"].items():
        if tied in table or owner not in table:
            seen = f"{listing([tied])}, too" if owner in table else f"no {owner!r:.60}"
            doubts.append(
                f"it ties {listing([tied])} to {owner!r:.60} but stores {seen}"
            )
        else:
            marked_table[tied] = dataclasses.replace(table[owner], owner=owner)
    for name, kind in marks["kinds"].items():
        leaf = marked_table.get(name)
        if leaf is None:
            problem = f"it says that {listing([name])} is a {kind!r:.60} but lacks it"
            doubts.append(problem)
        elif not _may_be(leaf.array, kind):
            doubts.append(f"{listing([name])} in it is not a {kind!r:.60}")
        else:
            marked_table[name] = dataclasses.replace(leaf, kind=kind)
    text = str(marks.get("hash", ""))
    return Stored(path, marked_table, hash=text, doubts=tuple(doubts))


def _may_be(array: jax.ShapeDtypeStruct, kind: str) -> bool:
    """Return whether an array may store a number, or typed PRNG keys."""
    if kind == NUMBER:
        return not array.shape
    return bool(array.shape) and array.dtype == np.uint32


def abstract(
    path: AnyPath, name: str, shape: Sequence[int], dtype: str
) -> jax.ShapeDtypeStruct:
    """Return shape and dtype that a file states, once they are believable.

    Args:
        path: the file, for messages.
        name: of the leaf, for messages.
        shape: as the file states it.
        dtype: name of a dtype, as the file states it.

    Raises:
        CheckpointError: they are not.
    """
    if not _is_sound(shape):
        refuse(path, f"the leaf {listing([name])} has no sound shape")
    if dtype not in DTYPES:
        refuse(path, f"the leaf {listing([name])} has an unknown dtype, {dtype!r:.60}")
    return jax.ShapeDtypeStruct(shape, DTYPES[dtype])


def require_form(name: str, array: Any) -> None:
    """Raise unless what is written of an array's shape and dtype can be read again.

    Raises:
        CheckpointError: it names the leaf.
    """
    is_known = DTYPES.get(array.dtype.name) == array.dtype
    if not is_known or not _is_sound(array.shape):
        what = describe(array) if is_known else f"of dtype {array.dtype}"
        raise CheckpointError(
            f"The leaf {listing([name])} is {what:.200}, which no checkpoint holds. "
            "Convert it, or leave it out with where=."
        )


def _is_sound(shape: Sequence[int]) -> bool:
    """Return whether there can be an array of a shape."""
    if len(shape) > MAX_RANK or any(type(size) is bool for size in shape):
        return False
    return all(0 <= size < 2**63 for size in shape) and math.prod(shape) < 2**63
