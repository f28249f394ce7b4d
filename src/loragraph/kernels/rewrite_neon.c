/* Changes of rows of weights for 64-bit Arm. */
#include "rewrite_impl.h"
#ifdef LORAGRAPH_NEON
#include "simd_neon.h"

#include "rewrite_body.h"

const rewrite_kernels loragraph_rewrite_neon = {add_change, squares};
#else
typedef int loragraph_no_rewrite_neon; /* ISO C wants a declaration in every file */
#endif
