"""Patterns: what each form parses to, and the errors for malformed ones."""

from __future__ import annotations

import contextlib
import copy
import pickle

import pytest
from caps import CAPS
from hypothesis import given
from hypothesis import strategies as st

import treeadapt as ta
from treeadapt.patterns.glob import AnyDepth, ClassName, FromEnd, Glob, Literal, parse
from treeadapt.patterns.matcher import Matcher


@pytest.mark.parametrize(
    ("text", "elements"),
    [
        ("a/b", [Literal("a"), Literal("b")]),
        ("a//b", [Literal("a"), Literal(""), Literal("b")]),
        ("a/", [Literal("a"), Literal("")]),
        (r"\/a", [Literal(""), Literal("a")]),
        (r"a\/b", [Literal("a"), Literal("b")]),
        (r"\*\?\[\]\{\}\\\<", [Literal(r"*?[]{}\<")]),
        (r"\a", [Literal("a")]),
        ("a,b-c.d>e!f", [Literal("a,b-c.d>e!f")]),
        ("!a", [Literal("!a")]),
        ("-1/..", [Literal("-1"), Literal("..")]),
        ("**", [AnyDepth()]),
        ("a/**/**/**/b", [Literal("a"), AnyDepth(), Literal("b")]),
        ("<LayerNorm>/w", [ClassName("LayerNorm"), Literal("w")]),
        (r"<List\[int\]>", [ClassName("List[int]")]),
        ("{-1}", [FromEnd(Literal(""), -1, -1, Literal(""))]),
        ("h_{-4..-2}b", [FromEnd(Literal("h_"), -4, -2, Literal("b"))]),
        ("h_{-4..}", [FromEnd(Literal("h_"), -4, -1, Literal(""))]),
    ],
)
def test_elements(text, elements):
    assert list(parse(text).elements) == elements


@pytest.mark.parametrize("text", ["*", "a?", "[ab]", "{a,b}", "{0..5}"])
def test_a_glob_within_a_segment_keeps_its_text(text):
    (element,) = parse(text).elements
    assert isinstance(element, Glob)
    assert element.text == text


def test_text_around_a_counted_number_may_be_a_glob():
    (element,) = parse("{a,b}_{-2..}_*").elements
    assert (element.before.text, element.after.text) == ("{a,b}_", "_*")


@pytest.mark.parametrize(
    ("text", "needs_tree"),
    [("a/*/**", False), ("**/<A>", True), ("a/x{-1}", True), ("re:<A>", False)],
)
def test_needs_tree(text, needs_tree):
    assert parse(text).needs_tree is needs_tree


def test_regular_expressions_are_compiled_and_not_split():
    pattern = parse("re:a/(b|c)")
    assert pattern.regex is not None
    assert pattern.regex.fullmatch("a/b")
    assert pattern.elements == ()
    assert parse("a").regex is None


def test_patterns_are_equal_by_text():
    assert parse("a/*") == parse("a/*")
    assert parse("a/*") != parse("a/**")
    assert hash(parse("a/*")) == hash(parse("a/*"))
    assert len({parse("a"), parse("b"), parse("a")}) == 2


def test_patterns_are_immutable():
    with pytest.raises(AttributeError):
        parse("a").text = "b"


@pytest.mark.parametrize("text", ["a/{b,c}*/<D>", "re:a.*", "x{-3..-2}"])
def test_patterns_survive_pickle_and_copy(text):
    pattern = parse(text)
    assert pickle.loads(pickle.dumps(pattern)) == pattern
    assert copy.deepcopy(pattern) == pattern
    assert pickle.loads(pickle.dumps(pattern)).elements == pattern.elements


def test_repr_reads_like_a_call():
    assert repr(parse("a/*\n")) == r"Pattern('a/*\n')"


def test_a_str_subclass_reads_as_its_value():
    class Name(str):
        def __str__(self):
            return "other"

    assert parse(Name("only/here")).text == "only/here"
    assert type(parse(Name("only/here")).text) is str


@pytest.mark.parametrize("text", [None, 3, b"a", ("a",)])
def test_other_types_than_str_are_refused(text):
    with pytest.raises(ta.PatternError, match=f"not {type(text).__name__}"):
        parse(text)
    with pytest.raises(ta.PatternError, match=f"not {type(text).__name__}"):
        ta.escape(text)


CAP = 4_096


