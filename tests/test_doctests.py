"""Every ``>>>`` in a docstring runs as printed.

pytest's own doctest collection would not pass the names below to modules outside
``tests/``. Pages have no prompts, so that their code pastes; ``test_pages`` runs them.
"""

from __future__ import annotations

import doctest
import importlib
from collections.abc import Iterable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeadapt as ta

# A reader runs the examples in JAX's default configuration, and Optax needs it.
pytestmark = pytest.mark.usefixtures("standard_promotion")

REPOSITORY = Path(__file__).parent.parent
NAMES = {"jax": jax, "jnp": jnp, "np": np, "optax": optax, "ta": ta}
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

MODULES = sorted(
    ".".join(file.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(
        ".__init__"
    )
    for file in (REPOSITORY / "treeadapt").rglob("*.py")
    if file.name != "__main__.py"
)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    if name == "treeadapt.trees.adapters.keras":
        pytest.importorskip("keras", reason="Keras is with the loops of others")
    if name == "treeadapt.trees.adapters.haliax":
        pytest.importorskip("haliax", reason="its releases need an older JAX")
    module = importlib.import_module(name)
    # The names of the module itself take precedence over ours.
    names = NAMES | vars(module)
    _run(doctest.DocTestFinder().find(module, name, globs=names))


def test_pages_have_no_prompts():
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]
    assert len(pages) > 50
    assert not [page.name for page in pages if ">>> " in page.read_text("utf-8")]


def test_a_wrong_example_fails():
    example = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "x", "x", 0)
    with pytest.raises(pytest.fail.Exception, match="Got:\n    2"):
        _run([example])


def _run(examples: Iterable[doctest.DocTest]) -> None:
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=OPTIONS)
    for example in examples:
        runner.run(example, out=report.append)
    if report:
        pytest.fail("".join(report), pytrace=False)
