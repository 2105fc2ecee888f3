"""No public name and no signature changes unsaid.

``golden_signatures.txt`` holds those of the last release and what the changelog says
since. A failure here means that users' code may break: say so in the changelog, and
write the file again with ``python tests/golden_signatures.py``.
"""

from __future__ import annotations

import difflib
import sys

import golden_signatures
import pytest


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="reprs differ by version")
def test_public_names_and_signatures_are_those_of_the_golden_file():
    golden = golden_signatures.FILE.read_text("utf-8").splitlines()
    now = list(golden_signatures.lines())
    assert not list(
        difflib.unified_diff(golden, now, "golden", "now", lineterm="", n=0)
    )


def test_a_changed_signature_is_seen():
    def before(tree, *, where=None):
        pass

    def after(tree, where=None):
        pass

    described = golden_signatures.described
    assert [*described("f", before)] == ["f(tree, *, where=None)"]
    assert [*described("f", before)] != [*described("f", after)]
