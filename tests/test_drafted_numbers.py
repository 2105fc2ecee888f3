"""Numbers in drafted paths: parts of names, or counted through a model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from random import Random
from typing import NamedTuple

import numpy as np
import pytest
from test_drafted_marks import Leaves, marks
from test_drafts import float32

import treeadapt as ta

#: Modules of each block, and their names in the target.
NAMED = {
    "norms of Flax": {"LayerNorm_0.w": "norm1.w", "LayerNorm_2.w": "norm2.w"},
    "norms of torch": {"norm1.w": "LayerNorm_0.w", "norm2.w": "LayerNorm_2.w"},
    "maps around a function": {"mlp.0.w": "fc_1.w", "mlp.3.w": "fc_2.w"},
    "other kinds of layers": {
        "layer.0.attn.w": "attn.w",
        "layer.0.norm.w": "n1.w",
        "layer.1.cross.w": "cross.w",
        "layer.1.norm.w": "n3.w",
        "layer.2.up.w": "up.w",
        "layer.2.norm.w": "n2.w",
    },
}
COUNTED = {
    "from the last": {"conv_0.w": "conv_3.w", "conv_2.w": "conv_1.w"},
    "every second layer": {"layers.0.w": "layers.0.w", "layers.2.w": "layers.1.w"},
    "some of a list": {"m.0.w": "a.0.w", "m.1.v": "mid.w", "m.2.w": "a.1.w"},
}


def blocks_of(count: int, width: int, names: Collection[str]) -> Leaves:
    return float32(
        {f"h.{b}.{name}": np.zeros((width, 7)) for b in range(count) for name in names}
    )


def renaming(names: Mapping[str, str]) -> Callable[[Leaves], Leaves]:
    def convert(leaves: Leaves) -> Leaves:
        paths = {path: path.split(".", 2) for path in leaves}
        return {f"b/{b}/{names[p]}": leaves[path] for path, (_, b, p) in paths.items()}

    return convert


@pytest.mark.parametrize("names", NAMED.values(), ids=NAMED)
def test_numbers_that_each_block_has_are_parts_of_names(names):
    convert = renaming(names)
    draft = ta.draft_migration(blocks_of(3, 5, names), convert=convert)
    assert {*marks(draft).values()} == {""}, marks(draft)
    other = blocks_of(5, 11, names)
    assert not ta.tree_diff(draft.migration(other), convert(other), values=True)
    single = ta.draft_migration(blocks_of(1, 5, names), convert=convert)
    assert any(marks(single).values()), marks(single)


@pytest.mark.parametrize("names", COUNTED.values(), ids=COUNTED)
def test_numbers_of_members_that_are_alike_are_counts_in_blocks_too(names):
    draft = ta.draft_migration(blocks_of(3, 5, names), convert=renaming(names))
    assert "numbers" in marks(draft).values(), marks(draft)


def test_numbers_that_some_blocks_lack_are_counts():
    names = {"LayerNorm_0.w": "norm1.w", "LayerNorm_2.w": "norm2.w"}
    source = blocks_of(3, 5, names)
    del source["h.1.LayerNorm_2.w"]
    draft = ta.draft_migration(source, convert=renaming(names))
    assert "numbers" in marks(draft).values(), marks(draft)


def test_a_number_right_after_a_word_of_layers_is_a_count():
    def convert(leaves: Leaves) -> Leaves:
        made = {path.replace("layer", "blk."): leaf for path, leaf in leaves.items()}
        return {path: made[path] for path in [*made][:-1]}

    source = float32({f"layer{n}.w": np.zeros((5, 7)) for n in range(3)})
    draft = ta.draft_migration(source, convert=convert)
    assert marks(draft) == {"layer2.w": "numbers", "layer{l}.w": ""}


#: How a target counts what a source counts from 0, given how many there are.
ORDERS: dict[str, Callable[[int, int], int]] = {
    "same": lambda n, count: n,
    "from 1": lambda n, count: n + 1,
    "every second": lambda n, count: 2 * n,
    "all but one": lambda n, count: n + (n > 0),
    "from the last": lambda n, count: count - 1 - n,
    "the next": lambda n, count: (n + 1) % count,
    "exchanged": lambda n, count: n ^ 1 if n ^ 1 < count else n,
}
#: Words before numbers, of stacks of equal shapes, blocks, and what is in each block.
LEVELS = ("stack", "side"), ("h", "layer"), ("conv", "LayerNorm", "layer")


class Counted(NamedTuple):
    """A model whose leaves are counted at some levels, and how the target counts."""

    words: tuple[str, ...]
    marks: tuple[str, ...]  # between words and numbers
    orders: tuple[str, ...]
    has_kinds: bool
    widened: int  # the level whose number the width follows

    def counts(self, random: Random, sizes: Sequence[int]) -> list[int]:
        """Other sizes: a block of another model has as many modules, not layers."""
        are_open = [word not in ("conv", "LayerNorm") for word in self.words]
        more = (random.randrange(-1, 3) if is_open else 0 for is_open in are_open)
        return [max(1, n + m) for n, m in zip(sizes, more, strict=True)]

    def pair(self, sizes: Sequence[int], seed: int) -> tuple[Leaves, Leaves]:
        shapes, targets = {}, {}
        for numbers in itertools.product(*map(range, sizes)):
            at = zip(self.words, self.marks, numbers, strict=True)
            old = ".".join(f"{word}{mark}{n}" for word, mark, n in at)
            news = zip(self.orders, numbers, sizes, strict=True)
            new = "/".join(f"t{ORDERS[order](n, count)}" for order, n, count in news)
            more = 4 * numbers[self.widened] if self.widened >= 0 else 0
            kind = "abcdefgh"[numbers[-1]] if self.has_kinds else "w"
            shapes |= {f"{old}.{kind}": np.zeros((5 + more, 7))}
            shapes |= {f"{old}.norm": np.zeros(5 + more)}
            targets |= {f"{old}.{kind}": f"{new}/{kind}", f"{old}.norm": f"{new}/scale"}
        source = float32(shapes, seed)
        return source, {targets[path]: leaf for path, leaf in source.items()}


def counted(random: Random) -> Counted:
    levels = random.choice([LEVELS, LEVELS[1:], LEVELS[:2]])
    changed = random.randrange(len(levels))
    names = [*ORDERS]
    return Counted(
        tuple(map(random.choice, levels)),
        tuple(random.choice((".", "_", "")) for _ in levels),
        tuple(
            random.choice(names) if n == changed else "same" for n in range(len(levels))
        ),
        has_kinds=random.random() < 0.3,
        widened=random.choice((-1, changed)),
    )


@pytest.mark.parametrize("seed", range(60))
def test_rows_without_a_mark_are_right_at_other_counts_or_have_no_row(seed):
    random = Random(seed)
    model = counted(random)
    sizes = [random.choice((2, 3)) for _ in model.words]
    draft = ta.draft_migration(*model.pair(sizes, seed))
    for _ in range(2):
        source, wanted = model.pair(model.counts(random, sizes), seed + 1)
        try:
            made, plan = draft.migration(source), draft.migration.plan(source)
        except ta.MigrationError:
            continue
        for group in plan.tables[-1].groups:
            is_marked = bool(group.row.notes.check)
            wrong = [
                p for p in group.filled if not np.array_equal(made[p], wanted.get(p))
            ]
            assert is_marked or not wrong, (model, sizes, group.row.text, wrong)


def turned(some: Collection[str]) -> Callable[[Leaves], Leaves]:
    """Maps of some layers are turned; all names stay."""

    def convert(leaves: Leaves) -> Leaves:
        are_turned = {path for path in leaves if path.endswith("up.w")}
        are_turned = {p for p in are_turned if p.split(".")[1] in some}
        return {p: leaf.T if p in are_turned else leaf for p, leaf in leaves.items()}

    return convert


@pytest.mark.parametrize(("layers", "last"), [(1, "0"), (3, "2")])
def test_what_the_rest_takes_of_further_layers_is_seen(layers, last):
    leaves = blocks_of(layers, 5, ["down.w", "norm.b"])
    own = float32({f"h.{last}.up.w": np.zeros((5, 7))})
    draft = ta.draft_migration(leaves | own, convert=turned([last]))
    assert "{rest:**}" in draft.to_toml()
    assert {*marks(draft).values()} == {"numbers", ""}


def test_a_leaf_that_the_first_of_several_layers_has_alone_keeps_no_mark():
    leaves = blocks_of(3, 5, ["down.w", "norm.b"])
    own = float32({"h.0.up.w": np.zeros((5, 7))})
    draft = ta.draft_migration(leaves | own, convert=turned(["0"]))
    assert "{rest:**}" in draft.to_toml()
    assert not any(marks(draft).values())
