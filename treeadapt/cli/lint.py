"""Linting: what is wrong with rules or a migration for one tree, as findings.

Takes ``Decision``; gives the findings of ``reports``, and rules that reach some but
not all of numbered siblings, such as a pattern that misses one oddly named layer. Or
takes a migration and abstract trees; gives its plan, findings, and notes on what no
check of shapes can see.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from treeadapt.checkpoints.migrated import named_migration
from treeadapt.errors import MigrationError, SelectorError
from treeadapt.migrations.migration import Migration
from treeadapt.migrations.plan import MigrationPlan, pairs_text
from treeadapt.names import fold, listing, natural
from treeadapt.reports.summary import Finding, findings
from treeadapt.selection.decision import Decision
from treeadapt.selection.files import stacks_in_file
from treeadapt.selection.selectors import Selector
from treeadapt.trees.views import view_tree

_OPTIONS = {
    r"allow_regex=True": "--allow-regex",
    r"max_shard_bytes=?": "--max-shard-bytes",
    r"; load\(schema\) .*": ".",
    r"Decide on the tree that .*": "Give the model as TREE, module:function.",
    r"decide on that: \.bind\(model\)": "give it as TREE, module:function",
    r"in sizes=, or give a target": "in [sizes], or name a target: TARGET, or --target",
    r"in sizes=": "in [sizes]",
    r"pass one with arrays for": "name a checkpoint as --target for",
    r"pass a target, or write two rows": (
        "write two rows, or name a target: TARGET, or --target"
    ),
    r"pass (\w+)=, or write it in \[given\]": (
        r"write it in [given], or give --given \1=..."
    ),
    r"new= fills (.*) Pass one.*": r"[new] fills \1 Name one: TARGET, or --target.",
}
ONE_WAY = "one-way"
CHECK = "check"
OPTIMIZER = "optimizer"
#: What keeps no table from running: no way back, or nobody compared the answers.
MILD = (ONE_WAY, CHECK)
_OF_RULES = ("unmatched", "overlap", "unused", "shadowed", "alternative", "uneven")
KINDS = (*_OF_RULES, "count", *MILD, "retyped", OPTIMIZER)
_FEWEST = 3  # siblings that make a family
_NUMBER = re.compile(r"([0-9]+)(?=([^/.]*))")  # and the rest of its word


def as_options(text: str) -> str:
    """Write what a message advises as the command takes it, not Python.

    Example:
        >>> as_options("Write a glob, or pass allow_regex=True.")
        'Write a glob, or pass --allow-regex.'
    """
    for pattern, instead in _OPTIONS.items():
        text = re.sub(pattern, instead, text)
    return stacks_in_file(text)


def linted(decision: Decision) -> Iterator[Finding]:
    """Yield all that is wrong with rules, by kind, with what a file can cure."""
    for finding in findings(decision):
        yield dataclasses.replace(finding, text=as_options(finding.text))
    yield from _uneven(decision)


class _Place(NamedTuple):
    """A number in a path, the family that it counts, and what is around it."""

    family: str
    number: str
    before: str
    after: str


def _uneven(decision: Decision) -> Iterator[Finding]:
    """Yield rules that reach some of numbered siblings, and would reach the others.

    A rule that cannot match other numbers lists its own on purpose. Where it could,
    but no such leaf exists, one layer has an odd name.
    """
    families: dict[str, dict[str, None]] = {}
    places: list[list[_Place]] = []
    for path, is_array in zip(decision.paths, decision.is_array, strict=True):
        places.append(list(_places(path)) if is_array else [])
        for place in places[-1]:
            families.setdefault(place.family, {})[place.number] = None
    paths = frozenset(decision.paths)
    for index, where in enumerate(decision.rules.selectors):
        reached: dict[str, list[_Place]] = {}
        for leaf in decision.selected(index):
            for place in places[leaf]:
                reached.setdefault(place.family, []).append(place)
        for family, spots in reached.items():
            every, numbers = families[family], {place.number for place in spots}
            around = dict.fromkeys((place.before, place.after) for place in spots)
            odd = [
                number
                for number in every
                if number not in numbers
                and all(
                    path not in paths and _would_match(where, path)
                    for path in (f"{above}{number}{below}" for above, below in around)
                )
            ]
            if odd and len(every) >= _FEWEST:
                missing = listing(sorted(odd, key=natural), write=str)
                yield Finding(
                    "uneven",
                    index + 1,
                    f"{where.typed} matches in {len(numbers):,} of "
                    f"{len(every):,} {family}; not in {missing}.",
                )


def _would_match(where: Selector, path: str) -> bool:
    """Return whether a rule would match a leaf that does not exist."""
    try:
        return where.matches(path)
    except SelectorError:  # a class, or numbers counted from the end
        return not any(map(_NUMBER.search, where.patterns()))


def _places(path: str) -> Iterator[_Place]:
    """Yield the numbers of a path.

    A family ends with the word, at a slash or, as PyTorch writes names, at a dot.
    """
    for match in _NUMBER.finditer(path):
        before, after = path[: match.start()], path[match.end() :]
        yield _Place(f"{before}*{match[2]}", match[1], before, after)


def read_migration(
    file: str, *checkpoints: str | None, reverse: bool = False
) -> Migration:
    """Read a migration file or a published table, or the way back of it.

    Args:
        file: its name.
        checkpoints: the configuration is next to one of these.
        reverse: whether the rows are read backwards.

    Raises:
        MigrationError: it cannot be read, or has no way back.
    """
    migration: Migration = named_migration(file, *filter(None, checkpoints))
    return migration.inverse if reverse else migration


def planned(
    migration: Migration, source: Any, target: Any
) -> tuple[MigrationPlan, list[Finding]]:
    """Plan a migration, and find what is wrong with it.

    Args:
        migration: the table.
        source: abstract tree, or flat dict, to migrate.
        target: abstract tree that the result should fit; None if that is not known.

    Raises:
        MigrationError: the table needs a target.
    """
    likes = None if target is None else view_tree(target).flat()
    leaves = view_tree(source).flat()
    plan, problems = migration.planned(leaves, likes, compares=True)
    numbers = {id(row): number for number, row in enumerate(plan.rows, 1)}
    each = list(problems.each())
    faults = []
    for text, places in fold(text for _, text, _ in each).items():
        kind, _, row = each[places[0]]
        faults.append(Finding(kind, None, as_options(text), numbers.get(id(row))))
    if not faults and plan.one_way:
        last = reversed(plan.groups)
        rows = (g.place + 1 for g in last if plan.one_way[0] in g.filled)
        text = f"the inverse does not lead back from {listing(fold(plan.one_way))}"
        faults.append(Finding(ONE_WAY, None, text, next(rows, None)))
    for number, row in enumerate(plan.rows, 1):
        if row.notes.check:
            text = (
                f"{row.both}: {row.notes.check}. Compare the answers of both models, "
                "then delete `check` from the row."
            )
            faults.append(Finding(CHECK, None, text, number))
    return plan, faults


def leads_other_way(migration: Migration, source: Any, target: Any) -> bool:
    """Return whether nothing but marks is wrong with a migration the other way."""
    try:
        faults = planned(migration, target, source)[1]
    except MigrationError:
        return False
    return {each.kind for each in faults} <= {CHECK}


def notes(plan: MigrationPlan) -> Iterator[str]:
    """Yield what shapes cannot show."""
    for place, pairs in plan.swappable.items():
        row = listing([plan.rows[place].text])
        text = f"shapes do not tell apart {pairs_text(pairs)}"
        yield f"row {place + 1}, {row}: {text}"
    for place in plan.idle:
        row = listing([plan.rows[place].text])
        yield f"row {place + 1}, {row}: it drops leaves, and none is here"
    for text in plan.unread:
        yield f"not checked on shapes: {text}"
    if plan.repeatable:
        yield "a second run would pass: no name or shape shows that one was done"
