/* The low-rank kernels without any instruction set beyond the compiler's baseline. */
#include "simd_portable.h"

#include "lowrank_expand.h"
#include "lowrank_shrink.h"

const lowrank_kernels loragraph_lowrank_portable = {"portable", shrink, expand, gather};
