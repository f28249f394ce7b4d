"""The scheduler with a runner whose cells name what they were computed from."""

from __future__ import annotations

import pytest

from loragraph.engine.plan import SchedulerConfig
from loragraph.engine.prefix_tree import PrefixTree
from loragraph.engine.scheduler import Scheduler
from loragraph.engine.sequence import Sequence, Status
from loragraph.errors import CapacityError, ConfigError, ContextLengthError
from tests.engine.fakes import FakeRunner, contents_of, next_token, sequence_of


def runner_of(n_cells: int = 256, **options: int) -> FakeRunner:
    """A runner over a new scheduler."""
    return FakeRunner(Scheduler(SchedulerConfig(n_cells, **options)))


def alone(sequence: Sequence) -> list[int]:
    """The tokens that the sequence generates alone in an endless cache."""
    twin = sequence_of(sequence.tokens[: sequence.n_prompt], salt=sequence.salt)
    twin.segments = sequence.segments
    twin.__post_init__()
    for _ in range(sequence.max_tokens):
        twin.tokens.append(next_token(contents_of(twin)[-1]))
    return twin.tokens


def test_generates_as_alone() -> None:
    """A sequence runs to max_tokens and ends with "length", with the tokens of a cold start."""
    runner = runner_of()
    one = sequence_of([1, 2, 3], max_tokens=5)
    runner.scheduler.add(one)
    assert runner.finish_all() == 5
    assert (one.status, one.finish_reason) == (Status.FINISHED, "length")
    assert one.tokens == alone(one)


@pytest.mark.parametrize("cancel", [False, True])
def test_equal_prompts_compute_once(cancel: bool) -> None:
    """32 equal prompts at once compute the prompt once, also when the first to compute ends."""
    runner = runner_of(4096, max_batch_tokens=64)
    scheduler = runner.scheduler
    prompt = list(range(100, 300))
    all_ = [sequence_of(prompt, max_tokens=2) for _ in range(32)]
    scheduler.add(*all_)
    runner.step()
    if cancel:
        scheduler.finish(all_[0], "abort")
    runner.step()
    if cancel:
        scheduler.finish(all_[1], "abort")
    runner.finish_all()
    left = all_[2:] if cancel else all_
    assert all(one.tokens == alone(one) for one in left)
    assert scheduler.stats.n_computed_tokens == 201
    # The prompt's last token for each but one, and the token generated after it.
    assert scheduler.stats.n_duplicate_tokens == 2 * (len(left) - 1)


def test_second_turn_hits_the_answer() -> None:
    """A chat's second turn finds its first turn and the answer to it, all but the last token."""
    runner = runner_of()
    first = sequence_of([5, 6, 7], max_tokens=40)
    runner.scheduler.add(first)
    runner.finish_all()
    second = sequence_of([*first.tokens, 8, 9])
    runner.scheduler.add(second)
    runner.finish_all()
    assert second.n_hit == len(first.tokens) - 1
    assert second.tokens == alone(second)


def test_choices_share_the_prompt() -> None:
    """n choices of a request compute the prompt once and diverge in cells of their own."""
    runner = runner_of()
    choices = [sequence_of(list(range(50)), max_tokens=3) for _ in range(4)]
    runner.scheduler.add(*choices)
    plan = runner.scheduler.schedule()
    runner.run(plan)
    runner.scheduler.complete(plan)
    for i, one in enumerate(choices):
        runner.scheduler.append(one, 1000 + i)
    plan = runner.step()
    assert [chunk.start for chunk in plan.chunks] == [50] * 4
    assert runner.scheduler.stats.n_cells_shared == 50
    assert runner.scheduler.stats.n_computed_tokens == 54


def test_mixes_and_salts_share_nothing() -> None:
    """Equal prompts under another mix, scale or salt find no cell of each other."""
    runner = runner_of(1024)
    prompt = list(range(40))
    variants = [
        sequence_of(prompt, (0, "")),
        sequence_of(prompt, (0, "a")),
        sequence_of(prompt, (0, "b")),
        sequence_of(prompt, (0, "ab")),
        sequence_of(prompt, (0, "a"), salt="tenant"),
    ]
    for one in variants:
        runner.scheduler.add(one)
        runner.finish_all()
    assert [one.n_hit for one in variants] == [0] * 5
    again = sequence_of(prompt, (0, "a"), salt="tenant")
    runner.scheduler.add(again)
    runner.finish_all()
    assert again.n_hit == 39


