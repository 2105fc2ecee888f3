"""Ways of storing an array as codes and scales, as libraries publish them.

``FORMS`` has a row for each: how its parts are named, and what makes a
``DecodedArray`` of them. Parts that contradict each other, or what the configuration
states, are an error that names them. Reads no array; see ``decoding``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from treeadapt.checkpoints.decoded_array import Codes, DecodedArray, reshaped
from treeadapt.checkpoints.errors import refuse
from treeadapt.checkpoints.quantization_config import FLOATS, Stated, raw_advice
from treeadapt.checkpoints.record import DTYPES, Leaf, abstract
from treeadapt.text.data_files import parse_json
from treeadapt.text.names import listing
from treeadapt.trees.describing import describe

#: Floats of one byte that are codes; the eighth kind has exponents alone.
FLOAT8 = tuple(
    name for name in DTYPES if name.startswith("float8") and "e8m0" not in name
)
_FP4 = np.array(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32
)
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # which of eight numbers is where in a word
_MAX_STATE_BYTES = 2**16
_STATE = ".quant_state.bitsandbytes__"
_INTEGERS = np.arange(256, dtype=np.float32)


class Form(NamedTuple):
    """A way of storing an array.

    Attributes:
        ending: of the name of its codes, after what all its parts share.
        dtypes: that codes have.
        needs: endings of the parts that must be there.
        may: endings of those that may be.
        build: returns the array, and what the form is called.
        reads: endings of the small parts whose values ``build`` needs.
        ending_decoded: of the name of the array.
        is_evident: whether names, dtypes and shapes alone show it.
    """

    ending: str
    dtypes: tuple[str, ...]
    needs: tuple[str, ...]
    may: tuple[str, ...]
    build: Callable[[Parts], tuple[DecodedArray, str]]
    reads: tuple[str, ...] = ()
    ending_decoded: str = ""
    is_evident: bool = True

    @property
    def endings(self) -> tuple[str, ...]:
        """Endings of all parts."""
        return (self.ending, *self.needs, *self.may)


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of one array.

    Attributes:
        form: how it is stored.
        root: how the names of all parts begin.
        leaves: by the endings of their names.
        small: values of the arrays that were read, by name.
        stated: what the configuration states.
    """

    form: Form
    root: str
    leaves: Mapping[str, Leaf]
    small: Mapping[str, Any]
    stated: Stated

    @property
    def codes(self) -> Leaf:
        """The codes."""
        return self.leaves[self.form.ending]

    def dtype(self, scale: Leaf) -> Any:
        """Return the dtype that is meant."""
        own = scale.array.dtype
        is_short = own in (DTYPES["bfloat16"], DTYPES["float16"])
        return self.stated.dtype or (own if is_short else DTYPES["bfloat16"])

    def value(self, ending: str) -> Any:
        """Return an array that was read."""
        return self.small[self.root + ending]

    def refuse(self, problem: str, ending: str | None = None) -> NoReturn:
        """Raise because of a part, the codes unless it is named."""
        name = self.root + (self.form.ending if ending is None else ending)
        refuse(self.stated.path, f"{listing([name])} {problem}", raw_advice())

    def contradict(self, ending: str, also: str = "") -> NoReturn:
        """Raise because the codes and another part do not fit each other."""
        other = self.leaves[ending].array
        self.refuse(
            f"is {describe(self.codes.array)}, and {listing([self.root + ending])} is "
            f"{describe(other)}{also}"
        )

    def grid(
        self, ending: str, shape: Sequence[int], block: Sequence[int] | None = None
    ) -> tuple[Any, tuple[int, ...]]:
        """Return scales with an axis for each of the codes, and how long a block is.

        Args:
            ending: of the scales.
            shape: of the codes.
            block: along the last axes, if that is known.
        """
        scale = self.leaves[ending]
        grid, known_block = tuple(scale.array.shape), tuple(block or ())
        if math.prod(grid) == 1 and not known_block:
            grid = (1,) * len(shape)
        elif len(grid) == 1 and grid[0] == shape[0]:
            grid = (*grid, *(1,) * (len(shape) - 1))
        stated = (0,) * (len(shape) - len(known_block)) + known_block
        blocks: tuple[int, ...] = ()
        if len(grid) == len(stated) == len(shape):
            blocks = tuple(
                size or (n if k == 1 else n // max(k, 1))
                for n, k, size in zip(shape, grid, stated, strict=True)
            )
        # Blocks of rows are always stated; of columns their number may say how long.
        fits = bool(blocks) and all(
            size
            and -(-n // size) == k
            and (known or size in (1, n) or axis == len(shape) - 1)
            for axis, (n, k, size, known) in enumerate(
                zip(shape, grid, blocks, stated, strict=True)
            )
        )
        if not fits or not (stated[-1] or shape[-1] % blocks[-1] == 0):
            sizes = " x ".join(map(str, known_block))
            self.contradict(ending, f", of blocks of {sizes}" * bool(sizes))
        return reshaped(scale.key, grid), blocks

    def require_scale(self, ending: str, *dtypes: str) -> Leaf:
        """Return a part, which must have one of some dtypes."""
        leaf = self.leaves[ending]
        if leaf.array.dtype.name not in dtypes:
            self.refuse(f"is {describe(leaf.array)}, not {' or '.join(dtypes)}", ending)
        return leaf


_SCALES = ("float32", "bfloat16", "float16", "float8_e8m0fnu", "uint8")


def _require_zeros(parts: Parts) -> None:
    """Raise if numbers are around zeros that are not there.

    Raises:
        CheckpointError: the configuration says that there are some.
    """
    is_symmetric = parts.stated.of_weights("symmetric")
    if "_zero_point" not in parts.leaves and is_symmetric not in (None, True):
        zeros = listing([f"{parts.root}_zero_point"])
        parts.refuse(f"lacks {zeros}, and the configuration says symmetric = false")


def _scaled(parts: Parts) -> tuple[DecodedArray, str]:
    """One byte for each number, and scales of any blocks: FP8, int8."""
    array, ending = parts.codes.array, parts.form.needs[0]
    scale = parts.require_scale(ending, *_SCALES)
    if array.dtype == np.int8 and scale.array.dtype == DTYPES["float8_e8m0fnu"]:
        return _two_in_a_byte(parts, ending, (1, 32), "float4_e2m1fn in blocks of 32")
    if not array.shape:
        parts.contradict(ending)
    stated, block = parts.stated, parts.stated.block
    is_of_rows = scale.array.shape in ((*array.shape[:-1], 1), array.shape[:1])
    if not stated.fields and math.prod(scale.array.shape) > 1:
        block = (128, 128)
    if is_of_rows and not stated.fields.get("weight_block_size"):
        block = None
    grid, blocks = parts.grid(ending, array.shape, block)
    _require_zeros(parts)
    zero = None
    if "_zero_point" in parts.leaves:
        leaf = parts.require_scale("_zero_point", "int8", "uint8", *FLOAT8)
        if leaf.array.shape != scale.array.shape:
            parts.contradict("_zero_point")
        zero = reshaped(leaf.key, grid.shape)
    decoded = DecodedArray(
        shape=array.shape,
        dtype=parts.dtype(scale),
        codes=Codes(parts.codes.key),
        table=_numbers_of(array.dtype),
        scale=grid,
        blocks=blocks,
        zero=zero,
    )
    return decoded, f"{array.dtype.name} with scales"


def _two_in_a_byte(
    parts: Parts, ending: str, block: Sequence[int], name: str, **others: Any
) -> tuple[DecodedArray, str]:
    """Two numbers of 4 bits in a byte, the low bits first."""
    array, scale = parts.codes.array, parts.leaves[ending]
    if len(array.shape) < 2:
        parts.contradict(ending)
    shape = (*array.shape[:-1], array.shape[-1] * 2)
    grid, blocks = parts.grid(ending, shape, block)
    if "scale_of_scale" in others:
        second = others.pop("scale_of_scale")
        if math.prod(parts.leaves[second].array.shape) != 1:
            parts.contradict(second)
        grid = DecodedArray(
            shape=grid.shape,
            dtype=np.dtype(np.float32),
            codes=Codes(grid),
            table=_numbers_of(grid.dtype),
            scale=reshaped(parts.leaves[second].key, (1,) * len(shape)),
            blocks=grid.shape,
            divides=others.pop("divides"),
        )
    decoded = DecodedArray(
        shape=shape,
        dtype=parts.dtype(scale),
        codes=Codes(parts.codes.key, 4, len(shape) - 1),
        table=_FP4,
        scale=grid,
        blocks=blocks,
    )
    return decoded, name


def _nvfp4_of_modelopt(parts: Parts) -> tuple[DecodedArray, str]:
    parts.require_scale("_scale", "float8_e4m3fn")
    parts.require_scale("_scale_2", "float32")
    return _two_in_a_byte(
        parts, "_scale", (16,), "NVFP4", scale_of_scale="_scale_2", divides=False
    )


def _float4_packed(parts: Parts) -> tuple[DecodedArray, str]:
    """NVFP4 and MXFP4 of compressed-tensors."""
    scale = parts.require_scale("_scale", "float8_e4m3fn", "uint8", "float8_e8m0fnu")
    if scale.array.dtype.name != "float8_e4m3fn":
        return _two_in_a_byte(parts, "_scale", (32,), "MXFP4")
    if "_global_scale" not in parts.leaves:
        parts.refuse(f"lacks {listing([f'{parts.root}_global_scale'])}")
    parts.require_scale("_global_scale", "float32")
    return _two_in_a_byte(
        parts, "_scale", (16,), "NVFP4", scale_of_scale="_global_scale", divides=True
    )


def _mxfp4_of_blocks(parts: Parts) -> tuple[DecodedArray, str]:
    """The experts of gpt-oss; transformers swaps the last two axes, OpenAI does not."""
    ending = parts.form.needs[0]
    *outer, in_block = parts.codes.array.shape
    scale = parts.require_scale(ending, "uint8")
    if in_block != 16 or scale.array.shape != (*outer,) or len(outer) < 2:
        parts.contradict(ending)
    stored = (*outer[:-1], outer[-1] * 32)
    swaps = parts.form.ending == "_blocks"
    words = reshaped(parts.codes.key, (*outer[:-1], outer[-1] * 16))
    decoded = DecodedArray(
        shape=(*stored[:-2], stored[-1], stored[-2]) if swaps else stored,
        dtype=parts.stated.dtype or DTYPES["bfloat16"],
        codes=Codes(words, 4, len(stored) - 1),
        table=_FP4,
        scale=scale.key,
        blocks=(*(1,) * (len(stored) - 1), 32),
        swaps=swaps,
    )
    return decoded, "MXFP4"


def _integers_packed(parts: Parts) -> tuple[DecodedArray, str]:
    """Integers of compressed-tensors, in words along the columns."""
    array, stated = parts.codes.array, parts.stated
    scale = parts.require_scale("_scale", "float32", "bfloat16", "float16")
    if "_g_idx" in parts.leaves:
        parts.refuse("is in the order of activations, which is not read", "_g_idx")
    said = tuple(parts.value("_shape").tolist())
    bits = stated.of_weights("num_bits")
    is_sound = len(said) == len(array.shape) == 2 and said[0] == array.shape[0]
    fitting = [
        each
        for each in (8, 4, 2)
        if is_sound
        and bits in (None, each)
        and said[1] > 0
        and -(-said[1] * each // 32) == array.shape[1]
    ]
    if not fitting:
        parts.contradict(
            "_shape", f" and says {said!r:.60}, of {bits or '8, 4 or 2'} bits"
        )
    if len(fitting) > 1:
        known = ", ".join(map(str, fitting))
        parts.refuse(
            f"may be of {known} bits: it has {said[1]} columns, and the configuration "
            "does not say which"
        )
    bits, zero, table = fitting[0], None, _INTEGERS - 2 ** (fitting[0] - 1)
    grid, blocks = parts.grid("_scale", said, stated.block)
    _require_zeros(parts)
    if "_zero_point" in parts.leaves:
        leaf, rows = parts.require_scale("_zero_point", "int32"), grid.shape[0]
        if leaf.array.shape != (-(-rows * bits // 32), grid.shape[1]):
            parts.contradict("_zero_point")
        zero, table = Codes(leaf.key, bits, 0), _INTEGERS
    decoded = DecodedArray(
        shape=said,
        dtype=parts.dtype(scale),
        codes=Codes(parts.codes.key, bits, 1),
        table=table,
        scale=grid,
        blocks=blocks,
        zero=zero,
    )
    return decoded, f"int{bits}, packed"


def _integers_turned(parts: Parts) -> tuple[DecodedArray, str]:
    """AWQ and GPTQ: integers in words along the outputs or the inputs of a layer."""
    words, scale = parts.codes.array, parts.require_scale("scales", *_SCALES[:3])
    zeros, stated = parts.require_scale("qzeros", "int32").array, parts.stated
    if not len(words.shape) == len(scale.array.shape) == len(zeros.shape) == 2:
        parts.contradict("scales")
    num_groups, outs = scale.array.shape
    bits = stated.number("bits", "w_bit") or zeros.shape[1] * 32 // max(1, outs)
    is_awq = words.shape[1] == zeros.shape[1] != outs
    version = stated.text("version" if is_awq else "checkpoint_format")
    version = version or ("gemm" if is_awq else "gptq")
    name = "AWQ" if is_awq else "GPTQ"
    if stated.method in ("awq", "gptq") and stated.method != name.lower():
        parts.refuse(f"is {describe(words)}, which is not packed as {stated.method} is")
    if not is_awq and not stated.fields:
        parts.refuse(
            "is of GPTQ, of which only a configuration says how zeros are stored"
        )
    if version not in ("gemm", "gptq", "gptq_v2"):
        parts.refuse(f"is of {name} in the form {version!r:.40}, which is not read")
    if bits not in ((4,) if is_awq else (2, 4, 8)):
        parts.refuse(f"is of {name} with {bits} bits, which is not read")
    ins = words.shape[0] * (1 if is_awq else 32 // bits)
    size = ins // max(1, num_groups)
    if (
        not ins
        or ins != size * num_groups
        or words.shape[1] * (32 // bits if is_awq else 1) != outs
    ):
        parts.contradict("scales")
    if zeros.shape != (num_groups, outs * bits // 32) or outs * bits % 32:
        parts.contradict("qzeros")
    group = stated.number("group_size", "q_group_size") if stated.fields else None
    if group and group > 0 and group != size:
        parts.contradict("scales", f", of groups of {group}")
    decoded = DecodedArray(
        shape=(outs, ins),
        dtype=parts.dtype(scale),
        codes=Codes(parts.codes.key, bits, int(is_awq), _AWQ_ORDER if is_awq else ()),
        # The first versions of GPTQ store one less than each zero.
        table=_INTEGERS - 1 if version == "gptq" else _INTEGERS,
        scale=scale.key,
        blocks=(size, 1),
        zero=Codes(parts.leaves["qzeros"].key, bits, 1, _AWQ_ORDER if is_awq else ()),
        swaps=True,
        groups=_groups(parts, ins, size, num_groups),
    )
    return decoded, f"{name}, {bits} bits"


def _groups(parts: Parts, ins: int, size: int, num_groups: int) -> Any:
    """Return the group of each input; None if they are in order."""
    if "g_idx" not in parts.leaves:
        if parts.stated.fields.get("desc_act"):
            parts.refuse(
                f"lacks {listing([f'{parts.root}g_idx'])}, as desc_act needs it"
            )
        return None
    groups = parts.value("g_idx")
    if groups.shape != (ins,) or groups.dtype.kind not in "iu":
        parts.contradict("g_idx")
    if groups.min() < 0 or groups.max() >= num_groups:
        parts.refuse(f"names groups that are not among {num_groups:,}", "g_idx")
    return None if np.array_equal(groups, np.arange(ins) // size) else groups


def _bytes_of_bitsandbytes(parts: Parts) -> tuple[DecodedArray, str]:
    """Rows of int8, each with the largest number that it had."""
    parts.require_scale("SCB", "float32")
    shape = parts.codes.array.shape
    grid, blocks = parts.grid("SCB", shape)
    decoded = DecodedArray(
        shape=shape,
        dtype=parts.stated.dtype or DTYPES["float16"],
        codes=Codes(parts.codes.key),
        table=_numbers_of(np.int8),
        scale=grid,
        blocks=blocks,
        factor=np.float32(7.874015718698502e-3),  # 1 / 127, multiplied after the scale
    )
    return decoded, "int8 of bitsandbytes"


def _floats_of_bitsandbytes(parts: Parts) -> tuple[DecodedArray, str]:
    """NF4 and FP4: 4 bits, the high ones first, in blocks that run on over rows."""
    words, absmax = parts.codes.array, parts.leaves[".absmax"]
    ending = parts.form.needs[0]
    state = _state(parts, ending)
    shape, block = state["shape"], state["blocksize"]
    size = math.prod(shape)
    num_bytes, num_blocks = -(-size // 2), -(-size // block)
    if math.prod(words.shape) * words.dtype.itemsize != num_bytes:
        parts.contradict(ending, f" that says {shape}")
    if absmax.array.shape != (num_blocks,):
        parts.contradict(".absmax", f", of blocks of {block}")
    table, scale = _numbers(parts, ".quant_map", 16), absmax.key
    if ending.endswith("fp4"):
        # Files of bitsandbytes 0.50.2 have 0.0 for code 8, and its kernels give -0.0.
        table = np.copysign(table, _FP4)
    if ".nested_absmax" in parts.leaves:
        outer = parts.require_scale(".nested_absmax", "float32")
        inner = state["nested_blocksize"]
        if outer.array.shape != (-(-num_blocks // inner),):
            parts.contradict(".nested_absmax", f", of blocks of {inner}")
        parts.require_scale(".absmax", "uint8")
        scale = DecodedArray(
            shape=(num_blocks,),
            dtype=np.dtype(np.float32),
            codes=Codes(absmax.key),
            table=_numbers(parts, ".nested_quant_map", 256),
            scale=outer.key,
            blocks=(inner,),
            offset=np.float32(state["nested_offset"]),
        )
    else:
        parts.require_scale(".absmax", "float32")
    decoded = DecodedArray(
        shape=shape,
        dtype=DTYPES[state["dtype"]],
        codes=Codes(
            reshaped(parts.codes.key, (num_bytes,), np.dtype("u1")), 4, 0, (1, 0)
        ),
        table=table,
        scale=scale,
        blocks=(block,),
        is_flat=True,
    )
    return decoded, f"{ending.removeprefix(_STATE)} of bitsandbytes"


def _state(parts: Parts, ending: str) -> dict[str, Any]:
    """Return what bitsandbytes says of an array, once it has a form that is read."""
    text = parts.value(ending)
    try:
        if text.dtype.itemsize * text.size > _MAX_STATE_BYTES:
            raise ValueError
        state = parse_json(text.tobytes().decode())
        sizes = [state["blocksize"], *state["shape"], state["shape"][0]]
        if ".nested_absmax" in parts.leaves:
            sizes.append(state["nested_blocksize"])
            if type(state["nested_offset"]) is not float:
                raise ValueError
        is_sound = all(type(each) is int and 0 < each < 2**63 for each in sizes)
        if not is_sound or state["dtype"] not in FLOATS:
            raise ValueError
        abstract(parts.stated.path, parts.root, state["shape"], state["dtype"])
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
        IndexError,
    ):
        parts.refuse("does not say what it should of an array of bitsandbytes", ending)
    return {**state, "shape": tuple(state["shape"])}


def _numbers(parts: Parts, ending: str, count: int) -> Any:
    """Return the table of numbers that codes stand for."""
    if ending not in parts.leaves:
        parts.refuse(f"lacks {listing([parts.root + ending])}")
    parts.require_scale(ending, "float32")
    table = parts.value(ending)
    if table.shape != (count,):
        parts.contradict(ending)
    return table


def _numbers_of(dtype: Any) -> Any:
    """Return the number that each code of one byte stands for."""
    with np.errstate(all="ignore"):
        return np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)


def _form(
    ending: str, dtypes: Sequence[str], needs: str, may: str, build: Any, **others: Any
) -> Form:
    return Form(
        ending, tuple(dtypes), tuple(needs.split()), tuple(may.split()), build, **others
    )


#: Of several rows whose parts are all there, the first counts.
FORMS = (
    _form("", ("uint8",), "_scale _scale_2", "", _nvfp4_of_modelopt),
    _form("", FLOAT8, "_scale_inv", "", _scaled),
    _form("", FLOAT8, "_scale", "_zero_point _shape", _scaled),
    _form("", ("int8",), "_scale_inv", "", _scaled, is_evident=False),
    _form("", ("int8",), "_scale", "_zero_point _shape", _scaled, is_evident=False),
    _form(
        "_packed",
        ("int32",),
        "_scale _shape",
        "_zero_point _g_idx",
        _integers_packed,
        reads=("_shape",),
    ),
    _form("_packed", ("uint8",), "_scale", "_global_scale", _float4_packed),
    _form("_blocks", ("uint8",), "_scales", "", _mxfp4_of_blocks),
    _form(".blocks", ("uint8",), ".scales", "", _mxfp4_of_blocks),
    _form(
        "qweight",
        ("int32",),
        "qzeros scales",
        "g_idx",
        _integers_turned,
        reads=("g_idx",),
        ending_decoded="weight",
    ),
    _form(
        "weight",
        ("int8",),
        "SCB",
        "weight_format",
        _bytes_of_bitsandbytes,
        ending_decoded="weight",
    ),
    *(
        _form(
            "",
            ("uint8", "int8", *FLOATS),
            f"{_STATE}{kind} .absmax .quant_map",
            ".nested_absmax .nested_quant_map",
            _floats_of_bitsandbytes,
            reads=(f"{_STATE}{kind}", ".quant_map", ".nested_quant_map"),
        )
        for kind in ("nf4", "fp4")
    ),
)
