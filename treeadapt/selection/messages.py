"""What errors and findings say of rules: overlapping, unused, shadowed, unmatched.

Takes ``RuleMatches`` and gives text, of a few lines whatever the size of the tree.
See ``rules`` for what was decided, ``repairs`` for what a pattern may have meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from treeadapt.arrays import same_value
from treeadapt.names import MAX_LISTED, fold, listing, paths_text, plural, section
from treeadapt.selection.repairs import entry_text, unused_lines

if TYPE_CHECKING:
    from treeadapt.selection.rules import RuleMatches

_SHADOWED = 4  # rules that are unreachable


def unmatched(paths: Sequence[str], num_arrays: int) -> str:
    """Write the message for array leaves that no rule matches.

    Args:
        paths: of these leaves.
        num_arrays: how many array leaves there are.
    """
    verb = "matches" if len(paths) == 1 else "match"
    limit = MAX_LISTED if num_arrays <= MAX_LISTED else 8
    bare = f"{paths_text(paths)}\n" if list(paths) == [""] else ""
    return (
        f"{len(paths):,} of {plural(num_arrays, 'leaf')} {verb} no rule: "
        f"{listing(fold(paths), limit=limit)}.\n{bare}"
        'Add a rule for them, end the rules with ("**", <label>), or pass '
        "default=<label>."
    )


def overlap(matches: RuleMatches) -> str:
    """Write the message for leaves that rules with different values match."""
    found, names = matches.overlaps, matches.rules.names
    rows = [
        f"{matches.paths[leaf]!r}: {names[first]}, and {names[second]}"
        for leaf, first, second in found
    ]
    title = f"{_leaves_match(len(found))} two rules with different values:"
    lines = section(title, rows)
    lines.append(
        'Exclude the leaves from one of them, ["...", "!..."], or let the first rule '
        'win with overlap="first".'
    )
    return "\n".join(lines)


def unused_rules(matches: RuleMatches) -> str:
    """Write the message for rules that match nothing, or are unreachable."""
    lines, shadowed = [], matches.shadowed
    if matches.unused:
        named = [
            (f"{entry_text(entry)} (rule {index + 1})", entry)
            for index, entry in matches.unused
        ]
        lines += unused_lines(named, "rules", matches.view.plan, matches.is_array)
    for index in shadowed[:_SHADOWED]:
        name = matches.rules.names[index]
        lines.append(f"R{name[1:]}, {shadow_text(matches, index)}")
    if len(shadowed) > _SHADOWED:
        more = f"{len(shadowed) - _SHADOWED:,} more rules"
        lines.append(f"{more} are unreachable as well.")
    if matches.unmatched:
        paths = listing(fold(matches.unmatched), limit=3)
        lines.append(f"{_leaves_match(len(matches.unmatched))} no rule: {paths}.")
    lines.append(
        "Correct or remove these rules; or allow it: "
        'treeadapt.Rules(rules, unused="ignore").'
    )
    return "\n".join(lines)


def shadow_text(matches: RuleMatches, index: int) -> str:
    """Write what is wrong with a shadowed rule, and its cure.

    Args:
        matches: what was decided.
        index: of the rule, one of ``matches.shadowed``.
    """
    values, leaves = matches.rules.values, matches.selected(index)
    deciding = sorted({matches.deciding[leaf] for leaf in leaves})
    earlier = matches.rules.names[deciding[0]]
    if all(same_value(values[index], values[rule]) for rule in deciding):
        cure = "Remove it: they give the same value."
    elif set(matches.selected(deciding[0])).issubset(leaves):
        cure = f"Keep one of the two, because {earlier}, matches no other leaf."
    else:
        cure = f"Move it up, before {earlier}."
    first = listing([matches.paths[leaves[0]]])
    matched = (
        f"its only leaf, {first}"
        if len(leaves) == 1
        else f"all {len(leaves):,} leaves that it matches, such as {first}"
    )
    return f"is unreachable: earlier rules already match {matched}. {cure}"


def _leaves_match(count: int) -> str:
    return f"{plural(count, 'leaf')} {'matches' if count == 1 else 'match'}"
