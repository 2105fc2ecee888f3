"""Migration files: the same table as text, from any author."""

from __future__ import annotations

import contextlib
import json
import os
import random
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from caps import CAPS
from command import invoke
from hypothesis import given, settings
from hypothesis import strategies as st
from sizes import full
from test_rules_files import MUTATIONS, TEXT, mutated

import treeadapt as ta

MAX_WEIGHT = CAPS["weight of the captures of a migration file"]


def load(folder: Path, text: str | bytes, name: str = "table.toml") -> ta.Migration:
    data = text.encode() if isinstance(text, str) else text
    (folder / name).write_bytes(data)
    return ta.load_migration(folder / name)


PATHS = {
    "model.layers.{l}.self_attn.q_proj.weight : (h d) e": "q : l e h d",
    "model.layers.{l}.mlp.{p=gate,up}_proj.weight : f e": "wi : l e p f",
    "model.layers.{l}.{n}_layernorm.weight : e": "blocks/{n}/scale : l e",
}
TABLES: dict[str, tuple[Any, dict[str, Any]]] = {
    "every kind of capture": (PATHS, {"sizes": {"d": 64}}),
    "nothing": ({}, {}),
    "pairs": ([("a", "b"), ("c/{x:**}", "d/{x}")], {}),
    "the same source twice": ([("a/{x}", "b/{x}"), ("a/{x}", "c/{x}")], {}),
    "concatenation": (
        {
            "h.{i}.c_attn : e [(h d) (k d) (k d)]": (
                "h/{i}/q : e h d",
                "h/{i}/k : e k d",
                "h/{i}/v : e k d",
            )
        },
        {"sizes": {"d": 64, "k": 12}},
    ),
    "copies": ({"wte : v e": ("embed : v e", "head : e v")}, {}),
    "copies on the left": ({("embed", "head"): "wte"}, {}),
    "lists on both sides": ({"m/{p=a,b}/{q=x,y}": "n/{p=c,d}/{q}"}, {}),
    "blocks": ({"l/{(b i)}/w : a": "w : b i a"}, {"sizes": {"i": 4}}),
    "shifted": ({"e/{n+60} : a": "w : n a"}, {}),
    "the rest": ({"w : ... a": "v : a ..."}, {}),
    "unit axes": ({"w : a 1": "v : a"}, {}),
    "drops": ({"*.inv_freq": None, "**/old": None, ("a", "b"): None}, {}),
    "every operation": (
        {
            "w : v e": (
                "k : e v",
                {
                    "scale": 2.0,
                    "offset": -1e-7,
                    "pad": {"v": (0, 47), "e": (1, 0)},
                    "cast": ["bfloat16", "float32"],
                },
            )
        },
        {},
    ),
    "one cast": ({"w": ("k", {"cast": "float32"})}, {}),
    "no operation in the end": ({"w": ("k", {"undo": {"scale": 1}})}, {}),
    "an undone row": ({"w": ("k", {"undo": {"scale": 3, "cast": "float16"}})}, {}),
    "copies with an operation": ({"w": (("a", "b"), {"scale": 0.5})}, {}),
    "new": ({"a": "b"}, {"new": {"head/**": "zeros", "*/bias": "target"}}),
    "odd names": ({'a"b\\\\c\n\x7f\u00e9': "\\ : \\{x\\}"}, {}),
    "names that TOML quotes": (
        {"w : x\u00e9 b": "v : b x\u00e9"},
        {"sizes": {"x\u00e9": 3}},
    ),
}
tables = pytest.mark.parametrize(("table", "options"), TABLES.values(), ids=TABLES)


@tables
def test_a_written_table_reads_back_equal(table, options, tmp_path):
    m = ta.Migration(table, **options)
    for each in (m, m.inverse, m.inverse.inverse) if m._rows else (m,):
        text = each.to_toml()
        assert load(tmp_path, text) == each
        assert load(tmp_path, text).to_toml() == text
        assert load(tmp_path, json.dumps(tomllib.loads(text)), "table.json") == each


