"""Rules files: the same table as text, from any author."""

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
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from sizes import full

import treeadapt as ta


def load(folder: Path, text: str | bytes, name: str = "rules.toml", **options: Any):
    data = text.encode() if isinstance(text, str) else text
    (folder / name).write_bytes(data)
    return ta.load_rules(folder / name, **options)


TOML = """\
# What trains, and how.
version = 1
default = "train"
overlap = "first"

[rules]
"policy/params/hidden_0" = "frozen"
'**/bias' = "no_decay"
value = 0.5
"layers/{-4..}" = 2
"!head" = true
"""


def test_a_table_keeps_its_order(tmp_path):
    assert load(tmp_path, TOML) == ta.Rules(
        [
            ("policy/params/hidden_0", "frozen"),
            ("**/bias", "no_decay"),
            ("value", 0.5),
            ("layers/{-4..}", 2),
            ("!head", True),
        ],
        default="train",
    )


def test_a_list_of_patterns_is_written_as_a_row_for_each(tmp_path):
    rules = ta.Rules([(["encoder", "norm"], "frozen"), ("**", "train")])
    want = ta.Rules({"encoder": "frozen", "norm": "frozen", "**": "train"})
    assert load(tmp_path, rules.to_toml()) == want


@pytest.mark.parametrize(
    ("pairs", "told"),
    [
        ([(["encoder", "!**/norm"], "f")], "Write rules for what is excluded"),
        ([(["!a", "!b"], "f")], "Write rules for what is excluded"),
        ([("a", "f"), (["b", "a"], "g")], "'a' is in two rules"),
    ],
)
def test_a_table_that_rows_cannot_express_is_refused(pairs, told):
    with pytest.raises(ta.RulesFileError, match=told):
        ta.Rules(pairs).to_toml()


def test_json_says_the_same(tmp_path):
    document = {
        "version": 1,
        "default": "train",
        "rules": {"policy": "frozen", "**/bias": "no_decay"},
    }
    want = ta.Rules({"policy": "frozen", "**/bias": "no_decay"}, default="train")
    assert load(tmp_path, json.dumps(document), "rules.json") == want


def test_a_byte_order_mark_and_windows_lines_are_read(tmp_path):
    text = "\ufeff" + TOML.replace("\n", "\r\n")
    assert load(tmp_path, text) == load(tmp_path, TOML)


# Round trips


TEXT = st.text(
    st.characters(exclude_categories=["Cs"]) | st.sampled_from("\\\"'\n\t\x7f[]{}!/#="),
    max_size=8,
)
PATTERN = TEXT.filter(bool).map(ta.escape)
LABEL = st.one_of(
    TEXT,
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.lists(st.sampled_from(["x", ("x", "y"), None])).map(lambda spec: P(*spec)),
    st.sampled_from([P("x", ...), P(..., ("x", "y")), P("x", ..., None), P(...)]),
    st.sampled_from(
        [
            ta.shard_largest("x", min_bytes=4096),
            ta.shard_largest(("x", "y"), 3, min_bytes=5, ties="last"),
        ]
    ),
)
WHERE = st.one_of(
    PATTERN,
    st.builds("!{}".format, PATTERN),
    st.lists(PATTERN, max_size=3),
)


@pytest.mark.slow
@settings(max_examples=full(500, 100))  # each writes a file
@given(
    st.lists(st.tuples(WHERE, LABEL), min_size=1, max_size=4),
    st.none() | LABEL,
    st.sampled_from(["error", "ignore"]),
    st.sampled_from(["error", "first"]),
)
def test_a_written_table_reads_back_equal(pairs, default, unused, overlap):
    given = {} if default is None else {"default": default}
    options = {"unused": unused, "overlap": overlap, **given}
    rows = [
        (row, label)
        for where, label in pairs
        for row in (where if isinstance(where, list) else [where])
    ]
    assume(rows and len(dict(rows)) == len(rows))
    text = ta.Rules(pairs, **options).to_toml()
    tomllib.loads(text)
    with tempfile.TemporaryDirectory() as folder:
        again = load(Path(folder), text)
    assert again == ta.Rules(rows, **options)
    assert again.to_toml() == text


def test_a_label_keeps_its_type(tmp_path):
    rules = ta.Rules({"a": 1, "b": 1.0, "c": True, "d": "1", "e": 1e-7, "f": 1e22})
    again = load(tmp_path, rules.to_toml())
    assert [type(value) for value in again.values] == [
        int,
        float,
        bool,
        str,
        *[float] * 2,
    ]
    assert again == rules


