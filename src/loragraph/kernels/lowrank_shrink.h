/* shrink: h = s * A x, and gather: h = s * a[:, token]. */
#ifndef LORAGRAPH_LOWRANK_SHRINK_H
#define LORAGRAPH_LOWRANK_SHRINK_H
#include "lowrank_body.h"

/* n_ranks x n_rows dot products over n_in, each in one accumulator of VL lanes. `ahead` is fetched on the way. */
INLINE void shrink_tile(const char *a, const float *const *x, int64_t n_in, int n_ranks, int n_rows, int type,
                        const char *ahead, float dots[RANKS][SHRINK_ROWS]) {
    const int64_t stride = row_bytes(n_in, type), whole = n_in - n_in % VL;
    vf acc[RANKS][SHRINK_ROWS];
    for (int i = 0; i < n_ranks; i++)
        for (int j = 0; j < n_rows; j++)
            acc[i][j] = v_set1(0.0f);
    for (int64_t k = 0; k < whole; k += VL) {
        vf xv[SHRINK_ROWS];
        if (ahead)
            prefetch(ahead + n_ranks * row_bytes(k, type), n_ranks * (type == Q8_0 ? VL : row_bytes(VL, type)));
#pragma GCC unroll 4
        for (int j = 0; j < n_rows; j++)
            xv[j] = v_load(x[j] + k);
#pragma GCC unroll 4
        for (int i = 0; i < n_ranks; i++) {
            vf av = row_load(a + i * stride, k, type);
#pragma GCC unroll 4
            for (int j = 0; j < n_rows; j++)
                acc[i][j] = v_fma(av, xv[j], acc[i][j]);
        }
    }
    const int rest = (int)(n_in - whole);
    if (rest)
#pragma GCC unroll 4
        for (int i = 0; i < n_ranks; i++)
#pragma GCC unroll 4
            for (int j = 0; j < n_rows; j++)
                acc[i][j] = v_fma(row_load_tail(a + i * stride, whole, rest, type),
                                  row_load_tail((const char *)x[j], whole, rest, F32), acc[i][j]);
#pragma GCC unroll 4
    for (int i = 0; i < n_ranks; i++)
#pragma GCC unroll 4
        for (int j = 0; j < n_rows; j++)
            dots[i][j] = v_sum(acc[i][j]);
}

/* One unit of work: up to RANKS rank rows of A with up to ROW_BLOCK rows of x. */
typedef struct {
    const lowrank_shrink_node *node;
    const lora_pair *pair;
    int64_t entry, n_rows; /* first entry, count */
    int64_t first_rank, n_ranks;
    float *h;          /* of the first entry */
    const char *ahead; /* memory that the thread reads soon, or NULL */
} shrink_unit;

INLINE void shrink_rows(const shrink_unit *u, int64_t row, int n_ranks, int n_rows, int type, int64_t first_rank) {
    const lowrank_step *step = u->node->step;
    const float *x[SHRINK_ROWS];
    const int32_t *x_row = u->node->x_by_token ? step->entry_token : step->entry_row;
    float dots[RANKS][SHRINK_ROWS];
    for (int j = 0; j < n_rows; j++)
        x[j] = u->node->x + x_row[u->entry + row + j] * u->node->x_stride;
    const char *a = (const char *)u->pair->a + first_rank * row_bytes(u->node->n_in, type);
    shrink_tile(a, x, u->node->n_in, n_ranks, n_rows, type, row == 0 && n_ranks == RANKS ? u->ahead : NULL, dots);
    for (int j = 0; j < n_rows; j++) {
        const float s = step->entry_scale[u->entry + row + j] * u->pair->scale;
        for (int i = 0; i < n_ranks; i++)
            u->h[(row + j) * u->pair->rank + first_rank + i] = dots[i][j] * s;
    }
}

INLINE void shrink_ranks(const shrink_unit *u, int n_ranks, int type, int64_t first_rank) {
    int64_t row = 0;
    for (; row + SHRINK_ROWS <= u->n_rows; row += SHRINK_ROWS)
        shrink_rows(u, row, n_ranks, SHRINK_ROWS, type, first_rank);
    for (; row < u->n_rows; row++)
        shrink_rows(u, row, n_ranks, 1, type, first_rank);
}

INLINE void shrink_typed(const shrink_unit *u, int type) {
    if (u->n_ranks == RANKS)
        shrink_ranks(u, RANKS, type, u->first_rank);
    else
        for (int64_t r = 0; r < u->n_ranks; r++)
            shrink_ranks(u, 1, type, u->first_rank + r);
}

static void shrink_one(const shrink_unit *u) {
    switch (u->pair->a_type) {
    case F32: shrink_typed(u, F32); break;
    case F16: shrink_typed(u, F16); break;
    case BF16: shrink_typed(u, BF16); break;
    case Q8_0: shrink_typed(u, Q8_0); break;
    }
}

/* Cost of a unit in rows: reading a tile of A costs about as much as two rows that use it from cache. */
INLINE int64_t unit_cost(int64_t n_rows) { return n_rows + 2; }

