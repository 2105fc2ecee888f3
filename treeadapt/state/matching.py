"""Matching: which leaf of an earlier state fills which leaf of a new one, by name.

Three steps, each on slots alone. A leaf in a copy of the params takes the saved leaf of
the same field and parameter, whatever groups and wrappers are above (``match_copies``).
Where the copies of a state came from is a *link* between the two states
(``learn_links``), and every other leaf follows the links: the step count of a group is
that of the group whose moments it took (``match_rest``). What has no link is matched by
its own name, or by the only state with the same fields.
See ``carry_state`` for which leaves may be taken (shapes, values).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Sequence, Set
from typing import Any

from treeadapt.optax_fields import GROUPS
from treeadapt.paths import SEPARATOR
from treeadapt.state_map import Slot, below, last, parent

#: A state by the names of its fields: ``{node: {field: name of the leaf}}``.
Nodes = dict[str, dict[str, str]]

#: ``{node of the new state: nodes of the saved state that leaves came from}``.
Links = dict[str, list[str]]

#: The partners of a node, and whether these are sure; see ``_pair``.
Pairs = dict[str, tuple[tuple[str, ...], bool]]

#: Saved names for leaves of the new state, and whether these are one leaf, or one of
#: each group; else they fit equally well.
Offers = dict[str, tuple[tuple[str, ...], bool]]


def match_copies(slots: Iterable[Slot], saved: Iterable[Slot]) -> Offers:
    """Match the leaves of copies of the params.

    A parameter's leaves of one state (``mu`` and ``nu``) come from one saved state. Of
    several, the one with most of its fields wins; then the one with just its fields,
    the same name, the longest common end of the name, the longest common beginning.

    Args:
        slots: leaves of the new state, those in copies.
        saved: leaves of the saved state, those in copies.
    """
    wanted, saved_by_tail = _by_tail(slots), _by_tail(saved)
    # Most params have the same fields in the same states.
    pairs_by_kind: dict[Any, Pairs] = {}
    offers: Offers = {}
    for tail, nodes in wanted.items():
        sources = saved_by_tail.get(tail, {})
        kind = repr(
            [[(n, *fields) for n, fields in x.items()] for x in (nodes, sources)]
        )
        if kind not in pairs_by_kind:
            pairs_by_kind[kind] = _pair(nodes, sources)
        for node, (partners, is_certain) in pairs_by_kind[kind].items():
            states = [sources[one] for one in partners]
            for field, name in nodes[node].items():
                fits = tuple([fields[field] for fields in states if field in fields])
                if fits:
                    offers[name] = fits, is_certain
    return offers


def learn_links(pairs: Iterable[tuple[Slot, Slot]]) -> Links:
    """Learn from matched copies which parts of the two states are one.

    ``inner_states/a/0`` from ``0`` says also that ``inner_states/a`` is the saved
    state's root.

    Args:
        pairs: leaves of the new state, and the saved leaves that they took.

    Example:
        >>> new = Slot("inner_states/a/0/mu/w", "inner_states/a/0/mu", "w")
        >>> learn_links([(new, Slot("0/mu/w", "0/mu", "w"))])
        {'inner_states/a/0': ['0'], 'inner_states/a': ['']}
    """
    links: Links = {}
    for slot, saved in pairs:
        node, source = slot.node, saved.node
        while source not in links.setdefault(node, []):
            links[node].append(source)
            if node and source and last(node) == last(source):
                node, source = parent(node), parent(source)
    return links


def match_rest(slots: Sequence[Slot], saved: Sequence[Slot], links: Links) -> Offers:
    """Match the leaves that are in no copy of the params.

    Args:
        slots: all leaves of the new state.
        saved: all leaves of the saved state.
        links: what ``learn_links`` says.

    Returns:
        Saved names for each leaf that has any: one, or one of each group whose leaves
        came together, of which ``carry_state`` takes one by their values.
    """
    rest = [slot for slot in slots if not slot.is_copy]
    by_name = {slot.name: slot for slot in saved if not slot.is_copy}
    owners = _owners(slots)
    offers: Offers = {}
    unlinked: list[Slot] = []
    for slot in rest:
        sources = _linked(slot, by_name, owners, links)
        if sources is None and slot.name in by_name:
            sources = (slot.name,)
        if sources is None:
            unlinked.append(slot)
        elif sources:
            offers[slot.name] = sources, True
    used = {name for sources, _ in offers.values() for name in sources}
    busy = _owners(saved)
    free = by_node(
        [s for n, s in by_name.items() if n not in used and s.node not in busy]
    )
    complete = by_node(rest)
    kinds: dict[tuple[str, ...], Nodes] = {}
    for node, fields in by_node(unlinked).items():
        if fields == complete[node] and node not in owners:
            # Several groups may continue one earlier state.
            kinds.setdefault((_group(node), *sorted(fields)), {})[node] = fields
    for kind, nodes in kinds.items():
        alike = {node: f for node, f in free.items() if sorted(f) == [*kind[1:]]}
        offers |= _match_alike(nodes, alike)
    return offers


def _owners(slots: Iterable[Slot]) -> frozenset[str]:
    """Return the nodes that have copies of the params as fields."""
    return frozenset([slot.node for slot in slots if slot.is_copy])


def _linked(
    slot: Slot, names: Collection[str], owners: Collection[str], links: Links
) -> tuple[str, ...] | None:
    """Follow the nearest link; None if there is none.

    Nothing, if no leaf of the copies next to it was carried: it starts again with them.
    """
    node = slot.node
    while True:
        rest = slot.name[len(node) + 1 :] if node else slot.name
        if node in links:
            every = [below(source, rest) for source in links[node]]
            if sources := [source for source in every if source in names]:
                name = slot.name.split(SEPARATOR)
                shared = [_common(name, one.split(SEPARATOR)) for one in sources]
                pairs = zip(sources, shared, strict=True)
                return tuple([source for source, n in pairs if n == max(shared)])
        elif node in owners:
            return ()
        if not node:
            return None
        node = parent(node)


def _match_alike(wanted: Nodes, saved: Nodes) -> Offers:
    """Match states that have the same fields."""
    pairs = _pair(wanted, saved)
    unsure = [sources for sources, is_certain in pairs.values() if not is_certain]
    claims = Counter(itertools.chain(*unsure))
    offers: Offers = {}
    for node, (sources, _) in pairs.items():
        is_contested = any(claims[source] > 1 for source in sources)
        # The same state in several groups is one: the groups are being joined.
        places = {source.removeprefix(_group(source)) for source in sources}
        is_certain = not is_contested and len(places) == 1
        for field, name in wanted[node].items():
            offers[name] = tuple(saved[one][field] for one in sources), is_certain
    return offers


def by_node(slots: Iterable[Slot]) -> Nodes:
    """Group leaves by the state that has them, or their copy, as a field."""
    nodes: Nodes = {}
    for slot in slots:
        nodes.setdefault(slot.node, {})[slot.field] = slot.name
    return nodes


def _by_tail(slots: Iterable[Slot]) -> dict[str, Nodes]:
    tails: dict[str, list[Slot]] = {}
    for slot in slots:
        tails.setdefault(slot.tail, []).append(slot)
    return {tail: by_node(alike) for tail, alike in tails.items()}


def _group(node: str) -> str:
    """Return the path of the innermost group of a partition in which a node is."""
    segments = node.split(SEPARATOR)
    ends = [i + 2 for i, text in enumerate(segments[:-1]) if text == GROUPS]
    return SEPARATOR.join(segments[: ends[-1]]) if ends else ""


def _pair(wanted: Nodes, saved: Nodes) -> Pairs:
    """Pair nodes one to one, the best pairs first.

    Returns:
        The partner of each node that has one, and True; the partners, and False, where
        several are equally good or one is shared.
    """
    left = {
        (node, source): _score(node, fields.keys(), source, others.keys())
        for node, fields in wanted.items()
        for source, others in saved.items()
        if not fields.keys().isdisjoint(others)
    }
    pairs: Pairs = {}
    while left:
        best = max(left.values())
        best_pairs = [pair for pair, score in left.items() if score == best]
        nodes, sources = zip(*best_pairs, strict=True)
        for node in nodes:
            partners = tuple(source for one, source in best_pairs if one == node)
            pairs[node] = partners, len(partners) == sources.count(partners[0]) == 1
        left = {
            (node, source): score
            for (node, source), score in left.items()
            if node not in nodes and source not in sources
        }
    return pairs


def _score(
    node: str, fields: Set[str], source: str, others: Set[str]
) -> tuple[int, ...]:
    one, two = node.split(SEPARATOR), source.split(SEPARATOR)
    return (
        len(fields & others),
        fields == others,
        node == source,
        _common(one[::-1], two[::-1]),
        _common(one, two),
    )


def _common(one: Sequence[str], two: Sequence[str]) -> int:
    """Count the segments that two names have in common from the start."""
    same = [a == b for a, b in zip(one, two, strict=False)]
    return [*same, False].index(False)
