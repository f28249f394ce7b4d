"""The doctor finds what was broken on purpose, and nothing where nothing was."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as GGMLType
from typer.testing import CliRunner

from loragraph.cli.main import app, main
from loragraph.errors import ConfigError
from loragraph.tools.deltas import Delta
from loragraph.tools.doctor import Diagnosis, diagnose
from loragraph.tools.doctor.strength import inner_product
from loragraph.tools.merge import merge
from tests.adapters.convert.test_golden import GOLDEN, base_of, converted
from tests.gguf_bytes import tensor, write_gguf
from tests.graph.test_vectors import TinyDora
from tests.reference.adapter import read_adapter, read_metadata, read_tensors
from tests.reference.llama import ReferenceLlama
from tests.tiny import TinyAdapter, TinyLlama

MODEL = TinyLlama()
MILD = TinyAdapter(b_std=0.01)  # a change of about 1 % of the weights, as training gives


def files(folder: Path, adapter: TinyAdapter = MILD, model: TinyLlama = MODEL) -> tuple[Path, Path]:
    """A base and an adapter."""
    adapter.write(folder / "a.gguf", model)
    return model.write(folder / "base.gguf"), folder / "a.gguf"


def levels(found: Diagnosis, check: str) -> list[str]:
    """The levels of a check's findings."""
    return [finding.level for finding in found.findings if finding.check == check]


def message(found: Diagnosis, check: str, level: str = "problem") -> str:
    """The first message of a check at a level."""
    return next(one.message for one in found.findings if (one.check, one.level) == (check, level))


def rewritten(source: Path, out: Path, alpha: float, factor: float, **changes: Any) -> Path:
    """An adapter file with another alpha, lora_b times a factor, tensors changed by name."""
    keys = {k: v for k, v in read_metadata(source).items() if not k.startswith("GGUF.")}
    tensors = []
    for name, values in read_tensors(source).items():
        if name in changes.get("drop", ()):
            continue
        if name.endswith(".lora_b"):
            values = values * np.float32(factor)
            if any(part in name for part in changes.get("shuffle", ())):
                values = values[::-1]
        tensors.append(tensor(name, values))
    return write_gguf(out, {**keys, "adapter.lora.alpha": alpha}, tensors)  # type: ignore[dict-item]


def test_a_sound_adapter(tmp_path: Path) -> None:
    """No problem and no warning; the numbers are there."""
    base, path = files(tmp_path)
    found = diagnose(base, path, n_threads=1)
    assert [one for one in found.findings if one.level != "fact"] == []
    assert found.verdict == "It applies to this base, at a plausible strength."
    assert {"coverage", "scale", "change_ratio", "text"} <= found.numbers.keys()


def test_numbers_are_those_of_the_reference(tmp_path: Path) -> None:
    """Norm ratios, perplexities and KL agree with float64 on the multiplied-out matrices."""
    base, path = files(tmp_path, TinyAdapter(b_std=0.05))
    text = "the other one in the world"
    found = diagnose(base, path, text=text, n_threads=1)
    arrays, weights = read_adapter(path), read_tensors(base)
    ratios = {
        name: float(np.linalg.norm(arrays.delta(name)) / np.linalg.norm(weights[name]))
        for name in arrays.pairs
    }
    numbers = found.numbers["change_ratio"]
    assert numbers["median"] == pytest.approx(float(np.median(list(ratios.values()))), rel=1e-5)
    assert numbers["max"] == pytest.approx(max(ratios.values()), rel=1e-5)
    assert numbers["largest_target"] == max(ratios, key=lambda name: ratios[name])
    from loragraph.engine.model import Model

    with Model.load(base, n_threads=1) as model:
        tokens = model.vocab.tokenize(text)
    rows = {}
    for scale in (0.0, 0.5, 1.0):
        logits = ReferenceLlama.load(base).logits(tokens, [(arrays, scale)] if scale else [])
        rows[scale] = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    likelihood = {
        scale: np.mean(one[np.arange(len(tokens) - 1), tokens[1:]]) for scale, one in rows.items()
    }
    measured = found.numbers["text"]
    assert measured["n_tokens"] == len(tokens)
    assert measured["base_perplexity"] == pytest.approx(math.exp(-likelihood[0.0]), rel=1e-4)
    for scale, name in ((0.5, "half"), (1.0, "full")):
        assert measured[name]["perplexity"] == pytest.approx(math.exp(-likelihood[scale]), rel=1e-4)
        kl = np.mean(np.sum(np.exp(rows[0.0]) * (rows[0.0] - rows[scale]), axis=1))
        assert measured[name]["kl"] == pytest.approx(kl, rel=1e-3)


