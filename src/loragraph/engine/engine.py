"""The engine: many requests with many adapters on one base, from any threads."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, Unpack

from loragraph.adapters.adapter import Adapter
from loragraph.adapters.combine import combine
from loragraph.adapters.mix import Mix
from loragraph.engine.assembly import (
    ATTENTIONS,
    KV_TYPES,
    AttentionName,
    KvType,
    LoweringName,
    make_runner,
)
from loragraph.engine.async_stream import AsyncStream, Deliveries
from loragraph.engine.client import Client
from loragraph.engine.core import EngineCore
from loragraph.engine.generate import Prompt, SamplingFields, sampling_params
from loragraph.engine.handle import EngineStream
from loragraph.engine.holds import Hold
from loragraph.engine.job_maker import JobMaker
from loragraph.engine.loader import AdapterLoader
from loragraph.engine.model import Model
from loragraph.engine.options import choice, integer, memory_errors, threads
from loragraph.engine.params import SamplingParams
from loragraph.engine.plan import SchedulerConfig
from loragraph.engine.registry import Generation, Registry
from loragraph.engine.request import Event, Request, Result, Score
from loragraph.engine.residency import Residency
from loragraph.engine.session import load_cells, save_cells
from loragraph.engine.table import AdapterRow, EngineStats, adapter_rows
from loragraph.engine.thread import EngineThread
from loragraph.errors import LifecycleError, LoragraphError
from loragraph.graph.lowrank.routed import RoutedLowering
from loragraph.graph.lowrank.stacked import StackedLowering

MAX_CELLS = 1 << 24
MAX_SLOTS = 4096


class Engine:
    """One base model, many adapters, many requests at once.

    One thread computes; every method may be called from any thread. `adapters` are registered by
    name (headers are read, tensors when a request wants them). `n_ctx` is the number of cells that
    all requests share. At most `max_adapters` adapters, of `max_adapter_bytes` together, are in
    memory at a time; the files of `adapter_dir` are known by their names without ".gguf".
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
        lowering: LoweringName = "routed",
        attention: AttentionName = "cells",
        kv_type: KvType = "f16",
        n_threads: int | None = None,
    ) -> None:
        """ConfigError for a wrong argument, CapacityError or BackendError for lack of memory.

        A model given as a path is loaded and closed with the engine. Raises what is wrong with the
        model or an adapter's header.
        """
        choice(lowering, "lowering", ("routed", "stacked"))  # branch: one set of adapters a batch
        choice(kv_type, "kv_type", tuple(KV_TYPES))
        choice(attention, "attention", ATTENTIONS)
        n_slots = integer(max_adapters, "max_adapters", 1, MAX_SLOTS)
        if max_adapter_bytes is not None:
            integer(max_adapter_bytes, "max_adapter_bytes", 1, 1 << 62)
        self.config = _scheduler_config(n_ctx, max_batch_tokens, max_sequences, max_sequence_tokens)
        max_waiting = integer(max_waiting, "max_waiting", 1, 1 << 30)
        n_threads = None if n_threads is None else threads(n_threads)
        self._owns_model = not isinstance(model, Model)
        self.model = model if isinstance(model, Model) else Model.load(model, n_threads=n_threads)
        self._pid = os.getpid()
        self._name = self.model.enter_context()
        self._closed = False
        self._loader = AdapterLoader(self.model, self._on_load)
        try:
            self.registry = Registry(self._loader.read_header, adapter_dir)
            slots = self._make_runner(lowering, kv_type, attention, n_threads, n_slots)
        except BaseException:
            self._release_model()
            raise
        residency = Residency(
            self.registry, slots, self._loader.start, n_slots, max_adapter_bytes, time.monotonic
        )
        self._core = EngineCore(
            self.config,
            self._runner,
            self.model.vocab,
            residency,
            time.monotonic,
            max_waiting,
            self.model.check_files,
        )
        self._jobs = JobMaker(self.model, self.registry, self.config.sequence_limit)
        deliveries = Deliveries()
        self._thread = EngineThread(
            self._core, time.monotonic, "loragraph-engine", deliveries.flush
        )
        self._client = Client(self._jobs, self._core, self._thread, deliveries)
        try:
            for name, source in (adapters or {}).items():
                self.load_adapter(name, source)
        except BaseException:
            self.close(drain=False)
            raise

    # -- requests ---------------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        adapters: Mapping[str, float] | None = None,
        n: int = 1,
        deadline_s: float | None = None,
        cache_salt: str = "",
        chat: bool = False,
        **fields: Unpack[SamplingFields],
    ) -> Result:
        """Generates to the end. `prompt`: a text, token ids or chat messages.

        `fields` are those of SamplingParams and replace those of `params`. Raises what is wrong
        with the request, OverloadedError where too many wait, DeadlineError (with what there is),
        and what failed in the engine.
        """
        chosen = sampling_params(params, fields)
        request = Request(prompt, adapters, chosen, n, cache_salt, deadline_s, chat)
        return self.run(request)

    def run(self, request: Request) -> Result:
        """Generates to the end; see generate()."""
        return self.generate_batch([request])[0]

    def generate_batch(self, requests: Sequence[Request]) -> list[Result]:
        """Generates all; they enter the engine together. The first error ends the others."""
        self._check_open()
        return self._client.run_all(requests)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        adapters: Mapping[str, float] | None = None,
        n: int = 1,
        deadline_s: float | None = None,
        cache_salt: str = "",
        chat: bool = False,
        **fields: Unpack[SamplingFields],
    ) -> EngineStream:
        """An iterator of events; closing it, or leaving its `with`, cancels the request.

        Arguments as for generate(). What is wrong with the request raises here, the rest while it
        is read.
        """
        chosen = sampling_params(params, fields)
        return self.open(Request(prompt, adapters, chosen, n, cache_salt, deadline_s, chat))

    def open(self, request: Request) -> EngineStream:
        """A stream of a request's events; see stream()."""
        self._check_open()
        return self._client.open(request)

    async def asubmit(self, request: Request) -> AsyncStream:
        """open() for asyncio: nothing in it blocks the event loop, long prompts neither."""
        self._check_open()
        return await self._client.submit(request)

    async def arun(self, request: Request) -> Result:
        """run() for asyncio; cancelling the task cancels the request."""
        self._check_open()
        async with await self._client.submit(request, wants_events=False) as stream:
            return await stream.wait()

    async def agenerate(self, prompt: Prompt, **options: Any) -> Result:
        """generate() for asyncio; cancelling the task cancels the request."""
        return await self.arun(_request(prompt, options))

    async def astream(self, prompt: Prompt, **options: Any) -> AsyncIterator[Event]:
        """stream() for asyncio; closing the iterator cancels the request."""
        async with await self.asubmit(_request(prompt, options)) as stream:
            async for event in stream:
                yield event

    def score(
        self,
        prompt: Prompt,
        adapters: Mapping[str, float] | None = None,
        *,
        start: int = 1,
        cache_salt: str = "",
        deadline_s: float | None = None,
    ) -> Score:
        """Log-probabilities of the tokens from `start` on, each given those before it."""
        self._check_open()
        request = Request(prompt, adapters, cache_salt=cache_salt, deadline_s=deadline_s)
        return self._client.score(request, start)

    # -- adapters ---------------------------------------------------------------------------------

    def load_adapter(
        self,
        name: str,
        source: str | os.PathLike[str] | Adapter,
        *,
        pin: bool = False,
        preload: bool = False,
    ) -> Generation:
        """Registers an adapter under a name; what the name meant stays with running requests.

        Reads the file's header. `preload` waits until it is in memory, `pin` also keeps it there;
        their error takes the name back.
        """
        self._check_open()
        if isinstance(source, Adapter) and source not in self.model.adapters:
            raise LifecycleError(
                f"{source!r} is closed or registered with another model",
                hint="load it with this engine's model",
            )
        new, old = self.registry.register(name, source)
        if old is not None:
            self._thread.post(lambda: self._core.retire(old))
        if pin or preload:
            try:
                self._hold(new, pin=pin)
            except LoragraphError:
                self.unload_adapter(name)
                raise
        return new

    def combine(self, name: str, scales: Mapping[str, float]) -> Generation:
        """Freezes a mix of adapters into one, in memory, under a name of its own.

        Exact, for any ranks and types; see `loragraph.adapters.combine`. Its parts are loaded for
        it. It is kept until the name is unloaded.
        """
        self._check_open()
        wanted = self._jobs.resolve(scales)
        holds = [Hold(generation, pin=True) for generation in wanted]
        try:
            for hold in holds:
                self._wait_for(hold)
            resident = self._thread.call(lambda: dict(self._core.residency.adapters))
            adapter = combine(
                Mix({resident[generation]: scale for generation, scale in wanted.items()})
            )
        finally:
            self._thread.post(lambda: self._core.holds.drop(holds))
        self.model.adopt_adapter(adapter)
        new = self.load_adapter(name, adapter)
        new.owned = True
        return new

    def unload_adapter(self, name: str) -> None:
        """The name means nothing at once; the memory goes when the last request is done."""
        self._check_open()
        old = self.registry.unload(name)
        self._thread.call(lambda: self._core.retire(old))

    def pin(self, name: str) -> None:
        """Loads an adapter and keeps it in memory; CapacityError where there is no room."""
        self._check_open()
        self._hold(self.registry.resolve(name), pin=True)

    def unpin(self, name: str) -> None:
        """Lets a pinned adapter be dropped."""
        self._check_open()
        generation = self.registry.resolve(name)
        self._thread.call(lambda: self._core.holds.unpin(generation))

    @property
    def adapters(self) -> tuple[AdapterRow, ...]:
        """The table of adapters, by name."""
        self._check_open()
        names = self.registry.names()
        return self._thread.call(
            lambda: tuple(adapter_rows(self.registry, self._core.residency.pool, names))
        )

    def stats(self) -> EngineStats:
        """All counters."""
        self._check_open()
        core = self._core
        return self._thread.call(
            lambda: EngineStats(
                replace(core.stats, n_jobs=core.n_jobs),
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

    def _make_runner(
        self,
        name: LoweringName,
        kv_type: KvType,
        attention: AttentionName,
        n_threads: int | None,
        n_slots: int,
    ) -> RoutedLowering | StackedLowering:
        """Makes the runner, and gives the lowering that holds its adapters."""
        with memory_errors(self._name):
            lowering, self._runner = make_runner(
                self.model,
                self.config.n_cells,
                self.config.max_batch_tokens,
                name,
                kv_type,
                attention,
                self.model.n_threads if n_threads is None else n_threads,
                n_slots,
            )
        assert isinstance(lowering, RoutedLowering | StackedLowering)
        return lowering

    def _hold(self, generation: Generation, *, pin: bool) -> None:
        self._wait_for(Hold(generation, pin))

    def _wait_for(self, hold: Hold) -> None:
        self._thread.post(lambda: self._core.hold(hold))
        error = hold.outcome.result()
        if error is not None:
            raise error

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


def _request(prompt: Prompt, options: dict[str, Any]) -> Request:
    """A request from the keyword arguments of generate()."""
    names = ("adapters", "n", "cache_salt", "deadline_s", "chat")
    own = {name: options.pop(name) for name in names if name in options}
    params: SamplingParams | None = options.pop("params", None)
    return Request(prompt, params=sampling_params(params, options), **own)  # type: ignore[arg-type]


def _scheduler_config(
    n_ctx: int, max_batch_tokens: int, max_sequences: int, max_sequence_tokens: int | None
) -> SchedulerConfig:
    """The checked budgets."""
    return SchedulerConfig(
        n_cells=integer(n_ctx, "n_ctx", 1, MAX_CELLS),
        max_batch_tokens=integer(max_batch_tokens, "max_batch_tokens", 1, 1 << 16),
        max_sequences=integer(max_sequences, "max_sequences", 1, 1 << 16),
        max_waiting=1 << 30,  # those that wait do so before the scheduler
        max_sequence_tokens=max_sequence_tokens,
    )
