"""What must hold if only some of the optional libraries are installed, or none.

``make test-alone`` runs this file and the golden paths once for each library, in a
separate environment. ``TREEADAPT_TEST_ONLY`` names the modules that may exist there, so
an environment with others fails. Nothing here imports an optional library itself.
"""

from __future__ import annotations

import importlib.util
import os
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from golden_trees import LIBRARIES

import treeadapt as ta

#: Modules of optional libraries; a library may install others of them.
OPTIONAL = (
    "attrs",
    "brax",
    "chex",
    "equinox",
    "flax",
    "haiku",
    "orbax",
    "paramax",
    "penzai",
    "rich",
    "safetensors",
)
INSTALLED = tuple(filter(importlib.util.find_spec, OPTIONAL))
#: Format -> file extension, and the modules that its reader and writer need.
FORMATS = {
    "safetensors": (".safetensors", ("safetensors",)),
    "orbax": ("", ("orbax",)),
}

pytestmark = pytest.mark.filterwarnings(
    "ignore::treeadapt.UnstablePathWarning", "ignore::treeadapt.CollectionWarning"
)

each_library = pytest.mark.parametrize(
    "library", [name for name in LIBRARIES if importlib.util.find_spec(name)]
)


def arrays_only(tree):
    """Return whether JAX sees only inexact arrays, and at least one."""
    leaves = jax.tree.leaves(tree)
    return bool(leaves) and all(
        isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.inexact)
        for leaf in leaves
    )


@pytest.mark.skipif(
    "TREEADAPT_TEST_ONLY" not in os.environ, reason="no environment of one library"
)
def test_the_environment_holds_the_libraries_that_it_claims_and_no_other():
    assert tuple(os.environ["TREEADAPT_TEST_ONLY"].split()) == INSTALLED


@pytest.mark.slow
def test_every_public_name_exists_without_importing_a_library(fresh):
    # Optax and JAX import other libraries themselves: chex, with an older Optax.
    program = f"""
    import sys
    print(*(name for name in {OPTIONAL} if name in sys.modules))
    import treeadapt
    for name in treeadapt.__all__:
        getattr(treeadapt, name)
    print(*(name for name in {OPTIONAL} if name in sys.modules))
    """
    done = fresh.run(program)
    assert done.returncode == 0, done.stderr
    given, found = done.stdout.splitlines()
    assert found == given


def structure(tree):
    return jax.tree.structure(ta.split(tree, where=[])[1])


@pytest.mark.slow
@each_library
def test_law_1_every_tree_comes_back(library):
    for name, tree in LIBRARIES[library]().items():
        flat = ta.to_flat_dict(tree)
        params, rest = ta.split(tree, where="**" if flat else [], arrays="all")
        for again in (
            ta.from_state_dict(tree, ta.to_state_dict(tree)),
            ta.from_flat_dict(tree, flat),
            ta.merge(params, rest),
        ):
            assert type(again) is type(tree), name
            assert structure(again) == structure(tree), name
            leaves = ta.to_flat_dict(again)
            assert all(leaves[path] is leaf for path, leaf in flat.items()), name


@pytest.mark.slow
@each_library
def test_law_4_adapt_and_partition_train_every_tree_as_a_flat_dict(library):
    trees = LIBRARIES[library]()
    trained = {name: tree for name, tree in trees.items() if arrays_only(tree)}
    for name, tree in trained.items():
        flat = ta.split(tree)[0]
        if not flat:  # nothing in it trains
            continue
        tx = optax.sgd(1e-2, momentum=0.9)
        grads = ta.map_where(jnp.ones_like, tree, "**")  # ties stay ties
        expected, _ = tx.update(jax.tree.map(jnp.ones_like, flat), tx.init(flat), flat)
        for ours in (ta.adapt(tx), ta.partition({"train": tx}, {"**": "train"})):
            updates, _ = ours.update(grads, ours.init(tree), tree)
            assert jax.tree.structure(updates) == jax.tree.structure(tree), name
            found = ta.to_flat_dict(ta.split(updates)[0])
            assert list(found) == list(expected), name
            assert all(map(np.array_equal, found.values(), expected.values())), name


@each_library
def test_labels_masks_and_reports_of_every_tree(library):
    for name, tree in LIBRARIES[library]().items():
        paths = ta.tree_paths(tree)
        labels = ta.param_labels(tree, {}, default="train")
        assert jax.tree.structure(labels) == jax.tree.structure(tree), name
        if jax.tree.leaves(ta.split(tree, "**" if paths else [], arrays="all")[0]):
            assert any(jax.tree.leaves(ta.param_mask(tree, "**"))), name
        text = str(ta.summarize(tree, statics=True))
        assert all(path in text for path in paths if path.isidentifier()), name


@pytest.mark.parametrize("kind", FORMATS)
def test_a_checkpoint_is_written_and_read_or_the_missing_library_is_named(
    kind, tmp_path
):
    ending, needed = FORMATS[kind]
    file = tmp_path / f"model{ending}"
    tree = {"layers": [np.ones(2), np.zeros((2, 3), np.float32)]}
    missing = [name for name in needed if name not in INSTALLED]
    if missing:
        message = rf"without {missing[0]}\b.*pip install {missing[0]}"
        with pytest.raises(ta.CheckpointError, match=message):
            ta.save(file, tree)
        assert list(tmp_path.iterdir()) == []
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Orbax, about threads
        ta.save(file, tree)
        again = ta.load(file, tree)
    assert not ta.tree_diff(tree, again, values=True)


def test_files_of_numpy_and_flax_are_read_or_the_missing_library_is_named(tmp_path):
    np.savez(tmp_path / "x.npz", w=np.ones(2))
    assert ta.load(tmp_path / "x.npz", {"w": np.zeros(2)})["w"].tolist() == [1, 1]
    (tmp_path / "x.msgpack").write_bytes(b"\x80")
    if "flax" in INSTALLED:
        assert ta.read_metadata(tmp_path / "x.msgpack") == {}
    else:
        with pytest.raises(ta.CheckpointError, match=r"without flax\b"):
            ta.read_metadata(tmp_path / "x.msgpack")


def test_a_url_is_read_or_what_to_install_is_said(tmp_path):
    url = "memory://alone/x.npz"
    if not importlib.util.find_spec("fsspec"):
        with pytest.raises(ta.CheckpointError, match=r"treeadapt\[remote\]"):
            ta.load(url)
        return
    import fsspec

    np.savez(tmp_path / "x.npz", w=np.ones(3))
    store = fsspec.filesystem("memory")
    store.pipe("/alone/x.npz", (tmp_path / "x.npz").read_bytes())
    assert ta.load(url)["w"].tolist() == [1, 1, 1]
    store.rm("/alone", recursive=True)


@pytest.mark.slow
def test_the_command_runs(tmp_path, fresh):
    np.savez(tmp_path / "model.npz", w=np.ones(2))
    program = "import runpy; runpy.run_module('treeadapt', None, '__main__', True)"
    found = fresh.run(program, "show", tmp_path / "model.npz")
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.splitlines()[1].split()[:2] == ["w", "[2]"]
