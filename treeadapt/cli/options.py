"""What all commands share: the group, its errors, and options.

An error is one or two lines on standard error, whatever was raised; ``Failure`` is one.
Options that several commands have are decorators here. See ``commands`` for these.
Imports neither JAX nor NumPy, as no help or completion needs them.
"""

from __future__ import annotations

import contextlib
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from treeadapt._version import __version__
from treeadapt.errors import TreeAdaptError
from treeadapt.reports.words import printable
from treeadapt.text.names import listing
from treeadapt.text.wording import command_words

PROGRAM = "treeadapt"
ONE_WAY = "one-way"
CHECK = "check"
OPTIMIZER = "optimizer"
#: What keeps no table from running: no way back, or nobody compared the answers.
MILD = (ONE_WAY, CHECK)
_OF_RULES = ("unmatched", "overlap", "unused", "shadowed", "alternative")
KINDS = (*_OF_RULES, "count", *MILD, "retyped", OPTIMIZER)  # of findings
UNUSABLE, _INTERRUPTED, NO_READER = 2, 130, 141  # the last two are 128 and the signal
_Help = click.exceptions.NoArgsIsHelpError
_HELP = """Names, labels and checks of every leaf of a checkpoint or model.

\b
See what is in it, and what rules do to it:
  treeadapt show model.safetensors
  treeadapt show model.safetensors --rules freeze.toml
Check rules, tables and models before they cost a run:
  treeadapt lint model.safetensors --rules freeze.toml
  treeadapt diff old.safetensors new.safetensors
  treeadapt compare Qwen3-8B my_module:init
Bring a checkpoint under other names:
  treeadapt draft old.safetensors my_module:model
  treeadapt convert old.safetensors new.safetensors \\
      --migration table.toml

Exit codes: 0 all is well; 1 lint found something, diff a difference, compare what does
not load, explain no rule or row; 2 the arguments or files cannot be used; 130
interrupted; 141 the reader of a pipe left.

TREE is a .safetensors, .npz, Flax .msgpack or PyTorch file (.bin, .pt, .pth), a folder
of safetensors as Hugging Face has it, an Orbax folder, a schema (.schema.toml), a URL,
module:function, which is run by jax.eval_shape, or module:model."""
# What people call a command -> what it is called here.
_MEANT = {
    "check validate verify": "lint",
    "inspect info list ls print summarize summary tree view": "show",
    "copy export migrate rename save": "convert",
    "which why": "explain",
    "load": "compare",
}
# Options that other programs have for the names of what is read and written.
_OF_NAMES = ("--from", "--to", "--input", "--in", "--out", "--source", "--src")
_WIDTH = 58  # of a line that is not filled again; narrow terminals have 60 columns


class Failure(click.ClickException):
    """An error in one or two lines."""

    def __init__(self, message: str, exit_code: int = UNUSABLE):
        super().__init__(message)
        self.exit_code = exit_code

    def show(self, file: Any = None) -> None:
        """Print it on standard error."""
        lines = [printable(line) for line in self.message.splitlines()[:2]]
        text = f"{click.style('error:', fg='red')} " + "\n".join(lines)
        click.echo(text, err=True, color=self.show_color)


class _Command(click.Command):
    """A command whose advice names only what it has."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run it."""
        names = (
            name
            for parameter in self.params
            for name in (*parameter.opts, str(getattr(parameter, "metavar", None)))
        )
        with command_words({name.strip("[].") for name in names}):
            return super().invoke(ctx)


class _ShortErrorGroup(click.Group):
    """Commands whose errors are short and show no traceback."""

    command_class = _Command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Find the command; propose ``show`` for what is a tree, or a synonym."""
        name = args[0]
        if name not in self.commands and ({*"./:"} & {*name} or Path(name).exists()):
            raise Failure(
                f"{listing([name])} is not a command. To see what is in it:\n"
                f"treeadapt show {printable(' '.join(args))}"
            )
        for words, meant in _MEANT.items():
            if name in words.split():
                ctx.fail(f"No such command {name!r}. Did you mean {meant!r}?")
        return super().resolve_command(ctx, args)

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Read the options before the command."""
        with command_words(), _short_errors():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        with command_words(), _short_errors(), warnings.catch_warnings():
            warnings.showwarning = show_warning
            return super().invoke(ctx)


@contextlib.contextmanager
def _short_errors() -> Iterator[None]:
    """Turn whatever is raised inside into a ``Failure``."""
    try:
        yield
    except (Failure, _Help, click.exceptions.Exit, click.Abort):
        raise
    except BrokenPipeError as error:
        raise click.exceptions.Exit(NO_READER) from error
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else PROGRAM
        wording = " ".join(error.format_message().split())
        typed = error.ctx.params if error.ctx else {}
        if isinstance(error, click.NoSuchOption) and command == PROGRAM:
            wording += " Options follow the command: treeadapt show TREE --rules FILE"
        elif isinstance(error, click.NoSuchOption) and error.option_name in _OF_NAMES:
            names = " ".join(error.ctx.command.collect_usage_pieces(error.ctx)[1:])
            wording = f"No such option {error.option_name!r}. Names come without one: "
            wording += f"{command} {names}"
        elif isinstance(error, click.NoSuchOption):
            wording += _others_with(error.option_name)
        elif "unexpected extra argument" in wording and ".toml" in f"{wording}{typed}":
            wording += ". A rules file comes after --rules, a table after --migration."
        raise Failure(f"{wording}\nTry '{command} --help'.") from error
    except TreeAdaptError as error:
        raise Failure(str(error)) from error
    except KeyboardInterrupt as error:
        raise Failure("Interrupted.", _INTERRUPTED) from error
    except Exception as error:
        wording = " ".join(str(error).split())[:300]
        raise Failure(f"{type(error).__name__}: {wording}") from error


