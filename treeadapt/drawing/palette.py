"""Colours of labels: told apart by everyone, on light and on dark ground.

They stay apart by at least 0.09 in OKLab for normal sight and for the three kinds of
colour blindness, and stand out from white and from near-black; a test computes both.
From the ninth label on they come again, striped. Numbers, such as learning rates, run
through one scale from dark to light instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

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


GAP = Paint(GAP_COLOR, "gap")
STATIC = Paint(STATIC_COLOR)
SIZES = Paint(HUES[0])  # where there are no labels


def paints(labels: Sequence[Any]) -> list[Paint]:
    """Give each label its paint; the order decides, and numbers by their rank.

    Args:
        labels: all different.

    Example:
        >>> [paint.color for paint in paints(["frozen", "train"])]
        ['#3377dd', '#dd8800']
        >>> [paint.color for paint in paints([1.0, 0.1, 0.01])]
        ['#e3cc36', '#179ccc', '#733699']
    """
    if len(labels) >= _FEWEST_NUMBERS and all(map(_is_number, labels)):
        ranks = sorted(range(len(labels)), key=lambda place: labels[place])
        found = {place: rank for rank, place in enumerate(ranks)}
        return [Paint(_mixed(found[i] / (len(labels) - 1))) for i in range(len(labels))]
    start = 1 if _FROZEN in [label for label in labels if type(label) is str] else 0
    others = 0
    made = []
    for label in labels:
        if type(label) is str and label == _FROZEN:
            made.append(Paint(HUES[0]))
            continue
        round_, place = divmod(start + others, len(HUES))
        others += 1
        made.append(Paint(HUES[place], "striped" if round_ % 2 else "plain"))
    return made


def _is_number(label: Any) -> bool:
    return type(label) in (int, float) and not math.isnan(label)


def _mixed(part: float) -> str:
    """Return the colour at a part of the scale, from 0 to 1."""
    place = part * (len(SCALE) - 1)
    low = min(int(place), len(SCALE) - 2)
    pairs = zip(_channels(SCALE[low]), _channels(SCALE[low + 1]), strict=True)
    mixed = (round(a + (b - a) * (place - low)) for a, b in pairs)
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def _channels(color: str) -> tuple[int, int, int]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)
