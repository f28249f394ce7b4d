"""The whole engine but for thread and model: equalities, sharing, ends of every kind."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from loragraph.engine.params import SamplingParams
from loragraph.engine.pool import State
from loragraph.engine.request import Event
from loragraph.errors import (
    AdapterChangedError,
    BackendError,
    CapacityError,
    ContextLengthError,
    DeadlineError,
    GGUFError,
    ModelNotFoundError,
    OverloadedError,
)
from tests.engine.fake_engine import FakeEngine, NamedAdapter

PROMPT = list(range(40, 70))
X, Y = 7, 8

Case = tuple[list[int], dict[str, float]]
CASES: list[Case] = [
    (PROMPT, {}),
    (PROMPT, {"a": 1.0}),
    (PROMPT, {"a": 0.5}),
    (PROMPT, {"a": -1.0}),
    (PROMPT, {"b": 1.0}),
    (PROMPT, {"a": 1.0, "b": 0.25}),
    (PROMPT[:7], {"b": 1.0}),
    ([*PROMPT, 1, 2, 3], {"a": 1.0}),
]


def engine_with(*names: str, **options: int) -> FakeEngine:
    """An engine with adapters of these names and contents."""
    engine = FakeEngine(**options)
    for name in names:
        engine.register(name)
    return engine


def cold(case: Case, **fields: int) -> str:
    """The text of a request that nothing came before."""
    return engine_with("a", "b").generate(*case, **fields).text


def test_a_mixed_batch_equals_each_alone() -> None:
    """Requests with unlike mixes in one batch give the texts that each gives alone."""
    engine = engine_with("a", "b")
    pending = [engine.submit(*case) for case in CASES]
    engine.finish()
    assert [one.result.text for one in pending] == [cold(case) for case in CASES]
    engine.check_idle()


def test_one_adapter_for_all_equals_each_alone() -> None:
    """The same adapter on many prompts gives the texts that each gives alone."""
    engine = engine_with("a", "b")
    cases: list[Case] = [(PROMPT[:n], {"a": 1.0}) for n in range(5, 25, 3)]
    pending = [engine.submit(*case) for case in cases]
    engine.finish()
    assert [one.result.text for one in pending] == [cold(case) for case in cases]


@pytest.mark.parametrize("first", CASES, ids=repr)
def test_whatever_came_before_changes_nothing(first: Case) -> None:
    """After any request, every other one gives what a cold start gives."""
    engine = engine_with("a", "b")
    engine.generate(*first)
    for case in CASES:
        assert engine.generate(*case).text == cold(case)


def test_a_prefix_hit_equals_a_miss() -> None:
    """The second time the prompt is found but for its last token, and the text is the same."""
    engine = engine_with("a")
    first, second = (engine.generate(PROMPT, {"a": 1.0}) for _ in range(2))
    assert (first.n_cached, second.n_cached) == (0, len(PROMPT) - 1)
    assert first.text == second.text


def test_another_scale_is_another_prefix() -> None:
    """At half the scale nothing of the full scale's cells is used."""
    engine = engine_with("a")
    engine.generate(PROMPT, {"a": 1.0})
    assert engine.generate(PROMPT, {"a": 0.5}).n_cached == 0


def test_equal_contents_under_two_names_share() -> None:
    """Two names for one content share their cells, and scales of both add up."""
    engine = FakeEngine()
    engine.register("a", "same")
    engine.register("b", "same")
    one = engine.generate(PROMPT, {"a": 1.0})
    two = engine.generate(PROMPT, {"b": 1.0})
    both = engine.generate(PROMPT, {"a": 0.5, "b": 0.5})
    assert one.text == two.text == both.text
    assert two.n_cached == both.n_cached == len(PROMPT) - 1


def test_32_equal_prompts_compute_the_prompt_once() -> None:
    """All but the last prompt token are computed by one of them."""
    engine = engine_with("a", max_sequences=32, max_batch_tokens=128)
    pending = [engine.submit(PROMPT, {"a": 1.0}, max_tokens=1) for _ in range(32)]
    engine.finish()
    assert engine.runner.n_rows == len(PROMPT) - 1 + 32
    assert len({one.result.text for one in pending}) == 1


def test_the_one_that_computes_is_cancelled() -> None:
    """Another takes the prompt over, and all get the same text."""
    engine = engine_with("a", max_batch_tokens=8)
    pending = [engine.submit(PROMPT, {"a": 1.0}) for _ in range(4)]
    engine.step()
    engine.step()
    engine.core.abort(pending[0].job)
    engine.finish()
    assert pending[0].result.finish_reason == "abort"
    assert {one.result.text for one in pending[1:]} == {cold((PROMPT, {"a": 1.0}))}
    engine.check_idle()


