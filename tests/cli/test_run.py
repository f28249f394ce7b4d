"""`loragraph run` from the user's side: text, JSON, statistics, exit statuses, errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import loragraph
from loragraph.cli import main as cli
from tests.tiny import TinyAdapter, TinyLlama

TINY = TinyLlama(seed=3)
SMALL = ("-t", "1", "-c", "64", "--temp", "0")
NO_EOG = ("--ignore-eos",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, adapters of it and of others, a file that is none."""
    folder = tmp_path_factory.mktemp("run")
    TINY.write(folder / "base.gguf")
    TinyAdapter().write(folder / "a.gguf", TINY)
    TinyAdapter(seed=2, rank=3).write(folder / "b,c:d.gguf", TINY)
    other = TinyLlama(n_embd=32)
    TinyAdapter().write(folder / "small.gguf", other)
    TinyAdapter(metadata={"general.architecture": "qwen2"}).write(folder / "qwen2.gguf", TINY)
    TinyAdapter(alpha=None).write(folder / "no-alpha.gguf", TINY)
    TinyAdapter(invocation_tokens=[5, 6]).write(folder / "alora.gguf", TINY)
    (folder / "junk.gguf").write_bytes(b"no GGUF at all")
    (folder / "prompt.txt").write_text("hello world\n")
    (folder / "empty.txt").write_text("\n")
    (folder / "latin1.txt").write_bytes(b"caf\xe9")
    (folder / "abc.gbnf").write_text('root ::= "abc"\n')
    return folder


@pytest.fixture(autouse=True)
def _in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def run(*args: str, stdin: str | None = None) -> Any:
    """Result of `loragraph run base.gguf ...`, with stdout and stderr apart."""
    words = ["run", "base.gguf", *SMALL, *args]
    return CliRunner().invoke(cli.app, words, input=stdin, catch_exceptions=False)


def run_json(*args: str) -> dict[str, Any]:
    """The JSON object of `loragraph run --json`."""
    result = run(*args, "--json")
    assert result.exit_code == 0
    facts: dict[str, Any] = json.loads(result.stdout)
    return facts


