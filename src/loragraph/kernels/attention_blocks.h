/* The inner loops of attention over one block of CELLS cells: loads, scores, softmax, weighted V.
 *
 * One simd_*.h is included before. Functions marked INLINE take types and tile sizes as constants.
 */
#ifndef LORAGRAPH_ATTENTION_BLOCKS_H
#define LORAGRAPH_ATTENTION_BLOCKS_H
#include "attention_impl.h"
#include "rows.h"

#include <math.h>

enum { CELL_VECTORS = 2 /* vectors of cells in a tile of scores */ };

typedef int32_t vi __attribute__((vector_size(VL * 4)));

/* exp(x) for x <= 0 within 2e-7 of it; what lies below exp(-80) is that. x = n ln 2 + r, Cephes' polynomial for r. */
INLINE vf v_exp(vf x) {
    const vf magic = v_set1(0x1.8p23f); /* adding it rounds to a whole number, which then stands in the low bits */
    x = v_max(v_set1(-80.0f), x); /* in this order NaN stays NaN */
    vf n = v_fma(x, v_set1(1.44269504f), magic);
    const vi exponent = (vi)n << 23;
    n = v_add(n, v_set1(-0x1.8p23f));
    vf r = v_fma(n, v_set1(-0.693359375f), x);
    r = v_fma(n, v_set1(2.12194440e-4f), r);
    vf p = v_fma(v_set1(1.9875691500e-4f), r, v_set1(1.3981999507e-3f));
    p = v_fma(p, r, v_set1(8.3334519073e-3f));
    p = v_fma(p, r, v_set1(4.1665795894e-2f));
    p = v_fma(p, r, v_set1(1.6666665459e-1f));
    p = v_fma(p, r, v_set1(5.0000001201e-1f));
    p = v_add(v_fma(p, v_mul(r, r), r), v_set1(1.0f));
    return (vf)((vi)p + exponent);
}

/* cap * tanh(x), from exp(-2 |x|) so that it stays in range. */
INLINE vf v_softcap(vf x, float cap) {
    const vi sign_bit = (vi)v_set1(-0.0f), sign = (vi)x & sign_bit;
    const vf e = v_exp(v_mul((vf)((vi)x & ~sign_bit), v_set1(-2.0f)));
    const vf tanh_x = v_add(v_set1(1.0f), v_mul(e, v_set1(-1.0f))) / v_add(v_set1(1.0f), e);
    return v_mul((vf)((vi)tanh_x | sign), v_set1(cap));
}

INLINE vf row_load_any(const char *row, int64_t k, int64_t n, int type) {
    return k + VL <= n ? row_load(row, k, type) : row_load_tail(row, k, (int)(n - k), type);
}

/* K of a block as kt[n_embd][CELLS]. Absent cells are copies of the first: finite, and masked later. */
INLINE void transpose_block(const char *const *rows, const char *const *next, int64_t n_embd, float *kt, int type) {
    const int64_t n_bytes = row_bytes(n_embd, type);
    for (int c = 0; c < CELLS; c += VL) {
        if (next)
            for (int i = 0; i < VL; i++)
                prefetch(next[c + i], n_bytes);
        for (int64_t d = 0; d < n_embd; d += VL) {
            vf m[VL];
#pragma GCC unroll 16
            for (int i = 0; i < VL; i++)
                m[i] = row_load_any(rows[c + i], d, n_embd, type);
            v_transpose(m);
#pragma GCC unroll 16
            for (int i = 0; i < VL; i++)
                v_store(kt + (d + i) * CELLS + c, m[i]);
        }
    }
}

/* V of a block as F32 rows of stride padded(n_embd), zeros behind. */
INLINE void convert_block(const char *const *rows, const char *const *next, int n, int64_t n_embd, float *out,
                          int type) {
    const int64_t stride = padded(n_embd), n_bytes = row_bytes(n_embd, type);
    for (int c = 0; c < n; c++) {
        if (next)
            prefetch(next[c], n_bytes);
        for (int64_t d = 0; d < n_embd; d += VL)
            v_store(out + c * stride + d, row_load_any(rows[c], d, n_embd, type));
    }
}

static void load_k(const char *const *rows, const char *const *next, int64_t n_embd, float *kt, int type) {
    switch (type) {
    case F32: transpose_block(rows, next, n_embd, kt, F32); break;
    case F16: transpose_block(rows, next, n_embd, kt, F16); break;
    case BF16: transpose_block(rows, next, n_embd, kt, BF16); break;
    case Q8_0: transpose_block(rows, next, n_embd, kt, Q8_0); break;
    }
}

static void load_v(const char *const *rows, const char *const *next, int n, int64_t n_embd, float *out, int type) {
    switch (type) {
    case F32: convert_block(rows, next, n, n_embd, out, F32); break;
    case F16: convert_block(rows, next, n, n_embd, out, F16); break;
    case BF16: convert_block(rows, next, n, n_embd, out, BF16); break;
    case Q8_0: convert_block(rows, next, n, n_embd, out, Q8_0); break;
    }
}

