"""Compiles `declarations` into `loragraph.ggml._declarations` (cffi, ABI mode: a Python module).

setup.py names `ffibuilder` below. Parsing C takes a twentieth of a second, so no process that
loads a model does it. No compiler takes part.
"""

from pathlib import Path
from runpy import run_path

from cffi import FFI

# By path: setuptools runs this file where loragraph itself cannot be imported yet.
_declarations = run_path(str(Path(__file__).resolve().parent / "declarations.py"))

ffibuilder = FFI()
ffibuilder.cdef("".join(_declarations[name] for name in ("GGML", "LLAMA", "LIBC")))
ffibuilder.set_source("loragraph.ggml._declarations", None)
