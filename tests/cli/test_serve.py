"""`loragraph serve` from the user's side: what it prints, how it starts and ends, its flags."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from typer.testing import CliRunner

import loragraph
from loragraph.cli import main as cli
from loragraph.cli import serve_options
from loragraph.cli.serve_plan import ServedAdapter, served_adapters
from loragraph.errors import ConfigError, LoragraphError
from tests.adapters.convert.test_golden import GOLDEN, base_of
from tests.server.serving import write_files
from tests.tiny import TinyLlama

SOURCE = Path(loragraph.__file__).parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny base whose answers may be long, and adapters."""
    folder = tmp_path_factory.mktemp("serve")
    write_files(folder, TinyLlama(n_ctx_train=4096))
    (folder / "keys.txt").write_text("first\n\n second \n")
    (folder / "none.txt").write_text("\n")
    (folder / "mixed").mkdir()
    (folder / "mixed" / "good.gguf").write_bytes((folder / "adapters/alpha.gguf").read_bytes())
    (folder / "mixed" / "bad.gguf").write_bytes(b"no GGUF")
    return folder


class Process:
    """A running `loragraph serve`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self.url = ""
        assert process.stderr is not None
        for line in process.stderr:
            self.lines.append(line)
            found = re.search(r"listening at (\S+?)(,|$)", line)
            if found:
                self.url = found[1]
                break
        assert self.url, "".join(self.lines)

    @property
    def output(self) -> str:
        """What it has printed until it listened."""
        return "".join(self.lines)

    def end(self, *signals: signal.Signals, wait_s: float = 0.3) -> tuple[int, str]:
        """Sends signals; exit status, and what it printed since."""
        for index, one in enumerate(signals):
            if index:
                time.sleep(wait_s)
            self.process.send_signal(one)
        _, rest = self.process.communicate(timeout=60)
        return self.process.returncode, rest


@contextmanager
def serve(folder: Path, *args: str, **variables: str) -> Iterator[Process]:
    """Runs it on a free port until the block ends."""
    words = [sys.executable, "-m", "loragraph.cli.main", "serve", "base.gguf"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "COLUMNS": "120", **variables}
    process = subprocess.Popen(
        [*words, "--port", "0", "-t", "1", *args],
        cwd=folder,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield Process(process)
    finally:
        process.kill()
        process.communicate()


def refused(folder: Path, *args: str) -> str:
    """What keeps `loragraph serve` from starting; in this process, which is faster."""
    with contextlib.chdir(folder), pytest.raises(LoragraphError) as caught:
        CliRunner().invoke(cli.app, ["serve", *args], catch_exceptions=False)
    return str(caught.value)


def long_request(process: Process, n_events: list[int]) -> threading.Thread:
    """A thread that reads a long stream and counts its events; waits for the first."""
    body = {"prompt": "a", "stream": True, "ignore_eos": True, "max_tokens": 3000}

    def read() -> None:
        with (
            httpx.Client(timeout=60) as client,
            client.stream("POST", f"{process.url}/v1/completions", json=body) as answer,
        ):
            for line in answer.iter_lines():
                n_events[0] += line.startswith("data: {")

    def run() -> None:
        try:
            read()
        except httpx.HTTPError:
            n_events.append(-1)

    thread = threading.Thread(target=run)
    thread.start()
    deadline = time.monotonic() + 30
    while n_events[0] < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return thread


def test_it_prints_what_it_loaded_and_drains(folder: Path) -> None:
    """Adapters with ids, scales and coverage, memory, the address; a first SIGTERM lets running
    requests end, while new ones are refused.
    """
    flags = ("--lora", "adapters/alpha.gguf,b=adapters/beta.gguf", "--lora-dir", "adapters")
    with serve(folder, *flags, "--lora-scaled", "adapters/gamma.gguf:0.5", "-c", "4096") as one:
        for text in ("alpha", "0.5", "14 of 16", "gamma.gguf", "cells", "4096 tokens each"):
            assert text in one.output
        with httpx.Client(timeout=60) as client:
            models = client.get(f"{one.url}/v1/models").json()["data"]
            got = client.post(
                f"{one.url}/v1/completions", json={"prompt": "a", "max_tokens": 1}
            ).json()
            n_events = [0]
            thread = long_request(one, n_events)
            one.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            health = client.get(f"{one.url}/health")
            late = client.post(f"{one.url}/v1/completions", json={"prompt": "a"})
        thread.join()
        status, _ = one.process.wait(60), None

    ids = {model["id"]: model["adapter"]["id"] for model in models[1:]}
    assert ids == {"alpha": 0, "b": 1, "gamma": 2, "beta": 3}
    assert {use["name"]: use["scale"] for use in got["adapters"]} == {"alpha": 1.0, "gamma": 0.5}
    assert (health.status_code, late.status_code) == (503, 503)
    assert "shutting down" in health.text
    assert n_events[0] > 100
    assert -1 not in n_events
    assert status == 0


def test_files_of_the_folder_that_cannot_be_used(folder: Path) -> None:
    """They are told at the start, and the others are served."""
    with serve(folder, "--lora-dir", "mixed") as one:
        assert re.search(r"good .* 14 of 16", one.output)
        assert re.search(r"^refused .*bad\.gguf", one.output, re.MULTILINE)
        assert httpx.get(f"{one.url}/health").status_code == 200


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(folder: Path, second: signal.Signals) -> None:
    """Running requests are cut off by a second signal."""
    with serve(folder, "-c", "4096", "--drain-timeout", "60") as one:
        n_events = [0]
        thread = long_request(one, n_events)
        start = time.monotonic()
        status, rest = one.end(signal.SIGTERM, second)
        thread.join()

    assert status == 0
    assert rest == ""
    assert n_events[0] < 3000
    assert time.monotonic() - start < 30


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("nothing.gguf",), "nothing.gguf"),
        (("base.gguf", "--lora", "nothing.gguf"), "nothing.gguf"),
        (("base.gguf", "--lora", "base.gguf"), "base.gguf"),
        (("base.gguf", "--lora", "adapters/alpha.gguf,alpha=adapters/beta.gguf"), "NAME=PATH"),
        (("base.gguf", "--lora-scaled", "adapters/alpha.gguf"), "PATH:SCALE"),
        (("base.gguf", "--lora-pin", "nope"), "nope"),
        (("base.gguf", "--lora-dir", "nothing"), "--lora-dir"),
        (("base.gguf", "--slot-save-path", "nothing"), "--slot-save-path"),
        (("base.gguf", "--api-prefix", "llm/"), "api_prefix"),
        (("base.gguf", "--ray", "--api-prefix", "/llm"), "--api-prefix: expected none"),
        (("base.gguf", "--ray", "--slot-save-path", "adapters"), "--slot-save-path: expected none"),
        (("base.gguf", "-c", "-5"), "n_ctx"),
        (("base.gguf", "-np", "0"), "max_sequences"),
        (("base.gguf", "--port", "70000"), "--port"),
        (("base.gguf", "--host", "no.such.host.invalid"), "--host"),
        (("base.gguf", "--api-key-file", "none.txt"), "expected keys"),
        (("base.gguf", "--api-key-file", "nothing.txt"), "nothing.txt"),
        (("base.gguf", "--ssl-key-file", "keys.txt"), "--ssl-cert-file"),
        (("base.gguf", "--ssl-key-file", "keys.txt", "--ssl-cert-file", "keys.txt"), "keys.txt"),
        (("base.gguf", "--cors-origin", "*"), "every page"),
        (("base.gguf", "--lowering", "branch"), "lowering"),
        (("base.gguf", "--max-body-bytes", "0"), "max_body_bytes"),
    ],
)
def test_what_keeps_it_from_starting(folder: Path, args: tuple[str, ...], text: str) -> None:
    """An error that names the flag or the file."""
    port = () if "--port" in args else ("--port", "0")

    assert text in refused(folder, *args, "-t", "1", *port)


def test_errors_are_one_line(folder: Path) -> None:
    """As of every command: no traceback, exit status 2."""
    done = subprocess.run(
        [sys.executable, "-m", "loragraph.cli.main", "serve", "nothing.gguf", "--port", "0"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.returncode == 2
    assert done.stderr.startswith("loragraph: nothing.gguf: ")
    assert done.stderr.count("\n") == 1


def test_a_port_in_use(folder: Path) -> None:
    """Told before anything is loaded."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = str(sock.getsockname()[1])
        message = refused(folder, "nothing.gguf", "--port", port)

    assert port in message
    assert "choose another port" in message


