"""Alternatives of a pattern that match nothing, while the pattern does.

``**/{norm,kernl}`` selects the norms, and what is wrong with it shows nowhere else.
Takes the table of leaves after a decision, and asks each alternative alone: patterns of
one alternative each, never their product. Where a name is near that the pattern does
not take, or the numbered siblings lack a number, it reads like a mistake; otherwise it
may be a habit, because one table serves several models.
See ``selectors`` and ``decision`` for who warns, ``reports`` for who notes.
"""

from __future__ import annotations

import difflib
import functools
import operator
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from treeadapt.errors import UnusedAlternativeWarning, explaining
from treeadapt.patterns.glob import REGEX_PREFIX, Pattern, alternatives, escape
from treeadapt.patterns.matcher import Matcher
from treeadapt.selection.leaves import Leaves
from treeadapt.selection.messages import ALLOWED
from treeadapt.selection.repairs import LIKE_RANGE, Names, globs_of
from treeadapt.text.names import listing, plural, section
from treeadapt.trees import paths as _paths
from treeadapt.trees.views import Plan

_MOST = 64  # alternatives of one pattern
_MOST_OF_ALL = 4_096  # of all patterns of a table
_FIRST_CHUNK = 512  # leaves that are asked first; mostly they settle all
_RANGE = re.compile(r"[0-9]+\.\.([0-9]+)")
_WORD = re.compile(r"[a-z]+|[0-9]+")
_LEAST_TYPO = 4  # letters; a shorter word with another letter is another word
_LIKE = 0.75
_MOST_LETTERS = 40  # of a word that is compared
_MOST_MORE = 3  # characters of a name that another one lacks
_LIBRARY = re.compile(r"(treeadapt|optax|flax|jax)\.")


_Parts: TypeAlias = tuple[str, str, str]  # before an alternative, itself, and after it


class UnusedAlternative(NamedTuple):
    """An alternative that matches no leaf, and no None.

    Attributes:
        rule: index of the selector that has the pattern.
        pattern: as it was typed.
        text: the alternative, as it was typed.
        hint: what reads like a mistake; empty if nothing does.
    """

    rule: int
    pattern: str
    text: str
    hint: str

    @property
    def line(self) -> str:
        """What is wrong, without its rule."""
        number = _RANGE.fullmatch(self.text)
        what = f"the end of {self.text!r}" if number else repr(self.text)
        hint = f": {self.hint}" if self.hint else ""
        return f"{what} in {listing([self.pattern])} matches nothing{hint}"


def unused_alternatives(
    leaves: Leaves, patterns: Iterable[tuple[int, str]]
) -> list[UnusedAlternative]:
    """Return the alternatives that match nothing, of patterns that match something.

    Args:
        leaves: the table of a whole tree.
        patterns: each with the index of its selector.
    """
    asked = [*_asked(leaves, patterns)]
    globs = [*globs_of(_alone(*parts) for *_, parts in asked)]
    idle = {glob.text for glob in _idle(globs, leaves.view.plan)}
    names = Names(leaves.view, leaves.spread(leaves.is_array)) if idle else None
    return [
        UnusedAlternative(rule, pattern, parts[1], _hint(pattern, parts, names))
        for rule, pattern, parts in dict.fromkeys(asked)
        if names and _alone(*parts) in idle
    ]


def warn_of_alternatives(
    leaves: Leaves, patterns: Iterable[tuple[int, str]], whose: str
) -> None:
    """Warn of alternatives that read like a mistake, found once a tree.

    Args:
        leaves: as for ``unused_alternatives``.
        patterns: as for ``unused_alternatives``.
        whose: ``"rule"``, whose number is named, or ``"selector"``.

    Warns:
        UnusedAlternativeWarning: it names what is near.
    """
    plan, key = leaves.view.plan, (leaves.matcher, whose)
    text = plan.memo.get(key)
    if text is None:
        with explaining():
            text = plan.remember(key, _mistakes(leaves, patterns, whose))
    if text:
        warnings.warn(text, UnusedAlternativeWarning, stacklevel=_level())


def _mistakes(leaves: Leaves, patterns: Iterable[tuple[int, str]], whose: str) -> str:
    """Write the warning; empty if nothing reads like a mistake."""
    rows = [
        one.line + (f" (rule {one.rule + 1})" if whose == "rule" else "")
        for one in unused_alternatives(leaves, patterns)
        if one.hint
    ]
    if not rows:
        return ""
    verb = "reads" if len(rows) == 1 else "read"
    title = f"{plural(len(rows), 'alternative')} of a {whose} {verb} like a mistake:"
    cure = 'Correct or remove it, or allow it with unused="ignore".'
    if whose == "rule":
        cure = f"Correct or remove it, or allow it: {ALLOWED}."
    return "\n".join([*section(title, rows), cure])


