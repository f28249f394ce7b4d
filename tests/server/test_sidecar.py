"""Sidecars: what they may say, what becomes of a request, and files that are wrong."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from loragraph.engine.params import SamplingParams
from loragraph.engine.registry import AdapterHeader, Generation, Registry
from loragraph.errors import FormatError, PermissionDeniedError
from loragraph.server.sidecar import (
    MAX_SIDECAR_BYTES,
    NO_DEFAULTS,
    Defaults,
    Sidecars,
    merged,
    read_defaults,
    sidecar_path,
)
from loragraph.vocab.chat import ChatTemplate

HEADER = AdapterHeader(100, 4, 1)
FULL = """
task_name = "poems"
system_prompt = "You are a poet."
prompt_prefix = "poem: "
stop = ["###", "END"]
chat_template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
scale = 0.5
keys = ["secret"]

[sampling]
temperature = 0.2
top_k = 7
max_tokens = 40
"""


def read(folder: Path, text: str, header: AdapterHeader = HEADER) -> Defaults:
    """The defaults of an adapter with this sidecar."""
    (folder / "poet.toml").write_text(text)
    return read_defaults(folder / "poet.gguf", header, ChatTemplate)


def test_every_key_is_read(tmp_path: Path) -> None:
    """A sidecar that says everything gives everything."""
    found = read(tmp_path, FULL)

    assert (found.task_name, found.system_prompt) == ("poems", "You are a poet.")
    assert (found.prompt_prefix, found.stop, found.scale) == ("poem: ", ("###", "END"), 0.5)
    assert found.sampling == {"temperature": 0.2, "top_k": 7, "max_tokens": 40}
    assert found.chat_template is not None
    assert found.chat_template.render([{"role": "user", "content": "x"}]) == "[x]"
    assert found.keys == (hashlib.sha256(b"secret").digest(),)


def test_an_adapter_without_a_sidecar_has_its_files_metadata(tmp_path: Path) -> None:
    """GGUF's task_name and prompt_prefix count where the sidecar does not say them."""
    header = AdapterHeader(100, 4, 1, task_name="from file", prompt_prefix="file: ")

    bare = read_defaults(tmp_path / "none.gguf", header, ChatTemplate)
    partly = read(tmp_path, 'prompt_prefix = ""', header)

    assert (bare.task_name, bare.prompt_prefix, bare.keys) == ("from file", "file: ", None)
    assert (partly.task_name, partly.prompt_prefix) == ("from file", "")
    assert read_defaults(None, HEADER, ChatTemplate) == NO_DEFAULTS


def test_the_sidecar_of_a_folder_stands_beside_it(tmp_path: Path) -> None:
    """A dot in a folder's name is no suffix."""
    (tmp_path / "v1.5").mkdir()

    assert sidecar_path(tmp_path / "v1.5") == tmp_path / "v1.5.toml"
    assert sidecar_path(tmp_path / "v1.5.gguf") == tmp_path / "v1.5.toml"


def test_fields_of_a_request_win(tmp_path: Path) -> None:
    """Defaults fill in what a request leaves out, and nothing else."""
    found = read(tmp_path, FULL)

    params = SamplingParams(**found.params({"temperature": 1.5, "stop": ("mine",)}))

    assert (params.temperature, params.top_k, params.stop) == (1.5, 7, ("mine",))
    assert found.params({})["stop"] == ("###", "END")


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (
            [{"role": "user", "content": "a"}],
            [("system", "You are a poet."), ("user", "poem: a")],
        ),
        (
            [{"role": "system", "content": "S"}, {"role": "user", "content": "poem: a"}],
            [("system", "S"), ("user", "poem: a")],
        ),
        (
            [
                {"role": "developer", "content": "D"},
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b"},
                {"role": "user", "content": "c"},
                {"role": "assistant", "content": "d"},
            ],
            [
                ("developer", "D"),
                ("user", "a"),
                ("assistant", "b"),
                ("user", "poem: c"),
                ("assistant", "d"),
            ],
        ),
    ],
)
def test_a_chat_gets_system_prompt_and_prefix_once(
    tmp_path: Path, messages: list[dict[str, str]], expected: list[tuple[str, str]]
) -> None:
    """The system prompt where there is none, the prefix in the last user message, if not there."""
    before = [dict(one) for one in messages]

    out = read(tmp_path, FULL).messages(messages)

    assert [(one["role"], one["content"]) for one in out] == expected
    assert messages == before


def test_messages_that_are_none_are_left_to_others() -> None:
    """Content of a wrong type, or no role at all, passes through unchanged."""
    odd: list[dict[str, object]] = [{"role": "user", "content": 5}, {"content": "x"}]

    assert Defaults(prompt_prefix="p").messages(odd) == odd


def test_of_a_mix_the_first_adapter_that_says_something_counts() -> None:
    """Field by field in the mix's order; stop strings of all, without repetition."""
    a = Defaults(sampling={"top_k": 1}, stop=("x",), prompt_prefix="a")
    b = Defaults(sampling={"top_k": 2, "top_p": 0.5}, stop=("y", "x"), system_prompt="b")

    found = merged([a, b])

    assert found.sampling == {"top_k": 1, "top_p": 0.5}
    assert (found.stop, found.prompt_prefix, found.system_prompt) == (("x", "y"), "a", "b")


