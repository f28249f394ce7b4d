"""An adapter file against the PEFT or MLX folder that it was made from: the same change or not?

The folder is converted anew, and the two changes of each target are compared as matrices: their
ratio of norms is the strength, their cosine tells whether they are the same at all. Both follow
from the factors, so it does not matter where alpha went, or in which basis the ranks stand.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from loragraph.adapters.adapter import Adapter
from loragraph.adapters.base import TOKEN_EMBD, BaseInfo
from loragraph.adapters.convert import convert
from loragraph.adapters.gguf import read_adapter
from loragraph.adapters.report import target_class
from loragraph.adapters.vectors import BaseRows, RowVectors, Values
from loragraph.ggml.lib import Library
from loragraph.tools.deltas import Term, Use, delta_of
from loragraph.tools.doctor.report import Diagnosis
from loragraph.tools.doctor.strength import inner_product

SAME_RATIO, SAME_COSINE = 0.02, 0.99  # a Q8_0 file is within a percent


def check_folder(
    lib: Library,
    adapter: Adapter,
    base: Path,
    info: BaseInfo,
    rows: BaseRows,
    folder: Path,
    found: Diagnosis,
) -> None:
    """Converts the folder and compares; LoragraphError where it cannot be converted."""
    with tempfile.TemporaryDirectory(prefix="loragraph-doctor-") as temporary:
        path, plan = convert(folder, base, Path(temporary) / "peft.gguf", outtype="f32", lib=lib)
        with read_adapter(lib, path, info, rows=rows) as trained:
            scales = sorted({scale for target in plan.targets for scale in target.scales})
            kind = "alpha / sqrt(rank)" if plan.config.rslora else "alpha / rank"
            spread = " to ".join(
                f"{scale:g}" for scale in dict.fromkeys((*scales[:1], *scales[-1:]))
            )
            if scales:
                found.add("fact", "scale", f"the training's scale ({kind}) is {spread}")
            _compare(adapter, trained, found)


def _compare(adapter: Adapter, trained: Adapter, found: Diagnosis) -> None:
    missing = sorted(trained.pairs.keys() - adapter.pairs.keys())
    extra = sorted(adapter.pairs.keys() - trained.pairs.keys())
    for names, text in ((missing, "trained but not in the file"), (extra, "not trained in PEFT")):
        if names:
            found.add("problem", "peft", f"{len(names)} targets are {text}: {', '.join(names[:3])}")
    shared = sorted(adapter.pairs.keys() & trained.pairs.keys())
    measured = {name: _ratio_and_cosine(adapter, trained, name) for name in shared}
    ratios = [ratio for ratio, _ in measured.values() if math.isfinite(ratio)]
    found.numbers["peft"] = {
        "n_targets": len(shared),
        "ratio_min": min(ratios, default=None),
        "ratio_max": max(ratios, default=None),
        "cosine_min": min((cosine for _, cosine in measured.values()), default=None),
    }
    unlike = [name for name, (_, cosine) in measured.items() if cosine < SAME_COSINE]
    if unlike:
        found.add("problem", "peft", _unlike(unlike, len(shared)))
    wrong = {
        name: ratio
        for name, (ratio, cosine) in measured.items()
        if cosine >= SAME_COSINE and abs(ratio - 1) > SAME_RATIO
    }
    if wrong:
        found.add("problem", "peft", _wrong_strength(wrong, len(shared), adapter, trained))
    _compare_facts(adapter, trained, found)
    if found.ok and shared:
        found.add(
            "fact",
            "peft",
            f"all {len(shared)} targets are what was trained (strength within "
            f"{max(abs(ratio - 1) for ratio in ratios):.2%})",
        )


def _ratio_and_cosine(adapter: Adapter, trained: Adapter, target: str) -> tuple[float, float]:
    one, other = (delta_of([Term(Use(side, 1.0), target)]) for side in (adapter, trained))
    ours, theirs = inner_product(one, one), inner_product(other, other)
    if theirs == 0:
        return (1.0, 1.0) if ours == 0 else (math.inf, 0.0)
    ratio = math.sqrt(max(0.0, ours) / theirs)
    cosine = inner_product(one, other) / math.sqrt(ours * theirs) if ours > 0 else 0.0
    return ratio, cosine


def _unlike(names: Iterable[str], n_shared: int) -> str:
    names = list(names)
    kinds = {target_class(name) for name in names}
    text = f"{len(names)} of {n_shared} targets hold another change than was trained: {names[0]}"
    if kinds <= {"attn_q", "attn_k"}:
        return f"{text}; only q and k: their rows were not put into this family's order"
    return f"{text}; another checkpoint, or converted wrongly"


def _wrong_strength(
    wrong: Mapping[str, float], n_shared: int, adapter: Adapter, trained: Adapter
) -> str:
    """The factor by which the strength is off, with the mistake that gives just this one."""
    values = list(wrong.values())
    name = next(iter(wrong))
    rank = trained.pairs[name].rank
    factor = float(np.median(values))
    text = f"{len(wrong)} of {n_shared} targets have {factor:.4g} times the trained strength"
    scale = trained.alpha / rank if trained.alpha else 1.0
    own = adapter.alpha / adapter.pairs[name].rank if adapter.alpha else 1.0
    causes = (
        (own, "the scale is applied twice: B holds it already"),
        (1 / scale, "the scale alpha / rank is missing"),
        (1 / math.sqrt(rank), "use_rslora was ignored"),
        (-1.0, "the sign is wrong"),
    )
    for cause, words in causes:
        if abs(cause - 1) > SAME_RATIO and abs(factor / cause - 1) < SAME_RATIO:
            return f"{text}: {words}"
    return f"{text}: use it at scale {1 / factor:.4g}, or convert it again"


def _compare_facts(adapter: Adapter, trained: Adapter, found: Diagnosis) -> None:
    """Invocation tokens, the tied head, DoRA, biases and norms."""
    if adapter.invocation_tokens != trained.invocation_tokens:
        found.add(
            "problem",
            "peft",
            f"its invocation tokens are {list(adapter.invocation_tokens)}, trained were "
            f"{list(trained.invocation_tokens)}",
        )
    if TOKEN_EMBD in trained.pairs and adapter.tied_output != trained.tied_output:
        meant = "both" if trained.tied_output else "the lookup alone"
        found.add("problem", "peft", f"the token table's pair was trained for {meant}")
    lost = sorted(trained.vectors.keys() - adapter.vectors.keys())
    if lost:
        found.add(
            "problem",
            "peft",
            f"{len(lost)} trained magnitudes, biases or norms are not in the file: {lost[0]}",
        )
    unlike = [
        target
        for target, vectors in sorted(trained.vectors.items())
        if target in adapter.vectors and not _alike(adapter.vectors[target], vectors)
    ]
    if unlike:
        found.add(
            "problem",
            "peft",
            f"{len(unlike)} targets have other magnitudes, biases or norms than were trained: "
            f"{unlike[0]}",
        )


def _alike(one: RowVectors, other: RowVectors) -> bool:
    """Whether two targets' magnitudes, biases and changes of norms are the same but for rounding."""
    pairs = (
        (one.magnitude, other.magnitude),
        (one.shift, other.shift),
        (one.delta, other.delta),
    )
    for mine, theirs in pairs:
        if theirs is None or mine is None:
            if theirs is not mine:
                return False
        elif len(mine) != len(theirs) or _distance(mine, theirs) > SAME_RATIO:
            return False
    return True


def _distance(one: Values, other: Values) -> float:
    """||one - other|| / ||other||."""
    size = float(np.linalg.norm(other))
    return float(np.linalg.norm(one - other)) / size if size else float(np.linalg.norm(one) > 0)
