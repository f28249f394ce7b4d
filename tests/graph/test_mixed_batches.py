"""Batches in which every token carries its own adapters, in each lowering that computes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from loragraph.adapters.mix import EMPTY_MIX, Mix
from loragraph.engine.context import Context
from loragraph.engine.model import Model
from loragraph.graph.batch import Batch
from tests.numerics.compare import nmse
from tests.numerics.runs import (
    LIBLLAMA_MODES,
    MIXING,
    Logits,
    LoweringName,
    open_context,
    random_tokens,
)
from tests.reference.llama import Active, ReferenceLlama
from tests.tiny import TinyAdapter, TinyLlama

EXACT_NMSE = 2e-12
TOKENS = random_tokens(24)
ADAPTERS = (
    TinyAdapter(seed=1, embeddings=True, output=True),
    TinyAdapter(seed=2, rank={"attn_q": 2, "ffn_down": 7}, targets=("attn_q", "ffn_down")),
    TinyAdapter(seed=3, rank=33, targets=("attn_v", "ffn_up"), layers=(1,), output=True),
)


class Setting:
    """A model with three adapters and the float64 reference."""

    def __init__(self, folder: Path) -> None:
        tiny = TinyLlama()
        base = tiny.write(folder / "m.gguf")
        self.reference = ReferenceLlama.load(base)
        self.model = Model.load(base, n_threads=1)
        self.arrays, self.adapters = [], []
        for index, adapter in enumerate(ADAPTERS):
            path = folder / f"{index}.gguf"
            self.arrays.append(adapter.write(path, tiny))
            self.adapters.append(self.model.load_adapter(path))

    def mix(self, *scales: float) -> Mix:
        """A mix by the adapters' scales."""
        return Mix(dict(zip(self.adapters, scales, strict=True)))

    def expected(self, scales: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> Logits:
        """Reference logits; scales (n_tokens, n_adapters)."""
        active: list[Active] = [(a, s) for a, s in zip(self.arrays, scales.T, strict=True)]
        return self.reference.logits(TOKENS, active).astype(np.float32)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    """Shared by all tests of this module."""
    return Setting(tmp_path_factory.mktemp("routed"))


def attach_all(context: Context, setting: Setting) -> None:
    """Makes all adapters resident."""
    context.set_adapters(dict.fromkeys(setting.adapters, 1.0))


def step(
    context: Context,
    mixes: Sequence[Mix],
    which: Sequence[int],
    outputs: Sequence[int] | None = None,
) -> Logits:
    """One step of TOKENS from the first cell on, each with its mix."""
    n = len(which)
    chosen = np.arange(n) if outputs is None else np.asarray(outputs)
    plain = Batch.of_one(np.asarray(TOKENS[:n], np.int32), 0, EMPTY_MIX, chosen.astype(np.int32))
    batch = replace(plain, mix=np.asarray(which, np.int32), mixes=tuple(mixes))
    return context._runner.run(batch)


SCALES = np.array([[0, 0, 0], [1, 0, 0], [0, 0.5, 0], [-1, 0.25, 2], [0, 0, 1.5], [0.3, 0, 0.3]])
WHICH = [i * 5 % len(SCALES) for i in range(len(TOKENS))]


def mixes(setting: Setting) -> list[Mix]:
    """One mix a row of SCALES; the first is the base."""
    return [setting.mix(*row) for row in SCALES.tolist()]


@pytest.mark.parametrize("lowering", MIXING)
def test_each_token_carries_its_own_adapters(lowering: LoweringName, setting: Setting) -> None:
    """Six mixes in one batch give the reference's logits for a scale a token."""
    with open_context(setting.model, lowering=lowering) as context:
        attach_all(context, setting)
        assert mixes(setting)[0] == EMPTY_MIX
        actual = step(context, mixes(setting), WHICH)
    assert nmse(actual, setting.expected(SCALES[WHICH])) <= EXACT_NMSE


@pytest.mark.parametrize("outputs", [[23], [0], [3, 7, 8, 22], list(range(0, 24, 2))])
@pytest.mark.parametrize("lowering", MIXING)
def test_output_rows_keep_their_adapters(
    lowering: LoweringName, outputs: list[int], setting: Setting
) -> None:
    """Where only some rows give logits, the last FFN and the head still apply each row's own."""
    with open_context(setting.model, lowering=lowering) as context:
        attach_all(context, setting)
        actual = step(context, mixes(setting), WHICH, outputs)
    assert nmse(actual, setting.expected(SCALES[WHICH])[outputs]) <= EXACT_NMSE


@pytest.mark.parametrize("mode", LIBLLAMA_MODES)
@pytest.mark.parametrize("lowering", MIXING)
def test_a_rows_result_does_not_depend_on_the_rest(
    lowering: LoweringName, mode: str, setting: Setting
) -> None:
    """The first tokens' bits are the same whatever adapters later tokens of the step carry."""
    n = 10
    alone = [3] * n + [0] * (len(TOKENS) - n)
    mixed = [3] * n + WHICH[n:]
    with open_context(setting.model, LIBLLAMA_MODES[mode], lowering=lowering) as context:
        attach_all(context, setting)
        expected = step(context, mixes(setting), alone)[:n]
        actual = step(context, mixes(setting), mixed)[:n]
    assert np.array_equal(actual, expected)


@pytest.mark.parametrize("lowering", MIXING)
def test_base_tokens_in_a_mixed_batch_are_the_base(
    lowering: LoweringName, setting: Setting
) -> None:
    """Tokens without adapters, before those that have some, give the bits of a base-only step."""
    n = 10
    with open_context(setting.model, lowering=lowering) as context:
        expected = step(context, [EMPTY_MIX], [0] * len(TOKENS))[:n]
        attach_all(context, setting)
        actual = step(context, mixes(setting), [0] * n + WHICH[n:])[:n]
    assert np.array_equal(actual, expected)


@pytest.mark.parametrize("lowering", MIXING)
def test_the_order_of_mixes_does_not_matter(lowering: LoweringName, setting: Setting) -> None:
    """How a batch numbers its mixes changes no bit; unused mixes do not either."""
    all_mixes = mixes(setting)
    with open_context(setting.model, lowering=lowering) as context:
        attach_all(context, setting)
        expected = step(context, all_mixes, WHICH)
        backwards = [len(all_mixes) - 1 - i for i in WHICH]
        assert np.array_equal(step(context, all_mixes[::-1], backwards), expected)
        unused = [setting.mix(7, 7, 7), *all_mixes]
        assert np.array_equal(step(context, unused, [i + 1 for i in WHICH]), expected)


@pytest.mark.parametrize("lowering", MIXING)
def test_all_mixes_share_one_graph(lowering: LoweringName, setting: Setting) -> None:
    """A uniform batch and a mixed one of one shape are the same graph; stacked has one a width."""
    with open_context(setting.model, lowering=lowering) as context:
        attach_all(context, setting)
        for which in ([1] * len(TOKENS), WHICH, [3] * len(TOKENS), WHICH[::-1]):
            step(context, mixes(setting), which)
        assert context.counters.n_graphs_built == {"routed": 1, "stacked": 2}[lowering]


@pytest.mark.parametrize("lowering", MIXING)
def test_a_mix_in_no_token_builds_the_base_graph(lowering: LoweringName, setting: Setting) -> None:
    """A batch that lists mixes which no token carries has no low-rank nodes."""
    with open_context(setting.model, lowering=lowering) as context:
        step(context, [EMPTY_MIX], [0] * len(TOKENS))
        base = context.counters.n_nodes
        attach_all(context, setting)
        step(context, mixes(setting), [0] * len(TOKENS))
        assert (context.counters.n_nodes, context.counters.n_graphs_built) == (base, 1)
