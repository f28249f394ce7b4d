"""Which adapters there are, for all replicas: the state, its changes, its copies. Pure.

Each change has a version, one more than the last. An entry's generation is the version at which
its content was set, so generations grow, of a name and of the whole, and are never used twice. A
request resolves its names once; whoever serves it has to know at least the version of then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from typing import Any

from loragraph.cluster.content import MAX_F32, Content
from loragraph.engine.registry import check_name
from loragraph.errors import (
    AdapterChangedError,
    CapacityError,
    FormatError,
    InvalidRequestError,
    ModelNotFoundError,
    StaleCatalogueError,
)

MAX_ENTRIES = 1_000_000
MAX_CHANGES = 10_000
"""Kept for copies that are behind; one that is further behind takes a snapshot."""

MAX_DROPPED = 100_000
"""Names kept that were dropped, so that a folder's file of that name does not bring one back."""

MAX_MIX = 256
"""Adapters of the default mix."""


class Op(StrEnum):
    """What a change does."""

    REGISTER = "register"
    SWAP = "swap"
    PIN = "pin"
    UNPIN = "unpin"
    DROP = "drop"
    MIX = "mix"


@dataclass(frozen=True, slots=True)
class Entry:
    """What a name means from `generation` on."""

    name: str
    generation: int
    content: Content
    id: int = 0  # llama-server's number: counts registrations, and stays through swaps


@dataclass(frozen=True, slots=True)
class Change:
    """One step from version - 1 to version. `content` only where it sets one, `mix` for MIX."""

    version: int
    op: Op
    name: str  # "" for MIX
    content: Content | None = None
    mix: Mapping[str, float] | None = None

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        out: dict[str, Any] = {"version": self.version, "op": self.op.value, "name": self.name}
        if self.content is not None:
            out["content"] = asdict(self.content)
        if self.mix is not None:
            out["mix"] = dict(self.mix)
        return out

    @classmethod
    def from_json(cls, value: object) -> Change:
        """FormatError for anything that to_json() does not make."""
        found = _object(value, "a change", {"version", "op", "name"}, ("content", "mix"))
        op = found["op"]
        if op not in list(Op):
            raise FormatError(f"expected one of {', '.join(Op)}, got {op!r:.40}", where="op")
        content = _content(found["content"]) if "content" in found else None
        if (content is not None) != (op in (Op.REGISTER, Op.SWAP)):
            raise FormatError(f"expected content for register and swap alone, got {op}", where="op")
        version = _natural(found, "version")
        if op != Op.MIX:
            if "mix" in found:
                raise FormatError(f"expected scales for mix alone, got {op}", where="op")
            return cls(version, Op(op), _name(found), content)
        if found["name"] != "":
            raise FormatError("expected no name for mix", where="name")
        return cls(version, Op.MIX, "", mix=_mix(found.get("mix")))


@dataclass(frozen=True, slots=True)
class ResolvedAdapter:
    """What a name meant when a request came."""

    name: str
    generation: int
    digest: str
    scale: float


@dataclass(frozen=True, slots=True)
class Resolved:
    """All adapters of a request, looked up at one version."""

    version: int
    adapters: tuple[ResolvedAdapter, ...]


