"""What a pickle of PyTorch says, without unpickling it.

Takes the pickle of a checkpoint; gives tables, lists, numbers, texts, and where each
tensor is. Its opcodes are walked, those that checkpoints have and no others, and a
global is a name that is compared with lists: nothing is imported, called or set because
a file says so. Python's own unpickler is not used, even with other globals: its memo is
an array as long as the largest index in the file.
Knows no files.
"""

from __future__ import annotations

import dataclasses
import pickletools
from collections.abc import Callable, Sequence
from typing import Any

from treeadapt.checkpoints.record import DTYPES

_MAX_OPCODES = 2**24  # each makes at most one object
_STORAGE_DTYPES = (
    "Float:float32 Double:float64 Half:float16 BFloat16:bfloat16 Char:int8 Short:int16 "
    "Int:int32 Long:int64 Byte:uint8 Bool:bool ComplexFloat:complex64 "
    "ComplexDouble:complex128"
)
# Dtype of what a class of storages has, by its name; bytes where the tensor says it.
_STORAGES = {
    f"torch.{kind}Storage": dtype
    for kind, dtype in (pair.split(":") for pair in _STORAGE_DTYPES.split())
} | {"torch.storage.UntypedStorage": "uint8", "torch.UntypedStorage": "uint8"}
# PyTorch packs these in its own ways.
_PACKED = ("int2", "int4", "uint2", "uint4", "float4_e2m1fn")
_DTYPES = {f"torch.{name}": name for name in DTYPES if name not in _PACKED}
_TABLES = {"collections.OrderedDict", "collections.defaultdict", "collections.Counter"}
# Tensors, and the place of what says that their numbers are not as they are stored.
_TENSORS = {"torch._utils._rebuild_tensor": 4}
_TENSORS |= {"torch._utils._rebuild_tensor_v2": 6, "torch._utils._rebuild_tensor_v3": 7}
_PARAMETERS = {"torch._utils._rebuild_parameter"}
_PARAMETERS |= {"torch._utils._rebuild_parameter_with_state"}
_OF_NUMPY = ("multiarray.scalar", "multiarray._reconstruct", "numeric._frombuffer")
_BUILTINS = ("bool", "complex", "dict", "float", "int", "list", "set", "str", "tuple")
#: What checkpoints of training have besides tensors and plain tables: left out.
_INERT = {
    *("argparse.Namespace", "torch.device", "torch.Size", "torch.Generator"),
    *("pathlib.PosixPath", "pathlib.WindowsPath", "pathlib._local.PosixPath"),
    *("torch.serialization._get_layout", "numpy.dtype", "numpy.ndarray"),
    *("_codecs.encode", "builtins.bytearray"),
    *(f"numpy.{core}.{name}" for core in ("core", "_core") for name in _OF_NUMPY),
    *(f"builtins.{kind}" for kind in _BUILTINS),
}
_KNOWN = {*_STORAGES, *_DTYPES, *_TABLES, *_TENSORS, *_PARAMETERS, *_INERT}
_ALONE = (
    "Only tensors, numbers and plain tables of them are read. If you trust the file, "
    "load it with torch.load(file, weights_only=False), and save those alone, as "
    "torch.save(model.state_dict(), new)."
)


class UnreadError(ValueError):
    """What is written is sound, and not read.

    Attributes:
        cure: what to do.
    """

    def __init__(self, problem: str, cure: str = _ALONE) -> None:
        super().__init__(problem)
        self.cure = cure


@dataclasses.dataclass(frozen=True)
class Other:
    """An object that is not a leaf.

    Attributes:
        name: of it, or of its class.
    """

    name: str


