"""Problems: all that is wrong with a migration, in one error."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from treeadapt.errors import MigrationError, MigrationProblem
from treeadapt.migrations.rows import Row, spaced
from treeadapt.migrations.templates import PathsByCapture, Template
from treeadapt.text.names import SHOWN, Speller, fold, listing, plural, section
from treeadapt.text.wording import offered, worded


class Cause(NamedTuple):
    """What makes a problem.

    Attributes:
        row: of the table; None if no row does.
        values: text and numbers that what the row fails to make has in its path, as far
            as they are known.
        paths: of the target, which alone the problem is about; empty if they are not
            known.
        is_early: whether it is of a table of a chain before the last.
        leaves: paths that the problem names, of the source or of the target.
    """

    row: Row | None = None
    values: Mapping[str, Any] = MappingProxyType({})
    paths: Sequence[str] = ()
    is_early: bool = False
    leaves: Sequence[str] = ()


class UnplannedError(Exception):
    """A row cannot make a group of some leaves; its maker adds which.

    Attributes:
        text: what is wrong.
        kind: of the problem.
    """

    def __init__(self, text: str, kind: str = "sizes") -> None:
        super().__init__(text)
        self.text = text
        self.kind = kind


@dataclasses.dataclass
class Problems:
    """All that is wrong, by kind.

    Attributes:
        texts: what is wrong, by kind, each with what makes it.
        num_made: how many leaves moved arrays have become so far.
        more_bytes: how many bytes they have become beyond what they always may.
        failed: rows of which a group failed, each with the text and numbers that all
            leaves of the group share, as far as they are known.
        lacking: paths of the target that a failed group would have needed.
        advice: what the whole of it looks like.
        origin: where the rows and their sizes come from, if that is worth a line.
        lead: what all of it comes from, which is said first.
    """

    texts: dict[str, dict[str, Cause]] = dataclasses.field(default_factory=dict)
    num_made: int = 0
    more_bytes: int = 0
    failed: list[tuple[Row, Mapping[str, Any]]] = dataclasses.field(
        default_factory=list
    )
    lacking: list[str] = dataclasses.field(default_factory=list)
    advice: list[str] = dataclasses.field(default_factory=list)
    origin: str = ""
    lead: str = ""

    def add(
        self,
        kind: str,
        text: str,
        row: Row | None = None,
        values: Mapping[str, Any] = MappingProxyType({}),
        paths: Sequence[str] = (),
        *,
        is_early: bool = False,
        leaves: Sequence[str] = (),
    ) -> None:
        """Note one problem, and what makes it, as a ``Cause`` says it."""
        cause = Cause(row, values, paths, is_early, leaves or paths)
        self.texts.setdefault(kind, {}).setdefault(text, cause)

    def fail(
        self,
        kind: str,
        text: str,
        row: Row,
        values: Mapping[str, Any],
        leaves: Sequence[str] = (),
    ) -> None:
        """Note that a row cannot make a group of some leaves of the source."""
        self.add(kind, text, row, values, leaves=leaves)
        self.failed.append((row, values))

    def about(self, paths: Iterable[str], *, are_filled: bool) -> Problems:
        """Return the problems that concern some leaves of a target.

        A row concerns them if it could make one of them.

        Args:
            paths: of these leaves.
            are_filled: whether all of them are filled. Leaves that no row takes matter
                only if not: one may be what is missing.
        """
        places = PathsByCapture(paths)

        def concerns(cause: Cause) -> bool:
            if cause.is_early:
                return not are_filled
            if cause.paths:
                return any(path in places for path in cause.paths)
            row = cause.row
            if row is None:
                return not are_filled
            sides = row.targets or row.sources
            return any(places.has(each.path, cause.values) for each in sides)

        texts = {
            kind: {text: cause for text, cause in causes.items() if concerns(cause)}
            for kind, causes in self.texts.items()
        }
        return dataclasses.replace(self, texts={k: v for k, v in texts.items() if v})

    def raise_any(self) -> None:
        """Raise if there is a problem.

        Raises:
            MigrationError: it lists the problems by kind.
        """
        if self.texts:
            raise MigrationError(str(self), problems=self.data)

    @property
    def data(self) -> list[MigrationProblem]:
        """What is wrong, for who reads it in a program."""
        return [
            MigrationProblem(
                None if cause.row is None else cause.row.text, kind, tuple(cause.leaves)
            )
            for kind in _KINDS
            for cause in self.texts.get(kind, {}).values()
        ]

    def each(self) -> Iterator[tuple[str, str, Row | None]]:
        """Yield problems: the kind, what is wrong, and the row that makes it."""
        for kind in (kind for kind in _KINDS if kind in self.texts):
            rows = [cause.row for cause in self.texts[kind].values()]
            for text, places in fold(self.texts[kind]).items():
                yield kind, f"{_title(kind)}: {text}", rows[places[0]]

    def __str__(self) -> str:
        lines = [self.lead] * bool(self.lead and self.texts)
        for kind in (kind for kind in _KINDS if kind in self.texts):
            noun = _KINDS[kind][0]
            title = f"{plural(len(self.texts[kind]), noun)}: {_title(kind)}"
            lines += section(title, fold(self.texts[kind]))
            is_explained = bool(self.advice or self.lead)
            lines += _REST if kind == "unmatched" and not is_explained else ()
        lines += self.advice
        origin = [f"The rows are {self.origin}."] * bool(self.origin and lines)
        return "\n".join([*lines, *origin])


_LOOKED_AT = 100  # leaves
_COMPARED = 10_000  # leaves, with a few rows
_REST = (
    'Write rows for them. As the last row, "{rest:**}": "{rest}" keeps all others, and',
    '"{rest:**}": None drops them.',
)
_CAPTURES = re.compile(r"\{[^{}]*\}")
# In the order in which a message lists them: a noun, what is wrong, and for some how
# the command words it.
_KINDS: dict[str, tuple[str, ...]] = {
    "unmatched": ("leaf", "no row takes"),
    "unused": ("row", "no leaf is taken by"),
    "ambiguous": ("leaf", "two addresses of one row match"),
    "torn": ("group", "parts are missing of"),
    "unequal": ("group", "its arrays differ"),
    "sizes": ("group", "sizes contradict each other or stay open"),
    "uneven": (
        "number",
        "rows take different numbers of one node; write the same take in each for",
    ),
    "mixed": (
        "row",
        "the target spells names in two ways, and a table writes one: rename some of",
    ),
    "unseen": (
        "leaf",
        "a function needs the shape of, and no target has it: pass one with",
    ),
    "unknown": ("leaf", "a table takes, and does not know before it is made"),
    "large": ("group", "a table may not make so much of"),
    "values": ("group", "its values cannot be changed so"),
    "clash": ("clash", "two leaves get the name of"),
    "idle": (
        "entry",
        "of new= for which the target has no unfilled leaf",
        "of [new] for which the target has no unfilled leaf",
    ),
    "abstract": (
        "leaf",
        "the target's values are kept, and no target has any: pass one with arrays for",
        "the target's values are kept, and no target has any: name a checkpoint as "
        "--target for",
    ),
    "blank": ("leaf", "new= cannot make zeros for", "[new] cannot make zeros for"),
    "missing": ("leaf", "nothing fills"),
    "extra": ("leaf", "the target does not have"),
    "misfit": ("leaf", "the target has another shape or dtype"),
    "retyped": (
        "leaf",
        "the target has another dtype; write {'cast': dtype} next to the target of its "
        "row, or load a checkpoint with cast=True",
    ),
}


def _title(kind: str) -> str:
    """Return what is wrong with problems of a kind."""
    _, python, *command = _KINDS[kind]
    return worded(python, *(command or [python]))


def advice(rows: Sequence[Row], unmatched: Sequence[str]) -> Iterator[str]:
    """Write what leaves look like that no row of a table names.

    Args:
        rows: the table.
        unmatched: paths of these leaves, at least one.
    """
    some = unmatched[:_LOOKED_AT]
    targets = [address.path for row in rows for address in row.targets]
    is_turned = all(any(path.match(x) is not None for path in targets) for x in some)
    if targets and not is_turned:  # maybe the table is of few of the leaves
        is_turned = all(
            any(path.match(x) is not None for x in some) for path in targets
        )
    if is_turned:
        yield (
            "They look like names of the other side of the rows: use "
            f"{worded('migration.inverse', '--reverse')}."
        )
    sources = [address.path for row in rows for address in row.sources]
    prefixes: dict[str, None] = {}
    for name in some:
        cuts = (place + 1 for place, char in enumerate(name) if char == "/")
        for cut in cuts:
            if any(path.match(name[cut:]) is not None for path in sources):
                prefixes[name[:cut]] = None
                break
    if prefixes:
        yield (
            f"Without {listing(prefixes)} in front, rows name such leaves: pass what "
            "is below it, or write {t:**}/ in front of both paths of each row. The "
            "state of an optimizer is moved by carry_state."
        )


def turned_rows(unused: Sequence[Row], paths: Sequence[str]) -> Iterator[str]:
    """Write which rows, of those that match no leaf, are the wrong way round.

    Args:
        unused: these rows.
        paths: of the source.
    """
    some = unused[:SHOWN]
    names = [*itertools.islice(paths, _COMPARED)]
    if some and all(_is_turned(row, names) for row in some):
        texts = (f"{row.targets[0].text!r:.200}" for row in some)
        yield (
            "The source has the names of the other side of these rows. If they are the "
            f"wrong way round, write {listing(texts, limit=3, write=str)} first."
        )


def _is_turned(row: Row, names: Sequence[str]) -> bool:
    return bool(row.targets) and all(_names_any(to.path, names) for to in row.targets)


def _names_any(path: Template, names: Iterable[str]) -> bool:
    """Return whether a path with some text of its own has one of these names."""
    is_name = bool(_CAPTURES.sub("", path.text).strip("/"))
    return is_name and any(path.match(name) is not None for name in names)


def name_target(python: str, command: str = "name a target") -> str:
    """Ask for a target, in a command by the arguments of its that take one.

    Example:
        >>> name_target("pass a target")
        'pass a target'
    """
    names = offered("TARGET", "--target") or ["--target of convert"]
    return worded(python, f"{command}: {' or '.join(names)}")


def colon_advice(unused: Iterable[Row]) -> Iterator[str]:
    """Write how rows are meant that lack a space at the colon before their axes."""
    for row in unused:
        meant = [spaced(one.text) for one in (*row.sources, *row.targets)]
        if any(meant):
            names = listing(filter(None, meant))
            yield f"The colon before axes has spaces; if these are axes, write {names}."


def nearest(speller: Speller, name: str, others: Sequence[str], what: str) -> str:
    """Write which of some names is the nearest to another one; empty if none is.

    Args:
        speller: what finds it.
        name: what was typed.
        others: what exists.
        what: what these are.
    """
    near = speller.best(name, others)
    return f" (the nearest {what} {listing([near])})" if near else ""


def with_nearest(names: Sequence[str], others: Sequence[str]) -> Iterator[str]:
    """Write names, each with the nearest of the others.

    Names that differ in a number get the hint of the first of them, so that they can be
    folded later.
    """
    speller = Speller()
    hints: dict[int, str] = {}
    for places in itertools.islice(fold(names).values(), SHOWN):
        hint = nearest(speller, names[places[0]], others, "is")
        hints |= dict.fromkeys(places, hint)
    for place, name in enumerate(names):
        yield listing([name]) + hints.get(place, "")


def near_paths(
    unused: Sequence[Row],
    paths: Sequence[str],
    static: Sequence[str],
    taken: Sequence[tuple[Row, Sequence[str]]],
) -> Iterator[str]:
    """Write rows that match no leaf, with the nearest leaves.

    Args:
        unused: these rows.
        paths: of the source.
        static: of what is not an array in it.
        taken: rows that must take leaves and do, with the paths of these.
    """
    speller = Speller()
    for row in unused[:SHOWN]:
        named, left_out = (
            [*itertools.islice(filter(row.takes, some), 3)] for some in (paths, static)
        )
        if named:
            rivals = (it for it, own in taken if all(map(row.takes, own)))
            cure = _cure_of_late(next(rivals, None))
            hint = f" (earlier rows take {listing(named, limit=2)}; {cure})"
        elif left_out:
            hint = f" ({listing(left_out, limit=2)}: not an array, and needs no row)"
        else:
            text = row.sources[0].path.text
            hint = nearest(speller, text, paths, "leaf is")
            if not hint:  # names of captures are none of the leaves
                hint = nearest(speller, _CAPTURES.sub("", text), paths, "leaf is")
        yield listing([row.text]) + hint
    yield from (listing([row.text]) for row in unused[SHOWN:])


def _cure_of_late(rival: Row | None) -> str:
    """Write what to do about a row that gets nothing.

    Args:
        rival: an earlier row that would get nothing if the row were before it.
    """
    if rival is None:
        return "move it up"
    note = worded("{'optional': True} next to its target", "optional = true")
    return (
        f"{listing([rival.text])} takes no others: keep one of the two rows, or write "
        f"first the one that is meant, and the other with {note}"
    )
