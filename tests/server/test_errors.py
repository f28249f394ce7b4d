"""Our errors as HTTP answers."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from loragraph.errors import (
    AdapterChangedError,
    AdapterFormatError,
    AdapterMismatchError,
    BackendError,
    CapacityError,
    ConfigError,
    ContextLengthError,
    DeadlineError,
    InvalidRequestError,
    LifecycleError,
    LoragraphError,
    MixTooLargeError,
    ModelNotFoundError,
    OverloadedError,
    UnsupportedError,
)
from loragraph.server.app import create_app
from loragraph.server.config import ServerConfig
from loragraph.server.errors import api_error


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidRequestError("x", param="p"), 400, "invalid_request_error"),
        (ContextLengthError("x"), 400, "exceed_context_size_error"),
        (ModelNotFoundError("x"), 404, "not_found_error"),
        (ConfigError("x", field="f"), 400, "invalid_request_error"),
        (AdapterFormatError("x", path="/srv/secret/a.gguf"), 400, "invalid_request_error"),
        (AdapterMismatchError("x", adapter="/secret place/a.gguf"), 400, "invalid_request_error"),
        (AdapterMismatchError("/srv/secret/a.gguf: x"), 400, "invalid_request_error"),
        (UnsupportedError("x"), 400, "invalid_request_error"),
        (AdapterChangedError("x from /secret/x.gguf"), 409, "conflict_error"),
        (OverloadedError("x"), 429, "rate_limit_error"),
        (CapacityError("x"), 503, "unavailable_error"),
        (MixTooLargeError("x"), 400, "invalid_request_error"),
        (LifecycleError("x"), 503, "unavailable_error"),
        (DeadlineError("x"), 504, "timeout_error"),
        (BackendError("x"), 500, "server_error"),
    ],
)
def test_each_error_has_its_status(error: LoragraphError, status: int, kind: str) -> None:
    """Status, type and code of an error; where trying again may help it says when."""
    answer = api_error(error)
    body = answer.body["error"]

    assert (answer.status_code, body["code"], body["type"]) == (status, status, kind)
    assert ("Retry-After" in (answer.headers or {})) == (status in (429, 503))
    assert "secret" not in str(answer.body)


def test_an_unknown_error_is_told_in_the_log_alone(caplog: pytest.LogCaptureFixture) -> None:
    """What nobody foresaw is a 500 without details, and a traceback in the log."""
    app = create_app(None, ServerConfig())

    @app.get("/broken")
    def broken() -> None:
        raise ZeroDivisionError("secret")

    with TestClient(app, raise_server_exceptions=False) as client:
        answer = client.get("/broken")

    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "secret" not in answer.text
    assert "ZeroDivisionError" in caplog.text


def test_a_method_that_a_route_lacks() -> None:
    """405 in the shape of all errors, with the methods there are."""
    with TestClient(create_app(None, ServerConfig())) as client:
        answer = client.delete("/v1/chat/completions")

    assert answer.status_code == 405
    assert answer.json()["error"]["code"] == 405
    assert answer.headers["allow"] == "POST"
