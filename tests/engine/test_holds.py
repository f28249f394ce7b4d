"""Holds of adapters while their names are swapped, and while they load."""

from __future__ import annotations

from loragraph.engine.holds import Hold
from loragraph.errors import CapacityError, GGUFError
from tests.engine.fake_engine import FakeEngine


def engine_with(*names: str, n_slots: int = 8) -> FakeEngine:
    """With these adapters."""
    engine = FakeEngine(n_slots=n_slots)
    for name in names:
        engine.register(name)
    return engine


def held(engine: FakeEngine, hold: Hold) -> Hold:
    """It, on its way."""
    engine.core.hold(hold)
    return hold


def test_a_pin_whose_name_is_swapped_while_it_loads_holds_nothing() -> None:
    """No name would lead to it any more."""
    engine = engine_with("a")
    hold = held(engine, Hold(engine.registry.resolve("a"), pin=True))
    engine.register("a", "other")
    engine.load()
    assert hold.outcome.result(0) is None
    assert not engine.core.holds.pinned
    engine.check_idle()
    assert engine.core.residency.pool.stats.n_resident == 0


def test_a_retired_generation_is_not_loaded_for_a_pin() -> None:
    """Nor for a preload; who keeps it by himself still gets it."""
    engine = engine_with("a")
    old = engine.registry.resolve("a")
    engine.register("a", "other")
    for hold in (Hold(old, pin=True), Hold(old)):
        assert held(engine, hold).outcome.result(0) is None
    assert not engine.loading
    hold = held(engine, Hold(old, keep=True))
    engine.load()
    assert hold.outcome.result(0) is None
    assert old in engine.core.residency.adapters
    engine.core.holds.drop([hold])
    engine.check_idle()
    assert engine.core.residency.pool.stats.n_resident == 0


def test_what_one_keeps_no_unpin_and_no_swap_takes_from_him() -> None:
    """It is no pin either."""
    engine = engine_with("a")
    old = engine.registry.resolve("a")
    kept, pin = (held(engine, one) for one in (Hold(old, keep=True), Hold(old, pin=True)))
    engine.load()
    assert engine.core.holds.pinned == {old}
    engine.core.holds.unpin(old)
    assert engine.core.residency.pool.n_users(old) == 1
    engine.register("a", "other")
    assert old in engine.core.residency.adapters
    engine.core.holds.drop([kept, pin])
    engine.check_idle()


def test_a_hold_that_is_dropped_while_it_loads_is_gone() -> None:
    """The end of its load found a hold without a ticket, which ended the engine's thread."""
    engine = engine_with("a")
    hold = held(engine, Hold(engine.registry.resolve("a"), keep=True))
    engine.core.holds.drop([hold])
    engine.load()
    assert not hold.outcome.done()
    engine.check_idle()


def test_pins_give_way_to_what_replaces_them_only_where_there_is_no_room() -> None:
    """They are back once the new one fails, before its caller learns of it."""
    for n_slots, stays in ((1, False), (2, True)):
        engine = engine_with("a", n_slots=n_slots)
        old = engine.registry.resolve("a")
        held(engine, Hold(old, pin=True))
        engine.load()
        engine.files["bad"], engine.invocations["bad"] = GGUFError("damaged"), ()
        new = engine.registry.make("a", "bad")
        hold = held(engine, Hold(new, pin=True, replaces=old))
        assert (old in engine.core.holds.pinned) == stays
        engine.load(1)
        assert isinstance(hold.outcome.result(0), GGUFError)
        engine.load()
        assert engine.core.holds.pinned == {old}
        assert old in engine.core.residency.adapters
        engine.core.residency.pool.check_invariants()


def test_pins_are_as_before_where_what_replaces_them_has_no_room_at_all() -> None:
    """Another's pin takes what is left."""
    engine = engine_with("a", "b", n_slots=2)
    old = engine.registry.resolve("a")
    for name in "ab":
        held(engine, Hold(engine.registry.resolve(name), pin=True))
    engine.load()
    running = engine.submit("abc", {"a": 1.0}, max_tokens=50)
    engine.step()
    engine.invocations["new"] = ()
    engine.files["new"] = engine.loaded[0]
    hold = held(engine, Hold(engine.registry.make("a", "new"), replaces=old))
    assert isinstance(hold.outcome.result(0), CapacityError)
    assert old in engine.core.holds.pinned
    engine.finish()
    assert running.result.text