def test_a_list_is_a_spec_and_is_written_as_one(tmp_path):
    rules = ta.Rules(
        {"a": P("x", None, ("x", "y")), "b": P(None), "c": P()}, default=P()
    )
    text = rules.to_toml()
    assert text.splitlines()[1:] == [
        "default = []",
        "",
        "[rules]",
        '"a" = ["x", "", ["x", "y"]]',
        '"b" = [""]',
        '"c" = []',
    ]
    again = load(tmp_path, text)
    assert again == rules
    assert again.values[0] == P("x", None, ("x", "y"))
    file = tmp_path / "rules.json"
    file.write_text('{"version": 1, "rules": {"a": ["x", null, ["x", "y"]]}}')
    assert ta.load_rules(file).values == again.values[:1]


def test_a_spec_that_no_list_says_is_not_written():
    for spec in (P(P.UNCONSTRAINED), P("x", 3), P(("x", 3)), P("x", unreduced={"y"})):
        with pytest.raises(ta.RulesFileError, match="cannot hold the P"):
            ta.Rules({"a": spec}).to_toml()


def test_a_long_list_is_written_line_by_line(tmp_path):
    spec = ta.FreezeSpec([f"layers/{n}/attention" for n in range(20)])
    assert max(map(len, spec.to_toml().splitlines())) < 80
    file = tmp_path / "spec.toml"
    file.write_text(spec.to_toml())
    assert ta.FreezeSpec.load(file) == spec


def test_a_str_subclass_is_written_as_its_text(tmp_path):
    rules = ta.Rules({np.str_("a"): np.str_("x"), "b": np.float64(0.5)})
    assert rules.to_toml() == 'version = 1\n\n[rules]\n"a" = "x"\n"b" = 0.5\n'


@pytest.mark.parametrize(
    "rules",
    [
        ta.Rules({ta.node(dict): "a"}),
        ta.Rules({ta.leaf(ndim=1): "a"}),
        ta.Rules({ta.glob("a") & ~ta.glob("b"): "a"}),
        ta.Rules([([dict, "a"], "a")]),
        ta.Rules({"a": np.ones(1)}),
        ta.Rules({"a": ("b", "c", 1j)}),
        ta.Rules({"a": float("nan")}),
        ta.Rules({"a": float("inf")}),
        ta.Rules({"a": 2**63}),
        ta.Rules({"a": "\ud800"}),
        ta.Rules({"a": 1}, default=1j),
        ta.Rules({}),
    ],
    ids=repr,
)
def test_a_table_that_is_not_data_cannot_be_written(rules):
    with pytest.raises(ta.RulesFileError):
        rules.to_toml()


# Refused


HEAD = "version = 1\n"


