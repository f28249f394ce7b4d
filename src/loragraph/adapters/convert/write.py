"""Plan -> GGUF adapter file, one target in memory at a time; it appears when it is complete."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from loragraph.adapters.convert.assemble import bias, delta, magnitude, pair_arrays
from loragraph.adapters.convert.config import looks_like_path
from loragraph.adapters.convert.plan import Plan, PlannedTarget
from loragraph.adapters.draft import ALPHA_KEY, INVOCATION_KEY, TIED_OUTPUT_KEY
from loragraph.errors import AdapterFormatError, ConfigError
from loragraph.ggml.handles import BF16, F16, F32, Q8_0

OutType = Literal["f32", "f16", "bf16", "q8_0"]
OUT_TYPES: dict[str, int] = {"f32": F32, "f16": F16, "bf16": BF16, "q8_0": Q8_0}
Progress = Callable[[int, int], None]  # bytes written, bytes in all
_Q8_0_VALUES = 32  # a row of Q8_0 is a multiple of this


@dataclass(frozen=True)
class OutTensor:
    """One tensor of the file to come."""

    name: str
    shape: tuple[int, ...]  # numpy order
    type: int

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        n = int(np.prod(self.shape, dtype=np.int64))
        return n // 32 * 34 if self.type == Q8_0 else n * (4 if self.type == F32 else 2)


def out_tensors(plan: Plan, outtype: OutType) -> list[OutTensor]:
    """All tensors in file order. Vectors are F32; rows that Q8_0 cannot hold become F16."""
    out = []
    for target in plan.targets:
        for half, shape in (("lora_a", target.shape_a), ("lora_b", target.shape_b)):
            if target.rank:
                out.append(OutTensor(f"{target.target}.{half}", shape, _type(outtype, shape)))
        for name, part in (
            ("lora_magnitude", target.magnitude),
            ("lora_bias", target.bias),
            ("lora_delta", target.delta),
        ):
            if part:
                out.append(OutTensor(f"{target.target}.{name}", (target.n_rows,), F32))
    return out


def write_plan(
    plan: Plan, path: Path, outtype: OutType, name: str, progress: Progress | None = None
) -> None:
    """Writes the file; AdapterFormatError for values that the type cannot hold."""
    if path.is_dir():
        raise ConfigError(f"expected a file name, got the folder {path}", field="outfile")
    if not path.parent.is_dir():
        raise ConfigError(f"no such folder: {path.parent}", field="outfile")
    try:
        handle, partial = tempfile.mkstemp(".part", f".{path.name[:100]}.", path.parent)
    except OSError as exc:
        raise ConfigError(f"cannot write {path}: {exc.strerror}", field="outfile") from exc
    os.close(handle)
    try:
        _write(plan, Path(partial), outtype, name, progress)
        # mkstemp makes files that only their owner reads.
        os.chmod(partial, 0o666 & ~_umask())
        os.replace(partial, path)
    except OSError as exc:
        raise ConfigError(f"cannot write {path}: {exc.strerror}", field="outfile") from exc
    finally:
        Path(partial).unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _write(plan: Plan, path: Path, outtype: OutType, name: str, progress: Progress | None) -> None:
    import gguf  # here, because importing it is slow

    tensors = {tensor.name: tensor for tensor in out_tensors(plan, outtype)}
    done, total = 0, sum(tensor.nbytes for tensor in tensors.values())
    writer = gguf.GGUFWriter(path, plan.base.info.arch)
    try:
        _metadata(writer, plan, name)
        for tensor in tensors.values():
            kind = gguf.GGMLQuantizationType(tensor.type)
            shape = tensor.shape
            if tensor.type == Q8_0:  # the writer takes the shape of the bytes
                shape = (*shape[:-1], shape[-1] // 32 * 34)
            dtype = np.dtype(np.uint8 if tensor.type in (Q8_0, BF16) else np.float32)
            if tensor.type == BF16:
                shape = (*shape[:-1], shape[-1] * 2)
            writer.add_tensor_info(tensor.name, shape, dtype, tensor.nbytes, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for target in plan.targets:
            for tensor_name, values in _arrays(plan, target):
                tensor = tensors[tensor_name]
                writer.write_tensor_data(_encoded(tensor_name, values, tensor.type))
                done += tensor.nbytes
                if progress is not None:
                    progress(done, total)
    finally:
        writer.close()


def _arrays(plan: Plan, target: PlannedTarget) -> Iterator[tuple[str, NDArray[np.float32]]]:
    if target.rank:
        a, b = pair_arrays(plan, target)
        yield f"{target.target}.lora_a", a
        yield f"{target.target}.lora_b", b
    if target.magnitude:
        yield f"{target.target}.lora_magnitude", magnitude(plan, target)
    if target.bias:
        yield f"{target.target}.lora_bias", bias(plan, target)
    if target.delta:
        yield f"{target.target}.lora_delta", delta(plan, target)


def _metadata(writer: Any, plan: Plan, name: str) -> None:
    writer.add_type("adapter")
    writer.add_name(name)
    base = plan.config.base_name
    if base and not looks_like_path(base):
        writer.add_base_model_count(1)
        writer.add_base_model_name(0, base.rsplit("/", 1)[-1])
        if base.count("/") == 1:
            writer.add_base_model_organization(0, base.split("/")[0])
    writer.add_string("adapter.type", "lora")
    writer.add_float32(ALPHA_KEY, plan.alpha)
    if plan.config.invocation_tokens:
        import gguf

        writer.add_key_value(
            INVOCATION_KEY,
            list(plan.config.invocation_tokens),
            gguf.GGUFValueType.ARRAY,
            sub_type=gguf.GGUFValueType.UINT32,
        )
    if plan.tied_output is not None:
        writer.add_bool(TIED_OUTPUT_KEY, plan.tied_output)
    writer.add_quantization_version(2)


def _type(outtype: OutType, shape: tuple[int, ...]) -> int:
    type_ = OUT_TYPES[outtype]
    return F16 if type_ == Q8_0 and shape[-1] % _Q8_0_VALUES else type_


def _encoded(name: str, values: NDArray[np.float32], type_: int) -> NDArray[Any]:
    """Values in the bytes of a type; AdapterFormatError where they become infinite."""
    import gguf

    with np.errstate(over="ignore"):
        encoded: NDArray[Any] = gguf.quantize(values, gguf.GGMLQuantizationType(type_))
    largest = float(np.abs(values).max(initial=0))
    limit = {F16: 65504.0, Q8_0: 65504.0 * 127}.get(type_, np.inf)
    if largest > limit:
        raise AdapterFormatError(
            f"{name}: the value {largest:g} leaves the range of the type",
            hint="convert with --outtype f32 or bf16",
        )
    return encoded