def test_variables_and_keys(folder: Path) -> None:
    """Flags may be environment variables; keys come from both flags and files."""
    variables = {
        "LORAGRAPH_LORA": "one=adapters/alpha.gguf,two=adapters/beta.gguf",
        "LORAGRAPH_API_KEY_FILE": "keys.txt",
        "LORAGRAPH_ALIAS": "tiny,other",
        "LORAGRAPH_CTX_SIZE": "128",
    }
    with (
        serve(folder, "--admin-key", "boss", **variables) as one,
        httpx.Client(base_url=one.url) as client,
    ):
        statuses = {
            key: client.get("/v1/models", headers={"X-Api-Key": key}).status_code
            for key in ("", "first", "second", "third", "boss")
        }
        found = client.get("/v1/models", headers={"X-Api-Key": "first"}).json()["data"]

    assert statuses == {"": 401, "first": 200, "second": 200, "third": 401, "boss": 200}
    assert [model["id"] for model in found] == ["tiny", "one", "two"]
    assert found[0]["aliases"] == ["tiny", "other"]
    assert found[0]["max_model_len"] == 128


def test_init_without_apply(folder: Path) -> None:
    """Requests that name no adapters get the base."""
    flags = ("--lora", "adapters/alpha.gguf", "--lora-init-without-apply")
    with serve(folder, *flags) as one, httpx.Client(base_url=one.url) as client:
        body = {"prompt": "a", "max_tokens": 1}
        plain = client.post("/v1/completions", json=body).json()
        named = client.post("/v1/completions", json={**body, "lora": [{"id": 0, "scale": 1}]})

    assert plain["adapters"] == []
    assert named.json()["adapters"][0]["name"] == "alpha"


