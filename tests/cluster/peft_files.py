"""Files of adapters as PEFT and MLX leave them, as small as they can be."""

from __future__ import annotations

import json

from loragraph.adapters.convert.source import CONFIG, INDEX

PEFT, MLX = "adapter_model.safetensors", "adapters.safetensors"
SHARDS = [f"adapter_model-{i}-of-2.safetensors" for i in (1, 2)]
Files = dict[str, bytes]


def weights(*names: str) -> bytes:
    """A file of safetensors with these tensors."""
    header = json.dumps(
        {
            name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]}
            for i, name in enumerate(names)
        }
    ).encode()
    return len(header).to_bytes(8, "little") + header + bytes(4 * len(names))


def folder(*names: str) -> Files:
    """An adapter's files, its weights in files of these names."""
    files = {CONFIG: b'{"peft_type": "LORA"}'}
    files |= {name: weights(f"t{i}") for i, name in enumerate(names)}
    if len(names) > 1:
        index = {"weight_map": {f"t{i}": name for i, name in enumerate(names)}}
        files[INDEX] = json.dumps(index).encode()
    return files