def test_a_table_reads_like_what_was_typed(tmp_path):
    text = """\
# From Hugging Face.
version = 1
rows = [
    { from = "wte : v e", to = ["embed : v e", "head : e v"], scale = 2 },
    { drop = "*.inv_freq" },
]
sizes = { e = 8 }
new = { "bias" = "zeros" }
"""
    want = ta.Migration(
        {
            "wte : v e": (("embed : v e", "head : e v"), {"scale": 2.0}),
            "*.inv_freq": None,
        },
        sizes={"e": 8},
        new={"bias": "zeros"},
    )
    assert load(tmp_path, text) == want
    assert load(tmp_path, "\ufeff" + text.replace("\n", "\r\n")) == want


def test_a_loaded_table_moves_arrays(tmp_path):
    m = ta.Migration({"layers.{l}.w : i o": "w : l o i"})
    flat = {f"layers.{i}.w": np.full((2, 3), i, np.float32) for i in range(11)}
    made = load(tmp_path, m.to_toml())(flat)
    again = load(tmp_path, m.inverse.to_toml())(made)
    assert made["w"][10, 0, 0] == 10
    assert again.keys() == flat.keys()
    assert all(np.array_equal(again[path], flat[path]) for path in flat)


def test_rows_with_functions_are_named():
    table = {
        "a": ("b", np.negative),
        "c": "d",
        "e": ("f", (np.negative, np.negative)),
    }
    with pytest.raises(ta.MigrationError, match=r"cannot hold functions.*'a', 'e'"):
        ta.Migration(table).to_toml()


def test_text_that_is_not_unicode_cannot_be_written():
    with pytest.raises(ta.MigrationError, match="not valid Unicode"):
        ta.Migration({"a\ud800": "b"}).to_toml()


# Refused


HEAD = "version = 1\n"
ROW = '[[rows]]\nfrom = "a : x"\nto = "b : x"\n'


