"""Selectors: the algebra, masks, filters, and answers on smaller views of a tree."""

from __future__ import annotations

import copy
import enum
import functools
import pickle
import re
import time
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from inside import inside
from reference_matcher import selects

import treeadapt as ta
from benchmarks.published_names import CHECKS, MODELS, digest, names_of, tree_of

F32 = jnp.float32


class Norm(eqx.Module):
    scale: Any
    bias: Any


class Dense(eqx.Module):
    kernel: Any
    bias: Any


class Block(eqx.Module):
    norm: Norm
    dense: Dense


class Net(eqx.Module):
    blocks: list[Block]
    head: Dense
    act: Any = jax.nn.relu


def array(*shape: int, dtype: Any = F32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def net(blocks: int = 3) -> Net:
    return Net(
        [
            Block(Norm(array(4), array(4)), Dense(array(4, 4), array(4)))
            for _ in range(blocks)
        ],
        Dense(array(4, 2), array(2)),
    )


def chosen(tree: Any, where: Any, **options: Any) -> list[str]:
    """Paths of the selected leaves."""
    mask = ta.to_flat_dict(ta.param_mask(tree, where, **options))
    return [path for path, selected in mask.items() if selected]


def selector_of(where: Any) -> ta.Selector:
    """A selector of what selectors may be made of."""
    if isinstance(where, ta.Selector):
        return where
    is_pattern = isinstance(where, str) and not where.startswith("!")
    return ta.glob(where) if is_pattern else ta.glob("**") & where


# The algebra


MLP = {
    "mlp": {"kernel": array(2, 2), "bias": array(2)},
    "head": {"kernel": array(2, 2)},
}


@pytest.mark.parametrize(
    ("where", "paths"),
    [
        ("mlp", ["mlp/bias", "mlp/kernel"]),
        ("**/kernel", ["head/kernel", "mlp/kernel"]),
        ("!**/bias", ["head/kernel", "mlp/kernel"]),
        (["mlp", "!**/bias"], ["mlp/kernel"]),
        (["!**/bias", "mlp"], ["mlp/kernel"]),
        (("head", "mlp/bias"), ["head/kernel", "mlp/bias"]),
        (["!mlp", "!head"], []),
        (ta.glob("mlp") & "**/kernel", ["mlp/kernel"]),
        ("mlp" & ta.glob("**/kernel"), ["mlp/kernel"]),
        (["mlp", "head"] & ta.glob("**/kernel"), ["head/kernel", "mlp/kernel"]),
        (ta.glob("mlp") & ["**", "!**/bias"], ["mlp/kernel"]),
        (ta.glob("head") | "mlp/bias", ["head/kernel", "mlp/bias"]),
        ("head" | ta.glob("mlp/bias"), ["head/kernel", "mlp/bias"]),
        (~ta.glob("mlp"), ["head/kernel"]),
        (~(ta.glob("mlp") & "**/bias"), ["head/kernel", "mlp/kernel"]),
        (ta.glob("mlp") & ta.leaf(ndim=1) | "head", ["head/kernel", "mlp/bias"]),
        (ta.leaf(ndim=1), ["mlp/bias"]),
        (ta.leaf(min_size=4), ["head/kernel", "mlp/kernel"]),
        (dict, ["head/kernel", "mlp/bias", "mlp/kernel"]),
        ([dict, "!mlp"], ["head/kernel"]),
        ([ta.glob("mlp") & ta.leaf(ndim=1), "head"], ["head/kernel", "mlp/bias"]),
        ([], []),
    ],
)
def test_a_selector_selects(where, paths):
    unused = "ignore" if where == ["!mlp", "!head"] else "error"
    assert chosen(MLP, where, unused=unused) == paths


def test_a_class_may_be_either_operand():
    both = Norm | ta.glob("head")
    assert chosen(net(1), both) == chosen(net(1), ta.glob("head") | Norm)
    assert chosen(net(1), both) == [
        "blocks/0/norm/scale",
        "blocks/0/norm/bias",
        "head/kernel",
        "head/bias",
    ]


def test_a_class_selects_its_subclasses_at_any_depth():
    class Scaled(Norm):
        pass

    model = eqx.tree_at(lambda m: m.blocks[1].norm, net(2), Scaled(array(4), array(4)))
    assert chosen(model, ta.node(Scaled)) == [
        "blocks/1/norm/scale",
        "blocks/1/norm/bias",
    ]
    assert len(chosen(model, Norm)) == 4
    assert len(chosen(model, ta.node(Block) & ~ta.node(Norm))) == 4


def test_a_box_is_a_class_too():
    model = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    assert chosen(model, nnx.Param) == ["bias", "scale"]
    assert chosen(model, nnx.BatchStat) == ["mean", "var"]


@pytest.mark.parametrize(
    ("selector", "leaves"),
    [
        (ta.leaf(), "fhikn"),
        (ta.leaf(dtype=jnp.float32), "fn"),
        (ta.leaf(dtype="bfloat16"), "h"),
        (ta.leaf(dtype=jnp.floating), "fhn"),
        (ta.leaf(dtype=float), "fhn"),
        (ta.leaf(dtype=int), "i"),
        (ta.leaf(dtype=np.integer), "i"),
        (ta.leaf(dtype=jax.dtypes.prng_key), "k"),
        (ta.leaf(dtype=jax.random.key(0).dtype), "k"),
        (ta.leaf(dtype=jax.random.key(0).dtype) & ta.leaf(ndim=0), "k"),
        (ta.leaf(ndim=2), "f"),
        (ta.leaf(ndim=0), "kn"),
        (ta.leaf(min_size=3), "fi"),
        (ta.leaf(lambda x: x.shape[-1:] == (2,), dtype=float), "fh"),
        (ta.leaf(lambda x: x.size == 1), "kn"),
    ],
)
def test_a_leaf_selector_reads_shape_and_dtype(selector, leaves):
    tree = {
        "f": jnp.ones((3, 2)),
        "h": jnp.ones(2, jnp.bfloat16),
        "i": jnp.arange(3),
        "k": jax.random.key(0),
        "n": np.float32(1),
        "s": 1.0,
        "z": "text",
    }
    assert "".join(chosen(tree, selector)) == leaves
    abstract = jax.eval_shape(lambda: {k: tree[k] for k in "fhikn"})
    assert "".join(chosen(abstract, selector)) == leaves


def test_a_leaf_selector_works_on_tracers():
    seen = []

    @jax.jit
    def step(tree):
        seen.append(ta.leaf(ndim=2)(tree))
        return tree

    step({"w": jnp.ones((2, 2)), "b": jnp.ones(2)})
    assert seen == [{"w": True, "b": False}]


def test_a_predicate_is_called_once_for_equal_shapes():
    asked = []
    tree = {str(n): array(2, 2) for n in range(100)}
    chosen(tree, ta.leaf(lambda x: bool(asked.append(x)) or True))
    assert len(asked) == 1


@pytest.mark.parametrize(
    "selector",
    [
        ta.glob("**/kernel"),
        ta.glob("**") & ["a", "!b", "!c/*"],
        ta.glob("**") & "!a",
        ta.leaf(ndim=2, min_size=10),
        ta.leaf(dtype="bfloat16"),
        ta.leaf(dtype=jnp.floating),
        ta.node(Norm),
        ta.glob("a") & ~ta.glob("b") | ta.leaf(ndim=1),
        (ta.glob("a") | Norm) & "b",
        ta.glob("a").bind({"a": array(1)}),
    ],
    ids=repr,
)
def test_selectors_are_values(selector):
    again = pickle.loads(pickle.dumps(selector))
    selector.matches if isinstance(selector, type) else None
    assert again == selector == copy.deepcopy(selector)
    assert hash(again) == hash(selector)
    assert repr(again) == repr(selector)
    assert selector != ta.glob("other")
    assert selector not in (..., True, None)


def test_a_used_selector_pickles_without_its_caches():
    selector = ta.glob("mlp") & ta.leaf(ndim=2)
    before = pickle.dumps(selector)
    assert chosen(MLP, selector) == ["mlp/kernel"]
    assert pickle.dumps(selector) == before


@pytest.mark.parametrize(
    ("selector", "text"),
    [
        (ta.glob("**/kernel") & ~ta.glob("head"), "glob('**/kernel') & ~glob('head')"),
        ((ta.glob("a") | "b") & "c", "(glob('a') | glob('b')) & glob('c')"),
        (ta.glob("a") | "b" & ta.glob("c"), "glob('a') | glob('b') & glob('c')"),
        (~(ta.glob("a") | "b"), "~(glob('a') | glob('b'))"),
        (~~ta.glob("a"), "~~glob('a')"),
        (ta.glob("a") & "b" & "c", "glob('a') & glob('b') & glob('c')"),
        (ta.glob("a") & ["b", "!c"], "glob('a') & ['b', '!c']"),
        (ta.leaf(ndim=2, dtype="bfloat16"), "leaf(ndim=2, dtype='bfloat16')"),
        (ta.leaf(dtype=float, min_size=3), "leaf(dtype=floating, min_size=3)"),
        (ta.leaf(jnp.ndim), "leaf(ndim)"),
        (ta.node(Norm), "node(Norm)"),
    ],
    ids=str,
)
def test_a_repr_reads_like_what_was_typed(selector, text):
    assert repr(selector) == text


def test_a_member_of_an_enum_reads_as_its_value():
    class Part(str, enum.Enum):  # noqa: UP042, the older form is hashed by name
        HEAD = "head"

    for where in (Part.HEAD, [Part.HEAD], ta.glob(Part.HEAD) & "**/kernel"):
        assert chosen(MLP, where) == ["head/kernel"]
    assert type(ta.glob(Part.HEAD).plain) is str


def test_selectors_do_not_change():
    with pytest.raises(AttributeError):
        ta.glob("a").plain = "b"


@pytest.mark.slow
def test_a_filter_spec_of_a_callable_module_leads_to_its_paths():
    spec = eqx.tree_at(
        lambda m: m.weight, eqx.nn.Linear(2, 1, key=jax.random.key(0)), True
    )
    spec = eqx.tree_at(lambda m: m.bias, spec, False)
    with pytest.raises(ta.SelectorError, match="Of a tree of bools take the paths"):
        ta.freeze(optax.sgd(0.1), spec)


def test_an_escaped_path_is_never_an_exclusion():
    tree = {"!a": array(1), "a": array(1), "re:x": array(1)}
    assert chosen(tree, ta.escape("!a")) == ["!a"]
    assert chosen(tree, ["**", "!" + ta.escape("!a")]) == ["a", "re:x"]
    assert chosen(tree, ta.escape("re:x")) == ["re:x"]


# One path, one filter


def test_matches_uses_only_the_path():
    decay = ta.glob("**/kernel") & ~ta.glob("head")
    assert decay.matches("mlp/kernel")
    assert not decay.matches("head/kernel")
    assert not selector_of(["**", "!**/bias"]).matches("mlp/bias")


def test_matches_answers_if_the_path_decides():
    assert not (ta.glob("mlp") & ta.leaf(ndim=2)).matches("head/kernel")
    assert (ta.glob("mlp") | ta.leaf(ndim=2)).matches("mlp/kernel")


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.l1 = nnx.Linear(2, 3, rngs=rngs)
        self.l2 = nnx.Linear(3, 1, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)


@pytest.mark.slow
def test_a_selector_is_an_nnx_filter():
    model = Mlp(nnx.Rngs(0))
    assert list(nnx.state(model, ta.glob("l2"))) == ["l2"]
    two_d = nnx.state(model, ta.leaf(ndim=2))
    assert sorted(two_d) == ["l1", "l2"]
    assert list(two_d["l1"]) == ["kernel"]
    head, stats, rest = nnx.state(model, ta.glob("l2"), nnx.BatchStat, ...)
    assert (list(head), list(stats), sorted(rest)) == (["l2"], ["norm"], ["l1", "norm"])


@pytest.mark.slow
def test_nnx_optimizer_takes_a_selector():
    model = Mlp(nnx.Rngs(0))
    before = np.asarray(model.l1.kernel[...])
    tx = nnx.Optimizer(model, optax.sgd(0.1), wrt=ta.glob("l2"))
    grads = nnx.grad(
        lambda m: (m.l2(m.l1(jnp.ones((1, 2)))) ** 2).sum(),
        argnums=nnx.DiffState(0, ta.glob("l2")),
    )(model)
    moved = np.asarray(model.l2.bias[...])
    tx.update(model, grads)
    assert np.array_equal(before, model.l1.kernel[...])
    assert not np.array_equal(moved, model.l2.bias[...])


def test_a_class_answers_a_filter_if_it_can():
    model = Mlp(nnx.Rngs(0))
    assert sorted(nnx.state(model, ta.node(nnx.Variable))) == ["l1", "l2", "norm"]
    with pytest.raises(ta.SelectorError, match="bind"):
        nnx.state(model, ta.node(nnx.Linear))
    linear = ta.node(nnx.Linear).bind(model)
    assert sorted(nnx.state(model, linear)) == ["l1", "l2"]


def test_jax_key_paths_are_read_too():
    tree = {"a": [array(2), array(2)]}
    mask = jax.tree_util.tree_map_with_path(ta.glob("a/1"), tree)
    assert mask == {"a": [False, True]}


# Masks, as Optax calls them


def test_the_mask_has_the_treedef_of_the_tree():
    model = net()
    mask = ta.glob("**/kernel")(model)
    assert jax.tree.structure(mask) == jax.tree.structure(model)
    assert mask.head.kernel is True
    assert mask.act is False


@pytest.mark.hazard("B4")
def test_the_mask_has_none_where_the_tree_has_none():
    key = jax.random.key(0)
    full, bare = (eqx.nn.Linear(2, 2, use_bias=use, key=key) for use in (True, False))
    assert ta.param_mask(full, "weight").bias is False
    assert ta.param_mask(bare, "weight").bias is None
    for model in (full, bare):
        mask = ta.param_mask(model, "weight")
        assert optax.masked(optax.sgd(0.1), mask).init(model)
    assert ta.param_mask(bare, "bias") == ta.param_mask(bare, "bias", unused="ignore")
    with pytest.raises(ta.UnusedRuleError, match="'bias/x'"):
        ta.param_mask(bare, "bias/x")


def test_a_static_leaf_is_selected_by_name_but_never_by_shape():
    assert chosen({"a": 1.0, "f": len, "w": array(1)}, "**") == ["a", "f", "w"]
    assert chosen({"a": 1.0, "f": len, "w": array(1)}, ta.leaf()) == ["w"]


@pytest.mark.usefixtures("standard_promotion")
def test_optax_accepts_a_selector_as_a_mask():
    params = {"mlp": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}}
    zero = jax.tree.map(jnp.zeros_like, params)
    tx = optax.adamw(0.1, weight_decay=0.5, mask=ta.glob("**/kernel"))
    updates, _ = jax.jit(tx.update)(zero, tx.init(params), params)
    assert float(updates["mlp"]["kernel"][0, 0]) == pytest.approx(-0.05)
    assert float(updates["mlp"]["bias"][0]) == 0.0


