"""llama-server's `t_max_predict_ms`: a generation that ends when its time is over."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from loragraph.engine.request import Event, Result
from loragraph.server.runs import Run


class TimedRun(Run):
    """Ends once `seconds` have gone by since its first token and there is a line break in its text.

    As in llama-server, whose code completions want at least a line. The result's choices that had
    not ended say "abort".
    """

    def __init__(self, *args: Any, seconds: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._seconds = seconds
        self._has_line = False

    async def finish(self) -> Result:
        """Waits for the end, reading events for it."""
        async with aclosing(self.events()) as batches:
            async for _ in batches:
                pass
        assert self.result is not None
        return self.result

    def _note(self, batch: list[Event]) -> None:
        super()._note(batch)
        assert self.first_event is not None
        assert self.last_event is not None
        self._has_line |= any("\n" in event.piece for event in batch)
        if self._has_line and self.last_event - self.first_event >= self._seconds:
            assert self.stream is not None
            self.stream.stop()
