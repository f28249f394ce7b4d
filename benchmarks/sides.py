"""The two engines that a benchmark compares, behind one small interface.

A round is one prefill of fresh tokens, logits of the last one alone, then single-token decodes, on
the same settings: F16 cells, 512 tokens a step. "routed" is what a context does by default, with
attention over cells; "flash" and "branch" use ggml's flash attention, as libllama does. libllama is
called through llama-cpp-python's low-level functions with the batch made beforehand, so its Python
part is one call a step.
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from llama_cpp import llama_cpp as low

import loragraph
from loragraph.ggml.lib import load_library

Clock = Literal["wall", "cpu"]
SideName = Literal["routed", "flash", "branch", "libllama"]

N_BATCH = 512  # tokens that one graph computes, on both sides
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True, slots=True)
class Settings:
    """What both sides get alike."""

    n_threads: int = 2
    n_ctx: int = 2048
    clock: Clock = "wall"  # cpu: the process's CPU time, for one thread on a busy machine


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds of one prefill and of all decodes after it."""

    prefill_s: float
    decode_s: float


class Side(Protocol):
    """One engine with one model, one context and one adapter, which is on or off."""

    def use_adapter(self, on: bool) -> None:
        """Whether the tokens that follow carry the adapter."""

    def round(self, prompt: Sequence[int], n_decode: int) -> Round:
        """Forgets the sequence, computes the prompt, then `n_decode` single tokens of it."""

    def close(self) -> None:
        """Frees everything."""


def prepare() -> None:
    """Opens both native libraries: what importing the packages has done before a load begins."""
    load_library()
    low.llama_backend_init()
    low.llama_log_set(_silent, ctypes.c_void_p())


def open_side(name: SideName, base: Path, adapter: Path | None, settings: Settings) -> Side:
    """Loads base and context, then the adapter, which is off at first."""
    if name == "libllama":
        return _Libllama(base, adapter, settings)
    if name == "routed":
        return _Loragraph(base, adapter, settings, "routed", "cells")
    return _Loragraph(base, adapter, settings, "routed" if name == "flash" else name, "flash")


class _Loragraph:
    def __init__(
        self,
        base: Path,
        adapter: Path | None,
        settings: Settings,
        lowering: Literal["routed", "branch"],
        attention: Literal["flash", "cells"],
    ) -> None:
        self._now = CLOCKS[settings.clock]
        self._model = loragraph.Model.load(base, n_threads=settings.n_threads)
        self._context = loragraph.Context(
            self._model,
            n_ctx=settings.n_ctx,
            lowering=lowering,
            attention=attention,
            n_batch=N_BATCH,
        )
        self._adapter = None if adapter is None else self._model.load_adapter(adapter)

    def use_adapter(self, on: bool) -> None:
        self._context.set_adapters({self._adapter: 1.0} if on and self._adapter else {})

    def round(self, prompt: Sequence[int], n_decode: int) -> Round:
        context, now = self._context, self._now
        context.clear()
        gc.collect()
        start = now()
        context.decode(prompt, outputs="last")
        middle = now()
        for token in prompt[:n_decode]:
            context.decode([token], outputs="last")
        return Round(middle - start, now() - middle)

    def close(self) -> None:
        self._context.close()
        self._model.close()


class _Libllama:
    def __init__(self, base: Path, adapter: Path | None, settings: Settings) -> None:
        self._now = CLOCKS[settings.clock]
        model_params = low.llama_model_default_params()
        model_params.n_gpu_layers = 0
        self._model = low.llama_model_load_from_file(os.fsencode(base), model_params)
        if not self._model:  # it takes any pointer for a model's
            raise RuntimeError(f"libllama could not load {base}")
        params = low.llama_context_default_params()
        params.n_ctx = settings.n_ctx
        params.n_batch = params.n_ubatch = N_BATCH
        params.n_threads = params.n_threads_batch = settings.n_threads
        params.flash_attn_type = low.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self._context: Any = low.llama_init_from_model(self._model, params)
        self._adapter: Any = None
        if adapter is not None:
            self._adapter = low.llama_adapter_lora_init(self._model, os.fsencode(adapter))
        if not (self._context and (adapter is None or self._adapter)):
            raise RuntimeError(f"libllama could not load {base} with {adapter}")

    def use_adapter(self, on: bool) -> None:
        count = int(on and self._adapter is not None)
        pointers = (low.llama_adapter_lora_p_ctypes * count)(*([self._adapter] * count))
        scales = (ctypes.c_float * count)(*([1.0] * count))
        self._check(low.llama_set_adapters_lora(self._context, pointers, count, scales))

    def round(self, prompt: Sequence[int], n_decode: int) -> Round:
        context, now = self._context, self._now
        prefill = _batch(prompt)
        decodes = [_batch([token]) for token in prompt[:n_decode]]
        low.llama_memory_clear(low.llama_get_memory(context), True)
        gc.collect()
        start = now()
        self._decode(prefill)
        middle = now()
        for batch in decodes:
            self._decode(batch)
        return Round(middle - start, now() - middle)

    def close(self) -> None:
        low.llama_free(self._context)
        if self._adapter is not None:
            low.llama_adapter_lora_free(self._adapter)
        low.llama_model_free(self._model)

    def _decode(self, batch: Any) -> None:
        self._check(low.llama_decode(self._context, batch))
        low.llama_get_logits(self._context)  # waits until they are there

    @staticmethod
    def _check(status: int) -> None:
        if status != 0:
            raise RuntimeError(f"libllama failed with status {status}")


def _batch(tokens: Sequence[int]) -> Any:
    """Tokens that continue the sequence; logits of the last one alone."""
    array = (low.llama_token * len(tokens))(*tokens)
    batch = low.llama_batch_get_one(array, len(tokens))
    batch.keep = array  # the batch only points at it
    return batch


@low.llama_log_callback  # type: ignore[untyped-decorator]
def _silent(level: int, text: bytes | None, user_data: object) -> None:
    """Nothing of what libllama says reaches the terminal."""
