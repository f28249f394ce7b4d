"""A mixture of experts: a router chooses some of many feed-forward networks for each token."""

from __future__ import annotations

from dataclasses import dataclass

from loragraph.ggml.handles import Tensor
from loragraph.graph.blocks import Block, Linear
from loragraph.graph.builder import Builder
from loragraph.model.experts import ExpertParams
from loragraph.model.weights import Weight

_MIN_SUM = 6.103515625e-5
"""llama.cpp's bound of the sum that weights are divided by: the smallest normal F16."""

_OAI_ALPHA, _OAI_LIMIT = 1.702, 7.0


@dataclass(frozen=True, slots=True)
class ExpertLinear:
    """y = W_e x + bias_e for each expert e of a token."""

    weight: Weight
    bias: Weight | None

    def __call__(self, b: Builder, x: Tensor, ids: Tensor) -> Tensor:
        return b.linear_id(self.weight, x, ids, self.bias)


def expert_linear(block: Block, name: str, n_in: int, n_out: int, n_expert: int) -> ExpertLinear:
    """`name.weight` [n_in, n_out, n_expert], and `name.bias` [n_out, n_expert] if there is one."""
    weight = block.weights.experts(block.full(name, "weight"), n_in, n_out, n_expert)
    bias = block.weights.optional_vector(block.full(name, "bias"), n_out, n_expert)
    return ExpertLinear(weight, bias)


class Router:
    """Which experts a token uses, and with what weights."""

    def __init__(self, block: Block, n_embd: int, params: ExpertParams) -> None:
        self.params = params
        self.logits = block.linear("ffn_gate_inp", n_embd, params.n_expert)
        name = block.full("exp_probs_b", "bias")
        self.selection_bias = block.weights.optional_vector(name, params.n_expert)

    def __call__(self, b: Builder, x: Tensor) -> tuple[Tensor, Tensor]:
        """Ids I32 [n_used, n] and weights F32 [1, n_used, n] of x F32 [n_embd, n]."""
        params, n = self.params, x.ne[1]
        probs = self._probs(b, x)
        ids = b.ops.top_k(self._selection(b, probs), params.n_used)
        weights = b.ops.get_rows(b.ops.reshape(probs, 1, params.n_expert, n), ids)
        return ids, self._weighted(b, weights)

    def _probs(self, b: Builder, x: Tensor) -> Tensor:
        logits = self.logits(b, x)
        if self.params.gating == "softmax":
            return b.ops.soft_max_rows(logits)
        return b.ops.sigmoid(logits) if self.params.gating == "sigmoid" else logits

    def _selection(self, b: Builder, probs: Tensor) -> Tensor:
        """What the largest are searched in: a bias and groups change the choice, not the weight."""
        params, n = self.params, probs.ne[1]
        if self.selection_bias is not None:
            probs = b.ops.add(probs, self.selection_bias.tensor)
        if params.n_group == 1:
            return probs
        grouped = b.ops.reshape(probs, params.n_expert // params.n_group, params.n_group, n)
        groups = b.ops.top_k(b.ops.best_of_groups(grouped, 2), params.n_group_used)
        return b.ops.reshape(b.ops.keep_groups(grouped, groups), params.n_expert, n)

    def _weighted(self, b: Builder, weights: Tensor) -> Tensor:
        params, n = self.params, weights.ne[2]
        if params.gating == "softmax of the chosen":
            weights = b.ops.soft_max_rows(b.ops.reshape(weights, params.n_used, n))
            weights = b.ops.reshape(weights, 1, params.n_used, n)
        if params.norm_weights:
            flat = b.ops.reshape(weights, params.n_used, n)
            total = b.ops.clamp_from(b.ops.sum_rows(flat), _MIN_SUM)
            weights = b.ops.reshape(b.ops.div(flat, total), 1, params.n_used, n)
        if params.weights_scale not in (0.0, 1.0):
            weights = b.ops.scale(weights, params.weights_scale)
        return weights


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """down(silu(gate x) * up x), for every token."""

    up: Linear
    gate: Linear
    down: Linear

    def __call__(self, b: Builder, x: Tensor) -> Tensor:
        up, gate = self.up(b, x), self.gate(b, x)
        return self.down(b, b.ops.swiglu_split(gate, up))


class MoE:
    """sum over a token's experts e of weight_e down_e(act(gate_e x) * up_e x), + a shared expert.

    Gate and up may be the halves of one stack, `ffn_gate_up_exps`.
    """

    def __init__(
        self, block: Block, n_embd: int, params: ExpertParams, *, oai: bool = False
    ) -> None:
        """`oai`: gpt-oss's clamped activation instead of silu."""
        self.router = Router(block, n_embd, params)
        self.oai = oai
        n_ff, n_expert = params.n_ff, params.n_expert
        self.gate_up: ExpertLinear | None = None
        if block.weights.has(block.full("ffn_gate_up_exps", "weight")):
            self.gate_up = expert_linear(block, "ffn_gate_up_exps", n_embd, 2 * n_ff, n_expert)
        else:
            self.up = expert_linear(block, "ffn_up_exps", n_embd, n_ff, n_expert)
            self.gate = expert_linear(block, "ffn_gate_exps", n_embd, n_ff, n_expert)
        self.down = expert_linear(block, "ffn_down_exps", n_ff, n_embd, n_expert)
        self.shared: SharedExpert | None = None
        if params.n_ff_shared:
            self.shared = SharedExpert(
                up=block.linear("ffn_up_shexp", n_embd, params.n_ff_shared),
                gate=block.linear("ffn_gate_shexp", n_embd, params.n_ff_shared),
                down=block.linear("ffn_down_shexp", params.n_ff_shared, n_embd),
            )

    def __call__(self, b: Builder, x: Tensor) -> Tensor:
        """F32 [n_embd, n] of x F32 [n_embd, n], the shared expert added."""
        chosen = self.chosen(b, x)
        return chosen if self.shared is None else b.ops.add(chosen, self.shared(b, x))

    def chosen(self, b: Builder, x: Tensor) -> Tensor:
        """The part of the experts that the router chose."""
        ids, weights = self.router(b, x)
        n_embd, n = x.ne[:2]
        gate, up = self._gate_and_up(b, b.ops.reshape(x, n_embd, 1, n), ids)
        if self.oai:
            hidden = b.ops.swiglu_oai(gate, up, _OAI_ALPHA, _OAI_LIMIT)
        else:
            hidden = b.ops.swiglu_split(gate, up)
        outs = b.ops.mul(self.down(b, hidden, ids), weights)
        return _summed(b, outs)

    def _gate_and_up(self, b: Builder, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        if self.gate_up is None:
            up = self.up(b, x, ids)
            return self.gate(b, x, ids), up
        both = self.gate_up(b, x, ids)
        n_ff, (n_used, n) = both.ne[0] // 2, both.ne[1:3]
        strides = (4 * both.ne[0], 4 * both.ne[0] * n_used)  # F32
        gate, up = (b.ops.view(both, (n_ff, n_used, n), strides, 4 * n_ff * i) for i in (0, 1))
        return gate, up


def _summed(b: Builder, outs: Tensor) -> Tensor:
    """F32 [n_embd, n]: outs F32 [n_embd, n_used, n] added up in the order of the choice."""
    n_embd, n_used, n, _ = outs.ne
    parts = [
        b.ops.view(outs, (n_embd, n), (4 * n_embd * n_used,), 4 * n_embd * i) for i in range(n_used)
    ]
    total = parts[0]
    for part in parts[1:]:
        total = b.ops.add(total, part)
    return b.ops.cont_2d(total, n_embd, n) if n_used == 1 else total
