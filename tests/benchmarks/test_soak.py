"""A short soak, and its judgement; the long one is scripts/bench soak."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import soak, soak_alone
from benchmarks.soak import MAX_GROWTH_KIB, Report, tiny_soak
from benchmarks.soak_alone import BOUND, Alone, lone_parts, pulled_apart
from benchmarks.soak_requests import GREEDY, INVOCATIONS, Kind, make_kinds
from loragraph import Context, Model, SamplingParams
from tests.tiny import TinyAdapter, TinyLlama

GOOD = Report(
    n_requests=10,
    n_finished=7,
    n_cancelled=2,
    n_refused=1,
    n_preemptions=1,
    n_compared=100,
    n_early=2,
    rss_start=5000,
    rss_end=5000 + MAX_GROWTH_KIB,
    speed_fresh=100.0,
    speed_end=90.0,
)


def test_a_short_soak_leaves_nothing_held_and_every_answer_right(tmp_path: Path) -> None:
    """Random requests of all kinds, swaps, unloads, cancellations, few cells and slots."""
    run = tiny_soak(tmp_path, n_kinds=40, n_threads=1)
    report = run.run(3, measure=False)
    assert report.faults() == []
    assert report.n_requests == report.n_finished + report.n_cancelled + report.n_refused
    assert report.n_compared >= report.n_finished > 0
    assert report.n_cancelled > 0
    assert report.n_swaps > 0


def test_a_wrong_answer_is_found(tmp_path: Path) -> None:
    """One that another request would get, one with another last token, one that is cut off."""
    run = tiny_soak(tmp_path, n_kinds=1, n_threads=1)
    run._kinds = [Kind((5, 6, 7), (("n0", 1.0),), replace(GREEDY, max_tokens=9, seed=0), 1, "")]
    with Model.load(tmp_path / "base.gguf", n_threads=1) as model:
        with Context(model, n_ctx=64) as context:
            alone = Alone(context)
            texts = []
            for name in ("0.gguf", "1.gguf"):
                alone.read(run._kinds[0], [(model.load_adapter(tmp_path / name), 1.0)])
                texts.append(alone.choice(0)[0])
        right, other = texts
        assert right != other
        answers = [right, other, [*right[:-1], (right[-1] + 1) % 320], right[:-1]]
        run._answers = {(0, (0,)): {(array("i", one).tobytes(),): 2 for one in answers}}
        run._compare(model)
    assert (run.report.n_compared, run.report.n_early, run.report.n_kinds) == (8, 0, 1)
    assert len(run.report.differing) == 3


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, None),
        ({"n_preemptions": 0}, "nothing was preempted"),
        ({"n_early": 3}, "3 of 100 comparisons ended early"),
        ({"n_compared": 0, "n_early": 0}, "0 of 0 comparisons"),
        ({"rss_end": 5001 + MAX_GROWTH_KIB}, "memory grew"),
        ({"speed_end": 89.0}, "89 tokens/s, 100 in a fresh engine"),
        ({"n_finished": 6}, "1 requests were lost"),
        ({"errors": ["jobs: 1 are still held"]}, "still held"),
        ({"differing": ["one"]}, "one"),
    ],
    ids=str,
)
def test_a_soak_is_judged(changes: dict[str, object], text: str | None) -> None:
    """A report at all its bounds has no fault, one beyond any of them has that one."""
    faults = replace(GOOD, **changes).faults()  # type: ignore[arg-type]
    assert len(faults) == (text is not None)
    assert text is None or text in faults[0]


def test_a_soak_with_a_fault_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And says which; without one 0."""
    for report, status in ((GOOD, 0), (replace(GOOD, n_preemptions=0), 1)):
        monkeypatch.setattr(soak.Soak, "run", lambda *_, report=report, **__: report)
        assert soak.main(["--minutes", "1", "--kinds", "1"]) == status
        assert ("nothing was preempted" in capsys.readouterr().out) == bool(status)


def test_the_requests_of_a_soak_are_of_every_kind() -> None:
    """Mixes, aLoRAs with and without their invocation, draws, grammars, choices, salts."""
    kinds = make_kinds(200, ["a", "b", "c"], ["x", "y"], 0)
    assert len(set(map(repr, kinds))) == 200
    assert {len(kind.adapters) for kind in kinds} == {0, 1, 2, 3}
    assert {kind.n for kind in kinds} == {1, 2, 3}
    assert {kind.cache_salt for kind in kinds} == {"", "one", "another"}
    activated = [kind for kind in kinds if {"x", "y"} & dict(kind.adapters).keys()]
    marks = [{start for start, _ in INVOCATIONS} & set(kind.prompt) for kind in activated]
    assert set(map(len, marks)) == {0, 1, 2}
    assert any(kind.params.grammar for kind in kinds)
    assert any(kind.params.mirostat for kind in kinds)
    assert {kind.params.greedy for kind in kinds} == {True, False}


def test_a_choice_is_open_where_logits_within_the_bound_choose_otherwise(tmp_path: Path) -> None:
    """Greedy: the second best token if it is that near, no other, and none that is further."""
    kind = Kind((5, 6, 7), (), SamplingParams(temperature=0, max_tokens=3, seed=1), 1, "")
    with (
        Model.load(TinyLlama().write(tmp_path / "m.gguf"), n_threads=1) as model,
        Context(model, n_ctx=64) as context,
    ):
        alone = Alone(context)
        alone.read(kind, [])
        tokens, rows = alone.choice(0)
        assert len(tokens) == len(rows) == 3
        second, third = np.argsort(-rows[2])[1:3].tolist()
        for gap, is_open in ((1.9 * BOUND, True), (2.1 * BOUND, False)):
            rows[2][second] = rows[2][tokens[2]] - gap
            assert alone.is_open(0, rows, tokens[:2], second) == is_open
            assert not alone.is_open(0, rows, tokens[:2], third)


def test_logits_are_pulled_apart_within_the_bound() -> None:
    """Nowhere further than the bound, and a token's own once up."""
    row = np.random.default_rng(0).standard_normal(100, dtype=np.float32)
    found = list(pulled_apart(row, 7))
    assert max(float(np.abs(one - row).max()) for one in found) <= 1.001 * BOUND
    assert found[0].argmax() == row.argmax()
    assert (found[0] > row).nonzero()[0].tolist() == [7]
    assert len(found) == 1 + 2 * (soak_alone._N_EDGES - 1 + 2)


def test_a_lone_aloras_parts_begin_at_its_last_invocation(tmp_path: Path) -> None:
    """The plain adapter from 0 on; one that is not invoked not at all."""
    tiny = TinyLlama()
    options = [{}, {"invocation_tokens": (8, 9)}, {"invocation_tokens": (1, 1)}]
    paths = [tmp_path / f"{i}.gguf" for i in range(3)]
    for path, option in zip(paths, options, strict=True):
        TinyAdapter(**option).write(path, tiny)  # type: ignore[arg-type]
    with Model.load(tiny.write(tmp_path / "m.gguf"), n_threads=1) as model:
        plain, activated, absent = map(model.load_adapter, paths)
        scales = [(plain, 1.0), (activated, 0.5), (absent, 2.0), (plain, 0.25)]
        parts = lone_parts([8, 9, 5, 8, 9, 6], scales)
    assert parts == [(0, {plain: 1.25}), (3, {plain: 1.25, activated: 0.5})]
