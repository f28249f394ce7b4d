/* The low-rank kernels for x86-64 with AVX512. */
#include "lowrank_impl.h"
#ifdef LORAGRAPH_X86
#include "simd_avx512.h"

#include "lowrank_body.h"

const lowrank_kernels loragraph_lowrank_avx512 = {"avx512", shrink, expand, gather};
#else
typedef int loragraph_no_avx512; /* ISO C wants a declaration in every file */
#endif
