"""Adapter GGUF files: PEFT weights -> file, and file -> PEFT weights.

Development only. Stands in for the conversion command; the reader is what makes golden numbers
comparable, since it gives PEFT the very values (rounded to F16) that an engine reads.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from base_model import PROJECTIONS, permute_rows, unpermute_rows
from numpy.typing import NDArray
from peft import PeftModel
from transformers import LlamaConfig

TARGETS = PROJECTIONS | {"output": "lm_head"}
# base_model.model.model.layers.3.self_attn.q_proj.lora_A.pirate.weight, and the two without a layer
_LAYER = re.compile(r"layers\.(\d+)\.(\w+\.\w+)\.lora_([AB])\.(\w+)\.weight$")
_HEAD = re.compile(r"lm_head\.lora_([AB])\.(\w+)\.weight$")
_EMBED = re.compile(r"embed_tokens\.lora_embedding_([AB])\.(\w+)$")


@dataclass(frozen=True)
class Header:
    """What the metadata of an adapter file says about it."""

    name: str
    alpha: float
    task_name: str
    description: str
    base: str = "SmolLM2-135M-Instruct"
    license: str = "apache-2.0"
    tied_output: bool | None = None  # whether a token_embd pair also changes a tied output head


def tensor_name(parameter: str) -> tuple[str, str] | None:
    """(GGUF tensor name, PEFT adapter name) of a PEFT parameter; None when it is no LoRA weight."""
    ours = {theirs: name for name, theirs in TARGETS.items()}
    if match := _LAYER.search(parameter):
        il, module, half, adapter = match.groups()
        return f"blk.{il}.{ours[module]}.weight.lora_{half.lower()}", adapter
    if match := _HEAD.search(parameter):
        half, adapter = match.groups()
        return f"output.weight.lora_{half.lower()}", adapter
    if match := _EMBED.search(parameter):
        half, adapter = match.groups()
        return f"token_embd.weight.lora_{half.lower()}", adapter
    return None


def _n_head(name: str, config: LlamaConfig) -> int | None:
    """Heads whose rows llama's conversion reorders in this tensor; None when it keeps them."""
    if name.endswith("attn_q.weight.lora_b"):
        return int(config.num_attention_heads)
    if name.endswith("attn_k.weight.lora_b"):
        return int(config.num_key_value_heads)
    return None


def write_adapter(
    path: Path, model: PeftModel, adapter: str, header: Header, dtype: type[np.floating]
) -> None:
    """Write one adapter of `model`.

    lora_a [n_in, rank] and lora_b [rank, n_out] of `dtype`; for token_embd lora_a [rank, n_vocab]
    and lora_b [rank, n_embd].
    """
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_name(header.name)
    writer.add_description(header.description)
    writer.add_license(header.license)
    writer.add_languages(["en"])
    writer.add_base_model_count(1)
    writer.add_base_model_name(0, header.base)
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", header.alpha)
    writer.add_string("adapter.lora.task_name", header.task_name)
    if header.tied_output is not None:
        writer.add_bool("loragraph.adapter.tied_output", header.tied_output)
    for parameter, value in model.named_parameters():
        named = tensor_name(parameter)
        if named is None or named[1] != adapter:
            continue
        name, data = named[0], value.detach().to(torch.float32).numpy()
        if name == "token_embd.weight.lora_a":
            data = data.T  # PEFT keeps (rank, n_vocab); a lookup reads one row per token
        if n_head := _n_head(name, model.config):
            data = permute_rows(data, n_head)
        writer.add_tensor(name, np.ascontiguousarray(data.astype(dtype)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_adapter(path: Path, model: PeftModel, adapter: str) -> None:
    """Overwrite the weights of one adapter of `model` with those in the file."""
    tensors: dict[str, NDArray[np.floating]] = {
        t.name: np.array(t.data) for t in gguf.GGUFReader(path).tensors
    }
    for parameter, value in model.named_parameters():
        named = tensor_name(parameter)
        if named is None or named[1] != adapter:
            continue
        name = named[0]
        data = tensors.pop(name)
        if n_head := _n_head(name, model.config):
            data = unpermute_rows(data.astype(np.float32), n_head)
        if name == "token_embd.weight.lora_a":
            data = data.T
        value.data = torch.from_numpy(np.ascontiguousarray(data)).to(value.dtype)
    if tensors:
        raise SystemExit(f"{path}: expected every tensor to have a place, left {sorted(tensors)}")
