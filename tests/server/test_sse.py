"""Server-sent events: what is encoded ahead is the same as what is encoded whole; silences."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from loragraph.engine.params import SamplingParams
from loragraph.engine.request import Event
from loragraph.errors import InvalidRequestError, ModelNotFoundError
from loragraph.server import sse
from loragraph.server.llamacpp.answers import Asked, ChunkBytes, chunk_json
from loragraph.vocab.vocab import Vocab

TEXTS = ["a", "", '"}\n\\', "é☃😀", "\x00\x1f", sse.MARK]


@pytest.mark.parametrize("text", TEXTS)
def test_a_form_is_the_event_with_its_text(text: str) -> None:
    """Whatever the text holds, the mark itself too."""
    chunk = sse.Chunks({"id": "x", "model": 'a"b'})
    entry = {"index": 0, "delta": {"content": sse.MARK}, "finish_reason": None}

    event = chunk.form(entry).of(text)

    assert event == chunk.data(choices=[{**entry, "delta": {"content": text}}])


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("has_token", [True, False])
def test_chunk_bytes_are_those_of_the_dictionary(text: str, has_token: bool) -> None:
    """llama-server's chunk, with its token and without; with log-probabilities too."""
    asked = Asked(SamplingParams(), 7, "")
    vocab = cast(Vocab, SimpleNamespace(piece=lambda token: b"t%d" % token))
    for logprob in (None, -0.5):
        event = Event(1, text, 50 if has_token else None, None, logprob, ((3, -0.1),), seat=2)

        chunk = ChunkBytes(asked, 3, vocab).of(event, 4, has_token=has_token)

        assert chunk == sse.data(chunk_json(asked, event, 3, vocab, 4))


def test_a_comment_breaks_the_silence_before_the_first_event() -> None:
    """The answer begins before there is anything to tell, and ends as any other."""

    async def chunks(go_on: asyncio.Event) -> AsyncGenerator[bytes, None]:
        await go_on.wait()
        yield sse.data(1)

    bodies = asyncio.run(_bodies(chunks))

    assert bodies[0] == b":\n\n"
    rest = b"".join(body for body in bodies if body != b":\n\n")
    assert rest == sse.data(1) + sse.DONE


def test_an_error_after_a_comment_is_an_event() -> None:
    """The status was sent already."""

    async def chunks(go_on: asyncio.Event) -> AsyncGenerator[bytes, None]:
        await go_on.wait()
        raise InvalidRequestError("no", param="prompt")
        yield b""

    bodies = [body for body in asyncio.run(_bodies(chunks)) if body != b":\n\n"]

    event, _, done = b"".join(bodies).partition(b"\n\n")
    assert json.loads(event.removeprefix(b"data: "))["error"]["param"] == "prompt"
    assert done == sse.DONE


@pytest.mark.parametrize(("tag", "code"), [("openai", "model_not_found"), ("llama-server", 404)])
def test_an_error_within_a_stream_had_the_status_as_code(tag: str, code: str | int) -> None:
    """On OpenAI's routes it is the string of whole answers."""

    async def chunks(go_on: asyncio.Event) -> AsyncGenerator[bytes, None]:
        await go_on.wait()
        raise ModelNotFoundError("gone", param="model")
        yield b""

    bodies = asyncio.run(_bodies(chunks, {"route": SimpleNamespace(tags=[tag])}))

    event = b"".join(body for body in bodies if body != b":\n\n").partition(b"\n\n")[0]
    error = json.loads(event.removeprefix(b"data: "))["error"]
    assert (error["code"], error["reason"]) == (code, "model_not_found")


async def _bodies(
    chunks: Callable[[asyncio.Event], AsyncGenerator[bytes, None]],
    scope: dict[str, Any] | None = None,
) -> list[bytes]:
    """What a stream sends whose generator waits until a comment was sent."""
    go_on = asyncio.Event()
    bodies: list[bytes] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            bodies.append(message["body"])
            go_on.set()

    async def receive() -> Any:
        await asyncio.Event().wait()

    response = await sse.event_stream(chunks(go_on), 60, ping_s=0.01)
    async with asyncio.timeout(60):
        await response(scope or {}, receive, send)
    return bodies
