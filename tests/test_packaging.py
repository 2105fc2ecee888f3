"""What is built and published: wheel, sdist, metadata, versions, changelog.

Builds from a copy of the sources, without a network. The build library is one of the
test libraries, and the fresh environment uses this one's JAX through a path file.
"""

from __future__ import annotations

import ast
import configparser
import email
import inspect
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import click
import jax
import numpy as np
import pytest
import yaml

import treeadapt as ta

REPOSITORY = Path(__file__).parent.parent
SOURCES = ("MANIFEST.in", "setup.cfg", "setup.py", "README.md", "LICENSE", "treeadapt")
SETUP = (REPOSITORY / "setup.cfg").read_text("utf-8")

sys.path.append(str(REPOSITORY / ".ci"))
from alone import BASE, JOBS  # noqa: E402
from lowest import lowest  # noqa: E402


def run(*command, cwd, **variables):
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=env | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(folder, *options):
    command = (sys.executable, "-m", "build", "--no-isolation", *options)
    assert "Deprecat" not in run(*command, cwd=folder)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return wheel and sdist, built from a clean copy of the sources."""
    folder = tmp_path_factory.mktemp("built")
    for name in SOURCES:
        source = REPOSITORY / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, folder / name, ignore=ignored)
        else:
            shutil.copy(source, folder)
    (folder / "tests").mkdir()
    shutil.copy(__file__, folder / "tests")
    build(folder)
    (wheel,) = folder.glob("dist/*.whl")
    (sdist,) = folder.glob("dist/*.tar.gz")
    return wheel, sdist


def members(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def metadata(wheel):
    (text,) = (
        text for name, text in members(wheel).items() if name.endswith("/METADATA")
    )
    return email.message_from_bytes(text)


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(built):
    package = {
        str(file.relative_to(REPOSITORY)): file.read_bytes()
        for file in sorted((REPOSITORY / "treeadapt").rglob("*"))
        if file.is_file() and file.suffix != ".pyc"
    }
    found = members(built[0])
    inside = {name: text for name, text in found.items() if ".dist-info/" not in name}
    assert inside == package
    assert {"treeadapt/py.typed", "treeadapt/__init__.pyi"} <= set(inside)


@pytest.mark.slow
def test_the_sdist_builds_the_same_wheel(built, tmp_path):
    wheel, sdist = built
    # The first releases of Python 3.11 have no filters.
    options = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, **options)
    (folder,) = tmp_path.iterdir()
    made = {"PKG-INFO", "treeadapt.egg-info"}
    assert {file.name for file in folder.iterdir()} == made | set(SOURCES)
    assert (folder / "treeadapt" / "py.typed").is_file()
    assert (folder / "treeadapt" / "__init__.pyi").is_file()
    build(folder, "--wheel")
    (again,) = folder.glob("dist/*.whl")
    assert members(again) == members(wheel)


@pytest.mark.slow
def test_the_metadata_is_complete(built):
    found = metadata(built[0])
    assert (found["Name"], found["Version"]) == ("treeadapt", ta.__version__)
    assert found["Summary"]
    assert found["Author"]
    assert found["Keywords"]
    assert found["Requires-Python"] == ">=3.11"
    assert found["License-Expression"] == "Apache-2.0"
    assert found["License-File"] == "LICENSE"
    assert any(name.endswith("/licenses/LICENSE") for name in members(built[0]))
    assert found["Description-Content-Type"] == "text/markdown"
    readme = (REPOSITORY / "README.md").read_text("utf-8")
    assert found.get_payload(decode=True).decode().strip() == readme.strip()
    classifiers = found.get_all("Classifier")
    assert "Typing :: Typed" in classifiers
    # A license expression and a license classifier together are refused by the index.
    assert not [text for text in classifiers if text.startswith("License ::")]
    assert not found.get_all("Project-URL")
    extras = {"all", "bench", "brax", "checkpoints", "docs", "equinox", "flax"}
    assert {*found.get_all("Provides-Extra")} == extras | {"hub", "remote", "test"}
    required = [text for text in found.get_all("Requires-Dist") if "extra" not in text]
    assert [re.split(r"[<>=]", text)[0] for text in required] == [
        "click",
        "jax",
        "numpy",
        "optax",
    ]


@pytest.mark.slow
def test_the_wheel_works_in_a_fresh_environment_outside_the_sources(built, tmp_path):
    venv.create(tmp_path / "env", symlinks=os.name != "nt")
    (site,) = tmp_path.glob("env/lib/python3*/site-packages")
    # Path files there are not read, so an editable treeadapt is not found.
    libraries = dict.fromkeys(Path(lib.__file__).parent.parent for lib in (jax, click))
    (site / "here.pth").write_text("".join(f"{folder}\n" for folder in libraries))
    scripts = tmp_path / "env" / "bin"
    python = scripts / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "-q")
    run(*pip, "--no-deps", "--no-index", "--force-reinstall", built[0], cwd=tmp_path)
    found = run(
        python,
        "-W",
        "error",
        "-c",
        "import treeadapt as ta\n"
        "print(ta.__file__)\n"
        "print(*(getattr(ta, name) is not None for name in ta.__all__))\n"
        "print(ta.tree_paths({'layers': [{'w': 1.0}]}))",
        cwd=tmp_path,
    ).splitlines()
    assert Path(found[0]).is_relative_to(site)
    assert set(found[1].split()) == {"True"}
    assert found[2] == "('layers/0/w',)"
    version = f"treeadapt, version {ta.__version__}\n"
    assert run(scripts / "treeadapt", "--version", cwd=tmp_path) == version
    rules = tmp_path / "rules.toml"
    rules.write_text('version = 1\n[rules]\n"**" = "train"\n')
    np.savez(tmp_path / "tree.npz", **{"a/b": np.ones(2)})
    explain = ("explain", "tree.npz", "a/b", "--rules", rules)
    told = run(scripts / "treeadapt", *explain, cwd=tmp_path)
    assert "'a/b' gets 'train'" in told
    assert "tunix/qwen3 " in run(scripts / "treeadapt", "tables", "tunix", cwd=tmp_path)
    card = run(scripts / "treeadapt", "tables", "tunix/qwen3", cwd=tmp_path)
    assert "compared with" in card


#: Uses every public name, and the command; in a new process, from ``sys.argv[1]``.
USE = """
import sys, warnings
warnings.simplefilter("error")
sys.path.insert(0, sys.argv[1])
import treeadapt
from treeadapt import *
assert treeadapt.__file__.startswith(sys.argv[1]), treeadapt.__file__
assert set(treeadapt.__all__) <= set(globals()) & set(dir(treeadapt))
print(*sorted(treeadapt.__all__))
print(tree_paths({"layers": [{"w": 1.0}]}))
print(len(load_migration("tunix/qwen3").rows))
from treeadapt.cli.commands import main
main(["--version"])
"""


def used_from(place, tmp_path):
    names, *lines = run(sys.executable, "-c", USE, place, cwd=tmp_path).splitlines()
    assert names.split() == sorted(ta.__all__)
    version = f"treeadapt, version {ta.__version__}"
    num_rows = len(ta.load_migration("tunix/qwen3").rows)
    assert num_rows > 5
    assert lines == ["('layers/0/w',)", str(num_rows), version]


@pytest.mark.slow
def test_the_package_works_from_a_zip(built, tmp_path):
    used_from(built[0], tmp_path)


@pytest.mark.slow
def test_the_package_works_without_its_stub(tmp_path):
    strip = shutil.ignore_patterns("*.pyi", "py.typed", "__pycache__")
    shutil.copytree(REPOSITORY / "treeadapt", tmp_path / "treeadapt", ignore=strip)
    assert not [*tmp_path.rglob("*.pyi")]
    used_from(tmp_path, tmp_path)


def test_the_stub_has_the_public_names_and_their_rooms():
    stub = ast.parse((REPOSITORY / "treeadapt" / "__init__.pyi").read_text("utf-8"))
    *imports, listed = stub.body
    rooms = {name.name: node.module for node in imports for name in node.names}
    assert rooms == {name: f"treeadapt.{ta._ROOM_OF[name]}" for name in ta.__all__}
    assert sorted(ast.literal_eval(listed.value)) == sorted(rooms) == ta.__all__


def test_the_version_is_in_one_place():
    config = configparser.ConfigParser()
    config.read_string(SETUP)
    assert config["metadata"]["version"] == "attr: treeadapt._version.__version__"
    places = [
        str(file.relative_to(REPOSITORY))
        for folder in ("treeadapt", "docs", "tests")
        for file in sorted((REPOSITORY / folder).rglob("*.py"))
        if f'"{ta.__version__}"' in file.read_text("utf-8")
    ]
    assert places == ["treeadapt/_version.py"]
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc|\.dev)\d+)?", ta.__version__)


def test_the_changelog_has_the_form_of_keep_a_changelog():
    text = (REPOSITORY / "CHANGELOG.md").read_text("utf-8")
    assert text.startswith("# Changelog\n")
    assert "keepachangelog.com" in text
    releases = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert releases[0] == "[Unreleased]"
    dated = [re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", x) for x in releases]
    assert all(dated[1:])
    # The newest first, and none after the version that is being written.
    versions = [[*map(int, re.findall(r"\d+", x)[:3])] for x in releases[1:]]
    assert versions == sorted(versions, reverse=True)
    assert max(versions, default=[0]) <= [*map(int, re.findall(r"\d+", ta.__version__))]
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.*)$", text, re.MULTILINE)) <= kinds


def test_the_citation_says_what_setup_cfg_says():
    cited = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text("utf-8"))
    config = configparser.ConfigParser()
    config.read_string(SETUP)
    said = config["metadata"]
    assert (cited["cff-version"], cited["type"]) == ("1.2.0", "software")
    assert (cited["title"], cited["version"]) == (said["name"], ta.__version__)
    assert cited["authors"] == [{"name": said["author"]}]
    assert cited["license"] == said["license_expression"]
    assert cited["abstract"] == said["description"]
    assert cited["keywords"] == said["keywords"].split(", ")
    assert cited["message"]


def test_the_lowest_versions_are_those_of_setup_cfg():
    found = lowest(SETUP)
    bounds = set(re.findall(r"^(?:\w+ =)? +([\w-]+) *[>~]=([\w.]+)$", SETUP, re.M))
    # Also on the line of its extra.
    bounds |= set(re.findall(r"^\w+ = ([\w-]+)>=([\w.]+)$", SETUP, re.M))
    assert set(found.items()) == bounds
    assert {"jax", "numpy", "optax", "flax", "hypothesis", "sphinx"} <= set(found)


def test_the_page_of_versions_shows_the_bounds():
    page = (REPOSITORY / "docs" / "versions.md").read_text("utf-8")
    told = re.findall(r"^\| `([\w-]+)` \| ([\d.]+) \|", page, re.MULTILINE)
    bounds = lowest(SETUP)
    assert dict(told) == {name: bounds[name] for name, _ in told}
    jobs = {name for names, _ in JOBS.values() for name in names}
    assert dict(told).keys() == {"click", "jax", "numpy", "optax"} | jobs


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("x = numpy", "'numpy' has no lower bound"),
        ("x = numpy<3", "'numpy<3' has no lower bound"),
        ("x = numpy>=1.0", "numpy is bounded by 2.0 and by 1.0"),
    ],
)
def test_a_requirement_without_exactly_one_lower_bound_is_an_error(extra, message):
    setup = (
        "[metadata]\nname = a\n[options]\ninstall_requires =\n    numpy>=2.0\n"
        f"[options.extras_require]\n{extra}\nall = a[x]\n"
    )
    with pytest.raises(ValueError, match=message):
        lowest(setup)


def test_there_is_a_job_for_every_optional_library():
    config = configparser.ConfigParser()
    config.read_string(SETUP)
    extras = config["options.extras_require"]
    wanted = " ".join(extras[name] for name in ("flax", "equinox", "brax", "remote"))
    libraries = set(re.findall(r"([\w-]+)>=", wanted + extras["checkpoints"]))
    peers = {
        "attrs",
        "chex",
        "dm-haiku",
        "paramax",
        "penzai",
    }  # adapters without an extra
    jobs = {name for names, _ in JOBS.values() for name in names}
    assert jobs == libraries | peers
    assert jobs | set(BASE) <= set(lowest(SETUP))


def _functions():
    for name in ta.__all__:
        value = getattr(ta, name)
        if inspect.isfunction(value):
            yield name, value
        if inspect.isclass(value):
            for key, member in vars(value).items():
                member = getattr(member, "fget", None) or getattr(
                    member, "__func__", member
                )
                if not inspect.isfunction(member) or key.startswith("_"):
                    continue
                if member.__name__ == key:  # no default of a field, such as a lambda
                    yield f"{name}.{key}", member


@pytest.mark.parametrize("function", [pytest.param(f, id=n) for n, f in _functions()])
def test_every_public_signature_is_fully_annotated(function):
    signature = inspect.signature(function)
    assert signature.return_annotation is not inspect.Signature.empty
    bare = [
        name
        for name, parameter in signature.parameters.items()
        if parameter.annotation is inspect.Parameter.empty
    ]
    assert [name for name in bare if name not in ("self", "cls")] == []
