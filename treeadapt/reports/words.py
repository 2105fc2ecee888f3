"""Words on a picture: sizes, shares, and names that fit where they stand.

A name may be anything that a checkpoint holds, so all of it goes through ``printable``.
"""

from __future__ import annotations

import unicodedata


def count_text(count: int) -> str:
    """Write a number of parameters for people.

    Example:
        >>> count_text(950), count_text(124_439_808), count_text(1_300_000_000)
        ('950', '124M', '1.30B')
    """
    size, units = float(count), ["", "k", "M", "B", "T"]
    while size >= 999.5 and len(units) > 1:
        size, units = size / 1000, units[1:]
    digits = 0 if not units[0] or size >= 99.5 else 1 if size >= 9.95 else 2
    return f"{size:.{digits}f}{units[0]}"


def share_text(part: float) -> str:
    """Write a part of one; nothing that is there reads as nothing, or as all.

    Example:
        >>> share_text(0.253), share_text(1e-9), share_text(1 - 1e-9), share_text(1)
        ('25%', '<1%', '>99%', '100%')
    """
    if 0 < part < 0.01:
        return "<1%"
    return ">99%" if 0.99 < part < 1 else f"{part:.0%}"


def printable(text: str) -> str:
    r"""Escape what does not print: control characters, unpaired surrogates.

    Example:
        >>> printable("a/b"), printable("a\x1b[1m")
        ('a/b', 'a\\x1b[1m')
    """
    return text if text.isprintable() else repr(text)[1:-1]


def columns(text: str) -> int:
    """Return how many columns of a fixed-width font a text takes.

    Example:
        >>> columns("abc"), columns("層")
        (3, 2)
    """
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(one) in "WF" for one in text)
    above = sum(unicodedata.combining(one) > 0 for one in text)
    return len(text) + wide - above


def fitted(text: str, width: int, *, middle: bool = False) -> str:
    """Shorten a text to a number of columns.

    Args:
        text: to shorten.
        width: columns to fit into, at least 1.
        middle: cut in the middle, as of a path, whose ends say most.

    Example:
        >>> fitted("transformer/block/kernel", 14), fitted("a/b/c/d/e", 7, middle=True)
        ('transformer/b…', 'a/b…d/e')
    """
    if columns(text) <= width:
        return text
    keep = max(width - 1, 0)
    tail = keep // 2 if middle else 0
    start = _prefix(text, keep - tail)
    return f"{start}…{_prefix(text[::-1], tail)[::-1]}"


def _prefix(text: str, width: int) -> str:
    text = text[: 2 * width]  # more cannot fit, however long it is
    while columns(text) > width:
        text = text[:-1]
    return text
