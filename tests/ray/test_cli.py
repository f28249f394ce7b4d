"""`loragraph serve --ray` from the user's side."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

import loragraph.ray
from loragraph.cli.serve_plan import Plan, ServedAdapter
from loragraph.cli.serve_ray import RayPlan, Stop, app_args, ray_plan
from loragraph.errors import ConfigError
from loragraph.ray.options import AppArgs
from loragraph.server.config import ServerConfig
from tests.cli.test_serve import refused, serve
from tests.ray.conftest import HAS_RAY
from tests.server.serving import write_files

ENGINE = {
    "max_batch_tokens": 64,
    "max_sequences": 4,
    "max_waiting": 9,
    "max_adapters": 5,
    "max_adapter_bytes": 1000,
    "lowering": "stacked",
    "attention": "flash",
    "kv_type": "q8_0",
}


def plan(**more: Any) -> Plan:
    """What `loragraph serve` was told."""
    options: dict[str, Any] = {
        "base": Path("base.gguf"),
        "adapters": [
            ServedAdapter("a", "a.gguf", 0.5),
            ServedAdapter("b", "s3://bucket/b.gguf", None),
        ],
        "pinned": ["a"],
        "adapter_dir": Path("adapters"),
        "n_ctx": 128,
        "max_model_len": 64,
        "threads": None,
        "repack": False,
        "engine_options": ENGINE,
        "host": "127.0.0.1",
        "port": 1,
        "tls": None,
        "drain_timeout_s": 3.0,
        **more,
    }
    return Plan(**options)


def many(replicas: int = 2, autoscale: str | None = None, **more: Any) -> RayPlan:
    """The flags of --ray."""
    options = {"address": None, "catalogue": None, "cache": None, "schemes": (), **more}
    return ray_plan(replicas, autoscale, **options)


def test_the_flags_become_the_applications_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them; relative paths are those of the command's folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    config = ServerConfig(
        aliases=("base", "other"),
        api_keys=("k",),
        default_mix={"a": 0.5},
        adapter_dir=Path("adapters"),
        deadline_s=7.0,
        with_metrics=True,
        with_page=False,
    )
    args = app_args(plan(), config, many(schemes=("s3",)), tmp_path / "own")

    assert isinstance(args, AppArgs)
    assert args.base == tmp_path / "base.gguf"
    assert [(one.name, one.source, one.scale) for one in args.adapters] == [
        ("a", str(tmp_path / "a.gguf"), 0.5),
        ("b", "s3://bucket/b.gguf", None),
    ]
    assert (args.n_threads, args.cpus_per_replica, args.replicas) == (4, 4.0, 2)
    assert (args.catalogue_dir, args.cache_dir) == (
        tmp_path / "own" / "catalogue",
        tmp_path / "own" / "cache",
    )
    made = args.server_config()
    assert made.adapter_dir == tmp_path / "adapters"
    for field in ("aliases", "api_keys", "deadline_s", "with_metrics", "with_page", "with_slots"):
        assert getattr(made, field) == getattr(config, field)
    assert args.default_mix == {"a": 0.5}
    assert args.engine_options() == {**ENGINE, "n_threads": 4}
    assert (args.lora_pin, args.lora_schemes, args.max_model_len) == (("a",), ("s3",), 64)


def test_threads_are_shared_out_but_for_those_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among the most replicas there may be; one on a cluster whose machines are not known here."""
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    config = ServerConfig()
    there = many(address="auto", catalogue=tmp_path, cache=tmp_path)

    def threads(ray: RayPlan, **more: Any) -> int:
        return int(app_args(plan(**more), config, ray, tmp_path).n_threads)

    assert threads(many(3)) == 2
    assert threads(many(1, "1:8")) == 1
    assert threads(many(20)) == 1
    assert threads(many(2), threads=6) == 6
    assert threads(there) == 1


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("--replicas", {"replicas": 0}),
        ("--autoscale", {"autoscale": "4"}),
        ("--autoscale", {"autoscale": "4:1"}),
        ("--autoscale", {"autoscale": "0:1"}),
        ("--autoscale", {"autoscale": "a:b"}),
        ("--lora-scheme", {"schemes": ("ftp",)}),
        ("--lora-scheme", {"schemes": ("file",)}),
        ("--ray-address", {"address": "auto"}),
    ],
)
def test_flags_that_cannot_be(field: str, wrong: dict[str, Any]) -> None:
    """Are told before anything starts."""
    with pytest.raises(ConfigError) as caught:
        many(**wrong)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("autoscale", {"autoscale": [3, 2]}),
        ("parallel", {"parallel": 0}),
        ("replica", {"replica": 2}),
        ("lowering", {"lowering": "none"}),
        ("adapters.0.source", {"adapters": [{"name": "x"}]}),
        ("base", {"base": None}),
    ],
)
def test_arguments_that_cannot_be(tmp_path: Path, field: str, wrong: dict[str, Any]) -> None:
    """Of a YAML file, told with their names."""
    good = {"base": "b.gguf", "catalogue_dir": str(tmp_path), "cache_dir": str(tmp_path)}
    assert AppArgs.checked(good).replicas == 1
    with pytest.raises(ConfigError) as caught:
        AppArgs.checked({**good, **wrong})
    assert caught.value.field == field


