"""Marks of drafted rows: numbers that were seen at one model alone are said to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from test_drafts import float32

import treeadapt as ta

Leaves = dict[str, Any]


def marks(draft: Any) -> dict[str, str]:
    """What each row of a table rests on, by its text."""
    return {row.text: row.notes.check for row in draft.migration.rows}


def words(rows: int, width: int) -> Leaves:
    return float32({"embed": np.zeros((rows, width)), "up": np.zeros((width, 2))})


def padded(multiple: int) -> Callable[[Leaves], Leaves]:
    """A vocabulary that is made as long as the next multiple of a number."""

    def convert(leaves: Leaves) -> Leaves:
        more = -len(leaves["embed"]) % multiple
        return {"wte": np.pad(leaves["embed"], ((0, more), (0, 0))), "up": leaves["up"]}

    return convert


def longer(count: int) -> Callable[[Leaves], Leaves]:
    return lambda leaves: {
        "wte": np.pad(leaves["embed"], ((0, count), (0, 0))),
        "up": leaves["up"],
    }


def shorter(count: int) -> Callable[[Leaves], Leaves]:
    return lambda leaves: {"wte": leaves["embed"][:-count], "up": leaves["up"]}


@pytest.mark.parametrize("convert", [padded(8), longer(3), shorter(3)])
def test_how_much_an_axis_is_longer_is_marked(convert):
    draft = ta.draft_migration(words(37, 11), convert=convert)
    assert marks(draft) == {"embed : v e": "length", "up": ""}
    assert str(draft).startswith("2 rows: 1 by values, 1 to check.\n")


@pytest.mark.parametrize(
    ("convert", "rows", "left"),
    [
        (padded(8), 37, "length"),  # no other vocabulary
        (padded(8), 45, "length"),  # three more, as for any rows of this kind
        (longer(3), 45, "length"),  # 40 and 48 have a divisor, too
        (longer(3), 46, ""),
        (shorter(3), 46, ""),
        (shorter(3), 45, ""),
        (shorter(3), 47, ""),
    ],
)
def test_another_length_answers_how_much_it_is_longer(convert, rows, left):
    draft = ta.draft_migration(words(37, 11), convert=convert)
    report = draft.check(words(rows, 13), convert)
    assert report, str(report)
    assert marks(report)["embed : v e"] == left


def layers(count: int, width: int, *names: str) -> Leaves:
    shape = (width, width + 2)
    return float32(
        {f"layers.{n}.{k}.w": np.zeros(shape) for n in range(count) for k in names}
    )


def but_the_last(leaves: Leaves) -> Leaves:
    count = len(leaves)
    return {f"blk.{n}.w": leaves[f"layers.{n}.up.w"] for n in range(count - 1)}


def stacked_but_the_last(leaves: Leaves) -> Leaves:
    return {"blocks": np.stack([*leaves.values()][:-1])}


def after_blocks(leaves: Leaves) -> Leaves:
    """Layers in blocks of three, and those that are left one by one."""
    every = [leaf.T for leaf in leaves.values()]
    end = len(every) - len(every) % 3
    made = {f"blocks/{n}": np.stack(every[n:end:3], 1) for n in range(3)}
    return made | {f"rest/{n}": leaf for n, leaf in enumerate(every[end:])}


@pytest.mark.parametrize(
    ("convert", "count", "text"),
    [
        (but_the_last, 4, "layers.3.up.w"),
        (stacked_but_the_last, 4, "layers.3.up.w"),
        (after_blocks, 8, "layers.{l+6}.up.w : o i"),
    ],
)
def test_numbers_of_layers_that_were_seen_are_marked(convert, count, text):
    source = layers(count, 5, "up")
    draft = ta.draft_migration(source, convert=convert)
    marked = {row: mark for row, mark in marks(draft).items() if mark}
    before = {"layers.{(b i)}.up.w : o a"} if convert is after_blocks else set()
    assert marked.keys() == {text} | before  # how many are before follows, too
    assert {*marked.values()} == {"numbers"}
    made = draft.migration(source, convert(source))
    assert not ta.tree_diff(made, convert(source), values=True)
    assert marks(draft.check(layers(count, 7, "up"), convert)) == marks(draft)


def test_the_last_layer_of_a_target_is_marked():
    def convert(leaves: Leaves) -> Leaves:
        made = {path.replace("layers", "h"): leaf for path, leaf in leaves.items()}
        return made | {f"h.{len(leaves) - 1}.up.w": made.pop("head")}

    source = layers(3, 5, "up") | float32({"head": np.zeros((5, 7))})
    draft = ta.draft_migration(source, convert=convert)
    assert marks(draft)["head"] == "numbers"


def test_twice_as_many_layers_answer_which_were_meant():
    def convert(leaves: Leaves) -> Leaves:
        others = [leaves[f"layers.{n}.up.w"] for n in range(2, len(leaves))]
        return {"h": np.stack(others), "a": leaves["layers.1.up.w"].T}

    draft = ta.draft_migration(layers(5, 5, "up"), convert=convert)
    assert "numbers" in marks(draft).values()
    for count, is_left in ((5, True), (7, True), (10, False)):
        report = draft.check(layers(count, 11, "up"), convert)
        assert report, str(report)
        assert ("numbers" in marks(report).values()) == is_left


@pytest.mark.parametrize(
    "names",
    [
        {"net.0.w": (5, 7), "net.2.w": (3, 5)},
        {f"h.{n}.Conv_{k}.w": (5, 7 + k) for n in range(3) for k in (0, 1)},
        {f"h.{n}.bn{k}.w": (5 + (k == 3),) for n in range(3) for k in (1, 2, 3)},
    ],
)
def test_a_number_that_is_a_name_is_not_marked(names):
    source = float32({path: np.zeros(shape) for path, shape in names.items()})

    def convert(leaves: Leaves) -> Leaves:
        return {path.replace(".", "/"): leaf.T for path, leaf in leaves.items()}

    assert not ta.draft_migration(source, convert=convert).doubtful


def test_a_number_of_one_leaf_alone_is_noted():
    def convert(leaves: Leaves) -> Leaves:
        return {path.replace(".", "/"): leaf.T for path, leaf in leaves.items()}

    source = layers(4, 5, "up") | float32({"layers.2.lstm": np.zeros((7, 3))})
    draft = ta.draft_migration(source, convert=convert)
    assert not draft.doubtful
    assert "with others, no row takes the leaves of: 'layers.2.lstm" in str(draft)


def test_a_row_for_few_of_the_leaves_of_another_is_above_it():
    """As of EnCodec: one bias has size 1, and so a row of its own."""
    ends = {"encoder": (0, 3, 6), "decoder": (0, 3)}
    shapes = {
        **{f"{s}.layers.{n}.bias": (5 + n,) for s in ends for n in ends[s]},
        "decoder.layers.6.bias": (1,),
    }
    source = float32({path: np.zeros(shape) for path, shape in shapes.items()})

    def convert(leaves: Leaves) -> Leaves:
        return {path.replace(".", "/"): leaf for path, leaf in leaves.items()}

    draft = ta.draft_migration(source, convert=convert)
    made = draft.migration(source)
    assert not ta.tree_diff(made, convert(source), values=True)


def bottlenecks(depths: tuple[int, ...], width: int) -> Leaves:
    """The shapes of a ResNet: of three kernels one is larger, and the last is wider."""
    shapes: dict[str, tuple[int, ...]] = {}
    before = width
    for stage, depth in enumerate(depths, 1):
        inner = width * 2 ** (stage - 1)
        for n in range(depth):
            at = f"layer{stage}.{n}"
            kernels = ((inner, before, 1), (inner, inner, 3), (4 * inner, inner, 1))
            for k, (o, i, size) in enumerate(kernels, 1):
                shapes[f"{at}.conv{k}.weight"] = (o, i, size, size)
                shapes |= {f"{at}.bn{k}.{name}": (o,) for name in ("weight", "bias")}
            before = 4 * inner
    return float32({path: np.zeros(shape) for path, shape in shapes.items()})


def by_stage(leaves: Leaves) -> Leaves:
    """As Keras names them."""
    made = {}
    for path, leaf in leaves.items():
        stage, n, layer, name = path.split(".")
        at = f"stack{int(stage[5:]) - 1}_block{n}_{layer[-1]}_{layer[:-1]}"
        made[f"{at}/{name}"] = leaf.transpose(2, 3, 1, 0) if leaf.ndim == 4 else leaf
    return made


def by_block(leaves: Leaves) -> Leaves:
    """As Flax's example counts them, through all stages."""
    blocks = dict.fromkeys(tuple(path.split(".")[:2]) for path in leaves)
    made = {}
    for path, leaf in leaves.items():
        stage, n, layer, name = path.split(".")
        at = f"Block_{[*blocks].index((stage, n))}/{layer[:-1]}_{int(layer[-1]) - 1}"
        made[f"{at}/{name}"] = leaf.transpose(2, 3, 1, 0) if leaf.ndim == 4 else leaf
    return made


