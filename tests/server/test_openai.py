"""The server with the openai package as its client, over a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.serving import Served, serving, write_files
from tests.tiny import TinyLlama

HELLO: list[Any] = [{"role": "user", "content": "hello world"}]


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    """The client."""
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def answer(client: openai.OpenAI, **fields: Any) -> Any:
    """A chat's answer at temperature 0."""
    options = {"model": "base", "messages": HELLO, "temperature": 0, "max_tokens": 8, **fields}
    return client.chat.completions.create(**options)


def direct(served: Served, adapters: dict[str, float] | None = None, n: int = 8) -> str:
    """The same from the engine itself."""
    return served.engine.generate(HELLO, adapters=adapters, temperature=0, max_tokens=n).text


def test_models_are_the_base_and_every_adapter(client: openai.OpenAI) -> None:
    """The list has the base first and adapters with their parent; each can be asked for alone."""
    found = list(client.models.list())

    assert [model.id for model in found] == ["base", "alpha", "beta", "gamma"]
    assert found[1].to_dict()["parent"] == "base"
    assert client.models.retrieve("alpha").id == "alpha"
    assert client.models.retrieve("base:alpha").id == "alpha"


@pytest.mark.parametrize("model", ["alpha", "base:alpha"])
def test_an_adapter_is_a_model(client: openai.OpenAI, served: Served, model: str) -> None:
    """By its name, alone or behind the base's, an adapter answers as the engine with it does."""
    got = answer(client, model=model)

    assert got.system_fingerprint.startswith("loragraph-")
    assert got.choices[0].message.content == direct(served, {"alpha": 1.0})
    assert got.choices[0].message.content != direct(served)
    assert got.adapters[0]["name"] == "alpha"
    assert got.adapters[0]["scale"] == 1.0
    assert got.model == "alpha"


def test_usage_counts_tokens_and_what_the_cache_had(client: openai.OpenAI) -> None:
    """usage is of prompt and answer; asked again, most of the prompt comes from the cache."""
    answer(client, model="gamma")
    got = answer(client, model="gamma")

    usage = got.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1
    fresh = answer(client, model="gamma", extra_body={"cache_prompt": False})
    assert fresh.usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize("model", ["base", "beta"])
def test_a_stream_is_the_whole_in_pieces(client: openai.OpenAI, model: str) -> None:
    """The chunks of a stream add up to the answer; role first, reason last, then the usage."""
    whole = answer(client, model=model, n=2, seed=7)
    chunks = list(
        answer(
            client, model=model, n=2, seed=7, stream=True, stream_options={"include_usage": True}
        )
    )

    texts = {0: "", 1: ""}
    reasons = {}
    for chunk in chunks:
        for choice in chunk.choices:
            if not texts[choice.index] and choice.delta.role:
                assert choice.delta.role == "assistant"
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == {one.index: one.message.content for one in whole.choices}
    assert reasons == {one.index: one.finish_reason for one in whole.choices}
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    used = [adapter["name"] for adapter in chunks[-2].adapters]
    assert used == ([] if model == "base" else [model])


def test_seeds_and_choices(client: openai.OpenAI) -> None:
    """The same seed gives the same n choices, which differ from each other."""
    one = answer(client, temperature=1.5, n=3, seed=11)
    two = answer(client, temperature=1.5, n=3, seed=11)

    texts = [choice.message.content for choice in one.choices]
    assert texts == [choice.message.content for choice in two.choices]
    assert len(set(texts)) == 3


def test_logprobs(client: openai.OpenAI) -> None:
    """Greedy tokens are the first of their top log-probabilities; the stream has the same."""
    got = answer(client, logprobs=True, top_logprobs=3)
    streamed = answer(client, logprobs=True, top_logprobs=3, stream=True)

    content = got.choices[0].logprobs.content
    assert len(content) == got.usage.completion_tokens
    for entry in content:
        assert entry.top_logprobs[0].bytes == entry.bytes
        assert len(entry.top_logprobs) == 3
        assert entry.logprob <= 0
    pieces = [c.choices[0].logprobs for c in streamed if c.choices and c.choices[0].logprobs]
    assert [e.logprob for p in pieces for e in p.content] == pytest.approx(
        [e.logprob for e in content], abs=1e-4
    )


def test_stop_strings(client: openai.OpenAI) -> None:
    """A stop string ends the answer before it."""
    whole = answer(client, max_tokens=12).choices[0].message.content
    stop = whole[4:6]

    got = answer(client, max_tokens=12, stop=[stop]).choices[0]

    assert got.finish_reason == "stop"
    assert got.message.content == whole[: whole.index(stop)]
    assert got.stop_reason == stop


