"""What one size hides: each row that is wrong at another one has a mark, or is right.

A draft sees one model. Where several formulas give it, the row says a number itself,
and so it has a mark, which an equal result at the same number does not answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from test_drafted_marks import marks
from test_drafts import float32

import treeadapt as ta

Leaves = dict[str, Any]
Convert = Callable[[Leaves], Leaves]


def wrong_rows(table: ta.Migration, source: Leaves, convert: Convert) -> list[str]:
    """Rows without a mark that give other numbers than a function does."""
    wanted = convert(source)
    made = table(source, wanted)
    odd = {
        path
        for path, leaf in wanted.items()
        if not np.allclose(made[path], leaf, rtol=1e-5)
    }
    groups = table.plan(source, wanted).groups
    return [
        group.row.text
        for group in groups
        if odd.intersection(group.filled) and not group.row.notes.check
    ]


# --- parts in reverse order ---


def levels(count: int, channels: int, width: int) -> Leaves:
    return float32({"fuse.w": np.zeros((width, count * channels))}, count)


def reversed_levels(count: int) -> Convert:
    def convert(leaves: Leaves) -> Leaves:
        whole = leaves["fuse.w"]
        parts = whole.reshape(len(whole), count, -1)
        return {"fuse/kernel": parts[:, ::-1].reshape(whole.shape).T}

    return convert


@pytest.mark.parametrize("count", [3, 5])
def test_parts_in_reverse_order_are_those_of_any_number(tmp_path, count):
    draft = ta.draft_migration(levels(count, 7, 13), convert=reversed_levels(count))
    (row,) = draft.migration.rows
    assert [*row.values.typed()["take"].values()] == ["::-1"]
    assert row.notes.check == "sizes"
    ((name, size),) = draft.migration.sizes.items()
    assert size == count
    report = draft.check(levels(count, 11, 17), reversed_levels(count))
    assert report, str(report)
    assert [*marks(report).values()] == ["sizes"]
    file = tmp_path / "table.toml"
    file.write_text(report.migration.to_toml())
    source, convert = levels(6, 5, 11), reversed_levels(6)
    table = ta.load_migration(file, sizes={name: 6})
    assert not ta.tree_diff(table(source, convert(source)), convert(source))
    made = table.inverse(convert(source), source)
    assert not ta.tree_diff(made, source, values=True)


def test_two_parts_the_other_way_round_are_the_formula():
    """As scale and shift are, or both halves of a gated map."""
    draft = ta.draft_migration(levels(2, 7, 13), convert=reversed_levels(2))
    (row,) = draft.migration.rows
    assert row.values.typed() == {"take": {"p": [1, 0]}}
    assert not row.notes.check


# --- one group ---


def fused(groups: int, queries: int, size: int, width: int) -> Leaves:
    rows = groups * (queries + 2) * size
    shapes = {"h.0.attn.qkv.w": (rows, width), "h.0.attn.qkv.b": (rows,)}
    return float32({path: np.zeros(shape) for path, shape in shapes.items()}, rows)


def cut_in_groups(groups: int, queries: int) -> Convert:
    def convert(leaves: Leaves) -> Leaves:
        made = {}
        for path, leaf in leaves.items():
            whole = leaf.reshape(groups, queries + 2, -1, *leaf.shape[1:])
            parts = whole[:, :queries], whole[:, queries], whole[:, queries + 1]
            for name, part in zip("qkv", parts, strict=True):
                at = path.replace("qkv", name)
                made[at] = part.reshape(-1, *leaf.shape[1:])
        return made

    return convert


@pytest.mark.parametrize("is_back", [False, True])
def test_one_group_of_heads_is_marked(is_back):
    """As the heads of Falcon 7B, of which 40B has several groups."""

    def pair(groups: int, queries: int, size: int, width: int) -> list[Leaves]:
        source = fused(groups, queries, size, width)
        both = [source, cut_in_groups(groups, queries)(source)]
        return both[::-1] if is_back else both

    draft = ta.draft_migration(*pair(1, 3, 5, 11))
    assert {*marks(draft).values()} == {"groups"}
    assert "a model with 2 groups of keys shows it" in draft.to_toml()
    report = draft.check(*pair(1, 2, 7, 13))
    assert report, str(report)
    assert {*marks(report).values()} == {"groups"}
    assert "if these models had several, delete the mark" in str(report)
    assert not draft.check(*pair(2, 3, 5, 11))


def repeated(heads: int, size: int, *, times: int = 3) -> tuple[Leaves, Convert]:
    """Keys of which each head is repeated, as for one device each."""
    rows = heads * size
    shapes = {f"h.{n}.attn.k_proj.w": np.zeros((rows, 11)) for n in (0, 1)}

    def convert(leaves: Leaves) -> Leaves:
        made = {}
        for path, leaf in leaves.items():
            if leaf.ndim == 2:
                leaf = leaf.reshape(heads, size, -1).repeat(times, 0).reshape(-1, 11)
            made[path.replace(".", "/")] = leaf
        return made

    return float32(shapes, rows), convert


def test_copies_of_one_head_are_marked():
    source, convert = repeated(1, 5)
    draft = ta.draft_migration(source, convert=convert)
    assert {*marks(draft).values()} == {"groups"}
    assert "a model with 2 heads here shows it" in draft.to_toml()
    report = draft.check(*repeated(1, 7))
    assert report, str(report)
    assert {*marks(report).values()} == {"groups"}
    source, convert = repeated(2, 5)
    assert not draft.check(source, convert)
    draft = ta.draft_migration(source, convert=convert)
    assert {*marks(draft).values()} == {"sizes"}  # of two heads
    assert draft.check(*repeated(2, 7))


def test_all_heads_once_more_are_no_copies_of_one_head():
    """How large a head is, is known from its norm."""
    source, _ = repeated(1, 10)
    source |= float32(
        {"h.0.attn.k_norm.w": np.ones(5), "h.1.attn.k_norm.w": np.ones(5)}
    )

    def convert(leaves: Leaves) -> Leaves:
        return {p: np.tile(a, (3, 1)) if a.ndim == 2 else a for p, a in leaves.items()}

    assert "groups" not in marks(ta.draft_migration(source, convert=convert)).values()


@pytest.mark.parametrize("shown", ["", "norm", "heads", "rest"])
def test_several_keys_next_to_each_other_are_no_group(shown):
    """Six heads of queries, and two of keys: of one group of 3 by 10, or of no group.

    Where nothing shows how large a head is, both fit.
    """
    rows = {"q": 30, "k": 10, "v": 10 if shown != "rest" else 9}
    source = float32({"h.0.attn.qkv.w": np.zeros((sum(rows.values()), 11))})
    if shown == "norm":
        source |= float32({"h.0.attn.q_norm.w": np.ones(5)})
    if shown == "heads":
        source |= float32({"h.0.attn.out.w": np.zeros((11, 30))})

    def convert(leaves: Leaves) -> Leaves:
        made = {path: leaf for path, leaf in leaves.items() if "norm" in path}
        if shown == "heads":
            made["h.0.attn.out.w"] = leaves["h.0.attn.out.w"].T.reshape(6, 5, 11)
        ends = np.cumsum([*rows.values()])[:-1]
        parts = np.split(leaves["h.0.attn.qkv.w"], ends)
        return made | {f"h.0.attn.{p}.w": x for p, x in zip(rows, parts, strict=True)}

    draft = ta.draft_migration(source, convert=convert)
    is_marked = any("groups" in mark for mark in marks(draft).values())
    assert is_marked == (not shown)


# --- numbers that another row has later ones of ---


def layers(count: int, width: int) -> Leaves:
    shapes = {
        f"h.{n}.{name}.w": (width, width)
        for n in range(count)
        for name in ("key", "out")
    }
    return float32({path: np.zeros(shape) for path, shape in shapes.items()}, width)


def of_layers(changed: Callable[[int, Any], Any]) -> Convert:
    """Change what goes out of each layer, by its number."""

    def convert(leaves: Leaves) -> Leaves:
        return {
            f"b/{path}": changed(int(path.split(".")[1]), leaf)
            if "out" in path
            else leaf
            for path, leaf in leaves.items()
        }

    return convert


def halved_every(period: int) -> Convert:
    """As RWKV divides what its later layers add."""
    return of_layers(lambda n, leaf: leaf * np.float32(2.0 ** -(n // period)))


def turned_every(period: int) -> Convert:
    return of_layers(lambda n, leaf: leaf if (n + 1) % period else leaf.T)


def turned_from(period: int) -> Convert:
    return of_layers(lambda n, leaf: leaf if n % (2 * period) else leaf.T)


@pytest.mark.parametrize("count", [3, 4, 5])
@pytest.mark.parametrize(
    "convert", [halved_every(2), turned_every(3), turned_every(2), turned_from(2)]
)
def test_no_row_that_runs_over_numbers_is_wrong_without_a_mark(convert, count):
    draft = ta.draft_migration(layers(count, 7), convert=convert)
    assert not draft.missing
    assert not draft.unexpected
    report = draft.check(layers(count, 11), convert)
    assert report, str(report)
    for table in (draft.migration, report.migration):
        for other in (count + 1, 2 * count):
            try:
                wrong = wrong_rows(table, layers(other, 13), convert)
            except ta.MigrationError:  # no row takes some of the leaves
                wrong = []
            assert not wrong, wrong
        keys = [row for row in table.rows if "key" in row.text]
        assert not any(row.notes.check for row in keys)


def stacked_halves(leaves: Leaves) -> Leaves:
    """As RWKV, whose layers are stacked: every sixth and what follows is halved."""
    every = [
        leaf.T / np.float32(2 ** (n // 6)) for n, leaf in enumerate(leaves.values())
    ]
    return {"out": np.stack(every)}


@pytest.mark.parametrize("count", [2, 3, 6])
def test_what_more_layers_contradict_is_marked(count):
    """A function is called with more layers than the model has that is drafted."""
    draft = ta.draft_migration(blocks(count, 7), convert=stacked_halves)
    assert marks(draft) == {"h.{l}.out.w : o i": "layers"}
    assert "draft a model with as many as yours" in draft.to_toml()
    assert len(draft.doubtful) == count
    if count < 6:
        report = draft.check(blocks(6, 11), stacked_halves)
        assert report, str(report)
        assert {*marks(report).values()} == {"layers"}
    assert ta.draft_migration(blocks(9, 7), convert=stacked_halves).missing


@pytest.mark.parametrize("name", ["encoderblock_{}.w", "EncoderLayer_{}.w"])
def test_words_that_end_in_one_of_layers_are_of_layers(name):
    source = float32({name.format(n): np.zeros((7, 3)) for n in range(3)})
    draft = ta.draft_migration(source, convert=stacked_halves)
    assert {*marks(draft).values()} == {"layers"}


def test_layers_that_are_not_alike_are_said_not_to_be_tried():
    """As the first ones of a mixture of experts, which are dense."""
    source = blocks(3, 7) | float32({"h.1.more.w": np.zeros((2, 5))})
    draft = ta.draft_migration(source, convert=lambda w: {p: x.T for p, x in w.items()})
    assert any("not all have the same leaves" in note for note in draft.notes)


@pytest.mark.parametrize("period", [6, 99])
def test_what_more_layers_contradict_is_said_of_two_tables(period):
    shapes = {f"h.{n}.{name}": np.zeros((3, 5)) for n in range(3) for name in "ab"}

    def convert(w: Leaves) -> Leaves:
        made = {}
        for n in range(len(w) // 2):
            whole = w[f"h.{n}.a"].T + 0.5 * w[f"h.{n}.b"].T
            made[f"l/{n}"] = whole / np.float32(2 ** (n // period))
        return made

    draft = ta.draft_migration(float32(shapes), convert=convert)
    assert len(draft.migration.tables) == 2
    said = [note for note in draft.notes if "with 13 layers the function" in note]
    assert len(said) == (period < 13), draft.notes


@pytest.mark.parametrize("layers", [1, 2])
def test_what_more_experts_contradict_is_marked(layers):
    """As of names in the order of the alphabet, in which the tenth is second."""

    def leaves(experts: int, width: int) -> Leaves:
        at = "h.{}.experts.{}.w" if layers > 1 else "moe{}.experts_{}.w"
        paths = (at.format(n, e) for n in range(layers) for e in range(experts))
        return float32({path: np.zeros((width, 3)) for path in paths}, experts)

    def convert(w: Leaves, names: Callable = sorted) -> Leaves:
        made: dict[str, list] = {}
        for path in names(w):
            made.setdefault(path.split("experts")[0] + "experts", []).append(w[path].T)
        return {path: np.stack(every) for path, every in made.items()}

    draft = ta.draft_migration(leaves(4, 7), convert=convert)
    assert {*marks(draft).values()} == {"layers"}
    assert "with 13 experts the function gives other numbers" in draft.to_toml()
    assert draft.check(leaves(6, 5), convert)
    assert not draft.check(leaves(11, 5), convert)
    in_order = ta.draft_migration(leaves(4, 7), convert=lambda w: convert(w, list))
    assert {*marks(in_order).values()} == {""}


@pytest.mark.parametrize(
    ("convert", "width", "reason"),
    [
        (
            lambda w: {"out": np.stack([w[f"h.{n}.out.w"] for n in range(3)])},
            7,
            "with 13 the function makes other leaves than the table",
        ),
        (
            lambda w: {3: {"out": np.stack([*w.values()])}}[len(w)],
            7,
            "with 13 the function raises",
        ),
        (lambda w: {"out": np.stack([*w.values()])}, 7, ""),
        (lambda w: {"out": np.stack([*w.values()])}, 301, "13 have too many numbers"),
    ],
)
def test_a_function_that_takes_more_layers_alike_or_none_gives_no_mark(
    convert, width, reason
):
    """That they were not tried is said."""
    draft = ta.draft_migration(blocks(3, width), convert=convert)
    assert not draft.doubtful
    assert not draft.missing
    notes = [note for note in draft.notes if "More layers were not tried" in note]
    assert len(notes) == bool(reason)
    assert all(f": {reason}. Call draft.check" in note for note in notes)


# --- sizes that were the same ---


def turned_after(size: int) -> Convert:
    """As DeepSeek's queries: of each head the last numbers turn, in halves."""

    def convert(leaves: Leaves) -> Leaves:
        (whole,) = leaves.values()
        heads = whole.reshape(-1, size + 5, whole.shape[1])
        halves = heads[:, -size:].reshape(len(heads), -1, 2, whole.shape[1])
        rope = halves.swapaxes(1, 2).reshape(-1, whole.shape[1])
        return {"nope": heads[:, :-size], "rope": rope}

    return convert


