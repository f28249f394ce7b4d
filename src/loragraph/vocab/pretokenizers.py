"""Which of libllama's BPE pre-tokenizers may see any text, and how the others are called.

Some split words with hand-written loops, the others with std::regex, whose recursion is as deep as
the match is long: 30,000 letters without a space overflow a stack of 8 MB and end the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from loragraph.errors import BackendError, InvalidRequestError

LOOPS = frozenset(
    (
        *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0"),
        *("lfm2", "jina-v5-nano", "dbrx", "smaug-bpe", "chatglm-bpe", "glm4", "glm5"),
        *("gpt-2", "phi-2", "jina-es", "jina-de", "gigachat", "jina-v2-es", "jina-v2-de"),
        *("a.x-4.0", "mellum", "modern-bert", "exaone4", "mpt", "olmo", "jais", "trillion"),
        *("granite-docling", "jina-v1-en", "jina-v2-code", "roberta-bpe", "starcoder", "refact"),
        *("command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2", "stablelm2"),
        *("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "hunyuan", "solar-open", "megrez"),
        *("grok-2", "qwen35", "laguna", "kimi-k2", "gemma4", "granite-embed-multi-311m"),
        "sarvam-moe",
    )
)
"""Names whose every expression is matched by a loop, or matches a single character."""

REFUSED = frozenset(("exaone-moe", "superbpe", "whitespace"))
"""Names whose expression backtracks without bound (two), and whose words break an assertion."""

MAX_REGEX_CHARS = 1 << 17
"""Longest text for a pre-tokenizer that recurses."""

_DIRECT_CHARS = 256  # fits the smallest stack that a thread has (512 KiB)
_STACK_BYTES_PER_CHAR = 2048
_STACK_BYTES = 1 << 20

_stack_size_lock = threading.Lock()  # the size for new threads belongs to the process


def with_deep_stack(call: Callable[[], int], n_chars: int) -> int:
    """`call()`, which recurses once a character, on a stack that is large enough for it."""
    if n_chars <= _DIRECT_CHARS:
        return call()
    if n_chars > MAX_REGEX_CHARS:
        raise InvalidRequestError(
            f"text: this vocabulary's pre-tokenizer takes at most {MAX_REGEX_CHARS} characters, "
            f"got {n_chars}",
            param="prompt",
        )
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(call()), name="tokenize")
    with _stack_size_lock:
        usual = threading.stack_size(_STACK_BYTES + n_chars * _STACK_BYTES_PER_CHAR)
        try:
            thread.start()
        except RuntimeError as exc:
            raise BackendError(f"no memory for the stack of the pre-tokenizer: {exc}") from exc
        finally:
            threading.stack_size(usual)
    thread.join()
    return results[0]