@pytest.mark.slow
def test_what_is_only_written_apart_is_not_marked():
    draft = ta.draft_migration(bottlenecks((3, 4, 6, 3), 5), convert=by_stage)
    assert {*marks(draft).values()} == {""}
    report = draft.check(bottlenecks((4, 5, 7, 2), 7), by_stage)
    assert report, str(report)


@pytest.mark.slow
def test_what_stages_add_to_the_numbers_of_layers_is_marked():
    source = bottlenecks((3, 4, 6, 3), 5)
    draft = ta.draft_migration(source, convert=by_block)
    made = by_block(source)
    assert not ta.tree_diff(draft.migration(source), made, values=True)
    first = {path for path in source if path.startswith("layer1.")}
    assert {*source} - first <= {*draft.doubtful}


def test_a_first_layer_that_is_turned_is_marked():
    def convert(leaves: Leaves) -> Leaves:
        made = {path.replace("layers", "h"): leaf.T for path, leaf in leaves.items()}
        return made | {"h.0.up.w": leaves["layers.0.up.w"]}

    draft = ta.draft_migration(layers(4, 5, "up"), convert=convert)
    assert {"numbers"} <= {*marks(draft).values()}


def lettered(repeats: tuple[int, ...], width: int) -> Leaves:
    """As Keras names the blocks of an EfficientNet: a stage, and a letter."""
    return float32(
        {
            f"block{stage}{'abcdef'[n]}_conv/kernel": np.zeros((width, width + stage))
            for stage, count in enumerate(repeats, 1)
            for n in range(count)
        }
    )


