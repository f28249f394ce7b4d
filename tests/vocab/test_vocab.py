from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loragraph.errors import (
    GGUFError,
    InvalidRequestError,
    LifecycleError,
    LoragraphError,
    UnsupportedError,
)
from loragraph.ggml.lib import Library
from loragraph.vocab.pretokenizers import MAX_REGEX_CHARS
from loragraph.vocab.vocab import MAX_SPECIALS, MAX_TEXT_BYTES, Vocab
from tests.gguf_bytes import Value
from tests.oracle.libllama import low
from tests.smollm import smollm_path
from tests.tiny_vocab import bpe_metadata, spm_metadata
from tests.vocab.conftest import Write

Tokenize = Callable[[str, bool, bool], list[int]]

_FIXTURES = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
_TEXTS = st.one_of(
    st.text(max_size=60),
    st.lists(
        st.sampled_from(
            ["Hello", " ", "  ", "\n", "<|im_end|>", "</s>", "12345", "é", "🦙", "'ll", "\0", "\t"]
        ),
        max_size=20,
    ).map("".join),
)


def _oracle(path: Path) -> Iterator[Tokenize]:
    """llama-cpp-python's own tokenizer on the same file, loaded by libllama itself."""
    params = low.llama_model_default_params()
    params.vocab_only = True
    model = low.llama_model_load_from_file(str(path).encode(), params)
    vocab = low.llama_model_get_vocab(model)

    def tokenize(text: str, add_special: bool, parse_special: bool) -> list[int]:
        data = text.encode()
        tokens = (ctypes.c_int32 * (len(data) + 8))()
        n = low.llama_tokenize(
            vocab, data, len(data), tokens, len(tokens), add_special, parse_special
        )
        return list(tokens[:n])

    yield tokenize
    low.llama_model_free(model)


@pytest.fixture(scope="module")
def smollm_oracle() -> Iterator[Tokenize]:
    yield from _oracle(smollm_path())


@pytest.fixture(scope="module")
def tiny_oracle(tiny_path: Path) -> Iterator[Tokenize]:
    yield from _oracle(tiny_path)


@pytest.fixture(scope="module")
def tiny(lib: Library, tiny_path: Path) -> Iterator[Vocab]:
    with Vocab.load(lib, tiny_path) as vocab:
        yield vocab


@_FIXTURES
@given(text=_TEXTS, add_special=st.booleans(), parse_special=st.booleans())
def test_real_vocabulary_tokenises_as_llama_cpp(
    smollm: Vocab, smollm_oracle: Tokenize, text: str, add_special: bool, parse_special: bool
) -> None:
    """A real BPE vocabulary gives the tokens that llama-cpp-python gives."""
    ours = smollm.tokenize(text, add_special=add_special, parse_special=parse_special)
    assert ours == smollm_oracle(text, add_special, parse_special)
    assert smollm.tokenize(text.encode(), add_special=False) == smollm.tokenize(
        text, add_special=False
    )


@_FIXTURES
@given(text=_TEXTS, add_special=st.booleans())
def test_small_vocabularies_tokenise_as_llama_cpp(
    tiny: Vocab, tiny_oracle: Tokenize, text: str, add_special: bool
) -> None:
    """Copying the checked keys loses nothing that libllama reads, for SentencePiece and BPE."""
    ours = tiny.tokenize(text, add_special=add_special, parse_special=True)
    assert ours == tiny_oracle(text, add_special, True)


# SmolLM2 has no tokens for some bytes, which only these characters are made of; they get lost.
_SPELLABLE = st.characters(
    max_codepoint=0x3FFFF, exclude_categories=["Cs"], exclude_characters="\x04\x06\x13\x14\x16\x1d"
)


@_FIXTURES
@given(text=st.text(_SPELLABLE, max_size=60))
def test_pieces_join_to_the_text(smollm: Vocab, text: str) -> None:
    """The bytes of a text's tokens are the text, and detokenize says the same."""
    tokens = smollm.tokenize(text, add_special=False, parse_special=False)
    assert b"".join(map(smollm.piece, tokens)) == text.encode()
    assert smollm.detokenize(tokens) == text


def test_facts_of_a_real_vocabulary(smollm: Vocab) -> None:
    """Special tokens, flags and template are those of SmolLM2-135M-Instruct."""
    assert (smollm.n_tokens, smollm.bos, smollm.eos, smollm.eot) == (49152, 1, 2, 0)
    assert (smollm.pad, smollm.add_bos, smollm.add_eos) == (2, False, False)
    assert smollm.nl == smollm.tokenize("\n")[0]
    assert smollm.is_eog(2)
    assert not smollm.is_eog(500)
    assert 2 in smollm.eog_tokens
    assert smollm.is_control(1)
    assert smollm.text(1) == "<|im_start|>"
    assert smollm.piece(1) == b"<|im_start|>"
    assert smollm.piece(1, special=False) == b""
    assert "<|im_start|>" in (smollm.chat_template() or "")
    assert smollm.chat_template("tool_use") is None


