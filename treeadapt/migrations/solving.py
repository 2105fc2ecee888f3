"""Sizes of axes: solved from the shapes of arrays.

Takes what is known and equations, each the size of one axis of one array; adds what
follows from them. An equation with one open name is linear, also in a concatenation.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator

from treeadapt.migrations.axes import Product


@dataclasses.dataclass(frozen=True)
class Equation:
    """The size of one axis: the sum of the products of its parts.

    Attributes:
        parts: names whose sizes multiply, for each part.
        size: the sum.
        where: which axis of which array, for messages.
        before: how many names of each part are before the bracket.
    """

    parts: tuple[Product, ...]
    size: int
    where: str
    before: int = 0


def solve(equations: Iterable[Equation], sizes: dict[str, int]) -> Iterator[str]:
    """Add to ``sizes`` what follows from the equations; yield what contradicts them.

    A name whose factor is 0 stays open: any size would do.

    Example:
        >>> sizes = {"h": 2, "d": 4}
        >>> fused = Equation((("h", "d"), ("k", "d")), 20, "axis 0 of 'w'")
        >>> list(solve([fused], sizes))
        []
        >>> sizes
        {'h': 2, 'd': 4, 'k': 3}
    """
    waiting = list(equations)
    count = -1
    while count != len(waiting):
        count, left = len(waiting), waiting
        waiting = []
        for equation in left:
            names = {n for part in equation.parts for n in part if n not in sizes}
            if len(names) > 1:
                waiting.append(equation)
                continue
            name = names.pop() if names else ""
            constant = factor = 0
            for part in equation.parts:
                product = math.prod(sizes[each] for each in part if each != name)
                if name in part:
                    factor += product
                else:
                    constant += product
            size, rest = divmod(equation.size - constant, factor) if factor else (0, 0)
            if name and not factor and constant == equation.size:
                waiting.append(equation)
            elif rest or size < 0 or (not factor and constant != equation.size):
                yield _contradiction(equation, sizes)
            elif name:
                sizes[name] = size


def _contradiction(equation: Equation, sizes: dict[str, int]) -> str:
    names = dict.fromkeys(name for part in equation.parts for name in part)
    values = ", ".join(f"{name}={sizes[name]}" for name in names if name in sizes)
    outer = equation.parts[0][: equation.before]
    inner = [" ".join(part[equation.before :]) or "1" for part in equation.parts]
    text = " ".join(f"({part})" if " " in part else part for part in inner)
    if len(inner) > 1:
        text = f"[{text}]"
    if outer:
        text = f"({' '.join(outer)} {text})"
    shown = f"and {text} has {values}" if values else "and the row has 1"
    if equation.size < 0:
        shown = "which no axis has"
    return f"{equation.where} has size {equation.size:,}, {shown}"
