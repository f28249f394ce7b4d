"""safetensors files: values of every type, and hostile headers in bounded time and memory."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loragraph.adapters.convert.safetensors import (
    _MAX_VALUES,
    MAX_TENSORS,
    read_header,
    read_values,
)
from loragraph.errors import AdapterFormatError, LoragraphError, UnsupportedError
from tests.adapters.convert.folders import bf16, normal, raw_safetensors, safetensors_bytes

ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def write(path: Path, data: bytes) -> Path:
    """A file with these bytes."""
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("dtype", ["<f8", "<f4", "<f2"])
def test_floats_are_read_as_they_are(dtype: str, tmp_path: Path) -> None:
    """F64, F32 and F16 come back as f32 in their own shape."""
    values = normal(1, 3, 5).astype(dtype)
    path = write(tmp_path / "a", safetensors_bytes({"x": normal(0, 2), "t": values}))
    got = read_values(read_header(path)["t"])
    np.testing.assert_array_equal(got, values.astype(np.float32))


def test_bf16_is_read_exactly(tmp_path: Path) -> None:
    """BF16 values are the upper half of f32 ones."""
    values = normal(1, 3, 5)
    path = write(tmp_path / "a", safetensors_bytes({"t": bf16(values)}))
    expected = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    np.testing.assert_array_equal(read_values(read_header(path)["t"]), expected)


def test_integers_are_refused(tmp_path: Path) -> None:
    """A quantised adapter is not read as if it were numbers."""
    path = write(tmp_path / "a", safetensors_bytes({"t": ("I8", [4], b"abcd")}))
    with pytest.raises(UnsupportedError, match="expected type F64, F32, F16, BF16, got I8"):
        read_values(read_header(path)["t"])


def header(**entries: object) -> bytes:
    """A file with these entries and 8 bytes of data."""
    return raw_safetensors(json.dumps(entries).encode(), bytes(8))


BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "expected a header"),
    "short": (b"\x01\x00", "expected a header"),
    "length beyond the file": (struct.pack("<Q", 2**40) + b"{}", "expected a header"),
    "length of 100 GB": (struct.pack("<Q", 100 << 30), "expected a header"),
    "no JSON": (raw_safetensors(b"{{{"), "no JSON"),
    "deep JSON": (raw_safetensors(b"[" * 200_000), "no JSON"),
    "a list": (raw_safetensors(b"[]"), "expected a JSON object"),
    "repeated name": (raw_safetensors(b'{"a": 1, "a": 2}'), "stands twice"),
    "no entry": (header(t=7), "expected dtype"),
    "unknown dtype": (header(t={**ENTRY, "dtype": "F99"}), "unknown dtype"),
    "negative size": (header(t={**ENTRY, "shape": [-2]}), "expected a shape"),
    "fraction": (header(t={**ENTRY, "shape": [2.0]}), "expected a shape"),
    "many dimensions": (header(t={**ENTRY, "shape": [1] * 99}), "expected a shape"),
    "absurd shape": (header(t={**ENTRY, "shape": [2**40, 2**40]}), "takes"),
    "wrong size": (header(t={**ENTRY, "shape": [3]}), "takes 12 bytes, got 8"),
    "outside": (header(t={**ENTRY, "data_offsets": [8, 16]}), "not within the file"),
    "backwards": (header(t={**ENTRY, "data_offsets": [8, 0]}), "not within the file"),
    "one offset": (header(t={**ENTRY, "data_offsets": [0]}), "two offsets"),
    "overlap": (header(t=ENTRY, u=ENTRY), "overlap"),
    "control character": (header(**{"a\x00b": ENTRY}), "printable"),
    "long name": (header(**{"a" * 5000: ENTRY}), "printable"),
    "LFS pointer": (b"version https://git-lfs.github.com/spec/v1\n", "Git-LFS pointer"),
    "zip": (b"PK\x03\x04" + bytes(40), "zip archive"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_header_is_one_clear_error(name: str, tmp_path: Path) -> None:
    """Each way in which a header can lie is named, and nothing is allocated for it."""
    data, message = BAD[name]
    path = write(tmp_path / "a", data)
    tracemalloc.start()
    try:
        with pytest.raises(AdapterFormatError, match=message):
            read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("item", [b"[]", b"{}", b"0", b"1.5", b'""'])
def test_a_header_full_of_tiny_values_takes_no_memory(item: bytes, tmp_path: Path) -> None:
    """JSON makes of two bytes an object of fifty: refused before it is read as JSON."""
    header = b'{"a":[' + (item + b",") * 5_000_000 + b"0]}"
    path = write(tmp_path / "a", raw_safetensors(header))
    tracemalloc.start()
    try:
        with pytest.raises(AdapterFormatError, match="values, got"):
            read_header(path)
        assert tracemalloc.get_traced_memory()[1] < len(header) + (4 << 20)
    finally:
        tracemalloc.stop()


def test_as_many_tensors_as_are_allowed(tmp_path: Path) -> None:
    """The bound of values is beyond what the bound of tensors allows."""
    assert _MAX_VALUES >= 8 * MAX_TENSORS
    entries = {
        f"m.{i}.lora_A.weight": {**ENTRY, "shape": [1, 0], "data_offsets": [0, 0]}
        for i in range(20_000)
    }
    path = write(tmp_path / "a", raw_safetensors(json.dumps(entries).encode(), bytes(8)))
    assert len(read_header(path)) == 20_000


def test_a_header_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    """A file that is all header is refused by its length."""
    path = tmp_path / "a"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 1 << 30))
        file.truncate((1 << 30) + 8)  # sparse
    with pytest.raises(AdapterFormatError, match="expected a header"):
        read_header(path)


@settings(max_examples=300, deadline=None)
@given(
    position=st.integers(0, 200),
    byte=st.integers(0, 255),
    cut=st.one_of(st.none(), st.integers(0, 200)),
)
def test_damage_gives_values_or_an_error(
    position: int, byte: int, cut: int | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Flipped and cut bytes never give anything but a LoragraphError, or other values."""
    data = bytearray(safetensors_bytes({"a.lora_A.weight": normal(0, 2, 3)}))
    data[position % len(data)] = byte
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(bytes(data[:cut]))
    try:
        for info in read_header(path).values():
            assert read_values(info).nbytes <= 4 * len(data)
    except LoragraphError:
        pass
