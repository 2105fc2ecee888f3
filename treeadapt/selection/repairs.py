"""Repairs: what a pattern that matches nothing may have meant.

Takes a pattern or class that selects no array leaf of a tree, and gives patterns that
do, each with the number of leaves that it matches. Work is done only once an error is
certain, and is bounded: few candidates, one walk for all of them, a limited vocabulary.
A regular expression is proposed only if it matches, and run only if it is simple.
See ``rules`` for what an unused rule is.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

from treeadapt.errors import PatternError, explaining
from treeadapt.layers.stacks import stack_text
from treeadapt.patterns.glob import (
    REGEX_PREFIX,
    ClassName,
    FromEnd,
    Pattern,
    escape,
    parse,
)
from treeadapt.patterns.matcher import Matcher
from treeadapt.text.names import (
    MAX_LISTED,
    Speller,
    fold,
    listing,
    natural,
    paths_text,
    plural,
    section,
    shorten,
)
from treeadapt.text.wording import worded
from treeadapt.trees.views import TreeView

_MAX_ADVISED = 4  # entries of one message that get proposals
_MAX_PROPOSALS = 3
_MAX_CANDIDATES = 48
_MAX_WORDS = 2_000  # different segments among which the nearest is sought
_MAX_TOPS = 5  # paths that show what a tree has
_MAX_TEXT = 300  # longer patterns are not typing errors

# A dot or key of an exact path, as JAX writes it: .policy['params'][0]
_EXACT_KEY = re.compile(r"""\.|\[(?:'([^']*)'|"([^"]*)"|([0-9]+))\]""")
# In the examples, what matches is in angle brackets.
# h<.*>w  <^>h  h/<\d>+  a<|>b
_REGEX_SIGNS = re.compile(r"\.\*|\.\+|\\[.dwSDWs]|[\^$|()+]")
_CHOICE = re.compile(r"[*+?{|]")
# (a+<)+>  (a)<\1>  <(?>=a)
_NESTED_REPEAT = re.compile(r"\)[*+?{]|\\[0-9]|\(\?")
_MAX_CHOICES = 3  # repeats and alternatives of a regular expression that is tried
_MAX_STEPS = 30_000_000  # that it may take on all paths
_NUMBER = re.compile(r"[0-9]+")
# What people write for a range, and for a number from the end.
# h/<0..11>/w  h/<0-11>  <0:11>/w, and not 1.0-2
LIKE_RANGE = re.compile(r"(?<![\w.])([0-9]+)(?:\.\.|-|:)([0-9]+)(?![\w.])")
# h/<-1>/w  h/<[-2:]>/w
_LIKE_FROM_END = re.compile(r"(?:^|(?<=/))\[?(-[0-9]+)(:|\.\.)?\]?(?=/|$)")
# h/<3>/w  layer_<3>/w  h/<{0..3}>/w, and not conv2d
_NUMBERS = re.compile(r"\{[0-9][0-9.,]*\}|(?:^|(?<=[/_]))[0-9]+(?=/|$)")
# Forms of a regular expression, and the glob that says the same.
_AS_GLOB = (
    (re.compile(r"\((?:\?:)?([\w.-]+(?:\|[\w.-]+)+)\)"), r"{\1}"),
    (re.compile(r"\\d\+?|\[0-9\]\+|\\w\+|\[\^/\][*+]"), "*"),
    (re.compile(r"(?:^|(?<=/))\.[*+](?=/|$)"), "**"),
    (re.compile(r"\.[*+]"), "*"),
    (re.compile(r"\\([./_-])"), r"\1"),
)
_ROOTS_OF_PARAMS = ("dict", "FrozenDict", "State")


