"""Two ways to the same logits: what must be equal, to the bit or within a stated bound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as GGMLType

from loragraph.adapters.adapter import Adapter
from loragraph.engine.model import Model
from loragraph.errors import AdapterFormatError
from tests.numerics.compare import nmse
from tests.numerics.runs import (
    LIBLLAMA_MODES,
    LOWERINGS,
    Logits,
    LoweringName,
    loragraph_logits,
    open_context,
    random_tokens,
    run,
)
from tests.reference.llama import Active, ReferenceLlama
from tests.reference.merge import merge
from tests.tiny import TinyAdapter, TinyLlama

# Measured in exact mode: branch and routed 1e-13, chunks 6e-14, merged 3e-13.
ROUNDING_NMSE = 2e-12
# Measured with F16 cells and flash attention: 4e-9.
DEFAULT_NMSE = 3e-8

TOKENS = random_tokens(30)
FIRST = TinyAdapter(embeddings=True, output=True, seed=1)
SECOND = TinyAdapter(
    rank={"attn_q": 2, "ffn_down": 7}, alpha=None, targets=("attn_q", "ffn_down"), seed=5
)
THIRD = TinyAdapter(rank=16, alpha=4.0, targets=("attn_v", "ffn_up"), layers=(1,), seed=9)
ALL = (FIRST, SECOND, THIRD)


class Setting:
    """One model with three adapters of overlapping and unlike targets and ranks."""

    def __init__(self, folder: Path, model: TinyLlama) -> None:
        self.tiny = model
        self.folder = folder
        self.base = model.write(folder / "m.gguf")
        self.paths = [folder / f"{index}.gguf" for index in range(len(ALL))]
        self.arrays = [one.write(p, model) for one, p in zip(ALL, self.paths, strict=True)]
        self.model = Model.load(self.base, n_threads=1)
        self.adapters = [self.model.load_adapter(path) for path in self.paths]

    def logits(self, scales: dict[int, float], **options: Any) -> Logits:
        """Logits of TOKENS in a context of its own; adapters by number, in that order."""
        chunk = options.pop("chunk", 0)
        with open_context(self.model, **options) as context:
            chosen = {self.adapters[index]: scale for index, scale in scales.items()}
            return run(context, TOKENS, chosen, chunk)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    """An untied F32 model, shared: tests leave it as they found it."""
    return Setting(tmp_path_factory.mktemp("equalities"), TinyLlama())


SETS: dict[str, dict[int, float]] = {
    "one": {0: 1.0},
    "negative": {0: -1.0},
    "no_alpha": {1: 0.5},
    "two": {0: 0.5, 1: 1.0},
    "three": {0: 0.5, 1: -0.7, 2: 2.0},
    "unlike_targets": {1: 1.0, 2: 1.0},
}


@pytest.mark.parametrize("scales", SETS.values(), ids=SETS)
@pytest.mark.parametrize("mode", LIBLLAMA_MODES)
def test_all_lowerings_agree(mode: str, scales: dict[int, float], setting: Setting) -> None:
    """All lowerings give the same logits for any set."""
    branch, *others = (
        setting.logits(scales, mode=LIBLLAMA_MODES[mode], lowering=lowering)
        for lowering in LOWERINGS
    )
    assert nmse(branch, setting.logits({})) > 1e-4
    for other in others:
        assert nmse(other, branch) <= (ROUNDING_NMSE if mode == "exact" else DEFAULT_NMSE)


@pytest.mark.parametrize("scales", SETS.values(), ids=SETS)
def test_all_agree_with_the_reference(scales: dict[int, float], setting: Setting) -> None:
    """Any set of adapters gives the float64 reference's logits."""
    active: list[Active] = [(setting.arrays[index], scale) for index, scale in scales.items()]
    expected = ReferenceLlama.load(setting.base).logits(TOKENS, active)
    for lowering in LOWERINGS:
        assert nmse(setting.logits(scales, lowering=lowering), expected) <= ROUNDING_NMSE


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_scale_zero_is_the_base(lowering: LoweringName, setting: Setting) -> None:
    """Scale 0 and -0 give the base's bits."""
    base = setting.logits({}, lowering=lowering)
    zero = setting.logits({0: 0.0, 1: -0.0}, lowering=lowering)
    assert np.array_equal(zero, base)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_detached_is_never_attached(lowering: LoweringName, setting: Setting) -> None:
    """After adapters were used and detached, base and other adapters give the bits of a new
    context."""
    first, second, _ = setting.adapters
    with open_context(setting.model, lowering=lowering) as context:
        run(context, TOKENS, {first: 1.0, second: 0.5})
        base = run(context, TOKENS, {})
        run(context, TOKENS, {first: -2.0})
        other = run(context, TOKENS, {second: 1.0})
    assert np.array_equal(base, setting.logits({}, lowering=lowering))
    assert np.array_equal(other, setting.logits({1: 1.0}, lowering=lowering))


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_the_order_of_adapters_does_not_matter(lowering: LoweringName, setting: Setting) -> None:
    """Whoever is named or registered first, the bits are the same."""
    expected = setting.logits({0: 0.5, 1: 1.0, 2: -1.0}, lowering=lowering)
    assert np.array_equal(setting.logits({2: -1.0, 1: 1.0, 0: 0.5}, lowering=lowering), expected)
    with Model.load(setting.base, n_threads=1) as model:
        third, second, first = (model.load_adapter(path) for path in reversed(setting.paths))
        with open_context(model, lowering=lowering) as context:
            actual = run(context, TOKENS, {second: 1.0, third: -1.0, first: 0.5})
    assert np.array_equal(actual, expected)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("scales", [{0: 1.0}, {0: 0.5, 1: -1.0}], ids=["one", "two"])
