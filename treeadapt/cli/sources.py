"""What the command line takes for a tree, for a mesh and for an optimizer.

Takes the text of an argument; gives an abstract tree, no array loaded or made. A
checkpoint is read as data. ``module:function`` imports code, and then runs the function
under ``jax.eval_shape``; ``module:model`` and ``module:tx`` import a tree and an
optimizer: all are the user's own, as with ``python -m``. A mesh is abstract, so that no
device is needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import click
import jax
from jax.sharding import AbstractMesh

from treeadapt.checkpoints import locating, opening, reading
from treeadapt.checkpoints.errors import reported
from treeadapt.checkpoints.leaves import may_be_tied, restored_form, stored_form
from treeadapt.checkpoints.record import NUMBER, Stored
from treeadapt.checkpoints.schema_file import ENDING
from treeadapt.checkpoints.shard_index import ending_of_shards
from treeadapt.checkpoints.url import is_url, shown
from treeadapt.cli.printing import bar
from treeadapt.errors import (
    CheckpointError,
    MigrationError,
    ShardingError,
    TransformError,
    TreeAdaptError,
)
from treeadapt.migrations.group import size_bytes
from treeadapt.migrations.loading import load_migration
from treeadapt.migrations.migration import Migration
from treeadapt.migrations.tables.published import is_name, published, tables_named
from treeadapt.reports.words import printable
from treeadapt.selection.rules import Rules, load_rules
from treeadapt.text.data_files import DataFile, one_line
from treeadapt.text.names import Speller, listing, plural
from treeadapt.text.wording import offered
from treeadapt.transforms.adapt import is_transformation
from treeadapt.trees.arrays import is_array
from treeadapt.trees.paths import as_tree
from treeadapt.trees.views import TreeView, view_tree

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*(?<!\.py):[A-Za-z_][\w.]*")
_AXIS = re.compile(r"\s*([^=,]*[^=,\s])\s*=\s*([1-9][0-9]{0,8})\s*")
_FILE = re.compile(r"(?P<file>.*)\.py(:(?P<name>[A-Za-z_][\w.]*)?)?", re.DOTALL)
_MODEL = re.compile(r"([\w.-]+/)?[\w.-]+")  # on the Hugging Face hub
_TABLES = (".toml", ".json")
_ANY_TABLE = DataFile(
    "rules or migration", TreeAdaptError, "[rules]", '"encoder" = "frozen"'
)


@dataclasses.dataclass(frozen=True)
class AbstractTree:
    """An abstract tree, and which of its leaves are others.

    Attributes:
        tree: leaves are ``jax.ShapeDtypeStruct`` and static leaves.
        ties: path, and the path whose leaf it is.
        stored: what was read of a checkpoint; None for a function.
    """

    tree: Any
    ties: Mapping[str, str]
    stored: Stored | None = None


def read_source(text: str, *, decode: bool = True) -> AbstractTree:
    """Read a tree, abstractly.

    Args:
        text: name of a checkpoint, ``module:function``, or ``module:model``.
        decode: as for ``load``.

    Raises:
        CheckpointError: there is no such checkpoint, or it cannot be read.
        TreeAdaptError: the function or model cannot be found, or the function fails.
    """
    if names_function(text):
        return _traced(text)
    stored = read_checkpoint(text, decode=decode)
    return AbstractTree(as_tree(stored.leaves), stored.ties, stored)


def read_tree(text: str | None, *, decode: bool = True) -> Any:
    """Read a tree alone, abstractly; None for no text.

    Raises:
        CheckpointError, TreeAdaptError: as for ``read_source``.
    """
    return None if text is None else read_source(text, decode=decode).tree


def read_pair(
    a: str, b: str, *, decode: bool = True
) -> tuple[AbstractTree, AbstractTree]:
    """Read two trees abstractly, in one form.

    What is in boxes has the names of the other tree. Next to a checkpoint, a function's
    tree is what ``save`` stores of it: no functions and texts, and the Python numbers
    that the checkpoint has.

    Args:
        a: name of a checkpoint, or ``module:function``.
        b: the same.
        decode: as for ``load``.

    Raises:
        CheckpointError: there is no such checkpoint, or it cannot be read.
        TreeAdaptError: a function cannot be found or fails.
    """
    one, two = (
        _traced(text) if names_function(text) else _as_stored(text, decode=decode)
        for text in (a, b)
    )
    return _next_to(two, a, one), _next_to(one, b, two)


def _next_to(
    other: AbstractTree | Stored, text: str, tree_or_file: AbstractTree | Stored
) -> AbstractTree:
    """Return what is called ``text``, under the names of the other one."""
    model_paths = (
        other.without_boxes().leaves
        if isinstance(other, Stored)
        else view_tree(other.tree).plan.paths
    )
    if isinstance(tree_or_file, Stored):
        unboxed = _unboxed(text, tree_or_file, model_paths)
        with reported(unboxed.path, "read"):
            tree = as_tree({p: restored_form(x) for p, x in unboxed.table.items()})
        return AbstractTree(tree, unboxed.ties, unboxed)
    if isinstance(other, AbstractTree):
        return tree_or_file
    view = view_tree(tree_or_file.tree)
    stored = other.without_boxes(view.plan.paths).table
    leaves: list[Any] = []
    for path, leaf in view.items():
        form = stored_form(leaf)
        is_saved = form and (form.kind != NUMBER or path in stored)
        leaves.append(restored_form(form) if form and is_saved else None)
    return dataclasses.replace(tree_or_file, tree=view.rebuild(leaves))


def _unboxed(text: str, stored: Stored, model_paths: Collection[str] = ()) -> Stored:
    """Name leaves without the ``value`` of boxes, and say so."""
    renamed = stored.without_boxes(model_paths)
    cut = len(stored.leaves.keys() - renamed.leaves.keys())
    if cut:
        wording = (
            f"left out /value, the name of what is in a box, from {plural(cut, 'path')}"
        )
        click.echo(printable(f"note: {shown(text)}: {wording}."), err=True)
    return renamed


def read_checkpoint(text: str, *, decode: bool = True) -> Stored:
    """Read all that is known of a checkpoint without its arrays.

    Args:
        text: its name.
        decode: as for ``load``.

    Raises:
        CheckpointError: it is not a checkpoint, or cannot be read.
    """
    return _unboxed(text, _as_stored(text, decode=decode))


def _as_stored(text: str, *, decode: bool = True) -> Stored:
    if names_function(text):
        raise CheckpointError(f"{text} has shapes and no values; name a checkpoint.")
    if meant := _meant(text):
        raise CheckpointError(f"{listing([text])} is not a checkpoint; {meant}")
    stored = opening.read_stored(text, decode=decode)
    for line in stored.decoded_lines:
        wording = f"{line}; sizes are those of the decoded arrays"
        click.echo(printable(f"note: {shown(text)}: {wording}."), err=True)
    return stored


def read_rules_or_migration(
    text: str, *, allow_regex: bool
) -> Rules | Migration | None:
    """Read a rules file or a migration file; None for whatever else a text names.

    Raises:
        TreeAdaptError: it is such a file, and cannot be read.
    """
    is_published = is_name(text) and text.partition("/")[0] in published()
    if is_published and not Path(text).exists():
        return load_migration(text)
    if not _may_be_table(text) or not Path(text).is_file():
        return None
    try:
        fields = _ANY_TABLE.read(text)
    except TreeAdaptError:
        if text.endswith(".json"):  # of another program, such as config.json
            return None
        raise
    if "rules" in fields:
        return load_rules(text, allow_regex=allow_regex)
    return load_migration(text) if {"rows", "tables", "extends"} & {*fields} else None


def _may_be_table(text: str) -> bool:
    is_stored = text.endswith(ENDING) or ending_of_shards(Path(text))
    return Path(text).suffix in _TABLES and not is_stored


def misplaced_table(*texts: str | None) -> str:
    """Return what to do if a table is among trees, as a hint; empty if none is."""
    named = [text for text in texts if text and tables_named(text)]
    published_names = [text for text in named if not Path(text).exists()]
    tables = [text for text in texts if text and _may_be_table(text)]
    if not (tables := [*tables, *published_names]):
        return ""
    trees = [shown(text) for text in texts if text and text not in tables] or ["TREE"]
    options = ("migration",) if tables[0] in named else ("rules", "migration")
    proposals = " or ".join(f"--{name} {tables[0]}" for name in options)
    return f" {tables[0]!r} is a table: write {' '.join(trees)} {proposals}."


def _meant(text: str) -> str | None:
    """Return what a text may mean that is not the name of a checkpoint, or None."""
    if Path(text).is_dir() or is_url(text):
        return None
    if file := _FILE.fullmatch(text):
        parts = Path(file["file"]).parts
        module = ".".join(parts) if all(map(str.isidentifier, parts)) else "module"
        name = file["name"] or "function"
        return f"name the module: {module}:{name}."
    if _may_be_table(text):
        return "rules come after --rules, the rows of a migration after --migration."
    if Path(text).exists():
        return None
    if tables := tables_named(text):
        is_type = all(
            text != each and not each.startswith(f"{text}/") for each in tables
        )
        names = tables if is_type else [text]
        call = "--migration" if offered("--migration") else "treeadapt tables"
        calls = " or ".join(f"{call} {name}" for name in names)
        return f"the name of published tables comes after its option: {calls}."
    if _MODEL.fullmatch(text):
        folder = Path("~/.cache/huggingface/hub") / f"models--{text.replace('/', '--')}"
        if folder.expanduser().is_dir():
            return f"the model of that name is in {folder}."
    module = text.rstrip(":.")
    if _is_module(module):
        return f"of a module, name a function or a model: {module}:function."
    module, _, name = module.rpartition(".")
    return f"did you mean {module}:{name}?" if _is_module(module) else None


def require_values(text: str, source: AbstractTree) -> Stored:
    """Return the checkpoint that a tree is of, and whose arrays can be read.

    Raises:
        CheckpointError: it is not a checkpoint, or has no arrays.
    """
    stored = source.stored or read_checkpoint(text)
    stored.require_arrays()
    return stored


def read_pairs(
    checkpoints: Sequence[Stored], paths: Sequence[Collection[str]]
) -> Iterator[tuple[Any, ...]]:
    """Read arrays of several checkpoints side by side, which are ``watched``.

    Args:
        checkpoints: of any format.
        paths: for each checkpoint, as many paths.

    Yields:
        For the first path of each checkpoint the array, then for the second, and so on.

    Raises:
        CheckpointError: one cannot be read.
    """
    every = [_arrays(*each) for each in zip(checkpoints, paths, strict=True)]
    table = checkpoints[0].table
    sizes = [size_bytes(table[path].array) for path in paths[0]]
    with bar("Comparing", sum(sizes)) as shown:
        for each_bytes in sizes:
            shown.update(each_bytes)
            yield tuple(map(next, every))  # an array is gone before the next is read


def _arrays(stored: Stored, paths: Collection[str]) -> Iterator[Any]:
    """Yield arrays that may read their data later; Orbax reads a batch at a time."""
    for batch in reading.batches(
        paths, lambda one: size_bytes(stored.table[one].array)
    ):
        pairs = reading.read_arrays(stored, dict.fromkeys(batch))
        arrays = dict(reading.read_ahead(stored, pairs))
        for path in batch:
            yield arrays.pop(path)


def names_function(text: str) -> bool:
    """Return whether a text names a function or a model, and no file."""
    return bool(_FUNCTION.fullmatch(text)) and not Path(text).exists()


def names_tree(text: str) -> bool:
    """Return whether a text names something that may be a tree, and is there."""
    is_there = is_url(text) or Path(text).exists()
    return names_function(text) or (is_there and not _meant(text))


def require_order(
    tree: str, other: str, order: str = "TREE, and the file after its option"
) -> None:
    """Raise if another argument names a tree, and the one for the tree does not.

    Raises:
        click.UsageError: they are in another order.
    """
    if other and names_tree(other) and not names_tree(tree):
        raise click.UsageError(
            f"{tree!r} is not a tree, and {other!r} is; the order is {order}."
            f"{'' if Path(tree).exists() else locating.near_name(Path(tree))}"
        )


def _traced(text: str) -> AbstractTree:
    """Return a model, or the result of a function, with abstract arrays."""
    with _named(text):
        value = _resolved(text)
        view, verb = view_tree(value), "is"
        # A module of Linen is callable, but its params come from its ``init``.
        has_init = callable(getattr(value, "init", None))
        is_module = has_init and not inspect.isclass(value)
        is_empty = not any(map(is_array, view.leaves))
        if is_empty and callable(value) and not is_module:
            view, verb = _traced_call(text, value), "returns"
        if not any(map(is_array, view.leaves)):
            kind = "None" if view.tree is None else type(view.tree).__name__
            cure = "name the tree of parameters, or a function that returns it"
            if is_module:
                cure = (
                    "its parameters come from init: name a function that returns them"
                )
            raise TreeAdaptError(f"{text} {verb} {kind}, with no array in it; {cure}.")
        first: dict[int, str] = {}
        ties: dict[str, str] = {}
        leaves: list[Any] = []
        for path, leaf in view.items():
            if may_be_tied(leaf) and first.setdefault(id(leaf), path) != path:
                ties[path] = first[id(leaf)]
            if is_array(leaf):
                leaf = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            leaves.append(leaf)
        return AbstractTree(view.rebuild(leaves), ties)


def _traced_call(text: str, function: Callable[..., Any]) -> TreeView:
    views: list[TreeView] = []
    try:
        jax.eval_shape(lambda: views.append(view_tree(_called(text, function))))
    except jax.errors.JAXTypeError as error:
        raise TreeAdaptError(
            f"{text} needs the values of arrays, and is run by jax.eval_shape, where "
            "they have none. Make the tree when the module is imported, and name that."
        ) from error
    return views[-1]


def read_mesh(text: str) -> AbstractMesh:
    """Read the axes of a mesh.

    Args:
        text: names and sizes, such as ``data=16,model=8``.

    Raises:
        ShardingError: it cannot be read, or two axes have one name.
    """
    axes = [_AXIS.fullmatch(part) for part in text.split(",")]
    pairs = [match.groups() for match in axes if match is not None]
    sizes = {name: int(size) for name, size in pairs}
    if len(sizes) < len(axes):
        raise ShardingError(
            f"--mesh has {listing([text])}. Write the name and size of each axis: "
            "data=16,model=8."
        )
    return AbstractMesh(tuple(sizes.values()), tuple(sizes))


def read_optimizer(text: str) -> Any:
    """Import a transformation, or what a function of no arguments returns.

    Args:
        text: ``module:name``.

    Raises:
        TransformError: it is not one.
        TreeAdaptError: it cannot be found, or the function fails.
    """
    if not _FUNCTION.fullmatch(text):
        raise TransformError(f"--optimizer has {listing([text])}. Write module:tx.")
    with _named(text):
        tx = _resolved(text)
        if not is_transformation(tx) and callable(tx):
            tx = _called(text, tx)
    if not is_transformation(tx):
        raise TransformError(
            f"{text} is {one_line(repr(tx))}. Give a transformation of Optax, or a "
            "function of no arguments that returns one."
        )
    return tx


def read_function(text: str) -> Callable[..., Any]:
    """Import a function.

    Args:
        text: ``module:name``.

    Raises:
        MigrationError: it is not one.
        TreeAdaptError: it cannot be found.
    """
    if not _FUNCTION.fullmatch(text):
        raise MigrationError(f"--convert has {listing([text])}. Write module:function.")
    with _named(text):
        function = _resolved(text)
    if not callable(function):
        raise MigrationError(
            f"{text} is {one_line(repr(function))}. Name a function that takes the "
            "leaves of SRC and returns the new tree."
        )
    return function


@contextlib.contextmanager
def _named(text: str) -> Iterator[None]:
    """Say that whatever is raised inside comes from what ``text`` names.

    Raises:
        TreeAdaptError: instead of any other exception.
    """
    try:
        yield
    except TreeAdaptError:
        raise
    except (Exception, SystemExit) as error:
        wording = " ".join(str(error).split())[:300]
        raise TreeAdaptError(
            f"{text} raised {type(error).__name__}{': ' * bool(wording)}{wording}"
        ) from error


def _resolved(text: str) -> Any:
    """Import what ``module:name`` names; modules here come first.

    Raises:
        TreeAdaptError: there is no such module, or nothing in it of that name.
    """
    _look_here()
    module, _, names = text.partition(":")
    try:
        value = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise  # another module, which this one imports
        near = Speller().nearest(module, (file.stem for file in Path().glob("*.py")))
        meant = [f"{names}:{module}"] if _is_module(names) else near
        hint = f" Did you mean {listing(meant)}?" if meant else ""
        raise TreeAdaptError(f"There is no module {module!r}.{hint}") from error
    for name in names.split("."):
        try:
            value = getattr(value, name)
        except AttributeError as error:
            near = Speller().nearest(name, dir(value))
            hint = f" Did you mean {listing(near)}?" if near else ""
            raise TreeAdaptError(f"{text} is not there: {error}.{hint}") from error
    return value


def _called(text: str, function: Callable[..., Any]) -> Any:
    """Return what a function returns that takes no arguments.

    Raises:
        TreeAdaptError: it needs some.
    """
    try:
        inspect.signature(function).bind()
    except ValueError:  # a function in C may say nothing of its arguments
        pass
    except TypeError as error:
        wording = f"{text} takes arguments: {error}. Name a function that takes none."
        raise TreeAdaptError(wording) from error
    return function()


def _is_module(name: str) -> bool:
    """Return whether there is a module of this name, in a file; imports nothing."""
    _look_here()
    folders: Sequence[str] | None = None
    spec = None
    for part in name.split("."):
        spec = PathFinder.find_spec(part, folders) if part.isidentifier() else None
        if spec is None:
            return False
        folders = spec.submodule_search_locations or []
    return spec is not None and spec.origin is not None


def _look_here() -> None:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
