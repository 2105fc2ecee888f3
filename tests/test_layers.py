"""The rooms of the package: who may import whom, and what ``import treeadapt`` costs.

Reads the source with ``ast``; imports inside functions and under ``TYPE_CHECKING``
count, and so do names of modules in strings. The complaints themselves are tested on
small packages that each break one law.
"""

from __future__ import annotations

import ast
import collections
import functools
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from forks import Forks

REPOSITORY = Path(__file__).parent.parent
PACKAGE = REPOSITORY / "treeadapt"

# A room imports rooms of earlier lines only. A folder is one room.
ROOMS = (
    ("errors", "_version"),
    ("text",),
    ("trees",),
    ("patterns",),
    ("layers",),
    ("selection",),
    ("transforms",),
    ("migrations", "optimizers"),
    ("state", "sharding"),
    ("checkpoints",),
    # The core runs tables, rules and optimizers; ``porting``, the workshop, writes and
    # checks tables. Only the command and the face know it.
    ("reports", "porting"),
    ("cli",),
    # A line each: the command prints the reports and ``__main__`` calls it.
    ("__main__",),
    ("testing",),
)
MOST_ROOMS = 17
LINE_OF = {room: line for line, rooms in enumerate(ROOMS) for room in rooms}

EVERYWHERE = frozenset({*sys.stdlib_module_names, "jax", "numpy", "optax"})
# An adapter file may also import the library that it is named after.
OWNED = {
    "trees.adapters.nnx": {"flax"},
    "checkpoints": set(),
    "checkpoints.msgpack_file": {"flax"},
    "checkpoints.orbax_folder": {"etils", "orbax"},  # etils: its paths
    "checkpoints.remote": {"aiohttp", "fsspec"},
    "checkpoints.safetensors_file": {"safetensors"},
    "cli": {"click"},
    "cli.bench": {"click", "flax", "optree", "tree"},  # what it compares with
    "porting.drafts.pairing": {"scipy"},  # which JAX needs, too
}

# A string that names a module of the package, as passed to ``importlib``.
NAME_OF_MODULE = re.compile(r"treeadapt(\.\w+)+")

UNDOCUMENTED_ENDS = ("default_registry", "_src", "walk")
UNDOCUMENTED = {"jtu.default_registry", "jax.tree_util.default_registry"}

# Tests ask the face, so that rooms can be moved. These import a room, and why.
FACES = {"treeadapt", "treeadapt.testing", "treeadapt.cli.commands"}
TESTS_IN_ROOMS = {
    "process_checkpoints_worker.py": "faults in one process of several",
    "programs.py": "trees with None for leaves, which the face refuses to make",
    "test_accelerators.py": "CPUs in the place of accelerators, and buffers",
    "test_caches.py": "what is remembered, and for how long",
    "test_carry_migration.py": "whether every power of a field is one that Optax shows",
    "test_chains.py": "which arrays are read, and how often",
    "test_checkpoint_faults.py": "faults between the steps of a save",
    "test_cli.py": "interrupts, small batches, and what is in memory at a time",
    "test_decoding.py": "boxes of decoded arrays, and which bytes are read",
    "test_doctests.py": "runs the examples of every module",
    "test_drafts.py": "fewer words, a small limit, and single rows of a draft",
    "test_drafts_without.py": "mechanisms of drafts, switched off one by one",
    "test_drawing.py": "whether colors can be told apart, and texts fit",
    "test_explaining.py": "explanations that fail",
    "test_found_files.py": "files that change while they are read",
    "test_hash_seeds.py": "tokens of statics, whose order nothing else shows",
    "test_jax_internals.py": "each undocumented call into JAX",
    "test_load_migration.py": "how much of a file is read, and when",
    "test_loading.py": "files whose content is not what their metadata says",
    "test_matcher.py": "the automaton against the reference, and its limits",
    "test_patterns.py": "what each form is parsed into",
    "test_places.py": "the line of each key of a file",
    "test_published.py": "keys of [config] that tables name",
    "test_registry.py": "adapter files loaded in another order",
    "test_remote.py": "requests that fail, and what each process reads",
    "test_replacing.py": "faults between the steps of replacing",
    "test_shards.py": "the order of reading and writing, and how leaves are divided",
    "test_matching.py": "what counts as rounding",
    "test_matching_layouts.py": "cuts of shapes, without models",
    "test_nested_parts.py": "boxes of an array that no file has, and what they cost",
    "test_slices.py": "which bytes are read, and parts of boxes",
    "test_stacks_properties.py": "names of layers there and back, of any number",
    "test_state.py": "all places of a name in a state, and the table of fields",
    "test_torch_files.py": "limits made small, and arrays read in small blocks",
    "test_untrusted.py": "limits, compared with the policy and made small",
}
# Whatever names a room has one of these, so most files need not be parsed.
MAY_ASK = re.compile(rf"treeadapt\.|treeadapt import|\bta\.(?:{'|'.join(LINE_OF)})\b")
PROGRAM_IMPORTS = re.compile(r"^ *(?:from|import) (treeadapt(?:\.\w+)+)", re.MULTILINE)

