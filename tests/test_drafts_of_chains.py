"""Drafts of what one table or one leaf does not say: scans in scans, and sums.

NumPy's conversion functions are the oracles, at another size and back.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import treeadapt as ta

Leaves = dict[str, Any]
Convert = Callable[[Leaves], Leaves]
Made = tuple[Leaves, Convert]


def numbers(shapes: dict[str, tuple[int, ...]]) -> Leaves:
    rng = np.random.default_rng(0)
    return {path: rng.normal(size=s).astype("f4") for path, s in shapes.items()}


def hybrid(layers: int, e: int, f: int, end: str) -> Made:
    """Blocks of four layers: a scan has the first three, and the last is apart."""
    shapes: dict[str, tuple[int, ...]] = {"embed": (17, e)}
    for n in range(layers):
        at = f"model{end}layers{end}{n}{end}"
        shapes |= {f"{at}norm{end}w": (e,), f"{at}mlp{end}up": (f, e)}
        shapes[f"{at}full" if n % 4 == 3 else f"{at}linear"] = (e, f)

    def convert(w: Leaves) -> Leaves:
        made = {"embed": w["embed"]}
        for name in (f"norm{end}w", f"mlp{end}up", "linear", "full"):
            whole = [
                w.get(f"model{end}layers{end}{n}{end}{name}") for n in range(layers)
            ]
            blocks = [whole[n : n + 4] for n in range(0, layers, 4)]
            if name != "full":
                made[f"local/{name}"] = np.stack(
                    [np.stack([a.T for a in block[:3]]) for block in blocks]
                )
            if name != "linear":
                made[f"global/{name}"] = np.stack([block[3].T for block in blocks])
        return made

    return numbers(shapes), convert


@pytest.mark.slow
@pytest.mark.parametrize("is_back", [False, True])
@pytest.mark.parametrize("end", [".", "/", "_"])
def test_a_scan_in_a_scan_is_two_tables(end, is_back, tmp_path):
    source, convert = hybrid(12, 11, 13, end)
    if is_back:
        draft = ta.draft_migration(convert(source), source)
    else:
        draft = ta.draft_migration(source, convert=convert)
    assert len(draft.migration.tables) == 2
    assert not draft.missing
    assert not draft.unexpected
    marked = [row.text for row in draft.migration.rows if row.notes.check]
    assert len(marked) == 1  # the size of a block was seen at one size alone
    assert "{(b i)}" in repr(draft)
    assert draft.pairs.keys() == (convert(source) if is_back else source).keys()
    (tmp_path / "table.toml").write_text(draft.to_toml())
    assert ta.load_migration(tmp_path / "table.toml") == draft.migration
    source, convert = hybrid(8, 7, 5, end)
    if is_back:
        report = draft.check(convert(source), source)
    else:
        report = draft.check(source, convert)
    assert report, str(report)
    assert not any(row.notes.check for row in report.migration.rows)


@pytest.mark.slow
def test_a_block_of_another_size_is_seen_in_a_check():
    source, convert = hybrid(12, 11, 13, ".")
    draft = ta.draft_migration(source, convert=convert)
    source, _ = hybrid(12, 7, 5, ".")
    report = draft.check(source, lambda w: {"embed": -w["embed"], **w})
    assert not report


def cell(layers: int, i: int, h: int, gates: str) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for n in range(layers):
        for name, size in (("ih", i), ("hh", h)):
            shapes[f"rnn.weight_{name}_l{n}"] = (len(gates) * h, size)
            shapes[f"rnn.bias_{name}_l{n}"] = (len(gates) * h,)
    return shapes


def one_bias(i: int, h: int) -> Made:
    shapes = cell(2, i, h, "ifgo")

    def convert(w: Leaves) -> Leaves:
        made = {}
        for n in (0, 1):
            made[f"cell_{n}/kernel"] = w[f"rnn.weight_ih_l{n}"].T
            made[f"cell_{n}/recurrent"] = w[f"rnn.weight_hh_l{n}"].T
            made[f"cell_{n}/bias"] = w[f"rnn.bias_ih_l{n}"] + w[f"rnn.bias_hh_l{n}"]
        return made

    return numbers(shapes), convert


def stacked_bias(i: int, h: int) -> Made:
    source, apart = one_bias(i, h)
    source = {path: leaf for path, leaf in source.items() if "weight_ih" not in path}

    def convert(w: Leaves) -> Leaves:
        made = apart(w | {f"rnn.weight_ih_l{n}": np.zeros((1, 1)) for n in (0, 1)})
        names = ("recurrent", "bias")
        return {k: np.stack([made[f"cell_{n}/{k}"] for n in (0, 1)]) for k in names}

    return source, convert


def flax_lstm(i: int, h: int) -> Made:
    shapes = cell(2, i, h, "ifgo")

    def convert(w: Leaves) -> Leaves:
        made = {}
        for n in (0, 1):
            whole = w[f"rnn.bias_ih_l{n}"] + w[f"rnn.bias_hh_l{n}"]
            for place, gate in enumerate("ifgo"):
                part = slice(place * h, (place + 1) * h)
                for p, name in (("i", "ih"), ("h", "hh")):
                    kernel = w[f"rnn.weight_{name}_l{n}"][part].T
                    made[f"cell_{n}/{p}{gate}/kernel"] = kernel
                made[f"cell_{n}/h{gate}/bias"] = whole[part]
        return made

    return numbers(shapes), convert


def flax_gru(i: int, h: int) -> Made:
    shapes = cell(2, i, h, "rzn")

    def convert(w: Leaves) -> Leaves:
        made = {}
        for n in (0, 1):
            for place, gate in enumerate("rzn"):
                part = slice(place * h, (place + 1) * h)
                for p, name in (("i", "ih"), ("h", "hh")):
                    kernel = w[f"rnn.weight_{name}_l{n}"][part].T
                    made[f"cell_{n}/{p}{gate}/kernel"] = kernel
                biases = [w[f"rnn.bias_{name}_l{n}"][part] for name in ("ih", "hh")]
                if gate == "n":  # of the state it is within r * (...)
                    made[f"cell_{n}/in/bias"], made[f"cell_{n}/hn/bias"] = biases
                else:
                    made[f"cell_{n}/i{gate}/bias"] = sum(biases)
        return made

    return numbers(shapes), convert


def embeddings(t: int, e: int) -> Made:
    """As XLM-R: positions from the third on, and the only type added to each."""
    shapes = {"word": (37, e), "position": (t + 2, e), "type": (1, e)}

    def convert(w: Leaves) -> Leaves:
        return {"tokens": w["word"], "positions": w["position"][2:] + w["type"]}

    return numbers(shapes), convert


def of_one_name(i: int, h: int) -> Made:
    shapes = {f"fc.{n}.{k}": s for n in (0, 1) for k, s in (("w", (i, h)), ("b", (h,)))}

    def convert(w: Leaves) -> Leaves:
        return {"b": w["fc.0.b"] + w["fc.1.b"], "a": w["fc.0.w"].T, "c": w["fc.1.w"].T}

    return numbers(shapes), convert


def scaled(i: int, h: int) -> Made:
    shapes = {"a": (i, h), "b": (h, i), "c": (i, h)}
    return numbers(shapes), lambda w: {"w": w["a"].T + w["b"] - 0.5 * w["c"].T}


SUMS = {
    "one bias": (one_bias, 1, set()),
    "a stack of biases": (stacked_bias, 1, set()),
    "the gates of a cell apart": (flax_lstm, 1, set()),
    "a part of each bias": (flax_gru, 2, set()),
    "one array to each row of another": (embeddings, 2, {"length"}),
    "arrays that differ in a number": (of_one_name, 2, set()),
    "multiples of arrays": (scaled, 2, {"scale"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_a_row_that_adds(name, tmp_path):
    make, tables, marks = SUMS[name]
    source, convert = make(5, 7)
    draft = ta.draft_migration(source, convert=convert)
    assert any(row.values.add for row in draft.migration.rows)
    assert len(draft.migration.tables) == tables
    assert {row.notes.check for row in draft.migration.rows} - {""} == marks
    assert not draft.missing
    assert not draft.unexpected
    assert {path for new in draft.pairs.values() for path in new} == {*convert(source)}
    (tmp_path / "table.toml").write_text(draft.to_toml())
    assert ta.load_migration(tmp_path / "table.toml") == draft.migration
    source, convert = make(3, 11)
    wanted = convert(source)
    made = draft.migration(source, wanted)
    for path, array in wanted.items():
        np.testing.assert_allclose(made[path], array, rtol=1e-6, atol=1e-6)
    again = draft.migration(draft.migration.inverse(made, source), wanted)
    for path, array in wanted.items():
        np.testing.assert_allclose(again[path], array, rtol=1e-6, atol=1e-6)
    report = draft.check(source, convert)
    assert report, str(report)
    wrong = draft.check(source, lambda w: {p: 2 * a for p, a in convert(w).items()})
    assert not wrong


def without_a_key_bias(order: str, *, is_stacked: bool) -> Callable[[int, int], Made]:
    """As Whisper, whose keys have no bias: the one of all three has zeros for them."""

    def make(layers: int, e: int) -> Made:
        at = "l.{}.{}_proj.bias"
        shapes = {at.format(n, x): (e,) for n in range(layers) for x in "qv"}

        def convert(w: Leaves) -> Leaves:
            zeros = np.zeros(e, "f4")
            rows = [
                np.concatenate([w.get(at.format(n, x), zeros) for x in order])
                for n in range(layers)
            ]
            if is_stacked:
                return {"qkv": np.stack(rows)}
            return {f"l/{n}/qkv": row for n, row in enumerate(rows)}

        return numbers(shapes), convert

    return make


def scaled_queries(factor: float | None) -> Callable[[int, int], Made]:
    """As DETR: of the three parts of one array the queries are divided by a root."""

    def make(layers: int, d: int) -> Made:
        shapes: dict[str, tuple[int, ...]] = {}
        for n in range(layers):
            shapes |= {f"l.{n}.w": (9 * d, 11), f"l.{n}.b": (9 * d,)}

        def convert(w: Leaves) -> Leaves:
            made = {}
            for path, leaf in w.items():
                heads = leaf.reshape(3, 3, d, *leaf.shape[1:])
                scales = np.float32(factor or d**-0.5), 1, 1
                for name, part, scale in zip("qkv", heads, scales, strict=True):
                    made[f"{path}/{name}"] = part * scale
            return made

        return numbers(shapes), convert

    return make


CHANGED = {
    "zeros in the middle": (without_a_key_bias("qkv", is_stacked=False), ""),
    "zeros at first": (without_a_key_bias("kqv", is_stacked=False), ""),
    "zeros of a stack": (without_a_key_bias("qkv", is_stacked=True), ""),
    "a root of a head": (scaled_queries(None), ""),
    "another factor": (scaled_queries(0.57), "scale"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGED)
def test_a_part_that_is_zeros_or_scaled_takes_a_table(name, tmp_path):
    make, mark = CHANGED[name]
    source, convert = make(2, 5)
    draft = ta.draft_migration(source, convert=convert)
    assert not draft.missing
    assert not draft.unexpected
    assert len(draft.migration.tables) == 2
    assert draft.pairs.keys() == source.keys()
    assert {path for new in draft.pairs.values() for path in new} == {*convert(source)}
    assert {row.notes.check for row in draft.migration.rows} - {""} == {mark} - {""}
    assert ("check = " in draft.to_toml()) == (name.startswith("zeros") or bool(mark))
    (tmp_path / "table.toml").write_text(draft.to_toml())
    table = ta.load_migration(tmp_path / "table.toml")
    assert table == draft.migration
    source, convert = make(3, 7)
    wanted = convert(source)
    made = table(source, wanted)
    back = table.inverse(made, source)
    for ones, twos in ((made, wanted), (back, source)):
        assert ones.keys() == twos.keys()
        for path, array in twos.items():
            np.testing.assert_allclose(ones[path], array, rtol=1e-6)
    report = draft.check(source, convert)
    assert report, str(report)
    assert not draft.check(source, lambda w: {p: a + 1 for p, a in convert(w).items()})


@pytest.mark.parametrize(
    "function",
    [
        lambda w: {"c": w["a"] * w["b"]},
        lambda w: {"c": np.maximum(w["a"], w["b"])},
        lambda w: {"a": w["a"], "c": w["a"] + w["b"]},  # of one row, `a` is a summand
        lambda w: {"c": w["a"] + w["b"] + 1},
    ],
)
def test_what_is_no_sum_has_no_row(function):
    source = numbers({"a": (5,), "b": (5,)})
    draft = ta.draft_migration(source, convert=function)
    assert "c" in draft.missing
    assert "b" in draft.unexpected
    assert len(draft.migration.tables) == 1


@pytest.mark.slow
@pytest.mark.parametrize("has_other", [False, True])
def test_a_sum_of_which_not_all_is_found_is_said_and_no_row(has_other):
    """One row of an array, for each of another: no row repeats a part."""
    shapes = {"pos": (17, 11), "type": (2, 11), "w": (3, 5), "v": (3, 5)}
    source = numbers(shapes)

    def convert(w: Leaves) -> Leaves:
        made = {"p": w["pos"] + w["type"][0], "w": w["w"].T, "v": w["v"].T}
        return made | ({"both": made.pop("w") + made.pop("v")} if has_other else {})

    draft = ta.draft_migration(source, convert=convert)
    assert "Sums, of which not all summands are found: 'p'." in draft.notes
    assert draft.missing == ("p",)
    assert {*draft.unexpected} == {"pos", "type"}
    wanted = {path: a for path, a in convert(source).items() if path != "p"}
    rest = {path: a for path, a in source.items() if path in draft.pairs}
    made = draft.migration(rest, wanted)
    for path, array in wanted.items():
        np.testing.assert_allclose(made[path], array, rtol=1e-6)
    assert draft.migration.inverse(made, rest).keys() == rest.keys()


@pytest.mark.slow
def test_a_function_that_takes_no_zeros_is_drafted_without_sums():
    def convert(w):
        if not all(map(np.any, w.values())):
            raise ZeroDivisionError("a norm is zero")
        return {"c": w["a"] + w["b"], "d": w["e"]}

    source = numbers({"a": (5,), "b": (5,), "e": (3,)})
    draft = ta.draft_migration(source, convert=convert)
    assert draft.missing == ("c",)
    assert draft.pairs == {"e": ("d",)}


@pytest.mark.slow
def test_summands_do_not_take_the_name_of_a_leaf():
    source = numbers({"a": (5,), "b": (7,), "d": (5,)})

    def convert(w):
        return {"c": w["a"] + w["b"][2:], "c/0": w["d"]}

    draft = ta.draft_migration(source, convert=convert)
    assert not draft.missing
    assert draft.pairs == {"a": ("c",), "b": ("c",), "d": ("c/0",)}
    made = draft.migration(source, convert(source))
    np.testing.assert_array_equal(made["c"], source["a"] + source["b"][2:])


def test_positions_that_are_longer_are_left_to_names_if_numbers_are_not_alike():
    shapes = {"pos.weight": (21, 22), "word.weight": (5, 7)}
    target = {"pos/embedding": np.ones((19, 22)), "word/embedding": np.ones((5, 7))}
    target = {p: a * np.arange(a.size).reshape(a.shape) for p, a in target.items()}
    draft = ta.draft_migration(numbers(shapes), target)
    assert draft.pairs["pos.weight"] == ("pos/embedding",)
    assert {*draft.doubtful} == {*shapes}


@pytest.mark.slow
def test_another_size_answers_the_marks_of_two_tables():
    def made(layers: int, words: int, tails: int) -> Made:
        source, scanned = hybrid(layers, 11, 13, ".")
        shapes = {f"tail.{n}.w": (5, layers + 3) for n in range(tails)}
        shapes["words"] = (words, 7)

        def convert(w: Leaves) -> Leaves:
            rest = [w[f"tail.{n}.w"] for n in range(2, tails)]
            more = {"tail": np.stack(rest), "first": w["tail.1.w"].T}
            more["wte"] = np.pad(w["words"], ((0, 3), (0, 0)))
            return scanned(w) | more

        return source | numbers(shapes), convert

    source, convert = made(8, 37, 5)
    draft = ta.draft_migration(source, convert=convert)
    assert len(draft.migration.tables) == 2
    marks = {row.notes.check for row in draft.migration.rows}
    assert {"length", "numbers"} <= marks
    report = draft.check(*made(12, 46, 10))
    assert report, str(report)
    assert {row.notes.check for row in report.migration.rows} <= {"", "sizes"}
    report = draft.check(*made(12, 37, 5))
    assert report, str(report)
    left = {row.notes.check for row in report.migration.rows}
    assert {"length", "numbers"} <= left


def directions(
    layers: int, i: int, h: int, ends: tuple[str, str], *, adds: bool
) -> Made:
    """A GRU of two directions in one array each, with the second of its gates first."""
    shapes: dict[str, tuple[int, ...]] = {"head": (5, h)}
    for n in range(layers):
        for end in ends:
            shapes |= {
                f"rnn.weight_ih_l{n}{end}": (3 * h, 2 * h if n else i),
                f"rnn.weight_hh_l{n}{end}": (3 * h, h),
                f"rnn.bias_ih_l{n}{end}": (3 * h,),
                f"rnn.bias_hh_l{n}{end}": (3 * h,),
            }

    def convert(w: Leaves) -> Leaves:
        made = {"out": w["head"].T}
        for n in range(layers):
            of_layer = {}
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
                arrays = [w[f"rnn.{name}_l{n}{end}"] for end in ends]
                gates = [a.reshape(3, h, *a.shape[1:])[[1, 0, 2]] for a in arrays]
                of_layer[name] = np.stack(
                    [g.reshape(a.shape) for g, a in zip(gates, arrays, strict=True)]
                )
            made[f"gru_{n}/W"] = of_layer["weight_ih"]
            made[f"gru_{n}/R"] = of_layer["weight_hh"]
            biases = of_layer["bias_ih"], of_layer["bias_hh"]
            made[f"gru_{n}/B"] = sum(biases) if adds else np.concatenate(biases, 1)
        return made

    return numbers(shapes), convert


@pytest.mark.slow
@pytest.mark.parametrize("ends", [("", "_reverse"), ("/ahead", "/back")])
@pytest.mark.parametrize(
    ("adds", "is_back"),
    [(False, False), (False, True), (True, False)],  # summands do not come back
)
def test_what_a_layer_has_twice_is_two_of_one_kind(ends, adds, is_back, tmp_path):
    source, convert = directions(4, 11, 7, ends, adds=adds)
    if is_back:
        draft = ta.draft_migration(convert(source), source)
    else:
        draft = ta.draft_migration(source, convert=convert)
    assert not draft.missing
    assert not draft.unexpected
    assert not draft.doubtful
    (tmp_path / "table.toml").write_text(draft.to_toml())
    assert ta.load_migration(tmp_path / "table.toml") == draft.migration
    source, convert = directions(9, 17, 13, ends, adds=adds)
    sides = (convert(source), source) if is_back else (source, convert)
    assert draft.check(*sides), str(draft.check(*sides))


def test_what_no_draft_says_is_drafted_from_what_a_first_table_makes():
    source = numbers({"w": (6, 4), "b": (7,)})
    rest = ("b", "b")
    lay_flat = ta.Migration([("w : a b", "w : (a b)"), rest])
    turn = ta.Migration([("w : (p q)", "w : (q p)"), rest], sizes={"p": 3})
    first = lay_flat.then(turn)
    target = {"k": first(source)["w"].reshape(6, 4), "bias": source["b"]}
    draft = ta.draft_migration(source, target)
    assert draft.missing == ("k",)
    assert "draft_migration(a(source), target) drafts `b` of `a.then(b)`" in (
        " ".join(draft.to_toml().replace("\n# ", " ").split())
    )
    second = ta.draft_migration(first(source), target).migration
    whole = first.then(second)
    for path, array in whole(source, target).items():
        np.testing.assert_array_equal(array, target[path])


@pytest.mark.parametrize("is_back", [False, True])
def test_marks_of_all_tables_are_data(is_back):
    source, convert = hybrid(12, 11, 13, ".")
    sides = (convert(source), source) if is_back else (source, convert(source))
    draft = ta.draft_migration(*sides)
    document = json.loads(draft.to_json())
    rows = document["rows"]
    assert [each["check"] for each in rows] == [
        [row.notes.check] if row.notes.check else [] for row in draft.migration.rows
    ]
    assert [each["in_table"] for each in rows] == [
        number
        for number, table in enumerate(draft.migration.tables, 1)
        for _ in table.rows
    ]
    assert document["doubtful"] == [*draft.doubtful]
    marked = {path for path in sides[0] if "embed" not in path}  # of blocks
    assert {*draft.doubtful} == marked


def test_what_tables_around_a_draft_do_is_shown():
    source, convert = flax_gru(5, 7)
    assert "add=True" in repr(ta.draft_migration(source, convert=convert))


@pytest.mark.parametrize("size", [5, 3])
def test_parts_one_of_which_has_an_ending_come_back(size):
    def made(layers: int, o: int, i: int) -> tuple[Leaves, Leaves]:
        rng = np.random.default_rng(0)
        source = {f"g{n}/w": rng.normal(size=(8, i)) for n in range(layers)}
        ends = ("", slice(None, o)), ("_reverse", slice(o, None))
        return source, {
            f"w_l{n}{end}": source[f"g{n}/w"][part]
            for n in range(layers)
            for end, part in ends
        }

    draft = ta.draft_migration(*made(3, size, 7))
    assert not draft.missing
    assert "no way back" not in draft.summary
    source, target = made(4, size, 11)
    assert draft.check(source, target), str(draft.check(source, target))
