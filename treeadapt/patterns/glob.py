r"""Patterns: one glob over label paths, parsed once.

Takes the text of a pattern and gives a ``Pattern``: its elements, one a segment.
Promises that a malformed text is a ``PatternError`` that points at the column, and
that nothing is expanded: a parsed pattern is never larger than its text by more than
a small factor, whatever its braces and ranges mean.
Knows no tree and matches nothing (see ``matcher``); a leading ``!`` means nothing here
(see ``selectors``).
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NoReturn, TypeAlias

from treeadapt.errors import PatternError
from treeadapt.text.names import listing

MAX_CHARACTERS = 4_096
MAX_ANY_DEPTH = 64
MAX_DIGITS = 20  # any 64-bit integer
REGEX_PREFIX = "re:"

_LAST_CODE_POINT = 0x10FFFF
# What makes a segment more than its own text. A comma speaks only within braces.
_SPECIAL = re.compile(r"[\\*?\[\]{}<]")
# A path as it is, perhaps with escapes: without wildcards there is nothing to cap.
_PLAIN = re.compile(r"(?!re:)(?:[^\\*?\[\]{}<]|\\.)*+", re.DOTALL)
# A slash ends a segment, written plainly or as ``\/``. Other escapes are skipped.
_ESCAPE_OR_SLASH = re.compile(r"\\[^/]|(?P<slash>\\?/)", re.DOTALL)
# A whole alternative that is a range, or that its writer must have meant as one.
_RANGE_LIKE = re.compile(r"(?:[-+\w]*\.\.[-+\w.]*|-[0-9]+)(?=[,}])")
_NUMBER = re.compile(r"-?[0-9]+")
# A set whose writer must have meant braces: a range of numbers, or a list of words.
_RANGE_IN_SET = re.compile(r"\[([0-9]+)(\.\.|-|:)([0-9]+)\]")
_WORDS_IN_SET = re.compile(r"[\w.-]+(?:[,|][\w.-]+)+")
_KEY_IN_SET = re.compile(r"(['\"]).*\1")  # of an exact path, as JAX writes it


# What is read as one within a segment: an escape, a set, a sign of braces.
_BRACES = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|(?P<sign>[{},])", re.DOTALL)
_FROM_END = re.compile(r"-[0-9]+(\.\..*)?")


class Mark(enum.Enum):
    """Tokens of a glob that are neither a character nor a number."""

    STAR = "*"
    OPEN = "{"
    COMMA = ","
    CLOSE = "}"


@dataclass(frozen=True, slots=True)
class CharacterSet:
    """One character out of a set: ``?``, ``[abc]``, ``[!abc]``, ``[0-9]``.

    Args:
        intervals: first and last code point of each run, ascending, disjoint.
    """

    intervals: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class NumberRange:
    """A number from ``first`` to ``last``, both included: ``{0..5}``, ``{00..11}``.

    Args:
        first: decimal digits. Without a leading zero the range holds the numbers as
            Python writes them, else the numbers padded to this width.
        last: decimal digits, not less than ``first``; of the same width if padded.
    """

    first: str
    last: str


Token: TypeAlias = str | CharacterSet | NumberRange | Mark


@dataclass(frozen=True, slots=True)
class AnyDepth:
    """The element ``**``: zero or more whole segments."""


@dataclass(frozen=True, slots=True)
class Literal:
    """A segment with exactly this text."""

    text: str


@dataclass(frozen=True, slots=True)
class Glob:
    """A segment of the form that ``tokens`` describe.

    Args:
        text: as written in the pattern; equal texts are equal globs.
        tokens: single characters, sets, numbers, stars and the marks of braces, in
            the order of the text. Braces are balanced.
    """

    text: str
    tokens: tuple[Token, ...] = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class ClassName:
    """A segment whose node is of a class, or has a base class, of this name."""

    name: str


@dataclass(frozen=True, slots=True)
class FromEnd:
    """A number counted from the end of its family of siblings: ``hidden_{-4..-2}``.

    Args:
        before: what the text before the number is.
        first: -1 for the last number of the family, -2 for the one before, ...
        last: the same, not less than ``first``.
        after: what the text after the number is.
    """

    before: Literal | Glob
    first: int
    last: int
    after: Literal | Glob


Element: TypeAlias = AnyDepth | Literal | Glob | ClassName | FromEnd

_ANY_DEPTH = AnyDepth()
_literal = lru_cache(maxsize=4_096)(Literal)  # rules use the same few names many times


@dataclass(frozen=True, slots=True)
class Pattern:
    """A parsed pattern; made by ``parse``, equal and hashed by its text.

    Args:
        text: what was parsed.
        elements: one for each segment of a glob; no two ``AnyDepth`` side by side.
            Empty for a regular expression.
        weight: what it costs to match, whatever the tree: 1 for a segment without
            wildcards and for ``**``, for another one the number of its characters.
        needs_tree: classes or siblings decide, so that a path alone does not.
        regex: the compiled regular expression of a ``re:`` pattern.

    Example:
        >>> pattern = parse("encoder/<LayerNorm>/{scale,bias}")
        >>> pattern
        Pattern('encoder/<LayerNorm>/{scale,bias}')
        >>> pattern.elements[:2]
        (Literal(text='encoder'), ClassName(name='LayerNorm'))
        >>> pattern.weight, pattern.needs_tree
        (24, True)
    """

    text: str
    elements: tuple[Element, ...] = field(compare=False)
    weight: int = field(compare=False)
    needs_tree: bool = field(default=False, compare=False)
    regex: re.Pattern[str] | None = field(default=None, compare=False)

    @property
    def literals(self) -> list[str]:
        """The segments that a path must have just as they are."""
        return [one.text for one in self.elements if isinstance(one, Literal)]

    def __repr__(self) -> str:
        return f"Pattern({self.text!r})"

    def __reduce__(self) -> tuple[object, ...]:
        # By text: the parsed form may differ between versions.
        return parse, (self.text,)


@lru_cache(maxsize=4_096)
def parse(text: str) -> Pattern:
    """Parse the text of a pattern; the same text gives the same object while cached.

    Args:
        text: a glob over label paths, or ``re:`` and a regular expression.

    Raises:
        PatternError: the text is malformed or too large; points at the column.

    Example:
        >>> parse("policy/*/kernel").elements[0]
        Literal(text='policy')
        >>> parse("layers/{5..3}")
        Traceback (most recent call last):
        treeadapt.errors.PatternError: Pattern 'layers/{5..3}', column 9: the range
        ends before it starts. Write '{3..5}'.
            layers/{5..3}
                    ^
    """
    if not isinstance(text, str):
        raise PatternError(f"A pattern is a string, not {type(text).__name__}.")
    text = str.__str__(text)
    if len(text) > MAX_CHARACTERS and not _PLAIN.fullmatch(text):
        problem = f"a pattern with wildcards has at most {MAX_CHARACTERS:,} characters"
        _fail(text, MAX_CHARACTERS, f"{problem}. Write several patterns in a list.")
    if text.startswith(REGEX_PREFIX):
        return Pattern(text, (), len(text), regex=_regex(text))
    if not text:
        problem = "the pattern is empty. Write '**' for every leaf, "
        _fail(text, 0, problem + "'{,}' for the path '' of a bare leaf.")
    if text[0] == "/":
        problem = f"a path has no leading slash. Write {listing([text.lstrip('/')])}"
        _fail(text, 0, problem + "; after an empty key, write '\\/'.")
    if not _SPECIAL.search(text):
        elements = tuple(map(_literal, text.split("/")))
        return Pattern(text, elements, len(elements))
    return _glob(text)


def escape(text: str) -> str:
    r"""Write the pattern that matches the path ``text`` and no other.

    Like any pattern it also selects what lies below that path, if it is a node.

    Args:
        text: a label path; may be empty, hold ``*``, start with ``/``, ``!``, ``re:``.

    Raises:
        PatternError: ``text`` is not a string.

    Example:
        >>> print(escape("blocks/[0]/w*"), escape("re:x"), escape(""))
        blocks/\[0\]/w\* \re:x {,}
    """
    if not isinstance(text, str):
        raise PatternError(f"A path is a string, not {type(text).__name__}.")
    if not text:
        return "{,}"
    escaped = _SPECIAL.sub(r"\\\g<0>", text)
    return "\\" + escaped if text.startswith(("/", "!", REGEX_PREFIX)) else escaped


def _regex(text: str) -> re.Pattern[str]:
    body = text[len(REGEX_PREFIX) :]
    if not body:
        _fail(text, len(text), "the regular expression is empty. Write 're:.*'.")
    try:
        return re.compile(body)
    except re.error as error:
        column, reason = error.pos or 0, error.msg
    except (OverflowError, RecursionError) as error:
        column, reason = 0, str(error)
    _fail(text, len(REGEX_PREFIX) + column, f"not a regular expression: {reason}.")


def _glob(text: str) -> Pattern:
    elements: list[Element] = []
    weight = any_depths = 0
    for start, stop in spans(text):
        segment = text[start:stop]
        if segment == "**":
            any_depths, weight = any_depths + 1, weight + 1
            if any_depths > MAX_ANY_DEPTH:
                _fail(text, start, f"a pattern has at most {MAX_ANY_DEPTH} '**'.")
            if elements[-1:] != [_ANY_DEPTH]:
                elements.append(_ANY_DEPTH)
        elif _SPECIAL.search(segment):
            elements.append(_Scanner(text, start, stop).element())
            weight += len(segment)
        else:
            elements.append(_literal(segment))
            weight += 1
    needs_tree = any(isinstance(one, ClassName | FromEnd) for one in elements)
    return Pattern(text, tuple(elements), weight, needs_tree)


def spans(text: str) -> Iterator[tuple[int, int]]:
    """Yield start and stop of every segment; a slash ends one, escaped or not."""
    start = 0
    for match in _ESCAPE_OR_SLASH.finditer(text):
        if match["slash"]:
            yield start, match.start()
            start = match.end()
    yield start, len(text)


def alternatives(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield each alternative of a glob, with what is before and after it.

    Without the others of its braces, that is the pattern of this one alternative; other
    braces stay. Numbers counted from the end are not alternatives.

    Args:
        text: of a pattern that can be parsed.

    Example:
        >>> [*alternatives("a/{b,x{c,d}}/{0..3}")][:2]
        [('a/', 'b', '/{0..3}'), ('a/x', 'c', '/{0..3}')]
    """
    opened, starts = 0, [0]  # of the outermost braces, and of its alternatives
    depth, bodies = 0, list[str]()
    for match in _BRACES.finditer(text):
        sign = match["sign"]
        depth += (sign == "{") - (sign == "}")
        if sign == "{" and depth == 1:
            opened, starts, bodies = match.start(), [match.end()], []
        elif (sign == "," and depth == 1) or (sign == "}" and depth == 0):
            bodies.append(text[starts[-1] : match.start()])
            starts.append(match.end())
        if sign != "}" or depth:
            continue
        for body in bodies:
            parts = [*alternatives(body)] or [("", body, "")]
            for before, one, after in parts:
                if not _FROM_END.fullmatch(one):
                    yield text[:opened] + before, one, after + text[match.end() :]


