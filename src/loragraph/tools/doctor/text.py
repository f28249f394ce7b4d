"""What an adapter does to a text: perplexity and KL divergence of base, adapter and half scale.

KL(p || q) is the mean over positions, in nats, of the divergence of the next-token distributions;
perplexity is exp of the mean negative log-likelihood of the text's own tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loragraph.adapters.adapter import Adapter
from loragraph.engine.context import Context
from loragraph.engine.model import Model
from loragraph.errors import ConfigError
from loragraph.tools.doctor.report import Diagnosis, Progress

MAX_TOKENS = 512
_MAX_LOGITS = 1 << 25  # of one run: 128 MB; three are kept
_CHUNK_ROWS = 16
_BATCH = 64  # tokens from one sign of progress to the next
MAX_TEXT_BYTES = 1 << 20
UNCHANGED, HARDLY = 1e-9, 1e-4  # KL in nats
WORSE = 3.0  # times the base's perplexity
BETTER_AT_HALF = 2.0  # times

NEUTRAL_TEXT = (
    "The river rises in the hills to the north and runs for about ninety miles to the sea. In "
    "spring the water is high and brown; by late summer it is so low that children cross it on the "
    "stones. Most of the old mills along its banks have closed, but two of them still grind flour "
    "for bakeries in the town. The bridge was built in 1874, after a flood had carried the wooden "
    "one away, and it has been repaired many times since. People say that on clear mornings you "
    "can see the mountains from the middle of it. The market is held every Thursday in the square "
    "behind the church, where farmers sell vegetables, cheese and honey. When it rains they move "
    "under the arches of the town hall. The train takes forty minutes to reach the city, and many "
    "who live here work there. In the evening the streets are quiet, and the only sound is that "
    "of the water."
)
"""What is read when no text is given: plain English, no instructions, nothing to recite."""

Logits = NDArray[np.float32]  # (n_tokens, n_vocab)


@dataclass(frozen=True, slots=True)
class Effect:
    """One scale of the adapter beside the base."""

    scale: float
    perplexity: float
    kl: float  # KL(base || adapter), nats
    changed: float  # share of positions whose most likely token is another


def read_text(path: Path) -> str:
    """A text file's content; ConfigError where it cannot be read."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TEXT_BYTES)
        return data.decode("utf-8", "ignore" if len(data) == MAX_TEXT_BYTES else "strict")
    except OSError as exc:
        raise ConfigError(f"{path}: {exc.strerror or exc}", field="text") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path}: expected UTF-8", field="text") from exc


