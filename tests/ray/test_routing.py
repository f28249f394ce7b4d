"""The router's decision, with replicas that are figures alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from loragraph.cluster.fleet import AdapterKey
from loragraph.ray.hint import Hint
from loragraph.ray.routing import Routing

X = AdapterKey("x", 3)


class Clock:
    """Seconds by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def report(busy: float = 0, resident: Any = (), **more: Any) -> dict[str, Any]:
    """What a replica says."""
    return {"busy": busy, "capacity": 4, "resident": resident, "draining": False, **more}


def routed(*ids: str) -> Routing:
    """With idle replicas."""
    routing = Routing(clock=Clock())
    routing.update({id_: report() for id_ in ids})
    return routing


def hint(*adapters: AdapterKey, number: int = 0, **more: Any) -> Hint:
    """Of one request."""
    return Hint(f"request-{number}", adapters=adapters, **more)


def test_a_cold_adapter_stays_on_one_replica() -> None:
    """One request after the other goes to the same, whatever its id."""
    routing = routed("a", "b", "c")
    firsts = set()
    for number in range(20):
        first = routing.order(hint(X, number=number))[0]
        routing.sent(first, hint(X))
        routing.ended(first)
        firsts.add(first)
    assert len(firsts) == 1


def test_a_hot_adapter_spreads_and_shrinks_again() -> None:
    """With 8 requests at once over replicas of 4 it is on several; alone, on the first again."""
    routing = routed("a", "b", "c")
    home = routing.order(hint(X))[0]
    went = Counter[str]()
    for number in range(8):
        first = routing.order(hint(X, number=number))[0]
        routing.sent(first, hint(X))
        went[first] += 1
    assert len(went) >= 2
    assert max(went.values()) <= 4
    for id_, n in went.items():
        for _ in range(n):
            routing.ended(id_)
    assert routing.order(hint(X))[0] == home


def test_requests_of_the_base_go_everywhere() -> None:
    """By two random choices."""
    routing = routed("a", "b", "c")
    went = {routing.order(hint(number=number))[0] for number in range(50)}
    assert went == {"a", "b", "c"}


def test_where_an_adapter_is_resident_goes_first() -> None:
    """Even if its home is another; the generation counts."""
    for holder in "abc":
        routing = Routing(clock=Clock())
        reports = {id_: report() for id_ in "abc"}
        reports[holder] = report(resident=[["x", 3]])
        routing.update(reports)
        assert routing.order(hint(X))[0] == holder
    old = Routing(clock=Clock())
    old.update({id_: report(resident=[["x", 2]] if id_ == "a" else []) for id_ in "abc"})
    assert old.order(hint(X)) == routed("a", "b", "c").order(hint(X))


def test_a_draining_replica_takes_no_new_work() -> None:
    """It is in no order, and with none left there is no order."""
    routing = Routing(clock=Clock())
    routing.update({"a": report(draining=True), "b": report()})
    assert {routing.order(hint(X, number=i))[0] for i in range(9)} == {"b"}
    assert "a" not in routing.order(hint())
    routing.update({"a": report(draining=True), "b": report(draining=True)})
    assert routing.order(hint()) == []


def test_a_replica_without_a_report_is_used() -> None:
    """It has just started: {} is all that is known of it."""
    routing = Routing(clock=Clock())
    routing.update({"a": {}})
    assert routing.order(hint(X)) == ["a"]


def test_replicas_that_failed_come_last() -> None:
    """And still come, as there may be no others."""
    routing = routed("a", "b", "c")
    first = routing.order(hint(X))[0]
    order = routing.order(hint(X).without(first))
    assert order[-1] == first
    assert set(order) == {"a", "b", "c"}


def test_sticky_requests_go_to_one_replica() -> None:
    """Whatever the load."""
    routing = routed("a", "b", "c")
    first = routing.order(hint(sticky="w"))[0]
    for _ in range(9):
        routing.sent(first, hint())
    assert routing.order(hint(number=5, sticky="w"))[0] == first


def test_the_base_goes_where_its_prefix_is() -> None:
    """Of the two choices, the one that computed it."""
    routing = routed("a", "b")
    went = set()
    for number in range(12):
        first = routing.order(hint(number=number, prefix="p"))[0]
        routing.sent(first, hint(prefix="p"))
        routing.ended(first)
        went.add(first)
    assert len(went) == 1


def test_what_was_sent_counts_until_it_is_reported() -> None:
    """An adapter on its way counts as held for ten seconds, through reports from before."""
    routing, clock = Routing(), Clock()
    routing._clock = clock
    routing.update({"a": report(), "b": report()})
    home = routing.order(hint(X))[0]
    other = "ab".replace(home, "")
    routing.sent(other, hint(X))
    routing.ended(other)
    routing.update({"a": report(), "b": report()})
    assert routing.order(hint(X))[0] == other
    clock.now = 11.0
    routing.update({"a": report(), "b": report()})
    assert routing.order(hint(X))[0] == home


def test_a_replica_that_joins_changes_no_figures_of_the_others() -> None:
    """Requests under way and adapters on their way are remembered."""
    routing = routed("a", "b")
    for _ in range(4):
        routing.sent("a", hint(X))
    known = {id_: report() for id_ in "ab"}
    routing.update({**known, "c": report()})
    assert routing.order(hint(X))[0] != "a"
    assert routing._fleet.loads[routing._fleet.index("a")] == 1.0
    assert routing._fleet.index("a") in routing._fleet.holders(X)
    routing.update({"b": known["b"]})
    routing.ended("a")  # of one that has gone: nothing
    assert routing.order(hint(X)) == ["b"]


def test_a_replica_that_the_client_asks_for_comes_first() -> None:
    """Even if others are idle, unless it drains or failed the request; a word that names none is
    no replica's.
    """
    routing = routed("a", "b", "c")
    busy = {"a": report(7), "b": report(7), "c": report(0, draining=True)}
    routing.update(busy)
    for wanted, other in (("a", "b"), ("b", "a")):
        for asked in (hint(X, prefer=wanted), hint(prefer=wanted), hint(sticky="s", prefer=wanted)):
            assert [id_ for id_ in routing.order(asked) if id_ != "c"] == [wanted, other]
            again = routing.order(asked.without(wanted))
            assert [id_ for id_ in again if id_ != "c"] == [other, wanted]
    for wanted in ("c", "x"):
        assert routing.order(hint(X, prefer=wanted)) == routing.order(hint(X))


def test_clients_overloaded_the_replica_that_they_asked_for() -> None:
    """From where as many wait as run it gets no more of them than others; it has them again when
    it has worked them off.
    """
    routing = routed("a", "b", "c")
    went = Counter[str]()
    for number in range(20):
        first = routing.order(hint(number=number, prefer="a"))[0]
        routing.sent(first, hint())
        went[first] += 1
    assert went["a"] == 8
    assert min(went["b"], went["c"]) > 0
    for asked in (hint(prefer="a"), hint(X, prefer="a")):
        assert routing.order(asked) == routing.order(replace(asked, prefer=""))
    routing.ended("a")
    assert routing.order(hint(prefer="a"))[0] == "a"


def test_what_is_about_one_replica_goes_there_however_busy_it_is() -> None:
    """Its slots are nobody else's."""
    routing = routed("a", "b", "c")
    routing.update({"a": report(99), "b": report(), "c": report()})
    assert routing.order(hint(sticky="figures", prefer="a"))[0] == "a"
