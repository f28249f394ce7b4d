"""A thousand registered adapters over sixteen places, with a real engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from loragraph.engine.engine import Engine
from loragraph.engine.params import SamplingParams
from tests.rss import resident_bytes
from tests.tiny import TinyAdapter, TinyLlama

N_ADAPTERS, N_RESIDENT, N_SEATS = 1000, 16, 4
PROMPT = [5, 6, 7, 8]
SHORT = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
MAX_GROWTH = 10 << 20
"""Bytes of resident memory over 1,000 loads: keeping what each takes would come to 100 MB."""


def write_adapters(folder: Path, tiny: TinyLlama) -> dict[str, Path]:
    """One adapter, and others of other strength: made fast, and each with a text of its own."""
    adapter = TinyAdapter(rank=32, targets=("attn_q", "ffn_up"))
    whole = adapter.to_bytes(tiny)
    n_tensors = sum(len(tensor.data) for tensor in adapter.raw_tensors(tiny))
    head, values = whole[:-n_tensors], np.frombuffer(whole[-n_tensors:], np.float32)
    paths = {f"n{i}": folder / f"n{i}.gguf" for i in range(N_ADAPTERS)}
    for i, path in enumerate(paths.values()):
        path.write_bytes(head + (values * np.float32(1 - i / (2 * N_ADAPTERS))).tobytes())
    return paths


async def finished(engine: Engine, names: Sequence[str]) -> list[int]:
    """All of one request each at once; which of them ended, in that order."""
    order: list[int] = []

    async def ask(i: int) -> None:
        result = await engine.agenerate(
            [*PROMPT, 9 + i % 200], params=SHORT, adapters={names[i]: 1.0}
        )
        assert len(result.tokens) == 2
        assert [use.name for use in result.adapters] == [names[i]]
        order.append(i)

    await asyncio.gather(*(ask(i) for i in range(len(names))))
    return order


def scores(engine: Engine, names: Sequence[str], salt: str) -> list[NDArray[np.float64]]:
    """Log-probabilities of a prompt of which the prefix tree knows nothing."""
    return [engine.score([*PROMPT] * 4, {n: 1.0}, cache_salt=salt).logprobs for n in names]


@pytest.mark.slow
def test_a_thousand_adapters_over_sixteen_places(tmp_path: Path) -> None:
    """3,966 requests: none lost or starved by a flood for others, memory flat, the same bits."""
    tiny = TinyLlama()
    paths = write_adapters(tmp_path, tiny)
    names = list(paths)
    hot, cold = names[:N_RESIDENT], names[-20:]
    flood = hot * 60
    probes = [names[0], names[500], names[999]]
    growth = []
    with Engine(
        tiny.write(tmp_path / "m.gguf"),
        paths,
        n_ctx=512,
        max_sequences=N_SEATS,
        max_adapters=N_RESIDENT,
        max_waiting=1000,
        n_threads=1,
    ) as engine:
        first = scores(engine, probes, "first")
        for _ in range(2):
            assert sorted(asyncio.run(finished(engine, names))) == list(range(N_ADAPTERS))
            order = asyncio.run(finished(engine, [*flood, *cold]))
            assert sorted(order) == list(range(len(flood) + len(cold)))
            last = max(order.index(i) for i in range(len(flood), len(order)))
            # the bound of engine/waiting.py, and what runs already
            n_flows = len(hot) + len(cold)
            assert last < n_flows - 1 + n_flows * 2 * N_SEATS + 2 * N_SEATS < len(flood)
            growth.append(resident_bytes())
        before = engine.stats().pool
        again = scores(engine, probes, "again")
        after = engine.stats()
    assert after.pool.n_loads >= before.n_loads + 2
    assert all(np.array_equal(one, other) for one, other in zip(first, again, strict=True))
    assert len({one.tobytes() for one in first}) == len(probes)
    assert after.core.n_finished == after.core.n_submitted == 3966
    assert (after.core.n_jobs, after.pool.n_tickets, after.pool.n_failures) == (0, 0, 0)
    assert after.pool.n_resident == N_RESIDENT
    assert after.pool.n_evictions > 2 * (N_ADAPTERS - N_RESIDENT)
    assert growth[1] - growth[0] < MAX_GROWTH
