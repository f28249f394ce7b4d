from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loragraph.engine.automaton import DEAD, Automaton
from loragraph.engine.gbnf import MAX_BYTES, parse_grammar
from loragraph.engine.grammar import GrammarMatcher
from loragraph.engine.params import SamplingParams
from loragraph.engine.sampler import Sampler
from loragraph.errors import InvalidRequestError, UnsupportedError
from loragraph.vocab.vocab import Vocab

JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""


def _accepts(grammar: str, text: str) -> bool:
    """True where `text` is a whole sentence of the grammar."""
    automaton = Automaton(parse_grammar(grammar))
    return automaton.may_end(_state(automaton, text))


def _state(automaton: Automaton, text: str) -> int:
    state = automaton.start
    for char in text:
        state = automaton.step(state, ord(char))
    return state


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('root ::= "yes" | "no"', ["yes", "no"], ["", "y", "yesno", "maybe"]),
        ("root ::= [a-c]+ [^a-c]", ["abx", "cé"], ["x", "ab", "abc"]),
        ('root ::= "a"{2,3}', ["aa", "aaa"], ["a", "aaaa"]),
        ('root ::= "a"{2}', ["aa"], ["a", "aaa"]),
        ('root ::= "a"{2,}', ["aa", "aaaaaa"], ["a"]),
        ('root ::= "a"? "b"*', ["", "a", "b", "abb"], ["aa", "ba"]),
        ('root ::= ("a" | "b" "c")+ # comment\n', ["a", "bc", "abca"], ["", "b", "ac"]),
        ("root ::= .", ["x", "é"], ["", "xx"]),
        ("root ::= item\nitem ::= [\\x41] [\\u00e9] [\\U0001F999]", ["Aé🦙"], ["Aé"]),
        ('root ::= "(" root ")" | "x"', ["x", "((x))"], ["(x", "x)"]),
        ('root ::= "a"{0} "b"', ["b"], ["ab"]),
        ("root ::= [a-]", ["a", "-"], ["b"]),
        (JSON, ['{"a": [1, -2.5e3, {"b": "\\n"}], "c": true}', "{}"], ["[", '{"a"}', "{,}"]),
    ],
)
def test_sentences(grammar: str, good: list[str], bad: list[str]) -> None:
    """The parsed rules and the automaton over them say yes and no as GBNF means it."""
    for text in good:
        assert _accepts(grammar, text), text
    for text in bad:
        assert not _accepts(grammar, text), text


@pytest.mark.parametrize(
    ("grammar", "part"),
    [
        ("", "expected 1 to"),
        ("x" * (MAX_BYTES + 1), "expected 1 to"),
        ("root ::= \0", "NUL"),
        ("root ::= \ud800", "Unicode"),
        ('start ::= "a"', "expected a rule 'root', got start"),
        ("root ::= missing", "definition of rule 'missing'"),
        ('root ::= "a', "line 1, column 12: expected a closing quote"),
        ("root ::= [a", "expected a closing quote or bracket"),
        ('root ::= ("a"', "expected ')'"),
        ('root ::= "a" )', "expected a new line"),
        ('root := "a"', "expected '::='"),
        ('root ::= "\\q"', "known escape"),
        ('root ::= "\\x4"', "2 hexadecimal digits"),
        ("root ::= *", "to repeat"),
        ('root ::= "a"{3,2}', "m <= n, got {3,2}"),
        ('root ::= "a"{2001}', "at most 2000"),
        ('root ::= "a"{99999999999}', "an integer"),
        ('root ::= "a"{x}', "an integer"),
        ('root ::= "a"{1', "expected ',' or '}'"),
        ('root ::= ("a"{0,50}){0,50}', "nested repetitions"),
        ('root ::= "' + "a" * 5000 + '"{2000}', "elements after expansion"),
        ("root ::= " + "(" * 65 + '"a"' + ")" * 65, "nested parentheses"),
        ('root ::= root "a"', "left recursion"),
        ('root ::= e root "a" | "b"\ne ::= f f\nf ::= ""', "left recursion"),
        ('root ::= a\na ::= b | "x"\nb ::= a', "left recursion"),
        (
            "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1} | r{i + 1}\n" for i in range(40))
            + 'r40 ::= "a"',
            "ways to begin",
        ),
        ("root ::= " + '"a"? ' * 600, "ways to read"),
    ],
)  # fmt: skip
def test_grammars_that_are_refused(bpe: Vocab, grammar: str, part: str) -> None:
    """What libllama refuses, hangs on or aborts on ends in an error that says where."""
    start = time.monotonic()
    with pytest.raises(InvalidRequestError) as caught:
        Sampler(bpe, SamplingParams(grammar=grammar))
    assert part in str(caught.value)
    assert caught.value.param == "grammar"
    assert time.monotonic() - start < 10


def test_token_references_are_unsupported(bpe: Vocab) -> None:
    """libllama masks and accepts them differently, which would end the process."""
    with pytest.raises(UnsupportedError, match="token references"):
        Sampler(bpe, SamplingParams(grammar="root ::= <[5]>"))


