"""Damaged vocabularies: loading, tokenising and spelling out. `vocab_fuzz.py N SEED`."""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

import numpy as np

from loragraph.errors import LoragraphError
from loragraph.ggml.lib import load_library
from loragraph.vocab.pretokenizers import LOOPS
from loragraph.vocab.vocab import Vocab
from tests.fuzz.runner import main
from tests.gguf_bytes import Value, gguf_bytes
from tests.tiny_vocab import bpe_metadata, spm_metadata

Metadata = dict[str, Value]

_PRE = [*sorted(LOOPS), "default", "deepseek-v3", "tekken", "gpt-4o", "superbpe", "viking", "x", ""]
_MODELS = ["llama", "gpt2", "gemma4", "bert", "t5", "rwkv", "plamo2", "none", "test", "hybriddna"]
_NAMES = ["phi-3", "PHI3 mini", "modern-bert", "x" * 2000, "\udcff"]
_ARCHITECTURES = ["llama", "qwen2", "nomic-bert-moe", "clip", "nonsense", ""]
_ODD_TOKENS = [
    *("", " ", "\n", "a b", "<|im_end|>", "<|eot_id|>", "</s>", "<s>", "<unk>", "▁", "\0", "a\0b"),
    *("[EMPTY_3]", "<0x0A>", "<0x", "<0xZZ>", "\udcff\udcfe", "é" * 3000, "x" * 5000, "🦙"),
]
_TEXTS = [
    *("", " ", "Hello, world!", "a" * 5000, "\n" * 300, "é中🦙\0x", "<|im_end|>" * 50, "\t \r\n"),
    *("1234567890" * 60, "</s><s><unk>", "\ufeff\u200b\u0301", "'s'T'RE " * 40),
]


def vocab_case(random_: random.Random) -> None:
    """Writes a damaged file, loads it, and uses what was loaded."""
    data = bytearray(gguf_bytes(list(_mutated(random_).items()), []))
    if random_.random() < 0.3:
        _flip(random_, data)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocab.gguf"
        path.write_bytes(data)
        with Vocab.load(load_library(), path) as vocab:
            _use(random_, vocab)


def _use(random_: random.Random, vocab: Vocab) -> None:
    for text in [*_TEXTS, "".join(chr(random_.randrange(32, 0x2FFF)) for _ in range(100))]:
        for add_special in (False, True):
            tokens = vocab.tokenize(text, add_special=add_special, parse_special=add_special)
            vocab.detokenize(tokens)
    for token in [*range(min(vocab.n_tokens, 400)), vocab.n_tokens - 1]:
        vocab.piece(token)
        vocab.is_eog(token)
        vocab.is_control(token)
        vocab.text(token)
    for token in (-1, vocab.n_tokens, 2**31 - 1):
        try:
            vocab.piece(token)
        except LoragraphError:
            continue
        raise AssertionError(f"token {token} was accepted")


def _mutated(random_: random.Random) -> Metadata:
    n_vocab = random_.randrange(300, 340)
    if random_.random() < 0.5:
        metadata = spm_metadata(n_vocab)
    else:
        metadata = bpe_metadata(n_vocab, random_.choice(_PRE))
    metadata = {"general.architecture": "llama", **metadata}
    for _ in range(random_.choice((0, 1, 1, 2, 4))):
        _mutate(random_, metadata)
    return metadata


def _mutate(random_: random.Random, metadata: Metadata) -> None:
    key = random_.choice(list(metadata))
    kind = random_.randrange(10)
    if kind == 0:
        del metadata[key]
    elif kind == 1:
        metadata[key] = _odd_value(random_)
    elif kind == 2:
        metadata["tokenizer.ggml.model"] = random_.choice(_MODELS)
    elif kind == 3:
        metadata["tokenizer.ggml.pre"] = random_.choice(_PRE)
    elif kind == 4:
        metadata["general.name"] = random_.choice(_NAMES)
        metadata["general.architecture"] = random_.choice(_ARCHITECTURES)
    elif kind == 5:
        name = random_.choice(("bos", "eos", "eot", "padding", "fim_pre", "unknown", "prefix"))
        values = (-1, 0, 5, 299, 340, 2**31, 2**32 - 1)
        metadata[f"tokenizer.ggml.{name}_token_id"] = np.int64(random_.choice(values))
    elif kind == 6:
        name = random_.choice(("add_bos_token", "add_eos_token", "add_space_prefix"))
        metadata[f"tokenizer.ggml.{name}"] = random_.choice((True, False))
    else:
        _mutate_array(random_, metadata)


def _mutate_array(random_: random.Random, metadata: Metadata) -> None:
    arrays = [key for key, value in metadata.items() if isinstance(value, list) and value]
    if not arrays:
        return
    key = random_.choice(arrays)
    values = list(metadata[key])  # type: ignore[arg-type]
    kind = random_.randrange(4)
    if kind == 0:
        values = values[: random_.randrange(len(values))]
    elif kind == 1:
        values += values[: random_.randrange(1, 5)]
    for _ in range(random_.choice((1, 1, 5, 50))):
        if values:
            at = random_.randrange(len(values))
            values[at] = _odd_element(random_, values[at])
    metadata[key] = values


def _odd_element(random_: random.Random, old: object) -> object:
    if isinstance(old, str):
        return random_.choice((*_ODD_TOKENS, old + " ", old[:1], old[::-1]))
    if isinstance(old, float):
        return random_.choice((0.0, -1e30, float("nan"), float("inf"), float("-inf"), 1.5))
    return random_.choice((-1, 0, 1, 2, 3, 4, 5, 6, 7, 2**31 - 1))


def _odd_value(random_: random.Random) -> Value:
    values: list[Value] = [
        *("", "text", 0, 1, -1, 2.5, True, ["a", "b"], [1, 2], [0.5], [""]),
        np.uint64(2**63),
        np.int8(-1),
        np.zeros(0, np.int32),
        np.full(320, 3, np.int32),
        np.full(320, 3, np.uint8),
    ]
    return random_.choice(values)


def _flip(random_: random.Random, data: bytearray) -> None:
    for _ in range(random_.choice((1, 1, 3, 20))):
        data[random_.randrange(len(data))] = random_.randrange(256)
    if random_.random() < 0.3:
        del data[random_.randrange(len(data)) :]


if __name__ == "__main__":
    sys.exit(main(__file__, vocab_case))
