"""The file of saved cells. Knows neither trees nor tensors: nodes, tokens and rows of bytes.

    magic          8 bytes, "LGCELLS1"
    header_bytes   u64
    header         JSON: model, kv_type, v_transposed, bytes_per_cell, long_context, keys, n_nodes,
                   n_tokens
    nodes          i64 (n_nodes, 3): parent (-1: the root), key, tokens; parents stand before
    tokens         i32 (n_tokens,), node after node
    rows           u8 (n_tokens, bytes_per_cell): K and V of each token, layer after layer
    digest         32 bytes, SHA-256 of all before

All numbers are little-endian. A key is {"salt": text, "mix": [[digest, scale], ...]}. Every size is
checked against the file's before anything is allocated, and the digest before anything is used.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from loragraph.errors import ConfigError, FormatError
from loragraph.graph.kv_cache import CellFormat

MAGIC = b"LGCELLS1"
_PIECE_BYTES = 4 << 20
_MAX_HEADER_BYTES = 64 << 20
_DIGEST_BYTES = 32
_PREFIX_BYTES = len(MAGIC) + 8
_NODE = np.dtype("<i8")
_TOKEN = np.dtype("<i4")

MixKey = tuple[tuple[str, float], ...]
Key = tuple[str, MixKey]
"""(salt, mix key): the edge key of a prefix tree's node."""


