"""Planning: which row takes which leaf, and whether all of it fits.

Takes rows, and shapes by path; gives groups, and every problem. No array is read. A
leaf goes to the first row that matches it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from treeadapt.migrations.copies import shares_of
from treeadapt.migrations.group import Group, Taken, shape_of
from treeadapt.migrations.groups import GroupMaker, Specs
from treeadapt.migrations.operations import COVERED
from treeadapt.migrations.problems import (
    Problems,
    advice,
    colon_advice,
    near_paths,
    turned_rows,
    with_nearest,
)
from treeadapt.migrations.rows import SPLIT, Row
from treeadapt.migrations.spellings import HasPlace, spell, spelled
from treeadapt.migrations.take import lengths_after, numbers_in
from treeadapt.migrations.templates import Index, PathsByCapture, Template
from treeadapt.text.names import SHOWN, listing
from treeadapt.trees.arrays import is_array, is_number
from treeadapt.trees.describing import describe


def plan_groups(
    rows: Sequence[Row],
    sizes: Mapping[str, int],
    source: Specs,
    target: Specs | None,
    problems: Problems,
    static: Sequence[str] = (),
    has_place: HasPlace | None = None,
) -> tuple[list[Group], list[str]]:
    """Plan on shapes alone.

    Args:
        rows: the table.
        sizes: sizes of names that hold in all rows.
        source: shapes and dtypes by path.
        target: the same of what the result should be, if that is known.
        problems: gets all that is wrong.
        static: paths of leaves that are not arrays, for messages.
        has_place: says whether something may be at an address with what it captured;
            None if ``target`` is all that the result should be.

    Returns:
        The groups, in the order of rows and then of their targets' names, and the
        paths of leaves that are dropped.
    """
    by_row, unmatched = assign(rows, [*source], problems)
    assigned = [*zip(rows, by_row, strict=True)]
    unused = [
        row for row, matches in assigned if not (matches or _may_be_idle(row, source))
    ]
    has_room = has_place or (None if target is None else has_place_in(target))
    by_row = spell(rows, by_row, has_room, problems)
    if has_room and any(row.is_spare or row.notes.copy for row in rows):
        by_row = _without_place(rows, by_row, has_room)
    sources = [one.text for row in rows for one in row.sources]
    for path, text in zip(unmatched, with_nearest(unmatched, sources), strict=True):
        problems.add("unmatched", text, leaves=[path])
    if unmatched and len(unmatched) == len(source):
        problems.advice += advice(rows, unmatched)
    else:
        problems.advice += turned_rows(unused, [*source])
    taken = [
        (row, [each.path for each in matches])
        for row, matches in assigned
        if matches and not _may_be_idle(row, source)
    ]
    texts = near_paths(unused, [*source], static, taken)
    for row, text in zip(unused, texts, strict=True):
        problems.add("unused", text, row)
    problems.advice += colon_advice(unused)
    groups: list[Group] = []
    dropped: list[str] = []
    lengths = lengths_after(source) if any(row.values.take for row in rows) else {}
    renumbered: dict[tuple[str, int], tuple[Row, int | None]] = {}
    pairs: set[tuple[Row, Row]] = set()  # of rows, of which one number says enough
    for place, row, matches in shares_of(rows, by_row, has_room):
        if row.drops:
            dropped += [each.path for each in matches]
        elif matches:
            maker = GroupMaker(
                row,
                place,
                sizes,
                source,
                target,
                problems,
                is_partial=has_place is not None,
                lengths=lengths,
                typed=rows[place],
            )
            groups += maker.groups(matches)
            dropped += maker.renumbering.left_out
            for number, new in maker.renumbering.new_numbers.items():
                other = renumbered.setdefault(number, (row, new))
                _check_numbers(number, other, (row, new), pairs, problems)
    for row, matches in zip(rows, by_row, strict=True) if renumbered else ():
        for each in matches if not (row.drops or row.values.take) else ():
            for number in numbers_in(each.path):
                if number in renumbered:
                    same = row, number[1]
                    _check_numbers(number, renumbered[number], same, pairs, problems)
    _check_clashes(groups, problems)
    return groups, dropped


def _may_be_idle(row: Row, paths: Iterable[str]) -> bool:
    """Return whether a row may match nothing, or leave all to rows above it."""
    if row.notes.optional == COVERED:
        return any(map(row.takes, paths))
    return bool(row.drops or row.notes.optional or row.notes.copy)


def _check_numbers(
    number: tuple[str, int],
    one: tuple[Row, int | None],
    two: tuple[Row, int | None],
    pairs: set[tuple[Row, Row]],
    problems: Problems,
) -> None:
    """Note a number in a path of which rows make different ones.

    Args:
        number: what is before it in the path, and the number.
        one: a row, and what it makes of the number.
        two: another one.
        pairs: gets the two rows; nothing is noted of those in it.
        problems: gets the number.
    """
    if one[1] != two[1] and (one[0], two[0]) not in pairs:
        pairs.add((one[0], two[0]))
        texts = (
            f"{listing([row.text])} "
            + ("leaves it out" if new is None else f"makes it number {new}")
            for row, new in (one, two)
        )
        text = f"{listing([f'{number[0]}{number[1]}'])}: {', and '.join(texts)}"
        problems.add("uneven", text, two[0])


def has_place_in(target: Specs) -> HasPlace:
    """Return what says whether a target has something at an address."""
    places = PathsByCapture(target)
    return lambda address, captures: places.has(address.path, captures)


def assign(
    rows: Sequence[Row], paths: Sequence[str], problems: Problems
) -> tuple[list[list[Taken]], list[str]]:
    """Give each path to the first row of which an address matches it.

    Args:
        rows: the table.
        paths: of the leaves.
        problems: gets the paths that two addresses of a row match.

    Returns:
        What each row takes, and the paths that no row takes.
    """
    by_row: list[list[Taken]] = [[] for _ in rows]
    every = [
        (place, number, address.path)
        for place, row in enumerate(rows)
        for number, address in enumerate(row.sources)
    ]
    every.sort(key=lambda each: bool(rows[each[0]].notes.copy))  # what no other takes
    index = Index(template for _, _, template in every)
    unmatched = []
    for path in paths:
        owner = None
        for place, number, template in map(every.__getitem__, index.near(path)):
            if owner is not None and place != owner:
                break
            captures = template.match(path)
            if captures is not None and owner is None:
                owner = place
                by_row[place].append(Taken(number, path, captures))
            elif captures is not None and not rows[place].drops:
                if by_row[place] and by_row[place][-1].path == path:
                    by_row[place].pop()
                texts = listing(each.path.text for each in rows[place].sources)
                text = f"{listing([path])}: {texts}"
                problems.add("ambiguous", text, rows[place], captures, leaves=[path])
        if owner is None:
            unmatched.append(path)
    return by_row, unmatched


def _without_place(
    rows: Sequence[Row], by_row: Sequence[Sequence[Taken]], has_place: HasPlace
) -> list[list[Taken]]:
    """Give leaves for which a target has no place to rows that drop what is spare.

    Or to rows that say of which other leaf they are a copy, which has a place.

    Args:
        rows: the table.
        by_row: what each row takes.
        has_place: of the target.
    """
    reassigned: list[list[Taken]] = [[] for _ in rows]
    for place, (row, matches) in enumerate(zip(rows, by_row, strict=True)):
        for each in matches:
            is_kept = row.drops or any(
                has_place(address, each.captures) for address in row.targets
            )
            new = (place, each) if is_kept else _spare(rows, place, each, has_place)
            reassigned[new[0]].append(new[1])
    return reassigned


def _spare(
    rows: Sequence[Row], place: int, taken: Taken, has_place: HasPlace
) -> tuple[int, Taken]:
    """Return the place of the row for a leaf for which the target has none."""
    for other, row in enumerate(rows):
        captures = row.sources[0].path.match(taken.path) if row.notes.copy else None
        if captures is not None and other != place:
            copy = spelled(row, Taken(0, taken.path, captures), has_place)
            if has_place(row.targets[0], copy.captures):
                return other, copy
    for other, row in enumerate(rows):
        if row.is_spare and other > place and row.takes(taken.path):
            return other, taken
    return place, taken


def _check_clashes(groups: Sequence[Group], problems: Problems) -> None:
    first: dict[str, Group] = {}
    advice: dict[str, None] = {}
    for group in groups:
        targets = set()
        for target in group.filled:
            other = first.setdefault(target, group)
            if other is not group or target in targets:
                paths = (
                    itertools.islice(each.source_paths, 2) for each in (other, group)
                )
                both = listing(dict.fromkeys(itertools.chain(*paths)))
                text = f"{listing([target])}: {both}"
                problems.add("clash", text, group.row, paths=[target])
                if other.row is group.row:
                    advice.setdefault(_what_tells_apart(group))
            targets.add(target)
    problems.advice += filter(None, [*advice][:SHOWN])


def _what_tells_apart(group: Group) -> str:
    """Write how a row keeps leaves apart of which its target makes one name."""
    row, path = group.row, next(group.source_paths)
    if row.has_axes or len(row.sources) != 1 or len(row.targets) != 1:
        return ""
    (source,), (target,) = row.sources, row.targets
    captures = source.path.match(path) or {}
    kept = target.path.names
    names = [
        each.key for each in source.path.captures if not kept.issuperset(each.names)
    ]
    for name in names:
        text = f"{{{name}}} is in {source.text!r:.200} and not in {target.text!r:.200}."
        if not str(captures.get(name)).isdecimal():
            return f"{text} Write it on both sides."
        rows = (f"{source.text}{SPLIT}...", f"{target.text}{SPLIT}{name} ...")
        return (
            f"{text} To stack arrays along an axis, write {rows[0]!r:.200}: "
            f"{rows[1]!r:.200}; else write it on both sides."
        )
    return ""


def compare_target(
    groups: Sequence[Group], new: Iterable[str], target: Specs, problems: Problems
) -> None:
    """Note how a plan does not fit a target.

    Args:
        groups: the plan.
        new: paths of the target that are filled otherwise.
        target: shapes and dtypes by path.
        problems: gets what is missing, unexpected or misfits.
    """
    filled: dict[str, Any] = dict.fromkeys(new, (None, None)) | {
        path: (spec, group) for group in groups for path, spec in group.specs.items()
    }
    would_fill = _filled_by_failed(problems.failed)
    missing = [
        path
        for path, spec in target.items()
        if path not in filled and is_array(spec) and not would_fill(path)
    ]
    extra = [path for path in filled if path not in target]
    extra += dict.fromkeys(problems.lacking)
    for kind, paths, others in (("missing", missing, extra), ("extra", extra, missing)):
        for path, text in zip(paths, with_nearest(paths, others), strict=True):
            group = filled.get(path, (None, None))[1]
            problems.add(kind, text, group and group.row, leaves=[path])
    for path, (spec, group) in filled.items():
        if spec is not None and path in target and not fits(spec, target[path]):
            like, row = target[path], group.row
            spec_text = describe(spec)
            text = f"{describe(like)}, the row {listing([row.text])} makes {spec_text}"
            same = is_array(spec) and is_array(like) and spec.shape == shape_of(like)
            if advice := group.exchange_advice(path, shape_of(like)):
                text += f"; {advice}"
            kind = "retyped" if same else "misfit"
            problems.add(kind, f"{listing([path])}: {text}", row, leaves=[path])


def _filled_by_failed(
    failed: Iterable[tuple[Row, Mapping[str, Any]]],
) -> Callable[[str], bool]:
    """Return what says of a path whether a group that failed would fill it.

    Such a path is not missing as well.

    Args:
        failed: rows, and what the leaves of the group share.
    """
    shared: dict[tuple[Template, tuple[str, ...]], set[tuple[Any, ...]]] = {}
    for row, values in failed:
        for address in row.targets:
            keys = tuple(c.key for c in address.path.captures if c.key in values)
            value_sets = shared.setdefault((address.path, keys), set())
            value_sets.add(tuple(map(values.get, keys)))
    every = [*shared]
    index = Index(template for template, _ in every)

    def would_fill(path: str) -> bool:
        for template, keys in map(every.__getitem__, index.near(path)):
            captures = template.match(path)
            if captures is None:
                continue
            if tuple(map(captures.get, keys)) in shared[template, keys]:
                return True
        return False

    return would_fill


def fits(spec: Any, like: Any) -> bool:
    """Return whether what a row makes can be where the target has a leaf."""
    if is_array(spec) and is_array(like):
        return bool(shape_of(spec) == shape_of(like) and spec.dtype == like.dtype)
    # A number and a 0-d array hold each other; a function is not a number.
    holds_number = is_array(like) or is_number(like)
    return holds_number and shape_of(spec) == shape_of(like) == ()