@dataclasses.dataclass(frozen=True)
class Storage:
    """A stretch of bytes that tensors are views of.

    Attributes:
        key: name of its member in the archive.
        dtype: of its numbers.
        size: how many these are.
    """

    key: str
    dtype: str
    size: int


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A view of a storage.

    Attributes:
        storage: that has the numbers.
        offset: of the first one, in numbers of the dtype.
        shape: of the tensor.
        strides: how far one place of each axis is from the next, in numbers.
        dtype: name of the dtype.
    """

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


class _Global(Other):
    """What a name stands for, which is not looked up."""


def content_of(pickled: bytes) -> Any:
    """Return what a pickle says: dicts, lists, tuples, numbers, texts, ``Tensor``.

    Args:
        pickled: the whole pickle.

    Raises:
        UnreadError: it has an opcode, a global or a tensor that is not read.
        ValueError: it is damaged.
    """
    walk = _Walk()
    for count, (opcode, argument, place) in enumerate(pickletools.genops(pickled)):
        if opcode.name == "STOP":
            return walk.popped(1)[0]
        step = _STEPS.get(opcode.name)
        if step is None:
            raise UnreadError(f"it has the opcode {opcode.name} at byte {place:,}")
        if count == _MAX_OPCODES:
            raise UnreadError(f"it has more than {_MAX_OPCODES:,} opcodes")
        step(walk, argument)
    raise ValueError("it does not end")


class _Walk:
    """The stack, the marks in it and the memo of a pickle."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def popped(self, count: int) -> list[Any]:
        """Take objects off the stack, down to the last mark at most."""
        start = len(self.stack) - count
        if start < (self.marks[-1] if self.marks else 0):
            raise ValueError("it takes more than there is")
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def above_mark(self) -> list[Any]:
        """Take what is above the last mark off the stack, and the mark."""
        if not self.marks:
            raise ValueError("it lacks a mark")
        items = self.popped(len(self.stack) - self.marks[-1])
        self.marks.pop()
        return items

    def top(self) -> Any:
        """Return the last object, which stays."""
        self.stack += (items := self.popped(1))
        return items[0]

    def drop(self) -> None:
        """Take the last object off the stack."""
        self.popped(1)

    def remember(self, index: int | None) -> None:
        """Keep the last object in the memo; without an index, as the next one."""
        self.memo[len(self.memo) if index is None else index] = self.top()

    def recall(self, index: int) -> None:
        """Put what the memo keeps on the stack."""
        if index not in self.memo:
            raise ValueError(f"it recalls {index:,}, which it did not keep")
        self.stack.append(self.memo[index])

    def extend(self, items: Sequence[Any]) -> None:
        """Append to a list."""
        target = self.top()
        if not isinstance(target, list | Other):
            raise ValueError(f"it appends to a {_kind(target)}")
        if isinstance(target, list):
            target.extend(items)

    def fill(self, items: Sequence[Any]) -> None:
        """Set keys of a table."""
        target, keys = self.top(), items[::2]
        if not isinstance(target, dict | Other) or len(items) % 2:
            raise ValueError(f"it sets keys of a {_kind(target)}")
        for key in keys:
            if not isinstance(key, str | int):
                raise UnreadError(f"a table in it has a key of the kind {_kind(key)}")
        if isinstance(target, dict):
            target.update(zip(keys, items[1::2], strict=True))

    def name(self, parts: Sequence[Any]) -> None:
        """Put a global on the stack, if its name is in the lists."""
        if not all(isinstance(part, str) for part in parts):
            raise ValueError("a name in it is not a text")
        # Protocol 2 writes the names of Python 2.
        name = ".".join(parts).replace("__builtin__.", "builtins.", 1)
        if name not in _KNOWN:
            raise UnreadError(f"it has an object of {name!r:.90}")
        self.stack.append(_Global(name))

    def call(self) -> None:
        """Put what a global would make of arguments on the stack."""
        function, arguments = self.popped(2)
        if not isinstance(function, _Global) or not isinstance(arguments, tuple):
            raise ValueError(f"it calls a {_kind(function)}")
        self.stack.append(_made(function.name, arguments))

    def describe_storage(self) -> None:
        """Put the storage on the stack that a persistent id describes."""
        (described,) = self.popped(1)
        is_known = isinstance(described, tuple) and len(described) == 5
        kind, of, key, _, size = described if is_known else (None,) * 5
        if kind != "storage" or not isinstance(of, _Global) or of.name not in _STORAGES:
            raise ValueError("a storage in it is not described as PyTorch does")
        if not isinstance(key, str) or type(size) is not int or size < 0:
            raise ValueError("a storage in it is not described as PyTorch does")
        self.stack.append(Storage(key, _STORAGES[of.name], size))


_VALUES = "BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINUNICODE "
_VALUES += "BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES BYTEARRAY8"

