"""DoRA and biases at run time: several at once, mixed batches, any base type, every lowering.

The oracle is the formula of docs/adapter-format.md in float64, its change of W as a full-rank pair
of the reference model; a bias is checked against a base that has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as GGMLType
from numpy.typing import NDArray

from loragraph.adapters.adapter import Adapter
from loragraph.adapters.combine import combine
from loragraph.adapters.gguf import check_adapter, memory_of, read_adapter, read_header
from loragraph.adapters.mix import EMPTY_MIX, Mix
from loragraph.engine.engine import Engine
from loragraph.engine.model import Model
from loragraph.engine.params import SamplingParams
from loragraph.engine.request import Request
from loragraph.errors import AdapterFormatError, LifecycleError, UnsupportedError
from loragraph.graph.batch import Batch
from tests.gguf_bytes import tensor
from tests.numerics.compare import nmse
from tests.numerics.runs import (
    EXACT,
    LOWERINGS,
    MIXING,
    LoweringName,
    open_context,
    random_tokens,
    run,
)
from tests.reference.adapter import AdapterArrays, read_tensors
from tests.reference.llama import ReferenceLlama
from tests.tiny import TinyAdapter, TinyLlama, write_adapter_raw
from tests.tiny_fold import Folding, write_folded

EXACT_NMSE = 2e-12
TOKENS = random_tokens(16)
TINY = TinyLlama(n_ff=64)


@dataclass(frozen=True)
class TinyDora:
    """A random adapter with magnitudes near the lengths of the rows, or with biases."""

    pairs: TinyAdapter
    bias: bool = False  # instead of magnitudes

    def write(self, path: Path, model: TinyLlama) -> Path:
        """The file, with a vector beside every pair."""
        rng = np.random.default_rng(self.pairs.seed)
        tensors = self.pairs.raw_tensors(model)
        for name, (a, b) in self.pairs.arrays(model).pairs.items():
            n_rows = len(b)
            if self.bias:
                vector = 0.3 * rng.standard_normal(n_rows)
                suffix = "lora_bias"
            else:
                lengths = row_lengths(model.arrays[name], a, b, 0.0, name)
                vector = lengths * rng.uniform(0.6, 1.5, n_rows)
                suffix = "lora_magnitude"
            tensors.append(tensor(f"{name}.{suffix}", vector.astype(np.float32)))
        return write_adapter_raw(path, self.pairs.keys(), tensors)


def row_lengths(
    w: NDArray[Any], a: NDArray[Any], b: NDArray[Any], scale: float, name: str
) -> NDArray[np.float64]:
    """||W + s B A|| row by row; of the token table over the tokens."""
    w, a, b = (part.astype(np.float64) for part in (w, a, b))
    if name == "token_embd.weight":
        return np.asarray(np.linalg.norm(w + scale * (a @ b.T), axis=0))
    return np.asarray(np.linalg.norm(w + scale * (b @ a), axis=1))


def full_rank(path: Path, base: Mapping[str, NDArray[np.float32]], alpha: float) -> AdapterArrays:
    """What a DoRA file changes of W, each as a pair of full rank with scale 1."""
    stored = read_tensors(path)
    pairs = {}
    for name in {key.rsplit(".", 1)[0] for key in stored}:
        a, b = (stored[f"{name}.lora_{half}"].astype(np.float64) for half in "ab")
        w = base[name].astype(np.float64)
        scale = alpha / b.shape[1]
        ratio = stored[f"{name}.lora_magnitude"] / row_lengths(w, a, b, scale, name)
        if name == "token_embd.weight":
            change = (w + scale * (a @ b.T)) * ratio - w
            pairs[name] = (change.astype(np.float32), np.eye(len(b), dtype=np.float32))
        else:
            change = (w + scale * (b @ a)) * ratio[:, None] - w
            pairs[name] = (change.astype(np.float32), np.eye(len(b), dtype=np.float32))
    return AdapterArrays(0.0, pairs)


DORAS = (
    TinyDora(TinyAdapter(seed=1, embeddings=True, output=True)),
    TinyDora(TinyAdapter(seed=2, rank=7, targets=("attn_q", "ffn_down"), alpha=5.0)),
)
PLAIN = TinyAdapter(seed=3, rank=5, targets=("attn_q", "attn_v"), output=True)


class Setting:
    """A model with two DoRA adapters and a plain one, and the float64 reference."""

    def __init__(self, folder: Path, tiny: TinyLlama = TINY) -> None:
        base = tiny.write(folder / "m.gguf")
        self.base = base
        self.reference = ReferenceLlama.load(base)
        self.model = Model.load(base, n_threads=1)
        values = read_tensors(base)
        self.paths = [dora.write(folder / f"{i}.gguf", tiny) for i, dora in enumerate(DORAS)]
        self.arrays = [
            full_rank(path, values, dora.pairs.alpha or 0.0)
            for path, dora in zip(self.paths, DORAS, strict=True)
        ]
        self.paths.append(folder / "plain.gguf")
        self.arrays.append(PLAIN.write(self.paths[-1], tiny))
        self.adapters = [self.model.load_adapter(path) for path in self.paths]

    def mix(self, *scales: float) -> Mix:
        """A mix by the adapters' scales."""
        return Mix(dict(zip(self.adapters, scales, strict=True)))

    def expected(self, scales: NDArray[np.float64]) -> NDArray[np.float64]:
        """Reference logits of TOKENS; scales (n_tokens, n_adapters)."""
        active = list(zip(self.arrays, scales.T, strict=True))
        out: NDArray[np.float64] = self.reference.logits(TOKENS, active)
        return out


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    """Shared by all tests of this module."""
    return Setting(tmp_path_factory.mktemp("dora"))


