"""Drafts: the seconds and the memory that writing a table from both sides takes.

Schemas have the published sizes: Llama 3.1 8B, and a mixture of experts whose kernels
become three arrays. Values are those of a small Llama with the same names, and of the
22,213 names of Qwen 3.5; each number of the target is looked up in the source.
"""

from __future__ import annotations

import re
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

import treeadapt as ta
from benchmarks import models
from benchmarks.harness import Race, Result, Target, figure
from benchmarks.published_names import qwen3_moe

TOPIC = "drafts"

_MOST_SECONDS = 15
_NUMBER = re.compile(r"(?<![0-9])[0-9]+(?![0-9])")


def races(layers: int = 32, experts: int = 128) -> Iterator[Race]:
    """Yield the races: drafts, next to one pass over all names."""
    for work, source, target in _pairs(layers, experts):
        yield Race(
            topic=TOPIC,
            work=work,
            size=len(source),
            contenders={
                "treeadapt": lambda a=source, b=target: ta.draft_migration(a, b),
                "numbers of all names": lambda a=source: _templates(a),
            },
            baseline="numbers of all names",
        )


def figures(layers: int = 32, experts: int = 128) -> Iterator[Result]:
    """Measure seconds of the processor, and the peak of memory, of each draft."""
    for work, source, target in _pairs(layers, experts):
        seconds, peak = _measured(lambda a=source, b=target: ta.draft_migration(a, b))
        yield figure(
            TOPIC,
            f"CPU seconds: {work}",
            len(source),
            "treeadapt",
            seconds,
            of="a second",
            target=Target(at_most=_MOST_SECONDS),
        )
        yield figure(
            TOPIC,
            f"peak memory: {work}",
            len(source),
            "treeadapt",
            peak / 2**20,
            of="a MiB",
            target=Target(at_most=256),
        )


def _templates(leaves: dict[str, Any]) -> set[str]:
    return {_NUMBER.sub("#", path) for path in leaves}


def _measured(run: Callable[[], Any]) -> tuple[float, int]:
    run()
    times = []
    for _ in range(3):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    tracemalloc.start()
    run()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return statistics.median(times), peak


def _pairs(
    layers: int, experts: int
) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield what is drafted, and both sides."""
    small = _llama(layers, width=22, head=14, heads=6, hidden=13, words=37)
    random = np.random.default_rng(0)
    source = {
        path: random.normal(size=leaf.shape).astype("float32")
        for path, leaf in small.items()
    }
    table = ta.Migration(_LLAMA, sizes={"d": 14})
    yield "Llama 8B's names, values of a small model", source, table(source)
    large = _llama(
        layers, width=4_096, head=128, heads=32, hidden=14_336, words=128_256
    )
    table = ta.Migration(_LLAMA, sizes={"d": 128})
    yield "Llama 8B, schemas", large, table(large)
    shapes = {"gate": (768, 2_048), "up": (768, 2_048), "down": (2_048, 768)}
    at = "model.layers.{}.mlp.experts.{}.{}_proj.weight"
    kernels = {
        at.format(layer, x, name): jax.ShapeDtypeStruct(shape, "bfloat16")
        for layer in range(48)
        for x in range(experts)
        for name, shape in shapes.items()
    }
    table = ta.Migration(
        {
            "model.layers.{l}.mlp.experts.{x}.{n=gate,up,down}_proj.weight : o i": (
                "blocks/experts/{n} : l x i o"
            )
        }
    )
    yield "experts to 3 arrays, schemas", kernels, table(kernels)
    if experts < 128:  # a quick run
        return
    tiny = {
        path: random.normal(size=(7,) if "norm" in path else (7, 5)).astype("float32")
        for path in qwen3_moe()
    }
    table = ta.Migration(_QWEN, sizes={"i": 4})
    yield "22,213 names, values of a small model", tiny, table(tiny)


_AT = "model/language_model/layers"
_QWEN = {
    _AT + "/{l}/mlp/experts/{x}/{n}_proj/weight : f e": (
        "layers/experts/{n}/kernel : l x e f"
    ),
    _AT + "/{(b i)}/{kind}_attn/{rest:**} : ...": "blocks/{i}/{kind}/{rest} : b ...",
    _AT + "/{l}/{rest:**} : ...": "layers/{rest} : l ...",
    "{rest:**}": "other/{rest}",
}
_LLAMA = {
    "model.embed_tokens.weight": "embed/embedding",
    "model.layers.{l}.self_attn.{p=q,k,v}_proj.weight : (h d) e": (
        "blocks/{p=query,key,value}/kernel : l e h d"
    ),
    "model.layers.{l}.self_attn.o_proj.weight : e (h d)": "blocks/out/kernel : l h d e",
    "model.layers.{l}.mlp.{m}_proj.weight : o i": "blocks/{m}/kernel : l i o",
    "model.layers.{l}.{n}_layernorm.weight : e": "blocks/{n}_norm/scale : l e",
    "model.norm.weight": "norm/scale",
    "lm_head.weight : v e": "head/kernel : e v",
}


def _llama(layers: int, *, head: int, heads: int, **sizes: int) -> dict[str, Any]:
    return models.llama(layers, queries=heads * head, keys=2 * head, **sizes)
