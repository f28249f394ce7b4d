"""What the front has to know of single routes: which may be sent twice, how a stream ends. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from loragraph.server import sse
from loragraph.server.errors import ApiError

HEALTH = frozenset({"/health", "/v1/health"})
METRICS = "/metrics"
REPLICA_METRICS = "/metrics/replicas"
REPLICAS = "/replicas"
WHOLE = HEALTH | {METRICS, REPLICA_METRICS, REPLICAS}
"""Answered for all replicas together."""

REPLICA_HEADER = "X-Loragraph-Replica"
"""Of an answer: who gave it; of a request: who is to answer it, if it is there and has time."""

_CHANGES = frozenset(
    {
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/load_lora_adapter",
        "/unload_lora_adapter",
        "/v1/pin_lora_adapter",
        "/v1/unpin_lora_adapter",
        "/lora-adapters",
    }
)
_ONE_REPLICA = frozenset({"/api/state", "/slots"})
_OPENAI_STREAMS = frozenset({"/v1/completions", "/v1/chat/completions", "/chat/completions"})


def may_repeat(method: str, path: str) -> bool:
    """Whether a request whose fate is not known may be sent again."""
    return method in ("GET", "HEAD", "OPTIONS") or path not in _CHANGES


def sticky_word(path: str) -> str:
    """One word for routes whose answers make sense only from the same replica."""
    one = path in _ONE_REPLICA or path.startswith("/slots/")
    return "figures" if one else ""


class Tail:
    """How a stream is to end when its replica is lost. It sees all that was sent before."""

    def feed(self, body: bytes) -> None:
        """A piece of the answer's body."""

    def end(self, error: ApiError) -> bytes | None:
        """The last piece; None: nothing can be said any more, and the connection is cut."""
        return None


class EventTail(Tail):
    """Of server-sent events: the error as an event, then what ends this route's streams."""

    def __init__(self, path: str) -> None:
        self._end = sse.DONE if path in _OPENAI_STREAMS else b""

    def end(self, error: ApiError) -> bytes:
        """As the route itself reports an error."""
        return sse.data(error.body) + self._end


class LinesTail(Tail):
    """Of POST /api/compare: an error for each answer that has not ended."""

    def __init__(self, n_requests: int) -> None:
        self._open = dict.fromkeys(range(n_requests))

    def feed(self, body: bytes) -> None:
        """Whole lines."""
        for line in body.splitlines():
            if b'"end":true' in line:
                self._open.pop(json.loads(line).get("index"), None)

    def end(self, error: ApiError) -> bytes:
        """Two lines for each."""
        text = sse.encoded(error.body).decode()
        lines: list[dict[str, Any]] = []
        for index in self._open:
            lines += [
                {"index": index, "status": error.status_code, "error": text},
                {"index": index, "end": True},
            ]
        return b"".join(sse.encoded(line) + b"\n" for line in lines)


def tail_of(path: str, headers: Iterable[tuple[bytes, bytes]], body: Any) -> Tail:
    """The tail for an answer with these headers to a request with this parsed body."""
    kind = b""
    for name, value in headers:
        if name.lower() == b"content-type":
            kind = value.partition(b";")[0].strip()
    if kind == b"text/event-stream":
        return EventTail(path)
    if kind == b"application/x-ndjson":
        requests = body.get("requests") if isinstance(body, dict) else None
        return LinesTail(len(requests) if isinstance(requests, list) else 0)
    return Tail()
