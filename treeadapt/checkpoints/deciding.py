"""Which leaves of a checkpoint go where, and whether they fit.

Takes what can be loaded, and a target; decides from metadata and numbers, before any
array is read. What does not fit is an error or a warning that lists all of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
from jax.sharding import PartitionSpec, Sharding

from treeadapt.checkpoints.differing_sizes import differing_sizes, is_throughout
from treeadapt.checkpoints.leaves import as_array, on_meshes
from treeadapt.checkpoints.load_report import LoadReport, compare_with_target
from treeadapt.checkpoints.migrated import (
    Source,
    miscounted_text,
    require_migration,
    source_of,
)
from treeadapt.checkpoints.next_call import all_shards, next_call
from treeadapt.checkpoints.reading import read_ahead
from treeadapt.checkpoints.record import Stored
from treeadapt.errors import (
    CheckpointError,
    MigrationError,
    SelectorError,
    TreeAdaptWarning,
    UnusedRuleError,
)
from treeadapt.migrations.group import shape_of
from treeadapt.migrations.migration import Migration
from treeadapt.selection.selectors import select
from treeadapt.text.names import SHOWN, fold, listing, plural, section, shorten
from treeadapt.transforms.optax_fields import is_state_class
from treeadapt.transforms.state_map import last
from treeadapt.trees.arrays import is_array
from treeadapt.trees.describing import describe
from treeadapt.trees.paths import as_tree
from treeadapt.trees.views import TreeView, view_tree


def selected(view: TreeView, where: Any) -> list[bool]:
    """Select leaves, with 0-d arrays in the place of Python numbers."""
    leaves = [as_array(leaf) for leaf in view.leaves]
    return select(dataclasses.replace(view, leaves=leaves), where)


def target_view(target: Any) -> TreeView:
    """Return the view of what leaves are to be loaded into, on meshes with devices.

    Raises:
        CheckpointError: it is a text or a function, or has shardings in the place of
            arrays.
    """
    if isinstance(target, str | bytes | os.PathLike):
        cure = "Pass the model that leaves go into, or what jax.eval_shape(init) gives."
        if isinstance(target, str | os.PathLike) and os.path.exists(target):
            name = listing([os.fspath(target)])
            cure += f" Names and shapes of a checkpoint are ta.read_metadata({name})."
        raise CheckpointError(
            f"Expected a tree as target, got the text {shorten(repr(target))}. {cure}"
        )
    view = view_tree(target)
    if view.plan.paths == ("",) and callable(target):
        name = getattr(target, "__name__", type(target).__name__)
        raise CheckpointError(
            f"Expected a tree as target, got {describe(target)}. Pass what it returns: "
            f"{name}(), or for shapes alone jax.eval_shape({name})."
        )
    specs = [p for p, it in view.items() if isinstance(it, Sharding | PartitionSpec)]
    if specs and not any(map(is_array, view.leaves)):
        kind = type(view.flat()[specs[0]]).__name__
        raise CheckpointError(
            f"Expected a target of arrays or shapes; it has a {kind} at "
            f"{listing(specs, limit=2)}. Pass shapes with shardings: jax.tree.map("
            "lambda x, s: x.update(sharding=s), jax.eval_shape(init), shardings)."
        )
    return dataclasses.replace(view, leaves=on_meshes(view.leaves))


#: Last segments of counters in a checkpoint from which a run goes on.
_OF_A_RUN = ("step", "count")


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What a call wants of a checkpoint.

    Attributes:
        where: selects leaves: of the target, or without one of the checkpoint.
        view: of the target; None without one.
        strict: whether all that is selected must fit.
        cast: whether other dtypes fit.
        is_whole: whether all leaves are selected, so that layers can be counted.
    """

    where: Any
    view: TreeView | None = None
    strict: bool = True
    cast: bool = False
    is_whole: bool = False

    @functools.cached_property
    def likes(self) -> dict[str, Any] | None:
        """The leaves of the target, by path."""
        return None if self.view is None else self.view.flat()

    @functools.cached_property
    def mask(self) -> dict[str, bool]:
        """Whether each leaf of the target is selected, by path.

        Raises:
            UnusedRuleError: as for ``select``; it says which names are meant.
        """
        assert self.view is not None
        with _naming("where= selects leaves of the target by their names there"):
            chosen = selected(self.view, self.where)
        return dict(zip(self.view.plan.paths, chosen, strict=True))

    @functools.cached_property
    def random(self) -> list[str]:
        """Paths of the target's random state, such as the keys of dropout."""
        assert self.view is not None
        return [self.view.plan.paths[index] for index in self.view.plan.random]


def paths_to_load(source: Source, where: Any) -> list[str]:
    """Select what can be loaded without a target.

    Raises:
        UnusedRuleError: as for ``select``; it says which names are meant.
    """
    names = "the new names" if source.migrates else "the names in the checkpoint"
    with _naming(f"Without a target, where= selects by {names}"):
        return chosen_paths(source.stored.leaves, where)