def test_optax_maps_params_of_a_masked_state():
    params = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
    tx = optax.masked(optax.adam(0.1), ta.glob("kernel"))
    state = tx.init(params)
    marked = optax.tree.map_params(tx, lambda _: "param", state)
    assert marked.inner_state[0].mu["kernel"] == "param"


def test_a_placeholder_is_given_back():
    class Hole(NamedTuple):
        pass

    assert ta.glob("a")(Hole()) == Hole()
    assert ta.glob("a")(optax.MaskedNode()) == optax.MaskedNode()
    assert ta.glob("a")({}) == {}
    assert ta.glob("a")(None) is None


def test_a_bare_array_is_a_tree():
    assert ta.glob("**")(jnp.ones(3)) is True
    assert ta.param_mask(jnp.zeros(()), "**") is True


# What is reported and what is not


def test_an_exclusion_that_removes_nothing_is_a_guard():
    tree = {"a": {"w": jnp.ones(2)}, "b": {"scale": jnp.ones(2)}}
    alone = ta.param_mask(tree, "**/w")
    for where in (["**/w", "!b"], ta.glob("**/w") & ~ta.glob("b")):
        assert ta.param_mask(tree, where) == alone
        assert ta.Rules([(where, 1), ("**", 2)]).match(tree).check()
    with pytest.raises(ta.UnusedRuleError, match="'!c'"):
        ta.param_mask(tree, ["**/w", "!c"])


