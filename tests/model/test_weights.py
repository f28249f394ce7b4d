"""Tensors of a model: what is refused, where they are placed, and that their memory comes back."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as GGMLType

from loragraph.engine.model import Model
from loragraph.errors import BackendError, GGUFError, LifecycleError, UnsupportedError
from loragraph.ggml.handles import Buffer
from tests.gguf_bytes import RawTensor
from tests.numerics.runs import (
    LOWERINGS,
    LoweringName,
    loragraph_logits,
    open_context,
    random_tokens,
    run,
)
from tests.rss import resident_bytes
from tests.tiny import TinyAdapter, TinyLlama, gguf_bytes, tensor

TOKENS = random_tokens(12)


def write(path: Path, tensors: list[RawTensor], model: TinyLlama | None = None) -> Path:
    """A file with these tensors and the tiny model's keys."""
    path.write_bytes(gguf_bytes((model or TinyLlama()).metadata(), tensors))
    return path


def changed(name: str, **changes: object) -> list[RawTensor]:
    """The tiny model's tensors with one of them changed."""
    return [
        replace(t, **changes) if t.name == name else t  # type: ignore[arg-type]
        for t in TinyLlama().raw_tensors()
    ]


def load(path: Path) -> None:
    """Loads and closes."""
    with Model.load(path, n_threads=1):
        pass


EVERY = [t.name for t in TinyLlama(n_layer=1).raw_tensors() if t.name != "output.weight"]


@pytest.mark.parametrize("name", EVERY)
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    """Each tensor of the family that the file lacks is a GGUFError with its name."""
    tensors = [t for t in TinyLlama().raw_tensors() if t.name != name]
    with pytest.raises(GGUFError, match=f"{name}: missing tensor"):
        load(write(tmp_path / "m.gguf", tensors))


@pytest.mark.parametrize("name", [*EVERY, "output.weight"])
def test_a_wrong_shape_is_named(name: str, tmp_path: Path) -> None:
    """Each tensor of a wrong shape is a GGUFError with both shapes."""
    (shape,) = (t.shape for t in TinyLlama().raw_tensors() if t.name == name)
    larger = np.zeros((*shape[:-1], shape[-1] + 1), np.float32)
    tensors = changed(name, shape=larger.shape, data=larger.tobytes())
    sizes = f"{shape[-1]}.*, got .*{shape[-1] + 1}"
    with pytest.raises(GGUFError, match=f"{name}: expected sizes .*{sizes}"):
        load(write(tmp_path / "m.gguf", tensors))


def test_a_transposed_matrix_is_refused(tmp_path: Path) -> None:
    """The same number of values in another shape is a wrong shape."""
    tensors = changed("blk.0.ffn_up.weight", shape=(64, 96))
    with pytest.raises(GGUFError, match=r"blk\.0\.ffn_up\.weight: expected sizes"):
        load(write(tmp_path / "m.gguf", tensors))


def test_tensors_that_nobody_reads_are_refused(tmp_path: Path) -> None:
    """A tensor outside the family would change nothing in silence, so it is named."""
    extra = tensor("blk.0.attn_q_norm.weight", np.ones(16, np.float32))
    with pytest.raises(GGUFError, match=r"1 tensors .* does not read: blk\.0\.attn_q_norm"):
        load(write(tmp_path / "m.gguf", [*TinyLlama().raw_tensors(), extra]))


@pytest.mark.parametrize("name", ["output_norm.weight", "blk.0.attn_norm.weight"])
def test_vectors_must_be_f32(name: str, tmp_path: Path) -> None:
    """Norms of another type are refused: ggml multiplies F32 only."""
    tensors = changed(name, type=GGMLType.F16, data=bytes(2 * 64))
    with pytest.raises(UnsupportedError, match=f"{name}: expected type f32, got f16"):
        load(write(tmp_path / "m.gguf", tensors))


