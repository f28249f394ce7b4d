"""The tables, verdicts and figures of scripts/bench serve, from made-up measurements."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import gguf
import numpy as np
import pytest

from benchmarks import adapter_memory, chart, first_token, idle, models, peer, throughput
from benchmarks.adapter_memory import Memory, Registering
from benchmarks.first_token import ALORA, LORA, STAYS, TURNS, Wait
from benchmarks.idle import Idle
from benchmarks.serve import Figures, arguments
from benchmarks.targets import Samples
from benchmarks.throughput import Cell
from tests.tiny import TinyAdapter, TinyLlama


def cells(n: int, **speeds: tuple[float, float, float]) -> list[Cell]:
    """By mode: ours, llama-server's with separate and with unified KV."""
    names = ("loragraph", "llama-server", "llama-server -kvu")
    return [
        Cell("Q4_0", mode, n, name, value, value - 1, value + 1)
        for mode, values in speeds.items()
        for name, value in zip(names, values, strict=True)
    ]


def wait(case: str, server: str, ms: float) -> Wait:
    """A figure whose rounds agree."""
    return Wait(case, server, Samples(ms, ms, ms))


AT_8 = cells(8, none=(400, 300, 200), one=(500, 200, 250), each=(410, 90, 100))
WAITS = [
    *(wait(TURNS, "loragraph", 10), wait(TURNS, "llama-server", 400)),
    *(wait(TURNS, "llama-server -kvu", 150), wait(ALORA, "loragraph", 12)),
]


def test_the_table_sets_ours_beside_the_better_layout() -> None:
    """Each figure has its own better layout."""
    assert throughput.markdown(AT_8).splitlines()[2:] == [
        "| Q4_0 | 8 | no adapter | 300 | 400 | 1.33 |  |",
        "| Q4_0 | 8 | one for all | 250 | 500 | 2.00 |  |",
        "| Q4_0 | 8 | each its own | 100 | 410 | 4.10 | 82% |",
    ]


def test_the_table_needs_no_peer() -> None:
    """Without one there is no ratio and no target over it."""
    ours = [cell for cell in AT_8 if cell.server == "loragraph"]
    assert "| Q4_0 | 8 | each its own |  | 410 |  | 82% |" in throughput.markdown(ours)
    assert [target.unit for target in throughput.targets(ours)] == ["of one for all"]


def test_throughput_is_held_to_the_bounds_of_its_number_of_requests() -> None:
    """8 and 32 requests have bounds of their own, one alone those of an adapter's cost."""
    at_1 = cells(1, none=(99, 100, 90), one=(115, 100, 90), each=(114, 100, 90))
    at_32 = cells(32, none=(100, 100, 90), one=(800, 100, 90), each=(510, 90, 100))
    found = {(t.what, t.unit): (t.low, t.met) for t in throughput.targets(at_1 + AT_8 + at_32)}
    peer_unit, own_unit = "times llama-server", "of one for all"
    assert found == {
        ("Q4_0, 1 request, no adapter", peer_unit): (1.0, False),
        ("Q4_0, 1 request, one for all", peer_unit): (1.15, True),
        ("Q4_0, 1 request, each its own", peer_unit): (1.15, False),
        ("Q4_0, 8 requests, no adapter", peer_unit): (1.0, True),
        ("Q4_0, 8 requests, each its own", peer_unit): (3.3, True),
        ("Q4_0, 8 requests, each its own", own_unit): (0.8, True),
        ("Q4_0, 32 requests, no adapter", peer_unit): (1.0, True),
        ("Q4_0, 32 requests, each its own", peer_unit): (5.0, True),
        ("Q4_0, 32 requests, each its own", own_unit): (0.65, False),
    }


def test_first_tokens_in_turns_are_held_to_the_faster_layout() -> None:
    """15 times faster than the better one is not 20, whatever the other one takes."""
    (target,) = first_token.targets(WAITS)
    assert (target.value, target.met) == (15.0, False)
    assert first_token.markdown(WAITS).splitlines()[2:] == [
        f"| {TURNS} | 150 | 10 | 15.0 |",
        f"| {ALORA} |  | 12 |  |",
    ]
    assert first_token.targets([wait(STAYS, "loragraph", 10), wait(LORA, "loragraph", 9)]) == []


def memory(n: int, server: str, registered: float, used: float | None) -> Memory:
    """Memory without mapped pages."""
    both = [None if v is None else Samples(v, v, v) for v in (registered, used)]
    assert both[0] is not None
    return Memory(n, server, "RssAnon", both[0], both[1])


MEMORY = [
    memory(8, "loragraph", 145, 220),
    memory(8, "llama-server", 300, 310),
    memory(8, "llama-server -kvu", 262, 270),
    memory(1000, "loragraph", 150, None),
]


