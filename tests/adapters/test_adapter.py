"""Identity and lifecycle of a loaded adapter."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loragraph.adapters.gguf import read_adapter
from loragraph.errors import LifecycleError
from loragraph.ggml.lib import Library
from tests.adapters.raw_gguf import (
    F16,
    N_EMBD,
    N_VOCAB,
    adapter_metadata,
    base,
    good_tensors,
    pair,
    tensor,
    write,
)

Q = "blk.0.attn_q.weight"


@pytest.fixture
def load(lib: Library, tmp_path: Path) -> Any:
    """Writes a file and reads it as an adapter of a tied base."""

    def load_(metadata: Any = None, tensors: Any = None, **options: Any) -> Any:
        return read_adapter(
            lib, write(tmp_path / "a.gguf", metadata, tensors), base(tied=True), **options
        )

    return load_


def test_digest_ignores_the_order_and_what_changes_no_result(load: Any) -> None:
    """Tensor order, names and descriptions do not enter; an absent alpha is an alpha of 0."""
    reordered = dict(reversed(good_tensors().items()))
    digest = load().digest
    assert len(digest) == 64
    assert load(None, reordered).digest == digest
    assert load(adapter_metadata(adapter__lora__task_name="x")).digest == digest
    assert (
        load(adapter_metadata(adapter__lora__alpha=None)).digest
        == load(adapter_metadata(adapter__lora__alpha=-0.0)).digest
    )


def test_digest_changes_with_every_field(load: Any) -> None:
    """Alpha, a value, a type, a target, a rank, invocation tokens and tied_output all enter."""
    one_value = pair(Q)[f"{Q}.lora_b"]
    changed = bytearray(one_value.data)
    changed[5] ^= 1
    embd = pair("token_embd.weight", n_out=N_VOCAB)
    digests = [
        load().digest,
        load(adapter_metadata(adapter__lora__alpha=8.0)).digest,
        load(adapter_metadata(adapter__alora__invocation_tokens=[1])).digest,
        load(adapter_metadata(adapter__alora__invocation_tokens=[2])).digest,
        load(
            None, good_tensors() | {f"{Q}.lora_b": type(one_value)((4, N_EMBD), 0, bytes(changed))}
        ).digest,
        load(None, pair(Q)).digest,
        load(None, pair(Q, type_=F16)).digest,
        load(None, pair(Q, rank=8)).digest,
        load(None, pair("output.weight", n_out=N_VOCAB)).digest,
        load(None, embd, tied_output=True).digest,
        load(None, embd, tied_output=False).digest,
    ]
    assert len(set(digests)) == len(digests)


def test_equality_is_identity(load: Any) -> None:
    """Two loads of one file are two adapters with one digest."""
    first, second = load(), load()
    assert first != second
    assert first.digest == second.digest
    assert len({first, second}) == 2


def test_use_after_close(load: Any) -> None:
    """After close() the memory is out of reach; the digest and the facts stay."""
    adapter = load()
    half = adapter.pairs[Q].a
    adapter.close()
    adapter.close()
    assert adapter.closed
    uses: list[Callable[[], Any]] = [
        lambda: adapter.data,
        lambda: adapter.address(half),
        lambda: adapter.raw(half),
        lambda: adapter.array(half),
        lambda: adapter.attach("a context"),
    ]
    for use in uses:
        with pytest.raises(LifecycleError, match="after its close"):
            use()
    assert len(adapter.digest) == 64
    assert "closed" in repr(adapter)


def test_close_while_attached_names_the_places(load: Any) -> None:
    """close() names who still uses the memory, and works after the last detach."""
    adapter = load()
    adapter.attach("context 2")
    adapter.attach("context 1")
    adapter.attach("context 1")
    assert adapter.attached_to == ("context 1", "context 2")
    with pytest.raises(LifecycleError, match="attached to context 1, context 2"):
        adapter.close()
    adapter.detach("context 2")
    adapter.detach("context 1")
    with pytest.raises(LifecycleError, match="attached to context 1 "):
        adapter.close()
    adapter.detach("context 1")
    adapter.close()
    assert adapter.closed


def test_detach_without_attach(load: Any) -> None:
    """A detach that nothing attached is refused."""
    with pytest.raises(LifecycleError, match="is not attached to context 1"):
        load().detach("context 1")


def test_with_closes(load: Any) -> None:
    """The end of a `with` closes."""
    with load() as adapter:
        assert not adapter.closed
    assert adapter.closed


def test_attach_from_many_threads(load: Any) -> None:
    """Counts of users stay exact when threads attach and detach at once."""
    adapter = load()

    def work() -> None:
        for _ in range(200):
            adapter.attach("pool")
            adapter.detach("pool")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert adapter.attached_to == ()


def test_arrays_outlive_close(load: Any) -> None:
    """Values that were copied out stay."""
    adapter = load(None, pair(Q) | {f"{Q}.lora_a": tensor(np.ones((4, N_EMBD)))})
    values = adapter.array(adapter.pairs[Q].a)
    adapter.close()
    assert (values == 1).all()
