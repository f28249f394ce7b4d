"""Checks of the arguments of the low-level interface: what is wrong raises here, never in C."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from loragraph.errors import CapacityError, ConfigError

MAX_THREADS = 512
"""GGML_MAX_N_THREADS (ggml.h): ggml ends the process above it."""

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def integer(value: object, field: str, low: int, high: int) -> int:
    """An int or numpy integer in [low, high]; ConfigError for all else, bool and float included."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or not low <= number <= high:
        raise ConfigError(f"expected an integer from {low} to {high}, got {value!r}", field=field)
    return number


def choice(value: object, field: str, allowed: Sequence[str]) -> None:
    """ConfigError unless `value` is one of the names."""
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"expected one of {', '.join(allowed)}, got {value!r}", field=field)


def threads(value: object) -> int:
    """A number of threads; None = the CPUs at hand."""
    if value is None:
        n_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 4
        return min(n_cpus, MAX_THREADS)
    return integer(value, "n_threads", 1, MAX_THREADS)


def check_memory(nbytes: int, what: str) -> None:
    """CapacityError where `nbytes` are more than this machine, or this container, has at all.

    The system would promise them and then end the process when they are written.
    """
    limit = _memory_bytes()
    if limit is not None and nbytes > limit:
        raise CapacityError(
            f"{what}: expected at most {limit} bytes, the memory of this machine, got {nbytes}",
            hint="a smaller n_ctx or n_batch takes less",
        )


@contextmanager
def memory_errors(what: str) -> Iterator[None]:
    """Python's MemoryError as CapacityError."""
    try:
        yield
    except MemoryError as exc:
        raise CapacityError(f"{what}: no memory") from exc


def _memory_bytes() -> int | None:
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not on this system
        return None
    try:
        text = _CGROUP_LIMIT.read_text().strip()
    except OSError:
        text = ""
    return min(total, int(text)) if text.isdigit() else total
