"""Every ``>>>`` in a docstring, in ``README.md`` and under ``docs/`` runs as printed.

pytest's own doctest collection would not pass the names below to modules outside
``tests/``, and would treat the closing fence of a Markdown example as output.
"""

from __future__ import annotations

import doctest
import importlib
import re
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
PAGES = sorted(
    str(file.relative_to(REPOSITORY))
    for file in [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]
    if ">>> " in file.read_text("utf-8")
)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    module = importlib.import_module(name)
    # The names of the module itself take precedence over ours.
    names = NAMES | vars(module)
    _run(doctest.DocTestFinder().find(module, name, globs=names))


@pytest.mark.parametrize("name", PAGES)
def test_page_examples(name):
    _run([_page(name, (REPOSITORY / name).read_text("utf-8"))])


def test_a_wrong_example_fails():
    page = "```python\n>>> 1 + 1\n3\n```\n"
    with pytest.raises(pytest.fail.Exception, match="Got:\n    2"):
        _run([_page("wrong.md", page)])


def _page(name: str, text: str) -> doctest.DocTest:
    without_fences = re.sub(r"^ *```.*$", "", text, flags=re.MULTILINE)
    return doctest.DocTestParser().get_doctest(
        without_fences, dict(NAMES), name, name, 0
    )


def _run(examples: Iterable[doctest.DocTest]) -> None:
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=OPTIONS)
    for example in examples:
        runner.run(example, out=report.append)
    if report:
        pytest.fail("".join(report), pytrace=False)