def test_tokens_before_an_invocation_are_the_base_ones() -> None:
    """An aLoRA's history is the base's by key: only tokens from the invocation on are computed."""
    runner = runner_of(1024)
    prompt = list(range(40))
    base, activated = sequence_of(prompt), sequence_of(prompt, (0, ""), (30, "a"))
    for one in (base, activated):
        runner.scheduler.add(one)
        runner.finish_all()
    assert activated.n_hit == 30
    assert activated.tokens == alone(activated)


@pytest.mark.parametrize(("n_prompt", "max_tokens"), [(1, 1), (1, 3), (15, 1), (15, 9), (16, 0)])
def test_fills_all_cells(n_prompt: int, max_tokens: int) -> None:
    """A lone sequence may fill all 16 cells, and ends with "length" when it does."""
    runner = runner_of(16, block_size=4)
    for _ in range(2):  # the second time everything is in the tree
        one = sequence_of(list(range(n_prompt)), max_tokens=max_tokens)
        runner.scheduler.add(one)
        runner.finish_all()
        assert one.finish_reason == "length"
        assert one.n_generated == min(max_tokens, 16 - n_prompt)
    assert one.n_hit == n_prompt - 1


def test_a_prompt_that_can_never_fit_is_refused() -> None:
    """ContextLengthError for a prompt that leaves no place for a token, or that is empty."""
    scheduler = runner_of(16).scheduler
    for tokens in (list(range(16)), []):
        with pytest.raises(ContextLengthError, match="expected a prompt of 1 to 15 tokens"):
            scheduler.add(sequence_of([1]), sequence_of(tokens))
    assert scheduler.n_waiting == 0


def test_too_many_waiting() -> None:
    """CapacityError once max_waiting sequences wait; those asked for together are all refused."""
    scheduler = runner_of(16, max_waiting=2).scheduler
    scheduler.add(sequence_of([1]))
    with pytest.raises(CapacityError, match="at most 2"):
        scheduler.add(sequence_of([1]), sequence_of([1]))
    assert scheduler.n_waiting == 1


def test_config_is_checked() -> None:
    """A step that cannot hold a token of every running sequence is refused."""
    with pytest.raises(ConfigError, match=r"max_batch_tokens: expected at least 32, got 8"):
        SchedulerConfig(64, max_batch_tokens=8)
    with pytest.raises(ConfigError, match=r"max_sequence_tokens: expected at least 1"):
        SchedulerConfig(64, max_sequence_tokens=0)


def test_max_tokens_zero_computes_the_prompt() -> None:
    """With max_tokens 0 the prompt is computed, without logits, and the sequence ends."""
    runner = runner_of()
    one = sequence_of([1, 2, 3], max_tokens=0)
    runner.scheduler.add(one)
    plan = runner.step()
    assert [chunk.n_outputs for chunk in plan.chunks] == [0]
    assert (one.finish_reason, one.n_generated) == ("length", 0)


def test_scored_tokens_are_computed_whatever_the_tree_has() -> None:
    """A scoring sequence gets the logits of every token from logits_from on, exactly once."""
    runner = runner_of(256, max_batch_tokens=32)
    prompt = list(range(90))
    for _ in range(2):
        one = sequence_of(prompt, max_tokens=0, logits_from=10)
        runner.scheduler.add(one)
        scored: list[int] = []
        while one.status is not Status.FINISHED:
            for chunk in runner.step().chunks:
                scored.extend(range(chunk.end - chunk.n_outputs, chunk.end))
        assert scored == list(range(10, 90))
    assert one.n_hit == 10
    assert runner.scheduler.blocks.n_used == 90


def test_failed_step_ends_what_runs_and_forgets_the_cells() -> None:
    """After a step that did not run, no cell of it can be found, and what waits goes on."""
    runner = runner_of(max_sequences=1)
    first, second = sequence_of([1, 2, 3]), sequence_of([1, 2, 3])
    runner.scheduler.add(first, second)
    runner.scheduler.schedule()
    assert runner.scheduler.fail() == [first]
    assert runner.scheduler.blocks.n_used == 0
    runner.finish_all()
    assert (first.finish_reason, second.n_hit) == ("error", 0)
    assert second.tokens == alone(second)