def _others_with(option: str) -> str:
    """Return a sentence with the commands that have an option; empty if none does."""
    having = [
        name
        for name, command in sorted(app.commands.items())
        if any(option in parameter.opts for parameter in command.params)
    ]
    return f" These commands have it: {', '.join(having)}." if having else ""


def show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning in one line on standard error."""
    text = printable(" ".join(str(message).split())[:300])
    click.echo(f"{click.style('warning:', fg='yellow')} {text}", err=True)


class _AnyText(click.types.BoolParamType):
    """Any text that is not empty, as NO_COLOR asks; see no-color.org."""

    def convert(self, value: Any, *_: Any) -> bool:
        """Return whether there is any text."""
        return bool(value)


class Size(click.ParamType):
    """A number of bytes, as a whole number or with a unit: 5GB, 500MB, 2GiB."""

    name = "size"

    def convert(self, value: Any, *where: Any) -> int:
        """Return the number of bytes."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kKMGT]?)(i?)[bB]?", str(value))
        if match is None:
            fault = f"{value!r} is not a size. Write 5GB, 500MB or 2GiB."
            return int(self.fail(fault, *where))  # it raises
        scale = (1_024 if match[3] else 1_000) ** " KMGT".index(match[2].upper() or " ")
        if not 1 <= (size_bytes := int(float(match[1]) * scale)) < 2**63:
            self.fail(f"{value!r} is not a size of 1 byte or more.", *where)
        return size_bytes


def _no_color(context: click.Context, _parameter: Any, value: object) -> None:
    if value:
        context.find_root().color = context.color = False


shared = click.option(
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
)


def text(name: str, metavar: str, help_text: str) -> Callable[..., Any]:
    """Give a command an option with a text; as a path, the shell completes it."""
    return click.option(name, metavar=metavar, type=click.Path(), help=help_text)


def flag(name: str, help_text: str) -> Callable[..., Any]:
    """Give a command an option without a value."""
    return click.option(name, is_flag=True, help=help_text)


def with_rules(command: Any) -> Any:
    """Give a command the two options of a rules file."""
    regex = flag("--allow-regex", "Accept re: patterns; only in a file you trust.")
    return text("--rules", "FILE", "A rules file, .toml or .json.")(regex(command))


given = click.option(
    "--given",
    metavar="NAME=VALUE",
    multiple=True,
    help="A value that optimizers of the rules file need; may be repeated.",
)


def with_migration(command: Any) -> Any:
    """Give a command the two options of a migration file."""
    reverse = flag("--reverse", "Read the rows of the migration backwards.")
    file = text(
        "--migration", "TABLE", "A migration file, or a published table: see tables."
    )
    return file(reverse(command))


target = text(
    "--target",
    "TREE",
    "What the migrated tree should fit: solves sizes, and fills [new].",
)


no_decode = click.option(
    "--no-decode",
    "decode",
    is_flag=True,
    flag_value=False,
    default=True,
    help="Codes and scales of quantised arrays as they are stored.",
)


def with_table(command: Any) -> Any:
    """Give a command the options of a table, rules or a migration, and of its tree."""
    return with_rules(given(with_migration(no_decode(command))))


def one_of(*forms: str) -> Callable[..., Any]:
    """Give a command ``--format``; without it, the form is the first."""
    return click.option("--format", "form", type=click.Choice(forms))


def patterns(name: str, what: str) -> Callable[..., Any]:
    """Give a command an option that selects leaves."""
    several = f"{what}; several are united, less those that start with !."
    return click.option(name, "where", metavar="PATTERN", multiple=True, help=several)


tree = click.argument("tree", metavar="TREE", type=click.Path())


@click.group(
    cls=_ShortErrorGroup,
    help=_HELP,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name=PROGRAM)
@shared
def app() -> None:
    """Hold the commands."""


def command(short_help: str, *examples: str) -> Callable[..., Any]:
    """Make a function a command, with examples at the end of its help."""
    lines = ["\b", "Examples:"]
    for each in examples:
        # As a shell takes it from here, too.
        parts = textwrap.wrap(f"treeadapt {each}", _WIDTH - 8, break_long_words=False)
        lines.append("  " + " \\\n      ".join(parts))
    return app.command(short_help=short_help, epilog="\n".join(lines))


def require_new(target: str, *, force: bool) -> None:
    """Raise if a file exists that may not be replaced.

    Raises:
        Failure: it does.
    """
    if Path(target).exists() and not force:
        raise Failure(f"{target!r} exists and is not replaced; --force replaces it.")
