"""Residency: budgets, pins, who is dropped, failed loads."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from loragraph.engine.pool import Grant, Pool, State
from loragraph.errors import CapacityError, GGUFError


class Setting:
    """A pool of adapters called by letters, a clock, and what left."""

    def __init__(self, n_slots: int = 2, max_bytes: int | None = None) -> None:
        self.now = 0.0
        self.left: list[str] = []
        self.pool: Pool[str] = Pool(n_slots, max_bytes, lambda: self.now, self.left.append)
        self._tickets = iter(range(10**6))

    def load_all(self) -> None:
        """Ends every load well."""
        while self.pool.to_load:
            self.pool.loaded(self.pool.to_load.popleft(), 10)

    def use(self, letters: str) -> int:
        """Acquires and loads; the ticket."""
        ticket = next(self._tickets)
        grant = self.pool.acquire(ticket, sizes(letters))
        assert grant is not Grant.BLOCKED
        self.load_all()
        return ticket

    def touch(self, letters: str) -> None:
        """Uses and lets go."""
        self.pool.release(self.use(letters))


def sizes(letters: str) -> dict[str, int]:
    """Ten bytes each."""
    return dict.fromkeys(letters, 10)


def test_the_longest_unused_leaves_first() -> None:
    """By the last release, not by the load."""
    setting = Setting()
    for letter in "abac":
        setting.touch(letter)
    assert setting.left == ["b"]


def test_what_is_held_never_leaves() -> None:
    """A wish that would need its slot is blocked, and holds nothing."""
    setting = Setting()
    ticket = setting.use("ab")
    assert setting.pool.acquire("other", sizes("c")) is Grant.BLOCKED
    assert setting.pool.stats.n_tickets == 1
    setting.pool.release(ticket)
    assert setting.pool.acquire("other", sizes("c")) is Grant.LOADING


def test_a_blocked_wish_drops_nothing() -> None:
    """All or none: what could be dropped stays where that is not enough."""
    setting = Setting()
    setting.use("a")
    setting.touch("b")
    assert setting.pool.acquire("other", sizes("cd")) is Grant.BLOCKED
    assert setting.left == []


def test_bytes_are_a_budget_beside_slots() -> None:
    """As many leave as the bytes ask for; one that is larger than reserved may fail."""
    setting = Setting(n_slots=8, max_bytes=25)
    setting.touch("a")
    setting.touch("b")
    assert setting.pool.acquire("big", {"c": 20}) is Grant.LOADING
    assert setting.left == ["a", "b"]
    with pytest.raises(CapacityError, match="30 bytes"):
        setting.pool.loaded("c", 30)


def test_what_is_loading_is_kept_for_who_asked() -> None:
    """From the wish on, even before it is loaded."""
    setting = Setting(n_slots=1)
    setting.pool.acquire("one", sizes("a"))
    assert setting.pool.acquire("two", sizes("b")) is Grant.BLOCKED
    setting.load_all()
    assert setting.pool.acquire("two", sizes("b")) is Grant.BLOCKED
    assert setting.pool.ready("one")


def test_a_failed_load_is_remembered_for_a_while() -> None:
    """The same error without another try; then another try."""
    setting = Setting()
    setting.pool.acquire("one", sizes("ab"))
    error = GGUFError("damaged")
    assert setting.pool.failed(setting.pool.to_load.popleft(), error) == ["one"]
    setting.pool.release("one")
    with pytest.raises(GGUFError):
        setting.pool.acquire("two", sizes("a"))
    setting.now = 6.0
    assert setting.pool.acquire("three", sizes("a")) is Grant.LOADING
    assert setting.pool.stats.n_failures == 1


def test_pins_leave_less_for_the_others() -> None:
    """What can never fit beside the pins is refused instead of waiting."""
    setting = Setting()
    setting.pool.acquire("pin", sizes("a"), pin=True)
    with pytest.raises(CapacityError, match="unpin"):
        setting.pool.acquire("one", sizes("bc"))
    assert setting.pool.acquire("two", sizes("ab")) is Grant.LOADING


def test_a_retired_one_leaves_with_its_last_user() -> None:
    """At once where nobody uses it."""
    setting = Setting()
    setting.touch("a")
    ticket = setting.use("b")
    setting.pool.retire("a")
    setting.pool.retire("b")
    assert setting.left == ["a"]
    setting.pool.release(ticket)
    assert setting.left == ["a", "b"]


@given(st.lists(st.sampled_from("abcde"), max_size=40), st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_lru_equals_its_naive_twin(letters: list[str], n_slots: int) -> None:
    """One at a time, the pool holds the last distinct letters used."""
    setting = Setting(n_slots)
    for letter in letters:
        setting.touch(letter)
    recent = list(dict.fromkeys(reversed(letters)))[:n_slots]
    assert set(setting.pool.keys()) == set(recent)


class PoolMachine(RuleBasedStateMachine):
    """Any order of wishes, loads, failures, releases, pins and retirements."""

    @initialize(n_slots=st.integers(1, 4), max_bytes=st.one_of(st.none(), st.integers(30, 90)))
    def start(self, n_slots: int, max_bytes: int | None) -> None:
        """A pool."""
        self.setting = Setting(n_slots, max_bytes)
        self.held: dict[int, Mapping[str, int]] = {}
        self.n = 0

    @rule(
        wanted=st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 30), min_size=1),
        pin=st.sampled_from([False, False, False, True]),
    )
    def acquire(self, wanted: dict[str, int], pin: bool) -> None:
        """A wish: granted in full, or nothing changes."""
        self.n += 1
        before = set(self.setting.pool.keys())
        try:
            self.setting.pool.check(wanted)
            grant = self.setting.pool.acquire(self.n, wanted, pin=pin)
        except (CapacityError, GGUFError):
            assert set(self.setting.pool.keys()) == before
            return
        if grant is Grant.BLOCKED:
            assert set(self.setting.pool.keys()) == before
        else:
            self.held[self.n] = wanted

    @precondition(lambda self: self.setting.pool.to_load)
    @rule(nbytes=st.integers(1, 40))
    def load(self, nbytes: int) -> None:
        """A load ends well, or has no room."""
        key = self.setting.pool.to_load.popleft()
        try:
            self.setting.pool.loaded(key, nbytes)
        except CapacityError as error:
            self.fail_with(key, error)

    @precondition(lambda self: self.setting.pool.to_load)
    @rule()
    def fail(self) -> None:
        """A load fails."""
        self.fail_with(self.setting.pool.to_load.popleft(), GGUFError("damaged"))

    def fail_with(self, key: str, error: CapacityError | GGUFError) -> None:
        """Its tickets are released."""
        for ticket in self.setting.pool.failed(key, error):
            self.setting.pool.release(ticket)
            assert isinstance(ticket, int)
            del self.held[ticket]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """A ticket ends."""
        ticket = data.draw(st.sampled_from(sorted(self.held)))
        del self.held[ticket]
        self.setting.pool.release(ticket)

    @rule(key=st.sampled_from("abcdefgh"))
    def retire(self, key: str) -> None:
        """A name means something else."""
        self.setting.pool.retire(key)

    @rule(seconds=st.floats(0, 4))
    def wait(self, seconds: float) -> None:
        """Time goes by."""
        self.setting.now += seconds

    @invariant()
    def what_is_held_is_there(self) -> None:
        """Nothing held has left; budgets are kept."""
        if not hasattr(self, "setting"):
            return
        pool = self.setting.pool
        pool.check_invariants()
        for wanted in self.held.values():
            assert all(pool.state(key) is not State.ABSENT for key in wanted)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