INLINE int64_t pair_cost(const lora_pair *pair, int64_t n_rows) {
    const int64_t n_blocks = (n_rows + ROW_BLOCK - 1) / ROW_BLOCK;
    return (pair_rank(pair) + RANKS - 1) / RANKS * (n_rows + n_blocks * unit_cost(0));
}

/* The A that follows (target, group) in the order of the units, NULL at the end. */
static const char *next_a(const lowrank_shrink_node *node, int target, int group) {
    for (group++; target < node->n_targets; target++, group = 0)
        for (; group < node->step->n_groups; group++)
            if (pair_of(node, target, group)->a)
                return pair_of(node, target, group)->a;
    return NULL;
}

/* The units of one pair that begin in [lo, hi) of the node's cost, the pair's own beginning at `cost`. */
static void shrink_pair(const lowrank_shrink_node *node, int target, int group, float *h, int64_t cost, int64_t lo,
                        int64_t hi) {
    const lora_pair *pair = pair_of(node, target, group);
    const int64_t first = node->step->group_ptr[group], n = group_size(node->step, group);
    const int64_t tile_bytes = RANKS * row_bytes(node->n_in, pair->a_type);
    const char *next = next_a(node, target, group);
    for (int64_t row = 0; row < n; row += ROW_BLOCK)
        for (int64_t rank = 0; rank < pair->rank; rank += RANKS) {
            shrink_unit unit = {node, pair, first + row, min_i64(ROW_BLOCK, n - row),
                                rank, min_i64(RANKS, pair->rank - rank), h + row * pair->rank, NULL};
            const int64_t beyond = rank / RANKS + AHEAD - (pair->rank + RANKS - 1) / RANKS; /* tiles past this A */
            if (beyond < 0)
                unit.ahead = (const char *)pair->a + (rank / RANKS + AHEAD) * tile_bytes;
            else if (next)
                unit.ahead = next + beyond * tile_bytes;
            if (cost >= lo && cost < hi)
                shrink_one(&unit);
            cost += unit_cost(unit.n_rows);
        }
}

static void shrink(const lowrank_shrink_node *node, int ith, int nth) {
    if (!scratch_fits(node))
        return; /* expand makes it visible */
    const lowrank_step *step = node->step;
    int64_t total = 0, cost = 0;
    for (int t = 0; t < node->n_targets; t++)
        for (int g = 0; g < step->n_groups; g++)
            total += pair_cost(pair_of(node, t, g), group_size(step, g));
    const int64_t lo = total * ith / nth, hi = total * (ith + 1) / nth;
    float *h = step->scratch;
    for (int t = 0; t < node->n_targets; t++)
        for (int g = 0; g < step->n_groups && cost < hi; g++) {
            const lora_pair *pair = pair_of(node, t, g);
            const int64_t n = group_size(step, g), own = pair_cost(pair, n);
            if (own && cost + own > lo)
                shrink_pair(node, t, g, h, cost, lo, hi);
            cost += own;
            h += n * pair_rank(pair);
        }
}

/* ---- gather: h = s * a[:, token] ---- */

INLINE void gather_row(const lora_pair *pair, int64_t token, float s, int type, float *h) {
    const char *row = (const char *)pair->a + token * row_bytes(pair->rank, type);
    const int64_t whole = pair->rank - pair->rank % VL;
    const int rest = (int)(pair->rank - whole);
    for (int64_t r = 0; r < whole; r += VL)
        v_store(h + r, v_mul(row_load(row, r, type), v_set1(s)));
    if (rest) {
        float buffer[VL];
        v_store(buffer, v_mul(row_load_tail(row, whole, rest, type), v_set1(s)));
        memcpy(h + whole, buffer, (size_t)rest * sizeof(float));
    }
}

static void gather_one(const lora_pair *pair, int64_t token, float s, float *h) {
    switch (pair->a_type) {
    case F32: gather_row(pair, token, s, F32, h); break;
    case F16: gather_row(pair, token, s, F16, h); break;
    case BF16: gather_row(pair, token, s, BF16, h); break;
    case Q8_0: gather_row(pair, token, s, Q8_0, h); break;
    }
}

static void gather(const lowrank_gather_node *node, int ith, int nth) {
    if (!scratch_fits(node->shrink))
        return; /* expand makes it visible */
    const lowrank_step *step = node->shrink->step;
    float *h = step->scratch;
    for (int g = 0; g < step->n_groups; g++) {
        const lora_pair *pair = pair_of(node->shrink, 0, g);
        const int64_t first = step->group_ptr[g], n = group_size(step, g);
        for (int64_t i = n * ith / nth; pair->a && i < n * (ith + 1) / nth; i++) {
            const int32_t token = node->tokens[step->entry_row[first + i]];
            const int known = token >= 0 && token < node->shrink->targets[0]->n_in;
            gather_one(pair, known ? token : 0, known ? step->entry_scale[first + i] * pair->scale : NAN,
                       h + i * pair->rank);
        }
        h += n * pair_rank(pair);
    }
}
#endif
