"""Puts together what a context computes with: cells, attention, lowering, backend, runner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Literal

from loragraph.engine.model import Model
from loragraph.engine.options import check_memory
from loragraph.engine.runner import Runner
from loragraph.errors import ConfigError
from loragraph.ggml.handles import F16, F32, Q8_0, CpuBackend
from loragraph.graph.attention.base import CELL_QUANTUM, Attention
from loragraph.graph.attention.cells import CellsAttention
from loragraph.graph.attention.flash import FlashAttention
from loragraph.graph.attention.plain import PlainAttention
from loragraph.graph.blocks import is_long_context
from loragraph.graph.kv_cache import KvCache
from loragraph.graph.lowrank.base import Lowering
from loragraph.graph.lowrank.branch import BranchLowering
from loragraph.graph.lowrank.resident import Resident
from loragraph.graph.lowrank.routed import RoutedLowering
from loragraph.graph.lowrank.stacked import StackedLowering
from loragraph.graph.lowrank.vectors import VectorLowering
from loragraph.graph.products import (
    GgmlProducts,
    GraphProducts,
    KernelProducts,
    product_layouts,
)

LoweringName = Literal["routed", "branch", "stacked"]
AttentionName = Literal["flash", "plain", "cells"]
KvType = Literal["f16", "f32", "q8_0"]

LOWERINGS: tuple[LoweringName, ...] = ("routed", "branch", "stacked")
ATTENTIONS: tuple[AttentionName, ...] = ("flash", "plain", "cells")
KV_TYPES: Mapping[KvType, int] = {"f16": F16, "f32": F32, "q8_0": Q8_0}


def make_runner(
    model: Model,
    n_ctx: int,
    n_batch: int,
    lowering_name: LoweringName,
    kv_type: KvType,
    attention_name: AttentionName,
    n_threads: int,
    n_slots: int = 64,
    n_ctx_sequence: int | None = None,
) -> tuple[Lowering, Runner]:
    """The lowering and the runner that owns it, the cells and a backend; all or nothing.

    `n_ctx` is the room of all sequences together, `n_ctx_sequence` that of one (default: all).
    """
    hparams, lib = model.hparams, model.lib
    attention = _make_attention(model, attention_name, kv_type, n_threads)
    n_cells = _whole_quanta(n_ctx)
    n_ctx_sequence = min(n_cells, _whole_quanta(n_ctx_sequence or n_ctx))  # as llama.cpp counts it
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
        cache = KvCache(
            lib,
            hparams,
            n_cells,
            type_,
            v_transposed=attention.v_transposed,
            long_context=is_long_context(hparams, model.weights, n_ctx_sequence),
        )
        made.callback(cache.close)
        # The runner computes row vectors (DoRA, biases) around the lowering that callers see.
        whole = VectorLowering(lowering, lib, model.weights.by_name, n_batch, max(n_slots, 64))
        runner = Runner(
            model.family,
            len(model.weights.by_name),
            cache,
            attention,
            whole,
            backend,
            n_batch,
            n_ctx_sequence,
            products=_make_products(model, lowering_name),
        )
        made.pop_all()
    return lowering, runner


def _whole_quanta(n: int) -> int:
    return -(-n // CELL_QUANTUM) * CELL_QUANTUM


def _make_attention(
    model: Model, name: AttentionName, kv_type: KvType, n_threads: int
) -> Attention:
    if kv_type == "q8_0":
        if name != "cells":
            raise ConfigError(
                f"expected attention 'cells' with kv_type 'q8_0', got {name!r}", field="kv_type"
            )
        if model.hparams.n_embd_head % 32:
            raise ConfigError(
                "expected a head size divisible by 32 with 'q8_0', "
                f"got {model.hparams.n_embd_head}",
                field="kv_type",
                hint="use 'f16'",
            )
    windows = sorted(set(model.hparams.windows))
    if name == "cells":
        return CellsAttention(n_threads, windows)
    if name == "flash":
        return FlashAttention(windows)
    hparams = model.hparams
    widths = frozenset(hparams.n_embd_v(il) for il in range(hparams.n_layer)) - {0}
    return PlainAttention(widths, windows)


def _make_products(model: Model, lowering: LoweringName) -> Callable[[], GraphProducts]:
    """The branch lowering is llama.cpp's mechanism to the bit, so its products are ggml's."""
    layouts = {}
    if lowering != "branch":
        layouts = product_layouts(model.weights.by_name.values(), model.weights.files)
    return (lambda: KernelProducts(layouts)) if layouts else GgmlProducts


def _make_lowering(model: Model, name: LoweringName, n_batch: int, n_slots: int) -> Lowering:
    if name == "branch":
        return BranchLowering(
            model.lib, tied=model.base_info.tied, registered=lambda: model.n_adapter_pairs
        )
    weights = model.weights.by_name
    if name == "stacked":
        tied = model.base_info.tied
        return StackedLowering(model.lib, weights, n_batch, tied=tied, n_slots=n_slots)
    return RoutedLowering(weights, Resident(weights, model.prepared, n_slots), n_batch)
