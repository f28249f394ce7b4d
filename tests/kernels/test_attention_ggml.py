"""Attention over cells against ggml's flash attention: never further from float64 than that is."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest
from numpy.typing import NDArray

from loragraph.ggml.handles import (
    F16,
    F32,
    Q8_0,
    Buffer,
    CpuBackend,
    GraphAllocator,
    TensorContext,
    array_view,
)
from loragraph.ggml.lib import load_library
from loragraph.ggml.ops import Ops
from tests.kernels.attention_cases import Layer, Stretch, prompt_chunk, run_native
from tests.kernels.cases import nmse

N_CELLS = 256


def run_flash(layer: Layer, stretches: list[Stretch], n_rows: int) -> NDArray[np.float32]:
    """The same by ggml over all cells with a mask: (n_rows, n_head * hd)."""
    lib, shape = load_library(), layer.shape
    mask = np.full((n_rows, N_CELLS), -np.inf, np.float16)
    for stretch in stretches:
        for row, begin, end in stretch.seen:
            mask[row, list(stretch.cells[begin:end])] = 0
    with ExitStack() as made:
        inputs = made.enter_context(TensorContext(lib, 4))
        q = inputs.new_tensor(F32, (shape.n_embd_k, shape.n_head, n_rows))
        k = inputs.new_tensor(shape.k_type, (shape.n_embd_k, shape.n_head_kv, N_CELLS))
        v = inputs.new_tensor(shape.v_type, (shape.n_embd_v, shape.n_head_kv, N_CELLS))
        m = inputs.new_tensor(F16, (N_CELLS, n_rows))
        made.enter_context(Buffer.for_tensors(inputs))
        for tensor, array in ((q, layer.q), (k, layer.k_data), (v, layer.v_data), (m, mask)):
            lib.ffi.memmove(tensor.ptr.data, np.ascontiguousarray(array).tobytes(), array.nbytes)
        ctx = made.enter_context(TensorContext(lib, 8, 8))
        ops = Ops(ctx)
        q, k, v = (ops.permute(t, 0, 2, 1, 3) for t in (q, k, v))
        out = ops.flash_attn(q, k, v, m, shape.scale, shape.softcap)
        ops.accumulate_in_f32(out)
        graph = lib.c.ggml_new_graph_custom(ctx.ptr, 8, False)
        lib.c.ggml_set_output(out.ptr)
        lib.c.ggml_build_forward_expand(graph, out.ptr)
        made.enter_context(GraphAllocator(lib)).allocate(graph)
        made.enter_context(CpuBackend(lib, 1)).compute(graph)
        return array_view(lib, out).reshape(n_rows, -1).copy()


@pytest.mark.parametrize("n_rows", [1, 7, 70])
@pytest.mark.parametrize("softcap", [0.0, 8.0])
@pytest.mark.parametrize("type_", [F32, F16, Q8_0])
@pytest.mark.parametrize(("heads", "n_embd"), [((9, 3), 64), ((4, 4), 96), ((8, 1), 128)])
def test_error_is_within_that_of_flash_attention(
    heads: tuple[int, int], n_embd: int, type_: int, softcap: float, n_rows: int
) -> None:
    """On the same bytes the error against float64 is at most ggml's, for every type of cell."""
    rng = np.random.default_rng(n_rows)
    layer = Layer.random(
        rng, n_rows, N_CELLS, heads, (n_embd, n_embd), (type_, type_), softcap=softcap
    )
    stretches = prompt_chunk(N_CELLS - 70, n_rows, range(N_CELLS))
    twin = layer.expected(stretches, n_rows)
    flash = nmse(run_flash(layer, stretches, n_rows), twin)
    cells = nmse(run_native(layer, stretches, n_rows), twin)
    assert cells <= 1e-11
    assert cells <= max(flash, 1e-12)
