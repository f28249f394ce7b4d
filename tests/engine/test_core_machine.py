"""Any order of requests, swaps, loads, cancellations and steps, against cold starts."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loragraph.engine.invocation import last_occurrence
from loragraph.errors import AdapterChangedError
from tests.engine.fake_engine import FakeEngine, NamedAdapter, Pending

INVOCATION = (2, 3)
NAMES = ("a", "b", "c", "alora")

Scales = dict[str, float]


def cold_tokens(prompt: list[int], scales: dict[tuple[str, bool], float], n: int) -> list[int]:
    """What a lone request generates: each token's content is a hash of mix, token and history."""
    tokens: list[int] = list(prompt)
    history: tuple[int, ...] = ()
    start = last_occurrence(prompt, INVOCATION)
    while True:
        for i in range(len(history), len(tokens)):
            key = tuple(
                sorted(
                    (digest, scale)
                    for (digest, is_alora), scale in scales.items()
                    if not is_alora or (start is not None and i >= start)
                )
            )
            history = (*history, hash((key, tokens[i], history)))
        if len(tokens) == len(prompt) + n:
            return tokens[len(prompt) :]
        tokens.append(history[-1] % 97)


class CoreMachine(RuleBasedStateMachine):
    """Few cells, few slots, few seats: everything is scarce."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = FakeEngine(
            n_cells=64, n_slots=2, max_sequences=3, max_batch_tokens=8, block_size=4
        )
        self.digests: dict[int, str] = {}
        self.n = 0
        self.requests: list[tuple[Pending, list[int], Scales, dict[str, int], int]] = []
        for name in NAMES:
            self.swap(name)

    @rule(name=st.sampled_from(NAMES))
    def swap(self, name: str) -> None:
        """The name gets new content."""
        self.n += 1
        invocation = INVOCATION if name == "alora" else ()
        generation = self.engine.register(name, f"{name}{self.n:03}", invocation)
        self.digests[generation.number] = f"{name}{self.n:03}"

    @rule(
        prompt=st.lists(st.integers(1, 4), min_size=1, max_size=12),
        scales=st.dictionaries(st.sampled_from(NAMES), st.sampled_from([1.0, -0.5]), max_size=2),
        n=st.integers(1, 6),
    )
    def submit(self, prompt: list[int], scales: Scales, n: int) -> None:
        """A request."""
        numbers = {name: self.engine.registry.resolve(name).number for name in scales}
        pending = self.engine.submit(prompt, scales, max_tokens=n)
        self.requests.append((pending, prompt, scales, numbers, n))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """Any request, ended or not."""
        pending = data.draw(st.sampled_from(self.requests))[0]
        self.engine.core.abort(pending.job)
        assert pending.ended

    @rule()
    def step(self) -> None:
        """A step without loads."""
        self.engine.core.step()

    @precondition(lambda self: self.engine.loading)
    @rule()
    def load(self) -> None:
        """The oldest load ends."""
        self.engine.load(1)

    @rule(name=st.sampled_from(NAMES))
    def overwrite(self, name: str) -> None:
        """The file of a name's generation gets other content behind the engine's back."""
        generation = self.engine.registry.resolve(name)
        assert generation.path is not None
        if generation.digest is not None:  # else the first load just reads it
            self.n += 1
            invocation = INVOCATION if name == "alora" else ()
            self.engine.files[generation.path.name] = NamedAdapter(f"x{self.n:03}", invocation)

    @invariant()
    def budgets_are_kept(self) -> None:
        """Slots and cells."""
        self.engine.core.residency.pool.check_invariants()
        self.engine.core.scheduler.tree.check()

    def teardown(self) -> None:
        """Every request ends, each finished one as a cold start, and nothing is held."""
        self.engine.finish()
        self.engine.check_idle()
        for pending, prompt, scales, numbers, n in self.requests:
            last: Any = pending.outcomes[-1]
            if isinstance(last, Exception):
                assert isinstance(last, AdapterChangedError), last
                continue
            used = {use.name: use.digest for use in last.adapters}
            for name, digest in used.items():
                known = self.digests.get(numbers[name])
                assert known in (digest, None), "a generation served other content"
            if last.finish_reason != "abort":
                by_digest = {(used[name], name == "alora"): s for name, s in scales.items()}
                assert list(last.tokens) == cold_tokens(prompt, by_digest, n)


TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
