"""Saved cells: what is loaded is what was computed, and what does not fit is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from loragraph.adapters.mix import EMPTY_MIX, Mix
from loragraph.engine.assembly import AttentionName, KvType
from loragraph.engine.batching import batch_of
from loragraph.engine.context import Context
from loragraph.engine.engine import Engine
from loragraph.engine.model import Model
from loragraph.engine.plan import SchedulerConfig
from loragraph.engine.prefix_tree import path_of
from loragraph.engine.scheduler import Scheduler
from loragraph.engine.sequence import Segment, Sequence
from loragraph.engine.session import load_cells, save_cells
from loragraph.errors import ConfigError, FormatError, LifecycleError
from loragraph.graph.stretches import cells_of
from tests.tiny import TinyAdapter, TinyLlama

STEM = list(range(5, 45))
PROMPTS = ([*STEM, 50, 51, 52], [*STEM, 60, 61], [7, 8, 9])


class Setting:
    """A model, another of the same shapes, and an adapter."""

    def __init__(self, folder: Path) -> None:
        tiny = TinyLlama()
        self.folder = folder
        self.base = tiny.write(folder / "m.gguf")
        self.model = Model.load(self.base, n_threads=1)
        self.other = Model.load(TinyLlama(seed=99).write(folder / "other.gguf"), n_threads=1)
        TinyAdapter().write(folder / "a.gguf", tiny)
        self.adapter = self.model.load_adapter(folder / "a.gguf")
        self.mix = Mix({self.adapter: 0.5})


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    """Shared by all tests of this module."""
    made = Setting(tmp_path_factory.mktemp("session"))
    yield made
    made.model.close()
    made.other.close()


class Rig:
    """A scheduler on a real runner, driven by hand."""

    def __init__(
        self,
        model: Model,
        kv_type: KvType = "f16",
        attention: AttentionName = "cells",
        n_cells: int = 256,
    ) -> None:
        self.model = model
        self.context = Context(model, n_ctx=256, kv_type=kv_type, attention=attention, n_threads=1)
        self.scheduler = Scheduler(SchedulerConfig(n_cells, max_sequences=8, block_size=4))
        self._n = 0

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.context.close()

    def sequence(self, tokens: list[int], mix: Mix = EMPTY_MIX, salt: str = "") -> Sequence:
        """A sequence that generates one token."""
        self._n += 1
        return Sequence(self._n, list(tokens), len(tokens), (Segment(0, mix),), 1, salt=salt)

    def run(self, *sequences: Sequence) -> list[NDArray[np.float32]]:
        """Logits after each prompt, one sequence after the other."""
        out = []
        for sequence in sequences:
            self.scheduler.add(sequence)
            while self.scheduler.running or self.scheduler.n_waiting:
                plan = self.scheduler.schedule()
                logits = self.context._runner.run(batch_of(plan))
                self.scheduler.complete(plan)
                if plan.chunks[0].wants_token:
                    out.append(logits[-1])
                    self.scheduler.append(sequence, int(logits[-1].argmax()))
        return out

    def bytes_of(self, sequence: Sequence) -> NDArray[np.uint8]:
        """The cells of its tokens but the last one, (n, bytes_per_cell)."""
        n = sequence.n_prompt - 1
        tree = self.scheduler.tree
        parts = sequence.key_parts(0, n)
        node, n_found = tree.advance(tree.root, sequence.tokens, parts)
        assert n_found == n
        cells = cells_of(run for one in [*path_of(node)][::-1] for run in one.runs)
        tree.release(node)
        return self.context._runner.read_cells(cells)

    def save(self, path: Path, **options: Any) -> int:
        """Tokens saved."""
        return save_cells(
            path, self.scheduler, self.context._runner, self.model.fingerprint, **options
        )

    def load(self, path: Path) -> int:
        """Tokens loaded; the bookkeeping is whole afterwards."""
        try:
            return load_cells(
                path,
                self.scheduler,
                self.context._runner,
                self.model.fingerprint,
                self.model.hparams.n_vocab,
            )
        finally:
            self.scheduler.tree.check()
            self.scheduler.blocks.check()


FORMATS: list[tuple[KvType, AttentionName]] = [
    ("f16", "cells"),
    ("f32", "plain"),
    ("f16", "flash"),
    ("q8_0", "cells"),
]


@pytest.mark.parametrize(("kv_type", "attention"), FORMATS)
def test_loaded_is_computed(
    kv_type: KvType, attention: AttentionName, tmp_path: Path, tmp_path_factory: Any
) -> None:
    """A new scheduler and runner find every saved token, with the logits of the first one's hits,
    for each mix and salt."""
    tiny = TinyLlama(n_embd=128, n_head=4) if kv_type == "q8_0" else TinyLlama()
    TinyAdapter().write(tmp_path / "a.gguf", tiny)
    with Model.load(tiny.write(tmp_path / "m.gguf"), n_threads=1) as model:
        adapter = model.load_adapter(tmp_path / "a.gguf")
        mix = Mix({adapter: 0.5})

        def sequences(rig: Rig) -> list[Sequence]:
            rig.context._lowering.attach(mix)
            return [
                *(rig.sequence(prompt) for prompt in PROMPTS),
                rig.sequence(PROMPTS[0], mix),
                rig.sequence(PROMPTS[1], salt="tenant"),
            ]

        with Rig(model, kv_type, attention) as first:
            first.run(*sequences(first))
            expected = first.run(*sequences(first))
            n_saved = first.save(tmp_path / "s")
            cells = [first.bytes_of(one) for one in sequences(first)]
            assert n_saved == first.scheduler.stats.n_cells_used
        with Rig(model, kv_type, attention) as second:
            assert second.load(tmp_path / "s") == n_saved
            assert second.scheduler.stats.n_computed_tokens == 0
            for sequence, rows in zip(sequences(second), cells, strict=True):
                assert np.array_equal(second.bytes_of(sequence), rows)
            asked = sequences(second)
            actual = second.run(*asked)
            assert [one.n_hit for one in asked] == [len(one.tokens) - 2 for one in asked]
        bound = 1e-3 if attention == "flash" else 1e-6  # flash sums cell by cell, in F16
        for got, want in zip(actual, expected, strict=True):
            assert np.abs(got - want).max() <= bound * np.abs(want).max()


def test_cells_of_another_mix_are_not_hit(setting: Setting, tmp_path: Path) -> None:
    """Neither another scale, nor the base, nor another salt finds what a mix computed."""
    with Rig(setting.model) as rig:
        rig.context._lowering.attach(setting.mix)
        rig.run(rig.sequence(PROMPTS[0], setting.mix, "a"))
        rig.save(tmp_path / "s")
    with Rig(setting.model) as rig:
        rig.context._lowering.attach(setting.mix)
        rig.load(tmp_path / "s")
        others = [
            rig.sequence(PROMPTS[0], Mix({setting.adapter: 0.25}), "a"),
            rig.sequence(PROMPTS[0], EMPTY_MIX, "a"),
            rig.sequence(PROMPTS[0], setting.mix, "b"),
        ]
        rig.run(*others)
        assert [one.n_hit for one in others] == [0, 0, 0]


@pytest.fixture
def saved(setting: Setting, tmp_path: Path) -> Path:
    """A file with the cells of three prompts; the last was used last."""
    with Rig(setting.model) as rig:
        rig.run(*(rig.sequence(prompt) for prompt in PROMPTS))
        assert rig.save(tmp_path / "saved") == 48
    return tmp_path / "saved"


def test_too_few_cells_take_what_was_used_last(setting: Setting, saved: Path) -> None:
    """Where not all fit, the newest paths come first, from their starts; a full tree takes none."""
    with Rig(setting.model, n_cells=16) as rig:
        assert rig.load(saved) == 16
        assert [rig.load(saved), rig.scheduler.stats.n_evicted_tokens] == [0, 0]
        found = []
        for prompt in PROMPTS:
            parts = rig.sequence(prompt).key_parts(0, len(prompt))
            found.append(rig.scheduler.tree.n_found(prompt, parts))
        assert found == [13, 13, 3]


def test_loaded_cells_are_evicted_like_others(setting: Setting, saved: Path) -> None:
    """Nobody holds them: a prompt that needs all cells gets them, the newest path goes last."""
    with Rig(setting.model, n_cells=48) as rig:
        rig.load(saved)
        stats = rig.scheduler.stats
        assert (stats.n_cells_used, stats.n_cells_in_use) == (48, 0)
        rig.run(rig.sequence(list(range(100, 120))))
        newest = rig.sequence([7, 8, 9])
        rig.run(newest)
        assert newest.n_hit == 2
        rig.run(rig.sequence(list(range(100, 147))))
        rig.scheduler.tree.check()


def test_loading_twice_adds_nothing(setting: Setting, saved: Path) -> None:
    """What the tree has is passed over, also where it has a part of a path."""
    with Rig(setting.model) as rig:
        rig.run(rig.sequence(STEM[:20]))
        assert rig.load(saved) == 48 - 20
        assert rig.load(saved) == 0
        asked = rig.sequence(PROMPTS[0])
        rig.run(asked)
        assert asked.n_hit == len(PROMPTS[0]) - 1


def test_only_chosen_paths_are_saved(setting: Setting, tmp_path: Path) -> None:
    """A chosen node is saved with all before it, and nothing else is."""
    with Rig(setting.model) as rig:
        rig.run(rig.sequence(PROMPTS[0]), rig.sequence(PROMPTS[1]), rig.sequence(STEM, salt="a"))
        n = rig.save(tmp_path / "s", chosen=lambda node: node.tokens[0] == 60)
        assert n == len(PROMPTS[1])
        assert rig.save(tmp_path / "s", chosen=lambda node: node.key[0] == "a") == len(STEM)
        assert rig.save(tmp_path / "none", chosen=lambda node: False) == 0
    with Rig(setting.model) as rig:
        assert (rig.load(tmp_path / "none"), rig.load(tmp_path / "s")) == (0, len(STEM))


def test_another_model_is_refused(setting: Setting, saved: Path) -> None:
    """A model of the same shapes and other weights does not take the cells."""
    with Rig(setting.other) as rig, pytest.raises(FormatError, match="expected cells of the model"):
        rig.load(saved)


@pytest.mark.parametrize(("kv_type", "attention"), [("f32", "cells"), ("f16", "plain")])
def test_other_cells_are_refused(
    kv_type: KvType, attention: AttentionName, setting: Setting, saved: Path
) -> None:
    """Another type of cells, or another layout of V."""
    with Rig(setting.model, kv_type, attention) as rig:
        with pytest.raises(FormatError, match="cells: expected CellFormat"):
            rig.load(saved)
        assert rig.scheduler.stats.n_cells_used == 0


def signed(data: bytes) -> bytes:
    """`data` with a right digest at its end: damage that the digest does not tell."""
    return data[:-32] + hashlib.sha256(data[:-32]).digest()


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "other magic": lambda data: signed(b"GGUF" + data[4:]),
    "header too long": lambda data: signed(data[:8] + b"\xff" * 8 + data[16:]),
    "cut header": lambda data: data[:60],
    "cut rows": lambda data: data[:-1000],
    "cut digest": lambda data: data[:-1],
    "longer": lambda data: data + b"\0",
    "no JSON": lambda data: signed(data[:16] + b"[" + data[17:]),
    "deep JSON": lambda data: signed(data[:16] + b"[" * 200 + data[216:]),
    "flipped token": lambda data: data.replace(b"\x05\0\0\0\x06\0\0\0", b"\x04\0\0\0\x06\0\0\0"),
    "token out of range": lambda data: signed(
        data.replace(b"\x05\0\0\0\x06\0\0\0", b"\xff\xff\0\0\x06\0\0\0")
    ),
    "NaN in a row": lambda data: signed(data[:-34] + b"\xff\xff" + data[-32:]),
    "more tokens": lambda data: signed(data.replace(b'"n_tokens": 48', b'"n_tokens": 96')),
    "more nodes": lambda data: signed(data.replace(b'"n_nodes": 4', b'"n_nodes": 5')),
    "negative count": lambda data: signed(data.replace(b'"n_tokens": 48', b'"n_tokens": -6')),
    "text as count": lambda data: signed(data.replace(b'"n_nodes": 4', b'"n_node": 42')),
    "parent behind": lambda data: signed(data.replace(b"\xff" * 8, b"\x7f" + b"\0" * 7)),
    "no salt": lambda data: signed(data.replace(b'"salt"', b'"sald"')),
    "scale 0": lambda data: signed(data.replace(b'"mix": []', b'"mix": 77')),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_files_are_refused(
    damage: Callable[[bytes], bytes], setting: Setting, saved: Path
) -> None:
    """Cut, longer, flipped, or forged with a right digest: FormatError, and nothing is loaded."""
    data = saved.read_bytes()
    damaged = damage(data)
    assert damaged != data
    saved.write_bytes(damaged)
    with Rig(setting.model) as rig:
        with pytest.raises(FormatError):
            rig.load(saved)
        assert rig.scheduler.stats.n_cells_used == 0


def test_random_damage_is_refused(setting: Setting, saved: Path) -> None:
    """Any flipped bit and any cut is met by FormatError."""
    data = saved.read_bytes()
    rng = np.random.default_rng(5)
    with Rig(setting.model) as rig:
        for at in rng.integers(0, len(data), 60).tolist():
            flipped = bytearray(data)
            flipped[at] ^= 1 << int(rng.integers(8))
            for damaged in (bytes(flipped), data[:at]):
                saved.write_bytes(damaged)
                with pytest.raises(FormatError):
                    rig.load(saved)
        assert rig.scheduler.stats.n_cells_used == 0


def test_missing_and_unwritable_paths(setting: Setting, tmp_path: Path) -> None:
    """Reading nothing is a FormatError, writing nowhere a ConfigError; no file is left behind."""
    with Rig(setting.model) as rig:
        with pytest.raises(FormatError, match="could not be read"):
            rig.load(tmp_path / "missing")
        with pytest.raises(ConfigError, match="path"):
            rig.save(tmp_path / "missing" / "s")
        (tmp_path / "folder").mkdir()
        with pytest.raises(ConfigError, match="path"):
            rig.save(tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_step_in_between_is_refused(setting: Setting, saved: Path) -> None:
    """While a step is scheduled its cells hold nothing yet: LifecycleError."""
    with Rig(setting.model) as rig:
        rig.scheduler.add(rig.sequence([1, 2, 3]))
        plan = rig.scheduler.schedule()
        with pytest.raises(LifecycleError):
            rig.save(saved)
        with pytest.raises(LifecycleError):
            rig.load(saved)
        rig.scheduler.complete(plan)


@pytest.mark.parametrize("lowering", ["routed", "stacked"])
def test_the_engine_saves_and_loads(lowering: Any, setting: Setting, tmp_path: Path) -> None:
    """An engine that loads what another one saved hits it, with the same text and adapters."""
    options: dict[str, Any] = {"n_ctx": 256, "n_threads": 1, "lowering": lowering}
    prompt = PROMPTS[0]
    results = []
    for number in range(2):
        with Engine(setting.base, {"a": setting.folder / "a.gguf"}, **options) as engine:
            if number:
                assert engine.load_session(tmp_path / "s") > len(prompt)
            result = engine.generate(prompt, adapters={"a": 0.5}, max_tokens=6, temperature=0.0)
            results.append(result)
            if not number:
                engine.save_session(tmp_path / "s")
            stats = engine.stats().scheduler
    assert stats.n_hit_tokens == len(prompt) - 1
    assert results[0].choices[0].tokens == results[1].choices[0].tokens
