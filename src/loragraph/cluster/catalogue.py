"""Which adapters there are, for all replicas: the state, its changes, its copies. Pure.

Each change has a version, one more than the last. An entry's generation is the version at which
its content was set, so generations grow, of a name and of the whole, and are never used twice. A
request resolves its names once; whoever serves it has to know at least the version of then.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

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
MAX_SOURCE = 4096
"""Characters of a path or URL."""

MAX_CHANGES = 10_000
"""Kept for copies that are behind; one that is further behind takes a snapshot."""

_DIGEST = re.compile(r"[0-9a-f]{64}")
_MAX_F32 = 3.4e38
_MAX_BYTES = 2**62


class Op(StrEnum):
    """What a change does."""

    REGISTER = "register"
    SWAP = "swap"
    PIN = "pin"
    UNPIN = "unpin"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class Content:
    """What a name is to mean. `source` may hold a signed URL, so it is never shown whole."""

    source: str = field(repr=False)
    digest: str  # SHA-256 of the file, 64 hexadecimal digits
    size_bytes: int
    scale: float = 1.0  # where a request gives none
    pinned: bool = False

    def __post_init__(self) -> None:
        _check_content(self)


@dataclass(frozen=True, slots=True)
class Entry:
    """What a name means from `generation` on."""

    name: str
    generation: int
    content: Content


@dataclass(frozen=True, slots=True)
class Change:
    """One step from version - 1 to version. `content` only where it sets one."""

    version: int
    op: Op
    name: str
    content: Content | None = None

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        out: dict[str, Any] = {"version": self.version, "op": self.op.value, "name": self.name}
        return out if self.content is None else out | {"content": asdict(self.content)}

    @classmethod
    def from_json(cls, value: object) -> Change:
        """FormatError for anything that to_json() does not make."""
        found = _object(value, "a change", {"version", "op", "name"}, {"content"})
        op = found["op"]
        if op not in list(Op):
            raise FormatError(f"expected one of {', '.join(Op)}, got {op!r:.40}", where="op")
        content = _content(found["content"]) if "content" in found else None
        if (content is not None) != (op in (Op.REGISTER, Op.SWAP)):
            raise FormatError(f"expected content for register and swap alone, got {op}", where="op")
        return cls(_natural(found, "version"), Op(op), _name(found), content)


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

    def __init__(self, version: int = 0, entries: Iterable[Entry] = ()) -> None:
        """FormatError for entries that no sequence of changes up to `version` gives."""
        self.version = version
        self._entries: dict[str, Entry] = {}
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
            self._entries[entry.name] = entry
        self._changes: deque[Change] = deque(maxlen=MAX_CHANGES)

    @property
    def entries(self) -> Mapping[str, Entry]:
        """By name; borrowed until the next change."""
        return self._entries

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
        }

    @classmethod
    def from_snapshot(cls, value: object) -> Catalogue:
        """FormatError for anything that snapshot() does not make."""
        found = _object(value, "a snapshot", {"version", "entries"})
        listed = found["entries"]
        if not isinstance(listed, list) or len(listed) > MAX_ENTRIES:
            raise FormatError(f"expected a list of at most {MAX_ENTRIES}", where="entries")
        return cls(_natural(found, "version"), map(_entry, listed))

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
        old = self._entries.get(change.name)
        if (old is None) != (change.op is Op.REGISTER):
            state = "is not registered" if old is None else "is registered"
            raise FormatError(
                f"change {change.version}: cannot {change.op} a name that {state}",
                where=change.name,
            )
        if change.content is not None:
            self._entries[change.name] = Entry(change.name, change.version, change.content)
        elif change.op is Op.DROP:
            del self._entries[change.name]
        else:
            assert old is not None
            content = replace(old.content, pinned=change.op is Op.PIN)
            self._entries[change.name] = replace(old, content=content)


def redacted(source: str) -> str:
    """A source as it may be shown: without user, password, query and fragment."""
    if "://" not in source:
        return source
    scheme, _, rest = source.partition("://")
    rest = re.split(r"[?#]", rest, maxsplit=1)[0]
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def _check_content(content: Content) -> None:
    """InvalidRequestError for what cannot be an entry."""
    source, scale = content.source, content.scale
    if not isinstance(source, str) or not 0 < len(source) <= MAX_SOURCE or "\0" in source:
        raise InvalidRequestError(
            f"source: expected a path or URL of 1 to {MAX_SOURCE} characters", param="source"
        )
    if "://" in source:
        _check_url(source)
    if not isinstance(content.digest, str) or not _DIGEST.fullmatch(content.digest):
        raise InvalidRequestError(
            f"digest: expected 64 hexadecimal digits, got {content.digest!r:.80}", param="digest"
        )
    size = content.size_bytes
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= _MAX_BYTES:
        raise InvalidRequestError(
            f"size_bytes: expected a number of bytes, got {size!r:.40}", param="size_bytes"
        )
    good = isinstance(scale, int | float) and not isinstance(scale, bool)
    if not good or not math.isfinite(scale) or abs(scale) > _MAX_F32:
        raise InvalidRequestError(
            f"scale: expected a finite number, got {scale!r:.40}", param="scale"
        )
    if not isinstance(content.pinned, bool):
        raise InvalidRequestError("pinned: expected true or false", param="pinned")


def _check_url(source: str) -> None:
    try:
        password = urlsplit(source).password
    except ValueError as error:
        raise InvalidRequestError("source: expected a URL", param="source") from error
    if password is not None:
        raise InvalidRequestError(
            f"source: expected a URL without a password, got one for {redacted(source)}",
            param="source",
            hint="the catalogue is written to disk; give each replica its credentials",
        )


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
    found = _object(value, "an entry", {"name", "generation", "content"})
    return Entry(_name(found), _natural(found, "generation"), _content(found["content"]))