def test_runtime_is_merged(
    scales: dict[int, float], lowering: LoweringName, setting: Setting, tmp_path: Path
) -> None:
    """Adapters at run time give the logits of weights merged with them."""
    pairs = [(setting.arrays[index], scale) for index, scale in scales.items()]
    merged = merge(setting.base, pairs, tmp_path / "merged.gguf")
    expected = loragraph_logits(merged, [], [()], TOKENS)[()]
    assert nmse(setting.logits(scales, lowering=lowering), expected) <= ROUNDING_NMSE


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("chunk", [1, 7, 29])
@pytest.mark.parametrize("mode", LIBLLAMA_MODES)
def test_chunked_prefill_is_whole(
    mode: str, chunk: int, lowering: LoweringName, setting: Setting
) -> None:
    """A prompt in pieces gives the logits of the whole prompt, and so does a small n_batch.

    Pieces by call and pieces by n_batch are the same steps: the bits are equal.
    """
    scales = {0: 0.5, 1: 1.0}
    options: dict[str, Any] = {"mode": LIBLLAMA_MODES[mode], "lowering": lowering}
    whole = setting.logits(scales, **options)
    by_call = setting.logits(scales, chunk=chunk, **options)
    by_batch = setting.logits(scales, n_batch=chunk, **options)
    assert np.array_equal(by_call, by_batch)
    assert nmse(by_call, whole) <= (ROUNDING_NMSE if mode == "exact" else DEFAULT_NMSE)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_the_last_row_alone_is_the_last_of_all(lowering: LoweringName, setting: Setting) -> None:
    """outputs="last" gives the last row, with adapters on the last FFN and the head too."""
    expected = setting.logits({0: 1.0, 2: 1.0}, lowering=lowering)[-1:]
    with open_context(setting.model, lowering=lowering) as context:
        context.set_adapters({setting.adapters[0]: 1.0, setting.adapters[2]: 1.0})
        actual = context.decode(TOKENS, outputs="last")
    assert actual.shape == expected.shape
    assert nmse(actual, expected) <= ROUNDING_NMSE


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_truncated_is_never_seen(lowering: LoweringName, setting: Setting) -> None:
    """Tokens taken back leave no trace in those that follow."""
    with open_context(setting.model, lowering=lowering) as context:
        context.set_adapters({setting.adapters[0]: 1.0})
        context.decode(TOKENS[:10])
        expected = context.decode(TOKENS[10:])
        context.truncate(10)
        context.decode(TOKENS[::-1])
        context.truncate(10)
        assert np.array_equal(context.decode(TOKENS[10:]), expected)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_earlier_cells_keep_their_adapters(lowering: LoweringName, setting: Setting) -> None:
    """A change of adapters concerns the tokens that follow: a scale for each token."""
    n = 12
    scales = np.where(np.arange(len(TOKENS)) < n, 0.0, 1.0)
    expected = ReferenceLlama.load(setting.base).logits(TOKENS, [(setting.arrays[0], scales)])
    with open_context(setting.model, lowering=lowering) as context:
        base = context.decode(TOKENS[:n])
        context.set_adapters({setting.adapters[0]: 1.0})
        actual = np.concatenate([base, context.decode(TOKENS[n:])])
    assert nmse(actual, expected) <= ROUNDING_NMSE


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_equal_content_in_two_files_sums(lowering: LoweringName, setting: Setting) -> None:
    """Two adapters of equal content act as one with the sum of their scales, to the bit."""
    copy = setting.folder / "copy.gguf"
    copy.write_bytes(setting.paths[0].read_bytes())
    with (
        setting.model.load_adapter(copy) as twin,
        open_context(setting.model, lowering=lowering) as context,
    ):
        first = setting.adapters[0]
        summed = run(context, TOKENS, {first: 0.25, twin: 0.5})
        alone = run(context, TOKENS, {first: 0.75})
        twin_alone = run(context, TOKENS, {twin: 0.75})
        cancelled = run(context, TOKENS, {first: 1.0, twin: -1.0})
        base = run(context, TOKENS, {})
    assert np.array_equal(summed, alone)
    assert np.array_equal(twin_alone, alone)
    assert np.array_equal(cancelled, base)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("output", [False, True], ids=["table", "table+head"])
