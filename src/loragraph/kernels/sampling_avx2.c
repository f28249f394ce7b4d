/* The passes over rows of logits for x86-64 with AVX2. */
#include "sampling_impl.h"
#ifdef LORAGRAPH_X86
#include "simd_avx2.h"

#include "sampling_body.h"

const sampling_kernels loragraph_sampling_avx2 = {maxima, weights, exact_weights, sum, split, moments, means};
#ifdef __clang__
#pragma clang attribute pop
#endif
#else
typedef int loragraph_no_sampling_avx2; /* ISO C wants a declaration in every file */
#endif
