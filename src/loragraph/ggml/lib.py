"""Finds and opens libggml and libllama, checks that they are what the declarations describe.

The objects of the package llama-cpp-python are used, or those of a folder given by the caller
(the command line reads it from LORAGRAPH_GGML_DIR). ABI mode: nothing is compiled here.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loragraph.errors import BackendError

try:
    from loragraph.ggml._declarations import ffi as _compiled
except ImportError as exc:
    raise BackendError(
        f"expected the generated module loragraph.ggml._declarations, got: {exc}",
        hint="reinstall loragraph",
    ) from exc

SUPPORTED_GGML = ("0.25", "0.26")
"""Versions of ggml (major.minor) whose headers were compared with `declarations`."""

GGML_STATUS = {-2: "allocation failed", -1: "failed", 0: "success", 1: "aborted"}

ffi: Any = _compiled

_log = logging.getLogger("loragraph.ggml")
_LOG_LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.WARNING, 4: logging.ERROR}
_LOG_CONTINUES = 5

_PROBE_NE = (7, 5, 3, 2)


class Library:
    """The opened native library: `ffi` and `c`, through which every C call goes.

    `c` is the handle of libllama; the loader finds ggml's symbols through its dependencies, so one
    handle serves both and there is never a second copy of ggml in the process.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ffi: Any = ffi
        try:
            # libggml first, as llama_cpp itself does: libllama's own dependency is then resolved
            # by its SONAME to this very object, whichever of the two packages is imported first.
            self._libggml = self.ffi.dlopen(str(_shared(folder, "ggml")), _global_flags(self.ffi))
            self.c: Any = self.ffi.dlopen(str(_shared(folder, "llama")), _global_flags(self.ffi))
        except OSError as exc:
            raise BackendError(
                f"the native library in {folder} cannot be opened: {exc}",
                hint="reinstall llama-cpp-python",
            ) from exc
        self.version = self._check_version()
        self._check_layout()
        self._log_callback = self.ffi.callback("ggml_log_callback", _LogBridge(self.ffi))
        self.c.llama_log_set(self._log_callback, self.ffi.NULL)  # sets ggml's too

    def text(self, pointer: Any) -> str:
        """The C string at `pointer`; "" for NULL, undecodable bytes replaced."""
        if pointer == self.ffi.NULL:
            return ""
        return bytes(self.ffi.string(pointer)).decode("utf-8", "replace")

    def address(self, pointer: Any) -> int:
        """The address that `pointer` holds."""
        return int(self.ffi.cast("uintptr_t", pointer))

    @contextmanager
    def log_lines(self) -> Iterator[list[str]]:
        """Collects the library's warnings and errors of this block, for use in error messages.

        The process has one log callback, and another package may have taken it: it is ours for
        the length of the block and then given back.
        """
        lines: list[str] = []
        handler = _Collector(lines)
        callback = self.ffi.new("ggml_log_callback *")
        user_data = self.ffi.new("void **")
        self.c.llama_log_get(callback, user_data)
        self.c.llama_log_set(self._log_callback, self.ffi.NULL)
        _log.addHandler(handler)
        try:
            yield lines
        finally:
            _log.removeHandler(handler)
            self.c.llama_log_set(callback[0], user_data[0])

    def _check_version(self) -> str:
        try:
            version = self.text(self.c.ggml_version())
        except AttributeError as exc:
            raise BackendError(
                f"the ggml in {self.folder} does not tell its version",
                hint=f"supported: ggml {SUPPORTED_GGML[0]} to {SUPPORTED_GGML[-1]}",
            ) from exc
        if ".".join(version.split(".")[:2]) not in SUPPORTED_GGML:
            raise BackendError(
                f"expected ggml {SUPPORTED_GGML[0]} to {SUPPORTED_GGML[-1]}, "
                f"got {version} in {self.folder}",
                hint="install the llama-cpp-python version that constraints.txt names",
            )
        return version

    def _check_layout(self) -> None:
        """Makes one tensor and reads it back: catches a `ggml_tensor` of another layout."""
        params = self.ffi.new("struct ggml_init_params *", [1 << 16, self.ffi.NULL, True])
        ctx = self.c.ggml_init(params[0])
        if ctx == self.ffi.NULL:
            raise BackendError("ggml_init failed: no memory")
        try:
            tensor = self.c.ggml_new_tensor(ctx, 1, 4, list(_PROBE_NE))
            self.c.ggml_set_name(tensor, b"layout")
            expected_nb = [2, 14, 70, 210]
            fits = (
                tensor.type == 1
                and list(tensor.ne) == list(_PROBE_NE)
                and list(tensor.nb) == expected_nb
                and self.text(tensor.name) == "layout"
                and tensor.data == self.ffi.NULL
                and tensor.view_src == self.ffi.NULL
            )
        finally:
            self.c.ggml_free(ctx)
        if not fits:
            raise BackendError(
                f"struct ggml_tensor of ggml {self.version} in {self.folder} has another layout",
                hint=f"supported: ggml {SUPPORTED_GGML[0]} to {SUPPORTED_GGML[-1]}",
            )


def load_library(folder: Path | None = None) -> Library:
    """Opens the native library once a process; `folder` overrides llama-cpp-python's own."""
    return _opened(folder if folder is not None else _package_folder())


@functools.cache
def _opened(folder: Path) -> Library:
    """One object however the folder was named."""
    return Library(folder)


def _package_folder() -> Path:
    spec = importlib.util.find_spec("llama_cpp")  # found, not imported: its import is slow
    if spec is None or not spec.submodule_search_locations:
        raise BackendError(
            "the package llama-cpp-python, which brings libggml and libllama, is not installed",
            hint="pip install llama-cpp-python",
        )
    return Path(spec.submodule_search_locations[0]) / "lib"


def _shared(folder: Path, name: str) -> Path:
    suffixes = {"darwin": (".dylib", ".so"), "win32": (".dll",)}.get(sys.platform, (".so",))
    for suffix in suffixes:
        for prefix in ("lib", ""):
            path = folder / f"{prefix}{name}{suffix}"
            if path.is_file():
                return path
    raise BackendError(
        f"no lib{name}{suffixes[0]} in {folder}", hint="reinstall llama-cpp-python from source"
    )


def _global_flags(ffi: Any) -> int:
    return int(ffi.RTLD_NOW | ffi.RTLD_GLOBAL)


class _LogBridge:
    """ggml's log callback: lines go to the logger `loragraph.ggml`, pieces are joined first."""

    def __init__(self, ffi: Any) -> None:
        self._ffi = ffi
        self._level = logging.DEBUG
        self._pending = ""

    def __call__(self, level: int, text: Any, _user_data: Any) -> None:
        if level != _LOG_CONTINUES:
            self._level = _LOG_LEVELS.get(level, logging.DEBUG)
        self._pending += bytes(self._ffi.string(text)).decode("utf-8", "replace")
        *lines, self._pending = self._pending.split("\n")
        for line in lines:
            if line.strip(" ."):
                _log.log(self._level, "%s", line)


class _Collector(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())
