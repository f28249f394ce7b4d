"""The choice among what bias, penalties and grammar have left: libllama's chain, or our own draw.

With top-k, and with mirostat, libllama's chain filters and draws over the few best. Without top-k
its array of all candidates would cost more than the model: there the filters are bounds on the
logits, and the token is found in the row itself, from the same random number and with the same sums
as in libllama's chain.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from loragraph.engine import chain
from loragraph.engine.candidates import Candidates, Left
from loragraph.engine.chain import Chain
from loragraph.engine.params import SamplingParams
from loragraph.ggml.lib import Library
from loragraph.kernels.sampling import (
    HIGHEST,
    LOWEST,
    MASS_ERROR,
    LogitRow,
    MersenneTwister,
    Passes,
    draw_candidate,
)
from loragraph.vocab.vocab import Vocab

_FEW = 256  # candidates that are sorted
_CERTAIN = 1 + 1e-5  # beyond the errors of masses

Logits = NDArray[np.float32]


class Draw(Protocol):
    """A sequence's random numbers, and the filters in front of them."""

    def among(self, candidates: Candidates) -> Passes[int]:
        """One of the candidates, of which there is at least one."""

    def reset(self) -> None:
        """Back to the seed."""

    def clone(self) -> Draw:
        """Another one in the same state."""

    def close(self) -> None:
        """Frees libllama's parts; a second call does nothing."""


def make(vocab: Vocab, params: SamplingParams, seed: int) -> Draw:
    """The draw for these parameters, which are not greedy."""
    if params.top_k > 0 or params.mirostat:
        return ChainDraw(chain.filters(vocab, params, seed))
    return RowDraw(vocab.lib, params, MersenneTwister(seed))


class ChainDraw:
    """libllama filters and draws."""

    def __init__(self, filters: Chain) -> None:
        self._filters = filters

    def among(self, candidates: Candidates) -> Passes[int]:
        """One of the candidates."""
        yield from self._filters.applied(candidates.ptr)
        return candidates.selected

    def reset(self) -> None:
        """Back to the seed."""
        self._filters.reset()

    def clone(self) -> ChainDraw:
        """Another one in the same state."""
        return ChainDraw(self._filters.clone())

    def close(self) -> None:
        """Frees the chain."""
        self._filters.close()


