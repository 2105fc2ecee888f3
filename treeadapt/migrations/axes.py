"""Axes: how the indices of an array are written, in the notation of einops.

Takes the text after `` : `` of an address and gives one ``Axis`` for each axis of the
array. An axis is a name, ``1``, a product ``(h d)``, ``...`` for all further axes, or
``[(h d) (k d)]``, parts one after the other, which ``(g [(r d) d d])`` has for each
``g``. Sizes are found in ``solving``.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

from treeadapt.migrations.templates import malformed

REST = "..."
MAX_AXES = 64  # of NumPy's arrays

#: Names whose sizes multiply; none for an axis of size 1.
Product: TypeAlias = tuple[str, ...]

_TOKEN = re.compile(r" +|\.\.\.|[A-Za-z_]\w*|1(?!\w)|[()\[\]]")


@dataclasses.dataclass(frozen=True)
class Axis:
    """One axis of an array.

    Attributes:
        parts: one product; several where the parts of a concatenation follow each
            other along the axis.
        before: how many names of each part are before the bracket: for each of their
            values the parts follow each other.
    """

    parts: tuple[Product, ...]
    before: int = 0

    @property
    def name(self) -> str | None:
        """The name that is alone on the axis."""
        is_alone = len(self.parts) == 1 and len(self.parts[0]) == 1
        return self.parts[0][0] if is_alone else None

    def product(self, part: int) -> Product:
        """Return its names in one part of the concatenation, whichever axis that is."""
        return self.parts[part if len(self.parts) > 1 else 0]

    @property
    def outer(self) -> Product:
        """Its names before the bracket."""
        return self.parts[0][: self.before]

    def inner(self, part: int) -> Product:
        """Return the names of one part that are not before the bracket."""
        return self.product(part)[self.before :]

    @property
    def text(self) -> str:
        """It as it is written in an address."""
        texts = [product_text(self.inner(n)) for n in range(len(self.parts))]
        if len(texts) == 1:
            return product_text(self.parts[0])
        parts = f"[{' '.join(texts)}]"
        return f"({' '.join(self.outer)} {parts})" if self.before else parts


def product_text(product: Product) -> str:
    """Write the names of one axis, in parentheses if there are several."""
    if not product:
        return "1"
    return product[0] if len(product) == 1 else f"({' '.join(product)})"


Axes: TypeAlias = tuple[Axis, ...]

#: What an address without axes means.
ANY_AXES: Axes = (Axis(((REST,),)),)


def indices(
    names: Iterable[str], sizes: Mapping[str, int]
) -> Iterator[tuple[int, ...]]:
    """Yield all values of some names, the last one fastest.

    Example:
        >>> list(indices(["l", "x"], {"l": 2, "x": 1}))
        [(0, 0), (1, 0)]
    """
    return itertools.product(*(range(sizes[name]) for name in names))


def parts_of(axes: Axes) -> int:
    """Return the number of parts of the concatenation; 1 without one."""
    return max((len(axis.parts) for axis in axes), default=1)


def every_name(axes: Axes) -> Iterator[str]:
    """Yield the names of all axes and parts, each as often as it is there.

    Example:
        >>> list(every_name(parse_axes("w : e [(h d) (k d)]", 4)))
        ['e', 'h', 'd', 'k', 'd']
    """
    for axis in axes:
        yield from itertools.chain(*axis.parts)


def names_of(axes: Axes, part: int) -> list[str]:
    """Return the names of the axes, in order, in one part of the concatenation.

    Example:
        >>> axes = parse_axes("w : e [(h d) (k d)]", 4)
        >>> names_of(axes, 0), names_of(axes, 1)
        (['e', 'h', 'd'], ['e', 'k', 'd'])
    """
    return [name for axis in axes for name in axis.product(part)]


def run_together(
    one: Iterable[str], two: Iterable[str], captured: Iterable[str]
) -> str:
    """Return the name on one of two sides that may be several, without spaces.

    Its letters are those of a name of the other side, but for what paths capture.

    Example:
        >>> run_together(["oi"], ["lio"], ["l"]), run_together(["kv"], ["q"], [])
        ('lio', '')
    """
    pairs = itertools.product(sorted({*one}), sorted({*two}))
    for pair in pairs:
        short, long = sorted(pair, key=len)
        letters = {*short}, {*long}
        is_alike = letters[0] <= letters[1] <= letters[0].union(captured)
        if is_alike and long.isalpha() and 1 < len(short) == len(letters[0]):
            return long
    return ""


def renamed(axes: Axes, names: Mapping[str, str]) -> Axes:
    """Return axes with other names.

    Example:
        >>> renamed(parse_axes("w : (h d)", 4), {"h": "k"})
        (Axis(parts=(('k', 'd'),), before=0),)
    """
    return tuple(
        Axis(
            tuple(tuple(names.get(n, n) for n in part) for part in axis.parts),
            axis.before,
        )
        for axis in axes
    )


def parse_axes(row: str, start: int) -> Axes:
    """Parse the axes of one address.

    Args:
        row: text of the address.
        start: column at which its axes start.

    Raises:
        MigrationError: the text is malformed; points at the column.

    Example:
        >>> parse_axes("w : (h d) 1", 4)
        (Axis(parts=(('h', 'd'),), before=0), Axis(parts=((),), before=0))
        >>> parse_axes("w : (g [(r d) d])", 4)
        (Axis(parts=(('g', 'r', 'd'), ('g', 'd')), before=1),)
    """
    axes: list[Axis] = []
    products: list[Product] | None = None  # of the parenthesis, one for each part
    parts: list[Product] | None = None  # of the bracket that is open
    part: Product | None = None  # of the parenthesis in it
    before, place = 0, start
    while place < len(row):
        token = _TOKEN.match(row, place)
        if token is None:
            cure = "Axes are names, 1, (a b), [a b] and ..., with spaces between them"
            malformed(row, place, f"{row[place]!r} is not an axis", cure)
        text = token[0]
        if text == "(" and parts is not None and part is None:
            part = ()
        elif text == "(" and products is None and parts is None:
            products, before = [()], 0
        elif text == ")" and parts is not None and part is not None:
            parts, part = [*parts, part], None
        elif text == ")" and parts is None and products is not None:
            axes.append(Axis(tuple(products), before))
            products = None
        elif text == "[" and parts is None and len(products or ()) < 2:
            parts = []
        elif text == "]" and parts is not None and part is None:
            if len(parts) < 2:
                cure = "Write one part for each address on the other side"
                malformed(row, place, "a concatenation has one part", cure)
            if products is None:
                axes.append(Axis(tuple(parts)))
            else:
                (outer,), before = products, len(products[0])
                products = [outer + each for each in parts]
            parts = None
        elif text == REST and (parts is not None or products is not None):
            malformed(row, place, "... in brackets", "Let it be an axis of its own")
        elif text in "()[]":
            cure = "One bracket may be in a parenthesis: (g [(r d) d d])"
            malformed(row, place, f"a {text!r} out of place", cure)
        elif text.strip():
            names = () if text == "1" else (text,)
            if part is not None:
                part += names
            elif parts is not None:
                parts.append(names)
            elif products is not None:
                products = [each + names for each in products]
            else:
                axes.append(Axis((names,)))
        place = token.end()
    if parts is not None or products is not None:
        malformed(row, len(row) - 1, "a bracket is open", "Close it")
    _check(row, start, tuple(axes))
    return tuple(axes)


def _check(row: str, start: int, axes: Axes) -> None:
    """Raise where a name is on two axes, or two axes are concatenations."""
    if sum(len(axis.parts) > 1 for axis in axes) > 1:
        malformed(row, start, "two concatenations", "Write two rows")
    for part in range(parts_of(axes)):
        names = names_of(axes, part)
        if len(names) > MAX_AXES:
            problem = f"{len(names):,} names, and arrays have {MAX_AXES} axes at most"
            malformed(row, start, problem, "Name several axes as one")
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            cure = "Give each axis a name of its own"
            malformed(row, start, f"{twice[0]!r} is there twice", cure)
