"""Converting: which migration of several, and what goes along with the weights.

Takes what ``convert`` was called with. Files next to the weights are copied as they
are, and a weight never is.
"""

from __future__ import annotations

import dataclasses
import filecmp
import itertools
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import jax.numpy as jnp

from treeadapt.checkpoints import locating, orbax_folder, safetensors_file, save_load
from treeadapt.checkpoints.decoding import may_be_quantized
from treeadapt.checkpoints.leaves import stored_form
from treeadapt.checkpoints.next_call import all_shards, tables_that_take
from treeadapt.checkpoints.quantization_config import (
    DTYPE_KEYS,
    QUANTIZATION_KEYS,
    places_in,
)
from treeadapt.checkpoints.record import Stored
from treeadapt.cli import options, printing, sources
from treeadapt.cli.migration_findings import planned, read_migration, turned_hint
from treeadapt.cli.options import MILD
from treeadapt.errors import CheckpointError, MigrationError
from treeadapt.migrations.group import size_bytes
from treeadapt.migrations.migration import Migration
from treeadapt.migrations.plan import MigrationPlan
from treeadapt.migrations.plan_text import selected_lines
from treeadapt.migrations.rows import unchecked_text
from treeadapt.migrations.tables.published import CONFIG
from treeadapt.reports.words import printable
from treeadapt.text.names import listing, natural, plural
from treeadapt.trees.views import view_tree

