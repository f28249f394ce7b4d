"""Puts together what a context computes with: cells, attention, lowering, backend, runner."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Literal

from loragraph.engine.model import Model
from loragraph.engine.options import check_memory
from loragraph.engine.runner import Runner
from loragraph.ggml.handles import F16, F32, CpuBackend
from loragraph.graph.attention.base import CELL_QUANTUM, Attention
from loragraph.graph.attention.flash import FlashAttention
from loragraph.graph.attention.plain import PlainAttention
from loragraph.graph.kv_cache import KvCache
from loragraph.graph.lowrank.base import Lowering
from loragraph.graph.lowrank.branch import BranchLowering
from loragraph.graph.lowrank.resident import Resident
from loragraph.graph.lowrank.routed import RoutedLowering

LoweringName = Literal["routed", "branch"]
AttentionName = Literal["flash", "plain"]
KvType = Literal["f16", "f32"]

KV_TYPES: Mapping[str, int] = {"f16": F16, "f32": F32}


def make_runner(
    model: Model,
    n_ctx: int,
    n_batch: int,
    lowering_name: LoweringName,
    kv_type: KvType,
    attention_name: AttentionName,
    n_threads: int,
    n_slots: int = 64,
) -> tuple[Lowering, Runner]:
    """The lowering and the runner that owns it, the cells and a backend; all or nothing."""
    hparams, lib = model.hparams, model.lib
    widths = frozenset(hparams.n_embd_kv(il) for il in range(hparams.n_layer))
    attention: Attention = FlashAttention() if attention_name == "flash" else PlainAttention(widths)
    n_cells = -(-n_ctx // CELL_QUANTUM) * CELL_QUANTUM
    type_ = KV_TYPES[kv_type]
    specs = attention.specs(n_batch, n_cells).values()
    check_memory(
        KvCache.bytes_for(lib, hparams, n_cells, type_) + sum(spec.nbytes for spec in specs),
        f"a context of {n_ctx} tokens, steps of {n_batch}",
    )
    with ExitStack() as made:  # closes what there is where a later piece fails
        lowering = _make_lowering(model, lowering_name, n_batch, n_slots)
        made.callback(lowering.close)
        backend = made.enter_context(CpuBackend(lib, n_threads))
        cache = KvCache(lib, hparams, n_cells, type_, v_transposed=attention.v_transposed)
        made.callback(cache.close)
        n_tensors = len(model.weights.by_name)
        runner = Runner(model.family, n_tensors, cache, attention, lowering, backend, n_batch)
        made.pop_all()
    return lowering, runner


def _make_lowering(model: Model, name: LoweringName, n_batch: int, n_slots: int) -> Lowering:
    if name == "branch":
        return BranchLowering(
            model.lib, tied=model.base_info.tied, registered=lambda: model.n_adapter_pairs
        )
    weights = model.weights.by_name
    return RoutedLowering(weights, Resident(weights, model.prepared, n_slots), n_batch)