def test_a_json_schema_binds_the_answer(client: openai.OpenAI) -> None:
    """With response_format json_schema the answer is JSON of that schema."""
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["a", "b"]}, "n": {"type": "integer", "maximum": 99}},
        "required": ["kind", "n"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}

    got = answer(client, max_tokens=200, temperature=1.0, seed=3, response_format=form)

    value = json.loads(got.choices[0].message.content)
    assert value["kind"] in ("a", "b")
    assert value["n"] <= 99


@pytest.mark.parametrize(
    "extra",
    [
        {"json_schema": {"enum": ["only"]}},
        {"grammar": 'root ::= "\\"only\\""'},
        {"response_format": {"type": "json_object", "schema": {"const": "only"}}},
    ],
)
def test_forms_of_llama_server(client: openai.OpenAI, extra: dict[str, Any]) -> None:
    """json_schema, grammar and a schema beside json_object work as in llama-server."""
    got = answer(client, max_tokens=50, extra_body=extra)

    assert got.choices[0].message.content.strip() == '"only"'


def test_completions_of_several_prompts(client: openai.OpenAI, served: Served) -> None:
    """Texts and token ids may be mixed; choices are in the order of prompts; echo shows them."""
    ids = served.engine.model.vocab.tokenize("the world")
    made = client.completions.create(
        model="beta",
        prompt=["hello", "the world"],
        max_tokens=5,
        temperature=0,
        echo=True,
        extra_body={"return_token_ids": True},
    )
    by_ids = client.completions.create(model="beta", prompt=ids, max_tokens=5, temperature=0)

    assert [choice.index for choice in made.choices] == [0, 1]
    assert made.choices[0].text.startswith("hello")
    assert made.choices[1].text == "the world" + by_ids.choices[0].text
    assert made.choices[1].to_dict()["prompt_token_ids"] == ids


def test_a_stream_of_several_prompts(client: openai.OpenAI) -> None:
    """Chunks of all prompts come mixed, and add up to the answers."""
    options: Any = {"model": "base", "prompt": ["a", "b c", "d"], "max_tokens": 6, "temperature": 0}
    whole = client.completions.create(**options, n=2)

    texts = dict.fromkeys(range(6), "")
    for chunk in client.completions.create(**options, n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text

    assert texts == {choice.index: choice.text for choice in whole.choices}


def test_echo_with_logprobs_scores_a_text(client: openai.OpenAI, served: Served) -> None:
    """What evaluation harnesses do: log-probabilities of a given text, as the engine scores it."""
    text = "hello the world"
    tokens = served.engine.model.vocab.tokenize(text)
    score = served.engine.score(tokens, {"alpha": 1.0})

    got = client.completions.create(
        model="alpha", prompt=text, echo=True, logprobs=2, max_tokens=1, temperature=0
    ).choices[0]

    found: Any = got.logprobs
    assert got.text.startswith(text)
    assert len(found.tokens) == len(tokens) + 1
    assert found.token_logprobs[0] is None
    assert found.token_logprobs[1:-1] == pytest.approx(list(score.logprobs), abs=1e-3)
    assert found.text_offset[0] == 0
    for value, top in zip(found.token_logprobs[1:], found.top_logprobs[1:], strict=True):
        assert max(top.values()) >= value


def test_max_tokens_0_only_scores(client: openai.OpenAI) -> None:
    """With echo and max_tokens 0 nothing is generated."""
    got = client.completions.create(model="base", prompt="abc", echo=True, logprobs=1, max_tokens=0)

    assert got.choices[0].text == "abc"
    assert got.usage is not None
    assert got.usage.completion_tokens == 0


def test_prompt_logprobs(client: openai.OpenAI) -> None:
    """vLLM's field: an entry a token of the prompt, nothing for the first."""
    got = answer(client, extra_body={"prompt_logprobs": 2}).to_dict()["prompt_logprobs"]

    assert got[0] is None
    assert all(2 <= len(entry) <= 3 for entry in got[1:])
    assert all(entry["logprob"] <= 0 for one in got[1:] for entry in one.values())


@pytest.mark.parametrize(
    ("fields", "adapters"),
    [
        ({"lora": [{"name": "alpha", "scale": 0.5}]}, {"alpha": 0.5}),
        ({"lora": [{"id": 1, "scale": 2}]}, {"beta": 2.0}),
        ({"lora": {"alpha": 1, "beta": -0.5}}, {"alpha": 1.0, "beta": -0.5}),
        ({"adapters": {"gamma": 0.25}}, {"gamma": 0.25}),
        ({"adapters": ["gamma"]}, {"gamma": 1.0}),
        ({"lora": []}, {}),
        ({"lora": [{"id": 0, "scale": 0}]}, {}),
        ({"model": "alpha", "lora": [{"name": "alpha", "scale": 0.5}]}, {"alpha": 0.5}),
    ],
)
def test_several_adapters_with_scales(
    client: openai.OpenAI, served: Served, fields: dict[str, Any], adapters: dict[str, float]
) -> None:
    """The fields lora and adapters give scales, for chats as the engine has them."""
    got = answer(client, model=fields.get("model", "base"), extra_body=fields)

    assert {one["name"]: one["scale"] for one in got.adapters} == adapters
    assert got.choices[0].message.content == direct(served, adapters)


@pytest.mark.parametrize("model", ["base", "beta"])
def test_embeddings(client: openai.OpenAI, served: Served, model: str) -> None:
    """Vectors of unit length, as the engine gives them, in either encoding and for each input."""
    adapters = None if model == "base" else {model: 1.0}
    expected = [served.engine.embed(text, adapters).values for text in ("hello", "the world")]

    got = client.embeddings.create(model=model, input=["hello", "the world"])  # asks for base 64
    plain = client.embeddings.create(model=model, input="hello", encoding_format="float")

    assert [one.index for one in got.data] == [0, 1]
    for one, values in zip(got.data, expected, strict=True):
        assert one.embedding == pytest.approx(values.tolist(), abs=1e-4)
        assert sum(value * value for value in one.embedding) == pytest.approx(1, abs=1e-4)
    assert plain.data[0].embedding == pytest.approx(expected[0].tolist(), abs=1e-4)
    assert got.usage.prompt_tokens == got.usage.total_tokens > 2


def test_embeddings_tell_times_and_what_the_cache_had(client: openai.OpenAI) -> None:
    """Of one input beside the data, of several in each entry."""
    one = client.embeddings.create(model="beta", input="hello again", encoding_format="float")
    two = client.embeddings.create(model="beta", input=["hello", "you"], encoding_format="float")

    told: Any = one.to_dict()
    timings, usage = told["timings"], told["usage"]
    assert timings["cache_n"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert timings["cache_n"] + timings["prompt_n"] == usage["prompt_tokens"]
    assert timings["prompt_ms"] + timings["predicted_ms"] > 0
    assert "timings" not in two.to_dict()
    entries: list[Any] = [entry.to_dict()["timings"] for entry in two.data]
    n_prompt = sum(entry["cache_n"] + entry["prompt_n"] for entry in entries)
    assert n_prompt == two.usage.prompt_tokens


def test_embeddings_of_token_ids_and_other_poolings(client: openai.OpenAI, served: Served) -> None:
    """Token ids are taken as they are; `pooling` and `embd_normalize` are the engine's."""
    ids = served.engine.model.vocab.tokenize("the world")
    options: Any = {"pooling": "last", "embd_normalize": -1}
    expected = served.engine.embed(ids, pooling="last", normalize=-1).values

    got = client.embeddings.create(model="base", input=[ids], extra_body=options)

    assert got.data[0].embedding == pytest.approx(expected.tolist(), rel=1e-3, abs=1e-3)
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        client.embeddings.create(model="base", input="a", dimensions=3)


TOOL_TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call>{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments.a }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "adds",
            "parameters": {
                "type": "object",
                "properties": {"a": {"$ref": "#/$defs/n"}, "b": {"$ref": "#/$defs/n"}},
                "required": ["a", "b"],
                "$defs": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object",
     "properties": {}, "additionalProperties": False}}},
]  # fmt: skip


@pytest.fixture(scope="module")
def tools_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A client of a server whose base has a template with tools."""
    folder = tmp_path_factory.mktemp("tools")
    write_files(
        folder, TinyLlama(extra={"tokenizer.chat_template": TOOL_TEMPLATE}, n_ctx_train=4096)
    )
    with (
        serving(folder, n_ctx=4096) as one,
        openai.OpenAI(base_url=f"{one.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def streamed_calls(chunks: list[Any]) -> list[tuple[str, str]]:
    """Names and arguments of the calls in a stream, put together as OpenAI's clients do."""
    calls: dict[int, list[str]] = {}
    for one in (one for c in chunks for one in c.choices[0].delta.tool_calls or ()):
        assert (one.id is not None) == (one.index not in calls)
        call = calls.setdefault(one.index, [one.function.name, ""])
        call[1] += one.function.arguments
    assert list(calls) == list(range(len(calls)))
    return [(name, arguments) for name, arguments in calls.values()]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_forced_calls(tools_client: openai.OpenAI, choice: Any) -> None:
    """tool_choice forces calls of the tools, with arguments by their schemas; streamed too."""
    options: Any = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 400, "seed": 5,
                    "temperature": 1.0}  # fmt: skip
    got = answer(tools_client, **options)
    chunks = list(answer(tools_client, **options, stream=True))

    message = got.choices[0].message
    assert got.choices[0].finish_reason == "tool_calls"
    assert message.content is None
    for call in message.tool_calls:
        arguments = json.loads(call.function.arguments)
        if call.function.name == "add":
            assert {0 <= arguments[name] <= 9 for name in "ab"} == {True}
        else:
            assert (call.function.name, arguments) == ("now", {})
    if choice != "required":
        assert [call.function.name for call in message.tool_calls] == ["add"]
    assert streamed_calls(chunks) == [
        (call.function.name, call.function.arguments) for call in message.tool_calls
    ]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_calls_written_by_the_model(tools_client: openai.OpenAI) -> None:
    """With tool_choice auto, what the model writes in its format becomes a call."""
    text = 'Well.<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    grammar = f"root ::= {json.dumps(text)}"
    options: Any = {"tools": TOOLS, "max_tokens": 200, "extra_body": {"grammar": grammar}}

    whole = answer(tools_client, **options).choices[0]
    chunks = list(answer(tools_client, **options, stream=True))
    none = answer(tools_client, **options, tool_choice="none").choices[0]

    assert whole.message.content == "Well."
    assert [call.function.name for call in whole.message.tool_calls] == ["now"]
    shown = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert shown == "Well."
    assert streamed_calls(chunks) == [("now", "{}")]
    assert none.message.content == text
    assert none.finish_reason == "stop"


def test_calls_are_left_in_the_text_where_that_is_wanted(tools_client: openai.OpenAI) -> None:
    """llama-server's parse_tool_calls false."""
    text = 'Well.<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    body = {"grammar": f"root ::= {json.dumps(text)}", "parse_tool_calls": False}
    got = answer(tools_client, tools=TOOLS, max_tokens=200, extra_body=body).choices[0]

    assert (got.message.content, got.message.tool_calls) == (text, None)


def test_calls_and_results_go_back_to_the_model(tools_client: openai.OpenAI) -> None:
    """Earlier calls reach the template with arguments as objects, results as messages."""
    messages: list[Any] = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function",
         "function": {"name": "add", "arguments": '{"a": 77, "b": 2}'}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "9"},
    ]  # fmt: skip

    with_call = answer(tools_client, messages=messages, extra_body={"return_token_ids": True})
    without = answer(tools_client, messages=[messages[0], messages[2]])

    assert with_call.usage.prompt_tokens > without.usage.prompt_tokens


def test_the_last_message_can_be_continued(client: openai.OpenAI, served: Served) -> None:
    """continue_final_message leaves the assistant's turn open."""
    messages = [*HELLO, {"role": "assistant", "content": "I am"}]
    body = {"continue_final_message": True, "return_token_ids": True}

    got = answer(client, messages=messages, extra_body=body).to_dict()["prompt_token_ids"]

    vocab = served.engine.model.vocab
    assert vocab.detokenize(got).endswith("assistant\nI am")


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    """The client raises its own classes for our statuses, with message, type and param."""
    with pytest.raises(openai.NotFoundError, match="known: base, alpha") as missing:
        answer(client, model="nope")
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.NotFoundError) as unlisted:
        client.models.retrieve("nope")
    assert unlisted.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="at most") as long:
        client.completions.create(model="base", prompt="a " * 5000)
    assert long.value.type == "exceed_context_size_error"
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="unknown field"):
        answer(client, extra_body={"temprature": 1})


def test_many_at_once_are_each_as_alone(served: Served) -> None:
    """Requests with unlike adapters, in flight together, get the texts that they get alone."""
    mixes: list[dict[str, float]] = [
        {},
        {"alpha": 1.0},
        {"beta": 1.0},
        {"gamma": 0.5},
        {"alpha": 0.5, "beta": 0.5},
    ]
    expected = [direct(served, mix, 12) for mix in mixes]

    async def ask(client: openai.AsyncOpenAI, mix: dict[str, float], stream: bool) -> str:
        options: Any = {
            "model": "base", "messages": HELLO, "temperature": 0, "max_tokens": 12,
            "extra_body": {"adapters": mix},
        }  # fmt: skip
        if not stream:
            got = await client.chat.completions.create(**options)
            return str(got.choices[0].message.content)
        parts = await client.chat.completions.create(**options, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in parts])

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(ask(client, mixes[i % 5], i % 2 == 0) for i in range(20)))

    assert asyncio.run(ask_all()) == [expected[i % 5] for i in range(20)]
