"""Tensor infos -> weights in memory: mapped from the file, or repacked where that is faster.

A model family asks for its tensors by name and shape (`linear`, `lookup`, `vector`); each request
is checked against the file at once, before anything is loaded. `place` then loads all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from loragraph.errors import GGUFError, UnsupportedError
from loragraph.ggml.gguf import TensorInfo
from loragraph.ggml.handles import F32, I32, Buffer, Tensor, TensorContext
from loragraph.ggml.lib import Library
from loragraph.model.files import ModelFiles
from loragraph.model.fold import Fold
from loragraph.model.rotations import Rotation, Rotations

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

_MAP_ALIGNMENT = 32  # of a tensor inside a mapped file; ggml's own kernels assume it
_COPY_ALIGNMENT = 64


class Use(Enum):
    """How the graph reads a weight: decides where it may be placed and what an adapter can do."""

    LINEAR = "linear"
    EXPERTS = "experts"
    LOOKUP = "lookup"
    VECTOR = "vector"


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A base tensor that the graph reads. `scale` is its optional factor w_s (product only)."""

    name: str
    tensor: Tensor
    info: TensorInfo
    use: Use
    repack_type: Any = None  # ggml buffer type, None = plain
    scale: Weight | None = None
    rotation: Rotation | None = None  # of the activation, or for a lookup of the rows it gives

    @property
    def ne(self) -> tuple[int, int, int, int]:
        """Sizes in ggml order."""
        return self.tensor.ne

    @property
    def repacked(self) -> bool:
        """Whether its memory has a layout that only matrix products can read."""
        return self.repack_type is not None


