"""The ``treeadapt`` command: its commands, their options and their help.

Takes arguments, prints to standard output, and gives an exit code: 0, all is well; 1,
``lint`` found something, ``diff`` a difference, ``compare`` what does not load,
``explain`` no rule or row; 2, the arguments or the files cannot be used, or nothing can
be printed; 130, interrupted; 141, the reader of a pipe left. Errors are one or two
lines on standard error. Only ``convert``, ``diff --values`` and ``draft`` read arrays,
and only ``convert``, ``show --output`` and ``draft --output`` write. The tree comes
first everywhere; tables are options.

A command imports what it does when it is called, because a shell that completes a word
imports this module: it must not import JAX or NumPy.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from treeadapt.cli import options

app = options.app


@options.command(
    "Show or draw paths, sizes and labels.",
    "show model.safetensors --rules freeze.toml --depth 2",
    "show my_module:init --rules freeze.toml --output report.svg",
)
@options.tree
@options.with_rules
@options.given
@options.one_of("table", "tree", "markdown", "json")
@click.option("--depth", type=click.IntRange(min=1), help="Add up below this depth.")
@options.flag("--statics", "Show each leaf that is not an array, not all as one line.")
@options.no_decode
@options.patterns("--filter", "Only what this selects")
@options.text(
    "--mesh", "AXES", "Plan the memory of devices: axes such as data=16,model=8."
)
@options.text(
    "--optimizer",
    "MODULE:TX",
    "What trains TREE on the mesh, or a function that returns it.",
)
@options.text("--memory-kind", "KIND", "Where the optimizer's state is: pinned_host.")
@options.text(
    "--output", "FILE", "Draw it, as .svg, .html or .md, and print nothing else."
)
@options.flag("--force", "Replace FILE if it exists.")
@options.shared
def show(**arguments: Any) -> None:
    """Show paths, shapes, dtypes, sizes, labels and deciding rules of TREE.

    With --mesh, the rules give a list of mesh axes for the axes of each array, and the
    bytes that each device would hold are shown, too.
    """
    from treeadapt.cli.showing import show_tree

    show_tree(**arguments)


@options.command(
    "Check rules or a migration against a tree; for CI.",
    "lint model.safetensors --rules freeze.toml",
    "lint old.safetensors my_module:model --migration table.toml",
)
@click.argument("tree", metavar="[TREE]", type=click.Path(), required=False)
@click.argument("target", metavar="[TARGET]", type=click.Path(), required=False)
@options.with_table
@click.option(
    "--ignore",
    "ignored",
    metavar="KIND",
    type=click.Choice(options.KINDS),
    multiple=True,
    help=f"Findings to leave out; may be repeated: {', '.join(options.KINDS)}.",
)
@options.one_of("text", "json", "github")
@options.shared
def lint(**arguments: Any) -> None:
    """Check rules, or a migration, against TREE: exit code 1 if anything is wrong.

    Finds leaves without a rule, rules that match nothing or are unreachable, overlaps
    that they refuse. With --migration, finds all that keeps TREE from becoming one like
    TARGET and back, and notes what shapes cannot show. Of optimizers in a rules file,
    all that is wrong, and with TREE also masks that reach nothing and what one step
    raises; without TREE only these are checked. As "github", findings are annotations
    of the file in a pull request.
    """
    from treeadapt.cli.lint import lint_table

    lint_table(**arguments)


@options.command(
    "Say how two trees differ.",
    "diff old.safetensors new.safetensors",
    "diff old.safetensors new.safetensors --values --where 'head/**'",
)
@click.argument("a", metavar="A", type=click.Path())
@click.argument("b", metavar="B", type=click.Path())
@options.patterns("--where", "What to compare")
@click.option("--values", is_flag=True, help="Compare values, too; reads all arrays.")
@options.no_decode
@options.one_of("text", "json")
@options.shared
def diff(**arguments: Any) -> None:
    """Say how the trees A and B differ: exit code 1 if they do.

    Added, removed, renamed (same shape, similar name), reshaped and retyped leaves,
    whatever the formats.
    """
    from treeadapt.cli.diffing import diff_trees

    diff_trees(**arguments)


@options.command(
    "Say whether a checkpoint loads into a model.",
    "compare model.safetensors my_module:init",
    "compare Qwen3-8B my_module:init --migration tunix --format json",
)
@click.argument("checkpoint", metavar="CHECKPOINT", type=click.Path())
@click.argument("target", metavar="TARGET", type=click.Path())
@options.with_migration
@options.patterns("--where", "What is to be loaded")
@options.flag("--cast", "Take other dtypes that hold as much.")
@options.no_decode
@options.one_of("text", "json")
@options.shared
def compare(**arguments: Any) -> None:
    """Say whether CHECKPOINT loads into TARGET: exit code 1 if it does not.

    Reads names, shapes and dtypes, as load does before it reads an array: leaves that
    are missing, unexpected, of another shape or dtype, and what a config.json says
    otherwise.
    """
    from treeadapt.cli.comparing import compare_with_model

    compare_with_model(**arguments)


@options.command(
    "Say which rule or row decides a leaf.",
    "explain model.safetensors h/3/attn/kernel --rules freeze.toml",
    "explain old.safetensors lm_head.weight --migration table.toml",
)
@options.tree
@click.argument("path", metavar="PATH")
@options.with_table
@options.target
@options.shared
def explain(**arguments: Any) -> None:
    """Say which rules match the leaf of TREE at PATH: exit code 1 if none does.

    With --migration, say which row moves the leaf at PATH, of TREE or of what it
    becomes, with its captures and sizes.
    """
    from treeadapt.cli.explaining import explain_leaf

    explain_leaf(**arguments)


@options.command(
    "List the published tables, or show one.",
    "tables",
    "tables tunix",
    "tables tunix/qwen3",
)
@click.argument("name", metavar="[LAYOUT[/TYPE]]", required=False)
@options.one_of("text", "json")
@options.shared
def tables(name: str | None, form: str | None) -> None:
    """List the published tables, those of a LAYOUT, or show the one of a model TYPE.

    A table moves published weights into the model of another library, and back: name it
    as --migration LAYOUT/TYPE, or LAYOUT where a config.json is next to the weights.
    """
    from treeadapt.cli.printing import print_published

    print_published(name, form)


@options.command(
    "Write a checkpoint in another format, or migrated.",
    "convert old.safetensors new.safetensors --migration table.toml",
    "convert run/1200 exported --max-shard-bytes 5GB",
)
@click.argument("source", metavar="SRC", type=click.Path())
@click.argument("destination", metavar="DST", type=click.Path())
@click.option(
    "--migration",
    "migrations",
    metavar="TABLE",
    type=click.Path(),
    multiple=True,
    help="A migration file or a published table; of several, the one that fits.",
)
@options.flag("--reverse", "Read the rows of the migration backwards.")
@options.target
@options.text(
    "--like", "FOLDER", "Copy what is not weights from there, as config.json."
)
@options.no_decode
@options.flag("--dry-run", "Say what would be done; write nothing.")
@options.flag("--force", "Replace DST if it exists.")
@click.option(
    "--max-shard-bytes",
    metavar="SIZE",
    type=options.Size(),
    help="Write DST as a folder of safetensors shards of at most this size: 5GB.",
)
@options.shared
def convert(**arguments: Any) -> None:
    """Write the checkpoint SRC as DST, in the format that its ending says.

    DST without an ending is an Orbax folder, and .schema.toml all but the arrays: then
    SRC may be module:function. DST is written under another name and put in place once
    it is whole. With --migration, leaves get new names and axes; SRC is read one group
    at a time. What is written is in memory until all of it is there, or with
    --max-shard-bytes one shard of it. With --like, the files of FOLDER that are not
    weights are copied next to what is written, and none there is replaced, or with
    --force by the same one; DST without an ending is then a folder of safetensors,
    unless FOLDER is an Orbax folder. Next to a single file nothing is copied, unless
    its name is model.safetensors.
    """
    from treeadapt.cli.convert_command import convert_checkpoint

    convert_checkpoint(**arguments)


@options.command(
    "Measure on this machine.",
    "bench",
    "bench model.safetensors --rules freeze.toml",
)
@click.argument("tree", metavar="[TREE]", type=click.Path(), required=False)
@options.with_rules
@options.no_decode
@options.shared
def bench(**arguments: Any) -> None:
    """Measure TREE on this machine: milliseconds, and times jax.tree.flatten.

    Without TREE, made-up trees of three sizes are measured. Other libraries that are
    installed and flatten the same tree to as many leaves are measured, too.
    """
    from treeadapt.cli.bench import measure

    measure(**arguments)


@options.command(
    "Write the first version of a migration.",
    "draft old.safetensors my_module:model --output table.toml",
    "draft tiny.safetensors --convert my_module:convert",
)
@click.argument("source", metavar="SRC", type=click.Path())
@click.argument("target", metavar="[TARGET]", type=click.Path(), required=False)
@options.text(
    "--convert", "MODULE:NAME", "A function that converts SRC: the table does it."
)
@options.text("--output", "FILE", "Write the table there, and print its summary.")
@options.text("--synonyms", "FILE", "More words that mean the same in names, .toml.")
@options.no_decode
@options.flag("--force", "Replace FILE if it exists.")
@options.one_of("text", "json")
@options.shared
def draft(**arguments: Any) -> None:
    """Write the first version of a migration that turns SRC into TARGET.

    Where both hold the same numbers, as a small model and what it should become, they
    show every row. Otherwise names and shapes are paired, and each such row is marked,
    check = "names". The exit code is 0 with such marks and gaps, too: lint says
    what is missing. With --convert, that function is imported and called with
    distinct numbers, and what it does becomes the table.
    """
    from treeadapt.cli.drafting import write_draft

    write_draft(**arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; ends the process with its exit code.

    Args:
        arguments: without the name of the program; None for those of the process.

    Raises:
        SystemExit: always.
    """
    argv = None if arguments is None else list(arguments)
    report = sys.unraisablehook
    sys.unraisablehook = functools.partial(_report_failure, report)
    try:
        if sys.stdout is None:
            options.Failure(
                "Standard output is closed. Open it, such as > /dev/null."
            ).show()
            sys.exit(options.UNUSABLE)
        app.main(args=argv, prog_name=options.PROGRAM)
    except OSError as error:  # of an error's own text
        sys.exit(
            options.NO_READER
            if isinstance(error, BrokenPipeError)
            else options.UNUSABLE
        )
    finally:
        sys.unraisablehook = report
        for stream in filter(None, (sys.stdout, sys.stderr)):
            _drop_unwritten(stream)


def _report_failure(report: Callable[[Any], Any], event: Any) -> None:
    """Report what failed where nothing can be raised, but for late answers to Orbax."""
    if str(event.exc_value) != "Event loop is closed":
        report(event)


def _drop_unwritten(stream: Any) -> None:
    """Send what cannot be written to nowhere; else Python tries again as it ends."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
