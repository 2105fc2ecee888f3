"""Pictures of reports: what they add up, what they fold, what they let no name do."""

from __future__ import annotations

import collections
import html.parser
import itertools
import re
import runpy
import warnings
import xml.etree.ElementTree as ET
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sizes import full, some
from trees import TREES

import treeadapt as ta
from treeadapt.reports.outline import every
from treeadapt.reports.palette import GAP_COLOR, HUES, SCALE, STATIC_COLOR, paints
from treeadapt.reports.text import lines, plain
from treeadapt.reports.words import columns, fitted

REPOSITORY = Path(__file__).parent.parent
SVG = "{http://www.w3.org/2000/svg}"

every_tree = pytest.mark.parametrize("row", TREES, ids=lambda row: row.name)


@pytest.fixture(autouse=True)
def _positions_are_fine():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ta.UnstablePathWarning)
        yield


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def blocks(count, **leaves):
    return [dict(leaves) for _ in range(count)]


def rows_of(summary, *, limit=10_000, width=10_000, depth=None):
    return list(every(summary.outline(depth=depth).rows(limit, width)))


def texts(svg):
    return ["".join(one.itertext()) for one in ET.fromstring(svg).iter(f"{SVG}text")]


class Tags(html.parser.HTMLParser):
    """The tags of a page, each of which must be closed; and its text."""

    def __init__(self, page):
        super().__init__()
        self.seen, self.open, self.text = set(), [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


# What a picture adds up


@pytest.mark.parametrize("row", some(TREES), ids=lambda row: row.name)
def test_the_legend_and_the_tree_add_up_to_what_the_rules_decided(row):
    tree = row.make()
    rules = ta.Rules({"**/{w,kernel,0}": "a", "{hidden,1}": "b"}, default="c")
    outline = ta.summarize(tree, rules).outline()
    matches = rules.match(tree)
    decided = collections.Counter(
        "static" if value is ta.STATIC else value for value in matches.values
    )
    assert {one.text: one.num_leaves for one in outline.labels} == decided
    counts = {
        outline.labels[place].text: part[0]
        for place, part in outline.root.parts.items()
    }
    assert counts == decided
    sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves(ta.split(tree)[0])]
    assert outline.root.size_bytes >= sum(sizes)
    assert sum(one.size_bytes for one in outline.labels) == outline.root.size_bytes


@every_tree
def test_what_is_below_a_row_adds_up_to_it(row):
    summary = ta.summarize(row.make(), ta.Rules({"**/w": "a"}, default="b"))
    outline = summary.outline()
    for limits in ((10_000, 10_000), (5, 2), (0, 1)):
        shown = outline.rows(*limits)
        for node, below in [
            (outline.root, shown),
            *((r.node, r.children) for r in every(shown)),
        ]:
            if below:
                nodes = [one.node for one in below]
                assert sum(one.num_leaves for one in nodes) == node.num_leaves
                assert sum(one.num_params for one in nodes) == node.num_params
                assert sum(one.size_bytes for one in nodes) == node.size_bytes
                assert sum(sum(s for _, s in n.parts.values()) for n in nodes) == (
                    node.size_bytes
                )


# What it folds


def test_a_range_of_siblings_is_the_pattern_that_selects_them():
    tree = {"net": {"blocks": blocks(12, w=array(2), b=array(3)), "head": array(2)}}
    summary = ta.summarize(tree, {"**/{2..7}": "frozen", "**": "train"})
    folded = [row for row in rows_of(summary) if "{" in row.path]
    assert [row.path for row in folded if row.children] == [
        "net/blocks/{0,1,8,9,10,11}",
        "net/blocks/{2..7}",
    ]
    for row in folded:
        assert sum(jax.tree.leaves(ta.glob(row.path)(tree))) == row.node.num_leaves


def test_siblings_fold_only_if_names_kinds_labels_and_rules_agree():
    def names(tree, rules=None):
        return [row.path for row in rows_of(ta.summarize(tree, rules)) if not row.level]

    alike = {f"h_{n}": array(2) for n in range(4)}
    assert names(alike) == ["h_{0..3}"]
    assert names(alike | {"h_1": array(3)}) == ["h_{0,2,3}", "h_1"]
    assert names(alike | {"h_1": array(2, dtype=jnp.int32)}) == ["h_{0,2,3}", "h_1"]
    assert names(alike, {"h_1": "a", "**": "b"}) == ["h_{0,2,3}", "h_1"]
    assert names(alike, [("h_1", "b"), ("**", "b")]) == ["h_{0,2,3}", "h_1"]
    assert names(alike | {"h_1": {"w": array(2)}}) == ["h_{0,2,3}", "h_1/w"]
    assert names({"a": array(2), "b": array(2), "c": array(2)}) == ["a", "b", "c"]
    assert names({"h_0": array(2), "h_1": array(2)}) == ["h_0", "h_1"]
    padded = {name: array(2) for name in ("00", "01", "02", "0", "1", "2")}
    assert names(padded) == ["{0..2}", "{00..02}"]


