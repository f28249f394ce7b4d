"""Steps of many sequences through a real graph: what each gives is what it gives alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from loragraph.engine.assembly import AttentionName, KvType
from loragraph.engine.batching import batch_of
from loragraph.engine.context import Context
from loragraph.engine.model import Model
from loragraph.engine.plan import SchedulerConfig
from loragraph.engine.scheduler import Scheduler
from tests.engine.fakes import sequence_of
from tests.tiny import TinyLlama

PROMPTS = [
    [5, 6, 7, 8, 9, 10, 11, 12, 13],
    [5, 6, 7, 8, 9, 20, 21],
    [5, 6, 7, 8, 9, 10, 11, 12, 13],
    [30],
]
N_GENERATED = 5


def context_of(model: Model, attention: AttentionName) -> Context:
    """A context whose plain form is exact, and whose flash form rounds cells to F16."""
    kv_type: KvType = "f32" if attention == "plain" else "f16"
    return Context(model, n_ctx=256, attention=attention, kv_type=kv_type)


def alone(model: Model, attention: AttentionName, prompt: list[int]) -> list[NDArray[np.float32]]:
    """The logits after the prompt and after each greedy token, with a context of its own."""
    with context_of(model, attention) as context:
        logits = [context.decode(np.array(prompt))[-1]]
        for _ in range(N_GENERATED - 1):
            logits.append(context.decode(np.array([logits[-1].argmax()]))[-1])
    return logits


@pytest.mark.parametrize(("attention", "bound"), [("plain", 1e-6), ("flash", 1e-3)])
@pytest.mark.parametrize("max_batch_tokens", [6, 64])
def test_mixed_as_alone(
    tmp_path: Path, attention: AttentionName, bound: float, max_batch_tokens: int
) -> None:
    """Shared prefixes, scattered cells, chunks and pending cells change no logits."""
    config = SchedulerConfig(256, max_batch_tokens=max_batch_tokens, max_sequences=4, block_size=2)
    scheduler = Scheduler(config)
    sequences = [sequence_of(prompt, max_tokens=N_GENERATED) for prompt in PROMPTS]
    scheduler.add(*sequences)
    with Model.load(TinyLlama().write(tmp_path / "tiny.gguf")) as model:
        expected = {
            one: alone(model, attention, prompt)
            for one, prompt in zip(sequences, PROMPTS, strict=True)
        }
        with context_of(model, attention) as context:
            while scheduler.running or scheduler.n_waiting:
                plan = scheduler.schedule()
                logits = iter(context._runner.run(batch_of(plan)))
                scheduler.complete(plan)
                for chunk in plan.chunks:
                    if chunk.wants_token:
                        got = next(logits)
                        want = expected[chunk.sequence][chunk.sequence.n_generated]
                        assert np.abs(got - want).max() <= bound * np.abs(want).max()
                        scheduler.append(chunk.sequence, int(want.argmax()))
    assert [one.n_generated for one in sequences] == [N_GENERATED] * 4
    assert scheduler.stats.n_hit_tokens == 5 + 8  # the stem of the second, the third but one
