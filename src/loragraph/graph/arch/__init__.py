"""Model families by `general.architecture`. To add one: write its file, name it here."""

from __future__ import annotations

from collections.abc import Mapping

from loragraph.errors import UnsupportedError
from loragraph.graph.arch.deepseek2 import DeepSeek2
from loragraph.graph.arch.family import About, Family
from loragraph.graph.arch.gemma import Gemma
from loragraph.graph.arch.gemma2 import Gemma2
from loragraph.graph.arch.gemma3 import Gemma3
from loragraph.graph.arch.gpt_oss import GptOss
from loragraph.graph.arch.granite import Granite
from loragraph.graph.arch.granitemoe import GraniteMoE
from loragraph.graph.arch.llama import Llama
from loragraph.graph.arch.phi3 import Phi3
from loragraph.graph.arch.qwen2 import Qwen2
from loragraph.graph.arch.qwen2moe import Qwen2MoE
from loragraph.graph.arch.qwen3 import Qwen3
from loragraph.graph.arch.qwen3moe import Qwen3MoE
from loragraph.graph.arch.smollm3 import SmolLM3

__all__ = ["FAMILIES", "REFUSED", "About", "Family", "family_of"]

FAMILIES: Mapping[str, type[Family]] = {
    "deepseek2": DeepSeek2,
    "gemma": Gemma,
    "gemma2": Gemma2,
    "gemma3": Gemma3,
    "gpt-oss": GptOss,
    "granite": Granite,
    "granitemoe": GraniteMoE,
    "llama": Llama,
    "phi3": Phi3,
    "qwen2": Qwen2,
    "qwen2moe": Qwen2MoE,
    "qwen3": Qwen3,
    "qwen3moe": Qwen3MoE,
    "smollm3": SmolLM3,
}

REFUSED: Mapping[str, str] = {
    "gemma3n": "its layers read a second embedding of each token, and some share their K and V",
    "gemma4": "its layers have unlike heads, and some read a second embedding of each token",
    "gemma-embedding": "it gives embeddings, not text",
    "phi2": "a parallel block with layer norms",
    "phimoe": "experts behind layer norms",
}
"""Relatives of the families above, with the reason why they are not among them."""


def family_of(arch: str) -> type[Family]:
    """The family's class; UnsupportedError names those there are and how to add one."""
    if arch not in FAMILIES:
        reason = f" ({REFUSED[arch]})" if arch in REFUSED else ""
        raise UnsupportedError(
            f"architecture '{arch}' is not supported{reason}; "
            f"supported: {', '.join(sorted(FAMILIES))}",
            what=f"architecture {arch}",
            hint="a family is one file, see CONTRIBUTING.md",
        )
    return FAMILIES[arch]