_NO_LIMIT = 2**62
MAX_COPIED_BYTES = 2**27  # of one file; the vocabularies of tokenizers have 2**25
# Endings of what holds weights, or the state of an optimizer: also of frameworks whose
# files are not read here, and of pickles, which may hold anything.
_WEIGHTS = re.compile(
    r".*\.(safetensors|bin|pt|pth|ckpt|msgpack|h5|hdf5|gguf|ggml|npz|npy|onnx|onnx_data"
    r"|ot|keras|eqx|pkl|pickle|tflite|mlmodel|pdparams|pdopt|params|weights"
    r"|data-\d+-of-\d+)"
    r"|.*\.index(\.[^.]+)?(\.json)?|.*\.schema\.toml",
    re.IGNORECASE,
)
# With it, transformers takes a folder for an adapter, and reads the weights of another.
_OF_ADAPTER = "adapter_config.json"
# Names that a folder is opened by; a file of any other name is not a model's folder.
_OF_FOLDER = re.compile(
    r"(adapter_|diffusion_pytorch_)?model(\.[^.]+)?\.safetensors", re.IGNORECASE
)
# Next to config.json; what they say is true of quantised weights alone.
_OF_QUANTIZATION = ("hf_quant_config.json", "quant_config.json", "quantize_config.json")
# What the first bytes of weights are, whatever their name: of zip files, as PyTorch and
# NumPy write them, of pickles, HDF5, GGUF and arrays of NumPy.
_FIRST_BYTES = (
    *(b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"),
    *(b"\x89HDF", b"GGUF", b"\x93NUMPY"),
)


@dataclasses.dataclass(frozen=True)
class OtherFiles:
    """The files of a folder that are not weights, and why others are left.

    Attributes:
        files: what is to be copied, by name.
        left: why each other entry is not, by name.
        config: what is written as the configuration; None to copy it as it is.
        notes: how it differs, for people.
        again: names of files that are there, and are replaced by the same ones.
    """

    files: Mapping[str, Path]
    left: Mapping[str, str]
    config: str | None = None
    notes: Sequence[str] = ()
    again: Sequence[str] = ()

    def lines(self, folder: str, done: str) -> list[str]:
        """Write what is copied and what is left, for people."""
        count, names = len(self.files), sorted(self.files, key=natural)
        text = f"{done} {plural(count, 'file')} from {folder!r}"
        lines = [f"{text}{': ' * bool(names)}{listing(names)}."]
        if self.again:
            lines.append(f"{len(self.again):,} of these had been copied there before.")
        reasons: dict[str, list[str]] = {}
        for name in sorted(self.left, key=natural):
            reasons.setdefault(self.left[name], []).append(name)
        texts = [f"{listing(names)} ({why})" for why, names in reasons.items()]
        lines += [f"Left there: {'; '.join(texts)}."] * bool(texts)
        return [*lines, *self.notes]

    def writes(self, file: Path) -> bool:
        """Return whether a file that is there is what is copied under its name."""
        original = self.files.get(file.name)
        if original is None or file.is_symlink() or not file.is_file():
            return False
        if file.name == CONFIG and self.config is not None:
            return file.read_bytes() == self.config.encode()
        return filecmp.cmp(original, file, shallow=False)

    def for_plain_weights(self, leaves: Mapping[str, Any]) -> OtherFiles:
        """Return the same, with a configuration that says how arrays are written.

        They are never written as codes and scales, so it must not say that they are.

        Args:
            leaves: that are written, abstract, by path.
        """
        file = self.files.get(CONFIG)
        if file is None:
            return self
        try:
            config = json.loads(file.read_text("utf-8"))
        except (OSError, ValueError, RecursionError):
            return self
        places = places_in(config)
        if not any(key in place for place in places for key in QUANTIZATION_KEYS):
            return self
        sizes: Counter[str] = Counter()
        for leaf in leaves.values():
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                sizes[leaf.dtype.name] += size_bytes(leaf)
        dtype = next((name for name, _ in sizes.most_common(1)), None)
        for place in places:
            for key in QUANTIZATION_KEYS:
                place.pop(key, None)
            for key in DTYPE_KEYS if dtype else ():
                if key in place:
                    place[key] = dtype
        if dtype and not any(key in config for key in DTYPE_KEYS):
            config["torch_dtype"] = dtype  # which all versions of transformers read
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        note = f"{CONFIG} has no quantization_config there"
        note += f", and its dtype is {dtype}." if dtype else "."
        return dataclasses.replace(self, config=text, notes=[note])


def published_shard_bytes(folder: str) -> int | None:
    """Return how large each file of the weights may be next to a published config.json.

    No tool that reads a config.json reads an Orbax checkpoint next to it.

    Args:
        folder: of a published model.

    Returns:
        The size of its largest shard, or no limit if its weights are one file; None if
        it is not a folder, or one of Orbax.
    """
    like = Path(folder)
    if not like.is_dir() or orbax_folder.others(like) is not None:
        return None
    endings = (".safetensors", ".bin")
    sizes = [_array_bytes(x) for x in like.iterdir() if x.suffix in endings]
    return max(1, *sizes) if len(sizes) > 1 else _NO_LIMIT


def _array_bytes(file: Path) -> int:
    """Return how large a file is without the header of safetensors."""
    size = file.stat().st_size
    if file.suffix != ".safetensors":
        return size
    with file.open("rb") as opened:
        return size - 8 - int.from_bytes(opened.read(8), "little")


def other_files(
    folder: str, destination: Path, converted: Path, *, replaces: bool
) -> OtherFiles:
    """Return what in a folder is not weights, and can be next to a new checkpoint.

    Args:
        folder: of a published model.
        destination: the folder that the files go to.
        converted: the new checkpoint, which is never replaced.
        replaces: whether what is in the destination goes.

    Raises:
        CheckpointError: it is the destination.
    """
    like = Path(folder)
    if destination.exists() and like.samefile(destination):
        raise CheckpointError(
            f"--like names {listing([folder])}, the folder that is written to, so its "
            "files are there already. Leave --like out."
        )
    by_orbax = orbax_folder.others(like)
    files: dict[str, Path] = {}
    left: dict[str, str] = {}
    for entry in sorted(like.iterdir()):
        name, there = entry.name, destination / entry.name
        stays = not replaces and (there.exists() or there.is_symlink())
        if why := _reason(entry, by_orbax):
            left[name] = why
        elif name == _OF_ADAPTER and not converted.name.startswith("adapter_model."):
            left[name] = "of an adapter, and DST is not adapter_model.safetensors"
        elif there == converted or stays:
            left[name] = "there already"
        else:
            files[name] = entry
    return OtherFiles(files, left)


def _require_folder(like: str) -> None:
    """Raise unless ``--like`` names a folder.

    Raises:
        CheckpointError: it does not.
    """
    if Path(like).is_dir():
        return
    what = "not a folder" if Path(like).exists() else "not there"
    cure = (
        "Name the folder of a model whose config.json and tokenizer files are to be "
        "copied."
    )
    if command := locating.download_command(like.removeprefix("hf://")):
        cure = (
            f"Name the folder that {command} --exclude '*.safetensors' prints, if it "
            "is a model of the Hugging Face Hub."
        )
    elif Path(like).name == CONFIG and Path(like).exists():
        cure = f"Name its folder, {listing([str(Path(like).parent)])}."
    raise CheckpointError(f"--like has {listing([like])}, which is {what}. {cure}")


def copy_files(rest: OtherFiles, destination: Path) -> None:
    """Copy files, what links lead to and not the links, and replace nothing.

    Raises:
        CheckpointError: a file cannot be read or written; those before it are there.
    """
    for name, file in rest.files.items():
        new = destination / name
        try:
            with file.open("rb") as source, new.open("xb") as target:
                if name == CONFIG and rest.config is not None:
                    target.write(rest.config.encode())
                else:
                    shutil.copyfileobj(source, target)
        except FileExistsError:
            continue  # it came meanwhile, and is not ours to replace
        except OSError as error:
            new.unlink(missing_ok=True)
            raise CheckpointError(
                f"The weights are written, but {listing([str(file)])} cannot be "
                f"copied: {error.strerror}."
            ) from error


def _reason(entry: Path, by_others: Sequence[str] | None) -> str:
    """Return why an entry of a folder is not copied; empty if it is."""
    name = entry.name
    if name.startswith("."):
        return "hidden"
    if entry.is_symlink() and not entry.exists():
        return "a link to nothing"
    if by_others is not None and name not in by_others and not entry.is_dir():
        return "weights"
    if entry.is_dir():
        return "folders"
    if name in _OF_QUANTIZATION:
        return "of quantised weights"
    if not entry.is_file():
        return "not files"
    if _WEIGHTS.fullmatch(name) or _WEIGHTS.fullmatch(entry.resolve().name):
        return "weights"
    if entry.stat().st_size > MAX_COPIED_BYTES:
        return f"over {MAX_COPIED_BYTES >> 20} MiB, as weights are"
    with entry.open("rb") as file:
        first = file.read(9)
    is_safetensors = first[4:] == b"\0\0\0\0{"  # after a length of less than 4 GiB
    return "weights" * (first.startswith(_FIRST_BYTES) or is_safetensors)


def fitting_migration(
    files: Sequence[str],
    stored: Stored,
    target: Any,
    checkpoints: Sequence[str | None],
    *,
    reverse: bool,
) -> tuple[str, Migration, MigrationPlan]:
    """Return the migration that fits a checkpoint, the only one, and its file.

    Args:
        files: of migrations.
        stored: the checkpoint.
        target: abstract tree that the result should fit; None without one.
        checkpoints: the configuration is next to one of these.
        reverse: whether the rows are read backwards.

    Raises:
        MigrationError: none fits, or more than one.
    """
    fitting: dict[str, tuple[Migration, MigrationPlan]] = {}
    misses: list[str] = []
    for file in files:
        try:
            table = read_migration(file, *checkpoints, reverse=reverse)
        except MigrationError as error:
            hints = tables_that_take(stored, file) if len(files) == 1 else []
            raise MigrationError("\n".join([str(error), *hints])) from None
        plan, faults = planned(table, stored, target)
        wrong = [each for each in faults if each.kind not in MILD]
        if not wrong:
            fitting[file] = table, plan
            continue
        # lint has no --like, and so no configuration that says which table is meant.
        name = read_migration(file, *checkpoints, reverse=False).published
        call = f"lint --migration {name}" if name else "lint"
        others = f"; {len(wrong) - 1:,} more, see {call}" if wrong[1:] else ""
        miss = f"{wrong[0].kind}: {wrong[0].line}{others}"
        misses.append(f"{listing([file])}: {miss}" if len(files) > 1 else miss)
    if len(fitting) > 1:
        raise MigrationError(
            f"{listing(fitting)} fit, and which is meant is not known. Name that one."
        )
    if not fitting:
        likes = None if target is None else view_tree(target).flat()
        published = table.published if len(files) == 1 else None
        turned = (
            turned_hint(file, stored, target, *checkpoints, reverse=reverse)
            for file in files
        )
        hints = [*filter(None, turned)]
        hints += [] if hints else tables_that_take(stored, published, likes)
        hints += filter(None, [all_shards(stored)])
        raise MigrationError("\n".join([" | ".join(misses), *hints]))
    ((file, (table, plan)),) = fitting.items()
    return file, table, plan


def convert_checkpoint(
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
    """Write a checkpoint as another one; see the options of ``convert``.

    Raises:
        click.UsageError, Failure: options that do not go together.
        TreeAdaptError: a file cannot be read or written, or does not fit.
    """
    if not migrations and (reverse or target is not None):
        raise click.UsageError("--reverse and --target need --migration.")
    if sources.names_function(destination):
        raise click.UsageError(
            f"DST {destination!r} is code, not the name of a file. What the result "
            f"should fit is --target {destination}."
        )
    sources.require_order(source, destination, "SRC, then DST")
    folder, rest = Path(destination), None
    is_replaced = folder.is_dir() and not folder.is_symlink()
    others = _others_than_weights(folder) if is_replaced else []
    _require_weights_alone(folder, others, like, force=force)
    options.require_new(destination, force=force)
    form = locating.format_of(destination, writing=True)
    is_folder = form == "orbax" or folder.is_dir()
    if like is not None and is_folder and max_shard_bytes is None:
        max_shard_bytes = published_shard_bytes(like)
    needs_arrays = form != "schema" or max_shard_bytes is not None
    if like is not None:
        if not needs_arrays:
            text = "--like needs a DST with arrays, and this is a schema."
            raise click.UsageError(text)
        _require_folder(like)
        is_file = form == "safetensors" and max_shard_bytes is None
        if is_file:
            folder = folder.parent
        if not is_file or _OF_FOLDER.fullmatch(Path(destination).name):
            rest = other_files(like, folder, Path(destination), replaces=is_replaced)
    if sources.names_function(source) and not migrations and not needs_arrays:
        num_leaves = _write_shapes(source, destination, decode=decode, dry_run=dry_run)
    else:
        conversion = _planned(
            source,
            migrations,
            target,
            like,
            needs_arrays=needs_arrays,
            reverse=reverse,
            decode=decode,
        )
        if rest is not None:
            rest = _with_copies(
                rest.for_plain_weights(conversion.written), folder, others
            )
        if not dry_run:
            _write(
                conversion, source, destination, max_shard_bytes, others, decode=decode
            )
        elif conversion.plan is not None:
            lines = map(printable, str(conversion.plan).splitlines())
            printing.print_lines("\n".join(lines))
        num_leaves = len(conversion.written)
    done = "Would write" if dry_run else "Wrote"
    click.echo(f"{done} {plural(num_leaves, 'leaf')} to {destination!r}.")
    if like is not None and rest is None:
        click.echo(
            f"Nothing is copied from {like!r}, because DST is a single file. For its "
            f"{CONFIG} next to the weights, name a folder as DST."
        )
    elif like is not None and rest is not None:
        if not dry_run:
            copy_files(rest, folder)
        for line in rest.lines(like, "Would copy" if dry_run else "Copied"):
            click.echo(printable(line))


def _others_than_weights(folder: Path) -> list[str]:
    """Return what a folder of weights holds next to them, as ``--like`` copies it."""
    has_index = (folder / safetensors_file.INDEX).is_file()
    return (safetensors_file if has_index else orbax_folder).others(folder) or []


def _require_weights_alone(
    folder: Path, others: Sequence[str], like: str | None, *, force: bool
) -> None:
    """Raise if a folder has other files than weights and what ``--like`` may copy.

    Raises:
        Failure: it has, and a folder is replaced as a whole.
    """
    copied = os.listdir(like) if like is not None and Path(like).is_dir() else []
    if strangers := [name for name in others if name not in copied]:
        raise options.Failure(
            f"{str(folder)!r} is not replaced, because it holds more than weights: "
            f"{listing(strangers)}. Move that away{' and pass --force' * (not force)}, "
            "or choose another name."
        )


def _with_copies(rest: OtherFiles, folder: Path, others: Sequence[str]) -> OtherFiles:
    """Return what is copied, with what of it is in a folder already, the same.

    Args:
        rest: what is copied.
        folder: that is replaced as a whole.
        others: what is in it next to the weights.

    Raises:
        Failure: one of these is another file, which would be lost.
    """
    if edited := [name for name in others if not rest.writes(folder / name)]:
        raise options.Failure(
            f"{str(folder)!r} is not replaced, because {listing(edited)} in it is not "
            "what --like copies. Move that away, or choose another name."
        )
    return dataclasses.replace(rest, again=others)


def _write_shapes(source: str, destination: str, *, decode: bool, dry_run: bool) -> int:
    """Write the schema of a tree in code; return how many leaves it has."""
    tree = sources.read_tree(source, decode=decode)
    if not dry_run:
        save_load.save(destination, tree)
    return sum(stored_form(leaf) is not None for leaf in view_tree(tree).leaves)


@dataclasses.dataclass(frozen=True)
class _Conversion:
    """What is read, and what becomes of it.

    Attributes:
        stored: the checkpoint.
        target: abstract tree that the result should fit; None without one.
        original: the checkpoint that the target is, which fills what rows do not.
        table: None if all stays as it is.
        plan: of the table.
    """

    stored: Stored
    target: Any
    original: Stored | None
    table: Migration | None
    plan: MigrationPlan | None

    @property
    def written(self) -> Mapping[str, Any]:
        """The leaves that are written, abstract."""
        return self.stored.leaves if self.plan is None else self.plan.result


def _planned(
    source: str,
    migrations: Sequence[str],
    target: str | None,
    like: str | None,
    *,
    needs_arrays: bool,
    reverse: bool,
    decode: bool,
) -> _Conversion:
    """Read a checkpoint without its arrays, and plan what becomes of it."""
    stored = sources.read_checkpoint(source, decode=decode)
    if needs_arrays:
        stored.require_arrays()
    if like is not None and not decode and may_be_quantized(stored):
        raise options.Failure(
            "--like copies a config.json for plain weights, and --no-decode writes "
            "codes and scales. Leave one of the two out."
        )
    likes = original = table = plan = None
    if target is not None:
        fitted = sources.read_source(target, decode=decode)
        likes = fitted.tree
        if fitted.stored is not None and fitted.stored.format != "schema":
            original = fitted.stored  # a schema has no arrays
    if migrations:
        file, table, plan = fitting_migration(
            migrations, stored, likes, (like, source), reverse=reverse
        )
        _print_migration(file if len(migrations) > 1 else None, table, plan)
    return _Conversion(stored, likes, original, table, plan)


def _write(
    conversion: _Conversion,
    source: str,
    destination: str,
    max_shard_bytes: int | None,
    replaceable: Sequence[str],
    *,
    decode: bool,
) -> None:
    """Write what becomes of a checkpoint, with a bar of the bytes."""
    written = conversion.written
    sizes = {path: size_bytes(leaf) for path, leaf in written.items()}
    whole, read_bytes = sum(sizes.values()), 0

    def read(path: str) -> None:
        nonlocal read_bytes
        read_bytes += sizes.get(path, 0)

    with printing.bar(f"Writing {destination}", whole, lambda: read_bytes) as shown:
        save_load.copy(
            source,
            destination,
            migration=conversion.table,
            target=conversion.target,
            original=conversion.original,
            max_shard_bytes=max_shard_bytes,
            decode=decode,
            progress=read,
            written=lambda size: printing.move(shown, size),
            replaceable=replaceable,
        )
        printing.move(shown, whole)


def _print_migration(file: str | None, table: Migration, plan: MigrationPlan) -> None:
    """Print which of several tables fits, where it is from, and what to be wary of."""
    if file is not None:
        click.echo(f"{file!r} fits.")
    if table.origin:
        click.echo(printable(f"The rows are {table.origin}."))
    unstated = itertools.chain(*(each.unstated for each in table.tables))
    marks = unchecked_text((*plan.rows, *table._marked_new))
    for text in (marks, *unstated, *selected_lines(plan)):
        if text:
            options.show_warning(text)