@pytest.mark.hazard("K2", "K12")
@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "no version"),
        ("version = 2\n" + ROW, "version 2"),
        (HEAD, "it has no rows"),
        (HEAD + "[rows]\na = 1\n", "'rows' is not a list of tables"),
        (HEAD + "[[row]]\n" + ROW, "unknown field 'row'.*Did you mean 'rows'"),
        (HEAD + "rows = [3]\n", "'rows' is not a list of tables"),
        (HEAD + ROW + 'form = "a"\n', "row 1 has an unknown.*Did you mean 'from'"),
        (HEAD + ROW + 'version = "a"\n', "unknown field 'version'"),
        (HEAD + ROW + 'from = "c"\n', "malformed.*are quoted: from"),
        (HEAD + ROW + '[[rows]]\nto = "c"\n', "row 2 has no 'from'"),
        (HEAD + '[[rows]]\nfrom = "c"\n', "row 1 has no 'to'. Write from and to, or"),
        (HEAD + "[[rows]]\nfrom = 3\nto = 'a'\n", "'from' of row 1 is not a string"),
        (HEAD + "[[rows]]\nfrom = []\nto = 'a'\n", "'from' of row 1 is not a string"),
        (HEAD + "[[rows]]\nfrom = ['a', 1]\nto = 'a'\n", "'from' of row 1 is not"),
        (HEAD + "[[rows]]\ndrop = [['a']]\n", "'drop' of row 1 is not"),
        (HEAD + "[[rows]]\ndrop = 'a'\nto = 'b'\n", "drops leaves and has 'to'"),
        (HEAD + ROW + "scale = '2'\n", "its scale is '2'. It is a finite number"),
        (HEAD + ROW + "scale = true\n", "its scale is True"),
        (HEAD + ROW + "scale = 0\n", "its scale is 0"),
        (HEAD + ROW + "scale = nan\n", "its scale is nan"),
        (HEAD + ROW + f"scale = 1{'0' * 400}\n", "its scale is 1000"),
        (HEAD + ROW + f"offset = 1{'0' * 9000}\n", "malformed"),
        (HEAD + ROW + "offset = []\n", r"its offset is \[\]"),
        (HEAD + ROW + "pad = 3\n", r"its pad is 3. Write the zeros before and after"),
        (HEAD + ROW + "pad = { x = 3 }\n", "its pad is {'x': 3}"),
        (HEAD + ROW + "pad = { x = [1] }\n", r"its pad is {'x': \[1\]}"),
        (HEAD + ROW + "pad = { x = [true, 1] }\n", r"its pad is {'x': \[True, 1\]}"),
        (HEAD + ROW + "pad = { y = [0, 1] }\n", "'y', which is not an axis"),
        (HEAD + ROW + "cast = 3\n", "3 is not a dtype"),
        (HEAD + ROW + "cast = {}\n", "{} is not a dtype"),
        (
            HEAD + ROW + 'cast = ["float32", "int8", "int8"]\n',
            "its cast is .*Write a dtype, or the old",
        ),
        (HEAD + ROW + 'cast = "float33"\n', "'float33' is not a dtype"),
        (HEAD + ROW + 'cast = "object"\n', "'object' is not a dtype"),
        (HEAD + ROW + 'cast = "f4,f4"\n', "'f4,f4' is not a dtype"),
        (HEAD + ROW + "undo = 3\n", "3 holds no operations"),
        (HEAD + ROW + "undo = {}\n", "holds no operations"),
        (
            HEAD + ROW + "undo = { scal = 3 }\n",
            "'scal' is not an operation.*mean 'scale'",
        ),
        (HEAD + ROW + "undo = { scale = [] }\n", r"its scale is \[\]"),
        (
            HEAD + ROW + "undo = { scale = 2 }\nscale = 2\n",
            "'undo' is not an operation",
        ),
        (HEAD + "sizes = 3\n" + ROW, "'sizes' is not a table"),
        (HEAD + "new = [3]\n" + ROW, "'new' is not a table"),
        (HEAD + "sizes = { x = 0 }\n" + ROW, "size of 'x' is 0"),
        (HEAD + "sizes = { x = 1.5 }\n" + ROW, "size of 'x' is 1.5. It is an integer"),
        (
            HEAD + "sizes = { x = 9223372036854775808 }\n" + ROW,
            "size of 'x' is 92.*at most 64 bits",
        ),
        (HEAD + "sizes = { y = 2 }\n" + ROW, "'y', which is not an axis"),
        (HEAD + "new = { y = 2 }\n" + ROW, "new= has 'y': 2. Write 'zeros'"),
        (HEAD + "new = { y = 'twos' }\n" + ROW, "'twos'. Write 'zeros'"),
        (HEAD + "[[rows]]\nfrom = 'a{'\nto = 'b'\n", "'a{' is malformed at column 2"),
        (HEAD + "a = " + "[" * 100_000, "nested too deep"),
        (b"version = 1\n\xff = 1\n", "not UTF-8"),
        ("\"a\".'b' . c" * 100 + "= 1\n", "too many dots"),
    ],
)
def test_a_malformed_file_is_refused(tmp_path, text, match):
    start = time.monotonic()
    with pytest.raises(ta.MigrationError, match=f"(?s){match}") as caught:
        load(tmp_path, text)
    assert time.monotonic() - start < 5
    assert str(caught.value).startswith("Migration file ")
    assert "table.toml" in str(caught.value)


@pytest.mark.hazard("K12")
@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[]", "top level"),
        ('{"version": 1, "rows": [], "rows": []}', "'rows' occurs twice"),
        ('{"version": 1, "rows": null}', "'rows' is not a list"),
        ('{"version": 1, "rows": [{"from": "a", "to": null}]}', "'to' of row 1 is not"),
        ('{"version": 1, "rows": [{"from": "a", "from": "b"}]}', "occurs twice"),
        ('{"version": 1, "rows": ' + "[" * 100_000, "nested too deep"),
    ],
)
def test_a_malformed_json_file_is_refused(tmp_path, text, match):
    with pytest.raises(ta.MigrationError, match=match):
        load(tmp_path, text, "table.json")