@dataclass(slots=True)
class Weights:
    """The weights of one model, while a family asks for them and after they are placed."""

    lib: Library
    files: ModelFiles
    device: Any  # ggml device that will compute
    repack: bool = True
    fold: Fold | None = None
    by_name: dict[str, Weight] = field(default_factory=dict)
    _ctx: TensorContext | None = None
    _buffers: list[Buffer] = field(default_factory=list)
    _rotations: Rotations = field(default_factory=Rotations)
    _rotated: set[str] = field(default_factory=set)  # names in the file
    _repack_choice: dict[tuple[int, int, int, int, bool], Any] = field(default_factory=dict)

    def linear(self, name: str, *ne: int) -> Weight:
        """A matrix [n_in, n_out] that meets activations in `builder.linear`, with its w_s."""
        return self._linear(name, name, ne)

    def linear_or_tied(self, name: str, table: str, *ne: int) -> Weight:
        """The output head: `name`, or, where the file has none, the token table as that matrix.

        A tied head is a weight of its own, so that it can be repacked while the lookup reads the
        plain table, and so that adapters can tell the two apart.
        """
        return self._linear(name, name if name in self.files.tensors else table, ne)

    def experts(self, name: str, *ne: int) -> Weight:
        """A stack [n_in, n_out, n_expert] that meets activations in `builder.linear_id`."""
        return self._add(name, name, Use.EXPERTS, ne, self._scale(name, (ne[-1],)))

    def heads(self, name: str, *ne: int) -> Weight:
        """A stack [n_in, n_out, n_head] that meets activations in `builder.linear_heads`."""
        scale = self._scale(name, (ne[-1],))
        return self._add(name, name, Use.EXPERTS, ne, scale, batched=True)

    def lookup(self, name: str, *ne: int) -> Weight:
        """A table [n_embd, n_rows] whose rows are read by index."""
        return self._add(name, name, Use.LOOKUP, ne)

    def vector(self, name: str, *ne: int) -> Weight:
        """A float32 vector: norm weight, bias, frequency factors."""
        weight = self._add(name, name, Use.VECTOR, ne)
        if weight.tensor.type != F32:
            raise UnsupportedError(
                f"{weight.info.path}: {name}: expected type f32, got "
                f"{self.lib.text(self.lib.c.ggml_type_name(weight.tensor.type))}",
                what=f"type of {name}",
            )
        return weight

    def has(self, name: str) -> bool:
        """Whether the file has a tensor of this name."""
        return name in self.files.tensors

    def refuse(self, name: str, reason: str) -> None:
        """Raises UnsupportedError where the file has this tensor."""
        if self.has(name):
            raise UnsupportedError(f"{self.files.path}: {name}: {reason}", what=f"tensor {name}")

    def optional_vector(self, name: str, *ne: int) -> Weight | None:
        """The vector, or None where the file has no tensor of this name."""
        return self.vector(name, *ne) if self.has(name) else None

    def check_all_read(self) -> None:
        """Raises GGUFError where the file holds tensors that the family did not ask for, or names
        folded ones that it does not hold."""
        unread = self.files.tensors.keys() - {weight.info.name for weight in self.by_name.values()}
        unread = {name for name in unread if not _is_ignored(name)}
        if unread:
            shown = ", ".join(sorted(unread)[:5])
            raise GGUFError(
                f"{len(unread)} tensors that this architecture does not read: {shown}",
                path=self.files.path,
                hint="is general.architecture right?",
            )
        if self.fold is not None:
            missing = (self.fold.folded | self.fold.latent) - self._rotated
            if missing:
                raise GGUFError(
                    f"prism.hadamard weight not found: {min(missing)}", path=self.files.path
                )

    def check_values(self) -> None:
        """Reads every weight: GGUFError names one with NaN, infinite or absurd block scales."""
        for weight in self.by_name.values():
            info = weight.info
            data = self.files.pointer(info)
            if not self.lib.c.ggml_validate_row_data(info.type, data, info.nbytes):
                raise GGUFError(
                    "expected finite values, got NaN, infinity or a damaged block",
                    path=info.path,
                    where=info.name,
                )

    def place(self, progress: Progress | None = None) -> None:
        """Loads every weight asked for; all or nothing."""
        try:
            self._place(progress or (lambda done, total: None))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Frees the weights; the mapped files are closed last."""
        for buffer in reversed(self._buffers):
            buffer.close()
        self._buffers.clear()
        if self._ctx is not None:
            self._ctx.close()
            self._ctx = None
        self.files.close()

    @property
    def nbytes(self) -> Mapping[str, int]:
        """Bytes by kind of memory: "mapped", "repacked", "copied"."""
        sums = {"mapped": 0, "repacked": 0, "copied": 0}
        for weight in self.by_name.values():
            sums[self._kind(weight)] += weight.info.nbytes
        return sums

    def _linear(self, name: str, source: str, ne: tuple[int, ...]) -> Weight:
        return self._add(name, source, Use.LINEAR, ne, self._scale(source, (1,)))

    def _scale(self, source: str, ne: tuple[int, ...]) -> Weight | None:
        return self.optional_vector(source.removesuffix(".weight") + ".scale", *ne)

    def _add(
        self,
        name: str,
        source: str,
        use: Use,
        ne: tuple[int, ...],
        scale: Weight | None = None,
        *,
        batched: bool = False,
    ) -> Weight:
        """`batched`: a stack whose matrices meet an activation each, in one plain product."""
        if name in self.by_name:
            return self.by_name[name]
        info = self.files.tensors.get(source)
        if info is None:
            raise GGUFError("missing tensor", path=self.files.path, where=source)
        if info.ne != (*ne, 1, 1, 1)[:4]:
            raise GGUFError(
                f"expected sizes {list(ne)}, got {list(info.ne)}", path=info.path, where=source
            )
        if self._ctx is None:
            self._ctx = TensorContext(self.lib, 4 * len(self.files.tensors) + 16)
        tensor = self._ctx.new_tensor(info.type, ne, name)
        repacks = use in (Use.LINEAR, Use.EXPERTS) and not batched
        repack_type = self._best_buffer_type(info, use) if repacks else None
        rotation = self._rotation(name, info, use, batched=batched)
        weight = Weight(name, tensor, info, use, repack_type, scale, rotation)
        if use is not Use.VECTOR:
            self._check_computable(weight)
        self.by_name[name] = weight
        return weight

    def _rotation(self, name: str, info: TensorInfo, use: Use, *, batched: bool) -> Rotation | None:
        """The rotation that a folded weight needs; an error where it is used in another way."""
        fold, source = self.fold, info.name
        if fold is None or source not in fold.folded | fold.latent:
            return None
        is_tied_head = name != source
        if is_tied_head and not fold.tied_output:
            raise GGUFError(
                "a tied Hadamard output requires version 2 and tied_output=true",
                path=info.path,
                where=source,
            )
        wanted = Use.LOOKUP if source in fold.latent and not is_tied_head else None
        if (use is not wanted if wanted else use not in (Use.LINEAR, Use.EXPERTS)) or batched:
            path = "inverse-after-lookup table" if wanted else "Hadamard-aware matmul path"
            raise UnsupportedError(
                f"{info.path}: prism.hadamard: '{source}' is not on a verified {path}",
                what=f"folded {source}",
            )
        self._rotated.add(source)
        fold.check_width(info)
        signs = fold.signs_of(info)
        assert self._ctx is not None  # the weight's tensor was made in it
        return self._rotations.of(self._ctx, fold.block_size, info.ne[0], signs)

    def _kind(self, weight: Weight) -> str:
        if weight.repacked:
            return "repacked"
        return "mapped" if weight.info.offset % _MAP_ALIGNMENT == 0 else "copied"

    def _place(self, progress: Progress) -> None:
        total = sum(weight.info.nbytes for weight in self.by_name.values())
        done = 0
        homes = self._reserve()
        mapped: dict[Path, Buffer] = {}
        for weight in self.by_name.values():
            if weight.name in homes:
                self._copy(weight, *homes[weight.name])
            else:
                path = weight.info.path
                if path not in mapped:
                    address, nbytes = self.files.address(path), self.files.mapped_bytes(path)
                    mapped[path] = self._keep(Buffer.mapped(self.lib, address, nbytes))
                mapped[path].place(weight.tensor, weight.info.offset)
            done += weight.info.nbytes
            progress(done, total)
        if self._rotations:
            self._keep(self._rotations.place(self.lib))
        self.files.check_sizes()
        for buffer in self._buffers:
            buffer.use_for_weights()
            if buffer not in mapped.values():
                buffer.prefer_huge_pages()

    def _reserve(self) -> dict[str, tuple[Buffer, int]]:
        """One buffer for all weights of a buffer type; buffer and offset of each that is copied.

        One large buffer can have huge pages, which many small ones cannot.
        """
        c = self.lib.c
        plain = c.ggml_backend_cpu_buffer_type()
        offsets: dict[str, tuple[Any, int]] = {}
        sizes: dict[Any, int] = {}
        for weight in self.by_name.values():
            if self._kind(weight) == "mapped":
                continue
            buft = weight.repack_type if weight.repacked else plain
            start = -(-sizes.get(buft, 0) // _COPY_ALIGNMENT) * _COPY_ALIGNMENT
            offsets[weight.name] = (buft, start)
            nbytes = c.ggml_backend_buft_get_alloc_size(buft, weight.tensor.ptr)
            sizes[buft] = start + int(nbytes)
        buffers: dict[Any, Buffer] = {}
        for buft, nbytes in sizes.items():
            buffers[buft] = self._keep(Buffer.allocate(self.lib, nbytes, buft, clear=False))
        return {name: (buffers[buft], start) for name, (buft, start) in offsets.items()}

    def _copy(self, weight: Weight, buffer: Buffer, offset: int) -> None:
        """Copies one weight into its place; a repacking buffer changes its layout."""
        buffer.place(weight.tensor, offset)
        data = self.files.pointer(weight.info)
        self.lib.c.ggml_backend_tensor_set(weight.tensor.ptr, data, 0, weight.info.nbytes)
        self.files.release(weight.info)

    def _keep(self, buffer: Buffer) -> Buffer:
        self._buffers.append(buffer)
        return buffer

    def _best_buffer_type(self, info: TensorInfo, use: Use) -> Any:
        """The first extra buffer type (repacked layout) that can multiply this weight, or None.

        Only what `supports_op` confirms is chosen: a type that cannot be repacked crashes there.
        """
        if not self.repack:
            return None
        key = (info.type, *info.ne[:3], use is Use.EXPERTS)
        if key not in self._repack_choice:
            candidates = extra_buffer_types(self.lib, self.device)
            self._repack_choice[key] = next(
                (buft for buft in candidates if self._multiplies(info, buft, use)), None
            )
        return self._repack_choice[key]

    def _multiplies(self, info: TensorInfo, buft: Any, use: Use = Use.LINEAR) -> bool:
        """Asks the device whether it computes w x with w of this type and shape in `buft`."""
        lib = self.lib
        with TensorContext(lib, 4) as ctx:
            w = ctx.new_tensor(info.type, info.ne)
            if use is Use.EXPERTS:
                x = ctx.new_tensor(F32, (info.ne[0], 1, 512))
                ids = ctx.new_tensor(I32, (1, 512))
                product = lib.c.ggml_mul_mat_id(ctx.claim(), w.ptr, x.ptr, ids.ptr)
            else:
                x = ctx.new_tensor(F32, (info.ne[0], 512, info.ne[2], info.ne[3]))
                product = lib.c.ggml_mul_mat(ctx.claim(), w.ptr, x.ptr)
            if buft is None:
                return bool(lib.c.ggml_backend_dev_supports_op(self.device, product))
            with Buffer(lib, lib.c.ggml_backend_buft_alloc_buffer(buft, 0), "probe") as probe:
                w.ptr.buffer = probe.ptr
                return bool(lib.c.ggml_backend_dev_supports_op(self.device, product))

    def _check_computable(self, weight: Weight) -> None:
        """A type without a dot product on the CPU ends the process there, in get_rows too.

        The device itself says yes to Q8_K, I32 and their like, so its table is asked as well.
        """
        traits = self.lib.c.ggml_get_type_traits_cpu(weight.tensor.type)
        has_product = traits.vec_dot != self.lib.ffi.NULL
        if not has_product or not (weight.repacked or self._multiplies(weight.info, None)):
            raise self._not_computable(weight.name, weight.info)

    def _not_computable(self, name: str, info: TensorInfo) -> UnsupportedError:
        type_name = self.lib.text(self.lib.c.ggml_type_name(info.type))
        return UnsupportedError(
            f"{info.path}: {name}: ggml cannot multiply type {type_name} here",
            what=f"type {type_name}",
        )


def extra_buffer_types(lib: Library, device: Any) -> list[Any]:
    """The buffer types of `device` with layouts of their own (CPU repacking, AMX)."""
    reg = lib.c.ggml_backend_dev_backend_reg(device)
    address = lib.c.ggml_backend_reg_get_proc_address(reg, b"ggml_backend_dev_get_extra_bufts")
    if address == lib.ffi.NULL:
        return []
    types = lib.ffi.cast("void **(*)(void *)", address)(device)
    found: list[Any] = []
    while types != lib.ffi.NULL and types[len(found)] != lib.ffi.NULL:
        found.append(types[len(found)])
    return found


def _is_ignored(name: str) -> bool:
    """Tensors that other programs write and no graph reads: activation scales of NVFP4 files."""
    return name.endswith(".input_scale")
