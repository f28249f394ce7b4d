from __future__ import annotations

from collections.abc import Iterator

import pytest

from loragraph.engine.model import Model
from loragraph.ggml.lib import Library, load_library
from loragraph.vocab.vocab import Vocab
from tests.engine.setting import Setting
from tests.gguf_bytes import write_gguf
from tests.tiny_vocab import bpe_metadata


@pytest.fixture(scope="session")
def lib() -> Library:
    return load_library()


@pytest.fixture(scope="session")
def bpe(lib: Library, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vocab]:
    """A byte-level vocabulary of 340 tokens: 3 control tokens, the bytes, short words."""
    path = tmp_path_factory.mktemp("bpe") / "vocab.gguf"
    write_gguf(path, {"general.architecture": "llama", **bpe_metadata(340)}, [])
    with Vocab.load(lib, path) as vocab:
        yield vocab


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    """The files, shared."""
    return Setting(tmp_path_factory.mktemp("lifecycle"))


@pytest.fixture
def model(setting: Setting) -> Iterator[Model]:
    """A model of the test's own."""
    with setting.load() as model:
        yield model