@pytest.mark.parametrize(
    "scales", [(1, 0, 0), (0.5, 0, 0), (-1, 0, 0), (1, 1, 0), (0.3, -0.7, 1.5), (0, 0, 1)]
)
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_several_with_any_user_scales(
    lowering: LoweringName, scales: tuple[float, ...], setting: Setting
) -> None:
    """The user's scale acts on the whole change, several add up, beside plain adapters too."""
    with open_context(setting.model, EXACT, lowering=lowering) as context:
        actual = run(context, TOKENS, dict(zip(setting.adapters, scales, strict=True)))
    wanted = setting.expected(np.tile(np.array(scales, np.float64), (len(TOKENS), 1)))
    assert nmse(actual, wanted) <= EXACT_NMSE


@pytest.mark.parametrize("outputs", [None, [3, 7, 15]])
@pytest.mark.parametrize("lowering", MIXING)
def test_each_token_carries_its_own(
    lowering: LoweringName, outputs: list[int] | None, setting: Setting
) -> None:
    """Tokens with and without such adapters share a batch, output rows keep theirs."""
    table = np.array([[0, 0, 0], [1, 0, 0], [0, 0.5, 0], [-1, 0.25, 2], [0, 0, 1.5]], np.float64)
    which = np.array([i * 3 % len(table) for i in range(len(TOKENS))], np.int32)
    chosen = np.arange(len(TOKENS)) if outputs is None else np.array(outputs)
    plain = Batch.of_one(np.asarray(TOKENS, np.int32), 0, EMPTY_MIX, chosen.astype(np.int32))
    batch = replace(plain, mix=which, mixes=tuple(setting.mix(*row) for row in table.tolist()))
    with open_context(setting.model, EXACT, lowering=lowering) as context:
        context.set_adapters(dict.fromkeys(setting.adapters, 1.0))
        actual = context._runner.run(batch)
    assert nmse(actual, setting.expected(table[which])[chosen]) <= EXACT_NMSE


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_step_without_vectors_has_none_of_their_nodes(
    lowering: LoweringName, setting: Setting
) -> None:
    """Base and plain adapters cost what they did before a DoRA adapter came."""
    with open_context(setting.model, EXACT, lowering=lowering) as context:
        base = run(context, TOKENS, {})
        n_base = context.counters.n_nodes
        run(context, TOKENS, {setting.adapters[0]: 1.0})
        n_dora = context.counters.n_nodes
        assert n_dora > n_base
        np.testing.assert_array_equal(run(context, TOKENS, {}), base)
        assert context.counters.n_nodes == n_base
        assert n_dora <= context.counters.node_budget


def test_adapters_come_and_go(setting: Setting, tmp_path: Path) -> None:
    """More adapters one after the other than a table has slots: each gives its own logits."""
    paths = [
        TinyDora(TinyAdapter(seed=10 + i, targets=("attn_k",))).write(tmp_path / f"{i}.gguf", TINY)
        for i in range(6)
    ]
    values = read_tensors(setting.base)
    with open_context(setting.model, EXACT) as context:
        for _ in range(2):
            for path in paths:
                with setting.model.load_adapter(path) as adapter:
                    actual = run(context, TOKENS, {adapter: 1.0})
                    context.set_adapters({})
                arrays = full_rank(path, values, 8.0)
                wanted = setting.reference.logits(TOKENS, [(arrays, 1.0)])
                assert nmse(actual, wanted) <= EXACT_NMSE
        assert context.counters.n_graphs_built == 1


