"""``where=`` of a load: what is selected must be filled, and nothing else matters."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import serialization

import treeadapt as ta

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")

TREE = {
    "net": {str(n): {"w": np.full((2, 3), n, "float32")} for n in range(3)},
    "head": np.arange(4, dtype="float32"),
    "stray": np.ones(2, "float32"),
}
HEAD = {"head": "out/kernel"}
STACK = {"net/{l}/w : i o": "blocks/w : l o i"}
WRITE = {
    "x.safetensors": ta.save,
    "x": ta.save,
    "x.npz": lambda path, tree: np.savez(path, **ta.to_flat_dict(tree)),
    "x.msgpack": lambda path, tree: path.write_bytes(
        serialization.msgpack_serialize(tree)
    ),
}


def target(layers=3):
    return {
        "blocks": {"w": np.zeros((layers, 3, 2), "float32")},
        "out": {"kernel": np.zeros(4, "float32")},
    }


# What is wrong with a row, other than that of the head.
FAULTY = {
    "unmatched": {},
    "unused": STACK | {"stray": None, "nett/{l}/w : i o": "blocks/v : l o i"},
    "sizes": {"net/{l}/w : i o n": "blocks/w : l o i n", "stray": None},
    "torn": {"net/{l=0,1,2,3}/w : i o": "blocks/w : l o i", "stray": None},
    "values": {
        "net/{l}/w : i o": ("blocks/w : l o i", {"scale": 1e300}),
        "stray": None,
    },
    "ambiguous": {
        ("net/{l}/{k} : i o", "{k}/{l}/w : i o"): "blocks/{k} : l o [i i]",
        "stray": None,
    },
    "clash": STACK | {"stray": "blocks/w"},
}


@pytest.mark.parametrize("name", WRITE)
@pytest.mark.parametrize("kind", FAULTY)
def test_errors_of_rows_that_make_nothing_selected_do_not_matter(tmp_path, name, kind):
    WRITE[name](tmp_path / name, TREE)
    m = ta.Migration(HEAD | FAULTY[kind])
    for strict in (True, False):
        loaded = ta.load(
            tmp_path / name, target(), where="out", migration=m, strict=strict
        )
        assert loaded["out"]["kernel"].tolist() == [0, 1, 2, 3]
        assert not loaded["blocks"]["w"].any()
    report = ta.compare_checkpoint(tmp_path / name, target(), where="out", migration=m)
    assert report.fits
    assert report.restored == ("out/kernel",)
    assert report.kept == ("blocks/w",)


@pytest.mark.parametrize("name", WRITE)
@pytest.mark.parametrize("kind", FAULTY)
@pytest.mark.parametrize("where", ["**", "blocks", "{blocks,out}"])
def test_errors_of_rows_that_make_something_selected_are_raised(
    tmp_path, name, kind, where
):
    WRITE[name](tmp_path / name, TREE)
    unused = {"nett/{l}/w : i o": "blocks/w : l o i", "stray": None}
    m = ta.Migration(HEAD | (unused | STACK if kind == "unused" else FAULTY[kind]))
    with pytest.raises(ta.MigrationError):
        ta.load(tmp_path / name, target(), where=where, migration=m)
    # The row of the head is well.
    part = ta.load(tmp_path / name, target(), where="out", migration=m)
    assert part["out"]["kernel"].tolist() == [0, 1, 2, 3]


@pytest.fixture
def file(tmp_path):
    ta.save(tmp_path / "x.safetensors", TREE)
    return tmp_path / "x.safetensors"


def test_a_selected_leaf_without_a_row_names_the_leaves_that_no_row_takes(file):
    m = ta.Migration(HEAD | {"net/{l}/w": None})
    with pytest.raises(ta.MigrationError) as caught:
        ta.load(file, target(), where="blocks", migration=m)
    assert "missing 'blocks/w'" in str(caught.value)
    assert "'stray'" in str(caught.value)


def test_of_one_row_only_the_groups_of_selected_leaves_matter(tmp_path):
    file = tmp_path / "x.safetensors"
    layers = {"a": range(3), "b": (0, 2)}
    ta.save(file, {k: {str(n): np.full(2, n) for n in layers[k]} for k in layers})
    m = ta.Migration({"{k}/{l} : e": "{k} : l e"})
    like = {"a": np.zeros((3, 2), int), "b": np.zeros((3, 2), int)}
    loaded = ta.load(file, like, where="a", migration=m)
    assert loaded["a"].tolist() == [[0, 0], [1, 1], [2, 2]]
    with pytest.raises(ta.MigrationError, match=r"'b/0', 'b/2' without 'b/1'"):
        ta.load(file, like, where="b", migration=m)


def test_a_selected_leaf_of_another_shape_is_an_error_and_another_one_is_not(file):
    m = ta.Migration(HEAD | STACK | {"stray": None})
    with pytest.raises(ta.MigrationError, match=r"float32\[3,3,2\]"):
        ta.load(file, target(4), where="blocks", migration=m)
    assert ta.load(file, target(4), where="out", migration=m)["out"]["kernel"][3] == 3


def test_what_is_stored_under_selected_names_and_not_in_the_target_is_unexpected(file):
    m = ta.Migration(HEAD | {"net/{l}/w": None, "stray": "out/bias"})
    with pytest.raises(ta.MigrationError, match="unexpected 'out/bias'"):
        ta.load(file, target(), where="out", migration=m)


def test_zeros_and_kept_values_are_only_asked_for_where_they_are_selected(tmp_path):
    file = tmp_path / "x.safetensors"
    ta.save(file, {"a": np.ones(2)})
    m = ta.Migration({"a": "a"}, new={"b": "target", "c": "zeros"})
    abstract = {
        path: jax.ShapeDtypeStruct((size,), "float64")
        for path, size in {"a": 2, "b": 3, "c": 3}.items()
    }
    with pytest.raises(ta.MigrationError, match="'b'"):
        ta.load(file, abstract, migration=m)
    loaded = ta.load(file, abstract, where="{a,c}", migration=m)
    assert loaded["a"].tolist() == [1, 1]
    assert loaded["c"].tolist() == [0, 0, 0]


def test_without_a_target_every_row_counts(file):
    with pytest.raises(ta.MigrationError, match="'stray'"):
        ta.load(file, where="out", migration=ta.Migration(HEAD | STACK))


def test_of_several_migrations_that_make_what_is_selected_the_whole_one_is_taken(file):
    whole = ta.Migration(HEAD | STACK | {"stray": None})
    other = ta.Migration(HEAD | {"nett/{l}/w : i o": "blocks/w : l o i"})
    report = ta.compare_checkpoint(
        file, target(), where="out", migration=[other, whole]
    )
    assert report.migration == 1
    # Neither is whole, and one makes what is selected.
    part = ta.Migration({"head": "blocks/w"})
    assert (
        ta.compare_checkpoint(
            file, target(), where="out", migration=[part, other]
        ).migration
        == 1
    )


def test_a_where_that_matches_nothing_says_which_names_it_selects_by(file):
    m = ta.Migration(HEAD | STACK | {"stray": None})
    for call in (ta.load, ta.compare_checkpoint):
        with pytest.raises(ta.UnusedRuleError) as caught:
            call(file, target(), where="net", migration=m)
        assert "where= selects leaves of the target by their names" in str(caught.value)
        assert "param_mask" not in str(caught.value)
    with pytest.raises(ta.UnusedRuleError, match="Correct or remove it") as caught:
        ta.load(file, where="haed")
    assert "where= selects by the names in the checkpoint" in str(caught.value)
    assert "did you mean 'head'" in str(caught.value)
    with pytest.raises(ta.UnusedRuleError, match="where= selects by the new names"):
        ta.load(file, where="net", migration=m)


def test_a_function_as_target_is_an_error_that_says_what_to_pass(file):
    def init():
        return target()

    for call in (ta.load, ta.compare_checkpoint):
        for migration in (None, ta.Migration(HEAD | STACK | {"stray": None})):
            with pytest.raises(ta.CheckpointError, match=r"jax\.eval_shape\(init\)"):
                call(file, init, migration=migration)
    with pytest.raises(ta.CheckpointError, match=r"Pass what it returns: dict\(\)"):
        ta.load(file, dict)


def test_shardings_as_target_are_an_error_that_says_what_to_pass(file):
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("d",))
    specs = jax.tree.map(lambda _: jax.sharding.PartitionSpec(), TREE)
    shardings = ta.named_shardings(TREE, {"**": jax.sharding.PartitionSpec()}, mesh)
    for places, kind in ((shardings, "NamedSharding"), (specs, "P")):
        with pytest.raises(ta.CheckpointError, match=rf"a {kind}\w* at 'head'"):
            ta.load(file, places)
    # What the message proposes.
    shapes = jax.eval_shape(lambda: TREE)
    like = jax.tree.map(lambda x, s: x.update(sharding=s), shapes, shardings)
    assert ta.load(file, like)["head"].sharding == shardings["head"]


@pytest.mark.parametrize("has_target", [False, True])
def test_a_where_that_matches_nothing_asks_no_function_about_other_leaves(
    tmp_path, has_target
):
    tree = {"w": np.ones((2, 3), np.float32)}
    file = tmp_path / "x.safetensors"
    ta.save(file, tree)
    where = ["nothing", ta.leaf(lambda leaf: leaf.shape[1] == 3)]
    with pytest.raises(ta.UnusedRuleError, match="where= selects"):
        ta.load(file, tree if has_target else None, where=where)
