"""Each family with experts, its optional parts on and off, against libllama, float64 and itself.

Where two experts are nearly tied, a last bit can choose the other one. The seeds here have no such
tie in the exact modes; where activations are rounded to F16 or to blocks, the bounds allow for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as GGMLType

from loragraph.adapters.mix import EMPTY_MIX, Mix
from loragraph.engine.context import Context
from loragraph.engine.model import Model
from loragraph.graph.batch import Batch
from tests.numerics.compare import as_near, nmse
from tests.numerics.runs import (
    EXACT,
    LIBLLAMA_MODES,
    LOWERINGS,
    MIXING,
    Logits,
    LoweringName,
    Mode,
    Scales,
    libllama_logits,
    loragraph_logits,
    open_context,
    random_tokens,
    run,
)
from tests.reference.adapter import AdapterArrays
from tests.reference.experts import ReferenceExperts
from tests.reference.merge import merge
from tests.tiny import TinyAdapter, TinyModel
from tests.tiny_experts import EXPERT_VARIANTS, TINY_EXPERTS, TinyDeepSeek2, TinyExperts

TOKENS = random_tokens(150)
CASES: tuple[Scales, ...] = ((0, 0), (1, 0), (-0.5, 0), (0.5, 1))
CELLS = Mode("f32", "cells")

# NMSE, measured and then about tripled.
EXACT_BOUND = 5e-12  # float32 sums in another order, up to 27 layers
HALF_BOUND = 1e-6  # F16 cells
DEEP_BOUND = 3e-4  # F16 cells and 26 layers, in one of which another expert may be chosen
BLOCK_BOUND = 3e-2  # to float64, where experts round their activations to blocks


def seen_by_libllama(model: TinyModel) -> TinyAdapter:
    """An adapter of every matrix whose adapter libllama does not ignore.

    Of latent attention and of deepseek2's head it multiplies the weights alone.
    """
    targets = model.targets
    if model.arch == "deepseek2":
        targets = tuple(
            name for name in targets if name.startswith("ffn_") or name == "attn_output"
        )
    is_apart = not model.tied  # libllama aborts on an adapter of a tied table
    output = is_apart and model.arch != "deepseek2"
    return TinyAdapter(seed=1, targets=targets, output=output, embeddings=is_apart, b_std=0.05)


class Files:
    """A variant's files, with two adapters of unlike ranks: `every` and one of a few matrices."""

    def __init__(self, folder: Path, model: TinyModel, every: TinyAdapter) -> None:
        self.model = model
        self.base = model.write(folder / "m.gguf")
        stacks = ("ffn_gate_up_exps", "ffn_up_exps", "ffn_down_exps")
        few = TinyAdapter(
            seed=5,
            rank=7,
            alpha=None,
            targets=("attn_output", *(name for name in stacks if name in model.targets)),
            layers=(1,),
            b_std=0.02,
        )
        self.adapters = [folder / "every.gguf", folder / "few.gguf"]
        self.arrays: list[AdapterArrays] = [
            one.write(path, model) for one, path in zip((every, few), self.adapters, strict=True)
        ]


@pytest.fixture(params=EXPERT_VARIANTS)
def model(request: pytest.FixtureRequest) -> TinyModel:
    """One variant."""
    return EXPERT_VARIANTS[request.param]


def same_bits(model: TinyModel, mode: str, lowering: LoweringName, scales: Scales) -> bool:
    """Whether libllama and loragraph make the same operations in the same order.

    qwen2moe's sigmoid is one operation here. Plain attention gives a head's values to `attn_v_b`
    in one piece there and side by side with the other heads' here, which ggml multiplies otherwise.
    """
    if model.arch == "qwen2moe" or (mode == "exact" and "attn_v_b" in model.targets):
        return False
    return not any(scales) or (lowering == "branch" and not scales[1])


