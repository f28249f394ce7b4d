"""The shapes that `prompt` may have, and the prompt of /infill: all to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from loragraph.errors import InvalidRequestError
from loragraph.server.errors import ApiError
from loragraph.server.llamacpp.tokens import tokenize_mixed
from loragraph.server.sidecar import Defaults
from loragraph.vocab.vocab import Vocab

Single = str | list[str | int]
"""A text, or token ids with texts between them."""


def split_prompts(value: Any, most: int) -> tuple[list[Single], bool]:
    """The prompts of a request's `prompt`, and whether it was a list of them.

    A list of ids, or of ids and texts, is one prompt; any other list has a prompt an element.
    """
    if isinstance(value, list) and not _is_single(value):
        if not value:
            raise _bad('"prompt" must not be empty')
        if len(value) > most:
            raise _bad(f"expected at most {most} prompts, got {len(value)}")
        return [_single(one) for one in value], True
    return [_single(value)], False


def prompt_tokens(vocab: Vocab, prompt: Single, defaults: Defaults) -> list[int]:
    """The token ids of a prompt; an adapter's prefix goes in front of one that begins with text."""
    if isinstance(prompt, str):
        prompt = defaults.text(prompt)
    elif prompt and isinstance(prompt[0], str):
        prompt = [defaults.text(prompt[0]), *prompt[1:]]
    tokens = tokenize_mixed(vocab, prompt, add_special=True)
    if not tokens:
        raise _bad("expected at least one token")
    return tokens


def infill_tokens(
    vocab: Vocab,
    prefix: str,
    suffix: str,
    extra: Sequence[Mapping[str, Any]],
    prompt: Single,
    n_most: int,
) -> list[int]:
    """The tokens of [extra] PRE prefix prompt SUF suffix MID, at most `n_most` of them.

    What does not fit is left out: first the beginning of `extra`, then the beginning of the prefix
    and the end of the suffix, in the ratio 3 to 1, as llama-server has it. `prompt` stands at the
    end of the prefix.
    """
    fim = fim_tokens(vocab)
    n_left = n_most - 4  # the three, and BOS
    before = vocab.tokenize(prefix, add_special=False, parse_special=False)
    before += tokenize_mixed(vocab, prompt, add_special=False, parse_special=False)
    after = vocab.tokenize(suffix, add_special=False, parse_special=False)
    n_after = min(len(after), max(n_left // 4, n_left - len(before)))
    n_before = min(len(before), n_left - n_after)
    context = _extra_tokens(vocab, extra)
    n_context = min(len(context), n_left - n_after - n_before)
    return [
        *([vocab.bos] if vocab.add_bos and vocab.bos is not None else []),
        *context[len(context) - n_context :],
        fim["prefix"],
        *before[len(before) - n_before :],
        fim["suffix"],
        *after[:n_after],
        fim["middle"],
    ]


def fim_tokens(vocab: Vocab) -> dict[str, int]:
    """The three tokens of infilling; 501 in llama-server's words where one is missing."""
    tokens = {"prefix": vocab.fim_pre, "suffix": vocab.fim_suf, "middle": vocab.fim_mid}
    missing = [f"{name} token is missing. " for name, token in tokens.items() if token is None]
    if missing:
        raise ApiError(501, f"Infill is not supported by this model: {''.join(missing)}")
    return {name: token for name, token in tokens.items() if token is not None}


def _extra_tokens(vocab: Vocab, extra: Sequence[Mapping[str, Any]]) -> list[int]:
    """Other files: each behind the repository's tokens where the model has them, else as text."""

    def tokens(text: str) -> list[int]:
        return vocab.tokenize(text, add_special=False, parse_special=False)

    if not extra:
        return []
    rep, sep = vocab.fim_rep, vocab.fim_sep
    out: list[int] = []
    if rep is not None and sep is not None:
        out += [rep, *tokens("myproject\n")]
    for file in extra:
        name, text = file.get("filename", "tmp"), file.get("text", "")
        if not isinstance(name, str) or not isinstance(text, str):
            raise InvalidRequestError(
                "input_extra: expected texts as 'filename' and 'text'", param="input_extra"
            )
        if rep is not None and sep is not None:
            out += [sep, *tokens(f"{name}\n{text}")]
        else:
            out += tokens(f"\n\n--- {name} ---\n\n{text}")
    if rep is not None and sep is not None:
        out += [sep, *tokens("filename\n")]
    return out


def _is_single(value: list[Any]) -> bool:
    """True for token ids, with texts between them or not."""
    kinds = {type(one) for one in value}
    return int in kinds and kinds <= {int, str}


def _single(value: Any) -> Single:
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        if value.get("multimodal_data"):
            raise _bad("expected text; this server does not support multimodal requests")
        text = value.get("prompt_string")
        if isinstance(text, str) and value.keys() <= {"prompt_string", "multimodal_data"}:
            return text
    if isinstance(value, list) and (_is_single(value) or all(isinstance(v, str) for v in value)):
        if not value:
            raise _bad('"prompt" must not be empty')
        return value
    raise _bad(f"expected a text, token ids, or a list of them, got {value!r:.80}")


def _bad(message: str) -> InvalidRequestError:
    return InvalidRequestError(f"prompt: {message}", param="prompt")
