"""The threads that share a step's sampling."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from loragraph.engine import crew as crew_module
from loragraph.engine.crew import Crew
from loragraph.engine.engine import Engine
from loragraph.engine.params import SamplingParams
from loragraph.engine.request import Request
from tests.numerics.runs import random_tokens
from tests.tiny import TinyLlama

LARGE = 1 << 24  # values a row: sharing is worth it


def crew_threads() -> list[threading.Thread]:
    """Those that any crew has made and not ended."""
    return [one for one in threading.enumerate() if one.name.startswith("loragraph-sample")]


@pytest.mark.parametrize("n_threads", [1, 2, 5])
@pytest.mark.parametrize("n_items", [0, 1, 2, 7])
def test_every_item_is_called_once(n_threads: int, n_items: int) -> None:
    called: list[int] = []
    crew = Crew(n_threads)
    crew.each(called.append, range(n_items), LARGE)
    crew.close()
    assert sorted(called) == list(range(n_items))
    assert not crew_threads()


def test_items_are_shared_with_another_thread() -> None:
    both = threading.Barrier(2)  # each call waits for one on another thread
    crew = Crew(2)
    crew.each(lambda _: [both.wait(60)].clear(), range(6), LARGE)
    assert len(crew_threads()) == 1
    crew.close()


def test_few_values_stay_on_the_callers_thread() -> None:
    threads: set[int] = set()
    crew = Crew(2)
    crew.each(lambda _: threads.add(threading.get_ident()), range(8), size=1000)
    assert threads == {threading.get_ident()}
    assert not crew_threads()
    crew.close()


@pytest.mark.parametrize("bad", [0, 1])
def test_an_error_comes_out_after_the_others_have_ended(bad: int) -> None:
    called: list[int] = []

    def call(item: int) -> None:
        if item == bad:
            raise ValueError("of one item")
        called.append(item)

    crew = Crew(2)
    with pytest.raises(ValueError, match="of one item"):
        crew.each(call, [0, 1], LARGE)
    assert called == [1 - bad]
    crew.close()


def test_close_twice_and_use_before_any_thread() -> None:
    crew = Crew(4)
    crew.close()
    crew.each(lambda _: None, range(9), LARGE)
    assert crew_threads()
    crew.close()
    crew.close()
    assert not crew_threads()


def test_texts_are_those_of_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws, penalties, grammars and biases of 12 unlike requests, sampled on one and on three."""
    base = TinyLlama().write(tmp_path / "m.gguf")
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 1.5, "top_k": 0, "top_p": 0.9, "min_p": 0.0},
        {"temperature": 1.0, "repeat_penalty": 1.2, "logit_bias": {7: 3.0}},
        {"temperature": 0.0, "grammar": "root ::= [a-z ]+"},
    ]
    requests = [
        Request(
            random_tokens(9, seed=i),
            params=SamplingParams(seed=i, max_tokens=8, ignore_eos=True, **kinds[i % 4]),
        )
        for i in range(12)
    ]
    texts = {}
    for worth in (1 << 60, 0):
        monkeypatch.setattr(crew_module, "_WORTH_IT", worth)
        with Engine(base, n_ctx=1024, max_sequences=12, n_threads=3) as engine:
            texts[worth] = [one.tokens for one in engine.generate_batch(requests)]
            assert bool(crew_threads()) == (worth == 0)
        assert not crew_threads()
    assert texts[0] == texts[1 << 60]