@pytest.mark.parametrize("mode", LIBLLAMA_MODES)
def test_agrees_with_libllama(mode: str, model: TinyModel, tmp_path: Path) -> None:
    """Base, one adapter of every matrix, and two: with the order of operations equal the bits are,
    otherwise the logits are within the bound, in every lowering.

    Quantised experts miss the bound of F16 cells on some processors (gpt-oss in MXFP4 on one with
    AVX2: 1.4e-6)."""
    files = Files(tmp_path, model, seen_by_libllama(model))
    expected = libllama_logits(files.base, files.adapters, CASES, TOKENS, LIBLLAMA_MODES[mode])
    for lowering in LOWERINGS:
        actual = loragraph_logits(
            files.base, files.adapters, CASES, TOKENS, LIBLLAMA_MODES[mode], lowering=lowering
        )
        for scales in CASES:
            half = DEEP_BOUND if model.n_layer > 20 else HALF_BOUND
            bound = EXACT_BOUND if mode == "exact" else half
            allowed = 0 if same_bits(model, mode, lowering, scales) else bound
            if nmse(actual[scales], expected[scales]) <= allowed:
                continue
            assert allowed, (lowering, scales)
            assert model.types, (lowering, scales)
            assert mode == "flash", (lowering, scales)
            active = list(zip(files.arrays, scales, strict=True))
            exact = ReferenceExperts.read(files.base, 256).logits(TOKENS, active)
            assert as_near(actual[scales], expected[scales], exact), (lowering, scales)
    assert nmse(expected[CASES[1]], expected[CASES[0]]) > 1e-3


def test_cells_agree_with_libllama(model: TinyModel, tmp_path: Path) -> None:
    """Attention over cells gives the exact mode's logits, whole and in chunks that end anywhere."""
    files = Files(tmp_path, model, seen_by_libllama(model))
    expected = libllama_logits(files.base, files.adapters, CASES, TOKENS)
    for chunk in (0, 37):
        actual = loragraph_logits(
            files.base, files.adapters, CASES, TOKENS, CELLS, lowering="routed", chunk=chunk
        )
        for scales in CASES:
            assert nmse(actual[scales], expected[scales]) <= EXACT_BOUND, (chunk, scales)


def test_agrees_with_the_reference(model: TinyModel, tmp_path: Path) -> None:
    """Adapters of every matrix, those that libllama ignores too: the float64 reading's logits."""
    every = TinyAdapter(seed=1, output=not model.tied, embeddings=True, b_std=0.05)
    files = Files(tmp_path, model, every)
    reference = ReferenceExperts.read(files.base, 256)
    tokens = TOKENS[:70]
    actual = loragraph_logits(files.base, files.adapters, CASES, tokens, CELLS, lowering="routed")
    for scales in CASES:
        expected = reference.logits(tokens, list(zip(files.arrays, scales, strict=True)))
        bound = BLOCK_BOUND if model.types else EXACT_BOUND
        assert nmse(actual[scales], expected) <= bound, scales


@pytest.mark.parametrize("arch", TINY_EXPERTS)
def test_factors_of_all_weights_agree_with_the_reference(arch: str, tmp_path: Path) -> None:
    """Factors of experts, shared experts and heads too, which libllama reads in part and multiplies
    by in llama and qwen3moe alone: the float64 reading's logits, with an adapter and without."""
    tiny = TINY_EXPERTS[arch](scales=True)
    files = Files(tmp_path, tiny, TinyAdapter(seed=1, output=True, embeddings=True, b_std=0.05))
    reference, tokens = ReferenceExperts.read(files.base, 256), TOKENS[:20]
    cases = CASES[:2]
    exact = [
        reference.logits(tokens, list(zip(files.arrays, scales, strict=True))) for scales in cases
    ]
    for lowering in LOWERINGS:
        actual = loragraph_logits(files.base, files.adapters, cases, tokens, lowering=lowering)
        for scales, expected in zip(cases, exact, strict=True):
            assert nmse(actual[scales], expected) <= EXACT_BOUND, (lowering, scales)


