"""A mistake in a rules file is said by every command, in each form and at any depth."""

from __future__ import annotations

import numpy as np
import pytest
from command import invoke

PLANTED = {
    "typo": ('"encodr" = "frozen"\n"**" = "train"\n', "encodr"),
    "order": ('"**" = "train"\n"encoder" = "frozen"\n', "earlier rules"),
    "gap": ('"encoder/block_0" = "frozen"\n', "without a rule"),
    "part": ('"encoder/{block_0,blok_1}" = "a"\n"**" = "b"\n', "blok_1"),
}
FORMS = [
    [*form, *depth]
    for form in (
        [],
        *(["--format", name] for name in ("table", "tree", "markdown", "json")),
        *(["--output", f"report.{ending}"] for ending in ("svg", "html", "md")),
    )
    for depth in ([], ["--depth", "1"], ["--depth", "2"])
]
LINT = [["--format", name] for name in ("text", "json", "github")]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    leaves = {f"encoder/block_{n}/kernel": np.ones((2, 2)) for n in range(3)}
    np.savez("m.npz", **leaves)
    return tmp_path


@pytest.mark.parametrize("mistake", PLANTED)
@pytest.mark.parametrize(
    "options", [*(("show", *f) for f in FORMS), *(("lint", *f) for f in LINT)], ids=str
)
def test_no_form_hides_a_mistake(here, mistake, options):
    rows, says = PLANTED[mistake]
    (here / "r.toml").write_text(f"version = 1\n[rules]\n{rows}")
    command, *others = options
    result = invoke(command, "m.npz", "--rules", "r.toml", *others)
    assert result.exit_code == (1 if command == "lint" else 0)
    written = "".join(file.read_text() for file in here.glob("report.*"))
    text = " ".join(f"{result.output}{written}".split())
    assert says in text
    assert any(kind in text.lower() for kind in ("unused", "shadow", "unmat", "altern"))
