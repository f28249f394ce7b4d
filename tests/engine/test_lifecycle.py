"""Who may be closed when, what a closed object does, and which threads may use a context."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loragraph.adapters.adapter import Adapter
from loragraph.engine.context import Context
from loragraph.engine.model import Model
from loragraph.errors import (
    BackendError,
    CapacityError,
    InvalidRequestError,
    LifecycleError,
)
from loragraph.graph.lowrank import branch, resident
from tests.engine.setting import Setting
from tests.numerics.runs import LOWERINGS, LoweringName, open_context, random_tokens, run
from tests.tiny import TinyAdapter, TinyLlama

TOKENS = random_tokens(20)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_an_attached_adapter_cannot_be_closed(
    lowering: LoweringName, model: Model, setting: Setting
) -> None:
    """Closing it names the context; the adapter goes on working; detached, it can be closed."""
    adapter = model.load_adapter(setting.paths[0])
    with open_context(model, lowering=lowering) as context:
        expected = run(context, TOKENS, {adapter: 1.0})
        with pytest.raises(LifecycleError, match=r"context 1 of m\.gguf"):
            adapter.close()
        assert np.array_equal(run(context, TOKENS, {adapter: 1.0}), expected)
        context.set_adapters({})
        adapter.close()
        with pytest.raises(LifecycleError, match="after its close"):
            context.set_adapters({adapter: 1.0})
        assert model.adapters == ()
    assert adapter.closed


def test_every_context_that_holds_an_adapter_is_named(model: Model, setting: Setting) -> None:
    """Two contexts with one adapter are both named; the last one to let it go frees it."""
    adapter = model.load_adapter(setting.paths[0])
    with open_context(model) as first, open_context(model) as second:
        for context in (first, second):
            context.set_adapters({adapter: 1.0})
        with pytest.raises(LifecycleError, match=f"{first.name}, {second.name}"):
            adapter.close()
        first.close()
        with pytest.raises(LifecycleError, match=second.name):
            adapter.close()
    adapter.close()


def test_a_model_with_an_open_context_cannot_be_closed(model: Model) -> None:
    """Closing it names the context, which goes on working."""
    with open_context(model) as context:
        expected = run(context, TOKENS, {})
        with pytest.raises(LifecycleError, match=context.name):
            model.close()
        assert np.array_equal(run(context, TOKENS, {}), expected)
    model.close()
    model.close()


def test_a_model_whose_adapter_is_held_elsewhere_stays_whole(setting: Setting) -> None:
    """A close that an attached adapter forbids closes nothing, and can be tried again."""
    with Model.load(setting.base, n_threads=1) as model:
        adapter = model.load_adapter(setting.paths[0])
        adapter.attach("a tool")
        for _ in range(2):
            with pytest.raises(LifecycleError, match="attached to a tool"):
                model.close()
        assert not model.closed
        assert model.vocab.tokenize("hello")
        adapter.detach("a tool")
    assert adapter.closed


def test_closing_a_model_closes_its_adapters(setting: Setting) -> None:
    """After the model's close its adapters are closed too."""
    model = setting.load()
    adapters = [model.load_adapter(path) for path in setting.paths]
    model.close()
    assert [adapter.closed for adapter in adapters] == [True, True]
    assert model.adapters == ()


CONTEXT_USES: dict[str, Callable[[Context, Adapter], object]] = {
    "decode": lambda context, adapter: context.decode(TOKENS),
    "set_adapters": lambda context, adapter: context.set_adapters({adapter: 1.0}),
    "clear": lambda context, adapter: context.clear(),
    "truncate": lambda context, adapter: context.truncate(0),
}


@pytest.mark.parametrize("use", CONTEXT_USES.values(), ids=CONTEXT_USES)
def test_a_closed_context_raises(
    use: Callable[[Context, Adapter], object], model: Model, setting: Setting
) -> None:
    """Every method of a closed context raises; closing it again does nothing."""
    adapter = model.load_adapter(setting.paths[0])
    context = open_context(model)
    context.close()
    context.close()
    with pytest.raises(LifecycleError, match="after its close"):
        use(context, adapter)


