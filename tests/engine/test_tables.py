"""What an engine tells of itself: sequences, counters, adapters and how they were loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from loragraph.adapters.adapter import Adapter
from loragraph.engine.embedding import PooledStates
from loragraph.engine.engine import Engine
from loragraph.engine.model import Model
from loragraph.engine.params import SamplingParams
from loragraph.engine.pool import State
from loragraph.engine.seats import Seats
from loragraph.errors import ConfigError, LoragraphError
from tests.engine.fake_engine import FakeEngine
from tests.engine.fakes import sequence_of
from tests.gguf_bytes import tensor, write_gguf
from tests.numerics.runs import random_tokens
from tests.tiny import TinyAdapter, TinyLlama

PROMPT = list(range(40, 70))
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def states(engine: FakeEngine) -> list[str]:
    """Of all sequences, oldest request first."""
    rows = sorted(engine.core.sequences(), key=lambda row: (row.request, row.index))
    return [row.state for row in rows]


def test_a_sequence_goes_through_its_states() -> None:
    """Loading, prompt, text; then it is in the table no more."""
    engine = FakeEngine(max_batch_tokens=16)
    engine.register("a")
    params = SamplingParams(temperature=0, seed=9)
    pending = engine.submit(PROMPT, {"a": 0.5}, max_tokens=4, params=params, number=7)
    assert states(engine) == ["queued"]
    engine.core.step()
    assert states(engine) == ["loading"]
    engine.step()
    assert states(engine) == ["prompt"]
    (row,) = engine.core.sequences()
    assert (row.n_prompt, row.n_prompt_done, row.n_decoded, row.n_max) == (30, 16, 0, 4)
    assert (row.request, row.index, row.seat, row.kind, row.seed) == (7, 0, 0, "text", 9)
    assert (row.adapters, row.params) == ((("a", 0.5),), params)
    engine.now += 3
    engine.step()
    assert states(engine) == ["text"]
    (row,) = engine.core.sequences()
    assert (row.n_prompt_done, row.n_decoded, row.age_s) == (30, 1, 3.0)
    engine.finish()
    assert states(engine) == []
    assert pending.ended
    assert len(engine.core.seats) == 0


def test_those_that_wait_have_no_seat() -> None:
    """With two seats the third request waits, and gets the lowest seat that falls free."""
    engine = FakeEngine(max_sequences=2)
    first = engine.submit(PROMPT, max_tokens=3)
    engine.submit(PROMPT, max_tokens=20)
    engine.submit(PROMPT, max_tokens=20)
    engine.step()
    assert [row.seat for row in engine.core.sequences()] == [None, 0, 1]
    while not first.ended:
        engine.step()
    engine.step()
    rows = list(engine.core.sequences())
    assert sorted(row.seat for row in rows if row.seat is not None) == [0, 1]
    engine.finish()


def test_preempted_sequences_give_their_seats_back() -> None:
    """No two sequences ever have one seat, and only those that run have any."""
    engine = FakeEngine(n_cells=160, block_size=8)
    for i in range(6):
        engine.submit([i, *PROMPT], max_tokens=40, number=i)
    waited = 0
    while engine.core.n_jobs:
        engine.step()
        rows = list(engine.core.sequences())
        seats = [row.seat for row in rows if row.seat is not None]
        assert len(set(seats)) == len(seats) == len(engine.core.scheduler.running)
        waited += sum(row.state == "waiting" for row in rows)
    assert waited
    assert len(engine.core.seats) == 0


def test_seats_are_the_lowest_free() -> None:
    """Numbers come back, and who has none loses none."""
    seats = Seats(3)
    one, two, three = (sequence_of([1]) for _ in range(3))
    seats.take(one)
    seats.take(two)
    assert (seats.of(one), seats.of(two), seats.of(three), seats.of(None)) == (0, 1, None, None)
    seats.leave(one)
    seats.leave(one)
    seats.take(three)
    assert (seats.of(one), seats.of(three), len(seats)) == (None, 0, 2)


def test_kinds_of_requests() -> None:
    """Scores and embeddings are in the table too."""
    engine = FakeEngine(max_batch_tokens=8)
    engine.submit(PROMPT, max_tokens=0, states=PooledStates("mean", 2))
    engine.step()
    assert [row.kind for row in engine.core.sequences()] == ["embedding"]
    engine.finish()


def test_what_a_step_failure_leaves() -> None:
    """Nothing: seats are free."""
    engine = FakeEngine()
    engine.submit(PROMPT)
    engine.step()

    def fail() -> None:
        raise LoragraphError("broken")

    engine.runner.before_step = fail
    engine.step()
    assert len(engine.core.seats) == 0
    assert states(engine) == []


def test_tokens_and_seconds_are_counted() -> None:
    """Prompts when they are done, with what the tree had; seconds of every sequence."""
    engine = FakeEngine(max_batch_tokens=16)

    def pass_a_second() -> None:
        engine.now += 1.0

    engine.runner.before_step = pass_a_second
    engine.generate(PROMPT, max_tokens=5)  # two steps of prompt, the second gives a token
    stats = engine.core.count()
    assert (stats.n_prompt_tokens, stats.n_prompt_tokens_cached) == (30, 0)
    assert stats.n_generated_tokens == 5
    assert (stats.prompt_s, stats.decode_s) == (2.0, 4.0)
    assert (stats.n_steps, stats.n_step_sequences, stats.n_tokens_max) == (6, 6, 35)
    engine.generate(PROMPT, max_tokens=3, n=2)
    stats = engine.core.count()
    assert (stats.n_prompt_tokens, stats.n_prompt_tokens_cached) == (90, 29 * 2)
    assert stats.n_prompt_tokens_computed == 32
    assert stats.n_generated_tokens == 11
    assert (stats.prompt_s, stats.decode_s) == (3.0, 8.0)
    assert stats.n_step_sequences == 6 + 2 * 3


def test_preemptions_count_no_prompt_twice() -> None:
    """A prompt is done once."""
    engine = FakeEngine(n_cells=160, block_size=8)
    pending = [engine.submit([i, *PROMPT], max_tokens=40) for i in range(6)]
    engine.finish()
    assert engine.core.scheduler.n_preemptions > 0
    stats = engine.core.count()
    assert stats.n_prompt_tokens == 6 * 31
    assert stats.n_generated_tokens == sum(len(one.result.tokens) for one in pending)


def test_jobs_of_now() -> None:
    """Waiting, loading and running ones."""
    engine = FakeEngine(max_sequences=2)
    engine.register("a")
    engine.submit(PROMPT, {"a": 1.0})
    for _ in range(5):
        engine.submit(PROMPT)
    engine.core.step()
    stats = engine.core.count()
    assert (stats.n_jobs_loading, stats.n_jobs_running, stats.n_jobs_waiting) == (1, 2, 3)
    assert stats.n_jobs == 6
    engine.finish()


# -- adapters -------------------------------------------------------------------------------------


@pytest.fixture
def tied(tmp_path: Path) -> TinyLlama:
    """A base whose table is its head, with adapters: on the table, on norms too."""
    tiny = TinyLlama(tied=True)
    tiny.write(tmp_path / "m.gguf")
    TinyAdapter(embeddings=True, seed=3).write(tmp_path / "table.gguf", tiny)
    plain = TinyAdapter(seed=4)
    plain.write(tmp_path / "plain.gguf", tiny)
    norm = tensor("blk.0.attn_norm.weight", np.ones(tiny.n_embd, np.float32))
    write_gguf(tmp_path / "norm.gguf", plain.keys(), [*plain.raw_tensors(tiny), norm])
    return tiny


@pytest.fixture
def engine(tied: TinyLlama, tmp_path: Path) -> Iterator[Engine]:
    """One adapter's room, so that loads and evictions alternate."""
    with Engine(tmp_path / "m.gguf", n_ctx=256, max_adapters=1, n_threads=1) as engine:
        yield engine


