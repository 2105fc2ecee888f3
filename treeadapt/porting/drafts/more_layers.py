"""What other numbers and more layers show: rows that the function then contradicts.

So do more experts, whose names a function may sort: the tenth before the second. RWKV
halves what goes out of every sixth layer, which a model of three does not show.
SincNet takes absolute values, which numbers above zero do not show. Takes a draft and
its function; gives the draft with marks on the rows that are wrong then.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

from treeadapt.errors import MigrationError
from treeadapt.porting.drafts.called_function import Conversion
from treeadapt.porting.drafts.checking import compared_with
from treeadapt.porting.drafts.inputs import Side, is_flat
from treeadapt.porting.drafts.migration_draft import MigrationDraft
from treeadapt.porting.drafts.path_numbers import ends_in
from treeadapt.porting.drafts.rows import (
    EXPERT_WORDS,
    LAYER_WORDS,
    template_of,
    tokens_of,
)
from treeadapt.porting.drafts.writing import as_table

_COUNT = 13  # more than two periods of six layers, the longest that is known
_MOST_NUMBERS = 2**20  # of all of their leaves
_NOTE = (
    f"with {_COUNT} {{}} the function gives other numbers: draft a model with as many "
    "as yours, whose widths may be small"
)
_UNTRIED = (
    "More {} were not tried: {}. Call draft.check with as many as your model has."
)
_RAISES = f"with {_COUNT} the function raises"
_OTHERS = f"with {_COUNT} the function makes other leaves than the table"
_UNLIKE = "not all have the same leaves, or numbers from 0 on"
_LARGE = f"{_COUNT} have too many numbers"
_UNTRIED_SIGN = "Numbers below zero were not tried: {}."
_SIGN = "numbers below zero become others, as of abs: no row says that, see the code"
_SAID = frozenset({"numbers", "scale"})  # marks that say it already


def with_more_layers(
    draft: MigrationDraft, source: Any, side: Side, convert: Callable[[Any], Any]
) -> MigrationDraft:
    """Return a draft with a mark on rows that are wrong with more layers or experts.

    A function that takes no more, or a table that does not run then, shows nothing, and
    a note says so.

    Args:
        draft: of a function.
        source: as in ``draft_migration``: without names and arrays alone, no more
            layers are known.
        side: its leaves.
        convert: the function.
    """
    is_plain = isinstance(source, str | os.PathLike) or is_flat(source)
    if not is_plain or draft.missing:
        return draft
    for noun, words in (("layers", LAYER_WORDS), ("experts", EXPERT_WORDS)):
        more, are_alike = _more_of(words, side.leaves)
        untried = "" if are_alike else _UNLIKE
        if more:
            draft, reason = _tried(draft, side, convert, noun, more)
            untried = reason or untried
        if untried:
            draft = _with_note(draft, _UNTRIED.format(noun, untried))
    return draft


def _tried(
    draft: MigrationDraft,
    side: Side,
    convert: Callable[[Any], Any],
    noun: str,
    more: Mapping[str, Any],
) -> tuple[MigrationDraft, str]:
    """Return a draft with what more leaves contradict, and why these were not tried.

    Args:
        draft: of a function.
        side: leaves of the source.
        convert: the function.
        noun: what there are more of.
        more: their leaves.
    """
    leaves = {**side.leaves, **more}
    if sum(leaf.size for leaf in leaves.values()) > _MOST_NUMBERS:
        return draft, _LARGE
    try:
        report = compared_with(
            draft.migration, [draft._shapes], leaves, convert, answers=False
        )
    except MigrationError:
        return draft, _RAISES
    if report.problem:
        return draft, _OTHERS
    note = _NOTE.format(noun)
    return _marked(draft, side, report.forwards, "layers", note, _SAID), ""


def _with_note(draft: MigrationDraft, note: str) -> MigrationDraft:
    return dataclasses.replace(draft, notes=(*draft.notes, note))


def with_numbers_below_zero(
    draft: MigrationDraft, side: Side, conversion: Conversion
) -> MigrationDraft:
    """Return a draft with a mark on the rows that are wrong for numbers below zero.

    A function that does not take these shows nothing, and a note says so.

    Args:
        draft: of a function.
        side: leaves of the source.
        conversion: the function.
    """
    try:
        source, target = conversion.below_zero()
    except MigrationError:
        return _with_note(draft, _UNTRIED_SIGN.format("the function raises"))
    for leaves, paths in ((source, draft.unexpected), (target, draft.missing)):
        for path in paths:  # which may be the name of another leaf on the other side
            leaves.pop(path, None)
    if not (source and target):
        return draft
    report = compared_with(
        draft.migration, [draft._shapes], source, target, answers=False
    )
    if report.problem:
        return _with_note(
            draft, _UNTRIED_SIGN.format("the table does not run on these")
        )
    return _marked(draft, side, report.forwards, "sign", _SIGN)


def _marked(
    draft: MigrationDraft,
    side: Side,
    wrong: Collection[str],
    mark: str,
    note: str,
    said: frozenset[str] = frozenset(),
) -> MigrationDraft:
    """Return a draft with a mark on the rows of some texts; with notes, of a chain.

    Args:
        draft: of a function.
        side: leaves of the source.
        wrong: texts of the rows.
        mark: that they get.
        note: the reason.
        said: marks of which each makes another one needless.
    """
    if len(draft.migration.tables) > 1:
        notes = (f"{text!r:.200}: {note}." for text in wrong)
        return dataclasses.replace(draft, notes=(*draft.notes, *notes))
    rows, marked = [*draft._rows], {*draft.doubtful}
    for number, row in enumerate(draft.migration.rows):
        own = rows[number].row
        if row.text in wrong and said.isdisjoint(own.checks):
            rows[number] = rows[number].with_row(own.marked(mark, note))
            marked.update(own.source_paths)
    return dataclasses.replace(
        draft,
        migration=as_table(rows, draft._sizes, draft.migration._new),
        doubtful=tuple(path for path in side.leaves if path in marked),
        _rows=tuple(rows),
    )


def _more_of(
    words: frozenset[str], leaves: Mapping[str, Any]
) -> tuple[dict[str, Any], bool]:
    """Return leaves of further layers, and whether all that there are have the same.

    Args:
        words: before the numbers of layers, or of experts, or their endings.
        leaves: that there are.

    Example:
        >>> leaves = {"h.0.w": "a", "h.1.w": "a", "g.0.w": "b"}
        >>> more, are_alike = _more_of(frozenset("h"), leaves)
        >>> [*more][:1], [*more.values()] == ["a"] * 11, are_alike
        (['h.2.w'], True, True)
    """
    layers: dict[tuple[str, ...], dict[int, dict[tuple[str, ...], Any]]] = {}
    for path, leaf in leaves.items():
        tokens = tokens_of(path)
        for at, fixed in enumerate(template_of(path)):
            above = tokens[:at]
            if fixed is None and ends_in((0, above), words):
                every = layers.setdefault(above, {})
                every.setdefault(int(tokens[at]), {})[tokens[at + 1 :]] = leaf
    more: dict[str, Any] = {}
    have_all_more = True
    used: list[tuple[str, ...]] = []
    for above in sorted(layers, key=len):  # of layers in layers the outer ones
        every, first = layers[above], layers[above].get(0)
        is_inner = any(above[: len(outer)] == outer for outer in used)
        are_all = {*every} == {*range(len(every))}
        are_alike = are_all and all(each == first for each in every.values())
        if is_inner or not 1 < len(every) < _COUNT:
            continue
        if first is None or not are_alike:
            have_all_more = False
            continue
        used.append(above)
        for number in range(len(every), _COUNT):
            text = "".join(above) + str(number)
            more |= {text + "".join(tokens): leaf for tokens, leaf in first.items()}
    return more, have_all_more
