"""The front's half of a request, with replicas that are lists of messages and failures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from starlette.types import Message, Scope

from loragraph.ray.forward import (
    ACCEPTED,
    REFUSED,
    Forwarded,
    Forwarder,
    ReplicaLostError,
)
from loragraph.ray.hint import Hint

EVENTS, JSON = b"text/event-stream; charset=utf-8", b"application/json"
Step = Message | BaseException | str


def accepted(replica: str = "r1") -> Message:
    """A replica takes the request."""
    return {"type": ACCEPTED, "replica": replica}


def refused(replica: str = "r1") -> Message:
    """It does not."""
    return {"type": REFUSED, "replica": replica, "reason": "the catalogue is old"}


def start(kind: bytes = JSON, status: int = 200) -> Message:
    """The head of an answer."""
    headers = [(b"content-type", kind)]
    return {"type": "http.response.start", "status": status, "headers": headers}


def piece(body: bytes, *, more: bool = True) -> Message:
    """A piece of its body."""
    return {"type": "http.response.body", "body": body, "more_body": more}


LOST = ReplicaLostError("the replica was lost")
END = piece(b"", more=False)


class FakeReplies:
    """One call's messages; "wait" stands for ever."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.cancelled = False
        self._steps = steps

    async def __aiter__(self) -> AsyncIterator[Sequence[Message]]:
        for step in self._steps:
            if isinstance(step, BaseException):
                raise step
            if isinstance(step, str):
                await asyncio.Event().wait()
            else:
                yield [step]

    def cancel(self) -> None:
        self.cancelled = True


class Exchange:
    """A request through a Forwarder whose calls are given."""

    def __init__(
        self, *calls: Sequence[Step], path: str = "/v1/completions", method: str = "POST"
    ) -> None:
        self.replies = [FakeReplies(steps) for steps in calls]
        self.hints: list[Hint] = []
        self.sent: list[Message] = []
        self.leaves = asyncio.Event()
        self.forwarder = Forwarder(self._call, accept_s=0.05)
        self._scope: Scope = {"type": "http", "method": method, "path": path, "headers": []}

    def _call(self, scope: Scope, body: bytes, hint: Hint) -> FakeReplies:
        self.hints.append(hint)
        return self.replies[len(self.hints) - 1]

    async def _receive(self) -> Message:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self.sent.append(message)

    async def run(self, parsed: Any = None) -> None:
        """To its end."""
        request = Forwarded(self._scope, self._scope["path"], b"{}", parsed, Hint("r"))
        await self.forwarder.serve(request, self._receive, self._send)

    @property
    def status(self) -> int:
        """Of the answer."""
        return int(self.sent[0]["status"])

    @property
    def body(self) -> bytes:
        """Of the answer, which has to have one start and one end."""
        kinds = [message["type"] for message in self.sent]
        assert kinds.count("http.response.start") == 1
        assert [one.get("more_body", False) for one in self.sent[1:]].count(False) == 1
        assert not self.sent[-1].get("more_body", False)
        return b"".join(message["body"] for message in self.sent[1:])


def test_an_answer_goes_through_with_the_replicas_name() -> None:
    """As it is; nothing was tried twice."""
    one = Exchange([accepted(), start(), piece(b"ab"), piece(b"c", more=False)])
    asyncio.run(one.run())

    assert (one.status, one.body) == (200, b"abc")
    assert (b"x-loragraph-replica", b"r1") in one.sent[0]["headers"]
    assert one.replies[0].cancelled
    assert (one.forwarder.counts.n_requests, one.forwarder.counts.n_retries) == (1, 0)


@pytest.mark.parametrize(
    "first",
    [
        [LOST],
        [accepted("r1"), LOST],
        [accepted("r1"), start(), LOST],
        [accepted("r1"), start()],
        [accepted("r1")],
        [refused("r1")],
        [],
    ],
)
def test_what_has_sent_nothing_is_tried_elsewhere(first: list[Step]) -> None:
    """Whatever befell the first replica, the client sees the second's answer alone."""
    one = Exchange(first, [accepted("r2"), start(), piece(b"x", more=False)])
    asyncio.run(one.run())

    assert (one.status, one.body) == (200, b"x")
    assert one.hints[1].avoid == (("r1",) if first and first != [LOST] else ())
    assert one.forwarder.counts.n_retries == 1
    assert all(replies.cancelled for replies in one.replies)


