"""What the benchmarks of kernels, sampling, long prompts and families ask, from made-up figures."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import (
    families,
    kernel_attention,
    kernel_lowrank,
    long_prompts,
    real_models,
    sampling,
)
from benchmarks.engine import row_of
from benchmarks.kernel_attention import CELLS, FLASH, UNIFIED
from benchmarks.long_prompts import Speeds


def test_a_row_sees_only_its_own_cells_of_the_unified_ones() -> None:
    """One stream with every sequence's cells, the others' hidden."""
    mask = kernel_attention.unified_mask(2, 3)
    assert mask.shape == (1, 2, 6)
    assert np.isfinite(mask[0]).tolist() == [[True] * 3 + [False] * 3, [False] * 3 + [True] * 3]
    assert set(mask[np.isfinite(mask)].tolist()) == {0.0}


@pytest.mark.parametrize(
    ("cells", "flash", "unified", "met"),
    [(1.1, 1.0, 3.4, [True, True]), (1.2, 1.0, 3.4, [False, False])],
)
def test_attention_has_a_bound_over_own_and_over_unified_cells(
    cells: float, flash: float, unified: float, met: list[bool]
) -> None:
    """At most 1.1 times the one, at least three times faster than the other."""
    found = kernel_attention.targets({FLASH: flash, UNIFIED: unified, CELLS: cells})
    assert [target.met for target in found] == met


def test_lowrank_prefill_is_judged_by_the_median_of_the_rounds_ratios() -> None:
    """One slow round of either side decides nothing."""
    target = kernel_lowrank.prefill_target([1.0, 1.0, 9.0], [1.25, 0.5, 8.0])
    assert (target.value, target.met) == (1.125, True)
    assert not kernel_lowrank.prefill_target([1.0] * 3, [1.1, 1.2, 0.5]).met
    assert kernel_lowrank.decode_target(32, 16, 65.0).met
    assert not kernel_lowrank.decode_target(32, 16, 64.9).met


def test_long_prompts_decode_over_separate_streams_and_prefill_over_the_better_layout() -> None:
    """A shared prompt, too, is compared with the peer's own prompts in separate streams."""
    speeds = {
        "loragraph": Speeds(1000, 440, 1000),
        "llama-server": Speeds(900, 400, 500),
        "llama-server -kvu": Speeds(1250, 200, 900),
    }
    prefill, own, shared = long_prompts.targets(speeds, 32)
    assert (prefill.value, prefill.met) == (0.8, False)
    assert (own.value, own.met) == (1.1, True)
    assert (shared.value, shared.met) == (2.5, True)
    assert len(long_prompts.targets(speeds, 1)) == 1


def test_sampling_is_held_to_a_share_of_the_step() -> None:
    """Of the whole step, sampling included."""
    assert sampling.target("greedy", 5, 95).met
    assert not sampling.target("greedy", 5.3, 95).met


def test_each_measure_of_a_family_has_a_verdict() -> None:
    """The default lowering over libllama."""
    values = {"routed": [95.0, 90.0, 100.0], "libllama": [100.0, 100.0, 100.0]}
    (target,) = families.targets([row_of("llama", "base decode", "tokens/s", values)])
    assert (target.what, target.value, target.met) == ("llama, base decode", 0.95, True)


def test_a_familys_ratios_are_one_line() -> None:
    """Under the names of what was measured; what was not stays empty."""
    rows = [
        row_of("llama", "base decode", "tokens/s", {"routed": [96.0], "libllama": [100.0]}),
        row_of("llama", "base prefill", "tokens/s", {"routed": [150.0], "libllama": [100.0]}),
        row_of("phi3", "base prefill", "tokens/s", {"routed": [101.0], "libllama": [100.0]}),
    ]

    assert families.compact(rows).splitlines() == [
        "| model | base decode | base prefill |",
        "|---|---:|---:|",
        "| llama | 0.96 | 1.50 |",
        "| phi3 |  | 1.01 |",
    ]


def test_packages_that_are_absent_are_named_as_pip_knows_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a run leaves out is said."""
    monkeypatch.setattr(real_models, "BASE_PACKAGE", "pytest")
    monkeypatch.setattr(real_models, "GEMMA_PACKAGE", "no_such_package")
    said: list[str] = []
    real_models.tell_absent(said.append)
    assert said == ["the package no-such-package is not installed: its real model is left out"]


@pytest.mark.parametrize("size", families.SIZES)
def test_the_families_models_are_ones_that_libllama_takes(size: str) -> None:
    """Of Qwen2 and others it takes heads of n_embd / n_head values alone."""
    sizes = families.SIZES[size]
    assert sizes["n_embd"] == sizes["n_head"] * 64
