"""A wrong call of an operation raises; it never reaches ggml's abort. In process, so that a
missing check ends the test run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from loragraph.errors import BackendError
from loragraph.ggml.handles import (
    BF16,
    F16,
    F32,
    I32,
    I64,
    Q8_0,
    Buffer,
    CpuBackend,
    GraphAllocator,
    Tensor,
    TensorContext,
    array_view,
)
from loragraph.ggml.lib import Library, load_library
from loragraph.ggml.ops import Ops, Rope

ROPE = Rope(n_rot=8, mode=0, n_ctx_orig=64, freq_base=10000.0, freq_scale=1.0)
Q4_0, Q8_1, Q4_K, Q8_K = 2, 9, 12, 15


class Maker:
    """Ops in a context of their own, and tensors by type and sizes."""

    def __init__(self, ctx: TensorContext) -> None:
        self.ctx = ctx
        self.ops = Ops(ctx)

    def __call__(self, type_: int, *ne: int) -> Tensor:
        return self.ctx.new_tensor(type_, ne)

    def f32(self, *ne: int) -> Tensor:
        """F32 of these sizes."""
        return self(F32, *ne)

    def turned(self, *ne: int) -> Tensor:
        """F32 of these sizes whose rows are not adjacent values."""
        return self.ops.permute(self(F32, ne[1], ne[0], *ne[2:]), 1, 0, 2, 3)

    def gapped(self, *ne: int) -> Tensor:
        """F32 of these sizes with room between the rows."""
        wide = self(F32, 2 * ne[0], *ne[1:])
        strides, nbytes = [], 4 * 2 * ne[0]
        for n in ne[1:]:
            strides.append(nbytes)
            nbytes *= n
        return self.ops.view(wide, ne, strides)


@pytest.fixture
def t() -> Iterator[Maker]:
    """Room for a few dozen tensors."""
    with TensorContext(load_library(), 64) as ctx:
        yield Maker(ctx)


Wrong = Callable[[Maker], object]

WRONG: dict[str, Wrong] = {
    "get_rows: ids of floats": lambda t: t.ops.get_rows(t.f32(8, 5), t.f32(3)),
    "get_rows: ids of I64": lambda t: t.ops.get_rows(t.f32(8, 5), t(I64, 3)),
    "get_rows: too few tables": lambda t: t.ops.get_rows(t.f32(8, 5), t(I32, 3, 2)),
    "get_rows: four axes of ids": lambda t: t.ops.get_rows(t.f32(8, 5, 1, 1), t(I32, 3, 1, 1, 2)),
    "get_rows: turned table": lambda t: t.ops.get_rows(t.turned(8, 5), t(I32, 3)),
    "get_rows: Q8_K": lambda t: t.ops.get_rows(t(Q8_K, 256, 5), t(I32, 3)),
    "mul_mat: Q8_1": lambda t: t.ops.mul_mat(t(Q8_1, 32, 5), t.f32(32, 3)),
    "set_rows: unlike widths": lambda t: t.ops.set_rows(t.f32(8, 5), t.f32(7, 3), t(I64, 3)),
    "set_rows: unlike counts": lambda t: t.ops.set_rows(t.f32(8, 5), t.f32(8, 3), t(I64, 4)),
    "set_rows: ids of floats": lambda t: t.ops.set_rows(t.f32(8, 5), t.f32(8, 3), t.f32(3)),
    "set_rows: integer rows": lambda t: t.ops.set_rows(t.f32(8, 5), t(I32, 8, 3), t(I64, 3)),
    "set_rows: depth": lambda t: t.ops.set_rows(t.f32(8, 5), t.f32(8, 3, 2), t(I64, 3)),
    "set_rows: ids of two axes": lambda t: t.ops.set_rows(
        t.f32(8, 5, 2), t.f32(8, 3, 2), t(I64, 3, 2)
    ),
    "set_rows: integer table": lambda t: t.ops.set_rows(t(I32, 8, 5), t.f32(8, 3), t(I64, 3)),
    "set_rows: F16 rows into Q8_0": lambda t: t.ops.set_rows(
        t(Q8_0, 32, 5), t(F16, 32, 3), t(I64, 3)
    ),
    "set_rows: turned rows": lambda t: t.ops.set_rows(t.f32(8, 5), t.turned(8, 3), t(I64, 3)),
    "add: no repetition": lambda t: t.ops.add(t.f32(8, 5), t.f32(3, 5)),
    "add: larger second": lambda t: t.ops.add(t.f32(8, 5), t.f32(16, 5)),
    "add: F16": lambda t: t.ops.add(t(F16, 8, 5), t.f32(8, 5)),
    "add: integers": lambda t: t.ops.add(t(I32, 8), t(I32, 8)),
    "add: turned": lambda t: t.ops.add(t.turned(8, 5), t.f32(8, 5)),
    "mul: no repetition": lambda t: t.ops.mul(t.f32(8, 5), t.f32(8, 2)),
    "mul: quantised": lambda t: t.ops.mul(t(Q8_0, 32, 5), t.f32(32)),
    "mul: turned second": lambda t: t.ops.mul(t.f32(8, 5), t.turned(8, 5)),
    "scale: F16": lambda t: t.ops.scale(t(F16, 8), 2.0),
    "scale: turned": lambda t: t.ops.scale(t.turned(8, 5), 2.0),
    "rms_norm: F16": lambda t: t.ops.rms_norm(t(F16, 8), 1e-5),
    "rms_norm: negative eps": lambda t: t.ops.rms_norm(t.f32(8), -1e-5),
    "rms_norm: eps is no number": lambda t: t.ops.rms_norm(t.f32(8), float("nan")),
    "rms_norm: turned": lambda t: t.ops.rms_norm(t.turned(8, 5), 1e-5),
    "mul_mat: unlike widths": lambda t: t.ops.mul_mat(t.f32(8, 5), t.f32(7, 3)),
    "mul_mat: F16 activation": lambda t: t.ops.mul_mat(t.f32(8, 5), t(F16, 8, 3)),
    "mul_mat: depth": lambda t: t.ops.mul_mat(t.f32(8, 5, 3), t.f32(8, 3, 4)),
    "mul_mat: outer depth": lambda t: t.ops.mul_mat(t.f32(8, 5, 1, 2), t.f32(8, 3, 1, 3)),
    "mul_mat: transposed weight": lambda t: t.ops.mul_mat(t.turned(8, 5), t.f32(8, 3)),
    "mul_mat: turned activation": lambda t: t.ops.mul_mat(t.f32(8, 5), t.turned(8, 3)),
    "mul_mat: integer weight": lambda t: t.ops.mul_mat(t(I32, 8, 5), t.f32(8, 3)),
    "mul_mat_id: ids of floats": lambda t: t.ops.mul_mat_id(
        t.f32(8, 5, 4), t.f32(8, 1, 3), t.f32(2, 3)
    ),
    "mul_mat_id: unlike tokens": lambda t: t.ops.mul_mat_id(
        t.f32(8, 5, 4), t.f32(8, 1, 3), t(I32, 2, 4)
    ),
    "mul_mat_id: unlike widths": lambda t: t.ops.mul_mat_id(
        t.f32(8, 5, 4), t.f32(7, 1, 3), t(I32, 2, 3)
    ),
    "mul_mat_id: used experts": lambda t: t.ops.mul_mat_id(
        t.f32(8, 5, 4), t.f32(8, 3, 3), t(I32, 2, 3)
    ),
    "mul_mat_id: depth of ids": lambda t: t.ops.mul_mat_id(
        t.f32(8, 5, 4), t.f32(8, 1, 3), t(I32, 2, 3, 2)
    ),
    "mul_mat_id: F16 activation": lambda t: t.ops.mul_mat_id(
        t.f32(8, 5, 4), t(F16, 8, 1, 3), t(I32, 2, 3)
    ),
    "mul_mat_id: integer weight": lambda t: t.ops.mul_mat_id(
        t(I32, 8, 5, 4), t.f32(8, 1, 3), t(I32, 2, 3)
    ),
    "accumulate_in_f32: no product": lambda t: t.ops.accumulate_in_f32(t.ops.scale(t.f32(8), 1.0)),
    "swiglu_split: unlike shapes": lambda t: t.ops.swiglu_split(t.f32(8, 5), t.f32(8, 4)),
    "swiglu_split: F16": lambda t: t.ops.swiglu_split(t(F16, 8, 5), t(F16, 8, 5)),
    "swiglu_split: turned": lambda t: t.ops.swiglu_split(t.turned(8, 5), t.f32(8, 5)),
    "rope: unlike tokens": lambda t: t.ops.rope(t.f32(8, 2, 3), t(I32, 4), ROPE, None),
    "rope: positions of floats": lambda t: t.ops.rope(t.f32(8, 2, 3), t.f32(3), ROPE, None),
    "rope: positions of two axes": lambda t: t.ops.rope(t.f32(8, 2, 3), t(I32, 3, 2), ROPE, None),
    "rope: F16": lambda t: t.ops.rope(t(F16, 8, 2, 3), t(I32, 3), ROPE, None),
    "rope: wider than a head": lambda t: t.ops.rope(t.f32(6, 2, 3), t(I32, 3), ROPE, None),
    "rope: few factors": lambda t: t.ops.rope(t.f32(8, 2, 3), t(I32, 3), ROPE, t.f32(3)),
    "rope: F16 factors": lambda t: t.ops.rope(t.f32(8, 2, 3), t(I32, 3), ROPE, t(F16, 4)),
    "rope: odd width": lambda t: t.ops.rope(
        t.f32(8, 2, 3), t(I32, 3), Rope(7, 0, 64, 10000.0, 1.0), None
    ),
    "rope: mode": lambda t: t.ops.rope(
        t.f32(8, 2, 3), t(I32, 3), Rope(8, 8, 64, 10000.0, 1.0), None
    ),
    "rope: turned": lambda t: t.ops.rope(t.turned(8, 2, 3), t(I32, 3), ROPE, None),
    "flash_attn: unlike heads": lambda t: flash(t, k=(8, 16, 3), v=(8, 16, 3)),
    "flash_attn: unlike widths": lambda t: flash(t, k=(16, 16, 2), v=(16, 16, 2)),
    "flash_attn: unlike K and V": lambda t: flash(t, v=(8, 15, 2)),
    "flash_attn: F16 query": lambda t: flash(t, q_type=F16),
    "flash_attn: F32 mask": lambda t: flash(t, mask_type=F32),
    "flash_attn: narrow mask": lambda t: flash(t, mask=(15, 3)),
    "flash_attn: short mask": lambda t: flash(t, mask=(16, 2)),
    "flash_attn: integer K": lambda t: flash(t, k_type=I32),
    "soft_max: F16": lambda t: t.ops.soft_max(t(F16, 8, 3), t.f32(8, 3), 1.0),
    "soft_max: narrow mask": lambda t: t.ops.soft_max(t.f32(8, 3), t.f32(7, 3), 1.0),
    "soft_max: short mask": lambda t: t.ops.soft_max(t.f32(8, 3), t.f32(8, 2), 1.0),
    "soft_max: integer mask": lambda t: t.ops.soft_max(t.f32(8, 3), t(I32, 8, 3), 1.0),
    "soft_max: turned": lambda t: t.ops.soft_max(t.turned(8, 3), t.f32(8, 3), 1.0),
    "soft_max: depth of the mask": lambda t: t.ops.soft_max(t.f32(8, 3, 3), t.f32(8, 3, 2), 1.0),
    "reshape: another product": lambda t: t.ops.reshape(t.f32(8, 3), 5, 5),
    "reshape: one axis": lambda t: t.ops.reshape(t.f32(8, 3), 24),
    "reshape: negative": lambda t: t.ops.reshape(t.f32(8, 3), -8, -3),
    "reshape: turned": lambda t: t.ops.reshape(t.turned(8, 3), 12, 2),
    "cont_2d: another product": lambda t: t.ops.cont_2d(t.f32(8, 3), 5, 5),
    "cont_2d: negative": lambda t: t.ops.cont_2d(t.f32(8, 3), -8, -3),
    "permute: an axis twice": lambda t: t.ops.permute(t.f32(8, 3), 0, 0, 2, 3),
    "permute: three axes": lambda t: t.ops.permute(t.f32(8, 3), 0, 1, 2),
    "view: beyond the end": lambda t: t.ops.view(t.f32(8, 3), (25,)),
    "view: offset beyond the end": lambda t: t.ops.view(t.f32(8, 3), (20,), offset=20),
    "view: stride beyond the end": lambda t: t.ops.view(t.f32(8, 3), (8, 3), (64,)),
    "view: negative offset": lambda t: t.ops.view(t.f32(8, 3), (4,), offset=-4),
    "view: negative stride": lambda t: t.ops.view(t.f32(8, 3), (8, 3), (-32,)),
    "view: no values": lambda t: t.ops.view(t.f32(8, 3), (0,)),
    "view: four axes": lambda t: t.ops.view(t.f32(8, 3), (1, 1, 1, 1), (4, 4, 4)),
    "view: strides missing": lambda t: t.ops.view(t.f32(8, 3), (8, 3)),
    "view: part of a block": lambda t: t.ops.view(t(Q8_0, 64, 3), (33,)),
    "custom: no inputs": lambda t: t.ops.custom(F32, (1,), [], 0, 0),
    "custom: eleven inputs": lambda t: t.ops.custom(F32, (1,), [t.f32(1)] * 11, 0, 0),
    "custom: five axes": lambda t: t.ops.custom(F32, (1,) * 5, [t.f32(1)], 1, 0),
    "custom: no values": lambda t: t.ops.custom(F32, (0,), [t.f32(1)], 1, 0),
    "custom: no function": lambda t: t.ops.custom(F32, (1,), [t.f32(1)], 0, 0),
    "custom_inplace: ten inputs": lambda t: t.ops.custom_inplace(t.f32(1), [t.f32(1)] * 10, 1, 0),
    "custom_inplace: no function": lambda t: t.ops.custom_inplace(t.f32(1), [t.f32(1)], 0, 0),
    "tensor: no sizes": lambda t: t(F32),
    "tensor: five sizes": lambda t: t(F32, 1, 1, 1, 1, 1),
    "tensor: size zero": lambda t: t(F32, 8, 0),
    "tensor: part of a block": lambda t: t(Q8_0, 33),
    "tensor: unknown type": lambda t: t(4000, 32),
    "tensor: negative type": lambda t: t(-1, 32),
    "tensor: removed type": lambda t: t(4, 32),
    "tensor: more bytes than there are": lambda t: t(F32, 1 << 40, 1 << 40),
}


def flash(
    t: Maker,
    *,
    q: tuple[int, ...] = (8, 3, 4),
    k: tuple[int, ...] = (8, 16, 2),
    v: tuple[int, ...] = (8, 16, 2),
    mask: tuple[int, ...] = (16, 3),
    q_type: int = F32,
    k_type: int = F16,
    mask_type: int = F16,
) -> Tensor:
    """Flash attention, right unless told otherwise."""
    return t.ops.flash_attn(t(q_type, *q), t(k_type, *k), t(F16, *v), t(mask_type, *mask), 1.0)


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_a_wrong_call_raises(call: Wrong, t: Maker) -> None:
    """Shapes, types and layouts that ggml asserts on raise BackendError instead."""
    with pytest.raises(BackendError):
        call(t)


RIGHT: dict[str, tuple[Wrong, tuple[int, ...]]] = {
    "get_rows": (lambda t: t.ops.get_rows(t.f32(8, 5), t(I32, 3)), (8, 3, 1, 1)),
    "get_rows: quantised": (lambda t: t.ops.get_rows(t(Q4_0, 32, 5), t(I32, 3)), (32, 3, 1, 1)),
    "set_rows": (lambda t: t.ops.set_rows(t(F16, 8, 5), t.f32(8, 3), t(I64, 3)), (8, 5, 1, 1)),
    "add: repeated": (lambda t: t.ops.add(t.f32(8, 5), t.f32(8)), (8, 5, 1, 1)),
    "mul: gapped": (lambda t: t.ops.mul(t.gapped(8, 5), t.f32(1, 5)), (8, 5, 1, 1)),
    "scale": (lambda t: t.ops.scale(t.f32(8, 5), 2.0), (8, 5, 1, 1)),
    "rms_norm": (lambda t: t.ops.rms_norm(t.f32(8, 5), 1e-5), (8, 5, 1, 1)),
    "mul_mat": (lambda t: t.ops.mul_mat(t(BF16, 8, 5), t.f32(8, 3)), (5, 3, 1, 1)),
    "mul_mat: K-quant": (lambda t: t.ops.mul_mat(t(Q4_K, 256, 5), t.f32(256, 3)), (5, 3, 1, 1)),
    "mul_mat: groups": (lambda t: t.ops.mul_mat(t.f32(8, 5, 2), t.f32(8, 3, 4)), (5, 3, 4, 1)),
    "mul_mat_id": (
        lambda t: t.ops.mul_mat_id(t.f32(8, 5, 4), t.f32(8, 1, 3), t(I32, 2, 3)),
        (5, 2, 3, 1),
    ),
    "swiglu_split": (lambda t: t.ops.swiglu_split(t.f32(8, 5), t.f32(8, 5)), (8, 5, 1, 1)),
    "rope": (lambda t: t.ops.rope(t.f32(8, 2, 3), t(I32, 3), ROPE, t.f32(4)), (8, 2, 3, 1)),
    "flash_attn": (flash, (8, 4, 3, 1)),
    "soft_max": (lambda t: t.ops.soft_max(t.f32(8, 3, 4), t.f32(8, 3), 1.0), (8, 3, 4, 1)),
    "reshape": (lambda t: t.ops.reshape(t.f32(8, 3), 4, 2, 3), (4, 2, 3, 1)),
    "cont_2d": (lambda t: t.ops.cont_2d(t.turned(8, 3), 12, 2), (12, 2, 1, 1)),
    "permute": (lambda t: t.ops.permute(t.f32(8, 3, 2), 0, 2, 1, 3), (8, 2, 3, 1)),
    "view": (lambda t: t.ops.view(t.f32(8, 3), (4, 3), (32,), 16), (4, 3, 1, 1)),
    "view: blocks": (lambda t: t.ops.view(t(Q8_0, 64, 3), (32, 3), (68,), 34), (32, 3, 1, 1)),
}


@pytest.mark.parametrize(("call", "ne"), RIGHT.values(), ids=RIGHT)
def test_a_right_call_gives_the_documented_shape(
    call: Wrong, ne: tuple[int, ...], t: Maker
) -> None:
    """The checks let through what the graphs need."""
    out = call(t)
    assert isinstance(out, Tensor)
    assert out.ne == ne


def test_a_full_context_raises() -> None:
    """One node too many raises instead of ggml's abort; what was made stays usable."""
    lib = load_library()
    with TensorContext(lib, 3, 3) as ctx:
        x = ctx.new_tensor(F32, (4,))
        y = Ops(ctx).scale(Ops(ctx).scale(x, 2.0), 2.0)
        with pytest.raises(BackendError, match="full"):
            Ops(ctx).scale(x, 2.0)
        with pytest.raises(BackendError, match="full"):
            ctx.new_tensor(F32, (4,))
        assert _computed(lib, ctx, x, y) == [0, 4, 8, 12]


def _computed(lib: Library, ctx: TensorContext, x: Tensor, y: Tensor) -> list[float]:
    """y of x = 0, 1, 2, 3."""
    graph = lib.c.ggml_new_graph_custom(ctx.ptr, 3, False)
    lib.c.ggml_build_forward_expand(graph, y.ptr)
    with (
        Buffer.allocate(lib, 64) as memory,
        GraphAllocator(lib) as allocator,
        CpuBackend(lib, 1) as backend,
    ):
        memory.place(x, 0)
        array_view(lib, x)[:] = np.arange(4)
        allocator.allocate(graph)
        backend.compute(graph)
        values: list[float] = array_view(lib, y).tolist()
        return values
