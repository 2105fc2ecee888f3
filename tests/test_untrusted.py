"""Untrusted input: the content of a file is data, never code. See ``SECURITY.md``."""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
import re
import sys
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from caps import CAPS
from command import run
from flax import nnx
from test_checkpoints import write

import treeadapt as ta
from treeadapt import errors
from treeadapt.checkpoints import (
    decoding,
    orbax_folder,
    quantization_config,
    record,
    safetensors_file,
    schema_file,
    torch_file,
    torch_pickle,
)
from treeadapt.migrations import files as migration_files
from treeadapt.migrations import groups
from treeadapt.optimizers import building
from treeadapt.patterns import glob as patterns
from treeadapt.selection import files
from treeadapt.text import data_files
from treeadapt.trees import flatten

ROOT = Path(__file__).parent.parent
FORMATS = ("npz", "safetensors", "msgpack", "orbax")
formats = pytest.mark.parametrize("kind", FORMATS)


@functools.cache
def sources() -> dict[str, ast.Module]:
    """Parse the files of the package once, in the process that needs it."""
    return {
        file.relative_to(ROOT).as_posix(): ast.parse(file.read_text("utf-8"))
        for file in sorted((ROOT / "treeadapt").rglob("*.py"))
    }


# Nothing in the package can turn data into code

RUNS_CODE = {"eval", "exec", "compile", "__import__", "breakpoint"}
UNPICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal"}
UNPICKLES |= {"joblib", "yaml"}

# Files that import a module by name; the name is a constant in the package, but the
# command line imports what its user types.
IMPORTERS = ("import_module", "resolve_name")
IMPORTS_BY_NAME = {
    "treeadapt/__init__.py",
    "treeadapt/trees/adapters/registry.py",
    "treeadapt/cli/sources.py",
}


# The test kit pickles its caller's objects and reads only these again; the comparison
# of metadata catches the errors of objects that cannot be pickled.
OWN_PICKLES = {
    "treeadapt/testing.py": {"pickle"},
    "treeadapt/trees/metadata.py": {"pickle"},
}
READS = {"treeadapt/testing.py": ["pickle.loads(pickle.dumps(rest))"]}


def calls(tree: ast.AST) -> list[str]:
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [ast.unparse(call.func) for call in found]