def test_keys_are_not_shown(tmp_path: Path) -> None:
    """Nor fsspec's options."""
    args = AppArgs(
        base=tmp_path,
        catalogue_dir=tmp_path,
        cache_dir=tmp_path,
        api_keys=("sesame",),
        admin_keys=("sesame",),
        storage={"s3": {"secret": "sesame"}},
    )
    assert "sesame" not in repr(args)


def test_an_access_log_is_a_file(tmp_path: Path) -> None:
    """Replicas have no standard output that anybody reads."""
    with pytest.raises(ConfigError, match="--access-log"):
        app_args(plan(access_log=Path("-")), ServerConfig(), many(), tmp_path)


def test_without_ray_the_command_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line."""
    write_files(tmp_path)
    monkeypatch.delitem(sys.modules, "loragraph.ray.local", raising=False)
    monkeypatch.delattr(loragraph.ray, "local", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    message = refused(tmp_path, "base.gguf", "--ray", "--port", "0")
    assert "pip install '.[ray]'" in message


def test_signals_before_and_after_the_start() -> None:
    """The first leaves a start at once, or lets wait() return; the next one is for what runs."""
    reached = []
    with Stop():
        signal.raise_signal(signal.SIGTERM)
        reached.append("never")
    assert reached == []
    with Stop() as stop:
        handler = signal.getsignal(signal.SIGINT)
        stop._waits = True
        signal.raise_signal(signal.SIGINT)
        stop.wait()
        assert not stop.again.is_set()
        signal.raise_signal(signal.SIGINT)
        assert stop.again.is_set()
    assert signal.getsignal(signal.SIGINT) is not handler


@pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed: pip install '.[ray]'")
def test_it_serves_and_drains(tmp_path: Path) -> None:
    """From one command to answers; a signal lets a running stream end, and then status 0."""
    write_files(tmp_path)
    flags = ("--lora", "mine=adapters/alpha.gguf", "--ray", "--access-log", "log.jsonl")
    with serve(tmp_path, *flags, "-c", "1024") as process:
        body = {"model": "mine", "prompt": "a", "max_tokens": 400, "ignore_eos": True}
        with (
            httpx.Client(base_url=process.url, timeout=60) as http,
            http.stream("POST", "/v1/completions", json={**body, "n": 8, "stream": True}) as got,
        ):
            lines = got.iter_lines()
            next(lines)
            process.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        status, _ = process.end()
    assert rest[-1] == "data: [DONE]"
    assert not any('"error"' in line for line in rest)
    assert status == 0
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert log[-1]["path"] == "/v1/completions"
