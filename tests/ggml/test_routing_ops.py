"""The operations of experts and latent attention: wrong calls raise, right ones compute what their
docstrings say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from loragraph.errors import BackendError
from loragraph.ggml.handles import (
    F16,
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
from loragraph.ggml.ops import Rope
from loragraph.ggml.routing_ops import RoutingOps

RNG = np.random.default_rng(21)
Arrays = tuple[NDArray[Any], ...]


class Maker:
    """Ops in a context of their own, and tensors by type and sizes."""

    def __init__(self, ctx: TensorContext) -> None:
        self.ctx = ctx
        self.ops = RoutingOps(ctx)

    def f32(self, *ne: int) -> Tensor:
        """F32 of these sizes."""
        return self.ctx.new_tensor(F32, ne)

    def f16(self, *ne: int) -> Tensor:
        """F16 of these sizes."""
        return self.ctx.new_tensor(F16, ne)

    def i32(self, *ne: int) -> Tensor:
        """I32 of these sizes."""
        return self.ctx.new_tensor(I32, ne)

    def turned(self, *ne: int) -> Tensor:
        """F32 of these sizes whose rows are not adjacent values."""
        return self.ops.permute(self.f32(ne[1], ne[0], *ne[2:]), 1, 0, 2, 3)


@pytest.fixture
def t() -> Iterator[Maker]:
    """Room for a few dozen tensors."""
    with TensorContext(load_library(), 64) as ctx:
        yield Maker(ctx)


Wrong = Callable[[Maker], object]

ROPE = Rope(n_rot=8, mode=0, n_ctx_orig=64, freq_base=10000.0, freq_scale=1.0)
WRONG: dict[str, Wrong] = {
    "soft_max_rows: F16": lambda t: t.ops.soft_max_rows(t.f16(8, 3)),
    "soft_max_rows: turned": lambda t: t.ops.soft_max_rows(t.turned(8, 3)),
    "sigmoid: turned": lambda t: t.ops.sigmoid(t.turned(8, 3)),
    "top_k: none": lambda t: t.ops.top_k(t.f32(8, 3), 0),
    "top_k: more than there are": lambda t: t.ops.top_k(t.f32(8, 3), 9),
    "top_k: integers": lambda t: t.ops.top_k(t.i32(8, 3), 2),
    "top_k: turned": lambda t: t.ops.top_k(t.turned(8, 3), 2),
    "counting_rows: none": lambda t: t.ops.counting_rows(0, 3),
    "counting_rows: no rows": lambda t: t.ops.counting_rows(3, 0),
    "counting_rows: beyond float32": lambda t: t.ops.counting_rows(1 << 24, 1),
    "sum_rows: turned": lambda t: t.ops.sum_rows(t.turned(8, 3)),
    "sum_rows: F16": lambda t: t.ops.sum_rows(t.f16(8, 3)),
    "clamp_from: F16": lambda t: t.ops.clamp_from(t.f16(8), 0.0),
    "div: no repetition": lambda t: t.ops.div(t.f32(8, 3), t.f32(3, 3)),
    "div: F16": lambda t: t.ops.div(t.f16(8, 3), t.f32(8, 3)),
    "add_id: unlike widths": lambda t: t.ops.add_id(t.f32(8, 2, 3), t.f32(7, 4), t.i32(2, 3)),
    "add_id: unlike counts": lambda t: t.ops.add_id(t.f32(8, 2, 3), t.f32(8, 4), t.i32(1, 3)),
    "add_id: ids of floats": lambda t: t.ops.add_id(t.f32(8, 2, 3), t.f32(8, 4), t.f32(2, 3)),
    "add_id: F16 rows": lambda t: t.ops.add_id(t.f32(8, 2, 3), t.f16(8, 4), t.i32(2, 3)),
    "swiglu_oai: unlike": lambda t: t.ops.swiglu_oai(t.f32(8, 3), t.f32(8, 2), 1.0, 7.0),
    "swiglu_oai: F16": lambda t: t.ops.swiglu_oai(t.f16(8, 3), t.f16(8, 3), 1.0, 7.0),
    "concat: unlike rows": lambda t: t.ops.concat(t.f32(8, 3), t.f32(8, 2)),
    "concat: F16": lambda t: t.ops.concat(t.f16(8, 3), t.f32(8, 3)),
    "concat: turned": lambda t: t.ops.concat(t.turned(8, 3), t.f32(8, 3)),
    "repeat_heads: two heads": lambda t: t.ops.repeat_heads(t.f32(8, 2, 3), 4),
    "repeat_heads: none": lambda t: t.ops.repeat_heads(t.f32(8, 1, 3), 0),
    "keep_groups: more than there are": lambda t: t.ops.keep_groups(t.f32(4, 2, 3), t.i32(3, 3)),
    "best_of_groups: too small": lambda t: t.ops.best_of_groups(t.f32(1, 4, 3), 2),
    "add_sinks: another number": lambda t: t.ops.add_sinks(
        t.ops.soft_max(t.f32(8, 3, 4), t.f32(8, 3), 1.0), t.f32(3)
    ),
    "add_sinks: F16": lambda t: t.ops.add_sinks(
        t.ops.soft_max(t.f32(8, 3, 4), t.f32(8, 3), 1.0), t.f16(4)
    ),
    "add_sinks: of a sum": lambda t: t.ops.add_sinks(t.ops.add(t.f32(8, 3, 4), t.f32(8)), t.f32(4)),
    "rope: beyond the head": lambda t: t.ops.rope(t.f32(12, 2, 3), t.i32(3), ROPE, None, 8),
    "rope: offset below 0": lambda t: t.ops.rope(t.f32(12, 2, 3), t.i32(3), ROPE, None, -1),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_a_wrong_call_raises(call: Wrong, t: Maker) -> None:
    """Shapes, types and layouts that ggml asserts on raise BackendError instead."""
    with pytest.raises(BackendError):
        call(t)


def computed(make: Callable[[RoutingOps, list[Tensor]], Tensor], *arrays: NDArray[Any]) -> Any:
    """What the operation makes of these arrays, in numpy order."""
    lib = load_library()
    with (
        TensorContext(lib, len(arrays)) as inputs,
        TensorContext(lib, 32, 32) as ctx,
        CpuBackend(lib, 1) as backend,
        GraphAllocator(lib) as allocator,
    ):
        types = [F32 if array.dtype == np.float32 else I32 for array in arrays]
        tensors = [
            inputs.new_tensor(type_, array.shape[::-1])
            for type_, array in zip(types, arrays, strict=True)
        ]
        with Buffer.for_tensors(inputs):
            for tensor, array in zip(tensors, arrays, strict=True):
                array_view(lib, tensor)[:] = array.ravel()
            out = make(RoutingOps(ctx), tensors)
            out = RoutingOps(ctx).cont(out) if out.type == F32 else out
            graph = lib.c.ggml_new_graph_custom(ctx.ptr, 32, False)
            lib.c.ggml_set_output(out.ptr)
            lib.c.ggml_build_forward_expand(graph, out.ptr)
            allocator.allocate(graph)
            backend.compute(graph)
            shape = [n for n in reversed(out.ne) if n > 1]
            return array_view(lib, out).reshape(shape).copy()


def normal(*shape: int) -> NDArray[np.float32]:
    """Random values."""
    return RNG.standard_normal(shape, dtype=np.float32)


def test_counting_rows_name_everything() -> None:
    """Each row counts from 0."""
    out = computed(lambda ops, _: ops.counting_rows(5, 3), normal(1, 1))
    np.testing.assert_array_equal(out, np.tile(np.arange(5), (3, 1)))


def test_the_chosen_experts_are_the_largest_in_order() -> None:
    """top_k gives indices, the largest value's first."""
    scores = normal(3, 8)
    chosen = np.argsort(-scores, axis=1)[:, :4].astype(np.int32)
    table = np.broadcast_to(np.arange(8, dtype=np.float32)[None, :, None], (3, 8, 1)).copy()

    out = computed(lambda ops, x: ops.get_rows(x[1], ops.top_k(x[0], 4)), scores, table)

    np.testing.assert_array_equal(out, chosen)


