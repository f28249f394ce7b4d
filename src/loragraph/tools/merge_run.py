"""Carries a merge out: pieces of rows through f32, in threads, into files that appear complete."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from loragraph.errors import GGUFError, UnsupportedError
from loragraph.ggml.gguf import TensorInfo
from loragraph.ggml.lib import Library
from loragraph.ggml.quants import Bytes, Floats, largest, type_name
from loragraph.ggml.rewrite import row_rewriter
from loragraph.kernels.rewrite import RowRewriter
from loragraph.tools.deltas import Term, delta_of
from loragraph.tools.gguf_header import OutTensor
from loragraph.tools.output import EarlySync, OutFile, out_files
from loragraph.tools.split import Part

Progress = Callable[[int, int], None]

_PIECE_VALUES = 1 << 20  # of one thread: Python's part of a job is small beside them
_SCRATCH_VALUES = 1 << 22  # of all threads together
_COPY_BYTES = 1 << 23  # a long copy would keep the jobs behind it from being counted


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
        early = stack.enter_context(EarlySync())
        pool = stack.enter_context(ThreadPoolExecutor(n_threads))
        stack.callback(pool.shutdown, wait=True, cancel_futures=True)
        jobs = (
            job
            for piece, (file, place) in zip(pieces, places, strict=True)
            for job in workers.jobs(piece, file, place)
        )
        done = 0
        for job in _ended(pool, jobs, 2 * n_threads):
            done += job.nbytes
            early.wrote(job.file, job.nbytes)
            if progress is not None:
                progress(done, total)


class _Job(Protocol):
    """A part of the work, for any thread."""

    @property
    def file(self) -> OutFile:
        """The file that it writes to."""

    @property
    def nbytes(self) -> int:
        """Bytes of the source that it takes."""

    def __call__(self) -> None:
        """Does it."""


def _ended(pool: ThreadPoolExecutor, jobs: Iterable[_Job], n_ahead: int) -> Iterator[_Job]:
    """The jobs in their order, each when it is done; `n_ahead` are made before they are needed."""
    waiting: deque[tuple[Future[None], _Job]] = deque()

    def first() -> _Job:
        future, job = waiting.popleft()
        future.result()
        return job

    for job in jobs:
        waiting.append((pool.submit(job), job))
        if len(waiting) > n_ahead:
            yield first()
    while waiting:
        yield first()


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

    def __init__(self, n_bytes: int) -> None:
        self._n_bytes = n_bytes
        self._read = np.empty(n_bytes, np.uint8)
        self._stored = np.empty(n_bytes, np.uint8)
        self._values = np.empty(0, np.float32)

    def buffers(
        self, n_read: int, n_stored: int, rewriter: RowRewriter
    ) -> tuple[Bytes, Bytes, Floats]:
        """Bytes to read into, bytes to store, and what the rewriter needs.

        Those of one row that is larger than a piece are rare, and not kept.
        """
        if max(n_read, n_stored) > self._n_bytes:
            return np.empty(n_read, np.uint8), np.empty(n_stored, np.uint8), rewriter.scratch()
        if self._values.size < rewriter.n_scratch:
            self._values = rewriter.scratch()
        return self._read[:n_read], self._stored[:n_stored], self._values


class _Workers:
    """Makes the jobs of a piece."""

    def __init__(self, lib: Library, sources: dict[Path, int], n_threads: int) -> None:
        self._lib = lib
        self._sources = sources
        self._n_values = min(_PIECE_VALUES, max(1 << 14, _SCRATCH_VALUES // n_threads))
        self._scratch = _Scratch(4 * self._n_values)

    def jobs(self, piece: Piece, file: OutFile, place: int) -> Iterator[_Job]:
        """All that is to be done for a tensor."""
        if piece.made is not None:
            yield _Write(file, piece.made, place, piece.source.nbytes)
            return
        if piece.is_copy:
            yield from self._copies(piece.source, file, place)
            return
        n_in, n_out, n_expert, n_outer = piece.source.ne
        step = max(1, self._n_values // n_in)
        for expert, rewriter in enumerate(self._rewriters(piece, n_expert * n_outer)):
            for row in range(0, n_out, step):
                n, before = min(step, n_out - row), expert * n_out
                yield _Rewrite(self, piece, file, place, rewriter, before, row, n)

    def _rewriters(self, piece: Piece, n_expert: int) -> Iterator[RowRewriter]:
        """One for each expert's matrix."""
        types, n_in = (piece.source.type, piece.out.type), piece.source.ne[0]
        if not piece.terms:
            yield from [row_rewriter(self._lib, *types, n_in)] * n_expert
            return
        delta = delta_of(piece.terms, self._factor(piece))
        for expert in range(n_expert):
            yield row_rewriter(self._lib, *types, n_in, delta.change(expert))

    def _copies(self, info: TensorInfo, file: OutFile, place: int) -> Iterator[_Job]:
        fd = self._sources[info.path]
        for start in range(0, info.nbytes, _COPY_BYTES):
            n = min(_COPY_BYTES, info.nbytes - start)
            yield _Copy(file, fd, info.offset + start, n, place + start)

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
            n = os.preadv(self._sources[info.path], [into.data], info.offset + start)
        except OSError as exc:
            raise GGUFError(f"failed to read: {exc.strerror or exc}", path=info.path) from exc
        if n != len(into):
            raise GGUFError("the file became shorter while it was read", path=info.path)

    def rewrite(self, job: _Rewrite) -> None:
        """Rows of a tensor: read, changed, stored."""
        form = job.rewriter.format
        read, stored, scratch = self._scratch.buffers(
            job.n * form.source_row, job.n * form.stored_row, job.rewriter
        )
        start = job.before + job.row
        self.read(job.piece.source, start * form.source_row, read)
        wrong = job.rewriter.run(job.row, read, stored, scratch)
        if wrong is not None:
            raise _out_of_range(self._lib, job.piece, wrong)
        job.file.write(stored.data, job.place + start * form.stored_row)


@dataclass(frozen=True, slots=True)
class _Rewrite:
    workers: _Workers
    piece: Piece
    file: OutFile
    place: int
    rewriter: RowRewriter
    before: int  # rows of the experts before this one
    row: int
    n: int

    @property
    def nbytes(self) -> int:
        """Bytes of the source that it takes."""
        return self.n * self.rewriter.format.source_row

    def __call__(self) -> None:
        self.workers.rewrite(self)


@dataclass(frozen=True, slots=True)
class _Write:
    file: OutFile
    data: Bytes
    place: int
    nbytes: int

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


def _out_of_range(lib: Library, piece: Piece, values: Floats) -> UnsupportedError:
    """NaN would end the process in some of ggml's quantisers, and a number beyond F16 be lost."""
    return UnsupportedError(
        f"{piece.out.name}: expected values within ±{largest(piece.out.type):g}, which "
        f"{type_name(lib, piece.out.type)} can hold, got {values.min():g} to {values.max():g}",
        what=f"values of {piece.out.name}",
        hint="--type bf16 or f32, a smaller scale, or a base without infinities",
    )