def test_https(folder: Path) -> None:
    """With a key and a certificate it speaks TLS."""
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "key.pem",
         "-out", "cert.pem", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1"],
        cwd=folder, capture_output=True, check=False,
    )  # fmt: skip
    if made.returncode:
        pytest.skip("openssl is not there to make a certificate")
    context = ssl.create_default_context(cafile=folder / "cert.pem")
    with serve(folder, "--ssl-key-file", "key.pem", "--ssl-cert-file", "cert.pem") as one:
        assert one.url.startswith("https://")
        answer = httpx.get(f"{one.url}/health", verify=context)

    assert answer.json() == {"status": "ok"}


def test_help_is_grouped_and_names_variables() -> None:
    """--help has the groups, and every flag its variable."""
    result = CliRunner().invoke(cli.app, ["serve", "--help"], env={"COLUMNS": "200"})
    text = re.sub(r"\x1b\[[0-9;]*m", "", result.output)

    for group in ("Adapters", "Cells, adapters and batches", "HTTP", "Keys and origins"):
        assert group in text
    flags = set(re.findall(r"--[a-z][a-z-]+", text)) - {"--help"}
    for flag in flags:
        if not flag.startswith("--no-"):
            assert serve_options.variable(flag) in text, flag


@pytest.mark.parametrize(
    ("plain", "scaled", "expected"),
    [
        (["a/b.gguf"], [], [("b", "a/b.gguf", 1.0)]),
        (["n=a/b.gguf"], [], [("n", "a/b.gguf", None)]),
        (["a/x=y.gguf"], [], [("x=y", "a/x=y.gguf", 1.0)]),
        ([], ["a:b.gguf:-2"], [("a:b", "a:b.gguf", -2.0)]),
        ([], ["x,y.gguf:0.5"], [("x,y", "x,y.gguf", 0.5)]),
    ],
)
def test_values_of_lora(
    plain: list[str], scaled: list[str], expected: list[tuple[Any, ...]]
) -> None:
    """PATH joins the default mix under its file's name, NAME=PATH only gives a name."""
    assert served_adapters(plain, scaled, None) == [ServedAdapter(*one) for one in expected]


