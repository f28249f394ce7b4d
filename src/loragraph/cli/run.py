"""`loragraph run`: a prompt to text, with the base or with adapters."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from loragraph.adapters.adapter import Adapter
from loragraph.cli import options
from loragraph.cli.adapter_list import adapter_list
from loragraph.cli.flags import in_flags
from loragraph.cli.interrupt import held_interrupt
from loragraph.cli.library import ggml_folder
from loragraph.engine.context import Context
from loragraph.engine.generate import Generation, Prompt
from loragraph.engine.model import Model
from loragraph.engine.params import SamplingParams
from loragraph.errors import ConfigError

_MAX_PROMPT_BYTES = 1 << 22


@dataclass(frozen=True)
class _Loading:
    """What to load, and how."""

    base: Path
    adapters: Sequence[tuple[str, float]]  # path, user scale
    ignore_norm: bool
    tied_output: bool | None
    threads: int | None
    repack: bool


@dataclass(frozen=True)
class _Computing:
    """What to compute with."""

    ctx_size: int  # 0: as trained
    batch_size: int
    lowering: options.Lowering
    kv_type: options.KvType
    attention: options.AttentionKind


@dataclass(frozen=True)
class _Loaded:
    """An adapter as the command line names it."""

    path: str
    scale: float
    adapter: Adapter


def run(
    base: options.Base,
    prompt: options.Prompt = None,
    file: options.PromptFile = None,
    chat: options.Chat = False,
    system: options.System = None,
    n_predict: options.NPredict = 256,
    stop: options.Stop = None,
    as_json: options.AsJson = False,
    lora: options.Lora = None,
    lora_scaled: options.LoraScaled = None,
    ignore_norm: options.IgnoreNorm = False,
    tied_output: options.TiedOutput = None,
    lowering: options.LoweringOption = options.Lowering.ROUTED,
    seed: options.Seed = -1,
    temp: options.Temp = 0.8,
    top_k: options.TopK = 40,
    top_p: options.TopP = 0.95,
    min_p: options.MinP = 0.05,
    typical: options.Typical = 1.0,
    repeat_penalty: options.RepeatPenalty = 1.0,
    repeat_last_n: options.RepeatLastN = 64,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    presence_penalty: options.PresencePenalty = 0.0,
    grammar: options.Grammar = None,
    grammar_file: options.GrammarFile = None,
    logit_bias: options.LogitBias = None,
    ignore_eos: options.IgnoreEos = False,
    ctx_size: options.CtxSize = 2048,
    batch_size: options.BatchSize = 512,
    threads: options.Threads = None,
    kv_type: options.Kv = options.KvType.F16,
    attention: options.Attention = options.AttentionKind.CELLS,
    repack: options.Repack = True,
) -> None:
    """Generate text from a prompt: text on standard output, statistics on standard error."""
    text = _prompt_text(prompt, file)
    scales = adapter_list(lora or (), lora_scaled or ())
    params = SamplingParams(
        temperature=temp,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        typical_p=typical,
        repeat_penalty=repeat_penalty,
        repeat_last_n=repeat_last_n,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        seed=None if seed == -1 else seed,
        grammar=_grammar_text(grammar, grammar_file),
        logit_bias=_biases(logit_bias or ()),
        stop=tuple(stop or ()),
        max_tokens=None if n_predict < 0 else n_predict,
        ignore_eos=ignore_eos,
    )
    loading = _Loading(base, scales, ignore_norm, tied_output, threads, repack)
    computing = _Computing(ctx_size, batch_size, lowering, kv_type, attention)
    _answer(loading, computing, _messages(text, chat, system), params, as_json)


def _answer(
    loading: _Loading, computing: _Computing, prompt: Prompt, params: SamplingParams, as_json: bool
) -> None:
    console = Console(stderr=True, markup=False, emoji=False, highlight=False, soft_wrap=True)
    with _loaded_model(console, loading) as model:
        loaded = [
            _Loaded(
                path,
                scale,
                model.load_adapter(
                    path, ignore_norm=loading.ignore_norm, tied_output=loading.tied_output
                ),
            )
            for path, scale in loading.adapters
        ]
        _warn(console, loaded)
        with Context(
            model,
            n_ctx=computing.ctx_size or model.hparams.n_ctx_train,
            lowering=computing.lowering.value,
            kv_type=computing.kv_type.value,
            attention=computing.attention.value,
            n_batch=computing.batch_size,
        ) as context:
            context.set_adapters({one.adapter: one.scale for one in loaded})
            generation = _generate(context, prompt, params, not as_json)
        if as_json:
            typer.echo(json.dumps(_facts(loading.base, generation, loaded), ensure_ascii=False))
        else:
            _show_statistics(console, generation, loaded)


def _generate(context: Context, prompt: Prompt, params: SamplingParams, shown: bool) -> Generation:
    with held_interrupt() as check_interrupt, context.stream(prompt, params) as stream:
        try:
            for event in stream:
                if shown and event.piece:
                    typer.echo(event.piece, nl=False)
                check_interrupt()
        finally:
            # An interrupted text ends its line too, before whatever follows on the terminal.
            if shown and sys.exc_info()[0] in (None, KeyboardInterrupt):
                typer.echo()
        return stream.result


@contextmanager
def _loaded_model(console: Console, loading: _Loading) -> Iterator[Model]:
    columns = (TextColumn("loading"), BarColumn(), DownloadColumn())
    # Only for a terminal: a log needs no bar.
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("load", total=None)
        model = Model.load(
            loading.base,
            n_threads=loading.threads,
            repack=loading.repack,
            ggml_folder=ggml_folder(),
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    with model:
        yield model


def _prompt_text(prompt: str | None, file: Path | None) -> str:
    if (prompt is None) == (file is None):
        raise ConfigError(
            f"expected a prompt, got {'none' if prompt is None else 'two'}",
            hint="-p TEXT, -p - for standard input, or -f FILE",
        )
    if prompt == "-":
        text = _decoded(sys.stdin.buffer.read(_MAX_PROMPT_BYTES + 1), "standard input")
    elif file is not None:
        text = _file_text(file, "-f")
    else:
        text = prompt or ""
    if not text:
        raise ConfigError("expected some text, got an empty prompt", field="-p")
    return text


def _grammar_text(grammar: str | None, file: Path | None) -> str | None:
    if grammar is not None and file is not None:
        raise ConfigError("expected one grammar, got two", field="--grammar-file")
    return _file_text(file, "--grammar-file") if file is not None else grammar


def _file_text(path: Path, flag: str) -> str:
    try:
        with path.open("rb") as opened:
            return _decoded(opened.read(_MAX_PROMPT_BYTES + 1), str(path))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}", field=flag) from error


def _decoded(data: bytes, source: str) -> str:
    """Text without its last line break, as llama.cpp reads prompts."""
    if len(data) > _MAX_PROMPT_BYTES:
        raise ConfigError(f"{source}: expected at most {_MAX_PROMPT_BYTES} bytes, got more")
    try:
        return data.decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{source}: expected UTF-8, got byte {data[error.start]:#04x} at {error.start}"
        ) from error


def _biases(values: Sequence[str]) -> dict[int, float]:
    """Token id -> bias of llama.cpp's form ID(+/-)BIAS."""
    biases = {}
    for value in values:
        sign = max(value.find("+"), value.find("-"))
        token, number = (value[:sign], value[sign:]) if sign > 0 else ("", "")
        try:
            biases[int(token)] = float(number)
        except ValueError as error:
            raise ConfigError(
                f"expected ID+BIAS or ID-BIAS, got {value!r}", field="--logit-bias"
            ) from error
    return biases


