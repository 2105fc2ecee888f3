"""Keys: texts for the numbers of layers, and layers that have one value.

See ``region`` for what they are used for.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Hashable, Iterator, Sequence
from typing import TypeVar

V = TypeVar("V", bound=Hashable)

_RUN = r"\{[0-9]{1,7}(?:\.\.[0-9]{1,7})?\}"
_LAYERS = re.compile(rf"({_RUN}|\{{{_RUN}(?:,{_RUN})+\}})(?:@([1-9][0-9]?))?")
_ENDS = re.compile(r"\{([0-9]+)(?:\.\.([0-9]+))?\}")
MAX_LAYERS = 1_000_000


def runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first number and the end of each run of ascending numbers.

    Example:
        >>> list(runs([0, 1, 2, 7]))
        [(0, 3), (7, 8)]
    """
    # Numbers that follow each other are at one distance from their places.
    by_run = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    for _, group in by_run:
        members = [number for _, number in group]
        yield members[0], members[-1] + 1


def boxes(
    values: Sequence[V], sizes: Sequence[int]
) -> dict[V, list[tuple[tuple[int, ...], ...]]]:
    """Divide a grid into boxes of one value each: sets of places along each axis.

    Args:
        values: one for each place, those along the last axis next to each other.
        sizes: of the axes.

    Example:
        >>> boxes("aabaab", (2, 3))
        {'a': [((0, 1), (0, 1))], 'b': [((0, 1), (2,))]}
    """
    if not sizes:
        return {values[0]: [()]}
    if len(sizes) == 1:  # as below, in a tenth of the time
        numbers: dict[V, list[int]] = {}
        for place, value in enumerate(values):
            numbers.setdefault(value, []).append(place)
        return {value: [(tuple(line),)] for value, line in numbers.items()}
    places: dict[tuple[V, tuple[tuple[int, ...], ...]], list[int]] = {}
    step = len(values) // sizes[0]
    for place in range(sizes[0]):
        part = values[place * step : (place + 1) * step]
        for value, inner in boxes(part, sizes[1:]).items():
            for box in inner:
                places.setdefault((value, box), []).append(place)
    by_value: dict[V, list[tuple[tuple[int, ...], ...]]] = {}
    for (value, box), line in places.items():
        by_value.setdefault(value, []).append((tuple(line), *box))
    return by_value


def runs_text(numbers: Sequence[int]) -> str:
    """Write ascending numbers as a segment of a pattern that matches just these.

    Example:
        >>> runs_text([3]), runs_text([4, 5, 6]), runs_text([0, 1, 5])
        ('{3}', '{4..6}', '{{0..1},{5}}')
    """
    texts = [
        f"{{{first}}}" if end == first + 1 else f"{{{first}..{end - 1}}}"
        for first, end in runs(numbers)
    ]
    return texts[0] if len(texts) == 1 else f"{{{','.join(texts)}}}"


def read_layers(segment: str) -> tuple[tuple[int, ...], int] | None:
    """Read the numbers that a segment of a key lists, and their axis.

    Returns:
        None if it does not list any as ours do.

    Example:
        >>> read_layers("{4..6}"), read_layers("{4}@1"), read_layers("{4..4}")
        (((4, 5, 6), 0), ((4,), 1), None)
    """
    match = _LAYERS.fullmatch(segment)
    if match is None:
        return None
    ends = [(int(one), int(two or one) + 1) for one, two in _ENDS.findall(match[1])]
    if sum(max(end - first, 0) for first, end in ends) > MAX_LAYERS:
        return None
    numbers = tuple(itertools.chain.from_iterable(range(*each) for each in ends))
    is_ours = numbers and runs_text(numbers) == match[1]
    return (numbers, int(match[2] or 0)) if is_ours else None
