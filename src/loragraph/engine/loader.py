"""Adapter files: headers at registration, tensors in one worker thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from loragraph.adapters.adapter import Adapter
from loragraph.adapters.gguf import memory_of, read_header
from loragraph.adapters.report import coverage
from loragraph.engine.model import Model
from loragraph.engine.options import memory_errors
from loragraph.engine.registry import AdapterHeader, Generation, LoadOptions
from loragraph.errors import BackendError, LifecycleError, LoragraphError

OnLoad = Callable[[Generation, Adapter | LoragraphError], None]


class AdapterLoader:
    """Reads adapters for one model. One load at a time: a step must keep its memory bandwidth."""

    def __init__(self, model: Model, on_load: OnLoad) -> None:
        """`on_load` is called on the worker; LifecycleError from it gives the memory back."""
        self._model = model
        self._on_load = on_load
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="loragraph-load")

    def read_header(self, path: Path, options: LoadOptions) -> AdapterHeader:
        """Checks a header against the model; raises what is wrong with it."""
        draft = read_header(
            self._model.lib,
            path,
            self._model.base_info,
            ignore_norm=options.ignore_norm,
            tied_output=options.tied_output,
        )
        nbytes, nbytes_b = memory_of(draft)
        ranks = [pair.b.ne[0] for pair in draft.pairs.values() if pair.b is not None]
        return AdapterHeader(
            nbytes + nbytes_b,
            max(ranks, default=0),
            len(draft.pairs) + len(draft.alone),
            draft.invocation_tokens,
            draft.task_name,
            draft.prompt_prefix,
            coverage((*draft.pairs, *draft.alone), self._model.base_info),
        )

    def start(self, generation: Generation) -> None:
        """Loads in the worker."""
        future = self._worker.submit(self._load, generation)
        future.add_done_callback(lambda done: self._report(generation, done))

    def close(self) -> None:
        """Waits for the load that runs; the others never begin."""
        self._worker.shutdown(wait=True, cancel_futures=True)

    def _load(self, generation: Generation) -> Adapter:
        options = generation.options
        with generation.opened() as path:
            adapter = self._model.load_adapter(
                path, ignore_norm=options.ignore_norm, tied_output=options.tied_output
            )
        try:
            with memory_errors(str(generation.path)):
                self._model.prepared.get(adapter)  # not on the engine's thread
        except BaseException:
            adapter.close()
            raise
        return adapter

    def _report(self, generation: Generation, done: Future[Adapter]) -> None:
        if done.cancelled():
            return
        error = done.exception()
        outcome: Adapter | LoragraphError
        if error is None:
            outcome = done.result()
        elif isinstance(error, LoragraphError):
            outcome = error
        else:
            outcome = BackendError(f"loading '{generation.name}' failed: {error!r}")
        try:
            self._on_load(generation, outcome)
        except LifecycleError:  # the engine was closed meanwhile
            if isinstance(outcome, Adapter):
                outcome.close()
