"""The operations of mixtures of experts and of latent attention, checked like those of ops.py."""

from __future__ import annotations

import math

from loragraph.ggml.handles import F32, I32, Tensor
from loragraph.ggml.ops import Ops, expect

_ASCENDING = 0
_SRC0_IS_HADAMARD = 1


class RoutingOps(Ops):
    """Ops, and what only some families need."""

    def soft_max_rows(self, a: Tensor) -> Tensor:
        """softmax(a) over axis 0."""
        expect(bool(self._c.ggml_is_contiguous(a.ptr)) and a.type == F32, "soft_max_rows", a)
        return self._done(self._c.ggml_soft_max(self.ctx.claim(), a.ptr))

    def sigmoid(self, a: Tensor) -> Tensor:
        """1 / (1 + exp(-a))."""
        self._check_unary("sigmoid", a)
        return self._done(self._c.ggml_sigmoid(self.ctx.claim(), a.ptr))

    def top_k(self, a: Tensor, k: int) -> Tensor:
        """Indices of the k largest values of each row, the largest first: I32 [k, n], a view."""
        expect(a.type == F32 and 0 < k <= a.ne[0], f"top_k of {k}", a)
        self._dense_rows("top_k", a)
        return self._done(self._c.ggml_argsort_top_k(self.ctx.claim(), a.ptr, k))

    def counting_rows(self, n: int, n_rows: int) -> Tensor:
        """I32 [n, n_rows], each row 0 to n - 1: ids that name everything."""
        expect(0 < n < 1 << 24 and n_rows > 0, f"counting_rows: {n} x {n_rows}")
        one = self._done(self._c.ggml_arange(self.ctx.claim(), 0.0, float(n), 1.0))
        many = self._done(self._c.ggml_repeat_4d(self.ctx.claim(), one.ptr, n, n_rows, 1, 1))
        return self._done(self._c.ggml_argsort(self.ctx.claim(), many.ptr, _ASCENDING))

    def sum_rows(self, a: Tensor) -> Tensor:
        """Sums over axis 0: F32 [1, n, ...]."""
        expect(a.type == F32, "sum_rows", a)
        self._dense_rows("sum_rows", a)
        return self._done(self._c.ggml_sum_rows(self.ctx.claim(), a.ptr))

    def clamp_from(self, a: Tensor, low: float) -> Tensor:
        """max(a, low), in a's own memory."""
        expect(a.type == F32, "clamp", a)
        self._dense_rows("clamp", a)
        return self._done(self._c.ggml_clamp(self.ctx.claim(), a.ptr, low, math.inf))

    def div(self, a: Tensor, b: Tensor) -> Tensor:
        """a / b, with b repeated to the shape of a."""
        self._check_broadcast("div", a, b)
        return self._done(self._c.ggml_div(self.ctx.claim(), a.ptr, b.ptr))

    def rotate(self, x: Tensor, hadamard: Tensor, signs: Tensor | None) -> Tensor:
        """H (signs * x), blocks of x [m, ...] by themselves; hadamard F32 [block, block]."""
        return self._hadamard(x if signs is None else self.mul(x, signs), hadamard)

    def unrotate(self, x: Tensor, hadamard: Tensor, signs: Tensor | None) -> Tensor:
        """signs * (H x): what `rotate` did, undone."""
        x = self._hadamard(x, hadamard)
        return x if signs is None else self.mul(x, signs)

    def _hadamard(self, x: Tensor, hadamard: Tensor) -> Tensor:
        block = hadamard.ne[0]
        fits = hadamard.ne == (block, block, 1, 1) and x.ne[0] % block == 0 and x.ne[3] == 1
        expect(fits and block & (block - 1) == 0, "hadamard", x, hadamard)
        x = x if bool(self._c.ggml_is_contiguous(x.ptr)) else self.cont(x)
        rows = self.reshape(x, block, x.ne[0] // block * x.ne[1] * x.ne[2])
        out = self.mul_mat(hadamard, rows)
        self._c.ggml_mul_mat_set_hint(out.ptr, _SRC0_IS_HADAMARD)  # a fast transform on the CPU
        return self.reshape(out, *(x.ne[:2] if x.ne[2] == 1 else x.ne[:3]))

    def add_id(self, a: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
        """a F32 [n, n_used, m] plus the row ids[u, t] of `rows` F32 [n, n_expert]."""
        expect(a.type == rows.type == F32 and ids.type == I32, "add_id: types", a, rows, ids)
        expect(a.ne[0] == rows.ne[0] and a.ne[1:3] == ids.ne[:2], "add_id", a, rows, ids)
        expect(a.ne[3] == 1 and rows.ne[2:] == (1, 1), "add_id", a, rows)
        self._dense_rows("add_id", a, rows, ids)
        return self._done(self._c.ggml_add_id(self.ctx.claim(), a.ptr, rows.ptr, ids.ptr))

    def swiglu_oai(self, gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
        """g sigmoid(alpha g) (u + 1), g = min(gate, limit), u = up within [-limit, limit]."""
        self._check_gated("swiglu_oai", gate, up)
        ptr = self._c.ggml_swiglu_oai(self.ctx.claim(), gate.ptr, up.ptr, alpha, limit)
        return self._done(ptr)

    def concat(self, a: Tensor, b: Tensor) -> Tensor:
        """a and b one behind the other along axis 0."""
        expect(a.type == b.type == F32 and a.ne[1:] == b.ne[1:], "concat", a, b)
        self._dense_rows("concat", a, b)
        return self._done(self._c.ggml_concat(self.ctx.claim(), a.ptr, b.ptr, 0))

    def repeat_heads(self, a: Tensor, n_head: int) -> Tensor:
        """a F32 [n, 1, m] as [n, n_head, m]."""
        expect(a.type == F32 and a.ne[1] == a.ne[3] == 1 and n_head > 0, "repeat_heads", a)
        self._dense_rows("repeat_heads", a)
        ne = (a.ne[0], n_head, a.ne[2], 1)
        return self._done(self._c.ggml_repeat_4d(self.ctx.claim(), a.ptr, *ne))

    def keep_groups(self, scores: Tensor, groups: Tensor) -> Tensor:
        """scores F32 [k, n_group, n], -inf in all groups but those of `groups` I32 [n_used, n]."""
        kept = self.get_rows(scores, groups)
        expect(groups.ne[0] <= scores.ne[1], "keep_groups", scores, groups)
        nothing = self._done(self._c.ggml_fill(self.ctx.claim(), scores.ptr, -math.inf))
        claim = self.ctx.claim()
        return self._done(self._c.ggml_set_rows(claim, nothing.ptr, kept.ptr, groups.ptr))

    def best_of_groups(self, scores: Tensor, k: int) -> Tensor:
        """Sum of the k largest scores of each group: F32 [n_group, n] of [m, n_group, n]."""
        best = self.top_k(scores, k)  # [k, n_group, n]
        m, n_group, n, _ = scores.ne
        claim = self.ctx.claim()
        apart = self._done(self._c.ggml_reshape_4d(claim, scores.ptr, 1, m, n_group, n))
        rows = self._done(self._c.ggml_get_rows(self.ctx.claim(), apart.ptr, best.ptr))
        return self.reshape(self.sum_rows(self.reshape(rows, k, n_group, n)), n_group, n)
