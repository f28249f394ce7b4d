"""Compiles the native kernels into `loragraph.kernels._kernels` (cffi, API mode).

setup.py names `ffibuilder` below. The instruction sets are chosen by pragmas inside the C files
and at run time, never by compiler flags, so one build serves every CPU of an architecture.
"""

from pathlib import Path

from cffi import FFI

FOLDER = Path(__file__).resolve().parent
SOURCES = (
    "lowrank.c",
    "lowrank_route.c",
    "lowrank_portable.c",
    "lowrank_avx2.c",
    "lowrank_avx512.c",
    "lowrank_neon.c",
    "attention.c",
    "attention_plan.c",
    "attention_portable.c",
    "attention_avx2.c",
    "attention_avx512.c",
    "attention_neon.c",
    "product.c",
    "product_vnni.c",
    "product_avx2.c",
    "product_f16_avx512.c",
    "product_f16_avx2.c",
    "sampling.c",
    "sampling_calls.c",
    "sampling_random.c",
    "sampling_scan.c",
    "sampling_portable.c",
    "sampling_avx2.c",
    "sampling_avx512.c",
    "sampling_neon.c",
    "strings.c",
    "rewrite.c",
    "rewrite_portable.c",
    "rewrite_avx2.c",
    "rewrite_avx512.c",
    "rewrite_neon.c",
)
HEADERS = ("lowrank.h", "attention.h", "product.h", "sampling.h", "strings.h", "rewrite.h")


def declarations(header: Path) -> str:
    """The header without preprocessor lines, which cffi does not read."""
    lines = header.read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if not line.startswith("#"))


ffibuilder = FFI()
for name in HEADERS:
    ffibuilder.cdef(declarations(FOLDER / name))
ffibuilder.set_source(
    "loragraph.kernels._kernels",
    "\n".join(f'#include "{name}"' for name in HEADERS),
    # Relative, as setuptools demands; it runs in the folder of setup.py.
    sources=[f"src/loragraph/kernels/{name}" for name in SOURCES],
    include_dirs=["src/loragraph/kernels"],
    depends=[f"src/loragraph/kernels/{path.name}" for path in sorted(FOLDER.glob("*.h"))],
    # The portable kernels must not be contracted to fma in one tile shape and not in another.
    extra_compile_args=["-O3", "-std=gnu11", "-ffp-contract=off"],
)
