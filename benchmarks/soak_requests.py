"""The requests of a soak: a fixed number of unlike ones, so that each is computed alone once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import loragraph
from loragraph import SamplingParams

INVOCATIONS = ((301, 302), (303, 303))
"""Of the aLoRA files, in turns; the prompts have none of these tokens but for an invocation."""

N_ORDINARY = 300  # token ids from 3 on
MAX_ADAPTERS = 3  # of one request
MAX_GENERATED = 90  # beyond the block that a sequence's room is reckoned with at its admission
_MAX_PROMPT = 64

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
WAYS = (
    GREEDY,
    GREEDY,
    SamplingParams(temperature=0, ignore_eos=True, repeat_penalty=1.3, frequency_penalty=0.3),
    SamplingParams(temperature=0.9, ignore_eos=True),
    SamplingParams(temperature=1.2, top_k=0, top_p=1.0, min_p=0.0, ignore_eos=True),
    SamplingParams(mirostat=2, ignore_eos=True),
    SamplingParams(dry_multiplier=1.0, xtc_probability=0.5, ignore_eos=True),
    SamplingParams(grammar='root ::= ("yes" | "no" | [a-f]) (" " root)?'),
)
"""How tokens are chosen; those that draw get a seed of their own."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One of the unlike requests; `adapters` are names with scales."""

    prompt: tuple[int, ...]
    adapters: tuple[tuple[str, float], ...]
    params: SamplingParams  # with a seed
    n: int
    cache_salt: str
    scores: bool = False  # the prompt's tokens, which computes again what the tree has

    def request(self, deadline_s: float | None = None) -> loragraph.Request:
        """As the engine takes it."""
        return loragraph.Request(
            list(self.prompt),
            dict(self.adapters),
            self.params,
            n=self.n,
            cache_salt=self.cache_salt,
            deadline_s=deadline_s,
            prompt_logprobs=0 if self.scores else None,
        )


def make_kinds(n: int, plain: Sequence[str], activated: Sequence[str], seed: int) -> list[Kind]:
    """`n` unlike requests for adapters of these names; half share the beginning of a prompt."""
    rng = random.Random(seed)
    stems = [_tokens(rng, 30) for _ in range(4)]
    return [_kind(rng, i, stems, plain, activated) for i in range(n)]


def _kind(
    rng: random.Random,
    number: int,
    stems: Sequence[list[int]],
    plain: Sequence[str],
    activated: Sequence[str],
) -> Kind:
    prompt = rng.choice(stems)[: rng.randrange(1, 30)] if rng.random() < 0.5 else []
    prompt = prompt + _tokens(rng, rng.randrange(1, 28))
    names = rng.sample(plain, rng.randrange(MAX_ADAPTERS))
    if rng.random() < 0.3:
        names.append(rng.choice(activated))
        # absent at times, or one that the file which the name means just then does not have
        for invocation in rng.sample(INVOCATIONS, rng.randrange(len(INVOCATIONS) + 1)):
            at = rng.randrange(len(prompt) + 1)
            prompt = prompt[:at] + list(invocation) + prompt[at:]
    assert len(prompt) <= _MAX_PROMPT
    most = MAX_GENERATED if rng.random() < 0.3 else MAX_GENERATED // 3
    params = replace(
        WAYS[number % len(WAYS)], max_tokens=rng.randrange(1, most + 1), seed=1000 * number
    )
    return Kind(
        tuple(prompt),
        tuple((name, rng.choice([1.0, 0.5, -0.5])) for name in names),
        params,
        n=rng.choice([1, 1, 1, 1, 2, 3]),
        cache_salt=rng.choice(["", "", "one", "another"]),
        scores=rng.random() < 0.15,
    )


def _tokens(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(3, N_ORDINARY) for _ in range(n)]
