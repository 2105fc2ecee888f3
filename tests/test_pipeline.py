"""What the page on pipelines says of JSON and exit codes is what the command prints."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import command
import jax.numpy as jnp
import pytest

import treeadapt as ta

PAGE = Path(__file__).parent.parent / "docs" / "json.md"
(BLOCK,) = re.findall(r"```json\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
SCHEMAS = json.loads(BLOCK)
TYPES = {"text": str, "int": int, "bool": bool, "any": object}
TREE = {"body": {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}, "head": {"w": jnp.ones(3)}}
RULES = 'version = 1\n[rules]\n"body" = "frozen"\n"hed" = "train"\n"**" = "train"\n'


def faults(schema: Any, data: Any, place: str = "") -> list[str]:
    """Return where data is not as a schema of the page says."""
    if isinstance(schema, str):
        kind = TYPES[schema.removesuffix("?")]
        is_right = isinstance(data, kind) and (kind is not int or type(data) is int)
        is_right |= data is None and schema.endswith("?")
        return [] if is_right else [f"{place} is {data!r}, not {schema}"]
    if type(schema) is not type(data):
        # The shape of what is no array.
        is_null = data is None and place.endswith(("/shape", "/spec"))
        return [] if is_null else [f"{place} is {data!r}, not {schema}"]
    if isinstance(schema, list):
        return [x for item in data for x in faults(schema[0], item, f"{place}/*")]
    if "*" in schema:
        return [x for key in data for x in faults(schema["*"], data[key], f"{place}/*")]
    names = {key.removesuffix("?"): key for key in schema}
    required = {key for key in schema if not key.endswith("?")}
    wrong = [f"{place} has {name}" for name in data.keys() - names.keys()]
    wrong += [f"{place} lacks {name}" for name in required - data.keys()]
    for name in names.keys() & data.keys():
        wrong += faults(schema[names[name]], data[name], f"{place}/{name}")
    return wrong


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    names = ("model.safetensors", "other.safetensors", "rules.toml")
    model, other, rules = (tmp_path / name for name in names)
    ta.save(model, TREE)
    ta.save(other, {"body": TREE["body"], "out": TREE["head"]})
    rules.write_text(RULES)
    return {"model": model, "other": other, "rules": rules}


def read(*arguments: Any, code: int = 0) -> Any:
    """Run a command; its document, which is as the page says."""
    document = json.loads(command.run(*arguments, "--format", "json", code=code))
    assert faults(SCHEMAS[arguments[0]], document) == []
    return document


def test_a_document_that_is_not_as_the_page_says_is_seen():
    schema = {"a": "int", "b?": ["text?"], "c": {"*": "bool"}}
    assert faults(schema, {"a": 1, "c": {"x": True}}) == []
    for wrong in (
        {"a": True, "c": {}},
        {"a": 1},
        {"a": 1, "c": {}, "d": 1},
        {"a": 1, "b": [1], "c": {}},
        {"a": 1, "c": {"x": 1}},
        {"a": None, "c": {}},
        [],
    ):
        assert faults(schema, wrong)


def test_lint_prints_what_the_page_lists(files):
    (finding,) = read("lint", files["model"], "--rules", files["rules"], code=1)
    assert finding["kind"] == "unused"
    assert finding["rule"] == 2
    files["rules"].write_text(RULES.replace('"hed" = "train"\n', ""))
    assert read("lint", files["model"], "--rules", files["rules"]) == []
    optimizer = '[optimizers.train]\ntype = "adamm"\n'
    files["rules"].write_text(f'version = 1\n[rules]\n"**" = "train"\n{optimizer}')
    (finding,) = read("lint", "--rules", files["rules"], code=1)
    assert finding["place"] == ["optimizers", "train", "type"]


def test_diff_prints_what_the_page_lists(files):
    document = read("diff", files["model"], files["other"], code=1)
    (difference,) = document["differences"]
    assert difference["kind"] == "renamed"
    assert read("diff", files["model"], files["model"])["differences"] == []
    assert read("diff", files["model"], files["model"], "--values")["values_compared"]


def test_compare_prints_what_the_page_lists(files):
    model, other = files["model"], files["other"]
    document = read("compare", model, other, code=1)
    assert document["missing"] == ["out/w"]
    assert document["unexpected"] == ["head/w"]
    assert not document["fits"]
    assert read("compare", model, model)["fits"]
    table = model.with_name("table.toml")
    table.write_text(ta.Migration({"head/w": "out/w", "{r:**}": "{r}"}).to_toml())
    assert read("compare", model, other, "--migration", table)["fits"]
    text = command.run("compare", model, other, code=1)
    assert "1 missing, 1 unexpected.\n  missing 'out/w'\n" in text
    assert f"note: treeadapt draft {model} {other} writes a table." in text


def test_compare_says_which_call_loads_a_part(files):
    target = dict(ta.read_metadata(files["model"]))
    whole = files["model"].with_name("whole.safetensors")
    ta.save(whole, {"params": {path: jnp.ones(x.shape) for path, x in target.items()}})
    text = command.run("compare", whole, files["model"], code=1)
    assert "All leaves of the target are below 'params' in it: ta.load(" in text
    assert "treeadapt draft" not in text
    assert "where='params'" in read("compare", whole, files["model"], code=1)["hint"]
    report = ta.compare_checkpoint(whole, target)
    assert report.hint in str(report)
    loaded = ta.load(whole, {"params": target}, where="params")["params"]
    assert [*loaded] == [*target]


def test_compare_says_numbers_as_json_can(files):
    ta.save(files["model"], {"loss": float("nan"), "w": jnp.ones((2, 3)), "step": 7})
    ta.save(files["other"], {"loss": 0.5, "w": jnp.ones((2, 2)), "step": 7.5})
    document = read("compare", files["model"], files["other"], code=1)
    assert [*document["misshaped"]] == ["w"]


def test_compare_says_numbers_that_change(files, tmp_path, monkeypatch):
    ta.save(files["model"], {"w": jnp.ones(2), "loss": float("nan"), "step": 7})
    tree = "{'w': numpy.ones(2, 'f'), 'loss': 0.5, 'step': 8}"
    (tmp_path / "numbers_of_mine.py").write_text(f"import numpy\ntree = {tree}\n")
    monkeypatch.syspath_prepend(tmp_path)
    document = read("compare", files["model"], "numbers_of_mine:tree")
    assert document["numbers"] == {"loss": ["nan", 0.5], "step": [7, 8]}


def test_compare_names_the_order_of_its_arguments(files):
    text = command.run("compare", "model:init", files["model"], code=2)
    assert "the order is CHECKPOINT, then TARGET" in text


def test_show_prints_what_the_page_lists(files, tmp_path):
    model, rules = files["model"], files["rules"]
    rules.write_text(RULES.replace('"hed" = "train"\n', ""))
    assert read("show", model, "--rules", rules)["leaves"]
    assert read("show", model, "--rules", rules, "--depth", 1)["nodes"]
    rules.write_text('version = 1\n[rules]\n"**" = []\n')
    assert read("show", model, "--rules", rules, "--mesh", "data=2")["memory"]
    tables = '[optimizers.train]\ntype = "sgd"\nlearning_rate = 1.0\n'
    rules.write_text(f'version = 1\n[rules]\n"**" = "train"\n{tables}')
    assert read("show", model, "--rules", rules)["optimizers"]


def test_draft_prints_what_the_page_lists(files):
    output = files["rules"].with_name("draft.toml")
    document = read("draft", files["model"], files["other"], "--output", output)
    assert "head/w" in document["doubtful"]
    assert output.read_text() == document["table"]


def test_tables_prints_what_the_page_lists():
    assert {each["name"] for each in read("tables", "tunix")} > {"tunix/qwen3"}
    (table,) = read("tables", "tunix/qwen3")
    assert table["card"]
    assert "no layout" in command.run("tables", "x/y", "--format", "json", code=2)


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_what_cannot_be_read_is_never_an_answer(name, tmp_path, files):
    absent = tmp_path / "absent.safetensors"
    more = {
        "lint": ("--rules", files["rules"]),
        "diff": (files["model"],),
        "compare": (files["model"],),
        "draft": (files["model"],),
        "show": (),
        "tables": (),
    }
    result = command.invoke(name, absent, *more[name], "--format", "json")
    assert result.exit_code == 2
    assert result.stdout == ""


def fails():
    """A function whose tree cannot be made."""
    raise ValueError('{"not": "an answer"}')


WRONG_FILES = {
    "empty.safetensors": b"",
    "cut.safetensors": b"\x40\0\0\0\0\0\0\0{",
    "page.safetensors": b"<!doctype html><p>error</p>",
    "pointer.safetensors": b"version https://git-lfs.github.com/spec/v1\noid sha256:0",
    "notes.txt": b"notes",
    "broken.toml": b"version = 1\n[rules\n",
    "old.toml": b"version = 7\n[rules]\n",
    "regex.toml": b'version = 1\n[rules]\n"re:.*" = "train"\n',
    "rows.toml": b'version = 1\n[[rows]]\nfrom = "{x:**}"\nto = "a/{x}"\n',
    "lost.toml": b'version = 1\n[[rows]]\nfrom = "nothing"\nto = "new"\n',
    "json.json": b'{"version": 1, "rules": 3}',
}
# Words that name a file of these, or of ``files``, are its path.
WRONG_INPUTS = [
    *(f"show {name}" for name in WRONG_FILES if not name.endswith(".toml")),
    "show folder",
    "show no_such_module:fn",
    "show test_pipeline:nothing",
    "show test_pipeline:fails",
    "show model --rules broken.toml",
    "show model --rules rows.toml",
    "show model --rules rules --mesh data=x",
    "show model --rules rules --mesh data=2",
    "show model --filter nothing",
    "show model --rules rules --optimizer test_pipeline:fails",
    "show model --depth 0",
    "show tunix/none",
    "lint model",
    "lint rules --rules model",
    "lint model --rules json.json",
    "lint model --rules old.toml",
    "lint model --rules regex.toml",
    "lint model --rules rules --migration rows.toml",
    "lint model --migration tunix",
    "lint model --migration broken.toml",
    "lint model cut.safetensors --migration rows.toml",
    "lint test_pipeline:fails --rules rules",
    "diff model",
    "diff model notes.txt",
    "diff model other --where nothing",
    "diff model test_pipeline:fails",
    "diff model cut.safetensors --values",
    "compare model rules",
    "compare rules model",
    "compare model other --where nothing",
    "compare model other --migration lost.toml",
    "compare model other --migration rules",
    "compare model other --migration tunix/none",
    "compare model test_pipeline:fails",
    "compare test_pipeline:fails model",
    "compare pointer.safetensors model",
    "draft model",
    "draft model notes.txt",
    "draft model other --output rules",
    "draft model --convert test_pipeline:fails",
    "draft model other --synonyms broken.toml",
    "draft cut.safetensors model",
    "tables no-layout",
    "tables tunix/none",
    "tables tunix/qwen3 more",
]


@pytest.mark.parametrize("words", WRONG_INPUTS)
def test_no_wrong_input_prints_a_document(words, files, tmp_path, monkeypatch):
    """Nor anything on standard error that a program could take for one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name, data in WRONG_FILES.items():
        (tmp_path / name).write_bytes(data)
    arguments = [files.get(word, word) for word in words.split()]
    result = command.invoke(*arguments, "--format", "json")
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert lines[0].startswith("error: ")
    assert 1 <= len(lines) <= 2
    for line in lines:
        with pytest.raises(json.JSONDecodeError):
            json.loads(line)
