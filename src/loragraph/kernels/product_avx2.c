/* The product nodes for AVX2.
 *
 * Q4_0: weights become unsigned bytes w + 8, so that a pair of them with a pair of x is at most 2 * 15 * 128 = 3840: the
 * eight instructions that multiply a whole block add up in 16 bits (30720), and only then become 32. What the offset
 * adds, 8 * sum(x), is taken off there.
 *
 * Q4_1: its bytes are unsigned as they are; the sum of x goes with the minimum instead.
 *
 * Q8_0: bytes with bytes would leave 16 bits, so both are widened to 16, w as it is unpacked and x as it is quantised.
 *
 * Sixteen columns are unpacked at a time, four bytes of each to two vectors, and used for all rows of a block of rows: so
 * a column's sum stays in its lane, and a row's bytes are broadcast from memory.
 */
#include "product_impl.h"
#ifdef LORAGRAPH_X86
#include "simd_avx2.h"

#include "rows.h"

enum {
    COLUMNS = 16,    /* of a tile of w */
    VECTORS = 2,     /* of eight columns each */
    GROUPS = QK / 4, /* of four values of a tile's block */
    ROWS = 4,        /* of x at a time: with VECTORS, eight sums beside the weights and what is multiplied */
    OFFSET = 8,      /* of Q4_0 */
    K_BLOCKS = 32,   /* blocks of bytes unpacked at a time: they and the rows they meet fit the first cache, nearly */
    ROW_BLOCK = 128, /* rows that use what was unpacked */
};

INLINE int value_bytes(int layout) { return layout == LORAGRAPH_Q8_0 ? 2 : 1; }

/* ---- x ---- */

INLINE uint32_t top_u32(__m256i v) {
    __m128i m = _mm_max_epu32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4e));
    return (uint32_t)_mm_cvtsi128_si32(_mm_max_epu32(m, _mm_shuffle_epi32(m, 0xb1)));
}

INLINE int32_t sum_i32(__m256i v) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}

/* Four values each as two of 16 bits: places 0 and 2, places 1 and 3. */
INLINE __m256i widen_even(__m256i bytes) { return _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8); }
INLINE __m256i widen_odd(__m256i bytes) { return _mm256_srai_epi16(bytes, 8); }

INLINE void quantize_block(const float *x, char *bytes, float *d, int32_t *negated_sum, int layout) {
    const int wide = value_bytes(layout) == 2;
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256 v[4];
    __m256i top = _mm256_setzero_si256(), q[4];
    for (int i = 0; i < 4; i++) {
        v[i] = _mm256_loadu_ps(x + 8 * i);
        /* As integers, so that NaN is the largest and makes d, and with it y, NaN. */
        top = _mm256_max_epu32(top, _mm256_and_si256(_mm256_castps_si256(v[i]), magnitude));
    }
    const uint32_t bits = top_u32(top);
    float max;
    memcpy(&max, &bits, sizeof max);
    const __m256 inverse = _mm256_set1_ps(max != 0.0f ? 127.0f / max : 0.0f);
    for (int i = 0; i < 4; i++)
        q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
    /* Packing goes by halves: fours of all vectors' low halves, then of their high ones. */
    const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i values = _mm256_permutevar8x32_epi32(packed, order);
    _mm256_storeu_si256((__m256i *)bytes, wide ? widen_even(values) : values);
    if (wide)
        _mm256_storeu_si256((__m256i *)bytes + 1, widen_odd(values));
    *d = half_to_float((uint16_t)_mm_cvtsi128_si32(_mm_cvtps_ph(_mm_set_ss(max / 127.0f), _MM_FROUND_TO_NEAREST_INT)));
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(OFFSET), packed);
    *negated_sum = -sum_i32(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

/* ---- w ---- */

typedef struct {
    /* Of a block n_groups, and of a group VECTORS, whose lanes are columns. Q4_0: four bytes each, plus OFFSET; Q4_1
     * without. Q8_0: two of 16 bits, the even places of all fours, then the odd ones. */
    __m256i values[K_BLOCKS * GROUPS * VECTORS];
    __m256 scales[K_BLOCKS][VECTORS];
    __m256 minimums[K_BLOCKS][VECTORS]; /* of Q4_1, over -OFFSET, as sums are times that */
} unpacked;

/* Lanes of Q4_0 are columns 0 1 4 5 2 3 6 7, as two vectors of eight bytes of four columns shuffle into them: from the
 * order of the columns to that of the lanes, or back. */
INLINE __m256 reorder(__m256 v, int layout) {
    return layout == LORAGRAPH_Q4_0X8 ? _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(v), 0xd8)) : v;
}

