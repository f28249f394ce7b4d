/* Attention over cells for x86-64 with AVX2. */
#include "attention_impl.h"
#ifdef LORAGRAPH_X86
#include "simd_avx2.h"

#include "attention_body.h"

const attention_kernels loragraph_attention_avx2 = {attend, reduce};
#ifdef __clang__
#pragma clang attribute pop
#endif
#else
typedef int loragraph_no_attention_avx2; /* ISO C wants a declaration in every file */
#endif
