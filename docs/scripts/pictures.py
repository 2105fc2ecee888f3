"""Draws the pictures of the pages again: python docs/scripts/pictures.py.

A test fails if a picture differs from what this draws.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import treeadapt as ta

PICTURES = Path(__file__).parent.parent / "pictures"


def _array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _mlp(*widths: int) -> dict[str, Any]:
    return {
        f"hidden_{n}": {"kernel": _array(a, b), "bias": _array(b)}
        for n, (a, b) in enumerate(itertools.pairwise(widths))
    }


def gpt2() -> ta.Summary:
    """Return GPT-2 with the rules of the front page."""
    width = 768
    sizes = {
        "attn/c_attn": (width, 3 * width),
        "attn/c_proj": (width, width),
        "mlp/c_fc": (width, 4 * width),
        "mlp/c_proj": (4 * width, width),
    }

    def norm() -> dict[str, Any]:
        return {"scale": _array(width), "bias": _array(width)}

    def block() -> dict[str, Any]:
        made: dict[str, Any] = {"ln_1": norm(), "attn": {}, "ln_2": norm(), "mlp": {}}
        for path, (n_in, n_out) in sizes.items():
            outer, inner = path.split("/")
            made[outer][inner] = {"kernel": _array(n_in, n_out), "bias": _array(n_out)}
        return made

    tree = {
        "wte": {"embedding": _array(50_257, width)},
        "wpe": {"embedding": _array(1_024, width)},
        "h": {str(n): block() for n in range(12)},
        "ln_f": norm(),
    }
    page = (PICTURES.parent / "index.md").read_text("utf-8")
    rules = re.search(r"^rules = ({.*?^})", page, flags=re.DOTALL | re.MULTILINE)
    return ta.summarize(tree, ast.literal_eval(rules[1]) if rules else None)


def agent() -> ta.Summary:
    """Return a PPO agent, its policy's trunk frozen; one rule is misspelt."""
    policy = {"params": _mlp(27, 128, 128, 128, 128, 16)}
    value = {"params": _mlp(27, 256, 256, 256, 1)}
    rules = {
        "policy/params/hidden_{0..3}": "frozen",
        "**/bias": "no_decay",
        "valu/**": "slow",
        "**": "train",
    }
    return ta.summarize({"policy": policy, "value": value}, rules)


def _block(width: int) -> dict[str, Any]:
    sizes = {
        "attention/qkv": (width, 3 * width),
        "attention/out": (width, width),
        "mlp/up": (width, 4 * width),
        "mlp/down": (4 * width, width),
    }
    made: dict[str, Any] = {"norm": {"scale": _array(width)}}
    for path, shape in sizes.items():
        outer, inner = path.split("/")
        made.setdefault(outer, {})[inner] = {"kernel": _array(*shape)}
    return made


def transformer() -> ta.Summary:
    """Return a transformer of 16 blocks whose rates grow towards the head."""
    tree = {
        "embed": _array(32_000, 1_024),
        "blocks": {str(n): _block(1_024) for n in range(16)},
        "head": {"kernel": _array(1_024, 32_000)},
    }
    rates = [(f"blocks/{n}", round(0.8 ** (16 - n), 3)) for n in range(16)]
    rules = ta.Rules([("embed", 0.01), *rates, ("head", 1.0)])
    return ta.summarize(tree, rules)


def scanned() -> ta.Summary:
    """Return a transformer that scans its blocks, the lower half of them frozen."""
    width, layers = 768, 12
    sizes = {
        "attention/out": (width, width),
        "attention/qkv": (width, 3 * width),
        "mlp/down": (4 * width, width),
        "mlp/up": (width, 4 * width),
    }
    blocks: dict[str, Any] = {"norm": {"scale": _array(layers, width)}}
    for path, shape in sizes.items():
        outer, inner = path.split("/")
        blocks.setdefault(outer, {})[inner] = {"kernel": _array(layers, *shape)}
    tree = {
        "embed": _array(50_257, width),
        "blocks": blocks,
        "head": {"kernel": _array(width, 50_257)},
    }
    table = {
        ("embed", "blocks/{0..5}"): "frozen",
        "blocks/{6..10}": "slow",
        "**": "fast",
    }
    return ta.summarize(tree, ta.Rules(table, stacks={"blocks": 0}))


def mixture() -> ta.Summary:
    """Return a mixture of experts with about 22,000 leaves."""
    half = jnp.bfloat16

    def layer(number: int) -> dict[str, Any]:
        attention = {
            f"{name}_proj": {"kernel": _array(7_168, 1_536, dtype=half)}
            for name in ("q", "k", "v", "o")
        }
        names = ("gate", "up", "down")
        if number < 3:
            wide = {
                name: {"kernel": _array(7_168, 18_432, dtype=half)} for name in names
            }
            return {"attention": attention, "mlp": wide}
        experts = {
            str(n): {
                name: {"kernel": _array(7_168, 2_048, dtype=half)} for name in names
            }
            for n in range(160)
        }
        return {
            "attention": attention,
            "experts": experts,
            "router": _array(7_168, 160),
        }

    tree = {
        "embed": _array(129_280, 7_168, dtype=half),
        "layers": {str(number): layer(number) for number in range(48)},
        "head": _array(7_168, 129_280, dtype=half),
    }
    rules = {"**/experts": "frozen", "**/router": "router", "layers": "train"}
    return ta.summarize(tree, rules)


def pictures() -> Iterator[tuple[str, str]]:
    """Yield the name of each picture, and what it holds."""
    yield "gpt2.svg", gpt2().to_svg(title="GPT-2 by the table above", depth=2)
    yield "agent.svg", agent().to_svg(title="agent.safetensors by freeze.toml")
    yield "rates.svg", transformer().to_svg(title="transformer by rates.toml")
    yield "layers.svg", scanned().to_svg(title="12 layers in one scan", depth=2)
    yield "mixture.svg", mixture().to_svg(title="mixture by train.toml")


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    for name, text in pictures():
        (PICTURES / name).write_text(text, "utf-8", newline="\n")