def test_an_adapter_of_another_base(tmp_path: Path) -> None:
    """Every reason of a refused load is a problem, and nothing is computed."""
    base, _ = files(tmp_path)
    TinyAdapter().write(tmp_path / "b.gguf", replace(MODEL, n_embd=128))
    found = diagnose(base, tmp_path / "b.gguf")
    assert set(levels(found, "fit")) == {"problem"}
    assert not found.ok
    assert found.verdict.startswith("It does not apply")
    assert "text" not in found.numbers


def test_an_output_that_does_not_change(tmp_path: Path) -> None:
    """Coverage says where the adapter reaches, the text that it does nothing."""
    base, path = files(tmp_path, TinyAdapter(b_std=1e-9, targets=("attn_q",)))
    found = diagnose(base, path, n_threads=1)
    assert "unchanged" in message(found, "text")
    assert levels(found, "strength") == ["warning"]
    assert "too little" in message(found, "strength", "warning")


def test_a_scale_that_is_applied_twice(tmp_path: Path) -> None:
    """alpha / rank in B and in alpha: the size of the change gives it away."""
    base, path = files(tmp_path, TinyAdapter(alpha=32.0, b_std=0.005))  # alpha / rank = 8
    assert diagnose(base, path, n_threads=1).of("problem") == []
    double = rewritten(path, tmp_path / "double.gguf", 32.0, 8.0)
    found = diagnose(base, double, n_threads=1)
    assert not found.ok
    assert "Double scaling is suspected" in message(found, "strength")
    assert "scale 0.125 would make up for it" in message(found, "strength")


def test_a_missing_alpha_is_a_warning(tmp_path: Path) -> None:
    """The file's strength is then B A as it is, which may be meant or not."""
    base, path = files(tmp_path, replace(MILD, alpha=None))
    assert levels(diagnose(base, path, n_threads=1), "scale") == ["warning"]


def test_tied_heads(tmp_path: Path) -> None:
    """Undecided: a warning. Decided by the file, or the head's own pair: a fact."""
    model = replace(MODEL, tied=True)
    key = "loragraph.adapter.tied_output"
    for adapter, level, words in (
        (replace(MILD, embeddings=True), "warning", "tied to the token table"),
        (replace(MILD, embeddings=True, metadata={key: False}), "fact", "the lookup alone"),
        (replace(MILD, embeddings=True, output=True), "fact", "the lookup alone"),
        (replace(MILD, output=True), "fact", "the head of a tied base alone"),
    ):
        base, path = files(tmp_path, adapter, model)
        found = diagnose(base, path, n_threads=1)
        assert levels(found, "tied head") == [level]
        assert words in message(found, "tied head", level)
    base, path = files(tmp_path, replace(MILD, embeddings=True))
    assert levels(diagnose(base, path, n_threads=1), "tied head") == []


def test_an_f16_base_tells_quantisation_from_the_adapter(tmp_path: Path) -> None:
    """A coarse base drowns a faint adapter; a fine one does not."""
    f16 = replace(MODEL, weight_type=GGMLType.F16).write(tmp_path / "f16.gguf")
    faint = replace(MILD, b_std=0.001)
    base, path = files(tmp_path, faint, replace(MODEL, weight_type=GGMLType.Q4_0))
    found = diagnose(base, path, f16_base=f16, n_threads=1)
    assert "the drift is the quantisation's" in message(found, "f16", "warning")
    base, path = files(tmp_path, TinyAdapter(), replace(MODEL, weight_type=GGMLType.Q8_0))
    found = diagnose(base, path, f16_base=f16, n_threads=1)
    assert levels(found, "f16") == ["fact"]
    assert found.numbers["f16"]["kl_adapter"] < found.numbers["f16"]["kl_effect"]
    other = replace(MODEL, n_vocab=330).write(tmp_path / "other.gguf")
    with pytest.raises(ConfigError, match="vocabulary"):
        diagnose(base, path, f16_base=other, n_threads=1)


