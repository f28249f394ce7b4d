"""Logits by the libllama of llama_cpp_py_sync, which knows `prism.hadamard.*`. A program.

Run by a Python that has the package: fold_libllama.py '{"model": ..., "tokens": [...], "out": ...}'
writes (n_tokens, n_vocab) f32 as .npy. Two builds of libllama do not share a process.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any

import numpy as np


def main(job: dict[str, Any]) -> None:
    """Load, decode in one batch, save."""
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
    tokens = job["tokens"]
    batch = lib.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i] = token, i
        batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, 1
    if lib.llama_decode(context, batch) != 0:
        raise SystemExit("decoding failed")
    n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    rows = ffi.buffer(lib.llama_get_logits(context), 4 * len(tokens) * n_vocab)
    np.save(job["out"], np.frombuffer(rows, np.float32).reshape(len(tokens), n_vocab))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
