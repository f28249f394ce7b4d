"""PyTorch's own format: through torch's restricted reader, or not at all."""

from __future__ import annotations

import importlib.util
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from loragraph import convert
from loragraph.adapters.convert import plan_conversion
from loragraph.errors import AdapterFormatError, UnsupportedError
from tests.adapters.convert.folders import layers, lora, peft, write_base


class FakeTorch:
    """What of torch is called, without torch: a load that notes how it was asked."""

    asked: dict[str, Any]

    def __init__(self, state: object) -> None:
        self.state = state

    def load(self, path: Path, **options: Any) -> object:
        """The state, or an error as torch's restricted reader raises it."""
        self.asked = options
        if isinstance(self.state, Exception):
            raise self.state
        return self.state

    def is_tensor(self, value: object) -> bool:
        """Whether a value is one of the stand-ins below."""
        return isinstance(value, FakeTensor)


class FakeTensor:
    """A tensor of torch, as far as it is read."""

    def __init__(self, values: NDArray[np.float32]) -> None:
        self.values = values
        self.shape, self.dtype = values.shape, "torch.float32"

    def numel(self) -> int:
        """Number of values."""
        return self.values.size

    def element_size(self) -> int:
        """Bytes of a value."""
        return 4

    def detach(self) -> FakeTensor:
        """Itself, like float() and cpu()."""
        return self

    float = cpu = detach

    def numpy(self) -> NDArray[np.float32]:
        """The values."""
        return self.values


def with_torch(monkeypatch: pytest.MonkeyPatch, torch: FakeTorch) -> None:
    """Lets the program find this torch."""
    find = importlib.util.find_spec
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: torch if name == "torch" else find(name)
    )


def pickled(folder: Path) -> Path:
    """A PEFT folder whose weights are a .bin."""
    peft(folder)
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(b"pickled")
    return folder


def test_pickled_weights_go_through_the_restricted_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torch a .bin is read with weights_only, and gives the file of the safetensors."""
    base = write_base(tmp_path / "base.gguf")
    wanted, _ = convert(peft(tmp_path / "a"), base, tmp_path / "a.gguf", name="x")
    tensors = lora(layers(("self_attn.q_proj", "self_attn.v_proj")))
    torch = FakeTorch({name: FakeTensor(values) for name, values in tensors.items()})
    with_torch(monkeypatch, torch)
    path, _ = convert(pickled(tmp_path / "b"), base, tmp_path / "b.gguf", name="x")
    assert torch.asked["weights_only"] is True
    assert path.read_bytes() == wanted.read_bytes()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (pickle.UnpicklingError("Unsupported global"), "could run a program"),
        (RuntimeError("truncated"), "truncated"),
        ([1, 2], "a dictionary of tensors"),
        ({"a": 3}, "names with tensors"),
    ],
)
def test_pickled_weights_that_are_none(
    state: object, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever torch refuses, or gives beside tensors, is one clear error."""
    with_torch(monkeypatch, FakeTorch(state))
    with pytest.raises(AdapterFormatError, match=message):
        plan_conversion(pickled(tmp_path / "b"), write_base(tmp_path / "base.gguf"))


def test_pickled_weights_need_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch a .bin is refused with what to do; nothing here unpickles."""
    folder = peft(tmp_path / "peft")
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else find(name)
    )
    with pytest.raises(UnsupportedError, match=r"torch alone.*safe_serialization"):
        plan_conversion(folder, write_base(tmp_path / "base.gguf"))
