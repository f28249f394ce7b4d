"""Packed strings: the same strings as Python's, in one piece of memory."""

from __future__ import annotations

import pytest

from loragraph.ggml.lib import load_library
from loragraph.kernels.strings import PackedStrings

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
