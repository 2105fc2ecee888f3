"""Globs within a segment: all of them as one automaton over characters.

Takes the tokens of parsed globs, each with bits; gives the bits of the globs that match
a text. A state is a set of positions, held as the bits of an int, so no glob, however
hostile, takes more than its length times the length of the text. Tables are bounded and
may be dropped at any time. See ``matcher`` for segments and trees.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, compress
from operator import xor

from treeadapt.patterns.glob import CharacterSet, Mark, NumberRange, Token

# Transitions that an automaton remembers before it starts again.
MAX_TRANSITIONS = 100_000


class _CharacterState(dict[str, "_CharacterState"]):
    """A set of positions, and where each character leads from there, once asked."""

    __slots__ = ("automaton", "matched", "positions")

    def __init__(self, automaton: CharacterAutomaton, positions: int, matched: int):
        self.automaton, self.positions, self.matched = automaton, positions, matched

    def __missing__(self, char: str) -> _CharacterState:
        state = self[char] = self.automaton.step(self, char)
        return state


class CharacterAutomaton:
    """All globs within a segment, side by side.

    A glob is a run of positions, laid out from its end: the lowest one says that the
    glob is matched. A state holds the positions whose character may come next. Most
    often a character leads one bit down; where braces and numbers lead elsewhere,
    ``_jumps`` says so.

    Args:
        globs: tokens, and the bits to give for a text that matches them.
        budget: bytes that the states may take before they are forgotten.
    """

    def __init__(self, globs: Iterable[tuple[Sequence[Token], int]], budget: int):
        self._everywhere = 0  # the bits of ``*`` alone
        self._size = self._first = self._accepts = self._jumping = 0
        self._stars = 0
        self._falling_stars = 0  # those that lead one bit down, at no character
        self._falling = 0  # positions whose character leads one bit down only
        self._literals: dict[str, int] = defaultdict(int)
        # Code point -> positions that from there on accept what they did not, or
        # no longer accept what they did.
        self._changes: dict[int, int] = defaultdict(int)
        self._jumps: dict[int, tuple[int, int]] = {}  # place -> positions, shift
        self._accepting: dict[int, int] = {}  # place -> bits of the answer
        for tokens, bits in globs:
            if len(tokens) == 1 and tokens[0] is Mark.STAR:
                self._everywhere |= bits
            else:
                self._accepting[self._size] = bits
                self._accepts |= 1 << self._size
                self._start = self._size  # the place of its lowest position
                self._size += 1
                self._first |= self._lay_out(tokens, 1 << self._start)
        self._limit = min(MAX_TRANSITIONS, 8 * budget // (self._size + 1))
        self._points = sorted(self._changes)
        changes = (self._changes[point] for point in self._points)
        self._in_sets = list(accumulate(changes, xor, initial=0))
        self._forget()

    def match(self, text: str) -> int:
        """The bits of all globs that match ``text``."""
        if not self._accepting:
            return self._everywhere
        if self._transitions > self._limit:
            self._forget()
        state = self._root
        for char in text:
            state = state[char]
        return state.matched

    def step(self, state: _CharacterState, char: str) -> _CharacterState:
        """The state that ``char`` leads to."""
        # The bit of a set changes where it begins and after it ends: the xor of all
        # changes up to a character has the bits of the sets that it is in.
        in_sets = self._in_sets[bisect_right(self._points, ord(char))]
        accepting = self._stars | in_sets | self._literals.get(char, 0)
        passed = state.positions & accepting
        # A star stays where it is; what falls goes one bit down, all by one shift.
        after = passed & self._stars | (passed & self._falling) >> 1
        after |= (after & self._falling_stars) >> 1
        if passed & self._jumping:
            after |= self._jump(passed & self._jumping)
        self._transitions += 1
        next_state = self._states.get(after)
        return self._state(after) if next_state is None else next_state

    def _state(self, positions: int) -> _CharacterState:
        matched = self._everywhere
        for place in places_of(positions & self._accepts):
            matched |= self._accepting[place]
        state = self._states[positions] = _CharacterState(self, positions, matched)
        return state

    def _jump(self, jumping: int) -> int:
        # By bytes, each of them worked out once: thousands of positions may jump at
        # every character.
        after, jumped = 0, self._jumped
        data = jumping.to_bytes(self._size // 8 + 1, "little")
        for index in compress(range(len(data)), data):  # bytes that are not zero
            key = index << 8 | data[index]  # which byte, and what is in it
            target = jumped.get(key)
            if target is None:
                if len(jumped) > self._limit // 8:
                    jumped.clear()
                target = 0
                for place in places_of(data[index]):
                    positions, shift = self._jumps[8 * index + place]
                    target |= positions << shift
                jumped[key] = target
            after |= target
        return after

    def _forget(self) -> None:
        self._transitions = 0
        self._jumped: dict[int, int] = {}
        self._states: dict[int, _CharacterState] = {}
        self._root = self._state(self._first)

    # Layout. Each takes the positions that come next and gives those to come from.

    def _lay_out(self, tokens: Sequence[Token], now: int) -> int:
        groups: list[tuple[int, int]] = []  # what follows, what alternatives begin with
        for token in reversed(tokens):
            if isinstance(token, str):
                now = self._literal(token, now)
            elif isinstance(token, CharacterSet):
                now = self._set(token.intervals, now)
            elif isinstance(token, NumberRange):
                now = self._numbers(token, now)
            elif token is Mark.STAR:
                now = self._star(now)
            elif token is Mark.CLOSE:
                groups.append((now, 0))
            elif token is Mark.COMMA:
                after, begin = groups.pop()
                groups.append((after, begin | now))
                now = after
            else:
                now |= groups.pop()[1]
        return now

    def _character(self, after: int) -> int:
        position = 1 << self._size
        below = position >> 1
        if after == below | (below & self._falling_stars) >> 1:
            self._falling |= position
        else:
            self._jump_to(after)
        self._size += 1
        return position

    def _jump_to(self, after: int) -> None:
        self._jumping |= 1 << self._size
        self._jumps[self._size] = after >> self._start, self._start

    def _literal(self, char: str, after: int) -> int:
        self._literals[char] |= 1 << self._size
        return self._character(after)

    def _set(self, intervals: Iterable[tuple[int, int]], after: int) -> int:
        for first, last in intervals:
            self._changes[first] ^= 1 << self._size
            self._changes[last + 1] ^= 1 << self._size
        return self._character(after)

    def _star(self, after: int) -> int:
        position = 1 << self._size
        self._stars |= position
        if after == position >> 1:
            self._falling_stars |= position
        else:
            self._jump_to(after)
        self._size += 1
        return position | after

    def _numbers(self, numbers: NumberRange, after: int) -> int:
        """Lay out a range: a handful of positions a place, whatever its size."""
        first, last = numbers.first, numbers.last
        begin, begins = 0, {("", ""): after}
        for width in range(len(first), len(last) + 1):
            low = first if width == len(first) else "1".ljust(width, "0")
            high = last if width == len(last) else "9" * width
            begin |= self._between(low, high, begins)
        return begin

    def _between(
        self, first: str, last: str, begins: dict[tuple[str, str], int]
    ) -> int:
        """Lay out the numbers of one width from ``first`` to ``last``, once."""
        if (first, last) not in begins:
            begin, low, high = 0, int(first[0]), int(last[0])
            zeros, nines = "0" * len(first[1:]), "9" * len(first[1:])
            digits: dict[tuple[str, str], list[int]] = {}  # by what may follow
            for digit in range(low, high + 1):
                ends = first[1:] if digit == low else zeros, nines
                ends = ends if digit < high else (ends[0], last[1:])
                digits.setdefault(ends, []).append(ord("0") + digit)
            for ends, codes in digits.items():
                after = self._between(*ends, begins)
                begin |= self._set([(codes[0], codes[-1])], after)
            begins[first, last] = begin
        return begins[first, last]


def places_of(mask: int) -> Iterator[int]:
    """The places of the bits that are set, without a look at those that are not."""
    while mask:
        lowest = mask & -mask  # in two's complement, the lowest bit alone
        yield lowest.bit_length() - 1
        mask ^= lowest