@pytest.mark.parametrize(("size", "is_left"), [(4, True), (6, False)])
def test_halves_of_two_pairs_keep_the_mark(size, is_left):
    """Two pairs are two halves: which of both is two in all models, nothing shows."""

    def source(heads: int, turned: int, width: int) -> Leaves:
        return float32({"q.w": np.zeros((heads * (turned + 5), width))}, width)

    draft = ta.draft_migration(source(3, size, 13), convert=turned_after(size))
    assert {*marks(draft).values()} == {"sizes"}
    report = draft.check(source(5, size, 17), turned_after(size))
    assert report, str(report)
    assert ("sizes" in marks(report).values()) == is_left
    other = source(3, 8, 13)
    assert not wrong_rows(report.migration, other, turned_after(8))


# --- single numbers, and rounded roots ---


def test_single_numbers_that_a_function_moves_are_proved():
    def convert(leaves: Leaves) -> Leaves:
        made = {"w": leaves["w"].T}
        for number, size in enumerate((8, 16)):
            for n, name in enumerate(("a", "b")):
                old = leaves[f"net/{size}x{size}/{name}/strength"]
                made[f"conv.{2 * number + n}.strength"] = old.reshape(1)
        return made

    shapes: dict[str, tuple[int, ...]] = {"w": (5, 7)}
    shapes |= {f"net/{s}x{s}/{n}/strength": () for s in (8, 16) for n in "ab"}
    source = float32({path: np.zeros(shape) for path, shape in shapes.items()})
    draft = ta.draft_migration(source, convert=convert)
    assert not draft.missing
    assert {*marks(draft).values()} <= {"", "numbers", "sizes"}


