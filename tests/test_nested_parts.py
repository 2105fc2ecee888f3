"""Parts that are nested in an axis: fused layouts of published models, against NumPy.

Random rows of this form are among those of ``test_migration_properties``.
"""

from __future__ import annotations

import einops
import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_slices import counted

import treeadapt as ta
from treeadapt.migrations.moved_array import moved_arrays

G, R, D, E = 4, 3, 8, 6


def numbers(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def groups_of_heads(qkv):
    """Falcon-40B, InternLM2, linear_qkv of Megatron: r queries, a key and a value."""
    x = qkv.reshape(G, R + 2, D, E)
    keys, values = (x[:, place].reshape(-1, E) for place in (R, R + 1))
    return {"q": x[:, :R].reshape(-1, E), "k": keys, "v": values}


def heads(qkv):
    """GPT-NeoX and BLOOM: a query, a key and a value of each head; to GPT-2's order."""
    return {"c": einops.rearrange(qkv, "(h p d) e -> e (p h d)", p=3, d=D)}


def gates(qkvz):
    """Qwen3-Next: by groups there, joined projections of all groups and gates here."""
    x = qkvz.reshape(G, 2 * D + 2 * R * D, E)
    cuts = np.split(x, [D, 2 * D, 2 * D + R * D], 1)
    q, k, v, z = (each.reshape(-1, E) for each in cuts)
    return {"qkv": np.concatenate([q, k, v]), "z": z}


FUSED = {
    "groups of heads": (
        {"w : (g [(r d) d d]) e": ("q : (g r d) e", "k : (g d) e", "v : (g d) e")},
        groups_of_heads,
        (R + 2) * G * D,
    ),
    "groups of heads, numbered": (
        {"w : (g [r 1 1] d) e": ("q : (g r d) e", "k : (g d) e", "v : (g d) e")},
        groups_of_heads,
        (R + 2) * G * D,
    ),
    "heads": (
        {"w : (g [d d d]) e": "c : e [(g d) (g d) (g d)]"},
        heads,
        3 * G * D,
    ),
    "gates": (
        {
            "w : (g [d d (r d) (r d)]) e": (
                "qkv : [(g d) (g d) (g r d)] e",
                "z : (g r d) e",
            )
        },
        gates,
        (2 + 2 * R) * G * D,
    ),
}
SIZES = {"g": G, "d": D}


@pytest.fixture(params=FUSED)
def fused(request):
    table, convert, length = FUSED[request.param]
    w = {"w": numbers(length, E)}
    return ta.Migration(table, sizes=SIZES), w, convert(w["w"])


def equal(found, wanted):
    assert not ta.tree_diff(found, wanted, values=True)


def test_fused_layouts_are_those_of_numpy_and_come_back(fused, tmp_path):
    m, w, want = fused
    plan = m.plan(w)
    assert plan.exact
    assert not plan.one_way
    for found in (m(w), jax.jit(m)(w)):
        equal(found, want)
        equal(m.inverse(found), w)
        equal(jax.jit(m.inverse)(found), w)
    file = tmp_path / "table.toml"
    for each in (m, m.inverse):
        file.write_text(each.to_toml())
        assert ta.load_migration(file) == each
    ta.save(tmp_path / "w.safetensors", w)
    ta.save(tmp_path / "back.safetensors", want)
    equal(ta.load(tmp_path / "w.safetensors", migration=m), want)
    equal(ta.load(tmp_path / "back.safetensors", migration=m.inverse), w)


@pytest.mark.usefixtures("standard_promotion")
def test_moments_of_a_fused_layout_move_with_it(fused):
    m, w, want = fused
    tx = optax.adam(1e-3)
    _, saved = tx.update(w, tx.init(w), w)
    state, report = ta.carry_state(tx, want, saved, migration=m)
    assert not report.fresh
    equal(state[0].mu, m(saved[0].mu))
    equal(state[0].nu, m(saved[0].nu))


def test_each_device_reads_the_groups_that_it_has(fused, tmp_path, monkeypatch):
    m, w, want = fused
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    for table, leaves, wanted in ((m, w, want), (m.inverse, want, w)):
        ta.save(tmp_path / "x.safetensors", leaves)
        likes = {}
        for name, leaf in wanted.items():
            spec = P(*("x" if size != E else None for size in leaf.shape))
            sharding = NamedSharding(mesh, spec)
            likes[name] = jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=sharding
            )
        with counted(monkeypatch) as counts:
            found = ta.load(tmp_path / "x.safetensors", likes, migration=table)
        equal(found, wanted)
        assert not table.plan(leaves, likes).gathered
        assert sum(counts) == sum(leaf.nbytes for leaf in leaves.values())


def test_a_shard_of_four_reads_its_quarter(fused):
    m, w, _ = fused
    (group,) = m.plan(w).groups
    for path, array in moved_arrays(group, w, {}).items():
        length = max(array.shape)
        axis = array.shape.index(length)
        box = [slice(0, size) for size in array.shape]
        box[axis] = slice(length // 4, length // 2)
        num_bytes, is_tight = array.cost([tuple(box)])
        assert is_tight
        if path not in ("c", "qkv"):
            assert num_bytes == array.dtype.itemsize * np.prod(array.shape) // 4
        # A quarter of joined parts is of all groups: it is read with what is between,
        # as these pieces are small.
        assert num_bytes <= w["w"].nbytes
        np.testing.assert_array_equal(
            array.read([tuple(box)])[0], np.asarray(array)[tuple(box)]
        )


def test_a_size_that_does_not_divide_is_shown_with_the_bracket():
    m = ta.Migration(FUSED["groups of heads"][0], sizes=SIZES | {"r": R})
    with pytest.raises(ta.MigrationError, match=r"size 7, and \(g \[\(r d\) d d\]\)"):
        m({"w": numbers(7, E)})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("w : (g [a [b c]])", r"'\[' out of place"),
        ("w : (g (a b))", r"'\(' out of place"),
        ("w : (g [a b] [c d])", r"'\[' out of place"),
        ("w : [a (b [c d])]", r"'\[' out of place"),
        ("w : (g [a])", "one part"),
        ("w : (g [a b]", "a bracket is open"),
        ("w : (g [a b)", r"'\)' out of place"),
        ("w : (g [a ...])", "... in brackets"),
        ("w : (g [a a g])", "'g' is there twice"),
        ("w : (g [a b]) [a b]", "two concatenations"),
    ],
)
def test_brackets_out_of_place_are_shown(text, problem):
    with pytest.raises(ta.MigrationError, match=problem):
        ta.Migration({text: ("a : g a", "b : g b")})


def test_a_row_with_too_few_addresses_counts_the_parts_of_both_sides():
    with pytest.raises(
        ta.MigrationError, match="3 parts, and the other side has 2 addresses"
    ):
        ta.Migration({"w : (g [d d d])": "c : [(g d) (g d)]"})