def test_a_second_turn_hits_the_first_answer() -> None:
    """Prompt and answer of a turn, but for the answer's last token, are found by the next."""
    engine = engine_with("a")
    first = engine.generate(PROMPT, {"a": 1.0}, max_tokens=8)
    turn = [*PROMPT, *first.tokens, 1, 2, 3]
    assert engine.generate(turn, {"a": 1.0}).n_cached == len(PROMPT) + 7


def test_choices_share_their_prompt() -> None:
    """n choices compute the prompt once."""
    engine = engine_with()
    result = engine.generate(PROMPT, n=4, max_tokens=1)
    assert [one.index for one in result.choices] == [0, 1, 2, 3]
    assert engine.runner.n_rows == len(PROMPT) - 1 + 4


def test_salts_do_not_share() -> None:
    """Requests with unlike salts use no cells of each other."""
    engine = engine_with()
    engine.generate(PROMPT, salt="one")
    assert engine.generate(PROMPT, salt="two").n_cached == 0
    assert engine.generate(PROMPT, salt="one").n_cached == len(PROMPT) - 1


def test_preempted_equals_undisturbed() -> None:
    """With too few cells sequences are put back and resumed, and the texts stay the same."""
    engine = engine_with("a", "b", n_cells=160, block_size=8)
    engine.register("alora", invocation=[X, Y])
    cases: list[Case] = [
        (PROMPT[i:] + list(range(100, 100 + i)), mix)
        for i, mix in enumerate([{}, {"a": 1.0}, {"b": 1.0}, {"a": 1.0, "b": 0.5}])
    ]
    cases.append(([*PROMPT, X, Y, 3], {"alora": 1.0}))
    pending = [engine.submit(*case, max_tokens=40) for case in cases]
    engine.finish()
    assert engine.core.scheduler.n_preemptions > 0

    def alone(case: Case) -> str:
        fresh = engine_with("a", "b")
        fresh.register("alora", invocation=[X, Y])
        return fresh.generate(*case, max_tokens=40).text

    assert [one.result.text for one in pending] == [alone(case) for case in cases]
    engine.check_idle()


# -- generations ----------------------------------------------------------------------------------


def test_new_bytes_under_the_same_name_are_a_cold_start() -> None:
    """After a name is registered with other content, nothing of the old one is used."""
    engine = engine_with("a")
    old = engine.generate(PROMPT, {"a": 1.0})
    engine.register("a", "other")
    new = engine.generate(PROMPT, {"a": 1.0})
    fresh = FakeEngine()
    fresh.register("a", "other")
    assert new.n_cached == 0
    assert new.text == fresh.generate(PROMPT, {"a": 1.0}).text != old.text
    assert new.adapters[0].generation > old.adapters[0].generation
    engine.check_idle()


def test_a_swap_under_load_changes_only_what_comes_later() -> None:
    """Running and waiting requests keep their generation; later ones get the new one."""
    engine = engine_with("a", max_sequences=2)
    before = [engine.submit(PROMPT, {"a": 1.0}) for _ in range(4)]
    engine.step()
    engine.register("a", "other")
    after = engine.submit(PROMPT, {"a": 1.0})
    engine.finish()
    assert {one.result.adapters[0].digest for one in before} == {"a"}
    assert {one.result.text for one in before} == {cold((PROMPT, {"a": 1.0}))}
    assert after.result.adapters[0].digest == "other"
    engine.check_idle()
    assert engine.core.residency.pool.stats.n_resident == 1


def test_an_unloaded_name_is_unknown_at_once_and_its_memory_goes_with_the_last_user() -> None:
    """The running request ends well; then nothing of the adapter is left."""
    engine = engine_with("a", "b")
    running = engine.submit(PROMPT, {"a": 1.0})
    engine.step()
    engine.core.retire(engine.registry.unload("a"))
    with pytest.raises(ModelNotFoundError, match="known: b"):
        engine.registry.resolve("a")
    engine.finish()
    assert running.result.text == cold((PROMPT, {"a": 1.0}))
    engine.check_idle()
    assert engine.core.residency.pool.stats.n_resident == 0


