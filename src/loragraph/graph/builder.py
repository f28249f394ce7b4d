"""Builds the graph of one step shape. The only place where a weight meets an activation.

A model family calls `embed`, `linear`, `linear_id` and `rms_norm` (the seams) and the plain
operations below; it never mentions adapters.
"""

from __future__ import annotations

from typing import Any

from loragraph.adapters.base import OUTPUT
from loragraph.ggml.handles import Tensor, TensorContext
from loragraph.ggml.ops import Rope
from loragraph.ggml.routing_ops import RoutingOps
from loragraph.graph.attention.base import AttentionGraph, Form
from loragraph.graph.expert_cache import ExpertCache, WholeStacks
from loragraph.graph.lowrank.base import GraphLowering, RowSet
from loragraph.graph.products import GgmlProducts, GraphProducts
from loragraph.model.rotations import Rotation
from loragraph.model.weights import Weight


class Builder:
    """Makes nodes in call order: what is called first is computed first."""

    def __init__(
        self,
        ctx: TensorContext,
        graph: Any,
        lowering: GraphLowering,
        attention: AttentionGraph,
        *,
        tokens: Tensor,
        positions: Tensor,
        out_ids: Tensor,
        n_states: int = 0,
        n_ctx: int = 0,
        products: GraphProducts | None = None,
        experts: ExpertCache | None = None,
    ) -> None:
        """The last `n_states` of the outputs give their state, and no logits are computed there.

        `n_ctx` is the room of one sequence: a few rotations depend on it. `products` makes the
        base products, `experts` is where those of experts read their matrices.
        """
        self.ops = RoutingOps(ctx)
        self._products = products or GgmlProducts()
        self._graph = graph
        self._lowering = lowering
        self._experts = experts or WholeStacks()
        self._attention = attention
        self._tokens = tokens  # I32 [n_tokens]
        self._positions = positions  # I32 [n_tokens]
        self._out_ids = out_ids  # I32 [n_outputs]
        self._n_states = n_states
        self._rows = RowSet.TOKENS
        self._rotations: dict[tuple[Tensor, Rotation], Tensor] = {}
        self._head_ids: dict[tuple[int, int], Tensor] = {}
        self.n_ctx = n_ctx
        self.state: Tensor | None = None  # F32 [n_embd, n_outputs], what the head reads

    def embed(self, table: Weight) -> Tensor:
        """The table's rows of the step's tokens, F32 [n_embd, n_tokens], adapters included."""
        x = self.ops.get_rows(table.tensor, self._tokens)
        if table.rotation is not None:
            x = self.ops.unrotate(x, table.rotation.matrix, table.rotation.signs)
        return self._take(self._lowering.lookup(self.ops, table, self._tokens, x))

    def linear(self, w: Weight, x: Tensor, bias: Weight | None = None) -> Tensor:
        """W x w_s + low-rank part + bias: F32 [n_out, n] of x F32 [n_in, n].

        The base product of a folded weight reads the rotated x, the low-rank part the plain one.
        """
        if w.name == OUTPUT and self._n_states:
            self.state = self._take(x)
            n_logits = x.ne[1] - self._n_states
            if not n_logits:
                return x  # in place of logits that nobody reads
            x = self.ops.view(x, (x.ne[0], n_logits), (int(x.ptr.nb[1]),))
            self._rows = RowSet.LOGITS
        y = self._products.mul_mat(self.ops, w, self._rotated(w, x))
        if w.scale is not None:  # belongs to the base product alone
            y = self.ops.mul(y, w.scale.tensor)
        y = self._lowering.linear(self.ops, w, x, y, self._rows)
        return self._take(y if bias is None else self.ops.add(y, bias.tensor))

    def linear_id(self, w: Weight, x: Tensor, ids: Tensor, bias: Weight | None = None) -> Tensor:
        """Products with the experts `ids` I32 [n_used, n] of x F32 [n_in, 1 or n_used, n].

        `bias` F32 [n_out, n_expert]. Gives F32 [n_out, n_used, n].
        """
        stack, slots = self._experts.experts(self.ops, w, ids)
        y = self.ops.mul_mat_id(stack, self._rotated(w, x), slots)
        if w.scale is not None:
            y = self.ops.mul(y, self._expert_scales(w.scale, ids))
        y = self._lowering.experts(self.ops, w, x, ids, y, self._rows)
        return self._take(y if bias is None else self.ops.add_id(y, bias.tensor, ids))

    def linear_heads(self, w: Weight, x: Tensor) -> Tensor:
        """A matrix a head, w [n_in, n_out, n_head]: F32 [n_out, n_head, n] of x F32 [n_in, n_head,
        n], whose tokens may be apart. For adapters the heads are experts, all of them chosen.
        """
        n_head, n = x.ne[1], x.ne[2]
        y = self.ops.mul_mat(w.tensor, self.ops.permute(x, 0, 2, 1, 3))  # [n_out, n, n_head]
        y = self.ops.cont(self.ops.permute(y, 0, 2, 1, 3))
        if w.scale is not None:
            y = self.ops.mul(y, self.ops.reshape(w.scale.tensor, 1, n_head))
        ids = self._head_ids.get((n_head, n))
        if ids is None:
            ids = self._head_ids[n_head, n] = self.ops.counting_rows(n_head, n)
        return self._take(self._lowering.experts(self.ops, w, x, ids, y, self._rows))

    def rms_norm(self, x: Tensor, weight: Weight, eps: float) -> Tensor:
        """RMS norm over axis 0, times the weight, of x F32 [n, n_rows] or [n, n_head, n_rows]."""
        n_rows = (self._tokens if self._rows is RowSet.TOKENS else self._out_ids).ne[0]
        by_row = self._lowering.norm_weight(self.ops, weight, self._rows, n_rows)
        x = self.ops.rms_norm(x, eps)
        if by_row is None:
            return self.ops.mul(x, weight.tensor)
        if x.ne[1:3] != (n_rows, 1):  # heads
            by_row = self.ops.reshape(by_row, weight.ne[0], 1, n_rows)
        return self.ops.mul(x, by_row)

    def heads(self, x: Tensor, n_head: int) -> Tensor:
        """[n_embd_head * n_head, n] as [n_embd_head, n_head, n]."""
        return self.ops.reshape(x, x.ne[0] // n_head, n_head, x.ne[1])

    def rope(
        self, x: Tensor, rope: Rope, freq_factors: Weight | None = None, offset: int = 0
    ) -> Tensor:
        """Rotates [n_embd_head, n_head, n] by the tokens' positions, from value `offset` on."""
        factors = None if freq_factors is None else freq_factors.tensor
        return self.ops.rope(x, self._positions, rope, factors, offset)

    def scaled(self, x: Tensor, factor: float) -> Tensor:
        """x * factor; x itself where that changes nothing."""
        return x if factor == 1.0 else self.ops.scale(x, factor)

    def softcap(self, x: Tensor, most: float) -> Tensor:
        """most tanh(x / most), within [-most, most]; x itself where `most` is 0."""
        if not most:
            return x
        return self.ops.scale(self.ops.tanh(self.ops.scale(x, 1.0 / most)), most)

    def attention(
        self,
        il: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        *,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Weight | None = None,
    ) -> Tensor:
        """Stores K and V of the tokens, attends: F32 [n_embd_head_v * n_head, n].

        A token sees the newest `window` positions of its sequence, or all. `sinks` F32 [n_head]
        are scores that take their share of the weights and add nothing.
        """
        for part in (q, v, k):
            self._take(part)
        form = Form(scale, window, softcap, None if sinks is None else sinks.tensor)
        out, writes = self._attention.layer(self.ops, il, q, k, v, form)
        for write in writes:  # nothing refers to them, and they must come before the reads
            self._take(write)
        return self._take(out)

    def output_rows(self, *xs: Tensor) -> tuple[Tensor, ...]:
        """Only the rows whose logits are wanted; from here on every activation has these rows."""
        self._rows = RowSet.OUTPUTS
        return tuple(self.ops.get_rows(x, self._out_ids) for x in xs)

    def _take(self, tensor: Tensor) -> Tensor:
        self.ops.lib.c.ggml_build_forward_expand(self._graph, tensor.ptr)
        return tensor

    def _rotated(self, w: Weight, x: Tensor) -> Tensor:
        """What the base product reads; weights with the same x share one rotation."""
        if w.rotation is None:
            return x
        key = (x, w.rotation)
        if key not in self._rotations:
            self._rotations[key] = self.ops.rotate(x, w.rotation.matrix, w.rotation.signs)
        return self._rotations[key]

    def _expert_scales(self, scale: Weight, ids: Tensor) -> Tensor:
        """w_s of the chosen experts, F32 [1, n_used, n]."""
        n_used, n = ids.ne[0], ids.ne[1]
        table = self.ops.reshape(scale.tensor, 1, scale.ne[0])
        flat = self.ops.view(ids, (n_used * n,)) if n == 1 else self.ops.cont_2d(ids, n_used * n, 1)
        rows = self.ops.get_rows(table, flat)
        return self.ops.reshape(rows, 1, n_used, n)
