"""Logits from libllama: GGUF paths, scales and token ids -> float32 logits. Development only."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path

import llama_cpp as ll
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

GGML_TYPE_F32 = 0
GGML_TYPE_F16 = 1


class Libllama:
    """A base and its adapters.

    exact: F32 cells and plain attention; otherwise F16 cells and flash attention.
    """

    def __init__(self, base: Path, *, exact: bool, n_threads: int = 2) -> None:
        ll.llama_backend_init()
        params = ll.llama_model_default_params()
        self._model = ll.llama_model_load_from_file(str(base).encode(), params)
        if not self._model:
            raise SystemExit(f"{base}: libllama cannot load it")
        cparams = ll.llama_context_default_params()
        cparams.n_ctx = cparams.n_batch = cparams.n_ubatch = 256
        cparams.n_threads = cparams.n_threads_batch = n_threads
        cparams.type_k = cparams.type_v = GGML_TYPE_F32 if exact else GGML_TYPE_F16
        cparams.flash_attn_type = 0 if exact else 1  # LLAMA_FLASH_ATTN_TYPE_DISABLED, _ENABLED
        self._context = ll.llama_init_from_model(self._model, cparams)
        self._n_vocab = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(self._model))
        self._adapters: dict[Path, ll.llama_adapter_lora_p_ctypes] = {}

    def set_adapters(self, mix: Mapping[Path, float]) -> None:
        """The adapters of later tokens; clears the cells."""
        for path in mix:
            if path not in self._adapters:
                adapter = ll.llama_adapter_lora_init(self._model, str(path).encode())
                if not adapter:
                    raise SystemExit(f"{path}: libllama refuses this adapter")
                self._adapters[path] = adapter
        pointers = (ll.llama_adapter_lora_p_ctypes * len(mix))(*(self._adapters[p] for p in mix))
        scales = (ctypes.c_float * len(mix))(*mix.values())
        status = ll.llama_set_adapters_lora(
            self._context, pointers if mix else None, len(mix), scales if mix else None
        )
        if status != 0:
            raise SystemExit(f"llama_set_adapters_lora returned {status}")
        self.clear()

    def clear(self) -> None:
        ll.llama_memory_clear(ll.llama_get_memory(self._context), True)

    def decode(self, ids: list[int], first: int = 0) -> Array:
        """(n_tokens, n_vocab) f32 logits after each of `ids`, which begin at position `first`."""
        batch = ll.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i] = token
            batch.pos[i] = first + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = 1
        status = ll.llama_decode(self._context, batch)
        ll.llama_batch_free(batch)
        if status != 0:
            raise SystemExit(f"llama_decode returned {status}")
        pointer = ll.llama_get_logits(self._context)
        return np.ctypeslib.as_array(pointer, (len(ids), self._n_vocab)).copy()

    def greedy(self, ids: list[int], n: int) -> list[int]:
        """The `n` most probable tokens in turn after `ids`, end of text or not."""
        out: list[int] = []
        logits = self.decode(ids)
        for i in range(n):
            out.append(int(logits[-1].argmax()))
            if i + 1 < n:
                logits = self.decode([out[-1]], len(ids) + i)
        return out

    def close(self) -> None:
        """Free the context and the model, and the adapters with it."""
        ll.llama_free(self._context)
        ll.llama_model_free(self._model)
