"""``docs/compatibility.md`` is up to date, and the script that writes it can say no."""

from __future__ import annotations

import importlib.util
import re
import sys
import warnings
from pathlib import Path

import jax
import optax
import pytest
from trees import BY_NAME, TREES

import treeadapt as ta

pytestmark = pytest.mark.usefixtures("standard_promotion")

SCRIPT = Path(__file__).parent.parent / "docs" / "scripts" / "compatibility.py"
spec = importlib.util.spec_from_file_location("compatibility", SCRIPT)
compatibility = importlib.util.module_from_spec(spec)
sys.modules["compatibility"] = compatibility
spec.loader.exec_module(compatibility)

PAGE = compatibility.PAGE.read_text("utf-8")


@pytest.fixture(autouse=True)
def _optax_may_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def as_on_the_page(name):
    return re.search(rf"^{re.escape(name)} +([=x-]+)  ([-=≈≠xr]+)$", PAGE, re.MULTILINE)


def test_the_page_has_every_transformation_and_every_kind_of_tree():
    if f"optax {optax.__version__}" not in PAGE:
        pytest.skip("the page was written with another Optax")
    names = [*compatibility.public_names(), *compatibility.USES]
    assert len(names) > 100
    assert [name for name in names if not as_on_the_page(name)] == []
    kinds = [row.name for row in TREES if row.paths]
    assert [kind for kind in kinds if f"| {kind} |" not in PAGE] == []


def test_no_cell_of_the_page_gives_other_numbers_or_raises():
    cells = [as_on_the_page(name) for name in compatibility.public_names()]
    ours = "".join(cell[2] for cell in cells if cell)
    assert set(ours) <= {"=", "≈", "r", "-"}
    assert ours.count("=") > 5_000


@pytest.mark.parametrize("kind", ["Equinox MLP", "NamedTuple", "dataclass"])
def test_cells_are_as_on_the_page(kind):
    index = [row.name for row in TREES if row.paths].index(kind)
    for name in ("adamw", "clip", "partition", "contrib.sam(opaque_mode=True)"):
        makers = compatibility.public_names() | compatibility.USES
        make = makers[name]
        if name not in compatibility.USES:
            make = lambda fn=make, name=name: compatibility.build(name, fn)  # noqa: E731
        case = compatibility._case(name, make)
        cell = compatibility.cell(case, BY_NAME[kind])
        native, ours = as_on_the_page(name).groups()
        assert (cell.native, cell.ours) == (native[index], ours[index])


def test_a_wrapper_that_does_not_hold_is_seen(monkeypatch):
    row = BY_NAME["NamedTuple"]

    def mark(make):
        return compatibility.cell(compatibility.Case("case", make), row).ours

    def noise():
        return optax.add_noise(0.1, 0.5, key=jax.random.key(0))

    def rate():
        return optax.sgd(0.1)

    assert mark(noise) == mark(rate) == compatibility.SAME
    monkeypatch.setattr(ta, "adapt", lambda tx: tx)  # leaves in order of the fields
    assert mark(noise) == compatibility.OTHER
    assert mark(rate) == compatibility.SAME_BITS
    monkeypatch.setattr(ta, "adapt", lambda tx: tx._replace(update=None))
    assert mark(rate) == compatibility.FAILS
    opaque = compatibility.Case("case", rate)
    row = BY_NAME["dataclass"]
    assert compatibility.cell(opaque, row).ours != compatibility.REFUSED


def test_what_needs_unknown_arguments_is_not_left_out_in_silence():
    def new(learning_rate, something: float) -> optax.GradientTransformation:
        return optax.sgd(learning_rate * something)

    assert compatibility._is_factory("new", new)
    with pytest.raises(compatibility._UndefinedError, match="something"):
        compatibility._case("new", lambda: compatibility.build("new", new))
    assert not compatibility._is_factory("l2_loss", optax.l2_loss)