@pytest.mark.hazard("K2", "K12")
@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "no version"),
        ("[rules]\na = 1\n", "no version"),
        ("version = 2\n[rules]\na = 1\n", "version 2"),
        ("version = true\n[rules]\na = 1\n", "version True"),
        ("version = 1.0\n[rules]\na = 1\n", "version 1.0"),
        ('version = "1"\n[rules]\na = 1\n', "version '1'"),
        (HEAD, "it has no rules"),
        (HEAD + "rules = 3\n", "'rules' is not a table"),
        (HEAD + "[rule]\na = 1\n", "Did you mean 'rules'"),
        (HEAD + '"**/bias" = "a"\n', "There is no 'rules': write"),
        (HEAD + "colour = 1\n[rules]\na = 1\n", "unknown field 'colour'"),
        (HEAD + "[rules]\na = 1\na = 2\n", "malformed"),
        (HEAD + '[rules]\n**/bias = "b"\n', "are quoted"),
        (HEAD + 'unused = "warn"\n[rules]\na = 1\n', "'error' or 'ignore'"),
        (HEAD + "overlap = 3\n[rules]\na = 1\n", "'first' or 'error'"),
        (HEAD + '[rules]\na = 1\n"a" = 2\n', "malformed"),
        (HEAD + "[rules]\na = 1\n[rules]\nb = 1\n", "malformed"),
        (HEAD + "[rules]\npolicy.hidden_0 = 1\n", "in quotes"),
        (HEAD + '[rules]\n[rules.policy]\nhidden = "a"\n', "in quotes"),
        (HEAD + "[rules]\na = [1]\n", "A label is"),
        (HEAD + '[rules]\na = [["b", ""]]\n', "A label is"),
        (HEAD + "[rules]\na = [[]]\n", "A label is"),
        (HEAD + '[rules]\na = ["...", "..."]\n', "A label is"),
        (
            HEAD + '[rules]\na = { shard_largest = "x", ties = "lasst" }\n',
            "Write { shard_largest",
        ),
        (
            HEAD + '[rules]\na = { shard_largest = "x", min_bytes = 1e9 }\n',
            "Write { shard_largest",
        ),
        (HEAD + '[rules]\na = [[["b"]]]\n', "A label is"),
        (HEAD + f"[rules]\na = {['b'] * 65}\n", "A label is"),
        (HEAD + "[rules]\na = 1979-05-27\n", "rules.a is a date or a time"),
        (HEAD + "[rules]\na = { shard_largest = 3 }\n", "Write { shard_largest"),
        (HEAD + "[rules]\na = { shard_largest = [] }\n", "Write { shard_largest"),
        (
            HEAD + f"[rules]\na = {{ shard_largest = {[*map(str, range(65))]} }}\n",
            "Write { shard_largest",
        ),
        (
            HEAD + '[rules]\na = { shard_largest = "x", min_size = -1 }\n',
            "Write { shard_largest",
        ),
        (
            HEAD + '[rules]\na = { shard_largest = "x", min_size = true }\n',
            "Write { shard_largest",
        ),
        (
            HEAD + '[rules]\na = { shard_largest = "x", min_sise = 8 }\n',
            "Did you mean 'min_size'?",
        ),
        (HEAD + "[rules]\na = nan\n", "A label is"),
        (HEAD + "[rules]\na = inf\n", "A label is"),
        (HEAD + "[rules]\na = 1e999\n", "A label is"),
        (HEAD + "[rules]\na = 9223372036854775808\n", "A label is"),
        (HEAD + f"[rules]\na = {'1' * 5000}\n", "malformed"),
        (HEAD + "default = [1]\n[rules]\na = 1\n", "'default'"),
        (HEAD + '[[rules]]\nwhere = "a"\nlabel = 1\n', "'rules' is not a table"),
        (HEAD + 'rules = [["a", 1]]\n', "'rules' is not a table"),
        (HEAD + '[rules]\n"re:.*" = 1\n', "allow_regex=True"),
        (HEAD + '[rules]\n"!re:.*" = 1\n', "allow_regex=True"),
        (HEAD + "a = " + "[" * 100_000, "nested too deep"),
        (HEAD + "a = " + "{b = " * 100_000, "nested too deep|malformed"),
        (b"version = 1\n\xff = 1\n", "not UTF-8"),
        (b"version = 1\n\x00", "malformed"),
        ("[" + ".".join("a" * 200_000) + "]\n", "too many dots"),
        ("\"a\".'b' . c" * 100 + "= 1\n", "too many dots"),
        ("".join(f"a.b.c.d.e{n} = 1\n" for n in range(30_000)), "too many dots"),
    ],
)
def test_a_malformed_toml_file_is_refused(tmp_path, text, match):
    start = time.monotonic()
    with pytest.raises(ta.RulesFileError, match=match) as caught:
        load(tmp_path, text)
    assert time.monotonic() - start < 5
    assert "rules.toml" in str(caught.value)


@pytest.mark.hazard("K12")
@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "malformed"),
        ("[]", "top level"),
        ("null", "top level"),
        ('{"version": 1, "version": 1, "rules": {"a": 1}}', "occurs twice"),
        ('{"version": 1, "rules": {"a": 1, "a": 2}}', "occurs twice"),
        ('{"version": 1, "rules": {"a": NaN}}', "NaN is not JSON"),
        ('{"version": 1, "rules": {"a": Infinity}}', "not JSON"),
        ('{"version": 1, "rules": {"a": 1e999}}', "A label is"),
        ('{"version": 1, "rules": {"a": null}}', "A label is"),
        ('{"version": 1, "rules": {"a": [[null]]}}', "A label is"),
        ('{"version": 1, "rules": {"a": {}}}', "is a table"),
        ('{"version": 1, "rules": {"a": 1}, "import": "os"}', "unknown field"),
        ('{"version": 1, "rules": {"a": %s}}' % ("1" * 5_000), "malformed"),
        ('{"version": 1, "rules": ' + "[" * 100_000, "nested too deep"),
        ('{"version": 1, "rules": ' + '{"a":' * 100_000, "nested too deep"),
        ('{"version": 1, "unused": "no", "rules": {"a": 1}}', "'error' or 'ignore'"),
        ('{"version": 1, "unused": [], "rules": {"a": 1}}', "'error' or 'ignore'"),
        ('{"version": 1, "overlap": {}, "rules": {"a": 1}}', "'first' or 'error'"),
    ],
)
def test_a_malformed_json_file_is_refused(tmp_path, text, match):
    with pytest.raises(ta.TreeAdaptError, match=match):
        load(tmp_path, text, "rules.json")


