"""Freeze specs: what is frozen, as data that can be saved and checked.

Takes patterns and, once bound to a tree, the paths that they selected there; gives a
selector, a file, and an error when a leaf that was frozen is not any more: a renamed
layer thaws in silence everywhere else.
See ``selectors`` for which leaves patterns select, ``files`` for the file.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Any

from treeadapt.errors import FreezeError, SelectorError
from treeadapt.selection import files
from treeadapt.selection.answers import Answers
from treeadapt.selection.arguments import argument_text
from treeadapt.selection.leaves import Leaves
from treeadapt.selection.selectors import (
    Bound,
    ListSelector,
    OfParts,
)
from treeadapt.text.data_files import FileField
from treeadapt.text.names import Speller, fold, plural, section
from treeadapt.trees.arrays import is_array
from treeadapt.trees.views import TreeView, view_tree

_FOLDED = 100  # leaves that are looked at for a message
_PATHS = FileField("a list of strings", 'it as ["encoder/kernel"]', files.MAX_PATHS)
_FIELDS = {
    "freeze": FileField(
        "a list of strings",
        'freeze = ["encoder", "!**/bias"]',
        files.MAX_PATTERNS,
        is_required=True,
    ),
    "paths": _PATHS,
    "others": _PATHS,
}


@dataclasses.dataclass(frozen=True, repr=False)
class FreezeSpec(OfParts):
    """The selector of what is frozen, as data.

    Args:
        freeze: a pattern, or several: their union minus those that start with ``!``.
        paths: the array leaves that were frozen when the spec was bound; None before.
        others: the other array leaves of that tree; None before.

    Raises:
        SelectorError: a field holds anything but strings.
        PatternError: a pattern is malformed.

    Example:
        >>> params = {"encoder": {"w": jnp.ones(2)}, "head": {"w": jnp.ones(2)}}
        >>> spec = FreezeSpec(freeze="encoder").bind(params)
        >>> spec
        FreezeSpec(freeze=['encoder'], paths=['encoder/w'])
        >>> spec.check({"backbone": params["encoder"], "head": params["head"]})
        Traceback (most recent call last):
        treeadapt.errors.FreezeError: 1 leaf that was frozen is not frozen any more:
          'encoder/w' is gone; the nearest name is 'backbone/w', which trains
        ...
    """

    for_users = OfParts.for_users | {"check", "to_toml", "load", "freeze", "paths"}

    freeze: tuple[str, ...]
    paths: tuple[str, ...] | None = None
    others: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in _FIELDS:
            texts = getattr(self, name)
            if texts is not None or name == "freeze":
                object.__setattr__(self, name, _strings(name, texts))
        _ = self.parts  # complains about a malformed pattern now

    def __repr__(self) -> str:
        paths = self.paths
        if paths is None:
            return f"FreezeSpec(freeze={list(self.freeze)})"
        shown = list(paths) if len(paths) <= 4 else f"<{plural(len(paths), 'path')}>"
        return f"FreezeSpec(freeze={list(self.freeze)}, paths={shown})"

    @functools.cached_property
    def parts(self) -> tuple[ListSelector]:  # type: ignore[override]
        """The selector of the patterns."""
        return (ListSelector(self.freeze),)

    def select(self, leaves: Leaves) -> list[bool]:
        """Answer as the patterns do."""
        return self.parts[0].select(leaves)

    def decide(
        self, view: TreeView, *, reports: bool, is_part: bool = False
    ) -> Answers:
        """Decide every leaf of a tree.

        By the patterns; by the recorded paths where patterns ask for classes or
        siblings that a flat dict no longer has.
        """
        if view.plan.is_flat_dict and self._recorded is not None:
            return self._recorded.decide(view, reports=reports)
        return super().decide(view, reports=reports, is_part=is_part)

    def _at_path(self, path: str, *leaf: Any) -> bool:
        if self._recorded is None:
            return super()._at_path(path, *leaf)
        return self._recorded._at_path(path, *leaf)

    @functools.cached_property
    def _recorded(self) -> Bound | None:
        """The recorded paths, if patterns alone cannot answer without the full tree."""
        if self.paths is None or not self.needs_tree:
            return None
        recorded = dict.fromkeys(self.others or (), False)
        recorded |= dict.fromkeys(self.paths, True)
        return Bound(self, Answers([*recorded], [*recorded.values()]))

    def bind(self, tree: Any) -> FreezeSpec:
        """Record which leaves of a tree are frozen.

        Args:
            tree: the full tree, concrete or abstract.

        Returns:
            Spec with the paths of the array leaves that the patterns select, and of
            the others.

        Raises:
            UnusedRuleError: a pattern matches no array leaf.
        """
        view = view_tree(tree)
        frozen, others = list[str](), list[str]()
        chosen = self.decide(view, reports=True).of(view)
        for (path, leaf), yes in zip(view.items(), chosen, strict=True):
            if is_array(leaf):
                (frozen if yes else others).append(path)
        return FreezeSpec(self.freeze, tuple(frozen), tuple(others))

    def check(self, tree: Any) -> None:
        """Raise if a leaf that was frozen when the spec was bound is not now.

        Args:
            tree: the full tree as it is now.

        Raises:
            FreezeError: it names the leaves, and what each may be called now.
            SelectorError: the spec was never bound.
        """
        if self.paths is None:
            raise SelectorError(
                f"{self!r} was never bound, so there is nothing to compare with. "
                "Record what is frozen first: spec = spec.bind(tree)."
            )
        view = view_tree(tree)
        chosen = self.decide(view, reports=False).of(view)
        now = dict(zip(view.plan.paths, chosen, strict=True))
        lost = [path for path in self.paths if not now.get(path, False)]
        if lost:
            before = frozenset((*self.paths, *(self.others or ())))
            raise FreezeError(_thaw_message(lost, now, before), paths=lost)

    def to_toml(self) -> str:
        """Write the spec as a file, for ``FreezeSpec.load``.

        Example:
            >>> print(FreezeSpec(["encoder", "!**/bias"]).to_toml(), end="")
            version = 1
            freeze = ["encoder", "!**/bias"]
        """
        fields = {name: getattr(self, name) for name in _FIELDS}
        lists = {name: list(it) for name, it in fields.items() if it is not None}
        return files.write_toml(lists)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, allow_regex: bool = False
    ) -> FreezeSpec:
        """Read a spec from a TOML or JSON file.

        Args:
            path: file name, ending in ``.toml`` or ``.json``. The file is read as data.
            allow_regex: accept ``re:`` patterns, in a file that you trust.

        Raises:
            RulesFileError: the file cannot be read, is malformed, or too large.
            PatternError: a pattern is malformed.
        """
        fields = files.RULES_FILE.read(path)
        if isinstance(fields.get("freeze"), str):
            fields["freeze"] = [fields["freeze"]]
        files.RULES_FILE.check(path, fields, _FIELDS)
        files.check_patterns(path, fields["freeze"], allow_regex=allow_regex)
        return cls(**fields)  # makes tuples of lists


def _strings(name: str, value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    is_list = isinstance(texts, list | tuple)
    if not is_list or not all(isinstance(text, str) for text in texts):
        raise SelectorError(
            f"FreezeSpec({name}=): expected strings, so that the spec can be saved; "
            f"got {argument_text(value)}. For a class write the pattern '**/<Name>'."
        )
    return tuple(str.__str__(text) for text in texts)


def _thaw_message(
    lost: Sequence[str], now: dict[str, bool], before: frozenset[str]
) -> str:
    speller = Speller()
    new = [path for path in now if path not in before]
    count = plural(len(lost), "leaf")
    verb = "was frozen is" if len(lost) == 1 else "were frozen are"
    rows = fold(_line(path, now, new, speller) for path in lost[:_FOLDED])
    left = len(lost[_FOLDED:])
    lines = section(f"{count} that {verb} not frozen any more:", rows, left=left)
    lines.append("Correct the patterns; or, if this is meant, spec = spec.bind(tree).")
    return "\n".join(lines)


def _line(path: str, now: dict[str, bool], new: Sequence[str], speller: Speller) -> str:
    if path in now:
        return f"{path!r} is still there, but no pattern selects it"
    near = speller.best(path, new, cutoff=0.3)
    state = "is frozen" if near and now[near] else "trains"
    hint = f"; the nearest name is {near!r}, which {state}" if near else ""
    return f"{path!r} is gone{hint}"
