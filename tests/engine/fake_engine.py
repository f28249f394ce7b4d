"""The engine's core on a runner without a model, byte tokens and adapters that are only names.

A cell's content is a hash of all that it was computed from, and a row's logits are a function of
its content: so texts differ as soon as any cell, token, mix or order does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from loragraph.adapters.adapter import Adapter
from loragraph.adapters.mix import Mix
from loragraph.adapters.report import LoadReport
from loragraph.engine.core import EngineCore
from loragraph.engine.job import ChoiceState, Job
from loragraph.engine.params import SamplingParams
from loragraph.engine.plan import SchedulerConfig
from loragraph.engine.registry import AdapterHeader, Generation, LoadOptions, Registry
from loragraph.engine.request import Embedding, Event, Outcome, Result
from loragraph.engine.residency import Residency
from loragraph.engine.sampler import Sampler
from loragraph.errors import LoragraphError
from loragraph.graph.batch import Batch
from loragraph.vocab.stream import TextStream

N_TOKENS = 257
EOG = 256
GREEDY = SamplingParams(temperature=0)


class ByteTexts:
    """A token a byte, and one that ends a generation."""

    n_tokens = N_TOKENS
    eog_tokens = frozenset({EOG})

    def piece(self, token: int, *, special: bool = True) -> bytes:
        """The byte."""
        return b"" if token == EOG else bytes([token])

    def is_eog(self, token: int) -> bool:
        """Whether it is the last one."""
        return token == EOG


class NamedAdapter:
    """An adapter that is only its content's name; counts who uses it."""

    def __init__(self, digest: str, invocation: Sequence[int] = ()) -> None:
        self.digest = digest
        self.invocation_tokens = tuple(invocation)
        self.pairs: dict[str, object] = {}
        self.nbytes = 100
        self.rank_max = 4
        self.task_name = self.prompt_prefix = ""
        self.report = LoadReport({}, {}, {}, n_tensors=2, n_params=1, base_params=1, nbytes=100)
        self.n_attached = 0
        self.closed = False

    def attach(self, where: str) -> None:
        """One more user."""
        assert not self.closed
        self.n_attached += 1

    def detach(self, where: str) -> None:
        """One less."""
        self.n_attached -= 1

    def close(self) -> None:
        """Frees nothing."""
        assert not self.n_attached
        self.closed = True


class HashRunner:
    """Computes contents from the cells that rows see; refuses adapters that are not in a slot."""

    def __init__(self, n_cells: int) -> None:
        self.contents = np.zeros(n_cells, np.int64)
        self.resident: set[Adapter] = set()
        self.n_rows = 0
        self.states: NDArray[np.float32] = np.empty((0, 4), np.float32)
        self.before_step: Callable[[], None] = lambda: None

    def run(self, batch: Batch, *, copy: bool = True) -> NDArray[np.float32]:
        """Logits (n_outputs, 257): 1 at a token that depends on the row's content, else 0."""
        self.before_step()
        self.n_rows += batch.n_tokens
        seen: list[list[tuple[int, int]]] = [[] for _ in range(batch.n_tokens)]
        stretches = batch.stretches
        for s in range(stretches.n_stretches):
            cells = stretches.cells(s)
            for i in range(stretches.row_ptr[s], stretches.row_ptr[s + 1]):
                for offset in range(stretches.row_begin[i], stretches.row_end[i]):
                    place = int(stretches.first[s]) + offset
                    seen[stretches.row[i]].append((place, int(cells[offset])))
        contents = np.zeros(batch.n_tokens, np.int64)
        for row in np.argsort(batch.positions, kind="stable"):
            mix = batch.mixes[batch.mix[row]]
            assert set(mix.adapters) <= self.resident, "a step uses what is not resident"
            history = tuple(int(self.contents[cell]) for _, cell in sorted(seen[row])[:-1])
            contents[row] = hash((mix.key, int(batch.tokens[row]), history))
            self.contents[batch.cells[row]] = contents[row]
        logits = np.zeros((batch.n_logits, N_TOKENS), np.float32)
        wanted = contents[batch.outputs]
        logits[np.arange(batch.n_logits), wanted[: batch.n_logits] % 97] = 1
        self.states = (wanted[batch.n_logits :, None] % [97, 89, 83, 79]).astype(np.float32)
        return logits

    def zero_cells(self, cells: NDArray[np.int64]) -> None:
        """Forgets them."""
        self.contents[cells] = 0

    def hold(self, adapters: Iterable[Adapter]) -> None:
        """The slots."""
        self.resident = set(adapters)

    def check(self, mix: Mix) -> None:
        """Everything can be computed."""