@pytest.mark.parametrize("kind", [GGMLType.F16, GGMLType.BF16, GGMLType.Q8_0, GGMLType.Q4_0])
def test_the_factor_comes_of_the_base_as_it_is_in_the_file(kind: GGMLType, tmp_path: Path) -> None:
    """On a quantised base the rows' lengths are those of the dequantised weights."""
    tiny = replace(TINY, weight_type=kind)
    base = tiny.write(tmp_path / "m.gguf")
    path = DORAS[0].write(tmp_path / "a.gguf", tiny)
    wanted = full_rank(path, read_tensors(base), 8.0)
    values = read_tensors(base)
    with Model.load(base, n_threads=1) as model:
        adapter = model.load_adapter(path)
        for name, vectors in adapter.vectors.items():
            assert vectors.gain is not None
            pair = adapter.pairs[name]
            a, b = adapter.array(pair.a), adapter.array(pair.b)
            changed = values[name] + wanted.pairs[name][0]
            low = values[name] + pair.scale * (a @ b.T if "embd" in name else b @ a)
            rows = 1 + vectors.gain
            again = low * (rows if "embd" in name else rows[:, None])
            assert nmse(again, changed) <= 1e-12


def test_a_scale_tensor_counts(tmp_path: Path) -> None:
    """A base with w_s: the length is that of w_s W + s B A."""
    tiny = replace(TINY, scales=True)
    base = tiny.write(tmp_path / "m.gguf")
    path = TinyDora(TinyAdapter(targets=("attn_q",), layers=(0,))).write(tmp_path / "a", tiny)
    stored, values = read_tensors(path), read_tensors(base)
    name = "blk.0.attn_q.weight"
    a, b = stored[f"{name}.lora_a"], stored[f"{name}.lora_b"]
    lengths = row_lengths(values[name] * values["blk.0.attn_q.scale"], a, b, 2.0, name)
    with Model.load(base, n_threads=1) as model:
        gain = model.load_adapter(path).vectors[name].gain
        assert gain is not None
        np.testing.assert_allclose(gain, stored[f"{name}.lora_magnitude"] / lengths - 1, atol=1e-6)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_bias_is_added_at_the_adapters_scale(lowering: LoweringName, tmp_path: Path) -> None:
    """A bias of lora_B is the base's bias plus u s b: the same logits as a base that has it."""
    tiny = replace(TINY, attn_bias=True, ffn_bias=True)
    base = tiny.write(tmp_path / "m.gguf")
    pairs = TinyAdapter(seed=4)
    path = TinyDora(pairs, bias=True).write(tmp_path / "a.gguf", tiny)
    stored = read_tensors(path)
    plain = ReferenceLlama.load(base)
    user, scale = 0.5, 2.0
    weights = dict(plain.weights)
    for name in pairs.arrays(tiny).pairs:
        bias = name.removesuffix("weight") + "bias"
        weights[bias] = weights[bias] + user * scale * stored[f"{name}.lora_bias"]
    wanted = replace(plain, weights=weights).logits(TOKENS, [(pairs.arrays(tiny), user)])
    with Model.load(base, n_threads=1) as model:
        adapter = model.load_adapter(path)
        with open_context(model, EXACT, lowering=lowering) as context:
            assert nmse(run(context, TOKENS, {adapter: user}), wanted) <= EXACT_NMSE


def test_frozen_into_one_they_do_the_same(setting: Setting) -> None:
    """A combined adapter carries gains and shifts, at any user scale of its own."""
    scales = (0.3, -0.7, 1.5)
    with combine(setting.mix(*scales)) as combined:
        setting.model.adopt_adapter(combined)
        with open_context(setting.model, EXACT) as context:
            actual = run(context, TOKENS, {combined: 0.5})
            context.set_adapters({})
    wanted = setting.expected(np.tile(0.5 * np.array(scales), (len(TOKENS), 1)))
    assert nmse(actual, wanted) <= EXACT_NMSE


def test_through_the_engine_alone_and_together(setting: Setting) -> None:
    """Requests with unlike adapters at the same time give what each gives alone."""
    names = ["dora", "other", "plain"]
    greedy = SamplingParams(temperature=0.0, max_tokens=6)
    mixes: list[dict[str, float]] = [{}, {"dora": 1.0}, {"other": 0.7}, {"dora": 0.5, "plain": 1.0}]
    requests = [Request(TOKENS, mix, greedy) for mix in mixes]
    with Engine(
        setting.model, dict(zip(names, setting.paths, strict=True)), kv_type="f32", n_ctx=512,
        n_threads=1,
    ) as engine:  # fmt: skip
        together = engine.generate_batch(requests)
        alone = [engine.run(replace(request, cache_salt="x")) for request in requests]
    assert [result.tokens for result in together] == [result.tokens for result in alone]
    assert len({result.tokens for result in alone}) > 1