@pytest.mark.parametrize(
    "name", ["plain", "rslora", "patterns", "dora", "lora_bias", "modules_to_save"]
)
def test_a_conversion_agrees_with_its_folder(name: str, tmp_path: Path) -> None:
    """A right conversion has strength 1 and cosine 1 on every target, in f32 and in q8_0."""
    for outtype in ("f32", "q8_0"):
        path, _ = converted(name, tmp_path, outtype)
        found = diagnose(base_of(name), path, peft=GOLDEN / name, n_threads=1)
        assert levels(found, "peft") == ["fact"]
        assert found.numbers["peft"]["cosine_min"] > 0.999
        assert found.numbers["peft"]["ratio_max"] == pytest.approx(1, abs=0.01)


def test_wrong_conversions_are_named(tmp_path: Path) -> None:
    """Twice the scale, no scale, rsLoRA ignored, a sign, lost targets, q and k rows."""
    path, _ = converted("plain", tmp_path)
    arrays = read_adapter(path)
    first = next(iter(arrays.pairs))
    rank = arrays.pairs[first][1].shape[1]
    scale = arrays.alpha / rank
    assert scale != 1
    cases: list[tuple[float, float, dict[str, Any], str]] = [
        (arrays.alpha, scale, {}, "applied twice"),
        (rank, 1.0, {}, "alpha / rank is missing"),
        (arrays.alpha, 0.3, {}, "0.3 times the trained strength: use it at scale 3.333"),
        (arrays.alpha, -1.0, {}, "another change than was trained"),
        (arrays.alpha, 1.0, {"shuffle": ("attn_q", "attn_k")}, "only q and k"),
        (
            arrays.alpha,
            1.0,
            {"drop": (f"{first}.lora_a", f"{first}.lora_b")},
            "trained but not in the file",
        ),
    ]
    for alpha, factor, changes, words in cases:
        wrong = rewritten(path, tmp_path / "wrong.gguf", alpha, factor, **changes)
        found = diagnose(base_of("plain"), wrong, peft=GOLDEN / "plain", n_threads=1)
        assert words in message(found, "peft")
        assert found.verdict.startswith("It applies, but not as it should")
    path, _ = converted("rslora", tmp_path)
    arrays = read_adapter(path)
    rank = arrays.pairs[first][1].shape[1]
    wrong = rewritten(path, tmp_path / "wrong.gguf", arrays.alpha, rank**-0.5)
    found = diagnose(base_of("rslora"), wrong, peft=GOLDEN / "rslora", n_threads=1)
    assert "use_rslora was ignored" in message(found, "peft")


def test_peft_logits_are_judged_by_what_the_bases_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adapter may differ as much as the base does, rounding included, and no more."""
    from loragraph.tools.doctor import peft_logits

    path, _ = converted("plain", tmp_path)
    rng = np.random.default_rng(0)
    seen: dict[str, Any] = {}

    def check(base: Path, folder: Path, tokens: Any, rows: Any, found: Diagnosis) -> None:
        seen["rows"] = rows
        monkeypatch.setattr(peft_logits, "_PACKAGES", ())
        for noise, level in ((1e-4, "fact"), (1e-1, "problem")):
            theirs = tuple(
                one * (1 + scale * rng.standard_normal(one.shape))
                for one, scale in zip(rows, (1e-4, noise), strict=True)
            )
            monkeypatch.setattr(peft_logits, "_peft_rows", lambda *_args, t=theirs: t)
            one = Diagnosis()
            peft_logits.check_logits(base, folder, tokens, rows, one)
            assert [finding.level for finding in one.findings] == [level]

        def cannot(*_args: object) -> None:
            raise ValueError("GGUF model with architecture foo\nis not supported yet.")

        monkeypatch.setattr(peft_logits, "_peft_rows", cannot)
        peft_logits.check_logits(base, folder, tokens, rows, found)

    monkeypatch.setattr("loragraph.tools.doctor.check_logits", check)
    found = diagnose(base_of("plain"), path, peft=GOLDEN / "plain", n_threads=1)
    assert len(seen["rows"]) == 2
    assert "foo is not supported yet" in message(found, "peft logits", "fact")
    assert levels(found, "strength") == ["fact"]  # settled by the folder


def test_without_torch_the_comparison_of_logits_is_skipped_aloud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fact says so; the comparison of the changes themselves needs no torch."""
    monkeypatch.setattr("loragraph.tools.doctor.peft_logits._PACKAGES", ("no_such_package",))
    path, _ = converted("plain", tmp_path)
    found = diagnose(base_of("plain"), path, peft=GOLDEN / "plain", n_threads=1)
    assert "no_such_package not installed" in message(found, "peft logits", "fact")


