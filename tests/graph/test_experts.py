"""`builder.linear_id`: products with chosen experts, their scales, and adapters on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from loragraph.adapters.base import BaseInfo, BaseTarget, TargetKind
from loragraph.adapters.gguf import read_adapter
from loragraph.adapters.mix import EMPTY_MIX, Mix
from loragraph.ggml.gguf import TensorInfo
from loragraph.ggml.handles import (
    F32,
    I32,
    Buffer,
    CpuBackend,
    GraphAllocator,
    Tensor,
    TensorContext,
    array_view,
)
from loragraph.ggml.lib import load_library
from loragraph.graph.batch import Batch
from loragraph.graph.builder import Builder
from loragraph.graph.lowrank.branch import BranchLowering
from loragraph.model.weights import Use, Weight
from tests.tiny import write_adapter_raw

NAME = "blk.0.ffn_up_exps.weight"
N_IN, N_OUT, N_EXPERT, RANK = 8, 6, 4, 3
RNG = np.random.default_rng(11)
W = RNG.standard_normal((N_EXPERT, N_OUT, N_IN)).astype(np.float32)
SCALES = RNG.uniform(0.5, 2, N_EXPERT).astype(np.float32)
PAIRS = [
    (
        RNG.standard_normal((N_EXPERT, RANK, N_IN)).astype(np.float32),
        RNG.standard_normal((N_EXPERT, N_OUT, RANK)).astype(np.float32),
    )
    for _ in range(2)
]
ALPHA = 6.0
METADATA: dict[str, Any] = {
    "general.type": "adapter",
    "general.architecture": "llama",
    "adapter.type": "lora",
    "adapter.lora.alpha": ALPHA,
}


@dataclass(frozen=True)
class Case:
    """`ids` (n, n_used) names each token's experts; `x` (n, 1 or n_used, n_in)."""

    ids: np.ndarray[Any, np.dtype[np.int32]]
    x: np.ndarray[Any, np.dtype[np.float32]]


def case(n: int, n_used: int, *, wide: bool) -> Case:
    """Random experts, no expert twice for one token."""
    ids = np.stack([RNG.permutation(N_EXPERT)[:n_used] for _ in range(n)]).astype(np.int32)
    x = RNG.standard_normal((n, n_used if wide else 1, N_IN)).astype(np.float32)
    return Case(ids, x)


def expected(one: Case, scales: Sequence[float], *, scaled: bool) -> np.ndarray[Any, Any]:
    """(n, n_used, n_out) in float64: w_s belongs to the base product alone."""
    n, n_used = one.ids.shape
    y = np.zeros((n, n_used, N_OUT))
    for t, u in np.ndindex(n, n_used):
        expert = one.ids[t, u]
        x = one.x[t, u % one.x.shape[1]].astype(np.float64)
        y[t, u] = W[expert].astype(np.float64) @ x * (SCALES[expert] if scaled else 1)
        for (a, b), scale in zip(PAIRS, scales, strict=True):
            y[t, u] += scale * ALPHA / RANK * (b[expert].astype(np.float64) @ (a[expert] @ x))
    return y


def computed(one: Case, folder: Path, scales: Sequence[float], *, scaled: bool) -> Any:
    """The same through a real graph of one `linear_id` in the branch lowering."""
    lib = load_library()
    n, n_used = one.ids.shape
    info = TensorInfo(NAME, F32, (N_IN, N_OUT, N_EXPERT, 1), 0, W.nbytes, folder)
    target = BaseTarget(NAME, info.ne, TargetKind.EXPERTS)
    base = BaseInfo("llama", "experts", {NAME: target}, tied=False)
    mix = EMPTY_MIX
    if any(scales):
        adapters = {}
        for i, ((a, b), scale) in enumerate(zip(PAIRS, scales, strict=True)):
            path = folder / f"{i}.gguf"
            write_adapter_raw(path, METADATA, {f"{NAME}.lora_a": a, f"{NAME}.lora_b": b})
            adapters[read_adapter(lib, path, base)] = scale
        mix = Mix(adapters)
    lowering = BranchLowering(lib, tied=False, registered=lambda: 0)
    lowering.attach(mix)
    indices = np.arange(n, dtype=np.int32)
    batch = Batch.of_one(indices, 0, mix, indices)
    with (
        TensorContext(lib, 4) as weights_ctx,
        TensorContext(lib, 64, 64) as ctx,
        CpuBackend(lib, 1) as backend,
        GraphAllocator(lib) as allocator,
    ):
        w = weights_ctx.new_tensor(F32, info.ne[:3], NAME)
        w_s = weights_ctx.new_tensor(F32, (N_EXPERT,), "scale")
        x = weights_ctx.new_tensor(F32, (N_IN, one.x.shape[1], n), "x")
        ids = weights_ctx.new_tensor(I32, (n_used, n), "ids")
        with Buffer.for_tensors(weights_ctx):
            for tensor, values in ((w, W), (w_s, SCALES), (x, one.x), (ids, one.ids)):
                array_view(lib, tensor)[:] = values.ravel()
            factor = Weight("scale", w_s, info, Use.VECTOR) if scaled else None
            graph = lib.c.ggml_new_graph_custom(ctx.ptr, 64, False)
            nothing = cast(Any, None)  # no attention and no tokens in this graph
            builder = Builder(
                *(ctx, graph, lowering.begin(batch), nothing),
                tokens=nothing,
                positions=nothing,
                out_ids=nothing,
            )
            y: Tensor = builder.linear_id(Weight(NAME, w, info, Use.EXPERTS, None, factor), x, ids)
            lib.c.ggml_set_output(y.ptr)
            allocator.allocate(graph)
            backend.compute(graph)
            result = array_view(lib, y).reshape(n, n_used, N_OUT).copy()
    lowering.close()
    return result


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "w_s"])
@pytest.mark.parametrize("scales", [(0.0, 0.0), (1.0, 0.0), (0.5, -1.0)])
@pytest.mark.parametrize(("n", "n_used", "wide"), [(1, 2, False), (5, 2, False), (3, 2, True)])
def test_experts_are_routed_in_base_and_adapters(
    tmp_path: Path, scaled: bool, scales: tuple[float, float], n: int, n_used: int, wide: bool
) -> None:
    """Base, A and B use each token's own experts; the experts' scales act on the base alone."""
    one = case(n, n_used, wide=wide)

    result = computed(one, tmp_path, scales, scaled=scaled)

    assert np.allclose(result, expected(one, scales, scaled=scaled), rtol=1e-5, atol=1e-5)
