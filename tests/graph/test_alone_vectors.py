"""Biases and changes of norms without a low-rank pair: every lowering, family and mix.

The oracle is the float64 reference with the vectors in its weights; where tokens carry unlike
mixes, the branch lowering one token at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from loragraph.adapters.adapter import Adapter
from loragraph.adapters.combine import combine
from loragraph.adapters.gguf import memory_of, read_header
from loragraph.adapters.mix import EMPTY_MIX, Mix
from loragraph.engine.engine import Engine
from loragraph.engine.model import Model
from loragraph.engine.params import SamplingParams
from loragraph.engine.request import Request
from loragraph.errors import AdapterFormatError
from loragraph.graph.batch import Batch
from loragraph.tools.merge import merge
from tests.gguf_bytes import tensor
from tests.numerics.compare import nmse
from tests.numerics.runs import (
    EXACT,
    LOWERINGS,
    MIXING,
    LoweringName,
    loragraph_logits,
    open_context,
    random_tokens,
    run,
)
from tests.reference.llama import ReferenceLlama
from tests.tiny import TinyAdapter, TinyLlama, TinyModel, write_adapter_raw
from tests.tiny_experts import TINY_EXPERTS
from tests.tiny_families import TINY_FAMILIES

Array = NDArray[np.float32]

BOUND = 2e-12
TINY = TinyLlama(attn_bias=True)
TOKENS = random_tokens(14)
NORMS = tuple(name for name in TINY.arrays if name.endswith("_norm.weight"))
BIASES = ("blk.0.attn_q.weight", "blk.1.attn_v.weight", "blk.1.ffn_down.weight", "output.weight")
"""The last two have no bias in the base."""


def vectors(names: tuple[str, ...], sizes: Mapping[str, int], seed: int) -> dict[str, Array]:
    """A random change for each name, of norms `lora_delta`, of others `lora_bias`."""
    rng = np.random.default_rng(seed)
    return {
        f"{name}.lora_{'delta' if name.endswith('_norm.weight') else 'bias'}": (
            0.3 * rng.standard_normal(sizes[name])
        ).astype(np.float32)
        for name in names
    }


def sizes_of(model: TinyModel) -> dict[str, int]:
    """The number of rows of matrices, of values of vectors."""
    return {name: array.shape[0] for name, array in model.arrays.items()}


class Setting:
    """A model, adapters of it (norms; biases and pairs; norms, biases and pairs), the reference."""

    PAIRS: tuple[TinyAdapter | None, ...] = (
        None,
        TinyAdapter(seed=4, targets=("ffn_up",)),
        TinyAdapter(seed=5, rank=3, targets=("attn_q", "ffn_down"), alpha=3.0),
    )
    NAMES = (NORMS, BIASES, (*NORMS[:2], "blk.1.attn_v.weight", "output.weight"))

    def __init__(self, folder: Path) -> None:
        self.base = TINY.write(folder / "m.gguf")
        self.reference = ReferenceLlama.load(self.base)
        self.model = Model.load(self.base, n_threads=1)
        self.vectors = [
            vectors(names, sizes_of(TINY), seed) for seed, names in enumerate(self.NAMES)
        ]
        self.paths = []
        for i, (pairs, own) in enumerate(zip(self.PAIRS, self.vectors, strict=True)):
            given = pairs or TinyAdapter(targets=())
            raw = [*given.raw_tensors(TINY), *(tensor(name, one) for name, one in own.items())]
            self.paths.append(write_adapter_raw(folder / f"{i}.gguf", given.keys(), raw))
        self.adapters = [self.model.load_adapter(path) for path in self.paths]

    def mix(self, *scales: float) -> dict[Adapter, float]:
        """User scales by adapter."""
        return dict(zip(self.adapters, scales, strict=True))

    def expected(self, *scales: float) -> NDArray[np.float64]:
        """The reference's logits of TOKENS."""
        weights = dict(self.reference.weights)
        active = []
        for scale, pairs, own in zip(scales, self.PAIRS, self.vectors, strict=True):
            if pairs is not None:
                active.append((pairs.arrays(TINY), scale))
            for name, values in own.items():
                target = name.replace(".lora_delta", "").replace("weight.lora_bias", "bias")
                weights[target] = weights.get(target, 0) + scale * values.astype(np.float64)
        of_head = weights.pop("output.bias", np.zeros(TINY.n_vocab))  # not of this family's files
        return np.asarray(replace(self.reference, weights=weights).logits(TOKENS, active)) + of_head


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    """Shared by all tests of this module."""
    return Setting(tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("scales", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (-0.5, 0.7, 1.5)])
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_any_user_scales(
    lowering: LoweringName, scales: tuple[float, ...], setting: Setting
) -> None:
    """A norm's weight is w + sum of u d, a bias is added u times, beside pairs and each other."""
    with open_context(setting.model, EXACT, lowering=lowering) as context:
        actual = run(context, TOKENS, setting.mix(*scales))
    assert nmse(actual, setting.expected(*scales)) <= BOUND


