"""Drafting: the first version of a migration, as a file or printed.

Takes what ``draft`` was called with.
"""

from __future__ import annotations

from pathlib import Path

import click

from treeadapt.cli import options, printing, sources
from treeadapt.porting.drafts.draft import draft_migration
from treeadapt.reports.words import printable


def write_draft(
    source: str,
    target: str | None,
    convert: str | None,
    output: str | None,
    synonyms: str | None,
    form: str | None,
    *,
    decode: bool,
    force: bool,
) -> None:
    """Write a draft; see the options of ``draft``.

    Raises:
        click.UsageError: there is neither a target nor a function.
        TreeAdaptError: a file cannot be read, or the function fails.
    """
    if target is None and convert is None:
        raise click.UsageError("Name a TARGET, or --convert, a function that gives it.")
    if output is not None:
        options.require_new(output, force=force)
    old, new = (
        sources.read_tree(text) if text and sources.names_function(text) else text
        for text in (source, target)
    )
    function = None if convert is None else sources.read_function(convert)
    drafted = draft_migration(
        old, new, convert=function, synonyms=synonyms, decode=decode
    )
    text = drafted.to_toml()
    if output is not None:
        Path(output).write_text(text, "utf-8")
    if form == "json":
        printing.print_lines(drafted.to_json())
        return
    if output is None:
        click.echo(text, nl=False)
        return
    printing.print_lines("\n".join(map(printable, drafted.summary.splitlines())))
    click.echo(f"Wrote {output!r}.")
