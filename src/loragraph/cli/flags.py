"""Messages of the library in the command line's words: `n_ctx` is called -c here."""

from __future__ import annotations

import re

from loragraph.errors import ConfigError, LoragraphError

_FLAGS = {  # argument, or argument=value -> flag
    "ignore_norm=True (--ignore-norm)": "--ignore-norm",
    "ignore_norm=True": "--ignore-norm",
    "ignore_norm": "--ignore-norm",
    "tied_output=False": "--no-tied-output",
    "tied_output=True": "--tied-output",
    "tied_output": "--tied-output",
    "attention='flash'": "--attention flash",
    "lowering='branch'": "--lowering branch",
    "n_ctx": "-c",
    "n_batch": "-b",
    "n_threads": "-t",
    "kv_type": "--kv-type",
    "max_tokens": "-n",
    "temperature": "--temp",
    "top_k": "--top-k",
    "top_p": "--top-p",
    "min_p": "--min-p",
    "typical_p": "--typical",
    "repeat_penalty": "--repeat-penalty",
    "repeat_last_n": "--repeat-last-n",
    "frequency_penalty": "--frequency-penalty",
    "presence_penalty": "--presence-penalty",
    "logit_bias": "--logit-bias",
    "max_split_bytes": "--split-max-size",
}
_FIELDS = {"output": "-o", "adapters": "--lora", "type": "--type", "scale": "--lora-scaled"}
# No part of a longer name, of a path or of a key: `loragraph.adapter.tied_output` stays.
_PATTERN = re.compile(
    r"(?<![\w./-])(" + "|".join(map(re.escape, _FLAGS)) + r")(?![\w/=-]|\.\w)", re.ASCII
)


def in_flags(message: str) -> str:
    """The message with the flags in place of Python's arguments."""
    return _PATTERN.sub(lambda match: _FLAGS[match[1]], message)


def error_in_flags(error: LoragraphError) -> str:
    """The same of an error, whose field, where it has one, begins its message."""
    message = str(error)
    field = error.field if isinstance(error, ConfigError) else ""
    if field in _FIELDS:
        message = _FIELDS[field] + message.removeprefix(field)
    return in_flags(message)
