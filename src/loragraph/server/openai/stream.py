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

    `choices` are those of all runs in turn. Of several runs, the last chunk of each tells it.
    """
    n = len(choices) // len(runs)
    n_open = [n] * len(runs)  # choices of each that have not ended
    last: dict[int, Fields] = {}  # of each run: waits, so that it can tell what made the answer
    async with aclosing(merged_events(runs)) as batches:
        async for number, batch in batches:
            # an event a token, and all that are there in one piece
            out: list[bytes] = []
            for event in batch:
                choice = choices[number * n + event.index]
                text = choice.text(event)
                if text is not None:
                    if text:
                        out.append(choice.form.of(text))
                    continue
                for fields in choice.of(event):
                    n_open[number] -= fields["choices"][0]["finish_reason"] is not None
                    if n_open[number]:
                        out.append(chunk.data(**fields))
                    else:
                        last[number] = fields
            if not batch and number in last:
                fields = last.pop(number)
                out.append(chunk.data(**_with_own(fields, runs[number], in_choice=len(runs) > 1)))
            if out:
                yield b"".join(out)
    if with_usage:
        results = [run.result for run in runs if run.result is not None]
        yield chunk.data(choices=[], usage=usage_json(results))


def _with_own(fields: Fields, run: Run, *, in_choice: bool) -> Fields:
    """A run's last chunk with what made the answer.

    It stands beside its choice, or in it where there are several runs, as in whole answers.
    """
    assert run.result is not None, "the run has not ended"
    own = own_json(run.result)
    if not in_choice:
        return {**fields, **own}
    [entry] = fields["choices"]
    return {**fields, "choices": [{**entry, **own}]}