class RowDraw:
    """Own draw, own cuts where they are bounds; libllama's filters for the rest."""

    def __init__(
        self,
        lib: Library,
        params: SamplingParams,
        random: MersenneTwister,
        chains: tuple[Chain, Chain] | None = None,
    ) -> None:
        self._lib = lib
        self._params = params
        self._random = random
        if chains is None:
            chains = chain.cuts(lib, params), chain.changes(lib, params, random.seed)
        self._cuts, self._changes = chains
        # libllama's are F32
        self._top_p, self._min_p, self._typical_p, self._temperature = (
            float(np.float32(value))
            for value in (params.top_p, params.min_p, params.typical_p, params.temperature)
        )
        self._min_p_below = np.float32(math.log(self._min_p) if self._min_p > 0 else LOWEST)
        self._last: Candidates | None = None  # of the last draw, if libllama's filters made them
        # what wants an array of all that is left
        self._lists = chain.has_xtc(params) or params.dynatemp_range > 0
        self._lists |= self._typical_p < 1 and (self._top_p < 1 or self._min_p > 0)
        self._lists |= params.min_keep > 1

    def among(self, candidates: Candidates) -> Passes[int]:
        """One of the candidates, after typical, top-p, min-p, XTC and temperature."""
        yield from self._cuts.applied(candidates.ptr)
        return (yield from self._among_cut(candidates))

    def of_row(self, logits: Logits, row: LogitRow) -> Passes[int]:
        """One token of `logits` (n,) f32, which `row` has read; some of them is above -inf."""
        self._last = None
        if row.max == HIGHEST:  # a bias has overflowed
            return row.best
        lo = yield from sigma_bound(row, self._params.top_n_sigma)
        if self._params.min_keep > 1:  # bounds know no counts
            return (yield from self._listed(logits, lo))
        if self._top_p < 1 and self._typical_p >= 1:
            few = yield from self._nucleus(logits, row, lo)
            if few is not None:
                candidates = Candidates(self._lib, few, logits, ranked=True)
                return (yield from self._among_cut(candidates))
            if not self._lists:
                return (yield from self._within_nucleus(logits, row, lo))
            return (yield from self._listed(logits, lo))
        if self._top_p >= 1 and self._typical_p >= 1:
            lo = max(lo, self._min_p_bound(row))
        if self._lists:
            return (yield from self._listed(logits, lo))
        if self._typical_p < 1:
            token = yield from row.typical(self._typical_p, self._random, self._temperature, lo)
            assert token >= 0  # the best of all is above any bound
            return token
        return (yield from self._drawn(row, lo))

    def left_of_row(self, logits: Logits, row: LogitRow) -> Passes[Left]:
        """What the last draw was among."""
        if self._last is None:  # it was our own, by bounds: no filter of these draws itself
            if row.max == HIGHEST:
                return np.array([row.best]), np.zeros(1)
            lo = yield from sigma_bound(row, self._params.top_n_sigma)
            self._last = self._candidates(logits, lo)
            yield from self._cuts.applied(self._last.ptr)
            yield from self._changes.applied(self._last.ptr)
        return self._last.left()

    def reset(self) -> None:
        """Back to the seed."""
        self._last = None
        self._random.reset()
        self._changes.reset()

    def clone(self) -> RowDraw:
        """Another one in the same state."""
        chains = self._cuts.clone(), self._changes.clone()
        return RowDraw(self._lib, self._params, self._random.clone(), chains)

    def close(self) -> None:
        """Frees the chains."""
        self._cuts.close()
        self._changes.close()

    def _among_cut(self, candidates: Candidates) -> Passes[int]:
        """Of candidates that passed typical and top-p."""
        self._last = candidates if self._params.post_sampling_probs else None
        yield from self._changes.applied(candidates.ptr)
        ptr = candidates.ptr
        index = draw_candidate(self._lib.address(ptr.data), int(ptr.size), self._random.uniform())
        return int(ptr.data[index].id)

    def _listed(self, logits: Logits, lo: float) -> Passes[int]:
        """All above `lo` through libllama's filters."""
        return (yield from self.among(self._candidates(logits, lo)))

    def _candidates(self, logits: Logits, lo: float) -> Candidates:
        candidates = Candidates(self._lib, np.flatnonzero(logits > lo), logits)
        candidates.prepare(self._params)
        return candidates

    def _drawn(self, row: LogitRow, lo: float) -> Passes[int]:
        token = yield from row.draw(self._random.uniform(), self._temperature, lo)
        return row.best if token < 0 else token

    def _min_p_bound(self, row: LogitRow) -> float:
        """Whatever lies above it is at least min_p times as likely as the best."""
        if self._min_p <= 0:
            return LOWEST
        return below(float(np.float32(row.max) + self._min_p_below))

    def _nucleus(
        self, logits: Logits, row: LogitRow, lo: float
    ) -> Passes[NDArray[np.int64] | None]:
        """The ids that top-p keeps, best first, if they are few."""
        # No weight is above 1: this many candidates cannot have more mass than they are.
        if self._top_p * (yield from row.estimate(lo)) > 2 * _FEW:
            return None
        wanted = self._top_p * (yield from row.mass(lo))
        if wanted > _FEW:
            return None
        ids = yield from row.top(_FEW)
        values = logits[ids].astype(np.float64)
        reached = np.cumsum(np.exp(values - row.max)) >= wanted
        n = int(reached.argmax()) + 1
        return ids[:n] if reached[n - 1] and values[n - 1] > lo else None

    def _within_nucleus(self, logits: Logits, row: LogitRow, lo: float) -> Passes[int]:
        """Draws until a token lies in the nucleus: the mass above it is less than top_p.

        After a token that does not, only those above it are left: at least as likely as `top_p`,
        the next draw is the last.
        """
        p = self._top_p
        floor = max(lo, self._min_p_bound(row))
        mass = math.inf
        while True:
            token = yield from self._drawn(row, floor)
            edge = float(logits[token])
            if floor == lo:
                mass = self._mass_bound(row.drawn_mass, len(logits))
            above_it, rest = yield from row.split(
                token, edge, outer=lo, most=p * mass, rest=(1 - p) * mass
            )
            if rest >= (1 - p) * mass or token == row.best:
                return token
            if above_it < p * mass:  # all was summed
                mass = above_it + rest
                if abs(above_it - p * mass) < 2 * MASS_ERROR * mass:
                    above_it, rest = yield from row.split(token, edge, outer=lo, exact=True)
                    mass = above_it + rest
                if above_it < p * mass:
                    return token
                mass *= _CERTAIN
            floor = max(floor, below(edge))

    def _mass_bound(self, mass: float, n: int) -> float:
        """More than the mass at temperature 1 of `n` tokens that have this one at the request's.

        No weight w is above 1. Above 1, sum(w^T) <= sum(w); below, Hoelder: sum(w^T) <= n^(1 - T)
        sum(w)^T.
        """
        t = self._temperature
        return _CERTAIN * (mass if t >= 1 else n ** (1 - t) * mass**t)


def sigma_bound(row: LogitRow, n: float) -> Passes[float]:
    """Below what top-n-sigma keeps: max - n standard deviations; -inf where it is off."""
    return below(row.max - n * (yield from row.deviation())) if n > 0 else LOWEST


def below(value: float) -> float:
    """The next F32 below."""
    return float(np.nextafter(np.float32(value), np.float32(LOWEST)))
