"""Passes over rows of logits, on the threads that compute the steps.

A thread of ggml that waits for work spins for milliseconds: threads of our own would share the
processors with those, and took two thirds longer. So the calls are one more graph for the same
threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from loragraph.ggml.handles import F32, Buffer, CpuBackend, TensorContext
from loragraph.ggml.ops import Ops
from loragraph.kernels.sampling import RowCall, RowCallsNode, run_alone

_FEWEST = 2


class RowThreads:
    """Runs calls as one custom node on a backend's threads; `backend` must outlive it."""

    def __init__(self, backend: CpuBackend) -> None:
        self._backend = backend
        self._node = RowCallsNode()
        lib = backend.lib
        with ExitStack() as undo:
            self._ctx = undo.enter_context(TensorContext(lib, 2, 2))
            before = self._ctx.new_tensor(F32, (1,))  # a custom node has an input
            node = (self._node.function, self._node.userdata)
            done = Ops(self._ctx).custom(F32, (1,), [before], *node)
            self._graph = lib.c.ggml_new_graph_custom(self._ctx.ptr, 2, False)
            lib.c.ggml_build_forward_expand(self._graph, done.ptr)
            self._buffer = undo.enter_context(Buffer.for_tensors(self._ctx))
            self._plan = backend.plan(self._graph)
            undo.pop_all()

    def run(self, calls: Sequence[RowCall]) -> None:
        """Runs calls of different rows, in any order; returns when all are done."""
        _ = self._buffer.ptr  # raises after close
        if len(calls) < _FEWEST:
            run_alone(calls)
            return
        self._node.write(calls)
        self._backend.compute(self._graph, self._plan)

    def close(self) -> None:
        """Frees the graph."""
        self._buffer.close()
        self._ctx.close()
