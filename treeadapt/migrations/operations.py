"""Operations: what is written next to the target of a row.

Takes the mapping of a row as it was typed, and gives ``Values``, what is done to the
numbers of its targets, and ``Notes``, what else is known of the row. Each is checked by
itself; whether the row has the axes that they name is up to ``rows``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
import re
import sys
from collections.abc import Mapping
from typing import Any, NoReturn, TypeAlias

import jax.numpy as jnp
import numpy as np

from treeadapt.errors import MigrationError
from treeadapt.migrations.take import Take, parse_take
from treeadapt.migrations.templates import NO_SIZES
from treeadapt.text.data_files import MAX_INTEGER
from treeadapt.text.names import Speller, listing
from treeadapt.text.wording import worded

OPERATIONS = (
    *("take", "repeat", "scale", "offset", "pad", "fill", "cast"),
    *("multiply", "add"),
)
NOTES = ("sizes", "checked", "optional", "copy", "check")

#: As ``optional``: it may match nothing where rows above it take all its leaves; and
#: read backwards, where nothing shows whether these rows make what it makes.
COVERED, COVERS = "covered", "covers"

#: Next to a list of ``take``: of how many numbers it selects some.
OF = "of"
_LONGEST_CHECK = 200

_DTYPE = re.compile(r"[<>=|]?[A-Za-z][A-Za-z0-9_]{0,30}")

_NAME = r"[A-Za-z_]\w*"
_POWER = re.compile(
    rf"(?P<name>{_NAME}|\({_NAME}(?: +{_NAME})+\))"
    r"(?:\*\*(?P<exponent>-?[0-9]{1,3}(?:\.[0-9]{1,3})?))?"
)
_ROUNDED = re.compile(r"(?P<dtype>float32|float16|bfloat16)\((?P<power>.+)\)")
_SIZE_NAME = re.compile(_NAME)

#: How many zeros are before and after the rest of an axis, by its name.
Pads: TypeAlias = Mapping[str | None, tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class Power:
    """A power of sizes, in the place of a number.

    Attributes:
        names: of the sizes, which are multiplied.
        exponent: of their product.
        dtype: in which the power is rounded; empty for none.
        degree: exponent of what all this is, as of the scale of a second moment.
    """

    names: tuple[str, ...]
    exponent: float = 1.0
    dtype: str = ""
    degree: float = 1.0

    def number(self, sizes: Mapping[str, int]) -> float:
        """Return the number; infinite if it is none."""
        product = math.prod(sizes[name] for name in self.names)
        with contextlib.suppress(OverflowError, ZeroDivisionError):
            power = float(product**self.exponent)
            if self.dtype:
                with np.errstate(over="ignore"):
                    power = float(np.float32(power).astype(jnp.dtype(self.dtype)))
            return power**self.degree
        return math.inf

    def __str__(self) -> str:
        name = " ".join(self.names)
        name = f"({name})" if len(self.names) > 1 else name
        exponent = f"**{self.exponent:.10g}" if self.exponent != 1 else ""
        text = f"{name}{exponent}"
        return f"{self.dtype}({text})" if self.dtype else text


@dataclasses.dataclass(frozen=True)
class Values:
    """What is done to the values of a row's targets, in this order, or undone.

    Attributes:
        take: names of which numbers are taken in another order, or only some, each with
            what is taken; before all else.
        repeat: names of axes along which numbers are repeated, each with its size, or
            None where that is known otherwise.
        scale: factor.
        offset: added to the product.
        pad: names of axes that get zeros, each with how many before and after.
        fill: whether what they get are not zeros, but the numbers of the target.
        cast: dtypes by name: the new one, or the old one and the new one.
        multiply: whether the sources are factors of the target, before all this.
        undoes: whether all this was done to the sources, and is undone.
        scale_of: a power of sizes that is a factor, too.
        offset_of: the same of what is added.
        add: whether the sources are summands of the target, before all this.
        pad_of: what is in the place of widths, as ``(axis, place, name)``.
    """

    repeat: tuple[tuple[str, int | None], ...] = ()
    scale: float = 1.0
    offset: float = 0.0
    pad: tuple[tuple[str, tuple[int, int]], ...] = ()
    fill: bool = False
    cast: tuple[str, ...] = ()
    multiply: bool = False
    undoes: bool = False
    add: bool = False
    take: tuple[tuple[str, Take], ...] = ()
    scale_of: Power | None = None
    offset_of: Power | None = None
    pad_of: tuple[tuple[str, int, str], ...] = ()

    @property
    def computes(self) -> bool:
        """Whether numbers change other than by their dtype."""
        is_power = self.scale_of is not None or self.offset_of is not None
        return self.add or is_power or self.scale != 1 or self.offset != 0

    @property
    def size_names(self) -> set[str]:
        """Names in the place of numbers."""
        powers = (each for each in (self.scale_of, self.offset_of) if each)
        names = (name for each in powers for name in each.names)
        return {*names, *(name for *_, name in self.pad_of)}

    def with_sizes(self, sizes: Mapping[str, int]) -> Values:
        """Return it with numbers in the place of powers of sizes."""
        if self.scale_of is None and self.offset_of is None:
            return self
        return dataclasses.replace(
            self,
            scale=self.scale * (self.scale_of.number(sizes) if self.scale_of else 1),
            offset=self.offset_of.number(sizes) if self.offset_of else self.offset,
            scale_of=None,
            offset_of=None,
        )

    def __bool__(self) -> bool:
        return self.moves or bool(self.take)

    @property
    def moves(self) -> bool:
        """Whether arrays are read, rather than numbers in their paths."""
        return self.changes or bool(self.cast or self.repeat)

    def pads(self, *, is_source: bool) -> Pads:
        """Return the padding of the sources, or of the targets, by name of the axis."""
        return dict(self.pad) if self.undoes == is_source else {}

    @property
    def changes(self) -> bool:
        """Whether other numbers come out than went in, but for their dtype.

        What is taken of them counts as no other.
        """
        return self.computes or self.multiply or bool(self.pad)

    @property
    def fills(self) -> bool:
        """Whether it takes numbers of the target."""
        return self.fill and not self.undoes

    @property
    def cuts_zeros(self) -> bool:
        """Whether it cuts off numbers that must be zero."""
        return bool(self.pad) and self.undoes and not self.fill

    def repeats(self, *, is_source: bool) -> frozenset[str]:
        """Return the names of axes along which the sources, or targets, are copies."""
        names = (name for name, _ in self.repeat if self.undoes == is_source)
        return frozenset(names)

    def typed(self) -> dict[str, Any]:
        """Return the operations as they are written in a table."""
        cast = self.cast[0] if len(self.cast) == 1 else list(self.cast)
        repeat: Any = dict(self.repeat)
        if None in repeat.values():
            ((repeat, _),) = self.repeat
        scale = self.scale if self.scale != 1 else None
        pads: dict[str, list[Any]] = {name: [*widths] for name, widths in self.pad}
        for name, place, size_name in self.pad_of:
            pads[name][place] = size_name
        takes: dict[str, Any] = {name: each.typed for name, each in self.take}
        sizes = [each.size for _, each in self.take if each.needs_size]
        takes |= {OF: sizes[0]} if sizes else {}
        every = {
            "take": takes,
            "repeat": repeat,
            "scale": str(self.scale_of) if self.scale_of else scale,
            "offset": str(self.offset_of) if self.offset_of else self.offset or None,
            "pad": {name: tuple(widths) for name, widths in pads.items()},
            "fill": "target" if self.fill else None,
            "cast": cast,
            "multiply": self.multiply,
            "add": self.add,
        }
        return {name: value for name, value in every.items() if value}


@dataclasses.dataclass(frozen=True)
class Notes:
    """What is known of a row, forwards and backwards.

    Attributes:
        sizes: sizes of names in this row.
        checked: names of which somebody checked that they are not swapped.
        optional: whether it may match no leaf, as of a head that some models tie;
            ``COVERED`` for only where rows above it take all its leaves.
        copy: whether one side of it is a copy, which may be missing: of what another
            row takes, or fills. A text is the key of a configuration that says so.
        check: what the row rests on, if nobody compared the answers: ``"names"``.
    """

    sizes: tuple[tuple[str, int], ...] = ()
    checked: tuple[str, ...] = ()
    optional: bool | str = False
    check: str = ""
    copy: bool | str = False

    def __bool__(self) -> bool:
        return bool(self.typed())

    def reversed(self) -> Notes:
        """Return the notes of the row read backwards."""
        other = {COVERED: COVERS, COVERS: COVERED}.get(str(self.optional))
        return dataclasses.replace(self, optional=other or self.optional)

    def typed(self) -> dict[str, Any]:
        """Return the notes as they are written in a table."""
        every = {
            "sizes": dict(self.sizes),
            "checked": " ".join(self.checked),
            "optional": self.optional,
            "copy": self.copy,
            "check": self.check,
        }
        return {name: value for name, value in every.items() if value}


def parse_operations(
    row: str, typed: Mapping[Any, Any], sizes: Mapping[str, int] = NO_SIZES
) -> tuple[Values, Notes]:
    """Read what is next to a target.

    Args:
        row: text of the row, for messages.
        typed: as in a table.
        sizes: by names that may be in the place of numbers.

    Raises:
        MigrationError: something in it is unknown or malformed.
    """
    rest = {name: value for name, value in typed.items() if name not in NOTES}
    notes = {name: value for name, value in typed.items() if name in NOTES}
    if not notes or rest:
        return _values(row, rest, sizes), _notes(row, notes)
    return Values(), _notes(row, notes)


def as_size(number: Any) -> int:
    """Return a size as an int; 0 if it is not an integer above 0, of 64 bits."""
    try:
        size = 0 if isinstance(number, bool | np.bool_) else operator.index(number)
    except TypeError:
        size = 0
    return size if 0 < size < MAX_INTEGER else 0


def _notes(row: str, typed: Mapping[str, Any]) -> Notes:
    sizes, checked = typed.get("sizes", {}), typed.get("checked", "")
    if not isinstance(sizes, Mapping) or not all(map(as_size, sizes.values())):
        cure = "Write integers above 0, of at most 64 bits: {'sizes': {'h': 8}}"
        refuse(row, f"its sizes are {sizes!r:.80}", cure)
    if not isinstance(checked, str) or ("checked" in typed and not checked.split()):
        cure = "Write names with spaces between them: {'checked': 'h w'}"
        refuse(row, f"its checked is {checked!r:.80}", cure)
    optional = typed.get("optional", True)
    if optional is not True and optional not in (COVERED, COVERS):
        cure = "Leave it out for a row that must match"
        refuse(row, f"its optional is not True or {COVERED!r}", cure)
    copy = typed.get("copy", True)
    if copy is not True and not (isinstance(copy, str) and copy.isprintable() and copy):
        cure = "Write True, or the key of a configuration: 'tie_word_embeddings'"
        refuse(row, f"its copy is {copy!r:.80}", cure)
    check = typed.get("check", "names")
    is_text = isinstance(check, str) and check.strip() and check.isprintable()
    if not is_text or len(check) > _LONGEST_CHECK:
        cure = f"Write a line of 1 to {_LONGEST_CHECK} characters, or leave it out"
        refuse(row, f"its check is {check!r:.80}", cure)
    return Notes(
        tuple((str(name), as_size(size)) for name, size in sizes.items()),
        tuple(dict.fromkeys(checked.split())),
        optional if "optional" in typed else False,
        check if "check" in typed else "",
        copy if "copy" in typed else False,
    )


def _values(row: str, typed: Mapping[Any, Any], sizes: Mapping[str, int]) -> Values:
    """Read the operations of a row."""
    undoes = [*typed] == ["undo"]
    operations = typed["undo"] if undoes else typed
    if not isinstance(operations, Mapping) or not operations:
        refuse(row, f"{operations!r:.80} holds no operations", "Write {'scale': 2.0}")
    for name in operations:
        if name not in OPERATIONS:
            options = OPERATIONS if undoes else (*OPERATIONS, *NOTES)
            near = Speller().nearest(str(name), options, count=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            problem = f"{name!r:.80} is not an operation; {hint}known are"
            refuse(row, f"{problem} {listing(options)}", "Correct it")
    powers = {name: _power(operations.get(name)) for name in ("scale", "offset")}
    for name in (name for name, power in powers.items() if power is None):
        number = operations.get(name, 1)
        is_number = isinstance(number, float) or type(number) is int
        limit = sys.float_info.max if isinstance(number, float) else MAX_INTEGER - 1
        is_finite = is_number and abs(number) <= limit
        if not is_finite or (name, number) == ("scale", 0):
            cure = (
                "It is a finite number of at most 64 bits, and a scale is not 0; or a "
                "power of sizes, as 'd**-0.5', '(h d)**-0.5' or 'bfloat16(e**0.5)'"
            )
            refuse(row, f"its {name} is {number!r:.80}", cure)
    pad = operations.get("pad", {})
    pad_of = _named_widths(pad)
    for *_, name in pad_of:
        if not as_size(sizes.get(name)):
            cure = worded(f"sizes={{{name!r}: 3}}", f"[sizes] above {name} = 3")
            cure = f"Write it, as in {cure}"
            refuse(row, f"its pad is {pad!r:.80}, and there is no size {name!r}", cure)
    if pad_of:
        pad = {k: tuple(sizes.get(each, each) for each in v) for k, v in pad.items()}
    if not isinstance(pad, Mapping) or not all(map(_is_width, pad.values())):
        cure = "Write the zeros before and after: {'pad': {'v': (0, 47)}}"
        refuse(row, f"its pad is {pad!r:.80}", cure)
    if operations.get("fill", "target") != "target" or (
        "fill" in operations and not pad
    ):
        cure = "Write what is new next to it: {'pad': {'l': (0, 1)}, 'fill': 'target'}"
        refuse(row, f"its fill is {operations['fill']!r:.80}", cure)
    cast = operations.get("cast", ())
    dtypes = cast if isinstance(cast, list | tuple) else [cast]
    if len(dtypes) > 2 or ("cast" in operations and not dtypes) or None in dtypes:
        cure = "Write a dtype, or the old and the new"
        refuse(row, f"its cast is {cast!r:.80}", cure)
    values = Values(
        _repeat(row, operations["repeat"]) if "repeat" in operations else (),
        1.0 if powers["scale"] else float(operations.get("scale", 1)),
        0.0 if powers["offset"] else float(operations.get("offset", 0)),
        tuple((str(name), (width[0], width[1])) for name, width in pad.items()),
        "fill" in operations,
        tuple(_dtype(row, dtype) for dtype in dtypes),
        "multiply" in operations,
        add="add" in operations,
        take=_takes(row, operations.get("take", {}), is_there="take" in operations),
        scale_of=powers["scale"],
        offset_of=powers["offset"],
        pad_of=pad_of,
    )
    if values.multiply and (operations["multiply"] is not True or undoes):
        refuse(
            row, "its multiply is not True", "A product has no way back: leave it out"
        )
    if values.add and operations["add"] is not True:
        refuse(row, "its add is not True", "Leave it out for sources that are copies")
    return dataclasses.replace(values, undoes=undoes and bool(values))


def _takes(row: str, typed: Any, *, is_there: bool) -> tuple[tuple[str, Take], ...]:
    cure = (
        "Write each number once, {'take': {'p': [0, 2, 1, 3]}}; what is selected, "
        "{'take': {'v': ['0:8', 9], 'of': 12}}; or a slice, {'take': {'l': '::2'}}"
    )
    if not isinstance(typed, Mapping) or (is_there and not typed.keys() - {OF}):
        refuse(row, f"its take is {typed!r:.80}", cure)
    listed = [n for n, it in typed.items() if n != OF and not isinstance(it, str)]
    size = as_size(typed.get(OF, 1))
    if not size or (OF in typed and len(listed) != 1):
        refuse(
            row, f"its take has {OF!r}: {typed[OF]!r:.80}", f"It is of one list. {cure}"
        )
    takes = []
    for name in (name for name in typed if name != OF):
        take = parse_take(typed[name], size if OF in typed else 0)
        if isinstance(take, str):
            refuse(
                row, f"it takes {typed[name]!r:.80} of {name!r:.80}, and {take}", cure
            )
        takes.append((str(name), take))
    return tuple(takes)


def _repeat(row: str, typed: Any) -> tuple[tuple[str, int | None], ...]:
    if isinstance(typed, str) and typed:
        return ((typed, None),)
    is_mapping = isinstance(typed, Mapping) and typed
    if not is_mapping or not all(map(as_size, typed.values())):
        cure = "Write an axis of the target, {'repeat': 'r'}, or its size, {'r': 2}"
        refuse(row, f"its repeat is {typed!r:.80}", cure)
    return tuple((str(name), as_size(size)) for name, size in typed.items())


def _power(typed: Any) -> Power | None:
    """Return the power of sizes that a text is; None if it is not one."""
    text = typed if isinstance(typed, str) else ""
    rounded = _ROUNDED.fullmatch(text)
    match = _POWER.fullmatch(rounded["power"] if rounded else text)
    if match is None:
        return None
    names = tuple(match["name"].strip("()").split())
    exponent = float(match["exponent"] or 1)
    return Power(names, exponent, rounded["dtype"] if rounded else "")


def _named_widths(pad: Any) -> tuple[tuple[str, int, str], ...]:
    """Return where names are in the place of widths."""
    pairs = pad.items() if isinstance(pad, Mapping) else ()
    return tuple(
        (str(axis), place, width)
        for axis, widths in pairs
        if isinstance(widths, list | tuple)
        for place, width in enumerate(widths)
        if isinstance(width, str) and _SIZE_NAME.fullmatch(width)
    )


def _is_width(width: Any) -> bool:
    is_pair = isinstance(width, list | tuple) and len(width) == 2
    return is_pair and all(
        type(count) is int and 0 <= count < MAX_INTEGER for count in width
    )


def _dtype(row: str, typed: Any) -> str:
    is_name = isinstance(typed, str) and _DTYPE.fullmatch(typed)
    if is_name or isinstance(typed, type | np.dtype):
        with contextlib.suppress(TypeError):  # of a name that NumPy does not know
            dtype = jnp.dtype(typed)
            if jnp.issubdtype(dtype, np.number) or dtype == np.bool_:
                return str(dtype.name)
    return refuse(row, f"{typed!r:.80} is not a dtype", "Write one such as 'float32'")


def refuse(row: str, problem: str, cure: str) -> NoReturn:
    """Raise because a row contradicts itself.

    Raises:
        MigrationError: always.
    """
    raise MigrationError(f"The row {listing([row])} is malformed: {problem}. {cure}.")