def score(engine: Engine, mix: dict[str, float]) -> float:
    """Of one prompt."""
    return engine.score(random_tokens(20), mix).total


def test_norm_weights_are_left_out_where_asked(engine: Engine, tmp_path: Path) -> None:
    """Refused without, the rest of the file with; after an eviction too."""
    with pytest.raises(LoragraphError, match="norm"):
        engine.load_adapter("norm", tmp_path / "norm.gguf")
    engine.load_adapter("plain", tmp_path / "plain.gguf")
    engine.load_adapter("norm", tmp_path / "norm.gguf", ignore_norm=True)
    for _ in range(2):
        assert score(engine, {"norm": 1.0}) == score(engine, {"plain": 1.0})
    row = next(row for row in engine.adapters if row.name == "norm")
    assert row.counts.n_loads == row.counts.n_evictions == 2
    assert row.report is not None
    assert row.report.ignored == ("blk.0.attn_norm.weight",)


def test_a_tied_head_is_changed_or_not(engine: Engine, tmp_path: Path) -> None:
    """As the caller says, and as Model.load_adapter does; two names for the two meanings."""
    path = tmp_path / "table.gguf"
    found = {}
    for name, tied_output in (("both", True), ("lookup", False)):
        engine.load_adapter(name, path, tied_output=tied_output)
        found[name] = score(engine, {name: 1.0})
        adapter = engine.model.load_adapter(path, tied_output=tied_output)
        engine.load_adapter("direct", adapter)
        assert score(engine, {"direct": 1.0}) == found[name]
        engine.unload_adapter("direct")
    assert abs(found["both"] - found["lookup"]) > 0.1


