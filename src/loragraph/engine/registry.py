"""Names of adapters and the generations behind them. Reads headers only; used by any thread.

A folder of PEFT or MLX is an adapter as a file is; its header is made of its own headers.

A name means one generation at a time; registering it again makes another one, at once. A request
keeps the generation that its name meant when it came. Numbers are never used twice.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from loragraph.adapters.adapter import Adapter
from loragraph.adapters.folder import folder_problem, is_adapter_folder
from loragraph.adapters.report import LoadReport
from loragraph.errors import (
    AdapterChangedError,
    AdapterFormatError,
    ConfigError,
    InvalidRequestError,
    ModelNotFoundError,
)

MAX_NAME = 128
"""Characters of a name."""

_SUFFIX = ".gguf"
_N_SHOWN = 8  # known names in an error


@dataclass(frozen=True, slots=True)
class AdapterHeader:
    """What the header of an adapter file tells before it is loaded."""

    nbytes: int  # that the loaded adapter will take
    rank_max: int
    n_targets: int
    invocation_tokens: tuple[int, ...] = ()
    task_name: str = ""  # what its file says of itself
    prompt_prefix: str = ""
    coverage: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # see LoadReport


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a file is read; see `loragraph.adapters.gguf.read_adapter`."""

    ignore_norm: bool = False
    tied_output: bool | None = None


PLAIN_LOAD = LoadOptions()

Opener = Callable[[], AbstractContextManager[Path]]
"""Gives an adapter's file, which is there until the context is left; may have to fetch it."""

HeaderReader = Callable[[Path, LoadOptions], AdapterHeader]
"""Reads and checks a file's header; raises what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What a store has under a name."""

    number: int  # its generation
    path: Path  # that is shown, and beside which a sidecar may lie
    opener: Opener


class Store(Protocol):
    """Adapters by name that are kept elsewhere; for any thread."""

    def names(self) -> Collection[str]:
        """All names of now."""

    def find(self, name: str) -> Stored | None:
        """What a name means now; blocks."""

    def shown(self, name: str) -> tuple[int, Path] | None:
        """Generation and path of a name, for lists; None for one that has none yet; at once."""

    def is_current(self, name: str, number: int) -> bool:
        """Whether a name still means that generation; at once.

        Once it does not, the store has the registry withdraw the name.
        """


@dataclass(slots=True)
class LoadCounts:
    """What happened to a generation since it was registered."""

    n_loads: int = 0
    n_failures: int = 0
    n_evictions: int = 0
    load_s: float = 0.0  # of all loads, waits for the worker included


@dataclass(slots=True, eq=False)
class Generation:
    """What a name meant from one registration to the next. Equality is identity."""

    name: str
    number: int
    path: Path | None  # None: made in memory
    header: AdapterHeader  # of the content that was loaded last, once one was
    options: LoadOptions = PLAIN_LOAD
    adapter: Adapter | None = None  # given by the caller, who keeps it unless `owned`
    owned: bool = False  # the adapter in memory goes with the generation
    digest: str | None = None  # known from the first load on
    retired: bool = False  # the name means something else, or nothing
    report: LoadReport | None = None  # of the last load
    counts: LoadCounts = field(default_factory=LoadCounts)
    load_started: float = 0.0
    opener: Opener | None = None  # None: the file is at `path`

    def opened(self) -> AbstractContextManager[Path]:
        """Its file, there until the context is left."""
        assert self.path is not None
        return nullcontext(self.path) if self.opener is None else self.opener()

    def check_digest(self, digest: str) -> None:
        """Notes the digest of a first load; AdapterChangedError where a later one differs."""
        if self.digest is None:
            self.digest = digest
        elif self.digest != digest:
            raise AdapterChangedError(
                f"adapter '{self.name}' (generation {self.number}): expected the content "
                f"{self.digest[:12]} that was loaded first, got {digest[:12]} from {self.path}",
                hint="the file was overwritten: ask again for the new content",
            )


