"""What the streams of chats and of completions share: events in, chunks out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from loragraph.engine.request import Event
from loragraph.server import sse
from loragraph.server.runs import Run, merged_events, own_json, usage_json

Fields = dict[str, Any]
"""The own fields of one chunk: `choices` with one entry, and what stands beside it."""


class StreamedChoice(Protocol):
    """One choice of a stream: what its events add."""

    form: sse.TextForm  # of a chunk of text and nothing else

    def text(self, event: Event) -> str | None:
        """The text of an event that adds nothing but text, which is the case of nearly all."""

    def of(self, event: Event) -> list[Fields]:
        """The chunks of any other; the last one has a finish_reason where the choice has ended."""


async def chunks(
    chunk: sse.Chunks, runs: Sequence[Run], choices: Sequence[StreamedChoice], *, with_usage: bool
) -> AsyncGenerator[bytes, None]:
    """Chunks of all events, the last of them with what made the answer, then one with the usage.

    `choices` are those of all runs in turn.
    """
    n = len(choices) // len(runs)
    last: Fields | None = None  # waits, so that it can tell what made the answer
    async with aclosing(merged_events(runs)) as batches:
        async for number, batch in batches:
            out: list[bytes] = []  # an event a token, and all that are there in one piece
            for event in batch:
                choice = choices[number * n + event.index]
                text = choice.text(event)
                if text is not None:
                    if text:
                        out.append(choice.form.of(text))
                    continue
                for fields in choice.of(event):
                    if fields["choices"][0]["finish_reason"] is None:
                        out.append(chunk.data(**fields))
                        continue
                    if last is not None:
                        out.append(chunk.data(**last))
                    last = fields
            if out:
                yield b"".join(out)
    assert last is not None
    results = [run.result for run in runs if run.result is not None]
    own = own_json(results[0]) if len(results) == 1 else {}
    yield chunk.data(**last, **own)
    if with_usage:
        yield chunk.data(choices=[], usage=usage_json(results))
