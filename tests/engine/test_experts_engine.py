"""The engine on models with experts: requests with unlike adapters in one batch, and sessions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from loragraph.engine.engine import Engine
from loragraph.engine.model import Model
from loragraph.engine.params import SamplingParams
from loragraph.engine.request import Request
from tests.numerics.runs import random_tokens
from tests.tiny import TinyAdapter, TinyModel
from tests.tiny_experts import (
    TINY_EXPERTS,
    TinyDeepSeek2,
    TinyGptOss,
    TinyGraniteMoE,
    TinyMixtral,
    TinyQwen2MoE,
    TinyQwen3MoE,
)

PROMPT = random_tokens(40)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
MIXES: list[dict[str, float]] = [{}, {"a": 1.0}, {"b": 0.5}, {"a": -0.5, "b": 1.0}]
MODELS: dict[str, TinyModel] = {
    "mixtral": TinyMixtral(),
    "qwen2moe": TinyQwen2MoE(),
    "qwen3moe": TinyQwen3MoE(),
    "granitemoe": TinyGraniteMoE(),
    "gpt-oss": TinyGptOss(n_swa=8),
    "deepseek2": TinyDeepSeek2(),
}


class Files:
    """A base and two adapters of every matrix, of unlike ranks."""

    def __init__(self, folder: Path, tiny: TinyModel) -> None:
        self.base = tiny.write(folder / "m.gguf")
        self.paths = {name: folder / f"{name}.gguf" for name in "ab"}
        for i, path in enumerate(self.paths.values()):
            TinyAdapter(rank=3 + i, seed=i + 1, output=True).write(path, tiny)


@pytest.fixture(params=MODELS)
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    return Files(tmp_path, MODELS[request.param])


@pytest.fixture
def model(files: Files) -> Iterator[Model]:
    with Model.load(files.base, n_threads=1) as model:
        yield model


def requests() -> list[Request]:
    """Two prompts with a common stem for each mix."""
    return [
        Request(PROMPT[: 20 + 9 * half], params=GREEDY, adapters=mix)
        for half in range(2)
        for mix in MIXES
    ]


def test_every_family_with_experts_is_here() -> None:
    """No family is left out of the tests below."""
    assert {tiny.arch for tiny in MODELS.values()} == TINY_EXPERTS.keys()


def test_mixed_requests_give_what_they_give_alone(files: Files, model: Model) -> None:
    """Eight requests with four mixes in one batch: the tokens of each by itself."""
    with Engine(model, files.paths, n_ctx=1024, kv_type="f32") as engine:
        alone = [engine.generate_batch([one])[0].tokens for one in requests()]
    with Engine(model, files.paths, n_ctx=1024, kv_type="f32") as engine:
        mixed = [result.tokens for result in engine.generate_batch(requests())]

    assert mixed == alone
    assert len({tuple(tokens) for tokens in alone[:4]}) == 4


def test_saved_prompts_are_found_again(files: Files, model: Model, tmp_path: Path) -> None:
    """Cells of latent attention hold K alone, and are saved and loaded like any others."""
    with Engine(model, files.paths, n_ctx=1024) as engine:
        expected = engine.generate(PROMPT, GREEDY, adapters={"a": 1.0}).tokens
        assert engine.save_session(tmp_path / "s") > 0
    with Engine(model, files.paths, n_ctx=1024) as engine:
        assert engine.load_session(tmp_path / "s") > 0
        result = engine.generate(PROMPT, GREEDY, adapters={"a": 1.0})
    assert result.tokens == expected
    assert result.n_cached > len(PROMPT) // 2
