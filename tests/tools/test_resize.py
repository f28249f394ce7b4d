"""Adapters to smaller ranks: the best approximation, and an error that is what it says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from loragraph.errors import ConfigError
from loragraph.tools.resize import resize_file
from tests.gguf_bytes import Value, gguf_bytes, tensor
from tests.numerics.compare import nmse
from tests.reference.adapter import read_adapter, read_tensors
from tests.reference.svd import truncated
from tests.tiny import TinyAdapter, TinyLlama


@pytest.mark.parametrize("rank", [1, 3, 5])
def test_each_pair_is_the_best_of_its_rank(rank: int, tmp_path: Path) -> None:
    """As the naive decomposition of the multiplied-out change gives it, error included."""
    adapter = TinyAdapter(rank={"attn_q": 5, "ffn_up": 8}, alpha=3.0, embeddings=True, output=True)
    meant = adapter.write(tmp_path / "a.gguf", TinyLlama())
    report = resize_file(tmp_path / "a.gguf", tmp_path / "r.gguf", rank=rank)
    result = read_adapter(tmp_path / "r.gguf")
    assert {choice.target for choice in report.choices} == meant.pairs.keys()
    for choice in report.choices:
        best, error = truncated(meant.delta(choice.target), rank)
        assert (
            choice.rank == min(rank, choice.rank_before) == result.pairs[choice.target][1].shape[1]
        )
        assert nmse(result.delta(choice.target), best) < 1e-11
        assert choice.error == pytest.approx(
            error if choice.rank < choice.rank_before else 0, abs=1e-6
        )


def test_energy_gives_the_smallest_rank_that_holds_it(tmp_path: Path) -> None:
    """One direction fewer would hold less than asked for."""
    meant = TinyAdapter(rank=8).write(tmp_path / "a.gguf", TinyLlama())
    report = resize_file(tmp_path / "a.gguf", tmp_path / "r.gguf", energy=0.8)
    ranks = set()
    for choice in report.choices:
        ranks.add(choice.rank)
        assert choice.energy >= 0.8
        _, error = truncated(meant.delta(choice.target), choice.rank - 1)
        assert 1 - error**2 < 0.8
    assert ranks - {1, 8}
    capped = resize_file(tmp_path / "a.gguf", tmp_path / "r.gguf", energy=0.8, rank=2)
    assert {choice.rank for choice in capped.choices} == {2}


def test_all_keys_stay_but_alpha(tmp_path: Path) -> None:
    """Names, invocation tokens and facts of the file are kept; the strength too."""
    adapter = TinyAdapter(
        rank=6,
        invocation_tokens=[3, 4],
        embeddings=True,
        metadata={"adapter.lora.task_name": "sql", "loragraph.adapter.tied_output": False},
    )
    adapter.write(tmp_path / "a.gguf", TinyLlama())
    resize_file(tmp_path / "a.gguf", tmp_path / "r.gguf", rank=2)
    fields = GGUFReader(tmp_path / "r.gguf", "r").fields
    assert fields["adapter.lora.alpha"].contents() == 2.0
    assert fields["adapter.lora.task_name"].contents() == "sql"
    assert fields["adapter.alora.invocation_tokens"].contents() == [3, 4]
    assert fields["loragraph.adapter.tied_output"].contents() is False


def test_experts(tmp_path: Path) -> None:
    """Each expert is cut on its own; all get one rank, and the energy is that of all."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape, np.float32) for shape in ((3, 6, 32), (3, 24, 6)))
    keys: dict[str, Value] = {
        "general.type": "adapter",
        "general.architecture": "qwen3moe",
        "adapter.type": "lora",
        "adapter.lora.alpha": 6.0,
    }
    name = "blk.0.ffn_up_exps.weight"
    tensors = [tensor(f"{name}.lora_a", a), tensor(f"{name}.lora_b", b)]
    (tmp_path / "a.gguf").write_bytes(gguf_bytes(keys, tensors))
    (choice,) = resize_file(tmp_path / "a.gguf", tmp_path / "r.gguf", rank=2).choices
    out = read_tensors(tmp_path / "r.gguf")
    product = out[f"{name}.lora_b"].astype(np.float64) @ out[f"{name}.lora_a"].astype(np.float64)
    exact = b.astype(np.float64) @ a.astype(np.float64)
    best = np.stack([truncated(one, 2)[0] for one in exact])
    assert nmse(product, best) < 1e-11
    error = np.linalg.norm(exact - best) / np.linalg.norm(exact)
    assert choice.error == pytest.approx(float(error), rel=1e-5)


@pytest.mark.parametrize("options", [{}, {"rank": 0}, {"energy": 0.0}, {"energy": 1.5}])
def test_wrong_arguments(options: dict[str, float], tmp_path: Path) -> None:
    """A rank or a share that makes no sense is refused."""
    TinyAdapter().write(tmp_path / "a.gguf", TinyLlama())
    with pytest.raises(ConfigError):
        resize_file(tmp_path / "a.gguf", tmp_path / "r.gguf", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "r.gguf").exists()
