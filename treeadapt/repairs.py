"""Repairs: what a pattern that hits nothing may have meant.

Takes a pattern or class that selects no array leaf of a tree, and gives patterns that
do, each with the number of leaves that it hits. Work is done only once an error is
certain, and is bounded: few candidates, one walk for all of them, a limited vocabulary.
Decides nothing (see ``decisions``); what an unused rule is, is up to ``rules``.
"""

from __future__ import annotations

import difflib
import itertools
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from treeadapt.errors import PatternError, listing, plural, shorten
from treeadapt.matcher import Matcher
from treeadapt.patterns import REGEX_PREFIX, ClassName, Pattern, escape, parse
from treeadapt.plans import Plan

_MAX_ADVISED = 4  # entries of one message that get proposals
_MAX_PROPOSALS = 3
_MAX_CANDIDATES = 48
_MAX_WORDS = 2_000  # different segments among which the nearest is sought
_MAX_TEXT = 300  # longer patterns are no typing errors
_REGEX_TIME_S = 0.1

# A dot or key of an exact path, as JAX writes it: .policy['params'][0]
_EXACT_KEY = re.compile(r"""\.|\[(?:'([^']*)'|"([^"]*)"|([0-9]+))\]""")
_REGEX_SIGNS = re.compile(r"\.\*|\.\+|\\[.dwSDWs]|[\^$|()+]")
# What is tried as a regular expression although nobody said that it is one: at most
# two repetitions, and none of a group, so that no path can take long; nothing that
# Python warns about.
_REPETITION = re.compile(r"(?<!\\)[*+?{]")
_RISKY = re.compile(r"\)[*+?{]|\[\[|--|&&|~~|\|\|")
_GROUP = re.compile(r"\([^()]*\)")
_NUMBER = re.compile(r"[0-9]+")
_ROOTS_OF_PARAMS = ("dict", "FrozenDict", "State")


class Speller:
    """Finds similar words with bounded effort, whatever the words.

    ``difflib`` takes time that grows with the cube of the length for words made of few
    letters. The effort is counted, not timed, so that messages are repeatable.
    """

    def __init__(self) -> None:
        self._effort = 5_000_000

    def nearest(
        self, word: str, words: Iterable[str], *, count: int = 3, cutoff: float = 0.6
    ) -> list[str]:
        """Return the words most like ``word``, the likest first.

        Args:
            word: what was typed.
            words: what exists.
            count: how many to return at most.
            cutoff: least similarity, from 0 to 1.

        Example:
            >>> Speller().nearest("kernal", ["bias", "kernel"])
            ['kernel']
        """
        matcher = difflib.SequenceMatcher(b=word[:_MAX_TEXT], autojunk=False)
        scored: list[tuple[float, int, str]] = []
        for place, other in enumerate(words):
            matcher.set_seq1(other[:_MAX_TEXT])
            if matcher.real_quick_ratio() < cutoff or matcher.quick_ratio() < cutoff:
                continue
            lengths = sorted((len(word), len(other)))
            self._effort -= lengths[0] ** 2 * lengths[1] // 4
            if self._effort < 0:
                break
            score = matcher.ratio()
            if score >= cutoff:
                scored.append((-score, place, other))
        return [other for _, _, other in sorted(scored)[:count]]


def unused_message(entries: Sequence[Any], plan: Plan, is_array: Sequence[bool]) -> str:
    """Write the message for entries of one selector that hit no array leaf.

    Args:
        entries: patterns, classes, or a whole selector whose parts all hit something.
        plan: names of the tree.
        is_array: whether each leaf is an array.
    """
    lines = [f"{misses(len(entries), 'selector', sum(is_array))}:"]
    named = [(entry_text(entry), entry) for entry in entries]
    lines += advice_lines(named, plan, is_array)
    lines.append('Correct or remove it; where unused= is taken, pass unused="ignore".')
    return "\n".join(lines)


