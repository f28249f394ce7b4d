"""Carries a merge out: pieces of rows through f32, in threads, into files that appear complete."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from loragraph.errors import GGUFError, UnsupportedError
from loragraph.ggml.gguf import TensorInfo
from loragraph.ggml.lib import Library
from loragraph.ggml.quants import Bytes, Floats, from_f32, largest, row_bytes, to_f32, type_name
from loragraph.tools.deltas import Delta, Term, delta_of
from loragraph.tools.gguf_header import OutTensor
from loragraph.tools.output import OutFile, out_files
from loragraph.tools.split import Part

Progress = Callable[[int, int], None]

_PIECE_VALUES = 1 << 18  # of one thread: fits its cache beside the factors
_SCRATCH_VALUES = 1 << 22  # of all threads together
_COPY_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of the output and what it is made of."""

    out: OutTensor
    source: TensorInfo
    terms: Sequence[Term] = ()
    factor: TensorInfo | None = None  # w_s, where the weight has one
    made: Bytes | None = None  # all of its bytes: a small tensor that the plan made already

    @property
    def is_copy(self) -> bool:
        """Whether its bytes are the source's."""
        return self.made is None and not self.terms and self.out.type == self.source.type


def run_pieces(
    lib: Library,
    pieces: Sequence[Piece],
    parts: Sequence[Part],
    n_threads: int,
    progress: Progress | None = None,
) -> None:
    """Writes all parts; `pieces` in the order of the parts' tensors.

    `progress` gets bytes of the sources, in the calling thread.
    """
    total = sum(piece.source.nbytes for piece in pieces)
    with out_files([part.path for part in parts]) as files, ExitStack() as stack:
        sources = _open_sources(pieces, stack)
        for file, part in zip(files, parts, strict=True):
            file.reserve(part.nbytes)
            file.write(part.head, 0)
        places = [
            (file, place) for file, part in zip(files, parts, strict=True) for place in part.places
        ]
        workers = _Workers(lib, sources, n_threads)
        # The pieces are shared out already: BLAS threads beside ours only wait for each other.
        # The limit holds for numpy in the whole process, until the merge ends.
        stack.enter_context(threadpool_limits(1, user_api="blas"))
        pool = stack.enter_context(ThreadPoolExecutor(n_threads))
        stack.callback(pool.shutdown, wait=True, cancel_futures=True)
        waiting: deque[tuple[Future[None], int]] = deque()
        done = 0
        jobs = (
            job
            for piece, (file, place) in zip(pieces, places, strict=True)
            for job in workers.jobs(piece, file, place)
        )
        for work, nbytes in jobs:
            waiting.append((pool.submit(work), nbytes))
            if len(waiting) > 2 * n_threads:
                done += _finished(waiting)
                _tell(progress, done, total)
        while waiting:
            done += _finished(waiting)
            _tell(progress, done, total)


def _finished(waiting: deque[tuple[Future[None], int]]) -> int:
    future, nbytes = waiting.popleft()
    future.result()
    return nbytes


def _tell(progress: Progress | None, done: int, total: int) -> None:
    if progress is not None:
        progress(done, total)


def _open_sources(pieces: Sequence[Piece], stack: ExitStack) -> dict[Path, int]:
    fds: dict[Path, int] = {}
    for path in {piece.source.path for piece in pieces}:
        try:
            fds[path] = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as exc:
            raise GGUFError(f"failed to open: {exc.strerror or exc}", path=path) from exc
        stack.callback(os.close, fds[path])
    return fds


class _Scratch(threading.local):
    """Buffers of a thread, kept from one piece to the next."""

    def __init__(self, n_values: int) -> None:
        self.values = np.empty(n_values, np.float32)
        self.product = np.empty(n_values, np.float32)
        self.stored = np.empty(4 * n_values, np.uint8)
        self.read = np.empty(4 * n_values, np.uint8)


