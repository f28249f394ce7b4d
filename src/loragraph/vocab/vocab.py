"""Text to token ids and back, through libllama's tokenizers (vocabulary only, no tensors)."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import repeat
from typing import Any, Self

from loragraph.errors import GGUFError, InvalidRequestError, LifecycleError, UnsupportedError
from loragraph.ggml.gguf import GGUFFile
from loragraph.ggml.handles import Handle
from loragraph.ggml.lib import Library
from loragraph.vocab.metadata import VocabMetadata
from loragraph.vocab.pieces import PieceIndex
from loragraph.vocab.pretokenizers import LOOPS, with_deep_stack

MAX_TEXT_BYTES = 1 << 22
"""Longest text that is tokenised in one call, bytes of UTF-8."""

MAX_SPECIALS = 1 << 14
"""Most occurrences of special tokens in one text: libllama's time grows with their square."""

_INT32_MIN = -(2**31)
_UNKNOWN, _CONTROL, _USER_DEFINED = 1, 8, 16  # llama.h, enum llama_token_attr


class Vocab(Handle):
    """The vocabulary of a GGUF file; close() frees it. All methods may be called from several
    threads at once; close() raises LifecycleError while another thread is in one of them.
    """

    def __init__(self, lib: Library, model: Any, metadata: VocabMetadata) -> None:
        super().__init__(lib, model, "vocabulary")
        self._lock = threading.Lock()
        self._users: Counter[int] = Counter()  # thread -> its calls into libllama under way
        self._vocab = lib.c.llama_model_get_vocab(model)
        self._chat_templates = dict(metadata.chat_templates)
        self._recurses = metadata.model == "gpt2" and metadata.pre not in LOOPS
        self.n_tokens = int(lib.c.llama_vocab_n_tokens(self._vocab))
        self.bos = self._special(lib.c.llama_vocab_bos)
        self.eos = self._special(lib.c.llama_vocab_eos)
        self.eot = self._special(lib.c.llama_vocab_eot)
        self.nl = self._special(lib.c.llama_vocab_nl)
        self.pad = self._special(lib.c.llama_vocab_pad)
        self.fim_pre = self._special(lib.c.llama_vocab_fim_pre)  # fill in the middle
        self.fim_suf = self._special(lib.c.llama_vocab_fim_suf)
        self.fim_mid = self._special(lib.c.llama_vocab_fim_mid)
        self.fim_rep = self._special(lib.c.llama_vocab_fim_rep)
        self.fim_sep = self._special(lib.c.llama_vocab_fim_sep)
        self.add_bos = bool(lib.c.llama_vocab_get_add_bos(self._vocab))
        self.add_eos = bool(lib.c.llama_vocab_get_add_eos(self._vocab))

    @classmethod
    def load(cls, lib: Library, path: str | os.PathLike[str]) -> Self:
        """Reads the vocabulary of the GGUF file at `path`.

        GGUFError for a damaged file, UnsupportedError for a tokenizer that is not implemented.
        """
        with GGUFFile(lib, path) as file:
            return cls.from_file(lib, file)

    @classmethod
    def from_file(cls, lib: Library, file: GGUFFile) -> Self:
        """Reads the vocabulary of an open file, which stays open and may be closed afterwards."""
        metadata = VocabMetadata.read(file)
        params = lib.c.llama_model_default_params()
        params.vocab_only = True
        params.n_gpu_layers = 0
        ctx = metadata.to_gguf(lib)
        try:
            with lib.log_lines() as lines:
                model = lib.c.llama_model_init_from_user(ctx, lib.ffi.NULL, lib.ffi.NULL, params)
        finally:
            lib.c.gguf_free(ctx)
        if model == lib.ffi.NULL:
            reason = next((line for line in lines if "error" in line), "; ".join(lines))
            reason = reason.rsplit("error loading model: ", 1)[-1] or "unknown reason"
            if "unknown" in reason:
                raise UnsupportedError(f"{file.path}: {reason}", what="vocabulary")
            raise GGUFError(reason, path=file.path, where="vocabulary")
        vocab = cls(lib, model, metadata)
        vocab._check_added_tokens(file)
        return vocab

    def tokenize(
        self, text: str | bytes, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """The token ids of `text` (bytes must be UTF-8).

        `add_special` adds what the file asks for (BOS, EOS); `parse_special` turns the texts of
        control tokens into these tokens, so leave it out for what a user typed.
        """
        data = _utf8(text)
        self._check_specials(data, parse_special)
        capacity = len(data) + 4  # never more tokens than bytes, but for the added ones
        tokens = self.lib.ffi.new("llama_token[]", capacity)
        n = self._tokenize(data, tokens, capacity, add_special, parse_special)
        if n < 0 and n != _INT32_MIN:
            capacity = -n
            tokens = self.lib.ffi.new("llama_token[]", capacity)
            n = self._tokenize(data, tokens, capacity, add_special, parse_special)
        if n < 0:
            raise InvalidRequestError("the text has too many tokens", param="prompt")
        return list(self.lib.ffi.unpack(tokens, n)) if n else []

    def piece(self, token: int, *, special: bool = True) -> bytes:
        """The bytes that `token` stands for; part of a UTF-8 character for some tokens.

        Without `special`, control tokens have no bytes.
        """
        self._check(token)
        c, size = self.lib.c, 64
        buffer = self.lib.ffi.new("char[]", size)
        with self._using() as vocab:
            n = c.llama_token_to_piece(vocab, token, buffer, size, 0, special)
            if n < 0:
                size = -n
                buffer = self.lib.ffi.new("char[]", size)
                n = c.llama_token_to_piece(vocab, token, buffer, size, 0, special)
        return bytes(self.lib.ffi.buffer(buffer, max(n, 0)))

    def detokenize(self, tokens: Sequence[int], *, special: bool = True) -> str:
        """The text of `tokens` as libllama joins it; invalid UTF-8 becomes U+FFFD."""
        for token in tokens:
            self._check(token)
        ids = self.lib.ffi.new("llama_token[]", list(tokens))
        size = 16 * len(tokens) + 64
        for _ in range(2):
            buffer = self.lib.ffi.new("char[]", size)
            with self._using() as vocab:
                n = self.lib.c.llama_detokenize(
                    vocab, ids, len(tokens), buffer, size, False, special
                )
            if n >= 0:
                return bytes(self.lib.ffi.buffer(buffer, n)).decode("utf-8", "replace")
            size = -n + 64
        raise InvalidRequestError("the tokens have too long a text", param="tokens")

    def is_eog(self, token: int) -> bool:
        """True for the tokens that end a generation (EOS, EOT, EOM and their like)."""
        self._check(token)
        with self._using() as vocab:
            return bool(self.lib.c.llama_vocab_is_eog(vocab, token))

    def is_control(self, token: int) -> bool:
        """True for control tokens, which have no text of their own."""
        self._check(token)
        with self._using() as vocab:
            return bool(self.lib.c.llama_vocab_is_control(vocab, token))

    def text(self, token: int) -> str:
        """The token as it stands in the file, e.g. "Ġthe" for " the"."""
        self._check(token)
        with self._using() as vocab:
            return self.lib.text(self.lib.c.llama_vocab_get_text(vocab, token))

    def chat_template(self, name: str | None = None) -> str | None:
        """The Jinja source of the file's chat template, or of its named variant; None if none."""
        return self._chat_templates.get(name or "")

    @cached_property
    def eog_tokens(self) -> frozenset[int]:
        """All tokens that end a generation."""
        with self._using() as vocab:
            is_eog = map(self.lib.c.llama_vocab_is_eog, repeat(vocab), range(self.n_tokens))
            return frozenset(token for token, ends in enumerate(is_eog) if ends)

    @cached_property
    def piece_index(self) -> PieceIndex:
        """All pieces, sorted for matching against a grammar; made at the first call."""
        return PieceIndex.build(self.pieces(), self.eog_tokens)

    def pieces(self) -> Iterator[bytes]:
        """The bytes of every token, special ones too, in the order of their ids."""
        get, unpack = self.lib.c.llama_token_to_piece, self.lib.ffi.unpack
        size = 256
        buffer = self.lib.ffi.new("char[]", size)  # one for all: allocation is most of the cost
        with self._using() as vocab:
            for token in range(self.n_tokens):
                n = get(vocab, token, buffer, size, 0, True)
                yield unpack(buffer, n) if n >= 0 else self.piece(token)

    @property
    def type_number(self) -> int:
        """libllama's number of the tokenizer's kind (llama.h, enum llama_vocab_type)."""
        with self._using() as vocab:
            return int(self.lib.c.llama_vocab_type(vocab))

    @property
    def vocab_ptr(self) -> Any:
        """libllama's `llama_vocab *`, borrowed until close()."""
        _ = self.ptr  # raises after close
        return self._vocab

    def close(self) -> None:
        """Frees it, once; LifecycleError while another thread is in one of the other methods."""
        with self._lock:
            # This thread's own entry is what an interrupt left behind, since here it makes no call.
            me = threading.get_ident()
            if any(n_calls for thread, n_calls in self._users.items() if thread != me):
                raise LifecycleError("the vocabulary was closed while another thread uses it")
            super().close()

    @contextmanager
    def _using(self) -> Iterator[Any]:
        """libllama's vocabulary, which close() does not free meanwhile."""
        with self._lock:
            _ = self.ptr  # raises after close
            self._users[threading.get_ident()] += 1
        try:
            yield self._vocab
        finally:
            with self._lock:
                self._users -= Counter((threading.get_ident(),))  # drops what is zero

    def _tokenize(
        self, data: bytes, tokens: Any, capacity: int, add_special: bool, parse_special: bool
    ) -> int:
        def call() -> int:
            text = self.lib.ffi.from_buffer(data)
            n = self.lib.c.llama_tokenize(
                vocab, text, len(data), tokens, capacity, add_special, parse_special
            )
            return int(n)

        with self._using() as vocab:
            return with_deep_stack(call, len(data)) if self._recurses else call()

    def _check_specials(self, data: bytes, parse_special: bool) -> None:
        if len(data) <= MAX_SPECIALS:
            return
        wanted = _USER_DEFINED | (_CONTROL | _UNKNOWN if parse_special else 0)
        n = sum(data.count(text) for attr, text in self._special_texts if attr & wanted)
        if n > MAX_SPECIALS:
            raise InvalidRequestError(
                f"text: expected at most {MAX_SPECIALS} special tokens, got {n}", param="prompt"
            )

    @cached_property
    def _special_texts(self) -> list[tuple[int, bytes]]:
        """(attributes, text) of the tokens that libllama searches for in texts."""
        c, string = self.lib.c, self.lib.ffi.string
        with self._using() as vocab:
            attrs = enumerate(map(c.llama_vocab_get_attr, repeat(vocab), range(self.n_tokens)))
            return [
                (attr, bytes(string(c.llama_vocab_get_text(vocab, token))))
                for token, attr in attrs
                if attr & (_UNKNOWN | _CONTROL | _USER_DEFINED)
            ]

    def _special(self, getter: Any) -> int | None:
        token = int(getter(self._vocab))
        return token if 0 <= token < self.n_tokens else None

    def _check(self, token: int) -> None:
        """libllama ends the process at an id out of range."""
        if not 0 <= token < self.n_tokens:
            raise InvalidRequestError(
                f"token id: expected 0 to {self.n_tokens - 1}, got {token}", param="tokens"
            )

    def _check_added_tokens(self, file: GGUFFile) -> None:
        """libllama asserts that a token it is told to add exists."""
        for flag, token, name in (
            (self.add_bos, self.bos, "bos"),
            (self.add_eos, self.eos, "eos"),
        ):
            if flag and token is None:
                self.close()
                raise GGUFError(
                    f"expected a {name} token, since add_{name}_token is set, got none",
                    path=file.path,
                    where=f"tokenizer.ggml.{name}_token_id",
                )

    def _free(self, ptr: Any) -> None:
        self.lib.c.llama_model_free(ptr)


def _utf8(text: str | bytes) -> bytes:
    if not isinstance(text, str | bytes):  # bytes(5) would be five zeros
        raise TypeError(f"expected text, got {type(text).__name__}")
    try:
        data = text.encode() if isinstance(text, str) else text
        if isinstance(text, bytes):
            data.decode()
    except (UnicodeEncodeError, UnicodeDecodeError) as exc:
        raise InvalidRequestError(
            f"text: expected valid Unicode, got {exc.reason} at {exc.start}", param="prompt"
        ) from exc
    if len(data) > MAX_TEXT_BYTES:
        raise InvalidRequestError(
            f"text: expected at most {MAX_TEXT_BYTES} bytes, got {len(data)}", param="prompt"
        )
    return data
