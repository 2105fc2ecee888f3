"""No public name and no signature changes unsaid.

``golden_signatures.txt`` holds those of the last release and what the changelog says
since. A failure here means that users' code may break: say so in the changelog, and
write the file again with ``python tests/golden_signatures.py``.
"""

from __future__ import annotations

import difflib
import pydoc
import re
import sys

import golden_signatures
import pytest

import treeadapt as ta


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


def test_the_package_lists_its_public_names_and_no_others():
    assert dir(ta) == ta.__all__
    assert "importlib" not in dir(ta)


def test_selectors_and_rules_show_what_is_for_users():
    names = {
        "matches bind": ta.glob("a") | ta.leaf(ndim=1),
        "matches bind check to_toml load freeze paths": ta.FreezeSpec("a"),
        "match by_path where bind to_toml values default unused overlap stacks "
        "expect": ta.Rules({"a": 1}),
    }
    for shown, thing in names.items():
        public = [name for name in dir(thing) if not name.startswith("_")]
        assert public == sorted(shown.split())
        assert all(hasattr(thing, name) for name in public)


@pytest.mark.slow
def test_help_begins_with_ten_names_and_has_all_others_by_task_errors_last():
    text = pydoc.plain(pydoc.render_doc(ta))
    first, others = ta.__doc__.split("All others, by task::")
    ten = re.findall(r"^    (\w+)\(", first, re.MULTILINE)
    assert len(ten) == 10
    assert text.index("split(tree, where)") < text.index("PACKAGE CONTENTS")
    listed = [
        *ten,
        *re.findall(r"\w+", re.sub(r"^    (their )?\w+ ", "", others, flags=re.M)),
    ]
    errors = [name for name in ta.__all__ if name.endswith(("Error", "Warning"))]
    tail = ["TreeAdaptError", "TreeAdaptWarning"]
    names = [name for name in listed if name in ta.__all__]
    assert names[-2:] == tail
    assert sorted(names) == sorted(
        {*ta.__all__, *tail} - {*errors, "__version__"} | {*tail}
    )


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("multi_transform", "partition"),
        ("tree_map_with_path", "map_where"),
        ("flatten", "to_flat_dict"),
        ("freeze_params", "freeze"),
        ("masked", "optax.masked"),
        ("load_report", "compare_checkpoint"),
        ("partion", "partition"),
    ],
)
def test_a_name_of_another_library_leads_to_ours(name, ours):
    with pytest.raises(AttributeError, match=rf"Did you mean .*{ours}"):
        getattr(ta, name)


def test_what_python_asks_for_has_no_hint():
    assert not hasattr(ta, "__wrapped__")
    with pytest.raises(AttributeError, match=r"'_unknown'$"):
        ta._unknown  # noqa: B018
