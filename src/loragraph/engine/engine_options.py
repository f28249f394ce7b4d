"""What an engine is made with, checked."""

from __future__ import annotations

from dataclasses import dataclass

from loragraph.engine.assembly import ATTENTIONS, KV_TYPES, AttentionName, KvType, LoweringName
from loragraph.engine.options import choice, integer, threads
from loragraph.engine.plan import SchedulerConfig

MAX_CELLS = 1 << 24
MAX_SLOTS = 4096


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The arguments of `Engine` that are no files, by its names. ConfigError for a wrong one."""

    n_ctx: int
    max_sequence_tokens: int | None
    max_batch_tokens: int
    max_sequences: int
    max_waiting: int
    max_adapters: int
    max_adapter_bytes: int | None
    lowering: LoweringName
    attention: AttentionName
    kv_type: KvType
    n_threads: int | None

    def __post_init__(self) -> None:
        choice(self.lowering, "lowering", ("routed", "stacked"))  # branch: one set a batch
        choice(self.kv_type, "kv_type", tuple(KV_TYPES))
        choice(self.attention, "attention", ATTENTIONS)
        integer(self.max_adapters, "max_adapters", 1, MAX_SLOTS)
        if self.max_adapter_bytes is not None:
            integer(self.max_adapter_bytes, "max_adapter_bytes", 1, 1 << 62)
        integer(self.n_ctx, "n_ctx", 1, MAX_CELLS)
        integer(self.max_batch_tokens, "max_batch_tokens", 1, 1 << 16)
        integer(self.max_sequences, "max_sequences", 1, 1 << 16)
        integer(self.max_waiting, "max_waiting", 1, 1 << 30)
        if self.n_threads is not None:
            threads(self.n_threads)
        _ = self.scheduler  # its own checks

    @property
    def scheduler(self) -> SchedulerConfig:
        """The scheduler's budgets."""
        return SchedulerConfig(
            n_cells=int(self.n_ctx),
            max_batch_tokens=int(self.max_batch_tokens),
            max_sequences=int(self.max_sequences),
            max_waiting=1 << 30,  # those that wait do so before the scheduler
            max_sequence_tokens=self.max_sequence_tokens,
        )
