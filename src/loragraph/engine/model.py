"""A base model in memory: its family, weights, vocabulary, and the adapters registered with it."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from loragraph.adapters.adapter import Adapter
from loragraph.adapters.base import OUTPUT, TOKEN_EMBD, BaseInfo, BaseTarget, TargetKind
from loragraph.adapters.gguf import read_adapter
from loragraph.engine.options import memory_errors, threads
from loragraph.errors import (
    InvalidRequestError,
    LifecycleError,
    LoragraphError,
    UnsupportedError,
)
from loragraph.ggml.gguf import Scalar
from loragraph.ggml.handles import CpuBackend
from loragraph.ggml.lib import Library, load_library
from loragraph.graph.arch import Family, family_of
from loragraph.graph.lowrank.resident import PreparedAdapters
from loragraph.model.files import ModelFiles
from loragraph.model.fingerprint import fingerprint
from loragraph.model.fold import read_fold
from loragraph.model.hparams import HParams
from loragraph.model.keys import Keys
from loragraph.model.rows import WeightRows
from loragraph.model.weights import Progress, Use, Weights
from loragraph.vocab.chat import ChatTemplate
from loragraph.vocab.vocab import Vocab

_KINDS: Mapping[Use, TargetKind] = {
    Use.LINEAR: TargetKind.LINEAR,
    Use.EXPERTS: TargetKind.EXPERTS,
    Use.LOOKUP: TargetKind.EMBEDDING,
    Use.VECTOR: TargetKind.NONE,
}


class Model:
    """One GGUF base model. Contexts compute with it, adapters are registered with it.

    Closing it closes every adapter registered with it; a context that is still open forbids that.
    """

    def __init__(
        self,
        lib: Library,
        files: ModelFiles,
        weights: Weights,
        family: Family,
        hparams: HParams,
        vocab: Vocab,
        backend: CpuBackend,
    ) -> None:
        """Takes all of them over. Use `Model.load`."""
        self.lib = lib
        self.hparams = hparams
        self.family = family
        self.weights = weights
        self.vocab = vocab
        self.path = files.path
        self.metadata: Mapping[str, Scalar] = files.metadata.scalars()
        self.base_info = _base_info(hparams, weights)
        self.prepared = PreparedAdapters(tied=self.base_info.tied)
        self._backend = backend
        self._lock = threading.Lock()
        self._adapters: dict[Adapter, None] = {}
        self._contexts: dict[str, None] = {}
        self._n_contexts = 0
        self._closed = False
        self._pid = os.getpid()

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        n_threads: int | None = None,
        repack: bool = True,
        ggml_folder: str | os.PathLike[str] | None = None,
        progress: Progress | None = None,
        check_tensors: bool = False,
    ) -> Self:
        """Loads the GGUF model at `path` (of a split one: the first part).

        `n_threads` is what contexts use unless they say otherwise (default: the CPUs at hand);
        `repack=False` keeps every weight as the file has it; `ggml_folder` holds other libggml
        and libllama objects; `progress` gets (bytes done, bytes in all). `check_tensors` reads
        every weight before and refuses NaN, infinities and damaged blocks; without it such weights
        give wrong logits, or some that are not finite. Raises GGUFError, UnsupportedError,
        BackendError.

        Weights are read from the mapped file while the model lives. The file must not be written
        to: one that shrinks raises GGUFError at the next step, or, where it shrinks within a step,
        lets the system end the process (SIGBUS). Renaming a new file over it is safe.
        """
        n_threads = threads(n_threads)
        lib = load_library(None if ggml_folder is None else Path(ggml_folder))
        with memory_errors(str(path)):
            return cls._load(lib, path, n_threads, repack, progress, check_tensors)

    @classmethod
    def _load(
        cls,
        lib: Library,
        path: str | os.PathLike[str],
        n_threads: int,
        repack: bool,
        progress: Progress | None,
        check_tensors: bool,
    ) -> Self:
        with ExitStack() as undo:
            parts = _prepare(lib, path, n_threads, repack, undo)
            if check_tensors:
                parts.weights.check_values()
            parts.weights.place(progress)
            model = cls(
                lib,
                parts.files,
                parts.weights,
                parts.family,
                parts.hparams,
                parts.vocab,
                parts.backend,
            )
            undo.pop_all()
            return model

    @property
    def n_threads(self) -> int:
        """Threads that a context uses unless it says otherwise."""
        return self._backend.n_threads

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._closed

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """The adapters registered and not closed, oldest first."""
        with self._lock:
            return tuple(self._adapters)

    @property
    def n_adapter_pairs(self) -> int:
        """Pairs of all registered adapters: what llama.cpp's node budget counts."""
        return sum(len(adapter.pairs) for adapter in self.adapters)

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The file's chat template, None where it has none. FormatError for one that is wrong."""
        source = self.vocab.chat_template()
        return None if source is None else self.compile_template(source)

    def compile_template(self, source: str) -> ChatTemplate:
        """Another template for this model; FormatError for one that is wrong."""
        return ChatTemplate(source, bos=self._text(self.vocab.bos), eos=self._text(self.vocab.eos))

    def chat_tokens(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        begins: bool = True,
        **variables: Any,
    ) -> list[int]:
        """The token ids of a chat, by the file's template; `variables` are for the template.

        As in llama.cpp: control tokens are parsed everywhere, and a BOS or EOS that both the
        template and the vocabulary add stands there once. `begins`: see `Vocab.tokenize`'s
        `add_special`.
        """
        self.check_open()
        if self.chat_template is None:
            raise InvalidRequestError(
                f"{self.path.name} has no chat template",
                param="messages",
                hint="give the prompt as plain text",
            )
        text = self.chat_template.render(
            messages, add_generation_prompt=add_generation_prompt, **variables
        )
        if begins and self.vocab.add_bos:
            text = text.removeprefix(self._text(self.vocab.bos))
        if begins and self.vocab.add_eos:
            text = text.removesuffix(self._text(self.vocab.eos))
        return self.vocab.tokenize(text, add_special=begins, parse_special=True)

    def load_adapter(
        self,
        path: str | os.PathLike[str],
        *,
        ignore_norm: bool = False,
        tied_output: bool | None = None,
    ) -> Adapter:
        """Loads and registers an adapter: a GGUF file, or a folder of PEFT or MLX.

        See `loragraph.adapters.gguf.read_adapter`.
        """
        self.check_open()
        with memory_errors(str(path)):
            adapter = read_adapter(
                self.lib,
                path,
                self.base_info,
                ignore_norm=ignore_norm,
                tied_output=tied_output,
                rows=WeightRows(self.weights),
            )
        return self.adopt_adapter(adapter)

    def adopt_adapter(self, adapter: Adapter) -> Adapter:
        """Registers an adapter that was made in memory for this base; closed with the model."""
        if not all(part.ready for part in adapter.vectors.values()):
            raise LifecycleError(
                f"{adapter!r} was read without the base's weights, which its DoRA magnitudes need",
                hint="load it with Model.load_adapter",
            )
        adapter.on_close(self._forget)
        with self._lock:
            if not self._closed:
                self._adapters[adapter] = None
                return adapter
        adapter.close()  # the model was closed meanwhile
        raise self._was_closed()

    def check_open(self) -> None:
        """Raises LifecycleError after close(), and in a process forked from the one that loaded."""
        if self._closed:
            raise self._was_closed()
        if self._pid != os.getpid():
            raise LifecycleError(
                f"the model {self.path.name} was used in a forked process",
                hint="the threads of ggml do not survive a fork: load the model there",
            )

    @cached_property
    def fingerprint(self) -> str:
        """Tells this model from others, for what is saved of it; see model/fingerprint.py."""
        return fingerprint(self.lib, self.weights.files)

    def check_files(self) -> None:
        """Raises GGUFError where a mapped file has become shorter; see `load`."""
        self.weights.files.check_sizes()

    def enter_context(self) -> str:
        """Registers a context and gives its name."""
        with self._lock:
            self.check_open()
            self._n_contexts += 1
            name = f"context {self._n_contexts} of {self.path.name}"
            self._contexts[name] = None
            return name

    def leave_context(self, name: str) -> None:
        """Takes a context's registration back."""
        with self._lock:
            self._contexts.pop(name, None)

    def close(self) -> None:
        """Closes the adapters and frees the weights; LifecycleError while a context is open."""
        with self._lock:
            if self._contexts:
                raise LifecycleError(
                    f"the model was closed while in use by {', '.join(self._contexts)}",
                    hint="close the contexts first",
                )
            if self._closed:
                return
            for adapter in self._adapters:  # before anything is closed: all or nothing
                if adapter.attached_to:
                    raise LifecycleError(
                        f"the model was closed while {adapter!r} is attached to "
                        f"{', '.join(adapter.attached_to)}",
                        hint="detach it there first",
                    )
            self.vocab.close()  # raises while another thread is in one of its calls
            self._closed = True
            adapters = tuple(self._adapters)
        for adapter in adapters:
            adapter.close()
        self.weights.close()
        self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def _was_closed(self) -> LifecycleError:
        return LifecycleError(f"the model {self.path.name} was used after its close")

    def _text(self, token: int | None) -> str:
        return "" if token is None else self.vocab.piece(token).decode("utf-8", "replace")

    def _forget(self, adapter: Adapter) -> None:
        with self._lock:
            self._adapters.pop(adapter, None)


