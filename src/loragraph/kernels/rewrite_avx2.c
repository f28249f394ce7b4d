/* Changes of rows of weights for x86-64 with AVX2. */
#include "rewrite_impl.h"
#ifdef LORAGRAPH_X86
#include "simd_avx2.h"

#include "rewrite_body.h"

const rewrite_kernels loragraph_rewrite_avx2 = {add_change, squares};
#ifdef __clang__
#pragma clang attribute pop
#endif
#else
typedef int loragraph_no_rewrite_avx2; /* ISO C wants a declaration in every file */
#endif