def test_inner_products_of_factors() -> None:
    """As of the multiplied-out matrices, for experts too."""
    rng = np.random.default_rng(0)

    def delta(rank: int) -> Delta:
        left, right = (rng.standard_normal(s, np.float32) for s in ((2, 9, rank), (2, rank, 7)))
        return Delta(left, right)

    one, other = delta(3), delta(4)
    products = [side.left.astype(np.float64) @ side.right for side in (one, other)]
    assert inner_product(one, other) == pytest.approx(float(np.sum(products[0] * products[1])))


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 0, 1 and 2: sound, a problem, a mistake of the user's; --json in each."""
    base, path = files(tmp_path)
    (tmp_path / "text.txt").write_text("the one in the world")

    def run(*args: object) -> Any:
        command = ["doctor", *map(str, args), "-t", "1"]
        return CliRunner().invoke(app, command, catch_exceptions=False)

    sound = run(base, path, "--text", tmp_path / "text.txt")
    assert sound.exit_code == 0
    assert "perplexity" in sound.stdout
    facts = json.loads(run(base, path, "--json").stdout)
    assert facts["ok"] is True
    assert {one["level"] for one in facts["findings"]} == {"fact"}
    TinyAdapter().write(tmp_path / "b.gguf", replace(MODEL, n_embd=128))
    broken = run(base, tmp_path / "b.gguf", "--json")
    assert broken.exit_code == 1
    assert json.loads(broken.stdout)["ok"] is False
    for args in ((tmp_path / "no.gguf", path), (base, path, "--text", tmp_path / "no.txt")):
        with pytest.raises(SystemExit) as ended:
            main(["doctor", *map(str, args)])
        assert ended.value.code == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_texts_that_cannot_be_measured(tmp_path: Path) -> None:
    """Too few tokens, or no text at all."""
    base, path = files(tmp_path)
    with pytest.raises(ConfigError, match="at least 2 tokens"):
        diagnose(base, path, text="", n_threads=1)
    (tmp_path / "latin.txt").write_bytes(b"\xff\xfe\xfd")
    from loragraph.tools.doctor.text import read_text

    with pytest.raises(ConfigError, match="UTF-8"):
        read_text(tmp_path / "latin.txt")


def test_the_change_of_dora_holds_its_gains(tmp_path: Path) -> None:
    """The measure is that of the merged weights: rows that are only made longer count too."""
    dora = TinyDora(replace(MILD, embeddings=True))
    base, path = MODEL.write(tmp_path / "base.gguf"), dora.write(tmp_path / "a.gguf", MODEL)
    merge(base, {path: 1.0}, tmp_path / "merged.gguf", type="f32")
    before, after = read_tensors(base), read_tensors(tmp_path / "merged.gguf")
    ratios = [
        np.linalg.norm(after[name] - before[name]) / np.linalg.norm(before[name])
        for name in read_adapter(path).pairs
    ]
    numbers = diagnose(base, path, n_threads=1).numbers["change_ratio"]
    assert numbers["median"] == pytest.approx(float(np.median(ratios)), rel=1e-4)
    assert numbers["max"] == pytest.approx(float(max(ratios)), rel=1e-4)
    assert numbers["min"] == pytest.approx(float(min(ratios)), rel=1e-4)


@pytest.mark.parametrize(("name", "suffix"), [("dora", "magnitude"), ("lora_bias", "bias")])
def test_other_magnitudes_or_biases_than_were_trained(
    name: str, suffix: str, tmp_path: Path
) -> None:
    """A vector that a converter got wrong is a problem, though every pair is right."""
    path, _ = converted(name, tmp_path)
    tensors = read_tensors(path)
    target = next(one for one in tensors if one.endswith(f".lora_{suffix}"))
    keys = {k: v for k, v in read_metadata(path).items() if not k.startswith("GGUF.")}
    tensors[target] = tensors[target][::-1]
    wrong = write_gguf(
        tmp_path / "wrong.gguf",
        keys,  # type: ignore[arg-type]
        [tensor(one, values) for one, values in tensors.items()],
    )
    found = diagnose(base_of(name), wrong, peft=GOLDEN / name, n_threads=1)
    assert "1 targets have other magnitudes, biases or norms" in message(found, "peft")
    assert target.rpartition(".")[0] in message(found, "peft")