@pytest.mark.parametrize("arch", TINY_EXPERTS)
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_runtime_is_merged(lowering: LoweringName, arch: str, tmp_path: Path) -> None:
    """Adapters of every matrix, router and table and head included, are the weights merged."""
    tiny = TINY_EXPERTS[arch]()
    base = tiny.write(tmp_path / "m.gguf")
    adapter = TinyAdapter(embeddings=True, output=True, b_std=0.05)
    arrays = adapter.write(tmp_path / "a.gguf", tiny)
    merged = merge(base, [(arrays, 0.5)], tmp_path / "x.gguf")
    expected = loragraph_logits(merged, [], [()], TOKENS)[()]
    with Model.load(base, n_threads=1) as loaded:
        one = loaded.load_adapter(tmp_path / "a.gguf")
        with open_context(loaded, EXACT, lowering=lowering) as context:
            assert nmse(run(context, TOKENS, {one: 0.5}), expected) <= EXACT_BOUND


SCALES = np.array([[0, 0], [1, 0], [0, 0.5], [-1, 2], [0.3, 0.3]])
WHICH = [i * 3 % len(SCALES) for i in range(40)]


def step(context: Context, mixes: Sequence[Mix], which: Sequence[int]) -> Logits:
    """One step from the first cell on, each token with its mix."""
    chosen = np.arange(len(which), dtype=np.int32)
    plain = Batch.of_one(np.asarray(TOKENS[: len(which)], np.int32), 0, EMPTY_MIX, chosen)
    batch = replace(plain, mix=np.asarray(which, np.int32), mixes=tuple(mixes))
    return context._runner.run(batch)


@pytest.mark.parametrize("arch", TINY_EXPERTS)
@pytest.mark.parametrize("lowering", MIXING)
def test_each_token_carries_its_own_adapters(
    lowering: LoweringName, arch: str, tmp_path: Path
) -> None:
    """Five mixes in one batch: the reference's logits for a scale a token, and a token's bits are
    the same whatever later tokens carry."""
    tiny = TINY_EXPERTS[arch]()
    files = Files(tmp_path, tiny, TinyAdapter(seed=1, embeddings=True, output=True, b_std=0.05))
    reference = ReferenceExperts.read(files.base, 256)
    scales = SCALES[WHICH].T
    expected = reference.logits(TOKENS[: len(WHICH)], list(zip(files.arrays, scales, strict=True)))
    with Model.load(files.base, n_threads=1) as loaded:
        adapters = [loaded.load_adapter(path) for path in files.adapters]
        mixes = [Mix(dict(zip(adapters, row, strict=True))) for row in SCALES.tolist()]
        with open_context(loaded, lowering=lowering) as context:
            context.set_adapters(dict.fromkeys(adapters, 1.0))
            actual = step(context, mixes, WHICH)
            assert nmse(actual, expected) <= EXACT_BOUND
            others = step(context, mixes, WHICH[:20] + [3] * 20)
            assert np.array_equal(others[:20], actual[:20])
            backwards = step(context, mixes[::-1], [len(mixes) - 1 - i for i in WHICH])
            assert np.array_equal(backwards, actual)


TYPES = {"F16": 1e-4, "Q8_0": 1e-2, "Q4_0": 2e-2}
"""NMSE to libllama where sums run in another order: roundings flip, and experts with them."""


def blocks_of_32(arch: str, type: GGMLType) -> TinyModel:
    """A model whose rows are whole blocks."""
    if arch == "deepseek2":
        return TinyDeepSeek2(
            n_embd=128, n_ff=64, n_ff_exp=64, n_lora_q=32, n_nope=32, n_value=32, weight_type=type
        )
    family = TINY_EXPERTS[arch]
    assert issubclass(family, TinyExperts)
    return family(n_embd=128, n_ff=64, n_ff_exp=64, weight_type=type)


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("arch", TINY_EXPERTS)
def test_types_agree_with_libllama(arch: str, type: str, tmp_path: Path) -> None:
    """Half-precision and quantised bases, experts repacked where they can be.

    Where a router's scores are nearly equal, libllama's roundings of x may choose another expert
    than F32 does: then a lowering has to be the closer of the two to float64.
    """
    tiny = blocks_of_32(arch, GGMLType[type])
    check_type(Files(tmp_path, tiny, seen_by_libllama(tiny)), type, LOWERINGS, CASES)


