"""What names say: words of paths, those that mean the same as one.

The words are in a data file; a user's own file is added to it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from treeadapt.errors import MigrationError
from treeadapt.text.data_files import DataFile, FileField

_FILE = DataFile("synonyms", MigrationError, "[words]", 'query = ["q", "q proj"]')
_LISTS = FileField("a table of lists of strings", 'query = ["q", "q proj"]')
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_MOST = 12  # words in one text
_MAX_WORDS = 64  # of one path
_INITIALS = (2, 3)  # words that a short one may stand for, `kn` for `k_norm`
_SPELT = ("norm", "attention")  # words of a text that stand for all their spellings


@dataclasses.dataclass(frozen=True)
class Words:
    """What words mean.

    Attributes:
        meanings: by the words of a text.
        fused: what one array may hold together, by the meaning of all.
    """

    meanings: Mapping[tuple[str, ...], str]
    fused: Mapping[str, tuple[str, ...]]

    def of(self, path: str) -> tuple[str, ...]:
        """Return the meanings of the words of a path, in order.

        Example:
            >>> load_words(None).of("layers.self_attn.q_proj.weight")
            ('layers', 'attention', 'query', 'weight')
        """
        words = plain_words(path)
        meanings: list[str] = []
        place = 0
        while place < len(words):
            for count in range(min(_MOST, len(words) - place), 0, -1):
                meaning = self.meanings.get(words[place : place + count])
                if meaning is not None:
                    meanings.append(meaning)
                    place += count
                    break
            else:
                meanings.append(words[place])
                place += 1
        return tuple(meanings)

    def in_order(self, texts: Sequence[str]) -> list[str]:
        """Return texts in the order of what one array holds, if they are all of it."""
        letters = enumerate(zip(*texts, strict=False))
        start = next((place for place, each in letters if len({*each}) > 1), 0)
        meanings = {self.of(text[start:]): text for text in texts}
        for names in self.fused.values():
            if meanings.keys() == {(name,) for name in names}:
                return [meanings[name,] for name in names]
        return [*texts]

    def shortened(self, path: str) -> tuple[frozenset[str], frozenset[str]]:
        """Return words of a path without a meaning, and initials of words in a row.

        Example:
            >>> unknown, initials = load_words(None).shortened("layers.0.k_norm")
            >>> "kn" in load_words(None).shortened("h/kn")[0] & initials
            True
        """
        words = plain_words(path)
        unknown = frozenset(
            w for w in words if w.isalpha() and (w,) not in self.meanings
        )
        initials = (
            "".join(word[0] for word in words[start : start + count])
            for count in _INITIALS
            for start in range(len(words) - count + 1)
        )
        return unknown, frozenset(initials)

    def single(self, path: str) -> tuple[str, ...]:
        """Return the meanings of the words of a path, each taken alone.

        Example:
            >>> load_words(None).single("layers.attn_norm.scale")
            ('layers', 'attention', 'norm', 'weight')
        """
        return tuple(self.meanings.get((word,), word) for word in plain_words(path))


@functools.lru_cache(maxsize=100_000)
def plain_words(path: str) -> tuple[str, ...]:
    """Return the words of a path, in lower case.

    Example:
        >>> plain_words("encoder/LayerNorm_1.q_proj")
        ('encoder', 'layer', 'norm', '1', 'q', 'proj')
    """
    words = (word.lower() for word in _WORD.findall(path[:2_000]))
    return tuple(words)[:_MAX_WORDS]


def load_words(path: str | os.PathLike[str] | None) -> Words:
    """Return the words that come with the library, and those of a file.

    Raises:
        MigrationError: the file cannot be read or is malformed.
    """
    return _merged([_shipped()] if path is None else [_shipped(), _table(path)])


@functools.cache
def _shipped() -> Mapping[str, Any]:
    import tomllib  # here, because importing it takes longer than this library

    text = (
        resources.files("treeadapt").joinpath("text/synonyms.toml").read_text("utf-8")
    )
    document = tomllib.loads(text)
    del document["version"]
    return document


def _table(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    document = _FILE.read(path)
    _FILE.check(path, document, {"words": _LISTS, "fused": _LISTS})
    return document


def _merged(documents: Sequence[Mapping[str, Any]]) -> Words:
    meanings: dict[tuple[str, ...], str] = {}
    fused: dict[str, tuple[str, ...]] = {}
    tables = [document.get("words", {}) for document in documents]
    for meaning, text in ((m, text) for t in tables for m in t for text in t[m]):
        if words := plain_words(text):
            meanings[words[:_MOST]] = meaning
    spellings = {
        name: [words for words, meaning in meanings.items() if meaning == name]
        for name in _SPELT
    }
    for words, meaning in [*meanings.items()]:
        if meaning not in _SPELT and not {*words}.isdisjoint(_SPELT):
            every = [spellings.get(word, [(word,)]) for word in words]
            for parts in itertools.product(*every):
                meanings.setdefault(tuple(itertools.chain(*parts))[:_MOST], meaning)
    for document in documents:
        for meaning, texts in document.get("fused", {}).items():
            fused[meaning] = tuple(texts)
    return Words(meanings, fused)
