"""Hints: which adapters a body asks for, and how its prompt begins."""

from __future__ import annotations

from typing import Any

import pytest

from loragraph.cluster.catalogue import Catalogue
from loragraph.cluster.fleet import AdapterKey
from loragraph.ray.hint import Hint, hint_of
from tests.cluster.test_catalogue import content_of


def catalogue() -> Catalogue:
    """a (id 0, generation 4 after a swap) and b (id 1); b is the default."""
    out = Catalogue()
    out.apply([out.register("a", content_of(1))])
    out.apply([out.register("b", content_of(2))])
    out.apply([out.mix({"b": 0.5, "a": 0})])
    out.apply([out.swap("a", content_of(3))])
    return out


A, B = AdapterKey("a", 4), AdapterKey("b", 2)


@pytest.mark.parametrize(
    ("body", "adapters"),
    [
        ({}, (B,)),
        ({"model": "base"}, (B,)),
        ({"model": ""}, (B,)),
        ({"model": "a"}, (A,)),
        ({"model": "base:a"}, (A,)),
        ({"model": "base:new"}, (AdapterKey("new", 0),)),
        ({"model": "../x"}, ()),
        ({"model": 5}, (B,)),
        ({"model": "base", "lora": []}, ()),
        ({"lora": [{"id": 0, "scale": 1}]}, (A,)),
        ({"lora": [{"id": 0, "scale": 0}, {"name": "b", "scale": 2}]}, (B,)),
        ({"lora": [{"id": 9, "scale": 1}, {"id": "0", "scale": 1}, 7]}, ()),
        ({"lora": [{"id": 1, "scale": 1}], "adapters": ["a"]}, (B,)),
        ({"adapters": ["b", "a"]}, (A, B)),
        ({"adapters": {"a": 0.5, "b": 0}}, (A,)),
        ({"adapters": "a"}, ()),
        ({"lora_name": "new", "lora_path": "a.gguf"}, (AdapterKey("new", 0),)),
        ({"lora_name": "../x"}, ()),
        ({"lora_path": None}, (B,)),
        ({"lora_path": [None]}, ()),
        ({"lora_path": [], "model": "a"}, ()),
        ({"lora_path": ["../x", 5]}, ()),
        ({"lora_path": 5}, ()),
        ({"lora_path": "a", "lora": {"b": 1}}, (B,)),
    ],
)
def test_adapters_of_a_body(body: dict[str, Any], adapters: tuple[AdapterKey, ...]) -> None:
    """As the routes choose them, with their generations; what is wrong is left to the routes."""
    hint = hint_of("r", body, catalogue(), ["base"])

    assert hint.adapters == adapters
    assert hint.version == 4


@pytest.mark.parametrize("path", ["a", ["a", "a"]])
def test_requests_with_lora_path_were_routed_as_the_default_mix(path: Any) -> None:
    """SGLang's field is read as the routes read it: in place of `adapters`."""
    hint = hint_of(
        "r", {"prompt": ["x", "y"], "model": "base", "lora_path": path}, catalogue(), ["base"]
    )

    assert hint.adapters == (A,)
    assert hint.prefix == prefix(prompt=["x", "y"], adapters=["a"])


@pytest.mark.parametrize("body", [None, [], "text", 5])
def test_a_body_that_is_no_object(body: Any) -> None:
    """Goes anywhere."""
    assert hint_of("r", body, catalogue(), ["base"]) == Hint("r", 4)


def prefix(**body: Any) -> str:
    """The fingerprint."""
    return hint_of("r", body, catalogue(), ["base"]).prefix


def test_a_prefix_is_that_of_the_first_messages() -> None:
    """Later turns of a chat have the same, another chat or another adapter has not."""
    first = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    turn = [*first, {"role": "assistant", "content": "a"}, {"role": "user", "content": "v"}]

    assert prefix(messages=first) == prefix(messages=turn) != ""
    assert prefix(messages=first) != prefix(messages=first, model="a")
    assert prefix(messages=first) != prefix(messages=first, cache_salt="x")
    assert prefix(messages=first) != prefix(messages=first[:1])


def test_a_prefix_of_texts_and_tokens() -> None:
    """The first thousand characters count; no prompt has no prefix; any text has one."""
    assert prefix(prompt="x" * 2000) == prefix(prompt="x" * 3000)
    assert prefix(prompt=[1, 2, 3]) != prefix(prompt=[1, 2, 4])
    assert prefix(prompt="") == prefix(prompt=[]) == prefix() == ""
    assert prefix(prompt="\ud800") != ""
    assert prefix(input="a") == prefix(prompt="a")


def test_the_swapped_generation_has_a_prefix_of_its_own() -> None:
    """Its cells are others."""
    before = catalogue()
    after = catalogue()
    after.apply([after.swap("a", content_of(9))])
    body = {"prompt": "hello", "model": "a"}

    assert hint_of("r", body, before, ()).prefix != hint_of("r", body, after, ()).prefix
