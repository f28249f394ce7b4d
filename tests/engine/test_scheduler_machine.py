"""The scheduler under random arrivals, aborts, floods, near-full cells and changing adapters."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from loragraph.engine.plan import SchedulerConfig, StepPlan
from loragraph.engine.prefix_tree import path_of
from loragraph.engine.scheduler import Scheduler
from loragraph.engine.sequence import Sequence, Status
from loragraph.errors import CapacityError, ContextLengthError
from tests.engine.fakes import FakeRunner, next_token, sequence_of
from tests.reference.scheduler import TurnModel, generate

N_CELLS = 32


@st.composite
def sequences(draw: st.DrawFn) -> list[Sequence]:
    """One request: 1 to 3 choices of one prompt, maybe with an invocation, salt or score."""
    stem = list(range(draw(st.sampled_from([0, 0, 3, 9]))))  # prompts often share a start
    tokens = [*stem, *draw(st.lists(st.integers(0, 2), min_size=1, max_size=8))]
    segments = [(0, draw(st.sampled_from(["", "", "a", "b", "ab"])))]
    if draw(st.booleans()):
        starts = draw(st.sets(st.integers(1, len(tokens)), max_size=2))
        segments += [(start, draw(st.sampled_from(["", "a", "c"]))) for start in sorted(starts)]
    max_tokens = draw(st.sampled_from([0, 1, 2, 12, 60, 60]))
    salt = draw(st.sampled_from(["", "", "", "tenant"]))
    scored = draw(st.sampled_from([None, None, None, 0, 2]))
    n = draw(st.sampled_from([1, 1, 1, 3]))
    return [
        sequence_of(tokens, *segments, max_tokens=max_tokens, salt=salt, logits_from=scored)
        for _ in range(n)
    ]


class SchedulerMachine(RuleBasedStateMachine):
    """Random requests in near-full cells; after every rule the books must balance."""

    @initialize(
        block_size=st.sampled_from([1, 4, 16]),
        max_preemptions=st.sampled_from([0, 1, 1, 2]),
        max_batch_tokens=st.sampled_from([4, 7, 32]),
    )
    def start(self, block_size: int, max_preemptions: int, max_batch_tokens: int) -> None:
        config = SchedulerConfig(
            N_CELLS,
            max_sequences=4,
            max_waiting=12,
            max_batch_tokens=max_batch_tokens,
            max_preemptions=max_preemptions,
            block_size=block_size,
        )
        self.scheduler = Scheduler(config)
        self.runner = FakeRunner(self.scheduler)
        self.turns = TurnModel()
        self.sequences: list[Sequence] = []
        self.unready: set[str] = set()

    @rule(request=sequences())
    def add(self, request: list[Sequence]) -> None:
        """All of a request or nothing of it is taken in."""
        waiting = self.scheduler.n_waiting
        try:
            self.scheduler.add(*request)
        except (CapacityError, ContextLengthError):
            assert self.scheduler.n_waiting == waiting
        else:
            self.sequences += request

    @rule(data=st.data())
    @precondition(lambda self: self.sequences)
    def abort(self, data: st.DataObject) -> None:
        """Any sequence may go at any time between steps."""
        self.scheduler.finish(data.draw(st.sampled_from(self.sequences)), "abort")

    @rule(letter=st.sampled_from("abc"))
    def load_or_evict(self, letter: str) -> None:
        """An adapter becomes ready or unready."""
        self.unready ^= {letter}

    @rule(n=st.integers(1, 12))
    def steps(self, n: int) -> None:
        """A step computes something wherever there is something to compute."""
        for _ in range(n):
            plan = self.scheduler.schedule(self.ready)
            self.after_schedule(plan)
            tokens = self.runner.run(plan)
            self.finish_step(plan, tokens)
            self.check()

    @rule(data=st.data())
    def step_with_aborts(self, data: st.DataObject) -> None:
        """Sequences may also go while their step runs."""
        plan = self.scheduler.schedule(self.ready)
        self.after_schedule(plan)
        tokens = self.runner.run(plan)
        if plan.chunks:
            chunk = data.draw(st.sampled_from(plan.chunks))
            self.scheduler.finish(chunk.sequence, "abort")
        self.finish_step(plan, tokens)

    @rule(data=st.data())
    @precondition(lambda self: self.scheduler.running)
    def fail(self, data: st.DataObject) -> None:
        """A step that fails ends what runs, and no cell of it is found again."""
        if data.draw(st.integers(0, 7)):
            return  # seldom: it ends everything
        self.after_schedule(self.scheduler.schedule(self.ready))
        self.scheduler.fail()
        assert self.scheduler.blocks.n_used == 0
        self.runner.contents.clear()

    def ready(self, sequence: Sequence) -> bool:
        """Whether all the sequence's adapters are resident."""
        return self.unready.isdisjoint(sequence.flow)  # type: ignore[arg-type]

    def after_schedule(self, plan: StepPlan) -> None:
        """The plan keeps the budgets, goes on where each sequence was, and is not idle."""
        scheduler = self.scheduler
        assert plan.n_tokens <= scheduler.config.max_batch_tokens
        assert len({chunk.sequence for chunk in plan.chunks}) == len(plan.chunks)
        for sequence in plan.admitted:
            assert self.ready(sequence)
            self.turns.admit(sequence.flow)
        decoding = [one for one in scheduler.running if one.n_pending == 0]
        assert all(any(chunk.sequence is one for chunk in plan.chunks) for one in decoding)
        idle = not (plan.chunks or plan.preempted or plan.admitted)
        assert not idle or not scheduler.running
        if idle:
            assert not any(self.ready(one) for one in scheduler.waiting())
        self.check_paths(
            private={r for chunk in plan.chunks if chunk.duplicate for r in chunk.runs}
        )

    def finish_step(self, plan: StepPlan, tokens: list[tuple[Sequence, int]]) -> None:
        """The caller's part after a run."""
        self.scheduler.complete(plan)
        for sequence, token in tokens:
            self.scheduler.append(sequence, token)

    @invariant()
    def check(self) -> None:
        """Books balance between steps."""
        if hasattr(self, "scheduler"):
            self.check_paths(private=set())
            # Who waits is told after every rule: a flow that was gone in between counts anew.
            self.turns.observe(one.flow for one in self.scheduler.waiting() if self.ready(one))

    def check_paths(self, private: set[tuple[int, int]]) -> None:
        """Cells, references, paths and limits are what the sequences say they are."""
        scheduler = self.scheduler
        scheduler.blocks.check()
        scheduler.tree.check()
        owned = [
            cell
            for node in scheduler.tree.nodes()
            for s, n in node.runs
            for cell in range(s, s + n)
        ]
        owned += [cell for start, n in private for cell in range(start, start + n)]
        assert len(owned) == len(set(owned))
        assert set(owned) == scheduler.blocks.used_cells()
        users = dict.fromkeys(scheduler.tree.nodes(), 0)
        for one in scheduler.running:
            assert one.node is not None
            path = list(path_of(one.node))[::-1]
            for node in path:
                users[node] += 1
            tokens = [token for node in path for token in node.tokens]
            assert tokens == one.tokens[: one.n_computed]
            keys = [node.key for node in path for _ in node.tokens]
            assert keys == [(one.salt, one.mix_at(i).key) for i in range(one.n_computed)]
        assert users == {node: node.ref_count for node in users}
        assert len(scheduler.running) <= scheduler.config.max_sequences
        assert scheduler.n_waiting == len(list(scheduler.waiting()))
        ranks = [one.rank for one in scheduler.running]
        assert ranks == sorted(ranks)
        for one in self.sequences:
            assert one.n_preempted <= scheduler.config.max_preemptions
            assert (one in scheduler.running) == (one.status is Status.RUNNING)

    def teardown(self) -> None:
        """Everything ends, with the tokens that it has alone, and nothing stays in use."""
        if not hasattr(self, "scheduler"):
            return
        self.unready.clear()
        self.runner.finish_all(2000)
        for one in self.sequences:
            assert one.status is Status.FINISHED
            assert one.tokens == generate_like(one)
            if one.finish_reason == "length":
                assert one.n_generated == min(one.max_tokens, N_CELLS - one.n_prompt)
        stats = self.scheduler.stats
        assert (stats.n_running, stats.n_waiting, stats.n_cells_in_use) == (0, 0, 0)
        self.scheduler.tree.clear()
        assert self.scheduler.blocks.n_free_whole == N_CELLS


def generate_like(one: Sequence) -> list[int]:
    """The tokens that the twin generates, as many as the sequence has."""
    keys = [one.mix_at(i).key for i in range(len(one.tokens))]
    return generate(one.salt, keys, one.tokens[: one.n_prompt], one.n_generated, next_token)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
