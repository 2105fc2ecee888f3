"""What is paired already next to a leaf: neighbours go to neighbours."""

from __future__ import annotations

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

_SEGMENT = re.compile(r"(^|[/.])[^/.]*$")


class Anchors:
    """Pairs of families, and how many there are below what is above each leaf.

    Attributes:
        pairs: their texts.
        counts: how many pairs are below a text, of each side.
        both: how many are below one text of each side.
    """

    def __init__(self, pairs: Sequence[tuple[str, str]]) -> None:
        self.pairs = {*pairs}
        self.counts: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
        self.both: dict[str, Counter[str]] = defaultdict(Counter)
        for a, b in pairs:
            ones, twos = prefixes(a), prefixes(b)
            self.counts[0].update(ones)
            self.counts[1].update(twos)
            for p in ones:
                self.both[p].update(twos)

    def contradict(self, a: str, b: str) -> bool:
        """Return whether what is next to one leaf goes to a sibling of the other.

        As ``tail/w`` to ``h/#/w``, where other leaves of ``tail`` go to ``t/#``, and
        there are others in ``h/#``.
        """
        itself = int((a, b) in self.pairs)
        for p in prefixes(a):
            near = self.both.get(p, Counter())
            for q in prefixes(b):
                is_apart = near[q] <= itself < self.counts[1][q]
                if is_apart and any(_are_siblings(q, other) for other in near):
                    return True
        return False


def _are_siblings(one: str, two: str) -> bool:
    """Return whether two texts differ in the last segment only.

    Example:
        >>> _are_siblings("h/#/attn", "h/#/mlp"), _are_siblings("h", "h/#")
        (True, False)
    """
    return one != two and _SEGMENT.sub("", one) == _SEGMENT.sub("", two)


@functools.lru_cache(maxsize=20_000)
def prefixes(text: str) -> list[str]:
    """Return what is above a leaf, at each depth.

    Example:
        >>> prefixes("h.#.attn/q")
        ['h', 'h.#', 'h.#.attn']
    """
    places = [i for i, char in enumerate(text) if char in "/."]
    return [text[:i] for i in places] or [""]