class FakeEngine:
    """A core, and the loads in the caller's hand: `files` maps a path's name to its adapter."""

    def __init__(
        self,
        n_cells: int = 512,
        n_slots: int = 8,
        max_bytes: int | None = None,
        max_waiting: int = 10_000,
        **config: int,
    ) -> None:
        self.now = 0.0
        self.files: dict[str, NamedAdapter | LoragraphError] = {}
        self.invocations: dict[str, tuple[int, ...]] = {}
        self.loading: list[Generation] = []
        self.loaded: list[NamedAdapter] = []
        self.runner = HashRunner(n_cells)
        self.registry = Registry(self._header)
        residency = Residency(
            self.registry, self.runner, self.loading.append, n_slots, max_bytes, lambda: self.now
        )
        settings = {"max_batch_tokens": 32, "max_sequences": 8, **config}
        self.core = EngineCore(
            SchedulerConfig(n_cells=n_cells, max_waiting=1 << 20, **settings),
            self.runner,
            ByteTexts(),
            residency,
            lambda: self.now,
            max_waiting,
        )

    def register(self, name: str, digest: str = "", invocation: Sequence[int] = ()) -> Generation:
        """A new generation of a name whose file holds `digest`."""
        path = f"{name}-{next(_ids)}"
        self.invocations[path] = tuple(invocation)
        self.files[path] = NamedAdapter(digest or name, invocation)
        new, old = self.registry.register(name, path)
        if old is not None:
            self.core.retire(old)
        return new

    def submit(
        self,
        prompt: Sequence[int] | str,
        adapters: Mapping[str, float] | None = None,
        max_tokens: int = 6,
        n: int = 1,
        **fields: Any,
    ) -> Pending:
        """A request on its way."""
        tokens = list(prompt.encode()) if isinstance(prompt, str) else list(prompt)
        scales = {self.registry.resolve(name): s for name, s in (adapters or {}).items() if s}
        pending = Pending()
        params = fields.pop("params", GREEDY)
        job = Job(tokens, scales, max_tokens, pending.outcomes.append, **fields)
        for index in range(n):
            sampler = Sampler(cast(Any, ByteTexts()), params)
            text = TextStream(params.stop, keep_stop=params.include_stop_str_in_output)
            job.choices.append(ChoiceState(job, index, sampler, text))
        pending.job = job
        self.core.submit(job)
        return pending

    def load(self, n: int | None = None) -> None:
        """Ends the oldest loads: all, or `n` of them."""
        for _ in range(len(self.loading) if n is None else n):
            generation = self.loading.pop(0)
            assert generation.path is not None
            found = self.files[generation.path.name]
            if isinstance(found, NamedAdapter):
                found = NamedAdapter(found.digest, found.invocation_tokens)
                self.loaded.append(found)
            self.core.on_load(generation, cast(Any, found))

    def step(self) -> bool:
        """All loads, then a step."""
        self.load()
        return self.core.step()

    def finish(self, n_steps: int = 20_000) -> int:
        """Steps until no job is left; how many."""
        for n in range(n_steps):
            if not self.core.n_jobs:
                return n
            self.step()
            self.core.residency.pool.check_invariants()
        raise AssertionError(f"jobs are left after {n_steps} steps")

    def generate(self, *args: Any, **fields: Any) -> Result:
        """One request to its end."""
        pending = self.submit(*args, **fields)
        self.finish()
        return pending.result

    def check_idle(self) -> None:
        """Nothing is held any more, but what is kept for later."""
        scheduler, pool = self.core.scheduler, self.core.residency.pool
        assert self.core.n_jobs == 0
        assert not scheduler.running
        assert scheduler.n_waiting == 0
        assert scheduler.tree.stats.n_in_use == 0
        assert scheduler.blocks.n_used == scheduler.tree.stats.n_cached
        scheduler.tree.check()
        assert pool.stats.n_tickets == 0
        assert not self.core.outputs.choices
        self.core.residency.sync()
        open_ = [adapter for adapter in self.loaded if not adapter.closed]
        assert len(open_) == pool.stats.n_resident

    def _header(self, path: Path, options: LoadOptions) -> AdapterHeader:
        found = self.files[path.name]
        nbytes = found.nbytes if isinstance(found, NamedAdapter) else 100
        return AdapterHeader(nbytes, 4, 1, self.invocations[path.name])


class Pending:
    """What a request has sent out so far."""

    def __init__(self) -> None:
        self.job: Job = cast(Any, None)
        self.outcomes: list[Outcome] = []

    @property
    def ended(self) -> bool:
        """Whether the last word is there."""
        return bool(self.outcomes) and not isinstance(self.outcomes[-1], Event)

    @property
    def result(self) -> Result:
        """The result; raises the error that ended it."""
        assert self.ended, "the request has not ended"
        last = self.outcomes[-1]
        if isinstance(last, LoragraphError):
            raise last
        return cast(Result, last)

    @property
    def embedding(self) -> Embedding:
        """The embedding."""
        last = self.outcomes[-1]
        assert isinstance(last, Embedding), f"no embedding: {last}"
        return last

    @property
    def error(self) -> LoragraphError:
        """The error that ended it."""
        last = self.outcomes[-1]
        assert isinstance(last, LoragraphError), f"no error: {last}"
        return last


_ids = itertools.count()
