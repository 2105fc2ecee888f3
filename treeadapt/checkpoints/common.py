"""What all checkpoint formats share: dtypes, caps, errors, safe names.

A checkpoint may come from anyone: counts and sizes are capped before work, its names
are data and never file names, nothing is unpickled, and whatever a reader raises
becomes a short ``CheckpointError`` that names the file.
Knows no format and no tree.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn
from urllib.parse import quote, unquote

import jax
import jax.numpy as jnp
import numpy as np

from treeadapt.errors import CheckpointError, PathCollisionError, TreeAdaptError
from treeadapt.names import listing
from treeadapt.paths import unboxed

MAX_LEAVES = 1_000_000
MAX_RANK = 64
NUMBER = "number"
_NUMBERS = ("bool", "int64", "float64", "complex128")
_EMPTY = "%E"  # an empty segment; no quoted text has it

_EXTENDED = (
    "bfloat16 float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn "
    "float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn "
    "int2 int4 uint2 uint4"
)
_PLAIN = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 "
    "complex64 complex128"
)


def _dtypes() -> dict[str, np.dtype[Any]]:
    extended = (getattr(jnp, name, None) for name in _EXTENDED.split())
    known = [np.dtype(kind) for kind in extended if kind is not None]
    return {dtype.name: dtype for dtype in [*known, *map(np.dtype, _PLAIN.split())]}


#: Dtypes that a checkpoint may hold, by name. No object, void, string or date.
DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(_dtypes())


@dataclasses.dataclass(frozen=True)
class Stored:
    """What a checkpoint holds, without its values.

    Attributes:
        leaves: shape and dtype by label path.
        names: what the format calls each leaf.
        ties: paths that are another path's leaf, which is stored once.
        kinds: what leaves were that no array can say: ``NUMBER`` for a Python number,
            or the kind of a typed PRNG key.
        version: changes when another checkpoint comes to this path.
        boxed: whether another library may have written boxes as their ``value``.
        path: the file or folder.
        format: its format.
    """

    leaves: Mapping[str, jax.ShapeDtypeStruct]
    names: Mapping[str, Any]
    ties: Mapping[str, str] = dataclasses.field(default_factory=dict)
    kinds: Mapping[str, str] = dataclasses.field(default_factory=dict)
    version: tuple[int, ...] = ()
    boxed: bool = False
    path: Path = Path()
    format: str = ""

    def without_boxes(self, known: Collection[str] = ()) -> Stored:
        """Return it with the paths of the model; see ``unboxed``."""
        if not self.boxed:
            return self
        new = unboxed(self.leaves, known)
        return dataclasses.replace(
            self,
            leaves={new[path]: leaf for path, leaf in self.leaves.items()},
            names={new[path]: name for path, name in self.names.items()},
            kinds={new[path]: kind for path, kind in self.kinds.items()},
            boxed=False,
        )


def marks(ties: Mapping[str, str], kinds: Mapping[str, str]) -> dict[str, Any]:
    """Return what ``marked`` reads, for the metadata of a file."""
    return {"ties": dict(ties), "kinds": dict(kinds)}


def marked(
    path: Path, leaves: dict[str, Any], names: dict[str, Any], found: Any
) -> Stored:
    """Return metadata with the ties and kinds that a file states, once they fit.

    Args:
        path: the file, for messages.
        leaves: shape and dtype by label path, without tied ones.
        names: what the format calls each leaf.
        found: what should be from ``marks``.

    Raises:
        CheckpointError: they do not fit.
    """
    match found:
        case {"ties": dict(ties), "kinds": dict(kinds)}:
            texts = (*ties.values(), *kinds.values())
        case _:
            texts = (None,)
    if not all(isinstance(text, str) for text in texts):
        refuse(path, "the marks in its metadata are damaged")
    for other, one in ties.items():
        if other in leaves or one not in leaves:
            refuse(path, f"it ties {listing([other])} to {listing([one])}")
    leaves = leaves | {other: leaves[one] for other, one in ties.items()}
    names = names | {other: names[one] for other, one in ties.items()}
    for one, kind in kinds.items():
        if one not in leaves or (kind == NUMBER and leaves[one].shape):
            refuse(path, f"{listing([one])} in it is not a {kind!r:.60}")
    return Stored(leaves, names, ties, kinds)


def number_array(number: Any) -> np.ndarray[Any, Any] | None:
    """Return a Python number as a 0-d array; None if it does not fit 64 bits."""
    made = np.asarray(number)
    return made if made.dtype.name in _NUMBERS else None


def abstract(path: Path, name: str, shape: Any, dtype: Any) -> jax.ShapeDtypeStruct:
    """Return shape and dtype that a file states, once they are believable.

    Args:
        path: the file, for messages.
        name: of the leaf, for messages.
        shape: what should be a sequence of sizes.
        dtype: what should be the name of a dtype.

    Raises:
        CheckpointError: they are not.
    """
    sizes = tuple(shape) if isinstance(shape, list | tuple) else (-1,)
    good = len(sizes) <= MAX_RANK and all(
        type(size) is int and 0 <= size < 2**63 for size in sizes
    )
    if not good or math.prod(sizes) >= 2**63:
        refuse(path, f"the leaf {listing([name])} has no sound shape")
    known = DTYPES.get(dtype) if isinstance(dtype, str) else None
    if known is None:
        refuse(path, f"the leaf {listing([name])} has an unknown dtype, {dtype!r:.60}")
    return jax.ShapeDtypeStruct(sizes, known)


def refuse(path: str | os.PathLike[str], problem: str, cure: str = "") -> NoReturn:
    """Raise because of what a checkpoint is.

    Raises:
        CheckpointError: always.
    """
    raise CheckpointError(
        f"The checkpoint {listing([os.fspath(path)])} is unusable: {problem}."
        f"{' ' * bool(cure)}{cure}"
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
    except ImportError as error:
        raise CheckpointError(
            f"The checkpoint {listing([os.fspath(path)])} cannot be {action} without "
            f'{error.name}: pip install "treeadapt[checkpoints,flax]".'
        ) from error
    except Exception as error:
        # Parsers of damaged files raise what they like, down to KeyError.
        text = " ".join(str(error).split())
        text = text if text.isprintable() else repr(text)
        text = text if len(text) <= 300 else f"{text[:300]}..."
        raise CheckpointError(
            f"The checkpoint {listing([os.fspath(path)])} cannot be {action}: "
            f"{type(error).__name__}{': ' * bool(text)}{text}"
        ) from error


def escape_segment(segment: str) -> str:
    """Write one segment as a name that is safe in any file system and store.

    Example:
        >>> [escape_segment(name) for name in ("kernel", "..", "a.b/c", "")]
        ['kernel', '%2E%2E', 'a%2Eb%2Fc', '%E']
    """
    # ``quote`` leaves dots and tildes, which file systems and Orbax give a meaning.
    text = quote(segment, safe="", errors="surrogatepass")
    return text.replace(".", "%2E").replace("~", "%7E") or _EMPTY


def unescape_segment(text: str) -> str:
    """Return the segment that ``escape_segment`` wrote.

    Example:
        >>> unescape_segment(escape_segment("a.b/ü"))
        'a.b/ü'
    """
    return "" if text == _EMPTY else unquote(text, errors="surrogatepass")


def nested(leaves: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """Return nested dicts that hold the leaves, by their segments.

    Raises:
        PathCollisionError: one leaf is above another.
    """
    made: dict[str, Any] = {}
    nodes: dict[tuple[str, ...], dict[str, Any]] = {(): made}
    for segments, leaf in leaves.items():
        for end in range(1, len(segments)):
            above = segments[:end]
            if above in leaves:
                one, two = "/".join(above), "/".join(segments)
                raise PathCollisionError(
                    f"Nested dicts cannot hold {listing([one])} next to "
                    f"{listing([two])}. Pass a target or choose leaves with where=; "
                    "treeadapt.read_metadata lists the paths."
                )
            if above not in nodes:
                nodes[above] = nodes[above[:-1]][above[-1]] = {}
        nodes[segments[:-1]][segments[-1]] = leaf
    return made


def as_tree(leaves: Mapping[str, Any]) -> Any:
    """Return nested dicts, whose siblings patterns can count, or the flat dict.

    Example:
        >>> as_tree({"a/b": 1}), as_tree({"a": 1, "a/b": 2})
        ({'a': {'b': 1}}, {'a': 1, 'a/b': 2})
    """
    try:
        return nested({tuple(path.split("/")): leaf for path, leaf in leaves.items()})
    except PathCollisionError:
        return dict(leaves)
