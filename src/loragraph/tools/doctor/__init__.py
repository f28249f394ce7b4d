"""Does an adapter apply, at the right strength, to the right model? Checks, facts, a verdict.

The two questions that people come with: the output does not change at all; the output drifts.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from loragraph.adapters.adapter import Adapter
from loragraph.adapters.base import OUTPUT, TOKEN_EMBD, BaseInfo
from loragraph.adapters.draft import ALPHA_KEY, TIED_OUTPUT_KEY
from loragraph.adapters.gguf import check_adapter, read_adapter
from loragraph.engine.model import Model, load_problem
from loragraph.engine.options import memory_errors
from loragraph.ggml.lib import load_library
from loragraph.model.files import ModelFiles
from loragraph.tools.doctor.peft import check_folder
from loragraph.tools.doctor.peft_logits import check_logits
from loragraph.tools.doctor.report import Diagnosis, Finding, Progress
from loragraph.tools.doctor.strength import check_norms, check_strength
from loragraph.tools.doctor.text import NEUTRAL_TEXT, check_f16, check_text, tokens_of
from loragraph.tools.merge import base_of
from loragraph.tools.tensor_values import FileRows

__all__ = ["Diagnosis", "Finding", "diagnose"]

Paths = str | os.PathLike[str]


class AdapterOptions(TypedDict):
    """How an adapter is loaded; see `Adapter.load`."""

    ignore_norm: bool
    tied_output: bool | None


def diagnose(
    base: Paths,
    adapter: Paths,
    *,
    peft: Paths | None = None,
    text: str | None = None,
    f16_base: Paths | None = None,
    ignore_norm: bool = False,
    tied_output: bool | None = None,
    n_threads: int | None = None,
    ggml_folder: Paths | None = None,
    progress: Progress | None = None,
) -> Diagnosis:
    """Checks `adapter` against `base`, and against what is given beside it.

    `peft`: the PEFT or MLX folder that it was converted from. `text`: what perplexity and KL are
    measured on (default: a short neutral one; at most 512 tokens). `f16_base`: the base before it
    was quantised. What is wrong with the adapter is in the diagnosis; what is wrong with the other
    files, or with an argument, raises LoragraphError. `progress` gets (step, done, in all) before
    and after each part of a step.
    """
    given = _Given(
        Path(base),
        Path(adapter),
        None if peft is None else Path(peft),
        None if f16_base is None else Path(f16_base),
        ignore_norm,
        tied_output,
        n_threads,
        None if ggml_folder is None else Path(ggml_folder),
        progress or (lambda step, done, total: None),
    )
    found = Diagnosis()
    with memory_errors(os.fspath(base)):
        if _check_files(given, found):
            _check_outputs(given, NEUTRAL_TEXT if text is None else text, found)
    return found


@dataclass(frozen=True, slots=True)
class _Given:
    """What the caller gave."""

    base: Path
    adapter: Path
    peft: Path | None
    f16_base: Path | None
    ignore_norm: bool
    tied_output: bool | None
    n_threads: int | None
    ggml_folder: Path | None
    progress: Progress

    def options(self) -> AdapterOptions:
        """How the adapter is to be loaded."""
        return {"ignore_norm": self.ignore_norm, "tied_output": self.tied_output}


def _check_files(given: _Given, found: Diagnosis) -> bool:
    """All that the files themselves tell; whether something can be computed with them."""
    lib = load_library(given.ggml_folder)
    with ModelFiles(lib, given.base) as files:
        info = base_of(files)
        given.progress("reading the adapter", 0, 1)
        problems = check_adapter(lib, given.adapter, info, **given.options())
        given.progress("reading the adapter", 1, 1)
        for problem in problems:
            found.add("problem", "fit", str(problem))
        if problems:
            return False
        rows = FileRows(lib, files)
        with read_adapter(lib, given.adapter, info, rows=rows, **given.options()) as adapter:
            _check_coverage(adapter, found)
            _check_scale(adapter, found)
            _check_tied(adapter, info, found)
            if given.peft is not None:
                given.progress("converting the folder anew", 0, 1)
                check_folder(lib, adapter, files.path, info, rows, given.peft, found)
                given.progress("converting the folder anew", 1, 1)
            settled = given.peft is not None and found.ok
            check_strength(
                lib, adapter, files.tensors, found, as_trained=settled, progress=given.progress
            )
            check_norms(lib, adapter, files.tensors, found)
    cannot_load = load_problem(lib, given.base)
    if cannot_load is not None:
        found.add("warning", "text", f"nothing could be computed with this base: {cannot_load}")
    return cannot_load is None


def _check_outputs(given: _Given, text: str, found: Diagnosis) -> None:
    """All that the outputs tell."""
    threads, folder = given.n_threads, given.ggml_folder
    with Model.load(given.base, n_threads=threads, ggml_folder=folder) as model:
        tokens = tokens_of(model, text)
        adapter = model.load_adapter(given.adapter, **given.options())
        rows = check_text(model, adapter, tokens, found, given.progress)
        is_alora = bool(adapter.invocation_tokens)
    if given.f16_base is not None:
        with Model.load(given.f16_base, n_threads=threads, ggml_folder=folder) as model:
            adapter = model.load_adapter(given.adapter, **given.options())
            check_f16(model, adapter, tokens, rows, found, given.progress)
    if given.peft is not None and not is_alora:  # PEFT starts an aLoRA at its invocation
        given.progress("computing the text with PEFT", 0, 1)
        check_logits(given.base, given.peft, tokens, rows, found)
        given.progress("computing the text with PEFT", 1, 1)


def _check_coverage(adapter: Adapter, found: Diagnosis) -> None:
    """How much of the model it changes, and where it leaves holes."""
    report = adapter.report
    kinds = {kind: pair for kind, pair in report.coverage.items() if pair[0]}
    shown = ", ".join(f"{kind} {n}/{total}" for kind, (n, total) in kinds.items())
    found.numbers["coverage"] = {kind: list(pair) for kind, pair in kinds.items()}
    found.add(
        "fact",
        "coverage",
        f"{report.n_targets} targets ({shown}), {report.n_params:,} parameters, "
        f"{report.base_share:.2%} of the base",
    )
    partly = [kind for kind, (n, total) in kinds.items() if n < total]
    if partly:
        found.add(
            "fact",
            "coverage",
            f"{', '.join(partly)}: not in every layer; right where the training chose layers",
        )
    for warning in report.warnings:
        if ALPHA_KEY not in warning and TIED_OUTPUT_KEY not in warning:
            found.add("warning", "coverage", warning)


def _check_scale(adapter: Adapter, found: Diagnosis) -> None:
    scales = sorted({adapter.effective_scale(target) for target in adapter.pairs})
    if not scales:  # norms or biases alone
        found.add("fact", "scale", "it has no low-rank pair: its vectors count as they are")
        return
    spread = " to ".join(f"{scale:g}" for scale in dict.fromkeys((scales[0], scales[-1])))
    ranks = " to ".join(
        str(rank) for rank in dict.fromkeys((adapter.report.rank_min, adapter.rank_max))
    )
    found.numbers["scale"] = {"min": scales[0], "max": scales[-1], "alpha": adapter.alpha}
    text = f"effective scale {spread} (alpha {adapter.alpha:g}, rank {ranks})"
    if adapter.alpha == 0:
        found.add(
            "warning",
            "scale",
            f"{text}: the file states no alpha, so B A counts as it is; right if the scale was "
            "multiplied into B, too weak or strong if the converter lost it",
        )
    elif adapter.alpha < 0:
        found.add("warning", "scale", f"{text}: negative, the change is subtracted")
    else:
        found.add("fact", "scale", text)
    if adapter.invocation_tokens:
        found.add(
            "fact",
            "scale",
            f"an aLoRA: active only from the tokens {list(adapter.invocation_tokens)} on, and "
            "measured here as active everywhere",
        )


def _check_tied(adapter: Adapter, info: BaseInfo, found: Diagnosis) -> None:
    """Whether table and head mean what the training meant."""
    has_table, has_head = TOKEN_EMBD in adapter.pairs, OUTPUT in adapter.pairs
    if not info.tied or not (has_table or has_head):
        return
    if has_head and not has_table:
        found.add("fact", "tied head", "it changes the head of a tied base alone, not the lookup")
    if not has_table:
        return
    stated = isinstance(adapter.metadata.get(TIED_OUTPUT_KEY), bool)
    meant = "the lookup and the head" if adapter.tied_output else "the lookup alone"
    if stated or has_head:
        found.add("fact", "tied head", f"the token table's pair changes {meant}")
    else:
        found.add(
            "warning",
            "tied head",
            f"the base's head is tied to the token table, and the file has no {TIED_OUTPUT_KEY}: "
            f"taken as {meant}; PEFT trains the lookup alone unless ensure_weight_tying. Convert "
            "it again, or use --tied-output or --no-tied-output",
        )
