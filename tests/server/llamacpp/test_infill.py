"""POST /infill: the order of its parts, what is left out when it is long, other files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from loragraph.vocab.vocab import Vocab
from tests.server.serving import Served, serving, write_files
from tests.tiny import TinyLlama

PRE, SUF, MID, REP, SEP = 310, 311, 312, 313, 314
IDS = {"fim_pre": PRE, "fim_suf": SUF, "fim_mid": MID, "fim_rep": REP, "fim_sep": SEP}


def model(*names: str) -> TinyLlama:
    """A base that has these tokens of infilling."""
    keys = {f"tokenizer.ggml.{name}_token_id": IDS[name] for name in names}
    return TinyLlama(extra=keys)


def serve(folder: Path, *names: str) -> Any:
    """A server of it."""
    write_files(folder, model(*names))
    return serving(folder, adapters={}, max_sequence_tokens=100)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A base with all of them, and at most 100 tokens a sequence."""
    with serve(tmp_path_factory.mktemp("infill"), *IDS) as one:
        yield one


def tokens(vocab: Vocab, text: str) -> list[int]:
    """Of a text that does not begin a prompt."""
    return vocab.tokenize(text, add_special=False, parse_special=False)


def asked(http: httpx.Client, **fields: Any) -> Any:
    """A good answer."""
    body = {"input_prefix": "", "input_suffix": "", "n_predict": 4, "temperature": 0, **fields}
    answer = http.post("/infill", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def expect(http: httpx.Client, served: Served, whole: list[int], **fields: Any) -> None:
    """The answer is that of exactly this prompt."""
    answer = asked(http, **fields)
    result = served.engine.generate(whole, temperature=0, max_tokens=4)

    vocab = served.engine.model.vocab
    assert answer["prompt"] == vocab.detokenize(whole)
    assert answer["tokens_evaluated"] == len(whole)
    assert answer["content"] == result.text


def test_prefix_suffix_and_the_middle(http: httpx.Client, served: Served) -> None:
    """BOS PRE prefix prompt SUF suffix MID."""
    vocab = served.engine.model.vocab
    own = [*tokens(vocab, "the"), *tokens(vocab, "he")]
    expected = [1, PRE, *own, SUF, *tokens(vocab, "world"), MID]

    expect(http, served, expected, input_prefix="the", input_suffix="world", prompt="he")


def test_special_tokens_in_texts_are_plain_text(http: httpx.Client, served: Served) -> None:
    """A file that mentions control tokens does not end its own prompt."""
    vocab = served.engine.model.vocab
    expected = [1, PRE, *tokens(vocab, "</s>"), SUF, MID]

    assert 2 not in expected
    expect(http, served, expected, input_prefix="</s>")


def test_other_files_stand_before_it(http: httpx.Client, served: Served) -> None:
    """Behind the repository's tokens, in their order."""
    vocab = served.engine.model.vocab
    extra = [{"filename": "a.py", "text": "x"}, {"filename": "b.py", "text": "y"}]
    context = [REP, *tokens(vocab, "myproject\n"), SEP, *tokens(vocab, "a.py\nx")]
    context += [SEP, *tokens(vocab, "b.py\ny"), SEP, *tokens(vocab, "filename\n")]

    expected = [1, *context, PRE, *tokens(vocab, "the"), SUF, MID]
    expect(http, served, expected, input_prefix="the", input_extra=extra)


def test_what_does_not_fit_is_left_out_far_from_the_gap(http: httpx.Client, served: Served) -> None:
    """The prefix loses its beginning, the suffix its end, 3 to 1; room is left for the answer."""
    vocab = served.engine.model.vocab
    before, after = "b" * 300, "c" * 300
    room = 100 - 4 - 4  # the answer, and BOS, PRE, SUF, MID
    n_after = room // 4
    kept = [*tokens(vocab, before)[-(room - n_after) :], SUF, *tokens(vocab, after)[:n_after]]

    expect(http, served, [1, PRE, *kept, MID], input_prefix=before, input_suffix=after)
    extra = [{"text": "d" * 300}]
    expect(
        http,
        served,
        [1, PRE, *kept, MID],
        input_prefix=before,
        input_suffix=after,
        input_extra=extra,
    )
    short = asked(http, input_prefix="b", input_suffix=after)
    assert short["tokens_evaluated"] == 96


def test_it_streams_and_has_adapters_as_any_route(http: httpx.Client) -> None:
    """The shape is /completion's."""
    body = {"input_prefix": "a", "input_suffix": "b", "n_predict": 2, "stream": True}
    with http.stream("POST", "/infill", json=body) as answer:
        lines = [line for line in answer.iter_lines() if line]

    assert '"stop":true' in lines[-1]


@pytest.mark.parametrize(
    ("fields", "phrase"),
    [
        ({"input_suffix": "a"}, "input_prefix"),
        ({"input_prefix": "a"}, "input_suffix"),
        ({"input_prefix": 5, "input_suffix": "a"}, "input_prefix"),
        ({"input_prefix": "a", "input_suffix": "a", "input_extra": "x"}, "input_extra"),
        ({"input_prefix": "a", "input_suffix": "a", "input_extra": [{"text": 5}]}, "input_extra"),
        ({"input_prefix": "a", "input_suffix": "a", "prompt": ["a", "b"]}, "prompt"),
    ],
)
def test_what_is_wrong(http: httpx.Client, fields: dict[str, Any], phrase: str) -> None:
    """400, naming the field."""
    answer = http.post("/infill", json=fields)

    assert answer.status_code == 400
    assert phrase in answer.json()["error"]["message"]


def test_a_base_that_lacks_a_token(tmp_path: Path) -> None:
    """501 in llama-server's words, naming what is missing."""
    with serve(tmp_path, "fim_pre", "fim_suf") as served, served.client() as http:
        answer = http.post("/infill", json={"input_prefix": "a", "input_suffix": "b"})

    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (501, "not_supported_error")
    assert error["message"] == "Infill is not supported by this model: middle token is missing. "


def test_without_repository_tokens_other_files_are_text(tmp_path: Path) -> None:
    """They stand before the prefix, each under its name."""
    names = ("fim_pre", "fim_suf", "fim_mid")
    with serve(tmp_path, *names) as served, served.client() as http:
        vocab = served.engine.model.vocab
        context = tokens(vocab, "\n\n--- a.py ---\n\nx")
        expected = [1, *context, PRE, *tokens(vocab, "the"), SUF, MID]
        extra = [{"filename": "a.py", "text": "x"}]

        expect(http, served, expected, input_prefix="the", input_extra=extra)
