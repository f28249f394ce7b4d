"""Which tokens of which sequences make up the next step. Pure: no ggml, clock, thread or log.

Prefill and decode are not phases. A step first takes one token of every sequence that decodes, then
fills its budget with chunks of prompts, then admits. Fairness is by flow (the mix a sequence ends
up with): a flow that was served goes behind the others. So with F flows waiting, the first request
of a flow is admitted after at most F - 1 admissions of other flows, however many requests those
hold; inside a flow the order is first come, first served.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from loragraph.engine.blocks import Blocks
from loragraph.engine.prefix_tree import EdgeKey, Node, PrefixTree
from loragraph.engine.sequence import FinishReason, Sequence, Status
from loragraph.errors import CapacityError, ContextLengthError

Ready = Callable[[Sequence], bool]
"""Whether all adapters of a sequence are resident, so that it may run."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Budgets. A sequence's tokens, prompt and generated, never exceed `max_sequence_tokens`."""

    n_cells: int
    max_batch_tokens: int = 512
    max_sequences: int = 32
    max_waiting: int = 1024
    max_preemptions: int = 8
    max_sequence_tokens: int | None = None

    @property
    def sequence_limit(self) -> int:
        """Tokens of the longest sequence that can run at all."""
        return min(self.n_cells, self.max_sequence_tokens or self.n_cells)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, end) of a sequence in this step, with a cell for each."""

    sequence: Sequence
    start: int
    end: int
    cells: NDArray[np.int64]  # (end - start,) i64, where K and V are written
    duplicate: bool = False  # the tree has this token already: the cells are only for this step
    node: Node | None = None  # end of the path that holds all tokens before `end` (if duplicate:
    # before `start`) when the step runs

    @property
    def wants_logits(self) -> bool:
        """Whether the sequence's last known token is computed: its logits give the next one."""
        return self.end == len(self.sequence.tokens)

    @property
    def n_tokens(self) -> int:
        """Tokens of the chunk."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The chunks of one step, in the order of its rows, and who was put back for lack of cells."""

    chunks: tuple[Chunk, ...]
    preempted: tuple[Sequence, ...] = ()
    finished: tuple[Sequence, ...] = ()  # ended without a step: no cells are left for them

    @property
    def n_tokens(self) -> int:
        """Tokens of the step."""
        return sum(chunk.n_tokens for chunk in self.chunks)


@dataclass(slots=True)
class _Step:
    """A step while it is put together."""

    budget: int
    chunks: list[Chunk] = field(default_factory=list)
    claims: set[tuple[int, EdgeKey, int]] = field(default_factory=set)
    preempted: list[Sequence] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)
    busy: set[int] = field(default_factory=set)  # sequence ids with a chunk: not to be preempted


