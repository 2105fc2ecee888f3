"""A slow matcher that shares no code and no idea with the library's.

Rewrites the text of the pattern step by step: the first character, the first braces,
the first segment, with every number of a range tried in turn. It handles only
well-formed patterns and short ranges.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass
class NamedTree:
    """Names of a tree as nested dicts; anything that is not a dict is a leaf.

    Args:
        nodes: children by segment.
        classes_at: classes of the nodes and boxes at a path.
    """

    nodes: dict
    classes_at: dict[str, tuple[type, ...]] = field(default_factory=dict)

    @property
    def paths(self) -> list[str]:
        return list(_leaf_paths(self.nodes, ""))

    def classes(self, path: str) -> tuple[type, ...]:
        return self.classes_at.get(path, ())

    def child_names(self, path: str | None) -> Sequence[str]:
        node = self.nodes
        for name in [] if path is None else path.split("/"):
            node = node[name]
        return list(node)


def _leaf_paths(node: dict, prefix: str) -> Iterator[str]:
    for name, child in node.items():
        if isinstance(child, dict):
            yield from _leaf_paths(child, f"{prefix}{name}/")
        else:
            yield prefix + name


def selects(pattern: str, path: str, tree: NamedTree | None = None) -> bool:
    """Whether ``pattern`` selects the leaf at ``path``."""
    if pattern.startswith("re:"):
        return re.fullmatch(pattern[3:], path) is not None
    wanted, names = split(pattern), path.split("/")

    @functools.cache
    def rest(i: int, j: int) -> bool:
        if i == len(wanted):
            return True
        if wanted[i] == "**":
            return any(rest(i + 1, later) for later in range(j, len(names) + 1))
        return j < len(names) and one(wanted[i], j) and rest(i + 1, j + 1)

    def one(form: str, j: int) -> bool:
        at = "/".join(names[: j + 1])
        if form.startswith("<"):
            bases = [base for kind in tree.classes(at) for base in kind.mro()]
            return unescape(form[1:-1]) in [base.__name__ for base in bases]
        counted = counted_range(form)
        if counted is None:
            return fits(form, names[j])
        above = "/".join(names[:j]) if j else None
        return names[j] in counted_names(counted, tree.child_names(above))

    return rest(0, 0)


def split(pattern: str) -> list[str]:
    """Split at slashes; ``\\/`` is one of them."""
    segments, i = [""], 0
    while i < len(pattern):
        if pattern[i] == "/" or pattern.startswith("\\/", i):
            segments.append("")
            i += 1 + (pattern[i] == "\\")
        elif pattern[i] == "\\":
            segments[-1] += pattern[i : i + 2]
            i += 2
        else:
            segments[-1] += pattern[i]
            i += 1
    return segments


def unescape(form: str) -> str:
    return re.sub(r"\\(.)", r"\1", form, flags=re.DOTALL)


def counted_range(form: str) -> tuple[str, int, int, str] | None:
    """Text before, first, last, text after a range that counts from the end."""
    found = re.fullmatch(
        r"((?:[^\\]|\\.)*?)\{(-\d+)(?:(\.\.)(-\d+)?)?\}(.*)", form, flags=re.DOTALL
    )
    if not found:
        return None
    before, first, dots, last, after = found.groups()
    end = -1 if dots and not last else int(last or first)
    return before, int(first), end, after


def counted_names(
    counted: tuple[str, int, int, str], siblings: Sequence[str]
) -> set[str]:
    before, first, last, after = counted
    families: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for name in siblings:
        for digits in re.finditer(r"(?<![0-9])[0-9]+", name):
            left, right = name[: digits.start()], name[digits.end() :]
            if fits(before, left) and fits(after, right):
                member = int(digits.group()), name
                families.setdefault((left, right), []).append(member)
    chosen = set()
    for members in families.values():
        numbers = sorted({number for number, _ in members})
        from_end = {number: i - len(numbers) for i, number in enumerate(numbers)}
        chosen |= {
            name for number, name in members if first <= from_end[number] <= last
        }
    return chosen


def alternatives(form: str) -> tuple[list[str], str]:
    """The expansions of the braces that begin ``form``, and the text after them."""
    depth, commas, i = 1, [0], 1
    while depth:
        if depth == 1 and form[i] in ",}":
            commas.append(i)
        depth += (form[i] == "{") - (form[i] == "}")
        i = _class_end(form, i) if form[i] == "[" else i + (form[i] == "\\")
        i += 1
    inner = [form[a + 1 : b] for a, b in itertools.pairwise(commas)]
    return [text for one in inner for text in _numbers(one)], form[i:]


def _numbers(form: str) -> list[str]:
    """All numbers of a range; any other form by itself."""
    found = re.fullmatch(r"(\d+)\.\.(\d+)", form)
    if not found:
        return [form]
    first, last = found.groups()
    width = len(first) if first.startswith("0") else 0
    return [str(n).zfill(width) for n in range(int(first), int(last) + 1)]


def _class_end(form: str, i: int) -> int:
    i += 1
    while form[i] != "]":
        i += 2 if form[i] == "\\" else 1
    return i


@functools.lru_cache(maxsize=100_000)
def fits(glob: str, text: str) -> bool:
    """Whether a glob within a segment matches all of ``text``."""
    if not glob:
        return not text
    if glob[0] == "{":
        begins, rest = alternatives(glob)
        return any(fits(begin + rest, text) for begin in begins)
    if glob[0] == "*":
        return fits(glob[1:], text) or (bool(text) and fits(glob, text[1:]))
    if not text:
        return False
    if glob[0] == "?":
        return fits(glob[1:], text[1:])
    if glob[0] == "[":
        end = _class_end(glob, 0)
        return _in_class(glob[1:end], text[0]) and fits(glob[end + 1 :], text[1:])
    escaped = glob[0] == "\\"
    return glob[escaped] == text[0] and fits(glob[1 + escaped :], text[1:])


def _in_class(body: str, char: str) -> bool:
    if body.startswith("!"):
        return not _in_class(body[1:], char)
    items = re.findall(r"(\\.|[^\\])(?:-(\\.|[^\\]))?", body, flags=re.DOTALL)
    return any(a[-1] <= char <= (b or a)[-1] for a, b in items)