@contextlib.contextmanager
def _naming(which: str) -> Iterator[None]:
    """Say in the last line of an error which names a selector should have."""
    try:
        yield
    except UnusedRuleError as error:
        problem, _, _ = str(error).rpartition("\n")
        cure = f"{which}. Correct or remove it."
        raise UnusedRuleError(f"{problem}\n{cure}") from None


def relevant(source: Source, wanted: Wanted) -> Source:
    """Return what can be loaded, with the problems of the selected leaves alone."""
    if wanted.likes is None or not source.problems.texts or all(wanted.mask.values()):
        return source
    leaves = {path: leaf for path, leaf in wanted.likes.items() if wanted.mask[path]}
    filled = source.kept | {*source.stored.table}
    are_filled = all(path in filled or not is_array(it) for path, it in leaves.items())
    problems = source.problems.about(leaves, are_filled=are_filled)
    return dataclasses.replace(source, problems=problems)


def chosen_paths(
    leaves: Mapping[str, Any], where: Any, unused: Literal["error", "ignore"] = "error"
) -> list[str]:
    """Return the paths that the selector selects by their names."""
    view = view_tree(as_tree(leaves))
    mask = select(view, where, unused=unused)
    return list(itertools.compress(view.plan.paths, mask))


def decided(source: Source, wanted: Wanted) -> LoadReport:
    """Return how what can be loaded fits a target."""
    target, unexpected = wanted.likes or {}, list[str]()
    chosen = [yes and path not in source.kept for path, yes in wanted.mask.items()]
    leaves = source.stored.leaves
    others = {path: leaf for path, leaf in leaves.items() if path not in target}
    with contextlib.suppress(SelectorError):  # it asks for classes; a file has none
        unexpected = chosen_paths(others, wanted.where, unused="ignore")

    def read(paths: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        return read_ahead(source.stored, source.read(paths))

    has_values = not (source.stored.is_abstract or source.problems.texts)
    report = compare_with_target(
        target,
        chosen,
        source.stored,
        unexpected,
        read if has_values else None,
        cast=wanted.cast,
    )
    report = dataclasses.replace(
        report,
        origin=source.problems.origin,
        miscounted=source.miscounted if wanted.is_whole else (),
        uncounted=source.uncounted,
    )
    # Published weights have none. A file that has some of it was cut off.
    lacking = [path for path in report.missing if path in {*wanted.random}]
    is_there = any(path in leaves for path in wanted.random)
    if is_there or any(isinstance(target[x], jax.ShapeDtypeStruct) for x in lacking):
        return report
    return dataclasses.replace(
        report,
        random=tuple(lacking),
        kept=(*report.kept, *lacking),
        missing=tuple(path for path in report.missing if path not in lacking),
    )


def source_that_fits(
    stored: Stored, migrations: Sequence[Migration | None], wanted: Wanted
) -> tuple[Source, int]:
    """Return what one of several migrations makes of a checkpoint, and which it is.

    Args:
        stored: what the checkpoint holds.
        migrations: for several layouts of one model; None for what is stored as it is.
        wanted: with a target the result must fit it; if not ``strict``, only the rows.

    Raises:
        MigrationError: none fits, or more than one does.
    """
    fitting: list[tuple[Source, int]] = []
    whole: list[tuple[Source, int]] = []  # of which all rows fit
    lines: list[str] = []
    for migration in migrations:
        if migration is not None:
            require_migration(migration)
    for place, migration in enumerate(migrations):
        try:
            source = source_of(stored, migration, wanted.likes, cast=wanted.cast)
            is_whole = not source.problems.texts
            source = relevant(source, wanted)
            misses = str(source.problems).splitlines()
            if wanted.view is not None and (wanted.strict or not misses):
                report = decided(source, wanted)
                misses += report.misfit_lines if wanted.strict else []
        except MigrationError as error:
            misses = str(error).splitlines()
        if misses:
            lines += section(f"migration[{place}] does not:", misses)
        else:
            fitting.append((source, place))
            whole += [(source, place)] * is_whole
    for candidates in (fitting, whole):
        if len(candidates) == 1:
            return candidates[0]
    if fitting:
        names = listing((f"migration[{place}]" for _, place in fitting), write=str)
        raise MigrationError(
            f"{names} fit {stored.title}, and which one is meant is not known. "
            "Pass that one alone, or give each a row that only its layout has leaves "
            "for."
        )
    lines.append("Of migrations one after the other, pass first.then(second).")
    title = f"No migration of {len(migrations)} fits {stored.title}."
    lines = [title, *filter(None, [all_shards(stored)]), *lines]
    raise MigrationError("\n".join(lines))


def require_count(source: Source, wanted: Wanted) -> None:
    """Raise if a configuration says that there are other layers, or warn of it.

    Raises:
        MigrationError: ``strict``, and it does.
    """
    if not source.miscounted or not wanted.is_whole:
        return
    text = miscounted_text(source)
    if wanted.strict:
        raise MigrationError(text)
    warnings.warn(text, TreeAdaptWarning, stacklevel=3)


def require_fit(source: Source, report: LoadReport, wanted: Wanted) -> None:
    """Raise if what is to be loaded does not fit, or warn of what is left out.

    Raises:
        CheckpointError: ``strict`` and it does not fit; the message lists all misfits.
        MigrationError: instead, with a migration, or its rows do not fit.
    """
    title, advice = source.stored.title, _advice(source, report, wanted)
    sizes = differing_sizes(source, report, wanted.likes or {})
    call = [*sizes, *_call(source, report, wanted)]
    unfilled = [*report.missing, *report.misshaped, *report.retyped]
    if wanted.strict and not report.fits:
        lines = [f"T{title[1:]} does not fit the target.", *call]
        if problems_text := str(source.problems):
            lines.append(problems_text)
            report = dataclasses.replace(report, origin="")  # it is said there
        lines.append(str(report))
        cure = "choose leaves with where=, or pass strict=False."
        if is_throughout(source, report, wanted.likes or {}):
            # What is left of a model of another size is of no use.
            cure = "change the target, or pass the checkpoint that it is for."
        if report.retyped and not wanted.cast:
            left = _if_cast(source, wanted).retyped
            if report.retyped.keys() - left.keys():
                cure = f"pass cast=True to convert dtypes, {cure}"
            elif left:
                names = listing(fold(left), limit=2)
                lines.append(f"cast=True would not help {names}: change the target.")
        if not source.migrates:
            lines += [*advice, f"{cure[0].upper()}{cure[1:]}"]
            raise CheckpointError("\n".join(lines), paths=report.misfits)
        wrong = [*report.misshaped, *report.retyped, *report.unexpected]
        lines += source.made_of(wrong)[:SHOWN]
        shapes = {p: shape_of((wanted.likes or {})[p]) for p in report.misshaped}
        lines += source.exchanged(shapes)[:SHOWN]
        if source.problems.texts:  # strict=False does not help
            cure = "choose leaves with where=, or pass the checkpoint that it is for."
            if "sizes" in source.problems.texts and not source.problems.origin:
                lines.append(
                    "Sizes that the table leaves open are those of the target. State "
                    "those of the checkpoint in [sizes] or sizes=; its config.json may "
                    "say them."
                )
        lines += [*advice, f"Change the migration, {cure}"]
        problems = source.problems.data
        text = "\n".join(lines)
        raise MigrationError(text, paths=report.misfits, problems=problems)
    source.problems.raise_any()
    steps = [path for path in source.stored.table if last(path) in _OF_A_RUN]
    if report.random and steps:
        warnings.warn(
            f"T{title[1:]} holds {listing(steps, limit=2)} of a run and no random "
            f"state: {listing(report.random)} begin as they are in the target.",
            TreeAdaptWarning,
            stacklevel=3,
        )
    if unfilled or not (report.restored or report.fits):
        seen = f"Nothing was loaded from {title}, because no leaf of the target fits"
        if report.restored:
            names = listing(fold(unfilled))
            seen = f"Not loaded from {title}, and left as they are: {names}"
        lines = [f"{seen}.", *call, str(report), *advice]
        warnings.warn("\n".join(lines), TreeAdaptWarning, stacklevel=3)


def is_unlike(report: LoadReport) -> bool:
    """Return whether no leaf fits, though there are some."""
    return not report.restored and bool(report.unexpected or report.misshaped)


def _if_cast(source: Source, wanted: Wanted) -> LoadReport:
    """Return what a load with ``cast=True`` would be."""
    return decided(source, dataclasses.replace(wanted, cast=True))


def _call(source: Source, report: LoadReport, wanted: Wanted) -> Iterator[str]:
    """Yield a sentence with the call that should come next, if one is known."""
    stored = source.first.stored
    if source.problems.lead:
        return  # it is said with what is wrong with the rows
    if report.missing and (text := all_shards(stored)):
        yield text
    elif (
        report.retyped
        and not (wanted.cast or source.problems.texts)
        and _if_cast(source, wanted).fits
    ):
        (path, (there, like)), *others = report.retyped.items()
        yield (
            f"{plural(1 + len(others), 'leaf')} of another dtype: pass cast=True to "
            f"convert what is stored ({listing([path])} from {there} to {like})."
        )
    elif is_unlike(report) and (not source.migrates or source.problems.origin):
        yield next_call(stored, wanted.likes or {}, wanted.random)


def _advice(source: Source, report: LoadReport, wanted: Wanted) -> list[str]:
    """Return what takes leaves of other names and shapes to a target."""
    assert wanted.view is not None
    lines, plan = [], wanted.view.plan
    wrong = {*report.missing, *report.misshaped, *report.retyped}
    in_states = (
        path
        for path in plan.paths
        if path in wrong and any(map(is_state_class, plan.enclosing(path)))
    )
    if (state := next(in_states, None)) is not None:
        lines.append(
            f"{listing([state])} is in the state of an optimizer: "
            "treeadapt.carry_state takes that of other params or another optimizer."
        )
    if random := [path for path in wanted.random if path in wrong]:
        lines.append(
            f"{listing(random, limit=2)}: random state of shapes without numbers. "
            "load(path, model), with a model in the place of its shapes, keeps its own."
        )
    if is_unlike(report) and not source.migrates:
        lines.append("Pass migration= to give what is stored other names and axes.")
    return lines
