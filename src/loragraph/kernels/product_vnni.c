/* The product nodes for AVX512-VNNI: 64 products of an unsigned and a signed byte an instruction.
 *
 * Weights become unsigned bytes w + offset; what the offset adds, offset * sum(x), is taken off by starting the sum at
 * its negative. Sixteen columns are unpacked at a time, four bytes of each to a vector, and used for all rows of a
 * block of rows: so a column's sum stays in its lane, and a row's bytes are broadcast from memory. Q4_1 is AVX2's.
 */
#include "product_impl.h"
#ifdef LORAGRAPH_X86
#include <immintrin.h>
#include <string.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")
#endif

#define INLINE static inline __attribute__((always_inline))

enum {
    COLUMNS = 16,    /* of a tile of w: the lanes of a vector */
    GROUPS = QK / 4, /* vectors of a tile's block */
    K_BLOCKS = 32,   /* blocks unpacked at a time: they and the rows they meet fit the first cache, nearly */
    ROW_BLOCK = 128, /* rows that use what was unpacked */
};

INLINE int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE int value_bytes(int layout) { return (void)layout, 1; }

/* ---- x ---- */

INLINE void quantize_block(const float *x, char *bytes, float *d, int32_t *negated_sum, int layout) {
    (void)layout;
    const __m512 v0 = _mm512_loadu_ps(x), v1 = _mm512_loadu_ps(x + 16);
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    /* As integers, so that NaN is the largest and makes d, and with it y, NaN. */
    const __m512i top = _mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(v0), magnitude),
                                         _mm512_and_si512(_mm512_castps_si512(v1), magnitude));
    const uint32_t bits = _mm512_reduce_max_epu32(top);
    float max;
    memcpy(&max, &bits, sizeof max);
    const __m512 inverse = _mm512_set1_ps(max != 0.0f ? 127.0f / max : 0.0f);
    const __m128i q0 = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(v0, inverse)));
    const __m128i q1 = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(v1, inverse)));
    _mm_storeu_si128((__m128i *)bytes, q0);
    _mm_storeu_si128((__m128i *)(bytes + 16), q1);
    *d = _cvtsh_ss(_cvtss_sh(max / 127.0f, _MM_FROUND_TO_NEAREST_INT));
    *negated_sum = -_mm512_reduce_add_epi32(_mm512_add_epi32(_mm512_cvtepi8_epi32(q0), _mm512_cvtepi8_epi32(q1)));
}

/* ---- w ---- */

typedef struct {
    __m512i bytes[K_BLOCKS][GROUPS]; /* lane c: bytes 4g to 4g + 3 of column c, plus the layout's offset */
    __m512 scales[K_BLOCKS];
} unpacked;

INLINE __m512 load_halves(const void *low, const void *high) {
    const __m128i l = _mm_loadu_si128(low), h = _mm_loadu_si128(high);
    return _mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(l), h, 1));
}

/* Eight bytes of eight and eight columns -> the first four of all, the last four of all. */
INLINE void split_octets(__m512i low, __m512i high, __m512i out[2]) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    out[0] = _mm512_permutex2var_epi32(low, even, high);
    out[1] = _mm512_permutex2var_epi32(low, _mm512_add_epi32(even, _mm512_set1_epi32(1)), high);
}

enum { X8_COLUMNS = 8, X8_BYTES = 16 + 128 }; /* of a block: 8 F16 d, then bytes 0 to 7 of 8 columns, then 8 to 15 */

/* Byte i of a column holds value i in its low and value i + 16 in its high bits, as two's complement. */
static void unpack_q4_0x8(const char *w, int64_t n_blocks, int64_t tile, int64_t begin, int64_t n, unpacked *out) {
    const __m512i flip = _mm512_set1_epi8((char)0x88), low_bits = _mm512_set1_epi8(0x0f);
    const char *p0 = w + (2 * tile * n_blocks + begin) * X8_BYTES, *p1 = p0 + n_blocks * X8_BYTES;
    for (int64_t b = 0; b < n; b++, p0 += X8_BYTES, p1 += X8_BYTES) {
        out->scales[b] = load_halves(p0, p1);
        for (int half = 0; half < 2; half++) {
            const __m512i v0 = _mm512_xor_si512(_mm512_loadu_si512(p0 + 16 + 64 * half), flip);
            const __m512i v1 = _mm512_xor_si512(_mm512_loadu_si512(p1 + 16 + 64 * half), flip);
            split_octets(_mm512_and_si512(v0, low_bits), _mm512_and_si512(v1, low_bits), &out->bytes[b][2 * half]);
            split_octets(_mm512_and_si512(_mm512_srli_epi16(v0, 4), low_bits),
                         _mm512_and_si512(_mm512_srli_epi16(v1, 4), low_bits), &out->bytes[b][4 + 2 * half]);
        }
    }
}

