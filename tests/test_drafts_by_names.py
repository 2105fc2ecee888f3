"""Drafts from names and shapes alone: what sisters, numbers and words decide.

Each case is a model with distinct numbers and what it becomes. The draft sees shapes;
its table is run on the numbers, there and back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_drafts import abstract

import treeadapt as ta

Arrays = dict[str, np.ndarray]
Shapes = Mapping[str, tuple[int, ...]]
OF_MODELS = Path(__file__).with_name("published")


def numbers(shapes: Shapes) -> Arrays:
    random = np.random.default_rng(0)
    return {path: random.normal(size=s).astype("float32") for path, s in shapes.items()}


def stacked(leaves: Arrays, paths: Sequence[str], axis: int = 0) -> np.ndarray:
    return np.stack([leaves[path].T for path in paths], axis)


def one_square_convolution() -> tuple[Arrays, Arrays]:
    """The face detector of facenet: three of four have fewer channels in than out."""
    sizes = [(3, 32, 3), (32, 64, 3), (64, 64, 3), (64, 128, 2)]
    source = numbers(
        {f"conv{n}.weight": (o, i, k, k) for n, (i, o, k) in enumerate(sizes, 1)}
    )
    return source, {
        f"convs/{n}/kernel": source[f"conv{n + 1}.weight"].transpose(2, 3, 1, 0)
        for n in range(4)
    }


def as_many_layers_as_features() -> tuple[Arrays, Arrays]:
    """Layers are the second axis, as MaxText has them; one map is square."""
    shapes = {"q": (6, 6), "up": (8, 6), "down": (6, 8)}
    source = numbers(
        {f"h.{n}.{name}.weight": s for n in range(6) for name, s in shapes.items()}
    )
    return source, {
        f"h/{name}/kernel": stacked(
            source, [f"h.{n}.{name}.weight" for n in range(6)], 1
        )
        for name in shapes
    }


def recurrent(names: Sequence[str], *, width: int = 5) -> tuple[Arrays, Arrays]:
    """An LSTM as wide as its input; ``names`` of the maps of input and state."""
    source = numbers(
        {
            f"rnn.weight_{k}_l{n}": (4 * width, width)
            for n in (0, 1)
            for k in ("ih", "hh")
        }
    )
    target = {
        f"cells/{n}/{name}": source[f"rnn.weight_{kind}_l{n}"].T
        for n in (0, 1)
        for kind, name in zip(("ih", "hh"), names, strict=True)
    }
    return source, dict(sorted(target.items(), reverse=names[0] < names[1]))


def gates(names: str, *, inputs: int, width: int = 5) -> tuple[Arrays, Arrays]:
    """Gates in one array, as PyTorch has them, and each apart, in Flax's order."""
    parts = len(names)
    source = numbers(
        {
            "weight_ih_l0": (parts * width, inputs),
            "weight_hh_l0": (parts * width, width),
            "bias_hh_l0": (parts * width,),
        }
    )
    target = {}
    for name, rows in zip(
        names, np.split(np.arange(parts * width), parts), strict=True
    ):
        target[f"cell/i{name}/kernel"] = source["weight_ih_l0"][rows].T
        target[f"cell/h{name}/kernel"] = source["weight_hh_l0"][rows].T
        target[f"cell/h{name}/bias"] = source["bias_hh_l0"][rows]
    return source, dict(sorted(target.items()))


def two_norms(first: str, second: str) -> tuple[Arrays, Arrays]:
    """The norm before attention is the second of the target."""
    names = "input_layernorm", "post_attention_layernorm"
    source = numbers(
        {f"layers.{n}.{name}.weight": (22,) for n in range(3) for name in names}
    )
    one, two = (
        stacked(source, [f"layers.{n}.{name}.weight" for n in range(3)])
        for name in names
    )
    return source, {f"layers/{second}/scale": two, f"layers/{first}/scale": one}


def stacked_stages(axis: str) -> tuple[Arrays, Arrays]:
    """Three stages of three blocks, of which the stages, or the blocks, are an axis."""
    source = numbers(
        {f"stages.{a}.blocks.{b}.fc.weight": (7, 5) for a in range(3) for b in range(3)}
    )
    paths = np.array([*source]).reshape(3, 3)
    paths = paths.T if axis == "stages" else paths
    name = "blocks" if axis == "stages" else "stage"
    return source, {
        f"{name}_{n}/fc/kernel": stacked(source, paths[n]) for n in range(3)
    }


def words_of_a_list() -> tuple[Arrays, Arrays]:
    """Four maps that nobody has a word for, and an array that holds all of them."""
    names = "alpha", "bravo", "charlie", "delta"
    source = numbers({f"net.{name}.weight": (7, 5) for name in names})
    return source, {"net/kernel": stacked(source, [*source])}


