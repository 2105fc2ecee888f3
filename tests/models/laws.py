"""What holds for each table that reads a PyTorch model into a target.

A test class takes these laws by inheriting from ``Laws``; its fixture ``setting`` says
for which table and target.
"""

from __future__ import annotations

import importlib
import tomllib
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest
from mutations import with_rows, wrong_tables
from tiny import HAS_TORCH, MIGRATIONS, Tiny, transformers

import treeadapt as ta

needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="PyTorch is not installed")


class Setting(NamedTuple):
    """What the tests of one table and target share; made once.

    Attributes:
        tiny: the model.
        folder: of the PyTorch file, if there is PyTorch.
        source: the arrays of that file.
        target: the model to fill, or its parameters, as shapes.
        table: file of the migration.
        migration: of that file.
        linear: the same without offsets, for gradients.
        answer: what the target answers, a function of the filled one.
        expected: PyTorch's answer, else that of transformers' own conversion to Flax.
    """

    tiny: Tiny
    folder: Path
    source: dict[str, np.ndarray]
    target: Any
    table: Path
    migration: ta.Migration
    linear: ta.Migration
    answer: Callable[[Any], np.ndarray]
    expected: np.ndarray

    @property
    def params(self) -> dict[str, np.ndarray]:
        """The arrays of the file without its buffers."""
        buffers = self.tiny.buffers()
        return {name: self.source[name] for name in self.source if name not in buffers}

    def filled(self, arrays: dict[str, Any]) -> Any:
        """The target with what the migration makes of arrays."""
        return ta.from_flat_dict(self.target, self.migration(arrays, self.target))

    def moved(self, arrays: dict[str, Any]) -> Any:
        """The target with gradients or updates: no number is added to them."""
        return ta.from_flat_dict(self.target, self.linear(arrays, self.target))


def make_setting(
    tiny: Tiny,
    file: Path,
    folder: Path,
    target: Any,
    answer: Callable[[Any], np.ndarray],
) -> Setting:
    """Save the model of PyTorch, and ask it; ``file`` is the table."""
    if not (HAS_TORCH or tiny.flax):
        pytest.skip("neither PyTorch nor a Flax model is there to answer")
    if HAS_TORCH:
        tiny.save(folder)
        source = ta.to_flat_dict(ta.load(folder))
        expected = tiny.torch_answer(tiny.read_torch(folder))
    else:
        source = tiny.source()
        expected = tiny.flax_answer()(oracle(tiny, source))
    rows = tomllib.loads(file.read_text())["rows"]
    linear = [{k: v for k, v in row.items() if k != "offset"} for row in rows]
    return Setting(
        tiny,
        folder,
        source,
        target,
        file,
        ta.load_migration(file),
        with_rows(file, linear, folder),
        answer,
        expected,
    )


def oracle(tiny: Tiny, source: dict[str, np.ndarray]) -> Any:
    """The Flax parameters that transformers' own conversion gives."""
    # Of the model, the conversion reads no more than this; so none is initialised.
    prefix = getattr(transformers, tiny.flax).base_model_prefix
    model = types.SimpleNamespace(base_model_prefix=prefix, params=tiny.flax_params())
    conversion = importlib.import_module("transformers.modeling_flax_pytorch_utils")
    return conversion.convert_pytorch_state_dict_to_flax(
        {name: source[name] for name in source if name not in tiny.buffers()}, model
    )


class Laws:
    """The laws, of a fixture ``setting``."""

    def test_the_answers_are_equal(self, setting):
        answer = setting.answer(setting.filled(setting.source))
        assert np.std(setting.expected) > 0.01
        np.testing.assert_allclose(answer, setting.expected, atol=1e-5, rtol=1e-5)

    def test_the_way_back_gives_every_bit(self, setting):
        back = setting.migration.inverse(setting.filled(setting.source))
        assert not ta.tree_diff(back, setting.params, values=True)

    @needs_torch
    def test_shards_are_read_and_written_for_pytorch(self, setting, tmp_path):
        params = ta.load(setting.folder, setting.target, migration=setting.migration)
        filled = setting.filled(setting.source)
        assert not ta.tree_diff(params, filled, values=True)
        changed = jax.tree.map(lambda leaf: leaf * 1.5, params)
        back = setting.migration.inverse(changed)
        ta.save(tmp_path / "model", back, max_shard_bytes=8_000)
        assert len([*(tmp_path / "model").glob("*.safetensors")]) > 1
        answer = setting.tiny.torch_answer(setting.tiny.read_torch(tmp_path / "model"))
        np.testing.assert_allclose(
            answer, setting.answer(changed), atol=1e-5 * np.abs(answer).max()
        )

    @needs_torch
    def test_the_schema_lists_what_pytorch_saves(self, setting):
        schema = MIGRATIONS / f"{setting.tiny.names}.schema.toml"
        assert ta.compare_checkpoint(schema, ta.read_metadata(setting.folder)).fits

    def test_adams_state_moves_along(self, setting):
        """A step after the migration equals the migration of a step, bit for bit."""
        migration, tx = setting.migration, optax.adam(1e-2)
        params, state = setting.params, tx.init(setting.params)
        for _ in range(2):
            grads = jax.tree.map(np.cos, params)
            updates, state = tx.update(grads, state, params)
            params = jax.tree.map(np.add, params, updates)
        there = setting.filled(params)
        carried, report = ta.carry_state(tx, there, state, migration=migration)
        assert not report.fresh, report
        grads = jax.tree.map(np.cos, params)
        updates, state = tx.update(grads, state, params)
        moved, carried = tx.update(setting.moved(grads), carried, there)
        assert not ta.tree_diff(moved, setting.moved(updates), values=True)
        again, _ = ta.carry_state(tx, params, carried, migration=migration.inverse)
        assert not ta.tree_diff(again, state, values=True)

    def test_no_mistake_in_the_table_stays_unseen(self, setting, tmp_path):
        """Shapes tell of it, or the answer does."""
        unseen, seen = [], 0
        for mistake, wrong in wrong_tables(setting.table, tmp_path, setting.source):
            try:
                params = wrong(setting.source, setting.target)
            except ta.MigrationError:
                seen += 1
                continue
            answer = setting.answer(ta.from_flat_dict(setting.target, params))
            if np.allclose(answer, setting.expected, atol=1e-3):
                unseen.append(mistake)
            seen += 1
        assert not unseen
        assert seen > 5