def test_a_rounded_root_of_a_size_that_is_the_same_stays_marked():
    def source(rows: int, width: int) -> Leaves:
        shapes = {"embed": (rows, width), "up": (width, rows + 2)}
        return float32({path: np.zeros(shape) for path, shape in shapes.items()}, rows)

    def convert(leaves: Leaves) -> Leaves:
        root = np.float32(jnp.bfloat16(leaves["embed"].shape[1] ** 0.5))
        return {"embedding": leaves["embed"] * root, "up": leaves["up"].T}

    draft = ta.draft_migration(source(37, 22), convert=convert)
    for width, is_left in ((22, True), (26, False)):
        report = draft.check(source(41, width), convert)
        assert report, str(report)
        assert ("scale" in marks(report).values()) == is_left


# --- lists of parts ---


def boxes(count: int, classes: int, width: int) -> Leaves:
    return float32({"conf.w": np.zeros((count * classes, width))}, width)


def rolled(classes: int) -> Convert:
    """As SSD puts the background, which is the first class of each box, last."""

    def convert(leaves: Leaves) -> Leaves:
        (whole,) = leaves.values()
        parts = whole.reshape(-1, classes, whole.shape[1])
        return {"cls/kernel": np.roll(parts, -1, 1).reshape(whole.shape).T}

    return convert


