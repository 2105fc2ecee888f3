"""Colours of labels, which everyone can distinguish on light and on dark ground.

They differ by at least 0.09 in OKLab for normal sight and for the three kinds of
colour blindness, and stand out from white and from near-black; a test computes both.
From the ninth label on they come again, striped. Numbers, such as learning rates, run
through one scale from dark to light instead.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from treeadapt.selection.decision import MISSING, STATIC

# The first is kept for what is frozen.
HUES = (
    "#3377dd",
    "#dd8800",
    "#aa2255",
    "#00ccdd",
    "#ff3388",
    "#774499",
    "#8899ff",
    "#aa6633",
)
SCALE = ("#733699", "#5a66cf", "#179ccc", "#0dca94", "#e3cc36")
STATIC_COLOR = "#8b929b"
GAP_COLOR = "#d1242f"
_FROZEN = "frozen"
_FEWEST_NUMBERS = 3  # that make a scale

Texture = Literal["plain", "striped", "gap"]


class Paint(NamedTuple):
    """How a label looks.

    Attributes:
        color: ``#rrggbb``.
        texture: ``"plain"``, ``"striped"``, or ``"gap"`` for leaves without a label.
    """

    color: str
    texture: Texture = "plain"


SIZES = Paint(HUES[0])  # where there are no labels
REST = Paint(STATIC_COLOR, "striped")  # several labels in one line


def paints(labels: Sequence[Any]) -> list[Paint]:
    """Give each label its paint; the order decides, and numbers by their rank.

    Args:
        labels: all different; ``STATIC`` and ``MISSING``, which is none, have their
            own.

    Example:
        >>> [paint.color for paint in paints(["frozen", "train"])]
        ['#3377dd', '#dd8800']
        >>> [paint.color for paint in paints([1.0, 0.1, 0.01])]
        ['#e3cc36', '#179ccc', '#733699']
    """
    special = {id(MISSING): Paint(GAP_COLOR, "gap"), id(STATIC): Paint(STATIC_COLOR)}
    ordinary = [label for label in labels if id(label) not in special]
    is_scale = len(ordinary) >= _FEWEST_NUMBERS and all(map(_is_number, ordinary))
    rest = iter(_scale(ordinary) if is_scale else _hues(ordinary))
    return [special.get(id(label)) or next(rest) for label in labels]


def _hues(labels: Sequence[Any]) -> Iterator[Paint]:
    """Yield the hues in turn, striped every other round; the first is for frozen."""
    is_frozen = [type(label) is str and label == _FROZEN for label in labels]
    others = itertools.count(int(any(is_frozen)))
    for yes in is_frozen:
        turn, place = divmod(0 if yes else next(others), len(HUES))
        yield Paint(HUES[place], "striped" if turn % 2 else "plain")


def _scale(labels: Sequence[Any]) -> list[Paint]:
    """Return colours of the scale, by rank."""
    ranks = sorted(range(len(labels)), key=lambda place: labels[place])
    shares = {place: rank / (len(labels) - 1) for rank, place in enumerate(ranks)}
    return [Paint(_mixed(shares[place])) for place in range(len(labels))]


def _is_number(label: Any) -> bool:
    return type(label) in (int, float) and not math.isnan(label)


def _mixed(part: float) -> str:
    """Return the colour at a part of the scale, from 0 to 1."""
    channels = zip(*(bytes.fromhex(color[1:]) for color in SCALE), strict=True)
    place, places = part * (len(SCALE) - 1), range(len(SCALE))
    return "#" + bytes(round(np.interp(place, places, one)) for one in channels).hex()
