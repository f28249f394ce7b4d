/* Products of F16 weights for AVX-512: y = w x in F32, without rounding x.
 *
 * A tile is up to eight rows of x with some rows of w: 24 sums at most, each a vector over the positions of n_in that
 * are equal mod 16. Weights become F32 as they are loaded, on pipes that the multiplications leave free, so nothing is
 * unpacked to memory. A sum's order is the same in every tile: one fma for each 16 positions, then reduce_8's tree.
 */
#include "product_impl.h"
#ifdef LORAGRAPH_X86
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif

#define INLINE static inline __attribute__((always_inline))

enum {
    LANES = 16,
    TOKENS = 8,          /* rows of x of a tile */
    SUMS = 24,           /* of a tile at most: with the weights and one x they fill the registers */
    STRIP_BYTES = 65536, /* of w that meet all rows of x, one tile after another, from the second cache */
};

INLINE int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }

/* Eight vectors -> the sum of each: quarters 0 and 2, 1 and 3, both; the same within what is left. */
INLINE void reduce_8(const __m512 *v, float *out) {
    __m512 two[4], four[2];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        two[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x44),
                               _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xee));
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
        four[i] = _mm512_add_ps(_mm512_shuffle_f32x4(two[2 * i], two[2 * i + 1], 0x88),
                                _mm512_shuffle_f32x4(two[2 * i], two[2 * i + 1], 0xdd));
    const __m512d a = _mm512_castps_pd(four[0]), b = _mm512_castps_pd(four[1]);
    const __m512 pairs = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                                       _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    const __m512 sums = _mm512_add_ps(pairs, _mm512_movehdup_ps(pairs));
    /* Lane 4i holds vector i, lane 4i + 2 vector i + 4. */
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 0, 0, 0, 0, 0, 0, 0);
    _mm256_storeu_ps(out, _mm512_castps512_ps256(_mm512_permutexvar_ps(order, sums)));
}

/* `rows` rows of w with `tokens` rows of x. */
INLINE void multiply_tile(const product_f16_node *node, int64_t row, int64_t token, int rows, int tokens) {
    const int64_t n_in = node->n_in, x_stride = node->x_stride;
    const uint16_t *w = node->w + row * n_in;
    const float *x = node->x + token * x_stride;
    const __mmask16 tail = (__mmask16)((1u << (n_in % LANES)) - 1);
    __m512 acc[SUMS], v[SUMS];
#pragma GCC unroll 24
    for (int i = 0; i < SUMS; i++)
        acc[i] = _mm512_setzero_ps();
    int64_t k = 0;
    for (; k + LANES <= n_in; k += LANES) {
        /* The next tile's weights, in the order in which they lie: the processor goes on from there. Never faults. */
#pragma GCC unroll 8
        for (int i = 0; i < rows; i += 2)
            _mm_prefetch((const char *)(w + rows * (n_in + k) + i * LANES), _MM_HINT_T0);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            v[r] = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(w + r * n_in + k)));
        }
#pragma GCC unroll 8
        for (int t = 0; t < tokens; t++) {
            const __m512 value = _mm512_loadu_ps(x + t * x_stride + k);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
                acc[r * tokens + t] = _mm512_fmadd_ps(v[r], value, acc[r * tokens + t]);
        }
    }
    if (tail) {
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
            v[r] = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(tail, w + r * n_in + k));
#pragma GCC unroll 8
        for (int t = 0; t < tokens; t++) {
            const __m512 value = _mm512_maskz_loadu_ps(tail, x + t * x_stride + k);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
                acc[r * tokens + t] = _mm512_fmadd_ps(v[r], value, acc[r * tokens + t]);
        }
    }
    float sums[SUMS];
#pragma GCC unroll 3
    for (int i = 0; i < rows * tokens; i += 8)
        reduce_8(acc + i, sums + i);
    float *y = node->y + token * node->y_stride + row;
#pragma GCC unroll 8
    for (int t = 0; t < tokens; t++)
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
            y[t * node->y_stride + r] = sums[r * tokens + t];
}

/* All rows of a strip with one tile's rows of x. */
INLINE void multiply_strip(const product_f16_node *node, int64_t begin, int64_t end, int64_t token, int tokens,
                           int rows) {
    int64_t row = begin;
    for (; row + rows <= end; row += rows)
        multiply_tile(node, row, token, rows, tokens);
    for (; row < end; row++)
        multiply_tile(node, row, token, 1, tokens);
}

void loragraph_product_f16_avx512(const product_f16_node *node, int ith, int nth) {
    const int64_t last = node->n_out * (ith + 1) / nth;
    /* 24 rows at least: a multiple of every tile's. */
    const int64_t strip = (STRIP_BYTES / (2 * node->n_in) / 24 + 1) * 24;
    for (int64_t begin = node->n_out * ith / nth; begin < last; begin += strip) {
        const int64_t end = min_i64(begin + strip, last);
        for (int64_t token = 0; token < node->n_rows; token += TOKENS)
            switch (min_i64(TOKENS, node->n_rows - token)) {
            case 1: multiply_strip(node, begin, end, token, 1, 4); break;
            case 2: multiply_strip(node, begin, end, token, 2, 4); break;
            case 3: multiply_strip(node, begin, end, token, 3, 4); break;
            case 4: multiply_strip(node, begin, end, token, 4, 6); break;
            case 5: multiply_strip(node, begin, end, token, 5, 4); break;
            case 6: multiply_strip(node, begin, end, token, 6, 4); break;
            case 7: multiply_strip(node, begin, end, token, 7, 3); break;
            default: multiply_strip(node, begin, end, token, 8, 3); break;
            }
    }
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#else
typedef int loragraph_no_f16; /* ISO C wants a declaration in every file */
#endif
