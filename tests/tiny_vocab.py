"""Small vocabularies that libllama accepts in full: every byte string can be tokenised."""

from __future__ import annotations

from gguf import TokenType

from tests.gguf_bytes import Value

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_CHAT_TOKENS = ("<|im_start|>", "<|im_end|>")
_WORDS = ("the", "he", "in", "an", "re", "on", "er", "at", "th", "es", "or", "hello", "world")


def spm_metadata(n_vocab: int) -> dict[str, Value]:
    """A SentencePiece vocabulary: 3 special, 2 chat and 256 byte tokens, then pieces."""
    tokens = ["<unk>", "<s>", "</s>", *_CHAT_TOKENS]
    types = [TokenType.UNKNOWN, *[TokenType.CONTROL] * 4]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    types += [TokenType.BYTE] * 256
    pieces = ["▁", *"etaoinshrdlucmfwypvbgkqjxz", *_WORDS, *[f"▁{word}" for word in _WORDS]]
    tokens = _filled(tokens, pieces, n_vocab)
    types += [TokenType.NORMAL] * (n_vocab - len(types))
    scores = [0.0] * 261 + [-float(rank) for rank in range(n_vocab - 261)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [int(kind) for kind in types],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def bpe_metadata(n_vocab: int, pre: str = "smollm") -> dict[str, Value]:
    """A byte-level BPE vocabulary: 3 control tokens, 256 bytes, then merges of lower-case pairs."""
    byte_symbols = [_byte_symbol(byte) for byte in range(256)]
    tokens = ["<|endoftext|>", *_CHAT_TOKENS, *byte_symbols]
    types = [TokenType.CONTROL] * 3 + [TokenType.NORMAL] * 256
    merges = ["Ġ t", "h e", "Ġt he", "i n", "a n", "r e", "o n", "Ġ a", "e r", "l l"]
    pairs = (f"{a} {b}" for a in "abcdefghijklmnopqrstuvwxyz" for b in "aeiouy")
    merges = list(dict.fromkeys([*merges, *pairs]))[: max(0, n_vocab - len(tokens))]
    tokens = _filled(tokens, [merge.replace(" ", "") for merge in merges], n_vocab)
    types += [TokenType.NORMAL] * (n_vocab - len(types))
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kind) for kind in types],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def _filled(tokens: list[str], pieces: list[str], n_vocab: int) -> list[str]:
    if n_vocab < len(tokens):
        raise ValueError(f"this vocabulary needs n_vocab >= {len(tokens)}, got {n_vocab}")
    filler = [f"<filler{index}>" for index in range(n_vocab)]
    return [*tokens, *pieces, *filler][:n_vocab]


def _byte_symbol(byte: int) -> str:
    """GPT-2's printable stand-in for a byte: itself if printable, else 256 + its rank."""
    if _is_printable(byte):
        return chr(byte)
    return chr(256 + sum(not _is_printable(other) for other in range(byte)))


def _is_printable(byte: int) -> bool:
    return 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255