enum { X8_BYTES = 16 + 128 }; /* of a block: 8 F16 d, then bytes 0 to 7 of 8 columns, then 8 to 15 */

/* Byte i of a column holds value i in its low and value i + 16 in its high bits, as two's complement. */
INLINE void unpack_q4_0x8(const char *p, __m256i out[GROUPS]) {
    const __m256i flip = _mm256_set1_epi8((char)0x88), low_bits = _mm256_set1_epi8(0x0f);
    for (int half = 0; half < 2; half++) {
        /* Eight bytes of four and four columns -> the first four of all, the last four of all. */
        const vf low = v_load(p + 16 + 64 * half), high = v_load(p + 16 + 64 * half + 32);
        const __m256i first = _mm256_xor_si256(_mm256_castps_si256(_mm256_shuffle_ps(low, high, 0x88)), flip);
        const __m256i last = _mm256_xor_si256(_mm256_castps_si256(_mm256_shuffle_ps(low, high, 0xdd)), flip);
        __m256i *values = out + 2 * half;
        values[0] = _mm256_and_si256(first, low_bits);
        values[1] = _mm256_and_si256(last, low_bits);
        values[GROUPS / 2] = _mm256_and_si256(_mm256_srli_epi16(first, 4), low_bits);
        values[GROUPS / 2 + 1] = _mm256_and_si256(_mm256_srli_epi16(last, 4), low_bits);
    }
}

enum { Q8_BYTES = 2 + QK };

/* 16 bytes of eight rows -> four groups of four bytes of all. */
INLINE void transpose_groups(const char *w, int64_t stride, __m256i out[4]) {
    __m256i r[4], a[4];
    for (int i = 0; i < 4; i++)
        r[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(w + i * stride))),
                                       _mm_loadu_si128((const __m128i *)(w + (i + 4) * stride)), 1);
    for (int i = 0; i < 2; i++) {
        a[i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        a[i + 2] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++) {
        out[2 * i] = _mm256_unpacklo_epi64(a[2 * i], a[2 * i + 1]);
        out[2 * i + 1] = _mm256_unpackhi_epi64(a[2 * i], a[2 * i + 1]);
    }
}

INLINE void unpack_q8_0(const char *p, int64_t stride, __m256i out[2 * GROUPS]) {
    __m256i groups[GROUPS];
    transpose_groups(p + 2, stride, groups);
    transpose_groups(p + 2 + 16, stride, groups + 4);
    for (int g = 0; g < GROUPS; g++) {
        out[g] = widen_even(groups[g]);
        out[GROUPS + g] = widen_odd(groups[g]);
    }
}

enum { Q4_1_BYTES = 4 + QK / 2 }; /* d, minimum, then bytes as Q4_0 has them, but unsigned */

INLINE void unpack_q4_1(const char *p, int64_t stride, __m256i out[GROUPS]) {
    const __m256i low_bits = _mm256_set1_epi8(0x0f);
    __m256i bytes[GROUPS / 2];
    transpose_groups(p + 4, stride, bytes);
    for (int g = 0; g < GROUPS / 2; g++) {
        out[g] = _mm256_and_si256(bytes[g], low_bits);
        out[GROUPS / 2 + g] = _mm256_and_si256(_mm256_srli_epi16(bytes[g], 4), low_bits);
    }
}

