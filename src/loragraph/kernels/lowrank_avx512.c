/* The low-rank kernels for x86-64 with AVX512. */
#include "lowrank_impl.h"
#ifdef LORAGRAPH_X86
#include "simd_avx512.h"

#include "lowrank_expand.h"
#include "lowrank_shrink.h"

const lowrank_kernels loragraph_lowrank_avx512 = {"avx512", shrink, expand, gather};
#ifdef __clang__
#pragma clang attribute pop
#endif
#else
typedef int loragraph_no_avx512; /* ISO C wants a declaration in every file */
#endif