def in_order_of_names(leaves: Leaves) -> Leaves:
    return {f"blocks.{n}.w": leaves[path] for n, path in enumerate(sorted(leaves))}


def test_numbers_that_are_counted_through_names_are_marked_whatever_a_check_shows():
    source = lettered((1, 2, 3), 5)
    draft = ta.draft_migration(source, convert=in_order_of_names)
    report = draft.check(lettered((1, 2, 3), 11), in_order_of_names)
    assert report, str(report)
    other = lettered((1, 1, 3), 5)
    wanted = in_order_of_names(other)
    for table in (draft.migration, report.migration):
        for row in table.tables[0].rows:
            made = ta.Migration([row.typed(), ("**", None)])(other)
            is_right = not ta.tree_diff(made, {p: wanted.get(p) for p in made})
            assert row.notes.check or is_right, row.text


def in_stages(first: int, second: int, width: int) -> Leaves:
    every = {"one": (first, 2), "two": (second, 3)}
    return float32(
        {
            f"{stage}.{n}.w": np.zeros((width, width + more))
            for stage, (count, more) in every.items()
            for n in range(count)
        }
    )


def test_what_is_added_to_numbers_follows_from_those_of_others():
    def convert(leaves: Leaves) -> Leaves:
        return {f"h.{n}.w": leaf.T for n, leaf in enumerate(leaves.values())}

    for first in (1, 2):
        draft = ta.draft_migration(in_stages(first, 3, 5), convert=convert)
        assert "numbers" in marks(draft).values()
        report = draft.check(in_stages(first, 6, 11), convert)  # as many in the first
        assert report, str(report)
        assert "numbers" in marks(report).values()


@pytest.mark.parametrize("turned", [(), (2,), (1, 2)])
def test_levels_that_are_counted_from_the_last_are_marked(turned):
    """As the levels of a decoder: each number follows from how many there are."""

    def convert(leaves: Leaves) -> Leaves:
        made = {}
        for n, leaf in enumerate(leaves.values()):
            other = leaf.T if n in turned[:1] else leaf * 2 if n in turned else leaf
            made[f"up_blocks.{len(leaves) - 1 - n}.w"] = other
        return made

    source = float32({f"up.{n}.w": np.zeros((5 + n, 11 + 2 * n)) for n in range(3)})
    draft = ta.draft_migration(source, convert=convert)
    assert all("numbers" in mark for mark in marks(draft).values()), marks(draft)