@pytest.mark.parametrize(
    ("text", "column", "says"),
    [
        ("", 1, "empty"),
        ("/a", 1, "Write 'a'"),
        ("//a", 1, "Write 'a'"),
        ("/", 1, "no leading slash"),
        ("a[b", 2, r"no '\]' closes"),
        ("a/[", 3, r"no '\]' closes"),
        ("[a-", 1, r"no '\]' closes"),
        ("x[!", 2, r"no '\]' closes"),
        ("[a/b]", 3, "one character of one segment"),
        (r"[a\]", 1, r"no '\]' closes"),
        ("a{b", 2, "no '}' closes"),
        ("{a,{b}", 1, "no '}' closes"),
        ("{a,{b", 4, "no '}' closes"),
        ("{a/b,c}", 3, "several patterns in a list"),
        ("{query/kernel,key/kernel}", 7, "several patterns in a list"),
        ("x/{a,b/*}/c", 7, "several patterns in a list"),
        ("a]", 2, "no '\\['"),
        ("a}", 2, "no '{'"),
        ("{a}}", 4, "no '{'"),
        ("x/{}", 3, "no alternatives"),
        ("a**b", 2, "whole segments"),
        ("a/**b", 3, "whole segments"),
        ("a**", 2, "whole segments"),
        ("***", 1, "whole segments"),
        ("{**,a}", 2, "whole segments"),
        ("<A", 1, "no '>' closes"),
        ("a/<A", 3, "no '>' closes"),
        ("<A/b>", 3, "within one segment"),
        ("<>", 2, "no class name"),
        ("<A>b", 4, "nothing follows"),
        ("<A*>", 3, "without wildcards"),
        ("a<A>", 2, "whole segment"),
        ("{<A>,<B>}", 2, "whole segment"),
        ("[]", 1, "class is empty"),
        ("a[]b]", 2, "class is empty"),
        ("[!]", 1, "class is empty"),
        ("[^a]", 2, r"\[!...\]"),
        ("[az-b]", 3, "'z' comes after 'b'"),
        ("h/[0..5]", 3, r"Write '{0..5}'"),
        ("h/[0-11]", 3, r"Write '{0..11}'"),
        ("[10-12]", 1, r"Write '{10..12}'"),
        ("[1-12]", 1, r"Write '{1..12}'"),
        ("[8-11]", 1, r"Write '{8..11}'"),
        ("a[0:5]b", 2, r"Write '{0..5}'"),
        ("[query|key]", 1, "'e' twice. Write '{query,key}' for"),
        ("[0,1,10]", 1, "',' twice. Write '{0,1,10}' for"),
        ("[a-eb-c]", 1, "'b' twice. Write each"),
        ("[!0-11]", 1, "'1' twice. Write each"),
        (r"[a\\-a]", 1, "'a' twice"),
        ("[xa-a]", 3, "'a' twice"),
        ("a\\", 2, "escapes nothing"),
        ("a/b\\", 4, "escapes nothing"),
        ("{a,\\", 4, "escapes nothing"),
        ("[a\\", 3, "escapes nothing"),
        ("{5..2}", 2, r"Write '{2..5}'"),
        ("l/{10..9}", 4, r"Write '{9..10}'"),
        ("{011..010}", 2, r"Write '{010..011}'"),
        ("{00..9}", 2, "Write '{00..09}'"),
        ("{1..05}", 2, "Write '{01..05}'"),
        ("{007..7}", 2, "same width"),
        ("{a,5..2}", 4, "ends before it starts"),
        ("{5..}", 2, "Write the last number"),
        ("{..5}", 2, "not a range"),
        ("{..-5}", 2, "not a range"),
        ("{a..e}", 2, "not a range"),
        ("{1..3..2}", 2, "not a range"),
        ("{1..b}", 2, "not a range"),
        ("{+1..3}", 2, "not a range"),
        ("{\u0661..\u0663}", 2, "not a range"),
        ("{-1..3}", 2, "not both"),
        ("{-1..0}", 2, "not both"),
        ("{0..-1}", 2, "not both"),
        ("{-2..-4}", 2, "Write '{-4..-2}'"),
        ("{-0}", 2, "starts at -1"),
        ("{-01}", 2, "starts at -1"),
        ("{-3..-0}", 2, "starts at -1"),
        ("{a,{-1}}", 5, "must be alone"),
        ("{{-1}}", 3, "must be alone"),
        ("{-1,-2}", 2, "must be alone"),
        ("{a,-2..}", 4, "must be alone"),
        ("{-1}_{-2}", 7, "at most one"),
        ("{0.." + "9" * 21 + "}", 2, "at most 20 digits"),
        ("{-" + "9" * 5000 + "}", CAP + 1, "4,096 characters"),
        ("*" + "x" * CAP, CAP + 1, "4,096 characters"),
        ("re:" + "x" * CAP, CAP + 1, "4,096 characters"),
        ("**/" * 64 + "**", 193, "at most 64"),
        ("**/a/" * 65, 321, "at most 64"),
        ("re:", 4, "empty"),
        ("re:a(b", 5, "unterminated subpattern"),
        ("re:*", 4, "nothing to repeat"),
        ("re:[b-a]", 5, "bad character range"),
        ("re:" + "(" * 4_000, 4, "not a regular expression"),
    ],
)
def test_an_error_points_at_the_column(text, column, says):
    with pytest.raises(ta.PatternError, match=f"column {column:d}: .*{says}") as caught:
        parse(text)
    *_, excerpt, caret = str(caught.value).split("\n")
    assert caret.strip() == "^"
    pointed = excerpt[len(caret) - 1 :]
    if column <= len(text):
        assert text[column - 1 :].startswith(pointed[:1])
    else:
        assert pointed == ""
    assert len(str(caught.value).encode()) <= CAPS["bytes of a message"]


