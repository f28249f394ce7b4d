"""The fields of OpenAI's bodies: taken, ignored or refused; docs/api.md says the same in words."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

from loragraph.engine.request import MAX_CHOICES
from loragraph.errors import InvalidRequestError
from loragraph.server.openai.vllm_fields import VllmBody
from loragraph.server.sampling import Body, SamplingBody, refuse_speculative

Lora = list[dict[str, Any]] | dict[str, Any]
Adapters = dict[str, Any] | list[Any]

_TOKENS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_TEXT: dict[str, Any] = {"type": "string"}
PROMPT_SCHEMA: dict[str, Any] = {
    "anyOf": [_TEXT, _TOKENS, {"type": "array", "items": {"anyOf": [_TEXT, _TOKENS]}}]
}

# Refused unless null or what they are by themselves.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "suffix": ("",),
    "stream_resumable": (False,),
    "reasoning_format": ("none", "auto"),
    "grammar_lazy": (False,),
    "n_indent": (0,),
    "t_max_predict_ms": (-1, 0),
    "use_beam_search": (False,),
}


_REFUSED_CHAT: dict[str, tuple[Any, ...]] = {"best_of": (1,), "echo": (False,)}


class StreamOptions(Body):
    """How a stream ends."""

    model_config = ConfigDict(extra="ignore", strict=True)  # include_obfuscation and the like

    include_usage: bool | None = None


class ResponseFormat(BaseModel):
    """What form the answer takes; llama-server's `schema` beside OpenAI's `json_schema`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None
    schema_: Any = Field(None, alias="schema")


class GenerationBody(SamplingBody, VllmBody):
    """What chat and plain completions share."""

    model: Annotated[str, Field(max_length=400)] | None = None
    lora: Lora | None = None
    adapters: Adapters | None = None
    adapter_defaults: bool | None = None  # false: without what the adapters' sidecars say
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    n_cmpl: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None  # llama-server's name of n
    n_probs: Annotated[int, Field(ge=0)] | None = None
    cache_salt: Annotated[str, Field(max_length=1000)] | None = None
    cache_prompt: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
    response_format: ResponseFormat | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | bool | None = None
    return_token_ids: bool | None = None
    sse_ping_interval: int | None = None  # seconds
    # Ignored: they change nothing that an answer holds.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    id_slot: Any = None
    n_cache_reuse: Any = None
    n_discard: Any = None
    n_keep: Any = None
    timings_per_token: Any = None
    return_tokens: Any = None
    return_progress: Any = None
    response_fields: Any = None
    verbose: Any = None
    t_max_prompt_ms: Any = None
    grammar_triggers: Any = None  # without grammar_lazy
    preserved_tokens: Any = None
    # Refused.
    suffix: Any = None
    stream_resumable: Any = None
    grammar_lazy: Any = None
    n_indent: Any = None
    reasoning_format: Any = None
    reasoning_budget: Any = None
    thinking_budget_tokens: Any = None
    image_data: Any = None
    multimodal_data: Any = None
    control_vector: Any = None
    control_vectors: Any = None
    t_max_predict_ms: Any = None
    use_beam_search: Any = None

    @model_validator(mode="before")
    @classmethod
    def _without_speculative(cls, body: Any) -> Any:
        """llama-server's `speculative.*` fields: they may say that there is none, and no more."""
        if not isinstance(body, dict) or not any(str(k).startswith("speculative.") for k in body):
            return body
        refuse_speculative(body)
        return {k: value for k, value in body.items() if not str(k).startswith("speculative.")}

    @property
    def n_choices(self) -> int:
        """Answers to each prompt."""
        return self.n or self.n_cmpl or 1

    def check(self) -> None:
        """InvalidRequestError for a field that asks for what there is not."""
        self.refuse()
        refused = _REFUSED | (_REFUSED_CHAT if isinstance(self, TemplateBody) else {})
        for name, value in self:
            if value is not None and name in refused and value not in refused[name]:
                raise InvalidRequestError(f"{name}: not supported", param=name)
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError(
                "stream_options: only for 'stream': true", param="stream_options"
            )
        if self.n is not None and self.n_cmpl not in (None, self.n):
            raise InvalidRequestError(
                f"'n' and 'n_cmpl' disagree: {self.n} and {self.n_cmpl}", param="n_cmpl"
            )
        forms = [
            name
            for name in ("grammar", "json_schema", "response_format")
            if getattr(self, name) is not None
        ]
        if self.response_format is not None and self.response_format.type == "text":
            forms.remove("response_format")
        forms += self.forms()
        if len(forms) > 1:
            raise InvalidRequestError(
                f"expected one form of the answer, got {', '.join(forms)}",
                param=forms[-1],
            )


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Annotated[Any, WithJsonSchema(PROMPT_SCHEMA)]  # checked by prompts_of
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None


class Message(BaseModel):
    """One message; further fields go to the template."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class Function(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow", strict=True)

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    """A tool."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal["function"]
    function: Function


class ToolName(BaseModel):
    """A function's name."""

    model_config = ConfigDict(extra="ignore", strict=True)

    name: str


class NamedTool(BaseModel):
    """The one tool to call."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["function"]
    function: ToolName


Messages = Annotated[list[Message], Field(min_length=1, max_length=10_000)]
Tools = Annotated[list[Tool], Field(max_length=128)]


class TemplateBody(Body):
    """What makes a prompt of a chat."""

    messages: Messages
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None  # for templates that know it
    documents: Annotated[list[dict[str, Any]], Field(max_length=1000)] | None = None  # the same
    add_special_tokens: bool | None = None


class ChatBody(GenerationBody, TemplateBody):
    """POST /v1/chat/completions."""

    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    parse_tool_calls: bool | None = None
    # Ignored.
    verbosity: Any = None
    prediction: Any = None
    include_reasoning: Any = None
    # Refused.
    audio: Any = None
    modalities: Any = None
    web_search_options: Any = None
    functions: Any = None
    function_call: Any = None
    chat_template: Any = None
    mm_processor_kwargs: Any = None
    echo: Any = None
    best_of: Any = None