def _messages(text: str, chat: bool, system: str | None) -> Prompt:
    if not (chat or system is not None):
        return text
    messages = [{"role": "user", "content": text}]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def _warn(console: Console, loaded: Sequence[_Loaded]) -> None:
    for one in loaded:
        warnings = list(one.adapter.report.warnings)
        if one.adapter.invocation_tokens:
            warnings.append("it has invocation tokens, but applies to the whole prompt here")
        for warning in warnings:
            console.print(f"warning: {one.path}: {in_flags(warning)}")


def _show_statistics(console: Console, generation: Generation, loaded: Sequence[_Loaded]) -> None:
    timings = generation.timings
    lines = [
        f"prompt   {timings.n_prompt} tokens, {timings.prompt_per_s:.1f} tokens/s",
        f"answer   {generation.n_generated} tokens, {timings.decode_per_s:.1f} tokens/s, "
        f"ended by {generation.finish_reason}, seed {generation.seed}",
    ]
    for one in loaded:
        report = one.adapter.report
        scales = _effective(one)
        spread = f"{scales[0]:g}" if scales[0] == scales[-1] else f"{scales[0]:g} to {scales[-1]:g}"
        in_base = sum(total for _, total in report.coverage.values())
        lines.append(
            f"adapter  {one.path} at {one.scale:g}: effective scale {spread}, "
            f"rank {report.rank_max}, {report.n_targets} of {in_base} weights"
        )
    for line in lines:
        console.print(line, style="dim")


def _effective(one: _Loaded) -> list[float]:
    """The effective scales over all targets, without repetition, ascending.

    Vectors without a pair have the user's.
    """
    scales = {one.adapter.effective_scale(target, one.scale) for target in one.adapter.pairs}
    return sorted(scales | ({one.scale} if one.adapter.alone else set()))


def _facts(base: Path, generation: Generation, loaded: Sequence[_Loaded]) -> dict[str, Any]:
    timings = generation.timings
    return {
        "model": str(base),
        "text": generation.text,
        "tokens": list(generation.tokens),
        "finish_reason": generation.finish_reason,
        "stop_string": generation.stop_string,
        "n_prompt": generation.n_prompt,
        "n_generated": generation.n_generated,
        "seed": generation.seed,
        "timings": {
            "prompt_ms": timings.prompt_ms,
            "prompt_per_s": timings.prompt_per_s,
            "decode_ms": timings.decode_ms,
            "decode_per_s": timings.decode_per_s,
        },
        "adapters": [
            {
                "path": one.path,
                "scale": one.scale,
                "digest": one.adapter.digest,
                "effective_scales": _effective(one),
                "rank_max": one.adapter.report.rank_max,
                "coverage": one.adapter.report.to_dict()["coverage"],
            }
            for one in loaded
        ],
    }
