"""Which tensor gets which type: as libllama's own quantisation decides."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGUFReader

from loragraph.tools.file_type import FILE_TYPES, file_type
from loragraph.tools.merge import merge
from tests.numerics.compare import nmse
from tests.oracle.libllama import Log, low
from tests.reference.adapter import read_tensors
from tests.reference.merge import merge as naive_merge
from tests.tiny import TinyAdapter, TinyLlama


def wide(n_layer: int, n_head_kv: int = 4, *, tied: bool = False) -> TinyLlama:
    """A model whose rows fit the blocks of 256."""
    return TinyLlama(
        n_embd=256,
        n_ff=256,
        n_head=4,
        n_vocab=288,
        n_layer=n_layer,
        n_head_kv=n_head_kv,
        tied=tied,
    )


MODELS = {
    "many layers": wide(8),
    "grouped heads": wide(1, n_head_kv=1),
    "tied": wide(1, tied=True),
    "narrow rows": TinyLlama(n_layer=2, seed=4),
}


def libllama_quantised(source: Path, out: Path, number: int) -> Path:
    """`source` as libllama quantises it."""
    params = low.llama_model_quantize_default_params()
    params.ftype, params.nthread = number, 1
    with Log() as log:
        status = low.llama_model_quantize(str(source).encode(), str(out).encode(), params)
    assert status == 0, log.text
    return out


@pytest.mark.parametrize("name", FILE_TYPES)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_types_are_those_of_libllama(name: str, model: TinyLlama, tmp_path: Path) -> None:
    """Each tensor's type, the file's type and the values are what libllama makes of the merge."""
    adapter = TinyAdapter(targets=("attn_q",))
    base = model.write(tmp_path / "base.gguf")
    adapter.write(tmp_path / "a.gguf", model)
    naive_merge(base, [(adapter.arrays(model), 1.0)], tmp_path / "naive.gguf")
    kind = file_type(name)
    assert kind is not None
    theirs = libllama_quantised(tmp_path / "naive.gguf", tmp_path / "theirs.gguf", kind.number)
    merge(base, {tmp_path / "a.gguf": 1.0}, tmp_path / "ours.gguf", type=name)
    files = [GGUFReader(path, "r") for path in (tmp_path / "ours.gguf", theirs)]
    ours_types, theirs_types = (
        {item.name: item.tensor_type.name for item in file.tensors} for file in files
    )
    assert ours_types == theirs_types
    for key in ("general.file_type", "general.quantization_version"):
        values = [file.fields[key].contents() for file in files if key in file.fields]
        assert len(set(values)) == 1
    ours, other = read_tensors(tmp_path / "ours.gguf"), read_tensors(theirs)
    for tensor, array in ours.items():
        # f32 sums of the naive merge may stand on the other side of a rounding boundary.
        bound = 1e-3 if "attn_q" in tensor else 0
        assert nmse(array, other[tensor]) <= bound
