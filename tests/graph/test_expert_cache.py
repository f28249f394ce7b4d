"""The seam for a cache of experts, with a fake one: base products read by slot, all else by id."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from loragraph.engine.context import Context
from loragraph.engine.model import Model
from loragraph.ggml.handles import I32, Buffer, Tensor, TensorContext
from loragraph.ggml.lib import Library, load_library
from loragraph.ggml.ops import Ops
from loragraph.model.weights import Weight
from tests.numerics.runs import (
    LOWERINGS,
    LoweringName,
    open_context,
    random_tokens,
    run,
)
from tests.tiny import TinyAdapter
from tests.tiny_experts import TinyExperts, TinyGptOss, TinyMixtral

N_EXPERT, N_SLOTS = 8, 5
PROMPT = random_tokens(12)


class FakeCache:
    """Fewer slots than experts, filled when the graph has chosen: least recently used ones go.

    Its nodes call Python from ggml, so it needs contexts of one thread.
    """

    def __init__(self, lib: Library) -> None:
        self.lib = lib
        self.n_loads = 0
        self._kept: list[Any] = []
        self._slots: dict[str, OrderedDict[int, int]] = {}
        self._stacks: dict[str, Tensor] = {}
        self._contexts: list[TensorContext] = []
        self._buffers: list[Buffer] = []

    def experts(self, ops: Ops, w: Weight, ids: Tensor) -> tuple[Tensor, Tensor]:
        stack = self._stack(w)
        slots = self._slots.setdefault(w.name, OrderedDict())
        nodes: list[Any] = []  # of the slots' tensor, once it is there

        def fill(dst: Any, ith: int, nth: int, userdata: Any) -> None:
            out = self._rows(nodes[0])
            for row, experts in enumerate(self._rows(ids).tolist()):
                out[row] = [self._slot_of(w, stack, slots, expert) for expert in experts]

        callback = self.lib.ffi.callback("ggml_custom_op_t", fill)
        self._kept.append(callback)
        address = int(self.lib.ffi.cast("uintptr_t", callback))
        nodes.append(ops.custom(I32, ids.ne[:2], [ids], address, 0))
        return stack, nodes[0]

    def bind(self) -> None:
        """The callbacks look addresses up when they run."""

    def close(self) -> None:
        for one in (*self._buffers, *self._contexts):
            one.close()

    def _stack(self, w: Weight) -> Tensor:
        if w.name not in self._stacks:
            ctx = TensorContext(self.lib, 1)
            self._contexts.append(ctx)
            self._stacks[w.name] = ctx.new_tensor(w.tensor.type, (*w.ne[:2], N_SLOTS))
            self._buffers.append(Buffer.for_tensors(ctx))
            self._bytes(self._stacks[w.name], N_SLOTS)[:] = 0xFF  # what no one filled is NaN
        return self._stacks[w.name]

    def _slot_of(self, w: Weight, stack: Tensor, slots: OrderedDict[int, int], expert: int) -> int:
        if expert not in slots:
            slot = len(slots) if len(slots) < N_SLOTS else slots.popitem(last=False)[1]
            slots[expert] = slot
            self.n_loads += 1
            self._bytes(stack, N_SLOTS)[slot] = self._bytes(w.tensor, w.ne[2])[expert]
        slots.move_to_end(expert)
        return slots[expert]

    def _rows(self, tensor: Tensor) -> NDArray[np.int32]:
        """I32 [n, m] as (m, n), rows apart where it is a view."""
        n, m, stride = *tensor.ne[:2], int(tensor.ptr.nb[1])
        memory = self.lib.ffi.buffer(tensor.ptr.data, (m - 1) * stride + 4 * n)
        return np.ndarray((m, n), np.int32, memory, strides=(stride, 4))

    def _bytes(self, tensor: Tensor, n: int) -> NDArray[np.uint8]:
        n_bytes = int(self.lib.c.ggml_nbytes(tensor.ptr))
        memory = self.lib.ffi.buffer(tensor.ptr.data, n_bytes)
        return np.frombuffer(memory, np.uint8).reshape(n, -1)


MODELS: dict[str, TinyExperts] = {
    "scales": TinyMixtral(n_expert=N_EXPERT, scales=True),
    "biases": TinyGptOss(n_expert=N_EXPERT),
}


@pytest.fixture(params=MODELS)
def tiny(request: pytest.FixtureRequest) -> TinyExperts:
    return MODELS[request.param]


def token_by_token(context: Context, scales: dict[Any, float]) -> NDArray[np.float32]:
    """Logits of PROMPT, two experts a step, which always fit into the slots."""
    return run(context, PROMPT, scales, chunk=1)


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeCache]]:
    """Contexts opened in this test use a fake cache; it is the list's one element."""
    from loragraph.engine import runner

    made: list[FakeCache] = []
    plain: Any = runner.Runner

    def with_cache(*parts: Any) -> Any:
        made.append(FakeCache(load_library()))
        return plain(*parts, experts=lambda: made[-1])

    monkeypatch.setattr("loragraph.engine.assembly.Runner", with_cache)
    yield made
    for one in made:
        one.close()


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_cache_of_experts_changes_no_bit(
    lowering: LoweringName, tiny: TinyExperts, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """With five slots for eight experts, base and adapter give the bits of the whole stacks: the
    slots reach neither A and B nor scales and biases."""
    path = tiny.write(tmp_path / "m.gguf")
    TinyAdapter(b_std=0.1).write(tmp_path / "a.gguf", tiny)
    with Model.load(path, n_threads=1, repack=False) as model:
        adapter = model.load_adapter(tmp_path / "a.gguf")
        with open_context(model, lowering=lowering) as context:
            expected = [token_by_token(context, {adapter: scale}) for scale in (0.0, 1.0)]
        made: list[FakeCache] = request.getfixturevalue("cached")
        with open_context(model, lowering=lowering) as context:
            actual = [token_by_token(context, {adapter: scale}) for scale in (0.0, 1.0)]
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert not np.array_equal(expected[0], expected[1])
    n_stacks = 3 * tiny.n_layer
    assert made[0].n_loads > n_stacks * N_SLOTS  # some were evicted and came back
