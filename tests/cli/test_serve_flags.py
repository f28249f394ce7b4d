"""Every flag of `loragraph serve` arrives where it belongs, with a value that no other has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from loragraph.cli import main as cli
from loragraph.cli import serving
from loragraph.cli.serve_flags import ServeFlags, without_beaten
from loragraph.cli.serve_plan import Plan
from loragraph.errors import ConfigError
from loragraph.server.config import ServerConfig

Given = tuple[Plan, ServerConfig]

_RAY = {"ray", "replicas", "autoscale", "ray_address", "catalogue", "lora_cache", "lora_scheme"}


def option(name: str) -> Callable[[Given], Any]:
    """An option of the engine."""
    return lambda given: given[0].engine_options[name]


def plan(name: str) -> Callable[[Given], Any]:
    """A field of the plan."""
    return lambda given: getattr(given[0], name)


def config(name: str) -> Callable[[Given], Any]:
    """A field of the routes' configuration."""
    return lambda given: getattr(given[1], name)


# field of ServeFlags, the flag with its value, where it arrives, as what
FLAGS: list[tuple[str, tuple[str, ...], Callable[[Given], Any], Any]] = [
    ("ctx_size", ("-c", "5001"), plan("n_ctx"), 5001),
    ("ctx_size", ("--ctx-size", "5002"), plan("n_ctx"), 5002),
    ("parallel", ("-np", "5003"), option("max_sequences"), 5003),
    ("parallel", ("--parallel", "5004"), option("max_sequences"), 5004),
    ("max_model_len", ("--max-model-len", "5005"), plan("max_model_len"), 5005),
    ("batch_size", ("-b", "5006"), option("max_batch_tokens"), 5006),
    ("batch_size", ("--batch-size", "5007"), option("max_batch_tokens"), 5007),
    ("max_waiting", ("--max-waiting", "5008"), option("max_waiting"), 5008),
    ("max_loras", ("--max-loras", "5009"), option("max_adapters"), 5009),
    ("max_lora_bytes", ("--max-lora-bytes", "2G"), option("max_adapter_bytes"), 2 * 10**9),
    ("max_lora_bytes", ("--max-lora-bytes", "512M"), option("max_adapter_bytes"), 512 * 10**6),
    ("max_lora_bytes", ("--max-lora-bytes", "1.5Gi"), option("max_adapter_bytes"), 3 << 29),
    ("max_lora_bytes", ("--max-lora-bytes", "5010"), option("max_adapter_bytes"), 5010),
    ("deadline", ("--deadline", "50.5"), config("deadline_s"), 50.5),
    ("threads", ("-t", "51"), plan("threads"), 51),
    ("threads", ("--threads", "52"), plan("threads"), 52),
    ("lowering", ("--lowering", "stacked"), option("lowering"), "stacked"),
    ("kv_type", ("--kv-type", "q8_0"), option("kv_type"), "q8_0"),
    ("cache_type_k", ("-ctk", "q8_0", "-ctv", "q8_0"), option("kv_type"), "q8_0"),
    (
        "cache_type_v",
        ("--cache-type-k", "f32", "--cache-type-v", "f32"),
        option("kv_type"),
        "f32",
    ),
    ("attention", ("--attention", "plain"), option("attention"), "plain"),
    ("flash_attn", ("-fa", "off"), option("attention"), "plain"),
    ("flash_attn", ("--flash-attn", "on"), option("attention"), "cells"),
    ("repack", ("--no-repack",), plan("repack"), False),
    ("host", ("--host", "127.0.0.53"), plan("host"), "127.0.0.53"),
    ("port", ("--port", "5011"), plan("port"), 5011),
    ("api_prefix", ("--api-prefix", "/llm"), config("api_prefix"), "/llm"),
    ("threads_http", ("--threads-http", "54"), config("n_http_threads"), 54),
    ("max_body_bytes", ("--max-body-bytes", "5012"), config("max_body_bytes"), 5012),
    ("send_timeout", ("--send-timeout", "55"), config("send_timeout_s"), 55),
    ("send_timeout", ("--timeout", "56"), config("send_timeout_s"), 56),
    ("send_timeout", ("-to", "57"), config("send_timeout_s"), 57),
    ("sse_ping_interval", ("--sse-ping-interval", "58"), config("sse_ping_interval_s"), 58),
    ("drain_timeout", ("--drain-timeout", "59"), plan("drain_timeout_s"), 59),
    ("alias", ("--alias", "one,two"), config("aliases"), ("one", "two")),
    ("alias", ("-a", "three"), config("aliases"), ("three",)),
    ("api_key", ("--api-key", "k1", "--api-key", "k2"), config("api_keys"), ("k1", "k2")),
    ("api_key_file", ("--api-key-file", "keys.txt"), config("api_keys"), ("first", "second")),
    ("admin_key", ("--admin-key", "boss"), config("admin_keys"), ("boss",)),
    ("admin_key_file", ("--admin-key-file", "keys.txt"), config("admin_keys"), ("first", "second")),
    ("allowed_hosts", ("--allowed-hosts", "A.b,c"), config("allowed_hosts"), ("a.b", "c")),
    ("cors_origin", ("--cors-origin", "https://x"), config("cors_origins"), ("https://x",)),
    ("metrics", ("--metrics",), config("with_metrics"), True),
    ("slots", ("--no-slots",), config("with_slots"), False),
    ("props", ("--props",), config("with_props"), True),
    ("page", ("--no-page",), config("with_page"), False),
    ("page", ("--no-webui",), config("with_page"), False),
    ("slot_save_path", ("--slot-save-path", "saved"), config("slot_save_path"), Path("saved")),
    ("access_log", ("--access-log", "log"), plan("access_log"), Path("log")),
    ("lora_dir", ("--lora-dir", "adapters"), plan("adapter_dir"), Path("adapters")),
    ("lora_dir", ("--lora-dir", "adapters"), config("adapter_dir"), Path("adapters")),
    ("lora_pin", ("--lora-pin", "a,b"), plan("pinned"), ("a", "b")),
    ("lora", ("--lora", "x.gguf"), config("default_mix"), {"x": 1.0}),
    ("lora_scaled", ("--lora-scaled", "x.gguf:0.53"), config("default_mix"), {"x": 0.53}),
    (
        "lora_init_without_apply",
        ("--lora", "x.gguf", "--lora-init-without-apply"),
        config("default_mix"),
        {},
    ),
    (
        "ssl_key_file",
        ("--ssl-key-file", "key.pem", "--ssl-cert-file", "cert.pem"),
        plan("tls"),
        (Path("key.pem"), Path("cert.pem")),
    ),
]


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Given]:
    """What a server would be told by some flags, in a folder with the files that they name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keys.txt").write_text("first\nsecond\n")
    for name in ("key.pem", "cert.pem"):
        (tmp_path / name).touch()
    for name in ("saved", "adapters"):
        (tmp_path / name).mkdir()
    told: list[Given] = []
    monkeypatch.setattr(serving, "run_server", lambda plan, config, _: told.append((plan, config)))

    def ask(*args: str, **variables: str) -> Given:
        told.clear()
        result = CliRunner(env=variables).invoke(cli.app, ["serve", *args], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        [one] = told
        return one

    return ask


@pytest.mark.parametrize(("field", "args", "place", "expected"), FLAGS)
def test_a_flag_arrives(
    given: Callable[..., Given],
    field: str,
    args: tuple[str, ...],
    place: Callable[[Given], Any],
    expected: Any,
) -> None:
    """In its field, which has another value without the flag; no other field changes with it."""
    plain, told = given("base.gguf"), given("base.gguf", *args)

    assert place(told) == expected
    assert place(plain) != expected or field in ("lora_init_without_apply", "flash_attn")


def test_every_flag_is_tried() -> None:
    """A new flag needs a line above."""
    tried = {field for field, *_ in FLAGS} | {"base", "model", "ssl_cert_file"} | _RAY

    assert {field.name for field in fields(ServeFlags)} == tried


def test_the_base_by_either_name(given: Callable[..., Given]) -> None:
    """As an argument, by llama-server's -m, by the variable; both only if they agree."""
    for args in (("b.gguf",), ("-m", "b.gguf"), ("--model", "b.gguf"), ("b.gguf", "-m", "b.gguf")):
        assert given(*args)[0].base == Path("b.gguf")
    assert given(LORAGRAPH_MODEL="v.gguf")[0].base == Path("v.gguf")
    for wrong in ((), ("a.gguf", "-m", "b.gguf")):
        with pytest.raises(ConfigError, match="BASE"):
            given(*wrong)


