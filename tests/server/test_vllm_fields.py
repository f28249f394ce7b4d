"""vLLM's and SGLang's own fields on OpenAI's routes."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx2 as httpx
import pytest

from tests.server.serving import Served

PATHS = ("/v1/completions", "/v1/chat/completions")
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    """A small request for a route."""
    asked: dict[str, Any] = {"prompt": "hello"}
    if "chat" in path:
        asked = {"messages": [{"role": "user", "content": "hello"}]}
    return {**asked, **GREEDY, **fields}


def text_of(answer: httpx.Response) -> str:
    """The first choice's text, of a stream too."""
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"].startswith("application/json"):
        choice = answer.json()["choices"][0]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line[6:7] == "{"]
    entries = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(
        entry["text"] if "text" in entry else entry["delta"].get("content", "") for entry in entries
    )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_choice": ["yes", "no way"]}, "yes|no way"),
        ({"structured_outputs": {"choice": ['"', "b\\n"]}}, r'"|b\\n'),
        ({"guided_regex": r"^[a-c]{3}-\d$"}, r"[a-c]{3}-\d"),
        ({"regex": "(ab|cd)x?"}, "(ab|cd)x?"),
        ({"structured_outputs": {"regex": "x{4}", "disable_any_whitespace": True}}, "x{4}"),
        ({"guided_grammar": 'root ::= "a" "b"?'}, "ab?"),
        ({"ebnf": 'root ::= "cd"'}, "cd"),
        ({"structured_outputs": {"grammar": 'root ::= "ef"'}}, "ef"),
        ({"guided_json": {"const": 5}, "guided_decoding_backend": "xgrammar"}, r"\s?5"),
        ({"guided_json": '{"enum": [7, 8]}'}, r"\s?[78]"),
        ({"structured_outputs": {"json": {"type": "boolean"}}}, r"\s?(true|false)"),
    ],
)
def test_guided_answers_have_their_form(
    http: httpx.Client, path: str, fields: dict[str, Any], pattern: str
) -> None:
    """All names of all forms bind the whole answer."""
    assert re.fullmatch(pattern, text_of(http.post(path, json=body_of(path, **fields))))


