"""The scheduler's twin: every sequence alone, in a cache without end or memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

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
        self._before: dict[Hashable, list[Hashable]] = {}

    def observe(self, waiting: set[Hashable]) -> None:
        """The flows that wait and may run now; a flow that is new among them starts to count."""
        self._before = {flow: self._before.get(flow, []) for flow in waiting}

    def admit(self, flow: Hashable) -> None:
        """A flow is served; asserts the bound for the others."""
        self._before[flow] = []
        for other, before in self._before.items():
            if other != flow:
                assert flow not in before, "a flow is served twice while another one waits"
                before.append(flow)
