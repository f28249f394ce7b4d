"""Files from where they stand onto this disk: in pieces, until a deadline. What has come stays,
with the tag of the content that it is of, so that a later try asks for what is missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from loragraph.cluster.cache import writing
from loragraph.cluster.transports import CutError, Origin, RangeError, Stream
from loragraph.errors import DeadlineError, SourceError

_T = TypeVar("_T")
_MAX_BACKOFF_S = 2.0


@dataclass(frozen=True, slots=True)
class Transfer:
    """All that one adapter takes, of a file or of several."""

    max_bytes: int  # of all its files
    max_tries: int  # without a byte more
    max_s: float
    deadline: float  # in the clock's seconds
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic

    def file(self, origin: Origin, part: Path, limit: int, *, can_mix: bool = False) -> None:
        """Into `part`, at most `limit` bytes, on from what is there of it.

        `can_mix`: without a tag too, as a digest will tell if that was wrong. CutError when all
        tries have failed, DeadlineError, SourceError for what is too large.
        """
        _touch(part)

        def attempt(is_last: bool) -> None:
            have, tag = part.stat().st_size, read_tag(part)
            # the last try asks for all: perhaps it is ranges that fail
            start = have if (tag or can_mix) and not is_last else 0
            try:
                with origin.open(start, tag) as stream:
                    self._take(origin, stream, part, limit)
            except RangeError:
                discard(part)
                _touch(part)
                raise

        try:
            self._persist(origin, attempt, lambda: part.stat().st_size)
        except SourceError:
            if part.stat().st_size == 0:
                discard(part)
            raise

    def is_current(self, origin: Origin, file: Path, tag: str) -> bool:
        """Whether a complete file of an earlier try is what its source holds, by tag and size.

        Asks for no more than its last byte, as a server may refuse what begins at the end.
        """
        size = file.stat().st_size

        def attempt(_is_last: bool) -> bool:
            try:
                with origin.open(max(size - 1, 0), tag) as stream:
                    return stream.tag == tag and stream.total == size
            except RangeError:
                return False

        return bool(tag) and self._persist(origin, attempt, lambda: 0)

    def check_time(self, origin: Origin) -> None:
        """DeadlineError when it is over."""
        if self.clock() > self.deadline:
            raise late(origin.shown, self.max_s)

    def _persist(
        self, origin: Origin, attempt: Callable[[bool], _T], progress: Callable[[], int]
    ) -> _T:
        """Until max_tries in a row were cut and brought nothing; tells an attempt if it is last."""
        n_failures, is_stuck = 0, False
        while True:
            have = progress()
            try:
                return attempt(is_stuck and n_failures == self.max_tries - 1)
            except CutError:
                is_stuck = progress() <= have
                n_failures = n_failures + 1 if is_stuck else 1
                if n_failures >= self.max_tries:
                    raise
            self.check_time(origin)
            self.sleep(min(0.05 * 2**n_failures, _MAX_BACKOFF_S))

    def _take(self, origin: Origin, stream: Stream, part: Path, limit: int) -> None:
        """Writes a stream; CutError where it is shorter than it said."""
        if stream.total is not None and stream.total > limit:
            raise self._too_large(origin, stream.total)
        with writing(part), open(part, "r+b") as file:
            file.truncate(stream.start)
            file.seek(stream.start)
            _tag_path(part).write_text(stream.tag, encoding="utf-8")
            n_bytes = stream.start
            for chunk in stream.chunks:
                n_bytes += len(chunk)
                if n_bytes > limit:
                    raise self._too_large(origin, n_bytes)
                file.write(chunk)
                if n_bytes != stream.total:  # what is complete is not late
                    self.check_time(origin)
        if stream.total is not None and n_bytes != stream.total:
            raise CutError(f"expected {stream.total} bytes, got {n_bytes}", source=origin.shown)

    def _too_large(self, origin: Origin, size: int) -> SourceError:
        return SourceError(
            f"expected at most {self.max_bytes} bytes, got {size} or more", source=origin.shown
        )


def late(source: str, max_s: float) -> DeadlineError:
    """Of a fetch that took too long."""
    return DeadlineError(
        f"{source}: expected to have it within {max_s:g} s",
        hint="what is there of it is kept, so asking again goes on from there",
    )


def read_tag(part: Path) -> str:
    """Of what has come; "" where nobody knows."""
    try:
        return _tag_path(part).read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


def discard(part: Path) -> None:
    """A part and its tag."""
    _tag_path(part).unlink(missing_ok=True)
    part.unlink(missing_ok=True)


def _touch(part: Path) -> None:
    with writing(part):
        part.touch(mode=0o600)


def _tag_path(part: Path) -> Path:
    return part.with_name(f"{part.name}.tag")