@pytest.mark.hazard("K15")
@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("table.yaml", "is TOML or JSON.*from ="),
        ("gone.toml", "gone.toml': there is no such file. Check the name"),
        ("folder.toml", "cannot be read: Is a directory"),
        ("a\0b.toml", "cannot be read: embedded null"),
    ],
)
def test_a_file_that_cannot_be_read_is_a_typed_error(tmp_path, name, match):
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(ta.MigrationError, match=match):
        ta.load_migration(os.path.join(tmp_path, name))
    with pytest.raises(ta.MigrationError, match="is named by a path"):
        ta.load_migration(3)  # type: ignore[arg-type]


@pytest.mark.slow
def test_size_and_counts_are_capped_before_work(tmp_path):
    start = time.monotonic()
    with pytest.raises(ta.MigrationError, match="larger than"):
        load(tmp_path, HEAD + "#" * CAPS["bytes of a rules or migration file"])
    count = CAPS["rows of a migration file"] + 1
    rows = [{"drop": f"a{place}"} for place in range(count)]
    with pytest.raises(ta.MigrationError, match=r"'rows' has 10,001 entries. At most"):
        load(tmp_path, json.dumps({"version": 1, "rows": rows}), "t.json")
    axes = " ".join(f"a{place}" for place in range(60))
    rows = [{"from": f"{place} : {axes}", "to": f"b : {axes}"} for place in range(600)]
    assert len(axes) * 1_200 > CAPS["characters of a migration file's addresses"]
    with pytest.raises(ta.MigrationError, match=r"characters\. At most 200,000"):
        load(tmp_path, json.dumps({"version": 1, "rows": rows}), "t.json")
    rows = [{"drop": f"{{a}}/{place}"} for place in range(MAX_WEIGHT + 1)]
    with pytest.raises(ta.MigrationError, match=r"weigh more than 500.*'{a}/500'"):
        load(tmp_path, json.dumps({"version": 1, "rows": rows}), "t.json")
    assert time.monotonic() - start < 10


@pytest.mark.slow
def test_a_table_of_plain_names_has_no_weight(tmp_path):
    m = ta.Migration({f"model.layers.{n}.w": f"layers/{n}/w" for n in range(3_000)})
    assert load(tmp_path, m.to_toml()) == m


@pytest.mark.slow
@pytest.mark.hazard("K30")
@pytest.mark.parametrize(
    "row",
    [
        "{a}.{b}.{c}.x%d",
        "{a=m,mo,model,z%d}.{b=q,layers}.{c=x,1,12}.{x}",
        "{a}e{b}e{c}e{d}e{l+%d99999}",
        "{a:**}/{b}r{c}/{d:**}/x%d",
    ],
)
def test_a_table_of_the_most_weight_is_planned_in_seconds(row, tmp_path):
    paths = [f"model.layers.{n}.attn.{k}.weight" for n in range(50) for k in "abcdef"]
    paths += [path.replace(".", "/") for path in paths[:50]]
    tree = dict.fromkeys(paths, jax.ShapeDtypeStruct((2,), np.float32))
    low, high = 1, MAX_WEIGHT + 1
    while high - low > 1:  # as many rows as a file may have
        middle = (low + high) // 2
        rows = [{"drop": row % place} for place in range(middle)]
        text = json.dumps({"version": 1, "rows": rows})
        try:
            m, low = load(tmp_path, text, "t.json"), middle
        except ta.MigrationError:
            high = middle
    start = time.monotonic()
    with pytest.raises(ta.MigrationError, match="no row takes"):
        m.plan(tree)
    assert time.monotonic() - start < 5  # a tenth of it when nothing else runs


