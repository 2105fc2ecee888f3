"""The configuration of every test: devices, strict JAX, repeatable examples.

Environment variables must be set before JAX is first imported, hence the late imports.
"""

from __future__ import annotations

import collections
import gc
import os
import zlib
from collections.abc import Iterator
from importlib.metadata import version

# The collector looks less often at what was imported, and at programs that JAX keeps.
# ``gc.freeze`` is for single tests: Hypothesis 6.120 asks the collector who holds its
# random state.
gc.set_threshold(10_000, 20, 50)

EIGHT_DEVICES = "--xla_force_host_platform_device_count=8"

# The CPU is the default; the environment may choose another platform.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Several test processes share one accelerator only if none takes all its memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Most tests compile small programs once. Both sides of every comparison are compiled
# with the same flags; ``make test-full`` compiles as users do.
CHEAP_COMPILATION = [
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
]
# XLA ends the process if it does not know a flag, and later versions lack this one.
if [int(part) for part in version("jaxlib").split(".")[:2]] <= [0, 10]:
    CHEAP_COMPILATION += ["--xla_cpu_use_fusion_emitters=false"]
for flags in ([EIGHT_DEVICES], CHEAP_COMPILATION):
    if flags[0].split("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags])

import jax  # noqa: E402
import pytest  # noqa: E402
from forks import IMPORTS, Forks  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402
from jax._src.interpreters import mlir  # noqa: E402

import treeadapt.errors  # noqa: E402

# JAX makes a new MLIR context for each program, a quarter of the time that a small one
# takes to compile; here all share one.
if hasattr(mlir, "make_ir_context") and CHEAP_COMPILATION[0] in os.environ["XLA_FLAGS"]:
    SHARED_CONTEXT = mlir.make_ir_context()
    mlir.make_ir_context = lambda: SHARED_CONTEXT

# What fails while it explains an error is a defect: here it is not hidden.
treeadapt.errors.RAISES_IN_EXPLANATIONS = True

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# The same examples on every run and machine: a failure means a change, never chance. An
# example's time shows how busy the machine is, not whether a law holds.
settings.register_profile(
    "default",
    max_examples=100,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
# ``--hypothesis-profile=full`` (``make test-full``): twenty times as many, new each.
settings.register_profile(
    "full", settings.get_profile("default"), max_examples=2_000, derandomize=False
)
# ``--hypothesis-profile=quick``: a first look while writing.
settings.register_profile("quick", settings.get_profile("default"), max_examples=25)
settings.load_profile("default")


#: Cases of one test that ``make test`` runs; ``make test-slow`` runs the others.
CASES = 6


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by ``-m`` and ``-k``
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave all but a few cases of each test to ``make test-slow``.

    They are spread over the cases, and begin elsewhere in each test: so every tree of
    the shared table is among those of some laws.
    """
    cases: dict[str, list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow") is None:
            cases[item.nodeid.partition("[")[0]].append(item)
    for test, own in cases.items():
        first, count = zlib.crc32(test.encode()), len(own)
        few = {(first + n * count // CASES) % count for n in range(CASES)}
        for place, item in enumerate(own):
            if place not in few and count > CASES:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def fresh() -> Iterator[Forks]:
    """Run programs in processes that have imported what treeadapt does, not itself."""
    forks = Forks(IMPORTS, "-W", "error")
    yield forks
    forks.close()


@pytest.fixture
def small_heap() -> Iterator[None]:
    """Let the collector look only at what the test makes, for tests that call it."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def standard_promotion() -> Iterator[None]:
    """Let JAX promote ranks and dtypes, for tests that run another library's maths."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield
