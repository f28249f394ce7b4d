/* Turning rows of weights; the instruction set is chosen in lowrank.c for all kernels. */
#include "rewrite_impl.h"

#include <string.h>

enum {
    CACHED = 1 << 15, /* values: 128 KB */
    SHARED = 24,      /* rows of a block, at least, where they are long: they share a read of the right factor */
    LARGEST = 1 << 18 /* values, of more than one row */
};

/* In the order of lowrank.c. */
static const rewrite_kernels *const sets[] = {
    &loragraph_rewrite_portable,
#ifdef LORAGRAPH_X86
    &loragraph_rewrite_avx2,
    &loragraph_rewrite_avx512,
#endif
#ifdef LORAGRAPH_NEON
    &loragraph_rewrite_neon,
#endif
};

int64_t loragraph_rewrite_rows(int64_t n_in) {
    int64_t n = CACHED / n_in / SHARED * SHARED; /* a multiple of every register tile's rows */
    if (n < SHARED)
        n = SHARED;
    if (n > LARGEST / n_in)
        n = LARGEST / n_in;
    return n > 1 ? n : 1;
}

/* Whether all of x[n] can be stored. The squares decide nearly always, in one fast pass. */
static int in_bounds(const rewrite_kernels *kernels, const float *x, int64_t n, float bound) {
    if ((double)kernels->squares(x, n) <= (double)bound * bound)
        return 1;
    for (int64_t i = 0; i < n; i++)
        if (!(x[i] >= -bound && x[i] <= bound)) /* NaN too */
            return 0;
    return 1;
}

int64_t loragraph_rewrite(const rewrite_format *format, const rewrite_change *change, int64_t n_rows,
                          const char *source, float *values, char *stored) {
    const rewrite_kernels *kernels = sets[loragraph_isa_active()];
    const int64_t n_in = format->n_in, block = loragraph_rewrite_rows(n_in);
    rewrite_change part = *change;
    for (int64_t row = 0; row < n_rows; row += block) {
        const int64_t n = n_rows - row < block ? n_rows - row : block;
        const char *from = source + row * format->source_row;
        if (format->to_float)
            format->to_float(from, values, n * n_in);
        else
            memcpy(values, from, (size_t)(n * n_in) * sizeof(float));
        part.left = change->rank ? change->left + row * change->rank : NULL;
        part.row_gain = change->row_gain ? change->row_gain + row : NULL;
        kernels->add_change(&part, n, n_in, values);
        if (!in_bounds(kernels, values, n * n_in, format->bound))
            return row;
        format->quantize(format->type, values, stored + row * format->stored_row, 0, n, n_in, format->weights);
    }
    return n_rows;
}
