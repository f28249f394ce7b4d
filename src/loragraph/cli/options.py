"""The options of `loragraph run`, named as llama.cpp's tools name theirs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer


class Lowering(StrEnum):
    """How adapters are computed."""

    ROUTED = "routed"
    BRANCH = "branch"
    STACKED = "stacked"


class KvType(StrEnum):
    """Type of the KV cells."""

    F16 = "f16"
    F32 = "f32"
    Q8_0 = "q8_0"


class AttentionKind(StrEnum):
    """How K and V are read."""

    FLASH = "flash"
    CELLS = "cells"
    PLAIN = "plain"


def _option(panel: str, *names: str, text: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


_PROMPT, _ADAPTERS, _SAMPLING, _MODEL = "Prompt and output", "Adapters", "Sampling", "Model"

Base = Annotated[Path, typer.Argument(metavar="BASE", help="The base model: a GGUF file.")]

# Prompt and output
Prompt = Annotated[
    str | None,
    _option(_PROMPT, "-p", "--prompt", text="The prompt; - reads it from standard input."),
]
PromptFile = Annotated[
    Path | None, _option(_PROMPT, "-f", "--file", text="File that holds the prompt.")
]
Chat = Annotated[
    bool, _option(_PROMPT, "--chat", text="Put the prompt into the model's chat template.")
]
System = Annotated[
    str | None,
    _option(_PROMPT, "-sys", "--system", "--system-prompt", text="System message; implies --chat."),
]
NPredict = Annotated[
    int,
    _option(
        _PROMPT,
        *("-n", "--n-predict", "--predict"),
        text="Most tokens to generate; -1: until the model or the context ends.",
    ),
]
Stop = Annotated[
    list[str] | None,
    _option(_PROMPT, "--stop", "-r", "--reverse-prompt", text="End before this text. Repeatable."),
]
AsJson = Annotated[bool, _option(_PROMPT, "--json", text="Print one JSON object, at the end.")]

# Adapters
Adapter = Annotated[Path, typer.Argument(help="The adapter: a GGUF file, or a PEFT or MLX folder.")]
Lora = Annotated[
    list[str] | None,
    _option(
        _ADAPTERS,
        "--lora",
        text="Adapter (GGUF, or a PEFT or MLX folder), at scale 1. Repeatable, comma-separated.",
    ),
]
LoraScaled = Annotated[
    list[str] | None,
    _option(
        _ADAPTERS,
        *("--lora-scaled",),
        metavar="PATH:SCALE",
        text="Adapter with a scale. Repeatable, comma-separated.",
    ),
]
IgnoreNorm = Annotated[
    bool, _option(_ADAPTERS, "--ignore-norm", text="Leave norm weights of the adapters out.")
]
TiedOutput = Annotated[
    bool | None,
    _option(
        _ADAPTERS,
        *("--tied-output/--no-tied-output",),
        text="Whether a token table's adapter changes a tied head too. Default: as the file says.",
    ),
]
LoweringOption = Annotated[
    Lowering,
    _option(
        _ADAPTERS,
        *("--lowering",),
        text="One node a target for all adapters, or llama.cpp's graph.",
    ),
]

# Sampling
Seed = Annotated[int, _option(_SAMPLING, "-s", "--seed", text="Random seed; -1 draws one.")]
Temp = Annotated[float, _option(_SAMPLING, "--temp", "--temperature", text="0: greedy.")]
TopK = Annotated[int, _option(_SAMPLING, "--top-k", text="0: off.")]
TopP = Annotated[float, _option(_SAMPLING, "--top-p", text="1: off.")]
MinP = Annotated[float, _option(_SAMPLING, "--min-p", text="0: off.")]
Typical = Annotated[float, _option(_SAMPLING, "--typical", "--typical-p", text="1: off.")]
RepeatPenalty = Annotated[float, _option(_SAMPLING, "--repeat-penalty", text="1: off.")]
RepeatLastN = Annotated[
    int, _option(_SAMPLING, "--repeat-last-n", text="Tokens that the penalties look at.")
]
FrequencyPenalty = Annotated[float, _option(_SAMPLING, "--frequency-penalty", text="0: off.")]
PresencePenalty = Annotated[float, _option(_SAMPLING, "--presence-penalty", text="0: off.")]
Grammar = Annotated[
    str | None, _option(_SAMPLING, "--grammar", text="GBNF grammar that the text follows.")
]
GrammarFile = Annotated[
    Path | None, _option(_SAMPLING, "--grammar-file", text="File that holds the grammar.")
]
LogitBias = Annotated[
    list[str] | None,
    _option(
        _SAMPLING,
        *("-l", "--logit-bias"),
        metavar="ID(+/-)BIAS",
        text="Added to a token's logit: 15043+1, 15043-inf. Repeatable.",
    ),
]
IgnoreEos = Annotated[
    bool, _option(_SAMPLING, "--ignore-eos", text="Forbid the tokens that end a generation.")
]

# Model
CtxSize = Annotated[
    int,
    _option(
        _MODEL, "-c", "--ctx-size", text="Tokens of prompt and answer together; 0: as trained."
    ),
]
BatchSize = Annotated[
    int, _option(_MODEL, "-b", "--batch-size", text="Most prompt tokens computed in one step.")
]
Threads = Annotated[
    int | None, _option(_MODEL, "-t", "--threads", text="Default: the CPUs at hand.")
]
Kv = Annotated[
    KvType, _option(_MODEL, "--kv-type", text="Type of the KV cells; q8_0 only with cells.")
]
Attention = Annotated[
    AttentionKind,
    _option(
        _MODEL,
        "--attention",
        text="Fused, over lists of cells, or with separate matmuls and softmax.",
    ),
]
Repack = Annotated[
    bool,
    _option(_MODEL, "--repack/--no-repack", text="Lay weights out for speed where possible."),
]
