"""Builds the documentation site: ``make docs``, output in ``docs/_build/html``.

Strict: a warning or a broken reference fails the build. The build does not use the
network.
"""

from __future__ import annotations

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
