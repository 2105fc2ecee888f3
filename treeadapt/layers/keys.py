"""Slices: names for some of the layers of an array that holds a stack of them.

``blocks/{4..11}/attn/kernel`` names layers 4 to 11 of the array that is stored at
``blocks/attn/kernel``: the numbers are put in after the stack. As a pattern, the name
matches just these layers of the unrolled model.
See ``stacks`` for what a stack is, ``region`` for the arrays.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TypeVar

V = TypeVar("V", bound=Hashable)

_RUN = r"\{[0-9]{1,7}(?:\.\.[0-9]{1,7})?\}"
_LAYERS = re.compile(rf"{_RUN}|\{{{_RUN}(?:,{_RUN})+\}}")
_ENDS = re.compile(r"\{([0-9]+)(?:\.\.([0-9]+))?\}")
MAX_LAYERS = 1_000_000

#: Layers by the key of their stack, the outermost stack first.
Sets = tuple[tuple[str, tuple[int, ...]], ...]


def slice_key(path: str, sets: Mapping[str, Sequence[int]]) -> str:
    """Name some layers of an array.

    Args:
        path: of the array in the stored tree.
        sets: ascending numbers of the layers, by the key of each stack above it.

    Example:
        >>> slice_key("blocks/attn/kernel", {"blocks": [4, 5, 6]})
        'blocks/{4..6}/attn/kernel'
        >>> slice_key("blocks/experts/w", {"blocks": [0, 1, 5], "blocks/experts": [2]})
        'blocks/{{0..1},{5}}/experts/{2}/w'
    """
    for key in sorted(sets, key=len, reverse=True):
        head, tail = path[: len(key)], path[len(key) :]
        path = "/".join(filter(None, (head, runs_text(sets[key]), tail.strip("/"))))
    return path


def read_slice_key(key: str) -> tuple[str, Sets]:
    """Read the name of some layers of an array.

    Returns:
        Path of the array in the stored tree, and the layers; no layers, and ``key``
        itself, if it is not such a name.

    Example:
        >>> read_slice_key("blocks/{4..6}/attn/kernel")
        ('blocks/attn/kernel', (('blocks', (4, 5, 6)),))
        >>> read_slice_key("blocks/attn/kernel")
        ('blocks/attn/kernel', ())
    """
    if "{" not in key:
        return key, ()
    path: list[str] = []
    sets: list[tuple[str, tuple[int, ...]]] = []
    for segment in key.split("/"):
        layers = _layers(segment) if _LAYERS.fullmatch(segment) else None
        if layers:
            sets.append(("/".join(path), layers))
        else:
            path.append(segment)
    return ("/".join(path), tuple(sets)) if sets else (key, ())


def runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first number and the end of each run of ascending numbers.

    Example:
        >>> list(runs([0, 1, 2, 7]))
        [(0, 3), (7, 8)]
    """
    for _, group in itertools.groupby(
        enumerate(numbers), lambda pair: pair[1] - pair[0]
    ):
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
    places: dict[tuple[V, tuple[tuple[int, ...], ...]], list[int]] = {}
    step = len(values) // sizes[0]
    for place in range(sizes[0]):
        part = values[place * step : (place + 1) * step]
        for value, inner in boxes(part, sizes[1:]).items():
            for box in inner:
                places.setdefault((value, box), []).append(place)
    found: dict[V, list[tuple[tuple[int, ...], ...]]] = {}
    for (value, box), own in places.items():
        found.setdefault(value, []).append((tuple(own), *box))
    return found


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


def _layers(segment: str) -> tuple[int, ...] | None:
    """Return the numbers that a segment lists; None if it does not as ours do."""
    ends = [(int(one), int(two or one) + 1) for one, two in _ENDS.findall(segment)]
    if sum(max(end - first, 0) for first, end in ends) > MAX_LAYERS:
        return None
    found = tuple(itertools.chain.from_iterable(range(*each) for each in ends))
    return found if found and runs_text(found) == segment else None
