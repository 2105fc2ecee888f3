"""What a factor of a drafted row may follow from: powers of sizes, and quotients.

Takes a row and names for its atoms; gives how the factor is written, and what its
reader should know. A number that was seen at one size proves no formula: 0.125 is
64**-0.5, and 4.6875 is the root of 22 in bfloat16. Only an irrational root, to all
digits of float32, of one name or product alone, is written without a mark; one that was
rounded, if there is no other, with a mark.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from fractions import Fraction

import jax.numpy as jnp
import numpy as np

from treeadapt.porting.drafts.rows import DraftRow, Hole

_EXPONENTS = (0.5, -0.5, 1, -1)
_EXPONENTS_ELSEWHERE = (*_EXPONENTS, 0.25, -0.25)  # roots of roots, as of DeepNet
_TIMES = (2, 4, 8)  # how often a size may be in what a factor is a power of
_ROUNDINGS = ("bfloat16", "float16")
_NEAR = 2.0**-22  # of a power that was computed in float32, in two steps
_DIGITS = 2  # after the point, of what is over a root
_LARGEST_ABOVE = 2**12  # of the whole numbers that a size may divide
_LARGEST_BELOW = 2**7  # of the sizes that are not of the row itself
_ROOTS = {1.0: "", 0.5: "**0.5"}
_NEAR_WHOLE = 1e-6  # of what was rounded to float32
_LARGEST = 2**16  # of the sizes of which a factor of another model may be a power
_OF_ITSELF = (1.0, -1.0)  # numbers that no size gives


@dataclasses.dataclass(frozen=True)
class Factor:
    """How a factor is written.

    Attributes:
        value: the power of a size, or the number.
        has_powers: whether it is a power of sizes, or may be one.
        doubts: why it may be another number at other sizes; none if it is not.
    """

    value: str | float
    has_powers: bool = False
    doubts: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Power:
    """A power of a size, or of a product, that a factor is."""

    text: str
    is_rational: bool
    is_rounded: bool


def read_factor(row: DraftRow, names: Mapping[int, str]) -> Factor:
    """Return how the factor of a row is written.

    Args:
        row: with numbers for its atoms.
        names: of the atoms.
    """
    doubts: tuple[str, ...] = ()
    if row.offset not in (0.0, *_OF_ITSELF):
        doubts = (f"{row.offset:.9g} is added, and may be another number elsewhere",)
    if row.scale in _OF_ITSELF:
        return Factor(row.scale, doubts=doubts)
    powers = [*_powers(row, names)]
    is_root = len(powers) == 1 and not powers[0].is_rational
    if is_root and not powers[0].is_rounded:
        return Factor(powers[0].text, has_powers=True, doubts=doubts)
    follows = " and ".join(power.text for power in powers)
    follows = follows or "a number that no size here gives"
    doubt = f"{row.scale:.9g} is {follows}, and may be another one at other sizes"
    value = powers[0].text if is_root else row.scale
    return Factor(value, bool(powers), (doubt, *doubts))


def _powers(row: DraftRow, names: Mapping[int, str]) -> Iterator[_Power]:
    """Yield the powers of sizes that a factor is, as ``d**-0.5``, exact ones first."""
    tokens = [token for place in row.places for token in place.tokens]
    texts = {a for t in tokens if isinstance(t, Hole) and t.is_text for a in t.atoms}
    every: dict[tuple[int, ...], None]
    every = {(atom,): None for atom in sorted(names) if atom not in texts}
    for part in (p for place in row.places for axis in place.axes for p in axis):
        ends = itertools.combinations(range(len(part) + 1), 2)
        every |= dict.fromkeys(part[start:end] for start, end in ends)
    orders: dict[frozenset[int], tuple[int, ...]] = {}  # of one product, the first
    for atoms in every:
        orders.setdefault(frozenset(atoms), atoms)
    products = {
        atoms: math.prod(row.sizes.get(a, 0) for a in atoms)
        for atoms in orders.values()
    }
    for rounding in ("", *_ROUNDINGS):
        for atoms, size in products.items():
            for exponent in _EXPONENTS if size > 1 else ():
                is_rational = abs(exponent) == 1 or math.isqrt(size) ** 2 == size
                if not _is_power(row.scale, size, exponent, rounding):
                    continue
                text = " ".join(names[atom] for atom in atoms)
                text = f"{text if len(atoms) == 1 else f'({text})'}**{exponent}"
                text = f"{rounding}({text})" if rounding else text
                yield _Power(text, is_rational, bool(rounding))


def powers_of_divisors(
    factor: float, lengths: Collection[int], same: Collection[int] = ()
) -> dict[str, int]:
    """Return the powers that a factor is, rounded ones too, of what divides lengths.

    So are those of two, four or eight times that: twice as many as layers are added to
    the residual stream of GPT-2.

    Args:
        factor: a number, of either sign.
        lengths: of axes, or of several as one.
        same: lengths that count as they are, and not what divides them.

    Returns:
        By powers of whole numbers up to 65,536, as ``4**-0.5``, what lengths are no
        multiples of where the factor is none of these.
    """
    sign = "-" * (factor < 0)
    powers = {}
    for exponent in _EXPONENTS_ELSEWHERE if factor not in (0.0, *_OF_ITSELF) else ():
        near = abs(factor) ** (1 / exponent)
        if not 1 < near <= _LARGEST:
            continue
        roundings = ("", *_ROUNDINGS) if exponent in _EXPONENTS else ("",)
        for size in range(max(2, int(near / 1.02)), math.ceil(near * 1.02) + 1):
            if not any(_is_power(abs(factor), size, exponent, r) for r in roundings):
                continue
            ones = [
                size,
                *(size // n for n in _TIMES if size % n == 0 and size > 2 * n),
            ]
            if any(n in same or any(not x % n for x in lengths) for n in ones):
                power = f"**{exponent}" if exponent != 1 else ""
                powers[f"{sign}{size}{power}"] = min(ones)
    return powers


def over_sizes(
    factor: float,
    lengths: Collection[int],
    own: Collection[int],
    same: Collection[int] = (),
) -> dict[str, int]:
    """Return which whole numbers over a size, or its root, a factor is, as ``16/3``.

    Such as the alpha of LoRA over its rank, or over the root of that. Over roots there
    are numbers of two digits after the point, too: MiniCPM has 1.4 over that of layers.

    Args:
        factor: a number, of either sign.
        lengths: what the size may divide, if the quotient has no smaller numbers.
        own: sizes of the row itself, of which any whole number may be a multiple.
        same: further sizes, if the quotient has no smaller numbers, and their roots.

    Returns:
        The size, by its quotient.
    """
    if factor in (0.0, *_OF_ITSELF):
        return {}
    quotients = {}
    for size, (power, text) in itertools.product(own, _ROOTS.items()):
        above = factor * size**power
        whole = round(above)
        is_near = math.isclose(above, whole, rel_tol=_NEAR_WHOLE)
        if is_near and abs(whole) <= _LARGEST_ABOVE:
            quotients[f"{whole}/{size}{text}"] = size
    for size in (n for n in (*own, *same) if math.isqrt(n) ** 2 != n):
        above = factor * size**0.5
        short = round(above, _DIGITS)
        if short and math.isclose(above, short, rel_tol=_NEAR_WHOLE):
            quotients.setdefault(f"{short:g}/{size}**0.5", size)
    fraction = Fraction(factor).limit_denominator(_LARGEST_BELOW)
    below = fraction.denominator
    is_near = math.isclose(factor, fraction, rel_tol=_NEAR_WHOLE)
    if is_near and below > 2 and (below in same or any(not n % below for n in lengths)):
        quotients[f"{fraction}"] = below
    return quotients


def sizes_less_one(offset: float, sizes: Collection[int]) -> dict[str, int]:
    """Return of which size an offset is one less, as ``3 - 1``."""
    size = abs(offset) + 1
    if offset in (0.0, *_OF_ITSELF) or size not in sizes:
        return {}
    text = f"{size:.0f} - 1" if offset > 0 else f"1 - {size:.0f}"
    return {text: int(size)}


def _is_power(factor: float, size: int, exponent: float, rounding: str) -> bool:
    """Return whether a factor is a power, or what a dtype of 16 bits makes of it."""
    exact = size**exponent
    if not rounding:
        is_near = math.isclose(exact, factor, rel_tol=_NEAR)
        return is_near or bool(np.float32(exact) == np.float32(factor))
    number = _rounded(exact, rounding)
    # A whole root is what its rounding is.
    return number != exact and bool(np.float32(number) == np.float32(factor))


@functools.cache
def _rounded(number: float, dtype: str) -> float:
    """Return a number as it is in a dtype of 16 bits."""
    with np.errstate(over="ignore"):
        return float(jnp.dtype(dtype).type(number))
