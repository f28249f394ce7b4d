"""Odd grammars: compiling, masking and accepting. `grammar_fuzz.py N SEED`."""

from __future__ import annotations

import random
import sys
import tempfile
from functools import cache
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

import numpy as np

from loragraph.engine.params import SamplingParams
from loragraph.engine.sampler import Sampler
from loragraph.errors import InvalidRequestError
from loragraph.ggml.lib import load_library
from loragraph.vocab.vocab import Vocab
from tests.fuzz.runner import main
from tests.gguf_bytes import write_gguf
from tests.tiny_vocab import _byte_symbol, bpe_metadata

_SEEDS = [
    'root ::= "yes" | "no"',
    "root ::= [a-z]+ [0-9]{1,3}",
    'root ::= "(" root ")" | "x" root "y" | "x"',
    'root ::= a b? c*\na ::= "a" | b\nb ::= [^x]\nc ::= . "c"',
    'root ::= item ("," item)*\nitem ::= "\\"" [^"\\\\]* "\\"" | [0-9]+ | "[" root "]"',
    'root ::= ws "{" ws (pair ("," ws pair)*)? "}"\nws ::= [ \\t\\n]*\npair ::= "a" ws ":" root',
    'root ::= ("a" | "b"){2,5} ("c" | )\n# comment\n',
    'root ::= "\\u00e9" [\\x41-\\U0001F600] "é" [а-я]+',
    'root ::= "a" root "b" | "a" root "c" | ""',
    'root ::= ((((a?){0,9})*)+)?\na ::= "a"?',
    "root ::= <[3]> !<[4]>",
]
_PIECES = [
    *('"a"', '"ab"', '""', "[a-z]", "[^a]", "[]", "[^]", "[a-]", "[z-a]", ".", "root", "a", "b"),
    *("c", "x1", "a_b", "|", "||", "(", ")", "()", "*", "+", "?", "{2}", "{0}", "{0,0}", "{3,2}"),
    *("{1,}", "{0,2000}", "{2001}", "{99999999999}", "{", "}", "{,3}", "\n", "\r\n", "#c\n", " "),
    *("::=", "root ::=", "\na ::=", "\nb ::= ", "\nroot_1 ::= ", "\\", '"\\x4"', '"\\uD800"'),
    *('"\\U0011FFFF"', "<[1]>", "!<[1]>", "<a>", '"unclosed', "[unclosed", "é", "\U0001f600"),
    *("((((((((((", "))))))))))", "root{2}", '("a"?){40}', '("a"|"a"|"a")*', "\t", "-", "0"),
]


def grammar_case(random_: random.Random) -> None:
    """Compiles an odd grammar and generates with it."""
    text = _grammar(random_)
    params = SamplingParams(
        grammar=text,
        seed=random_.randrange(1000),
        temperature=random_.choice((0.0, 1.0)),
        top_k=random_.choice((0, 1, 40)),
    )
    vocab = _vocab()
    logits = np.random.default_rng(random_.randrange(1 << 30))
    with Sampler(vocab, params) as sampler:
        for step in range(25):
            if step == 12:
                sampler.clone().close()
            token = sampler.sample(logits.standard_normal(vocab.n_tokens).astype(np.float32) * 3)
            _accept_any(random_, sampler, vocab)
            sampler.accept(token)
            if vocab.is_eog(token):
                sampler.reset()


def _accept_any(random_: random.Random, sampler: Sampler, vocab: Vocab) -> None:
    """A token that nobody sampled: refused with an error, or accepted; the process lives."""
    with sampler.clone() as other:
        try:
            other.accept(random_.randrange(vocab.n_tokens))
        except InvalidRequestError:
            return


def _grammar(random_: random.Random) -> str:
    if random_.random() < 0.3:
        return "root ::= " + " ".join(random_.choices(_PIECES, k=random_.randrange(1, 25)))
    text = random_.choice(_SEEDS)
    for _ in range(random_.randrange(6)):
        at = random_.randrange(len(text) + 1)
        cut = random_.choice((0, 0, 1, 3))
        text = text[:at] + random_.choice((*_PIECES, text[:at])) + text[at + cut :]
    return text[:20_000]


@cache
def _vocab() -> Vocab:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocab.gguf"
        metadata = bpe_metadata(420)
        tokens = list(metadata["tokenizer.ggml.tokens"])  # type: ignore[arg-type]
        # what breaks libllama's UTF-8 decoder: parts of characters, many of one character
        odd = [b"a" * 64, b"\x80\x80", b"\xe0\x80", b"\xe0\x80\x80", b"\xff\xff", b"\xc3\xa9"]
        tokens[-len(odd) :] = ["".join(map(_byte_symbol, piece)) for piece in odd]
        write_gguf(
            path, {"general.architecture": "llama", **metadata, "tokenizer.ggml.tokens": tokens}, []
        )
        return Vocab.load(load_library(), path)


if __name__ == "__main__":
    sys.exit(main(__file__, grammar_case))
