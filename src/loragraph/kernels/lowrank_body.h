/* The low-rank kernels over the primitives of one simd_*.h, which is included before this file.
 *
 * Functions marked INLINE take `type` and tile sizes as constants, so that each caller becomes its own loop.
 */
#include "lowrank_impl.h"

#include <math.h>
#include <stddef.h>

enum { F32 = 0, F16 = 1, Q8_0 = 8, BF16 = 30 }; /* ggml's numbers */
enum {
    RANKS = 4,       /* rank rows of a shrink tile */
    ROW_BLOCK = 16,  /* rows of a unit of shrink work */
    COLUMNS = 16,    /* floats of y in a cache line: threads never share one of an aligned y */
    LINE = 64,
    AHEAD = 2,       /* shrink tiles between a prefetch and its use */
};

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

INLINE void prefetch(const char *p, int64_t n_bytes) {
    for (int64_t i = 0; i < n_bytes; i += LINE)
        __builtin_prefetch(p + i, 0, 3);
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

/* ---- shrink: h = s * A x ---- */

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
    for (int i = 0; i < n_ranks; i++)
        for (int j = 0; j < n_rows; j++) {
            if (rest)
                acc[i][j] = v_fma(row_load_tail(a + i * stride, whole, rest, type),
                                  row_load_tail((const char *)x[j], whole, rest, F32), acc[i][j]);
            dots[i][j] = v_sum(acc[i][j]);
        }
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
    float dots[RANKS][SHRINK_ROWS];
    for (int j = 0; j < n_rows; j++)
        x[j] = u->node->x + step->entry_row[u->entry + row + j] * u->node->x_stride;
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

INLINE int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }

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

/* ---- expand: y += B h ---- */

enum { MAX_VECTORS = 8 };

/* n_rows x (n_vectors * VL) columns from `column` on; the last n_tail < VL columns if n_tail is not 0. */
INLINE void expand_tile(const lora_pair *pair, int64_t n_out, int64_t column, const float *h, float *const *y,
                        int n_rows, int n_vectors, int n_tail, int type, const char *ahead, int64_t ahead_stride) {
    const int64_t size = type == F32 ? 4 : type == Q8_0 ? 1 : 2;
    const char *bt = (const char *)pair->bt + column * size;
    const char *scales = (const char *)pair->bt_scales + column * 2;
    const int64_t rank = pair->rank;
    vf acc[EXPAND_ROWS][MAX_VECTORS], scale[MAX_VECTORS];
    for (int v = 0; v < n_vectors; v++) {
        scale[v] = v_set1(0.0f);
        for (int j = 0; j < n_rows; j++)
            acc[j][v] = v_set1(0.0f);
    }
    for (int64_t r = 0; r < rank; r++, bt += n_out * size) {
        if (ahead)
            prefetch(ahead + r * ahead_stride, n_vectors * VL * size);
        if (type == Q8_0 && r % 32 == 0) {
#pragma GCC unroll 8
            for (int v = 0; v < n_vectors; v++)
                scale[v] = n_tail ? row_load_tail(scales, 0, n_tail, F16) : v_load_f16(scales + v * VL * 2);
            scales += n_out * 2;
        }
#pragma GCC unroll 8
        for (int v = 0; v < n_vectors; v++) {
            vf b;
            if (type == Q8_0) {
                char q[VL] = {0};
                if (n_tail)
                    memcpy(q, bt, (size_t)n_tail);
                b = v_mul(v_load_i8(n_tail ? q : bt + v * VL), scale[v]);
            } else {
                b = n_tail ? row_load_tail(bt, 0, n_tail, type) : row_load(bt, v * VL, type);
            }
#pragma GCC unroll 4
            for (int j = 0; j < n_rows; j++)
                acc[j][v] = v_fma(v_set1(h[j * rank + r]), b, acc[j][v]);
        }
    }
#pragma GCC unroll 4
    for (int j = 0; j < n_rows; j++)
#pragma GCC unroll 8
        for (int v = 0; v < n_vectors; v++) {
            float *out = y[j] + column + v * VL, buffer[VL] = {0};
            if (n_tail) {
                memcpy(buffer, out, (size_t)n_tail * sizeof(float));
                v_store(buffer, v_add(v_load(buffer), acc[j][v]));
                memcpy(out, buffer, (size_t)n_tail * sizeof(float));
            } else {
                v_store(out, v_add(v_load(out), acc[j][v]));
            }
        }
}

/* A thread's columns [begin, end) of one pair. */
typedef struct {
    const lora_pair *pair;
    int64_t n_out, begin, end;
    const char *next_bt; /* where this thread reads in the next pair, or NULL */
} expand_range;