@dataclass(frozen=True, slots=True)
class Session:
    """All of a file but its rows. A node's tokens are `tokens[starts[i] : starts[i + 1]]`."""

    model: str  # fingerprint
    cells: CellFormat
    keys: tuple[Key, ...]
    nodes: NDArray[np.int64]  # (n_nodes, 3): parent or -1, index of the key, number of tokens
    tokens: NDArray[np.int32]  # (n_tokens,)

    @property
    def starts(self) -> NDArray[np.int64]:
        """Where each node's tokens begin, (n_nodes + 1,)."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.nodes[:, 2])])


def write_session(
    path: str | os.PathLike[str], session: Session, rows: Iterable[NDArray[np.uint8]]
) -> None:
    """Writes a file, all or nothing: the old one is there until the new one is whole.

    `rows` gives the tokens' rows in order, in pieces (n, bytes_per_cell). ConfigError where the
    file cannot be written.
    """
    header = json.dumps(
        {
            "model": session.model,
            **asdict(session.cells),
            "keys": [{"salt": salt, "mix": mix} for salt, mix in session.keys],
            "n_nodes": len(session.nodes),
            "n_tokens": len(session.tokens),
        }
    ).encode()
    sha = hashlib.sha256()
    target = Path(path)
    try:
        with NamedTemporaryFile(dir=target.parent, prefix=target.name, delete=False) as file:
            try:
                parts: list[Any] = [
                    MAGIC + struct.pack("<Q", len(header)) + header,
                    session.nodes.astype(_NODE).tobytes(),
                    session.tokens.astype(_TOKEN).tobytes(),
                ]
                for part in parts:
                    sha.update(part)
                    file.write(part)
                for piece in rows:
                    data = np.ascontiguousarray(piece).data
                    sha.update(data)
                    file.write(data)
                file.write(sha.digest())
                file.flush()
                os.replace(file.name, target)
            except BaseException:
                with suppress(OSError):
                    os.unlink(file.name)
                raise
    except OSError as exc:
        raise ConfigError(f"expected a path that can be written, got {exc}", field="path") from exc


class SessionReader:
    """An open file whose digest was checked."""

    def __init__(self, file: IO[bytes], path: str | os.PathLike[str]) -> None:
        self._file = file
        self._path = path
        self._n_bytes = os.fstat(file.fileno()).st_size
        header = self._header()
        self.session, self._rows_at = self._session(header)
        self._check_digest()

    def rows(self, first: int, n: int) -> NDArray[np.uint8]:
        """Rows of the tokens [first, first + n), (n, bytes_per_cell)."""
        width = self.session.cells.bytes_per_cell
        self._file.seek(self._rows_at + first * width)
        return np.frombuffer(self._read(n * width, "rows"), np.uint8).reshape(n, width)

    def _header(self) -> dict[str, Any]:
        prefix = self._read(_PREFIX_BYTES, "magic")
        if not prefix.startswith(MAGIC):
            raise self._error(f"expected a file of saved cells ({MAGIC!r}), got {prefix[:8]!r}")
        (n_bytes,) = struct.unpack("<Q", prefix[len(MAGIC) :])
        if n_bytes > min(_MAX_HEADER_BYTES, self._n_bytes):
            raise self._error(f"a header of {n_bytes} bytes does not fit", "header")
        try:
            header = json.loads(self._read(n_bytes, "header"))
        except (ValueError, RecursionError) as exc:
            raise self._error(f"no JSON: {exc}", "header") from exc
        if not isinstance(header, dict):
            raise self._error("expected an object", "header")
        return header

    def _session(self, header: dict[str, Any]) -> tuple[Session, int]:
        n_nodes, n_tokens = self._count(header, "n_nodes"), self._count(header, "n_tokens")
        cells = CellFormat(
            self._count(header, "kv_type"),
            header.get("v_transposed") is True,
            self._count(header, "bytes_per_cell"),
            header.get("long_context") is True,
        )
        at = self._file.tell()
        rows_at = at + 24 * n_nodes + 4 * n_tokens
        expected = rows_at + n_tokens * cells.bytes_per_cell + _DIGEST_BYTES
        if expected != self._n_bytes:
            raise self._error(f"expected {expected} bytes, got {self._n_bytes}: cut or damaged")
        nodes = np.frombuffer(self._read(24 * n_nodes, "nodes"), _NODE).reshape(-1, 3)
        tokens = np.frombuffer(self._read(4 * n_tokens, "tokens"), _TOKEN)
        keys = self._keys(header)
        parents, key_ids, counts = nodes.T
        whole = (
            bool(np.all((parents >= -1) & (parents < np.arange(n_nodes))))
            and bool(np.all((key_ids >= 0) & (key_ids < len(keys))))
            and bool(np.all((counts > 0) & (counts <= n_tokens)))
            and sum(counts.tolist()) == n_tokens
        )
        if not whole:
            raise self._error("parents, keys or lengths out of range", "nodes")
        model = header.get("model")
        if not isinstance(model, str):
            raise self._error("expected a text", "model")
        session = Session(model, cells, keys, nodes.astype(np.int64), tokens.astype(np.int32))
        return session, rows_at

    def _keys(self, header: dict[str, Any]) -> tuple[Key, ...]:
        try:
            return tuple(_key(entry) for entry in header["keys"])
        except (KeyError, TypeError, ValueError, OverflowError) as exc:
            raise self._error(f"expected salts and mixes, got {exc!r:.80}", "keys") from exc

    def _check_digest(self) -> None:
        self._file.seek(0)
        sha = hashlib.sha256()
        left = self._n_bytes - _DIGEST_BYTES
        while left:
            piece = self._read(min(left, _PIECE_BYTES), "rows")
            sha.update(piece)
            left -= len(piece)
        if self._read(_DIGEST_BYTES, "digest") != sha.digest():
            raise self._error("its bytes are not those that were saved: damaged", "digest")

    def _count(self, header: dict[str, Any], name: str) -> int:
        value = header.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 40:
            raise self._error(f"expected a number, got {value!r:.40}", name)
        return value

    def _read(self, n_bytes: int, where: str) -> bytes:
        data = self._file.read(n_bytes)
        if len(data) != n_bytes:
            raise self._error(f"expected {n_bytes} bytes, got {len(data)}: cut", where)
        return data

    def _error(self, message: str, where: str = "") -> FormatError:
        return FormatError(message, path=self._path, where=where)


@contextmanager
def open_session(path: str | os.PathLike[str]) -> Iterator[SessionReader]:
    """Opens and checks a file; FormatError where it is none, cut or damaged."""
    try:
        with open(path, "rb") as file:
            yield SessionReader(file, path)
    except OSError as exc:
        raise FormatError(f"could not be read: {exc}", path=path) from exc


def _key(entry: dict[str, Any]) -> Key:
    salt = entry["salt"]
    if not isinstance(salt, str):
        raise TypeError(salt)
    mix: list[tuple[str, float]] = []
    for digest, scale in entry["mix"]:
        number = float(scale)
        canonical = math.isfinite(number) and number != 0 and float(np.float32(number)) == number
        if not isinstance(digest, str) or not canonical or (mix and mix[-1][0] >= digest):
            raise ValueError(digest)
        mix.append((digest, number))
    return salt, tuple(mix)
