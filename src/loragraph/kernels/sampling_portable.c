/* The passes over rows of logits without any instruction set beyond the compiler's baseline. */
#include "simd_portable.h"

#include "sampling_body.h"

const sampling_kernels loragraph_sampling_portable = {maxima, weights, exact_weights, sum, split, moments, means};