@pytest.mark.parametrize(
    "grammar", ['root ::= "yes" | "no"', JSON, "root ::= [a-zé]{3,9} [0-9]?", 'root ::= "🦙é中"']
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_generated_text_is_a_sentence(bpe: Vocab, grammar: str, temperature: float) -> None:
    """Random logits under a grammar spell a beginning of a sentence, and end only a whole one."""
    rng = np.random.default_rng(8)
    text = b""
    with Sampler(bpe, SamplingParams(grammar=grammar, temperature=temperature, seed=1)) as sampler:
        for _ in range(60):
            token = sampler.sample(rng.standard_normal(bpe.n_tokens).astype(np.float32) * 4)
            if bpe.is_eog(token):
                assert _accepts(grammar, text.decode())
                break
            sampler.accept(token)
            text += bpe.piece(token)
    begun = text.decode("utf-8", "ignore")  # without an unfinished character
    assert _state(Automaton(parse_grammar(grammar)), begun) != DEAD


@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_masks_are_those_of_libllama(bpe: Vocab, data: st.DataObject) -> None:
    """After any allowed tokens, the same tokens may follow as libllama's grammar sampler says."""
    grammar = data.draw(
        st.sampled_from([JSON, 'root ::= ("a" | "ab" "c"?)* [é-ü]', "root ::= [^a]{2,4} .?"])
    )
    matcher = GrammarMatcher.parse(bpe, grammar)
    c = bpe.lib.c
    oracle = c.llama_sampler_init_grammar(bpe.vocab_ptr, grammar.encode(), b"root")
    for _ in range(data.draw(st.integers(0, 8))):
        allowed = matcher.allowed_tokens().tolist()
        assert allowed == _mask_of_libllama(bpe, oracle)
        assert allowed == [token for token in range(bpe.n_tokens) if matcher.allows(token)]
        ordinary = [token for token in allowed if not bpe.is_eog(token)]
        if not ordinary:
            break
        token = data.draw(st.sampled_from(ordinary))
        matcher.accept(token)
        c.llama_sampler_accept(oracle, token)
    c.llama_sampler_free(oracle)


def _mask_of_libllama(vocab: Vocab, sampler: Any) -> list[int]:
    ffi = vocab.lib.ffi
    data = ffi.new("llama_token_data[]", [(i, 0.0, 0.0) for i in range(vocab.n_tokens)])
    array = ffi.new("llama_token_data_array *", [data, vocab.n_tokens, -1, False])
    vocab.lib.c.llama_sampler_apply(sampler, array)
    return [item.id for item in data if item.logit == 0.0]


def test_forbidden_tokens_cannot_be_accepted(bpe: Vocab) -> None:
    """accept refuses what libllama would end the process for, and stays usable."""
    no, yes, end = bpe.tokenize("n")[0], bpe.tokenize("y")[0], 2
    with Sampler(bpe, SamplingParams(grammar='root ::= "y"', temperature=0.0)) as sampler:
        for token in (no, end, 1):
            with pytest.raises(InvalidRequestError, match="grammar allows next"):
                sampler.accept(token)
        sampler.accept(yes)
        assert sampler.sample(np.zeros(bpe.n_tokens, np.float32)) == 0  # the first to end it
        sampler.accept(end)
        sampler.reset()
        sampler.accept(yes)


def test_clone_keeps_the_place(bpe: Vocab) -> None:
    """A clone goes on from where its original was, and each goes its own way."""
    a, b, c = (bpe.tokenize(letter)[0] for letter in "abc")
    with Sampler(bpe, SamplingParams(grammar='root ::= "a" ("b" | "c") "d"')) as sampler:
        sampler.accept(a)
        with sampler.clone() as other:
            other.accept(c)
            sampler.accept(b)
            with pytest.raises(InvalidRequestError):
                other.accept(c)


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "a" root "b" | "a" root "c" | ""',
        'root ::= "a" root "b" | "a" "a" root "c" | "d"',
        'root ::= "z" t | "a" root "b" | "a" root "c"\nt ::= "z" t | ""',
    ],
)
def test_readings_that_multiply_end_the_request(bpe: Vocab, grammar: str) -> None:
    """Exponential growth of the ways to read a text is an error, not the end of the process."""
    letter = bpe.tokenize("a")[0]
    matcher = GrammarMatcher.parse(bpe, grammar)
    with pytest.raises(InvalidRequestError, match="ways to read"):
        _accept(matcher, [letter] * 40)


def test_ambiguity_without_growth_is_cheap(bpe: Vocab) -> None:
    """Many ways to the same place are one: libllama takes 2^40 steps for such a token."""
    matcher = GrammarMatcher.parse(bpe, 'root ::= ("a"?){40}')
    letter = bpe.tokenize("a")[0]
    for _ in range(40):
        matcher.accept(letter)
    assert matcher.may_end
    assert not matcher.allows(letter)


def test_work_is_bounded(bpe: Vocab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar with ever new states runs out of what it may cost."""
    monkeypatch.setattr("loragraph.engine.automaton.MAX_VISITS", 300)
    matcher = GrammarMatcher.parse(bpe, 'root ::= "(" root ")" | "x"')
    monkeypatch.setattr("loragraph.engine.grammar.VISITS_PER_TOKEN", 0)
    parenthesis = bpe.tokenize("(")[0]
    with pytest.raises(InvalidRequestError, match="ways to read"):
        _accept(matcher, [parenthesis] * 300)


def _accept(matcher: GrammarMatcher, tokens: list[int]) -> None:
    for token in tokens:
        matcher.accept(token)