def test_a_draft_without_a_way_back_says_so():
    source = words(12, 5)
    draft = ta.draft_migration(source, convert=lambda w: w | {"embed": w["embed"][::2]})
    with pytest.raises(ta.MigrationError):
        draft.migration.inverse({"embed": source["embed"][::2], "up": source["up"]})
    assert "There is no way back: 'embed : v e' cannot be read backwards." in str(draft)
    assert "no way back" not in str(ta.draft_migration(source, convert=dict))


def test_a_number_that_stands_for_a_word_is_no_count():
    source = float32(
        {
            f"h.{n}.{way}.w": np.zeros((5 + (way == "up"), 7))
            for n in range(2)
            for way in ("down", "up")
        }
    )
    numbers = {"down": 2, "up": 1}

    def convert(leaves: Leaves) -> Leaves:
        return {
            f"layers/{path.split('.')[1]}/fc_{numbers[path.split('.')[2]]}/k": leaf.T
            for path, leaf in leaves.items()
        }

    draft = ta.draft_migration(source, convert=convert)
    assert not any("numbers" in mark for mark in marks(draft).values()), marks(draft)


def of_a_sequence(layers: int, width: int) -> Leaves:
    """As the convolutions of WavLM: the first has a norm, the third module of it."""
    shapes = {
        f"conv.{n}.0.w": (width, width if n else 1, 3 + n % 2) for n in range(layers)
    }
    shapes |= {"conv.0.2.w": (width,), "conv.0.2.b": (width,)}
    return float32({path: np.zeros(shape) for path, shape in shapes.items()})


def with_words(leaves: Leaves) -> Leaves:
    words = {"0": "conv", "2": "norm"}
    return {
        f"layers.{n}.{words[module]}.{k}": leaf
        for path, leaf in leaves.items()
        for _, n, module, k in [path.split(".")]
    }


def test_numbers_that_no_row_runs_over_keep_no_mark():
    draft = ta.draft_migration(of_a_sequence(2, 11), convert=with_words)
    assert "numbers" in marks(draft).values()
    few = draft.check(of_a_sequence(3, 13), with_words)
    assert "twice as many after 'conv.' (2 in the draft, 3 here) answer it" in str(few)
    report = draft.check(of_a_sequence(5, 13), with_words)
    assert report, str(report)
    assert not report.left
    assert not any(marks(report).values()), marks(report)


def transitions(count: int, width: int) -> Leaves:
    """As AlphaFold names modules: the first one has no number."""
    names = ["transition", *(f"transition_{n}" for n in range(1, count))]
    return float32({f"{name}/w": np.zeros((width, width + 3)) for name in names})


def from_one(leaves: Leaves) -> Leaves:
    return {f"linear_{n}/w": leaf.T for n, leaf in enumerate(leaves.values(), 1)}


def test_what_has_no_number_follows_from_those_that_fill_its_place():
    draft = ta.draft_migration(transitions(3, 5), convert=from_one)
    assert "numbers" in marks(draft).values()
    report = draft.check(transitions(3, 7), from_one)
    assert report, str(report)
    assert marks(report) == marks(draft)
    way = "twice as many after 'transition_' (2 in the draft, 2 here) answer it"
    assert all(way in each["numbers"] for each in report.left.values())
    assert way in str(report)
    report = draft.check(transitions(5, 7), from_one)
    assert report, str(report)
    assert not any(marks(report).values()), marks(report)


def test_a_stage_with_as_many_layers_keeps_the_marks_of_the_next():
    def stages(first: int, second: int, width: int) -> Leaves:
        return float32(
            {
                f"stage{stage}.{n}.w": np.zeros((width, width + stage))
                for stage, count in ((1, first), (2, second))
                for n in range(count)
            }
        )

    def convert(leaves: Leaves) -> Leaves:
        return {f"h.{n}.w": leaf.T for n, leaf in enumerate(leaves.values())}

    for first in (1, 2):
        draft = ta.draft_migration(stages(first, 3, 5), convert=convert)
        assert "numbers" in marks(draft).values()
        report = draft.check(stages(first, 6, 11), convert)
        assert report, str(report)
        assert "numbers" in marks(report).values()


def test_a_mark_that_no_size_answers_says_so():
    source = lettered((1, 2, 3), 5)
    draft = ta.draft_migration(source, convert=in_order_of_names)
    report = draft.check(lettered((1, 2, 3), 11), in_order_of_names)
    assert report.left
    assert "no size answers for a list that gives numbers other ones" in str(report)
    odd = draft.check(
        source, lambda w: {p: -a for p, a in in_order_of_names(w).items()}
    )
    assert not odd.left


