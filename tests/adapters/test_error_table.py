"""Every row of the error table, each triggered by a file made here, and problems of reading."""

from __future__ import annotations

import errno
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loragraph.adapters.adapter import allocate_block
from loragraph.adapters.base import base_info_from_gguf
from loragraph.adapters.gguf import check_adapter, read_adapter
from loragraph.errors import (
    AdapterFormatError,
    AdapterMismatchError,
    CapacityError,
    FormatError,
    GGUFError,
    LoragraphError,
)
from loragraph.ggml.gguf import GGUFFile
from loragraph.ggml.lib import Library
from tests.adapters.error_rows import ROWS, UP, Row
from tests.adapters.raw_gguf import (
    N_EMBD,
    N_FF,
    adapter_metadata,
    base,
    pair,
    tensor,
    write,
)


def one_line_with_a_hint(error: LoragraphError) -> bool:
    """Whether the message is a line that says what to do; llama.cpp's own phrases do so inside."""
    return re.fullmatch(r".*\(hint: [^()]{12,}.*\).*", str(error)) is not None


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_wrong_file_is_refused_with_the_phrase_people_search_for(
    lib: Library, tmp_path: Path, row: Row
) -> None:
    """Each wrong file raises its class of error, names the file, and says expected and got."""
    path = write(tmp_path / "wrong.gguf", adapter_metadata(**row.metadata), row.tensors)
    with pytest.raises(LoragraphError) as caught:
        read_adapter(lib, path, base())
    assert type(caught.value) is row.error
    for phrase in (*row.phrases, str(path)):
        assert phrase in str(caught.value)
    assert one_line_with_a_hint(caught.value)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_check_lists_what_read_raises(lib: Library, tmp_path: Path, row: Row) -> None:
    """The first problem of the list is the error of a load, with a base and without one."""
    path = write(tmp_path / "wrong.gguf", adapter_metadata(**row.metadata), row.tensors)
    problems = check_adapter(lib, path, base())
    assert type(problems[0]) is row.error
    assert all(phrase in str(problems[0]) for phrase in row.phrases)
    without_base = check_adapter(lib, path)
    assert bool(without_base) is not row.fits_any


def test_check_lists_all_problems(lib: Library, tmp_path: Path) -> None:
    """Problems of the metadata, of each pair and of values come in one list."""
    tensors = (
        pair("blk.0.attn_q.weight", n_in=32)
        | pair("blk.9.attn_q.weight")
        | {
            f"{UP}.lora_a": tensor(np.ones((4, N_EMBD))),
            f"{UP}.lora_b": tensor(np.full((N_FF, 4), np.nan)),
        }
        | {"rubbish": tensor(np.ones(4))}
    )
    metadata = adapter_metadata(general__architecture="qwen2", adapter__lora__alpha="x")
    problems = check_adapter(lib, write(tmp_path / "a.gguf", metadata, tensors), base())
    assert [type(problem).__name__ for problem in problems] == [
        "AdapterMismatchError",  # architecture
        "AdapterFormatError",  # alpha
        "AdapterFormatError",  # suffix
        "AdapterMismatchError",  # blk.0.attn_q: n_in
        "AdapterMismatchError",  # blk.9: not in the base
        "AdapterFormatError",  # blk.0.ffn_up: NaN
    ]


def test_check_lists_headers_of_all_pairs_before_values(lib: Library, tmp_path: Path) -> None:
    """A load stops at a pair's header before it reads any value; the list has the same order."""
    nan = {"blk.0.attn_q.weight.lora_b": tensor(np.full((N_EMBD, 4), np.nan))}
    path = write(tmp_path / "a.gguf", None, pair("blk.0.attn_q.weight") | nan | pair(UP))
    problems = check_adapter(lib, path, base())
    assert [type(problem).__name__ for problem in problems] == [
        "AdapterMismatchError",
        "AdapterFormatError",
    ]
    with pytest.raises(AdapterMismatchError):
        read_adapter(lib, path, base())


def test_scale_that_underflows_changes_nothing(lib: Library, tmp_path: Path) -> None:
    """An alpha so small that alpha / rank is 0 in f32 is refused, by a load and by a check."""
    metadata = adapter_metadata(adapter__lora__alpha=np.float32(1e-45))
    path = write(tmp_path / "a.gguf", metadata)
    with pytest.raises(AdapterFormatError, match="would change nothing"):
        read_adapter(lib, path, base())
    assert "would change nothing" in str(check_adapter(lib, path, base())[0])


def test_check_finds_nothing_in_a_right_file(lib: Library, tmp_path: Path) -> None:
    """A file that loads has no problems."""
    assert check_adapter(lib, write(tmp_path / "a.gguf"), base()) == []


def test_first_error_follows_the_order_of_the_table(lib: Library, tmp_path: Path) -> None:
    """Of several problems the one that llama.cpp would report comes first."""
    metadata = adapter_metadata(general__architecture="qwen2", adapter__type="x")
    path = write(tmp_path / "a.gguf", metadata, {})
    with pytest.raises(AdapterMismatchError, match="arch mismatch"):
        read_adapter(lib, path, base())


