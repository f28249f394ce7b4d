"""From logits to a token: bias, penalties, grammar, then a draw in libllama's default order.

A request's sampler owns its random numbers, so its draws do not depend on what else is in the
batch.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from loragraph.engine import chain, draw
from loragraph.engine.candidates import Candidates, Left
from loragraph.engine.chain import Chain
from loragraph.engine.grammar import GrammarMatcher
from loragraph.engine.logprobs import TokenLogprob
from loragraph.engine.params import MAX_LAST_N, SamplingParams, bad_param
from loragraph.engine.ranking import best_of, ranked
from loragraph.engine.repetition import Repetition
from loragraph.errors import BackendError, InvalidRequestError
from loragraph.kernels.sampling import LogitRow, Passes, alone
from loragraph.vocab.vocab import Vocab

_MAX_SINGLY = 200  # above, asking the grammar about all tokens at once is cheaper
_SINGLY_PER_CANDIDATE = 4


def draw_seed() -> int:
    """A seed for a request that names none."""
    return secrets.randbelow(2**32 - 1)


class Sampler:
    """One sequence's sampler; close() frees its libllama parts. `vocab` must outlive it.

    `seed` is the one in use, drawn where the parameters have none. Penalties and DRY look at the
    tokens of `prompt` (n_prompt,) too, as llama-server's do, and at `n_ctx` tokens at most.
    """

    def __init__(
        self,
        vocab: Vocab,
        params: SamplingParams,
        prompt: Sequence[int] = (),
        n_ctx: int = MAX_LAST_N,
    ) -> None:
        self.params = params
        self.seed = draw_seed() if params.seed is None else params.seed
        self._vocab = vocab
        self._prompt = prompt
        self._n_accepted = 0
        self._bias_ids, self._bias = _bias_arrays(vocab, params)
        only_forbids = bool(np.all(self._bias == -np.inf))
        self._forbidden = frozenset(self._bias_ids.tolist()) if only_forbids else None
        self._ends = _end_tokens(vocab, params)
        self._end_ids = np.array(sorted(self._ends), np.int64)
        # the grammar first: it is what can be refused, and nothing is owned yet
        self._grammar = (
            None if params.grammar is None else GrammarMatcher.parse(vocab, params.grammar)
        )
        self._repetition = Repetition.of(vocab, params, n_ctx)
        draws = not params.greedy
        self._draw = draw.make(vocab, params, self.seed) if draws else None
        sigma = draws and params.top_n_sigma > 0 and not params.mirostat
        self._sigma = chain.top_n_sigma(vocab.lib, params) if sigma else None
        self._left: Left | None = None  # of the last draw, where that is to be told
        self._row: LogitRow | None = None  # made when it is needed: a request may wait for long
        self._read_prompt()

    @property
    def is_argmax(self) -> bool:
        """Whether the next token is just the largest logit's, unless that is `forbidden`."""
        return (
            self.params.greedy
            and self._forbidden is not None
            and self._grammar is None
            and self._repetition is None
        )

    @property
    def forbidden(self) -> frozenset[int] | None:
        """Tokens that bias and min_tokens only forbid; None where the bias does more."""
        if self._forbidden is None or not self._must_go_on:
            return self._forbidden
        return self._forbidden | self._ends

    def sample(self, logits: NDArray[np.float32]) -> int:
        """The next token for `logits` (n_vocab,) f32. Does not accept it.

        Bias and penalties stand in `logits` during the call only. BackendError for logits that are
        no finite numbers, InvalidRequestError where bias, grammar and min_tokens leave no
        candidate.
        """
        return alone(self.sampling(logits))

    def sampling(self, logits: NDArray[np.float32]) -> Passes[int]:
        """`sample` as passes, to be run beside those of other sequences."""
        row, logits = yield from self._read(logits)
        ids = self._ids_to_change()
        if not len(ids):
            return (yield from self._choose(logits, row))
        before = logits[ids]  # a copy of the whole row would take longer than all the rest
        try:
            self._change(logits)
            yield from row.changed(ids)
            return (yield from self._choose(logits, row))
        finally:
            logits[ids] = before

    def drawn(self, token: int) -> TokenLogprob:
        """`token`, just sampled, among what it was drawn from; with post_sampling_probs."""
        n_top = self.params.logprobs or 0
        if self.params.greedy:
            return TokenLogprob(token, 0.0, ((token, 0.0),)[:n_top])
        assert self._left is not None
        ids, logprobs = self._left
        top = tuple(zip(ids[:n_top].tolist(), logprobs[:n_top].tolist(), strict=True))
        # Sums in F32 may have the last one on the other side of an edge.
        at = int(np.argmax(ids == token)) if (ids == token).any() else -1
        return TokenLogprob(token, float(logprobs[at]), top)

    def accept(self, token: int) -> None:
        """Tells penalties and grammar that `token` is the next one of the sequence."""
        if not 0 <= token < self._vocab.n_tokens:
            raise InvalidRequestError(
                f"token id: expected 0 to {self._vocab.n_tokens - 1}, got {token}", param="tokens"
            )
        self._n_accepted += 1
        if self._grammar is not None:
            self._grammar.accept(token)
        if self._repetition is not None:
            self._repetition.accept(token)

    def reset(self) -> None:
        """Back to the state after construction, the random numbers too."""
        self._n_accepted = 0
        if self._draw is not None:
            self._draw.reset()
        if self._grammar is not None:
            self._grammar.reset()
        if self._repetition is not None:
            self._repetition.reset()
        self._read_prompt()

    def clone(self) -> Sampler:
        """An independent sampler in the same state: both will draw the same."""
        other = object.__new__(Sampler)
        other.params, other.seed, other._vocab = self.params, self.seed, self._vocab
        other._prompt, other._n_accepted = self._prompt, self._n_accepted
        other._bias_ids, other._bias = self._bias_ids, self._bias
        other._forbidden, other._ends = self._forbidden, self._ends
        other._end_ids = self._end_ids
        other._grammar = self._grammar.clone() if self._grammar is not None else None
        other._repetition = self._repetition.clone() if self._repetition is not None else None
        other._draw = self._draw.clone() if self._draw is not None else None
        other._sigma = self._sigma.clone() if self._sigma is not None else None
        other._row = other._left = None
        return other

    def with_seed(self, seed: int) -> Sampler:
        """One that draws with another seed, from the beginning. Cheaper than to make a new one.

        Only of a sampler that has accepted no token yet.
        """
        assert not self._n_accepted, "a sampler in use has no beginning"
        other = self.clone()
        other.params, other.seed = replace(self.params, seed=seed), seed
        if other._draw is not None:
            other._draw.close()
            other._draw = draw.make(self._vocab, other.params, seed)
        return other

    def close(self) -> None:
        """Frees libllama's samplers; a second call does nothing."""
        for owner in (self._repetition, self._draw, self._sigma):
            if owner is not None:
                owner.close()

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    @property
    def _must_go_on(self) -> bool:
        return self._n_accepted < self.params.min_tokens

    def _read_prompt(self) -> None:
        if self._repetition is not None:
            for token in self._prompt:
                self._repetition.accept(token)

    def _read(self, logits: NDArray[np.float32]) -> Passes[tuple[LogitRow, NDArray[np.float32]]]:
        """What a scan finds in the logits; and they, or a copy if they cannot be written to."""
        if logits.dtype != np.float32 or logits.shape != (self._vocab.n_tokens,):
            raise BackendError(
                f"logits: expected ({self._vocab.n_tokens},) float32, "
                f"got {logits.shape} {logits.dtype}"
            )
        flags = logits.flags
        if not (flags.c_contiguous and flags.writeable):
            logits = logits.copy()
        if self._row is None:
            self._row = LogitRow(self._vocab.n_tokens)
        yield from self._row.read(logits)
        if not self._row.finite:
            raise BackendError("the model's logits are not finite numbers")
        return self._row, logits

    def _ids_to_change(self) -> NDArray[np.int64]:
        """Of bias, min_tokens, penalties and DRY; some may stand there twice."""
        ids = [self._bias_ids]
        if self._must_go_on:
            ids.append(self._end_ids)
        if self._repetition is not None:
            ids.append(self._repetition.ids())
        return np.concatenate(ids) if len(ids) > 1 else self._bias_ids

    def _change(self, logits: NDArray[np.float32]) -> None:
        """Bias, penalties and DRY into the logits (n_vocab,)."""
        logits[self._bias_ids] += self._bias
        if self._must_go_on:
            logits[self._end_ids] = -np.inf
        if self._repetition is not None:
            self._repetition.apply(logits)

    def _choose(self, logits: NDArray[np.float32], row: LogitRow) -> Passes[int]:
        if self.params.greedy:
            if self._grammar is None:
                return self._checked(row.best, logits)
            return int((yield from self._allowed(logits, row, 1)).data["id"][0])
        assert self._draw is not None
        if self._grammar is None and isinstance(self._draw, draw.RowDraw):
            self._checked(row.best, logits)
            token = yield from self._draw.of_row(logits, row)
            if self.params.post_sampling_probs:
                self._left = yield from self._draw.left_of_row(logits, row)
            return token
        k = 0 if self.params.mirostat else self.params.top_k
        candidates = yield from self._allowed(logits, row, k)
        token = yield from self._draw.among(candidates)
        if self.params.post_sampling_probs:
            self._left = candidates.left()
        return token

    def _checked(self, token: int, logits: NDArray[np.float32]) -> int:
        if logits[token] == -np.inf:
            raise _nothing_left()
        return token

    def _allowed(self, logits: NDArray[np.float32], row: LogitRow, k: int) -> Passes[Candidates]:
        """The best `k` candidates (all of them for k <= 0) that the grammar and sigma allow."""
        if self._sigma is None:
            ids = yield from self._allowed_ids(logits, row, k)
        elif self._grammar is None and k > 0 and math.isfinite(row.max):
            ids = yield from best_of(row, logits, k)
            ids = ids[logits[ids] > (yield from draw.sigma_bound(row, self.params.top_n_sigma))]
        else:
            ids = yield from self._allowed_ids(logits, row, 0)
            ids = yield from self._within_sigma(self._sigma, ids, logits)
            ids = ids[ranked(logits[ids], k)] if k > 0 else ids
        candidates = Candidates(self._vocab.lib, ids, logits, ranked=k > 0)
        candidates.prepare(self.params)
        if not len(candidates.data):
            raise _nothing_left()
        return candidates

    def _within_sigma(
        self, sigma: Chain, ids: NDArray[np.int64], logits: NDArray[np.float32]
    ) -> Passes[NDArray[np.int64]]:
        """Of these candidates, those that top-n-sigma keeps, in the same order."""
        candidates = Candidates(self._vocab.lib, ids, logits)
        candidates.drop_forbidden(math.inf)
        if len(candidates.data):
            yield from sigma.applied(candidates.ptr)
        data = candidates.data
        return data["id"][data["logit"] > -np.inf].astype(np.int64)

    def _allowed_ids(
        self, logits: NDArray[np.float32], row: LogitRow, k: int
    ) -> Passes[NDArray[np.int64]]:
        """Ids of the best `k` that the grammar allows, the best first for k > 0.

        Exact: the grammar is asked about the top of the ranking one by one, and about all tokens at
        once where too few of the top passed.
        """
        if self._grammar is None:
            return (yield from best_of(row, logits, k)) if k > 0 else np.arange(len(logits))
        if 0 < k <= _MAX_SINGLY:
            top = yield from row.top(k * _SINGLY_PER_CANDIDATE)
            passed = list(islice(filter(self._grammar.allows, top.tolist()), k))
            if len(passed) == k:
                return np.array(passed, np.int64)
        allowed = self._grammar.allowed_tokens().astype(np.int64)
        return allowed[ranked(logits[allowed], k)] if k > 0 else allowed


def _bias_arrays(
    vocab: Vocab, params: SamplingParams
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    bias = {int(token): float(value) for token, value in params.logit_bias.items()}
    for token in bias:
        if not 0 <= token < vocab.n_tokens:
            raise bad_param("logit_bias", f"token ids from 0 to {vocab.n_tokens - 1}", token)
    if params.ignore_eos:
        bias |= dict.fromkeys(vocab.eog_tokens, -math.inf)
    return np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32)


def _end_tokens(vocab: Vocab, params: SamplingParams) -> frozenset[int]:
    """What may not come before min_tokens."""
    for token in params.stop_token_ids:
        if token >= vocab.n_tokens:
            raise bad_param("stop_token_ids", f"token ids from 0 to {vocab.n_tokens - 1}", token)
    return vocab.eog_tokens.union(params.stop_token_ids) if params.min_tokens else frozenset()


def _nothing_left() -> InvalidRequestError:
    return InvalidRequestError(
        "grammar, logit_bias and min_tokens leave no token to choose", param="grammar"
    )
