r"""Templates of paths: names with captures, matched and filled in.

Takes the text of one path of a migration and gives a ``Template``. A capture is
``{name}``, a part of one segment; ``{name:**}``, whole segments; ``{p=gate,up}``, one
of these texts; ``{n+60}``, a number at least 60; ``{(b i)}``, one number made of two;
and, in a row that drops leaves, ``*`` and ``**``. Which names are numbers is up to
``rows``. Matching takes time in the product of both lengths, whatever the texts.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

from treeadapt.errors import MigrationError
from treeadapt.names import listing
from treeadapt.paths import SEPARATOR

#: What a path gives each capture: text, or a number.
Captures: TypeAlias = dict[str, str | int]

_NAME = r"[A-Za-z_]\w*"
_CAPTURE = re.compile(
    rf"\{{(?:(?P<name>{_NAME})(?P<many>:\*\*)?"
    rf"|(?P<listed>{_NAME})=(?P<entries>(?:[^{{}}/\\]|\\.)*)"
    rf"|(?P<shifted>{_NAME})\+(?P<shift>[0-9]{{1,9}})"
    rf"|\((?P<product>{_NAME}(?: +{_NAME})+)\))\}}"
)
_WORD = re.compile(r"[^\W_]+")
_WHOLE_WORD = re.compile(r"(?<=[\W_])[^\W_]+(?=[\W_])")
_NUMBER = re.compile("0|[1-9][0-9]{0,17}")
_SHORT = 32  # texts of a list that are tried one by one
_ENTRY = re.compile(r"((?:[^,\\]|\\.)*),")
# A slash ends a segment, as in patterns written plainly or as ``\/``.
_ESCAPE_OR_SLASH = re.compile(r"\\[^/]|(?P<slash>\\?/)", re.DOTALL)
_STARS = re.compile(r"\*+")
_HINTS = {
    "{": "A capture is {name}, {name:**}, {name=a,b}, {name+1} or {(a b)}",
    "}": "It closes nothing",
    "*": "Capture what it matches: {name} within a segment, {name:**} for several",
    "?": "Capture what it matches: {name}",
    "[": "Capture what it matches: {name}",
}


@dataclasses.dataclass(frozen=True)
class Capture:
    """One capture of a template.

    Attributes:
        key: its name; ``(b i)`` where it is one number of several names.
        names: the names.
        is_many: whether it holds whole segments.
        is_number: whether it holds a number.
        entries: the only texts that it may hold; with ``is_number`` their positions
            are the numbers.
        shift: what is added to the number in the path.
        is_wild: whether it is ``*`` or ``**``, which may hold nothing.
    """

    key: str
    names: tuple[str, ...]
    is_many: bool = False
    is_number: bool = False
    entries: tuple[str, ...] = ()
    shift: int = 0
    is_wild: bool = False

    def read(self, text: str) -> Any:
        """Return what the capture holds if a path has this text; None if it cannot."""
        if self.is_many:
            return text
        if self.entries:
            place = self._positions.get(text)
            return text if place is not None and not self.is_number else place
        if self.is_number:
            fits = _NUMBER.fullmatch(text) and int(text) >= self.shift
            return int(text) - self.shift if fits else None
        return text if text or self.is_wild else None

    def write(self, value: str | int) -> str:
        """Return the text of a value in a path."""
        if not isinstance(value, int):
            return value
        return self.entries[value] if self.entries else str(value + self.shift)

    def ends(self, text: str, start: int, literal: str, stop: int) -> Iterator[int]:
        """Yield the ends of values that start at ``start``, the nearest first.

        Args:
            text: the segment.
            start: where the value starts.
            literal: what follows the value; empty for the last one, which ends at
                ``stop``.
            stop: where the last value ends.
        """
        end = text.find(literal, start, stop) if literal else stop
        while start <= end <= start + self._longest:
            if self.read(text[start:end]) is not None:
                yield end
            end = text.find(literal, end + 1, stop) if literal else -1

    def stops_at(self, literal: str) -> bool:
        """Return whether the first such literal is where a value must end."""
        held = "".join(self.entries) if self.entries else "0123456789"
        return not self.is_free and literal[0] not in held

    @property
    def any_text(self) -> str:
        """Regular expression for as little of a segment as it may hold."""
        return "[^/]*?" if self.is_wild else "[^/]+?"

    @property
    def values(self) -> str:
        """Regular expression for what it may hold, as far as that is short."""
        if self.entries:
            is_short = len(self.entries) <= _SHORT
            return "|".join(map(re.escape, self.entries)) if is_short else self.any_text
        return _NUMBER.pattern if self.is_number else self.any_text

    @property
    def is_free(self) -> bool:
        """Whether it may hold any text."""
        return not (self.entries or self.is_number)

    @functools.cached_property
    def _longest(self) -> int:
        if self.entries:
            return max(map(len, self.entries))
        return 18 if self.is_number else sys.maxsize

    @functools.cached_property
    def _positions(self) -> dict[str, int]:
        return {text: place for place, text in enumerate(self.entries)}


#: Literals and captures of a segment in turn, literals first; or one capture of many.
Segment: TypeAlias = tuple[str | Capture, ...]


@dataclasses.dataclass(frozen=True)
class Template:
    """One path with captures.

    Attributes:
        text: as typed, without axes.
        segments: what each segment is made of.
    """

    text: str
    segments: tuple[Segment, ...]

    @functools.cached_property
    def captures(self) -> tuple[Capture, ...]:
        """Its captures, from left to right; a name may be among them twice."""
        return tuple(
            part
            for segment in self.segments
            for part in segment
            if isinstance(part, Capture)
        )

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """The names that it captures."""
        return frozenset(name for each in self.captures for name in each.names)

    @functools.cached_property
    def keys(self) -> list[str]:
        """Texts that a path has if it matches: words, and the start of ``/path/``."""
        if not self.captures:
            return [SEPARATOR.join([*(str(part) for (part,) in self.segments), ""])]
        runs = [SEPARATOR]
        for segment in self.segments:
            for part in segment:
                if isinstance(part, str):
                    runs[-1] += part
                else:
                    runs.append("")
            runs[-1] += SEPARATOR
        return [*itertools.chain(*map(_WHOLE_WORD.findall, runs)), runs[0]]

    @functools.cached_property
    def _relaxed(self) -> re.Pattern[str]:
        """What ``/`` and a path match if captures may hold any text.

        Those that are settled hold what they may. Captures are atomic, so that nothing
        backtracks: if the first occurrence of what follows a capture does not lead to a
        match, a later one does not either.
        """
        text, end = "", ""
        settled = iter(self.settled)
        for segment in self.segments:
            if _is_many(segment):
                next(settled)
                text, end = f"{text}{end}(?>((?:/[^/]*)*?)", ")"
                continue
            text += SEPARATOR + re.escape(str(segment[0]))
            for place in range(1, len(segment), 2):
                held, literal = segment[place], re.escape(str(segment[place + 1]))
                assert isinstance(held, Capture)
                value = held.values if next(settled) else held.any_text
                after = "(?![^/])" if place + 2 == len(segment) else ""
                text += f"(?>({value}){literal}{after})"
            text += "(?![^/])" if len(segment) == 1 else ""
        return re.compile(f"{text}\\Z{end}")

    @functools.cached_property
    def settled(self) -> list[bool]:
        """For each capture, whether it may hold nothing but what is tried first."""
        settled = []
        has_many = any(map(_is_many, self.segments))
        for segment in self.segments:
            is_sure = not has_many
            for place, held in enumerate(segment):
                if isinstance(held, Capture):
                    after = "".join(map(str, segment[place + 1 : place + 2]))
                    is_last = place + 2 >= len(segment)
                    is_sure = is_sure and (is_last or held.stops_at(after))
                    settled.append(is_sure)
        return settled

    def understood(
        self,
        numbers: Collection[str],
        entries: Mapping[str, tuple[str, ...]],
        many: Collection[str],
    ) -> Template:
        """Return the template with the kinds that its row gives its captures.

        Args:
            numbers: names that hold numbers.
            entries: the texts that other names may hold.
            many: names that hold whole segments, where they are alone in one.
        """

        def understand(part: str | Capture) -> str | Capture:
            if isinstance(part, str) or part.is_many or part.is_wild:
                return part
            if any(name in numbers for name in part.names):
                return dataclasses.replace(part, is_number=True)
            return dataclasses.replace(part, entries=entries.get(part.key, ()))

        segments: list[Segment] = []
        for segment in self.segments:
            held = _only(segment)
            if held and held.key in many:
                segments.append((dataclasses.replace(held, is_many=True),))
            else:
                segments.append(tuple(map(understand, segment)))
        return Template(self.text, tuple(segments))

    def match(self, path: str) -> Captures | None:
        """Return what a path gives each capture; None if it does not match.

        Of all ways to match, each capture is as short as those left of it allow.
        """
        found = self._relaxed.match(SEPARATOR + path)
        if found is None:
            return None
        pairs = zip(self.captures, found.groups(), strict=True)
        held = [(capture, capture.read(text)) for capture, text in pairs]
        if any(value is None for _, value in held):
            sure = zip(held, self.settled, strict=True)
            if any(value is None and is_sure for (_, value), is_sure in sure):
                return None
            held = self._split(path.split(SEPARATOR))
            if not held:
                return None
        captures: Captures = {}
        for capture, value in held:
            if captures.setdefault(capture.key, value) != value and not capture.is_wild:
                return None
        return captures

    def _split(self, parts: Sequence[str]) -> list[tuple[Capture, Any]]:
        """Return what the segments of a path give each capture; empty if none."""
        places: Sequence[int] | None = range(len(parts) + 1)
        if any(map(_is_many, self.segments)):
            places = self._places(parts)
        if places is None:
            return []
        held: list[tuple[Capture, Any]] = []
        for segment, (start, stop) in zip(
            self.segments, itertools.pairwise(places), strict=True
        ):
            if _is_many(segment):
                # Each with its separator: no segment and one empty segment differ.
                run = "".join(SEPARATOR + part for part in parts[start:stop])
                held.append((segment[0], run))  # type: ignore[arg-type]
            else:
                found = _match_segment(segment, parts[start])
                if found is None:
                    return []
                held += found
        return held

    def _places(self, parts: Sequence[str]) -> list[int] | None:
        """Return where each segment of the template starts, and the end."""
        count, size = len(self.segments), len(parts)
        # fits[i][j]: segments from i on match parts from j on.
        fits = [[False] * (size + 1) for _ in range(count)] + [[False] * size + [True]]
        for i in reversed(range(count)):
            for j in reversed(range(size + 1)):
                if _is_many(self.segments[i]):
                    fits[i][j] = fits[i + 1][j] or (j < size and fits[i][j + 1])
                elif j < size and fits[i + 1][j + 1]:
                    fits[i][j] = _match_segment(self.segments[i], parts[j]) is not None
        if not fits[0][0]:
            return None
        places = [0]
        for i in range(count):
            j = places[-1]
            if _is_many(self.segments[i]):
                places.append(next(k for k in range(j, size + 1) if fits[i + 1][k]))
            else:
                places.append(j + 1)
        return places

    def fill(self, values: Mapping[str, str | int], sizes: Mapping[str, int]) -> str:
        """Return the path that some values give.

        Args:
            values: by name; those of ``{(b i)}`` by each of its names.
            sizes: of the names of each ``{(b i)}``.
        """
        filled: list[str] = []
        for segment, is_alone in self._alone:
            texts = []
            for part in segment:
                if isinstance(part, str):
                    texts.append(part)
                elif len(part.names) > 1:
                    texts.append(str(compose(part.names, values, sizes)))
                else:
                    texts.append(part.write(values[part.key]))
            run = "".join(texts) if len(texts) > 1 else texts[0]
            if is_alone and run[:1] in ("", SEPARATOR):
                filled += run.split(SEPARATOR)[1:]
            elif SEPARATOR in run:  # whole segments within one
                filled.append("".join(text.removeprefix(SEPARATOR) for text in texts))
            else:
                filled.append(run)
        return SEPARATOR.join(filled)

    @functools.cached_property
    def _alone(self) -> tuple[tuple[Segment, bool], ...]:
        """Its segments, and whether a capture is alone in each."""
        return tuple((segment, _only(segment) is not None) for segment in self.segments)


class Index:
    """Templates by a text that few of them have, so that few are tried for a path."""

    def __init__(self, templates: Iterable[Template]) -> None:
        every = [template.keys for template in templates]
        counts = Counter(itertools.chain(*every))
        self._places: dict[str, list[int]] = {}
        for place, keys in enumerate(every):
            key = min(keys, key=counts.__getitem__)
            self._places.setdefault(key, []).append(place)
        starts = (key for key in self._places if key.startswith(SEPARATOR))
        self._lengths = sorted({*map(len, starts)})

    def near(self, path: str) -> list[int]:
        """Return the places of all templates that may match, in order."""
        text = f"{SEPARATOR}{path}{SEPARATOR}"
        starts = (text[:length] for length in self._lengths)
        keys = dict.fromkeys([text[1:], *_WORD.findall(text), *starts])
        return sorted(place for key in keys for place in self._places.get(key, ()))


def compose(
    names: Sequence[str], values: Mapping[str, str | int], sizes: Mapping[str, int]
) -> int:
    """Return the number that the values of several names make.

    Example:
        >>> compose(["b", "i"], {"b": 2, "i": 1}, {"b": 4, "i": 6})
        13
    """
    number = 0
    for name in names:
        number = number * sizes[name] + int(values[name])
    return number


def decompose(
    names: Sequence[str], number: int, sizes: Mapping[str, int]
) -> dict[str, int]:
    """Return the values of several names that make a number.

    Example:
        >>> decompose(["b", "i"], 13, {"b": 4, "i": 6})
        {'i': 1, 'b': 2}
    """
    values = {}
    for name in reversed(names[1:]):
        number, values[name] = divmod(number, sizes[name])
    return values | {names[0]: number}


def parse_template(row: str, text: str, *, wild: bool = False) -> Template:
    """Parse the path of one address.

    Args:
        row: text of the address, for messages; starts with ``text``.
        text: the path, without axes.
        wild: whether ``*`` and ``**`` are allowed.

    Raises:
        MigrationError: the text is malformed; points at the column.
    """
    segments: list[Segment] = []
    for start, segment in _segments(text):
        parts = _parse_segment(row, segment, start, wild=wild)
        held = _only(parts)
        segments.append((held,) if held and held.is_many else parts)
    return Template(text, tuple(segments))


def malformed(text: str, column: int, problem: str, cure: str) -> NoReturn:
    """Raise because an address cannot be read.

    Raises:
        MigrationError: always; it points at the column.
    """
    # What a terminal would obey has the width of one character, too.
    shown = "".join(char if char.isprintable() else "?" for char in text)
    left = shown[max(column - 60, 0) : column]
    raise MigrationError(
        f"The row {listing([text])} is malformed at column {column + 1}: {problem}. "
        f"{cure}.\n    {left}{shown[column : column + 20]}\n    {' ' * len(left)}^"
    )


def _segments(text: str) -> Iterator[tuple[int, str]]:
    """Split at each slash, also where a backslash precedes it; yield columns too."""
    start = 0
    for slash in _ESCAPE_OR_SLASH.finditer(text):
        if slash["slash"]:
            yield start, text[start : slash.start()]
            start = slash.end()
    yield start, text[start:]


def _parse_segment(row: str, segment: str, start: int, *, wild: bool) -> Segment:
    """Return the literals and captures of one segment, in turn."""
    parts: list[str | Capture] = [""]
    place = 0
    while place < len(segment):
        found = _CAPTURE.match(segment, place)
        stars = _STARS.match(segment, place) if wild else None
        if found or stars:
            held, end = _capture(row, found, stars, start + place)
            if len(parts) > 1 and not parts[-1]:
                cure = "Put text between them"
                malformed(row, start + place, "two captures touch", cure)
            if held.is_many and (place, end) != (0, len(segment)):
                problem = f"{segment[place:end]} means whole segments"
                malformed(row, start + place, problem, "Let it be alone in one")
            parts += [held, ""]
            place = end
            continue
        if segment[place] in _HINTS:
            cure = _HINTS[segment[place]]
            malformed(row, start + place, f"a bare {segment[place]!r}", cure)
        place += segment[place] == "\\" and place + 1 < len(segment)
        parts[-1] = f"{parts[-1]}{segment[place]}"
        place += 1
    return tuple(parts)


def _capture(
    row: str, found: re.Match[str] | None, stars: re.Match[str] | None, column: int
) -> tuple[Capture, int]:
    """Return a capture and where its text ends in the segment."""
    if found is None:
        assert stars is not None
        if len(stars[0]) > 2:
            malformed(row, column, f"{stars[0]} is not a pattern", "Write * or **")
        return Capture(stars[0], (), stars[0] == "**", is_wild=True), stars.end()
    if found["product"]:
        names = tuple(found["product"].split())
        if len({*names}) < len(names):
            malformed(row, column, f"{found[0]} has a name twice", "Use other names")
        return Capture(f"({' '.join(names)})", names, is_number=True), found.end()
    if found["shifted"]:
        name, shift = found["shifted"], int(found["shift"])
        return Capture(name, (name,), is_number=True, shift=shift), found.end()
    if found["listed"]:
        texts = _ENTRY.findall(f"{found['entries']},")
        entries = tuple(re.sub(r"\\(.)", r"\1", text) for text in texts)
        if len({*entries}) < len(entries) or not all(entries):
            problem = f"the texts of {found[0]} are empty or not unique"
            malformed(row, column, problem, "Write each once")
        return Capture(
            found["listed"], (found["listed"],), entries=entries
        ), found.end()
    return Capture(found["name"], (found["name"],), bool(found["many"])), found.end()


def _only(segment: Segment) -> Capture | None:
    """Return the capture that is alone in a segment."""
    captures = [part for part in segment if isinstance(part, Capture)]
    return (
        captures[0]
        if len(captures) == 1
        and not any(part for part in segment if isinstance(part, str))
        else None
    )


def _is_many(segment: Segment) -> bool:
    return isinstance(segment[0], Capture)


def _match_segment(segment: Segment, text: str) -> list[tuple[Capture, Any]] | None:
    """Match one segment; return its captures with what they hold."""
    if len(segment) == 1:
        return [] if segment[0] == text else None
    literals: Sequence[str] = segment[::2]  # type: ignore[assignment]
    captures: Sequence[Capture] = segment[1::2]  # type: ignore[assignment]
    if not text.startswith(literals[0]) or not text.endswith(literals[-1]):
        return None
    return _search(literals, captures, text)


def _search(
    literals: Sequence[str], captures: Sequence[Capture], text: str
) -> list[tuple[Capture, Any]] | None:
    """Return what each capture holds, each as short as those left of it allow.

    Each capture is tried at each place once. Where one of any text fails, it fails at
    all places further right: what it could hold there, it could hold here.
    """
    stop, last = len(text) - len(literals[-1]), len(captures) - 1
    seen: set[tuple[int, int]] = set()
    hopeless = [sys.maxsize] * len(captures)
    starts: list[int] = []
    searches: list[Iterator[int]] = []

    def begin(place: int, start: int) -> None:
        literal = literals[place + 1] if place < last else ""
        starts.append(start)
        searches.append(captures[place].ends(text, start, literal, stop))

    begin(0, len(literals[0]))
    while searches:
        place = len(searches) - 1
        end = next(searches[-1], None)
        if end is None:
            searches.pop()
            first = starts.pop()
            if captures[place].is_free:
                hopeless[place] = min(hopeless[place], first)
        elif place == last:
            after = [*starts[1:], len(text)]
            pieces = zip(captures, literals[1:], starts, after, strict=True)
            return [(c, c.read(text[i : j - len(x)])) for c, x, i, j in pieces]
        else:
            start = end + len(literals[place + 1])
            if (place + 1, start) not in seen and start < hopeless[place + 1]:
                seen.add((place + 1, start))
                begin(place + 1, start)
    return None
