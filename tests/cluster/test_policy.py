"""The order of replicas: consistent, bounded, and the same for whoever asks."""

from __future__ import annotations

import pytest

from loragraph.cluster.fleet import AdapterKey, Fleet, ReplicaView
from loragraph.cluster.policy import (
    POLICIES,
    Affine,
    AffineOptions,
    Hash,
    Policy,
    Random,
    RequestKey,
    Sticky,
)
from loragraph.errors import CapacityError, ConfigError

IDS = [f"replica-{i}" for i in range(20)]
A, B = AdapterKey("a", 1), AdapterKey("b", 2)


def fleet_of(loads: dict[str, float] | None = None, ids: list[str] = IDS) -> Fleet:
    """Idle replicas but for those named."""
    return Fleet(ReplicaView(id_, (loads or {}).get(id_, 0.0)) for id_ in ids)


def request_of(
    *adapters: AdapterKey, id_: str = "r", prefix: str = "", version: int = 0
) -> RequestKey:
    """A request for a mix."""
    return RequestKey(id_, frozenset(adapters), prefix, version)


def first(policy: Policy, request: RequestKey, fleet: Fleet) -> str:
    """Where a request goes."""
    return policy.route(request, fleet).ids(fleet)[0]


def names_of(n: int) -> list[AdapterKey]:
    """Many adapters."""
    return [AdapterKey(f"adapter-{i}", 1) for i in range(n)]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("adapters", [(), (A,), (A, B)])
def test_a_route_is_each_eligible_replica_once_and_always_the_same(
    name: str, adapters: tuple[AdapterKey, ...]
) -> None:
    """Same figures, same order, whatever the order in which replicas were named."""
    views = [
        ReplicaView(id_, i / 10, frozenset({A}) if i % 3 else frozenset(), i == 4)
        for i, id_ in enumerate(IDS)
    ]
    fleet, turned = Fleet(views), Fleet(reversed(views))
    request = request_of(*adapters)
    got = POLICIES[name]().route(request, fleet).ids(fleet)
    assert got == POLICIES[name]().route(request, turned).ids(turned)
    assert sorted(got) == sorted(set(IDS) - {"replica-4"})


@pytest.mark.parametrize("name", POLICIES)
def test_without_a_replica_that_takes_work_a_request_is_refused(name: str) -> None:
    """All draining, or none at all: CapacityError."""
    for fleet in (Fleet(), Fleet([ReplicaView("x", draining=True)])):
        with pytest.raises(CapacityError, match="expected a replica"):
            POLICIES[name]().route(request_of(A), fleet)


@pytest.mark.parametrize("policy", [Hash(), Affine()])
def test_a_replica_that_joins_takes_its_share_and_nothing_else_moves(policy: Policy) -> None:
    """1/n of the adapters move, all of them to the new one; when it leaves they go back."""
    before, after = fleet_of(ids=IDS[:-1]), fleet_of()
    moved = 0
    for adapter in names_of(2000):
        old, new = (first(policy, request_of(adapter), fleet) for fleet in (before, after))
        if old != new:
            assert new == IDS[-1]
            moved += 1
    assert 60 < moved < 140  # 100 expected; five standard deviations of 9.7 at most
    after.remove(IDS[-1])
    assert all(
        first(policy, request_of(one), before) == first(policy, request_of(one), after)
        for one in names_of(200)
    )


def test_names_spread_evenly() -> None:
    """No replica is first for far more adapters than another."""
    fleet = fleet_of()
    counts = dict.fromkeys(IDS, 0)
    for adapter in names_of(4000):
        counts[first(Affine(), request_of(adapter), fleet)] += 1
    assert min(counts.values()) > 140
    assert max(counts.values()) < 260


