"""Every route against our own OpenAPI document: no 500, no hang, whatever is sent.

LORAGRAPH_FUZZ_CASES=N sends N requests to each route (scripts/fuzz-server) in place of a few.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loragraph.server.app import create_app
from loragraph.server.config import ServerConfig
from tests.server.serving import Served, serving, write_files

N_CASES = int(os.environ.get("LORAGRAPH_FUZZ_CASES", "12"))
LONGEST_S = 60.0
EXPECTED = (501, 503)
"""What this server does not do at all; no room for an adapter. 500 and 504 are not among them."""

OPTIONS = {"with_metrics": True, "with_props": True, "max_prompts": 16}
DOCUMENT = create_app(None, ServerConfig(**OPTIONS)).openapi()  # type: ignore[arg-type]
_FOUND: list[Any] = list(schemathesis.openapi.from_dict(DOCUMENT).get_all_operations())
OPERATIONS = {one.ok().label: one.ok() for one in _FOUND}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with all routes, adapters and a folder of them; it is whole and idle at the end."""
    folder = tmp_path_factory.mktemp("fuzz")
    write_files(folder)
    config = ServerConfig(adapter_dir=folder / "adapters", **OPTIONS)  # type: ignore[arg-type]
    options: dict[str, Any] = {"adapter_dir": folder / "adapters", "n_ctx": 64, "max_adapters": 2}
    with serving(folder, config, **options) as one:
        yield one
        with one.client() as client:
            body = {"prompt": "a", "max_tokens": 3, "temperature": 0, "adapters": {}}
            assert client.post("/v1/completions", json=body).status_code == 200
        assert not one.state.runs
        assert one.engine.stats().core.n_jobs == 0


@settings(
    max_examples=N_CASES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(data=st.data())
@pytest.mark.parametrize("label", OPERATIONS)
def test_no_request_breaks_the_server(served: Served, label: str, data: st.DataObject) -> None:
    """An answer in time, below 500 but for what is said in EXPECTED; errors in their one shape."""
    mode = data.draw(st.sampled_from(list(schemathesis.GenerationMode)))
    case = data.draw(OPERATIONS[label].as_strategy(generation_mode=mode))

    answer = case.call(base_url=served.url, timeout=LONGEST_S)

    assert answer.status_code < 500 or answer.status_code in EXPECTED, answer.text
    if answer.status_code >= 400:
        error = answer.json()["error"]
        strings = [error["reason"]] if error.get("reason") else []  # on OpenAI's routes
        assert error["code"] in [answer.status_code, *strings]
        assert error["message"]


def test_every_route_is_in_the_document() -> None:
    """What is sent at random reaches all routes that clients use."""
    assert {"POST /v1/chat/completions", "POST /completion", "POST /lora-adapters"} <= set(
        OPERATIONS
    )
