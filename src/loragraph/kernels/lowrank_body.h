/* What the low-rank kernels share: loads by storage type and the layout of h. One simd_*.h is included before.
 *
 * Functions marked INLINE take `type` and tile sizes as constants, so that each caller becomes its own loop.
 */
#ifndef LORAGRAPH_LOWRANK_BODY_H
#define LORAGRAPH_LOWRANK_BODY_H
#include "lowrank_impl.h"

#include <math.h>
#include <stddef.h>

enum { F32 = 0, F16 = 1, Q8_0 = 8, BF16 = 30 }; /* ggml's numbers */
enum {
    RANKS = 4,       /* rank rows of a shrink tile */
    ROW_BLOCK = 16,  /* rows of a unit of shrink work */
    COLUMNS = 16,    /* floats of y in a cache line: threads never share one of an aligned y */
    LINE = 64,
    AHEAD = 2,       /* tiles of A or B between a prefetch and its use */
};

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

/* ---- the layout of h: target after target, group after group, entry after entry, rank floats each ---- */

INLINE const lora_pair *pair_of(const lowrank_shrink_node *node, int target, int group) {
    return &node->targets[target]->pairs[node->step->group_slot[group]];
}

/* Rank of a pair that this step applies, 0 where the adapter leaves the target alone. */
INLINE int64_t pair_rank(const lora_pair *pair) { return pair->a ? pair->rank : 0; }

INLINE int64_t group_size(const lowrank_step *step, int group) {
    return step->group_ptr[group + 1] - step->group_ptr[group];
}

/* Floats of h before `target`; for n_targets: all that the node needs. */
static int64_t scratch_offset(const lowrank_shrink_node *node, int target) {
    int64_t offset = 0;
    for (int t = 0; t < target; t++)
        for (int g = 0; g < node->step->n_groups; g++)
            offset += group_size(node->step, g) * pair_rank(pair_of(node, t, g));
    return offset;
}

INLINE int scratch_fits(const lowrank_shrink_node *node) {
    return scratch_offset(node, node->n_targets) <= node->step->scratch_len;
}
#endif