def test_memory_is_compared_with_the_smaller_layout() -> None:
    """llama-server has no figure for 1,000."""
    assert adapter_memory.markdown(MEMORY).splitlines()[2:] == [
        "| 8 | RssAnon | 145 | 220 | 262 | 270 |",
        "| 1000 | RssAnon | 150 |  |  |  |",
    ]


@pytest.mark.parametrize(
    ("unit", "unused", "cost", "met"),
    [
        ("tokens/s", 99.0, 0.01, True),
        ("tokens/s", 94.0, 0.06, False),
        ("tokens/s", 120.0, -0.2, True),
        ("ms", 102.0, 0.02, True),
        ("ms", 108.0, 0.08, False),
    ],
)
def test_unused_adapters_may_cost_no_more_than_rounds_differ(
    unit: str, unused: float, cost: float, met: bool
) -> None:
    """Less speed or more time; the rounds of the server without them are 5 % apart at most."""
    row = Idle("requests", unit, Samples(100, 95, 102), Samples(unused, unused, unused))
    assert row.cost == pytest.approx(cost)
    (target,) = idle.targets([row])
    assert (target.high, target.met) == (5.0, met)


@pytest.mark.parametrize(("low", "high", "bound"), [(99, 101, 3.0), (70, 101, 10.0)])
def test_neither_calm_nor_wild_rounds_move_the_bound_far(
    low: float, high: float, bound: float
) -> None:
    """3 % at least, 10 % at most."""
    row = Idle("requests", "ms", Samples(100, low, high), Samples(100, 100, 100))
    assert [target.high for target in idle.targets([row])] == [bound]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--parts", "memory,nonsense"], "got nonsense"),
        (["--parts", "idle", "--chart", "a.png"], "--chart draws throughput"),
    ],
)
def test_what_cannot_be_run_is_told_before_measuring(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not after hours of it."""
    with pytest.raises(SystemExit):
        arguments(words)
    assert told in capsys.readouterr().err


def test_one_json_holds_all_figures_and_their_targets() -> None:
    """What the chart and the README come from."""
    figures = Figures(cells=AT_8, waits=WAITS, memory=MEMORY)
    figures.registering = Registering(1000, Samples(250, 240, 260), Samples(9, 8, 10))
    read = json.loads(json.dumps(figures.as_json()))
    assert {"cells", "waits", "memory", "registering", "idle", "targets"} == set(read)
    assert [target["met"] for target in read["targets"]].count(False) == 1
    text = figures.markdown()
    assert "registering 1000 files: 250 ms (0.25 ms each); a first load: 9.0 ms" in text
    assert text.endswith("3 of 4 targets met")


def test_a_run_without_figures_has_no_verdict() -> None:
    """Parts that were left out say nothing."""
    assert Figures().markdown() == ""


def test_the_chart_takes_the_better_layout() -> None:
    """The same choice as in the tables, and only what is there."""
    read = Figures(cells=AT_8, waits=WAITS, memory=MEMORY).as_json()
    assert chart.best_cell(read["cells"], "one", "llama-server") == (250, 249, 251)
    assert chart.best_cell(read["cells"], "none", "nobody") is None
    panels = {panel["title"]: panel for panel in chart.other_panels(read)}
    assert list(panels) == [
        "first token over a shared prompt",
        "registered adapters",
        "used adapters",
    ]
    waits = panels["first token over a shared prompt"]["bars"]["llama-server"]
    assert waits == [(150, 150, 150), None]


def test_numbered_adapters_have_bytes_of_their_own_and_take_no_disk(tmp_path: Path) -> None:
    """Each is a whole adapter file with other bytes than the next."""
    source = tmp_path / "a.gguf"
    TinyAdapter(rank=64).write(source, TinyLlama())
    made = models.numbered_adapters(source, tmp_path, 3)
    assert len({path.read_bytes() for path in made}) == 3
    assert {path.stat().st_size for path in made} == {source.stat().st_size}
    first = gguf.GGUFReader(made[0]).tensors[0]
    assert np.count_nonzero(first.data) == 1
    before = made[0].stat().st_mtime_ns
    assert models.numbered_adapters(source, tmp_path, 2) == made[:2]
    assert made[0].stat().st_mtime_ns == before


def test_a_peer_that_is_not_there_is_told_before_measuring(tmp_path: Path) -> None:
    """A wrong path, no package, and a program."""
    parser = argparse.ArgumentParser()
    peer.peer_argument(parser)
    with pytest.raises(FileNotFoundError, match="--peer"):
        peer.peer_of(parser.parse_args(["--peer", str(tmp_path / "none-such")]))
    assert peer.peer_of(parser.parse_args(["--peer", "none"])) is None
    assert peer.installed_peer("no-such-package-at-all") is None
    program = tmp_path / "llama-server"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert peer.peer_of(parser.parse_args(["--peer", str(program)])) == program
