/* The passes over rows of logits for 64-bit Arm. */
#include "sampling_impl.h"
#ifdef LORAGRAPH_NEON
#include "simd_neon.h"

#include "sampling_body.h"

const sampling_kernels loragraph_sampling_neon = {maxima, weights, exact_weights, sum, split, moments, means};
#else
typedef int loragraph_no_sampling_neon; /* ISO C wants a declaration in every file */
#endif