#: What each opcode does; it gets its argument.
_STEPS: dict[str, Callable[[_Walk, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME"), lambda walk, _: None),
    **dict.fromkeys(_VALUES.split(), lambda walk, value: walk.stack.append(value)),
    "NONE": lambda walk, _: walk.stack.append(None),
    "NEWTRUE": lambda walk, _: walk.stack.append(True),
    "NEWFALSE": lambda walk, _: walk.stack.append(False),
    "MARK": lambda walk, _: walk.marks.append(len(walk.stack)),
    "EMPTY_DICT": lambda walk, _: walk.stack.append({}),
    "EMPTY_LIST": lambda walk, _: walk.stack.append([]),
    "EMPTY_SET": lambda walk, _: walk.stack.append(Other("builtins.set")),
    "EMPTY_TUPLE": lambda walk, _: walk.stack.append(()),
    "TUPLE": lambda walk, _: walk.stack.append(tuple(walk.above_mark())),
    "TUPLE1": lambda walk, _: walk.stack.append(tuple(walk.popped(1))),
    "TUPLE2": lambda walk, _: walk.stack.append(tuple(walk.popped(2))),
    "TUPLE3": lambda walk, _: walk.stack.append(tuple(walk.popped(3))),
    "APPEND": lambda walk, _: walk.extend(walk.popped(1)),
    "APPENDS": lambda walk, _: walk.extend(walk.above_mark()),
    "ADDITEMS": lambda walk, _: walk.extend(walk.above_mark()),
    "SETITEM": lambda walk, _: walk.fill(walk.popped(2)),
    "SETITEMS": lambda walk, _: walk.fill(walk.above_mark()),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), _Walk.remember),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Walk.recall),
    "GLOBAL": lambda walk, name: walk.name(name.split(" ")),
    "STACK_GLOBAL": lambda walk, _: walk.name(walk.popped(2)),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), lambda walk, _: walk.call()),
    # Attributes, such as the ``_metadata`` of a state dict: no numbers of a leaf.
    "BUILD": lambda walk, _: walk.drop(),
    "BINPERSID": lambda walk, _: walk.describe_storage(),
}


def _kind(value: Any) -> str:
    return value.name if isinstance(value, Other) else type(value).__name__


def _made(name: str, arguments: tuple[Any, ...]) -> Any:
    """Return what a global would make of arguments, which is not called."""
    first = arguments[0] if arguments else None
    if name in _TABLES:
        if not isinstance(first, dict | _Global | None):
            raise ValueError(f"it makes a table of a {_kind(first)}")
        return {**first} if isinstance(first, dict) else {}
    if name in _PARAMETERS:
        if not isinstance(first, Tensor):
            raise ValueError(f"it makes a parameter of a {_kind(first)}")
        return first
    if name in _TENSORS:
        return _tensor(name, arguments)
    if name not in _INERT:
        raise ValueError(f"it calls {name!r}")
    return Other(name)


def _tensor(name: str, arguments: tuple[Any, ...]) -> Tensor:
    """Return the tensor that arguments describe."""
    if len(arguments) < 4:
        raise ValueError("a tensor in it is not described as PyTorch does")
    storage, offset, shape, strides = arguments[:4]
    if not isinstance(storage, Storage):
        raise ValueError("a tensor in it has no storage")
    if any(arguments[_TENSORS[name] :]):
        # Of a conjugate, or a negative, that PyTorch works out when it is used.
        cure = "Save tensor.resolve_conj().resolve_neg() in its place."
        raise UnreadError("a tensor is stored as its conjugate or negative", cure)
    dtype = storage.dtype
    if name.endswith("v3"):
        kind = arguments[6] if len(arguments) > 6 else None
        if not isinstance(kind, _Global) or kind.name not in _DTYPES:
            raise UnreadError(f"a tensor in it is of the dtype {_kind(kind)!r:.60}")
        dtype = _DTYPES[kind.name]
    if not isinstance(shape, tuple) or not isinstance(strides, tuple):
        raise ValueError("a tensor in it has no sound shape")
    numbers = (offset, *shape, *strides)
    is_sound = all(type(n) is int and 0 <= n < 2**62 for n in numbers)
    if len(shape) != len(strides) or not is_sound:
        raise ValueError("a tensor in it has no sound shape")
    return Tensor(storage, offset, shape, strides, dtype)