def fails(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit status and the one line on stderr of a failing command; stdout stays empty."""
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("loragraph: ")
    assert err.count("\n") == 1
    return int(ended.value.code or 0), err


def test_text_and_statistics() -> None:
    """The text alone goes to stdout; tokens, speed, end and seed to stderr."""
    result = run("-p", "hello", "-n", "8", "--seed", "7", *NO_EOG)
    wanted = loragraph.generate(
        "base.gguf", "hello", n_ctx=64, n_threads=1, temperature=0, max_tokens=8, seed=7,
        ignore_eos=True,
    )  # fmt: skip

    assert result.exit_code == 0
    assert result.stdout == wanted.text + "\n"
    assert f"prompt   {wanted.n_prompt} tokens, " in result.stderr
    assert "answer   8 tokens, " in result.stderr
    assert "ended by length, seed 7" in result.stderr


def test_json() -> None:
    """--json prints one object with text, tokens, end, seed, timings and adapters, and no more."""
    facts = run_json("-p", "hello", "-n", "4", "--lora-scaled", "a.gguf:0.5", *NO_EOG)

    assert len(facts["tokens"]) == facts["n_generated"] == 4
    assert facts["finish_reason"] == "length"
    assert facts["stop_string"] is None
    assert facts["timings"]["prompt_per_s"] > 0
    (adapter,) = facts["adapters"]
    assert (adapter["path"], adapter["scale"], adapter["rank_max"]) == ("a.gguf", 0.5, 4)
    assert adapter["effective_scales"] == [1.0]  # 0.5 · alpha 8 / rank 4
    assert adapter["coverage"]["attn_q"] == {"changed": 2, "in_base": 2}


def test_adapters_in_every_spelling() -> None:
    """Lists, repetitions, quotes and colons in paths name the same two adapters."""
    spellings = [
        ("--lora", 'a.gguf,"b,c:d.gguf"'),
        ("--lora", "a.gguf", "--lora", '"b,c:d.gguf"'),
        ("--lora-scaled", 'a.gguf:1,"b,c:d.gguf:1.0"'),
        ("--lora", "a.gguf", "--lora-scaled", '"b,c:d.gguf":1'),
    ]
    results = [run_json("-p", "hello", "-n", "8", *NO_EOG, *words) for words in spellings]
    base = run_json("-p", "hello", "-n", "8", *NO_EOG)

    assert [[one["path"] for one in facts["adapters"]] for facts in results] == [
        ["a.gguf", "b,c:d.gguf"]
    ] * 4
    assert len({facts["text"] for facts in results}) == 1
    assert results[0]["text"] != base["text"]


def test_scale_zero_is_the_base() -> None:
    """An adapter at scale 0 changes nothing."""
    words = ("-p", "hello", "-n", "8", *NO_EOG)

    assert run_json(*words, "--lora-scaled", "a.gguf:0")["text"] == run_json(*words)["text"]


def test_lowerings_agree() -> None:
    """Both lowerings give the same greedy text."""
    words = ("-p", "hello", "-n", "8", "--lora", "a.gguf", *NO_EOG)
    texts = {
        run_json(*words, "--lowering", name)["text"] for name in ("branch", "routed", "stacked")
    }

    assert len(texts) == 1


def test_adapter_statistics_and_warnings() -> None:
    """Effective scale, rank and coverage of each adapter, and what its loading warned of."""
    result = run("-p", "x", "-n", "1", "--lora-scaled", "a.gguf:0.5,no-alpha.gguf:2,alora.gguf:1")

    assert "a.gguf at 0.5: effective scale 1, rank 4, 14 of 16 weights" in result.stderr
    assert "no-alpha.gguf at 2: effective scale 2" in result.stderr
    assert "warning: no-alpha.gguf: " in result.stderr
    assert "warning: alora.gguf: it has invocation tokens" in result.stderr


@pytest.mark.parametrize("words", [("-p", "-"), ("-f", "prompt.txt"), ("-p", "hello world")])
def test_prompt_sources(words: tuple[str, ...]) -> None:
    """A prompt comes from the command line, a file or stdin, without its last line break."""
    result = run(*words, "-n", "6", *NO_EOG, stdin="hello world\n")
    same = run("-p", "hello world", "-n", "6", *NO_EOG)

    assert result.exit_code == 0
    assert result.stdout == same.stdout


def test_stop_and_grammar() -> None:
    """Grammars come as text or file; a stop string ends the text before itself."""
    grammar = ("--grammar", 'root ::= "abc hello abc"')

    assert run("-p", "x", *grammar).stdout == "abc hello abc\n"
    assert run("-p", "x", *grammar, "--stop", "zz", "--stop", "lo").stdout == "abc hel\n"
    assert run("-p", "x", "--grammar-file", "abc.gbnf").stdout == "abc\n"
    assert run_json("-p", "x", *grammar, "-r", "lo")["stop_string"] == "lo"


def test_chat() -> None:
    """--chat uses the model's template, --system adds a message to it."""
    plain, chat, system = (
        run_json("-p", "x", "-n", "1", *words)["n_prompt"]
        for words in ((), ("--chat",), ("--system", "be brief"))
    )

    assert plain < chat < system


def test_seed() -> None:
    """A seed gives the same text again; without one the one drawn is reported."""
    words = ("-p", "x", "-n", "8", "--temp", "2", *NO_EOG)
    first = run_json(*words)

    assert run_json(*words, "--seed", str(first["seed"]))["text"] == first["text"]


def test_options_reach_the_context() -> None:
    """The exact mode, batches and other layouts give the same greedy text."""
    words = ("-p", "hello world", "-n", "4", *NO_EOG)
    exact = ("--kv-type", "f32", "--attention", "plain", "-b", "3", "--no-repack")

    assert run_json(*words, *exact)["text"] == run_json(*words)["text"]


BASE = ("run", "base.gguf", "-t", "1", "-c", "64")


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ((), "Missing argument"),
        (("missing.gguf", "-p", "x"), "missing.gguf: failed to open"),
        ((".", "-p", "x"), "."),
        (("junk.gguf", "-p", "x"), "junk.gguf: "),
        (("a.gguf", "-p", "x"), "expected a base model, got general.type 'adapter'"),
        (("base.gguf", "-p", "x", "--heat", "1"), "No such option: --heat"),
        (("base.gguf", "-p", "x", "-n", "many"), "'-n'"),
        (("base.gguf", "-p", "x", "--lowering", "magic"), "'--lowering'"),
        (("base.gguf",), "expected a prompt, got none (hint: -p TEXT"),
        (("base.gguf", "-p", "x", "-f", "prompt.txt"), "expected a prompt, got two"),
        (("base.gguf", "-p", ""), "empty prompt"),
        (("base.gguf", "-f", "empty.txt"), "empty prompt"),
        (("base.gguf", "-f", "missing.txt"), "-f: missing.txt: No such file"),
        (("base.gguf", "-f", "latin1.txt"), "latin1.txt: expected UTF-8, got byte 0xe9 at 3"),
        (("base.gguf", "-p", "x" * 500, "-c", "64"), "more tokens in a context of 64"),
        (("base.gguf", "-p", "x", "-c", "-5"), "-c: expected an integer from 1 to"),
        (("base.gguf", "-p", "x", "-t", "0"), "-t: expected an integer from 1 to"),
        (("base.gguf", "-p", "x", "-b", "0"), "-b: expected an integer from 1 to"),
        (("base.gguf", "-p", "x", "--temp", "nan"), "--temp: expected"),
        (("base.gguf", "-p", "x", "--seed", "-7"), "seed: expected"),
        (("base.gguf", "-p", "x", "--stop", ""), "stop: expected"),
        (("base.gguf", "-p", "x", "--grammar", "root ::= ("), "grammar"),
        (("base.gguf", "-p", "x", "--grammar-file", "none.gbnf"), "none.gbnf: No such file"),
        (("base.gguf", "-p", "x", "--grammar", "a", "--grammar-file", "b"), "one grammar, got two"),
        (("base.gguf", "-p", "x", "-l", "5"), "expected ID+BIAS or ID-BIAS, got '5'"),
        (("base.gguf", "-p", "x", "-l", "x+1"), "expected ID+BIAS or ID-BIAS, got 'x+1'"),
        (
            ("base.gguf", "-p", "x", "-l", "9999+1"),
            "--logit-bias: expected token ids from 0 to 319",
        ),
        (("base.gguf", "-p", "x", "--lora", "missing.gguf"), "missing.gguf: failed to open"),
        (("base.gguf", "-p", "x", "--lora", "junk.gguf"), "junk.gguf: "),
        (("base.gguf", "-p", "x", "--lora", "base.gguf"), "expect general.type to be 'adapter'"),
        (("base.gguf", "-p", "x", "--lora", "qwen2.gguf"), "model arch and LoRA arch mismatch"),
        (("base.gguf", "-p", "x", "--lora", "small.gguf"), "has incorrect shape"),
        (("base.gguf", "-p", "x", "--lora", ""), "--lora: expected paths between the commas"),
        (("base.gguf", "-p", "x", "--lora-scaled", "a.gguf"), "expected PATH:SCALE, got 'a.gguf'"),
        (("base.gguf", "-p", "x", "--lora-scaled", "a.gguf:big"), "a finite number as scale"),
        (("base.gguf", "-p", "x", "--lora-scaled", "a.gguf:1e300"), "a scale within f32"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], match: str) -> None:
    """Every mistake is one line on stderr, nothing on stdout, and exit status 2."""
    status, line = fails(capsys, "run", *words)

    assert status == 2
    assert match in line


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    """A sub-command that does not exist is named, and the help hinted at."""
    status, line = fails(capsys, "rum")

    assert status == 2
    assert "No such command 'rum'" in line
    assert "(hint: loragraph --help)" in line