def test_every_entry_must_match_an_array():
    for where, missing in [
        ("mpl", "mpl"),
        (["mlp", "haed"], "haed"),
        (["mlp", "!**/bais"], r"'!\*\*/bais': did you mean '!\*\*/bias' \("),
        (ta.glob("mlp") & ~ta.glob("**/bais"), "bais"),
        (ta.glob("mlp") | Norm, "Norm"),
        (ta.leaf(ndim=7), r"leaf\(ndim=7\): no array satisfies it"),
        (ta.glob("mlp") & "head", "match some, but no array satisfies it"),
    ]:
        for use in (ta.param_mask, lambda t, w: selector_of(w)(t)):
            with pytest.raises(ta.UnusedRuleError, match=missing):
                use(MLP, where)
        assert ta.param_mask(MLP, where, unused="ignore").keys() == MLP.keys()
        assert isinstance(ta.param_mask(MLP, where, unused="ignore"), dict)


def test_a_tree_without_arrays_reports_nothing():
    assert ta.glob("a")({"b": 1.0}) == {"b": False}


HOLES = {"mlp": optax.MaskedNode(), "head": {"b": None, "w": array(1)}, "x": array(1)}


@pytest.mark.parametrize(
    "where",
    [
        *("mlp", "mlp/kernel", "**/kernel", "m*/{a,b}/c", "<Mlp>/w", "head/b", "*/b"),
        *(
            ["x", "!mlp/w"],
            ta.glob("x") & ~ta.glob("mlp/a"),
            Norm,
            "re:mlp/.*",
            "re:.*/b",
        ),
        *(ta.leaf(ndim=7), ta.glob("head") & "x", "{mlp,mpl}", "**/<Box>", "**"),
    ],
    ids=repr,
)
def test_a_pattern_that_could_match_at_or_below_a_hole_is_not_reported(where):
    mask = selector_of(where)(HOLES)
    assert jax.tree.structure(mask) == jax.tree.structure(HOLES)
    for whole in ({}, {"a": {"b": None}}, {"mlp": None}):
        assert selector_of(where)(whole) == whole


