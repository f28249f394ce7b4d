"""Wrong arguments and wrong moments: an error of ours or TypeError, and nothing has changed."""

from __future__ import annotations

import array
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loragraph import Adapter, Context, LoragraphError, Model
from loragraph.adapters.gguf import read_adapter
from loragraph.errors import (
    CapacityError,
    ConfigError,
    GGUFError,
    InvalidRequestError,
    LifecycleError,
)
from tests.tiny import TinyAdapter, TinyLlama

TINY = TinyLlama(n_layer=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and an adapter for it."""
    made = tmp_path_factory.mktemp("hostile")
    TINY.write(made / "base.gguf")
    TinyAdapter().write(made / "adapter.gguf", TINY)
    return made


@pytest.fixture
def model(folder: Path) -> Iterator[Model]:
    """One model, closed afterwards."""
    with Model.load(folder / "base.gguf", n_threads=1) as made:
        yield made


@pytest.fixture
def adapter(model: Model, folder: Path) -> Adapter:
    """An adapter registered with it."""
    return model.load_adapter(folder / "adapter.gguf")


@pytest.fixture
def ctx(model: Model) -> Iterator[Context]:
    """A context of 64 tokens."""
    with Context(model, n_ctx=64) as made:
        yield made


WRONG_TOKENS: list[Any] = [
    [1.5],
    [True],
    [-1],
    [TINY.n_vocab],
    [2**31],
    [-(2**63)],
    [2**63],
    [2**70],
    [[1, 2]],
    [[1], [2, 3]],
    [None],
    ["1"],
    "abc",
    b"\1",
    None,
    7,
    {1, 2},
    {1: 2},
    object(),
    iter([1, 2]),
    np.array([1.0]),
    np.array([np.nan]),
    np.array([1], object),
    np.array([1 + 2j]),
    np.array([True]),
    np.array([2**64 - 1], np.uint64),
    np.array(["2020-01-01"], "datetime64[D]"),
    np.zeros((0, 5), np.int32),
    np.zeros((1, 1), np.int32),
    np.zeros(65, np.int32),
    np.broadcast_to(np.int32(1), (1 << 31,)),
]


@pytest.mark.parametrize("tokens", WRONG_TOKENS, ids=lambda tokens: repr(tokens)[:40])
def test_wrong_tokens(ctx: Context, tokens: Any) -> None:
    """What is no flat sequence of ids is refused, and the sequence goes on as if never asked."""
    ctx.decode([1, 2])
    expected = ctx.decode([3])
    ctx.truncate(2)
    with pytest.raises(LoragraphError):
        ctx.decode(tokens)
    assert ctx.n_past == 2
    assert np.array_equal(ctx.decode([3]), expected)


RIGHT_TOKENS: list[Any] = [
    (1, 2, 3),
    range(1, 4),
    [np.int64(1), np.uint8(2), 3],
    np.array([1, 2, 3], np.uint8),
    np.array([1, 2, 3], np.uint64),
    np.array([1, 2, 3], ">i2"),
    np.array([3, 0, 2, 0, 1])[::-2],
    np.ma.masked_array([1, 2, 3]),
    array.array("q", [1, 2, 3]),
]


@pytest.mark.parametrize("tokens", RIGHT_TOKENS, ids=lambda tokens: repr(tokens)[:40])
def test_right_tokens_of_odd_types(ctx: Context, tokens: Any) -> None:
    """Integers of any width, byte order and stride mean the same tokens."""
    expected = ctx.decode([1, 2, 3])
    ctx.clear()
    assert np.array_equal(ctx.decode(tokens), expected)


def test_no_tokens(ctx: Context) -> None:
    """An empty input gives no logits and changes nothing."""
    assert ctx.decode([]).shape == (0, TINY.n_vocab)
    assert ctx.decode(np.empty(0)).shape == (0, TINY.n_vocab)
    assert ctx.n_past == 0


def test_wrong_outputs(ctx: Context) -> None:
    """Another word than all or last is an error, not all."""
    with pytest.raises(InvalidRequestError, match="outputs"):
        ctx.decode([1], outputs="first")  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, -1, 1.5, "8", True, 2**70, float("nan"), [1], b"8"])
@pytest.mark.parametrize("field", ["n_ctx", "n_batch", "n_threads"])
def test_wrong_sizes(model: Model, field: str, value: Any) -> None:
    """Sizes are integers in their bounds; a refused context is not registered."""
    with pytest.raises(ConfigError, match=f"^{field}: expected an integer"):
        Context(model, **{field: value})
    assert not model._contexts


@pytest.mark.parametrize("value", ["", "FLASH", None, 1, ["flash"], b"flash"])
@pytest.mark.parametrize("field", ["lowering", "kv_type", "attention"])
def test_wrong_choices(model: Model, field: str, value: Any) -> None:
    """A name that does not exist is refused with those that do."""
    with pytest.raises(ConfigError, match=f"^{field}: expected one of"):
        Context(model, **{field: value})


@pytest.mark.parametrize("value", [0, 513, 1.5, "2", True])
def test_wrong_threads_of_a_model(folder: Path, value: Any) -> None:
    """ggml would end the process above 512 threads."""
    with pytest.raises(ConfigError, match="n_threads"):
        Model.load(folder / "base.gguf", n_threads=value)


def test_context_on_something_else(folder: Path) -> None:
    """Only a Model carries contexts."""
    with pytest.raises(TypeError, match="expected a Model"):
        Context(folder)  # type: ignore[arg-type]


@pytest.mark.parametrize("attention", ["flash", "plain"])
def test_context_larger_than_the_machine(model: Model, attention: Any) -> None:
    """Terabytes of cells and masks are refused before the system promises them."""
    with pytest.raises(CapacityError, match="memory of this machine"):
        Context(model, n_ctx=1 << 24, n_batch=1 << 16, attention=attention)
    assert not model._contexts


WRONG_SCALES: list[Any] = [
    *(float("nan"), float("inf"), -float("inf"), 1e39, 10**400, "1", None, True, [1], 1j),
    *(np.array([1.0]), np.float64(1e39)),
]


@pytest.mark.parametrize("scale", WRONG_SCALES, ids=lambda scale: repr(scale)[:20])
def test_wrong_scales(ctx: Context, adapter: Adapter, scale: Any) -> None:
    """A scale that is no finite float32 is refused and the old set stays."""
    ctx.set_adapters({adapter: 0.5})
    with pytest.raises(InvalidRequestError):
        ctx.set_adapters({adapter: scale})
    assert [value for _, value in ctx.mix] == [0.5]


@pytest.mark.parametrize("scales", [{"a": 1.0}, {None: 1.0}, {5: 1.0}, [1], None, "a", 3.0])
def test_wrong_adapters(ctx: Context, scales: Any) -> None:
    """Keys that are no Adapter, and sets that are no mapping, are type errors."""
    with pytest.raises(TypeError, match="expected a"):
        ctx.set_adapters(scales)
    assert len(ctx.mix) == 0


@pytest.mark.parametrize("n", [-1, 4, 1.5, True, "1", None, 2**70])
def test_wrong_truncate(ctx: Context, n: Any) -> None:
    """Only as many tokens as there are can be kept."""
    ctx.decode([1, 2, 3])
    with pytest.raises(ConfigError, match="n_tokens"):
        ctx.truncate(n)
    assert ctx.n_past == 3


@pytest.mark.parametrize("text", [5, 10**12, None, ["a"], bytearray(b"a")])
def test_wrong_text(model: Model, text: Any) -> None:
    """A number is no text: bytes(n) would be n zeros."""
    with pytest.raises(TypeError, match="expected text"):
        model.vocab.tokenize(text)


@pytest.mark.parametrize("token", [-1, TINY.n_vocab, 2**31, 2**70, 1.5, "1", None])
def test_wrong_token_of_the_vocabulary(model: Model, token: Any) -> None:
    """libllama would end the process at an id out of range."""
    for call in (model.vocab.piece, model.vocab.text, model.vocab.is_eog, model.vocab.is_control):
        with pytest.raises((InvalidRequestError, TypeError)):
            call(token)
    with pytest.raises((InvalidRequestError, TypeError)):
        model.vocab.detokenize([token])


def test_use_after_close(model: Model, adapter: Adapter) -> None:
    """Everything raises after close, and a second close does nothing."""
    ctx = Context(model, n_ctx=64)
    ctx.set_adapters({adapter: 1.0})
    ctx.decode([1])
    ctx.close()
    ctx.close()
    for call in (
        lambda: ctx.decode([1]),
        lambda: ctx.set_adapters({}),
        ctx.clear,
        lambda: ctx.truncate(0),
    ):
        with pytest.raises(LifecycleError):
            call()
    adapter.close()
    adapter.close()
    with Context(model, n_ctx=64) as other, pytest.raises(LifecycleError):
        other.set_adapters({adapter: 1.0})
    model.close()
    model.close()
    with pytest.raises(LifecycleError):
        Context(model)
    with pytest.raises(LifecycleError):
        model.vocab.tokenize("a")


def test_model_closed_under_a_context(model: Model) -> None:
    """The context keeps the model open."""
    with Context(model, n_ctx=64) as ctx:
        with pytest.raises(LifecycleError, match="context 1"):
            model.close()
        assert ctx.decode([1]).shape == (1, TINY.n_vocab)


def test_adapter_that_finishes_loading_after_the_model_closed(
    model: Model, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is closed again instead of outliving its model."""
    loaded: list[Adapter] = []

    def slow_read(*args: Any, **options: Any) -> Adapter:
        loaded.append(read_adapter(*args, **options))
        model.close()
        return loaded[0]

    monkeypatch.setattr("loragraph.engine.model.read_adapter", slow_read)
    with pytest.raises(LifecycleError):
        model.load_adapter(folder / "adapter.gguf")
    assert loaded[0].closed


def test_close_while_another_thread_decodes(model: Model) -> None:
    """Either the close or the decode is refused, whoever comes second; nothing crashes."""
    ctx, errors = Context(model, n_ctx=2048), []
    started = threading.Event()

    def decode() -> None:
        try:
            while True:
                ctx.decode([1] * 16)
                started.set()
                time.sleep(0.002)  # leaves the other thread a gap
                ctx.clear()
        except LifecycleError as error:
            errors.append(error)

    thread = threading.Thread(target=decode)
    thread.start()
    assert started.wait(20)
    while thread.is_alive():
        try:
            ctx.close()
            break
        except LifecycleError as error:
            assert "two threads" in str(error)  # noqa: PT017 - it may also not be raised
            time.sleep(0.0003)
    thread.join(20)
    assert len(errors) == 1


@pytest.mark.parametrize("attention", ["flash", "plain"])
def test_values_that_overflowed_do_not_stay(model: Model, adapter: Adapter, attention: Any) -> None:
    """Cells with infinities of a huge scale spoil neither the cleared nor the cut sequence."""
    with Context(model, n_ctx=64, attention=attention) as ctx:
        first = ctx.decode([1, 2])
        expected = ctx.decode([3])
        ctx.truncate(2)
        ctx.set_adapters({adapter: 1e37})
        assert not np.isfinite(ctx.decode([3, 4, 5])).all()
        ctx.set_adapters({})
        ctx.truncate(2)
        assert np.array_equal(ctx.decode([3]), expected)
        ctx.clear()
        assert np.array_equal(ctx.decode([1, 2]), first)


def test_model_closed_while_another_thread_tokenises(model: Model) -> None:
    """The close is refused as long as libllama reads the vocabulary."""
    inside, leave = threading.Event(), threading.Event()

    def tokenise() -> None:
        with model.vocab._using():  # what every call into libllama does
            inside.set()
            assert leave.wait(60)

    thread = threading.Thread(target=tokenise)
    thread.start()
    try:
        assert inside.wait(60)
        with pytest.raises(LifecycleError, match="another thread"):
            model.close()
        assert not model.closed
    finally:
        leave.set()
        thread.join(60)
    model.close()


@pytest.mark.parametrize("path", ["", ".", "no/such/file", "a\0b", "/dev/null", "x" * 5000])
def test_wrong_paths(path: str) -> None:
    """What is no readable file is a GGUFError."""
    with pytest.raises(GGUFError):
        Model.load(path)


@pytest.mark.parametrize("path", [None, 5, b"base.gguf", ["base.gguf"]])
def test_paths_of_wrong_types(path: Any) -> None:
    """Path's own type error."""
    with pytest.raises(TypeError):
        Model.load(path)
