"""Numbers for adapters, as llama-server's `lora` fields use them: given once, never again."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from loragraph.errors import InvalidRequestError


class AdapterIds:
    """Names and their numbers. A name keeps its number until it is gone; any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_name: dict[str, int] = {}
        self._next = 0

    def sync(self, names: Iterable[str]) -> dict[str, int]:
        """Numbers for all names of now, in the order given; others lose theirs for ever."""
        with self._lock:
            known: dict[str, int] = {}
            for name in names:
                found = self._by_name.get(name)
                if found is None:
                    found, self._next = self._next, self._next + 1
                known[name] = found
            self._by_name = known
            return dict(sorted(known.items(), key=lambda pair: pair[1]))

    def forget(self, name: str) -> None:
        """The name is gone; should it come back, it gets another number."""
        with self._lock:
            self._by_name.pop(name, None)

    def name_of(self, number: int) -> str:
        """The name of a number; InvalidRequestError for one that nobody has."""
        with self._lock:
            for name, own in self._by_name.items():
                if own == number:
                    return name
            known = ", ".join(f"{own} ({name})" for name, own in list(self._by_name.items())[:8])
        raise InvalidRequestError(
            f"lora: no adapter has the id {number}; known: {known or 'none'}", param="lora"
        )
