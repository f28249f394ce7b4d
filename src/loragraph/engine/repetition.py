"""What a sequence's own tokens change of its logits: libllama's penalties and DRY."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from loragraph.engine import chain
from loragraph.engine.candidates import Candidates
from loragraph.engine.chain import Chain
from loragraph.engine.params import (
    DRY_BREAKERS,
    MAX_BREAKER_TOKENS,
    SamplingParams,
    bad_param,
)
from loragraph.vocab.vocab import Vocab


class Repetition:
    """Penalties, then DRY, each over a window of the last tokens; close() frees both.

    libllama gets to see the tokens of the window alone: it changes no others.
    """

    def __init__(self, parts: list[_Windowed]) -> None:
        self._parts = parts

    @classmethod
    def of(cls, vocab: Vocab, params: SamplingParams, n_ctx: int) -> Repetition | None:
        """None where the parameters ask for neither. With mirostat llama.cpp does without them.

        `n_ctx`: the most tokens that the sequence can have. InvalidRequestError for sequence
        breakers that occur in too many tokens.
        """
        parts = []
        if params.dry and not params.mirostat:
            _check_breakers(vocab, params.dry_sequence_breakers)
            last_n = _window(params.dry_penalty_last_n, n_ctx)
            parts.append(_Windowed(chain.dry(vocab, params, last_n), last_n))
        if params.penalises and not params.mirostat:
            last_n = _window(params.repeat_last_n, n_ctx)
            parts.insert(0, _Windowed(chain.penalties(vocab, params, last_n), last_n))
        return cls(parts) if parts else None

    def accept(self, token: int) -> None:
        """The sequence's next token."""
        for part in self._parts:
            part.accept(token)

    def ids(self) -> NDArray[np.int64]:
        """The tokens whose logits `apply` may change, some of them twice."""
        return np.concatenate([part.ids() for part in self._parts])

    def apply(self, logits: NDArray[np.float32]) -> None:
        """Changes logits (n_tokens,) f32 in place."""
        for part in self._parts:
            part.apply(logits)

    def reset(self) -> None:
        """Forgets all tokens."""
        for part in self._parts:
            part.reset()

    def clone(self) -> Repetition:
        """Another one in the same state."""
        return Repetition([part.clone() for part in self._parts])

    def close(self) -> None:
        """Frees libllama's parts; a second call does nothing."""
        for part in self._parts:
            part.chain.close()


class _Windowed:
    """One sampler of libllama, and how often each token stands in its window."""

    def __init__(self, chain: Chain, last_n: int) -> None:
        self.chain = chain
        self._last: deque[int] = deque(maxlen=last_n)
        self._counts: Counter[int] = Counter()

    def accept(self, token: int) -> None:
        """The sequence's next token."""
        self.chain.lib.c.llama_sampler_accept(self.chain.ptr, token)
        if len(self._last) == self._last.maxlen:
            oldest = self._last[0]
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]
        self._last.append(token)
        self._counts[token] += 1

    def ids(self) -> NDArray[np.int64]:
        """The tokens of the window, each once."""
        return np.fromiter(self._counts, np.int64, len(self._counts))

    def apply(self, logits: NDArray[np.float32]) -> None:
        """Changes logits (n_tokens,) f32 in place."""
        if not self._counts:
            return
        candidates = Candidates(self.chain.lib, self.ids(), logits)
        self.chain.apply(candidates.ptr)
        logits[candidates.data["id"]] = candidates.data["logit"]

    def reset(self) -> None:
        """Forgets all tokens."""
        self.chain.reset()
        self._last.clear()
        self._counts.clear()

    def clone(self) -> _Windowed:
        """Another one in the same state."""
        other = _Windowed(self.chain.clone(), self._last.maxlen or 1)
        other._last.extend(self._last)
        other._counts.update(self._counts)
        return other


def _window(last_n: int, n_ctx: int) -> int:
    return n_ctx if last_n < 0 else min(last_n, n_ctx)


def _check_breakers(vocab: Vocab, breakers: Sequence[str]) -> None:
    """libllama notes every token that a breaker occurs in, or whose end it begins with.

    A letter occurs in half of a vocabulary: a sampler would take many megabytes.
    """
    if breakers == DRY_BREAKERS:
        return
    texts = [text.encode() for text in breakers]
    beginnings = [tuple(text[:n] for n in range(1, len(text))) for text in texts]
    n_found = 0
    for piece in vocab.pieces():
        for text, parts in zip(texts, beginnings, strict=True):
            n_found += text in piece or piece.endswith(parts)
    if n_found > MAX_BREAKER_TOKENS:
        raise bad_param(
            "dry_sequence_breakers",
            f"texts that occur in at most {MAX_BREAKER_TOKENS} tokens together",
            n_found,
        )