def test_nodes_with_one_child_join_it():
    tree = {"params": {"Dense_0": {"kernel": array(2)}, "Dense_1": {"bias": array(2)}}}
    paths = [row.path for row in rows_of(ta.summarize(tree))]
    assert paths == ["params", "params/Dense_0/kernel", "params/Dense_1/bias"]


def test_a_leaf_may_be_where_a_node_is():
    flat = {"a": array(2), "a/b": array(3), "a/c": array(4)}
    rows = rows_of(ta.summarize(flat))
    assert [(row.path, row.node.is_leaf) for row in rows] == [
        ("a", True),
        ("a", False),
        ("a/b", True),
        ("a/c", True),
    ]


def test_what_has_several_labels_is_opened_first():
    plain = {f"m{c}": array(2) for c in "abcdef"}
    mixed = {"w": array(2), "b": array(1)}
    tree = {"aa": plain, "bb": plain, "zz": {"deep": {"er": mixed, "es": array(9)}}}
    summary = ta.summarize(tree, {"**/b": "no_decay", "**": "train"})
    shown = rows_of(summary, limit=8)
    assert [row.path for row in shown if row.children] == ["zz/deep", "zz/deep/er"]
    assert len(rows_of(summary, limit=30)) == 3 + 6 + 6 + 2 + 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wide", "deep", "layers", "unlike"])
