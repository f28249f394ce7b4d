/* The product node of F16 weights for x86-64 with AVX512. */
#include "product_impl.h"
#ifdef LORAGRAPH_X86
#include "simd_avx512.h"

#include "rows.h"

#define F16_TOKENS 8 /* rows of x of a tile at most */
#define F16_SUMS 24  /* of a tile at most: with the weights and one x they fill the registers */

INLINE int next_tokens(int64_t n) { return (int)min_i64(F16_TOKENS, n); }

INLINE int tile_rows(int tokens) { return tokens == 4 ? 6 : tokens < 7 ? 4 : 3; }

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

#include "product_f16_body.h"

void loragraph_product_f16_avx512(const product_f16_node *node, int ith, int nth) { multiply_f16(node, ith, nth); }
#ifdef __clang__
#pragma clang attribute pop
#endif
#else
typedef int loragraph_no_f16_avx512; /* ISO C wants a declaration in every file */
#endif