def test_stages_of_which_more_have_no_row_are_not_asked_for():
    """As of Swin, whose blocks are counted through, and merged between stages."""

    def stages(depths: tuple[int, ...], width: int) -> Leaves:
        shapes: dict[str, tuple[int, ...]] = {}
        for stage, depth in enumerate(depths):
            size = width * 2**stage
            shapes |= {f"layers.{stage}.blocks.{n}.w": (size,) for n in range(depth)}
            shapes[f"layers.{stage}.merge.w"] = (size, size + 1)
        return float32({path: np.zeros(shape) for path, shape in shapes.items()})

    def convert(leaves: Leaves) -> Leaves:
        blocks = [leaf for path, leaf in leaves.items() if "blocks" in path]
        merged = [leaf.T for path, leaf in leaves.items() if "merge" in path]
        made = {f"merge_{n}/w": leaf for n, leaf in enumerate(merged)}
        return made | {f"block_{n}/w": leaf for n, leaf in enumerate(blocks)}

    draft = ta.draft_migration(stages((2, 2, 3), 5), convert=convert)
    report = draft.check(stages((2, 2, 6), 7), convert)
    assert report, str(report)
    ways = {each["numbers"] for each in report.left.values()}
    assert len(ways) == 1
    assert "rows name each number after 'layers.'" in ways.pop()
    mine = ta.draft_migration(stages((2, 4, 3), 5), convert=convert)
    assert mine.check(stages((2, 4, 3), 11), convert)


def test_a_mark_of_numbers_says_what_answers_it():
    draft = ta.draft_migration(layers(4, 5, "up"), convert=but_the_last)
    assert "draft.check with twice as many answers it" in draft.to_toml()
    draft = ta.draft_migration(lettered((1, 2, 3), 5), convert=in_order_of_names)
    assert "no check answers it" in draft.to_toml()


# --- what a check at a size that is the same does not show ---


def queries(heads: int, size: int, width: int) -> Leaves:
    shape = (heads * size, width)
    return float32({f"h.{n}.q": np.zeros(shape) for n in range(heads)}, heads)


def scaled(size: int, *, apart: bool, factor: float | None = None) -> Any:
    """Queries that are divided by the root of the size of a head."""
    by = np.float32(size**-0.5 if factor is None else factor)

    def convert(leaves: Leaves) -> Leaves:
        made = {path: (leaf * by).T for path, leaf in leaves.items()}
        if not apart:
            return made
        return {path: leaf.reshape(len(leaf), -1, size) for path, leaf in made.items()}

    return convert


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("apart", [True, False])
def test_a_root_of_a_size_that_is_the_same_stays_marked(apart, sign):
    convert = scaled(4, apart=apart, factor=sign * 0.5)
    draft = ta.draft_migration(queries(3, 4, 13), convert=convert)
    report = draft.check(queries(5, 4, 17), convert)
    assert report, str(report)
    assert [*marks(report).values()] == ["scale"]
    assert f"it may be {'-' * (sign < 0)}4**-0.5 or" in str(report)


def test_the_name_of_a_size_in_place_of_its_root_is_right_at_others(tmp_path):
    draft = ta.draft_migration(queries(3, 4, 13), convert=scaled(4, apart=True))
    text = draft.to_toml()
    assert "\nscale = 0.5\n" in text
    file = tmp_path / "table.toml"
    file.write_text(text.replace("scale = 0.5", "scale = 'd**-0.5'"))
    table = ta.load_migration(file)
    for size in (4, 16):
        leaves = queries(3, size, 13)
        wanted = scaled(size, apart=True)(leaves)
        assert not ta.tree_diff(table(leaves, wanted), wanted, values=True)


@pytest.mark.parametrize("factor", [0.5, 1.702, 0.087, 1e-6, 3e8])
def test_a_factor_that_no_size_gives_twice_loses_its_mark(factor):
    convert = scaled(3, apart=False, factor=factor)
    draft = ta.draft_migration(queries(3, 4, 13), convert=convert)
    assert "scale" in marks(draft).values()
    report = draft.check(queries(5, 3, 17), convert)
    assert report, str(report)
    assert not report.left


def in_groups(num_groups: int) -> Callable[[Leaves], Leaves]:
    def convert(leaves: Leaves) -> Leaves:
        one, two = (a.reshape(num_groups, -1, a.shape[1]) for a in leaves.values())
        both = np.concatenate([one, two], 1)
        return {"kv": both.reshape(-1, both.shape[-1])}

    return convert


