r"""Templates of paths: names with captures, matched and filled in.

Takes the text of one path of a migration and gives a ``Template``. A capture is
``{name}``, a part of one segment; ``{name:**}``, whole segments; ``{p=gate,up}``, one
of these texts, of which one may be empty; ``{n+60}``, a number at least 60, or
``{n+dense}`` with a size in the place of 60; ``{(b i)}``, one number made of two; and,
in a row that drops leaves, ``*`` and ``**``. Which names are numbers is up to ``rows``.
Matching takes time in the product of both lengths, whatever the texts.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn, TypeAlias

from treeadapt.errors import MigrationError
from treeadapt.patterns.glob import spans
from treeadapt.text.names import listing
from treeadapt.text.wording import worded
from treeadapt.trees.paths import SEPARATOR

#: What a path gives each capture: text, or a number.
Captures: TypeAlias = dict[str, str | int]

_NAME = r"[A-Za-z_]\w*"
# All of a segment: a capture, stars, other characters, and one with a meaning.
_TOKEN = re.compile(
    rf"\{{(?:(?P<name>{_NAME})(?P<many>:\*\*)?"
    rf"|(?P<listed>{_NAME})=(?P<entries>(?:[^{{}}/\\]|\\.)*)"
    rf"|(?P<shifted>{_NAME})(?P<sign>[+-])(?P<shift>[0-9]{{1,9}}|{_NAME})"
    rf"|\((?P<product>{_NAME}(?: +{_NAME})+)\))\}}"
    r"|(?P<stars>\*+)|\\(?P<escaped>.)|(?P<plain>[^{}*?\[\\]+|\\)|(?P<bare>.)",
    re.DOTALL,
)
_FEW = 4  # templates
_WORD = re.compile(r"[^\W_]+")
_WHOLE_WORD = re.compile(r"(?<=[\W_])[^\W_]+(?=[\W_])")
_NUMBER = re.compile("0|[1-9][0-9]{0,17}")
_SHORT = 32  # texts of a list that are tried one by one
_ENTRY = re.compile(r"((?:[^,\\]|\\.)*),")
_END = re.compile(r"/|\Z")
#: Where no names are in the place of numbers.
NO_SIZES: Mapping[str, int] = MappingProxyType({})
_HINTS = {
    "{": "A capture is {name}, {name:**}, {name=a,b}, {name+1} or {(a b)}, without a /",
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
        shift_name: of the size that this is; empty if it is written as a number.
        is_wild: whether it is ``*`` or ``**``, which may hold nothing.
    """

    key: str
    names: tuple[str, ...]
    is_many: bool = False
    is_number: bool = False
    entries: tuple[str, ...] = ()
    shift: int = 0
    is_wild: bool = False
    shift_name: str = ""

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
            text: the path, after a slash.
            start: where the value starts.
            literal: what follows the value; empty if its segments end there.
            stop: where the last value ends.
        """
        ends = (match.start() for match in _END.finditer(text, start, stop))
        limit = next(ends)
        if self.is_many:
            places = itertools.chain([limit], ends) if limit == start else ()
            yield from (end for end in places if text.startswith(literal, end))
            return
        end = text.find(literal, start, limit + len(literal)) if literal else limit
        while start <= end <= start + self._longest:
            if self.read(text[start:end]) is not None:
                yield end
            again = text.find(literal, end + 1, limit + len(literal))
            end = again if literal else -1

    def alike(self, text: str, start: int) -> int:
        """Return what is equal for starts of which all fail that are after a failure.

        What a capture of any text could hold further right in its segment, it could
        hold here, too; and one of whole segments, if it may start here.
        """
        if not self.is_free:
            return start
        if self.is_many:
            return 0 if _END.match(text, start) else -1
        return text.find(SEPARATOR, start)

    def stops_at(self, literal: str) -> bool:
        """Return whether the first such literal is where a value must end."""
        characters = "".join(self.entries) if self.entries else "0123456789"
        return not self.is_free and literal[0] not in characters

    def regex(self, *, is_settled: bool) -> str:
        """Write a regular expression for what it may hold, or for any text.

        Args:
            is_settled: whether what it may hold matters; a long list does not say it.
        """
        if is_settled and self.is_number and not self.entries:
            return _NUMBER.pattern
        if is_settled and 0 < len(self.entries) <= _SHORT:
            return "|".join(map(re.escape, self.entries))
        return "[^/]*?" if self.is_wild or "" in self.entries else "[^/]+?"

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


#: What is below a node that is dropped; no address has it as text.
BELOW = Capture("", (), is_many=True, is_wild=True)

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
    def literals(self) -> list[str]:
        """What is before, between and after its captures, in a path after a slash.

        A capture of whole segments holds the slashes before these.
        """
        runs = [""]
        for segment in self.segments:
            runs[-1] += "" if isinstance(segment[0], Capture) else SEPARATOR
            for part in segment:
                if isinstance(part, str):
                    runs[-1] += part
                else:
                    runs.append("")
        return runs

    def _closed(self, end: str, write: Callable[[str], str] = str) -> list[str]:
        """Return its literals, with ``end`` after those that end a segment."""
        is_last = [*(each.is_many for each in self.captures), True]
        pairs = zip(self.literals, is_last, strict=True)
        return [write(text) + (end if each else "") for text, each in pairs]

    @functools.cached_property
    def keys(self) -> list[str]:
        """Texts that a path has if it matches: words, and the start of ``/path/``."""
        runs = self._closed(SEPARATOR)
        if not self.captures:
            return [runs[0].removeprefix(SEPARATOR)]
        return [*itertools.chain(*map(_WHOLE_WORD.findall, runs)), runs[0]]

    @functools.cached_property
    def _relaxed(self) -> re.Pattern[str]:
        """What ``/`` and a path match if captures may hold any text.

        Those that are settled hold what they may. Captures are atomic, so that nothing
        backtracks: if the first occurrence of what follows a capture does not lead to a
        match, a later one does not either.
        """
        (text, *literals), end = self._closed("(?![^/])", re.escape), ""
        every = zip(self.captures, literals, self.settled, strict=True)
        for capture, literal, is_settled in every:
            if capture.is_many:
                text, end = f"{text}{end}(?>((?:/[^/]*)*?){literal}", ")"
            else:
                text += f"(?>({capture.regex(is_settled=is_settled)}){literal})"
        return re.compile(f"{text}\\Z{end}")

    @functools.cached_property
    def settled(self) -> list[bool]:
        """For each capture, whether it may hold nothing but what is tried first."""
        if any(each.is_many and each != BELOW for each in self.captures):
            return [False] * len(self.captures)
        settled = []
        runs, is_sure = self._closed(SEPARATOR), True
        for capture, before, after in zip(self.captures, runs, runs[1:], strict=False):
            is_sure = (is_sure or SEPARATOR in before) and (
                SEPARATOR in after or capture.stops_at(after)
            )
            settled.append(is_sure)
        return settled

    def understood(
        self,
        numbers: Collection[str],
        entries: Mapping[str, tuple[str, ...]],
        many: Collection[str],
        least: Mapping[str, int],
    ) -> Template:
        """Return the template with the kinds that its row gives its captures.

        Args:
            numbers: names that hold numbers.
            entries: the texts that other names may hold.
            many: names that hold whole segments, where they are alone in one.
            least: by name the lowest of its shifts, which is 0 in the result: in a row
                with ``{n-3}`` the numbers of ``{n}`` are 3 and more.
        """

        def understand(part: str | Capture) -> str | Capture:
            if isinstance(part, str) or part.is_many or part.is_wild:
                return part
            if any(name in numbers for name in part.names):
                shift = part.shift - least.get(part.key, 0)
                return dataclasses.replace(part, is_number=True, shift=shift)
            return dataclasses.replace(part, entries=entries.get(part.key, ()))

        segments: list[Segment] = []
        for segment in self.segments:
            match segment:
                case ("", Capture() as capture, "") if capture.key in many:
                    segments.append((dataclasses.replace(capture, is_many=True),))
                case _:
                    segments.append(tuple(map(understand, segment)))
        return Template(self.text, tuple(segments))

    def renamed(self, names: Mapping[str, str]) -> Template:
        """Return the template with other names of its captures."""

        def rename(part: str | Capture) -> str | Capture:
            if isinstance(part, str) or names.keys().isdisjoint(part.names):
                return part
            new = tuple(names.get(name, name) for name in part.names)
            key = new[0] if len(new) == 1 else f"({' '.join(new)})"
            return dataclasses.replace(part, key=key, names=new)

        segments = (tuple(map(rename, each)) for each in self.segments)
        return Template(self.text, tuple(segments))

    def match(self, path: str) -> Captures | None:
        """Return what a path gives each capture; None if it does not match.

        Of all ways to match, each capture is as short as those left of it allow.
        """
        if not self.captures:
            return {} if path + SEPARATOR == self.keys[0] else None
        relaxed = self._relaxed.match(SEPARATOR + path)
        if relaxed is None:
            return None
        texts = zip(self.captures, relaxed.groups(), strict=True)
        pairs = [(capture, capture.read(text)) for capture, text in texts]
        if any(value is None for _, value in pairs):
            sure = zip(pairs, self.settled, strict=True)
            if any(value is None and is_sure for (_, value), is_sure in sure):
                return None
            pairs = self._search(SEPARATOR + path)
            if not pairs:
                return None
        captures: Captures = {}
        for capture, value in pairs:
            if captures.setdefault(capture.key, value) != value and not capture.is_wild:
                return None
        return captures

    def _search(self, text: str) -> list[tuple[Capture, Any]]:
        """Return what each capture holds, each as short as those left of it allow.

        Each capture is tried at each place once.

        Args:
            text: a path after a slash, of the form that ``_relaxed`` asks for.
        """
        literals, captures = self.literals, self.captures
        following, stop = [*literals[1:-1], ""], len(text) - len(literals[-1])
        tried: dict[tuple[int, int], int] = {}
        starts: list[int] = []
        searches: list[Iterator[int]] = []
        end: int | None = 0
        while end is not None:
            place = len(starts)
            if place < len(captures):
                capture, start = captures[place], end + len(literals[place])
                key = place, capture.alike(text, start)
                if start < tried.get(key, stop + 1):
                    tried[key] = start
                    starts.append(start)
                    searches.append(capture.ends(text, start, following[place], stop))
            elif end == stop:
                after = [*starts[1:], len(text)]
                pieces = zip(captures, literals[1:], starts, after, strict=True)
                return [(c, c.read(text[i : j - len(x)])) for c, x, i, j in pieces]
            while searches and (end := next(searches[-1], None)) is None:
                starts.pop()
                searches.pop()
        return []

    def fill(
        self,
        values: Mapping[str, str | int],
        sizes: Mapping[str, int],
        before: Capture | None = None,
    ) -> str:
        """Return the path that some values give.

        Args:
            values: by name; those of ``{(b i)}`` by each of its names.
            sizes: of the names of each ``{(b i)}``.
            before: the capture before which it ends; None for all of it.
        """
        path = self.literals[0]
        for capture, literal in zip(self.captures, self.literals[1:], strict=True):
            if capture is before:
                break
            if len(capture.names) > 1:
                text = str(compose(capture.names, values, sizes))
            else:
                text = capture.write(values[capture.key])
            if capture.is_many and text:  # whole segments may have been a part of one
                path += SEPARATOR
            path += text.removeprefix(SEPARATOR) + literal
        return path.removeprefix(SEPARATOR)


class Index:
    """Templates by a text that few of them have, so that few are tried for a path."""

    def __init__(self, templates: Iterable[Template]) -> None:
        every = [template.keys for template in templates]
        self._few = [*range(len(every))] if len(every) <= _FEW else []
        counts = Counter(itertools.chain(*every))
        self._places: dict[str, list[int]] = {}
        for place, keys in enumerate(every):
            key = min(keys, key=counts.__getitem__)
            self._places.setdefault(key, []).append(place)
        starts = (key for key in self._places if key.startswith(SEPARATOR))
        self._lengths = sorted({*map(len, starts)})

    def near(self, path: str) -> list[int]:
        """Return the places of all templates that may match, in order."""
        if self._few:  # to try each takes less than to look
            return self._few
        text = f"{SEPARATOR}{path}{SEPARATOR}"
        starts = (text[:length] for length in self._lengths)
        keys = dict.fromkeys([text[1:], *_WORD.findall(text), *starts])
        return sorted(place for key in keys for place in self._places.get(key, ()))


class PathsByCapture:
    """Paths, and whether one of them has what a template captured elsewhere.

    Args:
        paths: what there is.

    Example:
        >>> paths = PathsByCapture(["h/0/w", "h/1/w"])
        >>> template = parse_template("row", "h/{l}/{k}")
        >>> paths.has(template, {"l": "1"}), paths.has(template, {"k": "b"})
        (True, False)
        >>> "h/0/w" in paths
        True
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = frozenset(paths)
        self._values: dict[tuple[Template, tuple[str, ...]], set[Any]] = {}

    def __contains__(self, path: str) -> bool:
        return path in self._paths

    def has(self, template: Template, values: Mapping[str, Any]) -> bool:
        """Return whether a path matches a template, with these values of its names."""
        names = tuple(each.key for each in template.captures if each.key in values)
        if (template, names) not in self._values:
            every = map(template.match, self._paths)
            self._values[template, names] = {
                tuple(map(captures.get, names))
                for captures in every
                if captures is not None
            }
        return tuple(map(values.get, names)) in self._values[template, names]


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
    names: Sequence[str], number: Any, sizes: Mapping[str, int]
) -> dict[str, Any]:
    """Return the values of several names that make a number; what one name has.

    Example:
        >>> decompose(["b", "i"], 13, {"b": 4, "i": 6})
        {'i': 1, 'b': 2}
    """
    values = {}
    for name in reversed(names[1:]):
        number, values[name] = divmod(number, sizes[name])
    return values | dict.fromkeys(names[:1], number)