def misses(entries: int, whose: str, arrays: int) -> str:
    """Say how many entries hit no array leaf.

    Args:
        entries: how many there are.
        whose: what they are entries of.
        arrays: how many array leaves the tree has.

    Example:
        >>> print(misses(2, "rules", 5))
        2 entries of the rules hit none of this tree's 5 arrays
        >>> print(misses(1, "rules", 1))
        1 entry of the rules does not hit this tree's one array
    """
    one = entries == 1
    verb = "hits none of" if one else "hit none of"
    if arrays == 1:
        verb = "does not hit" if one else "do not hit"
    count = "one array" if arrays == 1 else plural(arrays, "array")
    return f"{plural(entries, 'entry')} of the {whose} {verb} this tree's {count}"


def advice_lines(
    entries: Sequence[tuple[str, Any]], plan: Plan, is_array: Sequence[bool]
) -> Iterator[str]:
    """Yield one line an entry: what it is, and what it may have meant.

    Args:
        entries: how to call each entry, and the entry.
        plan: names of the tree.
        is_array: whether each leaf is an array.
    """
    for number, (text, entry) in enumerate(entries[:8]):
        hint = advice(entry, plan, is_array) if number < _MAX_ADVISED else ""
        yield f"  {text}{': ' if hint else ''}{hint}"
    if len(entries) > 8:
        yield f"  and {len(entries) - 8:,} more"


def advice(entry: Any, plan: Plan, is_array: Sequence[bool]) -> str:
    """Say what an entry that hits no array leaf may have meant.

    Args:
        entry: pattern, perhaps after the ``!`` of a list, or class; there is no advice
            for anything else.
        plan: names of the tree.
        is_array: whether each leaf is an array.

    Example:
        >>> from treeadapt.plans import view_tree
        >>> plan = view_tree({"mlp": {"hidden_0": 1.0, "hidden_1": 2.0}}).plan
        >>> print(advice("hidden_*", plan, [True, True]))
        did you mean '**/hidden_*' (2 leaves) or 'mlp/hidden_*' (2 leaves)?
    """
    if isinstance(entry, type):
        return _class_advice(plan, is_array)
    if not isinstance(entry, str):
        patterns = next(iter(entry.patterns()), None)
        some = "its patterns hit some, but " if patterns is not None else ""
        return f"{some}no array satisfies it"
    excludes, pattern = entry.startswith("!"), entry.removeprefix("!")
    if _count(list(_parsed([pattern])), plan, [not yes for yes in is_array]) != [0]:
        return "it hits only leaves that are no arrays, and these need no rule"
    found = proposals(pattern, plan, is_array)
    if found:
        sign = "!" * excludes
        texts = [f"{sign + text!r} ({plural(n, 'leaf')})" for text, n in found]
        return f"did you mean {' or '.join(texts)}?"
    if any(isinstance(part, ClassName) for part in parse(pattern).elements):
        return _class_advice(plan, is_array)
    return _deepest(pattern, plan, is_array) or (
        f"paths here look like {listing(_examples(pattern, plan, is_array))}"
    )


def proposals(text: str, plan: Plan, is_array: Sequence[bool]) -> list[tuple[str, int]]:
    """Find patterns near ``text`` that hit array leaves.

    Args:
        text: a pattern that hits none.
        plan: names of the tree.
        is_array: whether each leaf is an array.

    Returns:
        At most three pairs of pattern and number of array leaves, the likeliest first.

    Example:
        >>> from treeadapt.plans import view_tree
        >>> plan = view_tree({"params": {"dense": {"kernel": 1.0}}}).plan
        >>> proposals("dense.kernel", plan, [True])
        [('**/dense/kernel', 1), ('params/dense/kernel', 1)]
    """
    if len(text) > _MAX_TEXT:
        return []
    found: list[tuple[str, int]] = []
    for texts in (
        _rewritten(text, plan),
        _as_regex(text, plan, is_array),
        _respelled(text, plan, is_array),
        _without_root(text),
    ):
        patterns = list(itertools.islice(_parsed(texts), _MAX_CANDIDATES))
        counts = _count(patterns, plan, is_array)
        found += [(one.text, n) for one, n in zip(patterns, counts, strict=True) if n]
        if found:
            break
    known = dict(found)
    for one, count in found:
        if known.get(one.removeprefix("**/"), 0) == count and one.startswith("**/"):
            known.pop(one, None)  # the same leaves, said with more
    return list(known.items())[:_MAX_PROPOSALS]


