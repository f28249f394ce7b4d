"""Text <-> token ids through libllama, vocabulary only, and the chat form of SmolLM2."""

from __future__ import annotations

from pathlib import Path

import jinja2.sandbox
import llama_cpp


class Vocab:
    """The vocabulary and chat template inside a GGUF."""

    def __init__(self, path: Path) -> None:
        self._llama = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
        template = self._llama.metadata["tokenizer.chat_template"]
        self._template = jinja2.sandbox.ImmutableSandboxedEnvironment().from_string(template)
        self.eos = self._llama.token_eos()

    def encode(self, text: str) -> list[int]:
        return self._llama.tokenize(text.encode(), add_bos=False, special=True)

    def decode(self, ids: list[int]) -> str:
        return self._llama.detokenize(ids).decode(errors="replace")

    def chat(self, question: str) -> str:
        """One user turn, with the template's own system prompt, ready for the answer."""
        messages = [{"role": "user", "content": question}]
        return str(self._template.render(messages=messages, add_generation_prompt=True))