@dataclass(frozen=True, slots=True)
class _Parts:
    """All of a model but the values of its weights."""

    files: ModelFiles
    backend: CpuBackend
    weights: Weights
    family: Family
    hparams: HParams
    vocab: Vocab


def load_problem(lib: Library, path: str | os.PathLike[str]) -> LoragraphError | None:
    """Why `Model.load` would refuse a file, None where nothing speaks against it.

    From headers and vocabulary alone: no weight is read.
    """
    try:
        with memory_errors(str(path)), ExitStack() as stack:
            _prepare(lib, path, 1, True, stack)
    except LoragraphError as error:
        return error
    return None


def _prepare(
    lib: Library, path: str | os.PathLike[str], n_threads: int, repack: bool, stack: ExitStack
) -> _Parts:
    """Reads and checks all but the weights; `stack` owns what was opened, last in first out."""
    files = ModelFiles(lib, path)
    stack.callback(files.close)
    kind = files.metadata.string("general.type", default="model")
    if kind != "model":
        raise UnsupportedError(
            f"{files.path}: expected a base model, got general.type '{kind}'",
            what=f"general.type {kind}",
            hint="an adapter is given beside its base",
        )
    keys = Keys(files.metadata)
    family_class = family_of(keys.arch)
    hparams = family_class.read_hparams(keys)
    backend = CpuBackend(lib, n_threads)
    stack.callback(backend.close)
    device = lib.c.ggml_backend_get_device(backend.ptr)
    weights = Weights(lib, files, device, repack, read_fold(files.metadata))
    stack.callback(weights.close)
    family = family_class(hparams, weights)
    weights.check_all_read()
    vocab = Vocab.from_file(lib, files.metadata)
    stack.callback(vocab.close)
    return _Parts(files, backend, weights, family, hparams, vocab)


def _base_info(hparams: HParams, weights: Weights) -> BaseInfo:
    targets = {
        name: BaseTarget(name, weight.ne, _KINDS[weight.use], weight.repacked)
        for name, weight in sorted(weights.by_name.items())
    }
    tied = weights.by_name[OUTPUT].info.name == TOKEN_EMBD
    latent = frozenset() if weights.fold is None else weights.fold.latent
    return BaseInfo(hparams.arch, hparams.name, targets, tied, latent, weights.files.path)
