"""Stable names for every leaf of any parameter tree, and Optax on all of it.

Two ways in. **Your own loop**: ``split`` a model into plain params and the rest, use
plain Optax, ``merge`` inside the loss. **Someone else's loop**: hand it rules and
selectors, which Optax takes wherever it takes labels and masks.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any


def _rooms() -> dict[str, str]:
    """Read from the stub next to this file which room each public name is in."""
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text("utf-8"))
    return {
        alias.name: str(node.module)
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


_ROOMS = _rooms()
__all__ = sorted(name for name in _ROOMS if not name.startswith("_"))


def __getattr__(name: str) -> Any:
    """Import a public name from its room, the first time that it is asked for."""
    if name not in _ROOMS:
        raise AttributeError(f"module 'treeadapt' has no attribute {name!r}")
    found = getattr(importlib.import_module(_ROOMS[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_ROOMS})