def test_specials_of_user_text_can_stay_text(smollm: Vocab) -> None:
    """With parse_special=False the text of a control token is no control token."""
    assert smollm.tokenize("<|im_end|>") == [2]
    assert 2 not in smollm.tokenize("<|im_end|>", parse_special=False)


def test_absent_specials_are_none(lib: Library, write: Write) -> None:
    """A token that the file does not have is None, and so is a missing template."""
    metadata = bpe_metadata(340)
    del metadata["tokenizer.chat_template"]
    metadata["tokenizer.ggml.padding_token_id"] = 2**32 - 1
    metadata["tokenizer.chat_template.rag"] = "{{ messages }}"
    with Vocab.load(lib, write(metadata)) as vocab:
        assert vocab.pad is None
        assert vocab.chat_template() is None
        assert vocab.chat_template("rag") == "{{ messages }}"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a\ud800", "surrogates not allowed"),
        (b"a\xff", "invalid start byte"),
        ("a" * (MAX_TEXT_BYTES + 1), "expected at most"),
        ("<|im_end|>" * (MAX_SPECIALS + 1), "special tokens"),
    ],
    ids=["surrogate", "no UTF-8", "too long", "too many specials"],
)
def test_texts_that_are_refused(smollm: Vocab, text: str | bytes, part: str) -> None:
    """What cannot be tokenised in bounded time, or at all, is the request's error."""
    with pytest.raises(InvalidRequestError, match=part):
        smollm.tokenize(text)


def test_token_ids_are_checked(smollm: Vocab) -> None:
    """An id out of range raises, where libllama would end the process."""
    calls: list[Callable[[int], Any]] = [
        smollm.piece,
        smollm.is_eog,
        smollm.is_control,
        smollm.text,
        lambda token: smollm.detokenize([token]),
    ]
    for call in calls:
        for token in (-1, smollm.n_tokens, 2**40):
            with pytest.raises(InvalidRequestError, match="token id"):
                call(token)


def test_texts_of_more_tokens_than_bytes(lib: Library, write: Write) -> None:
    """Without a token for it, SentencePiece's space is three byte tokens; all of them come."""
    tokens = [token.replace("▁", "space") for token in _TOKENS]
    with Vocab.load(lib, write(_with(tokens=tokens))) as vocab:
        ours = vocab.tokenize(" " * 50)
        assert len(ours) == 1 + 51 * 3
        assert b"".join(map(vocab.piece, ours[1:])).decode() == "▁" * 51


def test_long_pieces(lib: Library, write: Write) -> None:
    """Tokens longer than the usual buffer come out whole, alone and joined."""
    with Vocab.load(lib, write(_with(tokens=[*_TOKENS[:-1], "x" * 1000]))) as vocab:
        token = vocab.n_tokens - 1
        assert vocab.piece(token) == b"x" * 1000
        assert vocab.piece_index.pieces[token] == b"x" * 1000
        assert vocab.detokenize([token] * 5) == "x" * 5000
        assert vocab.detokenize([]) == ""


def test_close_during_another_threads_call(lib: Library, tiny_path: Path) -> None:
    """While another thread is inside a call, close() is refused and frees nothing."""
    vocab = Vocab.load(lib, tiny_path)
    inside, leave = threading.Event(), threading.Event()

    def call() -> None:
        with vocab._using():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=call)
    thread.start()
    assert inside.wait(10)
    with pytest.raises(LifecycleError, match="another thread"):
        vocab.close()
    leave.set()
    thread.join()
    assert vocab.tokenize("a")
    vocab.close()


def test_close_after_an_interrupted_call(lib: Library, tiny_path: Path) -> None:
    """Ctrl-C can end a call before it has left; the thread that it hit can still close."""
    vocab = Vocab.load(lib, tiny_path)
    interrupted = vocab._using()
    interrupted.__enter__()
    vocab.close()


def test_closed_vocabulary_raises(lib: Library, tiny_path: Path) -> None:
    """Use after close is an error; closing twice is not."""
    vocab = Vocab.load(lib, tiny_path)
    vocab.close()
    vocab.close()
    with pytest.raises(LifecycleError, match="vocabulary"):
        vocab.tokenize("a")


def test_threads_share_a_vocabulary(smollm: Vocab) -> None:
    """Tokenising in several threads gives what one thread gives."""
    texts = [f"text number {n} " * 50 for n in range(40)]
    expected = [smollm.tokenize(text) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(smollm.tokenize, texts)) == expected


def test_long_words_fit_any_stack(lib: Library, write: Write) -> None:
    """A pre-tokenizer that recurses per character works in a thread with a small stack."""
    results: list[int] = []
    with Vocab.load(lib, write(bpe_metadata(340, "default"))) as vocab:
        usual = threading.stack_size(512 << 10)
        thread = threading.Thread(
            target=lambda: results.append(len(vocab.tokenize("1" * MAX_REGEX_CHARS)))
        )
        thread.start()
        threading.stack_size(usual)
        thread.join()
        with pytest.raises(InvalidRequestError, match="pre-tokenizer takes at most"):
            vocab.tokenize("1" * (MAX_REGEX_CHARS + 1))
    assert results == [MAX_REGEX_CHARS]


