"""Comparing two trees, which may be checkpoints of two formats.

Takes what ``diff`` was called with; reads arrays only to compare values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import click

from treeadapt.checkpoints import url
from treeadapt.checkpoints.versions import watched
from treeadapt.cli import printing, sources
from treeadapt.reports.diff import TreeDiff, compared, tree_diff
from treeadapt.reports.words import printable


def diff_trees(
    a: str,
    b: str,
    where: Sequence[str],
    form: str | None,
    *,
    values: bool,
    decode: bool,
) -> None:
    """Print how two trees differ; see the options of ``diff``.

    Raises:
        SystemExit: they do.
        TreeAdaptError: one cannot be read.
    """
    pair = sources.read_pair(a, b, decode=decode)
    difference = differences((a, b), pair, list(where) or "**", values=values)
    if form == "json":
        rows = [dataclasses.asdict(each) for each in difference]
        printing.print_json({"values_compared": values, "differences": rows})
    else:
        printing.print_diff(difference)
        if difference.of("renamed") and not values:
            text = (
                f"note: treeadapt draft {url.shown(a)} {url.shown(b)} writes the table."
            )
            click.echo(printable(text))
    if difference:
        sys.exit(1)


def differences(
    names: Sequence[str],
    trees: Sequence[sources.AbstractTree],
    where: Any,
    *,
    values: bool,
) -> TreeDiff:
    """Return how two trees differ, reading their arrays if values count.

    Args:
        names: of both.
        trees: both.
        where: what to compare.
        values: whether values count.

    Raises:
        CheckpointError: a tree is not of a checkpoint, or it cannot be read.
    """
    one, two = trees
    if not values:
        return tree_diff(one.tree, two.tree, where=where)
    pair = [sources.require_values(*each) for each in zip(names, trees, strict=True)]
    with contextlib.ExitStack() as stack:
        for each in pair:
            stack.enter_context(watched(each.path, each.version))
        return compared(
            one.tree, two.tree, where, lambda *paths: sources.read_pairs(pair, paths)
        )
