"""The front's half of a request: sent to a replica, tried again elsewhere, ended in order.

Knows nothing of Ray: a call gives batches of ASGI messages, and raises ReplicaLostError where its
replica is lost. Until the first piece of an answer is sent, nobody knows that there was a try.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.types import Message, Receive, Scope, Send

from loragraph.errors import LoragraphError
from loragraph.ray.hint import Hint
from loragraph.ray.routes import REPLICA_HEADER, Tail, may_repeat, tail_of
from loragraph.server.errors import ApiError

_log = logging.getLogger(__name__)

ACCEPTED, REFUSED = "loragraph.accepted", "loragraph.refused"
"""Types of messages of our own, the first of every answer: who serves it, or why it does not."""

_REPLICA_HEADER = REPLICA_HEADER.lower().encode()
_MAX_TRIES = 3
_ACCEPT_S = 60.0


class ReplicaLostError(LoragraphError):
    """A replica died, cannot be reached, or does not take the request."""

    status = 503


class _StalledError(Exception):
    """The client reads nothing."""


class Replies(Protocol):
    """Batches of ASGI messages from a replica."""

    def __aiter__(self) -> AsyncIterator[Sequence[Message]]:
        """The batches; ReplicaLostError where their replica is lost."""

    def cancel(self) -> None:
        """The replica need not go on; twice is fine."""


Call = Callable[[Scope, bytes, Hint], Replies]
"""Sends a request to the replica that a router chooses by the hint."""


@dataclass(slots=True)
class ForwardCounts:
    """What happened to requests here; for metrics."""

    n_requests: int = 0
    n_retries: int = 0  # tries after the first
    n_cut: int = 0  # answers that their replica's loss cut off
    n_failed: int = 0  # requests that no replica took


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A request that was read as a whole."""

    scope: Scope
    path: str  # without what the scope's may begin with
    body: bytes
    parsed: Any  # of the body; None where it is no JSON
    hint: Hint


class Forwarder:
    """Sends requests on. For one event loop."""

    def __init__(
        self,
        call: Call,
        *,
        max_tries: int = _MAX_TRIES,
        accept_s: float = _ACCEPT_S,
        send_s: float = math.inf,
    ) -> None:
        """`accept_s`: how long a request waits for a replica that takes it; `send_s`: for how long
        a client may read nothing.
        """
        self.counts = ForwardCounts()
        self._call = call
        self._max_tries = max_tries
        self._accept_s = accept_s
        self._send_s = send_s if send_s < math.inf else None

    async def serve(self, request: Forwarded, receive: Receive, send: Send) -> None:
        """To the end of the answer, or until the client is gone."""
        self.counts.n_requests += 1

        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(self._send_s):
                    await send(message)
            except TimeoutError:
                raise _StalledError from None

        work = asyncio.ensure_future(self._tries(request, receive, send_in_time))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
        if work.cancelled():
            return
        try:
            work.result()
        except _StalledError:  # without an end to the answer the connection is closed
            _log.warning("a client read nothing for %g s: its answer is cut off", self._send_s)

    async def _tries(self, request: Forwarded, receive: Receive, send: Send) -> None:
        hint, scope = request.hint, request.scope
        repeatable = may_repeat(scope["method"], request.path)
        for number in range(self._max_tries):
            self.counts.n_retries += number > 0
            attempt = _Attempt(request, send)
            replies = self._call(scope, request.body, hint)
            try:
                await attempt.run(replies, self._accept_s)
                return
            except ReplicaLostError as error:
                if attempt.started:
                    self.counts.n_cut += 1
                    await attempt.fail(error)
                    return
                last = error
            finally:
                replies.cancel()
            if attempt.accepted and not repeatable:
                self.counts.n_failed += 1
                lost = ApiError(502, f"{last.message}; whether the change was made is not known")
                await lost.response(scope, receive, send)
                return
            if attempt.replica:
                hint = hint.without(attempt.replica)
        self.counts.n_failed += 1
        await ApiError(503, last.message).response(scope, receive, send)


class _Attempt:
    """One try of a request."""

    def __init__(self, request: Forwarded, send: Send) -> None:
        self.replica = ""  # who has it
        self.accepted = False
        self.started = False  # something of its answer was sent
        self._request = request
        self._send = send
        self._start: Message | None = None  # held back until there is a body
        self._ended = False
        self._tail = Tail()

    async def run(self, replies: Replies, accept_s: float) -> None:
        """Sends the answer; ReplicaLostError where it has no end."""
        batches = aiter(replies)
        try:
            async with asyncio.timeout(accept_s):
                first = await anext(batches)
        except StopAsyncIteration:
            first = ()
        except TimeoutError as error:
            raise ReplicaLostError(
                f"expected a replica that takes requests within {accept_s:g} s, got none"
            ) from error
        await self._take(first)
        async for batch in batches:
            await self._take(batch)
        if not self._ended:
            raise ReplicaLostError("the replica ended before its answer did")

    async def fail(self, error: ReplicaLostError) -> None:
        """Ends an answer that has begun; raises where its connection has to be cut."""
        end = self._tail.end(ApiError(502, f"the answer was cut off: {error.message}"))
        if end is None:
            raise error
        await self._send({"type": "http.response.body", "body": end, "more_body": False})

    async def _take(self, batch: Sequence[Message]) -> None:
        for message in batch:
            kind = message["type"]
            if kind == ACCEPTED:
                self.replica, self.accepted = message["replica"], True
            elif kind == REFUSED:
                self.replica, self.accepted = message["replica"], False
                raise ReplicaLostError(message["reason"])
            elif kind == "http.response.start":
                self._start = {
                    **message,
                    "headers": [*message["headers"], (_REPLICA_HEADER, self.replica.encode())],
                }
            elif kind == "http.response.body":
                await self._body(message)

    async def _body(self, message: Message) -> None:
        body, more = message.get("body", b""), message.get("more_body", False)
        if self._start is not None:
            start, self._start = self._start, None
            self._tail = tail_of(self._request.path, start["headers"], self._request.parsed)
            self.started = True
            await self._send(start)
        self._ended = self._ended or not more
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
        self._tail.feed(body)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
