"""Random programs of decode, clear, truncate and set_adapters against the float64 reference."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from loragraph.engine.context import Context
from loragraph.engine.model import Model
from tests.numerics.compare import nmse
from tests.numerics.runs import LOWERINGS, LoweringName, open_context, random_tokens
from tests.reference.adapter import AdapterArrays
from tests.reference.llama import Active, ReferenceLlama
from tests.tiny import TinyAdapter, TinyLlama

EXACT_NMSE = 2e-12  # float32 rounding, as elsewhere
N_OPERATIONS = 25
ADAPTERS = (
    TinyAdapter(seed=1, embeddings=True, output=True),
    TinyAdapter(seed=2, rank={"attn_q": 2, "ffn_down": 7}, targets=("attn_q", "ffn_down")),
    TinyAdapter(seed=3, rank=33, alpha=None, targets=("attn_v", "ffn_up"), layers=(1,), b_std=0.02),
)


class Setting:
    """One model with its adapters, and the reference."""

    def __init__(self, folder: Path) -> None:
        tiny = TinyLlama()
        base = tiny.write(folder / "m.gguf")
        self.reference = ReferenceLlama.load(base)
        self.model = Model.load(base, n_threads=1)
        self.paths = [folder / f"{index}.gguf" for index in range(len(ADAPTERS))]
        self.arrays: list[AdapterArrays] = [
            adapter.write(path, tiny) for adapter, path in zip(ADAPTERS, self.paths, strict=True)
        ]
        self.adapters = [self.model.load_adapter(path) for path in self.paths]


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    """Shared by all programs."""
    setting = Setting(tmp_path_factory.mktemp("programs"))
    yield setting
    setting.model.close()


class Program:
    """Random operations on a context, with a model of what its sequence must be."""

    def __init__(self, setting: Setting, context: Context, seed: int) -> None:
        self._setting = setting
        self._context = context
        self._rng = np.random.default_rng(seed)
        self._tokens: list[int] = []
        self._carried: list[list[float]] = []  # scales of each token, as it was appended
        self._scales = [0.0] * len(ADAPTERS)

    def run(self) -> None:
        """All operations; each decode is compared."""
        operations = (self.decode, self.decode, self.set_adapters, self.truncate, self.clear)
        for _ in range(N_OPERATIONS):
            operations[self._rng.choice(5, p=(0.4, 0.2, 0.25, 0.1, 0.05))]()
            assert self._context.n_past == len(self._tokens)

    def decode(self) -> None:
        """Some tokens, at times all but the last one's logits left out."""
        n = int(self._rng.choice([1, 1, 2, 5, 23]))
        if len(self._tokens) + n > self._context.n_ctx:
            return
        new = random_tokens(n, seed=int(self._rng.integers(1 << 30)))
        last_only = bool(self._rng.integers(2))
        actual = self._context.decode(new, outputs="last" if last_only else "all")
        self._tokens += new
        self._carried += [self._scales] * n
        expected = self._expected()[-1:] if last_only else self._expected()[-n:]
        assert nmse(actual, expected) <= EXACT_NMSE

    def set_adapters(self) -> None:
        """Another set, the empty one included."""
        self._scales = self._rng.choice([0.0, 0.0, 1.0, -0.5, 0.25], len(ADAPTERS)).tolist()
        pairs = zip(self._setting.adapters, self._scales, strict=True)
        self._context.set_adapters(dict(pairs))

    def truncate(self) -> None:
        """Keeps a prefix."""
        n = int(self._rng.integers(len(self._tokens) + 1))
        self._context.truncate(n)
        del self._tokens[n:], self._carried[n:]

    def clear(self) -> None:
        """Keeps nothing but the adapters."""
        self._context.clear()
        self._tokens, self._carried = [], []

    def _expected(self) -> npt.NDArray[np.float64]:
        scales = np.array(self._carried)
        active: list[Active] = list(zip(self._setting.arrays, scales.T, strict=True))
        return self._setting.reference.logits(self._tokens, active)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_random_program_is_the_reference(
    lowering: LoweringName, seed: int, setting: Setting
) -> None:
    """Whatever is called in whatever order, each decode gives the reference's logits for tokens
    that each carry the adapters set when they were appended."""
    n_batch = 7 if seed % 2 else 256
    with open_context(setting.model, lowering=lowering, n_batch=n_batch) as context:
        Program(setting, context, seed).run()


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_an_equal_adapter_takes_over(lowering: LoweringName, setting: Setting) -> None:
    """After a set was changed to another file's equal adapter, the first can be closed, and the
    same bits come from the second's memory."""
    first, second = (setting.model.load_adapter(setting.paths[0]) for _ in range(2))
    tokens = random_tokens(9)
    with open_context(setting.model, lowering=lowering) as context:
        context.set_adapters({first: 0.5})
        expected = context.decode(tokens)
        context.set_adapters({second: 0.5})
        first.close()
        context.clear()
        assert np.array_equal(context.decode(tokens), expected)
    second.close()