def test_a_folder_is_called_by_its_whole_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dot in it begins no suffix, and "." has a name too."""
    folder = tmp_path / "tales-3.1"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for given in (str(folder), ".", f"{folder}/"):
        (one,) = served_adapters([given], [], None)
        assert one == ServedAdapter("tales-3.1", given, 1.0)


def test_folders_of_peft_are_served(tmp_path: Path) -> None:
    """In --lora, with and without a name, and in --lora-dir; what is wrong with one names it."""
    shutil.copy(base_of("plain"), tmp_path / "base.gguf")
    shutil.copytree(GOLDEN / "plain", tmp_path / "plain")
    shutil.copytree(GOLDEN / "norms", tmp_path / "dir" / "tales")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    flags = ("--lora", "plain", "--lora", "n=dir/tales", "--lora-dir", "dir")
    with serve(tmp_path, *flags, TMPDIR=str(temporary)) as one, httpx.Client(timeout=60) as client:
        models = client.get(f"{one.url}/v1/models").json()["data"]
        assert {"plain", "n", "tales"} <= {model["id"] for model in models}
        body = {"prompt": "the thing", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        mixes: list[dict[str, Any]] = [{}, {"lora": []}, {"model": "n"}, {"model": "tales"}]
        texts = [
            client.post(f"{one.url}/v1/completions", json=body | mix).json()["choices"][0]["text"]
            for mix in mixes
        ]
        assert texts[2] == texts[3]
        assert len(set(texts)) == 3
        assert list(temporary.iterdir()) == []
    (tmp_path / "plain" / "adapter_model.safetensors").unlink()
    assert "plain: expected the weights" in refused(tmp_path, "base.gguf", "--lora", "plain")


def test_two_adapters_of_one_name() -> None:
    """Refused, with what to do."""
    with pytest.raises(ConfigError, match="NAME=PATH"):
        served_adapters(["a/x.gguf", "b/x.gguf"], [], None)


def test_the_access_log_is_appended_to(folder: Path, tmp_path: Path) -> None:
    """A line of JSON for each request; what the file held stays."""
    log = tmp_path / "access.jsonl"
    log.write_text("before\n")
    with serve(folder, "--access-log", str(log)) as process:
        httpx.get(f"{process.url}/v1/models")
        process.end(signal.SIGTERM)
    first, line = log.read_text().splitlines()

    assert first == "before"
    assert json.loads(line)["path"] == "/v1/models"
    assert "--access-log" in refused(folder, "base.gguf", "--access-log", str(tmp_path))


def test_a_wrong_sidecar_of_a_given_adapter_keeps_it_from_starting(
    folder: Path, tmp_path: Path
) -> None:
    """It is named, as what is wrong with an adapter's file is."""
    adapter = tmp_path / "alpha.gguf"
    adapter.write_bytes((folder / "adapters" / "alpha.gguf").read_bytes())
    (tmp_path / "alpha.toml").write_text("colour = 1")

    assert "alpha.toml: colour" in refused(
        folder, "base.gguf", "--lora", str(adapter), "--port", "0"
    )
