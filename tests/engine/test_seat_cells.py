"""Cells by seat: a running sequence's, the last one's, and what may be dropped of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loragraph.adapters.mix import EMPTY_MIX
from loragraph.engine.engine import Engine
from loragraph.engine.model import Model
from loragraph.engine.params import SamplingParams
from loragraph.engine.request import Request
from loragraph.engine.seat_cells import erase_seat, read_seat, save_seat
from loragraph.engine.seats import Seats, SeatTokens
from loragraph.engine.sequence import Segment, Sequence
from loragraph.errors import InvalidRequestError, LifecycleError
from tests.engine.test_session import STEM, Rig


def test_a_sequence_that_runs(model: Model, tmp_path: Path) -> None:
    """Its cells can be saved, not dropped; once it has ended they can."""
    with Rig(model) as rig:
        sequence, seats = rig.sequence(STEM), Seats(2)
        core: Any = SimpleNamespace(seats=seats, scheduler=rig.scheduler)
        seats.take(sequence)
        rig.run(sequence)

        path = tmp_path / "a"
        assert save_seat(path, 0, core, rig.context._runner, model.fingerprint) == len(STEM)
        with pytest.raises(LifecycleError, match="seat 0"):
            erase_seat(0, core)
        assert rig.scheduler.tree.stats.n_cached == len(STEM)
        seats.leave(sequence)
        assert erase_seat(0, core) == len(STEM)
        rig.scheduler.tree.check()
        assert rig.scheduler.tree.stats.n_cached == 0
        assert read_seat(path) == SeatTokens(STEM, [(("", ()), 0, len(STEM))])


def test_a_seat_keeps_the_tokens_of_its_last_sequence() -> None:
    """As they are when it leaves: a preempted one goes on elsewhere."""
    seats = Seats(1)
    sequence = Sequence(1, [1, 2, 3], 3, (Segment(0, EMPTY_MIX),), 5)
    assert seats.tokens(0) == SeatTokens([], [])
    seats.take(sequence)
    sequence.tokens.append(4)
    assert seats.tokens(0).tokens == [1, 2, 3, 4]
    seats.leave(sequence)
    sequence.tokens.append(5)

    assert seats.tokens(0) == SeatTokens([1, 2, 3, 4], [(("", ()), 0, 4)])


def test_seats_that_are_none(model: Model, tmp_path: Path) -> None:
    """Refused before a file is touched."""
    with Engine(model, n_ctx=256, max_sequences=2) as engine:
        for seat in (-1, 2):
            for act in (
                lambda seat: engine.save_seat(tmp_path / "a", seat),
                lambda seat: engine.restore_seat(tmp_path / "a", seat),
                engine.erase_seat,
            ):
                with pytest.raises(InvalidRequestError, match="seat"):
                    act(seat)
    assert not (tmp_path / "a").exists()


def test_restored_in_another_engine(model: Model, tmp_path: Path) -> None:
    """What one process saved another finds, as far as it has cells."""
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with Engine(model, n_ctx=256) as engine:
        text = engine.run(Request(STEM, params=params)).text
        assert engine.save_seat(tmp_path / "a", 0) == len(STEM) + 2
    with Engine(model, n_ctx=32) as engine:
        assert engine.restore_seat(tmp_path / "a", 1) == 32
    with Engine(model, n_ctx=256) as engine:
        assert engine.restore_seat(tmp_path / "a", 1) == len(STEM) + 2
        again = engine.run(Request(STEM, params=params))
    assert again.text == text
    assert again.n_cached == len(STEM) - 1
