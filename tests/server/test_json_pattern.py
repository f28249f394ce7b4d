"""Regular expressions to grammars. Oracle: Python's re."""

from __future__ import annotations

import itertools
import json
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loragraph.errors import InvalidRequestError
from loragraph.server.json_pattern import MAX_PATTERN, pattern_rule, regex_grammar
from tests.server.languages import Language

_atoms = st.sampled_from(
    [
        "",
        "()",
        "a",
        "b",
        r"\d",
        r"\w",
        r"\s",
        ".",
        "[a-c]",
        "[^a-y]",
        r"[\d-]",
        '"',
        r"\\",
        "é",
        r"\n",
        "-",
    ]
)
_TIMES = ["?", "*", "+", "{2}", "{0,2}", "{1,}", "{,2}", "{,}", "{0}", "+?"]
_patterns = st.recursive(
    _atoms,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.builds("(?:{}|{})".format, inner, inner),
        st.builds("({}){}".format, inner, st.sampled_from(_TIMES)),
    ),
    max_leaves=5,
)
_anchored = st.recursive(
    st.one_of(_patterns, st.sampled_from(["^", "$", "^a", "b$"])),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.builds("(?:{}|{})".format, inner, inner),
        st.builds("({})?".format, inner),
        st.builds("{}|{}".format, inner, inner),
    ),
    max_leaves=4,
)
_texts = st.text('ab z9_"\\\n-é', max_size=5)


def _python(pattern: str) -> re.Pattern[str]:
    """What a pattern of these tests means in Python, where `$` may stand before a last newline."""
    ascii_words = pattern.replace(r"\w", "[0-9A-Za-z_]").replace("$", r"\Z")
    return re.compile(ascii_words.replace("{,}", "*"), re.ASCII)


def _of_strings(pattern: str) -> Language:
    """Of JSON strings; beside the pattern there are only the letters that `_texts` has."""
    char = r'[ab z9_\-é] | "\\" ["\\n]'
    return Language(f"root ::= {pattern_rule(pattern)}\nchar ::= {char}")


@settings(deadline=None, max_examples=100)
@given(_patterns, _texts, st.integers(0, 2**32))
def test_patterns_mean_what_they_mean_in_python(pattern: str, text: str, seed: int) -> None:
    """A text is allowed if and only if it matches; drawn texts match."""
    whole = _python(pattern)
    strings, texts = _of_strings(f"^(?:{pattern})$"), Language(regex_grammar(pattern))

    matches = bool(whole.fullmatch(text))
    assert (json.dumps(text, ensure_ascii=False) in strings) == matches
    assert (text in texts) == matches
    drawn = strings.draw(random.Random(seed), 60)
    if drawn is not None:
        assert whole.fullmatch(json.loads(drawn)), drawn


@settings(deadline=None, max_examples=100)
@given(_anchored, _texts)
def test_anchors_mean_what_they_mean_in_python(pattern: str, text: str) -> None:
    """A text is allowed if and only if it matches somewhere, as anchors let it."""
    try:
        strings = _of_strings(pattern)
    except InvalidRequestError:  # b$a
        with pytest.raises(InvalidRequestError, match="where some text can match"):
            pattern_rule(pattern)
        assert not _python(pattern).search(text)
        return
    assert (json.dumps(text, ensure_ascii=False) in strings) == bool(_python(pattern).search(text))


@pytest.mark.parametrize(
    ("pattern", "allowed", "forbidden"),
    [
        ("(a?b?)+", ["", "a", "abba"], ["c"]),
        ("(a|)*", ["", "aa"], ["b"]),
        ("((a*)*b?)*", ["", "aab", "bba"], ["c"]),
        ("(a?){2,}", ["", "aaa"], ["b"]),
        ("(a?){2,3}", ["", "aaa"], ["aaaa"]),
        ("()*", [""], ["a"]),
        ("(|)+x", ["x"], [""]),
        ("a{,3}", ["", "aaa"], ["aaaa"]),
        ("a{,}", ["", "aaaa"], ["b"]),
        ("^a$|^b$", ["a", "b"], ["ab", ""]),
        ("(^a|^b)c$", ["ac", "bc"], ["c"]),
        ("^(a$|b$)", ["a", "b"], ["ab"]),
        ("(^)?a($|b)", ["a", "ab"], ["b"]),
    ],
)
def test_valid_expressions_that_were_refused_as_left_recursion(
    pattern: str, allowed: list[str], forbidden: list[str]
) -> None:
    """Repeated parts that may be empty, and anchors in alternatives."""
    texts = Language(regex_grammar(pattern))
    for text in allowed:
        assert text in texts, text
        assert bool(re.fullmatch(pattern.replace("{,}", "*"), text))
    for text in forbidden:
        assert text not in texts, text


def test_anchors_of_an_alternative_are_its_own() -> None:
    """`^a|b$` was read as `^(a|b)$`."""
    strings = _of_strings("^a|b$")
    assert all(f'"{text}"' in strings for text in ("a", "b", "az", "zb"))
    assert not any(f'"{text}"' in strings for text in ("", "z", "za", "bz"))


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(^a)*", "inside of what is repeated"),
        ("(a$){2}", "inside of what is repeated"),
        ("a$b", "where some text can match"),
        ("a^", "where some text can match"),
        ("a{}", "{m}, {m,}, {,n} or {m,n}"),
        ("a{x}", "{m}, {m,}, {,n} or {m,n}"),
        ("a{3,2}", "repetitions"),
        ("a)", "parenthesis"),
        ("*", "escaped"),
        ("[^\\w\\W]", "empty"),
        (r"\bx", r"'\b'"),
        ("(" * 30 + ")" * 30, "nested"),
    ],
)
def test_what_is_refused_is_said(pattern: str, words: str) -> None:
    """Of expressions, never of rules that the caller did not write."""
    with pytest.raises(InvalidRequestError, match=re.escape(words)):
        regex_grammar(pattern)
    with pytest.raises(InvalidRequestError, match=re.escape(words)):
        pattern_rule(pattern)


@pytest.mark.parametrize("unit", ["(a|$)", "(^|a)", "(^|a|$)", "(a?b?)*", "((a?b?)*)?", "[^a]?"])
def test_the_grammar_of_an_expression_is_bounded(unit: str) -> None:
    """However anchors and empty parts multiply, in one row and nested."""
    row = unit * (MAX_PATTERN // len(unit))
    nested = "x"
    for _ in range(20):
        nested = f"{unit}({nested}){unit}"
    for make, pattern in itertools.product((regex_grammar, pattern_rule), (row, nested)):
        try:
            text = make(pattern)
        except InvalidRequestError:
            with pytest.raises(InvalidRequestError, match="characters of grammar"):
                make(pattern)
        else:
            assert len(text) < 1 << 18