def imported(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if all(alias.name.endswith("Error") for alias in node.names):
                continue  # to catch it: an exception reads and runs nothing
            names.add((node.module or "").partition(".")[0])
    return names


@pytest.mark.slow
@pytest.mark.hazard("K7", "H15")
def test_nothing_is_unpickled_and_no_text_is_run():
    assert len(sources()) > 50
    for name, tree in sources().items():
        assert not imported(tree) & (UNPICKLES - OWN_PICKLES.get(name, set())), name
        assert not {*calls(tree)} & RUNS_CODE, name
        for node in ast.walk(tree):
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                assert ast.unparse(node.value) == "False", name


@pytest.mark.slow
@pytest.mark.hazard("K18")
def test_no_room_imports_a_module_that_a_file_names():
    by_name = {
        name
        for name, tree in sources().items()
        if any(call.endswith(IMPORTERS) for call in calls(tree))
    }
    assert by_name == IMPORTS_BY_NAME


@pytest.mark.slow
def test_no_answer_depends_on_a_clock():
    clocks = {name for name, tree in sources().items() if "time" in imported(tree)}
    assert clocks <= {"treeadapt/cli/bench.py", "treeadapt/cli/printing.py"}


@pytest.mark.slow
def test_the_test_kit_unpickles_only_its_own_pickles():
    for name in OWN_PICKLES:
        used = [
            ast.unparse(node)
            for node in ast.walk(sources()[name])
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pickle"
        ]
        assert {*used} <= {"pickle.loads", "pickle.dumps", "pickle.PickleError"}
        calls = [n for n in ast.walk(sources()[name]) if isinstance(n, ast.Call)]
        found = [ast.unparse(n) for n in calls if ast.unparse(n.func) == "pickle.loads"]
        assert found == READS.get(name, [])


def test_the_source_is_really_checked():
    tree = ast.parse("import pickle\nfrom yaml import load, YAMLError\nx = eval('1')")
    assert imported(tree) & UNPICKLES == {"pickle", "yaml"}
    assert {*calls(tree)} & RUNS_CODE == {"eval"}


# Names in files


@pytest.fixture
def trap(tmp_path, monkeypatch):
    """A module that must never be imported; returns ways to name it."""
    (tmp_path / "harmful_module.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    names = ["harmful_module", "harmful_module:Net", "harmful_module.Net"]
    yield [*names, "<harmful_module.Net>", "!!python/name:harmful_module.Net"]
    assert "harmful_module" not in sys.modules


@pytest.mark.hazard("K18")
def test_rules_that_name_a_module_import_nothing(trap, tmp_path):
    for kind in ("json", "toml"):
        for name in trap:
            file = tmp_path / f"rules.{kind}"
            rules = {name.lstrip("!"): name, "**": name}
            text = json.dumps({"version": 1, "rules": rules})
            file.write_text(text if kind == "json" else ta.Rules(rules).to_toml())
            found = ta.load_rules(file)
            assert {*found.values} == {name}
            with pytest.raises(ta.UnusedRuleError):
                found({"a": jnp.ones(1)})


@pytest.mark.hazard("K18")
def test_a_migration_that_names_a_module_imports_nothing(trap, tmp_path):
    file = tmp_path / "table.toml"
    names = [name.replace(" ", "") for name in trap]
    file.write_text(ta.Migration({name: f"new/{name}" for name in names}).to_toml())
    found = ta.load_migration(file)
    assert list(found({names[0]: np.ones(1)} | dict.fromkeys(names[1:], np.ones(1))))


@pytest.mark.hazard("K7", "K18")
@formats
def test_a_checkpoint_that_names_a_module_imports_nothing(kind, trap, tmp_path):
    flat = {name: np.ones(2, np.float32) for name in trap}
    file = tmp_path / ("x" if kind == "orbax" else f"x.{kind}")
    write(file, flat)
    loaded = ta.load(file, {name: np.zeros(2, np.float32) for name in flat})
    assert {*loaded} == {*flat}


# Names of attributes


@dataclasses.dataclass
class Plain:
    w: Any

    def forward(self):
        return "the real one"


class Module(eqx.Module):
    w: jax.Array

    def forward(self):
        return "the real one"


class Linear(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(2))

    def forward(self):
        return "the real one"


class Taught:
    def __init__(self):
        self.w = jnp.ones(2)

    def forward(self):
        return "the real one"


@dataclasses.dataclass
class Slots:
    __slots__ = ("w",)
    w: Any

    def forward(self):
        return "the real one"


MODELS = {
    "dataclass": lambda: Plain(jnp.ones(2)),
    "equinox": lambda: Module(jnp.ones(2)),
    "nnx": Linear,
    "by fields": Taught,
    "slots": lambda: Slots(jnp.ones(2)),
}
HARMFUL = ("__class__", "__dict__", "__init__", "forward", "__wrapped__", "new", "w/..")


@pytest.fixture
def taught():
    with ta.default_registry.copy().use():
        ta.register(Taught, fields=("w",))
        yield


@pytest.mark.hazard("K13")
@pytest.mark.usefixtures("taught")
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("name", HARMFUL)
def test_only_attributes_of_the_target_are_set(model, name, tmp_path):
    target = model()
    extra = {"w": jnp.zeros(2), name: jnp.zeros(2)}
    nested = {"w": jnp.zeros(2), **{part: jnp.zeros(2) for part in name.split("/")[:1]}}
    if name == "w/..":
        nested = {"w": {"..": jnp.zeros(2)}}
    for strict in (True, False):
        with pytest.raises(ta.StructureMismatchError, match=re.escape(name)):
            ta.from_flat_dict(target, extra, strict=strict)
        with pytest.raises(ta.StructureMismatchError, match=re.escape(name)):
            ta.from_state_dict(target, nested, strict=strict)
    with pytest.raises(ta.StructureMismatchError):
        ta.merge(extra, ta.split(target)[1])
    np.savez(tmp_path / "x.npz", **extra)
    with pytest.raises(ta.TreeAdaptError):
        ta.load(tmp_path / "x.npz", target)
    assert target.forward() == "the real one"
    assert type(target) is type(model())


# Caps


def test_the_policy_states_the_caps_as_they_are():
    assert CAPS == {
        "bytes of a rules or migration file": data_files.MAX_BYTES,
        "patterns of a rules file": files.MAX_PATTERNS,
        "weight of the patterns of a rules file": files.MAX_WEIGHT,
        "axes in a list of a rules file, and in an entry of it": files.MAX_AXES,
        "paths of a freeze spec": files.MAX_PATHS,
        "values of the optimizers of a rules file": building.MAX_VALUES,
        "levels of an optimizer of a rules file": building.MAX_DEPTH,
        "boundaries of a schedule of a rules file": building.MAX_BOUNDARIES,
        "rows of a migration file": migration_files.MAX_ROWS,
        "characters of a migration file's addresses": migration_files.MAX_CHARACTERS,
        "weight of the captures of a migration file": migration_files.MAX_WEIGHT,
        "leaves that a migration divides arrays into": groups.MAX_LEAVES,
        "times their bytes that a migration makes of arrays": groups.MAX_GROWTH,
        "bytes that it makes of all arrays beyond that": groups.MAX_MORE_BYTES,
        "characters of a pattern with wildcards": patterns.MAX_CHARACTERS,
        "`**` in a pattern": patterns.MAX_ANY_DEPTH,
        "digits of a number in a pattern": patterns.MAX_DIGITS,
        "leaves of a checkpoint": record.MAX_LEAVES,
        "axes of an array in a checkpoint": record.MAX_RANK,
        "bytes of a schema": schema_file.MAX_BYTES,
        "bytes of a safetensors header": safetensors_file._MAX_HEADER_BYTES,
        "bytes of a pickle of PyTorch": torch_file._MAX_PICKLE_BYTES,
        "opcodes of a pickle of PyTorch": torch_pickle._MAX_OPCODES,
        "levels of tables in a file of PyTorch": torch_file._MAX_LEVELS,
        "characters of all names in a file of PyTorch": torch_file._MAX_NAMES,
        "times the bytes of a file of PyTorch that its tensors take": (
            torch_file._MAX_TIMES
        ),
        "bytes that they take beyond that": torch_file._MAX_MORE_BYTES,
        "bytes of an Orbax metadata file": orbax_folder._MAX_METADATA_BYTES,
        "bytes of a `config.json` next to quantised weights": (
            quantization_config._MAX_BYTES
        ),
        "bytes of all shapes, orders and tables that are read of quantised arrays": (
            decoding.MAX_SMALL_BYTES
        ),
        "levels of a tree": flatten.MAX_DEPTH,
        "bytes of a message": errors.MAX_MESSAGE_BYTES,
    }


PADS = {
    "5 GB": "pad = { x = [0, 5000000000] }",
    "2**50": "pad = { x = [1125899906842624, 0] }",
    "the most": "pad = { x = [9223372036854775807, 9223372036854775807] }",
}


@pytest.mark.parametrize("pad", PADS.values(), ids=PADS)
def test_a_migration_file_cannot_fill_the_memory(pad, tmp_path):
    file, path = tmp_path / "table.toml", tmp_path / "x.safetensors"
    file.write_text(f'version = 1\n[[rows]]\nfrom = "a : x"\nto = "b : x"\n{pad}\n')
    migration = ta.load_migration(file)
    ta.save(path, {"a": np.ones(4, np.int8)})
    stated = {"a": jax.ShapeDtypeStruct((4,), np.int8)}
    # The caller's own target may ask for what a table may not, and this one does not.
    target = {"b": jax.ShapeDtypeStruct((5_000_000_005,), np.int8)}
    calls = {
        "plan": lambda: migration.plan(stated),
        "call": lambda: migration({"a": np.ones(4, np.int8)}),
        "jax": lambda: migration({"a": jnp.ones(4, jnp.int8)}),
        "load": lambda: ta.load(path, migration=migration),
        "target": lambda: ta.load(path, target, migration=migration),
        "report": lambda: ta.compare_checkpoint(path, target, migration=migration),
    }
    for call in calls.values():
        with pytest.raises(ta.MigrationError) as caught:
            call()
        text = str(caught.value)
        assert "a table may not make so much of\n  'a' would become int8[" in text
        assert "at most 32 times its bytes, and 1.0 GiB more in all" in text
    text = run("convert", path, tmp_path / "y.schema.toml", "--migration", file, code=2)
    assert "a table may not make so much of" in text
    assert not (tmp_path / "y.schema.toml").exists()


def test_a_schema_with_too_many_leaves_is_neither_read_nor_written(
    tmp_path, monkeypatch
):
    path = tmp_path / "x.schema.toml"
    path.write_text('version = 1\n[leaves]\n"a" = "int"\n"b" = "int"\n')
    few = dataclasses.replace(schema_file._LEAVES, limit=1)
    monkeypatch.setattr(schema_file, "_LEAVES", few)
    monkeypatch.setattr(schema_file, "MAX_LEAVES", 1)
    with pytest.raises(ta.CheckpointError, match="'leaves' has 2 entries"):
        ta.read_metadata(path)
    with pytest.raises(ta.CheckpointError, match="where="):
        ta.save(path, {"a": 1, "b": 2})


def test_what_rows_make_is_added_up(monkeypatch):
    monkeypatch.setattr(groups, "MAX_MORE_BYTES", 100)
    leaves = {f"a{n}": np.ones(2, np.int8) for n in range(3)}
    pad = {"pad": {"x": (0, 102)}}  # 40 bytes more than 32 times 2
    for count, fits in ((2, True), (3, False)):
        m = ta.Migration({f"a{n} : x": (f"b{n} : x", pad) for n in range(count)})
        source = dict([*leaves.items()][:count])
        if fits:
            assert len(m.plan(source).result) == count
            continue
        with pytest.raises(ta.MigrationError, match=r"1 group: .* much of\n  'a2'"):
            m.plan(source)
    copies = ta.Migration({"a0 : x": tuple(f"{n} : x" for n in range(83))})
    with pytest.raises(
        ta.MigrationError, match="at most 32 times its bytes, and 100 B"
    ):
        copies({"a0": leaves["a0"]})
    half = ta.Migration({"a0": (("b", "c"), {"cast": "int64"})})
    assert half({"a0": np.ones(2_000_000, np.int8)}).keys() == {"b", "c"}
    # What stays the same array takes no memory.
    names = ta.Migration({"a0": tuple(str(n) for n in range(200))})
    assert len(names({"a0": leaves["a0"]})) == 200
