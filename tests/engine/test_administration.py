"""Adapters that change while another thread changes, holds or combines them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from loragraph.adapters.combine import combine
from loragraph.adapters.mix import Mix
from loragraph.engine import administration
from loragraph.engine.engine import Engine
from loragraph.engine.holds import Hold
from loragraph.engine.model import Model
from loragraph.errors import (
    AdapterChangedError,
    CapacityError,
    FormatError,
    InvalidRequestError,
    LifecycleError,
    LoragraphError,
    ModelNotFoundError,
)
from tests.tiny import TinyAdapter, TinyLlama

TOKENS = [1, 2, 3]


class Files:
    """A base and four adapters of unlike ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tiny = TinyLlama()
        self.base = self.tiny.write(folder / "m.gguf")
        self.paths = [folder / f"{i}.gguf" for i in range(4)]
        for i, path in enumerate(self.paths):
            TinyAdapter(rank=3 + i, seed=i + 1).write(path, self.tiny)

    def engine(self, **options: Any) -> Engine:
        """With the adapters a and b."""
        names = {"a": self.paths[0], "b": self.paths[1]}
        return Engine(self.base, names, n_ctx=256, n_threads=1, **options)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Of all tests, which change none of them."""
    return Files(tmp_path_factory.mktemp("administration"))


@pytest.fixture
def engine(files: Files) -> Iterator[Engine]:
    """With room for all."""
    with files.engine() as engine:
        yield engine


def score(engine: Engine, *names: str) -> list[float]:
    """What an engine computes with these adapters."""
    result = engine.score(TOKENS, adapters=dict.fromkeys(names, 1.0), cache_salt=str(object()))
    return list(result.logprobs)


def meddle(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object], *, after: bool
) -> None:
    """Has another thread's act come before, or after, the first wait for a hold."""
    wait, acts = engine._wait_for, [act]

    def meddled(hold: Hold) -> None:
        todo = [acts.pop()] if acts else []
        if after:
            wait(hold)
        for one in todo:
            one()
        if not after:
            wait(hold)

    monkeypatch.setattr(engine, "_wait_for", meddled)


def check_nothing_held(engine: Engine) -> None:
    """No name, no adapter in memory, no pin."""
    for name in engine.registry.names():
        engine.unload_adapter(name)
    stats = engine.stats().pool
    assert (stats.n_resident, stats.n_tickets, stats.nbytes) == (0, 0, 0)