def test_a_hot_adapter_spreads_in_its_order_and_shrinks_again() -> None:
    """Each replica takes it until it is busy, then the next one; idle, the first has it again."""
    fleet, policy = fleet_of(), Affine()
    order = fleet.order_of("a").tolist()
    used: list[int] = []
    for i in range(60):  # each request one tenth of a replica, none ends
        index = int(policy.route(request_of(A, id_=str(i)), fleet).order[0])
        if index not in used:
            used.append(index)
        fleet.hold(index, A)
        fleet.set_load(index, fleet.loads[index] + 0.1)
    assert used == order[: len(used)]
    assert 6 <= len(used) <= 12
    for index in range(len(IDS)):
        fleet.set_load(index, 0.0)
    assert int(policy.route(request_of(A), fleet).order[0]) == order[0]


def test_a_new_generation_comes_to_where_the_old_one_was() -> None:
    """The order is that of the name."""
    fleet = fleet_of()
    assert first(Affine(), request_of(A), fleet) == first(
        Affine(), request_of(A._replace(generation=9)), fleet
    )


def test_of_the_first_with_room_the_one_that_holds_the_adapter_goes_first() -> None:
    """A resident one within reach beats the order; beyond it, it does not."""
    policy = Affine(AffineOptions(reach=3))
    for place, wins in ((2, True), (3, False)):
        fleet = fleet_of()
        order = fleet.order_of("a").tolist()
        fleet.hold(order[place], A)
        expected = order[place] if wins else order[0]
        assert policy.route(request_of(A), fleet).order[0] == expected


def test_an_adapter_that_nobody_holds_goes_to_the_least_loaded_within_reach() -> None:
    """And stays there, though that one is not the first in its order."""
    fleet = fleet_of(dict.fromkeys(IDS, 0.2))
    order = fleet.order_of("a").tolist()
    fleet.set_load(order[2], 0.1)
    fleet.set_load(order[4], 0.0)
    assert Affine().route(request_of(A), fleet).order[0] == order[2]
    fleet.hold(order[2], A)
    fleet.set_load(order[2], 0.4)
    assert Affine().route(request_of(A), fleet).order[0] == order[2]


def test_a_cached_prefix_decides_among_those_that_hold_the_adapter() -> None:
    """But an adapter to load weighs more than a prefix to compute."""
    fleet = fleet_of()
    order = fleet.order_of("a").tolist()
    fleet.learn_prefix(order[1], "p")
    fleet.hold(order[0], A)
    assert Affine().route(request_of(A, prefix="p"), fleet).order[0] == order[0]
    fleet.hold(order[1], A)
    assert Affine().route(request_of(A, prefix="p"), fleet).order[0] == order[1]
    fleet.forget_prefix(order[1], "p")
    assert Affine().route(request_of(A, prefix="p"), fleet).order[0] == order[0]


def test_a_replica_that_is_behind_the_catalogue_yields_to_an_equal_one() -> None:
    """It would have to read the catalogue first."""
    order = fleet_of().order_of("a").tolist()
    fleet = Fleet(
        ReplicaView(id_, catalogue_version=0 if i == order[0] else 5)
        for i, id_ in enumerate(sorted(IDS))
    )
    assert Affine().route(request_of(A, version=5), fleet).order[0] == order[1]
    assert Affine().route(request_of(A, version=0), fleet).order[0] == order[0]


def test_a_mix_follows_its_most_constrained_adapter() -> None:
    """The one that the fewest replicas hold; one that nobody holds constrains nothing."""
    fleet = fleet_of()
    for index in fleet.order_of("a").tolist()[:5]:
        fleet.hold(index, A)
    assert Affine().route(request_of(A, B), fleet).by == A
    home = fleet.order_of("b").tolist()[0]
    fleet.hold(home, B)
    route = Affine().route(request_of(A, B), fleet)
    assert (route.by, route.order[0]) == (B, home)


def test_a_draining_holder_does_not_constrain_a_mix() -> None:
    """Nobody can be sent there."""
    fleet = Fleet(
        [
            ReplicaView("x", resident=frozenset({B}), draining=True),
            ReplicaView("y", resident=frozenset({A})),
            ReplicaView("z", resident=frozenset({A})),
        ]
    )
    assert Affine().route(request_of(A, B), fleet).by == A


