/* Loads from rows of any storage type, for every kernel. One simd_*.h is included before.
 *
 * `type` is a constant in every caller, so that each becomes its own loop.
 */
#ifndef LORAGRAPH_ROWS_H
#define LORAGRAPH_ROWS_H
#include <stddef.h>

enum { F32 = 0, F16 = 1, Q8_0 = 8, BF16 = 30 }; /* ggml's numbers */
enum { LINE = 64 };

INLINE int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }

/* Bytes of n consecutive values of a row. */
INLINE int64_t row_bytes(int64_t n, int type) {
    return type == F32 ? n * 4 : type == Q8_0 ? n / 32 * 34 : n * 2;
}

/* VL values from k on, k a multiple of VL. */
INLINE vf row_load(const char *row, int64_t k, int type) {
    if (type == F32)
        return v_load(row + k * 4);
    if (type == F16)
        return v_load_f16(row + k * 2);
    if (type == BF16)
        return v_load_bf16(row + k * 2);
    const char *block = row + k / 32 * 34;
    uint16_t d;
    memcpy(&d, block, 2);
    return v_mul(v_set1(half_to_float(d)), v_load_i8(block + 2 + k % 32));
}

/* The last n < VL values from k on, zeros behind them; no row of Q8_0 blocks has such a tail. */
INLINE vf row_load_tail(const char *row, int64_t k, int n, int type) {
    char buffer[VL * 4] = {0};
    memcpy(buffer, row + row_bytes(k, type), (size_t)row_bytes(n, type));
    return row_load(buffer, 0, type);
}

/* Into the second cache: the first has too few miss buffers to keep a stream of memory busy (measured: 17 against
 * 11 GB/s on one core). An address past an array is harmless. */
INLINE void prefetch(const char *p, int64_t n_bytes) {
    for (int64_t i = 0; i < n_bytes; i += LINE)
        __builtin_prefetch(p + i, 0, 2);
}
#endif
