"""Log-probabilities in OpenAI's two forms, and vLLM's for those of prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from loragraph.engine.logprobs import TokenLogprob
from loragraph.engine.request import Event
from loragraph.server.llamacpp.answers import probabilities
from loragraph.vocab.vocab import Vocab


def of_events(events: Iterable[Event]) -> list[TokenLogprob]:
    """Those of a stream's events; the token that ends an answer is not part of it."""
    return [
        TokenLogprob(event.token, event.logprob, event.top_logprobs)
        for event in events
        if event.token is not None and event.logprob is not None
    ]


def chat_logprobs(
    vocab: Vocab, found: Iterable[TokenLogprob], *, post: bool = False
) -> dict[str, Any]:
    """Chat's form: an entry a token.

    `post`: llama-server's, with probabilities of what tokens were drawn from.
    """
    if post:
        return {"content": probabilities(found, vocab, post=True), "refusal": None}
    content = [
        {
            **_entry(vocab, one.token, one.logprob),
            "top_logprobs": [_entry(vocab, token, logprob) for token, logprob in one.top],
        }
        for one in found
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """The older form: parallel lists. Keeps the offset from chunk to chunk."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._offset = 0

    def of(self, found: Iterable[TokenLogprob | None], tokens: Sequence[int]) -> dict[str, Any]:
        """The lists of these tokens; None: nothing is known of the token, as of the first one."""
        texts, values, tops, offsets = [], [], [], []
        for one, token in zip(found, tokens, strict=True):
            text = token_text(self._vocab, token)
            texts.append(text)
            offsets.append(self._offset)
            self._offset += len(text)
            values.append(None if one is None else one.logprob)
            tops.append(None if one is None else self._top(one))
        return {
            "tokens": texts,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _top(self, one: TokenLogprob) -> dict[str, float]:
        """By text; of unlike tokens with one text the likeliest."""
        top: dict[str, float] = {}
        for token, logprob in (*one.top, (one.token, one.logprob)):
            top.setdefault(token_text(self._vocab, token), logprob)
        return top


def prompt_logprobs_json(
    vocab: Vocab, found: Sequence[TokenLogprob | None] | None
) -> list[dict[str, Any] | None] | None:
    """vLLM's form: for each token {id: {logprob, rank, decoded_token}}, null for the first."""
    if found is None:
        return None
    return [None if one is None else _ranked(vocab, one) for one in found]


def token_text(vocab: Vocab, token: int) -> str:
    """A token as text; bytes that are no character are U+FFFD."""
    return vocab.piece(token).decode("utf-8", "replace")


def _ranked(vocab: Vocab, one: TokenLogprob) -> dict[str, Any]:
    ranks = {token: rank for rank, (token, _) in enumerate(one.top, 1)}
    return {
        str(token): {
            "logprob": logprob,
            "rank": ranks.get(token),
            "decoded_token": token_text(vocab, token),
        }
        for token, logprob in ((one.token, one.logprob), *one.top)
    }


def _entry(vocab: Vocab, token: int, logprob: float) -> dict[str, Any]:
    data = vocab.piece(token)
    return {
        "token": data.decode("utf-8", "replace"),
        "id": token,
        "logprob": logprob,
        "bytes": list(data),
    }
