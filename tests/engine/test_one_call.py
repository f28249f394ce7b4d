"""`loragraph.generate`, and chats by the model's own template."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loragraph
from loragraph import Adapter, Context, Model
from loragraph.engine.generate import SamplingFields
from loragraph.errors import FormatError, InvalidRequestError
from tests.tiny import TinyAdapter, TinyLlama
from tests.tiny_vocab import CHAT_TEMPLATE

TINY = TinyLlama(seed=3)
NO_EOG = {2: -np.inf, 4: -np.inf}
PROMPT = "hello world"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and an adapter of it."""
    folder = tmp_path_factory.mktemp("one_call")
    TINY.write(folder / "base.gguf")
    TinyAdapter().write(folder / "a.gguf", TINY)
    return folder


@pytest.fixture
def ctx(folder: Path) -> Iterator[Context]:
    """A context of 128 tokens."""
    with (
        Model.load(folder / "base.gguf", n_threads=1) as model,
        Context(model, n_ctx=128) as ctx,
    ):
        yield ctx


def variant(tmp_path: Path, **extra: Any) -> Path:
    """The tiny model with other metadata."""
    return dataclasses.replace(TINY, extra=extra).write(tmp_path / "variant.gguf")


def test_chat(ctx: Context) -> None:
    """A chat is the rendered template: control tokens parsed, one BOS, the answer's header."""
    vocab = ctx.model.vocab
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    tokens = ctx.model.chat_tokens(messages)

    text = vocab.detokenize(tokens)
    assert tokens[0] == vocab.bos
    assert tokens.count(1) == 1
    assert tokens.count(vocab.tokenize("<|im_start|>", add_special=False)[-1]) == 3
    assert text.endswith("<|im_start|> assistant\n")
    assert ctx.generate(messages, max_tokens=1).n_prompt == len(tokens)
    ctx.clear()
    one = ctx.generate("b", chat=True, max_tokens=1)
    assert one.n_prompt == len(ctx.model.chat_tokens(messages[1:]))


def test_chat_template_with_bos(tmp_path: Path) -> None:
    """A template that writes BOS itself does not lead to two of them."""
    path = variant(tmp_path, **{"tokenizer.chat_template": "{{ bos_token }}" + CHAT_TEMPLATE})
    with Model.load(path, n_threads=1) as model:
        tokens = model.chat_tokens([{"role": "user", "content": "b"}])

    assert tokens[0] == 1
    assert tokens.count(1) == 1


def test_chat_without_bos_from_the_vocabulary(tmp_path: Path) -> None:
    """Where the vocabulary adds no BOS, the template's own stays."""
    keys = {"tokenizer.ggml.add_bos_token": False}
    template = {"tokenizer.chat_template": "{{ bos_token }}" + CHAT_TEMPLATE}
    with Model.load(variant(tmp_path, **keys, **template), n_threads=1) as model:
        tokens = model.chat_tokens([{"role": "user", "content": "b"}])

    assert tokens.count(1) == 1


def test_a_broken_chat_template(tmp_path: Path) -> None:
    """A template that cannot be compiled is the file's fault, and only chats need it."""
    path = variant(tmp_path, **{"tokenizer.chat_template": "{% for"})
    with Model.load(path, n_threads=1) as model, Context(model, n_ctx=64) as ctx:
        assert ctx.generate(PROMPT, max_tokens=1, logit_bias=NO_EOG).n_generated == 1
        with pytest.raises(FormatError, match="chat template"):
            ctx.stream("hello", chat=True)


def test_a_template_that_refuses(tmp_path: Path) -> None:
    """What a template complains of is the request's fault."""
    template = "{{ raise_exception('roles must alternate') }}"
    path = variant(tmp_path, **{"tokenizer.chat_template": template})
    with (
        Model.load(path, n_threads=1) as model,
        pytest.raises(InvalidRequestError, match="roles must alternate"),
    ):
        model.chat_tokens([{"role": "user", "content": "b"}])


def test_one_call(folder: Path) -> None:
    """loragraph.generate loads what it is given as paths, and gives what a context gives."""
    base, path = folder / "base.gguf", folder / "a.gguf"
    fields: SamplingFields = {"temperature": 0, "max_tokens": 8, "logit_bias": NO_EOG}
    with Model.load(base, n_threads=1) as model:
        adapter = Adapter.load(path, model)
        plain = loragraph.generate(model, PROMPT, **fields)
        changed = loragraph.generate(model, PROMPT, adapters={adapter: 2.0}, **fields)
        assert model.adapters == (adapter,)
        mixed = loragraph.generate(model, PROMPT, adapters={path: 2.0}, **fields)
        assert model.adapters == (adapter,)

    alone = loragraph.generate(str(base), PROMPT, adapters={path: 2.0}, n_threads=1, **fields)
    assert plain.tokens != changed.tokens
    assert alone.tokens == mixed.tokens == changed.tokens
    assert alone.adapters == changed.adapters == ((adapter.digest, 2.0),)


def test_one_call_closes_after_an_error(folder: Path) -> None:
    """An error inside leaves no adapter and no context behind."""
    with Model.load(folder / "base.gguf", n_threads=1) as model:
        with pytest.raises(InvalidRequestError):
            loragraph.generate(model, "", adapters={folder / "a.gguf": float("inf")})
        assert model.adapters == ()


def test_contexts_generate_in_parallel(folder: Path) -> None:
    """Two contexts of one model, with unlike adapters, generate in two threads as each alone."""
    fields: SamplingFields = {"temperature": 0, "max_tokens": 24, "logit_bias": NO_EOG}
    with Model.load(folder / "base.gguf", n_threads=1) as model:
        adapter = Adapter.load(folder / "a.gguf", model)
        sets: list[dict[Adapter | str | PathLike[str], float]] = [{}, {adapter: 2.0}]

        def answer(adapters: dict[Adapter | str | PathLike[str], float]) -> tuple[int, ...]:
            return loragraph.generate(model, PROMPT, adapters=adapters, **fields).tokens

        alone = [answer(adapters) for adapters in sets]
        with ThreadPoolExecutor(2) as pool:
            together = list(pool.map(answer, sets * 3))

    assert together == alone * 3
    assert alone[0] != alone[1]


def test_adapters_as_a_list_name_what_was_expected(folder: Path) -> None:
    """A list of paths, which says nothing of scales, is refused before anything is loaded."""
    adapters: Any = [folder / "a.gguf"]
    with pytest.raises(TypeError, match="expected a mapping of adapters to scales"):
        loragraph.generate("missing.gguf", PROMPT, adapters=adapters)
