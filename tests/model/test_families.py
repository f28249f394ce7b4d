"""What is missing, misshapen or absurd in a file of any family is named."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loragraph.engine.model import Model
from loragraph.errors import GGUFError, UnsupportedError
from loragraph.ggml.gguf import GGUFFile
from loragraph.ggml.lib import load_library
from loragraph.graph.arch import FAMILIES, REFUSED, family_of
from loragraph.model.hparams import HParams
from loragraph.model.keys import Keys
from tests.gguf_bytes import RawTensor, gguf_bytes, tensor
from tests.tiny import TinyModel
from tests.tiny_experts import TINY_EXPERTS
from tests.tiny_families import TINY_FAMILIES, VARIANTS, TinyPhi3

MISSING = object()


def write(
    path: Path,
    model: TinyModel,
    changes: dict[str, Any] | None = None,
    tensors: list[RawTensor] | None = None,
) -> Path:
    """A model with keys (named without `<arch>.`) changed or MISSING, or with other tensors."""
    named = {f"{model.arch}.{name}": value for name, value in (changes or {}).items()}
    keys = {k: v for k, v in (model.metadata() | named).items() if v is not MISSING}
    path.write_bytes(gguf_bytes(keys, model.raw_tensors() if tensors is None else tensors))
    return path


def read(path: Path, model: TinyModel, **changes: Any) -> HParams:
    """The numbers of such a model; double underscores stand for dots."""
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    with GGUFFile(load_library(), write(path / "m.gguf", model, changes)) as file:
        return FAMILIES[model.arch].read_hparams(Keys(file))


REQUIRED = (
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
)
OWN_REQUIRED = {"granite": ("logit_scale",)}


@pytest.mark.parametrize("arch", TINY_FAMILIES)
def test_a_missing_key_is_named(arch: str, tmp_path: Path) -> None:
    """Each key that a family cannot do without, taken away, is an error with its full name."""
    for name in REQUIRED + OWN_REQUIRED.get(arch, ()):
        path = write(tmp_path / "m.gguf", TINY_FAMILIES[arch](), {name: MISSING})
        with pytest.raises(GGUFError, match=f"{arch}.{name}: expected a key"):
            Model.load(path, n_threads=1)


SHALLOW = [name for name, model in VARIANTS.items() if model.n_layer < 40]
OPTIONAL = ("output.weight", "rope_freqs.weight")


@pytest.mark.parametrize("variant", SHALLOW)
def test_a_missing_tensor_is_named(variant: str, tmp_path: Path) -> None:
    """Each tensor but biases, head and factors, taken away, is an error with its name; of a fused
    projection q is asked for next."""
    model = VARIANTS[variant]
    tensors = model.raw_tensors()
    for one in tensors:
        if one.name.endswith((".bias", ".scale")) or one.name in OPTIONAL or "factors" in one.name:
            continue
        if one.name.startswith("blk.") and not one.name.startswith(f"blk.{model.n_layer - 1}."):
            continue
        rest = [other for other in tensors if other is not one]
        path = write(tmp_path / "m.gguf", model, tensors=rest)
        asked = one.name.replace("attn_qkv", "attn_q")
        with pytest.raises(GGUFError, match=f"{asked}: missing tensor"):
            Model.load(path, n_threads=1)


@pytest.mark.parametrize("variant", SHALLOW)
def test_a_misshapen_tensor_is_named(variant: str, tmp_path: Path) -> None:
    """Each tensor of the last layer and outside of layers, with a row too much, is named."""
    model = VARIANTS[variant]
    tensors = {one.name: one for one in model.raw_tensors()}
    for name, values in model.arrays.items():
        if name.startswith("blk.") and not name.startswith(f"blk.{model.n_layer - 1}."):
            continue
        longer = tensor(name, np.concatenate([values, values[:1]]))
        path = write(tmp_path / "m.gguf", model, tensors=list((tensors | {name: longer}).values()))
        with pytest.raises(GGUFError, match=f"{name}: expected sizes"):
            Model.load(path, n_threads=1)


@pytest.mark.parametrize("arch", TINY_FAMILIES)
def test_a_tensor_that_nobody_reads_is_named(arch: str, tmp_path: Path) -> None:
    """A tensor of another family is an error, not a model that computes something else."""
    model = TINY_FAMILIES[arch]()
    foreign = tensor("blk.0.ssm_a.weight", np.ones(4, np.float32))
    path = write(tmp_path / "m.gguf", model, tensors=[*model.raw_tensors(), foreign])
    with pytest.raises(GGUFError, match=r"does not read: blk\.0\.ssm_a\.weight"):
        Model.load(path, n_threads=1)


NAN = float("nan")
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("gemma2", {"attention.sliding_window": 0}, "expected a value from 1"),
    ("gemma2", {"attention.sliding_window": "16"}, "expected type integer"),
    ("gemma2", {"attention.sliding_window_pattern": [True]}, "expected 2 bools, one a layer"),
    ("gemma2", {"attention.sliding_window_pattern": ["a", "b"]}, "array of numbers"),
    ("gemma2", {"attention.sliding_window_pattern": [0.5, 1.0]}, "expected 2 bools"),
    ("gemma2", {"attention.sliding_window_pattern": -1}, "from 0 to 1024"),
    ("gemma2", {"attention.sliding_window_pattern": True}, "expected type integer"),
    ("gemma2", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping: expected a value from"),
    ("gemma2", {"attn_logit_softcapping": NAN}, "finite"),
    ("gemma2", {"final_logit_softcapping": -30.0}, "expected a value from"),
    ("gemma2", {"final_logit_softcapping": 30}, "expected type f32"),
    ("gemma2", {"rope.freq_base_swa": 0.0}, "rope.freq_base_swa: expected a value from"),
    ("gemma3", {"attention.sliding_window": -1}, "expected a value from 0"),
    ("gemma3", {"attention.sliding_window_pattern": [True, False]}, "expected 3 bools"),
    ("gemma3", {"final_logit_softcapping": -1.0}, "expected a value from 0"),
    ("gemma3", {"rope.freq_base_swa": -5.0}, "expected a value from"),
    ("gemma", {"rope.dimension_count": 34}, "invalid n_rot: 34, expected at most 32"),
    ("phi3", {"rope.dimension_count": 7}, r"invalid n_rot: 7, expected at most 16 \(even\)"),
    ("phi3", {"rope.scaling.original_context_length": -1}, "expected a value from 0"),
    ("phi3", {"attention.sliding_window": -1}, "expected a value from 0"),
    ("phi3", {"rope.scaling.type": "longrope"}, "rope_factors_short.weight: missing tensor"),
    ("qwen2", {"rope.dimension_count": 8}, "invalid n_rot: 8, expected 16"),
    ("qwen3", {"attention.key_length": 33, "attention.value_length": 33}, "n_rot"),
    ("granite", {"logit_scale": 0.0}, "logit_scale: expected a value from"),
    ("granite", {"logit_scale": "2"}, "expected type f32"),
    ("granite", {"residual_scale": NAN}, "residual_scale: expected a finite number"),
    ("granite", {"embedding_scale": 12}, "expected type f32"),
    ("granite", {"attention.scale": float("inf")}, "finite"),
    ("granite", {"rope.scaling.finetuned": 1}, "expected type bool"),
]


@pytest.mark.parametrize(("arch", "changes", "words"), WRONG, ids=[str(row[:2]) for row in WRONG])
def test_an_absurd_key_is_refused(
    arch: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """A family's own key of a wrong type or with an absurd value is a GGUFError that names it."""
    path = write(tmp_path / "m.gguf", TINY_FAMILIES[arch](), changes)
    with pytest.raises(GGUFError, match=words):
        Model.load(path, n_threads=1)


UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    ("granite", {"deepstack_mapping": [-1, -1]}, "layers that read images"),
    ("qwen3", {"attention.causal": False}, "reads text and writes none"),
    ("gemma3", {"attention.key_length_swa": 64}, "unlike the other layers' 32"),
    ("phi3", {"rope.scaling.type": "su"}, "none, linear, yarn or longrope, got 'su'"),
]


@pytest.mark.parametrize(
    ("arch", "changes", "words"), UNSUPPORTED, ids=[str(row[:2]) for row in UNSUPPORTED]
)
def test_what_is_not_implemented_says_so(
    arch: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """A variant that a family does not compute is an UnsupportedError with the reason."""
    path = write(tmp_path / "m.gguf", TINY_FAMILIES[arch](), changes)
    with pytest.raises(UnsupportedError, match=words):
        Model.load(path, n_threads=1)


@pytest.mark.parametrize(
    ("arch", "name", "words"),
    [
        ("qwen3", "cls.output.weight", "a reranker gives no logits"),
        ("gemma3", "dense_2.weight", "an embedding model gives no logits"),
    ],
)
def test_a_head_for_something_else_is_refused(
    arch: str, name: str, words: str, tmp_path: Path
) -> None:
    """Rerankers and embedding models are refused by the tensor that makes them so."""
    model = TINY_FAMILIES[arch]()
    head = tensor(name, np.ones((2, model.n_embd), np.float32))
    path = write(tmp_path / "m.gguf", model, tensors=[*model.raw_tensors(), head])
    with pytest.raises(UnsupportedError, match=words):
        Model.load(path, n_threads=1)


@pytest.mark.parametrize("arch", REFUSED)
def test_a_relative_is_refused_with_the_reason(arch: str) -> None:
    """Architectures that look like a family and are none say why."""
    with pytest.raises(UnsupportedError) as error:
        family_of(arch)
    assert REFUSED[arch] in str(error.value)


def test_windows_follow_the_pattern(tmp_path: Path) -> None:
    """A period, an array, none of either, and no window at all."""
    gemma3 = TINY_FAMILIES["gemma3"](n_layer=7)
    name = "attention__sliding_window_pattern"

    def windows(**changes: Any) -> tuple[int, ...]:
        return read(tmp_path, gemma3, **changes).windows

    assert windows() == (16, 16, 0, 16, 16, 0, 16)
    assert windows(**{name: MISSING}) == (16, 16, 16, 16, 16, 0, 16)
    assert windows(**{name: [1, 0, 0, 0, 0, 0, 1]}) == (16, 0, 0, 0, 0, 0, 16)
    assert windows(**{name: 0}) == (16,) * 7
    assert windows(**{name: 1}) == (0,) * 7
    assert windows(attention__sliding_window=MISSING) == (0,) * 7
    gemma2 = TINY_FAMILIES["gemma2"]()
    assert read(tmp_path, gemma2, attention__sliding_window=MISSING).windows == (4096, 0)


def test_local_layers_have_positions_of_their_own(tmp_path: Path) -> None:
    """Gemma 3's local layers keep base 10,000 and no stretch; Gemma 2's follow the others."""
    model = TINY_FAMILIES["gemma3"](rope_scaling="linear", rope_factor=8.0)
    hparams = read(tmp_path, model)
    local, whole = hparams.rope_of(0), hparams.rope_of(2)
    assert (local.freq_base, local.freq_scale) == (10000.0, 1.0)
    assert (whole.freq_base, whole.freq_scale) == (1e6, 0.125)
    assert read(tmp_path, model, rope__freq_base_swa=77.0).rope_of(0).freq_base == 77.0
    hparams = read(tmp_path, TINY_FAMILIES["gemma2"](), rope__freq_base=50.0)
    assert hparams.rope_of(0) == hparams.rope_of(1)


def test_the_largest_gemmas_scale_scores_by_n_embd(tmp_path: Path) -> None:
    """The 27B models, known by their depth, have heads unlike n_embd / n_head."""
    for variant, expected in (("gemma2, 27B", 8**-0.5), ("gemma3, 27B", 8**-0.5)):
        assert read(tmp_path, VARIANTS[variant]).attention_scale == pytest.approx(expected)
    assert read(tmp_path, VARIANTS["gemma3"]).attention_scale == pytest.approx(32**-0.5)


def test_phi3_says_that_a_window_is_laid_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The key that llama.cpp drops is dropped with a warning."""
    with caplog.at_level(logging.WARNING):
        assert read(tmp_path, TinyPhi3(window=17)).windows == (0, 0)
    assert "window of 17 positions is laid aside" in caplog.text
    caplog.clear()
    read(tmp_path, TinyPhi3())
    assert not caplog.records


def test_every_family_has_a_tiny_model() -> None:
    """What the registry names, the generator can make."""
    assert TINY_FAMILIES.keys() | TINY_EXPERTS.keys() == FAMILIES.keys()