@pytest.mark.parametrize(
    ("where", "missing"),
    [
        ("mpl", "'mpl'"),
        ("mlp2", "'mlp2'"),
        ("haed/b", "'haed/b'"),
        ("head/v", "'head/v'"),
        ("x/b", "'x/b'"),
        ("head/<Norm>/w", "head/<Norm>/w"),
        ("head/<Norm>", "head/<Norm>"),
        ("head/*/c", "head/*/c"),
        ("head/b/c", "head/b/c"),
        (["x", "!haed"], "'!haed'"),
        (ta.glob("x") | "xx", "'xx'"),
    ],
)
def test_a_pattern_that_matches_no_hole_of_a_partial_tree_is_reported(where, missing):
    for _ in range(2):
        with pytest.raises(ta.UnusedRuleError, match=re.escape(missing)):
            selector_of(where)(HOLES)


def test_a_full_tree_is_looked_for_where_it_is_named():
    for where in ("mlp", "mlp/w", "head/b/c"):
        with pytest.raises(ta.UnusedRuleError):
            ta.param_mask(HOLES, where)


@pytest.mark.slow
@pytest.mark.hazard("E30")
def test_a_typo_is_reported_in_a_model_with_holes():
    model = eqx.filter(
        eqx.nn.MLP(2, 2, 4, 2, use_bias=False, key=jax.random.key(0)), eqx.is_array
    )
    for typo in ("kernal", "layers/*/wieght", "layers/0/weights"):
        with pytest.raises(ta.UnusedRuleError, match=re.escape(typo)):
            optax.adamw(0.1, mask=ta.glob(typo)).init(model)
    optax.adamw(0.1, mask=ta.glob("layers/*/bias")).init(model)


def test_a_static_leaf_that_became_an_array_is_checked_again():
    where = ta.glob("a")
    with pytest.raises(ta.UnusedRuleError):
        where({"a": 1.0, "b": array(1)})
    assert where({"a": array(1), "b": array(1)}) == {"a": True, "b": False}
    with pytest.raises(ta.UnusedRuleError):
        where({"a": 1.0, "b": array(1)})


HINTS = {
    "kernel": "'\\*\\*/kernel' \\(2 leaves\\)",
    "params/mlp/dense/kernel": "'mlp/dense/kernel' \\(1 leaf\\)",
    "dense.kernel": "'\\*\\*/dense/kernel' \\(1 leaf\\)",
    "mlp.dense.kernel": "'mlp/dense/kernel' \\(1 leaf\\)",
    ".*kernel": "'\\*\\*/kernel' \\(2 .*\\? Or as a reg.*: 're:\\.\\*kernel\\(",
    "^mlp.*kernel$": "'mlp/\\*\\*/kernel' \\(1 .*'re:mlp\\.\\*kernel\\(/\\.\\*\\)\\?'",
    "dense/(kernel|bias)": "'\\*\\*/dense/{kernel,bias}' \\(2 leaves\\)",
    "re:kernel": "'\\*\\*/kernel' \\(2 .*whole path: 're:\\.\\*kernel\\(/\\.\\*\\)\\?'",
    "re:.*kernal.*": "\nThe paths here are '",
    "mlp/dence/kernel": "'mlp/dense/kernel' \\(1 leaf\\)",
    "MLP/Dense": "'mlp/dense' \\(2 leaves\\)",
    "**/kernal": "'\\*\\*/kernel' \\(2 leaves\\)",
    "mpl/dence": "'mlp/dense' \\(2 leaves\\)",
    "head_*/kernel": "'heads_\\*/kernel' \\(1 leaf\\)",
    "mlp/dense/": "'mlp/dense' \\(2 leaves\\)",
    "xyzzy": "\nThe paths here are '",
}


@pytest.mark.parametrize("pattern", HINTS)
def test_the_message_suggests_the_repaired_pattern_with_its_count(pattern):
    tree = {
        "mlp": {"dense": {"kernel": array(2, 2), "bias": array(2)}},
        "heads_0": {"kernel": array(2, 2)},
    }
    with pytest.raises(ta.UnusedRuleError, match=HINTS[pattern]):
        ta.glob(pattern)(tree)


@pytest.mark.parametrize(
    ("pattern", "proposed", "count"),
    [
        ("h/{0..1}", "h.{0..1}.*", 4),
        ("h.{0..1}", "h.{0..1}.*", 4),
        ("h/*/ln_1", "h.*.ln_1.*", 6),
        ("h/0/ln_1/weight", "h.0.ln_1.weight", 1),
        ("**/weight", "*.weight", 4),
        ("ln_1", "*.ln_1.*", 6),
        ("ln_1/**", "*.ln_1.*", 6),
        ("wte/**", "wte.*", 1),
    ],
)
def test_dots_are_suggested_for_slashes_in_published_names(pattern, proposed, count):
    names = [f"h.{n}.ln_1.{kind}" for n in range(3) for kind in ("weight", "bias")]
    tree = {name: array(2) for name in [*names, "wte.weight"]}
    with pytest.raises(ta.UnusedRuleError) as caught:
        ta.glob(pattern)(tree)
    leaves = f"{count} {'leaf' if count == 1 else 'leaves'}"
    assert f"did you mean {proposed!r} ({leaves})" in str(caught.value)
    assert sum(ta.glob(proposed)(tree).values()) == count


BACKTRACKING = "(.|.)" * 45 + "x"