def _with(**changes: Value) -> dict[str, Value]:
    keys = {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    return {**spm_metadata(340), **keys}


def _without(name: str, base: dict[str, Value]) -> dict[str, Value]:
    return {key: value for key, value in base.items() if key != f"tokenizer.ggml.{name}"}


_TOKENS: list[str] = list(spm_metadata(340)["tokenizer.ggml.tokens"])  # type: ignore[arg-type]
_HOSTILE: dict[str, tuple[dict[str, Value], type[LoragraphError], str]] = {
    "no tokens": (_without("tokens", spm_metadata(340)), GGUFError, "expected an array, got none"),
    "empty tokens": (_with(tokens=np.zeros(0, np.int32)), GGUFError, "entries, got 0"),
    "numeric tokens": (_with(tokens=[1, 2]), GGUFError, "expected an array of strings"),
    "equal tokens": (_with(tokens=["a", *_TOKENS[1:-1], "a"]), GGUFError, "each token once"),
    "token named as an empty one": (
        _with(tokens=["[EMPTY_339]", *_TOKENS[1:-1], ""]),
        GGUFError,
        "each token once",
    ),
    "long token": (
        _with(tokens=["a" * 5000, *_TOKENS[1:]]),
        GGUFError,
        "token 0: expected at most",
    ),
    "no byte token": (
        _with(tokens=[token.replace("<0x41>", "other") for token in _TOKENS]),
        UnsupportedError,
        "<0x41>",
    ),
    "few scores": (_with(scores=[0.5]), GGUFError, "expected 340 entries"),
    "scores of strings": (_with(scores=["a"] * 340), GGUFError, "array of string"),
    "score NaN": (_with(scores=[float("nan")] * 340), GGUFError, "score 0"),
    "few types": (_with(token_type=[1]), GGUFError, "expected 340 entries"),
    "unknown type": (_with(token_type=[77] * 340), GGUFError, "from 0 to 6, got 77"),
    "types of floats": (_with(token_type=[0.5] * 340), GGUFError, "array of f32"),
    "bos out of range": (_with(bos_token_id=340), GGUFError, "below 340, got 340"),
    "bos of a string": (_with(bos_token_id="1"), GGUFError, "expected type integer, got string"),
    "flag of a number": (_with(add_bos_token=1), GGUFError, "expected type bool, got u32"),
    "suppressed floats": (_with(suppress_tokens=[0.5]), GGUFError, "array of i32"),
    "model of a number": (_with(model=1), GGUFError, "expected type string"),
    "unknown model": (_with(model="bert"), UnsupportedError, "got 'bert'"),
    "long pre": (_with(pre="x" * 2000), GGUFError, "at most 1024 bytes"),
    "no merges": (_without("merges", bpe_metadata(340)), GGUFError, "merges of a BPE tokenizer"),
    "merge of one part": (
        {**bpe_metadata(340), "tokenizer.ggml.merges": ["ab"]},
        GGUFError,
        "two parts with a space",
    ),
    "unknown pre": (bpe_metadata(340, "nonsense"), UnsupportedError, "unknown pre-tokenizer type"),
    "exponential pre": (bpe_metadata(340, "exaone-moe"), UnsupportedError, "exaone-moe"),
    "unknown architecture": (
        {**spm_metadata(340), "general.architecture": "nonsense"},
        UnsupportedError,
        "unknown model architecture",
    ),
    "bos to add, but none": (
        {
            **_without("bos_token_id", bpe_metadata(340, "glm4")),
            "tokenizer.ggml.add_bos_token": True,
        },
        GGUFError,
        "expected a bos token",
    ),
    "large template": (
        {**spm_metadata(340), "tokenizer.chat_template": "x" * (1 << 20) + "x"},
        GGUFError,
        "bytes, got",
    ),
}


@pytest.mark.parametrize("name", _HOSTILE)
def test_hostile_vocabularies_are_refused(lib: Library, write: Write, name: str) -> None:
    """Damage that would end or exhaust the process ends in an error with expected and got."""
    metadata, error, part = _HOSTILE[name]
    with pytest.raises(error) as caught:
        Vocab.load(lib, write(metadata))
    assert part in str(caught.value)
    assert "vocab.gguf" in str(caught.value)


def test_many_special_tokens_are_refused(lib: Library, write: Write) -> None:
    """A vocabulary of special tokens alone would make every text slow."""
    tokens = [f"t{n}" for n in range((1 << 16) + 1)]
    metadata: dict[str, Value] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.token_type": [3] * len(tokens),
    }
    with pytest.raises(GGUFError, match="special tokens"):
        Vocab.load(lib, write(metadata))
