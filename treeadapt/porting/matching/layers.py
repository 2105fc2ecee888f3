"""Layers: parts that differ in one number of a path, or in a slice of a scan.

Takes groups of parts that could be each other; gives those of each layer, if both sides
have the layers in one order. That is a guess, which the answers have to confirm: with
numbers of their own for each layer. It leaves little to be told apart part by part, and
in a deep model of equal layers nothing else may tell them apart, because what flows
through them soon stays as it is.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from treeadapt.porting.drafts.rows import is_count, numberless, tokens_of
from treeadapt.porting.matching.sides import ModelPart, Step, Stretch
from treeadapt.text.names import range_text


class Layered(NamedTuple):
    """Where a part is.

    Attributes:
        label: which part of its layer; those of other layers have the same.
        layer: its number; None if there are no layers.
    """

    label: Hashable
    layer: int | None


def layers_of(parts: Iterable[ModelPart]) -> dict[ModelPart, Layered]:
    """Return the layer of each part of one side.

    Of the numbers of a path, and of slices of one entry, that is the one which most
    kinds of parts have: ``ln_1`` and ``ln_2`` are no layers below ``h.0`` and ``h.1``.
    """
    families: dict[Hashable, list[ModelPart]] = defaultdict(list)
    for part in parts:
        families[family_of(part)].append(part)
    columns = {family: _columns(members) for family, members in families.items()}
    shared = Counter(name for each in columns.values() for name in each)
    found: dict[ModelPart, Layered] = {}
    for family, members in families.items():
        numbers = [numbers_of(part) for part in members]
        names = columns[family]
        place = names[max(names, key=shared.__getitem__)] if names else None
        for part, own in zip(members, numbers, strict=True):
            if place is None:
                found[part] = Layered((family, own), None)
            else:
                label = family, own[:place], own[place + 1 :]
                found[part] = Layered(label, own[place])
    return found


def _columns(members: Sequence[ModelPart]) -> dict[Hashable, int]:
    """Return the places of numbers in which parts differ, by what is before them."""
    first = members[0].places[0]
    tokens = tokens_of(first.path)
    names: list[Hashable] = [
        numberless("".join(tokens[:place]))
        for place, token in enumerate(tokens)
        if is_count(token)
    ]
    names += [("slice", n) for n, _ in enumerate(filter(_is_slice, first.steps))]
    columns = zip(*(numbers_of(part) for part in members), strict=True)
    return {
        name: n
        for n, (name, column) in enumerate(zip(names, columns, strict=True))
        if len({*column}) > 1
    }


def family_of(part: ModelPart) -> Hashable:
    """Return what parts have in common that differ in numbers only."""
    place = part.places[0]
    steps = tuple((s[0],) if _is_slice(s) else s for s in place.steps)
    return numberless(place.path), steps, part.shapes


def numbers_of(part: ModelPart) -> tuple[int, ...]:
    """Return the numbers of the path, and of slices of one entry."""
    place = part.places[0]
    counts = (int(token) for token in tokens_of(place.path) if is_count(token))
    return (*counts, *(step[1] for step in place.steps if _is_slice(step)))


def _is_slice(step: Step) -> bool:
    return isinstance(step, Stretch) and step.stop - step.start == 1


def by_layer(
    parts: Sequence[ModelPart], layers: Mapping[ModelPart, Layered]
) -> list[tuple[ModelPart, ...]]:
    """Return the parts of each layer in order, those without one first."""
    found: dict[int, list[ModelPart]] = defaultdict(list)
    for part in parts:
        layer = layers[part].layer
        found[-1 if layer is None else layer].append(part)
    return [tuple(found[layer]) for layer in sorted(found)]


def one_text(paths: Iterable[str]) -> str:
    """Write paths that differ in numbers only as one, quoted.

    Example:
        >>> one_text(["h.0.b", "h.1.b"]), one_text(f"h.{n}.b" for n in range(3))
        ("'h.{0,1}.b'", "'h.{0..2}.b'")
    """
    columns = [
        [*dict.fromkeys(each)] for each in zip(*map(tokens_of, paths), strict=True)
    ]
    texts = (
        texts[0]
        if len(texts) == 1
        else (len(texts) > 2 and range_text(texts)) or "{" + ",".join(texts) + "}"
        for texts in columns
    )
    return repr("".join(texts))
