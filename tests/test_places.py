"""The line of each key in TOML and JSON, and of each finding of ``lint``."""

from __future__ import annotations

import itertools
import json
import tomllib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from command import run
from hypothesis import given
from hypothesis import strategies as st

import treeadapt as ta
from treeadapt.text.places import json_lines, line_of, place_text, toml_lines

# What looks like a head, a comment, a list or the end of a string, and is none.
AWKWARD = ("", "a", "[a]", "# a", '"', "\\", "'''", "=", "{", "a.b", "é\n[x]")
#: The text of a key is in the file once: its number is.
KEYS = st.sampled_from(AWKWARD)
SCALARS = st.one_of(st.integers(), st.booleans(), st.sampled_from(AWKWARD))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.lists(st.tuples(KEYS, inner), max_size=3)
    ),
    max_leaves=8,
)
TABLES = st.lists(st.tuples(KEYS, VALUES), max_size=4)


def numbered(pairs: Any, numbers: Iterator[int]) -> Any:
    """Lists of pairs as tables, each key with a number that no other has."""
    if isinstance(pairs, list) and pairs and isinstance(pairs[0], tuple):
        return {
            f"{key}{next(numbers)}@": numbered(value, numbers) for key, value in pairs
        }
    if isinstance(pairs, list):
        return [numbered(each, numbers) for each in pairs]
    return pairs