def test_a_file_overwritten_before_a_reload_never_serves_the_old_generation() -> None:
    """Whoever holds the old generation gets an error; the next request gets a new generation."""
    engine = engine_with("a", "b", n_slots=1)
    old = engine.registry.resolve("a")
    engine.generate(PROMPT, {"a": 1.0})
    engine.generate(PROMPT, {"b": 1.0})  # a leaves
    assert old.path is not None
    engine.files[old.path.name] = NamedAdapter("overwritten")
    held = engine.submit(PROMPT, {"a": 1.0})
    engine.finish()
    assert isinstance(held.error, AdapterChangedError)
    result = engine.generate(PROMPT, {"a": 1.0})
    assert result.adapters[0].digest == "overwritten"
    assert result.adapters[0].generation > old.number
    engine.check_idle()


def test_an_evicted_and_reloaded_adapter_gives_the_same() -> None:
    """Its content is the same, so are its text and its cells."""
    engine = engine_with("a", "b", n_slots=1)
    first = engine.generate(PROMPT, {"a": 1.0})
    engine.generate(PROMPT, {"b": 1.0})
    assert engine.core.residency.state(engine.registry.resolve("a")) is State.ABSENT
    again = engine.generate(PROMPT, {"a": 1.0})
    assert again.text == first.text
    assert again.n_cached == len(PROMPT) - 1
    assert engine.core.residency.pool.stats.n_loads == 3


# -- loads ----------------------------------------------------------------------------------------


def test_others_go_on_while_an_adapter_loads() -> None:
    """A request for an adapter on its way holds nobody up."""
    engine = engine_with("a", "b")
    waits = engine.submit(PROMPT, {"a": 1.0})
    base = engine.submit(PROMPT)
    for _ in range(30):
        engine.core.step()
    assert base.result.finish_reason == "length"
    assert not waits.ended
    engine.finish()
    assert waits.result.text == cold((PROMPT, {"a": 1.0}))


@pytest.mark.parametrize("cold_ones", [("slow",) * 4, ("slow", "b", "c", "d")])
def test_as_many_loads_as_seats_hold_nobody_up(cold_ones: tuple[str, ...]) -> None:
    """Requests that waited for files took all seats: nobody else was served until they came."""
    engine = engine_with("a", "b", "c", "d", "slow", max_sequences=4, n_slots=8)
    warm = engine.generate(PROMPT, {"a": 1.0}).text
    waits = [engine.submit(PROMPT, {name: 1.0}) for name in (*cold_ones, *cold_ones)]
    base, resident = engine.submit(PROMPT), engine.submit(PROMPT, {"a": 1.0})
    for _ in range(30):
        engine.core.step()
    assert base.result.text == cold((PROMPT, {}))
    assert resident.result.text == warm
    assert engine.core.count().n_jobs_loading == 4
    assert not any(one.ended for one in waits)
    engine.finish()
    assert all(one.result.finish_reason == "length" for one in waits)
    engine.check_idle()


def test_a_damaged_file_harms_only_its_own_requests() -> None:
    """They get the load's error, at once while it is remembered, and another try later."""
    engine = engine_with("a", "bad")
    path = engine.registry.resolve("bad").path
    assert path is not None
    good, engine.files[path.name] = engine.files[path.name], GGUFError("damaged")
    other = engine.submit(PROMPT, {"a": 1.0})
    first, both = engine.submit(PROMPT, {"bad": 1.0}), engine.submit(PROMPT, {"a": 1, "bad": 1})
    engine.finish()
    assert isinstance(first.error, GGUFError)
    assert isinstance(both.error, GGUFError)
    assert other.result.text == cold((PROMPT, {"a": 1.0}))
    again = engine.submit(PROMPT, {"bad": 1.0})
    engine.core.step()
    assert isinstance(again.error, GGUFError)
    assert not engine.loading
    engine.now += 100
    engine.files[path.name] = good
    assert engine.generate(PROMPT, {"bad": 1.0}).finish_reason == "length"
    engine.check_idle()


def test_a_mix_larger_than_the_pool_is_refused() -> None:
    """At submission, not after a wait."""
    engine = engine_with("a", "b", "c", n_slots=2)
    refused = engine.submit(PROMPT, {"a": 1.0, "b": 1.0, "c": 1.0})
    assert isinstance(refused.error, CapacityError)