@pytest.mark.parametrize(
    ("fields", "phrase"),
    [
        ({"guided_choice": ["a"], "guided_regex": "b"}, "guided_regex, guided_choice"),
        ({"guided_choice": ["a"], "grammar": 'root ::= "a"'}, "grammar, guided_choice"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": "(?=a)"}, "look-around"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": '{"type": "integer", "minimum": NaN}'}, "guided_json"),
        ({"guided_json": '{"const": NaN}'}, "guided_json"),
        ({"guided_json": '{"const": -Infinity}'}, "guided_json"),
        ({"structured_outputs": {"json": '{"const": [1e400]}'}}, "Out of range float"),
        ({"guided_json": {"type": "integer", "exclusiveMinimum": [1]}}, "exclusiveMinimum"),
        ({"guided_choice": [chr(0x4E00 + i) for i in range(600)]}, "at most 512 unlike"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structural_tag: not supported"),
        ({"structured_outputs": {"chioce": ["x"]}}, "unknown field"),
        ({"guided_grammar": "root ::= x"}, "grammar"),
        ({"bad_words": ["hello there you"]}, "words of one token"),
        ({"bad_words": [" "]}, "words of one token"),
        ({"truncate_prompt_tokens": 0}, "at least 1"),
        ({"lora_path": ["alpha", "beta"]}, "one adapter for all prompts"),
        ({"lora_path": "alpha", "adapters": ["beta"]}, "got both"),
        ({"allowed_token_ids": [1]}, "guided_choice"),
        ({"length_penalty": 2}, "length_penalty: not supported"),
        ({"logits_processors": ["x"]}, "logits_processors: not supported"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params: not supported"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs: not supported"),
        ({"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids: not supported"),
        ({"request_id": "a b"}, "request_id"),
        ({"request_id": "é"}, "request_id"),
    ],
)
@pytest.mark.parametrize("path", PATHS)
def test_what_there_is_not_is_refused_in_words(
    http: httpx.Client, path: str, fields: dict[str, Any], phrase: str
) -> None:
    """No such field is left out silently."""
    answer = http.post(path, json=body_of(path, **fields))

    assert answer.status_code == 400
    assert phrase in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
def test_neutral_values_change_nothing(http: httpx.Client, path: str) -> None:
    """What clients send along without meaning it."""
    neutral: dict[str, Any] = {
        "skip_special_tokens": True, "spaces_between_special_tokens": True,
        "include_stop_str_in_output": False, "length_penalty": 1.0, "bad_words": [],
        "logits_processors": [], "return_tokens_as_token_ids": False, "kv_transfer_params": None,
        "vllm_xargs": {}, "priority": 3, "guided_decoding_backend": "auto",
        "allowed_token_ids": None, "use_beam_search": False, "lora_path": None,
    }  # fmt: skip
    if "chat" in path:
        neutral |= {"echo": False, "best_of": 1, "include_reasoning": True, "chat_template": None}
        neutral |= {"mm_processor_kwargs": {}, "documents": []}

    plain = text_of(http.post(path, json=body_of(path)))
    assert text_of(http.post(path, json=body_of(path, **neutral))) == plain


# dataclasses.asdict(StructuredOutputsParams(choice=["yes", "no"])) of vLLM
ALL_OF_STRUCTURED: dict[str, Any] = {
    "json": None, "regex": None, "choice": ["yes", "no"], "grammar": None, "json_object": None,
    "disable_fallback": False, "disable_any_whitespace": False,
    "disable_additional_properties": False, "whitespace_pattern": None, "structural_tag": None,
    "_backend": None, "_backend_was_auto": False,
}  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("more", [{}, {"whitespace_pattern": " "}])
def test_null_fields_of_structured_outputs_were_unknown(
    http: httpx.Client, path: str, more: dict[str, Any]
) -> None:
    """null is a missing field in there too, as clients of vLLM's send all of them."""
    body = body_of(path, structured_outputs={**ALL_OF_STRUCTURED, **more})

    assert text_of(http.post(path, json=body)) in ("yes", "no")


@pytest.mark.parametrize("field", ["echo", "best_of", "chat_template", "mm_processor_kwargs"])
def test_what_chats_do_not_have_is_refused(http: httpx.Client, field: str) -> None:
    """As above, of chats alone."""
    value: Any = {"echo": True, "best_of": 2, "mm_processor_kwargs": {"a": 1}}.get(field, "x")
    answer = http.post(PATHS[1], json=body_of(PATHS[1], **{field: value}))

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_the_stop_string_stands_at_the_end_where_it_is_wanted(
    http: httpx.Client, path: str, stream: bool
) -> None:
    """include_stop_str_in_output, of stop strings."""
    grammar = 'root ::= "abcd"'
    asked = body_of(path, grammar=grammar, stop="c", stream=stream)
    assert text_of(http.post(path, json=asked)) == "ab"

    asked["include_stop_str_in_output"] = True
    assert text_of(http.post(path, json=asked)) == "abc"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_a_stop_tokens_text_stands_at_the_end_where_it_is_wanted(
    http: httpx.Client, served: Served, path: str, stream: bool
) -> None:
    """include_stop_str_in_output, of stop tokens; what was held back goes before."""
    asked = body_of(path, grammar='root ::= "abcd"', max_tokens=20)
    answer = http.post(path, json={**asked, "return_token_ids": True}).json()
    ids = answer["choices"][0]["token_ids"]
    pieces = [served.engine.model.vocab.piece(one).decode() for one in ids]
    at = next(i for i in range(1, len(ids)) if pieces[i].strip() and ids[i] not in ids[:i])
    asked |= {"stop_token_ids": [ids[at]], "stop": ["".join(pieces[:at]) + "x"], "stream": stream}
    before = "".join(pieces[:at])

    assert text_of(http.post(path, json=asked)) == before
    asked["include_stop_str_in_output"] = True
    assert text_of(http.post(path, json=asked)) == before + pieces[at]


@pytest.mark.parametrize("stream", [False, True])
def test_special_tokens_are_shown_where_it_is_wanted(
    http: httpx.Client, served: Served, stream: bool
) -> None:
    """skip_special_tokens false: control tokens have their texts; the ending one has none."""
    vocab = served.engine.model.vocab
    token = next(
        one
        for one in range(vocab.n_tokens)
        if vocab.is_control(one) and one not in vocab.eog_tokens and vocab.piece(one)
    )
    body = body_of(PATHS[0], max_tokens=2, logit_bias={str(token): 5000}, stream=stream)

    assert text_of(http.post(PATHS[0], json=body)) == ""
    shown = text_of(http.post(PATHS[0], json={**body, "skip_special_tokens": False}))
    assert shown == 2 * vocab.piece(token).decode()


def test_bad_words_are_never_generated(http: httpx.Client, served: Served) -> None:
    """A word of one token, at the begin and behind a blank."""
    vocab = served.engine.model.vocab
    word = next(
        text
        for text in (vocab.piece(one).decode("utf-8", "replace") for one in range(vocab.n_tokens))
        if text.isalpha() and len(vocab.tokenize(text, add_special=False, parse_special=False)) == 1
    )
    [token] = vocab.tokenize(word, add_special=False, parse_special=False)
    body = body_of(PATHS[0], logit_bias={str(token): 5000}, max_tokens=3, return_token_ids=True)

    assert token in http.post(PATHS[0], json=body).json()["choices"][0]["token_ids"]
    answer = http.post(PATHS[0], json={**body, "bad_words": [word]})
    assert token not in answer.json()["choices"][0]["token_ids"]


def test_prompts_are_cut_and_begin_as_asked(http: httpx.Client, served: Served) -> None:
    """truncate_prompt_tokens keeps the end; add_special_tokens false adds nothing."""
    limit = served.engine.config.sequence_limit
    ids = [200 + i % 40 for i in range(limit + 5)]

    def asked(path: str, **fields: Any) -> list[int]:
        answer = http.post(path, json=body_of(path, return_token_ids=True, **fields)).json()
        of_chat = answer.get("prompt_token_ids")
        return list(answer["choices"][0]["prompt_token_ids"] if of_chat is None else of_chat)

    assert asked(PATHS[0], prompt=ids[:9], truncate_prompt_tokens=4) == ids[5:9]
    assert asked(PATHS[0], prompt=ids, truncate_prompt_tokens=-1) == ids[17:]
    whole = asked(PATHS[1])
    assert asked(PATHS[1], truncate_prompt_tokens=2) == whole[-2:]
    vocab = served.engine.model.vocab
    bare = vocab.tokenize("hello", add_special=False, parse_special=True)
    assert asked(PATHS[0], add_special_tokens=False) == bare
    with_all = vocab.tokenize("hello", add_special=True, parse_special=True)
    assert asked(PATHS[0]) == with_all
    n_added = len(with_all) - len(bare)
    assert n_added > 0
    assert asked(PATHS[1], add_special_tokens=False) == whole[n_added:]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens", "n_predict"])
def test_cutting_to_what_fits_left_one_token_beside_a_long_answer(
    http: httpx.Client, served: Served, path: str, field: str
) -> None:
    """truncate_prompt_tokens -1 leaves a prompt that fits alone, and half the limit to others."""
    limit = served.engine.config.sequence_limit
    eog = min(served.engine.model.vocab.eog_tokens)
    ending = {"logit_bias": {str(eog): 5000}, "return_token_ids": True}

    def asked(**fields: Any) -> list[int]:
        body = body_of(path, **ending, **fields)
        del body["max_tokens"]
        answer = http.post(path, json={**body, field: 2 * limit})
        assert answer.status_code == 200, answer.text
        of_chat = answer.json().get("prompt_token_ids")
        ids = answer.json()["choices"][0].get("prompt_token_ids") if of_chat is None else of_chat
        return list(ids)

    whole = asked()
    assert len(whole) > 1
    assert asked(truncate_prompt_tokens=-1) == whole
    if "chat" not in path:
        ids = [200 + i % 40 for i in range(limit + 5)]
        assert asked(prompt=ids, truncate_prompt_tokens=-1) == ids[-(limit - limit // 2) :]


def test_lora_path_names_an_adapter(http: httpx.Client) -> None:
    """SGLang's field: one name, or one for each prompt; null in a list is the base."""

    def names(path: Any) -> list[str]:
        answer = http.post(PATHS[0], json=body_of(PATHS[0], lora_path=path))
        return [use["name"] for use in answer.json()["adapters"]]

    assert names(None) == []
    http.post("/lora-adapters", json=[{"name": "alpha", "scale": 1}]).raise_for_status()
    try:
        assert names("beta") == names(["beta", "beta"]) == ["beta"]
        assert names([None]) == names([]) == []
        assert names(None) == ["alpha"]
    finally:
        http.post("/lora-adapters", json=[]).raise_for_status()


@pytest.mark.parametrize("path", PATHS)
def test_a_request_id_of_the_body_is_the_answers(http: httpx.Client, path: str) -> None:
    """vLLM's request_id."""
    answer = http.post(path, json=body_of(path, request_id="mine-7"))

    assert answer.json()["id"].endswith("-mine-7")


@pytest.mark.parametrize("path", PATHS)
def test_llama_servers_fields_are_known_here_too(http: httpx.Client, path: str) -> None:
    """Those that mean nothing here, and other names of ours."""
    ignored: dict[str, Any] = {
        "verbose": True, "response_fields": ["content"], "t_max_prompt_ms": 5, "n_keep": 7,
        "return_progress": True, "grammar_triggers": [{"type": 0}], "preserved_tokens": [1],
        "speculative.n_max": 0, "image_data": [], "reasoning_budget": -1,
        "reasoning_format": "none",
    }  # fmt: skip
    plain = text_of(http.post(path, json=body_of(path)))
    assert text_of(http.post(path, json=body_of(path, **ignored))) == plain

    answer = http.post(path, json=body_of(path, n_cmpl=3, n_probs=2)).json()
    assert len(answer["choices"]) == 3
    assert answer["choices"][2]["logprobs"]["top_logprobs" if "chat" not in path else "content"]


@pytest.mark.parametrize("path", ["/completion", *PATHS])
@pytest.mark.parametrize(
    "fields",
    [
        {"speculative.n_max": 4},
        {"image_data": [{"id": 1, "data": ""}]},
        {"multimodal_data": ["x"]},
        {"control_vector": [{"fname": "x"}]},
        {"reasoning_budget": 5},
        {"thinking_budget_tokens": 5},
        {"n_indent": 2},
        {"grammar_lazy": True},
    ],
)
def test_one_answer_on_every_route_to_what_there_is_not(
    http: httpx.Client, path: str, fields: dict[str, Any]
) -> None:
    """The same fields of llama-server are refused on its routes and on OpenAI's."""
    [field] = fields
    answer = http.post(path, json=body_of(path, **fields))

    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(field)


def test_n_and_n_cmpl_have_to_agree(http: httpx.Client) -> None:
    """Two names of one field."""
    answer = http.post(PATHS[1], json=body_of(PATHS[1], n=2, n_cmpl=3))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n_cmpl")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (PATHS[1], {"n_probs": 3}),
        (PATHS[1], {"n_probs": 3, "logprobs": True}),
        (PATHS[1], {"n_probs": 3, "logprobs": True, "top_logprobs": 3}),
        (PATHS[1], {"n_probs": 0, "logprobs": True, "top_logprobs": 3}),
        (PATHS[0], {"n_probs": 3}),
        (PATHS[0], {"n_probs": 3, "logprobs": 3}),
    ],
)
def test_n_probs_beside_logprobs_told_no_candidates(
    http: httpx.Client, path: str, fields: dict[str, Any]
) -> None:
    """Two names of one field: the one that is there counts."""
    told = http.post(path, json=body_of(path, **fields)).json()["choices"][0]["logprobs"]

    if "chat" in path:
        assert [len(entry["top_logprobs"]) for entry in told["content"]] == [3] * 12
    else:
        alone = http.post(path, json=body_of(path, logprobs=3)).json()["choices"][0]["logprobs"]
        assert [list(top) for top in told["top_logprobs"]] == [
            list(top) for top in alone["top_logprobs"]
        ]
        assert any(len(top) > 1 for top in told["top_logprobs"])


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (PATHS[1], {"n_probs": 5, "logprobs": True, "top_logprobs": 0}),
        (PATHS[1], {"n_probs": 5, "logprobs": True, "top_logprobs": 3}),
        (PATHS[0], {"n_probs": 5, "logprobs": 0}),
        (PATHS[0], {"n_probs": 0, "logprobs": 5}),
    ],
)
def test_n_probs_and_logprobs_have_to_agree(
    http: httpx.Client, path: str, fields: dict[str, Any]
) -> None:
    """One of them was accepted and not acted on."""
    answer = http.post(path, json=body_of(path, **fields))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n_probs")