def test_a_large_tree_is_one_page(kind):
    count = full(22_213, 1_213)
    tree = {
        "wide": lambda: {f"{n}{'ab'[n % 2]}": array(1 + n % 977) for n in range(count)},
        "deep": lambda: {"/".join("ab" * 30 + str(n)): array(1) for n in range(count)},
        "layers": lambda: {"x": blocks(count // 2, w=array(3), b=array(2))},
        "unlike": lambda: [{"w": array(n), "b": array(n)} for n in range(count // 2)],
    }[kind]()
    summary = ta.summarize(tree, ta.Rules({"**/*b": "no_decay"}, default="train"))
    assert len(rows_of(summary, limit=44, width=28)) <= 44
    picture, page, part = summary.to_svg(), summary.to_html(), summary._repr_html_()
    assert len(picture) < 60_000
    assert len(page) < 3_000_000
    assert len(part) < 600_000
    assert len(summary.to_text()) < 12_000
    assert "".join(texts(picture)).count(f"{len(summary.rows):,} leaves") >= 1


@pytest.mark.slow
def test_thousands_of_labels_are_one_page():
    count = full(5_000, 2_000)
    tree = {"net": {f"w{n}": array(1 + n % 7) for n in range(count)}}
    rules = ta.Rules([(f"net/w{n}", n / count) for n in range(count)])
    summary = ta.summarize(tree, rules)
    assert len(summary.to_svg()) < 60_000
    assert len(summary.to_html()) < 1_000_000
    assert len(summary._repr_html_()) < 600_000
    assert len(summary.to_text()) < 12_000
    (net,) = rows_of(summary)[:1]
    assert len(net.node.parts) == count
    shares = [share for _, share in net.node.cells]
    assert len(shares) <= 60
    assert sum(shares) == pytest.approx(1)
    assert f"{count:,} labels" in texts(summary.to_svg())


def test_a_long_legend_shows_both_ends_and_what_is_between():
    tree = {f"w{n}": array(n + 1) for n in range(40)}
    summary = ta.summarize(tree, ta.Rules([(f"w{n}", f"g{n}") for n in range(40)]))
    between = "… 31 more labels"
    shown = texts(summary.to_svg())
    assert [text for text in shown if text in ("g5", "g6", "g36", "g37", between)][
        :3
    ] == [
        "g5",
        between,
        "g37",
    ]
    place = shown.index(between)
    assert shown[place + 1 : place + 5] == ["31", "682", "2.7 KiB", "83%"]
    assert f"{between}      31     682  2.7 KiB    83%\n" in summary.to_text()
    assert f"| `{between}` | 31 | 682 | 2.7 KiB | 83% |  |" in summary.to_markdown()
    assert "more labels" not in summary.to_html()


def test_a_sampled_bar_keeps_what_is_large():
    tree = {"net": {f"w{n}": array(1) for n in range(100)} | {"x": array(300)}}
    rules = [(f"net/w{n}", str(n)) for n in range(100)]
    summary = ta.summarize(tree, ta.Rules([*rules, ("**", "large")]))
    cells = dict(rows_of(summary)[0].node.cells)
    place = next(i for i, total in enumerate(summary.totals) if total.label == "large")
    assert cells[place] == 0.75


def test_long_names_keep_to_their_column():
    long = "x" * 3_000
    tree = {long: array(*[1] * 39), "a": array(2)}
    summary = ta.summarize(tree, {"x*": long, "**": "b"})
    assert max(map(len, texts(summary.to_svg()))) < 100
    assert len(summary.to_svg()) < 12_000
    assert max(map(len, summary.to_text().splitlines())) < 200


def dotted(layers=12):
    """Names as PyTorch writes them: one segment each."""
    names = ("ln_1.weight", "ln_1.bias", "attn.c_attn.weight", "mlp.0.weight")
    tree = {f"h.{n}.{name}": array(4) for n in range(layers) for name in names}
    return tree | {"wte.weight": array(9), "ln_f.weight": array(4)}


def test_dotted_names_fold_by_each_number():
    rows = rows_of(ta.summarize(dotted()))
    assert [row.path for row in rows] == [
        "h.{0..11}",
        "h.{0..11}.attn.c_attn.weight",
        "h.{0..11}.ln_1",
        "h.{0..11}.ln_1.bias",
        "h.{0..11}.ln_1.weight",
        "h.{0..11}.mlp.0.weight",
        "ln_f.weight",
        "wte.weight",
    ]
    assert [row.node.num_leaves for row in rows][:3] == [48, 12, 24]
    tree = dotted()
    for row in rows:  # the path of a leaf, and of a node with .*, selects it
        pattern = row.path if row.node.is_leaf else f"{row.path}.*"
        assert sum(jax.tree.leaves(ta.glob(pattern)(tree))) == row.node.num_leaves
    experts = {f"h.{n}.expert.{e}.w": array(2) for n in range(4) for e in range(8)}
    (row,) = rows_of(ta.summarize(experts))
    assert row.path == "h.{0..3}.expert.{0..7}.w"
    assert row.node.copies == 32
    mixed = ta.summarize(dotted(), {"h.{0..3}.*": "frozen", "*": "train"})
    assert [row.path for row in rows_of(mixed) if row.level == 1] == [
        "h.{0..3}",
        "h.{4..11}",
    ]
    assert ".ln_1" in texts(ta.summarize(dotted()).to_svg())


@pytest.mark.parametrize("name", [".a", "a.", "a..b", ".", "a/.b", "a./b", "//", "0.5"])
def test_dots_and_slashes_anywhere_stay_in_the_path(name):
    for tree in (
        {name: array(2)},
        {name: array(2), f"{name}x": array(3), "q": array(4)},
    ):
        shown = [row.path for row in rows_of(ta.summarize(tree)) if row.node.is_leaf]
        assert sorted(shown) == sorted(tree)


def test_depth_counts_dots_if_asked():
    def shown(depth, separator):
        summary = ta.summarize(dotted(), separator=separator)
        outline = summary.outline(depth=depth)
        return [row.path for row in every(outline.rows())]

    assert shown(2, ".") == ["h.{0..11}", "ln_f.weight", "wte.weight"]
    assert "h.{0..11}.ln_1" in shown(3, ".")
    assert "h.{0..11}.ln_1.bias" not in shown(3, ".")
    assert len(shown(1, "/")) == len(shown(None, "/")) == 8


def test_depth_stops_there():
    tree = {"a": {"b": {"c": array(2), "d": array(3)}, "e": array(4)}}
    summary = ta.summarize(tree)
    assert [r.path for r in rows_of(summary, depth=1)] == ["a"]
    assert [r.path for r in rows_of(summary, depth=2)] == ["a", "a/b", "a/e"]
    assert "c" in texts(summary.to_svg())
    assert "c" not in texts(summary.to_svg(depth=2))
    assert "<details" not in summary.to_html(depth=1)


# What it writes


@pytest.mark.parametrize("row", some(TREES), ids=lambda row: row.name)
def test_pictures_of_any_tree_are_well_formed_and_the_same_each_time(row):
    for rules in (None, ta.Rules({"**/w": 0.5}, default=1.0)):
        one, two = (ta.summarize(row.make(), rules) for _ in range(2))
        ET.fromstring(one.to_svg())
        Tags(one.to_html())
        Tags(one._repr_html_())
        assert (one.to_svg(), one.to_html()) == (two.to_svg(), two.to_html())
        assert one.to_text() == two.to_text()


HOSTILE = (
    "<script>alert(1)</script>",
    "]]>&\"'",
    "a\x00\x1b[31m\n",
    "\ud800",
    "\u202eabc",
    "x" * 3_000,
    "-->",
    "</style>",
    "層",
    "",
)


def test_no_name_label_or_pattern_leaves_its_place():
    tree = {name: array(2) for name in HOSTILE}
    rules = [(ta.glob(ta.escape(name)), name) for name in HOSTILE if name]
    summary = ta.summarize(tree, ta.Rules(rules, default="</title>"))
    picture = summary.to_svg(title="<b>&\x07")
    page = summary.to_html(title="<b>&\x07")
    root = ET.fromstring(picture)
    tags = {one.tag.removeprefix(SVG) for one in root.iter()}
    assert tags == {
        *("svg", "title", "style", "defs", "pattern", "rect", "g", "text"),
    }
    found = Tags(page)
    assert found.seen <= {
        *("html", "head", "meta", "title", "style", "body", "div", "table", "tr"),
        *("th", "td", "span", "i", "details", "summary", "ul", "li"),
    }
    shown = texts(picture)
    for where in (shown, found.text):
        assert "<script>alert(1)</script>" in where
        assert "a\\x00\\x1b[31m\\n" in where
        assert "\\ud800" in where
        assert "\\u202eabc" in where
        assert "<b>&\\x07" in where
    for text in (picture, page, summary.to_text(), str(summary)):
        assert all(char.isprintable() or char == "\n" for char in text)
        text.encode("utf-8")


def test_everything_that_a_picture_needs_is_in_it():
    summary = ta.summarize({"a": array(2), "b": array(3)}, ta.Rules({"a": "x"}))
    for text in (summary.to_svg(), summary.to_html()):
        own = text.replace("http://www.w3.org/2000/svg", "")
        for word in ("http:", "https:", "@import", "src=", "href", "<script", "url(h"):
            assert word not in own


def test_a_leaf_without_a_rule_stands_out():
    summary = ta.summarize({"a": array(2), "b": array(3)}, {"a": "x", "zz": "y"})
    shown = texts(summary.to_svg())
    assert "no rule" in shown
    for note in (
        "! Unmatched: 1 leaf without a rule: 'b'. Add",
        "! Unused: rule 2, 'zz' matches no array: ",
    ):
        assert any(text.startswith(note) for text in shown)
    assert f"gap-{GAP_COLOR[1:]}" in summary.to_svg()
    assert GAP_COLOR in summary.to_html()


def test_a_tooltip_says_path_shape_dtype_and_rule():
    tree = {"net": blocks(3, w=array(4, 5, dtype=jnp.bfloat16), b=array(5))}
    summary = ta.summarize(tree, {"**/w": "decay", "**": "train"})
    told = [one.text for one in ET.fromstring(summary.to_svg()).iter(f"{SVG}title")]
    assert (
        "net/{0..2}/w\n3 x bfloat16[4,5]\n3 leaves, 60 parameters, 120 B\n"
        "decay: 3 leaves, 120 B\nby rule 1: '**/w'"
    ) in told


def test_bars_are_as_long_as_their_part_of_the_whole():
    summary = ta.summarize({"a": array(75), "b": array(25)}, {"a": "x", "b": "y"})
    groups = ET.fromstring(summary.to_svg()).findall(f"{SVG}g")[-2:]
    lengths = []
    for group in groups:
        track, bar = [
            float(rect.get("width"))
            for rect in group.findall(f"{SVG}rect")
            if rect.get("class") != "band"
        ][:2]
        lengths.append(bar / track)
    assert lengths == [0.75, 0.25]


def test_words_stay_apart_where_styles_are_taken_away():
    summary = ta.summarize({"a": blocks(3, w=array(4))}, {"**": "x"})
    text = "".join(Tags(summary.to_html()).text)
    assert "a/{0..2}/w  3 x float32[4]  48 B  " in text
    assert text.rstrip().endswith("  x")


# Colours


def channels(color):
    srgb = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)


def luminance(color):
    return float(channels(color) @ [0.2126, 0.7152, 0.0722])


# Machado, Oliveira, Fernandes 2009: full protanopia, deuteranopia, tritanopia.
SIGHTS = {
    "all": np.eye(3),
    "protan": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deutan": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "tritan": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}


def oklab(linear):  # Ottosson 2020
    to_lms = np.array(
        [
            [0.4122214708, 0.5363325363, 0.0514459929],
            [0.2119034982, 0.6806995451, 0.1073969566],
            [0.0883024619, 0.2817188376, 0.6299787005],
        ]
    )
    to_lab = np.array(
        [
            [0.2104542553, 0.7936177850, -0.0040720468],
            [1.9779984951, -2.4285922050, 0.4505937099],
            [0.0259040371, 0.7827717662, -0.8086757660],
        ]
    )
    return to_lab @ np.cbrt(to_lms @ np.clip(linear, 0, 1))


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("colors", [HUES, SCALE], ids=["hues", "scale"])
def test_colors_can_be_told_apart(sight, colors):
    seen = [oklab(SIGHTS[sight] @ channels(color)) for color in colors]
    for one, two in itertools.combinations(seen, 2):
        assert np.linalg.norm(one - two) >= 0.09


@pytest.mark.parametrize("color", [*HUES, *SCALE, STATIC_COLOR, GAP_COLOR])
def test_colors_stand_out_from_light_and_dark_ground(color):
    light, dark = 1.0, luminance("#0d1117")
    own = luminance(color)
    assert (light + 0.05) / (own + 0.05) >= 1.6
    assert (own + 0.05) / (dark + 0.05) >= 2.4


def test_paints_differ_and_frozen_keeps_its_own():
    labels = ["train", "frozen", *map(str, range(14))]
    made = paints(labels)
    assert len(set(made)) == 16
    assert made[1] == paints(["frozen"])[0] == (HUES[0], "plain")
    assert paints(["a", "b"])[0].color == HUES[0]


def test_numbers_run_through_the_scale_by_rank():
    made = [paint.color for paint in paints([1.0, 0.25, 0.5, 0.125, 0.0625])]
    assert made == [SCALE[4], SCALE[2], SCALE[3], SCALE[1], SCALE[0]]
    assert luminance(SCALE[0]) < luminance(SCALE[2]) < luminance(SCALE[4])
    assert paints([True, False, "a"])[0].color == HUES[0]
    assert paints([1.0, float("nan"), 2.0])[0].color == HUES[0]


# Words


@pytest.mark.parametrize("text", ["abc", "層の重み", "e\u0301" * 9, "x" * 99, ""])
def test_what_is_fitted_fits(text):
    for width, middle in itertools.product(range(1, 30), (False, True)):
        short = fitted(text, width, middle=middle)
        assert columns(short) <= width
        assert (short == text) == (columns(text) <= width)


# Files


def test_save_writes_what_the_ending_says(tmp_path):
    summary = ta.summarize({"a": array(2)}, {"a": "x"})
    summary.save(tmp_path / "x.svg", title="t")
    summary.save(str(tmp_path / "x.HTML"), depth=1)
    assert (tmp_path / "x.svg").read_text("utf-8") == summary.to_svg(title="t")
    assert (tmp_path / "x.HTML").read_text("utf-8") == summary.to_html(depth=1)
    summary.save(tmp_path / "x.svg")
    assert (tmp_path / "x.svg").read_text("utf-8") == summary.to_svg()
    summary.save(tmp_path / "x.md", title="t")
    assert (tmp_path / "x.md").read_text("utf-8") == summary.to_markdown(title="t")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["x.HTML", "x.md", "x.svg"]


def test_save_refuses_what_it_cannot_write(tmp_path):
    summary = ta.summarize({"a": array(2)})
    (tmp_path / "folder.svg").mkdir()
    (tmp_path / "folder.svg" / "thesis.txt").write_text("years")
    for name, reason in (
        ("x.png", "End the name in .svg, .html or .md"),
        ("x", "End the name in .svg, .html or .md"),
        ("none/x.svg", "no folder"),
        ("folder.svg", "is a folder"),
    ):
        with pytest.raises(ta.TreeAdaptError, match=reason):
            summary.save(tmp_path / name)
    assert [path.name for path in tmp_path.rglob("*")] == ["folder.svg", "thesis.txt"]


def test_a_save_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    summary = ta.summarize({"a": array(2)})
    summary.save(tmp_path / "x.svg")
    before = (tmp_path / "x.svg").read_bytes()

    def full(_self, data):
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="no space"):
        ta.summarize({"b": array(2)}).save(tmp_path / "x.svg")
    assert [path.name for path in tmp_path.iterdir()] == ["x.svg"]
    assert (tmp_path / "x.svg").read_bytes() == before


@pytest.mark.slow
def test_the_pictures_of_the_documentation_are_todays():
    script = runpy.run_path(str(REPOSITORY / "docs" / "scripts" / "pictures.py"))
    for name, text in script["pictures"]():
        assert (script["PICTURES"] / name).read_text("utf-8") == text, name


# Terminals


@pytest.mark.parametrize("room", [40, 60, 80, 200])
def test_a_tree_fits_a_terminal_and_keeps_its_labels(room):
    layers = {f"a_layer_with_a_long_name_{n}": {"w": array(4)} for n in range(3)}
    rules = {"policy/a_layer_with_a_long_name_0": "frozen", "**": "train"}
    summary = ta.summarize({"policy": layers}, rules)
    tree = [plain([line]) for line in lines(summary.outline(), room)][-4:]
    assert all(columns(line) <= room for line in tree)
    assert sum(line.endswith("frozen") for line in tree) == 1
    assert any("█" in line for line in tree) == (room == 200)


@pytest.mark.parametrize(("room", "left_out"), [(30, {"rules", "params"}), (80, set())])
def test_a_legend_leaves_out_rules_and_counts_before_sizes(room, left_out):
    summary = ta.summarize({"a": array(4), "b": array(3)}, {"a": "x", "**": "y"})
    head, *rows = [plain([line]) for line in lines(summary.outline(), room)][2:5]
    names = ["label", "leaves", "params", "size", "share", "rules"]
    assert head.split() == [name for name in names if name not in left_out]
    assert all(columns(line) <= room for line in (head, *rows))


def test_a_tree_without_leaves_has_a_head_alone():
    assert ta.summarize({}).to_text().strip() == "0 leaves, 0 parameters, 0 B"


# Notebooks


def test_columns_of_a_notebook_stay_where_spaces_are_joined():
    rules = {"encoder": "frozen", "**": "train"}
    summary = ta.summarize({"a": array(3), "encoder": array(4)}, rules)
    spans = re.findall(r"<span[^>]*>", summary._repr_html_())
    assert spans
    assert all("width:" in span for span in spans)


def cells_of(shown):
    root = ET.fromstring(f"<all>{shown._repr_html_()}</all>")
    rows = ([cell.text or "" for cell in row.iter("td")] for row in root.iter("tr"))
    return [row for row in rows if row]


def test_rules_plans_and_drafts_are_tables_in_a_notebook():
    rules = ta.Rules({"a&b": "<frozen>", "**": 0.5})
    assert cells_of(rules) == [["1", "'a&b'", "'<frozen>'"], ["2", "'**'", "0.5"]]
    one = ta.Migration({"{k}.w : i o": "{k}/w : o i"})
    leaf = np.arange(6, dtype="float32").reshape(2, 3)
    first = ["1", "'{k}.w : i o'", "'{k}/w : o i'", "1 to 1", "i=2, o=3"]
    assert cells_of(one.plan({"a.w": leaf})) == [first]
    two = one.then(ta.Migration({"a/w": "b/w"})).plan({"a.w": leaf})
    assert cells_of(two) == [first, ["1", "'a/w'", "'b/w'", "1 to 1", ""]]
    draft = ta.draft_migration({"a.w": leaf, "b.x": leaf[0]}, {"a": {"w": leaf.T}})
    assert cells_of(draft) == [["'a.w : o i'", "'a/w : i o'", ""]]
    assert str(draft) == f"{draft.summary}\n'a.w : o i' -> 'a/w : i o'"


@pytest.mark.slow
def test_drawing_loads_no_library(fresh):
    code = (
        "import sys, treeadapt as ta, jax.numpy as jnp;"
        "s = ta.summarize({'a': jnp.ones(2)}, {'a': 'x'});"
        "s.to_svg(), s.to_html(), s.to_text(), s.to_markdown(), str(s);"
        "print(*{'treescope', 'rich', 'IPython', 'click'} & set(sys.modules))"
    )
    assert fresh.run(code).stdout == "\n"
