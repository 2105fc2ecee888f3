"""Counts: how many layers, or experts, a configuration says that a model has.

Takes paths with one number, as a table has them in ``[counts]``, and how many there
should be; says of a plan whether its rows take the leaves of so many. Leaves that rows
drop do not count.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from treeadapt.migrations.templates import Template, malformed, parse_template
from treeadapt.text.names import listing, plural

_SHOWN = 8  # numbers in a message


@dataclasses.dataclass(frozen=True)
class Count:
    """How many numbers the leaves below a path should have.

    Attributes:
        path: with one capture, which is the number.
        name: of the capture.
        key: of the configuration that says it.
        number: what it says; None if it says nothing, or there is none.
    """

    path: Template
    name: str
    key: str
    number: int | None

    @classmethod
    def of(
        cls, text: str, keys: str | list[str], stated: Mapping[str, tuple[int, str]]
    ) -> Count:
        """Return the count that one line of ``[counts]`` is.

        Args:
            text: the path, in which ``*`` and ``**`` are wildcards.
            keys: of the configuration.
            stated: what it says, and under which key, by such paths.

        Raises:
            MigrationError: the path does not have one number.
        """
        path = parse_template(text, text, wild=True)
        named = [each for each in path.captures if not each.is_wild]
        numbers = [each.key for each in named if not (each.entries or each.is_many)]
        if len(numbers) != 1:
            problem = f"it has {len(numbers)} captures"
            cure = "Write the number that is counted: 'layers.{l}.*'"
            malformed(text, 0, problem, cure)
        entries = {each.key: each.entries for each in named if each.entries}
        first = keys if isinstance(keys, str) else keys[0]
        number, key = stated.get(text, (None, first))
        understood = path.understood(numbers, entries, (), {})
        return cls(understood, numbers[0], key, number)

    @property
    def noun(self) -> str:
        """What is counted: ``layer`` in ``model.layers.{l}.*``."""
        return noun_of(self.path.text.partition(f"{{{self.name}}}")[0])

    def numbers(self, paths: Iterable[str]) -> list[int]:
        """Return the numbers in paths, each once, from the least to the largest."""
        matches = filter(None, map(self.path.match, paths))
        return sorted({int(captures[self.name]) for captures in matches})


def noun_of(before: str) -> str:
    """Return what the numbers after some text count.

    Example:
        >>> noun_of("model.layers."), noun_of("h/")
        ('layer', 'number')
    """
    word = re.split(r"\W+", before.rstrip("./"))[-1].rpartition("_")[2]
    noun = word.removesuffix("s")
    return noun if len(noun) > 1 and noun.isalpha() else "number"


def miscounted(plan: Any) -> Iterator[str]:
    """Yield in which counts the leaves that rows take differ from a configuration.

    Args:
        plan: of a migration.
    """
    for table in plan.tables:
        for count in table.counts:
            if count.number is None:
                continue
            paths = (path for group in table.groups for path in group.source_paths)
            numbers = count.numbers(paths)
            if numbers != [*range(count.number)]:
                is_all = numbers == count.numbers(table.source)
                shown = listing(map(str, numbers), limit=_SHOWN, write=str)
                yield (
                    f"{count.key} is {count.number:,}, and "
                    f"{'the file has' if is_all else 'the rows take'} "
                    f"{plural(len(numbers), count.noun)}"
                    f"{f': {shown}' if numbers else f' in {count.path.text!r:.200}'}"
                )


def uncounted(plan: Any) -> Iterator[str]:
    """Yield the keys of counts that no configuration states."""
    for table in plan.tables:
        yield from (count.key for count in table.counts if count.number is None)