def test_a_closed_model_raises(setting: Setting) -> None:
    """A closed model loads no adapter and opens no context."""
    model = setting.load()
    model.close()
    with pytest.raises(LifecycleError, match="after its close"):
        model.load_adapter(setting.paths[0])
    with pytest.raises(LifecycleError, match="after its close"):
        open_context(model)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_another_models_adapter_is_refused(
    lowering: LoweringName, model: Model, setting: Setting
) -> None:
    """An adapter registered with another model, even of the same file, is refused."""
    with setting.load() as other:
        stranger = other.load_adapter(setting.paths[0])
        with open_context(model, lowering=lowering) as context:
            with pytest.raises(LifecycleError, match="another model"):
                context.set_adapters({stranger: 1.0})
            assert len(context.mix) == 0
        assert stranger.attached_to == ()


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_contexts_with_unlike_sets_run_in_parallel(
    lowering: LoweringName, model: Model, setting: Setting
) -> None:
    """Two contexts on one model give in parallel threads the bits that each gives alone."""
    first, second = (model.load_adapter(path) for path in setting.paths)
    sets: list[dict[Adapter, float]] = [{first: 1.0}, {second: -0.5, first: 0.25}]
    expected = []
    for scales in sets:
        with open_context(model, lowering=lowering) as context:
            expected.append(run(context, TOKENS, scales))
    outcomes: list[list[bool]] = [[], []]
    barrier = threading.Barrier(2)

    def work(index: int) -> None:
        with open_context(model, lowering=lowering) as context:
            barrier.wait(10)
            for _ in range(10):
                equal = np.array_equal(run(context, TOKENS, sets[index]), expected[index])
                outcomes[index].append(equal)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert outcomes == [[True] * 10] * 2


def test_two_threads_in_one_context_raise(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one thread is inside, every use by another raises, and the first is undisturbed."""
    with open_context(model) as context:
        expected = context.decode(TOKENS)
        context.clear()
        inside, leave = threading.Event(), threading.Event()
        compute = type(context._runner._backend).compute

        def slow_compute(self: Any, graph: Any) -> None:
            inside.set()
            assert leave.wait(10)
            compute(self, graph)

        monkeypatch.setattr(type(context._runner._backend), "compute", slow_compute)
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(context.decode(TOKENS)))
        thread.start()
        assert inside.wait(10)
        uses: list[Callable[[], object]] = [
            lambda: context.decode(TOKENS),
            lambda: context.set_adapters({}),
            context.clear,
            lambda: context.truncate(0),
            context.close,
        ]
        for use in uses:
            with pytest.raises(LifecycleError, match="two threads at once"):
                use()
        leave.set()
        thread.join(10)
        assert np.array_equal(results[0], expected)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_failed_attach_leaves_the_old_set(
    lowering: LoweringName, model: Model, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a new set cannot be made ready, the old one goes on giving the same bits."""
    first, second = (model.load_adapter(path) for path in setting.paths)

    def fail(adapter: Adapter, **_: object) -> Any:
        raise BackendError("no memory")

    with open_context(model, lowering=lowering) as context:
        expected = run(context, TOKENS, {first: 1.0})
        module = branch if lowering == "branch" else resident
        with monkeypatch.context() as patch:
            patch.setattr(module, "target_pairs", fail)
            for wanted in ({second: 1.0}, {first: 0.5, second: 1.0}):
                with pytest.raises(BackendError, match="no memory"):
                    context.set_adapters(wanted)
        assert (first.attached_to, second.attached_to) == ((context.name,), ())
        context.clear()
        assert np.array_equal(context.decode(TOKENS), expected)
        context.set_adapters({second: 1.0})
    assert first.attached_to + second.attached_to == ()


WRONG_SETS: dict[str, Any] = {
    "infinite": float("inf"),
    "nan": float("nan"),
    "beyond_f32": 1e39,
    "overflows_with_alpha": 3e38,
    "text": "1",
    "bool": True,
}


@pytest.mark.parametrize("scale", WRONG_SETS.values(), ids=WRONG_SETS)
def test_a_wrong_scale_leaves_the_old_set(scale: Any, model: Model, setting: Setting) -> None:
    """Scales that are no finite numbers are refused and change nothing."""
    adapter = model.load_adapter(setting.paths[0])
    with open_context(model) as context:
        context.set_adapters({adapter: 0.5})
        with pytest.raises(InvalidRequestError, match="scale"):
            context.set_adapters({adapter: scale})
        assert context.mix.key == ((adapter.digest, 0.5),)


def test_more_adapters_than_a_token_can_carry(setting: Setting, tmp_path: Path) -> None:
    """The routed lowering refuses a mix of 17, and keeps the old set."""
    tiny = TinyLlama()
    with setting.load() as model:
        adapters = []
        for seed in range(17):
            path = tmp_path / f"{seed}.gguf"
            TinyAdapter(rank=1, targets=("attn_q",), layers=(0,), seed=seed).write(path, tiny)
            adapters.append(model.load_adapter(path))
        with open_context(model, lowering="routed") as context:
            context.set_adapters(dict.fromkeys(adapters[:16], 1.0))
            with pytest.raises(CapacityError, match="at most 16 adapters"):
                context.set_adapters(dict.fromkeys(adapters, 1.0))
            assert len(context.mix) == 16
