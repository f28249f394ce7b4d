"""What the front knows of single routes, and the example of a configuration."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx2 as httpx
import pytest

from loragraph.ray import build_app, routes
from loragraph.ray.options import AppArgs
from loragraph.server.app import create_app
from loragraph.server.config import ServerConfig
from tests.ray.conftest import HAS_RAY

EXAMPLE = Path(__file__).parents[2] / "docs" / "ray.yaml"


def test_every_route_that_changes_adapters_is_known() -> None:
    """And all that is told of routes is told of routes that there are."""
    app = create_app(None, ServerConfig(with_metrics=True))
    posted = {path for path, methods in app.openapi()["paths"].items() if "post" in methods}
    changing = {path for path in posted if "lora" in path and "adapter" in path}
    assert len(changing) == 7
    assert {path for path in changing if routes.may_repeat("POST", path)} == set()
    assert all(routes.may_repeat("POST", path) for path in posted - changing)
    own = {routes.REPLICAS, routes.REPLICA_METRICS}
    named = routes.WHOLE | routes._CHANGES | routes._ONE_REPLICA | routes._OPENAI_STREAMS

    async def statuses() -> dict[str, int]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            return {path: (await http.get(path)).status_code for path in named - own}

    assert [path for path, status in asyncio.run(statuses()).items() if status == 404] == []


@pytest.mark.parametrize(
    ("path", "word"),
    [("/slots", "figures"), ("/slots/3", "figures"), ("/api/state", "figures"), ("/props", "")],
)
def test_figures_of_one_engine_come_from_one_replica(path: str, word: str) -> None:
    """Others from any."""
    assert routes.sticky_word(path) == word


@pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed: pip install '.[ray]'")
@pytest.mark.filterwarnings("ignore")
def test_the_example_is_an_application() -> None:
    """Its arguments are checked, and both deployments are bound."""
    import yaml
    from ray.serve import Application

    (app,) = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))["applications"]
    assert app["import_path"] == "loragraph.ray:build_app"
    args = AppArgs.checked(app["args"])
    assert args.autoscale == (1, 4)
    assert args.n_threads == 8
    assert isinstance(build_app(app["args"]), Application)