class _Scanner:
    """Reads one segment, ``text[start:stop]``, from left to right."""

    def __init__(self, text: str, start: int, stop: int):
        self.text, self.start, self.stop = text, start, stop
        self.at = start
        self.tokens: list[Token] = []
        self.braces: list[int] = []  # columns of those still open
        self.counted: tuple[int, int] | None = None  # ends of a range from the end
        self.before: Literal | Glob = Literal("")
        self.part = start  # where the text that ``tokens`` describe begins

    def element(self) -> Element:
        if self.text[self.start] == "<":
            return self._class_name()
        while self.at < self.stop:
            self._read()
        if self.braces:
            self._unclosed(self.braces[-1], "}", "braces choose within one segment")
        last_part = self._take_part(self.stop)
        if self.counted is None:
            return last_part
        return FromEnd(self.before, *self.counted, last_part)

    def fail(self, problem: str, at: int | None = None) -> NoReturn:
        _fail(self.text, self.at if at is None else at, problem)

    def _read(self) -> None:
        char = self.text[self.at]
        if char == "\\":
            self.tokens.append(self._character())
        elif char == "*":
            self._star()
        elif char == "?":
            self._put(CharacterSet(((0, _LAST_CODE_POINT),)))
        elif char == "[":
            self.tokens.append(self._character_set())
        elif char == "{":
            self._open()
        elif char == "}":
            self._close()
        elif char == "," and self.braces:
            self._put(Mark.COMMA)
            self._range()
        elif char == "]":
            self.fail(r"no '[' before this ']'. Write '\]' for the character itself.")
        elif char == "<":
            self.fail(
                "a class name is a whole segment: '**/<LayerNorm>'. "
                r"Write '\<' for the character itself, or several patterns in a list."
            )
        else:
            self._put(char)

    def _put(self, token: Token) -> None:
        self.tokens.append(token)
        self.at += 1

    def _character(self) -> str:
        """One character, itself or after a backslash."""
        if self.text[self.at] == "\\":
            self.at += 1
            if self.at >= self.stop:
                problem = "a backslash at the end escapes nothing. "
                self.fail(problem + r"Write '\\' for a backslash.", self.at - 1)
        self.at += 1
        return self.text[self.at - 1]

    def _star(self) -> None:
        if self.text.startswith("**", self.at):
            self.fail(
                "'**' means whole segments and must be one itself. "
                "Write 'a*b' within a segment or 'a/**/b'."
            )
        self._put(Mark.STAR)

    def _take_part(self, stop: int) -> Literal | Glob:
        """What the tokens since the last part describe."""
        tokens, text = self.tokens, self.text[self.part : stop]
        self.tokens = []
        if all(isinstance(token, str) for token in tokens):
            return Literal("".join(map(str, tokens)))
        return Glob(text, tuple(tokens))

    def _unclosed(self, opened: int, closing: str, within: str) -> NoReturn:
        opening = self.text[opened]
        if closing in self.text[self.stop :]:
            self.fail(f"{within}. Write several patterns in a list.", self.stop)
        problem = f"no {closing!r} closes this {opening!r}. "
        self.fail(f"{problem}Write '\\{opening}' for the character itself.", opened)

    # Classes: ``<LayerNorm>`` and ``[abc]``.

    def _class_name(self) -> ClassName:
        self.at += 1
        name = ""
        while self.at < self.stop and self.text[self.at] != ">":
            if self.text[self.at] in "*?[]{}<":
                self.fail("a class name is written out, without wildcards.")
            name += self._character()
        if self.at >= self.stop:
            self._unclosed(self.start, ">", "a class name is within one segment")
        if not name:
            self.fail(r"no class name here. Write '\<' for the character itself.")
        if self.at + 1 < self.stop:
            self.fail("a class name is a whole segment: nothing follows.", self.at + 1)
        return ClassName(name)

    def _character_set(self) -> CharacterSet:
        opened = self.at
        self._refuse_range()
        self.at += 1
        negated = self.text.startswith("!", self.at, self.stop)
        if negated:
            self.at += 1
        if self.text.startswith("^", self.at, self.stop):
            self.fail(r"write '[!...]' for any other, '\^' for the character itself.")
        intervals = []
        while not self.text.startswith("]", self.at, self.stop):
            if self.at >= self.stop:
                self._unclosed(opened, "]", "a class is one character of one segment")
            intervals.append(self._interval())
        if not intervals:
            self.fail(r"the class is empty. Write '[\]]' for a ']'.", opened)
        self._refuse_twice(opened, intervals)
        self.at += 1
        return CharacterSet(_union(intervals, negated=negated))

    def _refuse_range(self) -> None:
        """Refuse a set that reads like a range of numbers: ``[0..5]``, ``[0-11]``."""
        match = _RANGE_IN_SET.match(self.text, self.at, self.stop)
        if match is None or int(match[1]) > int(match[3]):
            return
        if match[2] != "-" or len(match[1] + match[3]) > 2 or match[1] == match[3]:
            self.fail(
                f"{match[0]!r} is one character of a set, not a range of numbers. "
                f"Write '{{{match[1]}..{match[3]}}}'."
            )

    def _refuse_twice(self, opened: int, intervals: list[tuple[int, int]]) -> None:
        """Refuse a set that names a character twice: its writer meant something else.

        A key of an exact path has two quotes; who knows the tree writes it as a path.
        """
        body = self.text[opened + 1 : self.at]
        if _KEY_IN_SET.fullmatch(body):
            return
        seen = -1
        for first, last in sorted(intervals):
            if first <= seen:
                words = body.replace("|", ",")
                cure = f"'{{{words}}}' for one of several texts, or "
                cure *= _WORDS_IN_SET.fullmatch(body) is not None
                problem = f"the set names {chr(first)!r} twice. Write {cure}each "
                self.fail(f"{problem}character once.", opened)
            seen = last

    def _interval(self) -> tuple[int, int]:
        begin = self.at
        first = last = self._character()
        is_range = self.text.startswith("-", self.at, self.stop)
        if is_range and not self.text.startswith("]", self.at + 1, self.stop):
            self.at += 1
            if self.at < self.stop:
                last = self._character()
        if first > last:
            problem = f"{first!r} comes after {last!r}. "
            self.fail(problem + r"Write '\-' for the character itself.", begin)
        if first == last and self.at - begin > 2:
            self.fail(f"the set names {first!r} twice. Write it once.", begin)
        return ord(first), ord(last)

    # Braces: ``{query,key}``, ``{0..5}``, ``{-4..}``.

    def _open(self) -> None:
        if self.text.startswith("{}", self.at):
            problem = "no alternatives within the braces. "
            self.fail(problem + r"Write '\{\}' for the characters themselves.")
        self.braces.append(self.at)
        self._put(Mark.OPEN)
        self._range()

    def _close(self) -> None:
        if not self.braces:
            self.fail(r"no '{' before this '}'. Write '\}' for the character itself.")
        self.braces.pop()
        self._put(Mark.CLOSE)

    def _range(self) -> None:
        """Read a range, if one is the whole alternative that begins here."""
        match = _RANGE_LIKE.match(self.text, self.at, self.stop)
        if not match:
            return
        first, dots, last = match[0].partition("..")
        if not (_NUMBER.fullmatch(first) and (not last or _NUMBER.fullmatch(last))):
            self.fail(
                "not a range. Write '{0..5}', or '{-4..}' to count from the end; "
                r"For letters write '[a-e]', and for the characters themselves '\..'."
            )
        if max(len(first), len(last)) > MAX_DIGITS:
            self.fail(f"a number in a range has at most {MAX_DIGITS} digits.")
        if first.startswith("-"):
            last = last or ("-1" if dots else first)
            self._check_range(first, last)
            self._from_end(int(first), int(last), match.end())
        else:
            self._check_range(first, last)
            self.tokens.append(NumberRange(first, last))
            self.at = match.end()

    def _check_range(self, first: str, last: str) -> None:
        if not last:
            problem = "only a range counted from the end is open: '{-4..}'. "
            self.fail(problem + "Write the last number, too.")
        if first.startswith("-") != last.startswith("-"):
            self.fail("a range counts from the start or from the end, not both.")
        if first.startswith("-0") or last.startswith("-0"):
            self.fail("counting from the end starts at -1, without leading zeros.")
        is_padded = any(end[0] == "0" and len(end) > 1 for end in (first, last))
        if is_padded and len(first) != len(last):
            width = max(len(first), len(last))
            ends = f"{first.zfill(width)}..{last.zfill(width)}"
            problem = "zero-padded numbers have the same width on both sides. "
            self.fail(f"{problem}Write '{{{ends}}}'.")
        if int(first) > int(last):
            self.fail(f"the range ends before it starts. Write '{{{last}..{first}}}'.")

    def _from_end(self, first: int, last: int, stop: int) -> None:
        stands_alone = self.tokens[-1] is Mark.OPEN and self.text[stop] == "}"
        if len(self.braces) > 1 or not stands_alone:
            self.fail(
                "a range counted from the end must be alone in outermost braces. "
                r"Write several patterns in a list, or '\-' for the character itself."
            )
        if self.counted is not None:
            self.fail("a segment has at most one range counted from the end.")
        self.counted = first, last
        opened = self.braces.pop()
        self.tokens.pop()
        self.before = self._take_part(opened)
        self.at = self.part = stop + 1


def _union(
    intervals: list[tuple[int, int]], *, negated: bool
) -> tuple[tuple[int, int], ...]:
    """Ascending, disjoint intervals that hold the same code points, or all others."""
    inside: list[tuple[int, int]] = []
    for first, last in sorted(intervals):
        if inside and first <= inside[-1][1] + 1:
            first, previous = inside.pop()
            last = max(previous, last)
        inside.append((first, last))
    if not negated:
        return tuple(inside)
    starts = [0, *(last + 1 for _, last in inside)]
    stops = [*(first - 1 for first, _ in inside), _LAST_CODE_POINT]
    gaps = zip(starts, stops, strict=True)
    return tuple((start, stop) for start, stop in gaps if start <= stop)


def _fail(text: str, index: int, problem: str) -> NoReturn:
    """Raise a ``PatternError`` with a caret under ``text[index]``."""
    left = _printable(text[max(0, index - 40) : index])
    right = _printable(text[index : index + 30])
    raise PatternError(
        f"Pattern {listing([text])}, column {index + 1}: {problem}\n"
        f"    {left}{right}\n"
        f"    {' ' * len(left)}^"
    )


def _printable(text: str) -> str:
    # A pattern may come from a file: no newline or escape code reaches a terminal.
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
