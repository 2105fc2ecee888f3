"""Every published table, on two tiny models: what the library makes, without it.

A table has the digests of what its library made of the same numbers; ``make
test-oracles`` asks the libraries again. Here each table gives these digests, leads back
bit for bit, and lints clean.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest
from command import invoke
from sizes import slow_but

import treeadapt as ta

REPOSITORY = Path(__file__).parents[1]
sys.path.append(str(REPOSITORY / ".ci" / "oracles"))
sys.path.append(str(REPOSITORY / "docs" / "scripts"))
import cards  # noqa: E402
from common import FOLDER, config_of, digest, weights_of  # noqa: E402

TABLES = {
    f"{file.parent.name}/{file.stem}": tomllib.loads(file.read_text("utf-8"))
    for file in sorted(
        (REPOSITORY / "treeadapt" / "migrations" / "tables").glob("*/*.toml")
    )
}
CASES = [
    pytest.param(name, model_type, number, id=f"{name}-{model_type}-{number}")
    for name, table in TABLES.items()
    for model_type in table.get("model_types", [name.partition("/")[2]])
    for number in (1, 2)
    if (FOLDER / model_type).is_dir()
]


def tiny(model_type, number):
    return FOLDER / model_type / str(number)


@pytest.mark.parametrize(("name", "model_type", "number"), CASES)
def test_a_table_makes_what_its_library_makes_and_leads_back(name, model_type, number):
    folder, digests = tiny(model_type, number), TABLES[name]["digests"]
    weights = weights_of(folder)
    # One of openpi names no model type, and models of one type may have a table each.
    is_stated = config_of(folder).get("model_type") == model_type
    m = ta.load_migration(name.partition("/")[0] if is_stated else name, config=folder)
    params = m(weights)
    assert digest(params) == digests[f"{model_type}-{number}"]
    back = m.inverse(params)
    if written := digests.get(f"{model_type}-{number}-back"):  # by the library's writer
        assert digest(back) == written
    plan = m.plan(weights)
    assert not plan.one_way
    kept = {path: leaf for path, leaf in weights.items() if path not in plan.dropped}
    assert not ta.tree_diff(back, kept, values=True)
    assert not ta.tree_diff(m.inverse(params, target=weights), weights, values=True)


QUICKLY = ["flax/bert", "keras-hub/gpt2", "maxtext/gemma2", "tunix/gemma3"]


@pytest.mark.parametrize("name", slow_but(QUICKLY, TABLES))
def test_every_table_lints_clean_and_is_written_as_it_is_read(name, tmp_path):
    model_type = TABLES[name].get("model_types", [name.partition("/")[2]])[0]
    folder = tiny(model_type, 1)
    m = ta.load_migration(name, config=folder)
    source, target = tmp_path / "source.schema.toml", tmp_path / "target.schema.toml"
    ta.save(source, ta.load(folder / "model.schema.toml"))
    ta.save(target, m(weights_of(folder)))
    result = invoke("lint", folder / "model.schema.toml", target, "--migration", name)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("0 findings in ")
    file = tmp_path / "again.toml"
    for each in (m, m.inverse):
        file.write_text(each.to_toml())
        assert ta.load_migration(file) == each


def test_the_page_lists_every_table():
    layouts = dict.fromkeys(name.partition("/")[0] for name in TABLES)
    types = {
        (layout, model_type)
        for name, table in TABLES.items()
        for layout, _, stem in [name.partition("/")]
        for model_type in table.get("model_types", [stem])
    }
    cells = [["model type", *layouts], ["---", *[":-:" for _ in layouts]]]
    cells += [
        [f"`{each}`", *["x" if (layout, each) in types else "" for layout in layouts]]
        for each in sorted({model_type for _, model_type in types})
    ]
    table = "\n".join(f"| {' | '.join(row)} |" for row in cells)
    page = (REPOSITORY / "docs" / "recipes" / "published.md").read_text("utf-8")
    assert f"\n{table}\n" in page, f"Write this into published.md:\n{table}"


@pytest.mark.slow
def test_the_page_of_cards_is_that_of_the_tables():
    assert cards.PAGE.read_text("utf-8") == cards.page(), "Run docs/scripts/cards.py."


# What a page says of tables: of all of a layout, of all but some, or of some.
FACT = re.compile(
    r"(?:(?:all but (?P<others>[\w, ]+)|(?P<types>[\w, ]+)): )?(?P<text>.*)"
)


@pytest.mark.parametrize("name", TABLES)
def test_the_page_says_below_its_layout_what_a_card_says_of_each_table(name):
    layout, _, model_type = name.partition("/")
    page = cards.PAGE.read_text("utf-8")
    text = page.partition(f"\n## {layout}\n")[2].partition("\n## ")[0]
    facts = dict(re.findall(r"^\*(.+?)\*: (.+)\.$", text, flags=re.MULTILINE))
    about = re.search(rf"\*\*{re.escape(name)}\*\*: .*", text)[0]
    for heading, lines in cards.card(cards.published()[layout][model_type]).items():
        for line in lines:
            if heading == "about":
                assert line in about
            elif heading == "answers":  # in fewer words
                assert line.rpartition("by at most ")[2] in about
            elif heading != "model types":
                assert line in said_of(model_type, facts[heading.capitalize()])


def said_of(model_type, facts):
    parts = [FACT.fullmatch(each) for each in facts.split("; ")]
    return "".join(
        each["text"]
        for each in parts
        if model_type in (each["types"] or model_type).split(", ")
        and model_type not in (each["others"] or "").split(", ")
    )


@pytest.mark.parametrize("name", TABLES)
def test_a_card_names_all_that_a_table_says_of_a_file(name):
    table = TABLES[name]
    result = invoke("tables", name)
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0] == name
    first = table.get("tables", [table])[0]  # of a chain
    for row in first["rows"]:
        dropped = row.get("drop", [])
        for path in [dropped] if isinstance(dropped, str) else dropped:
            assert any(path.rpartition("}")[2] in line for line in lines)
    assert any(table["oracle"] in line for line in lines)
    for key in ("config", "counts"):
        stated = (
            it if isinstance(it, str) else it[0] for it in first.get(key, {}).values()
        )
        assert all(any(each in line for line in lines) for each in stated)


@pytest.mark.slow
def test_cards_say_when_tables_were_compared_and_how_far_answers_are_apart():
    file = REPOSITORY / "treeadapt" / "migrations" / "tables" / "compared.toml"
    fields = tomllib.loads(file.read_text("utf-8"))
    assert fields["days"].keys() == TABLES.keys()
    # A table has the one or the other.
    assert fields["answers"].keys() ^ fields["reasons"].keys() == TABLES.keys()
    for name, text in fields["answers"].items():
        assert float(text.partition(",")[0]) < 1e-5  # a table that is wrong gives 0.1
        lines = invoke("tables", name).output
        assert f"relative to the largest, by at most {text}" in " ".join(lines.split())
    for name, text in fields["reasons"].items():
        lines = invoke("tables", name).output
        assert f"not compared: {text}" in " ".join(lines.split())


def test_a_card_of_no_table_is_an_error():
    result = invoke("tables", "tunix/qwen33")
    assert result.exit_code == 2
    assert "Near it: 'qwen3'" in result.output
