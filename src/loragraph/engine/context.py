"""The low-level interface: one sequence on one model, its adapters chosen between calls."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, Self, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from loragraph.adapters.adapter import Adapter
from loragraph.adapters.mix import EMPTY_MIX, Mix
from loragraph.engine.assembly import (
    ATTENTIONS,
    KV_TYPES,
    LOWERINGS,
    AttentionName,
    KvType,
    LoweringName,
    make_runner,
)
from loragraph.engine.generate import (
    Generation,
    GenerationStream,
    Prompt,
    SamplingFields,
    prompt_tokens,
    sampling_params,
)
from loragraph.engine.model import Model
from loragraph.engine.options import choice, integer, memory_errors, threads
from loragraph.engine.params import SamplingParams
from loragraph.engine.runner import Counters
from loragraph.errors import (
    CapacityError,
    ContextLengthError,
    InvalidRequestError,
    LifecycleError,
)
from loragraph.graph.batch import Batch
from loragraph.graph.lowrank.branch import BranchLowering

MAX_CTX = 1 << 24
MAX_BATCH = 1 << 16


class Context:
    """One sequence of at most `n_ctx` tokens.

    `lowering` says how adapters are computed ("routed" serves any mix from one graph, "stacked"
    does so with ggml's own nodes, "branch" is llama.cpp's form), `kv_type` and `attention` how K
    and V are stored and read; "f32" with "plain" is the exact mode. A context is used by one
    thread at a time: a second one raises LifecycleError. Two contexts on one model run in parallel.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int = 2048,
        lowering: LoweringName = "routed",
        kv_type: KvType = "f16",
        attention: AttentionName = "cells",
        n_batch: int = 512,
        n_threads: int | None = None,
    ) -> None:
        """`n_batch` is the most tokens that one step computes; a longer input takes several.

        ConfigError for a wrong argument, CapacityError or BackendError where memory is too small.
        """
        if not isinstance(model, Model):
            raise TypeError(f"expected a Model, got {type(model).__name__}")
        choice(lowering, "lowering", LOWERINGS)
        choice(kv_type, "kv_type", tuple(KV_TYPES))
        choice(attention, "attention", ATTENTIONS)
        self.model = model
        self.n_ctx = integer(n_ctx, "n_ctx", 1, MAX_CTX)
        self.n_batch = min(integer(n_batch, "n_batch", 1, MAX_BATCH), self.n_ctx)
        n_threads = model.n_threads if n_threads is None else threads(n_threads)
        self._busy = threading.Lock()
        self._mix = EMPTY_MIX
        self._n_past = 0
        self._held: list[int] = []  # in the sequence, but not computed yet
        self._closed = False
        self._spoiled = False  # some cell may hold values that are not finite
        self.name = model.enter_context()
        try:
            with memory_errors(self.name):
                self._lowering, self._runner = make_runner(
                    model, self.n_ctx, self.n_batch, lowering, kv_type, attention, n_threads
                )
        except BaseException:
            model.leave_context(self.name)
            raise

    @property
    def n_past(self) -> int:
        """Tokens in the sequence."""
        return self._n_past + len(self._held)

    @property
    def mix(self) -> Mix:
        """The adapters that the tokens to come will carry."""
        return self._mix

    @property
    def counters(self) -> Counters:
        """Graphs built, reused and dropped, nodes and node budget."""
        return self._runner.counters

    @property
    def n_set_changes(self) -> int:
        """How often `set_adapters` really changed the set, as the branch lowering counts it."""
        return self._lowering.n_set_changes if isinstance(self._lowering, BranchLowering) else 0

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of cells, step inputs and compute memory."""
        return self._runner.nbytes

    def set_adapters(self, scales: Mapping[Adapter, float]) -> None:
        """The adapters, with user scales, of the tokens that follow; earlier cells keep theirs.

        Zero scales are dropped; the same set again changes nothing. InvalidRequestError for a
        scale that is not finite, LifecycleError for an adapter that is closed or another model's,
        MixTooLargeError for more than 16 adapters (unlike ones; "branch" takes any number).
        """
        if not isinstance(scales, Mapping):
            raise TypeError(f"expected a mapping of adapters to scales, got {scales!r:.80}")
        with self._use():
            for adapter in scales:
                self._check_adapter(adapter)
            mix = Mix(scales)
            for adapter, scale in mix:
                for target in adapter.pairs:
                    adapter.effective_scale(target, scale)  # raises where it overflows
            self._lowering.check(mix)
            if mix == self._mix and mix.adapters == self._mix.adapters:
                return
            self._attach(mix)

    def decode(
        self, tokens: ArrayLike, *, outputs: Literal["all", "last"] = "all"
    ) -> NDArray[np.float32]:
        """Appends tokens to the sequence; their logits (n_tokens, n_vocab) f32.

        `outputs="last"` computes the last token's alone, (1, n_vocab). Raises InvalidRequestError
        for ids outside the vocabulary, ContextLengthError where they do not fit; then nothing of
        them was appended. Without tokens, "last" gives the logits of a token that is held.
        """
        with self._use():
            if outputs not in ("all", "last"):
                raise InvalidRequestError(
                    f"expected outputs 'all' or 'last', got {outputs!r}", param="outputs"
                )
            ids = self._checked_tokens(tokens)
            self.model.check_files()
            if len(ids) == 0 and not (self._held and outputs == "last"):
                return np.empty((0, self.model.hparams.n_vocab), np.float32)
            held = self._held
            all_ids = np.array([*held, *ids.tolist()], np.int32) if held else ids
            logits = self._decode(all_ids, last_only=outputs == "last")
            self._held = []
            return logits if outputs == "last" else logits[len(held) :]

    def hold(self, token: int) -> None:
        """Appends a token without computing it: the next decode does, with what it is given.

        So the last token of a generation is part of the sequence, but costs no step of its own.
        It carries the adapters that are set when it is computed.
        """
        with self._use():
            self._held += self._checked_tokens([token]).tolist()

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        chat: bool = False,
        **fields: Unpack[SamplingFields],
    ) -> GenerationStream:
        """Appends `prompt` to the sequence and generates: an iterator of events, one a token.

        `prompt` is a text, token ids or chat messages; with `chat` a text is one user message.
        A chat is rendered as a whole, so its next turn wants clear() and all messages again.
        `fields` are those of SamplingParams, and replace those of `params`. Ends with "stop" at
        an end-of-generation token or a stop string, with "length" after max_tokens or where the
        context is full. Raises InvalidRequestError and ContextLengthError at once, before any
        token is computed.
        """
        chosen = sampling_params(params, fields)
        with self._use():
            ids = prompt_tokens(self.model, prompt, chat=chat, begins=self.n_past == 0)
            if not ids and not self._held:
                raise InvalidRequestError(
                    "prompt: expected at least one token, got none", param="prompt"
                )
            self._checked_tokens(ids)
            return GenerationStream(self, ids, chosen)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        chat: bool = False,
        **fields: Unpack[SamplingFields],
    ) -> Generation:
        """Appends `prompt` to the sequence and generates to the end; arguments as for stream()."""
        with self.stream(prompt, params, chat=chat, **fields) as stream:
            for _ in stream:
                pass
            return stream.result

    def clear(self) -> None:
        """Forgets the sequence; adapters stay set."""
        with self._use():
            self._forget_from(0)
            self._held = []

    def truncate(self, n_tokens: int) -> None:
        """Keeps the first `n_tokens` tokens of the sequence and forgets the rest.

        ConfigError where there are not so many.
        """
        with self._use():
            n_tokens = integer(n_tokens, "n_tokens", 0, self.n_past)
            self._held = self._held[: max(0, n_tokens - self._n_past)]
            self._forget_from(min(n_tokens, self._n_past))

    def close(self) -> None:
        """Detaches the adapters and frees the memory; a second call does nothing.

        LifecycleError while another thread uses it; then it stays open.
        """
        if self._closed:
            return
        with self._use(forked=True):
            self._closed = True
            for adapter in self._mix.adapters:
                adapter.detach(self.name)
            self._mix = EMPTY_MIX
            self._runner.close()
            self.model.leave_context(self.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _use(self, *, forked: bool = False) -> Iterator[None]:
        """One thread at a time, and after close nobody; `forked`: in a forked process too."""
        if not self._busy.acquire(blocking=False):
            raise LifecycleError(
                f"{self.name} is used by two threads at once",
                hint="give each thread a context of its own",
            )
        try:
            if self._closed:
                raise LifecycleError(f"{self.name} was used after its close")
            if not forked:
                self.model.check_open()
            yield
        except MemoryError as exc:
            raise CapacityError(f"{self.name}: no memory") from exc
        finally:
            self._busy.release()

    def _check_adapter(self, adapter: Adapter) -> None:
        if not isinstance(adapter, Adapter):
            raise TypeError(f"expected an Adapter as key, got {adapter!r:.80}")
        if adapter.closed:
            raise LifecycleError(f"{adapter!r} was used after its close")
        if adapter not in self.model.adapters:
            raise LifecycleError(
                f"{adapter!r} is registered with another model",
                hint="load it with this model",
            )

    def _attach(self, mix: Mix) -> None:
        """All or nothing: the new set is held before the old one is let go."""
        held: list[Adapter] = []
        try:
            for adapter in mix.adapters:
                adapter.attach(self.name)
                held.append(adapter)
            self._lowering.attach(mix)
        except BaseException:
            for adapter in held:
                adapter.detach(self.name)
            raise
        for adapter in self._mix.adapters:
            adapter.detach(self.name)
        if isinstance(self._lowering, BranchLowering):
            self._runner.drop_graphs()  # their branches point at the old set's tensors
        self._mix = mix

    def _checked_tokens(self, tokens: ArrayLike) -> NDArray[np.int32]:
        flat = _flat(tokens)
        if self.n_past + len(flat) > self.n_ctx:
            raise ContextLengthError(
                f"expected at most {self.n_ctx - self.n_past} more tokens in a context of "
                f"{self.n_ctx}, got {len(flat)}",
                param="tokens",
                hint="a larger n_ctx takes more",
            )
        n_vocab = self.model.hparams.n_vocab
        # For the one token of a decode lists cost less than numpy's reductions.
        ids = flat.tolist() if isinstance(flat, np.ndarray) else flat
        if ids and (min(ids) < 0 or max(ids) >= n_vocab):
            raise InvalidRequestError(
                f"expected token ids from 0 to {n_vocab - 1}, got {min(ids)} to {max(ids)}",
                param="tokens",
            )
        return np.array(ids, np.int32)

    def _decode(self, ids: NDArray[np.int32], *, last_only: bool) -> NDArray[np.float32]:
        start, parts = self._n_past, []
        try:
            for first in range(0, len(ids), self.n_batch):
                chunk = ids[first : first + self.n_batch]
                parts.append(self._step(chunk, last_only=last_only))
        except BaseException:
            self._forget_from(start)
            raise
        if last_only:
            return parts[-1]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _step(self, chunk: NDArray[np.int32], *, last_only: bool) -> NDArray[np.float32]:
        n = len(chunk)
        outputs = np.array([n - 1], np.int32) if last_only else np.arange(n, dtype=np.int32)
        logits = self._runner.run(Batch.of_one(chunk, self._n_past, self._mix, outputs))
        self._n_past += n
        # Every logit is a product over the whole of one hidden state, so the first tells of all.
        self._spoiled |= not math.isfinite(logits[-1, 0])
        return logits

    def _forget_from(self, n_tokens: int) -> None:
        """Masked cells still meet the product of plain attention, and 0 * NaN is NaN."""
        if self._spoiled:
            self._runner.clear_cells(n_tokens)
            self._spoiled = n_tokens > 0
        self._n_past = n_tokens


def _flat(tokens: ArrayLike) -> Sequence[int] | NDArray[Any]:
    """A flat sequence of integers, not looked at yet; InvalidRequestError for all else."""
    if isinstance(tokens, list | tuple) and all(type(token) is int for token in tokens):
        return tokens
    try:
        ids = np.asarray(tokens)
    except (ValueError, OverflowError) as exc:  # lists of unlike lengths and their like
        raise InvalidRequestError(
            f"expected a flat sequence of token ids, got {exc}", param="tokens"
        ) from exc
    if ids.ndim == 1 and ids.size == 0:
        return ()
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidRequestError(
            f"expected a flat sequence of token ids, got {ids.ndim} dimensions of {ids.dtype}",
            param="tokens",
        )
    return ids