@pytest.mark.parametrize("type_", ["I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K"])
@pytest.mark.parametrize("name", ["blk.0.attn_q.weight", "token_embd.weight", "output.weight"])
def test_types_that_cannot_be_multiplied(name: str, type_: str, tmp_path: Path) -> None:
    """Matrices of integers, F64 and of the types of activations are refused, for products and for
    the lookup alike: computing with them would end the process."""
    number = GGMLType[type_]
    model = TinyLlama(n_embd=256, n_ff=256)
    block, block_bytes = GGML_QUANT_SIZES[number] if type_ != "Q8_1" else (32, 36)
    tensors = [
        replace(t, type=number, data=bytes(t.shape[0] * t.shape[1] // block * block_bytes))
        if t.name == name
        else t
        for t in model.raw_tensors()
    ]
    with pytest.raises(UnsupportedError, match=f"(?i){name}.*{type_}"):
        load(write(tmp_path / "m.gguf", tensors, model))


def test_a_shortened_file_is_refused(tmp_path: Path) -> None:
    """A file cut anywhere in its data is refused before any of it is used."""
    whole = TinyLlama().to_bytes()
    path = tmp_path / "m.gguf"
    for n_bytes in (len(whole) - 33, len(whole) // 2):
        path.write_bytes(whole[:n_bytes])
        with pytest.raises(GGUFError, match="not within the file bounds"):
            load(path)


@pytest.mark.parametrize("distance", [-64, -32, 32, 1 << 30])
def test_tensors_that_overlap_are_refused(distance: int, tmp_path: Path) -> None:
    """Data said to stand in another tensor's, behind a hole or beyond the end: a GGUFError that
    names the tensor, its place and the place expected."""
    tensors = TinyLlama().raw_tensors()
    start = len(tensors[0].data)
    tensors[1] = replace(tensors[1], offset=start + distance)
    places = f"has offset {start + distance}, expected {start}"
    with pytest.raises(GGUFError, match=f"{tensors[1].name}.*{places}"):
        load(write(tmp_path / "m.gguf", tensors))


@pytest.mark.parametrize("alignment", [4, 8, 16])
def test_misaligned_tensors_are_copied(alignment: int, tmp_path: Path) -> None:
    """A file whose alignment is below ggml's own is loaded by copying, with the same bits."""
    model = TinyLlama()
    expected = loragraph_logits(model.write(tmp_path / "plain.gguf"), [], [()], TOKENS)[()]
    keys = model.metadata() | {"general.alignment": alignment}
    path, n_copied = tmp_path / "m.gguf", []
    for n in range(32 // alignment):  # n units in front move the rest over the 32-byte grid
        front = tensor("moving.input_scale", np.ones(n * alignment // 4 + 1, np.float32))
        data = gguf_bytes(keys, [front, *model.raw_tensors()], alignment=alignment)
        path.write_bytes(data)
        with Model.load(path, n_threads=1) as loaded:
            n_copied.append(loaded.weights.nbytes["copied"])
        assert np.array_equal(loragraph_logits(path, [], [()], TOKENS)[()], expected)
    assert n_copied.count(0) == 1


def test_aligned_tensors_are_mapped(tmp_path: Path) -> None:
    """F32 weights stay in the file: nothing is copied or repacked."""
    with Model.load(TinyLlama().write(tmp_path / "m.gguf"), n_threads=1) as model:
        nbytes = model.weights.nbytes
    assert nbytes["mapped"] > 0
    assert (nbytes["copied"], nbytes["repacked"]) == (0, 0)


REPACK_MODEL = TinyLlama(n_embd=128, n_ff=128, weight_type=GGMLType.Q4_0)


def test_q4_0_is_repacked_where_the_backend_can(tmp_path: Path) -> None:
    """Every Q4_0 matrix but the lookup's table is repacked; without repacking none is."""
    path = REPACK_MODEL.write(tmp_path / "m.gguf")
    with Model.load(path, n_threads=1) as model:
        repacked = [w.name for w in model.weights.by_name.values() if w.repacked]
        if not repacked:
            pytest.skip("this CPU repacks no Q4_0")
        linear = {f"blk.{il}.{n}.weight" for il in range(2) for n in _LINEAR} | {"output.weight"}
        assert set(repacked) == linear
        assert model.weights.nbytes["repacked"] == sum(
            w.info.nbytes for w in model.weights.by_name.values() if w.repacked
        )
        assert not model.weights.by_name["token_embd.weight"].repacked
    with Model.load(path, n_threads=1, repack=False) as model:
        assert model.weights.nbytes["repacked"] == 0


_LINEAR = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_tied_head_is_repacked_beside_the_plain_table(
    lowering: LoweringName, tmp_path: Path
) -> None:
    """The lookup of a tied base reads the plain table while the head is repacked."""
    tiny = replace(REPACK_MODEL, tied=True)
    TinyAdapter(embeddings=True).write(tmp_path / "a.gguf", tiny)
    path = tiny.write(tmp_path / "m.gguf")
    logits = []
    for repack in (True, False):
        with Model.load(path, n_threads=1, repack=repack) as model:
            adapter = model.load_adapter(tmp_path / "a.gguf")
            with open_context(model, lowering=lowering) as context:
                logits.append(run(context, TOKENS, {adapter: 1.0}))
            head, table = (model.weights.by_name[n] for n in ("output.weight", "token_embd.weight"))
            assert not table.repacked
            assert head.info.name == "token_embd.weight"
    assert float(np.abs(logits[0] - logits[1]).max()) < 0.2


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    """The callback counts up to all bytes."""
    seen: list[tuple[int, int]] = []
    path = TinyLlama().write(tmp_path / "m.gguf")
    Model.load(path, n_threads=1, progress=lambda done, total: seen.append((done, total))).close()
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > 0


def test_an_aborted_load_leaves_nothing(tmp_path: Path) -> None:
    """An exception out of the progress callback ends the load; the file can be loaded again."""

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    path = REPACK_MODEL.write(tmp_path / "m.gguf")
    with pytest.raises(KeyboardInterrupt):
        Model.load(path, n_threads=1, progress=stop)
    load(path)


def test_a_failed_allocation_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the n-th buffer cannot be had, for every n, loading raises and then works again."""
    path = REPACK_MODEL.write(tmp_path / "m.gguf")
    real, n_calls = Buffer.allocate, 0
    for n in range(1, 100):
        n_calls = 0

        def fail(*args: object, n: int = n, **kwargs: object) -> Buffer:
            nonlocal n_calls
            n_calls += 1
            if n_calls == n:
                raise BackendError("no memory")
            return real(*args, **kwargs)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            patch.setattr(Buffer, "allocate", fail)
            try:
                load(path)
            except BackendError:
                continue
        break
    load(path)


MODELS: dict[str, TinyLlama] = {
    "mapped": TinyLlama(n_embd=256, n_ff=512, n_layer=4),
    "repacked": TinyLlama(n_embd=256, n_ff=512, n_layer=4, weight_type=GGMLType.Q4_0),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_memory_comes_back(model: TinyLlama, tmp_path: Path) -> None:
    """Loaded, used and closed thirty times, with an adapter, a model leaves nothing behind."""
    path = model.write(tmp_path / "m.gguf")
    TinyAdapter(rank=16).write(tmp_path / "a.gguf", model)

    def cycle() -> None:
        with Model.load(path, n_threads=1) as loaded:
            adapter = loaded.load_adapter(tmp_path / "a.gguf")
            with open_context(loaded) as context:
                run(context, TOKENS, {adapter: 1.0})

    assert _growth(cycle) < 8 << 20


def test_a_refused_load_leaves_nothing(tmp_path: Path) -> None:
    """A model that fails at its last check frees all that was read."""
    extra = tensor("extra.weight", np.ones(1 << 18, np.float32))
    path = write(tmp_path / "m.gguf", [*TinyLlama().raw_tensors(), extra])

    def cycle() -> None:
        with pytest.raises(GGUFError):
            load(path)

    assert _growth(cycle) < 8 << 20


def _growth(cycle: Callable[[], None]) -> int:
    for _ in range(5):
        cycle()
    gc.collect()
    before = resident_bytes()
    for _ in range(30):
        cycle()
    gc.collect()
    return resident_bytes() - before


def test_weights_of_a_closed_model_are_out_of_reach(tmp_path: Path) -> None:
    """After close the maps are gone, and asking for them raises."""
    model = Model.load(TinyLlama().write(tmp_path / "m.gguf"), n_threads=1)
    files, info = model.weights.files, model.weights.by_name["output.weight"].info
    model.close()
    with pytest.raises(LifecycleError, match="closed"):
        files.pointer(info)
