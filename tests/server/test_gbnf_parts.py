"""Lists of texts as grammars. Oracle: the list."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loragraph.engine.automaton import MAX_STACKS
from loragraph.errors import InvalidRequestError
from loragraph.server.gbnf_parts import rules_of_texts
from loragraph.server.json_pattern import choice_grammar
from loragraph.server.json_schema import grammar_of_schema
from tests.server.languages import Language

_WORDS = ["red", "blue", "light", "lights", "dark", "old", "new", "sea", "stone", "and", "of"]


def _realistic() -> list[str]:
    """1,000 labels as people have them: of a few words, with ids."""
    rng = random.Random(1)
    texts = [f"{rng.choice(_WORDS)} {rng.choice(_WORDS)}/{i:03}" for i in range(500)]
    return texts + [f"{text}: {rng.choice(_WORDS)}" for text in texts]


@pytest.mark.parametrize(
    "texts",
    [
        _realistic(),
        ["a" * i for i in range(1000)],  # each the beginning of the next, and an empty one
        ["a" * 200 + chr(0x4E00 + i // 500) + chr(0x4E00 + i % 500) for i in range(1000)],
        [f"{i:010b}" for i in range(1000)],
        ['"\\\n\t]|[' * (i // 8) + '"\\\n\t]|['[: i % 8] for i in range(1000)],
        [chr(0x4E00 + i) + "x" for i in range(MAX_STACKS)],
    ],
    ids=["realistic", "beginnings", "unlike ends", "bits", "escapes", "unlike"],
)
def test_a_thousand_choices_were_refused_from_514_on(texts: list[str]) -> None:
    """They are all allowed, and nothing beside them."""
    choices = Language(choice_grammar(texts))
    known = set(texts)
    for text in texts:
        assert text in choices
    for text in texts[::20]:
        for other in (text[:-1], text + "a", text + '"', text[1:]):
            assert (other in choices) == (other in known), other


def test_more_unlike_choices_than_the_engine_reads_are_refused_in_words() -> None:
    """At the beginning and further on."""
    unlike = [chr(0x4E00 + i) + "x" for i in range(MAX_STACKS + 1)]
    for texts in (unlike, ["same " + text for text in unlike]):
        with pytest.raises(
            InvalidRequestError, match=re.escape("choice: expected texts with at most 512")
        ):
            choice_grammar(texts)
        with pytest.raises(InvalidRequestError, match="json_schema: expected texts"):
            grammar_of_schema({"enum": texts})


@given(st.lists(st.text("ab\n", max_size=5), min_size=1, max_size=12))
def test_rules_of_texts_are_the_texts(texts: list[str]) -> None:
    """Texts beside each other, doubled, empty, and beginnings of others."""
    rules = rules_of_texts(texts, "root", param="choice")
    choices = Language("\n".join(f"{name} ::= {body}" for name, body in rules.items()))
    for text in [*texts, *(text + "a" for text in texts), *(text[:-1] for text in texts)]:
        assert (text in choices) == (text in set(texts))