@pytest.mark.parametrize("is_back", [False, True])
def test_an_order_of_classes_within_each_box_is_marked(is_back):
    """Gates have something inside of each; how many classes there are is no formula."""

    def pair(count: int, width: int) -> list[Leaves]:
        source = boxes(count, 3, width)
        return [source, rolled(3)(source)][:: -1 if is_back else 1]

    draft = ta.draft_migration(*pair(5, 7))
    assert [*marks(draft).values()] == ["order"]
    report = draft.check(*pair(7, 11))
    assert report, str(report)
    assert [*marks(report).values()] == ["order"]
    assert "the list is of 3 in both models" in str(report)


def even_heads_first(heads: int) -> Convert:
    def convert(leaves: Leaves) -> Leaves:
        whole = leaves["q.w"]
        order = [*range(0, heads, 2), *range(1, heads, 2)]
        parts = whole.reshape(heads, -1, whole.shape[1])[order]
        return {"q": parts.reshape(whole.shape).T}

    return convert


def test_a_list_of_as_many_heads_stays_marked():
    def source(size: int, width: int) -> Leaves:
        return float32({"q.w": np.zeros((3 * size, width))}, width)

    draft = ta.draft_migration(source(5, 7), convert=even_heads_first(3))
    assert [*marks(draft).values()] == ["order"]
    report = draft.check(source(7, 11), even_heads_first(3))
    assert report, str(report)
    assert [*marks(report).values()] == ["order"]
    (left,) = report.left.values()
    assert "draft a model with another one" in left["order"]