@pytest.mark.slow
@pytest.mark.hazard("K2")
@pytest.mark.parametrize(
    "hostile",
    [
        *("(a+)+$", ".*.*.*.*.*x", "a" * 4_000, "{a,b}" * 600, "*a" * 64 + "|x"),
        *(BACKTRACKING, f"x/re:{BACKTRACKING}", f"params/re:{BACKTRACKING}"),
        *(f"[re:]{BACKTRACKING}", "?*/" * 1_300 + "a"),
        *(".*.*.*.*x", "re:(a|a)(a|a)(a|a)x"),
        "re:a*a*a*x",
    ],
    ids=lambda text: text[:12],
)
def test_an_unused_hostile_pattern_costs_little(hostile):
    tree = {"a" * 150 + str(n): array(1) for n in range(2_000)}
    ta.glob("**")(tree)
    start = time.process_time()
    with pytest.raises(ta.UnusedRuleError) as caught:
        ta.glob(hostile)(tree)
    assert time.process_time() - start < 5.0
    assert len(str(caught.value).encode()) <= 4_000


def test_messages_stay_small_whatever_the_tree():
    tree = {f"{'x' * 300}/{n}": array(1) for n in range(2_000)}
    with pytest.raises(ta.UnusedRuleError) as caught:
        ta.param_mask(tree, [f"{'y' * 300}{n}" for n in range(500)])
    assert len(str(caught.value).encode()) <= 4_000


# Alternatives in braces


BLOCKS = {
    "h": {
        str(n): {
            "norm": array(4),
            "attn": {name: array(4, 4) for name in ("q_proj", "v_proj", "o_proj")},
            "mlp": {"kernel": array(4, 4)},
        }
        for n in range(12)
    },
    "head": {"kernel": array(4, 2)},
    "scale": None,
}
#: A pattern, the alternatives in it that match nothing, and what is near the first.
MISTAKES = [
    ("**/{norm,kernl}", ["kernl"], "did you mean 'kernel' (13 leaves)?"),
    ("{haed,h}", ["haed"], "did you mean 'head' (1 leaf)?"),
    ("{h,Head}/**", ["Head"], "did you mean 'head' (1 leaf)?"),
    ("h/{0-2,7}", ["0-2"], "did you mean '0..2' (15 leaves)?"),
    ("h/{3,13}", ["13"], "the numbers below 'h' are 0 to 11"),
    ("h/{{0,1},{3,44}}/norm", ["44"], "the numbers below 'h' are 0 to 11"),
    ("h/*/{mpl,attn}/**", ["mpl"], "did you mean 'mlp' (12 leaves)?"),
    (["**", "!**/{norm,kernl}"], ["kernl"], "did you mean 'kernel' (13 leaves)?"),
    (~ta.glob("**/{norm,kernl}"), ["kernl"], "did you mean 'kernel' (13 leaves)?"),
]
HABITS = [
    "**/{kernel,bias}",
    "h/{0..30}/norm",
    "**/{q,k,v,o}_proj",
    "{h,head,scale}",
    "{h,head,}",
    "h/{-1}/{norm,mlp}",
    "**/{norm,n*}",
    "h/{0..5}",
]


@pytest.mark.parametrize(("where", "texts", "hint"), MISTAKES)
def test_an_alternative_that_reads_like_a_mistake_is_warned_of(where, texts, hint):
    for ask in (
        lambda: ta.param_mask(BLOCKS, where),
        lambda: ta.param_labels(BLOCKS, [(where, 1), ("**", 2)]),
        lambda: ta.split(BLOCKS, where),
        lambda: ta.freeze(optax.sgd(0.1), where).init(BLOCKS),
    ):
        with pytest.warns(ta.UnusedAlternativeWarning) as caught:
            ask()
        (warning,) = caught
        assert warning.filename == __file__
        assert hint in str(warning.message)
        assert all(repr(text) in str(warning.message) for text in texts)
    ta.param_mask(BLOCKS, where, unused="ignore")
    ta.param_labels(BLOCKS, ta.Rules([(where, 1), ("**", 2)], unused="ignore"))


@pytest.mark.parametrize("where", HABITS)
def test_an_alternative_that_may_be_a_habit_is_not_warned_of(where):
    ta.param_mask(BLOCKS, where)
    ta.param_labels(BLOCKS, [(where, 1), ("**", 2)])


def test_the_warning_names_the_rule_each_time_and_may_be_an_error():
    tree = {"kernel": array(2), "norm": array(2)}
    rules = ta.Rules({"{norm,kernl}": 1, "**": 2})
    for _ in range(2):
        with pytest.warns(ta.UnusedAlternativeWarning, match=r"\(rule 1\)"):
            rules(tree)
        with pytest.raises(ta.UnusedAlternativeWarning):  # as these tests have it
            rules(tree)


def test_a_report_notes_alternatives():
    table = {"**/{norm,kernl}": 1, "h/{0..30}/**": 2, "**/{kernel,bias}": 3}
    notes = ta.summarize(BLOCKS, table).notes
    assert [note.partition(":")[0] for note in notes] == ["Alternative", "Note", "Note"]
    assert "'bias' in '**/{kernel,bias}' matches nothing" in notes[2]
    assert "the end of '0..30'" in notes[1]
    assert not ta.summarize(BLOCKS, ta.Rules(table, unused="ignore")).notes


def test_many_alternatives_cost_little():
    tree = {f"l{n}": array(2) for n in range(300)}
    nested = "{" * 40 + "l1" + ",x}" * 40
    hostile = ["{" + ",".join(f"x{n}" for n in range(700)) + ",l1}", nested]
    hostile += [f"{{l{n},{'y' * 50}{n}}}" for n in range(300)]
    start = time.process_time()
    ta.param_mask(tree, hostile)
    assert time.process_time() - start < 3.0


# Smaller views


flat = ta.to_flat_dict


TREE_BOUND = [
    ta.node(Norm),
    ta.glob("**/<Norm>"),
    ta.glob("blocks/{-1}"),
    ~ta.node(Norm),
]


@pytest.mark.parametrize("selector", TREE_BOUND, ids=repr)
def test_a_flat_dict_cannot_answer_for_the_tree(selector):
    model = flat(net())
    for use in (selector, lambda tree: ta.param_mask(tree, selector)):
        with pytest.raises(ta.SelectorError, match="bind"):
            use(model)
        with pytest.raises(ta.SelectorError, match="bind"):
            use(model | {"head/bias": optax.MaskedNode(), "head/kernel": None})


