"""What tells one model's file from another's without reading all of it."""

from __future__ import annotations

import hashlib

from loragraph.ggml.lib import Library
from loragraph.model.files import ModelFiles

_SAMPLE_BYTES = 4096  # a page: at the start, in the middle and at the end of a tensor


def fingerprint(lib: Library, files: ModelFiles) -> str:
    """SHA-256 over metadata, tensor infos and samples of every tensor's bytes, as hex.

    Arrays of the metadata (the vocabulary above all) are left out; weights that were trained
    further differ in the samples.
    """
    files.check_sizes()
    sha = hashlib.sha256(b"loragraph model 1\0")
    for key, value in sorted(files.metadata.scalars().items()):
        sha.update(repr((key, value)).encode("utf-8", "surrogateescape") + b"\0")
    for name, info in sorted(files.tensors.items()):
        sha.update(repr((name, info.type, info.ne, info.nbytes)).encode() + b"\0")
        data = lib.ffi.buffer(files.pointer(info), info.nbytes)
        middle = info.nbytes // 2
        for start in (0, middle, max(0, info.nbytes - _SAMPLE_BYTES)):
            sha.update(data[start : start + _SAMPLE_BYTES])
    return sha.hexdigest()
