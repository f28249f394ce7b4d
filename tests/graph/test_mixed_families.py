"""Steps that mix sequences and adapters, for every family: each row gets what it gets alone.

Cells are handed out in turn, so no sequence's cells are neighbours for long, and two sequences
share the stretch of their common prefix, as the prefix tree lets them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from loragraph.adapters.mix import Mix
from loragraph.engine.assembly import make_runner
from loragraph.engine.model import Model
from loragraph.engine.runner import Runner
from loragraph.graph.batch import Batch
from loragraph.graph.lowrank.routed import RoutedLowering
from loragraph.graph.lowrank.stacked import StackedLowering
from loragraph.graph.stretches import Runs, Stretches, View
from tests.numerics.compare import nmse
from tests.numerics.runs import MIXING, Logits, LoweringName, Mode, open_context, random_tokens, run
from tests.tiny import TinyAdapter
from tests.tiny_experts import TINY_MODELS, TinyExperts

BLOCK = 8
PREFIX = random_tokens(40, seed=1)
PROMPTS = (
    random_tokens(70, seed=2),
    PREFIX + random_tokens(33, seed=3),
    PREFIX + random_tokens(9, seed=4),
)
FIRST = (66, 50, 41)  # tokens of each in the first step; the second step has the rest
OWNER = (0, 1, 1)  # whose mix each carries: the two that share a prefix must agree

MODES = {
    "plain": Mode("f32", "plain"),
    "cells": Mode("f32", "cells"),
    "flash": Mode("f16", "flash"),
}
# Measured, then tripled, with silu and with gelu, a table of F16 values on the CPU: products have
# other shapes, and ggml's flash attention sums V in F16, in the order of the cells.
BOUNDS = {"plain": (1e-12, 3e-9), "cells": (1e-12, 3e-9), "flash": (1.5e-6, 1.5e-6)}


def blocks(which: int) -> Runs:
    """Cells of list `which` of four: every fourth block, from the end to the start."""
    return [(BLOCK * (4 * i + which), BLOCK) for i in range(9, -1, -1)]


def cell(runs: Runs, index: int) -> int:
    """The cell at an offset of runs of whole blocks."""
    return runs[index // BLOCK][0] + index % BLOCK


def cut(runs: Runs, n: int) -> Runs:
    """The first `n` cells."""
    whole, rest = divmod(n, BLOCK)
    return [*runs[:whole], *([(runs[whole][0], rest)] if rest else [])]


PREFIX_CELLS, OWN_CELLS = blocks(3), [blocks(which) for which in range(3)]


class Step:
    """The rows of one step, sequence after sequence."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.cells: list[int] = []
        self.which: list[int] = []
        self.views: list[View] = []
        self.runs: list[Runs] = [cut(PREFIX_CELLS, len(PREFIX))]
        self.first: list[int] = [0]

    def add(self, seq: int, begin: int, end: int) -> None:
        """Tokens [begin, end) of a prompt; sequence 2 finds the prefix that sequence 1 computes."""
        shared = len(PREFIX) if seq else 0
        assert begin >= shared or seq != 2
        stretch = len(self.runs)
        self.runs.append(cut(OWN_CELLS[seq], end - shared))
        self.first.append(shared)
        row, n = len(self.tokens), end - begin
        if shared:
            self.views.append((0, row, n, begin, 1 << 30))
        self.views.append((stretch, row, n, begin, 1 << 30))
        for position in range(begin, end):
            own = position >= shared
            runs = OWN_CELLS[seq] if own else PREFIX_CELLS
            self.cells.append(cell(runs, position - shared if own else position))
        self.tokens += PROMPTS[seq][begin:end]
        self.positions += range(begin, end)
        self.which += [OWNER[seq]] * n

    def batch(self, mixes: Sequence[Mix]) -> Batch:
        """All rows give logits."""
        return Batch(
            np.asarray(self.tokens, np.int32),
            np.asarray(self.positions, np.int32),
            np.asarray(self.cells, np.int64),
            np.asarray(self.which, np.int32),
            tuple(mixes),
            np.arange(len(self.tokens), dtype=np.int32),
            Stretches.of_views(self.runs, self.first, self.views),
        )


def mixed_logits(runner: Runner, mixes: Sequence[Mix]) -> list[Logits]:
    """Logits of each sequence's tokens, computed in two steps of all three."""
    parts: list[list[Logits]] = [[], [], []]
    ends = [len(prompt) for prompt in PROMPTS]
    for begins, stops in (((0, 0, len(PREFIX)), FIRST), (FIRST, ends)):
        step = Step()
        for seq, (begin, stop) in enumerate(zip(begins, stops, strict=True)):
            step.add(seq, begin, stop)
        rows = np.cumsum([stop - begin for begin, stop in zip(begins, stops, strict=True)])
        for seq, part in enumerate(np.split(runner.run(step.batch(mixes)), rows[:-1])):
            parts[seq].append(part)
    return [np.concatenate(part) for part in parts]


def worst(actual: Logits, expected: Logits) -> int:
    """The row that differs most: in F16, one of a few hundred tokens may choose the other one of
    two experts that are nearly tied."""
    return int(((actual - expected) ** 2).sum(axis=1).argmax())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lowering", MIXING)
@pytest.mark.parametrize("name", TINY_MODELS)
def test_a_mixed_step_gives_what_each_gets_alone(
    name: str, lowering: LoweringName, mode: Literal["plain", "cells", "flash"], tmp_path: Path
) -> None:
    """Three sequences with two mixes, in blocks of cells all over the cache, get the logits of a
    context of their own."""
    tiny = TINY_MODELS[name]()
    paths = [tmp_path / "1.gguf", tmp_path / "2.gguf"]
    TinyAdapter(seed=1, b_std=0.05).write(paths[0], tiny)
    down = [one for one in ("ffn_down", "ffn_down_exps") if one in tiny.targets]
    TinyAdapter(seed=2, rank=9, targets=("attn_output", *down)).write(paths[1], tiny)
    with Model.load(tiny.write(tmp_path / "m.gguf"), n_threads=1) as model:
        one, two = (model.load_adapter(path) for path in paths)
        scales = ({one: 0.5}, {one: -0.3, two: 1.0})
        kv_type, attention = MODES[mode]
        held, runner = make_runner(model, 320, 256, lowering, kv_type, attention, 1)
        try:
            assert isinstance(held, RoutedLowering | StackedLowering)
            held.hold((one, two))
            actual = mixed_logits(runner, [Mix(each) for each in scales])
        finally:
            runner.close()
        with open_context(model, MODES[mode], lowering=lowering) as context:
            for seq, prompt in enumerate(PROMPTS):
                alone = run(context, prompt, scales[OWNER[seq]])
                expected = alone[len(PREFIX) :] if seq == 2 else alone
                bound = BOUNDS[mode][name.startswith("gemma")]
                kept = np.ones(len(expected), bool)
                if mode == "flash" and isinstance(tiny, TinyExperts):
                    kept[worst(actual[seq], expected)] = False
                assert nmse(actual[seq][kept], expected[kept]) <= bound, seq