@pytest.mark.hazard("K30")
@pytest.mark.parametrize(
    ("table", "tree", "match"),
    [
        ({"l.{l} : a": "w : l a"}, {"l.0": (2,), "l.9999999999999": (2,)}, "missing"),
        ({"w : l m": "w/{l}/{m} : "}, {"w": (2_000, 2_000)}, "4,000,000 leaves"),
    ],
)
def test_no_count_of_a_name_or_a_shape_is_gone_through(table, tree, match):
    start = time.monotonic()
    shapes = {k: jax.ShapeDtypeStruct(s, np.float32) for k, s in tree.items()}
    with pytest.raises(ta.MigrationError, match=match):
        ta.Migration(table).plan(shapes)
    assert time.monotonic() - start < 5


def test_a_message_shows_no_escape_code_of_the_file(tmp_path):
    for text in ('[[rows]]\nfrom = "\\u001b["\nto = "a"\n', '"\\u001b" = 1\n'):
        with pytest.raises(ta.MigrationError) as caught:
            load(tmp_path, HEAD + text)
        assert "\x1b" not in str(caught.value)


# Anything at all


SEEDS = [
    ta.Migration(table, **options).to_toml()
    for name, (table, options) in TABLES.items()
    if name != "odd names"
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["toml", "json"])
def test_a_mutated_file_gives_a_typed_error_or_a_migration(tmp_path, kind):
    dice = random.Random(f"migration {kind}")
    file = tmp_path / f"mutated.{kind}"
    seeds = SEEDS if kind == "toml" else [json.dumps(tomllib.loads(s)) for s in SEEDS]
    outcomes = {True: 0, False: 0}
    for _ in range(MUTATIONS):
        file.write_bytes(mutated(dice.choice(seeds), dice))
        outcomes[is_read(file)] += 1
    assert min(outcomes.values()) > 15, outcomes


TREE = {
    "model.layers.0.self_attn.q_proj.weight": np.ones((128, 3)),
    "h.0.c_attn": np.ones((3, 24)),
    "wte": np.ones((3, 2)),
    "w": np.ones((2, 3), np.float32),
    "a": np.ones(3),
}


def is_read(file: Path) -> bool:
    """Return whether a file can be read; its table must be usable."""
    try:
        found = ta.load_migration(file)
    except ta.TreeAdaptError as error:
        small = len(str(error).encode()) <= 4_000
    else:
        for path, leaf in TREE.items():
            with contextlib.suppress(ta.TreeAdaptError):
                str(found.plan({path: leaf}))
                found({path: leaf})
        with contextlib.suppress(ta.TreeAdaptError):
            assert found.inverse.inverse is not None
        with contextlib.suppress(ta.TreeAdaptError):  # half a character
            tomllib.loads(found.to_toml())
        return True
    assert small
    return False


WORDS = ["rows", "sizes", "from", "to", "drop", "undo", "scale", "pad", "cast", "a : x"]


@pytest.mark.slow
@settings(max_examples=full(100, 30))  # each writes 13 files
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(TEXT | st.sampled_from(WORDS), inner, max_size=3)
        ),
        max_leaves=8,
    )
)
def test_any_json_gives_a_typed_error_or_a_migration(document):
    row = {"from": "a : x", "to": "b : x"}
    documents = [
        document,
        {"version": 1, "rows": document},
        {"version": 1, "rows": [document, document]},
        {"version": 1, "rows": [], "sizes": document, "new": document},
        *({"version": 1, "rows": [{**row, name: document}]} for name in WORDS[2:-1]),
    ]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "any.json"
        for each in documents:
            file.write_text(json.dumps(each))
            is_read(file)


@pytest.mark.parametrize(
    "name", ["gpt2-flx.toml", "gpt2_flax.toml", "gpt2-flx", "gpt2-flax"]
)
def test_a_misspelt_name_is_answered_with_the_nearest_file(tmp_path, monkeypatch, name):
    for other in ("gpt2-flax.toml", "bert-flax.toml", "gpt2-flax.txt"):
        (tmp_path / other).write_text(ta.Migration({"a": "b"}).to_toml())
    monkeypatch.chdir(tmp_path)
    for path in (name, tmp_path / name):
        near = str(Path(path).with_name("gpt2-flax.toml"))
        with pytest.raises(ta.MigrationError) as caught:
            ta.load_migration(path)
        assert str(caught.value).endswith(f"Did you mean {near!r}?")


