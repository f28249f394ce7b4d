/* What one instruction set provides to rewrite.c. */
#ifndef LORAGRAPH_REWRITE_IMPL_H
#define LORAGRAPH_REWRITE_IMPL_H
#include "lowrank_impl.h"
#include "rewrite.h"

typedef struct {
    /* Changes values[n_rows][n_in] in place. A row's bits do not depend on the rows beside it. */
    void (*add_change)(const rewrite_change *change, int64_t n_rows, int64_t n_in, float *values);
    /* The sum of the squares of x[n]: NaN or infinite if one of them is. */
    float (*squares)(const float *x, int64_t n);
} rewrite_kernels;

extern const rewrite_kernels loragraph_rewrite_portable;
#ifdef LORAGRAPH_X86
extern const rewrite_kernels loragraph_rewrite_avx2;
extern const rewrite_kernels loragraph_rewrite_avx512;
#endif
#ifdef LORAGRAPH_NEON
extern const rewrite_kernels loragraph_rewrite_neon;
#endif
#endif
