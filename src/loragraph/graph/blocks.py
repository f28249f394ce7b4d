"""What most families are made of, so that a family's file says only what is its own.

Each part asks for its tensors when it is made and adds its nodes when it is called. Biases are
read wherever the file has them.
"""

from __future__ import annotations

from dataclasses import dataclass

from loragraph.errors import GGUFError
from loragraph.ggml.handles import Tensor
from loragraph.graph.builder import Builder
from loragraph.model.hparams import HParams
from loragraph.model.weights import Weight, Weights


@dataclass(frozen=True, slots=True)
class Linear:
    """y = W x + bias."""

    weight: Weight
    bias: Weight | None

    def __call__(self, b: Builder, x: Tensor) -> Tensor:
        return b.linear(self.weight, x, self.bias)


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm over axis 0, times the weight."""

    weight: Weight
    eps: float

    def __call__(self, b: Builder, x: Tensor) -> Tensor:
        return b.rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class SplitQKV:
    """q, k, v by a matrix each, as heads [n_embd_head, n_head, n]."""

    q: Linear
    k: Linear
    v: Linear
    n_head: int
    n_head_kv: int

    def __call__(self, b: Builder, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = b.heads(self.q(b, x), self.n_head)
        k = b.heads(self.k(b, x), self.n_head_kv)
        v = b.heads(self.v(b, x), self.n_head_kv)
        return q, k, v


@dataclass(frozen=True, slots=True)
class FusedQKV:
    """q, k, v by one matrix, as views of its result; `biases` of each where they are apart."""

    qkv: Linear
    biases: tuple[Weight | None, Weight | None, Weight | None]
    n_head: int
    n_head_kv: int

    def __call__(self, b: Builder, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.qkv(b, x)
        n_head = self.n_head + 2 * self.n_head_kv
        n_embd_head, n = y.ne[0] // n_head, y.ne[1]
        strides = (4 * n_embd_head, 4 * y.ne[0])  # F32
        first, parts = 0, []
        for bias, n_own in zip(self.biases, (self.n_head, *(self.n_head_kv,) * 2), strict=True):
            part = b.ops.view(y, (n_embd_head, n_own, n), strides, first * strides[0])
            if bias is not None:
                part = b.ops.add(part, b.ops.reshape(bias.tensor, n_embd_head, n_own))
            parts.append(part)
            first += n_own
        q, k, v = parts
        return q, k, v


@dataclass(frozen=True, slots=True)
class GatedFFN:
    """down(act(gate x) * up x); act is silu or gelu."""

    up: Linear
    gate: Linear
    down: Linear
    gelu: bool

    def __call__(self, b: Builder, x: Tensor) -> Tensor:
        up, gate = self.up(b, x), self.gate(b, x)
        return self.down(b, (b.ops.geglu_split if self.gelu else b.ops.swiglu_split)(gate, up))


@dataclass(frozen=True, slots=True)
class FusedFFN:
    """down(silu(gate x) * up x) with gate and up, in this order, the rows of one matrix."""

    gate_up: Linear
    down: Linear

    def __call__(self, b: Builder, x: Tensor) -> Tensor:
        return self.down(b, b.ops.swiglu(self.gate_up(b, x)))


class Block:
    """The tensors of layer `il`, by their names without `blk.<il>.`."""

    def __init__(self, hparams: HParams, weights: Weights, il: int) -> None:
        self._hparams = hparams
        self.weights = weights
        self._il = il

    def linear(self, name: str, n_in: int, n_out: int) -> Linear:
        """`name.weight` [n_in, n_out], and `name.bias` where there is one."""
        weight = self.weights.linear(self.full(name, "weight"), n_in, n_out)
        return Linear(weight, self._bias(name, n_out))

    def norm(self, name: str, n: int | None = None) -> Norm:
        """`name.weight` [n], by default [n_embd]."""
        n = self._hparams.n_embd if n is None else n
        weight = self.weights.vector(self.full(name, "weight"), n)
        return Norm(weight, self._hparams.norm_rms_eps)

    def qkv(self) -> SplitQKV | FusedQKV:
        """attn_q, attn_k and attn_v, or attn_qkv where the file has that."""
        hparams, il = self._hparams, self._il
        n_in, heads = hparams.n_embd, (hparams.n_head[il], hparams.n_head_kv[il])
        n_q = heads[0] * hparams.n_embd_head
        widths = (n_q, hparams.n_embd_k(il), hparams.n_embd_v(il))
        names = ("attn_q", "attn_k", "attn_v")
        if not self.weights.has(self.full("attn_qkv", "weight")):
            q, k, v = (self.linear(name, n_in, n) for name, n in zip(names, widths, strict=True))
            return SplitQKV(q, k, v, *heads)
        fused = self.linear("attn_qkv", n_in, sum(widths))
        bq, bk, bv = (
            None if fused.bias is not None else self._bias(name, n)
            for name, n in zip(names, widths, strict=True)
        )
        return FusedQKV(fused, (bq, bk, bv), *heads)

    def attention_output(self) -> Linear:
        """attn_output."""
        hparams, il = self._hparams, self._il
        return self.linear(
            "attn_output", hparams.n_head[il] * hparams.n_embd_head_v, hparams.n_embd
        )

    def gated_ffn(self, *, gelu: bool = False) -> GatedFFN:
        """ffn_up, ffn_gate, ffn_down."""
        n_embd, n_ff = self._hparams.n_embd, self._hparams.n_ff[self._il]
        return GatedFFN(
            up=self.linear("ffn_up", n_embd, n_ff),
            gate=self.linear("ffn_gate", n_embd, n_ff),
            down=self.linear("ffn_down", n_ff, n_embd),
            gelu=gelu,
        )

    def fused_ffn(self) -> FusedFFN:
        """ffn_up, which holds the gate too, and ffn_down."""
        n_embd, n_ff = self._hparams.n_embd, self._hparams.n_ff[self._il]
        return FusedFFN(
            gate_up=self.linear("ffn_up", n_embd, 2 * n_ff),
            down=self.linear("ffn_down", n_ff, n_embd),
        )

    def _bias(self, name: str, n: int) -> Weight | None:
        return self.weights.optional_vector(self.full(name, "bias"), n)

    def full(self, name: str, kind: str) -> str:
        """The tensor's name in the file; kind is "weight" or "bias"."""
        return f"blk.{self._il}.{name}.{kind}"