def keys(num_groups: int, size: int, width: int) -> Leaves:
    shape = (num_groups * size, width)
    return float32({"k": np.zeros(shape), "v": np.zeros(shape)}, size)


def test_a_stated_size_that_was_the_same_is_said_and_keeps_its_mark(tmp_path):
    draft = ta.draft_migration(keys(2, 5, 13), convert=in_groups(2))
    assert set(marks(draft).values()) == {"sizes"}
    report = draft.check(keys(2, 7, 11), in_groups(2))
    assert report, str(report)
    assert {*marks(report).values()} == {"sizes"}
    (name,) = report.same
    assert report.same == {name: 2}
    said, kept = str(report).splitlines()[1:]
    assert said == (
        f"[sizes] {name} = 2 was the same in both models: for one with another number, "
        f"pass sizes={{{name!r}: n}} to load_migration."
    )
    assert kept.endswith("where all models have these, delete the mark.")
    file = tmp_path / "table.toml"
    file.write_text(report.migration.to_toml())
    leaves = keys(4, 5, 11)
    wanted = in_groups(4)(leaves)
    made = ta.load_migration(file, sizes={name: 4})(leaves, wanted)
    assert not ta.tree_diff(made, wanted, values=True)


def test_what_is_rounded_where_it_is_computed_is_said():
    source = {"e": np.ones((5, 7), "f4"), "f": np.ones((5, 3), "f4")}
    large = {"e": np.ones((11, 13), "f4"), "f": np.ones((11, 2), "f4")}
    for change, lost in ((lambda x: x - 1, True), (lambda x: x / 4, False)):

        def convert(w: Leaves, change: Any = change) -> Leaves:
            return {"x": change(w["e"]), "y": w["f"]}

        report = ta.draft_migration(source, convert=convert).check(large, convert)
        assert report.lost == ("Rounded where it is computed: 'e'.",) * lost
        assert str(report).startswith("2 leaves: equal, there and back.")


def test_a_check_takes_the_sizes_of_another_model():
    draft = ta.draft_migration(keys(2, 5, 13), convert=in_groups(2))
    (name,) = draft.migration.sizes
    assert not draft.check(keys(4, 5, 11), in_groups(4))
    report = draft.check(keys(4, 5, 11), in_groups(4), sizes={name: 4})
    assert report, str(report)
    assert not report.same
    assert {*marks(report).values()} == {"sizes"}
    assert "right at two numbers of its [sizes]" in str(report)
    assert report.migration.sizes == {name: 4}
    again = draft.check(keys(2, 7, 11), in_groups(2), sizes={name: 2})
    assert again.same == {name: 2}
    with pytest.raises(ta.MigrationError, match=f"Those of the table are '{name}'"):
        draft.check(keys(4, 5, 11), in_groups(4), sizes={"heads": 4})


@pytest.mark.parametrize(
    ("convert", "lost"),
    [
        (
            lambda w: {"x": w["e"] + w["f"]},
            "Back from 'x', the first summand gets the sum, and the others zeros.",
        ),
        (
            lambda w: {"x": w["e"].T},
            "Dropped, and not made again: 'f'.",
        ),
        (
            lambda w: {"x": w["e"][:-3], "y": w["f"]},
            "What is cut off does not come back, and is kept of a target: 'e'.",
        ),
        (
            lambda w: {"x": w["e"].astype("float16"), "y": w["f"]},
            "Rounded to another dtype: 'e'.",
        ),
    ],
)
def test_what_does_not_come_back_is_said(convert, lost):
    def source(rows: int, width: int) -> Leaves:
        random = np.random.default_rng(rows)
        shape = (rows, width)
        return {name: random.normal(size=shape).astype("f4") for name in ("e", "f")}

    draft = ta.draft_migration(source(37, 11), convert=convert)
    report = draft.check(source(46, 13), convert)
    assert report, str(report)
    assert report.lost == (lost,)
    first, *rest = str(report).splitlines()
    assert first.endswith("equal, there; on the way back not all comes back.")
    assert rest == [lost]