INLINE int64_t expand_columns(const expand_range *c, int64_t column, const float *h, float *const *y, int n_rows,
                              int n_vectors, int type, int fetch) {
    const int64_t size = type == F32 ? 4 : type == Q8_0 ? 1 : 2, width = n_vectors * VL;
    for (; column + width <= c->end; column += width) {
        const char *ahead = NULL;
        if (fetch)
            ahead = column + width < c->end ? (const char *)c->pair->bt + (column + width) * size : c->next_bt;
        expand_tile(c->pair, c->n_out, column, h, y, n_rows, n_vectors, 0, type, ahead, c->n_out * size);
    }
    return column;
}

INLINE void expand_rows(const expand_range *c, const float *h, float *const *y, int n_rows, int type, int fetch) {
    int64_t column = c->begin;
    if (n_rows == 1)
        column = expand_columns(c, column, h, y, n_rows, MAX_VECTORS, type, fetch);
    column = expand_columns(c, column, h, y, n_rows, 4, type, fetch);
    column = expand_columns(c, column, h, y, n_rows, 2, type, fetch);
    column = expand_columns(c, column, h, y, n_rows, 1, type, fetch);
    if (column < c->end)
        for (int j = 0; j < n_rows; j++)
            expand_tile(c->pair, c->n_out, column, h + j * c->pair->rank, y + j, 1, 1, (int)(c->end - column), type,
                        NULL, 0);
}

INLINE void expand_typed(const expand_range *c, const lowrank_expand_node *node, int64_t first, int64_t n,
                         const float *h, int type) {
    const int32_t *rows = node->shrink->step->entry_row + first;
    int64_t i = 0;
    float *y[EXPAND_ROWS];
    for (; i + EXPAND_ROWS <= n; i += EXPAND_ROWS) {
        for (int j = 0; j < EXPAND_ROWS; j++)
            y[j] = node->y + rows[i + j] * node->y_stride;
        expand_rows(c, h + i * c->pair->rank, y, EXPAND_ROWS, type, 0);
    }
    for (; i < n; i++) {
        y[0] = node->y + rows[i] * node->y_stride;
        expand_rows(c, h + i * c->pair->rank, y, 1, type, i == 0);
    }
}

static void expand_pair(const expand_range *c, const lowrank_expand_node *node, int64_t first, int64_t n,
                        const float *h) {
    switch (c->pair->b_type) {
    case F32: expand_typed(c, node, first, n, h, F32); break;
    case F16: expand_typed(c, node, first, n, h, F16); break;
    case BF16: expand_typed(c, node, first, n, h, BF16); break;
    case Q8_0: expand_typed(c, node, first, n, h, Q8_0); break;
    }
}

/* Scratch was too small: no sum can be right, and NaN says so in every row. */
static void expand_poison(const lowrank_expand_node *node, int64_t begin, int64_t end) {
    const lowrank_step *step = node->shrink->step;
    for (int64_t i = 0; i < step->n_entries; i++)
        for (int64_t column = begin; column < end; column++)
            node->y[step->entry_row[i] * node->y_stride + column] = NAN;
}

static void expand(const lowrank_expand_node *node, int ith, int nth) {
    const lowrank_shrink_node *from = node->shrink;
    const lowrank_step *step = from->step;
    const int64_t n_out = from->targets[node->target]->n_out, n_chunks = (n_out + COLUMNS - 1) / COLUMNS;
    const int64_t begin = n_chunks * ith / nth * COLUMNS, end = min_i64(n_out, n_chunks * (ith + 1) / nth * COLUMNS);
    if (!scratch_fits(from))
        expand_poison(node, begin, end);
    if (!scratch_fits(from) || begin >= end)
        return;
    const float *h = step->scratch + scratch_offset(from, node->target);
    for (int g = 0; g < step->n_groups; g++) {
        const lora_pair *pair = pair_of(from, node->target, g);
        const int64_t n = group_size(step, g);
        if (pair->a && n) {
            expand_range range = {pair, n_out, begin, end, NULL};
            if (g + 1 < step->n_groups && pair_of(from, node->target, g + 1)->a) {
                const lora_pair *next = pair_of(from, node->target, g + 1);
                const int64_t size = next->b_type == F32 ? 4 : next->b_type == Q8_0 ? 1 : 2;
                range.next_bt = (const char *)next->bt + begin * size;
            }
            expand_pair(&range, node, step->group_ptr[g], n, h);
        }
        h += n * pair_rank(pair);
    }
}
