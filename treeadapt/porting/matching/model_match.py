"""What ``match_models`` found: a table, and what it rests on."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from treeadapt.migrations.migration import Migration
from treeadapt.text.names import fold, plural, section

_MOST_NAMES = 8


@dataclasses.dataclass(frozen=True)
class ModelMatch:
    """A table between two models, or where the search stopped; printed, it is a report.

    Attributes:
        found: whether there is a table with which both models answer alike.
        migration: the table; None unless found.
        after: largest difference of the answers with it, on the source and on two
            random sources, of usual size and small: see ``find_wrong_rows`` for the
            measure. With ``more=``, on that size too. Infinite if nothing that pairs
            all parts was compared.
        unseen: leaves of the target of which some entries influence no answer, and
            their share: tokens, positions and experts that the inputs do not reach.
            The table is not proved there.
        undecided: paths of the source whose exchange changes no answer, or one path
            whose order of axes does not. Names decide them; their rows have a mark.
        unused: leaves of the source that the table drops.
        kept: leaves of the target that keep their own numbers.
        why: what is to know. If nothing was found, first what the models differ in, as
            far as it was measured, then where the search stopped.
        nearest: a table that pairs everything, but with which the answers differ: the
            models differ elsewhere, as GELU by tanh and by erf, or the table is not
            that of another size. None if found.
        evaluations: how often a model was called.
    """

    found: bool
    migration: Migration | None
    after: float
    unseen: Mapping[str, float]
    undecided: tuple[tuple[str, ...], ...]
    unused: tuple[str, ...]
    kept: tuple[str, ...]
    why: tuple[str, ...]
    nearest: Migration | None
    evaluations: int

    @property
    def verdict(self) -> str:
        """``proved``, ``proved but for unseen``, ``nearest`` or ``none``."""
        if self.found:
            return "proved but for unseen" if self.unseen else "proved"
        return "nearest" if self.nearest is not None else "none"

    def to_json(self) -> str:
        """Return the match as JSON, for a program that decides what to do.

        The table is under ``migration``, or ``nearest``, as the text of its file.
        """
        fields: dict[str, Any] = {"verdict": self.verdict}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Migration):
                value = value.to_toml()
            if isinstance(value, float) and not math.isfinite(value):
                value = None
            fields[field.name] = dict(value) if isinstance(value, Mapping) else value
        return json.dumps(fields, indent=2)

    def __str__(self) -> str:
        lines = [
            f"unseen: {share:.0%} of {path}: no answer depends on these numbers"
            for path, share in self.unseen.items()
        ]
        reason, *whys = self.why or ("",)
        if self.found:
            whys = [*self.why]
        elif reason:
            lines.append(f"Not found: {reason}.")
        title = _TITLES[self.verdict]
        if not self.found and math.isfinite(self.after):
            title = _PAIRED[self.nearest is not None]
        lines.append(title.format(after=self.after))
        table = self.migration if self.found else self.nearest
        if table is not None:
            shows = "answers" if self.found else "near"
            for row in (row for each in table.tables for row in each.rows):
                source, target = row.typed()
                lines.append(f"  {source!r}: {target!r}  ({row.notes.check or shows})")
        undecided = [" and ".join(fold(paths)) for paths in self.undecided]
        for title, texts in (
            ("no answer tells apart, names decide:", undecided),
            ("of the source, not used:", fold(self.unused)),
            ("of the target, kept as they are:", fold(self.kept)),
            ("to know:", whys),
        ):
            lines += section(title, [*texts][:_MOST_NAMES])
        return "\n".join([*lines, plural(self.evaluations, "evaluation")])


_TITLES = {
    "proved": "Found: with this table the answers differ by {after:.2g}.",
    "proved but for unseen": (
        "Found, but for the numbers above: with this table the answers differ by "
        "{after:.2g}."
    ),
    "nearest": "This table pairs all parts, and it is not proved:",
    "none": "Nothing that was tried pairs all parts so that the answers are the same.",
}
#: Where answers were compared, by whether there is a table.
_PAIRED = {
    True: "This table pairs all parts, but with it the answers differ by {after:.2g}:",
    False: (
        "All parts are paired, and then the answers differ by {after:.2g}; what is "
        "missing is a table that says it."
    ),
}
