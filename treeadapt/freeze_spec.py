"""Freeze specs: what is frozen, as data that can be saved and checked.

Takes patterns and, once bound to a tree, the paths that they selected there; gives a
selector, a file, and an error when a leaf that was frozen is not any more: a renamed
layer thaws in silence everywhere else.
Which leaves patterns select is up to ``selectors``; files are read by ``rules_file``.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from treeadapt import rules_file
from treeadapt._arrays import is_array
from treeadapt.decisions import Case, Survey
from treeadapt.errors import FreezeError, SelectorError, plural
from treeadapt.plans import TreeView, view_tree
from treeadapt.repairs import Speller
from treeadapt.selectors import Listed, Selector

_SHOWN = 8
_CANDIDATES = 2_000


@dataclasses.dataclass(frozen=True, repr=False)
class FreezeSpec(Selector):
    """The selector of what is frozen, as data.

    Args:
        freeze: a pattern, or several: their union minus those that start with ``!``.
        paths: the array leaves that were frozen when the spec was bound; None before.

    Raises:
        SelectorError: ``freeze`` or ``paths`` holds anything but strings.
        PatternError: a pattern is malformed.

    Example:
        >>> spec = FreezeSpec(freeze="encoder").bind({"encoder": jnp.ones(2)})
        >>> spec
        FreezeSpec(freeze=['encoder'], paths=['encoder'])
        >>> spec.check({"backbone": jnp.ones(2)})
        Traceback (most recent call last):
        treeadapt.errors.FreezeError: 1 leaf that was frozen is not frozen any more:
          'encoder' is gone; the nearest name is 'backbone', which trains
        ...
    """

    freeze: tuple[str, ...]
    paths: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "freeze", _strings("freeze", self.freeze))
        if self.paths is not None:
            object.__setattr__(self, "paths", _strings("paths", self.paths))
        _ = self._patterns  # complains about a malformed pattern now

    def __repr__(self) -> str:
        paths = self.paths
        if paths is None:
            return f"FreezeSpec(freeze={list(self.freeze)})"
        shown = list(paths) if len(paths) <= 4 else f"<{plural(len(paths), 'path')}>"
        return f"FreezeSpec(freeze={list(self.freeze)}, paths={shown})"

    @functools.cached_property
    def _patterns(self) -> Listed:
        return Listed(self.freeze)

    @functools.cached_property
    def may_be_empty(self) -> bool:
        """Whether there is no pattern: nothing is to be frozen."""
        return not self.freeze

    @functools.cached_property
    def key(self) -> Hashable | None:
        """The key of the patterns."""
        return self._patterns.key

    def patterns(self) -> Iterator[str]:
        """Yield the patterns."""
        yield from self._patterns.patterns()

    def ask(self, case: Case) -> bool | None:
        """Ask the patterns."""
        return self._patterns.ask(case)

    def unused(self, survey: Survey) -> Iterator[str | type]:
        """Yield the patterns that hit nothing."""
        yield from self._patterns.unused(survey)

    def select(self, view: TreeView, *, reports: bool) -> list[bool]:
        """Decide every leaf of a tree.

        By the patterns; by the recorded paths where patterns ask for classes or
        siblings that a flat dict no longer has.
        """
        if view.plan.is_flat_dict and self._recorded is not None:
            return [path in self._recorded for path in view.plan.paths]
        return super().select(view, reports=reports)

    def _settled(self, path: str, **facts: Any) -> bool:
        if self._recorded is not None:
            return path in self._recorded
        return super()._settled(path, **facts)

    @functools.cached_property
    def _recorded(self) -> frozenset[str] | None:
        """The recorded paths, if patterns alone cannot answer without the full tree."""
        if self.paths is None or not self._program.needs_tree:
            return None
        return frozenset(self.paths)

    def bind(self, tree: Any) -> FreezeSpec:
        """Record which leaves of a tree are frozen.

        Args:
            tree: the full tree, concrete or abstract.

        Returns:
            Spec with the paths of the array leaves that the patterns select.

        Raises:
            UnusedRuleError: a pattern hits no array leaf.
        """
        view = view_tree(tree)
        chosen = self.select(view, reports=True)
        rows = zip(view.plan.paths, view.leaves, chosen, strict=True)
        paths = tuple(path for path, leaf, yes in rows if yes and is_array(leaf))
        return FreezeSpec(self.freeze, paths)

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
        chosen = self.select(view, reports=False)
        now = dict(zip(view.plan.paths, chosen, strict=True))
        lost = [path for path in self.paths if not now.get(path, False)]
        if lost:
            raise FreezeError(_thaw_message(lost, now, frozenset(self.paths)))

    def to_toml(self) -> str:
        """Write the spec as a file, for ``FreezeSpec.load``.

        Example:
            >>> print(FreezeSpec(["encoder", "!**/bias"]).to_toml(), end="")
            version = 1
            freeze = ["encoder", "!**/bias"]
        """
        fields: dict[str, Any] = {"freeze": list(self.freeze)}
        if self.paths is not None:
            fields["paths"] = list(self.paths)
        return rules_file.write_toml(fields)

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
        document = rules_file.read_file(path)
        rules_file.check_fields(path, document, ("freeze", "paths"))
        freeze = document.get("freeze")
        freeze = [freeze] if isinstance(freeze, str) else freeze
        limit = rules_file.MAX_PATTERNS
        patterns = rules_file.check_strings(path, "freeze", freeze, limit)
        rules_file.check_patterns(path, patterns, allow_regex=allow_regex)
        if "paths" not in document:
            return cls(tuple(patterns))
        limit = rules_file.MAX_PATHS
        paths = rules_file.check_strings(path, "paths", document["paths"], limit)
        return cls(tuple(patterns), tuple(paths))


def _strings(name: str, given: Any) -> tuple[str, ...]:
    texts = (given,) if isinstance(given, str) else given
    if not isinstance(texts, list | tuple) or not all(
        isinstance(x, str) for x in texts
    ):
        raise SelectorError(
            f"FreezeSpec({name}=): strings are wanted, so that the spec can be saved; "
            f"got {given!r}. For a class write the pattern '**/<Name>'."
        )
    return tuple(str.__str__(text) for text in texts)


def _thaw_message(
    lost: Sequence[str], now: dict[str, bool], before: frozenset[str]
) -> str:
    speller = Speller()
    new = [path for path in now if path not in before][:_CANDIDATES]
    count = plural(len(lost), "leaf")
    verb = (
        "was frozen is not frozen" if len(lost) == 1 else "were frozen are not frozen"
    )
    lines = [f"{count} that {verb} any more:"]
    for path in lost[:_SHOWN]:
        if path in now:
            lines.append(f"  {path!r} is there, but no pattern selects it")
            continue
        near = speller.nearest(path, new, count=1, cutoff=0.3)
        state = "is frozen" if near and now[near[0]] else "trains"
        hint = f"; the nearest name is {near[0]!r}, which {state}" if near else ""
        lines.append(f"  {path!r} is gone{hint}")
    if len(lost) > _SHOWN:
        lines.append(f"  and {len(lost) - _SHOWN:,} more")
    lines.append("Correct the patterns; or, if this is meant, spec = spec.bind(tree).")
    return "\n".join(lines)
