"""How large an adapter's change is beside the weights that it changes.

The measure is ||W' - W|| / ||W|| (Frobenius) of each target, where W' - W is s B A, with DoRA's
gains of W beside it. Fine-tuning moves weights little: the adapters in demos/, trained at the usual
rates until they were good, have medians from 0.009 to 0.036, and a target rarely passes 0.1. A
scale that is applied twice multiplies the measure by alpha / rank once more, commonly 2 to 8. So: a
median above LARGE deserves a look, one above HUGE means that the change outweighs what was learnt
before; one below TINY changes nothing that shows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from loragraph.adapters.adapter import Adapter
from loragraph.adapters.base import TOKEN_EMBD
from loragraph.ggml.gguf import TensorInfo
from loragraph.ggml.lib import Library
from loragraph.tools.deltas import Delta, Floats, Term, Use, delta_of
from loragraph.tools.doctor.report import Diagnosis, Progress
from loragraph.tools.tensor_values import read_f32

LARGE, HUGE, TINY = 0.15, 0.5, 1e-4
_CHUNK_ROWS = 1024


def inner_product(one: Delta, other: Delta) -> float:
    """<L1 R1, L2 R2> of all experts, without multiplying out: tr((L1ᵀ L2)(R2 R1ᵀ)), in f64."""
    total = 0.0
    for l1, r1, l2, r2 in zip(one.left, one.right, other.left, other.right, strict=True):
        outer = l1.T.astype(np.float64) @ l2.astype(np.float64)
        inner = r1.astype(np.float64) @ r2.T.astype(np.float64)
        total += float(np.sum(outer * inner))
    return total


def _energy(delta: Delta, weight: Floats) -> float:
    """The squared norm of all that changes in W; of DoRA its gains times W are a part."""
    if delta.gain is None:
        return inner_product(delta, delta)
    total = 0.0
    for first in range(0, len(weight), _CHUNK_ROWS):
        rows = slice(first, first + _CHUNK_ROWS)
        gain = delta.gain if len(delta.gain) == 1 else delta.gain[rows]
        change = gain * weight[rows] + delta.left[0, rows] @ delta.right[0]
        total += float(np.sum(np.square(change, dtype=np.float64)))
    return total


def check_strength(
    lib: Library,
    adapter: Adapter,
    tensors: Mapping[str, TensorInfo],
    found: Diagnosis,
    *,
    progress: Progress,
    as_trained: bool = False,
) -> None:
    """Ratios of norms for all targets, and what they say.

    `as_trained`: the comparison with the training's own files has settled the strength.
    """
    ratios: dict[str, float] = {}
    for done, target in enumerate(adapter.pairs):
        progress("measuring the change", done, len(adapter.pairs))
        delta = delta_of([Term(Use(adapter, 1.0), target)])
        weight = read_f32(lib, tensors.get(target) or tensors[TOKEN_EMBD])
        norm = math.sqrt(float(np.sum(np.square(weight, dtype=np.float64))))
        change = math.sqrt(max(0.0, _energy(delta, weight)))
        ratios[target] = change / norm if norm else math.inf
    progress("measuring the change", len(adapter.pairs), len(adapter.pairs))
    finite = [ratio for ratio in ratios.values() if math.isfinite(ratio)]
    if not finite:
        return
    median, largest = float(np.median(finite)), max(finite)
    worst = max(ratios, key=lambda target: ratios[target])
    found.numbers["change_ratio"] = {
        "median": median,
        "min": min(finite),
        "max": largest,
        "largest_target": worst,
    }
    text = (
        f"the change is {median:.2%} of the weights (median of norm ratios; largest {largest:.2%}, "
        f"{worst})"
    )
    if as_trained:
        found.add("fact", "strength", f"{text}, as it was trained")
    elif median > HUGE:
        found.add("problem", "strength", f"{text}: {_suspicion(adapter, median)}")
    elif median > LARGE:
        found.add("warning", "strength", f"{text}: {_suspicion(adapter, median)}")
    elif median < TINY:
        found.add("warning", "strength", f"{text}: too little to show; is alpha right?")
    else:
        found.add("fact", "strength", f"{text}; fine-tuning usually gives 0.5 % to 10 %")


def check_norms(
    lib: Library, adapter: Adapter, tensors: Mapping[str, TensorInfo], found: Diagnosis
) -> None:
    """How much the weights of trained norms change, as a fact: there is no usual size of it."""
    ratios = {}
    for target, vectors in adapter.alone.items():
        if vectors.delta is not None:
            norm = float(np.linalg.norm(read_f32(lib, tensors[target])))
            ratios[target] = float(np.linalg.norm(vectors.delta)) / norm if norm else math.inf
    if not ratios:
        return
    worst = max(ratios, key=lambda target: ratios[target])
    median = float(np.median(list(ratios.values())))
    found.numbers["norm_change_ratio"] = {"median": median, "max": ratios[worst]}
    found.add(
        "fact",
        "strength",
        f"{len(ratios)} norms change by {median:.2%} of their weights (median; largest "
        f"{ratios[worst]:.2%}, {worst})",
    )


def _suspicion(adapter: Adapter, median: float) -> str:
    """Why it may be so large: the factor alpha / rank that stands in B already."""
    ratio = abs(adapter.alpha) / adapter.rank_max if adapter.alpha else 1.0
    if ratio > 1 and median / ratio <= LARGE:
        return (
            f"far more than fine-tuning gives. Double scaling is suspected: without the factor "
            f"alpha / rank = {ratio:g} it would be {median / ratio:.2%}, so B may hold it already; "
            f"--peft tells, and scale {1 / ratio:g} would make up for it"
        )
    return "far more than fine-tuning gives; is it for this base, and is alpha right?"