# --- two that are no halves ---


def heads_inside(count: int, path: str) -> Convert:
    """As the heads of SuperGlue, or groups of ShuffleNet, are inside of channels."""

    def convert(leaves: Leaves) -> Leaves:
        (whole,) = leaves.values()
        parts = whole.reshape(-1, count, whole.shape[1]).swapaxes(0, 1)
        return {path: parts.reshape(whole.shape).T}

    return convert


@pytest.mark.parametrize("path", ["conv/kernel", "attn/q/kernel"])
def test_two_heads_or_groups_keep_their_mark(path):
    def source(size: int, width: int) -> Leaves:
        return float32({"proj.w": np.zeros((2 * size, width))}, width)

    draft = ta.draft_migration(source(5, 7), convert=heads_inside(2, path))
    assert draft.migration.sizes == {"two": 2}
    report = draft.check(source(7, 11), heads_inside(2, path))
    assert report, str(report)
    assert [*marks(report).values()] == ["sizes"]


def turned_heads(leaves: Leaves) -> Leaves:
    made = {}
    for path, leaf in leaves.items():
        heads = leaf.reshape(-1, 2, 5, leaf.shape[1]).swapaxes(1, 2)
        made[path.replace(".", "/")] = heads.reshape(-1, 10, leaf.shape[1])
    return made


@pytest.mark.parametrize(("name", "left"), [("q", ""), ("k_proj", ""), ("in", "sizes")])
def test_the_halves_of_heads_of_queries_are_two_in_all(name, left):
    def source(heads: int, width: int) -> Leaves:
        return float32({f"attn.{name}.w": np.zeros((10 * heads, width))}, width)

    draft = ta.draft_migration(source(3, 7), convert=turned_heads)
    assert [*marks(draft).values()] == ["sizes"]
    assert draft.migration.sizes == {"two": 2}
    report = draft.check(source(7, 11), turned_heads)
    assert report, str(report)
    assert [*marks(report).values()] == [left]


@pytest.mark.parametrize("is_scanned", [False, True])
def test_two_groups_of_heads_are_no_halves_of_one(is_scanned):
    """The heads of each key in another order: how large one is has its own axis."""
    at = "h.0.attn.q.w" if is_scanned else "attn.q.w"

    def source(queries: int, size: int, width: int) -> Leaves:
        shape = (3 * 2 * queries, size, width)
        paths = [at, at.replace("0", "1")]
        return float32({path: np.zeros(shape) for path in paths}, width)

    def convert(leaves: Leaves) -> Leaves:
        made = {}
        for path, leaf in leaves.items():
            groups = leaf.reshape(3, 2, -1, *leaf.shape[1:]).swapaxes(1, 2)
            made[path] = groups.reshape(3, -1, *leaf.shape[1:])
        return {"q": np.stack([*made.values()])} if is_scanned else made

    draft = ta.draft_migration(source(5, 7, 11), convert=convert)
    assert {*marks(draft).values()} == {"sizes"}
    report = draft.check(source(7, 5, 13), convert)
    assert report, str(report)
    assert {*marks(report).values()} == {"sizes"}


