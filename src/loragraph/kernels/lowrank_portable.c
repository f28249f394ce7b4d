/* The low-rank kernels without any instruction set beyond the compiler's baseline. */
#include "simd_portable.h"

#include "lowrank_body.h"

const lowrank_kernels loragraph_lowrank_portable = {"portable", shrink, expand, gather};
