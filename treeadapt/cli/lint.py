"""Linting: what is wrong with rules for one tree, as findings with repairs.

Takes ``RuleMatches``; gives findings: leaves without a rule, rules that hit nothing or
come too late, and rules that reach some but not all of numbered siblings, as a pattern
does that the odd layer escapes. Nothing is raised.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence

from treeadapt.errors import listing, plural, shorten
from treeadapt.matches import RuleMatches, where_text
from treeadapt.repairs import advice_lines, entry_text
from treeadapt.report import natural
from treeadapt.selectors import select

KINDS = ("unmatched", "unused", "shadowed", "uneven")
_FEWEST = 3  # siblings that make a family
_NUMBER = re.compile(r"[0-9]+")
_NO_STEM = re.compile(r"[0-9{}.,\-\[\]!*?\\]+")


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
    for index, entry in matches.unused:
        named = [(entry_text(entry), entry)]
        for line in advice_lines(named, plan, matches.is_array):
            found.append(Finding("unused", index + 1, f"hits nothing: {line.strip()}"))
    for index in matches.shadowed:
        text = shorten(where_text(matches.rules.selectors[index]))
        told = f"{text} {matches.shadow_text(index)}"
        found.append(Finding("shadowed", index + 1, told))
    return [*found, *_uneven(matches)]


def _selected(matches: RuleMatches, index: int) -> list[int]:
    where = matches.rules.selectors[index]
    mask = select(matches.view, where, unused="ignore")
    return [
        leaf
        for leaf, (yes, arr) in enumerate(zip(mask, matches.is_array, strict=True))
        if yes and arr
    ]


def _uneven(matches: RuleMatches) -> Iterator[Finding]:
    paths = matches.paths
    arrays = [i for i, arr in enumerate(matches.is_array) if arr]
    families: dict[str, dict[str, None]] = {}
    for leaf in arrays:
        for family, number in _places(paths[leaf]):
            families.setdefault(family, {})[number] = None
    for index, where in enumerate(matches.rules.selectors):
        patterns = list(where.patterns())
        reached: dict[str, dict[str, None]] = {}
        for leaf in _selected(matches, index):
            for family, number in _places(paths[leaf]):
                reached.setdefault(family, {})[number] = None
        for family, numbers in reached.items():
            every = families[family]
            if not len(every) >= _FEWEST or len(numbers) == len(every):
                continue
            if not any(_means(pattern, family) for pattern in patterns):
                missed = [number for number in every if number not in numbers]
                yield Finding(
                    "uneven",
                    index + 1,
                    f"{where_text(where)} matches in {len(numbers):,} of "
                    f"{len(every):,} {family}; not in {_numbers(missed)}.",
                )


def _places(path: str) -> Iterator[tuple[str, str]]:
    """Yield the numbered families that a path stands in, and its number in each."""
    segments = path.split("/")
    for place, segment in enumerate(segments):
        for found in _NUMBER.finditer(segment):
            name = f"{segment[: found.start()]}*{segment[found.end() :]}"
            yield "/".join([*segments[:place], name]), found[0]


def _means(pattern: str, family: str) -> bool:
    """Tell whether a pattern names numbers of this family, and so leaves some out."""
    stem = _NO_STEM.sub("", family.rpartition("/")[2])
    return any(
        _NUMBER.search(segment) and _NO_STEM.sub("", segment) == stem
        for segment in pattern.split("/")
    )


def _numbers(numbers: Sequence[str]) -> str:
    shown = sorted(numbers, key=lambda text: (len(text), text))[:8]
    more = f" and {len(numbers) - 8:,} more" if len(numbers) > 8 else ""
    return ", ".join(shown) + more
