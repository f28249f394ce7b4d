/* The inner loops of attention over one block of CELLS cells: loads, scores, softmax, weighted V.
 *
 * One simd_*.h is included before. Functions marked INLINE take types and tile sizes as constants.
 */
#ifndef LORAGRAPH_ATTENTION_BLOCKS_H
#define LORAGRAPH_ATTENTION_BLOCKS_H
#include "attention_impl.h"
#include "rows.h"
#include "simd_exp.h"

#include <math.h>

enum { CELL_VECTORS = 2 /* vectors of cells in a tile of scores */ };

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

/* Where a block's rows of one K/V head lie: rows[c] + offset; those of the block to come, or NULL, for prefetch. */
typedef struct {
    const char *const *rows;
    const char *const *next;
    int64_t offset;
} block_source;

/* K of a block as kt[n_embd][CELLS]. Absent cells are copies of the first: finite, and masked later. */
INLINE void transpose_block(const block_source *from, int64_t n_embd, float *kt, int type) {
    const int64_t n_bytes = row_bytes(n_embd, type);
    for (int c = 0; c < CELLS; c += VL) {
        const char *rows[VL];
        for (int i = 0; i < VL; i++) {
            rows[i] = from->rows[c + i] + from->offset;
            if (from->next)
                prefetch(from->next[c + i] + from->offset, n_bytes);
        }
        int64_t d = 0;
#ifdef TRANSPOSE_F16
        if (type == F16)
            for (; d + TRANSPOSE_F16 <= n_embd; d += TRANSPOSE_F16)
                transpose_f16(rows, d, kt + d * CELLS + c, CELLS);
#endif
        for (; d < n_embd; d += VL) {
            vf m[VL];
#pragma GCC unroll 16
            for (int i = 0; i < VL; i++)
                m[i] = row_load_any(rows[i], d, n_embd, type);
            v_transpose(m);
#pragma GCC unroll 16
            for (int i = 0; i < VL; i++)
                v_store(kt + (d + i) * CELLS + c, m[i]);
        }
    }
}

/* V of a block as F32 rows of stride padded(n_embd), zeros behind. */
INLINE void convert_block(const block_source *from, int n, int64_t n_embd, float *out, int type) {
    const int64_t stride = padded(n_embd), n_bytes = row_bytes(n_embd, type);
    for (int c = 0; c < n; c++) {
        const char *row = from->rows[c] + from->offset;
        int64_t d = 0;
        if (from->next)
            prefetch(from->next[c] + from->offset, n_bytes);
        for (; d + VL <= n_embd; d += VL)
            v_store(out + c * stride + d, row_load(row, d, type));
        for (; d < stride; d += VL)
            v_store(out + c * stride + d, row_load_tail(row, d, (int)(n_embd - d < 0 ? 0 : n_embd - d), type));
    }
}

static void load_k(const block_source *from, int64_t n_embd, float *kt, int type) {
    switch (type) {
    case F32: transpose_block(from, n_embd, kt, F32); break;
    case F16: transpose_block(from, n_embd, kt, F16); break;
    case BF16: transpose_block(from, n_embd, kt, BF16); break;
    case Q8_0: transpose_block(from, n_embd, kt, Q8_0); break;
    }
}

static void load_v(const block_source *from, int n, int64_t n_embd, float *out, int type) {
    switch (type) {
    case F32: convert_block(from, n, n_embd, out, F32); break;
    case F16: convert_block(from, n, n_embd, out, F16); break;
    case BF16: convert_block(from, n, n_embd, out, BF16); break;
    case Q8_0: convert_block(from, n, n_embd, out, Q8_0); break;
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

/* n is a constant in each call: the largest tiles that still fit go first. */
#define TILES(n, most, call)                                       \
    do {                                                           \
        int j = 0;                                                 \
        for (; (most) > 6 && j + (most) <= (n); j += (most))       \
            call(most);                                            \
        for (; (most) >= 6 && j + 6 <= (n); j += 6)                \
            call(6);                                               \
        for (; (most) >= 4 && j + 4 <= (n); j += 4)                \
            call(4);                                               \
        for (; (most) >= 3 && j + 3 <= (n); j += 3)                \
            call(3);                                               \
        for (; j + 2 <= (n); j += 2)                               \
            call(2);                                               \
        for (; j < (n); j++)                                       \
            call(1);                                               \
    } while (0)

static void scores(const float *q, int64_t q_stride, const float *kt, int64_t n_embd, float *s, int n) {
    for (int c = 0; c < CELLS; c += CELL_VECTORS * VL) {
#define SCORE(rows) score_tile(q + j * q_stride, q_stride, kt + c, n_embd, s + j * CELLS + c, (rows) < SCORE_ROWS ? (rows) : SCORE_ROWS)
        TILES(n, SCORE_ROWS, SCORE);
#undef SCORE
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

/* o[j] += sum over the cells [begin, end), in order, of p[j][c] v[c]: n queries, n_vectors vectors of a head from
 * value d on. V is read where it lies, or as F32 from scratch. */
INLINE void value_tile(const float *p, const block_source *from, int64_t d, int begin, int end, float *o,
                       int64_t stride, int n, int n_vectors, int type) {
    vf acc[VALUE_ROWS][VALUE_VECTORS];
    const int64_t n_bytes = row_bytes(n_vectors * VL, type), first = from->offset + row_bytes(d, type);
#pragma GCC unroll 6
    for (int j = 0; j < n; j++)
#pragma GCC unroll 4
        for (int i = 0; i < n_vectors; i++)
            acc[j][i] = v_load(o + j * stride + i * VL);
    for (int c = begin; c < end; c++) {
        const char *row = from->rows[c] + first;
        vf one[VALUE_VECTORS];
        if (from->next)
            prefetch(from->next[c] + first, n_bytes);
#pragma GCC unroll 4
        for (int i = 0; i < n_vectors; i++)
            one[i] = row_load(row, i * VL, type);
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

INLINE void value_columns(const float *p, const block_source *from, int begin, int end, float *o, int64_t stride,
                          int n, int type) {
    int64_t d = 0;
    for (; d + VALUE_VECTORS * VL <= stride; d += VALUE_VECTORS * VL)
        value_tile(p, from, d, begin, end, o + d, stride, n, VALUE_VECTORS, type);
    for (; d + VL <= stride; d += VL)
        value_tile(p, from, d, begin, end, o + d, stride, n, 1, type);
}

#define VALUE(rows)                                                                                          \
    value_columns(p + j * CELLS, from, begin, end, o + j * stride, stride, (rows) < VALUE_ROWS ? (rows) : VALUE_ROWS, \
                  TYPE)

static void values_f32(const float *p, const block_source *from, int begin, int end, float *o, int64_t stride, int n) {
#define TYPE F32
    TILES(n, VALUE_ROWS, VALUE);
#undef TYPE
}

static void values_f16(const float *p, const block_source *from, int begin, int end, float *o, int64_t stride, int n) {
#define TYPE F16
    TILES(n, VALUE_ROWS, VALUE);
#undef TYPE
}
#undef VALUE
#endif