def test_a_flood_of_one_adapter_cannot_starve_another() -> None:
    """With one slot, a request for another adapter is overtaken a bounded number of times."""
    engine = engine_with("a", "b", n_slots=1, max_sequences=2)
    flood = [engine.submit([i, *PROMPT], {"a": 1.0}, max_tokens=2) for i in range(60)]
    engine.step()
    other = engine.submit(PROMPT, {"b": 1.0}, max_tokens=2)
    while not other.ended:
        engine.step()
    # those in the two seats, one in its turn, and those that overtake
    assert sum(one.ended for one in flood) <= 2 + 1 + engine.core.waiting.max_overtaken
    engine.finish()
    engine.check_idle()


def test_flows_take_turns() -> None:
    """With F flows waiting, a new one's first request comes after at most F - 1 of the others."""
    engine = engine_with("a", "b", "c", max_sequences=1)
    flood = [
        engine.submit([i, *PROMPT], mix, max_tokens=1)
        for i in range(20)
        for mix in ({}, {"a": 1.0}, {"b": 1.0})
    ]
    for _ in range(6):
        engine.step()
    n_before = sum(one.ended for one in flood)
    new = engine.submit(PROMPT, {"c": 1.0}, max_tokens=1)
    while not new.ended:
        engine.step()
    n_seats_and_loads = 2  # one may run already, and others go on while c loads
    assert sum(one.ended for one in flood) - n_before <= 3 + n_seats_and_loads


def test_a_thousand_adapters_run_over_sixteen_slots() -> None:
    """No request is lost, no budget is passed, and nobody waits for ever."""
    engine = FakeEngine(n_slots=16, max_sequences=8)
    names = [f"n{i}" for i in range(1000)]
    for name in names:
        engine.register(name)
    rng = np.random.default_rng(0)
    pending = [
        engine.submit([1, 2, 3], {names[rng.integers(1000)]: 1.0}, max_tokens=1)
        for _ in range(1000)
    ]
    engine.finish()
    assert all(one.result.finish_reason == "length" for one in pending)
    engine.check_idle()
    assert engine.core.residency.pool.stats.n_resident == 16


# -- ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_steps", range(12))
def test_cancelled_at_any_step_everything_is_free(n_steps: int) -> None:
    """Waiting, loading, in the prompt, while it generates: nothing stays held."""
    engine = engine_with("a", max_batch_tokens=8)
    one = engine.submit(PROMPT, {"a": 1.0}, n=2)
    other = engine.submit(PROMPT, {"a": 1.0})
    for i in range(n_steps):
        engine.core.step() if i < 2 else engine.step()
    engine.core.abort(one.job)
    if not one.ended:
        raise AssertionError("no last word")
    engine.finish()
    assert other.result.text == cold((PROMPT, {"a": 1.0}))
    engine.check_idle()


def test_a_deadline_ends_a_request_wherever_it_is() -> None:
    """With what there is by then; others go on."""
    engine = engine_with("a")
    late = [
        engine.submit(PROMPT, {"a": 1.0}, deadline=5.0),
        engine.submit(PROMPT, max_tokens=100, deadline=5.0),
    ]
    other = engine.submit(PROMPT)
    for _ in range(4):
        engine.core.step()
    engine.now = 6.0
    engine.finish()
    errors = [one.error for one in late]
    assert all(isinstance(error, DeadlineError) for error in errors)
    assert errors[1].result.tokens  # type: ignore[attr-defined]
    assert other.result.finish_reason == "length"
    engine.check_idle()


def test_too_many_waiting_requests_are_refused() -> None:
    """With status 429; those that wait are served."""
    engine = engine_with(max_waiting=2)
    pending = [engine.submit(PROMPT) for _ in range(3)]
    assert isinstance(pending[2].error, OverloadedError)
    assert pending[2].error.status == 429
    engine.finish()
    assert [one.result.finish_reason for one in pending[:2]] == ["length"] * 2


def test_a_failed_step_ends_what_ran_and_the_engine_goes_on() -> None:
    """Running requests get the error, no cell is kept, waiting ones are served."""
    engine = engine_with("a", max_sequences=2)
    pending = [engine.submit(PROMPT, {"a": 1.0}) for _ in range(3)]
    engine.step()
    engine.step()

    def fail() -> None:
        raise BackendError("failed")

    engine.runner.before_step = fail
    engine.step()
    engine.runner.before_step = lambda: None
    engine.finish()
    assert [isinstance(one.outcomes[-1], BackendError) for one in pending] == [True, True, False]
    assert pending[2].result.text == cold((PROMPT, {"a": 1.0}))
    assert pending[2].result.n_cached == 0
    engine.check_idle()


