"""The router's decision: replicas in the order in which a request tries them. Pure.

It sees what replicas report about twice a second, and what it sent itself since.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from loragraph.cluster.fleet import AdapterKey, Fleet, ReplicaView, hash_of, rendezvous
from loragraph.cluster.policy import Affine, AffineOptions, RequestKey
from loragraph.errors import CapacityError
from loragraph.ray.hint import Hint

_MAX_PREFIXES = 2048  # remembered of a replica
_MAX_ASKED_LOAD = 2.0  # from which on no client's wish counts: as many wait as run
_EXPECTED_S = 10.0  # for which an adapter counts as held where a request for it went


@dataclass(slots=True)
class _Replica:
    """What is known of one."""

    report: Mapping[str, Any] | None = None
    n_sent: int = 0  # requests from here that have not ended
    expected: dict[AdapterKey, float] = field(default_factory=dict)  # until when
    prefixes: OrderedDict[str, None] = field(default_factory=OrderedDict)


class Routing:
    """One router's view; for one thread."""

    def __init__(
        self,
        options: AffineOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy = Affine(options)
        self._clock = clock
        self._fleet = Fleet()
        self._replicas: dict[str, _Replica] = {}

    def update(self, reports: Mapping[str, Mapping[str, Any]]) -> None:
        """The replicas of now with their last reports: {} from one that has made none yet.

        Keys: capacity, busy (requests), resident ([name, generation] each), draining, version.
        """
        joined_or_left = self._replicas.keys() != reports.keys()
        for id_ in self._replicas.keys() - reports.keys():
            del self._replicas[id_]
            self._fleet.remove(id_)
        for id_, report in reports.items():
            replica = self._replicas.setdefault(id_, _Replica())
            if replica.report is not report or joined_or_left:  # a fleet forgets what is newer
                replica.report = report
                self._put(id_, replica)

    def order(self, hint: Hint) -> list[str]:
        """All replicas that take new work, best first; () where there is none.

        The one that the client asks for comes first, those that failed the request last.
        """
        prefer = self._asked_for(hint)
        if hint.sticky:
            ids, hashes = self._fleet.ids, self._fleet.hashes
            order = [ids[i] for i in rendezvous(hash_of(hint.sticky), hashes)]
        else:
            key = RequestKey(hint.request_id, frozenset(hint.adapters), hint.prefix, hint.version)
            try:
                order = self._policy.route(key, self._fleet).ids(self._fleet)
            except CapacityError:
                return []
        return sorted(order, key=lambda id_: (id_ in hint.avoid, id_ != prefer))  # stable

    def sent(self, id_: str, hint: Hint) -> None:
        """A request went there."""
        replica = self._replicas.get(id_)
        if replica is None:
            return
        replica.n_sent += 1
        index = self._fleet.index(id_)
        until = self._clock() + _EXPECTED_S
        for adapter in hint.adapters:
            replica.expected[adapter] = until
            self._fleet.hold(index, adapter)
        if hint.prefix:
            replica.prefixes[hint.prefix] = None
            replica.prefixes.move_to_end(hint.prefix)
            self._fleet.learn_prefix(index, hint.prefix)
            if len(replica.prefixes) > _MAX_PREFIXES:
                self._fleet.forget_prefix(index, replica.prefixes.popitem(last=False)[0])
        self._fleet.set_load(index, _load(replica))

    def ended(self, id_: str) -> None:
        """A request that went there has ended, however."""
        replica = self._replicas.get(id_)
        if replica is not None:
            replica.n_sent = max(0, replica.n_sent - 1)
            self._fleet.set_load(self._fleet.index(id_), _load(replica))

    def _asked_for(self, hint: Hint) -> str:
        """The replica that a client may have. What is about one replica's own is always for that
        one; else a client could let one replica queue while others are idle.
        """
        if hint.sticky or hint.prefer not in self._replicas:
            return hint.prefer
        load = float(self._fleet.loads[self._fleet.index(hint.prefer)])
        return hint.prefer if load < _MAX_ASKED_LOAD else ""

    def _put(self, id_: str, replica: _Replica) -> None:
        report = replica.report or {}
        now = self._clock()
        replica.expected = {key: t for key, t in replica.expected.items() if t > now}
        resident = {AdapterKey(str(name), int(n)) for name, n in report.get("resident", ())}
        self._fleet.put(
            ReplicaView(
                id_,
                _load(replica),
                frozenset(resident | replica.expected.keys()),
                bool(report.get("draining", False)),
                int(report.get("version", 0)),
                frozenset(replica.prefixes),
            )
        )


def _load(replica: _Replica) -> float:
    """What it said, or what was sent from here since: whichever is more."""
    report = replica.report or {}
    capacity = max(1, int(report.get("capacity", 1)))
    return max(float(report.get("busy", 0)), float(replica.n_sent)) / capacity
