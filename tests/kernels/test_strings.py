"""Packed strings: the same strings as Python's, in one piece of memory."""

from __future__ import annotations

import struct

import pytest

from loragraph.ggml.lib import load_library
from loragraph.kernels.strings import PackedStrings, skip_strings

STRINGS = [b"a", b"", "Ġthe".encode(), b"a b", b"x" * 5000]


@pytest.mark.parametrize("strings", [STRINGS, [], [b""]])
def test_packing_loses_nothing(strings: list[bytes]) -> None:
    """A list of strings comes back whole, and each of them by its index."""
    packed = PackedStrings.of(strings)
    assert packed.to_list() == strings
    assert [packed[i] for i in range(len(packed))] == strings
    assert packed.lengths.tolist() == [len(one) for one in strings]


@pytest.mark.parametrize("strings", [STRINGS, []])
def test_strings_of_a_gguf_array_are_read(strings: list[bytes]) -> None:
    """What the C library holds under a key is what is read from it."""
    lib = load_library()
    ctx = lib.c.gguf_init_empty()
    try:
        held = [lib.ffi.new("char[]", one) for one in strings]
        lib.c.gguf_set_arr_str(ctx, b"key", lib.ffi.new("char *[]", held), len(strings))
        getter = lib.ffi.addressof(lib.c, "gguf_get_arr_str")
        packed = PackedStrings.read(lib.address(getter), lib.address(ctx), 0, len(strings))
    finally:
        lib.c.gguf_free(ctx)
    assert packed.to_list() == strings


def stored(strings: list[bytes]) -> bytes:
    """The strings as a GGUF file has them."""
    return b"".join(struct.pack("<Q", len(one)) + one for one in strings)


@pytest.mark.parametrize("strings", [STRINGS, [], [b""], [b"a\0b"]])
def test_stored_strings_are_skipped(strings: list[bytes]) -> None:
    """The end of a file's strings is found, whatever stands in front and behind."""
    data = b"head" + stored(strings)
    assert skip_strings(data + b"tail", 4, len(strings)) == len(data)


@pytest.mark.parametrize(
    ("data", "at", "n"),
    [
        (stored(STRINGS)[:-1], 0, len(STRINGS)),
        (stored(STRINGS), 0, len(STRINGS) + 1),
        (struct.pack("<Q", 2**64 - 1) + b"x", 0, 1),
        (struct.pack("<Q", 2**63 - 8), 0, 1),
        (b"", 1, 0),
        (b"", -1, 0),
        (stored([b""]), 0, 2**64 - 1),
    ],
)
def test_strings_beyond_the_data_are_found(data: bytes, at: int, n: int) -> None:
    """Cut files, lengths and numbers of strings without end."""
    with pytest.raises(IndexError):
        skip_strings(data, at, n)