def test_groups_are_kept_by_their_two_best() -> None:
    """The groups with the largest sums of two scores stay, the others become minus infinity."""
    scores = normal(5, 4, 6)
    sums = np.sort(scores, axis=2)[..., -2:].sum(axis=2)
    best = np.argsort(-sums, axis=1)[:, :2]
    expected = np.full_like(scores, -np.inf)
    for row in range(5):
        expected[row, best[row]] = scores[row, best[row]]

    out = computed(
        lambda ops, x: ops.keep_groups(x[0], ops.top_k(ops.best_of_groups(x[0], 2), 2)), scores
    )

    np.testing.assert_array_equal(out, expected)


def test_weights_are_made_to_sum_to_one() -> None:
    """div by sum_rows, clamped from below, as routers do it."""
    x = np.abs(normal(4, 6))
    x[2] = 0

    out = computed(lambda ops, t: ops.div(t[0], ops.clamp_from(ops.sum_rows(t[0]), 0.5)), x)

    np.testing.assert_allclose(out, x / np.maximum(x.sum(axis=1), 0.5)[:, None], rtol=1e-6)


def test_softmax_and_sigmoid_over_rows() -> None:
    """Both are those of the definition."""
    x = normal(4, 9)
    e = np.exp(x - x.max(axis=1, keepdims=True))

    out = computed(lambda ops, t: ops.soft_max_rows(t[0]), x)

    np.testing.assert_allclose(out, e / e.sum(axis=1, keepdims=True), rtol=1e-5)
    out = computed(lambda ops, t: ops.sigmoid(t[0]), x)
    np.testing.assert_allclose(out, 1 / (1 + np.exp(-x)), rtol=1e-5)