@pytest.mark.parametrize("tied_output", [False, True, None])
def test_tied_embeddings(
    tied_output: bool | None, output: bool, lowering: LoweringName, tmp_path: Path
) -> None:
    """On a tied base the table's pair changes the lookup, and the head where it shall; a pair of
    output.weight changes the head alone, and beside it the table's pair leaves the head."""
    model = TinyLlama(tied=True)
    base, path = model.write(tmp_path / "m.gguf"), tmp_path / "a.gguf"
    arrays = TinyAdapter(embeddings=True, output=output, targets=("attn_q",)).write(path, model)
    if output and tied_output:
        with pytest.raises(AdapterFormatError, match="has a pair of its own"):
            _tied_logits(base, path, lowering, tied_output)
        return
    changes_head = tied_output is not False and not output
    reference = ReferenceLlama.load(base)
    expected = reference.logits(TOKENS, [(arrays, 0.5)], tied_output=changes_head)
    actual = _tied_logits(base, path, lowering, tied_output)
    assert nmse(actual, expected) <= ROUNDING_NMSE
    other = reference.logits(TOKENS, [(arrays, 0.5)], tied_output=not changes_head)
    assert nmse(actual, other) > 1e-4


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_pair_of_the_head_on_a_tied_base(lowering: LoweringName, tmp_path: Path) -> None:
    """output.weight's pair alone leaves the lookup of a tied base as it is."""
    model = TinyLlama(tied=True)
    base, path = model.write(tmp_path / "m.gguf"), tmp_path / "a.gguf"
    arrays = TinyAdapter(output=True, targets=()).write(path, model)
    expected = ReferenceLlama.load(base).logits(TOKENS, [(arrays, 0.5)])
    assert nmse(_tied_logits(base, path, lowering, None), expected) <= ROUNDING_NMSE


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("adapter_type", ["F32", "F16", "BF16", "Q8_0"])
def test_token_table_adapters_of_every_type(adapter_type: str, tied: bool, tmp_path: Path) -> None:
    """A pair of the token table works in every adapter type: routed is exact, branch rounds
    activations as ggml does (measured: F16 5e-8, BF16 3e-6, Q8_0 4e-5)."""
    model = TinyLlama(tied=tied)
    base, path = model.write(tmp_path / "m.gguf"), tmp_path / "a.gguf"
    adapter = TinyAdapter(
        rank=32, alpha=64, embeddings=True, targets=(), dtype=GGMLType[adapter_type], b_std=0.04
    )
    arrays = adapter.write(path, model)
    expected = ReferenceLlama.load(base).logits(TOKENS, [(arrays, 0.5)])
    assert nmse(_tied_logits(base, path, "routed", None), expected) <= ROUNDING_NMSE
    bound = {"F32": ROUNDING_NMSE, "F16": 2e-7, "BF16": 1.5e-5, "Q8_0": 1.5e-4}[adapter_type]
    assert nmse(_tied_logits(base, path, "branch", None), expected) <= bound


def _tied_logits(
    base: Path, path: Path, lowering: LoweringName, tied_output: bool | None
) -> Logits:
    with Model.load(base, n_threads=1) as model:
        adapter: Adapter = model.load_adapter(path, tied_output=tied_output)
        with open_context(model, lowering=lowering) as context:
            return run(context, TOKENS, {adapter: 0.5})
