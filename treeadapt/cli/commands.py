"""The ``treeadapt`` command.

Takes arguments, prints to standard output, and gives an exit code: 0, all is well; 1,
``lint`` found something, ``diff`` a difference, ``explain`` no rule; 2, the arguments
or the files are of no use; 130, interrupted. Errors are one or two lines on standard
error. Only ``convert`` and ``diff --values`` read arrays, and only ``convert`` and
``show --output`` write.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click.shell_completion import get_completion_class

from treeadapt._version import __version__
from treeadapt.checkpoints import store
from treeadapt.cli import bench as _bench
from treeadapt.cli import lint as _lint
from treeadapt.cli import printing
from treeadapt.cli.progress import progress
from treeadapt.cli.sources import read_arrays, read_source, read_stored
from treeadapt.diff import tree_diff
from treeadapt.drawing.words import printable
from treeadapt.errors import SelectorError, TreeAdaptError, plural
from treeadapt.matches import MISSING, RuleMatches
from treeadapt.plans import view_tree
from treeadapt.report import Summary, natural, summarize
from treeadapt.rules import Rules, load_rules
from treeadapt.selectors import select

PROGRAM = "treeadapt"
_EXIT_CODES = """\b
Exit codes: 0 all is well; 1 lint found something, diff a difference, explain
no rule; 2 the arguments or files are of no use; 130 interrupted.
\b
TREE is a .safetensors, .npz or Flax .msgpack file, an Orbax folder, or
module:function, which is run by jax.eval_shape."""


class _Failure(click.ClickException):
    """An error in one or two lines."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        lines = [printable(line) for line in self.message.splitlines()[:2]]
        text = f"{click.style('error:', fg='red')} " + "\n".join(lines)
        click.echo(text, err=True, color=self.show_color)


class _Group(click.Group):
    """Commands whose errors are short."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Read the options before the command."""
        try:
            return super().make_context(*args, **kwargs)
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.UsageError as error:
            raise _misused(error) from error

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; no error of it shows a traceback."""
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _show_warning
                return super().invoke(ctx)
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.UsageError as error:
            raise _misused(error) from error
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except TreeAdaptError as error:
            raise _Failure(str(error)) from error
        except BrokenPipeError:
            raise
        except KeyboardInterrupt as error:
            raise _interrupted() from error
        except Exception as error:
            told = " ".join(str(error).split())[:300]
            raise _Failure(f"{type(error).__name__}: {told}") from error


def _interrupted() -> _Failure:
    failure = _Failure("Interrupted.")
    failure.exit_code = 130  # as of a shell's own commands
    return failure


def _misused(error: click.UsageError) -> _Failure:
    """Return a wrong use in two lines, without the line that repeats the usage."""
    command = error.ctx.command_path if error.ctx else PROGRAM
    told = " ".join(error.format_message().split())
    return _Failure(f"{told}\nTry '{command} --help'.")


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    text = printable(" ".join(str(message).split())[:300])
    click.echo(f"{click.style('warning:', fg='yellow')} {text}", err=True)


class _AnyText(click.types.BoolParamType):
    """Whatever text is not empty, as NO_COLOR asks; see no-color.org."""

    def convert(self, value: Any, *_: Any) -> bool:
        """Return whether there is any text."""
        return bool(value)


def _no_color(context: click.Context, _parameter: Any, value: object) -> None:
    if value:
        context.find_root().color = context.color = False


def _shared(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that all have."""
    return click.option(
        "--no-color",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_no_color,
        type=_AnyText(),
        default=False,
        flag_value=True,
        envvar="NO_COLOR",
        help="Plain text, as when piped or where NO_COLOR is set.",
    )(command)


# Any text will do; as a path, the shell completes it.
_tree = click.argument("tree", metavar="TREE", type=click.Path())
_rules = click.argument("rules", metavar="RULES", type=click.Path())
_allow_regex = click.option(
    "--allow-regex", is_flag=True, help="Accept re: patterns; only in a file you trust."
)


@click.group(
    cls=_Group,
    help=f"Names, labels and checks of every leaf of a checkpoint.\n\n{_EXIT_CODES}",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name=PROGRAM)
@_shared
def app() -> None:
    """Hold the commands."""