def test_missing_library(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """LORAGRAPH_GGML_DIR names the native library; one that is not there is no user's file."""
    monkeypatch.setenv("LORAGRAPH_GGML_DIR", "nowhere")
    status, line = fails(capsys, *BASE, "-p", "x")

    assert status == 1
    assert "nowhere" in line


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    """--help is no error; without arguments the help is shown and the status is 2."""
    for args, status, word in ((["run", "--help"], 0, "--lora-scaled"), ([], 2, "inspect")):
        with pytest.raises(SystemExit) as ended:
            cli.main(args)
        out, err = capsys.readouterr()
        assert (ended.value.code, err) == (status, "")
        assert word in out


def test_version(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """--version prints the installed version, and needs no command."""
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"{name} 1.2.3")
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])

    assert ended.value.code == 0
    assert capsys.readouterr().out == "loragraph 1.2.3\n"


def process(*words: str, **more: Any) -> subprocess.Popen[bytes]:
    """`python -m loragraph.cli.main`, running."""
    settings: dict[str, Any] = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "env": {**os.environ, "PYTHONPATH": str(Path(loragraph.__file__).parents[1])},
        **more,
    }
    return subprocess.Popen([sys.executable, "-m", "loragraph.cli.main", *words], **settings)


def test_process() -> None:
    """As a process: text and statistics on their streams, status 0; a mistake: one line, 2."""
    with process(*BASE, "-p", "hello", "-n", "4", *NO_EOG) as child:
        out, err = child.communicate(timeout=60)
    assert child.returncode == 0
    assert out.endswith(b"\n")
    assert b"answer   4 tokens" in err

    with process("run", "missing.gguf", "-p", "x") as child:
        out, err = child.communicate(timeout=60)
    assert (child.returncode, out) == (2, b"")
    assert err.startswith(b"loragraph: missing.gguf: ")
    assert err.count(b"\n") == 1


ENDLESS = ("run", "base.gguf", "-t", "1", "-c", "100000", "-n", "-1", "-p", "x", *NO_EOG)


def test_interrupt() -> None:
    """Ctrl-C ends the text's line, says nothing more, and gives status 130."""
    with process(*ENDLESS) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.read(20)
        child.send_signal(signal.SIGINT)
        rest = child.stdout.read()
        err = child.stderr.read()
        child.wait(timeout=60)

    assert child.returncode == 130
    assert rest.endswith(b"\n")
    assert err == b""


def test_closed_pipe() -> None:
    """When the reader of stdout goes away, the program ends quietly and soon."""
    with process(*ENDLESS) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.read(20)
        start = time.monotonic()
        child.stdout.close()
        err = child.stderr.read()
        child.wait(timeout=60)

    assert child.returncode == 1
    assert err == b""
    assert time.monotonic() - start < 30


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_behind_stdout() -> None:
    """Output that cannot be written is one line and status 1, not a traceback."""
    with open("/dev/full", "wb") as full:
        child = process(*BASE, "-p", "hello", "-n", "4", *NO_EOG, stdout=full)
    with child:
        _, err = child.communicate(timeout=60)
    assert child.returncode == 1
    assert err.startswith(b"loragraph: failed to write: ")
    assert err.count(b"\n") == 1