class Registry:
    """Names and their generations, and a folder whose files are known by name on demand."""

    def __init__(
        self,
        read_header: HeaderReader,
        adapter_dir: str | os.PathLike[str] | None = None,
        store: Store | None = None,
    ) -> None:
        """Names that nobody registered are looked for in the store, or else in the folder.

        ConfigError where `adapter_dir` is no folder.
        """
        self._read_header = read_header
        self._store = store
        self._dir = None if adapter_dir is None else Path(adapter_dir).resolve()
        if self._dir is not None and not self._dir.is_dir():
            raise ConfigError(f"expected a folder, got {adapter_dir}", field="adapter_dir")
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._current: dict[str, Generation] = {}
        self._unloaded: set[str] = set()  # of the folder: not to be found there again
        self._in_dir = self._list_dir()

    def __len__(self) -> int:
        return len(self.names())

    def register(
        self,
        name: str,
        source: str | os.PathLike[str] | Adapter,
        options: LoadOptions = PLAIN_LOAD,
    ) -> tuple[Generation, Generation | None]:
        """A new generation of `name`, and the one that it replaces; see `make`."""
        new = self.make(name, source, options)
        return new, self.swap(new)

    def make(
        self,
        name: str,
        source: str | os.PathLike[str] | Adapter,
        options: LoadOptions = PLAIN_LOAD,
    ) -> Generation:
        """A generation of `name`, which means it from `swap` on.

        Reads a file's header, not its tensors. Raises what is wrong with the file or the name.
        """
        check_name(name)
        if isinstance(source, Adapter):
            header = header_of(source)
            return Generation(
                name, next(self._numbers), None, header, adapter=source, digest=source.digest
            )
        path = Path(source).absolute()
        header = self._read_header(path, options)
        return Generation(name, next(self._numbers), path, header, options)

    def swap(self, new: Generation) -> Generation | None:
        """Its name means it from now on; the generation that it replaces."""
        with self._lock:
            return self._swap(new.name, new)

    def renew(self, old: Generation, header: AdapterHeader) -> Generation | None:
        """A new generation of the same file, whose header is another by now.

        None where its name no longer means `old`, and for what a store gives, which is verified.
        """
        with self._lock:
            if self._current.get(old.name) is not old or old.path is None or old.opener is not None:
                return None
            new = Generation(old.name, next(self._numbers), old.path, header, old.options)
            self._swap(old.name, new)
            return new

    def unload(self, name: str) -> Generation:
        """The name means nothing any more; the generation that it meant."""
        old = self.resolve(name)
        with self._lock:
            if self._current.get(name) is old:  # else it was swapped meanwhile, or is gone already
                del self._current[name]
                self._unloaded.add(name)
                old.retired = True
            return old

    def known(self, name: str) -> Generation | None:
        """What a name means now, as far as anybody asked; at once."""
        with self._lock:
            return self._current.get(name)

    def withdraw(self, name: str) -> Generation | None:
        """Forgets what a name of the store meant: the next one who asks looks there again."""
        with self._lock:
            old = self._current.pop(name, None)
            if old is not None:
                old.retired = True
            return old

    def resolve_all(self, names: Iterable[str]) -> list[Generation]:
        """What several names meant at one moment; ModelNotFoundError for an unknown one."""
        wanted = list(names)
        while True:
            found = [self.resolve(name) for name in wanted]
            # One that is not retired by now is what its name meant when the last was looked up.
            if not any(one.retired for one in found):
                return found

    def resolve(self, name: str) -> Generation:
        """What `name` means now; ModelNotFoundError for nothing."""
        with self._lock:
            found = self._current.get(name)
        if found is not None:
            return found
        if self._store is not None:
            return self._from_store(self._store, name)
        path = self.path_in_dir(name)
        if path is None:
            raise self._unknown(name)
        self.check_links(path)
        new = Generation(name, next(self._numbers), path, self._read_header(path, PLAIN_LOAD))
        with self._lock:  # another thread may have been first
            return self._current.setdefault(name, new)

    def names(self) -> list[str]:
        """All names, sorted, those of the folder's files included."""
        if self._dir is not None:
            self._in_dir = self._list_dir()
        if self._store is not None:
            stored = self._store.names()
            with self._lock:
                return sorted({*stored, *self._current})
        with self._lock:
            return sorted(self._current.keys() | (self._in_dir - self._unloaded))

    def current(self) -> dict[str, Generation]:
        """The generations by name; files of the folder that nobody asked for have none."""
        with self._lock:
            return dict(sorted(self._current.items()))

    def _from_store(self, store: Store, name: str) -> Generation:
        while True:
            stored = store.find(name) if name_problem(name) is None else None
            if stored is None:
                raise self._unknown(name)
            with stored.opener() as path:
                header = self._read_header(path, PLAIN_LOAD)
            new = Generation(name, stored.number, stored.path, header, opener=stored.opener)
            with self._lock:
                # Under the lock that a withdrawal takes, so that none comes between.
                if store.is_current(name, stored.number):
                    return self._current.setdefault(name, new)

    def _swap(self, name: str, new: Generation) -> Generation | None:
        old = self._current.get(name)
        self._current[name] = new
        self._unloaded.discard(name)
        if old is not None:
            old.retired = True
        return old

    def _list_dir(self) -> set[str]:
        return set() if self._dir is None else set(self._dir_names())

    def _dir_names(self) -> Iterator[str]:
        assert self._dir is not None
        with os.scandir(self._dir) as entries:
            for entry in entries:
                name = entry.name.removesuffix(_SUFFIX)
                if name_problem(name) is None and self._found(name) is not None:
                    yield name

    def path_in_dir(self, name: str) -> Path | None:
        """The folder's NAME.gguf, or its folder NAME; None where there is neither, or unloaded."""
        if self._dir is None or name_problem(name) is not None or name in self._unloaded:
            return None
        return self._found(name)

    def shown(self, name: str) -> tuple[int | None, Path | None]:
        """Generation and path of a name that nobody asked for yet, as far as they are known."""
        if self._store is not None:
            return self._store.shown(name) or (None, None)
        return None, self.path_in_dir(name)

    def _found(self, name: str) -> Path | None:
        """The file, or else the folder of PEFT or MLX, that no link leads out of the folder."""
        assert self._dir is not None
        for path, fits in (
            (self._dir / f"{name}{_SUFFIX}", Path.is_file),
            (self._dir / name, is_adapter_folder),
        ):
            real = path.resolve()
            if real.is_relative_to(self._dir) and fits(real):
                return path
        return None

    def check_links(self, path: Path) -> None:
        """AdapterFormatError for a folder whose files are links that lead out of ours."""
        assert self._dir is not None
        problem = folder_problem(path, self._dir) if path.is_dir() else None
        if problem is not None:
            raise AdapterFormatError(
                f"expected a folder of an adapter alone, got {problem}", path=path
            )

    def _unknown(self, name: object) -> ModelNotFoundError:
        names = self.names()
        shown = ", ".join(names[:_N_SHOWN]) or "none"
        more = f" and {len(names) - _N_SHOWN} more" if len(names) > _N_SHOWN else ""
        return ModelNotFoundError(
            f"no adapter is called {name!r:.{MAX_NAME}}; known: {shown}{more}", param="adapters"
        )


def name_problem(name: object) -> str | None:
    """What a name lacks to be one; None for a good one."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        return f"a text of 1 to {MAX_NAME} characters"
    if not name.isprintable() or name != name.strip() or "/" in name or "\\" in name:
        return "printable characters without slashes or surrounding spaces"
    return "a name that does not begin with a dot" if name.startswith(".") else None


def check_name(name: object) -> None:
    """InvalidRequestError for what cannot be a name."""
    problem = name_problem(name)
    if problem is not None:
        raise InvalidRequestError(
            f"adapter name: expected {problem}, got {name!r:.80}", param="name"
        )


def header_of(adapter: Adapter) -> AdapterHeader:
    """The header of an adapter that is in memory."""
    return AdapterHeader(
        resident_bytes(adapter),
        adapter.rank_max,
        adapter.report.n_targets,
        adapter.invocation_tokens,
        adapter.task_name,
        adapter.prompt_prefix,
        adapter.report.coverage,
    )


def resident_bytes(adapter: Adapter) -> int:
    """Bytes of an adapter in use: its tensors, and lora_b once more in the kernels' order."""
    return adapter.nbytes + sum(pair.b.nbytes for pair in adapter.pairs.values())