def test_tokens_of_an_aborted_sequence_are_dropped() -> None:
    """A token sampled for a sequence that was aborted while the step ran changes nothing."""
    runner = runner_of()
    one = sequence_of([1, 2])
    runner.scheduler.add(one)
    plan = runner.scheduler.schedule()
    runner.scheduler.finish(one, "abort")
    runner.scheduler.complete(plan)
    runner.scheduler.append(one, 5)
    assert one.tokens == [1, 2]
    assert runner.scheduler.stats.n_cells_in_use == 0


def test_a_flood_of_one_adapter_delays_another_by_one_admission() -> None:
    """With F flows waiting, a flow's first is admitted after at most F - 1 others."""
    runner = runner_of(512, max_sequences=2)
    flood = [sequence_of([1, i], (0, "a"), max_tokens=3) for i in range(40)]
    runner.scheduler.add(*flood)
    runner.step()
    others = [sequence_of([2, i], (0, name), max_tokens=3) for i, name in enumerate("bcd")]
    runner.scheduler.add(*others)
    order: list[Sequence] = []
    while len(order) < 8:
        order.extend(runner.step().admitted)
    assert [one for one in order[:4] if one in others] == others  # F - 1 = 3 before the last
    runner.finish_all()


def test_scales_do_not_make_another_flow() -> None:
    """A flood that varies an adapter's scale is one flow, and so is a mix behind a base history."""
    assert sequence_of([1], (0, "a")).flow == sequence_of([1, 2], (0, ""), (1, "a")).flow
    assert sequence_of([1], (0, "ab")).flow != sequence_of([1], (0, "a")).flow


def test_unready_adapters_block_nobody() -> None:
    """A flow whose adapters are not resident is passed over and is next once they are."""
    runner = runner_of(max_sequences=1)
    unready = sequence_of([1], (0, "a"))
    rest = [sequence_of([i], (0, name), max_tokens=1) for i, name in enumerate("bbc")]
    runner.scheduler.add(unready, *rest)
    order: list[Sequence] = []
    for _ in range(2):
        order.extend(runner.step(ready=lambda one: one is not unready).admitted)
    order.extend(runner.step().admitted)
    assert order == [rest[0], rest[2], unready]


def test_prefill_budget_goes_round_the_flows() -> None:
    """With P flows in prefill, a flow waits for at most P - 1 chunks of others."""
    runner = runner_of(4096, max_batch_tokens=64, max_sequences=16)
    long = [sequence_of([i, *range(600)], (0, "aaabc"[i]), max_tokens=1) for i in range(5)]
    runner.scheduler.add(*long)
    for _ in range(3):
        runner.step()
    short = sequence_of(list(range(20)), (0, "d"), max_tokens=1)
    runner.scheduler.add(short)
    chunks: list[Sequence] = []
    while short not in chunks:
        chunks += [chunk.sequence for chunk in runner.step().chunks]
    assert chunks.index(short) <= 3
    flows = [chunk.sequence.flow for _ in range(6) for chunk in runner.step().chunks]
    assert {flows.count((name,)) for name in "abc"} == {2}


def test_new_flows_do_not_overtake_a_long_prompt() -> None:
    """A flow that comes while another is in prefill goes behind it, however many come."""
    runner = runner_of(4096, max_batch_tokens=64, max_sequences=32)
    long = sequence_of(list(range(600)), (0, "a"), max_tokens=1)
    runner.scheduler.add(long)
    turns: list[int] = []
    for n in range(20):
        runner.scheduler.add(sequence_of([n] * 64, (0, chr(ord("b") + n)), max_tokens=1))
        if any(chunk.sequence is long for chunk in runner.step().chunks):
            turns.append(n)
    # Each time that it is served, those that came meanwhile have one chunk each before the next.
    assert turns == [0, 2, 5, 9, 14]


def test_equal_prompts_count_their_cells_once() -> None:
    """What others use already is no reason to wait: ten equal prompts run in cells for two."""
    runner = runner_of(128, block_size=4, max_sequences=16)
    runner.scheduler.add(*[sequence_of(list(range(60)), max_tokens=3) for _ in range(10)])
    runner.step()
    runner.step()
    assert len(runner.scheduler.running) == 10


