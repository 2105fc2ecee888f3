"""Cuts: some layers of the arrays in a flat dict, and the way back.

``divide`` gives each label a group: the keys of its own flat dict, and for each the
region of an array that it stands for. ``take`` cuts these out, ``put_back`` puts them
in again; a group of whole arrays costs nothing.
See ``layers.region`` for what a region is, ``partition`` for what runs on groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from treeadapt.errors import PathCollisionError
from treeadapt.layers.keys import boxes
from treeadapt.layers.region import Region, put
from treeadapt.selection.answers import Split
from treeadapt.transforms.flat import FlatDict, by_half

#: By key of a group's flat dict, the layers of an array of the flat dict around it;
#: None where the key is that of a whole array.
Group = dict[str, Region | None]


def divide(
    paths: Sequence[str], answers: Sequence[Any]
) -> tuple[dict[Any, Group], dict[str, Region]]:
    """Group the arrays of a flat dict, or regions of them, by label.

    Args:
        paths: keys of the flat dict.
        answers: a label for each; ``Split`` where its layers have different ones.

    Returns:
        The groups by label; and by key, which layers of the caller's tree are cut out.

    Raises:
        PathCollisionError: the key of some layers is the path of another leaf.
    """
    groups: dict[Any, Group] = {}
    regions: dict[str, Region] = {}
    whole_paths = frozenset(paths)
    for path, answer in zip(paths, answers, strict=True):
        if not isinstance(answer, Split):
            groups.setdefault(answer, {})[path] = None
            continue
        for label, boxed in boxes(answer.values, answer.region.sizes).items():
            for places in boxed:
                region = answer.region.at(places)
                if region.key in whole_paths:
                    raise PathCollisionError(
                        f"Some layers of {region.path!r} would be called "
                        f"{region.key!r}, which is the path of another leaf. Rename "
                        "that leaf."
                    )
                regions[region.key] = region
                inside = answer.region.inside(path).at(places)
                groups.setdefault(label, {})[region.key] = inside
    return groups, regions


def take(flat: Any, group: Group) -> Any:
    """Return the flat dict of a group, half by half for lookahead."""

    def of_half(half: FlatDict) -> FlatDict:
        return {
            key: half[key] if region is None else region.take(half[region.path])
            for key, region in group.items()
        }

    return by_half(of_half, flat)


def put_back(
    part: Mapping[str, Any], group: Group, rest: Callable[[str], Any]
) -> FlatDict:
    """Return the arrays of which a group has some layers, with these put in.

    Args:
        part: the flat dict of the group, or of several groups together.
        group: what its keys stand for.
        rest: gives the array, by path, that has all other layers; None if it has none,
            and then the result has none.
    """
    arrays = {key: leaf for key, leaf in part.items() if group.get(key) is None}
    regions: dict[str, list[tuple[Region, Any]]] = {}
    for key, region in group.items():
        if region is not None:
            regions.setdefault(region.path, []).append((region, part[key]))
    return arrays | {path: put(rest(path), parts) for path, parts in regions.items()}
