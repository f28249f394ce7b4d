from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from loragraph.ggml.lib import Library, load_library
from loragraph.vocab.vocab import Vocab
from tests.gguf_bytes import Value, write_gguf
from tests.smollm import smollm_path
from tests.tiny_vocab import bpe_metadata, spm_metadata

Write = Callable[[dict[str, Value]], Path]


@pytest.fixture(scope="session")
def lib() -> Library:
    return load_library()


@pytest.fixture(scope="session")
def smollm(lib: Library) -> Iterator[Vocab]:
    with Vocab.load(lib, smollm_path()) as vocab:
        yield vocab


@pytest.fixture(scope="session", params=["spm", "bpe"])
def tiny_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    metadata = spm_metadata(340) if request.param == "spm" else bpe_metadata(340)
    path = tmp_path_factory.mktemp(request.param) / "vocab.gguf"
    return write_gguf(path, {"general.architecture": "llama", **metadata}, [])


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes metadata as a GGUF file without tensors."""

    def write_metadata(metadata: dict[str, Value]) -> Path:
        return write_gguf(
            tmp_path / "vocab.gguf", {"general.architecture": "llama", **metadata}, []
        )

    return write_metadata
