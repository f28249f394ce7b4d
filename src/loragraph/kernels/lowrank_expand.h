/* expand: y += B h. */
#ifndef LORAGRAPH_LOWRANK_EXPAND_H
#define LORAGRAPH_LOWRANK_EXPAND_H
#include "lowrank_body.h"

/* Bytes of one value of transposed lora_b. */
INLINE int64_t b_size(int type) { return type == F32 ? 4 : type == Q8_0 ? 1 : 2; }

enum { MAX_VECTORS = 4, BLOCK = 2048 /* columns whose sums fit the first cache */ };

/* n_rows x (n_vectors * VL) columns from `column` on; the last n_tail < VL columns if n_tail is not 0. */
INLINE void expand_tile(const lora_pair *pair, int64_t n_out, int64_t column, const float *h, float *const *y,
                        int n_rows, int n_vectors, int n_tail, int type, const char *ahead) {
    const int64_t size = b_size(type);
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
            prefetch(ahead + r * n_out * size, n_vectors * VL * size);
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
    const int64_t size = b_size(type), width = n_vectors * VL;
    for (; column + width <= c->end; column += width) {
        const char *ahead = fetch && c->next_bt ? c->next_bt + (column - c->begin) * size : NULL;
        expand_tile(c->pair, c->n_out, column, h, y, n_rows, n_vectors, 0, type, ahead);
    }
    return column;
}

/* n_ranks rank rows from `rank` on, added to `sum` over [begin, end): B is walked along its rows. */
INLINE void expand_axpy(const expand_range *c, int64_t rank, int64_t begin, int64_t end, const float *h, float *sum,
                        int n_ranks, int type, const char *ahead) {
    const int64_t size = b_size(type), stride = c->n_out * size;
    const char *bt = (const char *)c->pair->bt + rank * stride;
    const char *scales = (const char *)c->pair->bt_scales + rank / 32 * c->n_out * 2;
    vf factor[RANKS];
    for (int i = 0; i < n_ranks; i++)
        factor[i] = v_set1(h[rank + i]);
    for (int64_t column = begin; column < end; column += VL) {
        vf acc = rank ? v_load(sum + column - begin) : v_set1(0.0f);
        vf scale = type == Q8_0 ? v_load_f16(scales + column * 2) : v_set1(0.0f);
        if (ahead && (column - begin) * size % LINE == 0)
#pragma GCC unroll 4
            for (int i = 0; i < n_ranks; i++)
                prefetch(ahead + i * stride + (column - begin) * size, LINE);
#pragma GCC unroll 4
        for (int i = 0; i < n_ranks; i++) {
            vf b = type == Q8_0 ? v_mul(v_load_i8(bt + i * stride + column), scale)
                                : row_load(bt + i * stride, column, type);
            acc = v_fma(factor[i], b, acc);
        }
        v_store(sum + column - begin, acc);
    }
}

/* One row's whole vectors: bound by memory, so B is read RANKS rank rows at a time, sums in a block of columns. */
INLINE int64_t expand_single(const expand_range *c, const float *h, float *y, int type, int fetch) {
    float sum[BLOCK];
    const int64_t size = b_size(type), stride = c->n_out * size, rank = c->pair->rank;
    const int64_t whole = c->begin + (c->end - c->begin) / VL * VL, n_tiles = (rank + RANKS - 1) / RANKS;
    for (int64_t begin = c->begin, end; begin < whole; begin = end) {
        end = min_i64(begin + BLOCK, whole);
        for (int64_t r = 0; r < rank; r += RANKS) {
            const int64_t tile = r / RANKS + AHEAD;
            const char *ahead = NULL;
            if (fetch && tile < n_tiles)
                ahead = (const char *)c->pair->bt + tile * RANKS * stride + begin * size;
            else if (fetch && c->next_bt)
                ahead = c->next_bt + (tile - n_tiles) * RANKS * stride + (begin - c->begin) * size;
            if (r + RANKS <= rank)
                expand_axpy(c, r, begin, end, h, sum, RANKS, type, ahead);
            else
                for (int64_t i = r; i < rank; i++)
                    expand_axpy(c, i, begin, end, h, sum, 1, type, NULL);
        }
        for (int64_t column = begin; column < end; column += VL)
            v_store(y + column, v_add(v_load(y + column), v_load(sum + column - begin)));
    }
    return whole;
}

INLINE void expand_rows(const expand_range *c, const float *h, float *const *y, int n_rows, int type, int fetch) {
    int64_t column = c->begin;
    if (n_rows == 1)
        column = expand_single(c, h, y[0], type, fetch);
    column = expand_columns(c, column, h, y, n_rows, 4, type, fetch);
    column = expand_columns(c, column, h, y, n_rows, 2, type, fetch);
    column = expand_columns(c, column, h, y, n_rows, 1, type, fetch);
    if (column < c->end)
        for (int j = 0; j < n_rows; j++)
            expand_tile(c->pair, c->n_out, column, h + j * c->pair->rank, y + j, 1, 1, (int)(c->end - column), type,
                        NULL);
}