def dense_first(leaves: Leaves) -> Leaves:
    count, dense = len(leaves) - 1, len(leaves["dense"])
    both = range(dense), range(dense, count)
    return {
        name: np.stack([leaves[f"layers.{n}.ln"] for n in numbers])
        for name, numbers in zip(("dense/ln", "moe/ln"), both, strict=True)
    }


def test_how_many_layers_come_first_keeps_its_mark():
    def source(dense: int, count: int, width: int) -> Leaves:
        shapes = {f"layers.{n}.ln": (width,) for n in range(count)}
        shapes["dense"] = (dense,)
        return float32({path: np.zeros(shape) for path, shape in shapes.items()}, count)

    draft = ta.draft_migration(source(2, 5, 7), convert=dense_first)
    report = draft.check(source(2, 8, 11), dense_first)
    assert report, str(report)
    for table in (draft, report):
        assert marks(table)["layers.{l+dense}.ln : e"] == "sizes"
        assert marks(table)["layers.{l}.ln : e"] == "sizes"


def test_how_many_layers_come_first_in_two_towers_keeps_its_mark():
    """No name of a size says two numbers; those before are of this model, too."""

    def towers(first: int, second: int, more: int, width: int) -> Leaves:
        shapes: dict[str, tuple[int, ...]] = {}
        for name, dense in (("enc", first), ("dec", second)):
            shapes |= {f"{name}.{n}.ln": (width,) for n in range(dense + more)}
            shapes[f"{name}.dense"] = (dense,)
        return float32({path: np.zeros(shape) for path, shape in shapes.items()}, more)

    def convert(leaves: Leaves) -> Leaves:
        made = {}
        for name in ("enc", "dec"):
            every = [leaf for p, leaf in leaves.items() if p[:3] == name and "ln" in p]
            dense = len(leaves[f"{name}.dense"])
            made[f"{name}/dense"] = np.stack(every[:dense])
            made[f"{name}/moe"] = np.stack(every[dense:])
        return made

    draft = ta.draft_migration(towers(2, 3, 4, 7), convert=convert)
    report = draft.check(towers(2, 3, 19, 11), convert)
    assert report, str(report)
    for table in (draft, report):
        moved = {row.text: row.notes.check for row in table.migration.rows if row.made}
        assert {m for text, m in moved.items() if "ln" in text} == {"numbers"}
    assert "draft a model with another number of these" in str(report)


# --- sizes of other leaves, and what follows from one ---


def blocks(count: int, width: int) -> Leaves:
    shapes = {f"h.{n}.out.w": (width, width + 3) for n in range(count)}
    return float32({path: np.zeros(shape) for path, shape in shapes.items()}, count)


@pytest.mark.parametrize("times", [2, 4, 8])
@pytest.mark.parametrize("power", [-0.5, 0.25])
def test_a_root_of_twice_as_many_layers_stays_marked(times, power):
    def convert(leaves: Leaves) -> Leaves:
        factor = np.float32((times * len(leaves)) ** power)
        return {f"b/{path}": leaf.T * factor for path, leaf in leaves.items()}

    draft = ta.draft_migration(blocks(3, 7), convert=convert)
    assert {*marks(draft).values()} == {"scale"}
    report = draft.check(blocks(3, 11), convert)
    assert report, str(report)
    assert {*marks(report).values()} == {"scale"}
    assert "no multiples of 3 answer it" in str(report)


@pytest.mark.parametrize(
    ("alpha", "power", "text"), [(24, 1, "24/8"), (6, 0.5, "6/8**0.5"), (5, 1, "5/8")]
)
def test_alpha_over_a_rank_that_is_the_same_stays_marked(alpha, power, text):
    def adapters(rank: int, width: int) -> Leaves:
        shapes = {"a": (rank, width), "b": (width + 2, rank)}
        return float32({path: np.zeros(shape) for path, shape in shapes.items()}, width)

    def convert(leaves: Leaves) -> Leaves:
        factor = np.float32(alpha / len(leaves["a"]) ** power)
        return {"a": leaves["a"].T, "b": leaves["b"].T * factor}

    draft = ta.draft_migration(adapters(8, 14), convert=convert)
    same = draft.check(adapters(8, 19), convert)
    assert same, str(same)
    assert "scale" in marks(same).values()
    assert f"it may be {text}, of a size" in str(same)
    assert not draft.check(adapters(4, 19), convert)


