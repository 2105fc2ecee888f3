"""The ``treeadapt`` command.

Takes arguments, prints to standard output, and gives an exit code: 0, all is well; 1,
``lint`` found something, ``diff`` a difference, ``explain`` no rule or row; 2, the
arguments or the files cannot be used, or nothing can be printed; 130, interrupted; 141,
the reader of a pipe left. Errors are one or two lines on standard error. Only
``convert``, ``diff --values`` and ``draft`` read arrays, and only ``convert``, ``show
--output`` and ``draft --output`` write. The tree comes first everywhere; tables are
options.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from treeadapt.checkpoints import locating, save_load, url
from treeadapt.checkpoints.decoding import may_be_quantized
from treeadapt.checkpoints.leaves import stored_form
from treeadapt.checkpoints.versions import watched
from treeadapt.cli import convert_command, optimizing, options, printing, sources
from treeadapt.cli.bench import bench_rows
from treeadapt.cli.explaining import explain_row, explain_rules
from treeadapt.cli.lint import (
    CHECK,
    KINDS,
    leads_other_way,
    notes,
    planned,
    read_migration,
)
from treeadapt.migrations.group import size_bytes
from treeadapt.migrations.migration import Migration
from treeadapt.migrations.plan import MigrationPlan, selected_lines
from treeadapt.migrations.rows import unchecked_text
from treeadapt.migrations.tables.published import published, tables_of
from treeadapt.optimizers.load import OptimizerFile
from treeadapt.porting.drafts.draft import draft_migration
from treeadapt.reports.diff import TreeDiff, compared, tree_diff
from treeadapt.reports.summary import Finding, findings, habits, summarize
from treeadapt.reports.words import printable
from treeadapt.selection.decision import Decision
from treeadapt.selection.rules import Rules, load_rules
from treeadapt.text.names import fold, listing, plural
from treeadapt.trees.views import view_tree

app = options.app
Outcome = Decision | tuple[MigrationPlan, list[Finding]]


def _with_table(command: Callable[..., None]) -> Any:
    """Give a command the options of both, and what the table does to its tree.

    That is ``Decision``, or of a migration what ``planned`` returns.
    """

    @functools.wraps(command)
    def run(
        *,
        tree: str | None,
        rules: str | None,
        migration: str | None,
        target: str | None,
        given: Sequence[str],
        allow_regex: bool,
        reverse: bool,
        decode: bool,
        **others: Any,
    ) -> None:
        file = rules or migration
        if file is None:
            hint = sources.misplaced_table(tree, target)
            raise click.UsageError(f"Missing option '--rules' or '--migration'.{hint}")
        if rules is not None and migration is not None:
            raise click.UsageError("--rules and --migration: give one of the two.")
        if target is not None and migration is None:
            raise click.UsageError("A target needs --migration.")
        if tree is not None:
            _require_order(tree, file)
            _require_order(tree, others.get("path", ""), "TREE, then PATH")
        outcome: Outcome | None = None
        if rules is not None:
            table = load_rules(file, allow_regex=allow_regex)
            others["optimizers"] = optimizing.read_optimizers(
                file, given, allow_regex=allow_regex
            )
            if tree is not None:
                outcome = table.match(sources.read_tree(tree, decode=decode))
            elif not others["optimizers"].tables:
                raise click.UsageError("Missing argument 'TREE'.")
        elif given or tree is None:
            wrong = "--given needs --rules." if given else "Missing argument 'TREE'."
            raise click.UsageError(wrong)
        else:
            rows = read_migration(file, tree, target, reverse=reverse)
            source = sources.read_source(tree, decode=decode)
            trees = [source.tree, sources.read_tree(target, decode=decode)]
            outcome = planned(rows, source.stored or source.tree, trees[1])
            is_wrong = any(each.kind != CHECK for each in outcome[1])
            if target is not None and is_wrong and leads_other_way(rows, *trees):
                raise click.UsageError(
                    f"The rows lead from {target!r} to {tree!r}, not from {tree!r} to "
                    f"{target!r}; the order is TREE, then TARGET. Swap the two, or "
                    f"read the rows {'forwards' if reverse else 'with --reverse'}."
                )
        command(tree=tree, file=file, outcome=outcome, **others)

    with_options = options.given(options.with_migration(options.no_decode(run)))
    return options.with_rules(with_options)


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
def show(
    tree: str,
    rules: str | None,
    given: Sequence[str],
    form: str | None,
    depth: int | None,
    where: Sequence[str],
    mesh: str | None,
    optimizer: str | None,
    memory_kind: str | None,
    output: str | None,
    *,
    statics: bool,
    decode: bool,
    allow_regex: bool,
    force: bool,
) -> None:
    """Show paths, shapes, dtypes, sizes, labels and deciding rules of TREE.

    With --mesh, the rules give a list of mesh axes for the axes of each array, and the
    bytes that each device would hold are shown, too.
    """
    if output is not None and form is not None:
        raise options.Failure(
            "--output draws, and --format prints; give one of the two."
        )
    if output is not None:
        _require_new(output, force=force)
    if mesh is not None and rules is None:
        raise click.UsageError("--mesh needs --rules, with a list for each pattern.")
    if optimizer is not None and mesh is None:
        raise click.UsageError("--optimizer needs --mesh.")
    if given and rules is None:
        raise click.UsageError("--given needs --rules.")
    table = optimizers = None
    if rules is not None:
        _require_order(tree, rules)
        table = load_rules(rules, allow_regex=allow_regex)
        optimizers = optimizing.read_optimizers(rules, given, allow_regex=allow_regex)
        if optimizers.tables:
            optimizing.require_whole(optimizers, rules)
    if not (rules or output or form or depth or where or statics):
        file = sources.read_rules_or_migration(tree, allow_regex=allow_regex)
        if file is not None:
            _show_table(tree, file)
            return
    source = sources.read_source(tree, decode=decode)
    tx = None if optimizer is None else sources.read_optimizer(optimizer)
    if tx is None and optimizers is not None and mesh is not None:
        tx = optimizers.tx
    if memory_kind is not None and tx is None:
        raise click.UsageError("--memory-kind needs --optimizer.")
    summary = summarize(
        source.tree,
        table,
        where=list(where) or None,
        mesh=None if mesh is None else sources.read_mesh(mesh),
        tx=tx,
        memory_kind=memory_kind,
        statics=statics,
    )
    notes = list(summary.notes)
    tied = (row.path for row in summary.rows if row.path in source.ties)
    if pairs := [f"{path!r} is {source.ties[path]!r}" for path in tied]:
        shown = listing(pairs, limit=3, write=str)
        notes.append(f"Tied, and counted twice: {shown}.")
    decoded = {} if source.stored is None else source.stored.decoded
    shown_forms: dict[str, list[str]] = {}
    for row in summary.rows:
        if row.path in decoded:
            shown_forms.setdefault(decoded[row.path], []).append(row.path)
    for kind, paths in shown_forms.items():
        notes.append(f"Decoded from {kind}: {listing(fold(paths))}.")
    summary = dataclasses.replace(summary, notes=tuple(notes))
    if optimizers is not None and optimizers.tx is not None and not where:
        rows = optimizing.optimizer_rows(optimizers, source.tree, summary)
        summary = dataclasses.replace(summary, optimizers=rows)
    if output is None:
        printing.print_summary(summary, source.ties, depth, form, decoded)
    else:
        names = (url.shown(name) for name in (tree, rules) if name)
        title = " by ".join(Path(name).name for name in names)
        summary.save(output, title=title, depth=depth)
        click.echo(f"Wrote {output!r}.")


def _show_table(name: str, table: Rules | Migration) -> None:
    """Print a rules file or a migration, and how to see what it does to a tree."""
    printing.print_lines(table.to_toml())
    is_rules = isinstance(table, Rules)
    if is_rules:
        file = optimizing.read_optimizers(name, (), allow_regex=True)
        for line in optimizing.table_lines(file):
            click.echo(printable(f"# {line}"))  # so that it stays TOML
    usage = "show TREE --rules" if is_rules else "lint TREE TARGET --migration"
    click.echo(printable(f"note: what it does: treeadapt {usage} {name}"), err=True)


@options.command(
    "Check rules or a migration against a tree; for CI.",
    "lint model.safetensors --rules freeze.toml",
    "lint old.safetensors my_module:model --migration table.toml",
)
@click.argument("tree", metavar="[TREE]", type=click.Path(), required=False)
@click.argument("target", metavar="[TARGET]", type=click.Path(), required=False)
@_with_table
@click.option(
    "--ignore",
    "ignored",
    type=click.Choice(KINDS),
    multiple=True,
    help="A kind of finding to leave out; may be repeated.",
)
@options.one_of("text", "json", "github")
@options.shared
def lint(
    tree: str | None,
    file: str,
    outcome: Outcome | None,
    ignored: Sequence[str],
    form: str | None,
    optimizers: OptimizerFile | None = None,
) -> None:
    """Check rules, or a migration, against TREE: exit code 1 if anything is wrong.

    Finds leaves without a rule, rules that match nothing or are unreachable, overlaps
    that they refuse. With --migration, finds all that keeps TREE from becoming one like
    TARGET and back, and notes what shapes cannot show. Of optimizers in a rules file,
    all that is wrong, and with TREE also masks that reach nothing and what one step
    raises; without TREE only these are checked. As "github", findings are annotations
    of the file in a pull request.
    """
    faults: list[Finding] = []
    hints: list[str] = []
    among, params = "the tables", None
    if isinstance(outcome, Decision):
        faults, hints = [*findings(outcome)], habits(outcome)
        params = outcome.stored.tree
        among = plural(sum(outcome.is_array), "array")
    elif outcome is not None:
        plan, faults = outcome
        among = plural(len(plan.source), "array")
        hints = [] if faults else [*notes(plan)]
    if optimizers is not None:
        fits = not faults
        faults += optimizing.optimizer_findings(optimizers, params, fits=fits)
        hints += optimizing.optimizer_notes(optimizers, params)
    left_out = Counter(each.kind for each in faults if each.kind in ignored)
    faults = [each for each in faults if each.kind not in ignored]
    if form == "json":
        printing.print_json([dataclasses.asdict(each) for each in faults])
    elif form == "github":
        printing.print_annotations(faults, file)
    else:
        printing.print_findings(faults, left_out, among)
        for hint in hints:
            click.echo(f"note: {printable(hint)}")
    if faults:
        sys.exit(1)


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
def diff(
    a: str,
    b: str,
    where: Sequence[str],
    form: str | None,
    *,
    values: bool,
    decode: bool,
) -> None:
    """Say how the trees A and B differ: exit code 1 if they do.

    Added, removed, renamed (same shape, similar name), reshaped and retyped leaves,
    whatever the formats.
    """
    pair = sources.read_pair(a, b, decode=decode)
    difference = _differences((a, b), pair, list(where) or "**", values=values)
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


def _differences(
    names: Sequence[str],
    trees: Sequence[sources.AbstractTree],
    where: Any,
    *,
    values: bool,
) -> TreeDiff:
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


@options.command(
    "Say which rule or row decides a leaf.",
    "explain model.safetensors h/3/attn/kernel --rules freeze.toml",
    "explain old.safetensors lm_head.weight --migration table.toml",
)
@options.tree
@click.argument("path", metavar="PATH")
@_with_table
@options.target
@options.shared
def explain(
    tree: str,
    path: str,
    file: str,
    outcome: Outcome,
    optimizers: OptimizerFile | None = None,
) -> None:
    """Say which rules match the leaf of TREE at PATH: exit code 1 if none does.

    With --migration, say which row moves the leaf at PATH, of TREE or of what it
    becomes, with its captures and sizes.
    """
    is_matched = (
        explain_rules(tree, path, outcome, optimizers)
        if isinstance(outcome, Decision)
        else explain_row(tree, path, outcome[0])
    )
    if not is_matched:
        sys.exit(1)


@options.command(
    "List the published tables.",
    "tables",
    "tables tunix",
)
@click.argument("layout", metavar="[LAYOUT]", required=False)
@options.shared
def tables(layout: str | None) -> None:
    """List the published tables, of LAYOUT alone if it is named.

    A table moves published weights into the model of another library, and back: name it
    as --migration LAYOUT/TYPE, or LAYOUT where a config.json is next to the weights.
    """
    chosen = [*published().values()] if layout is None else [tables_of(layout)]
    every = dict.fromkeys(table for types in chosen for table in types.values())
    rows = [(one.name, one.oracle, ", ".join(one.model_types)) for one in every]
    printing.print_table(("table", "compared with", "model types"), rows)


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
def convert(
    source: str,
    destination: str,
    migrations: Sequence[str],
    target: str | None,
    like: str | None,
    max_shard_bytes: int | None,
    *,
    reverse: bool,
    decode: bool,
    dry_run: bool,
    force: bool,
) -> None:
    """Write the checkpoint SRC as DST, in the format that its ending says.

    DST without an ending is an Orbax folder, and .schema.toml all but the arrays: then
    SRC may be module:function. DST is written under another name and put in place once
    it is whole. With --migration, leaves get new names and axes; SRC is read one group
    at a time. What is written is in memory until all of it is there, or with
    --max-shard-bytes one shard of it. With --like, the files of FOLDER that are not
    weights are copied next to what is written, and none there is replaced; DST without
    an ending is then a folder of safetensors, unless FOLDER is an Orbax folder.
    """
    if not migrations and (reverse or target is not None):
        raise click.UsageError("--reverse and --target need --migration.")
    if sources.names_function(destination):
        raise click.UsageError(
            f"DST {destination!r} is code, not the name of a file. What the result "
            f"should fit is --target {destination}."
        )
    _require_order(source, destination, "SRC, then DST")
    _require_new(destination, force=force)
    form = locating.format_of(destination, writing=True)
    if like is not None and form == "orbax" and max_shard_bytes is None:
        max_shard_bytes = convert_command.published_shard_bytes(like)
    needs_arrays = form != "schema" or max_shard_bytes is not None
    folder, rest = Path(destination), None
    if like is not None:
        if not needs_arrays:
            text = "--like needs a DST with arrays, and this is a schema."
            raise click.UsageError(text)
        if form == "safetensors" and max_shard_bytes is None:
            folder = folder.parent
        rest = convert_command.other_files(like, folder, Path(destination))
    if sources.names_function(source) and not migrations and not needs_arrays:
        tree = sources.read_tree(source, decode=decode)
        forms = map(stored_form, view_tree(tree).leaves)
        num_leaves = sum(stored is not None for stored in forms)
        if not dry_run:
            save_load.save(destination, tree)
    else:
        stored = sources.read_checkpoint(source, decode=decode)
        if needs_arrays:
            stored.require_arrays()
        if like is not None and not decode and may_be_quantized(stored):
            raise options.Failure(
                "--like copies a config.json for plain weights, and --no-decode writes "
                "codes and scales. Leave one of the two out."
            )
        table = likes = original = None
        if target is not None:
            fitted = sources.read_source(target, decode=decode)
            likes = fitted.tree
            if fitted.stored is not None and fitted.stored.format != "schema":
                original = fitted.stored  # a schema has no arrays
        written: Mapping[str, Any] = stored.leaves
        if migrations:
            file, table, plan = convert_command.fitting_migration(
                migrations, stored, likes, (like, source), reverse=reverse
            )
            if len(migrations) > 1:
                click.echo(f"{file!r} fits.")
            if table.origin:
                click.echo(printable(f"The rows are {table.origin}."))
            written = plan.result
            for text in (unchecked_text(plan.rows), *selected_lines(plan)):
                if text:
                    options.show_warning(text)
            if dry_run:
                printing.print_lines("\n".join(map(printable, str(plan).splitlines())))
        if not dry_run:
            sizes = {path: size_bytes(leaf) for path, leaf in written.items()}
            with printing.bar(f"Writing {destination}", sum(sizes.values())) as shown:
                save_load.copy(
                    source,
                    destination,
                    migration=table,
                    target=likes,
                    original=original,
                    max_shard_bytes=max_shard_bytes,
                    decode=decode,
                    progress=lambda path: shown.update(sizes.get(path, 0)),
                )
        num_leaves = len(written)
        if rest is not None:
            rest = rest.for_plain_weights(written)
    done = "Would write" if dry_run else "Wrote"
    click.echo(f"{done} {plural(num_leaves, 'leaf')} to {destination!r}.")
    if rest is not None and like is not None:
        if not dry_run:
            convert_command.copy_files(rest, folder)
        for line in rest.lines(like, "Would copy" if dry_run else "Copied"):
            click.echo(printable(line))


@options.command(
    "Measure on this machine.",
    "bench",
    "bench model.safetensors --rules freeze.toml",
)
@click.argument("tree", metavar="[TREE]", type=click.Path(), required=False)
@options.with_rules
@options.no_decode
@options.shared
def bench(
    tree: str | None, rules: str | None, *, allow_regex: bool, decode: bool
) -> None:
    """Measure TREE on this machine: milliseconds, and times jax.tree.flatten.

    Without TREE, made-up trees of three sizes are measured. Other libraries that are
    installed and flatten the same tree to as many leaves are measured, too.
    """
    if rules is not None and tree is None:
        raise click.UsageError("--rules needs a TREE.")
    if rules is not None:
        _require_order(tree or "", rules)
    table = load_rules(rules, allow_regex=allow_regex) if rules else None
    measured = None if tree is None else sources.read_tree(tree, decode=decode)
    printing.print_table(("call", "leaves", "ms", "ratio"), bench_rows(measured, table))


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
@options.shared
def draft(
    source: str,
    target: str | None,
    convert: str | None,
    output: str | None,
    synonyms: str | None,
    *,
    decode: bool,
    force: bool,
) -> None:
    """Write the first version of a migration that turns SRC into TARGET.

    Where both hold the same numbers, as a small model and what it should become, they
    show every row. Otherwise names and shapes are paired, and each such row is marked,
    check = "names". The exit code is 0 with such marks and gaps, too: lint says
    what is missing. With --convert, that function is imported and called with
    distinct numbers, and what it does becomes the table.
    """
    if target is None and convert is None:
        raise click.UsageError("Name a TARGET, or --convert, a function that gives it.")
    if output is not None:
        _require_new(output, force=force)
    old, new = (
        sources.read_tree(text) if text and sources.names_function(text) else text
        for text in (source, target)
    )
    function = None if convert is None else sources.read_function(convert)
    drafted = draft_migration(
        old, new, convert=function, synonyms=synonyms, decode=decode
    )
    if output is None:
        click.echo(drafted.to_toml(), nl=False)
        return
    Path(output).write_text(drafted.to_toml(), "utf-8")
    printing.print_lines("\n".join(map(printable, drafted.summary.splitlines())))
    click.echo(f"Wrote {output!r}.")


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


def _require_order(
    tree: str, other: str, order: str = "TREE, and the file after its option"
) -> None:
    if other and sources.names_tree(other) and not sources.names_tree(tree):
        raise click.UsageError(
            f"{tree!r} is not a tree, and {other!r} is; the order is {order}."
            f"{'' if Path(tree).exists() else locating.near_name(Path(tree))}"
        )


def _require_new(target: str, *, force: bool) -> None:
    if Path(target).exists() and not force:
        raise options.Failure(
            f"{target!r} exists and is not replaced; --force replaces it."
        )