def parse_template(
    row: str, text: str, *, wild: bool = False, sizes: Mapping[str, int] = NO_SIZES
) -> Template:
    """Parse the path of one address.

    Args:
        row: text of the address, for messages; starts with ``text``.
        text: the path, without axes.
        wild: whether ``*`` and ``**`` are allowed, and the path of a node means all
            that is below it, as a pattern does.
        sizes: by names that may be in the place of numbers.

    Raises:
        MigrationError: the text is malformed; points at the column.
    """
    segments = [
        _parse_segment(row, text[start:stop], start, sizes, wild=wild)
        for start, stop in spans(text)
    ]
    is_open = isinstance(segments[-1][0], Capture)
    if wild and text and not is_open:
        segments.append((BELOW,))
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


def _parse_segment(
    row: str, segment: str, start: int, sizes: Mapping[str, int], *, wild: bool
) -> Segment:
    """Return the literals and captures of one segment, in turn."""
    parts: list[str | Capture] = [""]
    for match in _TOKEN.finditer(segment):
        column, text = start + match.start(), match["escaped"] or match["plain"]
        if text:
            parts[-1] = f"{parts[-1]}{text}"
            continue
        if match["bare"] or (match["stars"] and not wild):
            bare = match[0][0]
            malformed(row, column, f"a bare {bare!r}", _HINTS[bare])
        capture = _capture(row, match, column, sizes)
        if len(parts) > 1 and not parts[-1]:
            malformed(row, column, "two captures touch", "Put text between them")
        if capture.is_many:
            if match[0] == segment:
                return (capture,)
            problem = f"{match[0]} means whole segments"
            one = "*" if capture.is_wild else f"{{{capture.key}}}"
            whole = f"{segment[: match.start()]}{one}{segment[match.end() :]}"
            cure = f"For a part of one write {one}: {whole!r:.200}"
            malformed(row, column, problem, cure)
        parts += [capture, ""]
    return tuple(parts)


