"""Linting: what is wrong with rules for one tree, as findings with repairs.

Takes ``RuleMatches``; gives findings: leaves without a rule, rules that match nothing
or are unreachable, and rules that reach some but not all of numbered siblings, as a
pattern does that the odd layer escapes. Nothing is raised.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from treeadapt.errors import SelectorError
from treeadapt.names import listing, plural, shorten
from treeadapt.report import natural
from treeadapt.selection.matches import RuleMatches, where_text
from treeadapt.selection.repairs import advice_lines, entry_text
from treeadapt.selection.selectors import Selector

_OPTIONS = {
    r"allow_regex=True": "--allow-regex",
    r"Decide on the tree that .*": "Give the model as TREE, module:function.",
    r"decide on that: \.bind\(model\)": "give it as TREE, module:function",
}
KINDS = ("unmatched", "unused", "shadowed", "uneven")
_FEWEST = 3  # siblings that make a family
_NUMBER = re.compile(r"[0-9]+")
_WORD_END = re.compile(r"[/.]|$")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        kind: ``"unmatched"``, ``"unused"``, ``"shadowed"`` or ``"uneven"``.
        rule: number of the rule, from 1; None for leaves without one.
        text: what is wrong, and how it may be cured.
    """

    kind: str
    rule: int | None
    text: str


def as_options(text: str) -> str:
    """Write what a message advises as the command takes it, not Python.

    Example:
        >>> as_options("Write a glob, or pass allow_regex=True.")
        'Write a glob, or pass --allow-regex.'
    """
    for pattern, instead in _OPTIONS.items():
        text = re.sub(pattern, instead, text)
    return text


def findings(matches: RuleMatches) -> list[Finding]:
    """Return all that is wrong, by kind."""
    plan = matches.view.plan
    found = []
    if matches.unmatched:
        names = listing(sorted(matches.unmatched, key=natural))
        found.append(
            Finding(
                "unmatched",
                None,
                f"{plural(len(matches.unmatched), 'leaf')} without a rule: "
                f'{names}. Add a rule, or end with "**" = "<label>".',
            )
        )
    unused = matches.unused
    named = [(entry_text(entry), entry) for _, entry in unused]
    lines = advice_lines(named, plan, matches.is_array, limit=len(named))
    for (index, _), line in zip(unused, lines, strict=True):
        told = f"matches nothing: {as_options(line.strip())}"
        found.append(Finding("unused", index + 1, told))
    for index in matches.shadowed:
        text = shorten(where_text(matches.rules.selectors[index]))
        told = f"{text} {matches.shadow_text(index)}"
        found.append(Finding("shadowed", index + 1, told))
    return [*found, *_uneven(matches)]


class _Place(NamedTuple):
    """A number in a path, the family that it counts, and what is around it."""

    family: str
    number: str
    before: str
    after: str


def _uneven(matches: RuleMatches) -> Iterator[Finding]:
    """Yield rules that reach some of numbered siblings, and would reach the others.

    A rule names its numbers where it does not match a path with another number: that is
    meant. Where it would match, but there is no such leaf, the layer is an odd one.
    """
    families: dict[str, dict[str, None]] = {}
    places: list[list[_Place]] = [[] for _ in matches.paths]
    for leaf in itertools.compress(range(len(places)), matches.is_array):
        places[leaf] = list(_places(matches.paths[leaf]))
        for place in places[leaf]:
            families.setdefault(place.family, {})[place.number] = None
    known = frozenset(matches.paths)
    for index, where in enumerate(matches.rules.selectors):
        matched = [places[leaf] for leaf in matches.selected(index)]
        reached: dict[str, dict[str, None]] = {}
        for place in itertools.chain(*matched):
            reached.setdefault(place.family, {})[place.number] = None
        around: dict[str, dict[tuple[str, str], None]] = {
            family: {}
            for family, numbers in reached.items()
            if len(numbers) < len(families[family]) >= _FEWEST
        }
        for place in itertools.chain(*(matched if around else ())):
            if place.family in around:
                around[place.family][place.before, place.after] = None
        for family, parts in around.items():
            numbers, every = reached[family], families[family]
            odd = [
                number
                for number in every
                if number not in numbers
                and all(
                    f"{before}{number}{after}" not in known
                    and _would_match(where, f"{before}{number}{after}")
                    for before, after in parts
                )
            ]
            if odd:
                yield Finding(
                    "uneven",
                    index + 1,
                    f"{where_text(where)} matches in {len(numbers):,} of "
                    f"{len(every):,} {family}; not in {_numbers(odd)}.",
                )


def _would_match(where: Selector, path: str) -> bool:
    """Tell whether a rule would match a leaf that does not exist."""
    try:
        return where.matches(path)
    except SelectorError:  # a class, or numbers counted from the end
        return not any(map(_NUMBER.search, where.patterns()))


def _places(path: str) -> Iterator[_Place]:
    """Yield the numbers of a path.

    A family ends with the word, at a slash or, as PyTorch writes names, at a dot.
    """
    for found in _NUMBER.finditer(path):
        before, after = path[: found.start()], path[found.end() :]
        word = _WORD_END.search(after)
        end = word.start() if word else 0
        yield _Place(f"{before}*{after[:end]}", found[0], before, after)


def _numbers(numbers: Sequence[str]) -> str:
    shown = sorted(numbers, key=lambda text: (len(text), text))[:8]
    more = f" and {len(numbers) - 8:,} more" if len(numbers) > 8 else ""
    return ", ".join(shown) + more