@pytest.mark.parametrize(
    ("variables", "args", "place", "expected"),
    [
        ({"MODEL": "v.gguf"}, ("b.gguf",), plan("base"), Path("b.gguf")),
        ({"MODEL": "v.gguf"}, ("-m", "b.gguf"), plan("base"), Path("b.gguf")),
        (
            {"MODEL": "v.gguf", "KV_TYPE": "f32"},
            ("-m", "b.gguf", "-ctk", "q8_0", "-ctv", "q8_0"),
            option("kv_type"),
            "q8_0",
        ),
        (
            {"MODEL": "v.gguf", "CACHE_TYPE_K": "f32", "CACHE_TYPE_V": "f32"},
            ("--kv-type", "q8_0"),
            option("kv_type"),
            "q8_0",
        ),
        ({"MODEL": "v.gguf", "ATTENTION": "cells"}, ("-fa", "off"), option("attention"), "plain"),
        (
            {"MODEL": "v.gguf", "FLASH_ATTN": "off"},
            ("--attention", "cells"),
            option("attention"),
            "cells",
        ),
    ],
)
def test_a_flag_beats_the_variable_of_its_other_name(
    given: Callable[..., Given],
    variables: dict[str, str],
    args: tuple[str, ...],
    place: Callable[[Given], Any],
    expected: Any,
) -> None:
    """They were compared, and the command failed with "got both" or "disagree"."""
    told = given(*args, **{f"LORAGRAPH_{name}": value for name, value in variables.items()})

    assert place(told) == expected


