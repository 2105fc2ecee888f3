"""Migrations: planning many leaves, and moving a gigabyte as NumPy would.

The arrays are those of a Llama under its published names; the result is the layout of
a model that scans its layers. The formulas next to ours are those of a conversion
script: reshape, transpose and ``np.stack``. Both keep the order of the sources in
memory where axes are only transposed, so neither pays for what the other leaves to the
reader. Where a head is reshaped, both copy it.

Large arrays come from the system page by page, and touching a page first is most of
the cost. ``first touch`` gives every result such memory; ``warm`` lets it take memory
that an earlier result has touched, as far as the C library can be told to.
"""

from __future__ import annotations

import ctypes
import functools
import re
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

import treeadapt as ta
from benchmarks import models
from benchmarks.harness import Contender, Race, Result, Target, figure
from treeadapt.migrations.moved_array import moved_arrays
from treeadapt.trees import arrays as memory

TOPIC = "migrations"

EXPERTS = {
    "model.layers.{l}.mlp.experts.{x}.{n=gate,up,down}_proj.weight : o i": (
        "layers/moe/{n}/kernel : x l i o"
    )
}
_EXPERT = re.compile(
    r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight"
)
_LAYER = "model.layers.{l}."
_HEAD = 64
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of mallopt(3)


def races(
    experts: int = 128,
    layers: int = 5,
    width: int = 2_048,
    hidden: int = 5_632,
    words: int = 8_000,
) -> Iterator[Race]:
    """Yield the races: a table of many leaves, and one of about a gigabyte."""
    leaves = _experts(experts)
    names = [*leaves]
    migration = ta.Migration(EXPERTS)
    yield Race(
        topic=TOPIC,
        work="plan 3 stacks of experts, on shapes",
        size=len(leaves),
        contenders={
            "treeadapt": lambda: migration.plan(leaves),
            "regex loop": lambda: _grouped(names),
        },
        baseline="regex loop",
    )
    arrays = _llama(layers, width, hidden, words)
    for axis, rotary in ((0, False), (1, True)):
        table = _migration(axis, rotary=rotary)
        formulas = _formulas(arrays, layers, axis, rotary=rotary)
        what = "stack on axis 1, rotary heads" if rotary else "stack on axis 0"
        for warm in (False, True):
            yield Race(
                topic=TOPIC,
                work=f"{what}, {'warm' if warm else 'first touch'}",
                size=len(arrays),
                contenders={
                    "treeadapt": _with_memory(lambda m=table: m(arrays), warm=warm),
                    "NumPy formulas": _with_memory(formulas, warm=warm),
                },
                baseline="NumPy formulas",
                # The system hands out pages ten times slower in some runs than others.
                targets={"treeadapt": Target(at_most=1.2)} if warm else {},
            )


def figures(
    experts: int = 128,
    layers: int = 5,
    width: int = 2_048,
    hidden: int = 5_632,
    words: int = 8_000,
) -> Iterator[Result]:
    """Measure the seconds of a plan, and the memory that moving and loading need."""
    leaves = _experts(experts)
    migration = ta.Migration(EXPERTS)
    yield figure(
        TOPIC,
        "seconds to plan 3 stacks of experts",
        len(leaves),
        "treeadapt",
        statistics.median(_seconds(lambda: migration.plan(leaves)) for _ in range(3)),
        of="a second",
        target=Target(at_most=1),
    )
    arrays = _llama(layers, width, hidden, words)
    migration = _migration(1, rotary=True)
    group = migration.plan(arrays).peak_bytes
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "llama.safetensors"
        ta.save(file, arrays)
        runs = {
            "moving": lambda: migration(arrays),
            "ta.load(migration=)": lambda: ta.load(file, migration=migration),
        }
        for work, run in runs.items():
            yield figure(
                TOPIC,
                f"peak memory of {work} beyond source and result",
                len(arrays),
                "treeadapt",
                _beyond_result(run) / group,
                of="largest group",
                target=Target(at_most=1.05),
            )
        yield from _chained(file, arrays)
    yield from _nested(layers, width)