@app.command(short_help="Show or draw paths, sizes and labels.")
@_tree
@click.option(
    "--rules", metavar="FILE", type=click.Path(), help="Show what these rules decide."
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "tree", "json", "csv"]),
    help="How to print; a tree is folded to what fits.",
)
@click.option("--depth", type=click.IntRange(min=1), help="Add up below this depth.")
@click.option("--filter", "where", metavar="PATTERN", help="Only what this selects.")
@click.option(
    "--output",
    metavar="FILE",
    type=click.Path(),
    help="Draw it, as .svg or .html, and print nothing else.",
)
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@_allow_regex
@_shared
def show(
    tree: str,
    rules: str | None,
    form: str | None,
    depth: int | None,
    where: str | None,
    output: str | None,
    *,
    force: bool,
    allow_regex: bool,
) -> None:
    """Show paths, shapes, dtypes, sizes, labels and deciding rules of TREE."""
    if output is not None and form is not None:
        raise _Failure("--output draws, and --format prints; give one of the two.")
    table = None if rules is None else _read_rules(rules, allow_regex=allow_regex)
    if output is not None:
        _require_new(output, force=force)
    source = read_source(tree)
    summary = summarize(source.tree, table, where=where)
    if source.ties and (output is not None or form == "tree"):
        notes = (*summary.notes, *_tied_notes(summary, source.ties))
        summary = dataclasses.replace(summary, notes=notes)
    if output is not None:
        told = [Path(tree).name, *([] if rules is None else [Path(rules).name])]
        summary.save(output, title=" by ".join(told), depth=depth)
        click.echo(f"Wrote {output!r}.")
        return
    view = view_tree(source.tree)
    decided = _rule_texts(table.match(view)) if table else {}
    shown = {row.path for row in summary.rows}
    ties = {path: one for path, one in source.ties.items() if path in shown}
    if form == "tree":
        printing.print_tree(summary, depth)
    elif depth is not None:
        _SUMS[form](summary, depth)
    elif form == "json":
        printing.print_leaves_json(summary, decided, ties)
    elif form == "csv":
        printing.print_leaves_csv(summary, decided, ties)
    else:
        printing.print_leaves(summary, ties)


_SUMS = {
    None: printing.print_sums,
    "table": printing.print_sums,
    "json": printing.print_sums_json,
    "csv": printing.print_sums_csv,
}


@app.command(short_help="Print labels as JSON.")
@_rules
@_tree
@_allow_regex
@_shared
def labels(rules: str, tree: str, *, allow_regex: bool) -> None:
    """Print the label of every leaf of TREE, as JSON."""
    matches = _read_rules(rules, allow_regex=allow_regex).match(read_source(tree).tree)
    found = matches.check().labels()
    pairs = zip(matches.paths, map(printing.as_data, found), strict=True)
    printing.print_json(dict(sorted(pairs, key=lambda pair: natural(pair[0]))))


@app.command(short_help="Print what patterns select, as JSON.")
@_tree
@click.argument("patterns", metavar="PATTERN...", nargs=-1, required=True)
@_shared
def mask(tree: str, patterns: Sequence[str]) -> None:
    """Print which leaves of TREE the PATTERNs select, as JSON.

    Several are united, less those that start with "!".
    """
    view = view_tree(read_source(tree).tree)
    found = select(view, list(patterns))
    pairs = zip(view.plan.paths, found, strict=True)
    printing.print_json(dict(sorted(pairs, key=lambda pair: natural(pair[0]))))


@app.command(short_help="Check rules against a tree; for CI.")
@_rules
@_tree
@click.option(
    "--ignore",
    "ignored",
    type=click.Choice(_lint.KINDS),
    multiple=True,
    help="A kind of finding that is no matter; may be repeated.",
)
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text")
@_allow_regex
@_shared
def lint(
    rules: str, tree: str, ignored: Sequence[str], form: str, *, allow_regex: bool
) -> None:
    """Check RULES against TREE: exit code 1 if anything is wrong.

    Finds leaves without a rule, rules that hit nothing or come too late, and rules that
    match in some but not all of numbered layers.
    """
    matches = _read_rules(rules, allow_regex=allow_regex).match(read_source(tree).tree)
    every = _lint.findings(matches)
    found = [each for each in every if each.kind not in ignored]
    left_out = Counter(each.kind for each in every if each.kind in ignored)
    if form == "json":
        printing.print_json([dataclasses.asdict(each) for each in found])
    else:
        printing.print_findings(found, left_out, sum(matches.is_array))
    if found:
        click.get_current_context().exit(1)


@app.command(short_help="Tell how two trees differ.")
@click.argument("a", metavar="A", type=click.Path())
@click.argument("b", metavar="B", type=click.Path())
@click.option("--where", metavar="PATTERN", default="**", help="What to compare.")
@click.option("--values", is_flag=True, help="Compare values, too; reads all arrays.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text")
@_shared
def diff(a: str, b: str, where: str, form: str, *, values: bool) -> None:
    """Tell how the trees A and B differ: exit code 1 if they do.

    Added, removed, renamed (same shape, similar name), reshaped and retyped leaves,
    whatever the formats.
    """
    one, two = (read_arrays(x) if values else read_source(x).tree for x in (a, b))
    found = tree_diff(one, two, where=where, values=values)
    if form == "json":
        told = [dataclasses.asdict(each) for each in found]
        content = {"values_compared": values, "differences": told}
        printing.print_json(content)
    else:
        printing.print_diff(found)
    if found:
        click.get_current_context().exit(1)