@pytest.mark.parametrize(("experts", "left"), [(5, "scale"), (7, "")])
def test_a_part_of_as_many_leaves_stays_marked(experts, left):
    def source(count: int, width: int) -> Leaves:
        shapes = {f"experts.{n}.w": (width, width + 3) for n in range(count)}
        shapes["router"] = count, width
        return float32({path: np.zeros(shape) for path, shape in shapes.items()}, width)

    def convert(leaves: Leaves) -> Leaves:
        factor = np.float32(0.4)  # 2/5
        return {path: leaf * factor for path, leaf in leaves.items()}

    draft = ta.draft_migration(source(5, 7), convert=convert)
    report = draft.check(source(experts, 11), convert)
    assert report, str(report)
    assert {*marks(report).values()} == {left}


def test_an_offset_one_less_than_a_size_stays_marked():
    def source(experts: int, width: int) -> Leaves:
        shapes = {"router.bias": (experts,), "norm": (width,)}
        return float32({path: np.zeros(shape) for path, shape in shapes.items()}, width)

    def three(leaves: Leaves) -> Leaves:
        return leaves | {"norm": leaves["norm"] + np.float32(2)}

    draft = ta.draft_migration(source(3, 5), convert=three)
    for experts, left in ((3, "scale"), (7, "")):
        report = draft.check(source(experts, 11), three)
        assert report, str(report)
        assert marks(report)["norm"] == left
        assert ("it may be 3 - 1" in str(report)) == bool(left)


# --- what is zero at few layers, and cut to a multiple ---


def flagged(leaves: Leaves) -> Leaves:
    flags = [(n + 1) % 6 == 0 for n in range(len(leaves))]
    return {"w": np.stack([*leaves.values()]), "is_global": np.array(flags, "f4")}


def test_what_is_zero_of_no_leaf_is_listed():
    draft = ta.draft_migration(blocks(2, 7), convert=flagged)
    line = "Zeros of no leaf of the source, as seen at this size: 'is_global'."
    assert line in str(draft)
    report = draft.check(blocks(4, 11), flagged)
    assert report, str(report)
    assert line in str(report)


def test_what_is_zero_of_no_leaf_has_a_mark_that_no_size_answers(tmp_path):
    draft = ta.draft_migration(blocks(2, 7), convert=flagged)
    report = draft.check(blocks(4, 11), flagged)
    for table in (draft, report.migration):
        file = tmp_path / "table.toml"
        file.write_text(table.to_toml())
        assert ta.load_migration(file) == report.migration
    file = tmp_path / "source.safetensors"
    ta.save(file, blocks(4, 11))
    like = {path: jnp.asarray(leaf) for path, leaf in flagged(blocks(4, 11)).items()}
    with pytest.warns(UserWarning, match=r"'is_global' \(constant numbers\)"):
        ta.load(file, like, migration=report.migration)
    more = draft.check(blocks(12, 11), flagged)
    assert more.forwards == {"[new]": ("is_global",)}


@pytest.mark.parametrize(("count", "left"), [(21, "length"), (22, "")])
def test_a_cut_to_a_multiple_stays_marked(count, left):
    def source(count: int, width: int) -> Leaves:
        return float32({"pos": np.zeros((count, width))}, count)

    def cut(leaves: Leaves) -> Leaves:
        whole = leaves["pos"]
        many = len(whole) - (5 if len(whole) == 22 else len(whole) % 8)
        return {"pos": whole[:many]}

    draft = ta.draft_migration(source(13, 5), convert=cut)
    assert [*marks(draft).values()] == ["length"]
    report = draft.check(source(count, 7), cut)
    assert report, str(report)
    assert [*marks(report).values()] == [left]


def to_odd(leaves: Leaves) -> Leaves:
    whole = leaves["pos"]
    return {"pos": np.pad(whole, ((0, 1 - len(whole) % 2), (0, 0)))}


def test_a_length_that_is_made_odd_stays_marked():
    def source(count: int, width: int) -> Leaves:
        return float32({"pos": np.zeros((count, width))}, count)

    draft = ta.draft_migration(source(12, 5), convert=to_odd)
    report = draft.check(source(14, 7), to_odd)
    assert report, str(report)
    assert [*marks(report).values()] == ["length"]
    assert "differs by no more than what is added" in str(report)
    always = draft.check(
        source(13, 7), lambda w: {"pos": np.pad(w["pos"], ((0, 1), (0, 0)))}
    )
    assert not always.left