def _chained(file: Path, arrays: dict[str, np.ndarray]) -> Iterator[Result]:
    """Compare two tables one after the other with one that does both."""
    one = _migration(0, rotary=False)
    rows: list[tuple[str, str]] = []
    for number, (source, target) in enumerate(_table(0, rotary=False).items()):
        name, _, axes = source.partition(" : ")
        head, _, new_axes = target.partition(" : ")
        each = [axis for axis in new_axes.split() if axis != "l"]
        between = head.replace("layers/", f"{{l}}/{number}/") if "{l}" in name else head
        rows.append((source, f"{between} : {' '.join(each)}" if axes else target))
    two = ta.Migration(rows, sizes={"d": _HEAD})
    stacked = [
        (row[1], target)
        for row, target in zip(rows, _table(0, rotary=False).values(), strict=True)
        if "{l}" in row[1]
    ]
    stacked += [(row[1], row[1]) for row in rows if "{l}" not in row[1]]
    chain = two.then(ta.Migration(stacked))
    runs = {"one table": one, "two tables": chain}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(5):
        for name, migration in runs.items():
            load = functools.partial(ta.load, file, migration=migration)
            seconds[name].append(_seconds(load))
    pairs = zip(seconds["two tables"], seconds["one table"], strict=True)
    yield figure(
        TOPIC,
        "load through two tables",
        len(arrays),
        "treeadapt",
        statistics.median(a / b for a, b in pairs),
        of="one table that does both",
        target=Target(at_most=1.15),
    )
    plan = chain.plan(arrays)
    made: dict[str, Any] = dict(plan.source)
    for table in plan.tables:
        for group in table.groups:
            made |= moved_arrays(group, made, {})
    array = made["layers/gate"]
    layers, width, hidden = array.shape
    quarter = (slice(0, layers), slice(0, width), slice(0, hidden // 4))
    whole = (slice(0, layers), slice(0, width), slice(0, hidden))
    yield figure(
        TOPIC,
        "bytes that one of four devices reads through two tables",
        len(arrays),
        "treeadapt",
        array.cost([quarter])[0] / array.cost([whole])[0],
        of="all bytes",
        target=Target(at_most=0.26),
    )


def _nested(layers: int, width: int) -> Iterator[Result]:
    """Compare parts nested in an axis with the formula of NumPy."""
    groups, queries = max(1, width // (4 * _HEAD)), 4
    shape = (groups * (queries + 2) * _HEAD, width)
    arrays = {f"{n}/qkv": np.ones(shape, np.float32) for n in range(layers)}
    parts = ("q : n (g r d) e", "k : n (g d) e", "v : n (g d) e")
    table = {"{n}/qkv : (g [(r d) d d]) e": parts}
    migration = ta.Migration(table, sizes={"g": groups, "d": _HEAD})

    def formula() -> dict[str, np.ndarray]:
        split = [x.reshape(groups, queries + 2, _HEAD, width) for x in arrays.values()]
        cuts = {"q": slice(queries), "k": slice(queries, -1), "v": slice(-1, None)}
        return {
            name: np.stack([x[:, cut].reshape(-1, width) for x in split])
            for name, cut in cuts.items()
        }

    formula()
    pairs = [(_seconds(lambda: migration(arrays)), _seconds(formula)) for _ in range(7)]
    yield figure(
        TOPIC,
        "parts nested in an axis, moved and stacked",
        layers,
        "treeadapt",
        statistics.median(ours / theirs for ours, theirs in pairs),
        of="NumPy's formula",
        target=Target(at_most=1.2),
    )


def _experts(count: int) -> dict[str, Any]:
    made = {}
    for layer in range(48):
        for expert in range(count):
            at = f"model.layers.{layer}.mlp.experts.{expert}"
            for name in ("gate", "up", "down"):
                shape = (2_048, 768) if name == "down" else (768, 2_048)
                made[f"{at}.{name}_proj.weight"] = jax.ShapeDtypeStruct(
                    shape, "float32"
                )
    return made


def _grouped(names: list[str]) -> dict[str, dict[tuple[int, int], str]]:
    """Group names by what becomes one array, and check nothing."""
    groups: dict[str, dict[tuple[int, int], str]] = {}
    for name in names:
        found = _EXPERT.fullmatch(name)
        assert found is not None
        layer, expert, kind = found.groups()
        groups.setdefault(kind, {})[int(layer), int(expert)] = name
    return groups


def _llama(layers: int, width: int, hidden: int, words: int) -> dict[str, np.ndarray]:
    few = max(width // 8, _HEAD)  # an eighth of the heads for keys and values
    shapes = models.llama(
        layers, width=width, queries=width, keys=few, hidden=hidden, words=words
    )
    return {path: np.ones(spec.shape, np.float32) for path, spec in shapes.items()}


def _table(axis: int, *, rotary: bool) -> dict[str, Any]:
    """Return the rows: layers on an axis, halves of rotary heads side by side."""
    d, to_d = ("two d", "(d two)") if rotary else ("d", "d")

    def to(name: str, first: str, *rest: str) -> str:
        order = (first, "l") if axis else ("l", first)
        return f"layers/{name} : {' '.join((*order, *rest))}"

    attention = f"{_LAYER}self_attn."
    return {
        "model.embed_tokens.weight": "embed",
        f"{attention}q_proj.weight : (h {d}) e": to("q", "e", "h", to_d),
        attention + f"{{p=k,v}}_proj.weight : (h {d}) e": to("{p}", "e", "h", to_d),
        f"{attention}o_proj.weight : e (h {d})": to("o", "h", to_d, "e"),
        _LAYER + "mlp.{p=gate,up}_proj.weight : f e": to("{p}", "e", "f"),
        f"{_LAYER}mlp.down_proj.weight : e f": to("down", "f", "e"),
        _LAYER + "{n}_layernorm.weight : e": to("{n}", "e"),
        "model.norm.weight": "norm",
        "lm_head.weight : v e": "head : e v",
    }


def _migration(axis: int, *, rotary: bool) -> ta.Migration:
    sizes = {"two": 2, "d": _HEAD // 2} if rotary else {"d": _HEAD}
    return ta.Migration(_table(axis, rotary=rotary), sizes=sizes)


def _formulas(
    arrays: dict[str, np.ndarray], layers: int, axis: int, *, rotary: bool
) -> Callable[[], dict[str, np.ndarray]]:
    """Return the same work, as a conversion script has it."""

    def heads(w: np.ndarray) -> np.ndarray:
        if not rotary:
            return w.T.reshape(w.shape[1], -1, _HEAD)
        w = w.reshape(-1, 2, _HEAD // 2, w.shape[1])
        return w.transpose(3, 0, 2, 1).reshape(w.shape[3], -1, _HEAD)

    def out(w: np.ndarray) -> np.ndarray:
        if not rotary:
            return w.T.reshape(-1, _HEAD, w.shape[0])
        w = w.reshape(w.shape[0], -1, 2, _HEAD // 2)
        return w.transpose(1, 3, 2, 0).reshape(-1, _HEAD, w.shape[0])

    formulas: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "self_attn.q_proj": heads,
        "self_attn.k_proj": heads,
        "self_attn.v_proj": heads,
        "self_attn.o_proj": out,
        "mlp.gate_proj": np.transpose,
        "mlp.up_proj": np.transpose,
        "mlp.down_proj": np.transpose,
        "input_layernorm": np.asarray,
        "post_attention_layernorm": np.asarray,
    }

    def run() -> dict[str, np.ndarray]:
        made = {
            "embed": arrays["model.embed_tokens.weight"],
            "norm": arrays["model.norm.weight"],
            "head": arrays["lm_head.weight"].T,
        }
        for name, formula in formulas.items():
            new = name.split(".")[-1].removesuffix("_proj").removesuffix("_layernorm")
            stacked = np.stack(
                [
                    formula(arrays[f"model.layers.{layer}.{name}.weight"])
                    for layer in range(layers)
                ]
            )
            # A view: stacking on another axis would fill memory in steps.
            made[f"layers/{new}"] = np.moveaxis(stacked, 0, axis)
        return made

    return run


def _with_memory(run: Callable[[], Any], *, warm: bool) -> Contender:
    """Let results have memory that an earlier one touched, or none such.

    Without glibc the C library does as it likes, and both are the same.
    """
    library = ctypes.CDLL(None)

    def prepare() -> None:
        if hasattr(library, "mallopt"):
            library.mallopt(_M_MMAP_MAX, 0 if warm else 65_536)
            library.mallopt(_M_TRIM_THRESHOLD, -1 if warm else 128 * 1_024)
            if not warm:
                library.malloc_trim(0)

    return Contender(run=lambda _: run(), fresh=prepare)


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _beyond_result(run: Callable[[], Any]) -> int:
    """Return the bytes that were held at most, less those that are still held."""
    # Python counts no pages that an array asked the system for.
    own_pages, memory._OWN_PAGES_BYTES = memory._OWN_PAGES_BYTES, 2**62
    tracemalloc.start()
    try:
        made = run()
        held, most = tracemalloc.get_traced_memory()
        del made
        return most - held
    finally:
        tracemalloc.stop()
        memory._OWN_PAGES_BYTES = own_pages