class Ends:
    """What stands before the first layer and behind the last: table, last norm and head."""

    def __init__(self, hparams: HParams, weights: Weights) -> None:
        n_embd, n_vocab = hparams.n_embd, hparams.n_vocab
        self.token_embd = weights.lookup("token_embd.weight", n_embd, n_vocab)
        norm = weights.vector("output_norm.weight", n_embd)
        self.output_norm = Norm(norm, hparams.norm_rms_eps)
        head = weights.linear_or_tied("output.weight", "token_embd.weight", n_embd, n_vocab)
        self.output = Linear(head, weights.optional_vector("output.bias", n_vocab))


@dataclass(frozen=True, slots=True)
class RopeFactors:
    """Divisors of the angles: rope_freqs for all contexts, or longrope's two sets."""

    hparams: HParams
    freqs: Weight | None
    short: Weight | None
    long: Weight | None

    @classmethod
    def of(cls, hparams: HParams, weights: Weights) -> RopeFactors:
        """Whatever the file has; GGUFError for longrope without its factors."""
        n = hparams.rope.n_rot // 2
        names = ("rope_freqs", "rope_factors_short", "rope_factors_long")
        freqs, short, long = (weights.optional_vector(f"{name}.weight", n) for name in names)
        if hparams.rope_scaling == "longrope" and freqs is None:
            for name, factors in zip(names[1:], (short, long), strict=True):
                if factors is None:
                    raise GGUFError(
                        "missing tensor: rope scaling is longrope",
                        path=weights.files.path,
                        where=f"{name}.weight",
                    )
        return cls(hparams, freqs, short, long)

    def of_context(self, n_ctx: int) -> Weight | None:
        """The factors for sequences of up to `n_ctx` tokens.

        As in llama.cpp by the room that there is, not by the text: K is never turned again.
        """
        if self.freqs is not None:
            return self.freqs
        return self.long if n_ctx > self.hparams.rope.n_ctx_orig else self.short


def is_long_context(hparams: HParams, weights: Weights, n_ctx: int) -> bool:
    """Whether K is turned by the factors for long contexts; saved cells remember it."""
    return weights.has("rope_factors_long.weight") and n_ctx > hparams.rope.n_ctx_orig
