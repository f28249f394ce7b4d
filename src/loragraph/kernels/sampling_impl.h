/* What one instruction set provides to sampling.c. */
#ifndef LORAGRAPH_SAMPLING_IMPL_H
#define LORAGRAPH_SAMPLING_IMPL_H
#include "lowrank_impl.h"
#include "sampling.h"

enum {
    SCAN_BLOCK = 64,   /* values under one maximum */
    DRAW_BLOCK = 1024, /* values under one sum: what is walked through once the sum is known to hold the choice */
};

/* How far a sum of weights by vectors may lie from one by expf: 1.2e-7 between v_exp and expf, 1.2e-7 of two F32
 * sums. */
#define DRAW_ERROR 2.6e-7

/* Beyond the errors of masses. */
#define CERTAIN (1 + 1e-5)

/* How far the sum of up to 2^22 weights depends on their order, in F64. */
#define ORDER_ERROR 1e-9

static inline int inside(const row_window *w, float l) { return l > w->lo && l < w->hi; }

/* expf's argument: libllama's temperature, then its softmax. Where max / T overflows, the difference is divided. */
static inline float exponent_of(const row_window *w, float top, float l) {
    return top - top != 0.0f ? (l - w->max) / w->temperature : l / w->temperature - top;
}

typedef struct {
    /* Maxima of whole blocks; 0 where a value is not finite. */
    int (*maxima)(const float *x, int64_t n_blocks, float *maxima);
    /* weights[n], n a multiple of SCAN_BLOCK; 0 outside of the window. */
    void (*weights)(const row_window *window, const float *x, int64_t n, float *weights);
    /* The same by expf, to the bit. */
    void (*exact_weights)(const row_window *window, const float *x, int64_t n, float *weights);
    /* The sum of `weights`, within DRAW_ERROR. */
    double (*sum)(const row_window *window, const float *x, int64_t n);
    /* The sums at temperature 1 of the window and of all above outer_lo, added to out[2]. */
    void (*split)(const row_window *window, float outer_lo, const float *x, int64_t n, double *out);
    /* n, sum, sum of squares of l - max, added to out[3]. */
    void (*moments)(const row_window *window, const float *x, int64_t n, double *out);
    /* Sums of weight and weight * (l - max) at temperature 1, added to out[2]. */
    void (*means)(const row_window *window, const float *x, int64_t n, double *out);
} sampling_kernels;

/* Those of the instruction set in use. */
const sampling_kernels *loragraph_sampling_active(void);

extern const sampling_kernels loragraph_sampling_portable;
#ifdef LORAGRAPH_X86
extern const sampling_kernels loragraph_sampling_avx2;
extern const sampling_kernels loragraph_sampling_avx512;
#endif
#ifdef LORAGRAPH_NEON
extern const sampling_kernels loragraph_sampling_neon;
#endif
#endif
