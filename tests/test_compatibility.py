"""The script that compares every transformation on every kind of tree can fail."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from pathlib import Path

import jax
import optax
import pytest
from trees import BY_NAME

import treeadapt as ta

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]

SCRIPT = Path(__file__).parent.parent / "docs" / "scripts" / "compatibility.py"
spec = importlib.util.spec_from_file_location("compatibility", SCRIPT)
compatibility = importlib.util.module_from_spec(spec)
sys.modules["compatibility"] = compatibility
spec.loader.exec_module(compatibility)


@pytest.fixture(autouse=True)
def _optax_may_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("kind", ["Equinox MLP", "NamedTuple", "dataclass"])
def test_no_cell_gives_other_numbers_or_raises(kind):
    row = BY_NAME[kind]
    expected = compatibility.REFUSED if row.opaque else compatibility.SAME
    for name in ("adamw", "clip", "partition", "contrib.sam(opaque_mode=True)"):
        makers = compatibility.public_names() | compatibility.USES
        make = makers[name]
        if name not in compatibility.USES:
            make = lambda fn=make, name=name: compatibility.build(name, fn)  # noqa: E731
        cell = compatibility.cell(compatibility._case(name, make), row)
        assert cell.ours == expected


def test_a_failing_cell_is_listed():
    cell = compatibility.Cell(native=compatibility.SAME, ours=compatibility.OTHER)
    assert compatibility.failures({"adam": {"dict": cell}}) == [
        "adam on dict: other numbers"
    ]


def test_layers_that_no_way_gives_as_in_the_unrolled_model_are_listed(monkeypatch):
    monkeypatch.setattr(compatibility, "LAYERS", (3,))

    def case(name):
        makers = compatibility.public_names() | compatibility.USES
        make = lambda: compatibility.build(name, makers[name])  # noqa: E731
        return compatibility._case(name, make)

    names = ("centralize", "clip_by_global_norm", "add_noise")
    table = compatibility.layers_table([case(name) for name in names])
    assert table["centralize"] == ("no", compatibility.BITS)
    assert table["clip_by_global_norm"][1] == "no"
    assert [*map(compatibility.is_same, table["clip_by_global_norm"])] == [True, False]
    assert table["add_noise"][1].startswith("refused: ")
    assert compatibility.failed_layers(table) == []
    table["trace"] = "no", "no"
    assert compatibility.failed_layers(table) == ["trace, layers: no, no"]


def test_a_wrapper_that_gives_other_numbers_is_reported(monkeypatch):
    row = BY_NAME["NamedTuple"]

    def mark(make):
        return compatibility.cell(compatibility.Case("case", make), row).ours

    def noise():
        return optax.add_noise(0.1, 0.5, key=jax.random.key(0))

    def rate():
        return optax.sgd(0.1)

    assert mark(noise) == mark(rate) == compatibility.SAME
    monkeypatch.setattr(ta, "adapt", lambda tx: tx)  # leaves in the order of the fields
    assert mark(noise) == compatibility.OTHER
    assert mark(rate) == compatibility.SAME_BITS
    monkeypatch.setattr(ta, "adapt", lambda tx: tx._replace(update=None))
    assert mark(rate) == compatibility.FAILS
    opaque = compatibility.Case("case", rate)
    row = BY_NAME["dataclass"]
    assert compatibility.cell(opaque, row).ours != compatibility.REFUSED


def test_a_transformation_with_unknown_arguments_is_not_silently_left_out():
    def new(learning_rate, something: float) -> optax.GradientTransformation:
        return optax.sgd(learning_rate * something)

    assert compatibility._is_factory("new", new)
    with pytest.raises(compatibility._UndefinedError, match="something"):
        compatibility._case("new", lambda: compatibility.build("new", new))
    assert not compatibility._is_factory("l2_loss", optax.l2_loss)