class Catalogue:
    """The catalogue, or a replica's copy of it. One thread at a time."""

    def __init__(
        self,
        version: int = 0,
        entries: Iterable[Entry] = (),
        *,
        next_id: int = 0,
        default_mix: Mapping[str, float] | None = None,
        dropped: Iterable[str] = (),
    ) -> None:
        """FormatError for entries that no sequence of changes up to `version` gives."""
        self.version = version
        self.next_id = next_id
        self.default_mix: Mapping[str, float] | None = default_mix  # None: never set
        self._dropped: dict[str, None] = dict.fromkeys(dropped)
        self._entries: dict[str, Entry] = {}
        self._names: dict[int, str] = {}  # by id
        generations = set()
        for entry in entries:
            if not 0 < entry.generation <= version or entry.generation in generations:
                raise FormatError(
                    f"expected generations of 1 to {version}, each once, got {entry.generation}",
                    where=entry.name,
                )
            if entry.name in self._entries:
                raise FormatError("expected each name once, got it twice", where=entry.name)
            generations.add(entry.generation)
            self.next_id = max(self.next_id, entry.id + 1)
            self._names[entry.id] = entry.name
            self._entries[entry.name] = entry
        self._changes: deque[Change] = deque(maxlen=MAX_CHANGES)

    @property
    def entries(self) -> Mapping[str, Entry]:
        """By name; borrowed until the next change."""
        return self._entries

    @property
    def dropped(self) -> Collection[str]:
        """Names that were dropped and have not come back, the last ones; borrowed."""
        return self._dropped.keys()

    def name_of(self, number: int) -> str | None:
        """The name of an id."""
        return self._names.get(number)

    # What a change would be; nothing happens until it is applied, so it can be written first.

    def register(self, name: str, content: Content) -> Change:
        """A new name; InvalidRequestError where it is taken."""
        check_name(name)
        if name in self._entries:
            raise InvalidRequestError(
                f"expected a new name, got {name!r}, which is registered",
                param="name",
                hint="swap it to give it new content",
            )
        if len(self._entries) >= MAX_ENTRIES:
            raise CapacityError(f"expected at most {MAX_ENTRIES} adapters, got one more")
        return Change(self.version + 1, Op.REGISTER, name, content)

    def swap(self, name: str, content: Content, *, generation: int | None = None) -> Change:
        """New content for a name; AdapterChangedError where it is of another generation."""
        self._get(name, generation)
        return Change(self.version + 1, Op.SWAP, name, content)

    def pin(self, name: str, *, generation: int | None = None) -> Change:
        """Replicas that hold it keep it."""
        self._get(name, generation)
        return Change(self.version + 1, Op.PIN, name)

    def unpin(self, name: str, *, generation: int | None = None) -> Change:
        """The opposite."""
        self._get(name, generation)
        return Change(self.version + 1, Op.UNPIN, name)

    def drop(self, name: str, *, generation: int | None = None) -> Change:
        """The name means nothing any more."""
        self._get(name, generation)
        return Change(self.version + 1, Op.DROP, name)

    def mix(self, scales: Mapping[str, float]) -> Change:
        """What requests get that name no adapters; ModelNotFoundError for an unknown name."""
        for name in scales:
            self._get(name)
        try:
            return Change(self.version + 1, Op.MIX, "", mix=_mix(dict(scales)))
        except FormatError as error:
            raise InvalidRequestError(error.message, param="lora") from error

    def apply(self, changes: Iterable[Change]) -> None:
        """Makes changes, those that are known already left out.

        StaleCatalogueError where one is missing in between, FormatError for one that does not
        fit; those before it are made then.
        """
        for change in changes:
            if change.version <= self.version:
                continue
            if change.version != self.version + 1:
                raise StaleCatalogueError(
                    f"expected change {self.version + 1} of the catalogue, got {change.version}",
                    hint="take a snapshot",
                )
            self._apply(change)
            self.version = change.version
            self._changes.append(change)

    def changes_since(self, version: int) -> list[Change] | None:
        """What a copy at `version` lacks; None where it has to take a snapshot."""
        n = self.version - version
        if n < 0 or n > len(self._changes):
            return None
        return list(self._changes)[len(self._changes) - n :]

    def snapshot(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return {
            "version": self.version,
            "entries": [asdict(entry) for entry in self._entries.values()],
            "next_id": self.next_id,
            "default_mix": self.default_mix,
            "dropped": list(self._dropped),
        }

    @classmethod
    def from_snapshot(cls, value: object) -> Catalogue:
        """FormatError for anything that snapshot() does not make."""
        optional = ("next_id", "default_mix", "dropped")
        found = _object(value, "a snapshot", {"version", "entries"}, optional)
        listed, dropped = found["entries"], found.get("dropped", [])
        if not isinstance(listed, list) or len(listed) > MAX_ENTRIES:
            raise FormatError(f"expected a list of at most {MAX_ENTRIES}", where="entries")
        if not isinstance(dropped, list) or len(dropped) > MAX_DROPPED:
            raise FormatError(f"expected a list of at most {MAX_DROPPED}", where="dropped")
        return cls(
            _natural(found, "version"),
            map(_entry, listed),
            next_id=_natural({"next_id": 0} | found, "next_id"),
            default_mix=None if found.get("default_mix") is None else _mix(found["default_mix"]),
            dropped=[_name({"name": name}) for name in dropped],
        )

    def resolve(self, names: Iterable[str]) -> Resolved:
        """What names mean now, all at one version; ModelNotFoundError for an unknown one."""
        entries = [self._get(name) for name in names]
        return Resolved(
            self.version,
            tuple(
                ResolvedAdapter(one.name, one.generation, one.content.digest, one.content.scale)
                for one in entries
            ),
        )

    def check(self, resolved: Resolved) -> tuple[Entry, ...]:
        """The entries of a request that was resolved elsewhere, if they are still what it means.

        StaleCatalogueError where this copy is older than the request: refresh it and ask again.
        ModelNotFoundError for a name that was dropped, AdapterChangedError for one that was
        swapped since: the whole request has to be resolved anew, never a part of it.
        """
        if self.version < resolved.version:
            raise StaleCatalogueError(
                f"expected a catalogue of version {resolved.version}, got {self.version}",
                hint="this replica has to refresh its copy first",
            )
        return tuple(self._get(one.name, one.generation) for one in resolved.adapters)

    def _get(self, name: str, generation: int | None = None) -> Entry:
        entry = self._entries.get(name)
        if entry is None:
            raise ModelNotFoundError(
                f"no adapter is called {name!r:.130} at version {self.version} of the catalogue",
                param="adapters",
            )
        if generation is not None and entry.generation != generation:
            raise AdapterChangedError(
                f"adapter '{name}': expected generation {generation}, got {entry.generation}",
                hint="it was swapped since: ask again for the new content",
            )
        return entry

    def _apply(self, change: Change) -> None:
        if change.op is Op.MIX:
            unknown = (change.mix or {}).keys() - self._entries.keys()
            if unknown:
                raise FormatError(f"change {change.version}: unknown {min(unknown)!r}", where="mix")
            self.default_mix = dict(change.mix or {})
            return
        old = self._entries.get(change.name)
        if (old is None) != (change.op is Op.REGISTER):
            state = "is not registered" if old is None else "is registered"
            raise FormatError(
                f"change {change.version}: cannot {change.op} a name that {state}",
                where=change.name,
            )
        if change.content is not None:
            number = self.next_id if old is None else old.id
            self.next_id = max(self.next_id, number + 1)
            self._dropped.pop(change.name, None)
            self._names[number] = change.name
            self._entries[change.name] = Entry(change.name, change.version, change.content, number)
        elif change.op is Op.DROP:
            assert old is not None
            del self._entries[change.name]
            self._names.pop(old.id, None)
            if self.default_mix is not None:
                kept = {n: s for n, s in self.default_mix.items() if n != change.name}
                self.default_mix = kept
            self._dropped[change.name] = None
            if len(self._dropped) > MAX_DROPPED:
                del self._dropped[next(iter(self._dropped))]
        else:
            assert old is not None
            content = replace(old.content, pinned=change.op is Op.PIN)
            self._entries[change.name] = replace(old, content=content)


def _object(
    value: object, what: str, required: set[str], optional: Iterable[str] = ()
) -> dict[str, Any]:
    if not isinstance(value, dict) or not required <= value.keys() <= required.union(optional):
        raise FormatError(f"expected {what} with {', '.join(sorted(required))}, got {value!r:.80}")
    return value


def _natural(found: dict[str, Any], key: str) -> int:
    value = found[key]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise FormatError(f"expected a number of 0 or more, got {value!r:.40}", where=key)
    return value


def _name(found: dict[str, Any]) -> str:
    try:
        check_name(found["name"])
    except InvalidRequestError as error:
        raise FormatError(error.message, where="name") from error
    return str(found["name"])


def _content(value: object) -> Content:
    found = _object(value, "content", {one.name for one in fields(Content)})
    try:
        return Content(**found)
    except InvalidRequestError as error:
        raise FormatError(error.message, where="content") from error


def _entry(value: object) -> Entry:
    found = _object(value, "an entry", {"name", "generation", "content"}, ("id",))
    return Entry(
        _name(found),
        _natural(found, "generation"),
        _content(found["content"]),
        _natural({"id": 0} | found, "id"),
    )


def _mix(value: object) -> dict[str, float]:
    """Names with finite scales."""
    if not isinstance(value, dict) or len(value) > MAX_MIX:
        raise FormatError(f"expected at most {MAX_MIX} names with scales", where="mix")
    for name, scale in value.items():
        _name({"name": name})
        good = isinstance(scale, int | float) and not isinstance(scale, bool)
        if not good or not abs(scale) <= MAX_F32:
            raise FormatError(f"{name}: expected a finite scale, got {scale!r:.40}", where="mix")
    return value