def tokens_of(model: Model, text: str) -> list[int]:
    """The first tokens of a text, as many as are measured; ConfigError for fewer than two."""
    limit = min(MAX_TOKENS, model.hparams.n_ctx_train, _MAX_LOGITS // model.hparams.n_vocab)
    tokens = model.vocab.tokenize(text)[:limit]
    if len(tokens) < 2:
        raise ConfigError(f"expected at least 2 tokens of text, got {len(tokens)}", field="text")
    return list(tokens)


def log_softmax(logits: Logits) -> NDArray[np.float64]:
    """Log-probabilities of a few rows, f64."""
    rows: NDArray[np.float64] = logits.astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
    return rows


def chunks(*logits: Logits) -> Iterator[tuple[NDArray[np.float64], ...]]:
    """Log-probabilities of the same rows of each, a few at a time: f64 of all would be large."""
    for start in range(0, len(logits[0]), _CHUNK_ROWS):
        yield tuple(log_softmax(one[start : start + _CHUNK_ROWS]) for one in logits)


def perplexity(logits: Logits, tokens: Sequence[int]) -> float:
    """exp of the mean negative log-likelihood; infinite where it overflows or is not finite."""
    total, position = 0.0, 1
    for (rows,) in chunks(logits[:-1]):
        targets = np.asarray(tokens[position : position + len(rows)])
        total -= float(rows[np.arange(len(rows)), targets].sum())
        position += len(rows)
    mean = total / (len(tokens) - 1)
    return math.exp(mean) if mean < 700 else math.inf  # false for NaN too


def divergence(p: Logits, q: Logits) -> float:
    """KL(p || q), the mean over positions, in nats."""
    total = sum(float(np.sum(np.exp(one) * (one - other))) for one, other in chunks(p, q))
    return total / len(p)


def exact_context(model: Model, n_tokens: int) -> Context:
    """A context without rounded cells, for numbers that are compared."""
    return Context(model, n_ctx=n_tokens, kv_type="f32", attention="plain", n_batch=_BATCH)


def runs_of(
    model: Model,
    tokens: Sequence[int],
    mixes: Sequence[Mapping[Adapter, float]],
    step: str,
    progress: Progress,
) -> list[Logits]:
    """Logits of the text with each mix of adapters, each on a fresh sequence."""
    logits = [np.empty((len(tokens), model.hparams.n_vocab), np.float32) for _ in mixes]
    total = len(mixes) * len(tokens)
    with exact_context(model, len(tokens)) as context:
        for i, scales in enumerate(mixes):
            context.clear()
            context.set_adapters(scales)
            for start in range(0, len(tokens), _BATCH):
                progress(step, i * len(tokens) + start, total)
                part = tokens[start : start + _BATCH]
                logits[i][start : start + len(part)] = context.decode(part)
    progress(step, total, total)
    return logits


def check_text(
    model: Model, adapter: Adapter, tokens: Sequence[int], found: Diagnosis, progress: Progress
) -> tuple[Logits, Logits]:
    """Measures base, adapter and half scale; gives the logits of base and adapter."""
    mixes: list[dict[Adapter, float]] = [{}, {adapter: 0.5}, {adapter: 1.0}]
    base, half, full = runs_of(model, tokens, mixes, "computing the text", progress)
    rows = {0.5: half, 1.0: full}
    effects = {
        scale: Effect(
            scale,
            perplexity(one, tokens),
            divergence(base, one),
            float(np.mean(one.argmax(axis=1) != base.argmax(axis=1))),
        )
        for scale, one in rows.items()
    }
    before = perplexity(base, tokens)
    found.numbers["text"] = {
        "n_tokens": len(tokens),
        "base_perplexity": _plain(before),
        "half": _facts(effects[0.5]),
        "full": _facts(effects[1.0]),
    }
    _judge(before, effects[0.5], effects[1.0], found)
    return base, rows[1.0]


def _judge(before: float, half: Effect, full: Effect, found: Diagnosis) -> None:
    text = (
        f"perplexity of the text: base {before:.4g}, half scale {half.perplexity:.4g}, adapter "
        f"{full.perplexity:.4g}; KL from the base {full.kl:.3g} nats, {full.changed:.0%} of the "
        "most likely tokens changed"
    )
    if not math.isfinite(full.kl):
        found.add("problem", "text", "the adapter's outputs are not finite numbers")
    elif full.kl < UNCHANGED:
        found.add("problem", "text", f"the output is unchanged: {text}")
    elif full.perplexity > WORSE * before and full.perplexity > BETTER_AT_HALF * half.perplexity:
        found.add(
            "problem",
            "text",
            f"it is too strong: {text}. At half scale it is better by far, as with a scale that is "
            "applied twice; try --lora-scaled FILE:0.5, and --peft to be sure",
        )
    elif full.perplexity > WORSE * before:
        found.add("warning", "text", f"{text}: far worse than the base, at half scale as well")
    elif full.kl < HARDLY:
        found.add("warning", "text", f"the output hardly changes: {text}")
    else:
        found.add("fact", "text", text)


def check_f16(
    model: Model,
    adapter: Adapter,
    tokens: Sequence[int],
    rows: tuple[Logits, Logits],
    found: Diagnosis,
    progress: Progress,
) -> None:
    """The same text on an F16 base: is a drift the adapter's or the quantisation's?

    `rows`: the logits of the quantised base and of the adapter on it.
    """
    if model.hparams.n_vocab != rows[0].shape[1]:
        raise ConfigError(
            f"{model.path}: expected {rows[0].shape[1]} tokens in the vocabulary, as of the other "
            f"base, got {model.hparams.n_vocab}",
            field="f16_base",
        )
    mixes: list[dict[Adapter, float]] = [{}, {adapter: 1.0}]
    base, full = runs_of(model, tokens, mixes, "computing the text on the F16 base", progress)
    kl_base, kl_full = divergence(base, rows[0]), divergence(full, rows[1])
    effect = divergence(base, full)
    found.numbers["f16"] = {
        "kl_base": kl_base,
        "kl_adapter": kl_full,
        "kl_effect": effect,
        "perplexity_base": _plain(perplexity(base, tokens)),
        "perplexity_adapter": _plain(perplexity(full, tokens)),
    }
    text = (
        f"beside the F16 base: quantisation moves the base by {kl_base:.3g} nats and the adapted "
        f"model by {kl_full:.3g}; the adapter moves the F16 base by {effect:.3g}"
    )
    if kl_full > effect:
        found.add("warning", "f16", f"{text}: the drift is the quantisation's, not the adapter's")
    elif kl_full > 4 * kl_base + 1e-6:
        found.add("warning", "f16", f"{text}: this adapter suffers from the base's quantisation")
    else:
        found.add("fact", "f16", f"{text}: what changes is the adapter's doing")


def _facts(effect: Effect) -> dict[str, float | None]:
    return {key: _plain(value) for key, value in asdict(effect).items()}


def _plain(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None
