"""One cluster for all tests of this folder that need one; skipped where Ray is not installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from loragraph.engine.engine import Engine
from loragraph.engine.model import Model
from tests.ray.cluster import Front, front
from tests.server.serving import ADAPTERS, write_files
from tests.tiny import TinyLlama

HAS_RAY = importlib.util.find_spec("ray") is not None


@dataclass(frozen=True)
class FrontState:
    """What tests ask of a server's state, asked of the front."""

    url: str
    engine: Engine

    def set_default_mix(self, scales: Mapping[str, float]) -> None:
        """Of all replicas."""
        body = [{"name": name, "scale": scale} for name, scale in scales.items()]
        httpx.post(f"{self.url}/lora-adapters", json=body, timeout=60).raise_for_status()


@dataclass(frozen=True)
class RayServed(Front):
    """A front with an engine of its own beside it, whose answers it has to give."""

    engine: Engine
    folder: Path

    @property
    def state(self) -> FrontState:
        """In place of a server's."""
        return FrontState(self.url, self.engine)


@pytest.fixture(scope="session")
def served_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and three adapters."""
    folder = tmp_path_factory.mktemp("served")
    write_files(folder, TinyLlama(n_ctx_train=1024))  # as long as all cells together
    return folder


@pytest.fixture(scope="session")
def served(served_folder: Path) -> Iterator[RayServed]:
    """Two replicas behind a front, shared by all files: a cluster takes long to start."""
    if not HAS_RAY:
        pytest.skip("Ray is not installed: pip install '.[ray]'")
    from loragraph.ray import local

    adapters = {name: served_folder / "adapters" / f"{name}.gguf" for name in ADAPTERS}
    options: dict[str, Any] = {"n_ctx": 1024, "max_sequences": 8}
    with (
        Model.load(served_folder / "base.gguf", n_threads=1) as model,
        Engine(model, adapters, n_threads=1, **options) as engine,
        local.cluster(2),
        front(served_folder) as one,
    ):
        yield RayServed(one.url, one.args, one.replicas, engine, served_folder)


@pytest.fixture
def http(served: RayServed) -> Iterator[httpx.Client]:
    """A client of it."""
    with served.client() as client:
        yield client


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Warnings of Ray's own code are not ours."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            for kind in ("DeprecationWarning", "ResourceWarning", "FutureWarning", "UserWarning"):
                item.add_marker(pytest.mark.filterwarnings(f"ignore::{kind}:ray"))