def entry_text(entry: Any) -> str:
    """Write an entry as it was typed.

    Example:
        >>> entry_text("a/*"), entry_text(dict)
        ("'a/*'", 'node(dict)')
    """
    if isinstance(entry, type):
        return f"node({entry.__qualname__})"
    return shorten(repr(entry))


def _rewritten(text: str, plan: Plan) -> Iterator[str]:
    """Yield the pattern with another root, or with slashes for dots and brackets."""
    if text.startswith(REGEX_PREFIX):
        body = text[len(REGEX_PREFIX) :]
        yield f"{REGEX_PREFIX}.*{body.removeprefix('^').removesuffix('$')}.*"
        return
    roots = list(dict.fromkeys(path.partition("/")[0] for path in plan.paths[:5_000]))
    forms = [text]
    exact = _EXACT_KEY.sub(lambda key: f"/{key[1] or key[2] or key[3] or ''}", text)
    if "[" in text and exact != text:
        forms.append(exact.strip("/"))
    if "." in text and ".." not in text:
        forms.append(text.replace(".", "/"))
    if "\\" not in text and text.strip("/") not in ("", text):
        forms.append(text.strip("/"))
    for form in forms:
        if form != text:
            yield form
        if not form.startswith("**"):
            yield f"**/{form}"
        root, slash, below = form.partition("/")
        if slash and root == "params":
            yield below
        yield from (f"{escape(root)}/{form}" for root in roots[:4] if root)


def _without_root(text: str) -> Iterator[str]:
    for form in (text, text.replace(".", "/")):
        below = form.partition("/")[2]
        if below.strip("*/"):  # what is wild throughout is no repair
            yield below
            yield f"**/{below}"


def _respelled(text: str, plan: Plan, is_array: Sequence[bool]) -> Iterator[str]:
    """Yield the pattern with each wrong segment spelled as the tree spells it."""
    words = _words(plan, is_array)
    spelled: dict[str, str] = {}  # small letters -> pattern, numbers as they are or "*"
    for word in words:
        spelled.setdefault(word.lower(), escape(word))
        spelled.setdefault(
            _NUMBER.sub("*", word.lower()), _NUMBER.sub("*", escape(word))
        )
    speller = Speller()
    names = {f"<{name.lower()}>": f"<{name}>" for name in _class_names(plan, is_array)}
    for form in dict.fromkeys((text, text.replace(".", "/"))):
        best = segments = form.split("/")
        for place, segment in enumerate(segments):
            if _is_spelled(segment, words):
                continue
            known = names if segment.startswith("<") else spelled
            near = speller.nearest(segment.lower(), known)
            for key in near:
                yield from _replaced(segments, place, known[key])
            if near:
                best = [*best[:place], known[near[0]], *best[place + 1 :]]
        yield "/".join(best)
        yield f"**/{'/'.join(best)}"


def _replaced(segments: list[str], place: int, word: str) -> Iterator[str]:
    changed = "/".join([*segments[:place], word, *segments[place + 1 :]])
    yield changed
    yield f"**/{changed}"


def _is_spelled(segment: str, words: Iterable[str]) -> bool:
    """Tell whether a segment of a pattern matches some segment of the tree."""
    if segment in ("", "**") or segment.startswith("<"):
        return segment in ("", "**")
    try:
        pattern = parse(segment)
    except PatternError:  # half of a class or brace that holds a dot or slash
        return False
    if pattern.needs_tree:
        return True
    matcher = Matcher([pattern])
    return any(matcher.match_path(word) for word in words)


def _parsed(texts: Iterable[str]) -> Iterator[Pattern]:
    for text in dict.fromkeys(texts):
        try:
            yield parse(text)
        except PatternError:  # no proposal, then
            continue