@pytest.mark.parametrize("outputs", [None, [3, 7, 13]])
@pytest.mark.parametrize("lowering", MIXING)
def test_each_token_carries_its_own(
    lowering: LoweringName, outputs: list[int] | None, setting: Setting
) -> None:
    """Tokens with and without such adapters share a batch: as branch gives token by token."""
    table = [(0, 0, 0), (1, 0, 0), (0, 0.5, 0), (-1, 0.25, 2), (0, 0, 1.5)]
    which = np.array([i * 3 % len(table) for i in range(len(TOKENS))], np.int32)
    chosen = np.arange(len(TOKENS)) if outputs is None else np.array(outputs)
    plain = Batch.of_one(np.asarray(TOKENS, np.int32), 0, EMPTY_MIX, chosen.astype(np.int32))
    mixes = tuple(Mix(setting.mix(*row)) for row in table)
    with open_context(setting.model, EXACT, lowering=lowering) as context:
        context.set_adapters(setting.mix(1, 1, 1))
        actual = context._runner.run(replace(plain, mix=which, mixes=mixes))
    with open_context(setting.model, EXACT, lowering="branch") as context:
        rows = []
        for token, row in zip(TOKENS, which, strict=True):
            context.set_adapters(setting.mix(*table[row]))
            rows.append(context.decode([token])[0])
    assert nmse(actual, np.array(rows)[chosen]) <= BOUND


@pytest.mark.parametrize("lowering", MIXING)
def test_rows_of_logits_beside_rows_of_states(lowering: LoweringName, setting: Setting) -> None:
    """A bias of the head counts where other outputs of the step give their state."""
    outputs = np.array([3, 7, 13], np.int32)
    plain = Batch.of_one(np.asarray(TOKENS, np.int32), 0, Mix(setting.mix(0, 1, 1)), outputs)
    with open_context(setting.model, EXACT, lowering=lowering) as context:
        context.set_adapters(setting.mix(1, 1, 1))
        whole = context._runner.run(plain).copy()
        context._runner.run(replace(plain, mixes=(Mix(setting.mix(1, 0, 0)),)))  # other scales
        logits = context._runner.run(replace(plain, n_states=1))[:2]
    assert nmse(logits, whole[:2]) <= BOUND


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_the_base_keeps_its_nodes_and_bits(lowering: LoweringName, setting: Setting) -> None:
    """Steps without such an adapter are what they were before one came."""
    with open_context(setting.model, EXACT, lowering=lowering) as context:
        base = run(context, TOKENS, {})
        n_base = context.counters.n_nodes
        run(context, TOKENS, setting.mix(1, 0, 0))
        assert n_base < context.counters.n_nodes <= context.counters.node_budget
        np.testing.assert_array_equal(run(context, TOKENS, {}), base)
        assert context.counters.n_nodes == n_base


def test_base_tokens_keep_their_bits_beside_norms(setting: Setting) -> None:
    """In a step with a changed norm a token of the base reads exactly the base's weight."""
    tokens = np.asarray(TOKENS, np.int32)
    plain = Batch.of_one(tokens, 0, EMPTY_MIX, np.arange(len(tokens), dtype=np.int32))
    which = np.array([0] * 7 + [1] * 7, np.int32)
    with open_context(setting.model, EXACT) as context:
        context.set_adapters(setting.mix(1, 0, 0))
        mixed = context._runner.run(
            replace(plain, mix=which, mixes=(EMPTY_MIX, Mix(setting.mix(1, 0, 0))))
        ).copy()
        context.set_adapters({})
        np.testing.assert_array_equal(mixed[:7], context._runner.run(plain)[:7])


def test_one_graph_for_all_adapters(setting: Setting, tmp_path: Path) -> None:
    """Which adapters a batch has is data: others of the same kinds build no new graph."""
    with open_context(setting.model, EXACT) as context:
        run(context, TOKENS, setting.mix(1, 0, 0))
        n_built = context.counters.n_graphs_built
        for seed in (7, 8):
            own = vectors(NORMS, sizes_of(TINY), seed)
            path = write_adapter_raw(tmp_path / f"{seed}.gguf", TinyAdapter().keys(), own)
            with setting.model.load_adapter(path) as adapter:
                run(context, TOKENS, {adapter: 0.5})
                context.set_adapters({})
        assert context.counters.n_graphs_built == n_built


