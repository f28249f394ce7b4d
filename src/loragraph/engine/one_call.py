"""`loragraph.generate`: one call that loads, generates and closes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Unpack

from loragraph.adapters.adapter import Adapter
from loragraph.engine.assembly import LoweringName
from loragraph.engine.context import Context
from loragraph.engine.generate import Generation, Prompt, SamplingFields
from loragraph.engine.model import Model
from loragraph.engine.params import SamplingParams


def generate(
    model: Model | str | os.PathLike[str],
    prompt: Prompt,
    params: SamplingParams | None = None,
    *,
    adapters: Mapping[Adapter | str | os.PathLike[str], float] | None = None,
    chat: bool = False,
    n_ctx: int = 2048,
    n_threads: int | None = None,
    lowering: LoweringName = "routed",
    **fields: Unpack[SamplingFields],
) -> Generation:
    """Generates once. What is given as a path is loaded, and closed again at the end.

    `adapters` maps adapters, or their paths, to user scales. The rest is as for `Model.load`,
    `Context` and `Context.stream`. For more than one text, keep a Model and a Context instead.
    """
    if adapters is not None and not isinstance(adapters, Mapping):
        raise TypeError(f"expected a mapping of adapters to scales, got {adapters!r:.80}")
    with ExitStack() as stack:
        if not isinstance(model, Model):
            model = stack.enter_context(Model.load(model, n_threads=n_threads))
        scales: dict[Adapter, float] = {}
        for adapter, scale in (adapters or {}).items():
            if not isinstance(adapter, Adapter):
                adapter = stack.enter_context(Adapter.load(adapter, model))
            scales[adapter] = scale
        context = stack.enter_context(
            Context(model, n_ctx=n_ctx, n_threads=n_threads, lowering=lowering)
        )
        context.set_adapters(scales)
        return context.generate(prompt, params, chat=chat, **fields)
