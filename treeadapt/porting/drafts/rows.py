"""What a drafted row says, before its axes have names.

A place is a path made of tokens and holes, and the axes of the arrays there. Axes and
holes are made of *atoms*: numbers, each an axis that no side divides further. One atom
on both sides of a row is one name.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from treeadapt.migrations.take import Take

_TOKEN = re.compile(
    r"0(?![0-9])|[1-9][0-9]{0,17}(?![0-9])|[0-9]+|[^\W\d_]+|.", re.DOTALL
)
_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")

#: Words before a number of which a larger model has more.
LAYER_WORDS = frozenset(
    {"layer", "layers", "h", "block", "blocks", "resblocks", "transformer"}
)
EXPERT_WORDS = frozenset({"expert", "experts"})
#: A number in a path that no model has.
LARGE_NUMBER = "987654321"


@dataclasses.dataclass(frozen=True)
class Hole:
    """A part of a path that is not the same in all leaves of a row.

    Attributes:
        atoms: what the number here is made of, the outermost first.
        shift: what is added to it.
        texts: what is here instead of a number, in the order of the atom.
        is_text: whether the atom is a text that both paths have.
    """

    atoms: tuple[int, ...]
    shift: int = 0
    texts: tuple[str, ...] = ()
    is_text: bool = False


#: Begins the last token of the path of a segment of a leaf (see ``segments``).
SEGMENT = "\0"

#: A path: its words, separators and numbers, and holes.
Tokens: TypeAlias = tuple[str | Hole, ...]

#: The axes of an array: parts of each, one but where the parts of a concatenation
#: follow each other; each a product of atoms.
AtomAxes: TypeAlias = tuple[tuple[tuple[int, ...], ...], ...]


@dataclasses.dataclass(frozen=True)
class DraftAddress:
    """An address whose axes have no names yet.

    Attributes:
        tokens: of its path.
        axes: of the array.
        before: how many atoms of each part of a bracket are outside of it.
    """

    tokens: Tokens
    axes: AtomAxes
    before: int = 0

    @functools.cached_property
    def path(self) -> str | None:
        """Its path; None if that is not the same in all leaves of a row."""
        texts = [token for token in self.tokens if isinstance(token, str)]
        return "".join(texts) if len(texts) == len(self.tokens) else None

    @functools.cached_property
    def words(self) -> frozenset[str]:
        """What its path is made of, in lower case, lists included."""
        texts = (t.texts if isinstance(t, Hole) else (t,) for t in self.tokens)
        return frozenset(text.lower() for text in itertools.chain(*texts))

    def with_tokens(self, start: int, stop: int, new: str | Hole) -> DraftAddress:
        """Return it with one token in the place of some."""
        tokens = (*self.tokens[:start], new, *self.tokens[stop:])
        return dataclasses.replace(self, tokens=tokens)


@dataclasses.dataclass(frozen=True)
class DraftRow:
    """One row.

    Attributes:
        sources: where the numbers are.
        targets: where they go.
        sizes: of atoms in this pair of models.
        pairs: leaves that it moves: paths of sources, and of targets made of them.
        evidence: ``"values"``, ``"shapes"`` or ``"equal"`` (names and shapes are).
        checks: what it rests on that is not proof: ``"names"``; none if numbers are.
        notes: what else its reader should know, such as other candidates.
        cast: old and new dtype, if they differ.
        scale: what the numbers are multiplied by.
        offset: what is added to the product.
        pads: axes of the target that are longer by zeros, and by how many at each end.
        cuts: axes of the source of which some of each end are left out.
        gaps: numbers in paths that do not have all values from 0 on, so that their
            count does not give the size.
        bare: atoms of texts that need no list, because nothing else matches.
        fixed: atoms of numbers of which the leaves of the row have one value.
        takes: atoms of which only some values are taken, or in another order.
        copies: atoms of axes of the targets along which the numbers are repeated.
        tie: the key of the configuration that says that all targets but the first are
            copies; empty if no configuration does.
        is_sum: whether the sources are added.
        is_rest: whether it takes all that no row above takes, as it is.
        is_live: whether it is in the table; numbers are against it if it is not.
    """

    sources: tuple[DraftAddress, ...]
    targets: tuple[DraftAddress, ...]
    sizes: Mapping[int, int]
    pairs: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
    evidence: str
    checks: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    scale: float = 1.0
    offset: float = 0.0
    pads: tuple[tuple[int, int, int], ...] = ()
    cuts: tuple[tuple[int, int, int], ...] = ()
    gaps: frozenset[int] = frozenset()
    bare: frozenset[int] = frozenset()
    fixed: frozenset[int] = frozenset()
    copies: frozenset[int] = frozenset()
    takes: tuple[tuple[int, Take], ...] = ()
    tie: str = ""
    is_sum: bool = False
    is_rest: bool = False
    is_live: bool = True

    @property
    def sides(self) -> tuple[tuple[DraftAddress, ...], tuple[DraftAddress, ...]]:
        """Sources, and targets."""
        return self.sources, self.targets

    @property
    def places(self) -> tuple[DraftAddress, ...]:
        """Sources, then targets."""
        return (*self.sources, *self.targets)

    @property
    def changes(self) -> tuple[object, ...]:
        """What is done to the numbers."""
        return (
            self.cast,
            self.scale,
            self.offset,
            self.pads,
            self.cuts,
            self.is_sum,
            self.takes,
        )

    @property
    def has_bracket(self) -> bool:
        """Whether an axis has several parts, one after the other."""
        return any(len(axis) > 1 for place in self.places for axis in place.axes)

    @property
    def source_paths(self) -> list[str]:
        """Paths of all leaves that it takes."""
        return [path for sources, _ in self.pairs for path in sources]

    @property
    def target_paths(self) -> list[str]:
        """Paths of all leaves that it makes."""
        return [path for _, targets in self.pairs for path in targets]

    def with_side(self, side: int, addresses: tuple[DraftAddress, ...]) -> DraftRow:
        """Return the row with other sources, if ``side`` is 0, or other targets."""
        if side == 0:
            return dataclasses.replace(self, sources=addresses)
        return dataclasses.replace(self, targets=addresses)

    def marked(self, check: str, note: str = "") -> DraftRow:
        """Return the row with one more mark, and what its reader should know of it."""
        checks, notes = (
            dict.fromkeys(filter(None, (*texts, text)))
            for texts, text in ((self.checks, check), (self.notes, note))
        )
        return dataclasses.replace(self, checks=tuple(checks), notes=tuple(notes))


def tokens_of(path: str) -> tuple[str, ...]:
    """Take a path apart into words, numbers and what is between them.

    Example:
        >>> tokens_of("h.10.ln_1/w")
        ('h', '.', '10', '.', 'ln', '_', '1', '/', 'w')
    """
    return tuple(_TOKEN.findall(path))


def is_count(token: Any) -> bool:
    """Return whether a token is a number as an index would be written."""
    # Most are words: the first character says so.
    is_number = isinstance(token, str) and "0" <= token < ":"
    return is_number and _NUMBER.fullmatch(token) is not None


def with_number(tokens: Sequence[str], place: int, number: str) -> str:
    """Return the path of some tokens, with another number in the place of one.

    Example:
        >>> with_number(("h", ".", "10", ".", "w"), 2, "3")
        'h.3.w'
    """
    return "".join((*tokens[:place], number, *tokens[place + 1 :]))


@functools.lru_cache(maxsize=32_768)  # a draft asks a few times about each path
def template_of(path: str) -> tuple[str | None, ...]:
    """Return the tokens of a path with None for its numbers.

    Example:
        >>> template_of("h.10.ln_1/w")
        ('h', '.', None, '.', 'ln', '_', None, '/', 'w')
    """
    return tuple(None if is_count(token) else token for token in tokens_of(path))


def by_template(paths: Iterable[str]) -> dict[tuple[str | None, ...], list[str]]:
    """Return paths that differ in numbers only together."""
    groups: dict[tuple[str | None, ...], list[str]] = {}
    for path in paths:
        groups.setdefault(template_of(path), []).append(path)
    return groups


def are_renumbered(olds: Sequence[str], news: Sequence[str]) -> bool:
    """Return whether numbers become others in a list, not all by adding the same.

    Example:
        >>> are_renumbered(["1a", "2a", "2b"], ["0", "1", "2"])
        True
        >>> are_renumbered(["5", "6"], ["0", "1"])
        False
        >>> are_renumbered(["q", "k"], ["0", "1"])
        False
    """
    both = [
        [[int(token) for token in tokens_of(text) if is_count(token)] for text in pair]
        for pair in zip(olds, news, strict=False)
    ]
    if not all(old and new for old, new in both):
        return False
    shifts = {tuple(b - a for a, b in zip(old, new, strict=False)) for old, new in both}
    return len(shifts) > 1


def numberless(path: str) -> str:
    """Return a path with ``#`` for its numbers.

    Example:
        >>> numberless("h.10.ln_1/w")
        'h.#.ln_#/w'
    """
    return "".join("#" if token is None else token for token in template_of(path))


def windowed(many: Sequence[Tokens]) -> tuple[int, int] | None:
    """Return how many tokens several paths share before and after where they differ.

    None if what differs is not within one segment, or touches a hole.

    Example:
        >>> windowed([tokens_of("a.q_proj.w"), tokens_of("a.k_proj.w")])
        (2, 4)
    """
    least = min(map(len, many))
    first = many[0]
    before = 0
    while before < least and all(each[before] == first[before] for each in many):
        before += 1
    after = 0
    while after < least - before and all(
        each[-1 - after] == first[-1 - after] for each in many
    ):
        after += 1
    middles = [each[before : len(each) - after] for each in many]
    if any(
        not middle or not all(isinstance(t, str) for t in middle) for middle in middles
    ):
        # Nothing is left in one of them, as of `a` next to `a_b`: take one word more.
        while before and not all(middles):
            before -= 1
            middles = [each[before : len(each) - after] for each in many]
        if any(not all(isinstance(t, str) for t in middle) for middle in middles):
            return None
    if not all(middles) or any("/" in middle for middle in middles):
        return None
    if before and isinstance(first[before - 1], Hole):
        return None
    if after and isinstance(first[-after], Hole):
        return None
    return before, after