def test_when_all_are_busy_the_order_holds_up_to_the_bound() -> None:
    """Above the bound the least loaded comes first; those that queue below it keep their order."""
    order = fleet_of().order_of("a").tolist()
    ids = sorted(IDS)
    loads = dict.fromkeys(ids, 2.0) | {ids[order[0]]: 4.0, ids[order[1]]: 3.0}
    got = Affine().route(request_of(A), fleet_of(loads)).order.tolist()
    assert got == [*order[2:], order[1], order[0]]


def test_a_replica_where_a_request_would_queue_yields_to_one_with_room() -> None:
    """Even where the mean allows more."""
    order = fleet_of().order_of("a").tolist()
    ids = sorted(IDS)
    loads = dict.fromkeys(ids, 0.99) | {ids[order[0]]: 1.0}
    got = Affine().route(request_of(A), fleet_of(loads)).order.tolist()
    assert got == [*order[1:], order[0]]


def test_the_base_takes_the_less_loaded_of_two_random_replicas() -> None:
    """So the fullest gets nothing, and no replica gets all."""
    fleet = fleet_of({IDS[0]: 0.9})
    seen = {first(Affine(), request_of(id_=str(i)), fleet) for i in range(400)}
    assert seen == set(IDS[1:])


def test_the_base_goes_to_its_prefix_if_one_of_the_two_has_it() -> None:
    """Unless that one is busy."""
    fleet = fleet_of(dict.fromkeys(IDS, 0.1))
    one, two = Affine().route(request_of(), fleet).order[:2].tolist()
    fleet.learn_prefix(two, "p")
    assert Affine().route(request_of(prefix="p"), fleet).order[0] == two
    fleet.set_load(two, 0.6)
    assert Affine().route(request_of(prefix="p"), fleet).order[0] == one


def test_sticky_keeps_a_hot_adapter_where_it_is() -> None:
    """What affinity without spill does, whatever the load."""
    fleet = fleet_of({IDS[7]: 50.0})
    fleet.hold(fleet.index(IDS[7]), A)
    assert first(Sticky(), request_of(A), fleet) == IDS[7]
    assert first(Sticky(), request_of(A, B), fleet) != IDS[7]


def test_random_knows_neither_load_nor_residency() -> None:
    """All replicas get their share."""
    fleet = fleet_of({IDS[0]: 50.0})
    fleet.hold(3, A)
    assert {first(Random(), request_of(A, id_=str(i)), fleet) for i in range(400)} == set(IDS)


def test_a_report_replaces_what_was_known_or_assumed() -> None:
    """An adapter that was expected to be loaded, but was not, is forgotten with the next report."""
    fleet = fleet_of()
    index = fleet.index(IDS[2])
    fleet.hold(index, A)
    fleet.release(index, B)  # never held: nothing happens
    fleet.put(ReplicaView(IDS[2], 0.5, frozenset({B}), prefixes=frozenset({"p"})))
    assert fleet.holders(A) == set()
    assert fleet.holders(B) == {index}
    assert fleet.has_prefix(index, "p")
    fleet.put(ReplicaView(IDS[2], draining=True))
    assert IDS[2] not in Affine().route(request_of(A), fleet).ids(fleet)
    fleet.put(ReplicaView("new"))
    assert "new" in Affine().route(request_of(A), fleet).ids(fleet)


@pytest.mark.parametrize("load", [-1.0, float("nan"), float("inf")])
def test_a_load_has_to_be_a_number(load: float) -> None:
    """A report that says otherwise is refused."""
    with pytest.raises(ConfigError, match="expected a load"):
        Fleet([ReplicaView("x", load)])


def test_ids_differ() -> None:
    """Two replicas of one name are a mistake."""
    with pytest.raises(ConfigError, match="twice"):
        Fleet([ReplicaView("x"), ReplicaView("x")])


@pytest.mark.parametrize(
    "options", [{"max_relative": 0.9}, {"min_load": 2.0}, {"max_load": float("inf")}, {"reach": 0}]
)
def test_bounds_that_mean_nothing_are_refused(options: dict[str, float]) -> None:
    """With the name of the field."""
    with pytest.raises(ConfigError) as caught:
        AffineOptions(**options)  # type: ignore[arg-type]
    assert caught.value.field in options