def test_an_experts_bias_is_added_by_id() -> None:
    """Row ids[t, u] of the biases goes to row u of token t."""
    x, biases = normal(3, 2, 8), normal(5, 8)
    ids = np.array([[4, 0], [1, 1], [2, 3]], np.int32)

    out = computed(lambda ops, t: ops.add_id(t[0], t[1], t[2]), x, biases, ids)

    np.testing.assert_array_equal(out, x + biases[ids])


def test_the_clamped_swiglu() -> None:
    """Both parts are clamped, and up counts from 1."""
    gate, up = 6 * normal(4, 32), 6 * normal(4, 32)
    g, u = np.minimum(gate, 7), np.clip(up, -7, 7)

    out = computed(lambda ops, t: ops.swiglu_oai(t[0], t[1], 1.702, 7.0), gate, up)

    np.testing.assert_allclose(out, g / (1 + np.exp(-1.702 * g)) * (u + 1), rtol=1e-4, atol=1e-5)


def test_parts_of_heads_are_joined() -> None:
    """concat along the values of a head; repeat_heads gives all heads the same."""
    a, b = normal(5, 3, 4), normal(5, 1, 2)

    out = computed(lambda ops, t: ops.concat(t[0], ops.repeat_heads(t[1], 3)), a, b)

    np.testing.assert_array_equal(out, np.concatenate([a, b.repeat(3, axis=1)], axis=2))


def test_a_rotation_may_begin_inside_the_head() -> None:
    """Values before the offset stay, the rest turn as if they stood alone."""
    x, pos = normal(3, 2, 12), np.array([0, 5, 9], np.int32)

    whole = computed(lambda ops, t: ops.rope(t[0], t[1], ROPE, None, 4), x, pos)
    alone = computed(lambda ops, t: ops.rope(t[0], t[1], ROPE, None), x[..., 4:].copy(), pos)

    np.testing.assert_array_equal(whole, np.concatenate([x[..., :4], alone], axis=2))
