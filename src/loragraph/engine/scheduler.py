"""Which tokens of which sequences make up the next step. Pure: no ggml, clock, thread or log.

Prefill and decode are not phases. A step takes one token of every sequence that decodes, admits
while there are seats and cells, and fills the rest of its budget with chunks of prompts.

**Sharing.** A chunk's tokens enter the prefix tree when they are scheduled, and every row of a step
reads cells after all of the step's K and V of that layer are written. So a sequence whose next
tokens are pending joins them in the same step: equal prompts that arrive together compute once,
whoever is aborted. Only the last prompt token is computed by each, for its logits.

**Fairness.** A flow is a set of adapters (scales do not make another). Waiting flows stand in a
queue; one that is served goes to its end, a new one joins at its end, one whose adapters are not
ready is passed over and keeps its place. So from the moment a flow waits, with F flows waiting,
its first sequence is admitted after at most F - 1 admissions of other flows, however many sequences
those hold and whoever comes later. If the next in turn lacks cells, nobody else is admitted, so a
long prompt is not overtaken for ever. Running prompts share the budget alike: with P flows in
prefill, at most P - 1 chunks of others come before the next chunk of a flow.

**Everything ends.** Let `protected` be a sequence that was preempted `max_preemptions` times.
(1) A protected one is admitted only if the cells it may ever need, with those that the protected
running ones may ever need, are no more than there are; it goes first in a step and may preempt
everyone unprotected. So it lacks a cell only while this step's duplicates hold them, which come on
top of the paths and are free again afterwards: then it waits for the next step. It is never
preempted: each sequence is preempted at most `max_preemptions` times.
(2) A step with running sequences computes a token, preempts or admits one. Who lacks cells evicts
what nobody uses, preempts the newest unprotected one behind it that has no chunk in this step, or
else waits where duplicates hold cells (so that there is a chunk), or else is preempted itself; and
the last one left alone finds cells, since no sequence is longer than all cells. With none running,
the next ready one is admitted.
(3) Preemptions are finite by (1), so are admissions and the tokens to compute between them: all
sequences end.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

from loragraph.engine.blocks import Blocks, Run, split_runs
from loragraph.engine.plan import Chunk, SchedulerConfig, SchedulerStats, StepPlan
from loragraph.engine.prefix_tree import PrefixTree
from loragraph.engine.sequence import FinishReason, Sequence, Status
from loragraph.errors import CapacityError, ContextLengthError

Ready = Callable[[Sequence], bool]
"""Whether all adapters of a sequence are resident; asked once a waiting flow, for its first."""


@dataclass(slots=True)
class _Step:
    """A step while it is put together."""

    budget: int
    chunks: list[Chunk] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    busy: set[Sequence] = field(default_factory=set)  # have a chunk: not to be preempted


class Scheduler:
    """Waiting and running sequences, the prefix tree and its cells.

    The caller's loop: `schedule`, run the plan, `complete` (or `fail`), then `append` each token.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.blocks = Blocks(config.n_cells, config.block_size)
        self.tree = PrefixTree(self.blocks)
        self.running: list[Sequence] = []  # oldest first
        self.n_admissions = 0
        self.n_preemptions = 0
        self._flows: dict[Hashable, deque[Sequence]] = {}  # waiting; the first is next in turn
        self._n_waiting = 0
        self._prefill_turn: dict[Hashable, int] = {}  # of running flows: when last served
        self._turn = 0
        self._private: list[Run] = []  # cells of duplicates, until the step is done
        self._in_step = False

    @property
    def n_waiting(self) -> int:
        """Sequences that wait."""
        return self._n_waiting

    @property
    def in_step(self) -> bool:
        """Whether a step was scheduled and neither completed nor failed: its cells hold nothing."""
        return self._in_step

    @property
    def stats(self) -> SchedulerStats:
        """Counts of now and since the start."""
        tree = self.tree.stats
        return SchedulerStats(
            n_waiting=self._n_waiting,
            n_running=len(self.running),
            n_cells=self.config.n_cells,
            n_cells_used=self.blocks.n_used,
            n_cells_in_use=tree.n_in_use,
            n_cells_shared=tree.n_shared,
            fragmentation=self.blocks.fragmentation,
            n_hit_tokens=tree.n_hit,
            n_computed_tokens=tree.n_computed,
            n_duplicate_tokens=tree.n_duplicate,
            n_evicted_tokens=tree.n_evicted,
            n_admissions=self.n_admissions,
            n_preemptions=self.n_preemptions,
        )

    def waiting(self) -> Iterator[Sequence]:
        """The waiting sequences, flow by flow."""
        for flow in self._flows.values():
            yield from flow

    def add(self, *sequences: Sequence) -> None:
        """Takes sequences in, all or none.

        ContextLengthError for a prompt that can never run, CapacityError where too many wait.
        """
        limit = self.config.sequence_limit
        for sequence in sequences:
            most = limit - 1 if sequence.max_tokens else limit
            if not 1 <= sequence.n_prompt <= most:
                raise ContextLengthError(
                    f"expected a prompt of 1 to {most} tokens, got {sequence.n_prompt}",
                    param="prompt",
                    hint="shorten the prompt or raise the number of cells",
                )
        if self._n_waiting + len(sequences) > self.config.max_waiting:
            raise CapacityError(
                f"{self._n_waiting} sequences wait already (at most {self.config.max_waiting})",
                hint="try again later",
            )
        for sequence in sequences:
            self._flows.setdefault(sequence.flow, deque()).append(sequence)
        self._n_waiting += len(sequences)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends a sequence in any state; its cells stay in the tree for others."""
        if sequence.status is Status.FINISHED:
            return
        if sequence.status is Status.WAITING:
            self._leave_queue(sequence)
        else:
            self._stop_running(sequence)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason

    def schedule(self, ready: Ready = lambda sequence: True) -> StepPlan:
        """The next step. Its tokens count as computed from now on; `complete` or `fail` it."""
        assert not self._in_step, "the last step was neither completed nor failed"
        step = _Step(self.config.max_batch_tokens)
        urgent = [one for one in self.running if self._is_protected(one)]
        decoding = [one for one in self.running if one.decoding and not self._is_protected(one)]
        others = len(urgent) + len(decoding)
        for sequence in urgent:
            others -= 1  # each of those behind it keeps a token of the budget
            self._advance(step, sequence, step.budget - others)
        for sequence in decoding:
            if sequence.status is Status.RUNNING:
                self._extend(step, sequence, 1)
        if not step.preempted:
            self._admit(step, ready)
        for sequence in self._in_turn(step):
            if sequence.status is Status.RUNNING and step.budget > 0:
                self._advance(step, sequence, step.budget)
        self._in_step = bool(step.chunks)
        return StepPlan(tuple(step.chunks), tuple(step.preempted), tuple(step.admitted))

    def complete(self, plan: StepPlan) -> None:
        """After a step ran: gives back the cells that were only for it."""
        self._end_step()
        for chunk in plan.chunks:
            sequence = chunk.sequence
            if sequence.logits_from is not None:
                sequence.logits_from = max(sequence.logits_from, chunk.end)
            if sequence.max_tokens == 0 and chunk.end == sequence.n_prompt:
                self.finish(sequence, "length")

    def fail(self) -> list[Sequence]:
        """After a step did not run: ends all running sequences and forgets all cells.

        Nobody can tell which cells were written, so none is kept. Returns who ended ("error").
        """
        self._end_step()
        ended = list(self.running)
        for sequence in ended:
            self.finish(sequence, "error")
        self.tree.clear()
        return ended

    def append(self, sequence: Sequence, token: int) -> None:
        """A sampled token; ends the sequence with "length" where no more may follow."""
        if sequence.status is not Status.RUNNING:
            return  # aborted while the step ran
        sequence.tokens.append(token)
        full = len(sequence.tokens) >= self.config.sequence_limit
        if full or len(sequence.tokens) - sequence.n_prompt >= sequence.max_tokens:
            self.finish(sequence, "length")

    def _in_turn(self, step: _Step) -> list[Sequence]:
        """Running sequences without a chunk: those in prefill, in turn.

        In turn: the oldest of each flow, the flow served longest ago first; then the second oldest
        of each flow, and so on.
        """
        turns: list[tuple[int, int, int, Sequence]] = []
        n_of_flow: dict[Hashable, int] = {}
        for one in self.running:
            if one not in step.busy:
                place = n_of_flow[one.flow] = n_of_flow.get(one.flow, 0) + 1
                turns.append((place, self._prefill_turn.get(one.flow, 0), one.rank, one))
        self._prefill_turn = {flow: self._prefill_turn.get(flow, 0) for flow in n_of_flow}
        return [one for _, _, _, one in sorted(turns, key=lambda entry: entry[:3])]

    def _advance(self, step: _Step, sequence: Sequence, n_at_most: int) -> None:
        """Walks along what the tree holds by now, then schedules a chunk."""
        self._match(sequence)
        if self._extend(step, sequence, min(sequence.n_pending, n_at_most)):
            self._turn += 1
            self._prefill_turn[sequence.flow] = self._turn

    def _match(self, sequence: Sequence) -> None:
        start, end = sequence.n_computed, sequence.n_reusable
        if start >= end or sequence.node is None:
            return
        parts = sequence.key_parts(start, end)
        sequence.node, n = self.tree.advance(sequence.node, sequence.tokens, parts)
        if n:
            sequence.n_computed += n
            sequence.n_hit += n if sequence.n_preempted == 0 else 0
            self.blocks.leave(sequence.cursor)

    def _extend(self, step: _Step, sequence: Sequence, n: int) -> bool:
        """Schedules the next `n` tokens, or as many as cells can be found for; False for none."""
        n = self._make_room(step, sequence, n)
        node = sequence.node
        if n == 0 or node is None:
            return False
        start = sequence.n_computed
        key = sequence.key_at(start)
        duplicate = self.tree.has_edge(node, key, sequence.tokens[start])
        if duplicate:
            n, runs = self._adopt(sequence, n)
        else:
            if sequence.cursor.next < 0 and node.runs and not node.children:
                last_start, last_length = node.runs[-1]
                self.blocks.resume(sequence.cursor, last_start + last_length - 1)
            runs = self.blocks.take(sequence.cursor, n)
            self._insert(sequence, start, start + n, runs)
        end = start + n
        step.budget -= n
        step.busy.add(sequence)
        sequence.n_computed = end
        assert sequence.node is not None
        tokens = sequence.tokens[start:end]
        n_outputs = sequence.n_outputs(start, end)
        step.chunks.append(
            Chunk(sequence, start, end, tokens, runs, sequence.node, duplicate, n_outputs)
        )
        return True

    def _adopt(self, sequence: Sequence, n: int) -> tuple[int, list[Run]]:
        """The tree has the next tokens, but their logits are wanted: moves on along its cells.

        They are computed again, in cells of their own for this step. Returns how many, and those.
        """
        assert sequence.node is not None
        parts = sequence.key_parts(sequence.n_computed, sequence.n_computed + n)
        sequence.node, n = self.tree.advance(sequence.node, sequence.tokens, parts, hit=False)
        self.tree.stats.n_duplicate += n
        self.blocks.leave(sequence.cursor)
        runs = self.blocks.take_holes(n)
        self._private.extend(runs)
        return n, runs

    def _insert(self, sequence: Sequence, start: int, end: int, runs: list[Run]) -> None:
        """Adds tokens [start, end) to the tree, a node a segment."""
        node = sequence.node
        assert node is not None
        for key, part_start, part_end in sequence.key_parts(start, end):
            head, runs = (runs, []) if part_end == end else split_runs(runs, part_end - part_start)
            node = self.tree.insert(node, key, sequence.tokens[part_start:part_end], head)
        sequence.node = node

    def _make_room(self, step: _Step, sequence: Sequence, n: int) -> int:
        """Evicts, then preempts, until cells for `n` tokens (or some) are free; how many."""
        blocks = self.blocks
        while True:
            missing = n - blocks.room(sequence.cursor)
            if missing > blocks.n_free_whole:
                self.tree.evict(missing)
            if blocks.n_free >= n:
                return n
            if blocks.n_free > 0:
                return blocks.n_free  # a shorter chunk now, the rest later
            victim = self._victim(step, sequence)
            if victim is not None:
                self._preempt(step, victim)
                continue
            if self._private:
                return 0  # the next step has those cells
            assert not self._is_protected(sequence), "a protected sequence lacks cells"
            self._preempt(step, sequence)
            return 0

    def _victim(self, step: _Step, sequence: Sequence) -> Sequence | None:
        """The newest running one that is unprotected, has no chunk and is behind `sequence`."""
        first = self._is_protected(sequence)
        for one in reversed(self.running):
            if one is sequence and not first:
                return None
            if one is not sequence and one not in step.busy and not self._is_protected(one):
                return one
        return None

    def _admit(self, step: _Step, ready: Ready) -> None:
        """Waiting sequences, one a flow in turn, while there are seats and cells."""
        turns = deque(self._flows)
        while turns and len(self.running) < self.config.max_sequences:
            flow = turns.popleft()
            sequence = self._flows[flow][0]
            if not ready(sequence):
                continue
            if not self._has_room_for(sequence):
                return
            self._leave_queue(sequence)
            if flow in self._flows:  # served: behind the others
                self._flows[flow] = self._flows.pop(flow)
                turns.append(flow)
            self._start(sequence)
            step.admitted.append(sequence)

    def _has_room_for(self, sequence: Sequence) -> bool:
        """Whether its known tokens fit beside what runs; if protected, all it may ever need."""
        if not self.running:
            return True
        n_cells = self.config.n_cells
        if self._is_protected(sequence):
            reserved = sum(self._most_cells(one) for one in self.running if self._is_protected(one))
            if reserved + self._most_cells(sequence) > n_cells:
                return False
        pending = sum(one.n_pending for one in self.running)
        n_private = sum(length for _, length in self._private)
        free = n_cells - self.tree.stats.n_in_use - n_private - pending
        wanted = len(sequence.tokens) + min(sequence.max_tokens, self.config.block_size)
        if wanted <= free:
            return True
        parts = sequence.key_parts(0, sequence.n_reusable)
        return wanted - self.tree.n_found(sequence.tokens, parts, in_use=True) <= free

    def _most_cells(self, sequence: Sequence) -> int:
        return min(sequence.n_prompt + sequence.max_tokens, self.config.sequence_limit)

    def _is_protected(self, sequence: Sequence) -> bool:
        return sequence.n_preempted >= self.config.max_preemptions

    def _start(self, sequence: Sequence) -> None:
        self.n_admissions += 1
        self._turn += 1
        if sequence.rank < 0:
            sequence.rank = self._turn
        self._prefill_turn.setdefault(sequence.flow, self._turn)  # behind the flows that run
        sequence.status = Status.RUNNING
        sequence.node = self.tree.root
        insort(self.running, sequence, key=lambda one: one.rank)
        self._match(sequence)  # at once, so that nobody evicts what it is going to use

    def _preempt(self, step: _Step, sequence: Sequence) -> None:
        """Back to the head of its flow; its cells stay in the tree until they are evicted."""
        self._stop_running(sequence)
        sequence.status = Status.WAITING
        sequence.n_preempted += 1
        self.n_preemptions += 1
        self._n_waiting += 1
        step.preempted.append(sequence)
        self._flows.setdefault(sequence.flow, deque()).appendleft(sequence)

    def _stop_running(self, sequence: Sequence) -> None:
        assert sequence.node is not None
        self.running.remove(sequence)
        self.blocks.leave(sequence.cursor)
        self.tree.release(sequence.node)
        sequence.node = None
        sequence.n_computed = 0

    def _leave_queue(self, sequence: Sequence) -> None:
        flow = self._flows[sequence.flow]
        flow.remove(sequence)
        self._n_waiting -= 1
        if not flow:
            del self._flows[sequence.flow]

    def _end_step(self) -> None:
        self._in_step = False
        self.blocks.free(self._private)
        self._private = []