def test_a_malformed_pattern_points_at_its_column(tmp_path):
    with pytest.raises(ta.PatternError, match=r"rules\.toml': .*column 3"):
        load(tmp_path, HEAD + '[rules]\n"a[" = 1\n'.replace("a[", "ab["))


def test_regular_expressions_are_allowed_for_trusted_files(tmp_path):
    text = HEAD + '[rules]\n"re:.*/w" = 1\n'
    assert load(tmp_path, text, allow_regex=True) == ta.Rules({"re:.*/w": 1})


@pytest.mark.slow
def test_size_and_counts_are_capped_before_work(tmp_path):
    start = time.monotonic()
    with pytest.raises(ta.RulesFileError, match="larger than"):
        load(tmp_path, HEAD + "#" * CAPS["bytes of a rules or migration file"])
    count = CAPS["patterns of a rules file"] + 1
    many = "".join(f'"{n}" = 1\n' for n in range(count))
    with pytest.raises(ta.RulesFileError, match="At most 10,000"):
        load(tmp_path, f"{HEAD}[rules]\n{many}")
    assert time.monotonic() - start < 10


@pytest.mark.hazard("K15")
@pytest.mark.parametrize(
    "name", ["rules.yaml", "rules", "gone.toml", "", ".", "a\0b.toml", "folder.toml"]
)
def test_a_file_that_cannot_be_read_is_a_typed_error(tmp_path, name):
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "rules.yaml").write_text("version: 1\n")
    with pytest.raises(ta.RulesFileError) as caught:
        ta.load_rules(os.path.join(tmp_path, name))
    assert "Errno" not in str(caught.value)
    with pytest.raises(ta.RulesFileError):
        ta.load_rules(3)


@pytest.mark.slow
@pytest.mark.hazard("K30")
def test_patterns_with_too_much_total_weight_are_refused(tmp_path):
    rows = [f'"{place}{{a,b}}*{"x" * 990}" = 1' for place in range(1_000, 1_250)]
    assert len(load(tmp_path, HEAD + "[rules]\n" + "\n".join(rows[:199])).values) == 199
    with pytest.raises(ta.RulesFileError, match="more than 200,000 segments"):
        load(tmp_path, HEAD + "[rules]\n" + "\n".join(rows))
    plain = [f'"{place}/{"x" * 1_000}" = 1' for place in range(3_000)]
    assert len(load(tmp_path, HEAD + "[rules]\n" + "\n".join(plain)).values) == 3_000


@pytest.mark.hazard("K18")
def test_a_label_that_names_code_is_only_text(tmp_path):
    evil = "__import__('os').system('true')"
    rules = load(tmp_path, f'{HEAD}[rules]\n"a" = "{evil}"\n')
    assert rules.values == (evil,)


def test_a_message_shows_no_escape_code_of_the_file(tmp_path):
    for text in (
        '"\\u001b[31m" = 1\n',
        "a = \x1b[31m\n",
        '[rules]\na = ["x", "\\u001b", 1]\n',
    ):
        with pytest.raises(ta.RulesFileError) as caught:
            load(tmp_path, HEAD + text)
        assert "\x1b" not in str(caught.value)


# Anything at all


