"""What errors and findings say of rules: overlapping, unused, shadowed, unmatched.

Takes paths, and rules as text, and gives a few lines whatever the size of the tree.
See ``rules`` for what was decided, ``repairs`` for what a pattern may have meant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from treeadapt.selection.arguments import turned_text
from treeadapt.selection.repairs import (
    Names,
    below_text,
    entry_text,
    misses,
    tops,
    unused_lines,
)
from treeadapt.text.names import MAX_LISTED, fold, listing, paths_text, plural, section

ALLOWED = 'treeadapt.Rules(rules, unused="ignore")'  # in every call that takes rules

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
    above = tops(paths) if len(paths) == num_arrays else []
    if above:
        bare = f"{below_text(above[-1], num_arrays)}\n"
    return (
        f"{len(paths):,} of {plural(num_arrays, 'leaf')} {verb} no rule: "
        f"{listing(fold(paths), limit=limit)}.\n{bare}"
        'Add a rule for them, end the rules with ("**", <label>), or pass '
        "treeadapt.Rules(rules, default=<label>)."
    )


def overlap(rows: Sequence[str]) -> str:
    """Write the message for leaves that rules with different values match.

    Args:
        rows: each leaf, and what two rules say of it.
    """
    title = f"{_leaves_match(len(rows))} two rules with different values:"
    lines = section(title, rows)
    lines.append(
        'Exclude the leaves from one of them, ["...", "!..."], or let the first rule '
        'win with overlap="first".'
    )
    return "\n".join(lines)


def unused_rules(
    unused: Sequence[tuple[int, Any]],
    shadowed: Sequence[str],
    unmatched_paths: Sequence[str],
    names: Names,
    lists: Sequence[Sequence[Any]],
    turned: Mapping[str, Any],
) -> str:
    """Write the message for rules that match nothing, or are unreachable.

    Args:
        unused: entries that match nothing: index of the rule, and the entry.
        shadowed: for each unreachable rule its name, and what ``shadow`` says.
        unmatched_paths: of leaves that no rule matches.
        names: of the tree, for proposals.
        lists: the lists of patterns among the rules that have such entries.
        turned: the rules the other way round, if no rule matches and all are texts.
    """
    lines = []
    if names.matched(turned):
        total = len(names.arrays)
        return f"{misses(len(unused), 'rules', total)}.\n{turned_text(turned)}"
    if unused:
        named = [
            (f"{entry_text(entry)} (rule {index + 1})", entry)
            for index, entry in unused
        ]
        lines += unused_lines(named, "rules", names, lists)
    lines += [f"R{text[1:]}" for text in shadowed[:_SHADOWED]]
    if len(shadowed) > _SHADOWED:
        more = f"{len(shadowed) - _SHADOWED:,} more rules"
        lines.append(f"{more} are unreachable as well.")
    if unmatched_paths:
        paths = listing(fold(unmatched_paths), limit=3)
        lines.append(f"{_leaves_match(len(unmatched_paths))} no rule: {paths}.")
    lines.append(f"Correct or remove these rules; or allow it: {ALLOWED}.")
    return "\n".join(lines)


def shadow(paths: Sequence[str], cure: str) -> str:
    """Write what is wrong with a rule whose leaves earlier rules decide.

    Args:
        paths: of the leaves that it matches.
        cure: what to do.
    """
    first = listing(paths[:1])
    matched = (
        f"its only leaf, {first}"
        if len(paths) == 1
        else f"all {len(paths):,} leaves that it matches, such as {first}"
    )
    return f"is unreachable: earlier rules already match {matched}. {cure}"


def _leaves_match(count: int) -> str:
    return f"{plural(count, 'leaf')} {'matches' if count == 1 else 'match'}"
