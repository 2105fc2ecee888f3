"""Slices: names for some of the layers of an array that holds a stack of them.

``blocks/{4..11}/attn/kernel`` names layers 4 to 11 of the array that is stored at
``blocks/attn/kernel``: the numbers are put in after the stack. As a pattern, the name
matches just these layers of the unrolled model.
See ``selection.stacks`` for what a stack is, ``transforms.cuts`` for the arrays.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

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
        path = "/".join(filter(None, (head, _text(sets[key]), tail.strip("/"))))
    return path


def read_slice_key(key: str) -> tuple[str, Sets] | None:
    """Read the name of some layers of an array.

    Returns:
        Path of the array in the stored tree, and the layers; None if ``key`` is not
        such a name.

    Example:
        >>> read_slice_key("blocks/{4..6}/attn/kernel")
        ('blocks/attn/kernel', (('blocks', (4, 5, 6)),))
    """
    if "{" not in key:
        return None
    path: list[str] = []
    sets: list[tuple[str, tuple[int, ...]]] = []
    for segment in key.split("/"):
        layers = _layers(segment) if _LAYERS.fullmatch(segment) else None
        if layers:
            sets.append(("/".join(path), layers))
        else:
            path.append(segment)
    return ("/".join(path), tuple(sets)) if sets else None


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


def _text(layers: Sequence[int]) -> str:
    texts = [
        f"{{{first}}}" if end == first + 1 else f"{{{first}..{end - 1}}}"
        for first, end in runs(layers)
    ]
    return texts[0] if len(texts) == 1 else f"{{{','.join(texts)}}}"


def _layers(segment: str) -> tuple[int, ...] | None:
    """Return the numbers that a segment lists; None if it does not as ours do."""
    ends = [(int(one), int(two or one) + 1) for one, two in _ENDS.findall(segment)]
    if sum(max(end - first, 0) for first, end in ends) > MAX_LAYERS:
        return None
    found = tuple(itertools.chain.from_iterable(range(*each) for each in ends))
    return found if found and _text(found) == segment else None