@pytest.mark.parametrize("arch", [*TINY_FAMILIES, *TINY_EXPERTS])
def test_every_norm_of_every_family(arch: str, tmp_path: Path) -> None:
    """Each norm's change counts: alone it moves the logits, and all of them are the merged file."""
    tiny = {**TINY_FAMILIES, **TINY_EXPERTS}[arch]()
    base = tiny.write(tmp_path / "m.gguf")
    with Model.load(base, n_threads=1) as model:
        sizes = {
            name: target.ne[0]
            for name, target in model.base_info.targets.items()
            if name.endswith("_norm.weight")
        }
        assert len(sizes) > 2 * tiny.n_layer
        own = vectors(tuple(sizes), sizes, 1)
        with open_context(model, EXACT) as context:
            plain = run(context, TOKENS, {})
            for name, values in own.items():
                one = write_adapter_raw(
                    tmp_path / "one.gguf", TinyAdapter().keys(arch), {name: values}
                )
                with model.load_adapter(one) as adapter:
                    assert nmse(run(context, TOKENS, {adapter: 1.0}), plain) > 1e-7, name
                    context.set_adapters({})
    path = write_adapter_raw(tmp_path / "a.gguf", TinyAdapter().keys(arch), own)
    merge(base, {path: 0.5}, tmp_path / "merged.gguf")
    wanted = loragraph_logits(tmp_path / "merged.gguf", [], [()], TOKENS, EXACT)[()]
    for lowering in LOWERINGS:
        actual = loragraph_logits(base, [path], [(0.5,)], TOKENS, EXACT, lowering=lowering)
        assert nmse(actual[0.5,], wanted) <= 1e-10


def test_frozen_into_one_they_do_the_same(setting: Setting) -> None:
    """A combined adapter carries them, at any user scale of its own, and counts them."""
    with combine(Mix(setting.mix(0.3, -0.7, 1.5))) as combined:
        setting.model.adopt_adapter(combined)
        assert set(combined.report.alone) == set(NORMS) | {"blk.0.attn_q.weight"} - set(
            combined.pairs
        ) | {"blk.1.attn_v.weight", "output.weight"}
        with open_context(setting.model, EXACT) as context:
            actual = run(context, TOKENS, {combined: 0.5})
            context.set_adapters({})
    assert nmse(actual, setting.expected(0.15, -0.35, 0.75)) <= BOUND


def test_through_the_engine_alone_and_together(setting: Setting) -> None:
    """Requests with unlike adapters at the same time give what each gives alone."""
    names = ["norms", "biases", "both"]
    greedy = SamplingParams(temperature=0.0, max_tokens=6)
    mixes: list[dict[str, float]] = [{}, {"norms": 1.0}, {"biases": 0.7}, {"norms": 0.5, "both": 1}]
    requests = [Request(TOKENS, mix, greedy) for mix in mixes]
    with Engine(
        setting.model, dict(zip(names, setting.paths, strict=True)), kv_type="f32", n_ctx=512,
        n_threads=1,
    ) as engine:  # fmt: skip
        header = engine.resolve("norms").header
        assert (header.rank_max, header.n_targets) == (0, len(NORMS))
        assert header.coverage["attn_norm"] == (2, 2)
        together = engine.generate_batch(requests)
        alone = [engine.run(replace(request, cache_salt="x")) for request in requests]
    assert [result.tokens for result in together] == [result.tokens for result in alone]
    assert len({result.tokens for result in alone}) > 1


def test_they_are_part_of_the_identity_and_of_the_memory(setting: Setting, tmp_path: Path) -> None:
    """Another value is another adapter; the header promises what the loaded one takes."""
    own = vectors(NORMS, sizes_of(TINY), 0)
    digests = set()
    for i, values in enumerate((own, own, {**own, "output_norm.weight.lora_delta": own[
        "output_norm.weight.lora_delta"] + 1})):  # fmt: skip
        path = write_adapter_raw(tmp_path / f"{i}.gguf", TinyAdapter().keys(), values)
        with setting.model.load_adapter(path) as adapter:
            digests.add(adapter.digest)
    assert len(digests) == 2
    assert setting.adapters[0].digest in digests
    for path, loaded in zip(setting.paths, setting.adapters, strict=True):
        header = read_header(setting.model.lib, path, setting.model.base_info)
        assert memory_of(header)[0] >= loaded.nbytes


def test_zeros_alone_would_change_nothing(setting: Setting, tmp_path: Path) -> None:
    """As with a pair whose B is zero."""
    zeros = {"output_norm.weight.lora_delta": np.zeros(TINY.n_embd, np.float32)}
    path = write_adapter_raw(tmp_path / "a.gguf", TinyAdapter().keys(), zeros)
    with pytest.raises(AdapterFormatError, match="would change nothing"):
        setting.model.load_adapter(path)