/* s[j][c] = q[j] . k[c] for n queries of a tile and CELL_VECTORS vectors of cells, summed over the head in order. */
INLINE void score_tile(const float *q, int64_t q_stride, const float *kt, int64_t n_embd, float *s, int n) {
    vf acc[SCORE_ROWS][CELL_VECTORS];
    for (int j = 0; j < n; j++)
        for (int i = 0; i < CELL_VECTORS; i++)
            acc[j][i] = v_set1(0.0f);
    for (int64_t d = 0; d < n_embd; d++) {
        vf k[CELL_VECTORS];
#pragma GCC unroll 2
        for (int i = 0; i < CELL_VECTORS; i++)
            k[i] = v_load(kt + d * CELLS + i * VL);
#pragma GCC unroll 12
        for (int j = 0; j < n; j++) {
            const vf one = v_set1(q[j * q_stride + d]);
#pragma GCC unroll 2
            for (int i = 0; i < CELL_VECTORS; i++)
                acc[j][i] = v_fma(one, k[i], acc[j][i]);
        }
    }
#pragma GCC unroll 12
    for (int j = 0; j < n; j++)
#pragma GCC unroll 2
        for (int i = 0; i < CELL_VECTORS; i++)
            v_store(s + j * CELLS + i * VL, acc[j][i]);
}

static void scores(const float *q, int64_t q_stride, const float *kt, int64_t n_embd, float *s, int n) {
    for (int c = 0; c < CELLS; c += CELL_VECTORS * VL) {
        int j = 0;
        for (; j + SCORE_ROWS <= n; j += SCORE_ROWS)
            score_tile(q + j * q_stride, q_stride, kt + c, n_embd, s + j * CELLS + c, SCORE_ROWS);
        if (SCORE_ROWS > 4)
            for (; j + 4 <= n; j += 4)
                score_tile(q + j * q_stride, q_stride, kt + c, n_embd, s + j * CELLS + c, 4);
        if (SCORE_ROWS > 3)
            for (; j + 3 <= n; j += 3)
                score_tile(q + j * q_stride, q_stride, kt + c, n_embd, s + j * CELLS + c, 3);
        for (; j + 2 <= n; j += 2)
            score_tile(q + j * q_stride, q_stride, kt + c, n_embd, s + j * CELLS + c, 2);
        for (; j < n; j++)
            score_tile(q + j * q_stride, q_stride, kt + c, n_embd, s + j * CELLS + c, 1);
    }
}

/* Online softmax of one query over a block: s becomes the weights, o and sum are brought to the new maximum. */
INLINE void softmax_block(float *s, float *max, float *sum, float *o, int64_t n_embd) {
    enum { N = CELLS / VL };
    vf x[N], top = v_set1(-INFINITY);
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) {
        x[i] = v_load(s + i * VL);
        top = v_max(top, x[i]);
    }
    const float old = *max, block_top = v_top(top);
    vf total = v_load(sum);
    if (block_top > old) {
        const vf factor = v_exp(v_set1(old - block_top));
        *max = block_top;
        total = v_mul(total, factor);
        for (int64_t d = 0; d < n_embd; d += VL)
            v_store(o + d, v_mul(v_load(o + d), factor));
    }
    const vf shift = v_set1(-*max);
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) {
        x[i] = v_exp(v_add(x[i], shift));
        total = v_add(total, x[i]);
        v_store(s + i * VL, x[i]);
    }
    v_store(sum, total);
}

/* o[j] += sum over the cells [begin, end), in order, of p[j][c] v[c]: n queries, n_vectors vectors of a head. */
INLINE void value_tile(const float *p, const float *v, int64_t stride, int begin, int end, float *o, int n,
                       int n_vectors) {
    vf acc[VALUE_ROWS][VALUE_VECTORS];
#pragma GCC unroll 6
    for (int j = 0; j < n; j++)
#pragma GCC unroll 4
        for (int i = 0; i < n_vectors; i++)
            acc[j][i] = v_load(o + j * stride + i * VL);
    for (int c = begin; c < end; c++) {
        vf one[VALUE_VECTORS];
#pragma GCC unroll 4
        for (int i = 0; i < n_vectors; i++)
            one[i] = v_load(v + c * stride + i * VL);
#pragma GCC unroll 6
        for (int j = 0; j < n; j++) {
            const vf weight = v_set1(p[j * CELLS + c]);
#pragma GCC unroll 4
            for (int i = 0; i < n_vectors; i++)
                acc[j][i] = v_fma(weight, one[i], acc[j][i]);
        }
    }
#pragma GCC unroll 6
    for (int j = 0; j < n; j++)
#pragma GCC unroll 4
        for (int i = 0; i < n_vectors; i++)
            v_store(o + j * stride + i * VL, acc[j][i]);
}

INLINE void value_columns(const float *p, const float *v, int64_t stride, int begin, int end, float *o, int n) {
    int64_t d = 0;
    for (; d + VALUE_VECTORS * VL <= stride; d += VALUE_VECTORS * VL)
        value_tile(p, v + d, stride, begin, end, o + d, n, VALUE_VECTORS);
    for (; d + VL <= stride; d += VL)
        value_tile(p, v + d, stride, begin, end, o + d, n, 1);
}

static void values(const float *p, const float *v, int64_t stride, int begin, int end, float *o, int n) {
    int j = 0;
    for (; j + VALUE_ROWS <= n; j += VALUE_ROWS)
        value_columns(p + j * CELLS, v, stride, begin, end, o + j * stride, VALUE_ROWS);
    if (VALUE_ROWS > 3)
        for (; j + 3 <= n; j += 3)
            value_columns(p + j * CELLS, v, stride, begin, end, o + j * stride, 3);
    for (; j < n; j++)
        value_columns(p + j * CELLS, v, stride, begin, end, o + j * stride, 1);
}
#endif