@pytest.mark.parametrize("type", ["F16", "Q8_0"])
@pytest.mark.parametrize("variant", EXPERT_VARIANTS)
def test_types_of_all_variants_agree_with_libllama(variant: str, type: str, tmp_path: Path) -> None:
    """Optional parts on and off beside half-precision and quantised matrices; of the deep models
    what has libllama's bits."""
    tiny = replace(EXPERT_VARIANTS[variant], weight_type=GGMLType[type])
    if isinstance(tiny, TinyDeepSeek2):
        tiny = replace(tiny, n_lora_q=tiny.n_lora_q and 32, n_nope=32, n_value=32)
    if isinstance(tiny, TinyExperts) and tiny.n_ff_shared:
        tiny = replace(tiny, n_ff_shared=64)
    files = Files(tmp_path, tiny, seen_by_libllama(tiny))
    lowerings = LOWERINGS[:1] if tiny.n_layer > 20 else LOWERINGS[:2]
    check_type(files, type, lowerings, CASES[:2])


def check_type(
    files: Files, type: str, lowerings: Sequence[LoweringName], cases: Sequence[Scales]
) -> None:
    """libllama's bits where the order is the same; else the bound (experts in MXFP4 have that of
    four bits), or with F16 weights nearer to float64 than libllama."""
    tiny, tokens = files.model, TOKENS[:60]
    bound = TYPES["Q4_0" if tiny.types else type]
    expected = libllama_logits(files.base, files.adapters, cases, tokens)
    for lowering in lowerings:
        actual = loragraph_logits(files.base, files.adapters, cases, tokens, lowering=lowering)
        for scales in cases:
            same = same_bits(tiny, "exact", lowering, scales)
            # Beside the branch, products may be the kernel's.
            same = same and lowering == "branch"
            if nmse(actual[scales], expected[scales]) <= (0 if same else bound):
                continue
            assert type == "F16", (lowering, scales)
            assert not same, (lowering, scales)
            active = list(zip(files.arrays, scales, strict=True))
            exact = ReferenceExperts.read(files.base, 256).logits(tokens, active)
            distance = nmse(actual[scales], exact)
            assert distance <= bound, (lowering, scales)
            assert distance < nmse(expected[scales], exact), (lowering, scales)


CHANGE_BOUND = 0.2
"""NMSE of what an adapter changes, by roundings and the experts that they choose: measured at most
0.063. Without the adapter it is 1."""


@pytest.mark.parametrize("type", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize("arch", TINY_EXPERTS)
def test_no_target_is_lost_on_a_quantised_base(arch: str, type: str, tmp_path: Path) -> None:
    """An adapter of each matrix alone changes the logits as it does in float64, in every lowering:
    the bounds above are wider than what a lost pair changes beside twenty others."""
    tiny = blocks_of_32(arch, GGMLType[type])
    base = tiny.write(tmp_path / "m.gguf")
    alone = {name: TinyAdapter(targets=(name,), b_std=0.5) for name in tiny.targets}
    alone["token_embd"] = TinyAdapter(targets=(), embeddings=True, b_std=0.5)
    alone["output"] = TinyAdapter(targets=(), output=True, b_std=0.5)
    paths = [tmp_path / f"{name}.gguf" for name in alone]
    arrays = [one.write(path, tiny) for one, path in zip(alone.values(), paths, strict=True)]
    tokens = TOKENS[:12]
    reference = ReferenceExperts.read(base, 256)
    unchanged = reference.logits(tokens)
    changes = [reference.logits(tokens, [(one, 1.0)]) - unchanged for one in arrays]
    none: Scales = (0.0,) * len(paths)
    cases: list[Scales] = [tuple(row) for row in np.eye(len(paths)).tolist()]
    for lowering in LOWERINGS:
        logits = loragraph_logits(base, paths, [none, *cases], tokens, lowering=lowering)
        for name, case, change in zip(alone, cases, changes, strict=True):
            assert nmse(unchanged + change, unchanged) > 5e-3, name
            assert nmse(logits[case] - logits[none], change) <= CHANGE_BOUND, (lowering, name)
