"""The graph operations, each checked before the C call: ggml aborts the process on a wrong shape.

The checks repeat the assertions of ggml.c and of the CPU backend for the operations that are used
here. A check that fails is a fault of loragraph, not of its user: BackendError.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loragraph.errors import BackendError
from loragraph.ggml.handles import F16, F32, I32, I64, STORAGE_ONLY, Tensor, TensorContext

PREC_F32 = 10
"""GGML_PREC_F32: accumulate in float32."""

_N_TASKS_MAX = -1


@dataclass(frozen=True, slots=True)
class Rope:
    """Parameters of rotary embedding, as ggml_rope_ext names them; mode 0 pairs (2i, 2i+1)."""

    n_rot: int
    mode: int
    n_ctx_orig: int
    freq_base: float
    freq_scale: float
    ext_factor: float = 0.0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0


class Ops:
    """Makes tensors of one graph in `ctx`; all sizes below are in ggml order."""

    def __init__(self, ctx: TensorContext) -> None:
        self.ctx = ctx
        self.lib = ctx.lib
        self._c: Any = ctx.lib.c

    def get_rows(self, table: Tensor, ids: Tensor) -> Tensor:
        """Rows `ids` I32 [n] of `table` [k, m]: F32 [k, n]."""
        expect(ids.type == I32, "get_rows: ids must be I32", table, ids)
        expect(table.ne[2] == ids.ne[1] and table.ne[3] == ids.ne[2], "get_rows", table, ids)
        expect(ids.ne[3] == 1, "get_rows: ids have too many dimensions", table, ids)
        expect(table.type == I32 or _is_real(table), "get_rows: types", table)
        self._dense_rows("get_rows", table)
        return self._done(self._c.ggml_get_rows(self.ctx.claim(), table.ptr, ids.ptr))

    def set_rows(self, table: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
        """Writes `rows` F32 [k, n] into `table` [k, m] at `ids` I64 or I32 [n]; a view of it."""
        expect(rows.type in (F32, F16), "set_rows: rows must be F32 or F16", table, rows)
        fits = _is_real(table) if rows.type == F32 else table.type == F16
        expect(fits, "set_rows: no conversion", table, rows)
        expect(ids.type in (I64, I32), "set_rows: ids must be I64 or I32", table, ids)
        expect(table.ne[0] == rows.ne[0] and rows.ne[1] == ids.ne[0], "set_rows", table, rows, ids)
        expect(table.ne[2:] == rows.ne[2:], "set_rows", table, rows)
        expect(ids.ne[1:] == (1, 1, 1), "set_rows: ids must be a vector", ids)
        self._dense_rows("set_rows", table, rows)
        return self._done(self._c.ggml_set_rows(self.ctx.claim(), table.ptr, rows.ptr, ids.ptr))

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """a + b, with b repeated to the shape of a."""
        self._check_broadcast("add", a, b)
        return self._done(self._c.ggml_add(self.ctx.claim(), a.ptr, b.ptr))

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        """a * b, with b repeated to the shape of a."""
        self._check_broadcast("mul", a, b)
        return self._done(self._c.ggml_mul(self.ctx.claim(), a.ptr, b.ptr))

    def scale(self, a: Tensor, factor: float) -> Tensor:
        """a * factor."""
        expect(a.type == F32, "scale: expected F32", a)
        self._dense_rows("scale", a)
        return self._done(self._c.ggml_scale(self.ctx.claim(), a.ptr, factor))

    def rms_norm(self, a: Tensor, eps: float) -> Tensor:
        """a / sqrt(mean(a², axis 0) + eps)."""
        expect(a.type == F32, "rms_norm: expected F32", a)
        expect(eps >= 0, "rms_norm: eps must not be negative", a)
        self._dense_rows("rms_norm", a)
        return self._done(self._c.ggml_rms_norm(self.ctx.claim(), a.ptr, eps))

    def mul_mat(self, w: Tensor, x: Tensor) -> Tensor:
        """w [k, m] times x F32 [k, n]: F32 [m, n]; higher dimensions of w are repeated."""
        fits = w.ne[0] == x.ne[0] and x.ne[2] % w.ne[2] == 0 and x.ne[3] % w.ne[3] == 0
        expect(fits, "mul_mat", w, x)
        expect(x.type == F32 and _is_real(w), "mul_mat: types", w, x)
        expect(self._nb(w)[0] <= self._nb(w)[1], "mul_mat: w is transposed", w)
        self._dense_rows("mul_mat", w, x)
        return self._done(self._c.ggml_mul_mat(self.ctx.claim(), w.ptr, x.ptr))

    def mul_mat_id(self, w: Tensor, x: Tensor, ids: Tensor) -> Tensor:
        """Experts: w [k, m, n_expert], x F32 [k, 1 or n_used, n], ids I32 [n_used, n]."""
        expect(ids.type == I32 and ids.ne[2:] == (1, 1), "mul_mat_id: ids", ids)
        expect(w.ne[3] == 1 and x.ne[3] == 1, "mul_mat_id", w, x)
        expect(ids.ne[1] == x.ne[2] and w.ne[0] == x.ne[0], "mul_mat_id", w, x, ids)
        expect(ids.ne[0] % x.ne[1] == 0, "mul_mat_id", x, ids)
        expect(x.type == F32 and _is_real(w), "mul_mat_id: types", w, x)
        expect(self._nb(w)[0] <= self._nb(w)[1], "mul_mat_id: w is transposed", w)
        self._dense_rows("mul_mat_id", w, x)
        return self._done(self._c.ggml_mul_mat_id(self.ctx.claim(), w.ptr, x.ptr, ids.ptr))

    def accumulate_in_f32(self, product: Tensor) -> None:
        """Asks for float32 accumulation in a mul_mat or flash_attn result."""
        description = self.lib.text(self._c.ggml_op_desc(product.ptr))
        if description == "FLASH_ATTN_EXT":
            self._c.ggml_flash_attn_ext_set_prec(product.ptr, PREC_F32)
        elif description == "MUL_MAT":
            self._c.ggml_mul_mat_set_prec(product.ptr, PREC_F32)
        else:
            raise BackendError(f"{description} has no accumulation precision")

    def add_sinks(self, product: Tensor, sinks: Tensor) -> None:
        """Gives each head of a soft_max or flash_attn result a score more, `sinks` F32 [n_head]:
        it takes its share of the weights and adds nothing."""
        description = self.lib.text(self._c.ggml_op_desc(product.ptr))
        n_head = product.ne[1 if description == "FLASH_ATTN_EXT" else 2]
        expect(sinks.type == F32 and sinks.ne == (n_head, 1, 1, 1), "add_sinks", product, sinks)
        if description == "FLASH_ATTN_EXT":
            self._c.ggml_flash_attn_ext_add_sinks(product.ptr, sinks.ptr)
        elif description == "SOFT_MAX":
            self._c.ggml_soft_max_add_sinks(product.ptr, sinks.ptr)
        else:
            raise BackendError(f"{description} has no sinks")

    def tanh(self, a: Tensor) -> Tensor:
        """tanh(a)."""
        self._check_unary("tanh", a)
        return self._done(self._c.ggml_tanh(self.ctx.claim(), a.ptr))

    def swiglu(self, a: Tensor) -> Tensor:
        """silu(gate) * up of a [2 n, ...] that holds gate, then up, in each row."""
        self._check_unary("swiglu", a)
        expect(a.ne[0] % 2 == 0, "swiglu: odd rows", a)
        return self._done(self._c.ggml_swiglu(self.ctx.claim(), a.ptr))

    def swiglu_split(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up."""
        self._check_gated("swiglu_split", gate, up)
        return self._done(self._c.ggml_swiglu_split(self.ctx.claim(), gate.ptr, up.ptr))

    def geglu_split(self, gate: Tensor, up: Tensor) -> Tensor:
        """gelu(gate) * up, with gelu's tanh form; on the CPU from a table of F16 values."""
        self._check_gated("geglu_split", gate, up)
        return self._done(self._c.ggml_geglu_split(self.ctx.claim(), gate.ptr, up.ptr))

    def rope(
        self, x: Tensor, pos: Tensor, rope: Rope, freq_factors: Tensor | None, offset: int = 0
    ) -> Tensor:
        """Rotates x F32 [head_dim, n_head, n] by positions I32 [n], values from `offset` on."""
        expect(pos.type == I32 and pos.ne[1:] == (1, 1, 1), "rope: positions", pos)
        expect(x.ne[2] == pos.ne[0] and x.type == F32, "rope", x, pos)
        fits = 0 < rope.n_rot <= x.ne[0] - offset and rope.n_rot % 2 == 0 <= offset
        expect(fits, f"rope: n_rot {rope.n_rot}", x)
        expect(rope.mode in (0, 2), f"rope: mode {rope.mode}", x)
        if freq_factors is not None:
            enough = freq_factors.ne[0] >= rope.n_rot // 2
            expect(freq_factors.type == F32 and enough, "rope: factors", freq_factors)
        self._dense_rows("rope", x)
        factors = self.lib.ffi.NULL if freq_factors is None else freq_factors.ptr
        ptr = self._c.ggml_rope_ext(
            *(self.ctx.claim(), x.ptr, pos.ptr, factors, rope.n_rot, rope.mode, rope.n_ctx_orig),
            *(rope.freq_base, rope.freq_scale, rope.ext_factor, rope.attn_factor),
            *(rope.beta_fast, rope.beta_slow),
        )
        if offset:
            self._c.ggml_rope_set_offset(ptr, offset)
        return self._done(ptr)

    def flash_attn(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float = 0.0
    ) -> Tensor:
        """Attention of q F32 [hd, n, n_head] over k, v [hd, n_kv, n_head_kv]: [hd, n_head, n].

        mask F16 [n_kv, n]: 0 = visible, -inf = hidden. K and V are not transposed.
        """
        fits = k.ne[0] == q.ne[0] and q.ne[2] % k.ne[2] == 0 and q.ne[3] == k.ne[3] == v.ne[3]
        expect(fits and k.ne[1:3] == v.ne[1:3], "flash_attn", q, k, v)
        expect(q.type == F32 and _is_real(k) and _is_real(v), "flash_attn: types", q, k, v)
        expect(mask.type == F16 and bool(self._c.ggml_is_contiguous(mask.ptr)), "flash_attn", mask)
        expect(mask.ne[0] == k.ne[1] and mask.ne[1] >= q.ne[1], "flash_attn: mask", q, k, mask)
        self._dense_rows("flash_attn", q, k, v)
        ptr = self._c.ggml_flash_attn_ext(
            self.ctx.claim(), q.ptr, k.ptr, v.ptr, mask.ptr, scale, 0.0, softcap
        )
        return self._done(ptr)

    def soft_max(self, a: Tensor, mask: Tensor, scale: float) -> Tensor:
        """softmax(scale * a + mask) over axis 0; mask F32 [a.ne0, >= a.ne1]."""
        expect(bool(self._c.ggml_is_contiguous(a.ptr)) and a.type == F32, "soft_max", a)
        contiguous = bool(self._c.ggml_is_contiguous(mask.ptr))
        expect(mask.type in (F16, F32) and contiguous, "soft_max: mask", mask)
        expect(mask.ne[0] == a.ne[0] and mask.ne[1] >= a.ne[1], "soft_max", a, mask)
        repeats = a.ne[2] % mask.ne[2] == 0 and a.ne[3] % mask.ne[3] == 0
        expect(repeats, "soft_max: depth of the mask", a, mask)
        ptr = self._c.ggml_soft_max_ext(self.ctx.claim(), a.ptr, mask.ptr, scale, 0.0)
        return self._done(ptr)

    def reshape(self, a: Tensor, *ne: int) -> Tensor:
        """The contiguous tensor `a` with two or three other sizes of the same product."""
        n_old, n_new = _product(a.ne), _product(ne)
        expect(n_old == n_new and len(ne) in (2, 3) and min(ne) > 0, f"reshape to {list(ne)}", a)
        expect(bool(self._c.ggml_is_contiguous(a.ptr)), "reshape: not contiguous", a)
        call = self._c.ggml_reshape_2d if len(ne) == 2 else self._c.ggml_reshape_3d
        return self._done(call(self.ctx.claim(), a.ptr, *ne))

    def rows(self, a: Tensor) -> Tensor:
        """[n0, n1, n] as [n0 * n1, n]; the rows of a view may be apart, each one being whole."""
        if bool(self._c.ggml_is_contiguous(a.ptr)):
            return self.reshape(a, a.ne[0] * a.ne[1], a.ne[2])
        nb = self._nb(a)
        whole = nb[0] == self._c.ggml_type_size(a.type) and nb[1] == a.ne[0] * nb[0]
        expect(whole and a.ne[3] == 1, "rows: a row is not in one piece", a)
        return self.view(a, (a.ne[0] * a.ne[1], a.ne[2]), (nb[2],))

    def cont_row(self, a: Tensor) -> Tensor:
        """All values of [n0, n1, n] as [1, n0 * n1 * n], copied where its rows are apart."""
        n_values = _product(a.ne)
        if bool(self._c.ggml_is_contiguous(a.ptr)):
            return self.reshape(a, 1, n_values)
        return self.reshape(self.cont_2d(a, a.ne[0] * a.ne[1], a.ne[2]), 1, n_values)

    def cont_2d(self, a: Tensor, ne0: int, ne1: int) -> Tensor:
        """A contiguous copy of `a` with sizes [ne0, ne1]."""
        expect(_product(a.ne) == ne0 * ne1 and ne0 > 0, f"cont_2d to {[ne0, ne1]}", a)
        return self._done(self._c.ggml_cont_2d(self.ctx.claim(), a.ptr, ne0, ne1))

    def cont(self, a: Tensor) -> Tensor:
        """A contiguous copy of `a`, of its shape."""
        return self._done(self._c.ggml_cont(self.ctx.claim(), a.ptr))

    def permute(self, a: Tensor, *axes: int) -> Tensor:
        """Axis i of `a` becomes axis axes[i] of the view."""
        expect(sorted(axes) == [0, 1, 2, 3], f"permute by {axes}", a)
        return self._done(self._c.ggml_permute(self.ctx.claim(), a.ptr, *axes))

    def view(
        self, a: Tensor, ne: Sequence[int], strides: Sequence[int] = (), offset: int = 0
    ) -> Tensor:
        """A view of `a` with sizes `ne`; `strides` of axes 1 … in bytes; inside a's memory."""
        expect(len(ne) in (1, 2, 3) and len(strides) == len(ne) - 1, "view: sizes", a)
        expect(min(*ne, *strides, offset + 1) > 0, "view: sizes", a)
        whole = ne[0] % int(self._c.ggml_blck_size(a.type)) == 0
        expect(whole, f"view: {ne[0]} values are no whole blocks", a)
        row = int(self._c.ggml_row_size(a.type, ne[0]))
        last = offset + row + sum((n - 1) * nb for n, nb in zip(ne[1:], strides, strict=True))
        expect(last <= int(self._c.ggml_nbytes(a.ptr)), "view: out of bounds", a)
        call = (self._c.ggml_view_1d, self._c.ggml_view_2d, self._c.ggml_view_3d)[len(ne) - 1]
        return self._done(call(self.ctx.claim(), a.ptr, *ne, *strides, offset))

    def custom(
        self, type_: int, ne: Sequence[int], args: Sequence[Tensor], function: int, userdata: int
    ) -> Tensor:
        """A node computed by the C function at address `function` from `args`."""
        if not 1 <= len(ne) <= 4 or min(ne) < 1:
            raise BackendError(f"custom: expected one to four sizes >= 1, got {list(ne)}")
        full = (*ne, 1, 1, 1)[:4]
        array = self._custom_args(args, limit=10)
        ptr = self._c.ggml_custom_4d(
            self.ctx.claim(), type_, *full, array, len(args), *self._custom_call(function, userdata)
        )
        return self._done(ptr)

    def custom_inplace(
        self, a: Tensor, args: Sequence[Tensor], function: int, userdata: int
    ) -> Tensor:
        """A node that changes `a` in place after reading `args`; a view of `a`."""
        array = self._custom_args(args, limit=9)
        ptr = self._c.ggml_custom_inplace(
            self.ctx.claim(), a.ptr, array, len(args), *self._custom_call(function, userdata)
        )
        return self._done(ptr)

    def name(self, tensor: Tensor, name: str) -> Tensor:
        """Names `tensor` for dumps and messages."""
        self._c.ggml_set_name(tensor.ptr, name.encode()[:63])
        return Tensor(tensor.ptr, tensor.type, tensor.ne, name)

    def _custom_args(self, args: Sequence[Tensor], limit: int) -> Any:
        if not 1 <= len(args) <= limit:
            raise BackendError(f"a custom node takes 1 to {limit} inputs, got {len(args)}")
        return self.lib.ffi.new("struct ggml_tensor *[]", [arg.ptr for arg in args])

    def _custom_call(self, function: int, userdata: int) -> tuple[Any, int, Any]:
        if function == 0:
            raise BackendError("a custom node without a function")
        ffi = self.lib.ffi
        return (
            ffi.cast("ggml_custom_op_t", function),
            _N_TASKS_MAX,
            ffi.cast("void *", userdata),
        )

    def _check_unary(self, what: str, a: Tensor) -> None:
        contiguous = bool(self._c.ggml_is_contiguous_1(a.ptr))
        expect(a.type == F32 and contiguous, what, a)

    def _check_gated(self, what: str, gate: Tensor, up: Tensor) -> None:
        expect(gate.ne == up.ne, what, gate, up)
        for part in (gate, up):
            self._check_unary(what, part)

    def _check_broadcast(self, what: str, a: Tensor, b: Tensor) -> None:
        expect(a.type == b.type == F32, f"{what}: expected F32", a, b)
        expect(all(m % n == 0 for m, n in zip(a.ne, b.ne, strict=True)), what, a, b)
        self._dense_rows(what, a, b)

    def _dense_rows(self, what: str, *tensors: Tensor) -> None:
        """The CPU backend reads whole rows: values of a row must be adjacent."""
        for t in tensors:
            expect(self._nb(t)[0] == self._c.ggml_type_size(t.type), f"{what}: row layout", t)

    def _nb(self, tensor: Tensor) -> Any:
        return tensor.ptr.nb

    def _done(self, ptr: Any) -> Tensor:
        if ptr == self.lib.ffi.NULL:
            raise BackendError("ggml could not make a node: no memory in its context")
        ne = ptr.ne
        return Tensor(ptr, ptr.type, (ne[0], ne[1], ne[2], ne[3]))


def _product(ne: Sequence[int]) -> int:
    n = 1
    for size in ne:
        n *= size
    return n


def _is_real(tensor: Tensor) -> bool:
    """Whether products can read it: a float or quantised type."""
    return tensor.type not in STORAGE_ONLY


def expect(condition: bool, what: str, *tensors: Tensor) -> None:
    """Raises BackendError for a call that ggml would end the process for."""
    if not condition:
        shapes = ", ".join(repr(t) for t in tensors)
        raise BackendError(f"wrong call of {what}: {shapes}")
