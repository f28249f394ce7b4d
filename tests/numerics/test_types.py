"""Against libllama, for every base type, adapter type, lowering and mode.

Where the operations and their order are the same, the bits are: `branch` with no or one adapter.
Elsewhere a sum runs in another order, or `routed` keeps float32 where libllama rounds activations
to the adapter's type (F16, BF16, Q8_0). In a base that rounds its own activations a difference in
the last bit can flip a rounding, so there two right answers differ by as much as libllama differs
from float64. So both are judged against the float64 reference too.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as GGMLType

from tests.numerics.compare import nmse
from tests.numerics.runs import (
    LOWERINGS,
    MODES,
    Scales,
    libllama_logits,
    loragraph_logits,
    random_tokens,
    same_base,
)
from tests.reference.llama import Float, ReferenceLlama
from tests.tiny import TinyAdapter, TinyLlama

ADAPTER_TYPES = ("F32", "F16", "BF16", "Q8_0")
BOUNDS: dict[str, dict[str, tuple[float, float, float, float]]] = {
    # NMSE between loragraph and libllama, by mode and base type, a column an adapter type.
    # Measured (AVX-512), then about tripled: F32 with F32 1e-13; F16 bases 6e-8; BF16 bases 1e-6;
    # quantised 0 to 9e-5; the other columns equal libllama's own error. K-quants round activations
    # in blocks of 256, so they flip more.
    "exact": {
        "F32": (5e-13, 2e-7, 1.5e-5, 1.5e-4),
        "F16": (2e-7, 1e-6, 1.5e-5, 1.5e-4),
        "BF16": (1e-5, 3e-5, 6e-5, 2e-4),
        "Q8_0": (1e-4, 3e-4, 5e-4, 7e-4),
        "Q4_0": (1e-4, 3e-4, 5e-4, 7e-4),
        "Q4_1": (1e-4, 3e-4, 5e-4, 7e-4),
        "Q5_0": (1e-4, 3e-4, 5e-4, 7e-4),
        "Q5_1": (1e-4, 3e-4, 5e-4, 7e-4),
        "Q4_K": (3e-4, 6e-4, 8e-4, 1e-3),
        "Q6_K": (3e-4, 6e-4, 8e-4, 1e-3),
    },
    "default": {
        "F32": (2e-8, 6e-7, 1.5e-5, 1.5e-4),
        "F16": (4e-7, 1.5e-6, 1.5e-5, 1.5e-4),
        "BF16": (1e-5, 3e-5, 6e-5, 2e-4),
        "Q8_0": (2e-4, 5e-4, 5e-4, 7e-4),
        "Q4_0": (2e-4, 5e-4, 5e-4, 7e-4),
        "Q4_1": (2e-4, 5e-4, 5e-4, 7e-4),
        "Q5_0": (2e-4, 5e-4, 5e-4, 7e-4),
        "Q5_1": (2e-4, 5e-4, 5e-4, 7e-4),
        "Q4_K": (5e-4, 7e-4, 8e-4, 1.2e-3),
        "Q6_K": (5e-4, 7e-4, 8e-4, 1.2e-3),
    },
}
NO_WORSE = 1.5
"""loragraph's error over libllama's, both against float64. Measured: at most 1.15."""

TOKENS = random_tokens(24)
CASES: tuple[Scales, ...] = ((0, 0), (1, 0), (0.5, 0), (-1, 0), (0.5, 1))


class Files:
    """Models and adapters, written when first asked for, with the reference's logits."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._references: dict[tuple[str, str], dict[Scales, Float]] = {}

    def model(self, base: str) -> TinyLlama:
        """K-quants need rows of 256."""
        weight_type = GGMLType[base]
        if base.endswith("_K"):
            return TinyLlama(n_embd=256, n_ff=256, n_vocab=320, weight_type=weight_type)
        return TinyLlama(n_embd=128, n_ff=192, weight_type=weight_type)

    def base(self, base: str) -> Path:
        """The model's file."""
        path = self._folder / f"{base}.gguf"
        return path if path.exists() else self.model(base).write(path)

    def adapters(self, base: str, type: str) -> list[Path]:
        """Two adapters with overlapping and unlike targets and unlike ranks."""
        paths = [self._folder / f"{base}-{type}-{index}.gguf" for index in (1, 2)]
        if not paths[0].exists():
            for path, adapter in zip(paths, self._adapters(type), strict=True):
                adapter.write(path, self.model(base))
        return paths

    def reference(self, base: str, type: str) -> dict[Scales, Float]:
        """Logits in float64 for each case."""
        key = (base, type)
        if key not in self._references:
            reference = ReferenceLlama.load(self.base(base))
            arrays = [one.arrays(self.model(base)) for one in self._adapters(type)]
            self._references[key] = {
                scales: reference.logits(TOKENS, list(zip(arrays, scales, strict=True)))
                for scales in CASES
            }
        return self._references[key]

    def _adapters(self, type: str) -> tuple[TinyAdapter, TinyAdapter]:
        dtype = GGMLType[type]
        return (
            TinyAdapter(
                rank=32, alpha=64, dtype=dtype, output=True, embeddings=True, b_std=0.04, seed=1
            ),
            TinyAdapter(
                rank=64,
                alpha=None,
                dtype=dtype,
                b_std=0.02,
                targets=("attn_q", "ffn_down"),
                layers=(0,),
                seed=5,
            ),
        )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """One folder for all cases of this module."""
    return Files(tmp_path_factory.mktemp("types"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("adapter_type", ADAPTER_TYPES)
@pytest.mark.parametrize("base", BOUNDS["exact"])
def test_agrees_with_libllama(base: str, adapter_type: str, mode: str, files: Files) -> None:
    """Base, one adapter at 1, 0.5 and -1, and two at once: equal bits in branch, else the bound."""
    _compare(base, adapter_type, mode, files, repack=True)


@pytest.mark.parametrize("base", BOUNDS["exact"])
def test_agrees_with_libllama_without_repacking(base: str, files: Files) -> None:
    """The same with every weight as the file has it, in both programs."""
    _compare(base, "F32", "default", files, repack=False)


def _compare(base: str, adapter_type: str, mode: str, files: Files, *, repack: bool) -> None:
    path, adapters = files.base(base), files.adapters(base, adapter_type)
    reference = files.reference(base, adapter_type)
    expected = libllama_logits(path, adapters, CASES, TOKENS, MODES[mode], repack=repack)
    bound = BOUNDS[mode][base][ADAPTER_TYPES.index(adapter_type)]
    for lowering in LOWERINGS:
        actual = loragraph_logits(
            path, adapters, CASES, TOKENS, MODES[mode], lowering=lowering, repack=repack
        )
        for scales in CASES:
            one = lowering == "branch" and not scales[1]
            same_order = one or (not any(scales) and same_base(lowering, base))
            assert nmse(actual[scales], expected[scales]) <= (0 if same_order else bound), (
                lowering,
                scales,
            )
            allowed = NO_WORSE * nmse(expected[scales], reference[scales])
            assert nmse(actual[scales], reference[scales]) <= allowed, (lowering, scales)


def test_scales_over_any_rank_have_libllamas_bits(tmp_path: Path) -> None:
    """Branch rounds user scale · alpha / rank as libllama does, for ranks that divide nothing."""
    tiny, rank_9 = TinyLlama(), TinyAdapter(rank=9)
    base, path = tiny.write(tmp_path / "m.gguf"), tmp_path / "a.gguf"
    rank_9.write(path, tiny)
    cases: tuple[Scales, ...] = ((0.7,), (0.9,), (-1.1,))
    for mode in MODES.values():
        expected = libllama_logits(base, [path], cases, TOKENS, mode)
        actual = loragraph_logits(base, [path], cases, TOKENS, mode, lowering="branch")
        assert [nmse(actual[scales], expected[scales]) for scales in cases] == [0, 0, 0]
