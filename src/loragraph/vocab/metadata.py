"""The vocabulary part of a GGUF file, checked, and the copy of it that libllama gets to see.

libllama aborts the process on some of what a damaged file can hold (two equal tokens, a missing
byte token, …), so it never sees the file: only the known tokenizer keys, each with its type and
bounds checked here, in a metadata object of our own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loragraph.errors import GGUFError, UnsupportedError
from loragraph.ggml.gguf import GGUFFile
from loragraph.ggml.lib import Library
from loragraph.kernels.strings import PackedStrings
from loragraph.vocab.pretokenizers import REFUSED

SUPPORTED_MODELS = ("llama", "gpt2", "gemma4")
"""Tokenizer models (`tokenizer.ggml.model`) of decoder language models: SentencePiece and BPE."""

MAX_TOKENS = 1 << 21
MAX_MERGES = 1 << 22
MAX_TOKEN_BYTES = 4096
MAX_SPECIAL_TOKENS = 1 << 16  # each is searched for in every text
MAX_TEMPLATE_BYTES = 1 << 20
_MAX_SQUARED_BYTES = 1 << 28  # libllama spells undecodable tokens out, quadratic in their length
_MAX_NAME_BYTES = 1024

_PREFIX = "tokenizer.ggml."
_IDS = (
    *("bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "mask"),
    *("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep"),
    *("prefix", "suffix", "middle"),
)
_FLAGS = (
    *("add_bos_token", "add_eos_token", "add_sep_token"),
    *("add_space_prefix", "remove_extra_whitespaces"),
)
_NO_TOKEN = 0xFFFFFFFF  # how some writers spell "there is no such token"
_GGUF_I32, _GGUF_F32 = 5, 6
_SPECIAL_TYPES = (2, 3, 4)  # unknown, control, user defined: what libllama searches for in texts
_MAX_TYPE = 6


@dataclass(frozen=True)
class VocabMetadata:
    """Checked tokenizer keys of a file, named as in GGUF without the prefix `tokenizer.ggml.`."""

    architecture: str
    name: str
    model: str
    pre: str
    tokens: PackedStrings
    merges: PackedStrings
    scores: NDArray[np.float32] | None  # (n_tokens,)
    token_types: NDArray[np.int32] | None  # (n_tokens,)
    suppress_tokens: NDArray[np.int32] | None  # (n,)
    ids: Mapping[str, int]
    flags: Mapping[str, bool]
    chat_templates: Mapping[str, str]  # "" is the default one

    @classmethod
    def read(cls, file: GGUFFile) -> VocabMetadata:
        """Reads and checks; GGUFError for damage, UnsupportedError for other tokenizers."""
        model = file.string(_PREFIX + "model")
        if model not in SUPPORTED_MODELS:
            raise UnsupportedError(
                f"{file.path}: {_PREFIX}model: expected one of {', '.join(SUPPORTED_MODELS)}, "
                f"got {model[:80]!r}",
                what="tokenizer",
            )
        pre = _short_string(file, _PREFIX + "pre", "")
        if model == "gpt2" and pre in REFUSED:
            raise UnsupportedError(
                f"{file.path}: {_PREFIX}pre: {pre!r} is not implemented", what="tokenizer"
            )
        tokens = _tokens(file)
        texts = _distinct(file, tokens)
        metadata = cls(
            architecture=_short_string(file, "general.architecture"),
            name=_short_string(file, "general.name", ""),
            model=model,
            pre=pre,
            tokens=tokens,
            merges=_merges(file) if model != "llama" else PackedStrings.of([]),
            scores=_scores(file, len(tokens)),
            token_types=_token_types(file, len(tokens)),
            suppress_tokens=_suppress_tokens(file),
            ids=_special_ids(file, len(tokens)),
            flags={key: file.boolean(_PREFIX + key) for key in _FLAGS if _PREFIX + key in file},
            chat_templates=_chat_templates(file),
        )
        if model == "llama":
            _check_byte_tokens(file, texts)
        return metadata

    def to_gguf(self, lib: Library) -> Any:
        """A `gguf_context` with these keys alone; the caller frees it with gguf_free."""
        c = lib.c
        ctx = c.gguf_init_empty()
        strings = {"general.architecture": self.architecture, _PREFIX + "model": self.model}
        strings |= {"general.name": self.name} if self.name else {}
        strings |= {_PREFIX + "pre": self.pre} if self.pre else {}
        for key, text in strings.items():
            c.gguf_set_val_str(ctx, key.encode(), text.encode())
        for name, token_id in self.ids.items():
            c.gguf_set_val_u32(ctx, f"{_PREFIX}{name}_token_id".encode(), token_id)
        for name, flag in self.flags.items():
            c.gguf_set_val_bool(ctx, (_PREFIX + name).encode(), flag)
        _set_strings(lib, ctx, _PREFIX + "tokens", self.tokens)
        if self.model != "llama":
            _set_strings(lib, ctx, _PREFIX + "merges", self.merges)
        for name, kind, values in (
            ("scores", _GGUF_F32, self.scores),
            ("token_type", _GGUF_I32, self.token_types),
            ("suppress_tokens", _GGUF_I32, self.suppress_tokens),
        ):
            if values is not None:
                data = lib.ffi.from_buffer(values)
                c.gguf_set_arr_data(ctx, (_PREFIX + name).encode(), kind, data, len(values))
        return ctx


def _error(file: GGUFFile, key: str, message: str) -> GGUFError:
    return GGUFError(message, path=file.path, where=key)


def _short_string(file: GGUFFile, key: str, default: str | None = None) -> str:
    text = file.string(key, default)
    if len(text.encode()) > _MAX_NAME_BYTES:
        raise _error(
            file, key, f"expected at most {_MAX_NAME_BYTES} bytes, got {len(text.encode())}"
        )
    return text


def _checked_length(file: GGUFFile, key: str, low: int, high: int) -> int:
    n = file.array_length(key)
    if not low <= n <= high:
        raise _error(file, key, f"expected {low} to {high} entries, got {n}")
    return n


def _tokens(file: GGUFFile) -> PackedStrings:
    key = _PREFIX + "tokens"
    _checked_length(file, key, 1, MAX_TOKENS)
    tokens = file.strings(key)
    if not tokens.lengths.all():
        # libllama gives an empty token this name, before it requires all tokens to differ
        texts = enumerate(tokens.to_list())
        tokens = PackedStrings.of([text or b"[EMPTY_%d]" % index for index, text in texts])
    lengths = tokens.lengths
    if lengths.max() > MAX_TOKEN_BYTES:
        index = int(lengths.argmax())
        raise _error(
            file,
            key,
            f"token {index}: expected at most {MAX_TOKEN_BYTES} bytes, got {lengths[index]}",
        )
    if int((lengths**2).sum()) > _MAX_SQUARED_BYTES:
        raise _error(file, key, f"expected texts of tokens, got {int(lengths.sum())} bytes in all")
    return tokens


def _distinct(file: GGUFFile, tokens: PackedStrings) -> set[bytes]:
    """The tokens as a set, as large as they are many."""
    texts = tokens.to_list()
    distinct = set(texts)
    if len(distinct) != len(texts):
        text, n = Counter(texts).most_common(1)[0]
        first = texts.index(text)
        raise _error(
            file,
            _PREFIX + "tokens",
            f"expected each token once, got {text[:80]!r} {n} times, first at {first}",
        )
    return distinct


def _merges(file: GGUFFile) -> PackedStrings:
    key = _PREFIX + "merges"
    if key not in file:
        raise _error(file, key, "expected the merges of a BPE tokenizer, got none")
    _checked_length(file, key, 0, MAX_MERGES)
    merges = file.strings(key)
    spaces = np.append(np.flatnonzero(merges.data == ord(" ")), len(merges.data))
    starts = merges.starts
    space = spaces[np.searchsorted(spaces, starts + 1)]  # the first one behind the first byte
    wrong = (space >= starts + merges.lengths) | (merges.lengths > 2 * MAX_TOKEN_BYTES)
    if wrong.any():
        index = int(wrong.argmax())
        raise _error(
            file,
            key,
            f"merge {index}: expected two parts with a space, got {merges[index][:80]!r}",
        )
    return merges


def _matching_array(
    file: GGUFFile, name: str, n_tokens: int, kinds: tuple[str, ...]
) -> NDArray[Any] | None:
    key = _PREFIX + name
    if key not in file:
        return None
    if file.type_of(key) not in kinds:
        raise _error(file, key, f"expected {' or '.join(kinds)}, got {file.type_of(key)}")
    values = file.numbers(key)
    if len(values) != n_tokens:
        raise _error(file, key, f"expected {n_tokens} entries, one a token, got {len(values)}")
    return values


def _scores(file: GGUFFile, n_tokens: int) -> NDArray[np.float32] | None:
    values = _matching_array(file, "scores", n_tokens, ("array of f32", "array of i32"))
    if values is None:
        return None
    scores = values.astype(np.float32)
    if np.isnan(scores).any():
        index = int(np.isnan(scores).argmax())
        raise _error(file, _PREFIX + "scores", f"score {index}: expected a number, got NaN")
    return scores


def _token_types(file: GGUFFile, n_tokens: int) -> NDArray[np.int32] | None:
    values = _matching_array(file, "token_type", n_tokens, ("array of i32", "array of u32"))
    if values is None:
        return None
    key = _PREFIX + "token_type"
    types = values.astype(np.int32)
    wrong = (types < 0) | (types > _MAX_TYPE)
    if wrong.any():
        index = int(wrong.argmax())
        raise _error(
            file, key, f"token {index}: expected a type from 0 to {_MAX_TYPE}, got {types[index]}"
        )
    n_special = int(np.isin(types, _SPECIAL_TYPES).sum())
    if n_special > MAX_SPECIAL_TOKENS:
        raise _error(
            file, key, f"expected at most {MAX_SPECIAL_TOKENS} special tokens, got {n_special}"
        )
    return types


def _suppress_tokens(file: GGUFFile) -> NDArray[np.int32] | None:
    key = _PREFIX + "suppress_tokens"
    if key not in file:
        return None
    if file.type_of(key) != "array of i32":
        raise _error(file, key, f"expected array of i32, got {file.type_of(key)}")
    _checked_length(file, key, 0, MAX_TOKENS)
    return file.numbers(key)


def _special_ids(file: GGUFFile, n_tokens: int) -> dict[str, int]:
    ids: dict[str, int] = {}
    for name in _IDS:
        key = f"{_PREFIX}{name}_token_id"
        if key not in file:
            continue
        token_id = file.integer(key, low=-1, high=_NO_TOKEN)
        if token_id in (-1, _NO_TOKEN):
            continue
        if token_id >= n_tokens:
            raise _error(file, key, f"expected an id below {n_tokens}, got {token_id}")
        ids[name] = token_id
    return ids


def _chat_templates(file: GGUFFile) -> dict[str, str]:
    base = "tokenizer.chat_template"
    templates: dict[str, str] = {}
    for key in file:
        if key != base and not key.startswith(base + "."):
            continue
        text = file.string(key)
        if len(text.encode()) > MAX_TEMPLATE_BYTES:
            raise _error(
                file, key, f"expected at most {MAX_TEMPLATE_BYTES} bytes, got {len(text.encode())}"
            )
        templates[key[len(base) + 1 :]] = text
    return templates


def _check_byte_tokens(file: GGUFFile, tokens: set[bytes]) -> None:
    """libllama ends the process at a character that has neither a token nor byte tokens."""
    for byte in range(256):
        if b"<0x%02X>" % byte not in tokens and bytes([byte]) not in tokens:
            raise UnsupportedError(
                f"{file.path}: {_PREFIX}tokens: expected a token for each of the 256 bytes, "
                f"got none for <0x{byte:02X}>",
                what="SentencePiece vocabulary without byte fallback",
            )


def _set_strings(lib: Library, ctx: Any, key: str, strings: PackedStrings) -> None:
    addresses = strings.starts + strings.data.ctypes.data
    pointers = lib.ffi.cast("const char **", lib.ffi.from_buffer(addresses))
    lib.c.gguf_set_arr_str(ctx, key.encode(), pointers, len(strings))