# Top-level entries; more of them would hide the important ones.
TOP_LEVEL = {
    ".ci",
    ".gitignore",
    ".pre-commit-hooks.yaml",
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "LICENSE",
    "MANIFEST.in",
    "Makefile",
    "README.md",
    "SECURITY.md",
    "benchmarks",
    "docs",
    "setup.cfg",
    "setup.py",
    "tests",
    "treeadapt",
}


def complaints(package: Path) -> Iterator[str]:
    """Every import in ``package`` that breaks a law, one per line."""
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package).with_suffix("").parts
        room, module = parts[0], ".".join(parts)
        if room != "__init__" and room not in LINE_OF:
            yield f"{module}: has no line in ROOMS"
            continue
        for target, line in _imports(file, package):
            reason = _reason(room, module, target)
            if reason:
                yield f"{module}:{line}: {reason} ({target})"
        if module != "trees._jax":
            for call, line in _undocumented(file):
                yield f"{module}:{line}: calls what JAX does not document ({call})"


@functools.cache  # several tests read each file, and to walk it takes long
def nodes_in(source: str) -> list[ast.AST]:
    """What a source imports, its attributes and its constants, in order."""
    kinds = ast.Import | ast.ImportFrom | ast.Attribute | ast.Constant
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]


def _imports(file: Path, package: Path) -> Iterator[tuple[str, int]]:
    """Absolute dotted names that ``file`` imports, with line numbers."""
    for node in nodes_in(file.read_text("utf-8")):
        if isinstance(node, ast.Import):
            for alias in node.names:
                # Without ``as`` this binds the package, whatever follows the dot.
                bound = alias.name if alias.asname else alias.name.split(".")[0]
                yield bound, node.lineno
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield "." * node.level + (node.module or ""), node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == package.name:
            for alias in node.names:
                yield _room_or_face(package, alias.name), node.lineno
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module), node.lineno
        elif isinstance(node, ast.Constant) and NAME_OF_MODULE.fullmatch(
            str(node.value)
        ):
            yield str(node.value), node.lineno  # for ``importlib``


def _undocumented(file: Path) -> Iterator[tuple[str, int]]:
    """Uses of undocumented parts of JAX, with line numbers; ``_jax`` has them."""
    for node in nodes_in(file.read_text("utf-8")):
        if isinstance(node, ast.Attribute) and node.attr in UNDOCUMENTED_ENDS:
            text = ast.unparse(node)
            if (
                text in UNDOCUMENTED
                or text.startswith("jax._src")
                or (text.endswith(".walk") and text not in ("_jax.walk", "os.walk"))
            ):
                yield text, node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            if names & UNDOCUMENTED or node.module.startswith("jax._src"):
                yield node.module, node.lineno


def _room_or_face(package: Path, name: str) -> str:
    is_room = (package / f"{name}.py").is_file() or (package / name).is_dir()
    return f"{package.name}.{name}" if is_room else package.name


def _reason(room: str, module: str, target: str) -> str | None:
    """What is wrong with ``module`` of ``room`` importing ``target``, if anything."""
    library, _, inside = target.partition(".")
    if library != PACKAGE.name:
        return _foreign_reason(room, module, library)
    if room == "__init__":
        return None
    if not inside:
        return None if room == "__main__" else "imports the package face"
    source = inside.split(".")[0]
    if source == room:
        return None
    if source not in LINE_OF:
        return "imports a room that has no line in ROOMS"
    if LINE_OF[source] == LINE_OF[room]:
        return "imports sideways"
    return "imports upward" if LINE_OF[source] > LINE_OF[room] else None