def test_replicas_beats_the_variable_of_autoscale() -> None:
    """--autoscale goes first only where both are flags, or both variables."""
    sources = {"autoscale": "ENVIRONMENT", "replicas": "COMMANDLINE"}
    flags = {"autoscale": "1:4", "replicas": 2}

    def beaten(sources: dict[str, str]) -> Any:
        return without_beaten(flags, lambda name: SimpleNamespace(name=sources.get(name)))

    assert beaten(sources) == {"autoscale": None, "replicas": 2}
    for same in ("ENVIRONMENT", "COMMANDLINE"):
        assert beaten(dict.fromkeys(flags, same)) == flags
    assert beaten({"autoscale": "COMMANDLINE", "replicas": "ENVIRONMENT"}) == flags


def test_variables_that_contradict(given: Callable[..., Given]) -> None:
    """Neither of two variables is the stronger one."""
    with pytest.raises(ConfigError, match="disagree"):
        given("b.gguf", LORAGRAPH_ATTENTION="cells", LORAGRAPH_FLASH_ATTN="off")


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("-ctk", "q8_0"), "one type of K and V"),
        (("-ctv", "f32"), "one type of K and V"),
        (("--kv-type", "f16", "-ctk", "q8_0", "-ctv", "q8_0"), "disagree"),
        (("--attention", "cells", "-fa", "off"), "disagree"),
        (("--max-lora-bytes", "2X"), "--max-lora-bytes: expected a number of bytes"),
    ],
)
def test_flags_that_contradict(
    given: Callable[..., Given], args: tuple[str, ...], text: str
) -> None:
    """Two names of one thing have to say the same."""
    with pytest.raises(ConfigError, match=text):
        given("base.gguf", *args)


def test_variables_of_other_names(given: Callable[..., Given]) -> None:
    """A flag's every long name has its variable."""
    assert given("b.gguf", LORAGRAPH_TIMEOUT="61")[1].send_timeout_s == 61
    assert given("b.gguf", LORAGRAPH_SEND_TIMEOUT="62")[1].send_timeout_s == 62
    assert (
        given("b.gguf", LORAGRAPH_MAX_LORA_BYTES="3M")[0].engine_options["max_adapter_bytes"]
        == 3_000_000
    )


@pytest.mark.parametrize(
    ("args", "n_ctx_train", "expected"),
    [
        ((), 700, (8192, 700)),
        (("-c", "500"), 700, (500, 500)),
        (("-c", "900"), 700, (900, 700)),
        (("-c", "0"), 700, (700, 700)),
        (("-c", "900", "--max-model-len", "600"), 700, (900, 600)),
        (("-c", "500", "--max-model-len", "600"), 700, (500, 500)),
        (("-c", "900", "--max-model-len", "800"), 700, (900, 700)),
        (("-c", "0", "--max-model-len", "9"), 700, (700, 9)),
    ],
)
def test_cells_and_the_most_tokens_of_a_request(
    given: Callable[..., Given], args: tuple[str, ...], n_ctx_train: int, expected: tuple[int, int]
) -> None:
    """-c is of all requests; one may have the least of that, what was trained, --max-model-len."""
    assert given("b.gguf", *args)[0].limits(n_ctx_train) == expected
