"""Law 12: rules with ``stacks`` decide on a scanned model as on the unrolled one.

Each law runs over ``scanned.TWINS``: models of three libraries, and plain dicts.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from programs import bits
from scanned import BY_NAME, TWINS, WIDTH, NnxBlock, arrays, read_key
from sizes import full, some

import treeadapt as ta

#: The maths is that of Optax.
pytestmark = pytest.mark.usefixtures("standard_promotion")

#: One of each library, and of each way to say where layers are.
EACH = ("Linen, boxes, axis 1", "nnx, metadata", "Equinox")
#: All but those that differ only in what other rows show.
DECIDED = (*EACH, "Linen", "nnx, axis 1", "dict of experts", "ensemble")


def each_twin(*quick, step=1):
    """Run a test over all twins in ``make test-full``, and over some elsewhere.

    Each ``step``-th of these runs in ``make test``, the others in ``make test-slow``.
    """
    names = full(tuple(twin.name for twin in TWINS), quick)
    twins = some([BY_NAME[name] for name in names], step)
    return pytest.mark.parametrize("twin", twins, ids=lambda twin: twin.name)


# Tables: which rule decides, for each row of the table of leaves.

TABLES = {
    "depth": lambda twin: {
        twin.at("{0..1}"): "low",
        twin.at("{-1}"): "last",
        "**": "middle",
    },
    "from the end": lambda twin: {twin.at("{-2..}"): 1.0, "**": 0.1},
    "kernels": lambda twin: {
        twin.at("{0..1}", f"**/{twin.kernel}"): "low",
        f"**/{twin.kernel}": "kernel",
        "**": "other",
    },
    "alternating": lambda twin: {twin.at("[024]"): "even", "**": "odd"},
    "shapes": lambda twin: [
        (ta.leaf(ndim=2), "matrix"),
        (ta.leaf(ndim=1), "vector"),
        ("**", "rest"),
    ],
    "sizes": lambda twin: [
        (ta.leaf(min_size=100), "large"),
        (ta.leaf(lambda leaf: leaf.shape[-1] == WIDTH), "width"),
        ("**", "other"),
    ],
    "both": lambda twin: [
        (twin.at("{1..2}") & ta.leaf(ndim=1), 1),
        (~ta.leaf(ndim=2) | twin.at("0"), 2),
        ("**", 3),
    ],
    "a list": lambda twin: [(["**", "!" + twin.at("0"), "!**/bias"], 1), ("**", 2)],
    "classes": lambda twin: [
        (nnx.LayerNorm, 1),
        (eqx.nn.LayerNorm, 2),
        (twin.at("{1..3}", "<Linear>"), 3),
        ("**", 4),
    ],
    "a class by name": lambda twin: {"**/<LayerNorm>/bias": 1, "**": 2},
    "blocks": lambda twin: [(NnxBlock, 1), ("**/<EqxBlock>/wi", 2), ("**", 3)],
    "a regular expression": lambda twin: [("re:(.*[/_])?[02]/.*", 1), ("**", 2)],
    "experts": lambda twin: {"**/experts/{-1}": 1, "**/[13]/**/1": 2, "**": 3},
    "without a rule": lambda twin: {twin.at("{0..2}"): 1},
    "a wrong number": lambda twin: {twin.at("7"): 1, "**": 2},
    "a wrong name": lambda twin: {twin.at("1", "kernels"): 1, "**": 2},
    "stored paths": lambda twin: {f"{twin.axes[0].key}/norm".lstrip("/"): 1, "**": 2},
    "shadowed": lambda twin: {twin.at("*"): 1, twin.at("{1..2}"): 2, "**": 3},
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"default": "other"},
    {"overlap": "error"},
    {"unused": "ignore"},
]
ALL_OPTIONS = full(tuple(BY_NAME), ("Equinox", "dict of experts"))


def decisions(rules, tree):
    """All that rules decide for a tree, or the error."""
    matches = rules.match(tree)
    rows = zip(
        matches.paths,
        matches.values,
        matches.deciding,
        matches.is_array,
        [
            (getattr(x, "shape", None), getattr(x, "dtype", None))
            for x in matches.view.leaves
        ],
        strict=True,
    )
    try:
        error = matches.check() and None
    except ta.TreeAdaptError as raised:
        # Which leaves a message shows first depends on the order of the leaves, and
        # only a tree with stacks has layers to count.
        head = str(raised).partition(":")[0].replace("arrays and layers", "arrays")
        error = type(raised), head
    return {
        "rows": {path: row for path, *row in rows},
        "unused": matches.unused,
        "shadowed": matches.shadowed,
        "unmatched": sorted(matches.unmatched),
        "overlaps": sorted(
            (matches.paths[leaf], *two) for leaf, *two in matches.overlaps
        ),
        "error": error,
    }


@pytest.mark.slow
@each_twin(*DECIDED, step=2)
def test_law_12_rules_decide_as_on_the_unrolled_model(twin):
    scanned, unrolled = twin.scanned(), twin.unrolled()
    for name, table in TABLES.items():
        for options in OPTIONS if twin.name in ALL_OPTIONS else OPTIONS[:1]:
            rules = ta.Rules(table(twin), **options)
            with_stacks = ta.Rules(rules, stacks=twin.stacks, **options)
            expected = decisions(rules, unrolled)
            for model in (scanned, unrolled):  # one rules file serves both
                found = decisions(with_stacks, model)
                for part in expected:
                    assert found[part] == expected[part], (name, options, part)


@each_twin(*EACH)
def test_law_12_labels_are_those_of_the_unrolled_model_or_an_error(twin):
    scanned, unrolled = twin.scanned(), twin.unrolled()
    layers = {}
    for path, layer, _ in twin.places(arrays(scanned)):
        layers.setdefault(path, []).append(layer)
    for name, table in TABLES.items():
        options = {"default": "other", "unused": "ignore"}
        rules = ta.Rules(table(twin), **options)
        with_stacks = ta.Rules(rules, stacks=twin.stacks, **options)
        expected = ta.to_flat_dict(ta.param_labels(unrolled, rules))
        labels = ta.param_labels(unrolled, with_stacks)  # no array is cut
        assert ta.to_flat_dict(labels) == expected, name
        agreed = {path: {expected[one] for one in layers[path]} for path in layers}
        if all(len(values) == 1 for values in agreed.values()):
            labels = ta.param_labels(scanned, with_stacks)
            assert jax.tree.structure(labels) == jax.tree.structure(scanned), name
            labels = ta.to_flat_dict(labels)
            assert {path: {labels[path]} for path in layers} == agreed, name
        else:
            with pytest.raises(ta.StackError, match="partition"):
                ta.param_labels(scanned, with_stacks)


# Updates: partition, freeze and scale_by_rules, with layers of one array apart.

#: Transformations that treat leaves alone, and draw no random numbers.
ALONE = {
    "adabelief": lambda: optax.adabelief(0.1),
    "adadelta": lambda: optax.adadelta(0.1),
    "adagrad": lambda: optax.adagrad(0.1),
    "adam": lambda: optax.adam(0.1),
    "adamax": lambda: optax.adamax(0.1),
    "adamaxw": lambda: optax.adamaxw(0.1),
    "adamw": lambda: optax.adamw(0.1, weight_decay=0.5),
    "adan": lambda: optax.adan(0.1),
    "ademamix": lambda: optax.contrib.ademamix(0.1),
    "acprop": lambda: optax.contrib.acprop(0.1),
    "amsgrad": lambda: optax.amsgrad(0.1),
    "clip": lambda: optax.chain(optax.clip(0.2), optax.sgd(0.1)),
    "cocob": lambda: optax.contrib.cocob(),
    "ema": lambda: optax.chain(optax.ema(0.9), optax.sgd(0.1)),
    "inject": lambda: ta.inject_hyperparams(optax.rmsprop)(0.1),
    "keep nonnegative": lambda: optax.chain(
        optax.sgd(0.1), optax.keep_params_nonnegative()
    ),
    "lion": lambda: optax.lion(0.1),
    "lookahead in a chain": lambda: optax.chain(
        optax.trace(0.9, nesterov=True), optax.scale(-0.1)
    ),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(0.1), 2),
    "nadam": lambda: optax.nadam(0.1),
    "nadamw": lambda: optax.nadamw(0.1),
    "optimistic": lambda: optax.optimistic_gradient_descent(0.1),
    "radam": lambda: optax.radam(0.1),
    "rmsprop": lambda: optax.rmsprop(0.1, centered=True, momentum=0.9),
    "rprop": lambda: optax.rprop(0.1),
    "schedule": lambda: optax.adam(optax.cosine_decay_schedule(0.1, 10)),
    "schedule free": lambda: optax.contrib.schedule_free_adamw(0.1),
    "sgd": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "sign": lambda: optax.sign_sgd(0.1),
    "simplified ademamix": lambda: optax.contrib.simplified_ademamix(0.1),
    "yogi": lambda: optax.yogi(0.1),
}
#: These look at all leaves of a group at once: sums of layers are in another order.
GLOBAL = {
    "global norm": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)),
    "lbfgs": lambda: optax.lbfgs(0.1, memory_size=2, linesearch=None),
}


def gradients(twin, num_steps=2):
    """Numbers of all signs and sizes, in the shapes of the scanned model."""
    flat, rest = ta.split(twin.scanned())
    for step in range(num_steps):
        random = np.random.default_rng(step)
        yield ta.merge(
            {
                path: jnp.asarray(random.normal(size=leaf.shape) ** 3, leaf.dtype)
                for path, leaf in flat.items()
            },
            rest,
        )


def trained(tx, params, grads):
    """All updates, and the last params and state."""
    state, found = tx.init(params), []
    for grad in grads:
        updates, state = tx.update(grad, state, params)
        params = ta.apply_updates(params, updates)
        found.append(arrays(updates))
    return found, arrays(params), state


def unrolled_state(twin, state):
    """A state with the flat dicts of layers that the unrolled model has there."""
    return jax.tree.map(
        lambda node: (
            dict(sorted(twin.unroll(node).items())) if type(node) is dict else node
        ),
        state,
        is_leaf=lambda node: type(node) is dict and is_flat(twin, node),
    )


def is_flat(twin, node):
    """Whether a dict of a state is the flat dict of a group."""
    shapes = {path: leaf.ndim for path, leaf in arrays(twin.scanned()).items()}
    paths = [read_key(key)[0] for key in node]
    return bool(paths) and all(
        path in shapes and getattr(leaf, "ndim", -1) == shapes[path]
        for path, leaf in zip(paths, node.values(), strict=True)
    )


def compare(twin, scanned, unrolled, same):
    """Hold updates, params and state of both models against each other."""
    for found, expected in zip(
        [*scanned[0], scanned[1]], [*unrolled[0], unrolled[1]], strict=True
    ):
        layers = twin.unroll(found)
        assert layers.keys() == expected.keys()
        same({path: layers[path] for path in expected}, expected)
    if same is same_bits:
        same(unrolled_state(twin, scanned[2]), unrolled[2])


def same_bits(found, expected):
    assert bits(found) == bits(expected)


def nearly(found, expected):
    for path, leaf in expected.items():
        np.testing.assert_allclose(found[path], leaf, rtol=1e-4, atol=1e-6)


def check_updates(twin, make, rules, same=same_bits):
    """Hold a transformation of both models against each other."""
    grads = [*gradients(twin)]
    with_stacks = ta.Rules(rules, stacks=twin.stacks)
    compare(
        twin,
        trained(make(with_stacks), twin.scanned(), grads),
        trained(make(rules), twin.unrolled(), map(twin.unroll_tree, grads)),
        same,
    )


def three_groups(twin):
    """The first layer is frozen, and the others alternate."""
    return ta.Rules({twin.at("0"): "frozen", twin.at("[13]"): "a", "**": "b"})


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("twin", full((*EACH, "dict of experts", "small"), ("small",)))
def test_law_12_groups_move_as_in_the_unrolled_model(name, twin):
    twin = BY_NAME[twin]
    transforms = {"a": ALONE[name](), "b": optax.sgd(0.1)}
    check_updates(twin, lambda r: ta.partition(transforms, r), three_groups(twin))


@pytest.mark.slow
@pytest.mark.parametrize("name", full(tuple(GLOBAL), ("global norm",)))
def test_law_12_to_rounding_where_all_layers_are_looked_at_together(name):
    twin = BY_NAME["small"]
    transforms = {"a": GLOBAL[name](), "b": GLOBAL[name]()}
    check_updates(
        twin, lambda r: ta.partition(transforms, r), three_groups(twin), nearly
    )


@pytest.mark.slow
@each_twin(*EACH[::-1], step=3)
def test_law_12_decay_of_matrices_in_a_model_with_frozen_layers(twin):

    def make(rules):
        matrices = ta.Rules({ta.leaf(ndim=2): 1, "**": 0}, stacks=rules.stacks)
        decay = optax.add_decayed_weights(0.5, mask=matrices.where(1))
        tx = optax.chain(decay, optax.trace(0.9), optax.scale(-0.1))
        return ta.freeze(tx, rules.where("frozen"))

    check_updates(twin, make, three_groups(twin))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The factor -3 of scale_by_rules")
@each_twin("ensemble", "nnx, metadata", step=2)
def test_law_12_factors_of_updates(twin):
    rules = ta.Rules(
        [
            (twin.at("0"), 0.0),
            (ta.leaf(ndim=1) & twin.at("[12]"), 0.5),
            (twin.at("{-1}"), -3),
            ("**", 1.0),
        ]
    )
    grads = next(iter(gradients(twin)))
    flat, rest = ta.split(grads)
    # No number of a layer with the factor 0 is multiplied.
    flat = {
        path: leaf.at[0].set(jnp.nan).at[-1].set(jnp.inf) for path, leaf in flat.items()
    }
    grads = ta.merge(flat, rest)

    def scaled(rules, grads):
        tx = ta.scale_by_rules(rules)
        return arrays(tx.update(grads, tx.init(grads), grads)[0])

    found = twin.unroll(scaled(ta.Rules(rules, stacks=twin.stacks), grads))
    expected = scaled(rules, twin.unroll_tree(grads))
    same_bits({path: found[path] for path in expected}, expected)


@pytest.mark.slow
@each_twin("dict of experts", "Linen, boxes", "nnx", "ensemble", step=4)
def test_law_12_optimizers_with_stacks_run_on_the_unrolled_model(twin):
    params = ta.split(twin.unrolled())[0]
    table = {"**/*1/**": "slow", "**": "fast"}
    transforms = {"slow": optax.sgd(0.5), "fast": optax.adam(0.1)}

    def updates(stacks, by_layer):
        factors = ta.Rules([("**/*1/**", 0.0), ("**", 2.0)], stacks=stacks)
        tx = optax.chain(
            ta.partition(transforms, ta.Rules(table, stacks=stacks)),
            ta.scale_by_rules(factors),
            by_layer(optax.scale_by_trust_ratio()),
        )
        return tx.update(params, tx.init(params), params)[0]

    expected = updates({}, ta.adapt)
    same_bits(updates(twin.stacks, lambda tx: ta.per_layer(tx, twin.stacks)), expected)


@each_twin("ensemble")
def test_law_6_frozen_layers_keep_every_bit_and_have_no_state(twin):
    rules = ta.Rules({twin.at("{0..1}"): "frozen", "**": "a"}, stacks=twin.stacks)
    flat, rest = ta.split(twin.scanned())
    params = ta.merge({path: leaf * -0.0 for path, leaf in flat.items()}, rest)
    grads = ta.merge({path: leaf * jnp.nan for path, leaf in flat.items()}, rest)
    before, frozen = twin.unroll(arrays(params)), set()
    for layer, label in zip(
        rules.match(params).paths, rules.match(params).values, strict=True
    ):
        frozen |= {layer} if label == "frozen" and layer in before else set()
    assert 0 < len(frozen) < len(before)
    for tx in (
        ta.partition({"a": optax.trace(0.9)}, rules),
        ta.freeze(optax.trace(0.9), rules.where("frozen")),
    ):
        _, after, state = trained(tx, params, [grads])
        after = twin.unroll(after)
        for layer in before:
            kept = bits(after[layer]) == bits(before[layer])
            assert kept == (layer in frozen), layer
        moved = sum(leaf.size for layer, leaf in before.items() if layer not in frozen)
        assert sum(leaf.size for leaf in jax.tree.leaves(state)) == moved


#: Which layers train, stage by stage: thawed from the top, taken apart, frozen again.
STAGES = ("{-1}", "{-3..}", "[024]", "*", "{0..1}")


@pytest.mark.slow
@each_twin("small")
def test_law_12_state_after_thawing(twin):
    grads = next(iter(gradients(twin)))

    def stage(layers, stacks):
        table = {twin.at(layers): "train", "**/embed": "train", "**": "frozen"}
        rules = ta.Rules(table, stacks=stacks, unused="ignore")
        return ta.partition({"train": optax.trace(0.9)}, rules)

    def train(params, grads, stacks):
        first, *later = (stage(layers, stacks) for layers in STAGES)
        states = [first.init(params)]
        updates, states[0] = first.update(grads, states[0], params)
        for tx in later:
            state, _ = ta.carry_state(tx, params, states[-1])
            updates, state = tx.update(grads, state, params)
            states.append(state)
        return arrays(updates), states

    updates, states = train(twin.scanned(), grads, twin.stacks)
    expected, others = train(twin.unrolled(), twin.unroll_tree(grads), {})
    updates = twin.unroll(updates)
    same_bits({path: updates[path] for path in expected}, expected)
    for state, other in zip(states, others, strict=True):
        same_bits(unrolled_state(twin, state), other)
