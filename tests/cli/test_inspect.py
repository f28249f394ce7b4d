"""`loragraph inspect` from the user's side: text, JSON, exit statuses, one-line errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from loragraph.cli.inspect import size
from loragraph.cli.main import app
from tests.adapters.raw_gguf import (
    N_EMBD,
    N_FF,
    N_VOCAB,
    adapter_metadata,
    base,
    pair,
    tensor,
    write,
)
from tests.tiny import TinyAdapter, TinyLlama

N_BASE_PARAMS = 2 * N_EMBD * N_VOCAB + N_EMBD * N_EMBD + N_EMBD * N_FF + N_EMBD


@pytest.fixture
def base_path(tmp_path: Path) -> Path:
    """A base model's file: header and weights, no vocabulary."""
    tensors = {
        "token_embd.weight": tensor(np.zeros((N_VOCAB, N_EMBD))),
        "output.weight": tensor(np.zeros((N_VOCAB, N_EMBD))),
        "blk.0.attn_norm.weight": tensor(np.zeros(N_EMBD)),
        "blk.0.attn_q.weight": tensor(np.zeros((N_EMBD, N_EMBD))),
        "blk.0.ffn_up.weight": tensor(np.zeros((N_FF, N_EMBD))),
    }
    metadata = {"general.architecture": "llama", "general.name": "tiny [red]", "x.list": [1, 2]}
    return write(tmp_path / "base.gguf", metadata, tensors)


def run(*args: object) -> tuple[int, str]:
    """Exit status and output of `loragraph inspect`."""
    result = CliRunner().invoke(app, ["inspect", *map(str, args)], catch_exceptions=False)
    return result.exit_code, result.output


def run_json(*args: object) -> tuple[int, dict[str, Any]]:
    """Exit status and JSON of `loragraph inspect --json`."""
    status, output = run(*args, "--json")
    return status, json.loads(output)


def test_base(base_path: Path) -> None:
    """A base shows metadata, architecture, types, counts, bytes, and whether its head is tied."""
    _, text = run(base_path)
    for part in ("tiny [red]", "llama", "F32", f"{N_BASE_PARAMS:,}", "of its own", "array of u32"):
        assert part in text
    _, facts = run_json(base_path)
    assert facts["kind"] == "base"
    assert (facts["n_tensors"], facts["n_params"], facts["tied"]) == (5, N_BASE_PARAMS, False)
    assert facts["types"] == {
        "F32": {"n_tensors": 5, "n_params": N_BASE_PARAMS, "nbytes": 4 * N_BASE_PARAMS}
    }
    assert facts["metadata"]["x.list"] == "array of u32, 2 values"


def test_base_that_loads(tmp_path: Path) -> None:
    """A base that would load has no problems, and status 0."""
    status, facts = run_json(TinyLlama().write(tmp_path / "m.gguf"))
    assert (status, facts["problems"]) == (0, [])


@pytest.mark.parametrize(
    ("header", "error", "phrase"),
    [
        ({"general.architecture": "foo"}, "UnsupportedError", "'foo' is not supported"),
        ({"llama.block_count": 3}, "GGUFError", "blk.2."),
        ({"llama.embedding_length": "x"}, "GGUFError", "llama.embedding_length"),
    ],
)
def test_base_that_would_be_refused_says_why(
    header: dict[str, Any], error: str, phrase: str, tmp_path: Path
) -> None:
    """What Model.load would refuse in a base is shown, and the exit status is 1."""
    path = TinyLlama(extra=header).write(tmp_path / "m.gguf")
    status, facts = run_json(path)
    assert status == 1
    (problem,) = facts["problems"]
    assert problem["error"] == error
    assert phrase in problem["message"]
    assert "refused" in run(path)[1]


def test_adapter_alone(tmp_path: Path) -> None:
    """Without a base an adapter shows targets, ranks, scales, bytes, and what can be checked."""
    status, text = run(write(tmp_path / "a.gguf"))
    assert status == 0
    for part in ("blk.0.attn_q.weight", "attn_q", "--base checks the fit", "digest"):
        assert part in text


def test_adapter_against_its_base(base_path: Path, tmp_path: Path) -> None:
    """With a base the coverage and the share of the base are there."""
    path = write(tmp_path / "a.gguf")
    status, text = run(path, "--base", base_path)
    assert status == 0
    assert "fits the base" in text
    assert "1/1" in text
    _, facts = run_json(path, "--base", base_path)
    assert facts["problems"] == []
    assert facts["targets"]["attn_q"] == {"changed": 1, "in_base": 1, "ranks": [4]}
    assert facts["weights"][0]["scale"] == 4.0
    assert facts["base"]["share"] == facts["n_params"] / N_BASE_PARAMS