def _count(
    patterns: Sequence[Pattern], plan: Plan, is_array: Sequence[bool]
) -> list[int]:
    if not patterns or (plan.is_flat_dict and any(p.needs_tree for p in patterns)):
        return [0] * len(patterns)
    counts = dict.fromkeys(range(len(patterns)), 0)
    tallies: dict[int, int] = {}
    for mask, yes in zip(Matcher(patterns).match(plan), is_array, strict=True):
        if yes:
            tallies[mask] = tallies.get(mask, 0) + 1
    for mask, tally in tallies.items():
        for place in counts:
            counts[place] += tally * (mask >> place & 1)
    return list(counts.values())


def _as_regex(text: str, plan: Plan, is_array: Sequence[bool]) -> Iterator[str]:
    """Yield the pattern as the regular expression that somebody pasted, if it hits."""
    if text.startswith(REGEX_PREFIX) or not _REGEX_SIGNS.search(text):
        return
    core = text.removeprefix("^").removesuffix("$")
    core = core.removeprefix(".*").removesuffix(".*")
    if len(_REPETITION.findall(core)) > 2 or _RISKY.search(core):
        return
    try:
        regex = re.compile(core)
    except (re.error, OverflowError, RecursionError):
        return
    # The time is measured: should a path take long after all, there is no proposal.
    deadline = time.monotonic() + _REGEX_TIME_S
    hits = 0
    for path in itertools.compress(plan.paths, is_array):
        if time.monotonic() > deadline:
            return
        hits += bool(len(path) <= 200 and regex.search(path))
    if hits:
        whole = f"({core})" if "|" in _GROUP.sub("", core) else core
        start = "" if text.startswith("^") else ".*"
        stop = "" if text.endswith("$") else ".*"
        yield f"{REGEX_PREFIX}{start}{whole}{stop}"


def _deepest(text: str, plan: Plan, is_array: Sequence[bool]) -> str:
    """Say how far the pattern leads: what its longest beginning hits, if any does."""
    segments = text.split("/")
    starts = ("/".join(segments[:n]) for n in range(len(segments) - 1, 0, -1))
    texts = (start for start in starts if start.strip("*/"))
    patterns = list(itertools.islice(_parsed(texts), _MAX_CANDIDATES))
    counts = _count(patterns, plan, is_array)
    for pattern, count in zip(patterns, counts, strict=True):
        if count:
            hits = map(bool, Matcher([pattern]).match(plan))
            flags = map(all, zip(hits, is_array, strict=True))
            example = listing([next(itertools.compress(plan.paths, flags))])
            start = listing([pattern.text])
            return f"{start} hits {plural(count, 'leaf')}, such as {example}"
    return ""


def _words(plan: Plan, is_array: Sequence[bool]) -> dict[str, None]:
    """Return the different segments of the tree's paths, at most a few thousand."""
    words: dict[str, None] = {}
    for path, yes in zip(plan.paths, is_array, strict=True):
        if yes:
            words.update(dict.fromkeys(path.split("/")))
            if len(words) > _MAX_WORDS:
                break
    return words


def _class_advice(plan: Plan, is_array: Sequence[bool]) -> str:
    names = _class_names(plan, is_array)
    if not names:
        return ""
    # Neither Linen's params nor what nnx.Optimizer hands over has the model's classes.
    lost = plan.root is not None and plan.root.__name__ in _ROOTS_OF_PARAMS
    cure = (
        "; if they were made from a model, decide on that: .bind(model)" if lost else ""
    )
    return f"classes here are {listing(names)}{cure}"


def _class_names(plan: Plan, is_array: Sequence[bool]) -> list[str]:
    names: dict[str, None] = {}
    for index in list(itertools.compress(range(len(plan)), is_array))[:_MAX_WORDS]:
        names.update(dict.fromkeys(cls.__name__ for cls in plan.enclosing(index)))
    return list(names)


def _examples(text: str, plan: Plan, is_array: Sequence[bool]) -> list[str]:
    paths = list(itertools.compress(plan.paths, is_array))
    sample = paths[:: max(1, len(paths) // 500)]
    return Speller().nearest(text, sample, cutoff=0.3) or paths[:3]