class _Workers:
    """Makes the jobs of a piece: functions without arguments, for any thread."""

    def __init__(self, lib: Library, sources: dict[Path, int], n_threads: int) -> None:
        self._lib = lib
        self._sources = sources
        self._n_values = min(_PIECE_VALUES, max(1 << 14, _SCRATCH_VALUES // n_threads))
        self._scratch = _Scratch(self._n_values)

    def jobs(
        self, piece: Piece, file: OutFile, place: int
    ) -> Iterator[tuple[Callable[[], None], int]]:
        """Each job with the bytes of the source that it takes."""
        if piece.made is not None:
            yield _Write(file, piece.made, place), piece.source.nbytes
            return
        if piece.is_copy:
            yield from self._copies(piece.source, file, place)
            return
        n_in, n_out, n_expert, n_outer = piece.source.ne
        delta = delta_of(piece.terms, self._factor(piece)) if piece.terms else None
        in_row = row_bytes(self._lib, piece.source.type, n_in)
        step = max(1, self._n_values // n_in)
        for expert in range(n_expert * n_outer):
            for row in range(0, n_out, step):
                start, n = expert * n_out + row, min(step, n_out - row)
                yield _Convert(self, piece, file, place, delta, start, n), n * in_row

    def _copies(
        self, info: TensorInfo, file: OutFile, place: int
    ) -> Iterator[tuple[Callable[[], None], int]]:
        fd = self._sources[info.path]
        for start in range(0, info.nbytes, _COPY_BYTES):
            n = min(_COPY_BYTES, info.nbytes - start)
            yield _Copy(file, fd, info.offset + start, n, place + start), n

    def _factor(self, piece: Piece) -> Floats | None:
        info = piece.factor
        if info is None:
            return None
        data = np.empty(info.nbytes, np.uint8)
        self.read(info, 0, data)
        return data.view(np.float32)

    def read(self, info: TensorInfo, start: int, into: Bytes) -> None:
        """Bytes of a tensor from `start` on; GGUFError where the file has become shorter."""
        try:
            data = os.pread(self._sources[info.path], len(into), info.offset + start)
        except OSError as exc:
            raise GGUFError(f"failed to read: {exc.strerror or exc}", path=info.path) from exc
        if len(data) == len(into):
            into[:] = np.frombuffer(data, np.uint8)
        else:
            raise GGUFError("the file became shorter while it was read", path=info.path)

    def convert(
        self, piece: Piece, file: OutFile, place: int, delta: Delta | None, start: int, n: int
    ) -> None:
        """Rows [start, start + n) of a tensor: read, changed, stored."""
        lib, source, n_in = self._lib, piece.source, piece.source.ne[0]
        in_row = row_bytes(lib, source.type, n_in)
        out_row = row_bytes(lib, piece.out.type, n_in)
        scratch = self._scratch
        if n * n_in > len(scratch.values):  # one row alone is larger: rare, and not kept
            scratch = _Scratch(n * n_in)
        values = scratch.values[: n * n_in].reshape(n, n_in)
        product = scratch.product[: n * n_in].reshape(n, n_in)
        read, stored = scratch.read[: n * in_row], scratch.stored[: n * out_row]
        self.read(source, start * in_row, read)
        to_f32(lib, source.type, read, values)
        with np.errstate(over="ignore", invalid="ignore"):  # what comes of it is checked
            if delta is not None:
                delta.add_to(values, start, product)
            _check_range(lib, piece, values)
        from_f32(lib, piece.out.type, values, stored)
        file.write(stored.data, place + start * out_row)


@dataclass(frozen=True, slots=True)
class _Convert:
    workers: _Workers
    piece: Piece
    file: OutFile
    place: int
    delta: Delta | None
    start: int
    n: int

    def __call__(self) -> None:
        self.workers.convert(self.piece, self.file, self.place, self.delta, self.start, self.n)


@dataclass(frozen=True, slots=True)
class _Write:
    file: OutFile
    data: Bytes
    place: int

    def __call__(self) -> None:
        self.file.write(self.data.data, self.place)


@dataclass(frozen=True, slots=True)
class _Copy:
    file: OutFile
    fd: int
    start: int
    nbytes: int
    place: int

    def __call__(self) -> None:
        self.file.copy(self.fd, self.start, self.nbytes, self.place)


def _check_range(lib: Library, piece: Piece, values: Floats) -> None:
    """NaN would end the process in some of ggml's quantisers, and a number beyond F16 be lost."""
    bound = largest(piece.out.type)
    flat = values.reshape(-1)
    if float(np.dot(flat, flat)) <= bound * min(bound, 1e18):  # one pass; false for NaN and inf
        return
    low, high = float(values.min()), float(values.max())
    if not (-bound <= low and high <= bound):  # false for NaN too
        raise UnsupportedError(
            f"{piece.out.name}: expected values within ±{bound:g}, which "
            f"{type_name(lib, piece.out.type)} can hold, got {low:g} to {high:g}",
            what=f"values of {piece.out.name}",
            hint="--type bf16 or f32, a smaller scale, or a base without infinities",
        )