def test_logits_that_are_not_finite_end_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one whose row it is; the others go on."""
    engine = engine_with("a")
    bad, good = engine.submit(PROMPT, {"a": 1.0}), engine.submit(PROMPT)
    engine.step()
    engine.step()
    run = engine.runner.run

    def spoiled(batch: object, *, copy: bool = True) -> object:
        logits = run(batch, copy=copy)  # type: ignore[arg-type]
        logits[batch.mix[batch.outputs] == [bool(m) for m in batch.mixes].index(True)] = np.nan  # type: ignore[attr-defined]
        return logits

    monkeypatch.setattr(engine.runner, "run", spoiled)
    engine.step()
    monkeypatch.undo()
    engine.finish()
    assert isinstance(bad.error, BackendError)
    assert good.result.text == cold((PROMPT, {}))
    engine.check_idle()


def test_a_prompt_that_can_never_fit_is_refused() -> None:
    """With the length that would."""
    engine = engine_with(n_cells=16)
    refused = engine.submit(PROMPT)
    engine.finish()
    assert isinstance(refused.error, ContextLengthError)


def test_a_stop_string_ends_a_choice_and_is_not_part_of_it() -> None:
    """The text ends before it; the events' pieces join to the text."""
    text = cold((PROMPT, {}), max_tokens=12)
    stop = text[5:7]
    engine = engine_with()
    params = SamplingParams(temperature=0, stop=(stop,))
    pending = engine.submit(PROMPT, max_tokens=12, params=params, wants_events=True)
    engine.finish()
    result = pending.result
    assert result.text == text[: text.index(stop)]
    assert result.finish_reason == "stop"
    assert result.choices[0].stop_string == stop
    events = [one for one in pending.outcomes if isinstance(one, Event)]
    assert "".join(event.piece for event in events) == result.text
    assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)


def test_no_token_is_generated_for_max_tokens_0() -> None:
    """The prompt is computed, and the request ends with "length"."""
    result = engine_with().generate(PROMPT, max_tokens=0)
    assert (result.text, result.tokens, result.finish_reason) == ("", (), "length")


# -- aLoRA ----------------------------------------------------------------------------------------

ALORA: dict[str, Callable[[], tuple[list[int], int | None]]] = {
    "in the middle": lambda: ([1, 2, X, Y, 3, 4], 2),
    "at index 0": lambda: ([X, Y, 3, 4], 0),
    "at the end": lambda: ([1, 2, 3, X, Y], 3),
    "alone": lambda: ([X, Y], 0),
    "overlapping: x y y": lambda: ([1, 2, X, Y, Y], 2),
    "twice: the last one counts": lambda: ([X, Y, 1, X, Y, 2], 3),
    "absent": lambda: ([1, 2, X, 3, Y], None),
    "longer than the prompt": lambda: ([Y], None),
}


@pytest.mark.parametrize("make", ALORA.values(), ids=ALORA)
def test_an_alora_is_active_from_its_last_invocation_on(
    make: Callable[[], tuple[list[int], int | None]],
) -> None:
    """Tokens before carry the base, later ones the adapter; absent, the request runs as base."""
    prompt, start = make()
    engine = FakeEngine()
    engine.register("alora", invocation=[X, Y])
    engine.register("plain")
    pending = engine.submit(prompt, {"alora": 1.0})
    engine.step()
    engine.step()
    sequence = pending.job.choices[0].sequence
    assert sequence is not None
    active = [bool(sequence.mix_at(i)) for i in range(len(prompt) + 1)]
    first = len(prompt) + 1 if start is None else start
    assert active == [i >= first for i in range(len(prompt) + 1)]
    engine.finish()
    assert pending.result.adapters[0].active_from == start


def test_an_alora_shares_the_cells_of_the_base() -> None:
    """After a base request on the same history only the invocation and what follows is computed."""
    engine = FakeEngine()
    engine.register("alora", invocation=[X, Y])
    engine.generate(PROMPT)
    result = engine.generate([*PROMPT, X, Y, 3], {"alora": 1.0})
    assert result.n_cached == len(PROMPT)


def test_two_aloras_and_a_plain_adapter_in_one_request() -> None:
    """Each token's mix is what is active there."""
    engine = FakeEngine()
    engine.register("first", invocation=[X])
    engine.register("second", invocation=[Y])
    engine.register("plain")
    pending = engine.submit([1, X, 2, Y, 3], {"second": -0.5, "plain": 0.25, "first": 1.0})
    engine.step()
    engine.step()
    sequence = pending.job.choices[0].sequence
    assert sequence is not None
    mixes = [dict(sequence.mix_at(i).key) for i in range(6)]
    plain = {"plain": 0.25}
    both = {"first": 1.0, **plain}
    assert mixes == [plain, both, both, *[{**both, "second": -0.5}] * 3]
    engine.finish()
    assert [use.active_from for use in pending.result.adapters] == [3, 0, 1]


