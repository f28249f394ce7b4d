from __future__ import annotations

import httpx2 as httpx
import pytest


def test_health(http: httpx.Client) -> None:
    """A server with an engine says that it is ready."""
    assert http.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize("path", ["/nope", "/v1/nope", "/v1/models/nope"])
def test_what_does_not_exist_is_404_in_the_shape_of_errors(http: httpx.Client, path: str) -> None:
    """Unknown routes and models answer with code, type and message."""
    answer = http.get(path)

    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["code"] == 404
    assert error["type"] == "not_found_error"
    assert error["message"]
