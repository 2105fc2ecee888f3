"""Sizes that differ between a checkpoint and a target.

Takes what can be loaded, how it fits, and the leaves of the target; gives one sentence
for each, so that nobody has to find three layers in the shapes of nine leaves.
Decides nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from treeadapt.checkpoints.load_report import LoadReport
from treeadapt.checkpoints.migrated import Source
from treeadapt.checkpoints.next_call import config_of
from treeadapt.checkpoints.record import Stored
from treeadapt.errors import MigrationError
from treeadapt.migrations.axes import REST
from treeadapt.migrations.counts import noun_of
from treeadapt.migrations.group import Group, shape_of
from treeadapt.migrations.tables.published import CONFIG, stated_sizes
from treeadapt.text.names import plural
from treeadapt.text.wording import worded

_MOST = 3  # numbers, so that these are what differs
_LAYERS = ["num_hidden_layers", "n_layer", "n_layers", "num_layers"]
_NUMBER = re.compile(r"(?<![^\W_])[0-9]+(?![^\W_])")


@dataclasses.dataclass(frozen=True)
class _Size:
    """A size that differs.

    Attributes:
        name: of its axis in the rows; empty if they do not say it.
        there: what the checkpoint has.
        wanted: what the target has.
    """

    name: str
    there: int
    wanted: int


def differing_sizes(
    source: Source, report: LoadReport, likes: Mapping[str, Any]
) -> list[str]:
    """Write which numbers differ, if they are few: one sentence for each.

    Args:
        source: what can be loaded.
        report: how it fits.
        likes: leaves of the target by path.
    """
    if not report.misshaped:
        return [*_other_counts(source, report, likes)]
    groups, found = source.groups or {}, dict[_Size, None]()
    for path in report.misshaped:
        shapes = source.stored.table[path].array.shape, shape_of(likes[path])
        if len(shapes[0]) != len(shapes[1]) or sorted(shapes[0]) == sorted(shapes[1]):
            return []  # other axes, or the same in another order
        names = _axes(groups.get(path), path, len(shapes[0]))
        for name, there, wanted in zip(names, *shapes, strict=True):
            if there != wanted:
                found[_Size(name, there, wanted)] = None
    names_of: dict[tuple[int, int], set[str]] = {}
    for size in found:
        names_of.setdefault((size.there, size.wanted), set()).update({size.name} - {""})
    sizes = [
        _Size(min(names) if len(names) == 1 else "", *pair)
        for pair, names in names_of.items()
    ]
    is_alone = len(report.misshaped) == 1 and not any(size.name for size in sizes)
    if len(sizes) > _MOST or is_alone:
        return []  # the lines about the leaves say as much
    made = [groups[path] for path in report.misshaped if path in groups]
    sentences = (_sentence(source, size, made) for size in sizes)
    return [*sentences, *_splits(sizes, made)]


def is_throughout(source: Source, report: LoadReport, likes: Mapping[str, Any]) -> bool:
    """Return whether what does not fit is that of a model of another size.

    It is where most leaves have other shapes, or leaves of several layers, or where
    layers are missing: then what fits is not worth loading alone, as it is if a head or
    a vocabulary is another one.

    Args:
        source: as for ``differing_sizes``.
        report: the same.
        likes: the same.
    """
    wrong = [*report.misshaped]
    if not wrong:
        return bool(report.missing and [*_other_counts(source, report, likes)])
    olds = (_NUMBER.sub("#", old) for path in wrong for old in source.old_paths([path]))
    is_of_layers = any(count > 1 for count in Counter(olds).values())
    return is_of_layers or len(wrong) > max(1, len(report.restored))


def _axes(group: Group | None, path: str, length: int) -> list[str]:
    """Return the name of each axis of a leaf in the row that makes it, or no text."""
    if group is not None:
        number = next(n for n, paths in enumerate(group.targets) if path in paths)
        axes = group.row.targets[number].axes
        if len(axes) == length and all(axis.name != REST for axis in axes):
            return [axis.text for axis in axes]
    return [""] * length


def _sentence(source: Source, size: _Size, groups: Iterable[Group]) -> str:
    """Write one size that differs, and where the rows have it from."""
    for address in (each for group in groups for each in group.row.sources):
        if size.name in address.numbers:
            before = address.path.text.partition(f"{{{size.name}}}")[0]
            return _counts(source, before, size.there, size.wanted)
    if size.name:
        return (
            f"{size.name} is {size.there:,} in the checkpoint, {size.wanted:,} in the "
            "target."
        )
    return (
        f"A size of {size.there:,} in the checkpoint is {size.wanted:,} in the target."
    )


def _splits(sizes: Iterable[_Size], groups: Iterable[Group]) -> list[str]:
    """Write how a product such as ``(h d)`` is split, if such a size differs."""
    names = {size.name for size in sizes}
    for group in groups:
        every = [axis for each in group.row.sources for axis in each.axes]
        shown = {axis.name for axis in every}
        shown.update(*(each.numbers for each in group.row.sources))
        for axis in every:
            product = axis.parts[0]
            is_shown = names.isdisjoint(product) or not shown.isdisjoint(product)
            if is_shown or group.move is None:
                continue
            inner = [f"{name} = {group.move.size[name]}" for name in product[1:]]
            stated = worded("[sizes] or sizes=", "[sizes]")
            return [
                f"A checkpoint shows only the product {axis.text}. What splits it is "
                f"in its config.json, and in {stated} of the table, here "
                f"{', '.join(inner)}."
            ]
    return []


def _counts(source: Source, before: str, there: int, wanted: int) -> str:
    noun = noun_of(before)
    text = f"The checkpoint has {plural(there, noun)}, the target has {wanted:,}."
    is_said = noun not in ("layer", "block") or source.miscounted  # by the report
    return text if is_said else text + _stated(source.stored, there, wanted)


def _stated(stored: Stored, there: int, wanted: int) -> str:
    """Write what the configuration states, which says which of the two is wrong."""
    file, stated = config_of(stored), dict[str, tuple[int, str]]()
    # A malformed one would hide the error in whose message this is a hint.
    with contextlib.suppress(MigrationError):
        stated = {} if file is None else stated_sizes({"layers": _LAYERS}, file)
    if not stated:
        return ""
    number, key = stated["layers"]
    missing = ", so files may be missing" if there < wanted == number else ""
    return f" {CONFIG} says {key} = {number:,}{missing}."


def _other_counts(
    source: Source, report: LoadReport, likes: Mapping[str, Any]
) -> Iterator[str]:
    """Yield how many layers there are, if leaves of some are all that does not fit."""
    wrong = [*report.missing, *report.unexpected]
    if not wrong or report.retyped or source.problems.texts:
        return
    befores = ({path[: x.start()] for x in _NUMBER.finditer(path)} for path in wrong)
    for before in sorted(set.intersection(*befores), key=len):
        number = re.compile(f"{re.escape(before)}([0-9]+)(?![^\\W_])")
        there, wanted, others = (
            {match[1] for match in map(number.match, paths) if match}
            for paths in (source.stored.table, likes, wrong)
        )
        if there and wanted and others == there ^ wanted and len(there) != len(wanted):
            yield _counts(source, before, len(there), len(wanted))
            return
