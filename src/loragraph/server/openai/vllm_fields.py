"""vLLM's and SGLang's own fields of OpenAI's bodies; docs/api.md says the same in words."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from loragraph.errors import InvalidRequestError
from loragraph.server.gate import REQUEST_ID_PATTERN
from loragraph.server.sampling import Body

MAX_GUIDED_CHOICES = 1000

Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_GUIDED_CHOICES)]

# Refused unless null or what they are by themselves.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "chat_template": (),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "return_tokens_as_token_ids": (False,),
    "vllm_xargs": ({},),
}
_HINTS = {
    "allowed_token_ids": "; bind the answer with guided_choice, guided_regex or a grammar",
    "chat_template": "; an adapter's sidecar can have one",
}


class StructuredOutputs(BaseModel):
    """vLLM's `structured_outputs`: one form."""

    model_config = ConfigDict(extra="forbid", strict=True)

    json_: Any = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    # Ignored: how the form is kept to is this server's matter.
    disable_fallback: Any = None
    disable_any_whitespace: Any = None
    disable_additional_properties: Any = None
    whitespace_pattern: Any = None
    backend: Any = Field(None, alias="_backend")
    backend_was_auto: Any = Field(None, alias="_backend_was_auto")
    # Refused.
    structural_tag: Any = None


class VllmBody(Body):
    """What vLLM and SGLang have beside OpenAI's fields, in chats and plain completions."""

    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    regex: str | None = None  # SGLang's
    ebnf: str | None = None  # SGLang's
    lora_path: str | list[str | None] | None = None  # SGLang's: names of adapters
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    request_id: Annotated[str, Field(pattern=f"^{REQUEST_ID_PATTERN}$")] | None = None
    # Ignored.
    guided_decoding_backend: Any = None
    guided_whitespace_pattern: Any = None
    priority: Any = None
    spaces_between_special_tokens: Any = None
    # Refused.
    allowed_token_ids: Any = None
    kv_transfer_params: Any = None
    length_penalty: Any = None
    logits_processors: Any = None
    return_tokens_as_token_ids: Any = None
    vllm_xargs: Any = None

    def forms(self) -> dict[str, tuple[str, Any]]:
        """The forms of an answer that are asked for: by field (kind, what it says).

        Kinds: json, regex, choice, grammar.
        """
        kinds = {
            "guided_json": "json",
            "guided_regex": "regex",
            "guided_choice": "choice",
            "guided_grammar": "grammar",
            "regex": "regex",
            "ebnf": "grammar",
        }
        found = {
            name: (kind, getattr(self, name))
            for name, kind in kinds.items()
            if getattr(self, name) is not None
        }
        inner = self.structured_outputs
        if inner is None:
            return found
        for kind in ("json", "regex", "choice", "grammar"):
            value = getattr(inner, "json_" if kind == "json" else kind)
            if value is not None:
                found[f"structured_outputs.{kind}"] = kind, value
        if inner.json_object:
            found["structured_outputs.json_object"] = "json", {"type": "object"}
        return found

    def refuse(self) -> None:
        """InvalidRequestError for a field of vLLM's that asks for what there is not."""
        for name, neutral in _REFUSED.items():
            value = getattr(self, name, None)
            if value is not None and value not in neutral:
                raise InvalidRequestError(
                    f"{name}: not supported{_HINTS.get(name, '')}", param=name
                )
        inner = self.structured_outputs
        if inner is not None and inner.structural_tag is not None:
            name = "structured_outputs.structural_tag"
            raise InvalidRequestError(f"{name}: not supported", param=name)

    def adapter_names(self) -> list[str] | None:
        """Those of `lora_path`; None: not said."""
        path = self.lora_path
        if path is None:
            return None
        wanted = {path} if isinstance(path, str) else set(path)
        if len(wanted) > 1:
            raise InvalidRequestError(
                "lora_path: expected one adapter for all prompts of a request, got several",
                param="lora_path",
                hint="'adapters' mixes several; prompts with unlike ones are requests of their own",
            )
        return [name for name in wanted if name is not None]
