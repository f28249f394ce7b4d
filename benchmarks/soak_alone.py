"""A soak's answers against the same requests alone, in the low-level interface, from nothing.

Two texts are equal up to the first token that differs; there the choice must have been open: some
logits that are nowhere further than the bound from the lone ones choose the other token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.soak_requests import Kind
from loragraph import Adapter, Context, SamplingParams
from loragraph.engine.sampler import Sampler

BOUND = 0.01  # of one logit
_N_EDGES = 64  # ranks that the logits are pulled apart at

Logits = NDArray[np.float32]


class Alone:
    """A request's choices as the context computes them, one after the other."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._vocab = context.model.vocab

    def read(self, kind: Kind, scales: Sequence[tuple[Adapter, float]]) -> None:
        """The request's prompt, with its adapters' files."""
        self._kind = kind
        context, prompt = self._context, kind.prompt
        context.clear()
        parts = lone_parts(prompt, scales)
        ends = [*(start for start, _ in parts[1:]), len(prompt)]
        for (start, active), end in zip(parts, ends, strict=True):
            context.set_adapters(active)
            self._last = context.decode(prompt[start:end], outputs="last")[0]

    def choice(self, index: int) -> tuple[list[int], list[Logits]]:
        """The tokens of a choice, with the one that ended it, and the logits before each."""
        self._context.truncate(len(self._kind.prompt))
        logits, tokens, rows = self._last, [], []
        with self._sampler(index) as sampler:
            while True:
                rows.append(logits)
                tokens.append(sampler.sample(logits.copy()))
                sampler.accept(tokens[-1])
                n_most = self._kind.params.max_tokens
                if self._vocab.is_eog(tokens[-1]) or len(tokens) == n_most:
                    return tokens, rows
                logits = self._context.decode(tokens[-1:], outputs="last")[0]

    def is_open(self, index: int, rows: Sequence[Logits], tokens: Sequence[int], to: int) -> bool:
        """Whether logits within the bound of the last row choose `to`; `tokens` come before."""
        with self._sampler(index) as sampler:
            for row, token in zip(rows, tokens, strict=False):
                sampler.sample(row.copy())
                sampler.accept(token)
            for logits in pulled_apart(rows[-1], to):
                with sampler.clone() as trial:
                    if trial.sample(logits) == to:
                        return True
        return False

    def _sampler(self, index: int) -> Sampler:
        params: SamplingParams = self._kind.params
        assert params.seed is not None
        params = replace(params, seed=params.seed + index)
        return Sampler(self._vocab, params, self._kind.prompt, self._context.n_ctx)


def lone_parts(
    prompt: Sequence[int], scales: Sequence[tuple[Adapter, float]]
) -> list[tuple[int, dict[Adapter, float]]]:
    """Stretches of the prompt with one mix each: where it begins, and the mix."""
    starts: list[tuple[int, Adapter, float]] = []
    for adapter, scale in scales:
        wanted = tuple(adapter.invocation_tokens or ())
        found = [i for i in range(len(prompt)) if tuple(prompt[i : i + len(wanted)]) == wanted]
        if not wanted:
            starts.append((0, adapter, scale))
        elif found:
            starts.append((found[-1], adapter, scale))
    parts = []
    for first in sorted({0, *(start for start, _, _ in starts)}):
        mix: dict[Adapter, float] = {}
        for start, adapter, scale in starts:
            if start <= first:
                mix[adapter] = mix.get(adapter, 0.0) + scale
        parts.append((first, mix))
    return parts


def pulled_apart(row: Logits, to: int) -> Iterator[Logits]:
    """Logits as far from `row` (n_vocab,) as the bound allows, by which a choice may change.

    A draw finds its token by the mass before it, in the order of the tokens or of their logits, and
    filters cut at a rank: what lies on either side of an edge is pulled apart, once each way. `to`
    itself is raised once.
    """
    bound = np.float32(BOUND)
    raised = np.where(np.arange(len(row)) == to, bound, -bound)
    yield row + raised
    order = np.argsort(-row, kind="stable")
    ranks = np.empty(len(row), np.int64)
    ranks[order] = np.arange(len(row))
    masks = [ranks < edge for edge in range(1, min(_N_EDGES, len(row)))]
    masks += [np.arange(len(row)) < edge for edge in (to, to + 1)]
    for mask in masks:
        yield row + np.where(mask, bound, -bound)
        yield row + np.where(mask, -bound, bound)