def test_an_order_of_as_many_parts_as_stages_is_marked():
    random = np.random.default_rng(0)

    def model(stages: int, width: int) -> Leaves:
        source = {"fuse.weight": np.zeros((width, 3 * stages))}
        source |= {f"proj.{i}.weight": np.zeros((3, 7 + 4 * i)) for i in range(stages)}
        return float32({p: random.normal(size=x.shape) for p, x in source.items()})

    def last_stage_first(leaves: Leaves) -> Leaves:
        parts = np.split(leaves["fuse.weight"], len(leaves) - 1, axis=1)
        return leaves | {"fuse.weight": np.concatenate([parts[-1], *parts[:-1]], 1)}

    draft = ta.draft_migration(model(3, 5), convert=last_stage_first)
    order = {text: check for text, check in marks(draft).items() if "fuse" in text}
    assert {*order.values()} == {"order"}
    report = draft.check(model(3, 11), last_stage_first)
    assert report
    assert {*marks(report).values()} == {"", "order"}


def test_an_order_of_gates_in_as_many_layers_is_not_marked():
    random = np.random.default_rng(0)
    cells = {f"lstm.{i}.weight": random.normal(size=(12, 5)) for i in range(4)}

    def gates(leaves: Leaves) -> Leaves:
        order = (0, 1, 3, 2)
        split = {path: np.split(x, 4) for path, x in leaves.items()}
        return {p: np.concatenate([x[i] for i in order]) for p, x in split.items()}

    draft = ta.draft_migration(float32(cells), convert=gates)
    assert marks(draft) == {"lstm.{n}.weight : (p o) i": ""}


@pytest.mark.parametrize("change", [np.abs, lambda x: np.maximum(x, 0)])
def test_what_becomes_of_numbers_below_zero_is_marked(change):
    leaves = float32({"a": np.zeros((7, 5)), "b": np.zeros(5)})
    marked = ta.draft_migration(leaves, convert=lambda w: w | {"a": change(w["a"].T)})
    assert marks(marked) == {"a : o i": "sign", "b": ""}
    moved = ta.draft_migration(leaves, convert=lambda w: w | {"a": w["a"].T + 1})
    assert {*marks(moved).values()} == {""}


def test_numbers_below_zero_are_seen_beside_a_leaf_of_the_same_name():
    leaves = float32({"a": np.zeros((7, 5)), "b": np.zeros(3)})
    draft = ta.draft_migration(
        leaves, convert=lambda w: {"b": np.abs(w["a"].T), "c": w["b"] ** 2}
    )
    assert (draft.unexpected, draft.missing) == (("b",), ("c",))
    assert marks(draft) == {"a : o i": "sign"}
    assert not any("no way back" in note for note in draft.notes)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x: {True: x.T}[x.min() >= 0], "the function raises"),
        (lambda x: x.T[:2] if x.min() < 0 else x.T, "the table does not run on these"),
    ],
)
def test_where_numbers_below_zero_are_not_tried_a_note_says_so(change, reason):
    leaves = float32({"a": np.zeros((7, 5)), "b": np.zeros(5)})
    draft = ta.draft_migration(leaves, convert=lambda w: w | {"a": change(w["a"])})
    assert marks(draft) == {"a : o i": "", "b": ""}
    assert draft.notes[-1] == f"Numbers below zero were not tried: {reason}."


@pytest.mark.filterwarnings("error")
def test_a_function_with_roots_warns_of_nothing():
    leaves = float32({"a": np.zeros((7, 5)), "var": np.zeros(5)})
    roots = ta.draft_migration(leaves, convert=lambda w: w | {"var": w["var"] ** 0.5})
    assert roots.missing == ("var",)
    assert marks(roots) == {"a": ""}


def test_what_becomes_of_numbers_below_zero_is_said_of_two_tables():
    leaves = float32({"a": np.zeros((7, 5)), "b": np.zeros((5, 7)), "c": np.zeros(3)})

    def convert(w: Leaves) -> Leaves:
        return {"sum": w["a"].T + 0.5 * w["b"], "c": np.abs(w["c"])}

    draft = ta.draft_migration(leaves, convert=convert)
    assert len(draft.migration.tables) == 2
    assert any("numbers below zero" in note for note in draft.notes), draft.notes


def test_a_number_over_the_root_of_the_layers_keeps_its_mark():
    random = np.random.default_rng(0)

    def model(layers: int, width: int) -> Leaves:
        paths = (f"l.{n}.o_proj" for n in range(layers))
        return float32({path: random.normal(size=(width, 3)) for path in paths})

    def folded(w: Leaves) -> Leaves:
        return {path: x * np.float32(1.4 / len(w) ** 0.5) for path, x in w.items()}

    draft = ta.draft_migration(model(3, 11), convert=folded)
    report = draft.check(model(3, 17), folded)
    assert {*marks(report).values()} == {"scale"}
    assert "1.4/3**0.5" in str(report)
    assert not draft.check(model(5, 17), folded)