# --- marks of rows that nobody compared ---

MARKED = {
    "h.{l}.w : o i": ("h/w : l i o", {"scale": 2.0, "check": "order of axes"}),
    "norm": ("scale", {"check": "names"}),
    "old": (None, {"check": "names"}),
    "*.mask": None,
}


def test_a_mark_is_a_part_of_its_row():
    table = ta.Migration(MARKED)
    plain = ta.Migration(
        {
            "h.{l}.w : o i": ("h/w : l i o", {"scale": 2.0}),
            "norm": "scale",
            "old": None,
            "*.mask": None,
        }
    )
    assert table != plain
    assert hash(table) != hash(plain)
    checks = [row.notes.check for row in table.rows]
    assert checks == ["order of axes", "names", "names", ""]
    assert [row.notes.check for row in table.inverse.rows] == checks[:2]
    source = {"h.0.w": np.ones((2, 3)), "norm": np.ones(3), "old": np.ones(1)}
    assert not ta.tree_diff(table(source), plain(source), values=True)
    text = str(table.plan(source))
    assert text.count("    check: names") == 2
    assert "    check: order of axes" in text


@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_a_mark_comes_back_from_a_file(suffix, tmp_path):
    for table in (ta.Migration(MARKED), ta.Migration(MARKED).inverse):
        file = tmp_path / f"table.{suffix}"
        text = table.to_toml()
        if suffix == "json":
            text = json.dumps(tomllib.loads(text))
        file.write_text(text)
        assert ta.load_migration(file) == table


@pytest.mark.parametrize("check", ["", " ", "a\nb", 3, True, "x" * 201, None])
def test_a_mark_is_a_short_text(check):
    for value in ("b", None):
        with pytest.raises(ta.MigrationError, match=r"its check is .*Write a line"):
            ta.Migration({"a": (value, {"check": check})})


def test_load_warns_once_of_marks(tmp_path):
    ta.save(tmp_path / "a.safetensors", {"a": np.ones(2), "b": np.ones(3)})
    table = ta.Migration(
        {"a": ("x", {"check": "names"}), "b : e": ("y : e", {"check": "names"})}
    )
    target = {"x": np.zeros(2), "y": np.zeros(3)}
    for migration in (table, [ta.Migration({"c": "x"}), table]):
        with pytest.warns(ta.TreeAdaptWarning, match="2 of 2 rows of the") as seen:
            ta.load(tmp_path / "a.safetensors", target, migration=migration)
        assert len(seen) == 1
        assert seen[0].filename == __file__


def test_lint_and_convert_say_what_is_marked(tmp_path):
    ta.save(tmp_path / "a.safetensors", {"a": np.ones((2, 3))})
    table = tmp_path / "t.toml"
    row = {"a : o i": ("b : o i", {"checked": "o i", "check": "ask Ann"})}
    table.write_text(ta.Migration(row).to_toml())
    linted = invoke("lint", tmp_path / "a.safetensors", "--migration", table)
    assert linted.exit_code == 1
    assert "check: 'a : o i' -> 'b : o i': ask Ann." in linted.output
    new = tmp_path / "b.safetensors"
    done = invoke("convert", tmp_path / "a.safetensors", new, "--migration", table)
    assert done.exit_code == 0
    assert done.output.count("1 of 1 row of the migration is marked to check") == 1


@pytest.mark.parametrize("sizes", [True, 3, "h = 3", [("h", 3)]])
def test_sizes_of_a_file_are_a_mapping(sizes):
    with pytest.raises(ta.MigrationError, match=r"Expected a mapping as sizes=, got"):
        ta.load_migration("tunix/qwen3", sizes=sizes)
