"""What the configuration next to published weights states: heads, first layers, ties.

Takes the path of a checkpoint; gives sizes by the keys under which ``config.json`` has
them. Shapes do not show how many heads an array has: ``(h d)`` fits any number.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from treeadapt.checkpoints.remote import checkpoint_path
from treeadapt.errors import MigrationError
from treeadapt.migrations.tables.published import CONFIG, stated_sizes
from treeadapt.porting.drafts.rows import EXPERT_WORDS, LAYER_WORDS, DraftRow
from treeadapt.text.data_files import DataFile

_FILE = DataFile("configuration", MigrationError, "{}", '"head_dim": 64')

_NUMBER = re.compile(r"heads|n_head")
_SIZE = re.compile(r"head_dim|head_size|^d_kv$|kv_channels")
_WIDTH = re.compile(r"hidden_size|n_embd|d_model|dim|embed_dim")
_FEWER = re.compile(r"kv|key|value|group")
_COUNT = re.compile(r"^num_|^n_|heads|layers|experts|groups|blocks|depth")
_FIRST = re.compile(r"dense")
_WORDS = re.compile(r"[^A-Za-z]+")
_LAYERS = LAYER_WORDS - {"transformer"}  # which may be one of several towers
_OF_LAYERS = re.compile(
    r"(num_|n_)?(hidden_|encoder_|decoder_)?layers?|depth|num_blocks"
)
_OF_EXPERTS = re.compile(r"(num_|n_)(local_|routed_)?experts")
_TIED = "tie_word_embeddings"


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and ties that a configuration states.

    Attributes:
        heads: the key of the size of a head, by the number of heads and that size.
        first: keys of numbers of first layers that are dense, by these.
        counts: numbers of heads, layers, experts and whatever else is counted, by key.
        tied: the key that says that the head is the embedding; empty without one.
        note: why nothing is known; empty if there is nothing to say.
    """

    heads: Mapping[tuple[int, int], str]
    first: Mapping[int, str]
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    tied: str = ""
    note: str = ""

    def count_key(self, before: str, number: int) -> str:
        """Return the key that says how many layers, or experts, there are.

        Args:
            before: what is before the numbers of their paths.
            number: how many there are.

        Returns:
            The key; empty if none says so, or several do.
        """
        word = _WORDS.split(before)[-2:][0].lower()
        is_layer, is_expert = word in _LAYERS, word in EXPERT_WORDS
        wanted = _OF_LAYERS if is_layer else _OF_EXPERTS
        other = "encoder" if "decoder" in before else "decoder"
        keys = [
            key
            for key, value in self.counts.items()
            if value == number and wanted.fullmatch(key.rpartition(".")[2])
            if other not in key
        ]
        return keys[0] if len(keys) == 1 and (is_layer or is_expert) else ""

    def head_sizes(self, row: DraftRow) -> dict[int, str]:
        """Return the atoms of a row that are the size of a head, and its keys."""
        keys = {}
        for part in _parts(row):
            for number, inner in _splits(part, row):
                size = math.prod(row.sizes[atom] for atom in inner)
                if len(inner) == 1 and (number, size) in self.heads:
                    keys[inner[0]] = self.heads[number, size]
        return keys

    def contradiction(self, row: DraftRow) -> str:
        """Return how heads of a row are others than these; empty if none are."""
        by_total = {number * size: (number, size) for number, size in self.heads}
        for part in _parts(row):
            total = math.prod(row.sizes[atom] for atom in part)
            ways = [
                (number, math.prod(row.sizes[atom] for atom in inner))
                for number, inner in _splits(part, row)
            ]
            if total in by_total and self.heads.keys().isdisjoint(ways):
                number, size = by_total[total]
                here = row.sizes[part[0]]
                return (
                    f"{CONFIG} states {number} heads of {size} "
                    f"({self.heads[number, size]}), and these are {here} of "
                    f"{total // here}"
                )
        return ""


NOTHING = ModelConfig({}, {})


def _config_of(source: Any) -> Any:
    """Return the ``config.json`` next to a checkpoint; None without one."""
    if not isinstance(source, str | os.PathLike):
        return None
    path = checkpoint_path(source)
    file = (path if path.is_dir() else path.parent) / CONFIG
    return file if file.is_file() else None


def sizes_at(keys: Mapping[str, str], source: Any) -> dict[str, int]:
    """Return the sizes that the configuration next to a checkpoint has for some keys.

    Raises:
        MigrationError: it cannot be read, or a value is not a size.
    """
    file = _config_of(source) if keys else None
    stated = {} if file is None else stated_sizes(keys, file)
    return {name: size for name, (size, _) in stated.items()}


def read_stated(source: Any) -> ModelConfig:
    """Return what ``config.json`` next to a checkpoint states; nothing of a tree."""
    file = _config_of(source)
    if file is None:
        return NOTHING
    try:
        fields = _FILE.parsed(file)
    except MigrationError as error:
        text = f"Heads and ties are not known: {error}".splitlines()[0]
        return dataclasses.replace(NOTHING, note=text)
    heads: dict[tuple[int, int], str] = {}
    first: dict[int, str] = {}
    counts: dict[str, int] = {}
    tied = ""
    for prefix, section in _sections(fields, "") if isinstance(fields, Mapping) else ():
        for number, size, key in _heads_of(section, prefix):
            heads.setdefault((number, size), key)
        counts |= {prefix + key: value for key, value in _sizes_in(section, _COUNT)}
        for key, value in _sizes_in(section, _FIRST):
            first.setdefault(value, prefix + key)
        if section.get(_TIED) is True:
            tied = tied or prefix + _TIED
    return ModelConfig(heads, first, counts, tied)


def _sections(fields: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the tables of a configuration, and what is before their keys."""
    yield prefix, fields
    for key, value in fields.items():
        if isinstance(value, Mapping) and "." not in key:
            yield from _sections(value, f"{prefix}{key}.")


def _sizes_in(
    section: Mapping[str, Any], pattern: re.Pattern[str]
) -> list[tuple[str, int]]:
    return [
        (key, value)
        for key, value in section.items()
        if type(value) is int and value > 0 and pattern.search(key)
    ]


def _heads_of(
    section: Mapping[str, Any], prefix: str
) -> Iterator[tuple[int, int, str]]:
    """Yield numbers of heads, their size, and the key of that size."""
    numbers = [
        each for each in _sizes_in(section, _NUMBER) if not _SIZE.search(each[0])
    ]
    sizes = [(prefix + key, size) for key, size in _sizes_in(section, _SIZE)]
    if not sizes:
        every = [each for each in numbers if not _FEWER.search(each[0])]
        widths = [x for x in _sizes_in(section, _WIDTH) if _WIDTH.fullmatch(x[0])]
        sizes = [
            (f"{prefix}{width} / {prefix}{key}", whole // number)
            for (width, whole), (key, number) in itertools.product(widths, every)
            if not whole % number
        ]
    for (_, number), (key, size) in itertools.product(numbers, sizes):
        yield number, size, key


def _parts(row: DraftRow) -> Iterator[tuple[int, ...]]:
    """Yield what axes of the source are made of, where that is several factors."""
    for place in row.sources:
        for part in itertools.chain(*place.axes):
            if len(part) > 1 and all(row.sizes.get(atom) for atom in part):
                yield part


def _splits(part: Sequence[int], row: DraftRow) -> Iterator[tuple[int, Sequence[int]]]:
    """Yield how many heads a part may have, and what makes up each of them."""
    for middle in range(1, len(part)):
        for start in range(middle):
            number = math.prod(row.sizes[atom] for atom in part[start:middle])
            yield number, part[middle:]
