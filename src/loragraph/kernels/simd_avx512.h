/* Vector primitives for AVX-512 (F, BW, DQ, VL); the contract stands in simd_portable.h. */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif

#define VL 16
#define SHRINK_ROWS 4
#define EXPAND_ROWS 4
#define SCORE_ROWS 12 /* x 2 vectors of cells: 24 of 32 registers */
#define VALUE_ROWS 6  /* x 4 vectors of a head */
#define VALUE_VECTORS 4
#define INLINE static inline __attribute__((always_inline))

typedef __m512 vf;

INLINE float half_to_float(uint16_t half) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half))); }
INLINE vf v_set1(float s) { return _mm512_set1_ps(s); }
INLINE vf v_load(const void *p) { return _mm512_loadu_ps(p); }
INLINE void v_store(float *p, vf v) { _mm512_storeu_ps(p, v); }
INLINE vf v_load_f16(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256(p)); }
INLINE vf v_load_bf16(const void *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p)), 16));
}
INLINE vf v_load_i8(const void *p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p))); }
INLINE vf v_add(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf v_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf v_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE float v_sum(vf v) {
    __m256 w = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(w), _mm256_extractf128_ps(w, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
INLINE vf v_max(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE float v_top(vf v) {
    __m256 w = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(w), _mm256_extractf128_ps(w, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
typedef __m512d vd;
INLINE vd v_wide_fma(vd a, vd b, vd c) { return _mm512_fmadd_pd(a, b, c); }
INLINE vd v_low(vf v) { return _mm512_cvtps_pd(_mm512_castps512_ps256(v)); }
INLINE vd v_high(vf v) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1)); }
INLINE vf v_narrow(vd low, vd high) {
    const __m512 half = _mm512_castps256_ps512(_mm512_cvtpd_ps(low));
    return _mm512_insertf32x8(half, _mm512_cvtpd_ps(high), 1);
}
INLINE vf v_between(vf value, vf x, vf lo, vf hi) {
    const __mmask16 above = _mm512_cmp_ps_mask(x, lo, _CMP_GT_OQ);
    return _mm512_maskz_mov_ps(_mm512_mask_cmp_ps_mask(above, x, hi, _CMP_LT_OQ), value);
}
INLINE void v_transpose(vf m[VL]) {
    vf t[VL], u[VL];
#pragma GCC unroll 16
    for (int i = 0; i < VL; i += 2) {
        t[i] = _mm512_unpacklo_ps(m[i], m[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(m[i], m[i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < VL; i += 4)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            u[i + 2 * j] = _mm512_shuffle_ps(t[i + j], t[i + j + 2], 0x44);
            u[i + 2 * j + 1] = _mm512_shuffle_ps(t[i + j], t[i + j + 2], 0xee);
        }
    /* u[4 g + i] holds, in lane l, column 4 l + i of rows 4 g ... 4 g + 3. */
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        vf a = _mm512_shuffle_f32x4(u[i], u[i + 4], 0x88), b = _mm512_shuffle_f32x4(u[i + 8], u[i + 12], 0x88);
        vf c = _mm512_shuffle_f32x4(u[i], u[i + 4], 0xdd), d = _mm512_shuffle_f32x4(u[i + 8], u[i + 12], 0xdd);
        m[i] = _mm512_shuffle_f32x4(a, b, 0x88);
        m[i + 8] = _mm512_shuffle_f32x4(a, b, 0xdd);
        m[i + 4] = _mm512_shuffle_f32x4(c, d, 0x88);
        m[i + 12] = _mm512_shuffle_f32x4(c, d, 0xdd);
    }
}

/* 32 halves from k on of each of 16 rows, as 32 rows of 16 floats: half the shuffles of transposing floats. */
#define TRANSPOSE_F16 32
INLINE void transpose_f16(const char *const *rows, int64_t k, float *out, int64_t stride) {
    const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), high = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    __m512i t[2][8]; /* t[g][i] holds, in lane l, value 8 l + i of rows 8 g ... 8 g + 7 */
#pragma GCC unroll 2
    for (int g = 0; g < 2; g++) {
        __m512i r[8], a[8], b[8];
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++)
            r[i] = _mm512_loadu_si512(rows[8 * g + i] + k * 2);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            a[i] = _mm512_unpacklo_epi16(r[2 * i], r[2 * i + 1]);
            a[i + 4] = _mm512_unpackhi_epi16(r[2 * i], r[2 * i + 1]);
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
            b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
        }
        /* b: values 0 1 | 2 3 of rows 0-3, the same of rows 4-7, then 4 5 | 6 7. */
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const int from = i / 2 * 4 + i % 2;
            t[g][2 * i] = _mm512_unpacklo_epi64(b[from], b[from + 2]);
            t[g][2 * i + 1] = _mm512_unpackhi_epi64(b[from], b[from + 2]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        const __m512i x = _mm512_permutex2var_epi64(t[0][i], low, t[1][i]);
        const __m512i y = _mm512_permutex2var_epi64(t[0][i], high, t[1][i]);
        v_store(out + i * stride, _mm512_cvtph_ps(_mm512_castsi512_si256(x)));
        v_store(out + (8 + i) * stride, _mm512_cvtph_ps(_mm512_extracti64x4_epi64(x, 1)));
        v_store(out + (16 + i) * stride, _mm512_cvtph_ps(_mm512_castsi512_si256(y)));
        v_store(out + (24 + i) * stride, _mm512_cvtph_ps(_mm512_extracti64x4_epi64(y, 1)));
    }
}
