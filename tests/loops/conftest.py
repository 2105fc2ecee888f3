"""Which libraries are installed, and what they set for all loops."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import jax
import pytest
from loop import SECTIONS

# Importing NetKet would set a mesh of its own for the loops that come after it.
os.environ["NETKET_EXPERIMENTAL_SHARDING"] = "0"


def pytest_report_header() -> list[str]:
    libraries = [name for section in SECTIONS.values() for name in section.needs]
    names = dict.fromkeys(["jax", "optax", *libraries, "keras"])
    return [f"loops: {_installed(name)}" for name in names]


def _installed(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return f"{name} is NOT INSTALLED: its loop is SKIPPED."


@pytest.fixture(autouse=True, scope="package")
def promotion() -> Iterator[None]:
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield
