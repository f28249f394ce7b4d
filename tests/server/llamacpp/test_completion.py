"""POST /completion: llama-server's fields and shapes, against the engine asked directly."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx2 as httpx
import pytest

from loragraph.engine.request import Result
from tests.server.serving import Served

GREEDY: dict[str, Any] = {"temperature": 0, "n_predict": 6, "ignore_eos": True}
FINAL = {
    *("index", "content", "tokens", "id_slot", "stop", "model", "tokens_predicted"),
    *("tokens_evaluated", "generation_settings", "prompt", "has_new_line", "truncated"),
    *("stop_type", "stopping_word", "tokens_cached", "timings"),
}
CHUNK = {
    *("index", "content", "tokens", "stop", "id_slot", "tokens_predicted", "tokens_evaluated"),
}
TIMINGS = {
    *("cache_n", "prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second"),
    *("predicted_n", "predicted_ms", "predicted_per_token_ms", "predicted_per_second"),
}
SETTINGS = {
    *("seed", "temperature", "dynatemp_range", "dynatemp_exponent", "top_k", "top_p", "min_p"),
    *("top_n_sigma", "xtc_probability", "xtc_threshold", "typical_p", "repeat_last_n"),
    *("repeat_penalty", "presence_penalty", "frequency_penalty", "dry_multiplier", "dry_base"),
    *("dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "mirostat"),
    *("mirostat_tau", "mirostat_eta", "stop", "max_tokens", "n_predict", "n_keep", "n_discard"),
    *("ignore_eos", "stream", "logit_bias", "n_probs", "min_keep", "grammar", "samplers"),
    *("timings_per_token", "post_sampling_probs", "lora", "speculative.n_max"),
}


def post(http: httpx.Client, prompt: Any = "hello world", **fields: Any) -> Any:
    """A good answer."""
    answer = http.post("/completion", json={"prompt": prompt, **GREEDY, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(http: httpx.Client, prompt: Any = "hello world", **fields: Any) -> list[Any]:
    """The chunks of a stream."""
    body = {"prompt": prompt, **GREEDY, "stream": True, **fields}
    with http.stream("POST", "/completion", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def asked(served: Served, prompt: str | Sequence[int] = "hello world", **fields: Any) -> Result:
    """The engine's own answer."""
    own = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, **fields}
    return served.engine.generate(prompt, **own)


def test_an_answer_has_llama_servers_keys(http: httpx.Client, served: Served) -> None:
    """All of them, at every level, and the text is the engine's."""
    answer = post(http)
    result = asked(served)

    assert answer.keys() >= FINAL
    assert answer["timings"].keys() >= TIMINGS
    assert answer["generation_settings"].keys() >= SETTINGS
    assert answer["content"] == result.text
    assert (answer["index"], answer["stop"], answer["tokens"]) == (0, True, [])
    assert (answer["stop_type"], answer["stopping_word"]) == ("limit", "")
    assert answer["tokens_predicted"] == answer["timings"]["predicted_n"] == 6
    timings = answer["timings"]
    assert answer["tokens_evaluated"] == result.n_prompt == timings["prompt_n"] + timings["cache_n"]
    assert answer["prompt"] == "<s> hello world"
    assert answer["model"] == "base"
    assert answer["truncated"] is False


def test_a_stream_has_llama_servers_keys(http: httpx.Client, served: Served) -> None:
    """A chunk a token, then the last one without text; together the engine's text; no [DONE]."""
    *chunks, final = stream(http, return_tokens=True)
    result = asked(served)

    assert all(chunk.keys() == CHUNK and chunk["stop"] is False for chunk in chunks)
    assert "".join(chunk["content"] for chunk in chunks) == result.text
    assert [token for chunk in chunks for token in chunk["tokens"]] == list(result.tokens)
    assert [chunk["tokens_predicted"] for chunk in chunks] == [1, 2, 3, 4, 5, 6]
    assert final.keys() >= FINAL
    assert (final["content"], final["tokens"], final["stop"]) == ("", [], True)
    assert final["generation_settings"]["stream"] is True


@pytest.mark.parametrize("path", ["/completion", "/completions"])
def test_both_names_of_the_route(http: httpx.Client, path: str) -> None:
    """/completions is the same route, not OpenAI's."""
    answer = http.post(path, json={"prompt": "a", **GREEDY}).json()

    assert answer.keys() >= FINAL


def test_shapes_of_one_prompt(http: httpx.Client, served: Served) -> None:
    """A text, its ids, ids and texts mixed, and an object: all one prompt."""
    vocab = served.engine.model.vocab
    ids = vocab.tokenize("hello world")
    text = post(http)["content"]

    assert post(http, ids)["content"] == text
    assert post(http, {"prompt_string": "hello world"})["content"] == text
    mixed = post(http, ["hello", 300, " world"])
    tokens = [*vocab.tokenize("hello"), 300, *vocab.tokenize(" world", add_special=False)]
    assert mixed["content"] == asked(served, tokens).text
    assert mixed["tokens_evaluated"] == len(tokens)
    assert post(http, [300, "hello"])["tokens_evaluated"] == 1 + len(
        vocab.tokenize("hello", add_special=False)
    )


def test_several_prompts_give_a_list(http: httpx.Client, served: Served) -> None:
    """In their order, whatever their shapes; a list of one is a list too."""
    answers = post(http, ["hello", [5, 6, 7], ["a", 300], {"prompt_string": "world"}])

    assert [answer["index"] for answer in answers] == [0, 1, 2, 3]
    tokens = [*served.engine.model.vocab.tokenize("a"), 300]
    prompts: list[Any] = ["hello", [5, 6, 7], tokens, "world"]
    assert [a["content"] for a in answers] == [asked(served, prompt).text for prompt in prompts]
    assert [answer["content"] for answer in post(http, ["hello"])] == [asked(served, "hello").text]


def test_several_prompts_and_choices_in_one_stream(http: httpx.Client, served: Served) -> None:
    """Each chunk says whose it is; each has its own last words."""
    chunks = stream(http, ["hello", "world"], n_cmpl=2)

    texts = dict.fromkeys(range(4), "")
    for chunk in chunks:
        texts[chunk["index"]] += chunk["content"]
    a, b = asked(served, "hello").text, asked(served, "world").text
    assert list(texts.values()) == [a, a, b, b]
    assert sorted(chunk["index"] for chunk in chunks if chunk["stop"]) == [0, 1, 2, 3]


def test_more_prompts_than_the_engine_waits_for(http: httpx.Client, served: Served) -> None:
    """One request may have more prompts than there are seats."""
    answers = post(http, [f"{i}" for i in range(40)], n_predict=2)

    assert [answer["index"] for answer in answers] == list(range(40))
    assert answers[39]["content"] == asked(served, "39", max_tokens=2).text


def test_why_it_ended(http: httpx.Client, served: Served) -> None:
    """eos, limit and word, with the word; the end of the context is told as truncated."""
    text = asked(served, max_tokens=20).text
    word = text[3:5]

    stopped = post(http, stop=["never", word, ""], n_predict=20)
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", word)
    assert stopped["content"] == text[: text.index(word)]
    forced = post(http, grammar='root ::= "a"', ignore_eos=False)
    assert (forced["stop_type"], forced["content"]) == ("eos", "a")
    full = post(http, [5] * 1000, n_predict=-1)
    assert (full["stop_type"], full["truncated"]) == ("limit", True)
    assert full["tokens_evaluated"] + full["tokens_predicted"] == 1024
    exact = post(http, [5] * 1000, n_predict=24)
    assert exact["truncated"] is False


def test_nothing_to_predict_evaluates_the_prompt(http: httpx.Client) -> None:
    """n_predict 0 fills the cache and gives no text."""
    prompt = list(range(100, 150))
    first = post(http, prompt, n_predict=0)
    second = post(http, prompt)

    assert (first["content"], first["tokens_predicted"]) == ("", 0)
    assert second["timings"]["cache_n"] == 49


def test_without_cache_prompt_nothing_is_reused(http: httpx.Client) -> None:
    """cache_prompt false computes it all, and leaves nothing for others either."""
    prompt = list(range(150, 200))

    assert post(http, prompt, cache_prompt=False)["timings"]["cache_n"] == 0
    assert post(http, prompt)["timings"]["cache_n"] == 0
    assert post(http, prompt, cache_prompt=False)["timings"]["cache_n"] == 0
    assert post(http, prompt)["timings"]["cache_n"] == 49


def test_probabilities(http: httpx.Client, served: Served) -> None:
    """An entry a token, with its likeliest; id, text, bytes and natural logarithm each."""
    answer = post(http, n_probs=3, return_tokens=True)
    *chunks, final = stream(http, n_probs=3)

    found = answer["completion_probabilities"]
    assert [entry["id"] for entry in found] == answer["tokens"]
    vocab = served.engine.model.vocab
    for entry in found:
        assert entry.keys() == {"id", "token", "bytes", "logprob", "top_logprobs"}
        assert bytes(entry["bytes"]) == vocab.piece(entry["id"])
        assert len(entry["top_logprobs"]) == 3
        assert entry["top_logprobs"][0]["id"] == entry["id"]  # greedy
        assert entry["top_logprobs"][0]["logprob"] == pytest.approx(entry["logprob"])
    assert [chunk["completion_probabilities"][0]["id"] for chunk in chunks] == answer["tokens"]
    assert "completion_probabilities" not in final
    assert "completion_probabilities" not in post(http)


@pytest.mark.parametrize(
    "bias",
    [
        [[62, False]],
        [["9", False]],
        {"62": -100.0},
        {"62": False},
        {"9&9": -100.0},
        [[62, -50], [62, -50]],
    ],
)
def test_logit_bias_in_all_its_shapes(http: httpx.Client, served: Served, bias: Any) -> None:
    """Pairs or an object, ids or texts, numbers or false."""
    assert served.engine.model.vocab.piece(62) == b"9"
    assert 62 in asked(served).tokens

    answer = post(http, logit_bias=bias, return_tokens=True)

    assert 62 not in answer["tokens"]


def test_grammar_and_json_schema(http: httpx.Client) -> None:
    """The text keeps to them; an empty grammar is none, and a grammar goes before a schema."""
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}

    found = post(http, json_schema=schema, n_predict=60, ignore_eos=False)["content"]
    assert json.loads(found)["a"] in (1, 2)
    found = post(http, grammar='root ::= "yes"', json_schema=schema, ignore_eos=False)["content"]
    assert found == "yes"
    assert post(http, grammar="")["content"] == post(http)["content"]


def test_a_seed_repeats_a_text(http: httpx.Client) -> None:
    """The seed in use stands in the settings; -1 draws one."""
    first = post(http, temperature=1.5, seed=-1, n_predict=12)
    seed = first["generation_settings"]["seed"]

    assert post(http, temperature=1.5, seed=seed, n_predict=12)["content"] == first["content"]
    assert 0 <= seed < 2**32


def test_settings_echo_what_was_asked(http: httpx.Client) -> None:
    """Each sampling field comes back as it went in; also under its other name."""
    given: dict[str, Any] = {
        "temperature": 0.7,
        "top_k": 7,
        "top_p": 0.5,
        "min_p": 0.1,
        "typical_p": 0.9,
        "repeat_penalty": 1.5,
        "repeat_last_n": 5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "dry_multiplier": 0.5,
        "dry_base": 2.0,
        "dry_allowed_length": 3,
        "dry_penalty_last_n": 9,
        "dry_sequence_breakers": ["\n", "."],
        "xtc_probability": 0.2,
        "xtc_threshold": 0.2,
        "top_n_sigma": 1.5,
        "dynatemp_range": 0.1,
        "dynatemp_exponent": 1.5,
        "mirostat": 0,
        "stop": ["x"],
        "seed": 7,
    }
    settings = post(http, **given)["generation_settings"]

    assert {name: settings[name] for name in given} == given
    body = {"prompt": "a", "max_tokens": 3}
    assert http.post("/completion", json=body).json()["generation_settings"]["n_predict"] == 3


def test_response_fields(http: httpx.Client) -> None:
    """Only those, nested ones under their path; unknown ones are left out."""
    fields = ["content", "generation_settings/n_predict", "nope", "timings/nope/x"]
    answer = post(http, response_fields=fields)

    assert answer == {"content": answer["content"], "generation_settings/n_predict": 6}


def test_samplers_switch_the_others_off(http: httpx.Client) -> None:
    """What is not named has its neutral value, given or default; letters mean the same."""
    only = post(http, samplers=["top_k", "temperature"], top_p=0.1)["generation_settings"]
    letters = post(http, samplers="kt", top_p=0.1)["generation_settings"]

    assert (only["top_k"], only["top_p"], only["min_p"]) == (40, 1.0, 0.0)
    assert {**letters, "seed": 0} == {**only, "seed": 0}
    assert post(http, samplers=["top_k", "infill"])["generation_settings"]["temperature"] == 1.0


def test_unknown_fields_mean_nothing(http: httpx.Client) -> None:
    """As in llama-server; null is a missing field."""
    extra = {"image_data": [], "n_keep": 5, "id_slot": 3, "whatever": {"a": 1}, "top_k": None}

    assert post(http, **extra)["content"] == post(http)["content"]