enum { Q8_BYTES = 2 + QK };

/* 16 rows of 8 groups of four bytes, turned. */
INLINE void transpose_groups(const char *w, int64_t stride, __m512i out[GROUPS]) {
    const __m512i flip = _mm512_set1_epi8((char)0x80);
    const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13), second = _mm512_add_epi64(first, _mm512_set1_epi64(2));
    __m512i r[8], a[8], b[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        const __m256i low = _mm256_loadu_si256((const __m256i *)(w + i * stride));
        const __m256i high = _mm256_loadu_si256((const __m256i *)(w + (i + 8) * stride));
        r[i] = _mm512_xor_si512(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1), flip);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        out[i] = _mm512_permutex2var_epi64(b[i], first, b[i + 4]);
        out[i + 4] = _mm512_permutex2var_epi64(b[i], second, b[i + 4]);
    }
}

static void unpack_q8_0(const char *w, int64_t n_blocks, int64_t tile, int64_t begin, int64_t n, unpacked *out) {
    const int64_t stride = n_blocks * Q8_BYTES;
    const char *p = w + tile * COLUMNS * stride + begin * Q8_BYTES;
    for (int64_t b = 0; b < n; b++, p += Q8_BYTES) {
        uint16_t d[COLUMNS];
        for (int i = 0; i < COLUMNS; i++)
            memcpy(&d[i], p + i * stride, sizeof d[i]);
        out->scales[b] = load_halves(d, d + 8);
        transpose_groups(p + 2, stride, out->bytes[b]);
    }
}

INLINE void unpack(const char *w, int64_t n_blocks, int64_t tile, int64_t begin, int64_t n, unpacked *out, int layout) {
    if (layout == LORAGRAPH_Q4_0X8)
        unpack_q4_0x8(w, n_blocks, tile, begin, n, out);
    else
        unpack_q8_0(w, n_blocks, tile, begin, n, out);
}

/* ---- y ---- */

/* n blocks of `size` rows with 16 columns, added to y or stored there; x: the first of these blocks in its tile. */
INLINE void multiply_tile(const unpacked *w, int64_t n, const char *x, float *y, int64_t y_stride, int size, int layout,
                          int add) {
    const int shift = layout == LORAGRAPH_Q4_0X8 ? 3 : 7; /* of the offset */
    __m512 acc[MAX_TILE];
#pragma GCC unroll 16
    for (int j = 0; j < size; j++)
        acc[j] = add ? _mm512_loadu_ps(y + j * y_stride) : _mm512_setzero_ps();
    for (int64_t b = 0; b < n; b++, x += size * record(1)) {
        const float *d = (const float *)(x + size * QK);
        const int32_t *negated_sums = (const int32_t *)(x + size * (QK + 4));
        __m512i v[GROUPS];
#pragma GCC unroll 8
        for (int g = 0; g < GROUPS; g++)
            v[g] = w->bytes[b][g];
        const __m512 scales = w->scales[b];
#pragma GCC unroll 16
        for (int j = 0; j < size; j++) {
            const int32_t *row = (const int32_t *)(x + j * QK);
            __m512i sum = _mm512_slli_epi32(_mm512_set1_epi32(negated_sums[j]), shift);
#pragma GCC unroll 8
            for (int g = 0; g < GROUPS; g++)
                sum = _mm512_dpbusd_epi32(sum, v[g], _mm512_set1_epi32(row[g]));
            acc[j] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(scales, _mm512_set1_ps(d[j])), acc[j]);
        }
    }
#pragma GCC unroll 16
    for (int j = 0; j < size; j++)
        _mm512_storeu_ps(y + j * y_stride, acc[j]);
}

#include "product_body.h"

void loragraph_product_input_vnni(const product_input_node *node, int ith, int nth) {
    if (node->layout == LORAGRAPH_Q4_1)
        loragraph_product_input_avx2(node, ith, nth);
    else
        quantize_rows(node, ith, nth, LORAGRAPH_Q8_0); /* the same for both layouts */
}

void loragraph_product_vnni(const product_node *node, int ith, int nth) {
    if (node->layout == LORAGRAPH_Q4_1)
        loragraph_product_avx2(node, ith, nth);
    else if (node->layout == LORAGRAPH_Q4_0X8)
        multiply_layout(node, ith, nth, LORAGRAPH_Q4_0X8);
    else
        multiply_layout(node, ith, nth, LORAGRAPH_Q8_0);
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#else
typedef int loragraph_no_vnni; /* ISO C wants a declaration in every file */
#endif
