"""The native library is opened once, and only if it is the one that the declarations describe."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loragraph.errors import BackendError
from loragraph.ggml import lib as lib_module
from loragraph.ggml.lib import Library, load_library
from tests.tiny import TinyLlama

SRC = Path(__file__).resolve().parents[2] / "src"


class OtherBuild:
    """The opened library with some functions of another build in place of its own."""

    def __init__(self, c: Any, **functions: Callable[..., Any]) -> None:
        self._c = c
        self._functions = functions

    def __getattr__(self, name: str) -> Any:
        function = self._functions.get(name)
        return function if function is not None else getattr(self._c, name)


def opened(**functions: Callable[..., Any]) -> Library:
    """The process's library before its checks, with some functions replaced."""
    real = load_library()
    library = Library.__new__(Library)
    library.folder, library.ffi, library.version = real.folder, real.ffi, real.version
    library.c = OtherBuild(real.c, **functions)
    return library


def test_the_library_is_opened_once_however_it_is_asked_for() -> None:
    """The default and its folder spelled out give one object."""
    library = load_library()
    assert load_library(None) is library
    assert load_library(library.folder) is library


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ggml outside the supported versions: they, its own and its folder are named."""
    library = load_library()
    monkeypatch.setattr(lib_module, "SUPPORTED_GGML", ("0.1", "0.2"))
    with pytest.raises(BackendError) as raised:
        Library(library.folder)
    assert raised.value.message == (
        f"expected ggml 0.1 to 0.2, got {library.version} in {library.folder}"
    )
    assert "constraints.txt" in raised.value.hint


@pytest.mark.parametrize("version", [b"", b"0", b"0.2", b"1.25.0", b"0.251.0", b"b1234"])
def test_a_version_is_compared_by_its_numbers(version: bytes) -> None:
    """Texts that merely begin like a supported version, or are none, are refused."""
    library = opened(ggml_version=lambda: load_library().ffi.from_buffer(version + b"\0"))
    with pytest.raises(BackendError, match="expected ggml"):
        library._check_version()


def test_a_library_without_a_version_is_refused() -> None:
    """An old ggml lacks the function: no AttributeError comes out."""

    def missing() -> None:
        raise AttributeError("ggml_version")

    with pytest.raises(BackendError, match="does not tell its version"):
        opened(ggml_version=missing)._check_version()


def test_its_own_layout_passes() -> None:
    """Without anything replaced the probe finds what the declarations say."""
    library = opened()
    library._check_layout()
    assert library._check_version() == library.version


def test_a_layout_moved_by_a_pointer_is_refused() -> None:
    """What a field inserted at the front of `ggml_tensor` would do."""
    library = load_library()

    def moved(*arguments: Any) -> Any:
        address = library.address(library.c.ggml_new_tensor(*arguments))
        return library.ffi.cast("struct ggml_tensor *", address + 8)

    with pytest.raises(BackendError, match=r"ggml_tensor of ggml .* has another layout"):
        opened(ggml_new_tensor=moved)._check_layout()


def _set_ne(tensor: Any) -> None:
    tensor.ne[3] = 1


def _set_nb(tensor: Any) -> None:
    tensor.nb[1] = 28


def _set_name(tensor: Any) -> None:
    tensor.name[0] = b"L"


CHANGES: dict[str, Callable[[Any], None]] = {
    "type": lambda tensor: setattr(tensor, "type", 0),
    "ne": _set_ne,
    "nb": _set_nb,
    "name": _set_name,
    "data": lambda tensor: setattr(tensor, "data", tensor),
    "view_src": lambda tensor: setattr(tensor, "view_src", tensor),
}


@pytest.mark.parametrize("field", CHANGES)
def test_every_probed_field_counts(field: str) -> None:
    """One field that reads back as something else is enough."""
    c = load_library().c

    def named(tensor: Any, name: bytes) -> None:
        c.ggml_set_name(tensor, name)
        CHANGES[field](tensor)

    with pytest.raises(BackendError, match="has another layout") as raised:
        opened(ggml_set_name=named)._check_layout()
    assert "supported: ggml" in raised.value.hint


def test_the_environment_names_another_build(tmp_path: Path) -> None:
    """A copy of the library's folder works in place of llama-cpp-python's own."""
    folder = tmp_path / "build"
    folder.mkdir()
    for path in load_library().folder.iterdir():
        (folder / path.name).symlink_to(path)
    base = TinyLlama().write(tmp_path / "m.gguf")
    code = (
        "import sys\n"
        "from loragraph.cli.library import ggml_folder\n"
        "from loragraph.engine.model import Model\n"
        "with Model.load(sys.argv[1], n_threads=1, ggml_folder=ggml_folder()) as model:\n"
        "    print(model.lib.folder)\n"
        "    print(model.vocab.n_tokens)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(SRC), "LORAGRAPH_GGML_DIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(base)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split("\n")[:2] == [str(folder), "320"]