@app.command(short_help="Write a checkpoint in another format.")
@click.argument("source", metavar="IN", type=click.Path())
@click.argument("target", metavar="OUT", type=click.Path())
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@click.option("--format", "form", type=click.Choice(store.WRITTEN))
@_shared
def convert(source: str, target: str, form: Any, *, force: bool) -> None:
    """Write the checkpoint IN as OUT, in the format that its ending says.

    OUT without an ending is an Orbax folder. It is written under another name and put
    in place once it is whole.
    """
    _require_new(target, force=force)
    num_leaves = len(read_stored(source).leaves)
    with progress(f"Writing {target}", num_leaves) as step:
        store.copy(source, target, format=form, progress=lambda _: step())
    click.echo(f"Wrote {plural(num_leaves, 'leaf')} to {target!r}.")


@app.command(short_help="Tell which rule decides a path.")
@_rules
@click.argument("path", metavar="PATH")
@click.option(
    "--tree",
    metavar="TREE",
    type=click.Path(),
    help="For rules that ask for more than names.",
)
@_allow_regex
@_shared
def explain(rules: str, path: str, tree: str | None, *, allow_regex: bool) -> None:
    """Tell which RULES match a leaf at PATH, and which decides: code 1 if none does."""
    table = _read_rules(rules, allow_regex=allow_regex)
    answers = _answers(table, path, tree)
    first = answers.index(True) if True in answers else -1
    printing.print_verdicts(table, answers, first)
    if first >= 0:
        click.echo(f"{path!r} gets {table.values[first]!r}.")
    elif table.default is not MISSING:
        click.echo(f"{path!r} gets the default, {table.default!r}.")
    else:
        click.echo(f"{path!r} is matched by no rule.")
        click.get_current_context().exit(1)


@app.command(short_help="Measure on this machine.")
@_shared
def bench() -> None:
    """Measure on this machine: milliseconds, and times jax.tree.flatten."""
    cells = [
        (name, f"{leaves:,}", f"{elapsed_ms:.3f}", f"{ratio:.1f}")
        for name, leaves, elapsed_ms, ratio in _bench.bench_rows()
    ]
    printing.print_table(("call", "leaves", "ms", "ratio"), cells)


@app.command(short_help="Print a shell's completion script.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@_shared
def completion(shell: str) -> None:
    """Print the completion script: eval "$(treeadapt completion bash)"."""
    kind = get_completion_class(shell)
    if kind is None:
        raise _Failure(f"There is no completion for {shell}.")
    variable = f"_{PROGRAM.upper()}_COMPLETE"
    click.echo(kind(app, {}, PROGRAM, variable).source())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; ends the process with its exit code.

    Args:
        arguments: without the name of the program; None for those of the process.

    Raises:
        SystemExit: always.
    """
    app.main(args=None if arguments is None else list(arguments), prog_name=PROGRAM)


def _answers(table: Rules, path: str, tree: str | None) -> list[bool]:
    """Tell for each rule whether it matches a leaf at one path."""
    if tree is None:
        try:
            return [where.matches(path) for where in table.selectors]
        except SelectorError as error:
            raise _Failure(f"{error} Here: --tree TREE.".replace("\n", " ")) from error
    view = view_tree(read_source(tree).tree)
    if path not in view.plan.paths:
        raise _Failure(f"{tree!r} has no leaf {path!r}.")
    place = view.plan.paths.index(path)
    return [select(view, w, unused="ignore")[place] for w in table.selectors]


def _read_rules(name: str, *, allow_regex: bool) -> Rules:
    if not Path(name).exists():
        raise _Failure(f"There is no rules file {name!r}.")
    if Path(name).is_dir() or Path(name).suffix.removeprefix(".") in store.FORMATS:
        raise _Failure(
            f"{name!r} is no rules file, but a checkpoint or a folder. A rules file is "
            "a .toml or .json file, and stands before the tree."
        )
    return load_rules(name, allow_regex=allow_regex)


def _require_new(target: str, *, force: bool) -> None:
    if Path(target).exists() and not force:
        raise _Failure(f"{target!r} exists and is not replaced; --force replaces it.")


def _tied_notes(summary: Summary, ties: Mapping[str, str]) -> list[str]:
    shown = [row.path for row in summary.rows if row.path in ties]
    told = ", ".join(f"{path!r} is {ties[path]!r}" for path in shown[:3])
    more = f" and {len(shown) - 3:,} more" if len(shown) > 3 else ""
    return [f"Tied, and counted twice: {told}{more}."] if shown else []


def _rule_texts(matches: RuleMatches) -> dict[str, str]:
    return {path: matches.rule_text(i) for i, path in enumerate(matches.paths)}
