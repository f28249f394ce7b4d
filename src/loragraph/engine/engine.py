"""The engine: many requests with many adapters on one base, from any threads."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import Self

from loragraph.adapters.adapter import Adapter
from loragraph.engine.administration import EngineAdapters
from loragraph.engine.assembly import AttentionName, KvType, LoweringName, make_runner
from loragraph.engine.async_stream import Deliveries
from loragraph.engine.client import Client
from loragraph.engine.core import EngineCore
from loragraph.engine.engine_options import EngineOptions
from loragraph.engine.job_maker import JobMaker
from loragraph.engine.loader import AdapterLoader
from loragraph.engine.model import Model
from loragraph.engine.options import memory_errors
from loragraph.engine.registry import Generation, Registry, Store
from loragraph.engine.requests import EngineRequests
from loragraph.engine.residency import Residency
from loragraph.engine.seat_cells import erase_seat, read_seat, save_seat
from loragraph.engine.sequence_table import SequenceRow
from loragraph.engine.session import load_cells, save_cells
from loragraph.engine.table import EngineStats
from loragraph.engine.thread import EngineThread
from loragraph.errors import InvalidRequestError, LifecycleError, LoragraphError
from loragraph.graph.lowrank.routed import RoutedLowering
from loragraph.graph.lowrank.stacked import StackedLowering


class Engine(EngineRequests, EngineAdapters):
    """One base model, many adapters, many requests at once.

    One thread computes; every method may be called from any thread. `adapters` are registered by
    name (headers are read, tensors when a request wants them). `n_ctx` is the number of cells that
    all requests share. At most `max_adapters` adapters, of `max_adapter_bytes` together, are in
    memory at a time; the files of `adapter_dir` are known by their names without ".gguf", or in its
    place those of a `store`.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Model,
        adapters: Mapping[str, str | os.PathLike[str] | Adapter] | None = None,
        *,
        n_ctx: int = 4096,
        max_sequence_tokens: int | None = None,
        max_batch_tokens: int = 512,
        max_sequences: int = 32,
        max_waiting: int = 1024,
        max_adapters: int = 64,
        max_adapter_bytes: int | None = None,
        adapter_dir: str | os.PathLike[str] | None = None,
        store: Store | None = None,
        lowering: LoweringName = "routed",
        attention: AttentionName = "cells",
        kv_type: KvType = "f16",
        n_threads: int | None = None,
    ) -> None:
        """ConfigError for a wrong argument, CapacityError or BackendError for lack of memory.

        A model given as a path is loaded and closed with the engine. Raises what is wrong with the
        model or an adapter's header.
        """
        options = EngineOptions(
            n_ctx=n_ctx,
            max_sequence_tokens=max_sequence_tokens,
            max_batch_tokens=max_batch_tokens,
            max_sequences=max_sequences,
            max_waiting=max_waiting,
            max_adapters=max_adapters,
            max_adapter_bytes=max_adapter_bytes,
            lowering=lowering,
            attention=attention,
            kv_type=kv_type,
            n_threads=n_threads,
        )
        self.config = options.scheduler
        self._pid = os.getpid()
        self._closed = False
        self._owns_model = not isinstance(model, Model)
        self.model = model if isinstance(model, Model) else Model.load(model, n_threads=n_threads)
        self._n_threads = self.model.n_threads if n_threads is None else n_threads
        self._name = self.model.enter_context()
        try:
            self._assemble(options, adapter_dir, store)
        except BaseException:
            self._release_model()
            raise
        try:
            for name, source in (adapters or {}).items():
                self.load_adapter(name, source)
        except BaseException:
            self.close(drain=False)
            raise

    # -- the engine itself ------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """All counters."""
        self._check_open()
        core = self._core
        return self._thread.call(
            lambda: EngineStats(
                core.count(),
                core.scheduler.stats,
                core.residency.pool.stats,
                replace(self._runner.counters),
            )
        )

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of "cells", of step "inputs" and of "compute" memory."""
        self._check_open()
        return self._thread.call(lambda: self._runner.nbytes)

    def sequences(self) -> tuple[SequenceRow, ...]:
        """The table of what runs and waits: a row for each choice that has not ended."""
        self._check_open()
        return self._thread.call(lambda: tuple(self._core.sequences()))

    def save_session(self, path: str | os.PathLike[str]) -> int:
        """Saves what the prefix tree holds to a file; how many tokens. No step runs meanwhile.

        ConfigError where it cannot be written; an older file of that name is then as it was.
        """
        self._check_open()
        model, scheduler = self.model.fingerprint, self._core.scheduler
        return self._thread.call(lambda: save_cells(path, scheduler, self._runner, model))

    def load_session(self, path: str | os.PathLike[str]) -> int:
        """Takes saved cells into the prefix tree, as many as are free; how many.

        Requests hit them as if computed here. FormatError for a file that is damaged, or of another
        model, kv_type or layout of cells.
        """
        self._check_open()
        model, scheduler = self.model.fingerprint, self._core.scheduler
        n_vocab = self.model.hparams.n_vocab
        return self._thread.call(lambda: load_cells(path, scheduler, self._runner, model, n_vocab))

    def save_seat(self, path: str | os.PathLike[str], seat: int) -> int:
        """save_session() of the cells of one seat's sequence, or of its last one."""
        self._check_seat(seat)
        model, core = self.model.fingerprint, self._core
        return self._thread.call(lambda: save_seat(path, seat, core, self._runner, model))

    def restore_seat(self, path: str | os.PathLike[str], seat: int) -> int:
        """load_session() of a file of save_seat(); how many of its tokens there are cells of now.

        They count as the seat's last sequence, and any request hits them.
        """
        self._check_seat(seat)
        held = read_seat(path)

        def restored() -> int:
            tree = self._core.scheduler.tree
            self._core.seats.put(seat, held)
            return tree.n_found(held.tokens, held.parts)

        self.load_session(path)
        return self._thread.call(restored)

    def erase_seat(self, seat: int) -> int:
        """Drops what nobody else uses of the cells of a seat's last sequence; how many tokens.

        LifecycleError while a sequence runs there.
        """
        self._check_seat(seat)
        return self._thread.call(lambda: erase_seat(seat, self._core))

    def _check_seat(self, seat: int) -> None:
        self._check_open()
        if not 0 <= seat < self.config.max_sequences:
            raise InvalidRequestError(
                f"seat: expected 0 to {self.config.max_sequences - 1}, got {seat}", param="seat"
            )

    # -- life -------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._closed

    def close(self, *, drain: bool = False) -> None:
        """Ends the engine: with `drain` after all requests, else they end with LifecycleError.

        New requests are refused at once. A second call does nothing.
        """
        if self._closed:
            return
        self._closed = True
        self._thread.stop(drain=drain)
        self._loader.close()
        self._core.residency.close()
        self._runner.close()
        self._release_model()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close(drain=kind is None)

    # -- inside -----------------------------------------------------------------------------------

    def _assemble(
        self,
        options: EngineOptions,
        adapter_dir: str | os.PathLike[str] | None,
        store: Store | None,
    ) -> None:
        """Makes the parts; the last of them, the thread, begins to work."""
        self._loader = AdapterLoader(self.model, self._on_load)
        self.registry = Registry(self._loader.read_header, adapter_dir, store)
        slots = self._make_runner(options)
        residency = Residency(
            self.registry,
            slots,
            self._loader.start,
            options.max_adapters,
            options.max_adapter_bytes,
            time.monotonic,
        )
        self._core = EngineCore(
            self.config,
            self._runner,
            self.model.vocab,
            residency,
            time.monotonic,
            options.max_waiting,
            self.model.check_files,
            self._runner.run_calls,
        )
        self._jobs = JobMaker(self.model, self.registry, self.config.sequence_limit)
        deliveries = Deliveries()
        self._thread = EngineThread(
            self._core, time.monotonic, "loragraph-engine", deliveries.flush
        )
        self._client = Client(self._jobs, self._core, self._thread, deliveries)

    def _make_runner(self, options: EngineOptions) -> RoutedLowering | StackedLowering:
        """Makes the runner, and gives the lowering that holds its adapters."""
        with memory_errors(self._name):
            lowering, self._runner = make_runner(
                self.model,
                self.config.n_cells,
                self.config.max_batch_tokens,
                options.lowering,
                options.kv_type,
                options.attention,
                self._n_threads,
                options.max_adapters,
                self.config.max_sequence_tokens,
            )
        assert isinstance(lowering, RoutedLowering | StackedLowering)
        return lowering

    def _on_load(self, generation: Generation, outcome: Adapter | LoragraphError) -> None:
        self._thread.post(lambda: self._core.on_load(generation, outcome))

    def _check_open(self) -> None:
        if self._closed:
            raise LifecycleError("the engine was used after its close")
        if self._pid != os.getpid():
            raise LifecycleError(
                "the engine was used in a forked process",
                hint="its threads do not survive a fork: make it there",
            )

    def _release_model(self) -> None:
        self.model.leave_context(self._name)
        if self._owns_model:
            self.model.close()