def test_tries_are_bounded() -> None:
    """After three the client gets a 503, with the reason."""
    one = Exchange([LOST], [accepted("r1"), LOST], [refused("r2")])
    asyncio.run(one.run())

    assert one.status == 503
    assert json.loads(one.body)["error"]["message"] == "the catalogue is old"
    assert one.hints[2].avoid == ("r1",)
    assert one.forwarder.counts.n_failed == 1


def test_no_replica_takes_it_in_time() -> None:
    """The wait for one is bounded."""
    one = Exchange(["wait"], ["wait"], ["wait"])
    asyncio.run(one.run())

    assert one.status == 503
    assert "takes requests" in json.loads(one.body)["error"]["message"]


@pytest.mark.parametrize(
    ("path", "end"),
    [
        ("/v1/completions", b"data: [DONE]\n\n"),
        ("/v1/chat/completions", b"data: [DONE]\n\n"),
        ("/completion", b""),
    ],
)
def test_a_stream_that_lost_its_replica_ends_with_an_error_event(path: str, end: bytes) -> None:
    """In the shape of the route's own errors; it is not tried again."""
    one = Exchange([accepted(), start(EVENTS), piece(b"data: 1\n\n"), LOST], path=path)
    asyncio.run(one.run())

    events = one.body.removeprefix(b"data: 1\n\n").removesuffix(end)
    error = json.loads(events.removeprefix(b"data: "))["error"]
    assert (error["code"], error["type"]) == (502, "upstream_error")
    assert len(one.hints) == 1
    assert one.forwarder.counts.n_cut == 1


def test_compared_answers_each_get_their_error() -> None:
    """Those that had ended do not."""
    done = b'{"index":1,"body":"x"}\n{"index":1,"end":true}\n'
    one = Exchange(
        [accepted(), start(b"application/x-ndjson"), piece(done), LOST], path="/api/compare"
    )
    asyncio.run(one.run({"requests": [{}, {}, {}]}))

    lines = [json.loads(line) for line in one.body.removeprefix(done).splitlines()]
    assert [(line["index"], line.get("status"), "end" in line) for line in lines] == [
        *((0, 502, False), (0, None, True)),
        *((2, 502, False), (2, None, True)),
    ]
    assert json.loads(lines[0]["error"])["error"]["code"] == 502


def test_a_whole_answer_that_is_cut_ends_its_connection() -> None:
    """There is no way to say it within."""
    one = Exchange([accepted(), start(), piece(b"{"), LOST])
    with pytest.raises(ReplicaLostError):
        asyncio.run(one.run())


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/lora-adapters"])
def test_a_change_is_not_made_twice(path: str) -> None:
    """Once a replica has taken it, nobody knows whether it was made; before that it may go on."""
    lost = Exchange([accepted(), LOST], path=path)
    asyncio.run(lost.run())
    again = Exchange([refused()], [accepted(), start(), END], path=path)
    asyncio.run(again.run())
    listed = Exchange([accepted(), LOST], [accepted(), start(), END], path=path, method="GET")
    asyncio.run(listed.run())

    assert lost.status == 502
    assert "not known" in json.loads(lost.body)["error"]["message"]
    assert again.status == listed.status == 200


def test_a_client_that_leaves_cancels_the_call() -> None:
    """Whether an answer has begun or not."""

    async def leaves(one: Exchange) -> None:
        task = asyncio.ensure_future(one.run())
        while not one.hints:
            await asyncio.sleep(0)
        one.leaves.set()
        await task

    begun: list[Step] = [accepted(), start(EVENTS), piece(b"x")]
    for steps in ([], begun):
        steps.append("wait")
        one = Exchange(steps)
        asyncio.run(leaves(one))
        assert one.replies[0].cancelled
        assert len(one.hints) == 1


def test_a_client_that_reads_nothing_is_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    """Its answer gets no end, the replica need not go on, and nobody is asked once more."""

    class Stalled(Exchange):
        async def _send(self, message: Message) -> None:
            if self.sent:
                await asyncio.Event().wait()
            self.sent.append(message)

    exchange = Stalled([accepted(), start(EVENTS), piece(b"a"), "wait"])
    exchange.forwarder = Forwarder(exchange._call, accept_s=5, send_s=0.01)
    asyncio.run(exchange.run())

    assert [message["type"] for message in exchange.sent] == ["http.response.start"]
    assert exchange.replies[0].cancelled
    assert exchange.forwarder.counts.n_retries == exchange.forwarder.counts.n_cut == 0
    assert "is cut off" in caplog.text