# -- the faults of llama-server -------------------------------------------------------------------


def test_fault_1_stale_kv_after_a_global_switch() -> None:
    """Another default set for the same prompt finds no cell of the one before."""
    engine = engine_with("a", "b")
    engine.generate(PROMPT, {"a": 1.0})
    switched = engine.generate(PROMPT, {"b": 1.0})
    assert switched.n_cached == 0
    assert switched.text == cold((PROMPT, {"b": 1.0}))


def test_fault_2_host_cache_blind_to_adapters() -> None:
    """A with adapter a, B with b, A with b: nothing of A's cells with a is used."""
    engine = engine_with("a", "b")
    engine.generate(PROMPT, {"a": 1.0})
    engine.generate(PROMPT[::-1], {"b": 1.0})
    third = engine.generate(PROMPT, {"b": 1.0})
    assert third.n_cached == 0
    assert third.text == cold((PROMPT, {"b": 1.0}))


def test_fault_3_overlapping_invocation_missed() -> None:
    """x y is found in ...x y y."""
    engine = FakeEngine()
    engine.register("alora", invocation=[X, Y])
    assert engine.generate([1, X, Y, Y], {"alora": 1.0}).adapters[0].active_from == 1


def test_fault_4_invocation_at_index_0_reuses_base_cells() -> None:
    """After a base run of the same prompt nothing of it is used."""
    engine = FakeEngine()
    engine.register("alora", invocation=[X, Y])
    prompt = [X, Y, *PROMPT]
    engine.generate(prompt)
    assert engine.generate(prompt, {"alora": 1.0}).n_cached == 0


def test_fault_5_two_requests_with_one_alora() -> None:
    """One that generates and one that starts do not change each other."""
    engine = FakeEngine(max_batch_tokens=8)
    engine.register("alora", invocation=[X, Y])
    first_prompt, second_prompt = [1, X, Y, 2], [*PROMPT, X, Y]
    first = engine.submit(first_prompt, {"alora": 1.0}, max_tokens=20)
    for _ in range(3):
        engine.step()
    second = engine.submit(second_prompt, {"alora": 1.0})
    engine.finish()
    for pending, prompt, n in ((first, first_prompt, 20), (second, second_prompt, 6)):
        fresh = FakeEngine()
        fresh.register("alora", invocation=[X, Y])
        assert pending.result.text == fresh.generate(prompt, {"alora": 1.0}, max_tokens=n).text


def test_fault_6_token_before_the_invocation_carries_the_adapter() -> None:
    """It carries the base: its cell is the base's own."""
    engine = FakeEngine()
    engine.register("alora", invocation=[X, Y])
    engine.generate([*PROMPT, X, Y], {"alora": 1.0})
    assert engine.generate([*PROMPT, 1]).n_cached == len(PROMPT)


def test_fault_7_an_empty_list_means_the_base() -> None:
    """No adapters, and one at scale 0, give the base whatever ran before, and share its cells."""
    engine = engine_with("a", "b")
    engine.generate(PROMPT, {"a": 1.0})
    empty, zero = engine.generate(PROMPT, {}), engine.generate(PROMPT, {"a": 0.0})
    assert empty.text == zero.text == cold((PROMPT, {}))
    assert (empty.n_cached, zero.n_cached) == (0, len(PROMPT) - 1)


def test_a_choice_that_ends_before_its_job_frees_its_seat() -> None:
    """It kept it until the job ended: with all seats in use the next request ended the engine."""
    engine = FakeEngine(max_sequences=2)
    engine.submit(PROMPT, {}, max_tokens=20)
    second = engine.submit([*PROMPT, 1], {}, max_tokens=20)
    for _ in range(3):
        engine.step()
    first, _ = engine.core.scheduler.running
    engine.core.scheduler.finish(first, "stop")  # as of one of several choices
    third = engine.submit([*PROMPT, 2], {}, max_tokens=20)
    for _ in range(3):
        engine.step()
    assert len(engine.core.seats) == len(engine.core.scheduler.running) == 2
    assert engine.core.seats.of(first) is None
    while not (second.ended and third.ended):
        engine.step()