def digest_of(setting: Setting, dora: TinyDora, path: Path) -> str:
    """The digest of an adapter as loaded for the setting's model."""
    with setting.model.load_adapter(dora.write(path, TINY)) as adapter:
        return adapter.digest


def test_the_vectors_are_part_of_the_identity(setting: Setting, tmp_path: Path) -> None:
    """Equal pairs with other magnitudes are another adapter; loading twice gives one digest."""
    pairs = TinyAdapter(seed=1)
    dora = digest_of(setting, TinyDora(pairs), tmp_path / "a")
    assert dora == digest_of(setting, TinyDora(pairs), tmp_path / "b")
    assert dora != digest_of(setting, TinyDora(pairs, bias=True), tmp_path / "c")


def test_memory_counts_the_vectors(setting: Setting) -> None:
    """What the header promises is what the loaded adapter takes at most."""
    lib = setting.model.lib
    nbytes, _ = memory_of(read_header(lib, setting.paths[0], setting.model.base_info))
    assert nbytes >= setting.adapters[0].nbytes


def test_without_the_base_it_can_be_read_but_not_run(setting: Setting) -> None:
    """Tools that look at a file need no weights; a graph would need them."""
    with read_adapter(setting.model.lib, setting.paths[0], setting.model.base_info) as adapter:
        assert isinstance(adapter, Adapter)
        with pytest.raises(LifecycleError, match="without the base's weights"):
            setting.model.adopt_adapter(adapter)


NAME = "blk.0.attn_q.weight"
BAD: dict[str, tuple[dict[str, NDArray[Any]], str]] = {
    "length": ({f"{NAME}.lora_magnitude": np.ones(5, np.float32)}, "one value for each of the 64"),
    "NaN": ({f"{NAME}.lora_bias": np.full(64, np.nan, np.float32)}, "finite"),
    "no pair": ({"blk.1.attn_q.weight.lora_magnitude": np.ones(64, np.float32)}, "missing one"),
    "lookup": (
        {
            "token_embd.weight.lora_a": np.ones((320, 2), np.float32),
            "token_embd.weight.lora_b": np.ones((64, 2), np.float32),
            "token_embd.weight.lora_bias": np.ones(64, np.float32),
        },
        "a lookup has no bias",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_vector_is_refused(case: str, setting: Setting, tmp_path: Path) -> None:
    """Length, values, a missing pair, a place where it means nothing: the load and the check."""
    extra, message = BAD[case]
    pairs = TinyAdapter(targets=("attn_q",), layers=(0,))
    tensors = pairs.raw_tensors(TINY) + [tensor(name, array) for name, array in extra.items()]
    path = write_adapter_raw(tmp_path / "a.gguf", pairs.keys(), tensors)
    with pytest.raises(AdapterFormatError, match=message):
        setting.model.load_adapter(path)
    found = check_adapter(setting.model.lib, path, setting.model.base_info)
    assert any(message in str(problem) for problem in found)


def test_dora_on_a_folded_base_is_refused(tmp_path: Path) -> None:
    """A folded base's rows are rotated: their lengths with B A added would be wrong."""
    base = write_folded(TINY, Folding(), tmp_path / "m.gguf")
    path = DORAS[1].write(tmp_path / "a.gguf", TINY)
    with Model.load(base, n_threads=1) as model:
        with pytest.raises(UnsupportedError, match="Hadamard-folded base"):
            model.load_adapter(path)
        biased = TinyDora(TinyAdapter(targets=("attn_q",)), bias=True)
        model.load_adapter(biased.write(tmp_path / "b.gguf", TINY))  # needs no lengths


def test_dora_of_a_table_that_is_the_head_too_is_refused(tmp_path: Path) -> None:
    """A lookup's magnitude means nothing for the head: it is refused, not dropped."""
    tiny = replace(TINY, tied=True)
    base = tiny.write(tmp_path / "m.gguf")
    path = TinyDora(TinyAdapter(embeddings=True, targets=())).write(tmp_path / "a.gguf", tiny)
    with Model.load(base, n_threads=1) as model:
        with pytest.raises(UnsupportedError, match="DoRA of a token table"):
            model.load_adapter(path)
        model.load_adapter(path, tied_output=False)