def unused_message(
    entries: Sequence[Any], names: Names, lists: Sequence[Sequence[Any]] = ()
) -> str:
    """Write the message for entries of one selector that match no array leaf.

    Args:
        entries: patterns, classes, or a whole selector whose parts all match something.
        names: of the tree.
        lists: as for ``unused_lines``.
    """
    named = [(entry_text(entry), entry) for entry in entries]
    lines = unused_lines(named, "selector", names, lists)
    python = (
        'Correct or remove it; or allow it with unused="ignore". Where a call takes no '
        "unused=, as masks of Optax do, pass treeadapt.Rules([(where, 1)], "
        'unused="ignore").where(1).'
    )
    lines.append(worded(python, "Correct or remove it."))
    return "\n".join(lines)


def misses(entries: int, whose: str, arrays: int, noun: str = "array") -> str:
    """Say how many entries match no array leaf.

    Args:
        entries: how many there are.
        whose: what they are entries of.
        arrays: how many array leaves the tree has.
        noun: what they are.

    Example:
        >>> print(misses(2, "rules", 5))
        2 entries of the rules match none of this tree's 5 arrays
        >>> print(misses(1, "rules", 1))
        1 entry of the rules does not match this tree's one array
    """
    one = entries == 1
    verb = "matches none of" if one else "match none of"
    if arrays == 1:
        verb = "does not match" if one else "do not match"
    count = "one array" if arrays == 1 else plural(arrays, noun)
    return f"{plural(entries, 'entry')} of the {whose} {verb} this tree's {count}"


def advice_lines(
    entries: Sequence[tuple[str, Any]], names: Names, *, lists_paths: bool = False
) -> Iterator[str]:
    """Yield one line an entry: what it is, and what the first few may have meant.

    Args:
        entries: how to call each entry, and the entry.
        names: of the tree.
        lists_paths: all paths of the tree are listed elsewhere.
    """
    for number, (text, entry) in enumerate(entries):
        is_first = number < _MAX_ADVISED
        hint = ""
        with explaining():
            hint = _advice(entry, names, lists_paths=lists_paths) if is_first else ""
        yield f"{text}{': ' if hint else ''}{hint}"


def unused_lines(
    entries: Sequence[tuple[str, Any]],
    whose: str,
    names: Names,
    lists: Sequence[Sequence[Any]] = (),
) -> list[str]:
    """Return a first line and those of ``advice_lines``, but of a few entries only.

    Entries that differ in a number are one, with the advice for the first of them. The
    paths of a small tree are listed: in a loop of somebody else's nobody can ask for
    them.
    Arguments as for ``misses`` and ``advice_lines``; ``lists`` are the lists of
    patterns that have the entries, each perhaps one path, typed as a tuple of keys.
    """
    arrays = sorted(names.arrays, key=natural)
    lists_paths = len(arrays) <= MAX_LISTED
    rows = advice_lines(_alike_as_one(entries), names, lists_paths=lists_paths)
    noun = "array or layer" if names.plan.has_layers else "array"
    first = f"{misses(len(entries), whose, len(arrays), noun)}:"
    texts = [entry for _, entry in entries if isinstance(entry, str)]
    return [
        *section(first, [*rows]),
        *_paths_as_tuples(lists, names),
        *_names_below_a_node(texts, arrays, names),
        *([paths_text(arrays)] if lists_paths else ()),
    ]