@pytest.mark.parametrize(
    "selector", [*TREE_BOUND, ta.glob("**/kernel"), ta.leaf(ndim=1)]
)
def test_a_bound_selector_answers_on_every_view(selector):
    model = net()
    want = flat(ta.param_mask(model, selector))
    bound = selector.bind(model)
    assert bound(flat(model)) == want
    assert flat(bound(model)) == want
    part = {path: value for path, value in flat(model).items() if "blocks/1" in path}
    assert bound(part) == {path: want[path] for path in part}
    assert (bound & "blocks/1")(part) == {path: want[path] for path in part}
    assert bound.matches("head/kernel") == want["head/kernel"]
    assert flat((~bound)(model)) == {path: not yes for path, yes in want.items()}
    masked = {path: optax.MaskedNode() for path in part} | {"head/bias": array(2)}
    assert bound(masked)["head/bias"] == want["head/bias"]


def test_a_bound_selector_refuses_a_leaf_that_it_does_not_know():
    bound = ta.glob("a").bind({"a": array(1), "b": array(1)})
    with pytest.raises(ta.SelectorError, match="'c'"):
        bound({"c": array(1)})
    with pytest.raises(ta.SelectorError, match="'c'"):
        (bound | "b")({"c": array(1), "b": array(1)})
    assert bound({"a": array(1), "f": len}) == {"a": True, "f": False}


@pytest.mark.parametrize(
    "asked", [ta.glob("**/w"), ta.Rules({"**/w": True, "**": False})], ids=repr
)
def test_what_is_bound_to_a_part_answers_for_it_inside_a_larger_tree(asked):
    policy = {"w": array(2), "b": array(3)}
    bound = asked.bind({"policy": policy})
    tree = {"policy": policy, "value": {"w": array(2)}}
    part = {"policy/w": array(2), "policy/b": array(3)}
    mask = inside(tree, lambda _: bound(part))
    assert mask == {"policy/w": True, "policy/b": False}
    with pytest.raises(ta.SelectorError, match="no leaf at 'value/w'"):
        inside(tree, lambda _: bound({"policy/w": array(2), "value/w": array(2)}))


@pytest.mark.parametrize("selector", TREE_BOUND, ids=repr)
def test_inside_a_transformation_a_flat_dict_answers_as_the_tree(selector):
    model = net()
    want = flat(ta.param_mask(model, selector))
    shown = {p: jnp.zeros(1) for p, x in flat(model).items() if hasattr(x, "shape")}
    mask = inside(model, lambda _: selector(shown))
    assert mask == {path: want[path] for path in shown}
    shown["head/bias"] = optax.MaskedNode()
    mask = inside(model, lambda _: selector(shown))
    assert mask["blocks/2/norm/bias"] == want["blocks/2/norm/bias"]
    with pytest.raises(ta.SelectorError):
        ta.node(Norm)(flat(model))


def test_what_matches_nothing_is_reported_of_params_and_not_of_gradients_alone():
    mask = inside(net(), ta.glob("typo"), has_params=False)
    assert mask.keys() < flat(net()).keys()
    assert not any(mask.values())
    with pytest.raises(ta.UnusedRuleError):
        inside(net(), ta.glob("typo"))


def test_a_transformation_of_a_part_keeps_the_larger_tree():
    part = {"head/bias": array(2)}
    mask = inside(net(), lambda _: inside(part, ta.node(Dense)))
    assert mask == {"head/bias": True}


def test_another_tree_inside_a_transformation_answers_for_itself():
    norm = Norm(array(1), array(1))
    assert inside(net(), lambda _: ta.node(Norm)(norm)) == Norm(True, True)


def test_a_tree_is_forgotten_where_its_transformation_fails():
    with pytest.raises(ZeroDivisionError):
        inside(net(), lambda _: 1 // 0)
    with pytest.raises(ta.SelectorError):
        ta.node(Norm)(flat(net()))


# Names from published models


@pytest.mark.parametrize("model", MODELS)
def test_the_generated_names_are_the_published_ones(model):
    assert (len(names_of(model)), digest(names_of(model))) == CHECKS[model]
    assert ta.tree_paths(tree_of(model)) == names_of(model)


def _last(names, prefix, count):
    """Numbers of the last layers below ``prefix``, found slowly."""
    numbers = {
        int(name.removeprefix(prefix).split("/")[0])
        for name in names
        if name.startswith(prefix)
    }
    return sorted(numbers)[-count:]


USES = {
    "LoRA targets": (
        "gemma3",
        "language_model/**/{q,k,v,o}_proj",
        lambda n: (
            n.startswith("language_model")
            and n.split("/")[-2] in ("q_proj", "k_proj", "v_proj", "o_proj")
        ),
        248,
    ),
    "the vision tower": (
        "gemma3",
        "vision_tower",
        lambda n: n.startswith("vision_tower/"),
        437,
    ),
    "no decay": (
        "gemma3",
        ["**/*norm*", "**/bias"],
        lambda n: any("norm" in s for s in n.split("/")) or n.endswith("/bias"),
        647,
    ),
    "decay": (
        "gemma3",
        ["!**/*norm*", "!**/bias"],
        lambda n: (
            not any("norm" in s for s in n.split("/")) and not n.endswith("/bias")
        ),
        600,
    ),
    "routers": (
        "mixtral",
        "**/block_sparse_moe/gate",
        lambda n: n.endswith("block_sparse_moe/gate/weight"),
        56,
    ),
    "experts": ("mixtral", "**/experts", lambda n: "/experts/" in n, 1_344),
    "all but the experts": (
        "mixtral",
        "!**/experts",
        lambda n: "/experts/" not in n,
        395,
    ),
    "experts 2 to 5": (
        "mixtral",
        "model/layers/*/block_sparse_moe/experts/{2..5}",
        lambda n: any(f"/experts/{e}/" in n for e in (2, 3, 4, 5)),
        672,
    ),
    "the last four layers": (
        "mixtral",
        "model/layers/{-4..}",
        lambda n: any(f"layers/{k}/" in n for k in (52, 53, 54, 55)),
        124,
    ),
    "attention of either kind": (
        "qwen3_moe",
        "**/{self,linear}_attn",
        lambda n: "self_attn" in n or "linear_attn" in n,
        330,
    ),
    "routers and shared experts": (
        "qwen3_moe",
        ["**/mlp/gate", "**/mlp/shared_expert*"],
        lambda n: "/mlp/gate/" in n or "/mlp/shared_expert" in n,
        200,
    ),
    "one dimension": (
        "qwen3_moe",
        ta.leaf(ndim=1),
        lambda n: "norm" in n or n.endswith(("A_log", "dt_bias")),
        191,
    ),
    "all but the experts of 40 layers": (
        "qwen3_moe",
        ["**", "!**/experts"],
        lambda n: "/experts/" not in n,
        613,
    ),
    "every tenth expert": (
        "qwen3_moe",
        "**/experts/{,[1-9],1[0-7]}0",
        lambda n: "/experts/" in n and n.split("/experts/")[1].split("/")[0][-1] == "0",
        2_160,
    ),
}


@pytest.mark.parametrize("use", USES)
def test_selectors_that_people_use(use):
    model, where, wanted, count = USES[use]
    found = chosen(tree_of(model), where)
    assert found == [name for name in names_of(model) if wanted(name)]
    assert len(found) == count


@pytest.mark.slow
def test_the_tree_decides_which_layers_are_last():
    names = names_of("qwen3_moe")
    last = _last(names, "model/language_model/layers/", 4)
    found = chosen(tree_of("qwen3_moe"), "model/language_model/layers/{-4..}")
    assert {int(name.split("/")[3]) for name in found} == set(last) == {36, 37, 38, 39}


# Against a slow reference


SEGMENT = st.sampled_from(["a", "b", "ab"])
PATHS = st.lists(
    st.lists(SEGMENT, min_size=1, max_size=3).map("/".join), min_size=1, max_size=6
)
PATTERN = st.lists(
    st.sampled_from(["a", "b", "ab", "*", "**", "a*", "{a,b}"]), min_size=1, max_size=3
).map("/".join)
SPEC = st.recursive(
    PATTERN | st.builds("!{}".format, PATTERN),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner).map(lambda two: selector_of(two[0]) & two[1]),
        st.tuples(inner, inner).map(lambda two: selector_of(two[0]) | two[1]),
        inner.map(lambda one: ~selector_of(one)),
    ),
    max_leaves=6,
)