def test_an_empty_system_prompt_is_one() -> None:
    """It can switch off what another adapter of the mix, or the template, would say."""
    found = merged([Defaults(system_prompt=""), Defaults(system_prompt="b")])

    assert found.messages([])[0] == {"role": "system", "content": ""}


def write_mode(mode: str, path: Path) -> None:
    """Makes something that is no readable sidecar."""
    if mode == "large":
        path.write_text("#" * (MAX_SIDECAR_BYTES + 1))
    elif mode == "folder":
        path.mkdir()
    elif mode == "pipe":
        os.mkfifo(path)
    elif mode == "loop":
        path.symlink_to(path)
    elif mode == "out":
        outside = path.parent.parent / "outside.toml"
        outside.write_text("")
        path.symlink_to(outside)
    else:
        path.write_bytes(b"\xff")


@pytest.mark.parametrize("mode", ["large", "folder", "pipe", "loop", "out", "bytes"])
def test_what_is_no_small_text_file_is_refused(tmp_path: Path, mode: str) -> None:
    """A huge file, a folder, a pipe without a writer, a link out of the folder, bytes."""
    folder = tmp_path / "adapters"
    folder.mkdir()
    write_mode(mode, folder / "poet.toml")

    with pytest.raises(FormatError, match=r"poet\.toml"):
        read_defaults(folder / "poet.gguf", HEADER, ChatTemplate)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("x = ", "TOML"),
        ("a." * 20_000 + "a = 1", "256 parts"),
        (". " * 30_000, "TOML"),
        ('"a" .\t' * 5000 + "a = 1", "256 parts"),
        ("x = " + "[" * 30_000, "TOML"),
        ("scale = " + "9" * 5000, "TOML"),
        ("colour = 1", "colour"),
        ("[sampling]\ncolour = 1", "sampling.colour"),
        ("[sampling]\nstop = []", "sampling.stop"),
        ("[sampling]\ntemperature = 'hot'", "temperature"),
        ("[sampling]\ntemperature = 1" + "0" * 400, "temperature"),
        ("[sampling]\ntop_k = 1.5", "top_k"),
        ("sampling = 3", "sampling"),
        ("system_prompt = 3", "system_prompt"),
        ("stop = 'one'", "stop"),
        ("stop = [1]", "stop"),
        ("stop = ['']", "stop"),
        ("scale = true", "scale"),
        ("scale = nan", "scale"),
        ("scale = inf", "scale"),
        ("scale = 1" + "0" * 400, "scale"),
        ("keys = []", "keys"),
        ("keys = ['']", "keys"),
        ("keys = ['sha256:12']", "keys"),
        ("keys = 'k'", "keys"),
        ("chat_template = '{% for %}'", "chat_template"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, where: str) -> None:
    """An unknown key, a wrong type or value: an error with the file and the key, and no crash."""
    with pytest.raises(FormatError, match=r"poet\.toml") as caught:
        read(tmp_path, text)

    assert where in str(caught.value)
    assert len(str(caught.value)) < 2000


def test_an_error_about_keys_does_not_tell_them(tmp_path: Path) -> None:
    """A key that is too long is not repeated."""
    with pytest.raises(FormatError) as caught:
        read(tmp_path, f"keys = ['{'hush' * 500}']")

    assert "hush" not in str(caught.value)


@pytest.fixture
def make(tmp_path: Path) -> Callable[[str, str], Generation]:
    """Registers an adapter with a sidecar."""
    registry = Registry(lambda _path, _options: HEADER)

    def register(name: str, text: str) -> Generation:
        (tmp_path / f"{name}.toml").write_text(text)
        return registry.register(name, tmp_path / f"{name}.gguf")[0]

    return register


def test_only_the_bearers_of_its_keys_may_use_an_adapter(
    make: Callable[[str, str], Generation],
) -> None:
    """Plain or as a digest; every adapter of a mix has to allow the key."""
    digest = hashlib.sha256(b"beta").hexdigest()
    one = make("one", f"keys = ['alpha', 'sha256:{digest.upper()}']")
    two = make("two", "keys = ['alpha']")
    free = make("free", "")
    sidecars = Sidecars(ChatTemplate)

    assert sidecars.for_mix([one, free], "beta") == NO_DEFAULTS
    assert sidecars.for_mix([one, two], "alpha") == NO_DEFAULTS
    for key in ("beta", "other", "", None):
        with pytest.raises(PermissionDeniedError, match="'two'"):
            sidecars.for_mix([two, free], key)
    assert sidecars.for_mix([], None) == NO_DEFAULTS


def test_a_generation_keeps_the_sidecar_that_it_was_first_read_with(
    tmp_path: Path, make: Callable[[str, str], Generation]
) -> None:
    """An edited sidecar counts from the next registration of the name on."""
    sidecars = Sidecars(ChatTemplate)
    old = make("one", "scale = 2")
    assert sidecars.of(old).scale == 2

    new = make("one", "scale = 3")

    assert (sidecars.of(old).scale, sidecars.of(new).scale) == (2, 3)