def every_place(data: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of every key of a document."""
    for key in data if isinstance(data, dict) else range(len(data)):
        if isinstance(data, dict):
            yield (*place, key)
        if isinstance(data[key], dict | list):
            yield from every_place(data[key], (*place, key))


def written(value: Any, is_long: Iterator[bool]) -> str:
    """A value as TOML, lists over several lines where ``is_long`` says so."""
    if isinstance(value, dict):
        fields = (f"{json.dumps(k)} = {written(x, is_long)}" for k, x in value.items())
        return f"{{ {', '.join(fields)} }}"
    if isinstance(value, list):
        glue = "\n  # [ {\n " if next(is_long) else " "
        return f"[{glue}{f', {glue}'.join(written(x, is_long) for x in value)}{glue}]"
    is_text = isinstance(value, str) and '"' not in value and "\\" not in value
    return f'"""\n{value}"""' if is_text and next(is_long) else json.dumps(value)


@pytest.mark.slow
@given(st.data())
def test_the_line_of_a_key_is_the_one_on_which_it_is_written(data):
    numbers = itertools.count()
    is_long = itertools.cycle(data.draw(st.lists(st.booleans(), min_size=1)))
    document = numbered(data.draw(TABLES), numbers) or {}
    lines = [f"{json.dumps(k)} = {written(x, is_long)}" for k, x in document.items()]
    statements = {(key,) for key in document}
    for key in data.draw(st.lists(KEYS, max_size=3)):
        name, tables = f"{key}{next(numbers)}@", data.draw(st.lists(TABLES, max_size=3))
        entries = [numbered(table, numbers) or {} for table in tables]
        is_list = len(entries) != 1
        for number, entry in enumerate(entries):
            head = json.dumps(name)
            lines += ["# [c]", f" [[{head}]] # x" if is_list else f" [{head}] # x"]
            lines += [
                f"{json.dumps(k)}={written(x, is_long)}" for k, x in entry.items()
            ]
            statements |= {(name, *([number] * is_list), each) for each in entry}
            statements.add((name,))
            document[name] = entries if is_list else entry
    text = "\n".join(lines)
    assert tomllib.loads(text) == document
    check(toml_lines(text), text, document, statements)
    assert toml_lines(text.replace("\n", "\r\n")) == toml_lines(text)
    text = json.dumps(document, indent=data.draw(st.sampled_from((None, 0, 2))))
    check(json_lines(text), text, document, {*every_place(document)})


def check(lines: Any, text: str, document: Any, known: set[Any]) -> None:
    """Known places are on their own line; others between it and what they are in."""
    rows = text.split("\n")
    for place in every_place(document):
        own = next(n for n, row in enumerate(rows, 1) if json.dumps(place[-1]) in row)
        around = next(place[:n] for n in range(len(place), 0, -1) if place[:n] in known)
        at = line_of(lines, place)
        assert at == own if place == around else line_of(lines, around) <= at <= own


def test_places_are_written_as_in_toml():
    assert place_text(("a", "b c", 0, "d", 1, 2)) == 'a."b c"[0].d[1][2]'


RULES = """version = 1
[expect]
lora = 1

[rules]
"**/bias" = "b"  # "bais" =
"bais" = "lora"
"he,ad/\\u002e" = "c"
"head" = "b"

[[optimizers.b]]
type = "adam"
learning_rate = 0.1
[[optimizers.b]]
type = "sgd"
learning_rate = -1.0
[optimizers.lora]
type = "adam"
learning_rte = 1
[given]
rate = 1
"""
#: What each annotated line has, by what the finding says.
ANNOTATED = {
    "without a rule": "rules",
    "'bais' matches no array": "bais",
    "'he,ad/.'": "he,ad",
    "should have the label 'lora'": "lora",
    "-1.0": "learning_rate",
    "no argument 'learning_rte'": "learning_rte",
    "the label 'c' has no optimizer": "he,ad",
    "never mentions it": "rate",
}


def annotations(*arguments: Any) -> dict[str, int | None]:
    """What ``lint`` says, and the line of each."""
    lines: dict[str, int | None] = {}
    for line in run("lint", *arguments, "--format", "github", code=1).splitlines():
        _, fields, text = line.split("::", 2)
        number = [x.partition("=")[2] for x in fields.split(",") if x[:5] == "line="]
        lines[text] = int(number[0]) if number else None
    return lines


@pytest.mark.parametrize("form", ["toml", "json"])
def test_findings_of_rules_and_optimizers_are_on_the_line_of_their_key(tmp_path, form):
    model, rules = tmp_path / "m.safetensors", tmp_path / f"r.{form}"
    ta.save(model, {"a": {"bias": np.ones(2), "w": np.ones(2)}, "head": np.ones(2)})
    as_json = json.dumps(tomllib.loads(RULES), indent=1)
    rules.write_text(RULES if form == "toml" else as_json)
    rows = rules.read_text().splitlines()
    said = annotations(model, "--rules", rules)
    assert len(said) == len(ANNOTATED), "\n".join(said)
    for part, key in ANNOTATED.items():
        ((text, line),) = ((x, n) for x, n in said.items() if part in x)
        assert line is not None, text
        assert key in rows[line - 1].split("=" if form == "toml" else ":")[0], text


MIGRATION = """version = 1
{head}
from = "a.w : i o"
to = "b/w : o i"
{head}
from = [
    "x",
]
to = "y"
{head}
drop = "z"
{between}
{head}
from = "b/w : o i"
to = "c/w : i o"
{head}
from = "{{rest:**}}"
to = "{{rest}}"
"""


@pytest.mark.parametrize("is_chain", [False, True])
def test_findings_of_rows_are_on_the_line_of_the_row(tmp_path, is_chain):
    model, table = tmp_path / "m.safetensors", tmp_path / "t.toml"
    ta.save(model, {"a.w": np.ones((2, 3)), "q": np.ones(2)})
    head, between = "[[rows]]", ""
    if is_chain:
        head, between = "[[tables.rows]]", "[[tables]]"
    text = MIGRATION.format(head=head, between=between)
    text = text.replace("1\n", "1\n[[tables]]\n", 1) if is_chain else text
    table.write_text(text)
    rows = text.splitlines()
    said = annotations(model, "--migration", table)
    unused = {
        text: line for text, line in said.items() if "no leaf is taken by" in text
    }
    assert unused, said
    for text, line in unused.items():
        assert rows[line - 1] == head, text
        source = json.dumps(text.split("'")[1])
        assert source in rows[line] + rows[line + 1], text
    if not is_chain:
        as_json = tmp_path / "t.json"
        as_json.write_text(json.dumps(tomllib.loads(table.read_text()), indent=1))
        (line,) = {
            line
            for x, line in annotations(model, "--migration", as_json).items()
            if "'x'" in x
        }
        assert as_json.read_text().splitlines()[line].strip() == '"from": ['


@pytest.mark.parametrize("reverse", [False, True])
def test_rows_that_a_configuration_leaves_out_move_no_line(tmp_path, reverse):
    (tmp_path / "config.json").write_text('{"tied": false}')
    model, table = tmp_path / "model.safetensors", tmp_path / "t.toml"
    ta.save(model, {"embed": np.ones(2), "other": np.ones(2)})
    rows = [
        '[[rows]]\nfrom = "embed"\nto = "embed"',
        '[[rows]]\nfrom = "head"\nto = "embed"\ncopy = "tied"',
        '[[rows]]\nfrom = "x"\nto = "y"',
    ]
    table.write_text("\n".join(["version = 1", *rows]))
    said = annotations(model, "--migration", table, *["--reverse"] * reverse)
    lines = table.read_text().splitlines()
    places = {line for text, line in said.items() if "'x" in text or "'y" in text}
    assert [lines[line] for line in places] == ['from = "x"'], said


@pytest.mark.parametrize("is_chain", [False, True])
def test_findings_of_the_way_back_are_on_the_line_of_the_row(tmp_path, is_chain):
    model, table = tmp_path / "m.safetensors", tmp_path / "t.toml"
    ta.save(model, {"b/w": np.ones((3, 2)), "u": np.ones(1)})
    rows = [
        '[[rows]]\ndrop = "mask"',
        '[[rows]]\nfrom = "a : i o"\nto = "b/w : o i"',
        '[[rows]]\nfrom = "x"\nto = "y"',
        '[[rows]]\nfrom = "u"\nto = "u"',
        '[new]\nfresh = "zeros"',
    ]
    table.write_text("\n".join(["version = 1", *rows]))
    if is_chain:
        one = ta.load_migration(table)
        two = ta.Migration({"{x:**}": "{x}"})
        table.write_text(one.then(two).to_toml())
    said = annotations(model, "--migration", table, "--reverse")
    lines = table.read_text().splitlines()
    places = {line for text, line in said.items() if "'y'" in text}
    assert [lines[line] for line in places] == ['from = "x"'], said


def test_a_published_table_has_no_line(tmp_path):
    ta.save(tmp_path / "m.safetensors", {"a": np.ones(2)})
    said = annotations(tmp_path / "m.safetensors", "--migration", "tunix/qwen3")
    assert {*said.values()} == {None}