def _capture(
    row: str, match: re.Match[str], column: int, sizes: Mapping[str, int]
) -> Capture:
    """Return what is captured, or matched by stars."""
    if stars := match["stars"]:
        if len(stars) > 2:
            malformed(row, column, f"{stars} is not a pattern", "Write * or **")
        return Capture(stars, (), stars == "**", is_wild=True)
    if match["product"]:
        names = tuple(match["product"].split())
        if len({*names}) < len(names):
            malformed(row, column, f"{match[0]} has a name twice", "Use other names")
        return Capture(f"({' '.join(names)})", names, is_number=True)
    if match["shifted"]:
        name, shift = match["shifted"], match["shift"]
        size_name = "" if shift.isdecimal() else shift
        if size_name and size_name not in sizes:
            size = f"sizes={{{size_name!r}: 3}}"
            size = worded(size, f"[sizes] above {size_name} = 3")
            cure = f"Write the size, as in {size}"
            malformed(row, column, f"{match[0]} and no size {size_name!r}", cure)
        number = int(f"{match['sign']}{sizes[size_name] if size_name else shift}")
        return Capture(
            name, (name,), is_number=True, shift=number, shift_name=size_name
        )
    if match["listed"]:
        texts = _ENTRY.findall(f"{match['entries']},")
        entries = tuple(re.sub(r"\\(.)", r"\1", text) for text in texts)
        if len({*entries}) < len(entries) or not any(entries):
            problem = f"the texts of {match[0]} are empty or not unique"
            malformed(row, column, problem, "Write each once")
        return Capture(match["listed"], (match["listed"],), entries=entries)
    return Capture(match["name"], (match["name"],), bool(match["many"]))
