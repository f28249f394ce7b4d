"""libllama as an oracle: a typed owner over llama-cpp-python's low-level functions.

It computes whatever libllama computes. It never keeps a wrong call from aborting the process, so
tests do not hand it what libllama asserts on (an adapter on a tied token table, for one).
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt


def _import_low_level() -> ModuleType:
    with warnings.catch_warnings():
        # The package's own import may warn, which pytest here turns into errors.
        warnings.simplefilter("ignore")
        from llama_cpp import llama_cpp
    return llama_cpp


low = _import_low_level()

_GGML_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8, "bf16": 30}
_POOLINGS = {"none": 0, "mean": 1, "cls": 2, "last": 3}
_LEVEL_ERROR = 4


class LibllamaError(Exception):
    """libllama refused something; the text is what it logged."""


class Log:
    """What libllama says, line by line, while this object is open; nothing reaches stderr.

    libllama has one log sink per process: the innermost open Log gets it.
    """

    # The sink is process-wide in libllama, so the stack of its owners is too.
    _open: ClassVar[list[Log]] = []

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.errors: list[str] = []

    def __enter__(self) -> Self:
        Log._open.append(self)
        low.llama_log_set(_receive, ctypes.c_void_p())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        Log._open.remove(self)

    @property
    def text(self) -> str:
        """All lines."""
        return "".join(self.lines)

    @property
    def error_text(self) -> str:
        """Lines of level error."""
        return "".join(self.errors)

    def take(self, level: int, text: str) -> None:
        """Receive one message."""
        self.lines.append(text)
        if level == _LEVEL_ERROR:
            self.errors.append(text)


@low.llama_log_callback  # type: ignore[untyped-decorator]
def _receive(level: int, text: bytes | None, _user_data: object) -> None:
    if Log._open:
        Log._open[-1].take(level, (text or b"").decode("utf-8", "replace"))


class Libllama:
    """One model, one context and its adapters, freed in order by close().

    Defaults are libllama's exact side: flash attention off. `repack` allows the extra buffer types.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        n_ctx: int = 512,
        n_threads: int = 1,
        flash: bool = False,
        kv_type: Literal["f16", "f32", "bf16", "q8_0", "q4_0"] = "f16",
        n_ubatch: int = 512,
        use_mmap: bool = True,
        repack: bool = True,
        vocab_only: bool = False,
        pooling: Literal["none", "mean", "cls", "last"] | None = None,
    ) -> None:
        self._model: Any = None
        self._context: Any = None
        self._adapters: dict[int, Any] = {}
        self.log = Log()
        with self.log:
            low.llama_backend_init()
            self._model = self._load(path, use_mmap, repack, vocab_only)
            self._vocab = low.llama_model_get_vocab(self._model)
            self.n_vocab = int(low.llama_vocab_n_tokens(self._vocab))
            if vocab_only:
                return
            params = low.llama_context_default_params()
            params.n_ctx = params.n_batch = n_ctx
            params.n_ubatch = n_ubatch
            params.n_threads = params.n_threads_batch = n_threads
            params.flash_attn_type = int(flash)
            params.type_k = params.type_v = _GGML_TYPES[kv_type]
            params.no_perf = False
            if pooling is not None:
                params.embeddings = True
                params.pooling_type = _POOLINGS[pooling]
            self._context = low.llama_init_from_model(self._model, params)
            if not self._context:
                self.close()
                raise LibllamaError(self.log.error_text)
        self.n_ctx = n_ctx
        self._n_past = 0
        self._pooled = pooling not in (None, "none")

    def _load(self, path: str | Path, use_mmap: bool, repack: bool, vocab_only: bool) -> Any:
        params = low.llama_model_default_params()
        params.n_gpu_layers = 0
        params.load_mode = low.LLAMA_LOAD_MODE_MMAP if use_mmap else low.LLAMA_LOAD_MODE_NONE
        params.use_extra_bufts = repack
        params.vocab_only = vocab_only
        model = low.llama_model_load_from_file(str(path).encode(), params)
        if not model:
            raise LibllamaError(self.log.error_text)
        return model

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free context, adapters and model, in that order; a second call does nothing."""
        with self.log:
            if self._context:
                low.llama_free(self._context)
            for pointer in self._adapters.values():
                low.llama_adapter_lora_free(pointer)
            if self._model:
                low.llama_model_free(self._model)
        self._context = self._model = None
        self._adapters = {}

    def tokenize(self, text: str, *, add_special: bool = True, special: bool = True) -> list[int]:
        """Token ids of `text`; `special` recognises control tokens written out."""
        data = text.encode()
        room = len(data) + 8
        out = (low.llama_token * room)()
        count = low.llama_tokenize(self._vocab, data, len(data), out, room, add_special, special)
        if count < 0:
            raise LibllamaError(f"llama_tokenize needs room for {-count} tokens, got {room}")
        return list(out[:count])

    def piece(self, token: int, *, special: bool = True) -> bytes:
        """The bytes of one token."""
        buffer = ctypes.create_string_buffer(256)
        count = low.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, special)
        if count < 0:
            raise LibllamaError(f"llama_token_to_piece needs {-count} bytes")
        return buffer.raw[:count]

    def load_adapter(self, path: str | Path) -> int:
        """Load an adapter; gives its handle, or LibllamaError with libllama's own message."""
        with Log() as log:
            pointer = low.llama_adapter_lora_init(self._model, str(path).encode())
        if not pointer:
            raise LibllamaError(log.error_text)
        handle = len(self._adapters) + 1
        self._adapters[handle] = pointer
        return handle

    def adapter_metadata(self, handle: int) -> dict[str, str]:
        """The adapter's keys that are no arrays, values as libllama prints them."""
        pointer = self._adapters[handle]
        return {
            _text(low.llama_adapter_meta_key_by_index, pointer, index): _text(
                low.llama_adapter_meta_val_str_by_index, pointer, index
            )
            for index in range(low.llama_adapter_meta_count(pointer))
        }

    def invocation_tokens(self, handle: int) -> list[int]:
        """The tokens that switch an aLoRA on; none for a plain adapter."""
        pointer = self._adapters[handle]
        count = int(low.llama_adapter_get_alora_n_invocation_tokens(pointer))
        tokens = low.llama_adapter_get_alora_invocation_tokens(pointer)
        return [int(tokens[index]) for index in range(count)]

    def set_adapters(self, scales: Mapping[int, float]) -> None:
        """Make exactly these adapters (handle -> user scale) active for the tokens that follow."""
        count = len(scales)
        pointers = (low.llama_adapter_lora_p_ctypes * count)(
            *(self._adapters[handle] for handle in scales)
        )
        values = (ctypes.c_float * count)(*scales.values())
        with self.log:
            status = low.llama_set_adapters_lora(self._context, pointers, count, values)
        if status != 0:
            raise LibllamaError(f"llama_set_adapters_lora gave {status}")

    def clear(self) -> None:
        """Forget all tokens."""
        low.llama_memory_clear(low.llama_get_memory(self._context), True)
        self._n_past = 0

    def decode(self, tokens: Sequence[int], *, last_only: bool = False) -> npt.NDArray[np.float32]:
        """Append tokens to the sequence; logits (n_outputs, n_vocab) f32 of all or the last one."""
        count = len(tokens)
        batch = low.llama_batch_init(count, 0, 1)
        try:
            batch.n_tokens = count
            for index, token in enumerate(tokens):
                batch.token[index] = token
                batch.pos[index] = self._n_past + index
                batch.n_seq_id[index] = 1
                batch.seq_id[index][0] = 0
                batch.logits[index] = not last_only or index == count - 1
            with Log() as log:
                status = low.llama_decode(self._context, batch)
        finally:
            low.llama_batch_free(batch)
        if status != 0:
            raise LibllamaError(f"llama_decode gave {status}: {log.error_text}")
        self._n_past += count
        pointer = low.llama_get_logits(self._context)
        n_outputs = 1 if last_only else count
        return np.ctypeslib.as_array(pointer, shape=(n_outputs, self.n_vocab)).copy()

    def embed(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """States of a fresh sequence, (n_embd,) f32, or without pooling (n_tokens, n_embd) f32.

        Only in a context made with `pooling`.
        """
        self.clear()
        self.decode(tokens)
        n_embd = int(low.llama_model_n_embd(self._model))
        if self._pooled:
            pooled = low.llama_get_embeddings_seq(self._context, 0)
            return np.ctypeslib.as_array(pooled, shape=(n_embd,)).copy()
        rows = low.llama_get_embeddings(self._context)
        return np.ctypeslib.as_array(rows, shape=(len(tokens), n_embd)).copy()

    def logits(self, tokens: Sequence[int], chunk: int | None = None) -> npt.NDArray[np.float32]:
        """Logits (n_tokens, n_vocab) f32 of a fresh sequence, `chunk` tokens a decode."""
        self.clear()
        width = chunk or len(tokens)
        parts = [
            self.decode(tokens[start : start + width]) for start in range(0, len(tokens), width)
        ]
        return np.concatenate(parts)

    def greedy(self, tokens: Sequence[int], n: int) -> list[int]:
        """The `n` most likely continuations, one after another, end tokens included."""
        return self.greedy_logits(tokens, n).argmax(axis=1).tolist()  # type: ignore[no-any-return]

    def greedy_logits(self, tokens: Sequence[int], n: int) -> npt.NDArray[np.float32]:
        """Logits (n, n_vocab) f32 at each of `n` greedy steps of a fresh sequence."""
        self.clear()
        rows = [self.decode(tokens, last_only=True)[0]]
        while len(rows) < n:
            rows.append(self.decode([int(rows[-1].argmax())])[0])
        return np.stack(rows)

    @property
    def n_reused(self) -> int:
        """How many decodes reused the graph of the one before, since the context began."""
        return int(low.llama_perf_context(self._context).n_reused)


def _text(read: Callable[..., int], pointer: Any, index: int) -> str:
    buffer = ctypes.create_string_buffer(4096)
    count = read(pointer, index, buffer, len(buffer))
    if not 0 <= count < len(buffer):
        raise LibllamaError(f"metadata {index}: {count} bytes")
    return buffer.value.decode()