INLINE vf load_scales(const char *p, int64_t stride) {
    uint16_t d[8];
    for (int i = 0; i < 8; i++)
        memcpy(&d[i], p + i * stride, sizeof d[i]);
    return v_load_f16(d);
}

INLINE int n_groups(int layout) { return GROUPS * value_bytes(layout); }

INLINE void unpack(const char *w, int64_t n_blocks, int64_t tile, int64_t begin, int64_t n, unpacked *out, int layout) {
    const int x8 = layout == LORAGRAPH_Q4_0X8;
    const int64_t step = x8 ? X8_BYTES : layout == LORAGRAPH_Q4_1 ? Q4_1_BYTES : Q8_BYTES, stride = n_blocks * step;
    const int64_t octet = x8 ? X8_BYTES : 8 * step; /* of a block of eight columns */
    for (int c = 0; c < VECTORS; c++) {
        const char *columns = w + (VECTORS * tile + c) * n_blocks * octet, *p = columns + begin * step;
        for (int64_t b = 0; b < n; b++, p += step) {
            prefetch(columns + (VECTORS * n_blocks + begin + b) * octet, octet); /* the next tile's */
            __m256i groups[2 * GROUPS];
            if (x8)
                unpack_q4_0x8(p, groups);
            else if (layout == LORAGRAPH_Q4_1)
                unpack_q4_1(p, stride, groups);
            else
                unpack_q8_0(p, stride, groups);
            for (int g = 0; g < n_groups(layout); g++)
                out->values[(b * n_groups(layout) + g) * VECTORS + c] = groups[g];
            out->scales[b][c] = reorder(x8 ? v_load_f16(p) : load_scales(p, stride), layout);
            if (layout == LORAGRAPH_Q4_1)
                out->minimums[b][c] = _mm256_mul_ps(load_scales(p + 2, stride), _mm256_set1_ps(-1.0f / OFFSET));
        }
    }
}

/* ---- y ---- */

/* Compilers may add integers in another order, and then keep all that is to be added. */
#define KEEP_ORDER(v) __asm__("" : "+x"(v))

INLINE __m256i add_product(__m256i sum, __m256i w, __m256i x, int first, int layout) {
    if (value_bytes(layout) == 1) {
        const __m256i pairs = _mm256_maddubs_epi16(w, x);
        return first ? pairs : _mm256_add_epi16(sum, pairs);
    }
    const __m256i pairs = _mm256_madd_epi16(w, x);
    return first ? pairs : _mm256_add_epi32(sum, pairs);
}

/* One group of four values of `rows` rows. */
INLINE void add_group(const __m256i *w, const char *x, __m256i (*sum)[VECTORS], int first, int rows, int layout) {
    __m256i v[VECTORS];
#pragma GCC unroll 2
    for (int c = 0; c < VECTORS; c++)
        v[c] = w[c];
#pragma GCC unroll 4
    for (int j = 0; j < rows; j++) {
        int32_t four;
        memcpy(&four, x + j * QK * value_bytes(layout), sizeof four);
        const __m256i values = _mm256_set1_epi32(four);
#pragma GCC unroll 2
        for (int c = 0; c < VECTORS; c++) {
            sum[j][c] = add_product(sum[j][c], v[c], values, first, layout);
            KEEP_ORDER(sum[j][c]);
        }
    }
}