def test_blocks_whose_numbers_go_on_from_stage_to_stage_all_have_rows():
    """As a ResNet of PyTorch in Flax; some norms of two stages are as wide."""

    def numbers(counts: tuple[int, ...]) -> list[tuple[int, int]]:
        return [
            (stage + 1, n) for stage, count in enumerate(counts) for n in range(count)
        ]

    def model(width: int, *counts: int) -> Leaves:
        shapes = {
            f"layer{s}.{n}.bn{k}.{name}": (width * 2 ** (s - 1) * (2 if k == 3 else 1),)
            for s, n in numbers(counts)
            for k in (1, 2, 3)
            for name in ("weight", "running_mean")
        }
        return float32({path: np.zeros(shape) for path, shape in shapes.items()})

    def convert(w: Leaves) -> Leaves:
        blocks = dict.fromkeys(path.rpartition(".bn")[0] for path in w)
        names = {"weight": "scale", "running_mean": "mean"}
        return {
            f"Block_{block}/BatchNorm_{k}/{new}": w[f"{at}.bn{k + 1}.{old}"]
            for block, at in enumerate(blocks)
            for k in range(3)
            for old, new in names.items()
        }

    draft = ta.draft_migration(model(5, 2, 3, 2), convert=convert)
    assert not draft.missing
    assert not draft.unexpected
    assert {*marks(draft).values()} == {"", "numbers"}
    source = model(7, 2, 3, 2)
    made, wanted = draft.migration(source), convert(source)
    assert made.keys() == wanted.keys()
    assert all(np.array_equal(made[path], wanted[path]) for path in wanted)
    with pytest.raises(ta.MigrationError, match="two"):
        draft.migration(model(5, 3, 3, 2))


def test_leaves_that_are_paired_without_a_rule_have_a_row_each():
    pairs = {"2.2.bn3": "4/Norm_2", "3.0.bn2": "5/Norm_1", "3.1.bn3": "6/Norm_2"}
    source = float32({f"layer{old}.mean": np.zeros(20) for old in pairs})

    def convert(w: Leaves) -> Leaves:
        return {f"Block_{pairs[p[5:-5]]}/mean": leaf for p, leaf in w.items()}

    draft = ta.draft_migration(source, convert=convert)
    assert not draft.missing
    assert {*marks(draft).values()} == {"numbers"}
    made, wanted = draft.migration(source), convert(source)
    assert all(np.array_equal(made[path], wanted[path]) for path in wanted)


def test_a_list_of_padded_numbers_is_marked():
    source = float32({f"layer_{n + 2:02}.w": np.zeros((5, 3)) for n in range(3)})

    def convert(w: Leaves) -> Leaves:
        return {f"h.{n}.w": leaf.T for n, leaf in enumerate(w.values())}

    draft = ta.draft_migration(source, convert=convert)
    assert marks(draft) == {"layer_{p=02,03,04}.w : o i": "numbers"}


def test_sums_among_too_many_leaves_are_said_not_to_be_looked_for():
    names = [f"{a}{b}" for a in "abcdef" for b in "uvwxyz"]
    source = float32({name: np.zeros((3, 5)) for name in names})
    draft = ta.draft_migration(source, convert=lambda w: {"s": w["au"] + w["bv"]})
    assert any("Sums were not looked for among 36" in note for note in draft.notes)


def test_sizes_that_a_check_took_are_named_where_it_fails():
    def in_heads(heads: int) -> Callable[[Leaves], Leaves]:
        def convert(w: Leaves) -> Leaves:
            whole = w["attn.k"].reshape(heads, -1, 2, 11)
            return {"key": whole.swapaxes(1, 2).reshape(-1, 11)}

        return convert

    source = float32({"attn.k": np.zeros((3 * 10, 11))})
    draft = ta.draft_migration(source, convert=in_heads(3))
    other = float32({"attn.k": np.zeros((6 * 14, 11))})
    report = draft.check(other, in_heads(6))
    assert not report
    assert "h = 3" in str(report)
    assert "pass sizes= to check" in str(report)
    assert draft.check(other, in_heads(6), sizes={"h": 6})
