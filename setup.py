"""Compiles the native kernels (src/loragraph/kernels); all else stands in pyproject.toml."""

from setuptools import setup

setup(cffi_modules=["src/loragraph/kernels/build.py:ffibuilder"])
