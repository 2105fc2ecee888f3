"""What all checkpoint formats share: the record of a leaf, dtypes, caps, errors.

A checkpoint may come from anyone: counts and sizes are capped before work, its names
are data and never file names, nothing is unpickled, and whatever a reader raises
becomes a short ``CheckpointError`` that names the file.
Knows no format and no tree.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from treeadapt.convert import describe
from treeadapt.data_files import one_line
from treeadapt.errors import CheckpointError, PathCollisionError, TreeAdaptError
from treeadapt.names import listing
from treeadapt.paths import unboxed

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


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What a checkpoint says of one leaf, without its value.

    Attributes:
        array: shape and dtype in the file.
        kind: what the leaf was, if an array cannot say it: ``NUMBER`` for a Python
            number, or the kind of a typed PRNG key; empty for an array.
        key: what the format needs to find the leaf.
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
        path: the file or folder.
        table: its leaves, by label path.
        boxed: whether another library may have written boxes as their ``value``.
        format: name of its format.
        version: by path of what is read, what changes when another comes to it.
        hash: that of its leaves when it was written; empty if it does not say.
        doubts: what its marks say and its leaves do not bear out, and what it holds
            that is no leaf.
    """

    path: Path
    table: Mapping[str, Leaf]
    boxed: bool = False
    format: str = ""
    version: Mapping[Path, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    hash: str = ""
    doubts: tuple[str, ...] = ()

    @property
    def leaves(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype by label path."""
        return {path: leaf.array for path, leaf in self.table.items()}

    @property
    def ties(self) -> dict[str, str]:
        """Paths that are another path's leaf, and that path."""
        return {path: leaf.owner for path, leaf in self.table.items() if leaf.owner}

    def without_boxes(self, model_paths: Collection[str] = ()) -> Stored:
        """Return it with the paths of the model; see ``unboxed``."""
        if not self.boxed:
            return self
        new = unboxed(self.table, model_paths)
        table = {new[path]: leaf for path, leaf in self.table.items()}
        return dataclasses.replace(self, table=table, boxed=False)


def sound_marks(path: Path, marks: Any) -> dict[str, Any]:
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
    is_other = isinstance(marks, dict) and marks.get("version", 1) != MARKS_VERSION
    return not is_other


def marked(path: Path, table: Mapping[str, Leaf], marks: Mapping[str, Any]) -> Stored:
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
    for other, one in marks["ties"].items():
        if other in table or one not in table:
            seen = f"{listing([other])}, too" if one in table else f"no {one!r:.60}"
            doubts.append(
                f"it ties {listing([other])} to {one!r:.60} but stores {seen}"
            )
        else:
            marked_table[other] = dataclasses.replace(table[one], owner=one)
    for one, kind in marks["kinds"].items():
        leaf, name = marked_table.get(one), listing([one])
        if leaf is None:
            doubts.append(f"it says that {name} is a {kind!r:.60} but lacks it")
        elif not _may_be(leaf.array, kind):
            doubts.append(f"{name} in it is not a {kind!r:.60}")
        else:
            marked_table[one] = dataclasses.replace(leaf, kind=kind)
    text = str(marks.get("hash", ""))
    return Stored(path, marked_table, hash=text, doubts=tuple(doubts))


def _may_be(array: jax.ShapeDtypeStruct, kind: str) -> bool:
    """Return whether an array may store a number, or typed PRNG keys."""
    if kind == NUMBER:
        return not array.shape
    return bool(array.shape) and array.dtype == np.uint32


def abstract(
    path: Path, name: str, shape: Sequence[int], dtype: str
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
    is_small = len(shape) <= MAX_RANK and all(0 <= size < 2**63 for size in shape)
    return is_small and math.prod(shape) < 2**63


# What to do with files that torch.save wrote.
UNPICKLED = (
    "A pickle of PyTorch can run code; there, save_pretrained, or "
    "safetensors.torch.save_model, writes .safetensors."
)


def refuse(path: str | os.PathLike[str], problem: str, cure: str = "") -> NoReturn:
    """Raise because of what a checkpoint is.

    Raises:
        CheckpointError: always.
    """
    name = listing([os.fspath(path)])
    raise CheckpointError(
        f"The checkpoint {name} is unusable: {problem}. {cure}".strip()
    )


@contextlib.contextmanager
def reported(path: str | os.PathLike[str], action: str) -> Iterator[None]:
    """Turn whatever another library raises inside into one short error.

    Args:
        path: the checkpoint.
        action: ``"read"`` or ``"written"``.

    Raises:
        CheckpointError: instead of any other exception.
    """
    try:
        yield
    except TreeAdaptError:
        raise
    except Exception as error:
        # Parsers of damaged files raise what they like, down to KeyError.
        text = one_line(error)
        problem = f": {type(error).__name__}{': ' * bool(text)}{text}"
        reason = _system_reason(str(error))
        if reason not in text:  # it is in the middle, which was cut out
            problem = f": {reason}."
        if isinstance(error, ImportError):
            install = 'pip install "treeadapt[checkpoints,flax]"'
            problem = f" without {error.name}: {install}."
        raise CheckpointError(
            f"The checkpoint {listing([os.fspath(path)])} cannot be {action}{problem}"
        ) from error


def _system_reason(text: str) -> str:
    """Return the words of the system in a message, such as those of a full disk."""
    reasons = (os.strerror(number) for number in errno.errorcode)
    return next((reason for reason in reasons if reason in text), "")


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested dicts that hold the leaves, one level a segment of their paths.

    Raises:
        PathCollisionError: one leaf is above another.

    Example:
        >>> nested({"a/b": 1, "a/c": 2})
        {'a': {'b': 1, 'c': 2}}
    """
    top: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = path.split("/")
        node = top
        paths = itertools.accumulate(parents, "{}/{}".format)
        for above, segment in zip(paths, parents, strict=True):
            if above in leaves:
                raise PathCollisionError(
                    f"Nested dicts cannot hold {listing([above])} next to "
                    f"{listing([path])}. Pass a target or choose leaves with where=; "
                    "treeadapt.read_metadata lists the paths."
                )
            node = node.setdefault(segment, {})
        node[last] = leaf
    return top


def as_tree(leaves: Mapping[str, Any]) -> Any:
    """Return nested dicts, whose siblings patterns can count, or the flat dict.

    Example:
        >>> as_tree({"a/b": 1}), as_tree({"a": 1, "a/b": 2})
        ({'a': {'b': 1}}, {'a': 1, 'a/b': 2})
    """
    try:
        return nested(leaves)
    except PathCollisionError:
        return dict(leaves)
