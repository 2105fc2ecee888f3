"""Draws the pictures of the pages again: python docs/scripts/pictures.py.

A test fails if a picture differs from what this draws.
"""

from __future__ import annotations

import ast
import itertools
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import treeadapt as ta

PICTURES = Path(__file__).parent.parent / "pictures"

# Of the two drawings that explain a notation; they are as wide as a phone is.
WIDTH, LINE = 500, 22
COLORS = ("#3377dd", "#dd8800", "#aa2255", "#1a9c86", "#774499")
STYLE = """
text { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono",
  monospace; fill: #1f2328; white-space: pre }
.head { font-weight: 600 }
.middle { text-anchor: middle }
.on { fill: #ffffff; text-anchor: middle; font-weight: 600 }
.dim { fill: #59636e }
.band { fill: #f3f5f8 }
.ground { fill: #ffffff; stroke: #d0d7de }
path { fill: none; stroke-width: 2; opacity: 0.75 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 }
.on { fill: #ffffff }
.dim { fill: #9198a1 }
.band { fill: #161d26 }
.ground { fill: #0d1117; stroke: #30363d }
}
"""


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


class Drawing:
    """An SVG document in the making: texts, rectangles and lines by their places."""

    def __init__(self, title: str, height: int) -> None:
        box = {"width": str(WIDTH), "height": str(height), "role": "img"}
        space = {"xmlns": "http://www.w3.org/2000/svg"}
        self.root = ET.Element("svg", space | box, viewBox=f"0 0 {WIDTH} {height}")
        self.add("title", title)
        self.add("style", STYLE)
        size = {"width": WIDTH - 1, "height": height - 1}
        self.add("rect", x=0.5, y=0.5, rx=6, class_="ground", **size)

    def add(self, tag: str, content: str = "", **attributes: object) -> None:
        """Add an element; ``class_`` is the attribute ``class``."""
        named = {name.rstrip("_"): str(value) for name, value in attributes.items()}
        ET.SubElement(self.root, tag, named).text = content

    def text(self, x: float, y: float, content: str, style: str = "") -> None:
        """Write a text; its class says from where."""
        self.add("text", content, x=x, y=y, class_=style)

    def __str__(self) -> str:
        return ET.tostring(self.root, encoding="unicode") + "\n"


def patterns() -> Drawing:
    """Return which leaves of a small tree four patterns select."""
    block = {"kernel": 0.0, "bias": 0.0}
    tree = {f"block_{n}": dict(block) for n in (1, 2, 10)} | {"head": {"kernel": 0.0}}
    columns = ("block_1", "**/bias", "*/kernel", "block_{2..10}")
    lines = [
        (name, leaf) for name, node in tree.items() for leaf in (None, *sorted(node))
    ]
    top, left, width = 74, 106, 94
    drawing = Drawing("What four patterns select", top + LINE * len(lines) + 12)
    drawing.text(16, 28, "A pattern that matches a node takes all leaves below it.")
    for row, (name, leaf) in enumerate(lines):
        y = top + LINE * row
        if leaf is None:
            drawing.add("rect", x=8, y=y, width=WIDTH - 16, height=LINE, class_="band")
        drawing.text(16 if leaf is None else 36, y + 15, leaf or name)
    for column, pattern in enumerate(columns):
        middle = left + width * column + width / 2
        drawing.text(middle, 58, pattern, "head middle")
        mask = ta.param_mask(tree, pattern)
        nodes = ta.param_mask(dict.fromkeys(tree, 0.0), pattern, unused="ignore")
        for row, (name, leaf) in enumerate(lines):
            is_node = leaf is None
            if not (nodes[name] if is_node else mask[name][leaf]):
                continue
            # The mark of a node reaches down to its leaves: it is there as one.
            height = LINE * (1 + len(mask[name])) if is_node else LINE
            box = {"width": 26, "height": height - 8, "rx": 5}
            place = {"x": middle - 13, "y": top + LINE * row + 4}
            drawing.add("rect", fill=COLORS[column], **place, **box)
    return drawing


# A fused projection of GPT-2, as the page "Moving parameters" splits it.
ROW = ("h.{l}.attn.weight : m (p h d)", "blocks/{p=q,k,v}/kernel : l m h d")
SIZES = {"l": 12, "p": 3, "m": 768, "h": 12, "d": 64}


def row() -> Drawing:
    """Return where each axis of a row of a migration goes."""
    source, target = ROW
    fused = {
        f"h.{n}.attn.weight": _array(SIZES["m"], 3 * SIZES["m"])
        for n in range(SIZES["l"])
    }
    migration = ta.Migration({source: target}, sizes={"h": SIZES["h"]})
    moved = migration(fused)
    path = "blocks/q/kernel"
    drawing = Drawing("How a row of a migration moves axes", 350)
    drawing.text(16, 28, f'"{source}"', "head")
    drawing.text(16, 48, f'  -> "{target}"', "head")
    before = f"{len(fused)} arrays such as h.0.attn.weight"
    drawing.text(16, 84, f"{before}, {list(fused['h.0.attn.weight'].shape)}", "dim")
    drawing.text(
        16, 306, f"{len(moved)} arrays such as {path}, {list(moved[path].shape)}", "dim"
    )
    drawing.text(16, 334, "dashed: a capture of the path, one array for each", "dim")
    above = _boxes(drawing, 96, "path l | m | p h d")
    below = _boxes(drawing, 246, "path p | l | m | h | d")
    for name, start in above.items():
        end, color = below[name], COLORS[list(SIZES).index(name)]
        curve = f"M{start},{96 + 38} C{start},190 {end},190 {end},246"
        drawing.add("path", d=curve, stroke=color)
    return drawing


def _boxes(drawing: Drawing, y: int, axes: str) -> dict[str, float]:
    """Draw the axes of an address side by side; return the middle of each name."""
    middles, x = {}, 16.0
    for axis in axes.split(" | "):
        in_path, names = axis.startswith("path "), axis.removeprefix("path ").split()
        for name in names:
            color = COLORS[list(SIZES).index(name)]
            look = {"fill": color, "rx": 5}
            if in_path:
                look = {"fill": "none", "stroke": color, "stroke-dasharray": "4 3"}
            drawing.add("rect", x=x, y=y, width=74, height=38, **look)
            text = f"{name} = {SIZES[name]}"
            drawing.text(x + 37, y + 24, text, "middle" if in_path else "on")
            middles[name], x = x + 37, x + 76
        x += 22 if in_path else 12
    return middles


def pictures() -> Iterator[tuple[str, str]]:
    """Yield the name of each picture, and what it holds."""
    yield "patterns.svg", str(patterns())
    yield "row.svg", str(row())
    yield "gpt2.svg", gpt2().to_svg(title="GPT-2 by the table above", depth=2)
    yield "agent.svg", agent().to_svg(title="agent.safetensors by freeze.toml")
    yield "rates.svg", transformer().to_svg(title="transformer by rates.toml")
    yield "layers.svg", scanned().to_svg(title="12 layers in one scan", depth=2)
    yield "mixture.svg", mixture().to_svg(title="mixture by train.toml")


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    for name, text in pictures():
        (PICTURES / name).write_text(text, "utf-8", newline="\n")