class Scheduler:
    """Waiting and running sequences, the prefix tree and its cells."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.blocks = Blocks(config.n_cells)
        self.tree = PrefixTree(self.blocks)
        self.running: list[Sequence] = []  # oldest first
        self._flows: dict[Hashable, deque[Sequence]] = {}  # waiting; first = served longest ago
        self._prefill_turn: dict[Hashable, int] = {}
        self._turn = 0

    @property
    def n_waiting(self) -> int:
        """Sequences that wait."""
        return sum(len(flow) for flow in self._flows.values())

    def waiting(self) -> Iterable[Sequence]:
        """The waiting sequences, flow by flow."""
        for flow in self._flows.values():
            yield from flow

    def add(self, *sequences: Sequence) -> None:
        """Takes sequences in, all or none.

        ContextLengthError for a prompt that can never run, CapacityError where too many wait.
        """
        for sequence in sequences:
            limit = self.config.sequence_limit
            if sequence.n_prompt > limit or (sequence.n_prompt == limit and sequence.max_tokens):
                raise ContextLengthError(
                    f"expected a prompt of fewer than {limit} tokens, got {sequence.n_prompt}",
                    param="prompt",
                )
        if self.n_waiting + len(sequences) > self.config.max_waiting:
            raise CapacityError(
                f"{self.n_waiting} requests wait already (at most {self.config.max_waiting})",
                hint="try again later",
            )
        for sequence in sequences:
            self._flows.setdefault(sequence.flow, deque()).append(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends a sequence in any state; its cells stay in the tree for others."""
        if sequence.status is Status.FINISHED:
            return
        if sequence.status is Status.WAITING:
            self._leave_queue(sequence)
        else:
            self.running.remove(sequence)
            self._let_go(sequence)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason

    def schedule(self, ready: Ready = lambda sequence: True) -> StepPlan:
        """The next step. Its tokens count as computed from now on: run it, then `append`."""
        step = _Step(self.config.max_batch_tokens)
        for sequence in [one for one in self.running if one.decoding]:
            if sequence.status is Status.RUNNING and step.budget > 0:
                self._extend(step, sequence, 1)
        for sequence in self._prefilling():
            if sequence.status is Status.RUNNING and step.budget > 0:
                self._prefill(step, sequence)
        self._admit(step, ready)
        return StepPlan(tuple(step.chunks), tuple(step.preempted), tuple(step.finished))

    def complete(self, plan: StepPlan) -> None:
        """After a step ran: gives back the cells that were only for it."""
        for chunk in plan.chunks:
            if chunk.duplicate:
                self.blocks.free(chunk.cells)

    def append(self, sequence: Sequence, token: int) -> None:
        """A sampled token; ends the sequence with "length" where no more may follow."""
        sequence.tokens.append(token)
        full = len(sequence.tokens) >= self.config.sequence_limit
        if sequence.n_generated >= sequence.max_tokens or full:
            self.finish(sequence, "length")

    def _prefilling(self) -> list[Sequence]:
        """Running sequences with a prompt to compute, the flow served longest ago first."""
        return sorted(
            (one for one in self.running if not one.decoding),
            key=lambda one: self._prefill_turn.get(one.flow, 0),
        )

    def _prefill(self, step: _Step, sequence: Sequence) -> None:
        """A chunk of a prompt, unless another sequence computes the same tokens right now."""
        self._match(sequence)
        frontier = self._frontier(sequence)
        if frontier in step.claims:
            return
        step.claims.add(frontier)
        self._turn += 1
        self._prefill_turn[sequence.flow] = self._turn
        self._extend(step, sequence, min(sequence.n_pending, step.budget))

    def _match(self, sequence: Sequence) -> None:
        """Walks the path along what the tree holds by now, but the last token is computed."""
        assert sequence.node is not None
        start, end = sequence.n_computed, len(sequence.tokens) - 1
        if start < end:
            keys = sequence.edge_keys(start, end)
            sequence.node, n = self.tree.advance(sequence.node, keys, sequence.tokens[start:end])
            sequence.n_computed += n
            sequence.n_hit += n
            if n:
                self.blocks.leave(sequence.cursor)

    def _frontier(self, sequence: Sequence) -> tuple[int, EdgeKey, int]:
        index = sequence.n_computed
        key = sequence.edge_keys(index, index + 1)[0]
        return id(sequence.node), key, sequence.tokens[index]

    def _admit(self, step: _Step, ready: Ready) -> None:
        """Waiting sequences, one a flow in turn, while there are seats and budget."""
        passed_over: list[Hashable] = []
        while step.budget > 0 and len(self.running) < self.config.max_sequences:
            flow = next((key for key in self._flows if key not in passed_over), None)
            if flow is None or step.preempted:
                break
            sequence = next((one for one in self._flows[flow] if ready(one)), None)
            if sequence is None or not self._has_room_for(sequence):
                passed_over.append(flow)
                continue
            self._leave_queue(sequence)
            rest = self._flows.pop(flow, None)
            if rest is not None:  # served: behind the others
                self._flows[flow] = rest
            self._start(sequence)
            self._prefill(step, sequence)

    def _has_room_for(self, sequence: Sequence) -> bool:
        """Whether its known tokens fit beside what runs, counting what can be evicted."""
        if not self.running:
            return True
        in_use = sum(len(node.cells) for node in self.tree.nodes() if node.ref_count)
        return in_use + len(sequence.tokens) + self.blocks.block_size <= self.config.n_cells

    def _start(self, sequence: Sequence) -> None:
        sequence.status = Status.RUNNING
        sequence.node = self.tree.root
        sequence.n_computed = 0
        self.running.append(sequence)

    def _extend(self, step: _Step, sequence: Sequence, n: int) -> None:
        """Schedules the next `n` tokens, or as many as cells can be found for."""
        assert sequence.node is not None
        if sequence.cursor.block < 0 and sequence.node.cells and not sequence.node.children:
            self.blocks.resume(sequence.cursor, sequence.node.cells[-1])
        n = self._make_room(step, sequence, n)
        if n == 0:
            return
        start, end = sequence.n_computed, sequence.n_computed + n
        cells = self.blocks.take(sequence.cursor, n)
        step.budget -= n
        step.busy.add(sequence.sequence_id)
        key = sequence.edge_keys(start, start + 1)[0]
        if self.tree.has_edge(sequence.node, key, sequence.tokens[start]):
            # Only a last token can be there already; it is computed again for its logits, in a
            # cell of its own, and then the sequence goes on from the tree's.
            assert n == 1, "only the last token is computed twice"
            before = sequence.node
            self.tree.stats.n_duplicate += 1
            sequence.node, _ = self.tree.advance(before, [key], sequence.tokens[start:end])
            self.tree.stats.n_hit -= 1
            self.blocks.leave(sequence.cursor)
            step.chunks.append(Chunk(sequence, start, end, cells, True, before))
        else:
            self._insert(sequence, start, end, cells)
            step.chunks.append(Chunk(sequence, start, end, cells, False, sequence.node))
        sequence.n_computed = end

    def _insert(self, sequence: Sequence, start: int, end: int, cells: NDArray[np.int64]) -> None:
        done = start
        for segment, part_end in sequence.segment_ranges(start, end):
            key = (sequence.salt, segment.mix.key)
            assert sequence.node is not None
            sequence.node = self.tree.insert(
                sequence.node,
                key,
                sequence.tokens[done:part_end],
                cells[done - start : part_end - start].tolist(),
            )
            done = part_end

    def _make_room(self, step: _Step, sequence: Sequence, n: int) -> int:
        """Evicts, then preempts the newest, until cells for `n` tokens (or some) are free."""
        while True:
            missing = n - self.blocks.room(sequence.cursor)
            if missing > self.blocks.n_free:
                self.tree.evict(missing)
            available = self.blocks.available(sequence.cursor)
            if available >= n:
                return n
            if available > 0 and not sequence.decoding:
                return available  # a shorter chunk now, the rest later
            victim = self._victim(step, sequence)
            if victim is None:
                return self._give_up(step, sequence)
            self._preempt(step, victim)

    def _victim(self, step: _Step, sequence: Sequence) -> Sequence | None:
        """The newest running sequence behind `sequence` that may still be preempted."""
        for one in reversed(self.running):
            if one is sequence:
                return None
            spared = one.sequence_id in step.busy or one.n_preempted >= self.config.max_preemptions
            if not spared:
                return one
        return None

    def _give_up(self, step: _Step, sequence: Sequence) -> int:
        """No cell can be found: goes back to wait, or ends if nobody else holds cells."""
        if len(self.running) > 1 and sequence.n_preempted < self.config.max_preemptions:
            self._preempt(step, sequence)
        elif len(self.running) == 1:
            self.finish(sequence, "length")
            step.finished.append(sequence)
        return 0

    def _preempt(self, step: _Step, sequence: Sequence) -> None:
        """Back to the head of its flow; its cells stay in the tree until they are evicted."""
        self.running.remove(sequence)
        self._let_go(sequence)
        sequence.status = Status.WAITING
        sequence.n_preempted += 1
        step.preempted.append(sequence)
        self._flows.setdefault(sequence.flow, deque()).appendleft(sequence)

    def _let_go(self, sequence: Sequence) -> None:
        self.blocks.leave(sequence.cursor)
        if sequence.node is not None:
            self.tree.release(sequence.node)
            sequence.node = None
        sequence.n_computed = 0

    def _leave_queue(self, sequence: Sequence) -> None:
        flow = self._flows[sequence.flow]
        flow.remove(sequence)
        if not flow:
            del self._flows[sequence.flow]
