"""The engine's adapters: names registered, loaded, pinned, combined, unloaded."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress

from loragraph.adapters.adapter import Adapter
from loragraph.adapters.combine import combine
from loragraph.adapters.mix import Mix
from loragraph.engine.core import EngineCore
from loragraph.engine.holds import Hold
from loragraph.engine.job_maker import JobMaker
from loragraph.engine.model import Model
from loragraph.engine.registry import PLAIN_LOAD, Generation, LoadOptions, Registry, check_name
from loragraph.engine.table import AdapterRow, adapter_rows
from loragraph.engine.thread import EngineThread
from loragraph.errors import AdapterChangedError, ConfigError, LifecycleError, LoragraphError


class EngineAdapters(ABC):
    """Everything of `Engine` that changes or lists its adapters."""

    model: Model
    registry: Registry
    _core: EngineCore
    _jobs: JobMaker
    _thread: EngineThread

    def load_adapter(
        self,
        name: str,
        source: str | os.PathLike[str] | Adapter,
        *,
        pin: bool = False,
        preload: bool = False,
        ignore_norm: bool = False,
        tied_output: bool | None = None,
    ) -> Generation:
        """Registers an adapter under a name; what the name meant stays with running requests.

        Reads the file's header. `preload` waits until it is in memory, `pin` also keeps it there;
        the name means it only then, and after their error goes on to mean what it meant.
        `ignore_norm` and `tied_output`: see `Model.load_adapter`; they hold for later loads of the
        same generation too.
        """
        self._check_open()
        options = LoadOptions(ignore_norm, tied_output)
        if isinstance(source, Adapter) and source not in self.model.adapters:
            raise LifecycleError(
                f"{source!r} is closed or registered with another model",
                hint="load it with this engine's model",
            )
        if isinstance(source, Adapter) and options != PLAIN_LOAD:
            raise ConfigError(
                "expected a file to read with ignore_norm or tied_output, got an adapter in memory",
                field="ignore_norm" if ignore_norm else "tied_output",
            )
        new = self.registry.make(name, source, options)
        if pin or preload:
            self._load_unnamed(Hold(new, pin=pin, replaces=self.registry.known(name)))
        self._swap(new)
        return new

    def combine(self, name: str, scales: Mapping[str, float]) -> Generation:
        """Freezes a mix of adapters into one, in memory, under a name of its own.

        Exact, for any ranks and types; see `loragraph.adapters.combine`. Its parts are loaded for
        it, and stay until it is made, whatever becomes of their names meanwhile. It is kept until
        the name is unloaded.
        """
        self._check_open()
        check_name(name)
        wanted = self._jobs.resolve(scales)
        holds = [Hold(generation, keep=True) for generation in wanted]
        try:
            for hold in holds:
                self._wait_for(hold)
            resident = self._thread.call(lambda: dict(self._core.residency.adapters))
            parts: dict[Adapter, float] = {}  # two names may mean one adapter
            for generation, scale in wanted.items():
                part = resident[generation]
                parts[part] = parts.get(part, 0.0) + scale
            adapter = combine(Mix(parts))
        finally:
            self._thread.post(lambda: self._core.holds.drop(holds))
        self.model.adopt_adapter(adapter)
        new = self.registry.make(name, adapter)
        new.owned = True  # before anybody can swap it away
        self._swap(new)
        return new

    def unload_adapter(self, name: str) -> None:
        """The name means nothing at once; the memory goes when the last request is done."""
        self._check_open()
        old = self.registry.unload(name)
        self._thread.call(lambda: self._core.retire(old))

    def withdraw_adapter(self, name: str) -> None:
        """What a name of the store meant is over: who asks next gets what the store has then."""
        self._check_open()
        old = self.registry.withdraw(name)
        if old is not None:
            self._thread.post(lambda: self._core.retire(old))

    def preload(self, name: str) -> None:
        """Waits until an adapter is in memory; it may be dropped again at any time."""
        self._hold_named(name, pin=False)

    def pin(self, name: str) -> None:
        """Loads an adapter and keeps it in memory; CapacityError where there is no room."""
        self._hold_named(name, pin=True)

    def unpin(self, name: str) -> None:
        """Lets a pinned adapter be dropped."""
        self._check_open()
        generation = self.registry.resolve(name)
        self._thread.call(lambda: self._core.holds.unpin(generation))

    def resolve(self, name: str) -> Generation:
        """What a name means now; a file of `adapter_dir` is registered by it, from its header.

        ModelNotFoundError for nothing, or what is wrong with the file.
        """
        self._check_open()
        return self.registry.resolve(name)

    @property
    def adapters(self) -> tuple[AdapterRow, ...]:
        """The table of adapters, by name."""
        self._check_open()
        current = self.registry.current()
        files = {
            name: (None, None) if name in current else self.registry.shown(name)
            for name in self.registry.names()
        }
        core = self._core
        return self._thread.call(
            lambda: tuple(adapter_rows(self.registry, core.residency.pool, core.holds, files))
        )

    def _swap(self, new: Generation) -> None:
        old = self.registry.swap(new)
        if old is not None:
            self._thread.post(lambda: self._core.retire(old))

    def _load_unnamed(self, hold: Hold) -> None:
        """Loads what no name means yet; nothing of it is left after an error."""
        try:
            self._wait_for(hold)
        except BaseException:
            hold.generation.retired = True
            with suppress(LifecycleError):  # the engine was closed, with all that it held
                self._thread.post(lambda: self._core.retire(hold.generation))
            raise

    def _hold_named(self, name: str, *, pin: bool) -> None:
        """Holds what a name means, also where that changes while it is loaded."""
        self._check_open()
        while True:
            hold = Hold(self.registry.resolve(name), pin=pin)
            try:
                self._wait_for(hold)
            except AdapterChangedError:
                raise
            except LoragraphError:
                if not hold.generation.retired:
                    raise
            if not hold.generation.retired:
                return

    def _wait_for(self, hold: Hold) -> None:
        self._thread.post(lambda: self._core.hold(hold))
        error = hold.outcome.result()
        if error is not None:
            raise error

    @abstractmethod
    def _check_open(self) -> None:
        """LifecycleError where nothing can be changed."""
