"""Logits by the libllama of llama_cpp_py_sync, which knows `prism.hadamard.*`. A program.

Run by a Python that has the package and numpy: fold_libllama.py '{"model": ..., "adapter": ...,
"scales": [0, 1], "tokens": [...], "out": ...}' writes (n_scales, n_tokens, n_vocab) f32 as .npy; at
scale 0 nothing is attached, and "adapter" may be null. Two builds do not share a process.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any

import numpy as np


def main(job: dict[str, Any]) -> None:
    """Load, decode with each scale, save."""
    bindings: Any = import_module("llama_cpp_py_sync._cffi_bindings")
    ffi, lib = bindings.ffi, bindings.get_lib()
    lib.llama_backend_init()
    params = lib.llama_model_default_params()
    params.n_gpu_layers = 0
    model = lib.llama_model_load_from_file(job["model"].encode(), params)
    if model == ffi.NULL:
        raise SystemExit("the model does not load")
    settings = lib.llama_context_default_params()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = 256
    settings.n_threads = settings.n_threads_batch = 1
    settings.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
    settings.type_k = settings.type_v = 0  # F32
    context = lib.llama_init_from_model(model, settings)
    if context == ffi.NULL:
        raise SystemExit("no context")
    adapter = ffi.NULL
    if job["adapter"]:
        adapter = lib.llama_adapter_lora_init(model, job["adapter"].encode())
        if adapter == ffi.NULL:
            raise SystemExit("the adapter does not load")
    n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    rows = []
    for scale in job["scales"]:
        attached = ffi.new("struct llama_adapter_lora *[]", [adapter] if scale else [])
        scales = ffi.new("float[]", [scale] if scale else [])
        if lib.llama_set_adapters_lora(context, attached, len(scales), scales) != 0:
            raise SystemExit("the adapter is not attached")
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        _decode(lib, context, job["tokens"])
        data = ffi.buffer(lib.llama_get_logits(context), 4 * len(job["tokens"]) * n_vocab)
        rows.append(np.frombuffer(data, np.float32).reshape(-1, n_vocab).copy())
    np.save(job["out"], np.stack(rows))


def _decode(lib: Any, context: Any, tokens: list[int]) -> None:
    """All tokens as one sequence in one batch, with logits of each."""
    batch = lib.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i] = token, i
        batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, 1
    if lib.llama_decode(context, batch) != 0:
        raise SystemExit("decoding failed")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
