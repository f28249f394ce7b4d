"""What llama-server says of a model in /v1/models and /props, in its words."""

from __future__ import annotations

from typing import Any

from loragraph.engine.model import Model

# llama.cpp's llama_model_ftype_name() of `general.file_type`
_FTYPES = {
    0: "all F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K - Medium",
    11: "Q3_K - Small",
    12: "Q3_K - Medium",
    13: "Q3_K - Large",
    14: "Q4_K - Small",
    15: "Q4_K - Medium",
    16: "Q5_K - Small",
    17: "Q5_K - Medium",
    18: "Q6_K",
    19: "IQ2_XXS - 2.0625 bpw",
    20: "IQ2_XS - 2.3125 bpw",
    21: "Q2_K - Small",
    22: "IQ3_XS - 3.3 bpw",
    23: "IQ3_XXS - 3.0625 bpw",
    24: "IQ1_S - 1.5625 bpw",
    25: "IQ4_NL - 4.5 bpw",
    26: "IQ3_S - 3.4375 bpw",
    27: "IQ3_S mix - 3.66 bpw",
    28: "IQ2_S - 2.5 bpw",
    29: "IQ2_M - 2.7 bpw",
    30: "IQ4_XS - 4.25 bpw",
    31: "IQ1_M - 1.75 bpw",
    32: "BF16",
    36: "TQ1_0 - 1.69 bpw ternary",
    37: "TQ2_0 - 2.06 bpw ternary",
    38: "MXFP4 MoE",
}


def ftype_name(model: Model) -> str:
    """The name of the file's mix of types; "" where the file does not say."""
    number = model.metadata.get("general.file_type")
    if not isinstance(number, int):
        return ""
    return _FTYPES.get(number, "unknown, may not work")  # llama.cpp's words


def meta_json(model: Model, n_ctx: int) -> dict[str, Any]:
    """`meta` of /v1/models: counts of the vocabulary, the context and the weights."""
    tensors = model.weights.files.tensors.values()
    return {
        "vocab_type": model.vocab.type_number,
        "n_vocab": model.hparams.n_vocab,
        "n_ctx": n_ctx,
        "n_ctx_train": model.hparams.n_ctx_train,
        "n_embd": model.hparams.n_embd,
        "n_params": sum(tensor.n_elements for tensor in tensors),
        "size": sum(tensor.nbytes for tensor in tensors),
        "ftype": ftype_name(model),
    }


def listed_json(name: str) -> dict[str, Any]:
    """An entry of `models`, the list in Ollama's shape that llama-server has beside OpenAI's."""
    return {
        "name": name,
        "model": name,
        "modified_at": "",
        "size": "",
        "digest": "",
        "type": "model",
        "description": "",
        "tags": [""],
        "capabilities": ["completion"],
        "parameters": "",
        "details": {
            "parent_model": "",
            "format": "gguf",
            "family": "",
            "families": [""],
            "parameter_size": "",
            "quantization_level": "",
        },
    }


def template_caps(source: str) -> dict[str, bool]:
    """`chat_template_caps` of /props: what a template reads of a chat, by the names it uses."""
    calls = "tool_calls" in source
    return {
        "supports_string_content": bool(source),
        "supports_typed_content": False,  # parts of type text are joined before
        "supports_tools": "tools" in source,
        "supports_tool_calls": calls,
        "supports_parallel_tool_calls": calls,
        "supports_system_role": "system" in source or "message.role" in source,
        "supports_object_arguments": calls,
        "supports_preserve_reasoning": "reasoning_content" in source,
    }
