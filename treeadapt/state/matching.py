"""Matching: which leaf of an earlier state fills which leaf of a new one, by name.

Three steps, each on slots alone. A leaf in a copy of the params takes the saved leaf of
the same field and parameter, whatever groups and wrappers are above (``match_copies``).
Where the copies of a state came from is a *link* between the two states
(``learn_links``), and every other leaf follows the links: the step count of a group is
that of the group whose moments it took (``match_rest``). What has no link is matched by
its own name, the label of its group, or all states with the same fields: these must
then be equal, because a place in a chain says nothing of whose count it is.
See ``carry_state`` for which leaves may be taken (shapes, values).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import Any, Literal, TypeAlias

from treeadapt.transforms.optax_fields import GROUPS
from treeadapt.transforms.state_map import Slot, above, below, last, parent
from treeadapt.trees.paths import SEPARATOR

#: The fields of a state that is a step count alone, such as that of a schedule. Places
#: of a chain are no names of these.
_COUNT_ALONE = {"count"}

#: A state by the names of its fields: ``{node: {field: name of the leaf}}``.
Nodes = dict[str, dict[str, str]]

#: ``{node of the new state: nodes of the saved state that leaves came from}``.
Links = dict[str, list[str]]

#: The partners of a node, and whether these are sure; see ``_pair``.
Pairs = dict[str, tuple[tuple[str, ...], bool]]

#: What decides between saved leaves that fit a new one: the least count; their values,
#: if these are all equal; or nothing.
Choice: TypeAlias = Literal["least", "equal", "nothing"]

#: Saved names for leaves of the new state.
Offers: TypeAlias = dict[str, tuple[tuple[str, ...], Choice]]


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
        kind = repr([{n: [*f] for n, f in x.items()} for x in (nodes, sources)])
        if kind not in pairs_by_kind:
            pairs_by_kind[kind] = _pair(nodes, sources)
        for node, (partners, is_certain) in pairs_by_kind[kind].items():
            states = [sources[one] for one in partners]
            for field, name in nodes[node].items():
                fits = tuple([fields[field] for fields in states if field in fields])
                if fits:
                    offers[name] = fits, "least" if is_certain else "nothing"
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


def match_rest(
    slots: Sequence[Slot],
    saved: Sequence[Slot],
    links: Links,
    fields: Mapping[str, Collection[str]],
) -> Offers:
    """Match the leaves that are in no copy of the params.

    Args:
        slots: all leaves of the new state.
        saved: all leaves of the saved state that may be taken.
        links: what ``learn_links`` says.
        fields: all fields of the saved state, by node; some leaves did not move.

    Returns:
        Saved names for each leaf that has any.
    """
    rest = [slot for slot in slots if not slot.is_copy]
    by_name = {slot.name: slot for slot in saved if not slot.is_copy}
    owners = {slot.node for slot in slots if slot.is_copy}
    complete = by_node(rest)
    states = {
        node: names
        for node, names in by_node(by_name.values()).items()
        if names.keys() == set(fields.get(node, names))
    }
    stages, saved_stages = (
        [n for n in nodes if nodes[n].keys() == _COUNT_ALONE and n not in owners]
        for nodes in (complete, states)
    )
    offers: Offers = {}
    unlinked: list[Slot] = []
    for slot in rest:
        sources = _linked(slot, by_name, owners, links)
        if sources and slot.node in stages:
            # A place below a link is a name where both sides have the same places.
            tops = [_top(slot.node, parent(one), links) for one in sources]
            if any(_below(a, stages) != _below(b, saved_stages) for a, b in tops):
                sources = None
        is_named = slot.name in by_name and complete[slot.node].keys() != _COUNT_ALONE
        if sources is None and is_named:
            sources = (slot.name,)
        if sources is None:
            unlinked.append(slot)
        elif sources:
            offers[slot.name] = sources, "least"
    used = {name for sources, _ in offers.values() for name in sources}
    kinds: dict[tuple[str, ...], Nodes] = {}
    for node, names in by_node(unlinked).items():
        if names == complete[node] and node not in owners:
            # Several groups may continue one earlier state.
            kinds.setdefault((_group(node), *sorted(names)), {})[node] = names
    with_moments = {path for node in owners for path in (node, *above(node))}
    for (group, *kind), nodes in kinds.items():
        # What goes on elsewhere is nothing for a group whose moments are new.
        may_share = group and group not in with_moments
        alike = {
            node: names
            for node, names in states.items()
            if sorted(names) == kind and (may_share or used.isdisjoint(names.values()))
        }
        offers |= _match_alike(group, nodes, alike)
    return offers


def _linked(
    slot: Slot, names: Collection[str], owners: Collection[str], links: Links
) -> tuple[str, ...] | None:
    """Follow the nearest link; None if there is none.

    Nothing, if it is next to copies of which no leaf was carried: it starts again with
    them.
    """
    for node in (slot.node, *above(slot.node), ""):
        if node in links:
            rest = slot.name.removeprefix(node).removeprefix(SEPARATOR)
            every = [below(source, rest) for source in links[node]]
            if sources := [source for source in every if source in names]:
                name = slot.name.split(SEPARATOR)
                shared = [_common(name, one.split(SEPARATOR)) for one in sources]
                pairs = zip(sources, shared, strict=True)
                return tuple([source for source, n in pairs if n == max(shared)])
        elif node in owners and node == slot.node:
            return ()
    return None


def _match_alike(group: str, wanted: Nodes, saved: Nodes) -> Offers:
    """Match states that have the same fields, and no moments.

    Args:
        group: path of the group that has the new states.
        wanted: these.
        saved: states of any group, or of none.
    """
    by_group: dict[str, Nodes] = {}
    for node, fields in saved.items():
        by_group.setdefault(_group(node), {})[node] = fields
    if group:
        groups = [each for each in by_group if each]
        named = [each for each in groups if last(each) == last(group)]
        by_group = {each: by_group[each] for each in named or groups or by_group}
    offers: Offers = {}
    for node, fields in wanted.items():
        sources: list[str] = []
        for states in by_group.values():
            place = _inside(wanted)[node]
            places = _inside(states)
            is_one_to_one = sorted(places.values()) == sorted(_inside(wanted).values())
            sources += [n for n in states if not is_one_to_one or places[n] == place]
        # A count is one of updates, which all stages see.
        is_clear = len(wanted) <= len(saved) or fields.keys() == _COUNT_ALONE
        choice: Choice = "equal" if is_clear else "nothing"
        for field, name in fields.items() if sources else ():
            offers[name] = tuple([saved[one][field] for one in sources]), choice
    return offers


def _top(node: str, source: str, links: Links) -> tuple[str, str]:
    """Return the nearest node with a link, and what is there above its source."""
    while node and node not in links:
        node, source = parent(node), parent(source)
    return node, source


def _below(node: str, names: Sequence[str]) -> list[str]:
    """Return what names have below a node, sorted."""
    start = f"{node}{SEPARATOR}" if node else ""
    return sorted(name[len(start) :] for name in names if name.startswith(start))


def _inside(nodes: Nodes) -> dict[str, str]:
    """Return the names of nodes without what all of them begin with."""
    names = {node: node.split(SEPARATOR) for node in nodes}
    first, *others = names.values()
    shared = min([_common(first, each) for each in others], default=len(first))
    return {node: SEPARATOR.join(name[shared:]) for node, name in names.items()}


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