def initials(names: Sequence[str]) -> tuple[Arrays, Arrays]:
    """Norms of keys and queries, or two maps that nobody has a word for."""
    meant = dict(
        zip(names, ("".join(x[0] for x in n.split("_")) for n in names), strict=True)
    )
    source = numbers({f"h.{n}.{name}.weight": (7,) for n in range(2) for name in meant})
    target = {
        f"h/{n}/{meant[name]}": source[f"h.{n}.{name}.weight"]
        for n in range(2)
        for name in reversed(names)
    }
    return source, target


CASES: dict[str, Callable[[], tuple[Arrays, Arrays]]] = {
    "one square convolution": one_square_convolution,
    "as many layers as features": as_many_layers_as_features,
    "the state of Haiku": lambda: recurrent(["w_i", "w_h"]),
    "the state of Keras": lambda: recurrent(["kernel", "recurrent_kernel"]),
    "the state of NNX": lambda: recurrent(["dense_i/kernel", "dense_h/kernel"]),
    "gates of an LSTM": lambda: gates("ifgo", inputs=3),
    "gates as wide as the input": lambda: gates("ifgo", inputs=5),
    "gates of a GRU": lambda: gates("rzn", inputs=5),
    "input norm": lambda: two_norms("input_rms_norm", "a_norm"),
    "norm of the input": lambda: two_norms("norm_input", "mid_norm"),
    "norm before self-attention": lambda: two_norms(
        "pre_self_attention_rmsnorm", "pre_mlp_rmsnorm"
    ),
    "stages are an axis": lambda: stacked_stages("stages"),
    "blocks are an axis": lambda: stacked_stages("blocks"),
    "words of a list": words_of_a_list,
    "initials of norms": lambda: initials(["k_norm", "q_norm"]),
    "initials of other words": lambda: initials(["soft_cap_low", "hard_cap_low"]),
}


@pytest.mark.parametrize("is_back", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_names_and_shapes_give_the_table(name, is_back):
    source, target = CASES[name]()[:: -1 if is_back else 1]
    draft = ta.draft_migration(abstract(source), abstract(target))
    assert not draft.missing
    assert not draft.unexpected
    assert {*draft.doubtful} == {*source}
    assert all("names" in row.notes.check for row in draft.migration.rows)
    for made, leaves in (
        (draft.migration(source, target), target),
        (draft.migration.inverse(target, source), source),
    ):
        assert not ta.tree_diff(made, leaves, values=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "is_back"), [("keras-hub/vit", True), ("maxtext/deepseek_v3", False)]
)
def test_leaves_of_published_models_are_paired_as_those_next_to_them(name, is_back):
    """A weight goes where its bias may go, and a node where its other leaves go."""
    folder = OF_MODELS / name.partition("/")[2] / "1"
    migration = ta.load_migration(name, config=folder)
    plan = migration.plan(ta.read_metadata(folder / "model.schema.toml"))
    wanted: dict[str, set[str]] = {}
    for group in plan.groups:
        ones, twos = [[*group.source_paths], [*group.filled]][:: -1 if is_back else 1]
        for path in ones:
            wanted.setdefault(path, set()).update(twos)
    pair = abstract(plan.source), abstract(plan.result)
    draft = ta.draft_migration(*pair[:: -1 if is_back else 1])
    assert {path: {*draft.pairs.get(path, ())} for path in wanted} == wanted


def test_axes_follow_rows_that_numbers_prove():
    """A square map of ones is turned as the one whose numbers show that it is."""
    q = numbers({"q": (7, 7)})["q"]
    ones = np.ones((7, 7), "float32")
    source, target = {"h.q.w": q, "h.k.w": ones}, {"h/q/w": q.T, "h/k/w": ones}
    draft = ta.draft_migration(source, target)
    assert draft.doubtful == ("h.k.w",)
    assert [(row.text, row.targets[0].text) for row in draft.migration.rows] == [
        ("h.q.w : o i", "h/q/w : i o"),
        ("h.k.w : o i", "h/k/w : i o"),
    ]


def padded(width: int) -> tuple[Arrays, Arrays]:
    """A vocabulary that is longer by zeros, and a map that is not."""
    source = numbers(
        {
            "model.embed_tokens.weight": (37, width),
            "lm_head.weight": (37, width),
            "model.layers.0.mlp.up_proj.weight": (24, width),
        }
    )
    embed, head, up = source.values()
    more = ((0, 11), (0, 0))
    target = {
        "embed/embedding": np.pad(embed, more),
        "head/kernel": np.pad(head, more).T,
    }
    return source, target | {"layers_0/up/kernel": up.T}


@pytest.mark.parametrize("is_back", [False, True])
def test_a_vocabulary_that_is_longer_by_zeros_is_paired_by_names(is_back):
    source, target = padded(16)[:: -1 if is_back else 1]
    draft = ta.draft_migration(abstract(source), abstract(target))
    marks = [row.notes.check for row in draft.migration.rows]
    assert sum("length" in mark for mark in marks) == 2
    assert not draft.missing
    assert not draft.unexpected
    source, target = padded(19)[:: -1 if is_back else 1]
    made = draft.migration(source, target)
    assert not ta.tree_diff(made, target, values=True)
    back = draft.migration.inverse(target, source)
    assert not ta.tree_diff(back, source, values=True)
    if is_back:
        source["embed/embedding"][-1] = 1
        with pytest.raises(ta.MigrationError, match="what is cut off is not zero"):
            draft.migration(source, target)