def _asked(
    leaves: Leaves, patterns: Iterable[tuple[int, str]]
) -> Iterator[tuple[int, str, _Parts]]:
    """Yield index and pattern, and the parts of each alternative."""
    left = _MOST_OF_ALL
    for rule, pattern in patterns:
        is_glob = "{" in pattern and not pattern.startswith(REGEX_PREFIX)
        if not is_glob or pattern.count(",") + pattern.count("{") > _MOST:
            continue
        if not leaves.is_used(pattern):
            continue
        for parts in alternatives(pattern):
            left -= 1
            if left < 0:
                return
            alone = _alone(*parts)
            # Otherwise the text means something else without the braces.
            if alone.count("**") == pattern.count("**") and alone[:3] != REGEX_PREFIX:
                yield rule, pattern, parts


def _alone(before: str, text: str, after: str) -> str:
    """Return the pattern of one alternative; of a range, of its last number."""
    number = _RANGE.fullmatch(text)
    return before + (number[1] if number else text) + after


def _idle(globs: Sequence[Pattern], plan: Plan) -> Sequence[Pattern]:
    """Return the patterns that match no leaf and no None; mostly the first show that.

    Segments that no path has settle others, before all paths are asked.
    """
    places = (*plan.nones, *plan.paths)
    globs = _unseen(globs, plan, places[:_FIRST_CHUNK])
    rest = places[_FIRST_CHUNK:]
    if not globs or not rest:
        return globs
    words = frozenset(_paths.SEPARATOR.join(places).split(_paths.SEPARATOR))
    absent = [glob for glob in globs if not words.issuperset(glob.literals)]
    return absent + _unseen([g for g in globs if g not in absent], plan, rest)


def _unseen(
    globs: Sequence[Pattern], plan: Plan, places: Sequence[str]
) -> list[Pattern]:
    masks = Matcher(globs).match(plan, places) if globs else ()
    seen = functools.reduce(operator.or_, masks, 0)
    return [glob for place, glob in enumerate(globs) if not seen >> place & 1]


def _hint(pattern: str, parts: _Parts, names: Names) -> str:
    """Say what an unused alternative reads like; nothing if it may be a habit."""
    before, text, after = parts
    prefix, suffix = before.rpartition("/")[2], after.partition("/")[0]
    around = prefix + suffix or "-"
    if _RANGE.fullmatch(text) or escape(around) != around:
        return ""  # with a wildcard next to it, no name is just this alternative
    if text.isdecimal():
        return names.numbers_text(before, after)
    near = {}
    if number := LIKE_RANGE.fullmatch(text):
        meant = f"{number[1]}..{number[2]}"
        near[meant] = f"{before}{{{meant}}}{after}"
    for word in names.words:
        middle = word[len(prefix) : len(word) - len(suffix)]
        if is_near(text, middle) and prefix + middle + suffix == word:
            near[word] = before + escape(middle) + after
    leaves_by_pattern = names.matched([pattern, *near.values()]) if near else {}
    hints = []
    for word, other in near.items():
        selected = leaves_by_pattern.get(pattern, ())
        if more := {*leaves_by_pattern.get(other, ())}.difference(selected):
            hints.append(f"{word!r} ({plural(len(more), 'leaf')})")
    return f"did you mean {' or '.join(hints[:2])}?" if hints else ""


def is_near(one: str, other: str) -> bool:
    """Return whether one name may be a misspelling of another.

    Words are compared one by one, so that ``q_proj`` is not near ``o_proj``, and
    numbers never: ``norm_1`` and ``norm_2`` are two names.

    Example:
        >>> is_near("kernl", "kernel"), is_near("haed", "head"), is_near("LN", "ln")
        (True, True, True)
        >>> is_near("bias", "scale"), is_near("q_proj", "o_proj"), is_near("fc1", "fc2")
        (False, False, False)
    """
    if abs(len(one) - len(other)) > _MOST_MORE:
        return False
    words, others = (_WORD.findall(name.lower()) for name in (one, other))
    return "".join(words) == "".join(others) or (
        len(words) == len(others) and all(map(_is_typo, words, others))
    )


def _is_typo(one: str, other: str) -> bool:
    if one == other or not (one.isalpha() and other.isalpha()):
        return one == other
    letters = frozenset(one)
    if 2 * len(letters.intersection(other)) < len(letters):
        return False
    if sorted(one) == sorted(other):
        return True
    if min(len(one), len(other)) < _LEAST_TYPO or len(one) > _MOST_LETTERS:
        return False
    return difflib.SequenceMatcher(None, one, other, False).ratio() >= _LIKE


def _level() -> int:
    """Return the stack level of the first caller outside the libraries."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and _LIBRARY.match(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    return level
