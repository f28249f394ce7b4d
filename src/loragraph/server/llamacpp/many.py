"""Several runs of one request: all results, or all events as they come. One failure ends all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from loragraph.engine.request import Event, Result
from loragraph.server.runs import Run


async def results_of(runs: Sequence[Run]) -> list[Result]:
    """All results, in order; the first error cancels the others and is raised."""
    tasks = [asyncio.ensure_future(run.finish()) for run in runs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _cancelled(tasks)


async def batches_of(runs: Sequence[Run]) -> AsyncGenerator[tuple[int, list[Event]], None]:
    """(a run's number, its new events); once more without events when its result is there."""
    queue: asyncio.Queue[tuple[int, list[Event]] | None] = asyncio.Queue()

    async def read(number: int, run: Run) -> None:
        async for events in run.events():
            queue.put_nowait((number, events))
        queue.put_nowait((number, []))

    tasks = [asyncio.ensure_future(read(number, run)) for number, run in enumerate(runs)]
    for task in tasks:
        task.add_done_callback(lambda _task: queue.put_nowait(None))
    n_left = len(tasks)
    try:
        while n_left:
            got = await queue.get()
            if got is not None:
                yield got
                continue
            n_left -= 1
            for task in tasks:
                if task.done():
                    task.result()  # raises what ended it
    finally:
        await _cancelled(tasks)


async def _cancelled(tasks: Sequence[asyncio.Future[object]]) -> None:
    """Cancels what still runs, and waits for it."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