def test_an_adapter_in_memory_takes_no_load_options(engine: Engine, tmp_path: Path) -> None:
    """It has been read already."""
    adapter: Adapter = engine.model.load_adapter(tmp_path / "plain.gguf")
    for options in ({"ignore_norm": True}, {"tied_output": False}):
        with pytest.raises(ConfigError, match="in memory"):
            engine.load_adapter("a", adapter, **options)


def test_the_table_of_adapters(tied: TinyLlama, tmp_path: Path) -> None:
    """Files of the folder are listed with their paths before anybody asks for them."""
    folder = tmp_path / "adapters"
    folder.mkdir()
    for name in ("one", "two"):
        (folder / f"{name}.gguf").write_bytes((tmp_path / "plain.gguf").read_bytes())
    with (
        Model.load(tmp_path / "m.gguf", n_threads=1) as model,
        Engine(model, n_ctx=256, adapter_dir=folder) as engine,
    ):
        rows = {row.name: row for row in engine.adapters}
        assert {name: row.path for name, row in rows.items()} == {
            name: folder.resolve() / f"{name}.gguf" for name in ("one", "two")
        }
        assert rows["one"].generation is None
        assert engine.resolve("one").number == 1
        engine.pin("one")
        rows = {row.name: row for row in engine.adapters}
        one, two = rows["one"], rows["two"]
        assert (one.state, one.pinned, one.n_targets) == (State.RESIDENT, True, 14)
        assert (one.counts.n_loads, one.counts.n_failures) == (1, 0)
        assert one.counts.load_s > 0
        assert one.report is not None
        assert (two.state, two.pinned, two.report) == (State.ABSENT, False, None)
        engine.unpin("one")
        assert not next(row for row in engine.adapters if row.name == "one").pinned
        (folder / "two.gguf").write_bytes(b"no adapter")
        with pytest.raises(LoragraphError):
            engine.resolve("two")


def test_failed_loads_are_counted() -> None:
    """For the generation whose file was damaged."""
    engine = FakeEngine()
    generation = engine.register("a")
    assert generation.path is not None
    engine.files[generation.path.name] = LoragraphError("damaged")
    pending = engine.submit(PROMPT, {"a": 1.0})
    engine.finish()
    assert pending.error is not None
    assert (generation.counts.n_loads, generation.counts.n_failures) == (0, 1)


def test_sequences_and_stats_of_an_engine(engine: Engine) -> None:
    """From any thread, while it runs."""
    with engine.stream(random_tokens(20), GREEDY, max_tokens=200) as stream:
        next(stream)
        (row,) = engine.sequences()
        assert row.state == "text"
        assert row.request > 0
        assert engine.stats().core.n_jobs_running == 1
    engine.stats()
    assert engine.sequences() == ()
