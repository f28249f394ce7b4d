from __future__ import annotations

import inspect
from typing import Any

import httpx2 as httpx
import pytest

from loragraph.server.gate import api_key, request_id, require_admin
from loragraph.server.state import server_state


def test_health(http: httpx.Client) -> None:
    """A server with an engine says that it is ready."""
    assert http.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("path", "code"),
    [("/nope", 404), ("/v1/nope", 404), ("/v1/models/nope", "model_not_found")],
)
def test_what_does_not_exist_is_404_in_the_shape_of_errors(
    http: httpx.Client, path: str, code: int | str
) -> None:
    """Unknown routes and models answer with code, type and message."""
    answer = http.get(path)

    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["code"] == code
    assert error["type"] == "not_found_error"
    assert error["message"]


@pytest.mark.parametrize("dependency", [server_state, request_id, api_key, require_admin])
def test_no_dependency_takes_a_thread(dependency: Any) -> None:
    """FastAPI has a thread do what is not async, which costs more than all else of a request."""
    assert inspect.iscoroutinefunction(dependency)
