/* Changes of rows of weights without any instruction set beyond the compiler's baseline. */
#include "rewrite_impl.h"
#include "simd_portable.h"

#include "rewrite_body.h"

const rewrite_kernels loragraph_rewrite_portable = {add_change, squares};
