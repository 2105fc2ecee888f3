"""The matcher: which of many patterns select which leaves, in one walk.

Takes parsed patterns and the names of a tree; gives one int a leaf, whose bit ``i``
says whether pattern ``i`` selects the leaf. All globs are one automaton over segments
that goes down the tree with the state carried from parent to child. Each transition
is computed once, so that a leaf costs one dictionary look-up, whatever the number of
patterns. All globs within a segment are one automaton over characters. The states of
both are sets of positions, held as the bits of an int: no pattern, however hostile,
takes more than its length times the length of the path.
Tables are bounded and may be dropped at any time: they only ever save work. Knows no
leaf, and neither ``!`` nor the order of rules (see ``selectors`` and ``rules``).
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from operator import or_, xor
from typing import Protocol

from treeadapt.errors import SelectorError
from treeadapt.names import listing
from treeadapt.patterns import (
    AnyDepth,
    CharacterSet,
    ClassName,
    FromEnd,
    Glob,
    Literal,
    Mark,
    NumberRange,
    Pattern,
    Token,
    weight,
)

# Transitions that an automaton remembers before it starts again, and the bytes that the
# states of one matcher may take by then.
MAX_TRANSITIONS = 100_000
MAX_BYTES = 64 * 2**20
# The weight of the patterns that share an automaton: a step costs what all of them
# weigh, so larger tables are walked in groups.
MAX_WEIGHT = 8_192

_DIGITS = re.compile("[0-9]+")
_NOT_ZERO = re.compile(rb"[^\0]", re.DOTALL)


class NameTree(Protocol):
    """The names of a tree, as far as patterns ask for them."""

    @property
    def paths(self) -> Sequence[str]:
        """One label path a leaf, all different."""

    def classes(self, path: str) -> tuple[type, ...]:
        """Classes of the nodes and boxes that stand at ``path``; often none."""

    def child_names(self, path: str | None) -> Sequence[str]:
        """Segments right below the node at ``path``, below the root for ``None``."""


class Matcher:
    """Many patterns as one automaton.

    Args:
        patterns: parsed patterns; their order gives the bits of an answer.

    Example:
        >>> from treeadapt.patterns import parse
        >>> matcher = Matcher([parse("policy"), parse("**/{bias,scale}")])
        >>> [matcher.match_path(path) for path in ("policy/w", "value/bias", "x")]
        [1, 2, 0]
    """

    def __init__(self, patterns: Iterable[Pattern]):
        self.patterns = tuple(patterns)
        self._regexes = [
            (1 << index, pattern.regex)
            for index, pattern in enumerate(self.patterns)
            if pattern.regex
        ]
        groups = list(_groups(self.patterns))
        budget = MAX_BYTES // max(1, len(groups))
        self._automata = [_SegmentAutomaton(globs, budget) for globs in groups]

    def match(self, tree: NameTree) -> list[int]:
        """Match all leaves of a tree.

        Args:
            tree: its paths are read always, its classes and child names only where a
                pattern asks for them.

        Returns:
            One int for each of ``tree.paths``: bit ``i`` is set if ``patterns[i]``
            selects the leaf.
        """
        found = [0] * len(tree.paths)
        for automaton in self._automata:
            masks = _Walk(automaton, tree).leaves()
            found = list(map(or_, found, masks)) if any(found) else masks
            automaton.trim()
        for bit, regex in self._regexes:
            for index, path in enumerate(tree.paths):
                if regex.fullmatch(path):
                    found[index] |= bit
        return found

    def reach(self, tree: NameTree, paths: Sequence[str]) -> int:
        """Tell which patterns could match at or below places of which little is known.

        Args:
            tree: the tree that these places are in.
            paths: their paths. What class stands there, and what is below, is unknown.

        Returns:
            An int whose bit ``i`` is set if ``patterns[i]`` could; so it is for every
            regular expression.
        """
        found = _union(bit for bit, _ in self._regexes) if paths else 0
        for automaton in self._automata:
            walk = _Walk(automaton, tree, unknown=frozenset(paths))
            found |= automaton.alive(walk.state(path) for path in paths)
            automaton.trim()
        return found

    def match_path(self, path: str) -> int:
        """Match one path, of which no tree is known.

        Returns:
            An int whose bit ``i`` is set if ``patterns[i]`` selects the path.

        Raises:
            SelectorError: a pattern asks for classes or siblings.
        """
        asking = [pattern.text for pattern in self.patterns if pattern.needs_tree]
        if asking:
            raise SelectorError(
                f"Only a tree can answer {listing(asking)}: a path does not tell "
                "classes or siblings. Bind the selector or the rules to the full tree "
                "first: .bind(tree)."
            )
        found = 0
        for automaton in self._automata:
            state = automaton.root
            for name in path.split("/"):
                state = state[name]
            found |= state.found
            automaton.trim()
        for bit, regex in self._regexes:
            if regex.fullmatch(path):
                found |= bit
        return found


@lru_cache(maxsize=256)
def matcher_of(patterns: tuple[Pattern, ...]) -> Matcher:
    """The matcher of these patterns; shared, so that what it learnt is kept.

    Example:
        >>> from treeadapt.patterns import parse
        >>> matcher_of((parse("a"),)) is matcher_of((parse("a"),))
        True
    """
    return Matcher(patterns)


def _groups(patterns: Sequence[Pattern]) -> Iterator[dict[Pattern, int]]:
    """Each different glob with the bits of all its places, in groups of one weight."""
    bits: dict[Pattern, int] = defaultdict(int)
    for index, pattern in enumerate(patterns):
        if not pattern.is_regex:
            bits[pattern] |= 1 << index
    group: dict[Pattern, int] = {}
    total = 0
    for pattern in bits:
        total += weight(pattern.text)
        if group and total > MAX_WEIGHT:
            yield group
            group, total = {}, weight(pattern.text)
        group[pattern] = bits[pattern]
    if group:
        yield group


class _Walk:
    """One walk of a segment automaton over one tree."""

    def __init__(
        self,
        segments: _SegmentAutomaton,
        tree: NameTree,
        unknown: frozenset[str] = frozenset(),
    ):
        self.segments, self.tree, self.unknown = segments, tree, unknown
        self.states: dict[str | None, _SegmentState] = {None: segments.root}
        self.counted: dict[str | None, dict[str, int]] = {}
        self.classes: dict[tuple[type, ...], int] = {}

    def leaves(self) -> list[int]:
        """What each leaf of the tree is selected by."""
        return [self.state(path).found for path in self.tree.paths]

    def state(self, path: str) -> _SegmentState:
        """The state after the path of a leaf, which is not remembered."""
        parent, slash, name = path.rpartition("/")
        above = parent if slash else None
        state = self.states.get(above)
        if state is None:
            state = self.descend(parent)
        return self.ask(state, above, name, path) if state.asks else state[name]

    def descend(self, path: str) -> _SegmentState:
        """The state after ``path``, which is remembered."""
        # From the root: that is cheaper than to write and look up the paths on the
        # way, of which long ones would fill the memory.
        state, names = self.states[None], path.split("/")
        for i, name in enumerate(names):
            state = self._ask_once(state, names[: i + 1]) if state.asks else state[name]
        self.states[path] = state
        return state

    def _ask_once(self, state: _SegmentState, names: list[str]) -> _SegmentState:
        path = "/".join(names)
        known = self.states.get(path)
        if known is None:
            parent = "/".join(names[:-1]) if len(names) > 1 else None
            known = self.states[path] = self.ask(state, parent, names[-1], path)
        return known

    def ask(
        self, state: _SegmentState, parent: str | None, name: str, path: str
    ) -> _SegmentState:
        """The state after ``name`` below ``parent``, where it depends on the tree."""
        asks = state.asks
        answer = 0
        if asks & self.segments.class_positions:
            classes = self.tree.classes(path)
            if path in self.unknown:
                answer |= asks & self.segments.class_positions
            elif classes:
                answer |= self._of_classes(classes) & asks
        if asks & self.segments.counted_positions:
            answer |= self._of_siblings(parent, asks).get(name, 0)
        return state[name, answer] if answer else state[name]

    def _of_classes(self, classes: tuple[type, ...]) -> int:
        positions = self.classes.get(classes)
        if positions is None:
            positions = 0
            for one in classes:
                for base in one.__mro__:
                    positions |= self.segments.class_names.get(base.__name__, 0)
            self.classes[classes] = positions
        return positions

    def _of_siblings(self, parent: str | None, asks: int) -> dict[str, int]:
        # One node has one state, so it always asks the same.
        positions = self.counted.get(parent)
        if positions is None:
            positions = self.segments.count(self.tree.child_names(parent), asks)
            self.counted[parent] = positions
        return positions


class _SegmentState(dict["str | tuple[str, int]", "_SegmentState"]):
    """A set of positions, and where each segment leads from there.

    Filled when asked. A key is a segment; or a segment and those positions, of the
    ones that depend on the tree, that it satisfies.
    """

    __slots__ = ("asks", "automaton", "found", "positions")

    def __init__(self, automaton: _SegmentAutomaton, positions: int, found: int):
        self.automaton = automaton
        self.positions = positions
        self.asks = positions & automaton.tree_positions
        self.found = found

    def __missing__(self, key: str | tuple[str, int]) -> _SegmentState:
        name, answer = (key, 0) if isinstance(key, str) else key
        state = self.automaton.step(self, name, answer)
        self[key] = state
        return state


class _SegmentAutomaton:
    """All globs over segments: each is a run of positions, one bit each.

    In a state, the bit of an element says that all elements before it are satisfied;
    the bit after the last one, that the whole glob is. That bit stays set on the way
    down: who selects a node selects all leaves below.

    Args:
        globs: patterns, and the bits to give for a path that each selects.
        budget: bytes that the states of each automaton may take before it forgets.
    """

    def __init__(self, globs: dict[Pattern, int], budget: int):
        self._budget = budget
        self.class_names: dict[str, int] = defaultdict(int)
        self.any_depth = 0
        self._accepting: dict[int, int] = {}  # place -> bits of the answer
        self._size = 0
        self._literals: dict[str, int] = defaultdict(int)
        self._globs: dict[Glob, int] = defaultdict(int)
        self._counted: dict[FromEnd, int] = defaultdict(int)
        self._first = 0
        for glob, bits in globs.items():
            self._first |= 1 << self._size
            self._lay_out(glob)
            self._accepting[self._size] = bits
            self._new_position()
        self._finish()

    def alive(self, states: Iterable[_SegmentState]) -> int:
        """The bits of all globs that match in a state, or may do so further down."""
        ends = sorted(self._accepting)
        places = _places(_union(state.positions for state in states))
        found = {ends[bisect_left(ends, place)] for place in places}
        return _union(self._accepting[end] for end in found)

    def trim(self) -> None:
        """Forget what was learnt if that is too much."""
        if self._transitions > _limit(self._budget, self._size):
            self._forget()

    def step(self, state: _SegmentState, name: str, answer: int) -> _SegmentState:
        """The state that segment ``name`` leads to.

        Args:
            state: where it leads from.
            name: the text of the segment.
            answer: positions that the tree says this segment satisfies.
        """
        before = state.positions
        after = (before & (self.satisfied_by(name) | answer)) << 1
        after |= before & self._stays
        after |= (after & self.any_depth) << 1
        self._transitions += 1
        return self._state(after, before, state.found)

    def _state(self, positions: int, before: int, found: int) -> _SegmentState:
        """The state of ``positions``, when ``before`` has ``found`` already."""
        state = self._states.get(positions)
        if state is None:
            for place in _places(positions & ~before & self._accepts):
                found |= self._accepting[place]
            state = self._states[positions] = _SegmentState(self, positions, found)
        return state

    def satisfied_by(self, name: str) -> int:
        """The positions whose own text or glob ``name`` matches."""
        positions = self._satisfied.get(name)
        if positions is None:
            positions = self._literals.get(name, 0) | self._characters.match(name)
            self._satisfied[name] = positions
        return positions

    def count(self, names: Sequence[str], asks: int) -> dict[str, int]:
        """For siblings ``names``, which of the positions ``asks`` each satisfies."""
        positions: dict[str, int] = defaultdict(int)
        for element, own in self._counted.items():
            if own & asks:
                for name in self._counted_names(element, names):
                    positions[name] |= own & asks
        return positions

    def _counted_names(self, element: FromEnd, names: Sequence[str]) -> Iterator[str]:
        before, after = self._parts[element]
        families: dict[tuple[str, str], list[tuple[tuple[int, str], str]]]
        families = defaultdict(list)
        for name in names:
            for digits in _DIGITS.finditer(name):
                left, right = name[: digits.start()], name[digits.end() :]
                if self._matches(left, before) and self._matches(right, after):
                    # Not ``int``: Python refuses to read very long ones.
                    number = digits[0].lstrip("0")
                    families[left, right].append(((len(number), number), name))
        for members in families.values():
            numbers = sorted({number for number, _ in members})
            chosen = set(numbers[element.first : element.last + 1 or None])
            yield from (name for number, name in members if number in chosen)

    def _matches(self, text: str, position: int) -> bool:
        found = self._literals.get(text, 0) | self._characters.match(text)
        return bool(found & position)

    def _new_position(self) -> int:
        self._size += 1
        return 1 << self._size - 1

    def _lay_out(self, glob: Pattern) -> None:
        for element in glob.elements:
            position = self._new_position()
            if isinstance(element, Literal | Glob):
                self._add_text(element, position)
            elif isinstance(element, AnyDepth):
                self.any_depth |= position
            elif isinstance(element, ClassName):
                self.class_names[element.name] |= position
            else:
                self._counted[element] |= position

    def _add_text(self, element: Literal | Glob, position: int) -> None:
        if isinstance(element, Literal):
            self._literals[element.text] |= position
        else:
            self._globs[element] |= position

    def _finish(self) -> None:
        # The texts around a counted number have positions that no state ever holds:
        # nothing leads from an accepting position to the next.
        self._parts: dict[FromEnd, tuple[int, int]] = {}
        for element in self._counted:
            before, after = self._new_position(), self._new_position()
            self._add_text(element.before, before)
            self._add_text(element.after, after)
            self._parts[element] = before, after
        self._characters = _CharacterAutomaton(
            ((glob.tokens, positions) for glob, positions in self._globs.items()),
            self._budget,
        )
        self.class_positions = _union(self.class_names.values())
        self.counted_positions = _union(self._counted.values())
        self.tree_positions = self.class_positions | self.counted_positions
        self._accepts = _mask(self._accepting, self._size)
        self._stays = self._accepts | self.any_depth
        self._forget()

    def _forget(self) -> None:
        self._transitions = 0
        self._satisfied: dict[str, int] = {}
        self._states: dict[int, _SegmentState] = {}
        first = self._first | (self._first & self.any_depth) << 1
        self.root = self._state(first, 0, 0)


class _CharacterState(dict[str, "_CharacterState"]):
    """A set of positions, and where each character leads from there."""

    __slots__ = ("automaton", "found", "positions")

    def __init__(self, automaton: _CharacterAutomaton, positions: int):
        self.automaton = automaton
        self.positions = positions
        self.found = automaton.found(positions)

    def __missing__(self, char: str) -> _CharacterState:
        state = self.automaton.step(self.positions, char)
        self[char] = state
        return state


class _CharacterAutomaton:
    """All globs within a segment, side by side.

    A state holds the positions whose character may come next. Most often a character
    leads one bit down; where braces and numbers lead elsewhere, ``_jumps`` says so.

    Args:
        globs: tokens, and the bits to give for a text that matches them.
        budget: bytes that the states may take before they are forgotten.
    """

    def __init__(self, globs: Iterable[tuple[Sequence[Token], int]], budget: int):
        self._everywhere = 0  # the bits of ``*`` alone
        self._first = self._stars = self._falling_stars = self._falling = 0
        self._literals: dict[str, int] = defaultdict(int)
        self._changes: dict[int, int] = defaultdict(int)
        self._jumps: dict[int, tuple[int, int]] = {}  # place -> positions, shift
        self._accepting: dict[int, int] = {}  # place -> bits of the answer
        self._size = 0
        for tokens, bits in globs:
            if len(tokens) == 1 and tokens[0] is Mark.STAR:
                self._everywhere |= bits
            else:
                self._accepting[self._size] = bits
                self._put(_Layout(tokens))
        self._limit = _limit(budget, self._size)
        self._finish()

    def match(self, text: str) -> int:
        """The bits of all globs that match ``text``."""
        if not self._accepting:
            return self._everywhere
        if self._transitions > self._limit:
            self._forget()
        state = self._root
        for char in text:
            state = state[char]
        return state.found

    def found(self, positions: int) -> int:
        """The bits of all globs that are matched in ``positions``."""
        found = self._everywhere
        for place in _places(positions & self._accepts):
            found |= self._accepting[place]
        return found

    def step(self, positions: int, char: str) -> _CharacterState:
        """The state that ``char`` leads to from ``positions``."""
        hits = positions & self._accepted(char)
        after = hits & self._stars | (hits & self._falling) >> 1
        after |= (after & self._falling_stars) >> 1
        if hits & self._jumping:
            after |= self._jump(hits & self._jumping)
        self._transitions += 1
        state = self._states.get(after)
        if state is None:
            state = self._states[after] = _CharacterState(self, after)
        return state

    def _accepted(self, char: str) -> int:
        """The positions that accept ``char``."""
        in_sets = self._in_sets[bisect_right(self._points, ord(char))]
        return self._stars | in_sets | self._literals.get(char, 0)

    def _jump(self, hits: int) -> int:
        # By bytes, each of them worked out once: thousands of positions may jump at
        # every character.
        after = 0
        data = hits.to_bytes(self._size // 8 + 1, "little")
        for found in _NOT_ZERO.finditer(data):
            index = found.start()
            key = index << 8 | data[index]
            target = self._jumped.get(key)
            if target is None:
                if len(self._jumped) > self._limit // 8:
                    self._jumped.clear()
                target = self._jumped[key] = self._jump_byte(8 * index, data[index])
            after |= target
        return after

    def _jump_byte(self, begin: int, byte: int) -> int:
        after = 0
        for place in _places(byte):
            positions, shift = self._jumps[begin + place]
            after |= positions << shift
        return after

    def _put(self, glob: _Layout) -> None:
        shift = self._size
        self._size += glob.size
        self._first |= glob.first << shift
        self._stars |= glob.stars << shift
        self._falling_stars |= glob.falling_stars << shift
        self._falling |= glob.falling << shift
        for char, positions in glob.literals.items():
            self._literals[char] |= positions << shift
        for point, positions in glob.changes.items():
            self._changes[point] ^= positions << shift
        for place, positions in glob.jumps.items():
            self._jumps[shift + place] = positions, shift

    def _finish(self) -> None:
        self._accepts = _mask(self._accepting, self._size)
        self._jumping = _mask(self._jumps, self._size)
        self._points = sorted(self._changes)
        changes = (self._changes[point] for point in self._points)
        self._in_sets = list(accumulate(changes, xor, initial=0))
        self._forget()

    def _forget(self) -> None:
        self._transitions = 0
        self._jumped: dict[int, int] = {}
        self._states: dict[int, _CharacterState] = {}
        self._root = self._states[self._first] = _CharacterState(self, self._first)


class _Layout:
    """One glob within a segment as a run of positions.

    It is laid out from its end: the lowest position says that the glob is matched,
    and a character most often leads one bit down.

    Args:
        tokens: what the glob matches.
    """

    def __init__(self, tokens: Sequence[Token]):
        self.size = 1
        self.stars = 0
        self.falling_stars = 0  # those that lead one bit down, at no character
        self.falling = 0  # positions whose character leads one bit down only
        self.jumps: dict[int, int] = {}  # place -> where else it leads
        self.literals: dict[str, int] = defaultdict(int)
        # Code point -> positions that from there on accept what they did not, or
        # no longer accept what they did.
        self.changes: dict[int, int] = defaultdict(int)
        self.first = self._lay_out(tokens, 1)

    # Each of these takes the positions that come next and gives those to come from.

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
        position = 1 << self.size
        below = position >> 1
        if after == below | (below & self.falling_stars) >> 1:
            self.falling |= position
        else:
            self.jumps[self.size] = after
        self.size += 1
        return position

    def _literal(self, char: str, after: int) -> int:
        self.literals[char] |= 1 << self.size
        return self._character(after)

    def _set(self, intervals: Iterable[tuple[int, int]], after: int) -> int:
        for first, last in intervals:
            self.changes[first] ^= 1 << self.size
            self.changes[last + 1] ^= 1 << self.size
        return self._character(after)

    def _star(self, after: int) -> int:
        position = 1 << self.size
        self.stars |= position
        if after == position >> 1:
            self.falling_stars |= position
        else:
            self.jumps[self.size] = after
        self.size += 1
        return position | after

    def _digit(self, first: int, last: int, after: int) -> int:
        if first > last:
            return 0
        return self._set([(ord("0") + first, ord("0") + last)], after)

    def _numbers(self, numbers: NumberRange, after: int) -> int:
        """Lay out a range: a handful of positions a place, whatever its size."""
        first, last = numbers.first, numbers.last
        if len(first) == len(last):
            return self._between(first, last, after)
        free = self._free_digits(len(last) - 1, after)
        # Numbers of the widths in between need no look at their digits.
        begin = self._at_least(first, free)
        if len(first) + 1 < len(last):
            begin |= self._digit(1, 9, _union(free[len(first) : -1]))
        rest, high = free[-1], self._at_most(last[1:], free)
        return begin | self._digits(1, rest, int(last[0]), high, rest)

    def _between(self, first: str, last: str, after: int) -> int:
        """Lay out the numbers of one width from ``first`` to ``last``."""
        pairs = zip(first, last, strict=True)
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), len(first))
        now = after
        if shared < len(first):
            free = self._free_digits(len(first) - shared - 1, after)
            low = self._at_least(first[shared + 1 :], free)
            high = self._at_most(last[shared + 1 :], free)
            now = self._digits(
                int(first[shared]), low, int(last[shared]), high, free[-1]
            )
        for char in reversed(first[:shared]):
            now = self._literal(char, now)
        return now

    def _free_digits(self, count: int, after: int) -> list[int]:
        """Lay out any digits: none of them, one, ... up to ``count``."""
        # In a row, so that each leads one bit down.
        free = [after]
        for _ in range(count):
            free.append(self._digit(0, 9, free[-1]))
        return free

    def _at_least(self, digits: str, free: list[int]) -> int:
        low = free[0]
        for digit, rest, free_too in zip(
            reversed(digits), free, free[1:], strict=False
        ):
            same = digit == "0" and low == rest
            low = free_too if same else self._digits(int(digit), low, 9, rest, rest)
        return low

    def _at_most(self, digits: str, free: list[int]) -> int:
        high = free[0]
        for digit, rest, free_too in zip(
            reversed(digits), free, free[1:], strict=False
        ):
            same = digit == "9" and high == rest
            high = free_too if same else self._digits(0, rest, int(digit), high, rest)
        return high

    def _digits(self, bottom: int, low: int, top: int, high: int, rest: int) -> int:
        """Lay out one place: ``low`` follows ``bottom``, ``high`` follows ``top``.

        ``rest`` follows the digits between them; ``bottom`` and ``top`` too, where that
        says the same.
        """
        begin = 0
        if low != rest:
            begin |= self._digit(bottom, bottom, low)
            bottom += 1
        if high != rest:
            begin |= self._digit(top, top, high)
            top -= 1
        return begin | self._digit(bottom, top, rest)


def _limit(budget: int, size: int) -> int:
    """How many transitions between sets of ``size`` positions fit into a budget."""
    return min(MAX_TRANSITIONS, 8 * budget // (size + 1))


def _places(mask: int) -> Iterator[int]:
    """The places of the bits that are set."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _mask(places: Iterable[int], size: int) -> int:
    """The int whose bits at ``places`` are set, all less than ``size``."""
    bits = bytearray(size // 8 + 1)
    for place in places:
        bits[place >> 3] |= 1 << (place & 7)
    return int.from_bytes(bits, "little")


def _union(masks: Iterable[int]) -> int:
    union = 0
    for mask in masks:
        union |= mask
    return union
