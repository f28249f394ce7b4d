/* The low-rank kernels for 64-bit Arm. */
#include "lowrank_impl.h"
#ifdef LORAGRAPH_NEON
#include "simd_neon.h"

#include "lowrank_expand.h"
#include "lowrank_shrink.h"

const lowrank_kernels loragraph_lowrank_neon = {"neon", shrink, expand, gather};
#else
typedef int loragraph_no_neon; /* ISO C wants a declaration in every file */
#endif
