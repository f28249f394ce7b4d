"""`loragraph convert` from the user's side."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from loragraph.cli.main import app
from tests.adapters.convert.folders import peft, write_base


def run(*args: object) -> tuple[int, str]:
    """Exit status and output of `loragraph convert`."""
    runner = CliRunner(env={"COLUMNS": "200"})
    result = runner.invoke(app, ["convert", *map(str, args)], catch_exceptions=False)
    return result.exit_code, result.output


def test_convert_writes_a_file_that_inspect_accepts(tmp_path: Path) -> None:
    """The file has the name, the type and the targets that were asked for."""
    base, folder = write_base(tmp_path / "base.gguf"), peft(tmp_path / "sql")
    out = tmp_path / "out.gguf"
    status, text = run(folder, "--base", base, "-o", out, "--outtype", "f16", "--name", "SQL")
    assert status == 0
    assert f"wrote {out}: 8 tensors" in text
    assert "attn_q 2/2, attn_v 2/2" in text
    assert "llama.cpp: loads it" in text
    result = CliRunner().invoke(app, ["inspect", str(out), "--base", str(base), "--json"])
    facts = json.loads(result.output)
    assert facts["problems"] == []
    assert facts["metadata"]["general.name"] == "SQL"
    assert list(facts["types"]) == ["F16"]


def test_dry_run_shows_the_plan_and_writes_nothing(tmp_path: Path) -> None:
    """Targets with module, rank, scale and what is folded into lora_b."""
    base = write_base(tmp_path / "base.gguf")
    folder = peft(tmp_path / "sql", alpha_pattern={"v_proj": 4})
    status, text = run(folder, "--base", base, "--dry-run")
    assert status == 0
    assert f"would write {tmp_path / 'sql-f32.gguf'}" in text
    (row,) = (line for line in text.splitlines() if "blk.1.attn_v.weight" in line)
    assert "model.layers.1.self_attn.v_proj" in row
    assert [cell.strip() for cell in row.split("│")[3:6]] == ["4", "1", "0.5"]
    assert [cell.strip() for cell in row.split("│")[3:6]] == ["4", "1", "0.5"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base.gguf", "sql"]


def test_the_plan_as_json(tmp_path: Path) -> None:
    """--json prints the plan alone."""
    base, folder = write_base(tmp_path / "base.gguf"), peft(tmp_path / "sql")
    status, text = run(folder, "--base", base, "--dry-run", "--json")
    facts = json.loads(text)
    assert status == 0
    assert facts["outfile"] is None
    assert {target["rank"] for target in facts["targets"]} == {4}


def test_a_refusal_is_one_line(tmp_path: Path) -> None:
    """Exit status 2 and one line with the reason, no traceback."""
    base, folder = write_base(tmp_path / "base.gguf"), peft(tmp_path / "x", peft_type="IA3")
    done = subprocess.run(
        [sys.executable, "-m", "loragraph.cli.main", "convert", str(folder), "--base", str(base)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "peft_type is IA3" in done.stderr


GOLDEN = Path(__file__).parents[1] / "golden" / "peft_variants"


def test_run_takes_a_peft_folder(tmp_path: Path) -> None:
    """--lora FOLDER answers as the converted file does, and leaves no file behind."""
    base, folder, out = GOLDEN / "untied.gguf", GOLDEN / "dora", tmp_path / "a.gguf"
    assert run(folder, "--base", base, "-o", out)[0] == 0
    flags = ["-p", "the thing", "-t", "1", "-c", "64", "-n", "12", "--temp", "0", "--ignore-eos"]
    texts = []
    for adapter in (folder, out):
        words = ["run", str(base), *flags, "--json", "--lora", str(adapter)]
        result = CliRunner(env={"TMPDIR": str(tmp_path)}).invoke(app, words)
        assert result.exit_code == 0, result.output
        texts.append(json.loads(result.stdout)["text"])
    assert texts[0] == texts[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gguf"]


def test_run_says_what_is_wrong_with_a_folder(tmp_path: Path) -> None:
    """A folder without an adapter is one line, exit status 2."""
    words = ["run", str(GOLDEN / "untied.gguf"), "-p", "x", "-t", "1", "--lora", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "loragraph.cli.main", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "expected a file adapter_config.json" in done.stderr