def test_adapter_that_would_be_refused(base_path: Path, tmp_path: Path) -> None:
    """Every problem is shown with its class, and the exit status is 1."""
    tensors = (
        pair("blk.10.attn_q.weight") | pair("blk.2.attn_q.weight") | pair("output_norm.weight")
    )
    metadata = adapter_metadata(adapter__lora__alpha=float("nan"))
    path = write(tmp_path / "a.gguf", metadata, tensors)
    status, text = run(path, "--base", base_path)
    assert status == 1
    assert "refused" in text
    status, facts = run_json(path, "--base", base_path)
    assert status == 1
    assert [problem["error"] for problem in facts["problems"]] == [
        "AdapterFormatError",
        "AdapterMismatchError",
        "AdapterMismatchError",
        "AdapterMismatchError",
    ]
    assert "wrong base model" in facts["problems"][1]["message"]
    assert facts["alpha"] == "nan"
    targets = [weight["target"] for weight in facts["weights"]]
    assert targets[:2] == ["blk.2.attn_q.weight", "blk.10.attn_q.weight"]


def test_ignore_norm(base_path: Path, tmp_path: Path) -> None:
    """--ignore-norm checks as a load with ignore_norm would."""
    tensors = pair("blk.0.attn_q.weight") | {"blk.0.attn_norm.weight": tensor(np.ones(N_EMBD))}
    path = write(tmp_path / "a.gguf", None, tensors)
    assert run(path, "--base", base_path)[0] == 1
    status, facts = run_json(path, "--base", base_path, "--ignore-norm")
    assert status == 0
    assert "left out as asked" in facts["warnings"][0]


def test_split_base(tmp_path: Path) -> None:
    """Any part of a split base stands for all; a missing part is a problem."""
    tiny = TinyLlama(tied=True)
    first, second = tiny.write_split(tmp_path, 2)
    status, facts = run_json(second)
    assert (status, facts["problems"]) == (0, [])
    assert facts["files"] == [str(first), str(second)]
    assert (facts["n_tensors"], facts["tied"]) == (len(tiny.raw_tensors()), True)
    TinyAdapter().write(tmp_path / "a.gguf", tiny)
    assert run(tmp_path / "a.gguf", "--base", second)[0] == 0
    second.unlink()
    status, facts = run_json(first)
    assert status == 1
    assert "failed to open" in facts["problems"][0]["message"]


def main(*args: object) -> subprocess.CompletedProcess[str]:
    """The command as a process."""
    command = [sys.executable, "-m", "loragraph.cli.main", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_error_is_one_line_and_status_2(tmp_path: Path) -> None:
    """A user's mistake is one line on stderr without a traceback."""
    path = tmp_path / "a\nb.gguf"
    path.write_bytes(b"not a GGUF file, but long enough")
    result = main("inspect", path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("loragraph: ")
    assert result.stderr.count("\n") == 1
    assert "expected the magic" in result.stderr


def test_base_against_a_base(base_path: Path) -> None:
    """--base with a file that is no adapter is the user's mistake."""
    result = main("inspect", base_path, "--base", base_path)
    assert result.returncode == 2
    assert "only an adapter can be checked against a base" in result.stderr


def test_wrong_usage_is_status_2() -> None:
    """An unknown flag is a usage error."""
    result = main("inspect", "--nonsense")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


def test_reader_that_goes_away(tmp_path: Path) -> None:
    """`loragraph inspect … | head -0` leaves no traceback."""
    path = write(tmp_path / "a.gguf")
    command = f"'{sys.executable}' -m loragraph.cli.main inspect '{path}' --json | head -c 0"
    result = subprocess.run(
        command, shell=True, capture_output=True, text=True, check=False, timeout=60
    )
    assert "Traceback" not in result.stderr
    assert "BrokenPipe" not in result.stderr


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1500, "1.5 kB"), (96_600_000, "96.6 MB"), (7e9, "7 GB")],
)
def test_size(nbytes: int, text: str) -> None:
    """Bytes are shown in decimal units."""
    assert size(nbytes) == text


def test_base_fixture_matches_the_checks() -> None:
    """The in-memory base of the adapter tests has the shapes used here."""
    assert base().targets["blk.0.ffn_up.weight"].ne == (N_EMBD, N_FF, 1, 1)


def test_tied_output(tmp_path: Path) -> None:
    """--tied-output and its opposite decide, as a load would, and the answer is shown."""
    tiny = TinyLlama(tied=True)
    base = tiny.write(tmp_path / "base.gguf")
    path = tmp_path / "a.gguf"
    TinyAdapter(embeddings=True).write(path, tiny)
    _, facts = run_json(path, "--base", base)
    assert facts["tied_output"] is True
    assert "tied" in facts["warnings"][0]
    _, facts = run_json(path, "--base", base, "--no-tied-output")
    assert (facts["tied_output"], facts["warnings"]) == (False, [])
    assert "leaves the tied head alone" in run(path, "--base", base, "--no-tied-output")[1]
    assert "changes the tied head too" in run(path, "--base", base, "--tied-output")[1]
    assert run_json(path)[1]["tied_output"] is None
    result = main("inspect", base, "--tied-output")
    assert (result.returncode, "only an adapter" in result.stderr) == (2, True)
