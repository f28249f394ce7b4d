"""Compiles the native kernels and ggml's declarations; all else stands in pyproject.toml."""

from setuptools import setup

setup(
    cffi_modules=[
        "src/loragraph/kernels/build.py:ffibuilder",
        "src/loragraph/ggml/build.py:ffibuilder",
    ]
)
