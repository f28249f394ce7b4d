"""Many strings in one piece of memory: no Python object per string on the way from C to C."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from loragraph.kernels.library import ffi, lib, pointer


def skip_strings(data: bytes, at: int, n: int) -> int:
    """The end of `n` strings of a GGUF file, each behind its length (u64), the first at `at`.

    IndexError where they reach behind the data.
    """
    if not 0 <= at <= len(data):
        raise IndexError("strings begin behind the data")
    end = int(lib.loragraph_strings_skip(ffi.from_buffer(data), len(data), at, n))
    if end < 0:
        raise IndexError("a string reaches behind the data")
    return end


@dataclass(frozen=True, slots=True, eq=False)
class PackedStrings:
    """Strings without NUL, one after another, each with a NUL behind it as C wants it."""

    data: NDArray[np.uint8]  # (n_bytes,) u8
    lengths: NDArray[np.int64]  # (n,) i64, bytes without the NUL

    @classmethod
    def of(cls, strings: Sequence[bytes]) -> Self:
        """The same strings packed; none of them may hold a NUL."""
        data = np.frombuffer(b"".join(one + b"\0" for one in strings), np.uint8)
        return cls(data, np.fromiter(map(len, strings), np.int64, len(strings)))

    @classmethod
    def read(cls, getter: int, ctx: int, key_id: int, n: int) -> Self:
        """The `n` strings of a GGUF array, each cut at its first NUL.

        `getter` is the address of gguf_get_arr_str, `ctx` that of an open `gguf_context`; the
        caller has checked that `key_id` is an array of `n` strings.
        """
        get = ffi.cast("loragraph_get_string", getter)
        gguf = ffi.cast("void *", ctx)
        lengths = np.empty(n, np.int64)
        lib.loragraph_strings_measure(get, gguf, key_id, n, pointer(lengths, "int64_t *"))
        data = np.empty(int(lengths.sum()) + n, np.uint8)
        out = pointer(data, "char *")
        lib.loragraph_strings_pack(get, gguf, key_id, n, pointer(lengths, "int64_t *"), out)
        return cls(data, lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> bytes:
        start = int(self.starts[index])
        return self.data[start : start + int(self.lengths[index])].tobytes()

    @property
    def starts(self) -> NDArray[np.int64]:
        """Offset of each string's first byte in `data`, (n,) i64."""
        return np.cumsum(self.lengths + 1) - (self.lengths + 1)

    def to_list(self) -> list[bytes]:
        """The strings as Python objects."""
        return self.data.tobytes().split(b"\0")[:-1]