@pytest.mark.parametrize("n_cut", [1, 100, 3000])
def test_truncated_file(lib: Library, tmp_path: Path, n_cut: int) -> None:
    """A file whose end is missing is refused with the bytes expected and got."""
    path = write(tmp_path / "a.gguf")
    path.write_bytes(path.read_bytes()[:-n_cut])
    with pytest.raises(
        GGUFError, match="is not within the file bounds, file is corrupted"
    ) as raised:
        read_adapter(lib, path, base())
    assert one_line_with_a_hint(raised.value)


def test_missing_file(lib: Library, tmp_path: Path) -> None:
    """A path that leads nowhere is a GGUFError that says so."""
    with pytest.raises(GGUFError, match="failed to open: No such file") as raised:
        read_adapter(lib, tmp_path / "nowhere.gguf", base())
    assert one_line_with_a_hint(raised.value)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"\0" * 100, b"GGML" + bytes(60)])
def test_no_gguf(lib: Library, tmp_path: Path, content: bytes) -> None:
    """Files that are no GGUF are refused."""
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    with pytest.raises(GGUFError) as raised:
        read_adapter(lib, path, base())
    assert one_line_with_a_hint(raised.value)


def test_file_shrinks_between_header_and_data(
    lib: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file cut by someone else while it loads gives the bounds error, not garbage."""
    path = write(tmp_path / "a.gguf")

    def cut(nbytes: int) -> Any:
        path.write_bytes(path.read_bytes()[:-200])
        return allocate_block(nbytes)

    monkeypatch.setattr("loragraph.adapters.gguf.allocate_block", cut)
    with pytest.raises(GGUFError, match="is not within the file bounds"):
        read_adapter(lib, path, base())


def test_no_memory_for_the_tensors(
    lib: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed allocation is a CapacityError that says how much was wanted."""

    def fail(_nbytes: int) -> Any:
        raise MemoryError

    monkeypatch.setattr("loragraph.adapters.gguf.allocate_block", fail)
    with pytest.raises(
        CapacityError, match="failed to allocate buffer for lora adapter: no memory for 7168"
    ):
        read_adapter(lib, write(tmp_path / "a.gguf"), base())


def test_disk_that_fails_while_data_is_read(
    lib: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read error names the file and the system's reason, in a load and in a check."""

    def fail(*_args: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    path = write(tmp_path / "a.gguf")
    monkeypatch.setattr("loragraph.adapters.gguf._read", fail)
    with pytest.raises(GGUFError, match=r"a\.gguf: failed to read: Input/output error"):
        read_adapter(lib, path, base())
    assert "Input/output error" in str(check_adapter(lib, path, base())[0])


def test_check_of_a_file_that_shrinks(
    lib: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check lists the bounds error of a file that is cut after its header was read."""
    path = write(tmp_path / "a.gguf")
    empty = np.empty

    def cut(nbytes: int, dtype: Any) -> Any:
        path.write_bytes(path.read_bytes()[:-200])
        return empty(nbytes, dtype)

    monkeypatch.setattr("loragraph.adapters.gguf.np.empty", cut)
    problems = check_adapter(lib, path, base())
    assert all("is not within the file bounds" in str(problem) for problem in problems)
    assert problems


def test_adapter_is_no_base(lib: Library, tmp_path: Path) -> None:
    """An adapter given as a base is refused."""
    with (
        GGUFFile(lib, write(tmp_path / "a.gguf")) as file,
        pytest.raises(FormatError, match="expected a base model, got a GGUF file of type 'adapter"),
    ):
        base_info_from_gguf(file)


def test_tensor_in_two_parts(lib: Library, tmp_path: Path) -> None:
    """A split base whose parts repeat a tensor is refused."""
    path = write(tmp_path / "a.gguf", {"general.architecture": "llama"})
    with (
        GGUFFile(lib, path) as first,
        GGUFFile(lib, path) as second,
        pytest.raises(FormatError, match="stands in two files"),
    ):
        base_info_from_gguf(first, second)


def test_keys_alike_up_to_a_nul(lib: Library, tmp_path: Path) -> None:
    """Keys that a C string cannot tell apart are refused."""
    path = write(tmp_path / "a.gguf", adapter_metadata() | {"adapter.type\0": "x"})
    with pytest.raises(GGUFError, match="distinct keys"):
        read_adapter(lib, path, base())


def test_file_that_is_no_gguf_says_failed_to_load_lora_adapter(
    lib: Library, tmp_path: Path
) -> None:
    """A damaged container is told with llama.cpp's phrase, and with the reason behind it."""
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF" + bytes([9]) * 40)
    with pytest.raises(GGUFError, match="failed to load lora adapter from file: ") as raised:
        read_adapter(lib, path, base())
    assert raised.value.path == str(path)
