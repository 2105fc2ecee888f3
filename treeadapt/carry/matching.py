"""Matching: which leaf of an earlier state fills which leaf of a new one, by name.

Three steps, each on label paths alone. A leaf in a copy of the params takes the saved
leaf of the same field and parameter, whatever groups and wrappers stand above
(``match_copies``). Where the copies of a state came from is a *link* between the two
states (``learn_links``), and every other leaf follows the links: the step count of a
group is that of the group whose moments it took (``match_rest``). What has no link is
matched by its own name, or by the only state with the same fields.
Which leaves may be taken (shapes, values) is up to ``carry_state``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence

from treeadapt.carry.slots import Cut, Slot, below, parent
from treeadapt.paths import SEPARATOR

#: A state by the names of its fields: ``{node: {field: name of the leaf}}``.
Nodes = dict[str, dict[str, str]]

#: ``{node of the new state: {node of the saved state: leaves that came from it}}``.
Links = dict[str, dict[str, int]]

_GROUPS = "inner_states"  # the field of Optax's PartitionState


def match_copies(
    slots: Iterable[Slot], cuts: Mapping[str, Cut]
) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """Match the leaves of copies of the params.

    A parameter's leaves of one state (``mu`` and ``nu``) come from one saved state. Of
    several, the one with most of its fields wins; then the one with just its fields,
    the same name, the longest common end of the name, the longest common beginning.

    Args:
        slots: leaves of the new state, those in copies.
        cuts: what ``cut_names`` says of the saved names.

    Returns:
        The saved name for each name, and the candidates where several fit equally.
    """
    wanted: dict[str, Nodes] = {}
    for slot in slots:
        nodes = wanted.setdefault(slot.tail, {})
        nodes.setdefault(slot.node, {})[slot.field] = slot.name
    given: dict[str, Nodes] = {}
    for name, (node, field, tail) in cuts.items():
        given.setdefault(tail, {}).setdefault(node, {})[field] = name
    found: dict[str, str] = {}
    ambiguous: dict[str, tuple[str, ...]] = {}
    for tail, nodes in wanted.items():
        saved = given.get(tail, {})
        pairs, rivals = _pair(_signature(nodes), _signature(saved))
        for node, source in pairs.items():
            for field, name in nodes[node].items():
                if field in saved[source]:
                    found[name] = saved[source][field]
        for node, sources in rivals.items():
            for field, name in nodes[node].items():
                fits = [saved[s][field] for s in sources if field in saved[s]]
                if fits:
                    ambiguous[name] = tuple(fits)
    return found, ambiguous


def learn_links(
    slots: Iterable[Slot], found: Mapping[str, str], cuts: Mapping[str, Cut]
) -> Links:
    """Learn from matched copies which parts of the two states are one.

    ``inner_states/a/0`` from ``0`` says also that ``inner_states/a`` is the saved
    state's root.

    Example:
        >>> slot = Slot("inner_states/a/0/mu/w", "inner_states/a/0/mu", "w")
        >>> cuts = {"0/mu/w": ("0", "mu", "w")}
        >>> learn_links([slot], {slot.name: "0/mu/w"}, cuts)
        {'inner_states/a/0': {'0': 1}, 'inner_states/a': {'': 1}}
    """
    links: Links = {}
    for slot in slots:
        if slot.name not in found:
            continue
        for node, source in _upward(slot.node, cuts[found[slot.name]][0]):
            sources = links.setdefault(node, {})
            sources[source] = sources.get(source, 0) + 1
    return links


def match_rest(
    slots: Sequence[Slot], names: Iterable[str], cuts: Mapping[str, Cut], links: Links
) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]]:
    """Match the leaves that stand in no copy of the params.

    Args:
        slots: all leaves of the new state.
        names: all names of the saved state.
        cuts: what ``cut_names`` says of them.
        links: what ``learn_links`` says.

    Returns:
        Saved names for each leaf that has any: one, or one of each group whose leaves
        came together, of which ``carry`` takes one by their values. And the candidates
        where several fit equally.
    """
    rest = [slot for slot in slots if slot.prefix is None]
    given = dict.fromkeys(name for name in names if name not in cuts)
    owners = frozenset(slot.node for slot in slots if slot.prefix is not None)
    found: dict[str, tuple[str, ...]] = {}
    unlinked: list[Slot] = []
    for slot in rest:
        sources = _linked(slot.name, given, owners, links)
        if sources is None and slot.name in given:
            sources = (slot.name,)
        if sources is None:
            unlinked.append(slot)
        elif sources:
            found[slot.name] = sources
    taken = frozenset(name for sources in found.values() for name in sources)
    saved_owners = frozenset(node for node, _, _ in cuts.values())
    free = _by_node(
        Slot(name)
        for name in given
        if name not in taken and parent(name) not in saved_owners
    )
    complete = _by_node(rest)
    groups: dict[str, Nodes] = {}
    for node, fields in _by_node(unlinked).items():
        if fields == complete[node] and node not in owners:
            groups.setdefault(_group(node), {})[node] = fields
    ambiguous: dict[str, tuple[str, ...]] = {}
    for nodes in groups.values():  # several groups may continue one earlier state
        for kind in dict.fromkeys(tuple(sorted(fields)) for fields in nodes.values()):
            some, doubtful = _alike(_of_kind(nodes, kind), _of_kind(free, kind))
            found |= some
            ambiguous |= doubtful
    return found, ambiguous


def _linked(
    name: str, given: Mapping[str, None], owners: frozenset[str], links: Links
) -> tuple[str, ...] | None:
    """Follow the nearest link; None if there is none.

    Nothing, if no leaf of the copies beside it was carried: it starts anew with them.
    """
    node = parent(name)
    while True:
        rest = name[len(node) + 1 :] if node else name
        if node in links:
            sources = [below(source, rest) for source in links[node]]
            sources = [source for source in sources if source in given]
            if sources:
                return _nearest(name, sources)
        elif node in owners:
            return ()
        if not node:
            return None
        node = parent(node)


def _nearest(name: str, sources: Sequence[str]) -> tuple[str, ...]:
    segments = name.split(SEPARATOR)
    shared = [_common(segments, source.split(SEPARATOR)) for source in sources]
    return tuple(s for s, n in zip(sources, shared, strict=True) if n == max(shared))


def _of_kind(nodes: Nodes, fields: tuple[str, ...]) -> Nodes:
    """Return the states that have just these fields."""
    return {node: names for node, names in nodes.items() if sorted(names) == [*fields]}


def _alike(
    wanted: Nodes, given: Nodes
) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]]:
    """Match states that have the same fields; return what ``match_rest`` does."""
    pairs, rivals = _pair(_signature(wanted), _signature(given))
    found: dict[str, tuple[str, ...]] = {}
    ambiguous: dict[str, tuple[str, ...]] = {}
    for node, sources in ({n: (s,) for n, s in pairs.items()} | rivals).items():
        contested = any(
            not set(sources).isdisjoint(others)
            for other, others in rivals.items()
            if other != node
        )
        # The same state in several groups is no contest: the groups are being joined.
        places = {source.removeprefix(_group(source)) for source in sources}
        into = ambiguous if contested or len(places) > 1 else found
        for field, name in wanted[node].items():
            into[name] = tuple(given[source][field] for source in sources)
    return found, ambiguous


def _by_node(slots: Iterable[Slot]) -> Nodes:
    nodes: Nodes = {}
    for slot in slots:
        nodes.setdefault(slot.node, {})[slot.field] = slot.name
    return nodes


def _group(node: str) -> str:
    """Return the path of the innermost group of a partition that a node stands in."""
    segments = node.split(SEPARATOR)
    ends = [i + 2 for i, text in enumerate(segments[:-1]) if text == _GROUPS]
    return SEPARATOR.join(segments[: ends[-1]]) if ends else ""


def _upward(node: str, source: str) -> Iterable[tuple[str, str]]:
    """Yield two nodes, then what stands above both as long as their names end alike."""
    yield node, source
    while node and source:
        (node, _, last), (source, _, other) = (
            path.rpartition(SEPARATOR) for path in (node, source)
        )
        if last != other:
            return
        yield node, source


#: Nodes with the names of their fields, hashable.
Signature = tuple[tuple[str, tuple[str, ...]], ...]


def _signature(nodes: Nodes) -> Signature:
    return tuple((node, tuple(fields)) for node, fields in nodes.items())


@functools.lru_cache(maxsize=256)
def _pair(
    wanted: Signature, given: Signature
) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """Pair nodes one to one, the best pairs first.

    Returns:
        The pairs; and, for each node that has several equally good partners or shares
        one, these partners.
    """
    left = {
        (node, source): _score(node, fields, source, others)
        for node, fields in wanted
        for source, others in given
        if not set(fields).isdisjoint(others)
    }
    pairs: dict[str, str] = {}
    rivals: dict[str, tuple[str, ...]] = {}
    while left:
        best = max(left.values())
        top = [pair for pair, score in left.items() if score == best]
        for node, source in top:
            partners = tuple(s for n, s in top if n == node)
            shared = sum(s == source for _, s in top)
            if len(partners) == shared == 1:
                pairs[node] = source
            else:
                rivals[node] = partners
        nodes, sources = zip(*top, strict=True)
        left = {
            (node, source): score
            for (node, source), score in left.items()
            if node not in nodes and source not in sources
        }
    return pairs, rivals


def _score(
    node: str, fields: Sequence[str], source: str, others: Sequence[str]
) -> tuple[int, ...]:
    one, two = node.split(SEPARATOR), source.split(SEPARATOR)
    return (
        len(set(fields) & set(others)),
        set(fields) == set(others),
        node == source,
        _common(one[::-1], two[::-1]),
        _common(one, two),
    )


def _common(one: Sequence[str], two: Sequence[str]) -> int:
    """Count the segments that two names have in common from the start."""
    same = itertools.takewhile(
        lambda pair: pair[0] == pair[1], zip(one, two, strict=False)
    )
    return sum(1 for _ in same)
