"""In a notebook: reports are tables of at most 40 lines, tracebacks are short."""

from __future__ import annotations

import sys
import traceback
import types

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeadapt as ta


def num_lines(html: str) -> int:
    return html.count("<tr>") + html.count("<div>") + 1


def test_a_migration_is_a_table_of_at_most_40_lines():
    rows = {f"old_{n} : i o": f"new_{n} : o i" for n in range(100)}
    html = ta.Migration(rows)._repr_html_()
    assert num_lines(html) <= 40
    assert "100 rows" in html
    assert "and 63 more rows" in html
    assert html.count("old_") == 37


def test_each_part_of_a_row_is_in_the_table():
    table = ta.Migration(
        {
            "w : (h d) e": ("kernel : e h d", {"scale": 2.0}),
            "norm": ("scale", lambda x: x + 1),
            "mask": None,
        },
        sizes={"h": 2},
        new={"bias": "zeros"},
    )
    html = table._repr_html_()
    for text in ("w : (h d) e", "kernel : e h d", "scale = 2.0", "a function"):
        assert text in html
    for text in ("dropped", "sizes: h = 2", "new: &#x27;bias&#x27;"):
        assert text in html
    chain = table.then(ta.Migration({"{rest:**}": "{rest}"}))._repr_html_()
    assert "4 rows of 2 tables, one after the other" in chain


def test_a_plan_keeps_the_sides_of_a_row_apart_whatever_their_names_hold():
    long = "a -> " + "b" * 80
    plan = ta.Migration({"q -> k": "w", long: "c -> d"}).plan(
        {"q -> k": np.ones(2), long: np.ones(2)}
    )
    html = plan._repr_html_().replace("&#x27;", "").replace("&gt;", ">")
    for cells in (("q -> k", "w"), (long, "c -> d")):
        assert all(f">{text}</td>" in html for text in cells)
    lines = repr(plan).splitlines()
    assert "'q -> k' -> 'w': 1 to 1" in lines
    place = lines.index(repr(long))
    assert lines[place + 1] == "    -> 'c -> d': 1 to 1"


def test_a_report_of_carried_state_is_a_table_of_at_most_40_lines():
    params = {f"w{n}": jnp.ones(n % 3 + 1) for n in range(60)}
    saved = optax.adam(1e-3).init({**params, "gone": jnp.ones(2)})
    params["new"] = jnp.ones(3)
    _, report = ta.carry_state(optax.adam(1e-3), params, saved)
    html = report._repr_html_()
    assert num_lines(html) <= 40
    title = str(report).splitlines()[0]
    assert title in html
    for text in ("carried, of the same name", "fresh", "saved, but not used", "gone"):
        assert text in html
    assert all(f"warning: {text[:30]}" in html for text in report.warnings)


@pytest.fixture
def shell(monkeypatch):
    """Stand in for IPython, which asks an exception how to print it."""
    tracebacks = types.SimpleNamespace(
        structured_traceback=lambda kind, error, frames, tb_offset: (
            traceback.format_exception(kind, error, frames)
        )
    )
    module = types.ModuleType("IPython")
    module.get_ipython = lambda: types.SimpleNamespace(InteractiveTB=tracebacks)
    monkeypatch.setitem(sys.modules, "IPython", module)


def frames_of(error: ta.TreeAdaptError) -> list[str]:
    """Return the files of the frames that are printed for an error."""
    lines = "".join(error._render_traceback_()).splitlines()
    return [line for line in lines if line.startswith("  File")]


@pytest.mark.usefixtures("shell")
def test_frames_of_this_package_are_folded_to_the_one_that_was_called():
    tx = ta.partition({"train": optax.adam(1e-3)}, {"hed": "frozen", "**": "train"})
    with pytest.raises(ta.UnusedRuleError) as caught:
        tx.init({"head": np.ones(2)})
    frames = frames_of(caught.value)
    assert len(caught.traceback) > 4
    assert sum("treeadapt/" in line for line in frames) == 1
    assert __file__ in frames[0]
    assert str(caught.value) in "".join(caught.value._render_traceback_())


@pytest.mark.usefixtures("shell")
def test_frames_of_the_caller_between_ours_stay():
    def wrong(leaf):
        raise ta.TreeAdaptError("mine")

    with pytest.raises(ta.TreeAdaptError) as caught:
        ta.map_where(wrong, {"w": np.ones(2)}, "w")
    names = [line.rpartition(" in ")[2] for line in frames_of(caught.value)]
    assert names[-1] == "wrong"


def test_ipython_prints_it_so(capsys):
    IPython = pytest.importorskip("IPython")  # comes with what builds the pages
    shell = IPython.core.interactiveshell.InteractiveShell.instance()
    shell.run_cell("import treeadapt as ta\nta.Migration({'w:i': 'k : i'})")
    text = capsys.readouterr().out
    assert "spaces around" in text
    assert text.count("treeadapt/") == 1
