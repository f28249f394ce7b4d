"""Rows of any ggml type to f32 and back; wrong shapes and types raise before the C call."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as GGMLType
from gguf.quants import dequantize

from loragraph.errors import UnsupportedError
from loragraph.ggml.lib import load_library
from loragraph.ggml.quants import (
    block_values,
    can_read,
    can_write,
    from_f32,
    row_bytes,
    to_f32,
    type_name,
)

LIB = load_library()
WRITABLE = [type_ for type_ in GGMLType if can_write(LIB, type_)]


@pytest.mark.parametrize("type_", WRITABLE, ids=lambda type_: type_.name)
def test_read_is_what_the_gguf_package_reads(type_: GGMLType) -> None:
    """What ggml writes of a type, both ggml and the gguf package read alike."""
    block, block_bytes = GGML_QUANT_SIZES[type_]
    n = 512 if type_.name.startswith("IQ") else 1024
    assert (block_values(LIB, type_), row_bytes(LIB, type_, n)) == (block, n // block * block_bytes)
    values = np.random.default_rng(0).standard_normal((2, n), dtype=np.float32)
    data = np.empty(2 * row_bytes(LIB, type_, n), np.uint8)
    from_f32(LIB, type_, values, data)
    out = np.full((2, n), np.nan, np.float32)
    to_f32(LIB, type_, data, out)
    assert np.mean((out - values) ** 2) < 0.75  # ternary types keep little of it
    try:
        raw = data.view(np.float32) if type_ == GGMLType.F32 else data
        expected = dequantize(raw.reshape(2, -1), type_)
    except NotImplementedError:
        return
    np.testing.assert_array_equal(out, np.asarray(expected, np.float32).reshape(2, n))


def test_most_types_can_be_written() -> None:
    """The list of types that ggml quantises to is not empty by mistake."""
    names = {type_.name for type_ in WRITABLE}
    assert {"F32", "F16", "BF16", "Q4_0", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4"} <= names
    assert not names & {"Q8_K", "Q8_1", "I32", "F64"}


@pytest.mark.parametrize("type_", [-1, 4, 9, 15, 24, 43, 10**9])
def test_types_without_values_are_refused(type_: int) -> None:
    """Numbers that are no type, and types that hold no rows of weights."""
    rows, data = np.zeros((1, 256), np.float32), np.zeros(4096, np.uint8)
    assert not can_write(LIB, type_)
    assert not can_read(LIB, type_)
    assert type_name(LIB, type_)
    with pytest.raises(UnsupportedError):
        from_f32(LIB, type_, rows, data)
    with pytest.raises(UnsupportedError):
        to_f32(LIB, type_, data, rows)


def test_rows_and_bytes_must_fit() -> None:
    """A row that is no multiple of the block, too few bytes, too many."""
    with pytest.raises(UnsupportedError, match="rows of 100 values"):
        row_bytes(LIB, GGMLType.Q8_0, 100)
    rows = np.zeros((2, 64), np.float32)
    for n in (0, 67, 135, 137):
        with pytest.raises(UnsupportedError):
            to_f32(LIB, GGMLType.Q8_0, np.zeros(n, np.uint8), rows)
        with pytest.raises(UnsupportedError):
            from_f32(LIB, GGMLType.Q8_0, rows, np.zeros(n, np.uint8))
