"""The matcher: which of many patterns select which leaves, in one walk.

Takes parsed patterns and the names of a tree; gives one int a leaf, whose bit ``i``
says whether pattern ``i`` selects the leaf. All globs are one automaton over segments
that goes down the tree with the state carried from parent to child. Each transition
is computed once, so that a leaf costs one dictionary look-up, whatever the number of
patterns. States are sets of positions, held as the bits of an int: no pattern, however
hostile, takes more than its length times the length of the path.
Tables are bounded and may be dropped at any time: they only ever save work. Globs
within a segment are matched by ``characters``; ``!`` and the order of rules belong to
``selection``.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, reduce
from operator import or_

from treeadapt.errors import SelectorError
from treeadapt.patterns import characters
from treeadapt.patterns.glob import (
    AnyDepth,
    ClassName,
    Element,
    FromEnd,
    Glob,
    Literal,
    Pattern,
)
from treeadapt.text.names import listing
from treeadapt.trees.views import Plan

# The bytes that the states of one matcher may take before it starts again.
MAX_BYTES = 64 * 2**20
# The weight of the patterns that share an automaton: a step costs what all of them
# weigh, so larger tables are walked in groups.
MAX_WEIGHT = 8_192

_DIGITS = re.compile("[0-9]+")


class Matcher:
    """Many patterns as one automaton.

    Args:
        patterns: parsed patterns; their order gives the bits of an answer.

    Attributes:
        bits: the bit of each pattern, by its text.
        asking: the patterns that ask for classes or siblings.
        has_braces: whether any pattern has alternatives.

    Example:
        >>> from treeadapt.patterns.glob import parse
        >>> matcher = Matcher([parse("policy"), parse("**/{bias,scale}")])
        >>> [matcher.match_path(path) for path in ("policy/w", "value/bias", "x")]
        [1, 2, 0]
    """

    def __init__(self, patterns: Iterable[Pattern]):
        self.patterns = tuple(patterns)
        self.bits: dict[str, int] = {}
        self.asking: list[str] = []
        self.has_braces = any("{" in pattern.text for pattern in self.patterns)
        self._regexes: list[tuple[int, re.Pattern[str]]] = []
        places: dict[Pattern, int] = defaultdict(int)  # of each different glob
        for index, pattern in enumerate(self.patterns):
            bit = self.bits[pattern.text] = 1 << index
            if pattern.needs_tree:
                self.asking.append(pattern.text)
            if pattern.regex:
                self._regexes.append((bit, pattern.regex))
            else:
                places[pattern] |= bit
        groups: list[dict[Pattern, int]] = []
        weight = MAX_WEIGHT
        for pattern, bits in places.items():
            weight += pattern.weight
            if weight > MAX_WEIGHT:
                groups.append({})
                weight = pattern.weight
            groups[-1][pattern] = bits
        budget = MAX_BYTES // max(1, len(groups))
        self._automata = [_SegmentAutomaton(globs, budget) for globs in groups]

    def match(self, plan: Plan, paths: Sequence[str] | None = None) -> list[int]:
        """Match all leaves of a tree, or other places in it.

        Args:
            plan: names of the tree; its classes and child names are read only where a
                pattern asks for them.
            paths: the places; by default those of the leaves.

        Returns:
            One int for each path: bit ``i`` is set if ``patterns[i]`` selects it.
        """
        paths = plan.paths if paths is None else paths
        matches = [0] * len(paths)
        for automaton in self._automata:
            states = _Descent(automaton, plan).after(paths)
            masks = [state.matched for state in states]
            matches = list(map(or_, matches, masks)) if any(matches) else masks
            automaton.trim()
        if self._regexes:
            matches = list(map(or_, matches, map(self._of_regexes, paths)))
        return matches

    def reach(self, plan: Plan, paths: Sequence[str]) -> int:
        """Tell which patterns could match at or below places of which little is known.

        Args:
            plan: names of the tree that these places are in.
            paths: their paths. Their class, and what is below them, is unknown.

        Returns:
            An int whose bit ``i`` is set if ``patterns[i]`` could; so it is for every
            regular expression.
        """
        mask = 0
        for bit, _ in self._regexes if paths else ():
            mask |= bit
        for automaton in self._automata:
            mask |= automaton.alive(_Descent(automaton, plan, *paths).after(paths))
            automaton.trim()
        return mask

    def match_path(self, path: str) -> int:
        """Match one path, of which no tree is known.

        Returns:
            An int whose bit ``i`` is set if ``patterns[i]`` selects the path.

        Raises:
            SelectorError: a pattern asks for classes or siblings.
        """
        if self.asking:
            raise SelectorError(
                f"Only a tree can answer {listing(self.asking)}: a path does not show "
                "classes or siblings. Bind the selector or the rules to the full tree "
                "first: .bind(tree)."
            )
        mask = 0
        for automaton in self._automata:
            state = automaton.root
            for name in path.split("/"):
                state = state[name]
            mask |= state.matched
            automaton.trim()
        return mask | self._of_regexes(path)

    def _of_regexes(self, path: str) -> int:
        return sum(bit for bit, regex in self._regexes if regex.fullmatch(path))


@lru_cache(maxsize=256)
def matcher_of(patterns: tuple[Pattern, ...]) -> Matcher:
    """The matcher of these patterns; shared, so that what it learnt is kept.

    Example:
        >>> from treeadapt.patterns.glob import parse
        >>> matcher_of((parse("a"),)) is matcher_of((parse("a"),))
        True
    """
    return Matcher(patterns)


class _Descent:
    """One segment automaton going down one tree, with nodes of unknown classes."""

    def __init__(self, segments: _SegmentAutomaton, plan: Plan, *unknown: str):
        self.segments, self.plan, self.unknown = segments, plan, frozenset(unknown)
        self.states: dict[str | None, _SegmentState] = {None: segments.root}
        self.counted: dict[str | None, dict[str, int]] = {}
        self.classes: dict[tuple[type, ...], int] = {}

    def after(self, paths: Sequence[str]) -> list[_SegmentState]:
        """The states after paths of leaves, which are not remembered."""
        states = []
        for path in paths:
            parent, slash, name = path.rpartition("/")
            above = parent if slash else None
            state = self.states.get(above)
            if state is None:
                state = self.descend(parent)
            asks = state.asks
            states.append(self.ask(state, above, name, path) if asks else state[name])
        return states

    def descend(self, path: str) -> _SegmentState:
        """The state after ``path``, which is remembered."""
        # From the root: that is cheaper than to write and look up the paths on the
        # way, of which long ones would fill the memory.
        state, names = self.states[None], path.split("/")
        for i, name in enumerate(names):
            if not state.asks:
                state = state[name]
                continue
            here, parent = "/".join(names[: i + 1]), "/".join(names[:i]) if i else None
            below = self.states.get(here)
            if below is None:
                below = self.states[here] = self.ask(state, parent, name, here)
            state = below
        self.states[path] = state
        return state

    def ask(
        self, state: _SegmentState, parent: str | None, name: str, path: str
    ) -> _SegmentState:
        """The state after ``name`` below ``parent``, where it depends on the tree."""
        asks = state.asks
        answer = 0
        if asks & self.segments.class_positions:
            unknown = path in self.unknown
            answer = (
                self.segments.class_positions if unknown else self._of_classes(path)
            )
            answer &= asks
        if asks & self.segments.counted_positions:
            if parent not in self.counted:
                # One node has one state, so it always asks the same.
                names = self.plan.child_names(parent)
                self.counted[parent] = self.segments.count(names, asks)
            answer |= self.counted[parent].get(name, 0)
        return state[name, answer] if answer else state[name]

    def _of_classes(self, path: str) -> int:
        classes = self.plan.classes(path)
        positions = self.classes.get(classes)
        if positions is None:
            positions = 0
            for one in classes:
                for base in one.__mro__:
                    positions |= self.segments.class_names.get(base.__name__, 0)
            self.classes[classes] = positions
        return positions


class _SegmentState(dict["str | tuple[str, int]", "_SegmentState"]):
    """A set of positions, and where each segment leads from there, once asked.

    It is the dict itself, so that a segment that was met before costs one look-up in C,
    and no call of Python's.

    A key is a segment; or a segment and those positions, of the ones that depend on the
    tree (``asks``), that it satisfies.
    """

    __slots__ = ("asks", "automaton", "matched", "positions")

    def __init__(self, automaton: _SegmentAutomaton, positions: int, matched: int):
        self.automaton, self.positions, self.matched = automaton, positions, matched
        self.asks = positions & automaton.tree_positions

    def __missing__(self, key: str | tuple[str, int]) -> _SegmentState:
        state = self[key] = self.automaton.step(self, key)
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
        self._size = self._first = self._accepts = self.any_depth = 0
        self._accepting: dict[int, int] = {}  # place -> bits of the answer
        self._literals: dict[str, int] = defaultdict(int)
        self._globs: dict[Glob, int] = defaultdict(int)
        self.class_names: dict[str, int] = defaultdict(int)
        self.class_positions = self.counted_positions = 0
        self._counted: dict[FromEnd, int] = defaultdict(int)
        for glob, bits in globs.items():
            self._first |= 1 << self._size
            for element in glob.elements:
                self._lay_out(element)
            self._accepting[self._size] = bits
            self._accepts |= 1 << self._size
            self._size += 1
        # The texts around a counted number have positions that no state ever holds:
        # nothing leads from an accepting position to the next.
        self._parts = {
            element: (self._lay_out(element.before), self._lay_out(element.after))
            for element in self._counted
        }
        self._characters: characters.CharacterAutomaton | None = None
        if self._globs:
            tokens = ((glob.tokens, bits) for glob, bits in self._globs.items())
            self._characters = characters.CharacterAutomaton(tokens, budget)
        self.tree_positions = self.class_positions | self.counted_positions
        self._stays = self._accepts | self.any_depth
        self._forget()

    def alive(self, states: Iterable[_SegmentState]) -> int:
        """The bits of all globs that match in a state, or may do so further down."""
        # Globs are laid out one after the other, so the next end at or after a position
        # is that of its own glob.
        ends, mask = list(self._accepting), 0
        positions = reduce(or_, (state.positions for state in states), 0)
        for place in characters.places_of(positions):
            mask |= self._accepting[ends[bisect_left(ends, place)]]
        return mask

    def trim(self) -> None:
        """Forget what was learnt if that is too much."""
        fitting = 8 * self._budget // (self._size + 1)
        if self._transitions > min(characters.MAX_TRANSITIONS, fitting):
            self._forget()

    def step(self, state: _SegmentState, key: str | tuple[str, int]) -> _SegmentState:
        """The state that a segment leads to.

        Args:
            state: where it leads from.
            key: the text of the segment; if positions depend on the tree, also those
                that it says are satisfied.
        """
        name, answer = (key, 0) if isinstance(key, str) else key
        before = state.positions
        satisfied = self._satisfied.get(name)
        if satisfied is None:
            satisfied = self._satisfied[name] = self._satisfied_by(name)
        # All positions at once: a satisfied element hands its bit to the next one.
        after = (before & (satisfied | answer)) << 1
        after |= before & self._stays
        # ``**`` may stand for no segment: what follows it may come at once. Two of them
        # never follow each other, so once is enough.
        after |= (after & self.any_depth) << 1
        self._transitions += 1
        next_state = self._states.get(after)
        return (
            self._state(after, before, state.matched)
            if next_state is None
            else next_state
        )

    def _state(self, positions: int, before: int, matched: int) -> _SegmentState:
        """A new state of ``positions``, when ``before`` has ``matched`` already."""
        # Bit by bit from the lowest: as many rounds as globs that match here for the
        # first time, however many there are.
        new = positions & ~before & self._accepts
        while new:
            lowest = new & -new
            matched |= self._accepting[lowest.bit_length() - 1]
            new ^= lowest
        state = self._states[positions] = _SegmentState(self, positions, matched)
        return state

    def _satisfied_by(self, name: str) -> int:
        """The positions whose own text or glob ``name`` matches."""
        positions = self._literals.get(name, 0)
        return (
            positions | self._characters.match(name) if self._characters else positions
        )

    def count(self, names: Sequence[str], asks: int) -> dict[str, int]:
        """For siblings ``names``, which of the positions ``asks`` each satisfies."""
        positions: dict[str, int] = defaultdict(int)
        for element, bits in self._counted.items():
            if bits & asks:
                for name in self._counted_names(element, names):
                    positions[name] |= bits & asks
        return positions

    def _counted_names(self, element: FromEnd, names: Sequence[str]) -> Iterator[str]:
        families: dict[tuple[str, str], list[tuple[tuple[int, str], str]]]
        families = defaultdict(list)
        for name in names:
            for digits in _DIGITS.finditer(name):
                around = name[: digits.start()], name[digits.end() :]
                texts = zip(
                    map(self._satisfied_by, around), self._parts[element], strict=True
                )
                if all(satisfied & position for satisfied, position in texts):
                    # Not ``int``: Python refuses to read very long ones.
                    number = digits[0].lstrip("0")
                    families[around].append(((len(number), number), name))
        for members in families.values():
            numbers = sorted({number for number, _ in members})
            chosen = set(numbers[element.first : element.last + 1 or None])
            yield from (name for number, name in members if number in chosen)

    def _lay_out(self, element: Element) -> int:
        """Give an element the next position."""
        position = 1 << self._size
        self._size += 1
        if isinstance(element, Literal):
            self._literals[element.text] |= position
        elif isinstance(element, Glob):
            self._globs[element] |= position
        elif isinstance(element, AnyDepth):
            self.any_depth |= position
        elif isinstance(element, ClassName):
            self.class_names[element.name] |= position
            self.class_positions |= position
        else:
            self._counted[element] |= position
            self.counted_positions |= position
        return position

    def _forget(self) -> None:
        self._transitions = 0
        self._satisfied: dict[str, int] = {}
        self._states: dict[int, _SegmentState] = {}
        first = self._first | (self._first & self.any_depth) << 1
        self.root = self._state(first, 0, 0)
