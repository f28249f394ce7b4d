"""What vLLM reads, from a GGUF base: a transformers folder in bf16, and random adapters for it.

    PYTHON -m benchmarks.vllm_folders BASE FOLDER N_ADAPTERS

PYTHON is one with torch, transformers, tokenizers and gguf: that of the environment in which vLLM
is. Writes FOLDER/base and FOLDER/a0, a1, ...; rank 16 on the seven linear weights, as
`models.random_adapter` has them. What the weights hold is of no account for a speed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, PreTrainedTokenizerFast

from demos.base_model import load_model

RANK = 16
MODULES = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)


def write_base(path: Path, folder: Path) -> LlamaConfig:
    """The weights in bf16 and a tokenizer with the file's tokens and merges."""
    model = load_model(path).to(torch.bfloat16)
    model.save_pretrained(folder)
    reader = gguf.GGUFReader(path)
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(m.split(" ")) for m in reader.fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    end = tokens[int(reader.fields["tokenizer.ggml.eos_token_id"].contents())]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end).save_pretrained(folder)
    return model.config


def write_adapter(folder: Path, config: LlamaConfig, seed: int) -> None:
    """A PEFT folder."""
    generator = torch.Generator().manual_seed(seed)
    head = config.hidden_size // config.num_attention_heads
    n_kv, n_embd = head * config.num_key_value_heads, config.hidden_size
    n_ff = config.intermediate_size
    outs = (n_embd, n_kv, n_kv, n_embd, n_ff, n_ff, n_embd)
    tensors = {}
    for il in range(config.num_hidden_layers):
        for module, n_out in zip(MODULES, outs, strict=True):
            n_in = n_ff if module == "mlp.down_proj" else n_embd
            prefix = f"base_model.model.model.layers.{il}.{module}"
            a = 0.02 * torch.randn(RANK, n_in, generator=generator)
            b = 0.02 * torch.randn(n_out, RANK, generator=generator)
            tensors[f"{prefix}.lora_A.weight"] = a.to(torch.bfloat16)
            tensors[f"{prefix}.lora_B.weight"] = b.to(torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": [module.rpartition(".")[2] for module in MODULES],
        "bias": "none",
        "base_model_name_or_path": "base",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def main() -> None:
    """Writes them all."""
    base, folder, n_adapters = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    config = write_base(base, folder / "base")
    for i in range(n_adapters):
        write_adapter(folder / f"a{i}", config, i)


if __name__ == "__main__":
    main()
