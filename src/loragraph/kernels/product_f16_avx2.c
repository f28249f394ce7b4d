/* The product node of F16 weights for x86-64 with AVX2. */
#include "product_impl.h"
#ifdef LORAGRAPH_X86
#include "simd_avx2.h"

#include "rows.h"

#define F16_TOKENS 4 /* rows of x of a tile at most */
#define F16_SUMS 16  /* of which 12 are used: with what is held and what streams past they fill the registers */

/* One row alone leaves half of the instructions idle, so five are three and two. */
INLINE int next_tokens(int64_t n) { return n == 5 || n == 6 ? 3 : (int)min_i64(F16_TOKENS, n); }

INLINE int tile_rows(int tokens) { return tokens == 1 ? 8 : 12 / tokens; }

/* Eight vectors -> the sum of each: places 0 and 2, 1 and 3 of the halves, both; then the halves. */
INLINE void reduce_8(const vf *v, float *out) {
    vf two[4], four[2];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const vf even = _mm256_shuffle_ps(v[2 * i], v[2 * i + 1], 0x44);
        two[i] = v_add(even, _mm256_shuffle_ps(v[2 * i], v[2 * i + 1], 0xee));
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        const vf even = _mm256_shuffle_ps(two[2 * i], two[2 * i + 1], 0x88);
        four[i] = v_add(even, _mm256_shuffle_ps(two[2 * i], two[2 * i + 1], 0xdd));
    }
    const vf low = _mm256_permute2f128_ps(four[0], four[1], 0x20);
    v_store(out, v_add(low, _mm256_permute2f128_ps(four[0], four[1], 0x31)));
}

#include "product_f16_body.h"

void loragraph_product_f16_avx2(const product_f16_node *node, int ith, int nth) { multiply_f16(node, ith, nth); }
#ifdef __clang__
#pragma clang attribute pop
#endif
#else
typedef int loragraph_no_f16_avx2; /* ISO C wants a declaration in every file */
#endif