def _foreign_reason(room: str, module: str, library: str) -> str | None:
    if not library:
        return "imports relatively"
    owned = OWNED.get(module, OWNED.get(room, set()))
    if library in EVERYWHERE | owned:
        return None
    if module == f"trees.adapters.{library}":
        return None
    return "imports a library that it does not own"


def test_data_flows_one_way():
    assert list(complaints(PACKAGE)) == []


def test_a_folder_or_a_module_at_the_top_is_a_room_and_there_are_few():
    top = {path.stem for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    top |= {path.stem for path in PACKAGE.glob("*.py")}
    top -= {"__init__", "__main__", "_version"}
    assert top == LINE_OF.keys() - {"__main__", "_version"}
    assert len(top) <= MOST_ROOMS


@pytest.mark.slow
def test_only_the_command_and_the_face_import_the_workshop():
    importing = {
        file.relative_to(PACKAGE).parts[0]
        for file in PACKAGE.rglob("*.py")
        for target, _ in _imports(file, PACKAGE)
        if target.startswith("treeadapt.porting")
    }
    assert importing == {"porting", "cli"}  # the face has names of rooms in strings


def test_no_module_imports_itself_by_way_of_others():
    files = {
        ".".join(file.relative_to(REPOSITORY).with_suffix("").parts): file
        for file in PACKAGE.rglob("*.py")
        if file.stem != "__init__"
    }
    imports: dict[str, set[str]] = {module: set() for module in files}
    for module, file in files.items():
        for node in nodes_in(file.read_text("utf-8")):
            if isinstance(node, ast.ImportFrom):
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                imports[module] |= {str(node.module), *names} & files.keys()
    graphlib.TopologicalSorter(imports).prepare()  # raises for a circle


#: Functions that every format of a checkpoint has, or that say the same of a file and
#: of a table; and the entry of the program.
SHARED = {
    *("main", "read", "read_metadata", "refuse", "others", "write"),
    *("checkpoints", "parts"),
}


def pages_on_design() -> Iterator[str]:
    yield (REPOSITORY / "docs" / "design.md").read_text("utf-8")
    for page in sorted((REPOSITORY / "docs" / "design").glob("*.md")):
        yield page.read_text("utf-8")


def defined_in(file: Path) -> set[str]:
    """Names of classes, functions, variables and fields, at any depth."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def test_the_pages_on_design_name_files_that_exist():
    folders = {file.parent.name for file in PACKAGE.glob("*/__init__.py")}
    names = {
        name
        for page in pages_on_design()
        for name in re.findall(r"`(\w+(?:/\w+)+)`", page)
        if name.split("/")[0] in folders
    }
    assert len(names) > 50
    assert sorted(n for n in names if not (PACKAGE / f"{n}.py").exists()) == []


#: What the list of rooms explains; and modules that hold the public function after
#: which they are named, and call the others of their room.
EXPLAINED = {
    *("errors", "testing", "__main__", "_version"),
    *("migrations/migration", "porting/drafts/draft"),
}


def test_the_page_on_design_says_what_each_file_is_for():
    page = next(pages_on_design())
    files = {
        str(file.relative_to(PACKAGE).with_suffix(""))
        for file in PACKAGE.rglob("*.py")
        if file.stem != "__init__" and file.parent.name != "adapters"
    }
    named = {*re.findall(r"`([\w/]+)`", page)}
    missing = {file for file in files if not {file, file.split("/")[-1]} & named}
    assert missing == EXPLAINED


@pytest.mark.slow
def test_the_pages_on_design_name_what_is_in_these_files():
    pairs = {
        pair
        for page in pages_on_design()
        for pair in re.findall(r"`([\w.]+)`,?\s(?:in|of)\s`(\w+(?:/\w+)+)`", page)
    }
    assert len(pairs) > 15
    assert [
        (name, file)
        for name, file in sorted(pairs)
        if not {*name.split(".")} <= defined_in(PACKAGE / f"{file}.py")
    ] == []


@pytest.mark.slow
def test_no_two_classes_and_no_two_functions_have_one_name():
    homes = collections.defaultdict(set)  # an overload is in its file several times
    for file in PACKAGE.rglob("*.py"):
        for node in ast.parse(file.read_text("utf-8")).body:
            is_class = isinstance(node, ast.ClassDef)
            is_function = isinstance(node, ast.FunctionDef) and node.name[0] != "_"
            if is_class or is_function:
                homes[node.name].add(str(file.relative_to(PACKAGE)))
    clashes = {name: files for name, files in homes.items() if len(files) > 1}
    assert clashes.keys() == SHARED, clashes


def rooms_asked(file: Path) -> set[str]:
    """The modules of rooms that a test imports or names, in programs that it runs too.

    Patches by name count, and so does a room as an attribute of the package.
    """
    source = file.read_text("utf-8")
    if not MAY_ASK.search(source):
        return set()
    names = {name for name, _ in _imports(file, PACKAGE)}
    for node in nodes_in(source):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.update(PROGRAM_IMPORTS.findall(node.value))
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "ta":
            names.add(_room_or_face(PACKAGE, node.attr))
    return {
        name
        for name in names - FACES
        if name.partition("treeadapt.")[2].split(".")[0] in LINE_OF
    }


@pytest.mark.slow
def test_tests_import_no_room_but_where_the_face_would_not_do():
    tests = Path(__file__).parent
    asking = {
        str(file.relative_to(tests)): sorted(rooms)
        for file in tests.rglob("*.py")
        if file != Path(__file__) and (rooms := rooms_asked(file))
    }
    assert {name: asking[name] for name in asking.keys() - TESTS_IN_ROOMS.keys()} == {}
    assert TESTS_IN_ROOMS.keys() - asking.keys() == set()


@pytest.mark.parametrize(
    "source",
    [
        "from treeadapt.trees.views import view_tree",
        "def f():\n    import treeadapt.trees.state_dict as c",
        "from treeadapt import patterns",
        "patch.setattr('treeadapt.patterns.matcher.MAX_WEIGHT', 3)",
        "x = ta.patterns.parse",
        "PROGRAM = 'import sys\\nfrom treeadapt.checkpoints import replacing'",
    ],
)
def test_a_test_that_asks_a_room_is_seen(tmp_path, source):
    file = tmp_path / "test_it.py"
    file.write_text(source)
    assert len(rooms_asked(file)) == 1
    file.write_text(
        "import treeadapt as ta\nfrom treeadapt import glob\n"
        "from treeadapt.testing import check_adapter\n"
        "from treeadapt.cli.commands import app\nx = ta.partition, 'treeadapt.lift'"
    )
    assert rooms_asked(file) == set()


def test_the_test_reads_the_package():
    # An empty glob would pass every law.
    assert "errors" in {file.stem for file in PACKAGE.rglob("*.py")}


@pytest.mark.parametrize(
    ("file", "source", "reason"),
    [
        ("text.py", "from treeadapt.trees.state_dict import f", "imports upward"),
        ("text.py", "def f():\n    from treeadapt import trees", "imports upward"),
        ("text.py", "import treeadapt.trees.state_dict as r", "imports upward"),
        ("text.py", "if TYPE_CHECKING:\n    import treeadapt.trees as r", "upward"),
        ("trees/adapters/x.py", "from treeadapt.transforms.adapt import f", "upward"),
        ("errors.py", "from treeadapt._version import E", "imports sideways"),
        ("text.py", "x = 'treeadapt.trees.state_dict'", "imports upward"),
        ("text.py", "import treeadapt", "package face"),
        ("text.py", "import treeadapt.errors", "package face"),
        ("text.py", "from treeadapt import Rules", "package face"),
        ("text.py", "from .errors import E", "imports relatively"),
        ("text.py", "from . import errors", "imports relatively"),
        ("utils.py", "", "has no line in ROOMS"),
        ("text.py", "from treeadapt.nowhere import x", "has no line in ROOMS"),
        ("text.py", "import flax", "does not own"),
        ("layers.py", "def f():\n    import equinox as eqx", "does not own"),
        ("transforms/adapt.py", "from chex import dataclass", "does not own"),
        ("trees/adapters/equinox.py", "import flax.nnx", "does not own"),
        ("trees/adapters/penzai.py", "from haiku import x", "does not own"),
        ("reports/summary.py", "import click", "does not own"),
        ("__init__.py", "import rich", "does not own"),
        ("text.py", "x = jtu.default_registry.flatten", "does not document"),
        ("text.py", "from jax._src import tree_util", "does not document"),
        ("text.py", "from jax.tree_util import default_registry", "does not doc"),
        ("text.py", "def f(treedef):\n    treedef.walk(g)", "does not document"),
    ],
)
def test_a_broken_law_is_reported(tmp_path, file, source, reason):
    package = _package(
        tmp_path, {"trees/__init__.py": "", "_version.py": "", file: source}
    )
    (found,) = complaints(package)
    assert reason in found


def test_a_package_that_keeps_the_laws_passes(tmp_path):
    allowed = {
        "errors.py": "import os.path\nimport jax.numpy as jnp",
        "text.py": "from treeadapt import errors\nfrom treeadapt.errors import E",
        "trees/adapters/flax.py": "import flax.linen as nn\nimport treeadapt.text as r",
        "trees/adapters/nnx.py": "from treeadapt.trees.walk import f\nimport flax",
        "patterns/matcher.py": "from treeadapt.trees import _jax",
        "trees/_jax.py": "x = jtu.default_registry.flatten",
        "checkpoints/orbax_folder.py": "def f():\n    import orbax.checkpoint",
        "cli.py": "import click\nfrom treeadapt.reports.summary import summarize",
        "reports/summary.py": "from treeadapt.trees.state_dict import as_rules",
        "__init__.py": "from treeadapt.errors import E",
        "__main__.py": "from treeadapt.cli import main",
    }
    assert list(complaints(_package(tmp_path, allowed))) == []


def _package(folder: Path, files: dict[str, str]) -> Path:
    for name, source in files.items():
        file = folder / PACKAGE.name / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source, "utf-8")
    return folder / PACKAGE.name


NEW_LIBRARIES = """
import sys
import jax, jax.numpy, numpy, optax
before = set(sys.modules)
{statement}
roots = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(*sorted(roots - set(sys.stdlib_module_names) - {{"treeadapt"}}))
"""


def _libraries_that_come_with(statement: str, fresh: Forks) -> list[str]:
    run = fresh.run(NEW_LIBRARIES.format(statement=statement))
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


def test_importing_the_package_imports_only_jax_numpy_and_optax(fresh):
    assert _libraries_that_come_with("import treeadapt", fresh) == []


@pytest.mark.slow
def test_the_import_probe_sees_a_library(fresh):
    assert "flax" in _libraries_that_come_with("import flax", fresh)


COMPLETING = """
import sys
from click.shell_completion import ShellComplete
from treeadapt.cli.commands import app
typed = [["--help"], *([name, "--help"] for name in app.commands)]
for words in typed:
    app.main(words, prog_name="treeadapt", standalone_mode=False)
for words, start in (([], "s"), (["show"], "--"), (["lint", "x", "--ignore"], "un")):
    shell = ShellComplete(app, {}, "treeadapt", "_TREEADAPT_COMPLETE")
    print([each.value for each in shell.get_completions(words, start)])
print(*sorted({"jax", "numpy", "optax"} & set(sys.modules)))
"""


@pytest.mark.slow
def test_help_and_completion_import_no_jax_and_no_numpy():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", COMPLETING],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    *_, commands, options, kinds, libraries = done.stdout.splitlines()
    assert commands == "['show']"
    assert "'--depth', '--statics'" in options
    assert kinds == "['unmatched', 'unused']"
    assert libraries == ""


def test_the_top_level_holds_only_what_the_design_fixes():
    listed = subprocess.run(
        ["git", "-C", str(REPOSITORY), "ls-files"],
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("no git repository here: an unpacked archive")
    tracked = {name.split("/")[0] for name in listed.stdout.splitlines()}
    assert tracked <= TOP_LEVEL, sorted(tracked - TOP_LEVEL)
