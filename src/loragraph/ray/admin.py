"""Adapters changed through the catalogue, by one replica's routes; see AdapterAdmin."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace

from loragraph.cluster.catalogue import Op
from loragraph.cluster.content import Content
from loragraph.engine.engine import Engine
from loragraph.engine.registry import check_name
from loragraph.errors import (
    AdapterChangedError,
    CapacityError,
    InvalidRequestError,
    ModelNotFoundError,
    PermissionDeniedError,
)
from loragraph.ray.store import CatalogueStore, SharedCatalogue
from loragraph.server.adapters_api import (
    LoadBody,
    check_folder,
    check_load,
    confined_path,
    loaded_already,
)
from loragraph.server.state import ServerState


class CatalogueAdmin:
    """Every change is known by all when its route answers."""

    def __init__(
        self, catalogue: SharedCatalogue, store: CatalogueStore, schemes: Collection[str]
    ) -> None:
        """`schemes`: of URLs that clients may load from."""
        self._catalogue = catalogue
        self._store = store
        self._schemes = schemes

    def load(self, state: ServerState, body: LoadBody) -> None:
        """From the shared folder or a URL; checked as a whole against the base before it counts."""
        check_load(state, body)
        source = self._source(state, body.lora_path)
        self._catalogue.refresh()
        old = self._catalogue.entries.get(body.lora_name)
        if old is not None and not body.load_inplace:
            raise loaded_already(body.lora_name)
        content = replace(self._checked(state.engine, source), pinned=bool(body.pinned))
        op = Op.REGISTER if old is None else Op.SWAP
        made = self._catalogue.change(op, body.lora_name, content=content)
        try:
            if content.pinned:
                state.engine.pin(body.lora_name)
            else:
                state.engine.preload(body.lora_name)
        except CapacityError:  # no room: the name means again what it meant
            # unless another replica has given it a meaning since
            with suppress(AdapterChangedError, ModelNotFoundError):
                if old is None:
                    self._catalogue.change(Op.DROP, body.lora_name, generation=made)
                else:
                    back = old.content
                    self._catalogue.change(Op.SWAP, body.lora_name, content=back, generation=made)
            raise

    def unload(self, state: ServerState, name: str) -> None:
        """Whatever has become of its source."""
        self._known(state.engine, name)
        self._catalogue.change(Op.DROP, name)

    def pin(self, state: ServerState, name: str) -> None:
        """On this replica now, on others from their next use of it on."""
        self._known(state.engine, name)
        state.engine.pin(name)
        self._catalogue.change(Op.PIN, name)

    def unpin(self, state: ServerState, name: str) -> None:
        """On all."""
        self._known(state.engine, name)
        self._catalogue.change(Op.UNPIN, name)

    def set_default_mix(self, state: ServerState, scales: Mapping[str, float]) -> None:
        """Of all replicas."""
        for name in scales:
            self._known(state.engine, name)
        self._catalogue.change(Op.MIX, mix=dict(scales))

    def seed(self, engine: Engine, name: str, source: str) -> None:
        """Registers an adapter of the command line unless its name has a meaning already."""
        check_name(name)
        self._catalogue.refresh()
        if name in self._catalogue.entries or name in self._catalogue.dropped:
            return
        content = self._checked(engine, source)
        try:
            self._catalogue.change(Op.REGISTER, name, content=content)
        except InvalidRequestError:  # another replica was first
            self._catalogue.refresh()

    def seed_mix(self, scales: Mapping[str, float]) -> None:
        """The default mix of the command line, unless one was set already."""
        self._catalogue.refresh()
        if self._catalogue.default_mix is None:
            known = {n: s for n, s in scales.items() if n in self._catalogue.entries}
            self._catalogue.change(Op.MIX, mix=known)

    def _known(self, engine: Engine, name: str) -> None:
        """ModelNotFoundError for an unknown name; a file of the folder enters the catalogue."""
        if name not in self._catalogue.entries:
            engine.resolve(name)

    def _checked(self, engine: Engine, source: str) -> Content:
        with self._store.fetched(source) as (content, path):
            engine.model.load_adapter(path).close()
            return content

    def _source(self, state: ServerState, given: str) -> str:
        scheme, colon, _ = given.partition("://")
        if not colon:
            path = confined_path(state.config.adapter_dir, given)
            if path.is_dir():
                check_folder(path, state.config.adapter_dir)
            state.sidecars.check(path)
            return str(path)
        if scheme not in self._schemes:
            allowed = ", ".join(sorted(self._schemes)) or "none"
            raise PermissionDeniedError(
                f"lora_path: expected a path or a URL of an allowed scheme ({allowed}), "
                f"got {scheme!r:.20}",
                param="lora_path",
                hint="see --lora-scheme",
            )
        return given
