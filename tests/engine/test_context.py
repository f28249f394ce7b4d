"""Wrong calls of a context change nothing; what fails leaves nothing behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from loragraph.engine.model import Model
from loragraph.engine.runner import Runner
from loragraph.errors import (
    BackendError,
    ConfigError,
    ContextLengthError,
    InvalidRequestError,
    LoragraphError,
)
from loragraph.ggml.handles import CpuBackend, GraphAllocator
from loragraph.graph.inputs import Inputs
from loragraph.graph.kv_cache import KvCache
from tests.engine.setting import Setting
from tests.numerics.runs import open_context, random_tokens

TOKENS = random_tokens(20)


WRONG_TOKENS: dict[str, tuple[Any, type[LoragraphError]]] = {
    "negative": ([-1], InvalidRequestError),
    "beyond_vocab": ([320], InvalidRequestError),
    "floats": ([1.0], InvalidRequestError),
    "nested": ([[1, 2]], InvalidRequestError),
    "text": ("abc", InvalidRequestError),
    "too_many": ([5] * 257, ContextLengthError),
}


@pytest.mark.parametrize(("tokens", "error"), WRONG_TOKENS.values(), ids=WRONG_TOKENS)
def test_wrong_tokens_append_nothing(
    tokens: Any, error: type[LoragraphError], model: Model
) -> None:
    """Tokens that cannot be decoded raise and leave the sequence as it was."""
    with open_context(model) as context:
        context.decode(TOKENS)
        with pytest.raises(error):
            context.decode(tokens)
        assert context.n_past == len(TOKENS)


def test_no_tokens_are_no_logits(model: Model) -> None:
    """An empty input gives an empty array of the right width."""
    with open_context(model) as context:
        assert context.decode([]).shape == (0, 320)


def test_a_failed_step_appends_nothing(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the second chunk fails, the first is taken back too, and the next call is right."""
    with open_context(model, n_batch=8) as context:
        expected = context.decode(TOKENS)
        context.clear()
        backend = type(context._runner._backend)
        compute, calls = backend.compute, []

        def fail_second(self: Any, *graph: Any) -> None:
            calls.append(graph)
            if len(calls) == 2:
                raise BackendError("aborted")
            compute(self, *graph)

        with monkeypatch.context() as patch:
            patch.setattr(backend, "compute", fail_second)
            with pytest.raises(BackendError, match="aborted"):
                context.decode(TOKENS)
        assert context.n_past == 0
        assert np.array_equal(context.decode(TOKENS), expected)


@pytest.mark.parametrize("n", [-1, 21])
def test_truncate_keeps_what_there_is(n: int, model: Model) -> None:
    """A sequence cannot be cut to fewer than none or to more than it has."""
    with open_context(model) as context:
        context.decode(TOKENS)
        with pytest.raises(ConfigError, match="0 to 20"):
            context.truncate(n)
        assert context.n_past == 20


WRONG_OPTIONS: dict[str, dict[str, Any]] = {
    "lowering": {"lowering": "stacked"},
    "kv_type": {"kv_type": "q4_0"},
    "attention": {"attention": "paged"},
    "n_ctx": {"n_ctx": 0},
    "n_batch": {"n_batch": 0},
    "n_threads": {"n_threads": 0},
}


@pytest.mark.parametrize("field", WRONG_OPTIONS)
def test_wrong_options_leave_nothing(field: str, model: Model) -> None:
    """An option out of range raises ConfigError that names it, and the model stays closable."""
    with pytest.raises(ConfigError, match=field):
        open_context(model, **WRONG_OPTIONS[field])
    model.close()


PARTS: tuple[type[Any], ...] = (CpuBackend, KvCache, GraphAllocator, Inputs, Runner)


@pytest.mark.parametrize("part", PARTS)
def test_a_context_that_fails_to_build_leaves_nothing(
    part: type[Any], model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever part fails, those made before are freed and the model has no context."""
    made: list[type[Any]] = []
    closed: list[type[Any]] = []

    def record(cls: type[Any]) -> None:
        init, close = cls.__init__, cls.close

        def making(self: Any, *args: Any, **kwargs: Any) -> None:
            if cls is part:
                raise BackendError("no memory")
            init(self, *args, **kwargs)
            made.append(cls)

        def closing(self: Any) -> None:
            closed.append(cls)
            close(self)

        patch.setattr(cls, "__init__", making)
        patch.setattr(cls, "close", closing)

    with monkeypatch.context() as patch:
        for cls in PARTS:
            record(cls)
        with pytest.raises(BackendError, match="no memory"):
            open_context(model)
    assert set(closed) == set(made)
    model.close()


@pytest.mark.parametrize("n_threads", [0, -1, 513])
def test_a_model_with_a_wrong_number_of_threads(n_threads: int, setting: Setting) -> None:
    """1 to 512 threads; anything else is a ConfigError."""
    with pytest.raises(ConfigError, match="n_threads"):
        Model.load(setting.base, n_threads=n_threads)