def _alike_as_one(entries: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return the first of the entries that differ in a number only, called that."""
    groups = fold([text for text, _ in entries])
    return [
        (f"{text}, the first" if len(members) > 1 else text, entries[members[0]][1])
        for text, members in groups.items()
    ]


def _paths_as_tuples(lists: Sequence[Sequence[Any]], names: Names) -> Iterator[str]:
    """Yield a line on lists of patterns that are the keys of one path of the tree."""
    keys = [
        each for each in lists[:_MAX_ADVISED] if all(isinstance(x, str) for x in each)
    ]
    if paths := names.matched("/".join(each) for each in keys if len(each) > 1):
        yield (
            "A tuple or list is of several patterns. If it is meant as one path, write "
            f"{listing(paths)}."
        )


def _names_below_a_node(
    texts: Sequence[str], arrays: Sequence[str], names: Names
) -> Iterator[str]:
    """Yield a line if several patterns match something below the node of all arrays."""
    for top in tops(arrays):
        lower = [f"{top}/{text}" for text in texts if not text.startswith("**/")]
        if len(names.matched(lower)) > 1:
            yield below_text(top, len(arrays))
            return


def tops(paths: Sequence[str]) -> list[str]:
    """Return the nodes that are above all of several paths, the topmost first.

    Example:
        >>> tops(["params/net/w", "params/net/b"]), tops(["a/w", "b/w"])
        (['params', 'params/net'], [])
    """
    if len(paths) < 2:
        return []
    first, last = min(paths).split("/"), max(paths).split("/")
    alike = itertools.takewhile(
        lambda two: two[0] == two[1], zip(first[:-1], last[:-1], strict=False)
    )
    return [*itertools.accumulate((one for one, _ in alike), "{}/{}".format)]


def below_text(top: str, num_leaves: int) -> str:
    """Say that all array leaves are below a node, and what rules for them look like."""
    return (
        f"All {num_leaves:,} leaves are below {listing([top])}: write "
        f"{listing([f'{escape(top)}/...'])} or '**/...'."
    )


def _advice(entry: Any, names: Names, *, lists_paths: bool) -> str:
    """Say what an entry that matches no array leaf may have meant.

    Args:
        entry: pattern, perhaps after the ``!`` of a list, or class; there is no advice
            for anything else.
        names: of the tree.
        lists_paths: as for ``advice_lines``.
    """
    if isinstance(entry, type):
        return names.class_advice()
    if not isinstance(entry, str):
        patterns = next(iter(entry.patterns()), None)
        some = "its patterns match some, but " if patterns is not None else ""
        return f"{some}no array satisfies it"
    sign, pattern = "!" * entry.startswith("!"), entry.removeprefix("!")
    globs = [] if all(names.is_array) else [*globs_of([pattern])]
    if any(Matcher(globs).match(names.plan)):
        return "it matches only leaves that are not arrays, and these need no rule"
    if advice := names.tied(pattern) or names.wrong_number(pattern):
        return advice
    hints = []
    proposals = _proposals(pattern, names)
    if proposals:
        texts = [
            f"{sign + text!r} ({plural(n, 'leaf')})" for text, n in proposals.items()
        ]
        hints.append(f"did you mean {' or '.join(texts)}?")
    regex = _as_regex(pattern, names)
    if regex and not (proposals and names.is_dotted):  # where '.' is a part of names
        start = "Or as" if proposals else "as"
        pasted = listing([sign + regex])
        hints.append(f"{start} a regular expression of the whole path: {pasted}")
    elif not proposals and any(_has(glob, ClassName) for glob in globs_of([pattern])):
        hints.append(names.class_advice())
    if not proposals:
        hints.append(names.layers_text(pattern))
    if not any(hints):
        like = "" if lists_paths else listing(names.like(pattern), limit=5)
        hints.append(f"paths here look like {like}" if like else "")
    return " ".join(filter(None, hints))


def _proposals(text: str, names: Names) -> dict[str, int]:
    """Find at most three globs near ``text``, with their numbers of array leaves."""
    core = text.removeprefix(REGEX_PREFIX)
    if core.strip("^$()/") in (".*", ".+"):  # of regular expressions: everything
        return {"**": len(names.arrays)}
    if len(text) > _MAX_TEXT or text in (REGEX_PREFIX, ""):
        return {}
    nearer: list[Iterable[str]] = [_as_globs(core, text)]
    if core == text:
        nearer += [
            _rewritten(text, names),
            _as_class(text, names),
            _respelled(text, names),
            _synonyms(text, names),
            _with_gap(text),
            itertools.chain.from_iterable(map(_with_gap, _synonyms(text, names))),
            _without_root(text),
        ]
    matches = next(filter(None, map(names.matched, nearer)), {})
    counts = {
        one: len(leaves)
        for one, leaves in matches.items()
        # Otherwise the same leaves are said with less.
        if not one.startswith("**/") or matches.get(one.removeprefix("**/")) != leaves
    }
    return dict(itertools.islice(counts.items(), _MAX_PROPOSALS))


def entry_text(entry: Any) -> str:
    """Write an entry as it was typed.

    Example:
        >>> entry_text("a/*"), entry_text(dict)
        ("'a/*'", 'node(dict)')
    """
    if isinstance(entry, type):
        return f"node({entry.__qualname__})"
    return shorten(repr(entry))


def pattern_text(entry: Any) -> str:
    """Write an entry as data: the pattern itself, or the text of anything else."""
    plain = entry if isinstance(entry, str) else getattr(entry, "plain", None)
    return entry_text(entry) if plain is None else plain


def _as_globs(text: str, typed: str) -> Iterator[str]:
    """Yield globs for a regular expression, and for numbers of another notation."""
    form = text.removeprefix("^").removesuffix("$")
    form = form.removeprefix(".*").removesuffix(".*").strip("/")
    for sign, instead in _AS_GLOB:
        form = sign.sub(instead, form)
    form = re.sub(r"\{[^{}]*\}", lambda match: match[0].replace("|", ","), form)
    form = LIKE_RANGE.sub(_as_range, form)
    form = _LIKE_FROM_END.sub(lambda m: f"{{{m[1]}{'..' if m[2] else ''}}}", form)
    if form != typed and form.strip("*/") and not re.search(r"[\^$|()+]", form):
        yield from _anywhere(form)
        if "*" in form.replace("**", ""):
            yield from _anywhere(re.sub(r"(?<![*/])\*(?![*/])", "/**/", form))


def _as_range(match: re.Match[str]) -> str:
    text, before = f"{match[1]}..{match[2]}", match.string[: match.start()]
    return text if before.endswith(("{", ",")) else f"{{{text}}}"


def _rewritten(text: str, names: Names) -> Iterator[str]:
    """Yield the pattern with another root, or with slashes for dots and brackets."""
    plan = names.plan
    roots = list(dict.fromkeys(path.partition("/")[0] for path in plan.paths[:5_000]))
    forms = [text]
    exact = _EXACT_KEY.sub(lambda key: f"/{key[1] or key[2] or key[3] or ''}", text)
    if "[" in text and exact != text:
        forms.append(exact.strip("/"))
    if "." in text and ".." not in text:
        forms.append(text.replace(".", "/"))
    if "\\" not in text and text.strip("/") not in ("", text):
        forms.append(text.strip("/"))
    forms.append(plan.with_layers(text))  # a path as stored, where layers are meant
    for form in dict.fromkeys(forms):
        yield from _anywhere(form)
        root, slash, below = form.partition("/")
        if slash and root == "params":
            yield below
        yield from (f"{escape(root)}/{form}" for root in roots[:4] if root)
    if "\\" not in text and names.is_dotted:
        # As PyTorch writes names: a whole path is one segment.
        dotted = text.replace("**", "*").replace("/", ".")
        for form in (dotted, dotted.removeprefix("*."), f"*.{dotted}"):
            yield from (form, f"{form}.*")


@functools.cache
def _meanings() -> Mapping[str, str]:
    """The words of parameter names that mean the same, which drafts know as well."""
    import tomllib  # here, because importing it takes longer than this library

    file = resources.files("treeadapt").joinpath("text/synonyms.toml")
    table = tomllib.loads(file.read_text("utf-8"))["words"]
    return {_plain(word): name for name, words in table.items() for word in words}


def _plain(word: str) -> str:
    return re.sub(r"[ _]", "", word.lower())


def _with_gap(text: str) -> Iterator[str]:
    """Yield the pattern with nodes left out between two of its segments."""
    segments = text.split("/")
    for place in range(1, len(segments)):
        if segments[place] not in ("*", "**"):
            yield "/".join((*segments[:place], "**", *segments[place:]))


def _without_root(text: str) -> Iterator[str]:
    for form in (text, text.replace(".", "/")):
        below = form.partition("/")[2]
        if below.strip("*/"):  # what is wild throughout is not a repair
            yield from _anywhere(below)
    dotted = text.replace("**", "*").replace("/", ".").partition(".")[2]
    if dotted.strip("*."):
        yield from (dotted, f"{dotted}.*")


def _as_class(text: str, names: Names) -> Iterator[str]:
    """Yield the pattern with ``<Name>`` for a segment that names a class."""
    classes = {*names.class_names}
    segments = text.split("/")
    if not classes.isdisjoint(segments):
        yield from _anywhere(
            "/".join(f"<{s}>" if s in classes else s for s in segments)
        )


def _respelled(text: str, names: Names) -> Iterator[str]:
    """Yield the pattern with each wrong segment spelled as the tree spells it."""
    spelled: dict[str, str] = {}  # small letters -> pattern, numbers as they are or "*"
    for word in names.words:
        spelled.setdefault(word.lower(), escape(word))
        spelled.setdefault(
            _NUMBER.sub("*", word.lower()), _NUMBER.sub("*", escape(word))
        )
    classes = {f"<{name.lower()}>": f"<{name}>" for name in names.class_names}
    speller = Speller()

    def near(segment: str) -> list[str]:
        spellings = classes if segment.startswith("<") else spelled
        return [spellings[key] for key in speller.nearest(segment.lower(), spellings)]

    for form in dict.fromkeys((text, text.replace(".", "/"))):
        yield from _replaced(form, names, near)


def _synonyms(text: str, names: Names) -> Iterator[str]:
    """Yield the pattern with the tree's words for those of other libraries."""
    meanings = _meanings()

    def alike(segment: str) -> list[str]:
        meaning = meanings.get(_plain(segment), "")
        words = names.words if meaning else ()
        return [escape(one) for one in words if meanings.get(_plain(one)) == meaning]

    yield from _replaced(text, names, alike)


def _replaced(
    text: str, names: Names, instead: Callable[[str], list[str]]
) -> Iterator[str]:
    """Yield the pattern with others for segments that no path has, one and all."""
    best = segments = text.split("/")
    for place in _misspelt(segments, names.words):
        others = instead(segments[place])
        for other in others:
            new = [*segments[:place], other, *segments[place + 1 :]]
            yield from _anywhere("/".join(new))
        if others:
            best = [*best[:place], others[0], *best[place + 1 :]]
    if best != segments:
        yield from _anywhere("/".join(best))


def _anywhere(form: str) -> tuple[str, str]:
    return form, f"**/{form}"


def _misspelt(segments: Sequence[str], words: Iterable[str]) -> list[int]:
    """Return the places of the segments that match no segment of the tree."""
    globs: dict[str, Pattern | None] = {
        one: next(globs_of([one]), None)  # None: half of a class that holds a slash
        for one in segments
        if one not in ("", "**")
    }
    asked = [glob for glob in globs.values() if glob and not glob.needs_tree]
    matched = functools.reduce(operator.or_, map(Matcher(asked).match_path, words), 0)
    right = {glob.text for place, glob in enumerate(asked) if matched >> place & 1}
    # No word can answer what counts siblings.
    right |= {one for one, glob in globs.items() if glob and _has(glob, FromEnd)}
    return [i for i, one in enumerate(segments) if one in globs.keys() - right]


def globs_of(texts: Iterable[str]) -> Iterator[Pattern]:
    """Parse what is well formed; a regular expression is never made of a hint."""
    for text in dict.fromkeys(texts):
        if not text.startswith(REGEX_PREFIX):
            with contextlib.suppress(PatternError):  # no proposal, then
                yield parse(text)


def _has(glob: Pattern, kind: type) -> bool:
    return any(isinstance(part, kind) for part in glob.elements)


def _as_regex(text: str, names: Names) -> str:
    """Write what looks like a pasted regular expression as a pattern; else ``""``.

    It matches some array, and what could take long is not tried. What it matches is a
    whole name if it can be: ``h/1`` is not ``h/10``.
    """
    core = text.removeprefix(REGEX_PREFIX)
    if len(text) > _MAX_TEXT or (core == text and not _REGEX_SIGNS.search(text)):
        return ""
    core = core.removeprefix("^").removesuffix("$")
    core = core.removeprefix(".*").removesuffix(".*").strip("/")
    is_simple = len(_CHOICE.findall(core)) <= _MAX_CHOICES
    if not core or not is_simple or _NESTED_REPEAT.search(core):
        return ""
    # A second time with each dollar as itself: a name may hold one.
    for form in dict.fromkeys((core, re.sub(r"(?<!\\)\$", r"\\$", core))):
        whole = f"(?:{form})" if "|" in form else form
        for regex in names.regexes_around(whole):
            if REGEX_PREFIX + regex != text:
                return REGEX_PREFIX + regex
    return ""


class Names:
    """The names of one tree that hints are made of; each kind is looked up once.

    Args:
        view: the tree.
        is_array: whether each leaf is an array.
    """

    def __init__(self, view: TreeView, is_array: Sequence[bool]):
        self.plan, self.is_array = view.plan, is_array
        self.arrays = [*itertools.compress(self.plan.paths, is_array)]

    @functools.cached_property
    def words(self) -> dict[str, None]:
        """The different segments of the paths of arrays, at most a few thousand."""
        words = dict.fromkeys("/".join(self.arrays).split("/"))
        return dict.fromkeys(itertools.islice(words, _MAX_WORDS))

    @functools.cached_property
    def class_names(self) -> list[str]:
        """The names of the classes above or at the first arrays."""
        paths = itertools.islice(self.arrays, _MAX_WORDS)
        classes = itertools.chain.from_iterable(map(self.plan.enclosing, paths))
        return list(dict.fromkeys(cls.__name__ for cls in classes))

    def class_advice(self) -> str:
        """Say which classes there are."""
        if not self.class_names:
            return ""
        # Neither Linen's params nor what nnx.Optimizer hands over has the model's
        # classes.
        root = self.plan.root
        lost = root is not None and root.__name__ in _ROOTS_OF_PARAMS
        cure = worded("decide on that: .bind(model)", "name that as TREE")
        cure = f"; if they were made from a model, {cure}"
        return f"classes here are {listing(self.class_names)}{cure if lost else ''}"

    def tied(self, text: str) -> str:
        """Name the first path of a leaf, for a glob that matches its second one."""
        matcher = Matcher(one for one in globs_of([text]) if not one.needs_tree)
        for second, first in self.plan.ties.items():
            below = [p for p in self.plan.paths if f"{p}/".startswith(f"{first}/")]
            for path in below:
                alias = second + path[len(first) :]
                if matcher.match_path(alias):
                    return (
                        f"{alias!r} is tied to {path!r}: one variable under two names, "
                        "of which the first counts; write the rule for that"
                    )
        return ""

    def like(self, text: str) -> list[str]:
        """Return the paths of some arrays, the most similar first."""
        sample = self.arrays[:: max(1, len(self.arrays) // 500)]
        firsts = {path.partition("/")[0]: path for path in reversed(self.arrays)}
        some = [*reversed(firsts.values())][:_MAX_TOPS]
        return Speller().nearest(text, sample, cutoff=0.3) or some

    @functools.cached_property
    def is_dotted(self) -> bool:
        """Whether names have dots in them, as PyTorch writes them."""
        return any("." in path for path in self.plan.paths[:5_000])

    def regexes_around(self, regex: str) -> list[str]:
        """Return regular expressions of whole paths that a simple one is a part of.

        The narrowest first; none if it matches inside no array's path, or might take
        long: each repeat multiplies the steps by at most the length of the path, each
        alternative by two.
        """
        try:
            search = re.compile(regex).search
        except (re.error, OverflowError):
            return []
        choices, steps = _CHOICE.findall(regex), 0
        # A whole node from the start of a path, a whole node lower, a part of a name.
        forms = (f"{regex}(/.*)?", f".*{regex}(/.*)?", f".*{regex}.*")
        is_found = [False] * len(forms)
        power = 1 + sum(choice not in "|?" for choice in choices)
        for path in self.arrays:
            steps += len(path) ** power * 2 ** len(choices)
            if steps > _MAX_STEPS:
                break
            if match := search(path):
                is_node = path[match.end() :][:1] in ("", "/")
                is_found[(match.start() > 0) if is_node else 2] = True
        return [*itertools.compress(forms, is_found)]

    def wrong_number(self, pattern: str) -> str:
        """Say which numbers there are in the place of one that nothing has."""
        if len(pattern) > _MAX_TEXT or pattern.startswith(REGEX_PREFIX):
            return ""
        for match in itertools.islice(_NUMBERS.finditer(pattern), 4):
            before, after = pattern[: match.start()], pattern[match.end() :]
            if text := self.numbers_text(before, after):
                return text
        return ""

    def layers_text(self, pattern: str) -> str:
        """Say how to name layers inside arrays; empty if none may be meant."""
        for match in _NUMBERS.finditer(pattern[:_MAX_TEXT]):
            node = pattern[: match.start()].removesuffix("/")
            if node and any(path.startswith(f"{node}/") for path in self.arrays):
                cure = worded(
                    f"Rules(..., stacks={{{node!r}: 0}})", stack_text(node, 0)
                )
                return (
                    f"if the arrays below {listing([node])} hold layers along an axis, "
                    f"name it: {cure}"
                )
        return ""

    def numbers_text(self, before: str, after: str) -> str:
        """Say which numbers there are in a place of a pattern; empty if there are none.

        Args:
            before: the pattern before the number.
            after: the pattern after it.
        """
        siblings = f"{before}{{0..{'9' * 18}}}{after}"
        leaves = self.matched([siblings]).get(siblings, ())
        prefix, suffix = before.rpartition("/")[2], after.partition("/")[0]
        number = re.compile(f"{re.escape(prefix)}([0-9]+){re.escape(suffix)}")
        segments = {one for leaf in leaves for one in self.plan.paths[leaf].split("/")}
        numbers = sorted((m[1] for m in map(number.fullmatch, segments) if m), key=int)
        if not numbers:
            return ""
        node = before.rpartition("/")[0]
        where = f"below {listing([node])}" if node and not prefix else "there"
        where = f"after {listing([before])}" if prefix else where
        few = len(numbers) < 3 or int(numbers[-1]) - int(numbers[0]) >= len(numbers)
        text = listing(numbers, write=str) if few else f"{numbers[0]} to {numbers[-1]}"
        verb = "number {} is" if len(numbers) == 1 else "numbers {} are"
        return f"the {verb.format(where)} {text}"

    def matched(self, texts: Iterable[str]) -> dict[str, list[int]]:
        """Return those of ``texts`` that match arrays, with the leaves that they do."""
        globs = list(itertools.islice(globs_of(texts), _MAX_CANDIDATES))
        if self.plan.is_flat_dict:
            globs = [glob for glob in globs if not glob.needs_tree]
        rows = collections.defaultdict(list)  # leaves that the same globs match
        for leaf, mask in enumerate(Matcher(globs).match(self.plan)):
            if mask and self.is_array[leaf]:
                rows[mask].append(leaf)
        leaves_by_text = {}
        for place, glob in enumerate(globs):
            groups = (leaves for mask, leaves in rows.items() if mask >> place & 1)
            if leaves := sorted(itertools.chain.from_iterable(groups)):
                leaves_by_text[glob.text] = leaves
        return leaves_by_text