LISTED = ta.Rules([(["a", "b"], 1), ("!c", 0.5)], default="x", unused="ignore")
SPEC = ta.FreezeSpec(["a/**", "!a/b"], ["a/c", "a/d"])
SEEDS = {
    ("toml", ta.load_rules): (TOML, LISTED.to_toml()),
    ("json", ta.load_rules): (
        '{"version": 1, "default": "t", "rules": {"a/**": "f", "!b": 1.5}}',
        '{"version": 1, "rules": {"a": true, "**": -1}}',
    ),
    ("toml", ta.FreezeSpec.load): (SPEC.to_toml(),),
    ("json", ta.FreezeSpec.load): (
        '{"version": 1, "freeze": ["a"], "paths": ["a/b"]}',
    ),
}
CRUMBS = (
    *(b"\"'\\[]{}=,.#\n\t\0!*?<>/:-_0129eE"[i : i + 1] for i in range(34)),
    *(b"version", b"rules", b"re:", b'"""', b"'''", b"[[", b"]]", b"nan", b"null"),
    *(b"\xff", b"\xef\xbb\xbf", b"\\ud800", b"\\u0000", b"1979-05-27", b"{-1..}"),
    *(
        b"**",
        b"{0..99999999999999999999}",
        b"[!",
        b"true",
        b"\r\n",
        b"\xf0\x9f\x98\x80",
    ),
)


MUTATIONS = 1_000  # for each reader and form


def mutated(seed: str, dice: random.Random) -> bytes:
    data = bytearray(seed.encode())
    for _ in range(dice.randint(1, 3)):
        at = dice.randrange(len(data) + 1)
        kind = dice.randrange(5)
        if kind == 0:
            data[at:at] = dice.choice(CRUMBS)
        elif kind == 1:
            del data[at : at + dice.randint(1, 8)]
        elif kind == 2:
            data[at : at + 1] = bytes([dice.randrange(256)])
        elif kind == 3:
            start = dice.randrange(len(data) + 1)
            data[at:at] = data[start : start + dice.randint(1, 30)]
        else:
            data[at:at] = dice.choice(CRUMBS) * dice.randint(2, 40)
    return bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "read"), SEEDS)
def test_a_mutated_file_gives_a_typed_error_or_rules(tmp_path, kind, read):
    dice = random.Random(f"{kind} {read.__qualname__}")
    file = tmp_path / f"mutated.{kind}"
    outcomes = {True: 0, False: 0}
    for _ in range(MUTATIONS):
        file.write_bytes(mutated(dice.choice(SEEDS[kind, read]), dice))
        outcomes[is_read(read, file, allow_regex=dice.random() < 0.3)] += 1
    assert min(outcomes.values()) > 15, outcomes


def is_read(read: Any, file: Path, **options: Any) -> bool:
    """Return whether a file can be read; its rules must be usable."""
    try:
        found = read(file, **options)
    except ta.TreeAdaptError as error:
        small = len(str(error).encode()) <= 4_000
    else:
        assert isinstance(found, ta.Rules | ta.FreezeSpec)
        with contextlib.suppress(ta.TreeAdaptError):
            assert jax.tree.structure(found(TREE)) == jax.tree.structure(TREE)
        with contextlib.suppress(ta.TreeAdaptError):  # the table may be empty
            tomllib.loads(found.to_toml())
        return True
    assert small
    return False


TREE = {"a": {"b": np.ones(1), "c": np.ones(1)}, "policy": {"bias": np.ones(2)}}


@pytest.mark.slow
@settings(max_examples=full(300, 50))  # each writes four files
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                TEXT | st.sampled_from(["rules", "default", "freeze", "paths"]),
                inner,
                max_size=3,
            )
        ),
        max_leaves=8,
    )
)
def test_any_json_gives_a_typed_error_or_rules(document):
    tables = [
        document,
        {"version": 1, "rules": document},
        {"version": 1, "rules": {"a": document, "b": document}},
        {"version": 1, "freeze": document, "paths": document},
    ]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "any.json"
        for table in tables:
            file.write_text(json.dumps(table))
            for read in (ta.load_rules, ta.FreezeSpec.load):
                is_read(read, file)


def test_the_writer_names_what_it_cannot_write():
    with pytest.raises(ta.RulesFileError, match="ndarray"):
        ta.Rules({"a": np.ones(1)}).to_toml()


def test_every_written_file_can_be_read():
    for label in [(1, 2), ["a"], ("a", None), (), {"b": 1}]:
        end = r".* Write .* P\(\"data\", None\)"
        with pytest.raises(
            ta.RulesFileError, match=f"cannot hold the label of 'a'{end}"
        ):
            ta.Rules({"a": label}).to_toml()
        with pytest.raises(ta.RulesFileError, match=f"hold the label of default={end}"):
            ta.Rules({"a": "b"}, default=label).to_toml()