def test_a_prompt_takes_the_cells_that_are_left() -> None:
    """Where fewer cells are free than a chunk wants, it is shorter; with none, the newest waits."""
    runner = runner_of(64, block_size=4, max_sequences=2, max_batch_tokens=4)
    old = sequence_of(list(range(14)), max_tokens=49)
    new = sequence_of(list(range(50, 90)), (0, "a"), max_tokens=5)
    runner.scheduler.add(old)
    while not old.n_generated:
        runner.step()
    runner.scheduler.add(new)
    lengths: list[int] = []
    while not new.n_preempted:
        lengths += [c.n_tokens for c in runner.step().chunks if c.sequence is new]
    assert lengths[:-1] == [3] * 12
    assert lengths[-1] < 3
    runner.finish_all()
    assert [old.tokens, new.tokens] == [alone(old), alone(new)]


def test_a_long_request_ends_under_a_flood() -> None:
    """While others arrive in every step and cells are short, a long request ends all the same."""
    runner = runner_of(64, block_size=4, max_sequences=6, max_batch_tokens=16, max_preemptions=2)
    long = sequence_of([9, 9], (0, "b"), max_tokens=60)
    runner.scheduler.add(long)
    n = 0
    while long.status is not Status.FINISHED:
        if runner.scheduler.n_waiting < 20:
            runner.scheduler.add(sequence_of([n, n, n, n, n], (0, "a"), max_tokens=20))
        n += 1
        assert n < 500
        runner.step()
    assert long.tokens == alone(long)


def test_a_prompt_as_long_as_all_cells_is_not_overtaken_for_ever() -> None:
    """The next in turn that lacks cells holds back later ones until it has them."""
    runner = runner_of(64, block_size=4, max_sequences=4)
    runner.scheduler.add(*[sequence_of([i], (0, "a"), max_tokens=9) for i in range(3)])
    runner.step()
    big = sequence_of(list(range(63)), (0, "b"), max_tokens=1)
    small = [sequence_of([50 + i], (0, "c"), max_tokens=1) for i in range(3)]
    runner.scheduler.add(big, *small)
    order: list[Sequence] = []
    while len(order) < 4:
        order += runner.step().admitted
    assert order[0] is big


def test_a_step_does_not_walk_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step costs does not grow with what the tree holds."""
    monkeypatch.setattr(PrefixTree, "nodes", lambda self: pytest.fail("walks the tree"))
    runner = runner_of(64, block_size=4, max_sequences=4)
    runner.scheduler.add(*[sequence_of([i, i], max_tokens=20) for i in range(9)])
    runner.finish_all()
    assert runner.scheduler.stats.n_evicted_tokens > 0


def test_stats_name_hits_cells_and_fragmentation() -> None:
    """The counts of a second sequence over the first one's prompt."""
    runner = runner_of(64, block_size=8)
    runner.scheduler.add(sequence_of(list(range(20)), max_tokens=1))
    runner.finish_all()
    runner.scheduler.add(sequence_of([*range(12), 77, 78], max_tokens=9))
    runner.step()
    stats = runner.scheduler.stats
    assert (stats.n_hit_tokens, stats.n_computed_tokens, stats.n_evicted_tokens) == (12, 22, 0)
    assert (stats.n_cells_used, stats.n_cells_in_use, stats.n_cells_shared) == (22, 14, 0)
    assert (stats.n_waiting, stats.n_running, stats.n_admissions) == (0, 1, 2)
    assert stats.fragmentation == 1 - 22 / 32


@pytest.mark.parametrize("max_preemptions", [0, 1, 8])
def test_preempted_is_undisturbed(max_preemptions: int) -> None:
    """Sequences that do not fit together preempt each other a bounded number of times and end."""
    runner = runner_of(
        64, block_size=4, max_sequences=8, max_batch_tokens=16, max_preemptions=max_preemptions
    )
    many = [sequence_of([i, i + 1, 7], (0, "ab"[i % 2]), max_tokens=40) for i in range(8)]
    runner.scheduler.add(*many)
    runner.finish_all()
    assert all(one.tokens == alone(one) for one in many)
    assert max(one.n_preempted for one in many) <= max_preemptions
    assert runner.scheduler.stats.n_cells_in_use == 0
    if max_preemptions:
        assert runner.scheduler.stats.n_preemptions > 0