def slow(where: Any, path: str) -> bool:
    """Decide one path by recursion over what the selector says that it is."""
    if isinstance(where, str):
        if where.startswith("!"):
            return not ta.glob(where[1:]).matches(path)
        return ta.glob(where).matches(path)
    if isinstance(where, list) or type(where).__name__ == "ListSelector":
        entries = where if isinstance(where, list) else where.entries
        outs = [e[1:] for e in entries if isinstance(e, str) and e[0] == "!"]
        ins = [e for e in entries if not (isinstance(e, str) and e[0] == "!")]
        start = any(slow(e, path) for e in ins) if ins else bool(outs)
        return start and not any(slow(e, path) for e in outs)
    kind = type(where).__name__
    if kind == "GlobSelector":
        return slow(where.plain, path)
    parts = [slow(part, path) for part in where.parts]
    folds = {"And": all, "Or": any, "Not": lambda p: not p[0]}
    return folds[kind](parts)


@pytest.mark.slow
@given(PATHS, SPEC)
def test_selectors_agree_with_a_slow_reference(paths, spec):
    tree = functools.reduce(lambda t, p: t | {p: array(1)}, paths, {})
    selector = selector_of(spec)
    want = {path: slow(spec, path) for path in tree}
    assert ta.param_mask(tree, spec, unused="ignore") == want
    assert {path: selector.matches(path) for path in tree} == want


@pytest.mark.parametrize(
    ("selector", "leaf", "want"),
    [
        (ta.node(Norm) | ta.leaf(ndim=2), array(2, 2), True),
        (ta.leaf(ndim=2) | ta.node(Norm), array(2, 2), True),
        (ta.node(Norm) & ta.leaf(ndim=2), array(2), False),
        (ta.leaf(ndim=2) & ta.node(Norm), array(2), False),
        (~ta.node(Norm) & ta.leaf(ndim=2), array(2), False),
        (ta.leaf(), ..., False),
    ],
    ids=repr,
)
def test_a_filter_answers_where_one_part_settles_it(selector, leaf, want):
    assert selector(("a",), leaf) is want


def test_a_path_answers_where_one_part_settles_it():
    assert not (ta.leaf(ndim=2) & ~(ta.glob("a") | ta.leaf(ndim=1))).matches("a")
    assert (ta.glob("**") & [ta.leaf(), [ta.leaf(), "a"]]).matches("a")


def test_a_class_is_never_asked_of_a_flat_dict_whatever_else_settles_it():
    flat_dict = {"a/b": array(1), "c/d": array(1)}
    for where in (ta.glob("zzz") & ta.node(Norm), ["**", Norm]):
        with pytest.raises(ta.SelectorError, match="flat dict"):
            ta.param_mask(flat_dict, where, unused="ignore")


def test_an_array_whose_shape_does_not_hash_has_a_shape():
    class Listed:
        shape, dtype = [2, 3], np.dtype("float32")

    assert chosen({"a": Listed(), "b": Listed()}, "a" | ta.leaf(ndim=2)) == ["a", "b"]


NUMPYRO = {
    f"{net}$params": {
        f"Dense_{n}": {"kernel": array(2, 2), "bias": array(2)} for n in range(4)
    }
    for net in ("decoder", "encoder")
} | {"noise": array(1)}


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("encoder$params/Dense_{5..6}", r"after 'encoder\$params/Dense_' are 0 to 3"),
        ("encoder$params/Dnse_0", r"did you mean 'encoder\$params/Dense_"),
        (r"re:encoder$params/Dense_0", r"'re:encoder\\\\\$params/Dense_0\(/\.\*\)\?'"),
        (r"re:.*encoder$params/.*", r"'re:encoder\\\\\$params\(/\.\*\)\?'"),
        ("(encoder|decoder).*kernel", r"'re:\(\?:\(encoder\|decoder\).*kernel\)\(/"),
        (
            "z_auto_loc",
            r"look like 'decoder\$params/Dense_0/bias', "
            r"'encoder\$params/Dense_0/bias', 'noise'",
        ),
    ],
)
def test_a_dollar_of_a_name_is_no_sign_of_a_regular_expression(pattern, hint):
    with pytest.raises(ta.UnusedRuleError, match=hint) as caught:
        ta.glob(pattern)(NUMPYRO)
    proposed = re.findall(r"whole path: '(re:.*?)'", str(caught.value))
    for text in proposed:
        assert any(jax.tree.leaves(ta.glob(text.replace("\\\\", "\\"))(NUMPYRO)))