@pytest.mark.parametrize("more", [0, 1])
def test_as_many_zeros_as_registers_stay_marked(more):
    def source(count: int, registers: int, width: int) -> Leaves:
        shapes = {"pos": (count, width), "register": (registers, width)}
        return float32({path: np.zeros(shape) for path, shape in shapes.items()}, width)

    def convert(leaves: Leaves) -> Leaves:
        before = len(leaves["register"]) + more
        return leaves | {"pos": np.pad(leaves["pos"], ((before, 0), (0, 0)))}

    draft = ta.draft_migration(source(16, 4, 7), convert=convert)
    report = draft.check(source(25, 4, 11), convert)
    assert report, str(report)
    assert marks(report)["pos : o i"] == "length"
    assert "it may be 4" in str(report)
    always = draft.check(
        source(25, 6, 11),
        lambda w: w | {"pos": np.pad(w["pos"], ((4 + more, 0), (0, 0)))},
    )
    assert not always.left


def shared_by_every_third(leaves: Leaves) -> Leaves:
    """As Zamba: one map, in every third layer."""
    made = {f"b/{path}": leaf.T for path, leaf in leaves.items() if path[0] == "h"}
    count = len(made)
    return made | {f"b/h.{n}.shared": leaves["shared"].T for n in range(0, count, 3)}


def test_copies_for_some_layers_are_marked():
    def source(count: int, width: int) -> Leaves:
        return blocks(count, width) | float32({"shared": np.zeros((width, 2))})

    draft = ta.draft_migration(source(7, 5), convert=shared_by_every_third)
    marked = {row: mark for row, mark in marks(draft).items() if mark}
    assert marked == {"shared : o i": "numbers"}
    report = draft.check(source(7, 11), shared_by_every_third)
    assert report, str(report)
    assert marks(report) == marks(draft)
    assert not draft.check(source(14, 11), shared_by_every_third)


@pytest.mark.parametrize(
    ("name", "at"),
    [("after all", "b_"), ("a copy for each", "b_"), ("a copy for each", "b")],
)
def test_what_counts_layers_in_the_target_alone_is_marked(name, at):
    """As Keras numbers a norm after all layers, or a bias of T5 that all share."""

    def source(count: int, width: int) -> Leaves:
        return blocks(count, width) | float32({"h.0.bias": np.zeros((width, 2))})

    def convert(leaves: Leaves) -> Leaves:
        made = [leaf.T for path, leaf in leaves.items() if "out" in path]
        copies = range(len(made)) if name == "a copy for each" else [len(made)]
        others = {f"{at}{n}/bias": leaves["h.0.bias"] for n in copies}
        return {f"{at}{n}/w": leaf for n, leaf in enumerate(made)} | others

    draft = ta.draft_migration(source(3, 5), convert=convert)
    assert not draft.missing
    marked = {row: mark for row, mark in marks(draft).items() if mark}
    assert len(marked) == 1
    assert all("bias" in row for row in marked)
    assert [*marked.values()] == ["numbers"]
    report = draft.check(source(3, 11), convert)
    assert report, str(report)
    assert marks(report) == marks(draft)
    assert not draft.check(source(6, 11), convert)


# --- lists of layers ---


def every_second(count: int, width: int) -> Leaves:
    shapes = {}
    for n in range(count):
        shapes[f"block.{n}.ln"] = (width,)
        for name in ("router",) if n % 2 else ("wi", "wo"):
            shapes[f"block.{n}.{name}"] = (width, width + 2)
    return float32({path: np.zeros(shape) for path, shape in shapes.items()}, width)


def in_two_stacks(leaves: Leaves) -> Leaves:
    count = sum(path.endswith("ln") for path in leaves)
    made = {}
    for first, stack in enumerate(("dense", "m/moe")):
        for name in ("router", "ln") if first else ("wi", "wo", "ln"):
            every = [leaves[f"block.{n}.{name}"].T for n in range(first, count, 2)]
            made[f"{stack}/{name}"] = np.stack(every, 1)
    return made


def test_a_list_of_every_second_layer_is_marked_as_numbers_and_keeps_it():
    """As of Switch; the rows name no size, so that ``sizes`` would say nothing."""
    draft = ta.draft_migration(every_second(6, 7), convert=in_two_stacks)
    assert not draft.migration.sizes
    marked = {row: mark for row, mark in marks(draft).items() if mark}
    assert {*marked.values()} == {"numbers"}
    report = draft.check(every_second(6, 11), in_two_stacks)
    assert report, str(report)
    assert {row: mark for row, mark in marks(report).items() if mark} == marked
    assert "other numbers have no row" in str(report)
    assert not draft.check(every_second(8, 11), in_two_stacks)
