"""Builds the documentation site: ``make docs``, output in ``docs/_build/html``.

Strict: a warning or a broken reference fails the build. The build does not use the
network.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from docutils import nodes

from treeadapt import __version__

project = "treeadapt"
author = "The treeadapt authors"
copyright = author  # noqa: A001, Sphinx's name for it
release = version = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "scripts", "static"]

myst_heading_anchors = 3
# Pages that say so are notebooks. The build runs them, each time.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 60

# A signature has one parameter a line, with its type; the text says what it holds.
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
maximum_signature_line_length = 72
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
add_module_names = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

nitpicky = True
# Types, which name classes of Python, JAX, Optax and inner rooms.
nitpick_ignore_regex = [
    ("py:class", ".*"),
]

html_theme = "furo"
html_title = f"treeadapt {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
# The dark style that furo chooses underlines names of modules, as if they were links.
pygments_dark_style = "lightbulb"

# The search of the site counts words, and knows no synonyms. These are words that
# people type, with the page that answers; ``scripts/check_search.py`` tries them.
html_search_scorer = str(Path(__file__).parent / "static" / "scorer.js")
SEARCH_WORDS = json.loads((Path(__file__).parent / "search_words.json").read_text())


def add_search_words(app: Any, page: str, source: list[str]) -> None:
    """Put the words of a page into the index, below its title."""
    words = SEARCH_WORDS.get(page, ())
    title, newline, text = source[0].partition("\n")
    if words and title.startswith("# "):
        entries = "".join(f"```{{index}} ! {word}\n```\n" for word in words)
        source[0] = f"{title}{newline}\n{entries}{text}"


def write_list_of_pages(app: Any, error: Exception | None) -> None:
    """Write ``llms.txt``: what is where, a line a page, for readers that are programs.

    Sphinx copies the source of each page, which is its plain text.
    """
    if error is not None:
        return
    lines = [f"# {html_title}", ""]
    for page in sorted(app.env.found_docs):
        title = app.env.titles[page].astext()
        paragraph = app.env.get_doctree(page).next_node(nodes.paragraph)
        about = " ".join(paragraph.astext().split()) if paragraph else ""
        first, stop, _ = about.partition(". ")
        lines.append(f"- [{title}](_sources/{page}.md.txt): {first}{stop.strip()}")
    Path(app.outdir, "llms.txt").write_text("\n".join(lines) + "\n", "utf-8")


def setup(app: Any) -> None:
    """Tell Sphinx of the words, and of the list of pages."""
    app.connect("source-read", add_search_words)
    app.connect("build-finished", write_list_of_pages)