def test_maps_of_other_widths_are_not_padded():
    source = abstract(
        {"h.0.up.weight": np.zeros((24, 16)), "norm.weight": np.zeros(16)}
    )
    target = abstract({"h/0/up/kernel": np.zeros((16, 32)), "norm/scale": np.zeros(20)})
    assert not ta.draft_migration(source, target).pairs


def test_parts_that_words_do_not_order_are_marked():
    source, target = words_of_a_list()
    draft = ta.draft_migration(abstract(source), abstract(target))
    (row,) = draft.migration.rows
    assert row.notes.check == "names, order of parts"


def test_a_list_of_words_is_never_the_number_of_the_other_path():
    """Layers with numbers do not become layers with other words in one row."""
    source = abstract({f"net.{n}.w": np.zeros((5, 7)) for n in range(3)})
    target = {
        f"{name}/w": leaf for name, leaf in zip("xyz", source.values(), strict=True)
    }
    draft = ta.draft_migration(source, target)
    assert not draft.missing
    plan: Any = draft.migration.plan(source, target)
    assert plan.exact


def test_a_list_of_words_is_an_axis_where_layers_have_nearer_names():
    """As of four gates in one array, next to four layers of the size of a gate."""
    layers = {f"net.{n}.w": np.zeros((5, 7)) for n in range(4)}
    gates = {f"net/{gate}/w": np.zeros((5, 7)) for gate in ("ii", "if", "ig", "io")}
    source = abstract(layers | {"stack.w": np.zeros((4, 5, 7))})
    others = {f"t.{n}.w": np.zeros((5, 7)) for n in range(4)}
    draft = ta.draft_migration(source, abstract(others | gates))
    assert not draft.missing
    assert draft.pairs["stack.w"] == tuple(gates)
    assert [draft.pairs[path] for path in layers] == [(path,) for path in others]


# --- layers in blocks ---


def local_and_global() -> tuple[Arrays, Arrays]:
    """As of Gemma 2 in MaxText: a stack of each kind of layer; names alone say so."""
    shapes = {"attn.q": (10, 7), "attn.o": (7, 10), "mlp.gate": (13, 7), "norm": (7,)}
    shapes |= {"mlp.up": (13, 7), "mlp.down": (7, 13)}
    source = numbers(
        {f"layers.{n}.{name}.weight": s for n in range(6) for name, s in shapes.items()}
    )
    names = {"attn.q": "attention_{}-query", "attn.o": "attention_{}-out"}
    names |= {"norm": "norm_{}", "mlp.down": "mlp_{}-wo"}
    names |= {"mlp.gate": "mlp_{}-wi_0", "mlp.up": "mlp_{}-wi_1"}
    return source, {
        f"layers-{new.format(kind)}-kernel": stacked(
            source, [f"layers.{n}.{old}.weight" for n in range(first, 6, 2)]
        )
        for old, new in names.items()
        for first, kind in enumerate(("local", "global"))
    }


def every_fourth() -> tuple[Arrays, Arrays]:
    """As of Qwen3-Next: of four layers the last has another kind of attention."""
    shapes = {"norm": (11,), "mlp.up": (13, 11)}
    source = numbers(
        {
            f"layers.{n}.{name}.weight": shape
            for n in range(8)
            for name, shape in {
                **shapes,
                **({"full.o": (11, 5)} if n % 4 == 3 else {"linear.o": (11, 7)}),
            }.items()
        }
    )

    def whole(name: str, inner: Sequence[int]) -> np.ndarray:
        every = [
            stacked(source, [f"layers.{n + i}.{name}.weight" for i in inner])
            for n in (0, 4)
        ]
        return np.stack(every)

    made = {f"local/{name}/kernel": whole(name, (0, 1, 2)) for name in shapes}
    made |= {f"global/{name}/kernel": whole(name, (3,))[:, 0] for name in shapes}
    made["local/linear/o/kernel"] = whole("linear.o", (0, 1, 2))
    return source, made | {"global/full/o/kernel": whole("full.o", (3,))[:, 0]}


@pytest.mark.slow
@pytest.mark.parametrize("make", [local_and_global, every_fourth])
@pytest.mark.parametrize("is_back", [False, True])
def test_layers_in_blocks_are_paired_by_names(make, is_back):
    source, target = make()
    proved = ta.draft_migration(*(target, source) if is_back else (source, target))
    pair = (target, source) if is_back else (source, target)
    draft = ta.draft_migration(*map(abstract, pair))
    assert not draft.missing
    assert not draft.unexpected
    assert draft.doubtful == (*draft.pairs,)
    right = [path for path, news in proved.pairs.items() if draft.pairs[path] == news]
    assert len(right) == len(proved.pairs)