/* One block of `rows` rows, added to their sums. */
INLINE void multiply_block(const unpacked *w, int64_t b, const char *x, const float *d, const int32_t *negated_sums,
                           __m256 (*acc)[VECTORS], int rows, int layout) {
    const __m256i *values = w->values + b * n_groups(layout) * VECTORS;
    __m256i sum[ROWS][VECTORS];
    if (value_bytes(layout) == 1) {
#pragma GCC unroll 8
        for (int g = 0; g < GROUPS; g++)
            add_group(values + g * VECTORS, x + 4 * g, sum, g == 0, rows, layout);
    } else {
#pragma GCC unroll 4
        for (int j = 0; j < rows; j++)
#pragma GCC unroll 2
            for (int c = 0; c < VECTORS; c++)
                sum[j][c] = _mm256_setzero_si256();
        /* Sixteen are a loop: unrolled, they take a tenth more time (Zen 3). */
#pragma GCC unroll 1
        for (int g = 0; g < 2 * GROUPS; g++)
            add_group(values + g * VECTORS, x + 4 * g, sum, 0, rows, layout);
    }
#pragma GCC unroll 4
    for (int j = 0; j < rows; j++)
#pragma GCC unroll 2
        for (int c = 0; c < VECTORS; c++) {
            __m256i whole = sum[j][c];
            if (value_bytes(layout) == 1)
                whole = _mm256_madd_epi16(whole, _mm256_set1_epi16(1));
            if (layout == LORAGRAPH_Q4_0X8)
                whole = _mm256_add_epi32(whole, _mm256_set1_epi32(negated_sums[j]));
            const __m256 scale = _mm256_mul_ps(w->scales[b][c], _mm256_set1_ps(d[j]));
            acc[j][c] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(whole), scale, acc[j][c]);
            if (layout == LORAGRAPH_Q4_1)
                acc[j][c] = _mm256_fmadd_ps(w->minimums[b][c], _mm256_set1_ps(d[j] * (float)negated_sums[j]), acc[j][c]);
        }
}

/* n blocks of `size` rows with 16 columns, added to y or stored there; x: the first of these blocks in its tile. */
INLINE void multiply_tile(const unpacked *w, int64_t n, const char *x, float *y, int64_t y_stride, int size, int layout,
                          int add) {
    const int rows = size < ROWS ? size : ROWS, values = QK * value_bytes(layout);
    __m256 acc[MAX_TILE][VECTORS];
    for (int j = 0; j < size; j++)
        for (int c = 0; c < VECTORS; c++)
            acc[j][c] = add ? reorder(_mm256_loadu_ps(y + j * y_stride + 8 * c), layout) : _mm256_setzero_ps();
    for (int64_t b = 0; b < n; b++, x += size * record(value_bytes(layout))) {
        const float *d = (const float *)(x + size * values);
        const int32_t *negated_sums = (const int32_t *)(x + size * (values + 4));
        for (int j = 0; j < size; j += rows)
            multiply_block(w, b, x + j * values, d + j, negated_sums + j, acc + j, rows, layout);
    }
    for (int j = 0; j < size; j++)
        for (int c = 0; c < VECTORS; c++)
            _mm256_storeu_ps(y + j * y_stride + 8 * c, reorder(acc[j][c], layout));
}

#include "product_body.h"

void loragraph_product_input_avx2(const product_input_node *node, int ith, int nth) {
    if (node->layout == LORAGRAPH_Q8_0)
        quantize_rows(node, ith, nth, LORAGRAPH_Q8_0);
    else
        quantize_rows(node, ith, nth, LORAGRAPH_Q4_0X8); /* the same for Q4_1 */
}

void loragraph_product_avx2(const product_node *node, int ith, int nth) {
    if (node->layout == LORAGRAPH_Q4_0X8)
        multiply_layout(node, ith, nth, LORAGRAPH_Q4_0X8);
    else if (node->layout == LORAGRAPH_Q4_1)
        multiply_layout(node, ith, nth, LORAGRAPH_Q4_1);
    else
        multiply_layout(node, ith, nth, LORAGRAPH_Q8_0);
}
#ifdef __clang__
#pragma clang attribute pop
#endif
#else
typedef int loragraph_no_product_avx2; /* ISO C wants a declaration in every file */
#endif
