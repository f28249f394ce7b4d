"""Finding the native library, checking that it is the one that was declared, and its log."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from loragraph.errors import BackendError, GGUFError
from loragraph.ggml import lib as lib_module
from loragraph.ggml.gguf import GGUFFile
from loragraph.ggml.lib import SUPPORTED_GGML, Library, load_library
from tests.tiny import TinyLlama


class FakeC:
    """The real functions, with some replaced."""

    def __init__(self, real: Any, **replaced: Any) -> None:
        self._real = real
        self._replaced = replaced

    def __getattr__(self, name: str) -> Any:
        if name in self._replaced:
            if self._replaced[name] is None:
                raise AttributeError(name)
            return self._replaced[name]
        return getattr(self._real, name)


def fake(**replaced: Any) -> Library:
    """A Library object around replaced C functions, with nothing checked yet."""
    real = load_library()
    library = object.__new__(Library)
    library.folder, library.ffi = real.folder, real.ffi
    library.c = FakeC(real.c, **replaced)
    library.version = real.version
    return library


@pytest.mark.parametrize("version", ["0.24.9", "0.27.0", "1.0.0", "0.2", "", "nonsense"])
def test_another_version_is_refused(version: str) -> None:
    """A version outside the range names both, and where it was found."""
    text = load_library().ffi.new("char[]", version.encode())
    library = fake(ggml_version=lambda: text)
    with pytest.raises(BackendError, match=f"expected ggml {SUPPORTED_GGML[0]}") as caught:
        library._check_version()
    assert version in str(caught.value)
    assert str(library.folder) in str(caught.value)


@pytest.mark.parametrize("version", SUPPORTED_GGML)
def test_the_supported_versions_are_accepted(version: str) -> None:
    """Any patch level of a supported minor version will do."""
    text = load_library().ffi.new("char[]", f"{version}.17".encode())
    assert fake(ggml_version=lambda: text)._check_version() == f"{version}.17"


def test_a_library_without_a_version_is_refused() -> None:
    """A ggml from before ggml_version() is told apart."""
    with pytest.raises(BackendError, match="does not tell its version"):
        fake(ggml_version=None)._check_version()


def test_another_layout_is_refused() -> None:
    """A tensor that reads back otherwise than it was made is found."""
    real = load_library()

    def other_shape(ctx: Any, type_: int, n_dims: int, ne: list[int]) -> Any:
        return real.c.ggml_new_tensor(ctx, type_, n_dims, ne[::-1])

    fake()._check_layout()
    with pytest.raises(BackendError, match="another layout"):
        fake(ggml_new_tensor=other_shape)._check_layout()


def test_the_library_of_this_machine_is_supported() -> None:
    """It is opened once, and its version is in the range."""
    assert load_library() is load_library()
    assert ".".join(load_library().version.split(".")[:2]) in SUPPORTED_GGML


def test_a_folder_without_libraries(tmp_path: Path) -> None:
    """An override that holds no library says which file is missing where."""
    with pytest.raises(BackendError, match=r"no libggml.* in .*/empty"):
        Library(tmp_path / "empty")


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    """An override whose library cannot be opened says so."""
    for name in ("libggml.so", "libllama.so", "libggml.dylib", "libllama.dylib"):
        (tmp_path / name).write_bytes(b"not a library")
    with pytest.raises(BackendError, match="cannot be opened"):
        Library(tmp_path)


def test_the_package_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without llama-cpp-python the error names it and how to get it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BackendError, match="pip install llama-cpp-python"):
        lib_module._package_folder()


def test_log_lines_go_to_the_logger(caplog: pytest.LogCaptureFixture) -> None:
    """Pieces are joined to lines, levels kept, dots of progress dropped."""
    real = load_library()
    bridge = lib_module._LogBridge(real.ffi)

    def say(level: int, text: str) -> None:
        bridge(level, real.ffi.new("char[]", text.encode("utf-8", "surrogateescape")), None)

    with caplog.at_level(logging.DEBUG, "loragraph.ggml"):
        say(3, "half ")
        say(5, "a line\nand a second")
        say(5, "\n")
        say(2, "....")
        say(5, "\n")
        say(4, "bad \udcff bytes\n")
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (logging.WARNING, "half a line"),
        (logging.WARNING, "and a second"),
        (logging.ERROR, "bad \N{REPLACEMENT CHARACTER} bytes"),
    ]


def test_log_lines_of_a_block_are_collected(tmp_path: Path) -> None:
    """What the library says of a failure stands in the error's message."""
    whole = TinyLlama().to_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[:200])
    with pytest.raises(GGUFError, match=r"not a readable GGUF file: .*(failed|key|read)"):
        GGUFFile(load_library(), path)
    with load_library().log_lines() as lines:
        assert lines == []