INLINE void expand_typed(const expand_range *c, const lowrank_expand_node *node, int64_t first, int64_t n,
                         const float *h, int type) {
    const int32_t *rows = node->shrink->step->entry_row + first;
    int64_t i = 0;
    float *y[EXPAND_ROWS];
    for (; i + EXPAND_ROWS <= n; i += EXPAND_ROWS) {
        for (int j = 0; j < EXPAND_ROWS; j++)
            y[j] = node->y + rows[i + j] * node->y_stride;
        expand_rows(c, h + i * c->pair->rank, y, EXPAND_ROWS, type, i == 0);
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
static void expand_poison(const lowrank_expand_node *node) {
    const lowrank_step *step = node->shrink->step;
    for (int64_t i = 0; i < step->n_entries; i++)
        for (int64_t column = 0; column < node->shrink->targets[node->target]->n_out; column++)
            node->y[step->entry_row[i] * node->y_stride + column] = NAN;
}

/* What a thread owns of y. */
typedef struct {
    int64_t begin, end;         /* columns */
    int64_t first_row, end_row; /* rows */
} expand_share;

enum { SPLIT_ROWS = 1024 };

/* Many adapters with a row or two each: a thread takes whole rows, so that it reads whole matrices (one core reads
 * halves of their rows at 11 GB/s, all of them at 18). Weights are ranks. 0 if that would not share out evenly. */
static int share_rows(const lowrank_expand_node *node, int ith, int nth, expand_share *share) {
    const lowrank_step *step = node->shrink->step;
    int64_t weight[SPLIT_ROWS], total = 0, n_rows = 0;
    if (nth == 1 || step->n_groups < 4 * nth || step->n_entries > 2 * step->n_groups)
        return 0;
    for (int64_t i = 0; i < step->n_entries; i++)
        n_rows = step->entry_row[i] >= n_rows ? step->entry_row[i] + 1 : n_rows;
    if (n_rows > SPLIT_ROWS)
        return 0;
    memset(weight, 0, (size_t)n_rows * sizeof *weight);
    for (int g = 0; g < step->n_groups; g++)
        for (int64_t i = step->group_ptr[g]; i < step->group_ptr[g + 1]; i++) {
            const int64_t rank = pair_rank(pair_of(node->shrink, node->target, g));
            weight[step->entry_row[i]] += rank;
            total += rank;
        }
    int64_t before = 0, load = 0, last_owner = 0;
    for (int64_t row = 0; row < n_rows; before += weight[row++]) {
        const int64_t owner = total ? (2 * before + weight[row]) * nth / (2 * total) : 0;
        load = owner == last_owner ? load + weight[row] : weight[row];
        last_owner = owner;
        if (2 * load * nth > 3 * total)
            return 0;
        if (owner == ith) {
            share->first_row = share->end_row ? share->first_row : row;
            share->end_row = row + 1;
        }
    }
    return 1;
}

static expand_share share_of(const lowrank_expand_node *node, int ith, int nth) {
    const int64_t n_out = node->shrink->targets[node->target]->n_out, n_lines = (n_out + COLUMNS - 1) / COLUMNS;
    expand_share share = {0, n_out, 0, 0};
    if (!share_rows(node, ith, nth, &share)) {
        share.begin = n_lines * ith / nth * COLUMNS;
        share.end = min_i64(n_out, n_lines * (ith + 1) / nth * COLUMNS);
        share.first_row = 0;
        share.end_row = INT32_MAX;
    }
    return share;
}

/* Entries [*first, result) of a group are the share's; rows ascend within a group. */
static int64_t share_entries(const lowrank_expand_node *node, const expand_share *share, int group, int64_t *first) {
    const lowrank_step *step = node->shrink->step;
    int64_t begin = step->group_ptr[group], end = step->group_ptr[group + 1];
    if (!pair_of(node->shrink, node->target, group)->a)
        end = begin;
    while (begin < end && step->entry_row[begin] < share->first_row)
        begin++;
    while (begin < end && step->entry_row[end - 1] >= share->end_row)
        end--;
    *first = begin;
    return end;
}

/* Where the thread reads after `group`, NULL at the end. */
static const char *next_b(const lowrank_expand_node *node, const expand_share *share, int group) {
    int64_t first;
    for (group++; group < node->shrink->step->n_groups; group++)
        if (share_entries(node, share, group, &first) > first) {
            const lora_pair *pair = pair_of(node->shrink, node->target, group);
            return (const char *)pair->bt + share->begin * b_size(pair->b_type);
        }
    return NULL;
}

static void expand(const lowrank_expand_node *node, int ith, int nth) {
    const lowrank_shrink_node *from = node->shrink;
    const expand_share share = share_of(node, ith, nth);
    if (!scratch_fits(from)) {
        if (ith == 0)
            expand_poison(node);
        return;
    }
    if (share.begin >= share.end || share.first_row >= share.end_row)
        return;
    const float *h = from->step->scratch + scratch_offset(from, node->target);
    for (int g = 0; g < from->step->n_groups; g++) {
        const lora_pair *pair = pair_of(from, node->target, g);
        int64_t first;
        const int64_t n = share_entries(node, &share, g, &first) - first;
        if (n > 0) {
            const expand_range range = {pair, from->targets[node->target]->n_out, share.begin, share.end,
                                        next_b(node, &share, g)};
            expand_pair(&range, node, first, n, h + (first - from->step->group_ptr[g]) * pair->rank);
        }
        h += group_size(from->step, g) * pair_rank(pair);
    }
}
#endif