CHANGES: dict[str, Callable[[Engine, Files], object]] = {
    "swap": lambda engine, files: engine.load_adapter("a", files.paths[2]),
    "unload": lambda engine, files: engine.unload_adapter("a"),
    "unpin": lambda engine, files: engine.unpin("a"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_parts_of_a_combination_stay_whatever_becomes_of_their_names(
    change: Callable[[Engine, Files], object],
    engine: Engine,
    files: Files,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They were closed while they were read."""
    expected = score(engine, "a", "b")
    closed: list[bool] = []

    def late(mix: Mix) -> Any:
        change(engine, files)
        engine.generate(TOKENS, max_tokens=1)
        closed.extend(part.closed for part in mix.adapters)
        return combine(mix)

    monkeypatch.setattr(administration, "combine", late)
    engine.combine("both", {"a": 1.0, "b": 1.0})
    assert closed == [False, False]
    assert score(engine, "both") == pytest.approx(expected, abs=1e-3)
    assert not any(row.pinned for row in engine.adapters)
    check_nothing_held(engine)


def test_a_swap_between_the_load_and_the_look_up_of_a_part(
    engine: Engine, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a KeyError."""
    expected = score(engine, "a", "b")
    meddle(engine, monkeypatch, lambda: engine.load_adapter("a", files.paths[2]), after=True)
    engine.combine("both", {"a": 1.0, "b": 1.0})
    assert score(engine, "both") == pytest.approx(expected, abs=1e-3)
    check_nothing_held(engine)


def test_a_combination_leaves_the_pins_of_its_parts(engine: Engine) -> None:
    """Those of `pin` are not its own."""
    engine.pin("a")
    engine.combine("both", {"a": 1.0, "b": 1.0})
    assert [row.name for row in engine.adapters if row.pinned] == ["a"]


def test_a_combination_with_a_bad_name_leaves_no_adapter(engine: Engine) -> None:
    """It was made all the same, and stayed until the model was closed."""
    with pytest.raises(InvalidRequestError, match="adapter name"):
        engine.combine("a/b", {"a": 1.0})
    assert engine.model.adapters == ()


def test_a_pin_that_meets_a_swap_pins_the_new_generation(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old one stayed in its place for good, and no name led to it."""
    with files.engine(max_adapters=2) as engine:
        meddle(engine, monkeypatch, lambda: engine.load_adapter("a", files.paths[2]), after=False)
        engine.pin("a")
        row = next(row for row in engine.adapters if row.name == "a")
        assert (row.pinned, row.path) == (True, files.paths[2])
        engine.unpin("a")
        assert score(engine, "a", "b")
        check_nothing_held(engine)


def test_a_pin_that_meets_an_unload_is_of_an_unknown_name(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And holds nothing."""
    meddle(engine, monkeypatch, lambda: engine.unload_adapter("a"), after=False)
    with pytest.raises(ModelNotFoundError):
        engine.pin("a")
    check_nothing_held(engine)


def test_a_preload_without_room_leaves_the_name_as_it_was(files: Files) -> None:
    """The good generation was lost."""
    with files.engine(max_adapters=1) as engine:
        expected, old = score(engine, "b"), engine.resolve("b")
        engine.pin("a")
        with pytest.raises(CapacityError):
            engine.load_adapter("b", files.paths[2], preload=True)
        with pytest.raises(CapacityError):
            engine.load_adapter("new", files.paths[2], pin=True)
        assert engine.registry.names() == ["a", "b"]
        engine.unpin("a")
        assert engine.resolve("b") is old
        assert not old.retired
        assert score(engine, "b") == expected
        check_nothing_held(engine)


def test_a_preload_of_a_bad_file_leaves_a_name_of_the_folder(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was unloaded, and not found in the folder any more."""
    (tmp_path / "c.gguf").write_bytes(files.paths[3].read_bytes())
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(files.paths[2].read_bytes())
    with files.engine(adapter_dir=tmp_path) as engine:
        meddle(engine, monkeypatch, lambda: bad.write_bytes(b"no file of ours"), after=False)
        with pytest.raises(FormatError):
            engine.load_adapter("c", bad, preload=True)
        assert engine.resolve("c").path == tmp_path / "c.gguf"
        assert score(engine, "c")


@pytest.mark.parametrize("options", [{"preload": True}, {"pin": True}])
def test_a_failed_preload_leaves_what_another_caller_registered_meanwhile(
    options: dict[str, bool], files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """His good generation was unloaded."""
    with files.engine(max_adapters=1) as engine:
        engine.pin("a")
        meddle(engine, monkeypatch, lambda: engine.load_adapter("b", files.paths[3]), after=False)
        with pytest.raises(CapacityError):
            engine.load_adapter("b", files.paths[2], **options)
        assert engine.resolve("b").path == files.paths[3]
        engine.unpin("a")
        assert score(engine, "b")
        check_nothing_held(engine)


def test_requests_get_the_old_generation_until_the_new_one_is_in_memory(
    engine: Engine, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A swap with a preload makes nobody wait."""
    expected, seen = score(engine, "a"), []
    meddle(engine, monkeypatch, lambda: seen.append(score(engine, "a")), after=True)
    new = engine.load_adapter("a", files.paths[2], preload=True)
    assert seen == [expected]
    assert engine.resolve("a") is new
    assert score(engine, "a") != expected
    check_nothing_held(engine)


def test_a_pinned_adapter_gives_way_to_its_own_next_generation(files: Files) -> None:
    """Where there is no room for both; where that fails it is pinned again."""
    with files.engine(max_adapters=1) as engine:
        engine.pin("a")
        engine.load_adapter("a", files.paths[2], pin=True)
        old = engine.resolve("a")
        assert old.path == files.paths[2]
        bad = files.folder / "late.gguf"
        bad.write_bytes(files.paths[3].read_bytes())
        wait = engine._wait_for

        def overwritten(hold: Hold) -> None:
            bad.write_bytes(b"no file of ours")
            wait(hold)

        engine._wait_for = overwritten  # type: ignore[method-assign]
        with pytest.raises(FormatError):
            engine.load_adapter("a", bad, pin=True)
        del engine._wait_for
        engine.preload("a")  # it may have been dropped for the new one
        row = next(row for row in engine.adapters if row.name == "a")
        assert (row.generation, row.pinned) == (old.number, True)
        check_nothing_held(engine)


def test_an_overwritten_file_has_the_header_of_its_new_content(
    files: Files, tmp_path: Path
) -> None:
    """Lists showed the old rank, and the pool reserved the old file's bytes."""
    path = tmp_path / "a.gguf"
    path.write_bytes(files.paths[0].read_bytes())
    with Engine(
        files.base, {"a": path, "b": files.paths[1]}, n_ctx=256, n_threads=1, max_adapters=1
    ) as engine:
        score(engine, "a")
        old = engine.resolve("a")
        score(engine, "b")  # a leaves
        TinyAdapter(rank=9, seed=9, invocation_tokens=[7, 8]).write(path, files.tiny)
        with pytest.raises(AdapterChangedError):
            score(engine, "a")
        check_header(engine, path, old.number)


def test_a_file_overwritten_before_its_first_load_has_its_new_header(
    files: Files, tmp_path: Path
) -> None:
    """The one of its registration told of what was never loaded."""
    path = tmp_path / "a.gguf"
    path.write_bytes(files.paths[0].read_bytes())
    with Engine(files.base, {"a": path}, n_ctx=256, n_threads=1) as engine:
        TinyAdapter(rank=9, seed=9, invocation_tokens=[7, 8]).write(path, files.tiny)
        score(engine, "a")
        check_header(engine, path, 0)


def check_header(engine: Engine, path: Path, older: int) -> None:
    """It is that of rank 9 with its invocation, and the same whether or not it is loaded."""
    before = engine.resolve("a")
    assert before.number > older
    headers = [before.header]
    score(engine, "a")
    headers += [engine.resolve("a").header, engine.load_adapter("fresh", path).header]
    assert headers[0] == headers[1] == headers[2]
    assert (headers[0].rank_max, headers[0].invocation_tokens) == (9, (7, 8))
    row = next(row for row in engine.adapters if row.name == "a")
    assert (row.rank_max, row.is_alora, row.nbytes) == (9, True, headers[0].nbytes)
    assert engine.stats().pool.nbytes == headers[0].nbytes


@pytest.mark.parametrize("cancel", [False, True])
def test_a_combination_goes_only_after_those_who_wait_for_it(files: Files, cancel: bool) -> None:
    """Unloaded while a request for it waited for a seat, it was closed, and the request failed."""
    greedy: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4}
    with files.engine(max_sequences=1) as engine:
        engine.combine("both", {"a": 1.0, "b": 0.5})
        expected = engine.generate(TOKENS, adapters={"both": 1.0}, **greedy).tokens
        generation = engine.registry.resolve("both")
        first = engine.stream(TOKENS, max_tokens=250, ignore_eos=True)
        next(first)  # it has the seat
        waits = [engine.stream(TOKENS, adapters={"both": 1.0}, **greedy) for _ in range(2)]
        engine.unload_adapter("both")
        if cancel:
            for one in waits:
                one.close()
        first.close()
        for one in waits:
            if not cancel:
                assert list(one)
                assert one.result.tokens == expected
        deadline = time.monotonic() + 10
        assert generation.adapter is not None
        while not generation.adapter.closed and time.monotonic() < deadline:
            time.sleep(0.01)
        assert generation.adapter.closed


def test_a_combination_that_others_have_attached_ends_no_engine(
    engine: Engine, files: Files
) -> None:
    """It was closed all the same, which raised on the engine's thread."""
    generation = engine.combine("c", {"a": 1.0})
    adapter = generation.adapter
    assert adapter is not None
    engine.load_adapter("other", adapter)
    engine.preload("other")
    expected = score(engine, "c")
    engine.load_adapter("c", files.paths[2])
    assert not adapter.closed
    assert score(engine, "other") == pytest.approx(expected, abs=1e-5)


def test_one_adapter_under_two_names_is_combined_twice(engine: Engine, files: Files) -> None:
    """Its scales add up, as in a mix; the last one alone counted."""
    adapter = engine.model.load_adapter(files.paths[0])
    engine.load_adapter("x", adapter)
    engine.load_adapter("y", adapter)
    engine.combine("z", {"x": 1.0, "y": 1.0})
    assert score(engine, "z") == pytest.approx(score(engine, "x", "y"), abs=1e-4)
    assert score(engine, "z") != pytest.approx(score(engine, "x"), abs=0.01)


def test_a_combination_goes_with_the_last_who_waits_though_he_fails(
    files: Files, tmp_path: Path
) -> None:
    """A request that ended before it had its adapters left it in memory for good."""
    with files.engine(max_sequences=1, max_adapters=2) as engine:
        generation = engine.combine("c", {"a": 1.0})
        bad = tmp_path / "bad.gguf"
        bad.write_bytes(files.paths[2].read_bytes())
        engine.load_adapter("bad", bad)
        bad.write_bytes(b"nothing")
        with pytest.raises(LoragraphError):
            engine.preload("bad")
        first = engine.stream(TOKENS, max_tokens=200, ignore_eos=True)
        next(first)
        waits = engine.stream(TOKENS, adapters={"c": 1.0, "bad": 1.0}, max_tokens=2)
        engine.unload_adapter("c")
        first.close()
        with pytest.raises(FormatError):
            list(waits)
        engine.stats()
        assert generation.adapter is not None
        assert generation.adapter.closed


def test_a_combination_that_is_unloaded_before_its_request_enters(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name means nothing any more, and that is what is said."""
    engine.combine("c", {"a": 1.0})
    real = engine._jobs._prompt

    def late(request: Any) -> Any:
        engine.unload_adapter("c")
        return real(request)

    monkeypatch.setattr(engine._jobs, "_prompt", late)
    with pytest.raises(ModelNotFoundError, match="unloaded"):
        engine.generate(TOKENS, adapters={"c": 1.0}, max_tokens=1)


def test_a_mix_with_a_closed_adapter_leaves_no_place_behind(files: Files) -> None:
    """The file beside it was never loaded, and stayed "loading"."""
    with files.engine(max_adapters=2) as engine:
        adapter = engine.model.load_adapter(files.paths[2])
        engine.load_adapter("m", adapter)
        adapter.close()
        with pytest.raises(LifecycleError):
            engine.generate(TOKENS, adapters={"m": 1.0, "b": 1.0}, max_tokens=1)
        score(engine, "b")
        for name in ("m", "a", "b"):
            engine.unload_adapter(name)
        pool = engine.stats().pool
        assert (pool.n_loading, pool.nbytes, pool.n_tickets) == (0, 0, 0)


def test_unpinned_while_a_replacement_fails(files: Files) -> None:
    """The pin that gave way for it came back, after unpin."""
    with files.engine(max_adapters=1) as engine:
        engine.pin("a")
        old = engine.registry.resolve("a")
        holds = engine._core.holds
        new = Hold(engine.registry.make("a", files.paths[3]), pin=True, replaces=old)

        def give_way_and_fail() -> None:
            holds.hold(new)
            assert old not in holds.pinned
            holds.unpin(old)
            holds.fail(new, FormatError("damaged"))

        engine._thread.call(give_way_and_fail)
        assert not [row for row in engine.adapters if row.pinned]


def test_a_closed_engine_leaves_no_combination_in_its_model(files: Files) -> None:
    """Those that still had a name stayed in a model that other engines use."""
    with Model.load(files.base, n_threads=1) as model:
        for _ in range(2):
            with Engine(model, {"a": files.paths[0]}, n_ctx=256) as engine:
                engine.combine("c", {"a": 1.0})
                score(engine, "c")
        assert not model.adapters