@pytest.mark.parametrize(
    "pattern",
    ["re:kernal", "^kernal$", "(kernal|bais)", "re:(a+)+$", "re:[", r"(\d+)+$"],
)
def test_a_regular_expression_that_matches_nothing_is_not_proposed(pattern):
    tree = {"mlp": {"a" * 200: array(2), "b": array(2)}}
    with pytest.raises((ta.UnusedRuleError, ta.PatternError)) as caught:
        ta.glob(pattern)(tree)
    assert "regular expression of" not in str(caught.value)


LAYERS_OF_12 = {
    "h": {
        str(n): {"kernel": array(2, 2), "bias": array(2), "attn": {"kernel": array(2)}}
        for n in range(12)
    },
    "layer_0": array(2),
    "layer_1": array(2),
}


@pytest.mark.parametrize(
    ("pattern", "advice", "proposed"),
    [
        ("^h/1", "'h/1' (3 leaves)", "re:h/1(/.*)?"),
        ("h/1$", "'h/1' (3 leaves)", "re:h/1(/.*)?"),
        ("re:h/1", "'h/1' (3 leaves)", "re:h/1(/.*)?"),
        ("^h/1/.*", "'h/1' (3 leaves)", "re:h/1(/.*)?"),
        ("h/(0|1)", "'h/{0,1}' (6 leaves)", "re:(?:h/(0|1))(/.*)?"),
        (r"h/\d+/attn", "'h/*/attn' (12 leaves)", ""),
        ("h/-1", "'h/{-1}' (3 leaves)", ""),
        ("h/-4:", "'h/{-4..}' (12 leaves)", ""),
        ("h/{0-5}", "'h/{0..5}' (18 leaves)", ""),
        ("h/{0:5}", "'h/{0..5}' (18 leaves)", ""),
        ("h/0..5", "'h/{0..5}' (18 leaves)", ""),
        ("h/{0-2,20}/kernel", "'h/{0..2,20}/kernel' (3 leaves)", ""),
        ("h/12", "the numbers below 'h' are 0 to 11", ""),
        ("h/{12..20}/kernel", "the numbers below 'h' are 0 to 11", ""),
        ("**/h/12", "the numbers below '**/h' are 0 to 11", ""),
        ("layer_7", "the numbers after 'layer_' are 0, 1", ""),
        ("h/*/weight", "'h/*/kernel' (12 leaves)", ""),
        ("h/*/beta", "'h/*/bias' (12 leaves)", ""),
        ("blocks/1/bias", "'h/1/bias' (1 leaf)", ""),
        ("h/*/self_attention", "'h/*/attn' (12 leaves)", ""),
    ],
)
def test_the_advice_selects_what_was_meant(pattern, advice, proposed):
    with pytest.raises(ta.UnusedRuleError) as caught:
        ta.glob(pattern)(LAYERS_OF_12)
    assert advice in str(caught.value)
    assert not proposed or f"{proposed!r}" in str(caught.value)
    if proposed.startswith("re:h/1"):
        assert chosen(LAYERS_OF_12, proposed) == chosen(LAYERS_OF_12, "h/1")


def test_the_numbers_of_layers_in_a_stack_are_named():
    tree = {"blocks": {"w": array(4, 2), "b": array(4)}}
    rules = ta.Rules({"blocks/{5..6}": 1, "**": 2}, stacks={"blocks": 0})
    with pytest.raises(ta.UnusedRuleError, match="below 'blocks' are 0 to 3"):
        ta.param_labels(tree, rules)


@pytest.mark.parametrize(
    "spec",
    [{"w": np.ones(3)}, {"w": jnp.ones(3)}, {1: True, "a": False}, None, object()],
    ids=["NumPy", "JAX", "unsortable", "None", "object"],
)
def test_what_is_not_a_selector_is_refused_whatever_it_holds(spec):
    with pytest.raises(ta.SelectorError, match="A selector is a pattern") as caught:
        ta.param_mask({"w": array(1)}, spec)
    assert ("Of a tree of bools" in str(caught.value)) is isinstance(spec, dict)


LETTERS = st.sampled_from(["a", "b", "ab", "1", "2", "12"])


@pytest.mark.slow
@given(
    st.lists(
        st.lists(LETTERS, min_size=1, max_size=3).map("/".join),
        min_size=1,
        max_size=8,
        unique=True,
    ),
    st.lists(
        st.one_of(
            LETTERS,
            st.sampled_from(["*", "**", "?", "{1..2}"]),
            st.lists(LETTERS, min_size=1, max_size=3, unique=True),
        ),
        min_size=1,
        max_size=3,
    ),
)
def test_alternatives_that_match_nothing_are_those_of_a_slow_reference(paths, parts):
    paths = [p for p in paths if not any(q.startswith(f"{p}/") for q in paths)]
    texts = [p if isinstance(p, str) else f"{{{','.join(p)}}}" for p in parts]

    def matches(place, text):
        pattern = "/".join([*texts[:place], text, *texts[place + 1 :]])
        return any(selects(pattern, path) for path in paths)

    wanted = []
    if matches(0, texts[0]):
        for place, part in enumerate(parts):
            alone = {"1..2": "2"} if part == "{1..2}" else {}
            alone |= {x: x for x in part} if isinstance(part, list) else {}
            wanted += [x for x, y in alone.items() if not matches(place, y)]
    tree = dict.fromkeys(paths, array(1))
    rules = ta.Rules([("/".join(texts), 1), ("**", 2)])
    found = [one.text for one in rules.match(tree).alternatives]
    assert sorted(found) == sorted(wanted)