@pytest.mark.parametrize(
    "text",
    [
        "*" + "x" * (CAP - 1),
        "x" * 10 * CAP,
        "re:" + "x" * (CAP - 3),
        "**/a/" * 63 + "**",
        "{0.." + "9" * 20 + "}",
        "{a}",
        "{a,}",
        "{,}",
        "{-a}",
        "{-1a}",
        "{a.b..c}",
        r"{\-1}",
        r"{a\..b}",
        "[!a]",
        "[a-]",
        "[-a]",
        "[a^]",
        "[!!]",
        "[0-5]",
        "[a-eg-i_0-9]",
        "params['w']",
        '["hidden"]',
        r"[\]]",
        r"[\^]",
        "[[]",
        "[*?{},<]",
    ],
)
def test_just_within_the_bounds_parses(text):
    assert parse(text).text == text


@pytest.mark.parametrize(
    ("text", "pointed"),
    [
        ("a\n**\x1b[31m", "**"),
        ("\x1b\\]0;x\x07{", "{"),
        ("\u202e[", "["),
        ("\ud800}", "}"),
    ],
)
def test_an_error_shows_no_control_characters(text, pointed):
    with pytest.raises(ta.PatternError) as caught:
        parse(text)
    lines = str(caught.value).split("\n")
    assert len(lines) == 3
    assert all(line.isprintable() for line in lines)
    assert lines[2].index("^") == lines[1].index(pointed)


HARD_PATHS = [
    "",
    "/",
    "//",
    "/a",
    "a/",
    "a//b",
    "!a",
    "!",
    "re:a",
    "re:",
    "a/re:b",
    "**",
    "***",
    "*/?/[a]",
    "{a,b}",
    "{-1}",
    "h_{-2..}",
    "{0..5}",
    "<LayerNorm>",
    "a<b>",
    "a\\b",
    "\\",
    "\\/",
    "a\nb",
    "\x1b[0m",
    "params/['w']/layers[0].kernel",
    "(1,a)",
    "]}>,-..^",
    "mlp/~/linear_0/w",
]


@pytest.mark.parametrize("path", HARD_PATHS)
def test_escape_matches_that_path_and_no_other(path):
    matcher = Matcher([parse(ta.escape(path))])
    others = [other for other in HARD_PATHS if matcher.match_path(other)]
    # Like any pattern it also selects everything below the path.
    assert others == [o for o in HARD_PATHS if o == path or o.startswith(path + "/")]


@pytest.mark.parametrize("char", "[/é\\")
def test_escape_of_a_long_name_is_a_pattern(char):
    name = f"a{char}" * CAP
    matcher = Matcher([parse(ta.escape(name))])
    assert matcher.match_path(name) == 1
    assert matcher.match_path(name[:-2]) == 0


@pytest.mark.slow
@given(
    st.text("ab/!re:*?[]{}<>\\,-.0^\n", max_size=12),
    st.text("ab/!re:*?[]{}<>\\,-.0^\n", max_size=12),
)
def test_escape_of_any_text(path, other):
    matcher = Matcher([parse(ta.escape(path))])
    assert matcher.match_path(path)
    assert bool(matcher.match_path(other)) == (other + "/").startswith(path + "/")


@given(st.text("ab/*?[]!{}<>,-.019\\^re:", max_size=14))
def test_any_text_parses_or_is_a_pattern_error(text):
    with contextlib.suppress(ta.PatternError):
        assert parse(text).text == text
