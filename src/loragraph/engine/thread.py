"""The engine's thread: commands come in through a queue, and nothing else touches the core."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from loragraph.engine.core import EngineCore
from loragraph.errors import BackendError, LifecycleError

T = TypeVar("T")
Command = Callable[[], object]


class EngineThread:
    """Runs a core until it is stopped. `post` and `call` may be used by any thread."""

    def __init__(
        self,
        core: EngineCore,
        clock: Callable[[], float],
        name: str,
        after_step: Callable[[], None] = lambda: None,
    ) -> None:
        """`after_step` is called when commands and step have sent out what they had."""
        self._core = core
        self._after_step = after_step
        self._clock = clock
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._accepts = True  # commands
        self._stopping = False
        self._draining = False
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    @property
    def stopping(self) -> bool:
        """Whether it accepts no new requests."""
        return self._stopping or self._draining or not self._accepts

    def post(self, command: Command) -> None:
        """Has the engine's thread run a command between two steps; LifecycleError once stopped."""
        with self._lock:
            if not self._accepts:
                raise LifecycleError("the engine was used after its close")
            self._commands.put(command)

    def call(self, function: Callable[[], T]) -> T:
        """Has the engine's thread run a function between two steps, and waits for what it gives."""
        future: Future[T] = Future()

        def command() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
                if not isinstance(error, Exception):
                    raise

        self.post(command)
        return future.result()

    def stop(self, *, drain: bool) -> None:
        """Ends the thread: after all requests with `drain`, else after the step that runs."""

        def command() -> None:
            self._draining = True
            self._stopping = self._stopping or not drain

        with suppress(LifecycleError):  # it ended already
            self.post(command)
        self._thread.join()

    def _main(self) -> None:
        busy = False
        try:
            while not self._stopping and not (self._draining and not self._core.n_jobs):
                self._take_commands(wait=not busy)
                busy = self._core.step()
                self._after_step()
        finally:  # after an error too: nobody is left waiting
            with self._lock:
                self._accepts = False
            ended = LifecycleError("the engine was closed before the request ended")
            self._core.close(ended if self._draining else BackendError("the engine's thread ended"))
            self._take_commands(wait=False)
            self._after_step()

    def _take_commands(self, *, wait: bool) -> None:
        """Runs all commands there are; with `wait` at least one, or until a deadline."""
        try:
            if wait:
                seconds = self._core.next_deadline() - self._clock()
                timeout = None if seconds == math.inf else max(0.0, seconds)
                self._commands.get(timeout=timeout)()
            while True:
                self._commands.get_nowait()()
        except queue.Empty:
            return
