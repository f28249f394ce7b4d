"""The scheduler's twin: every sequence alone, in a cache without end or memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence

Choose = Callable[[int], int]
"""The next token after a content."""


def contents(salt: str, mix_keys: Sequence[Hashable], tokens: Sequence[int]) -> list[int]:
    """What a cold start computes for each token: a hash of all that its K and V depend on."""
    out: list[int] = []
    content = 0
    for key, token in zip(mix_keys, tokens, strict=True):
        content = hash((salt, key, token, content))
        out.append(content)
    return out


def generate(
    salt: str, mix_keys: Sequence[Hashable], prompt: Sequence[int], n: int, choose: Choose
) -> list[int]:
    """The prompt and `n` tokens chosen after it; mix_keys are those of all tokens."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(choose(contents(salt, mix_keys[: len(tokens)], tokens)[-1]))
    return tokens


class TurnModel:
    """The fairness bound, counted: while a flow waits and may run, each other flow goes once."""

    def __init__(self) -> None:
        self._before: dict[Hashable, set[Hashable]] = {}
        self._n_waiting: Counter[Hashable] = Counter()

    def observe(self, waiting: Iterable[Hashable]) -> None:
        """The flow of each sequence that waits and may run; a new flow starts to count."""
        self._n_waiting = Counter(waiting)
        self._before = {flow: self._before.get(flow, set()) for flow in self._n_waiting}

    def admit(self, flow: Hashable) -> None:
        """A flow is served; asserts the bound for the others that wait."""
        self._n_waiting[flow] -= 1
        del self._before[flow]
        for before in self._before.values():
            assert flow not in before, "a flow is served twice while another one waits"
            before.add(flow)
        if self._n_waiting[flow]:
            self._before[flow] = set()
