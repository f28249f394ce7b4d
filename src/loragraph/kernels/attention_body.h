/* attend and reduce over the plan of a step. One simd_*.h is included before. */
#ifndef LORAGRAPH_ATTENTION_BODY_H
#define LORAGRAPH_ATTENTION_BODY_H
#include "attention_blocks.h"

/* Query heads that walk a unit's cells together: all of the K/V heads [head, head_end), row by row. */
typedef struct {
    const attention_node *node;
    const attention_unit *unit;
    const attention_entry *entries;
    int n_rows, head, head_end, group;
    int64_t q_stride, o_stride;
    float *q, *o, *s, *max, *sum, *kt, *v;
} attention_tile;

enum { DIRECT_QUERIES = 6 };

INLINE int min_int(int a, int b) { return a < b ? a : b; }
INLINE int max_int(int a, int b) { return a > b ? a : b; }

/* Number of a K/V head's first query head in the tile's arrays. */
INLINE int first_query(const attention_tile *t, int head) { return (head - t->head) * t->n_rows * t->group; }

static void start_tile(attention_tile *t) {
    const attention_node *node = t->node;
    const float factor = node->softcap != 0.0f ? node->scale / node->softcap : node->scale;
    int m = 0;
    for (int head = t->head; head < t->head_end; head++)
        for (int r = 0; r < t->n_rows; r++)
            for (int i = 0; i < t->group; i++, m++) {
                const float *q = node->q + t->entries[r].row * node->q_row_stride +
                                 (head * t->group + i) * node->q_head_stride;
                for (int64_t d = 0; d < node->n_embd_k; d++)
                    t->q[m * t->q_stride + d] = q[d] * factor;
                t->max[m] = -INFINITY;
                memset(t->sum + m * PAD, 0, PAD * sizeof(float));
                memset(t->o + m * t->o_stride, 0, (size_t)t->o_stride * sizeof(float));
            }
}

/* Addresses of a block's rows of K and V; absent cells repeat the first. */
typedef struct { const char *k[CELLS], *v[CELLS]; } block_rows;

static void find_rows(const attention_node *node, const attention_unit *unit, int first, block_rows *rows) {
    const int32_t *cells = node->step->cells + unit->first_cell + first;
    const int n = min_int(unit->n_cells - first, CELLS);
    for (int c = 0; c < CELLS; c++) {
        const int64_t cell = cells[c < n ? c : 0];
        rows->k[c] = (const char *)node->k + cell * node->k_stride;
        rows->v[c] = (const char *)node->v + cell * node->v_stride;
    }
}

/* Cells of the block at `first` that a row sees, by ordinal in the block: [lo, hi), empty if lo >= hi. */
INLINE void seen(const attention_entry *e, int first, int n, int *lo, int *hi) {
    *lo = max_int(e->begin - first, 0);
    *hi = min_int(e->end - first, n);
}

/* Weights of the queries of rows [begin, end) in place of their scores. */
static void weigh(const attention_tile *t, int head, int first, int n, int begin, int end) {
    for (int r = begin; r < end; r++) {
        int lo, hi;
        seen(&t->entries[r], first, n, &lo, &hi);
        if (lo >= hi)
            continue;
        for (int i = 0; i < t->group; i++) {
            const int m = first_query(t, head) + r * t->group + i;
            float *s = t->s + (r * t->group + i) * CELLS;
            if (t->node->softcap != 0.0f)
                for (int c = 0; c < CELLS; c += VL)
                    v_store(s + c, v_softcap(v_load(s + c), t->node->softcap));
            for (int c = 0; c < lo; c++)
                s[c] = -INFINITY;
            for (int c = hi; c < CELLS; c++)
                s[c] = -INFINITY;
            softmax_block(s, &t->max[m], t->sum + m * PAD, t->o + m * t->o_stride, t->o_stride);
        }
    }
}

/* Adds the weighted V: rows that see the same cells go together, so that no row meets a cell it does not see. */
static void add_values(const attention_tile *t, const block_source *v, int type, int head, int first, int n, int begin,
                       int end) {
    block_source from = *v;
    for (int r = begin, next; r < end; r = next) {
        int lo, hi;
        seen(&t->entries[r], first, n, &lo, &hi);
        for (next = r + 1; next < end; next++) {
            int other_lo, other_hi;
            seen(&t->entries[next], first, n, &other_lo, &other_hi);
            if (other_lo != lo || other_hi != hi)
                break;
        }
        if (lo >= hi)
            continue;
        const float *p = t->s + r * t->group * CELLS;
        float *o = t->o + (first_query(t, head) + r * t->group) * t->o_stride;
        (type == F16 ? values_f16 : values_f32)(p, &from, lo, hi, o, t->o_stride, (next - r) * t->group);
        from.next = NULL; /* once is enough */
    }
}

/* One K/V head of a block, for the rows [begin, end); those between that see none of it are passed over. */
static void attend_head(const attention_tile *t, const block_rows *rows, const block_rows *next, int head, int first,
                        int n, int begin, int end) {
    const attention_node *node = t->node;
    const int n_queries = (end - begin) * t->group;
    const block_source k = {rows->k, next ? next->k : NULL, head * row_bytes(node->n_embd_k, node->k_type)};
    const block_source v = {rows->v, next ? next->v : NULL, head * row_bytes(node->n_embd_v, node->v_type)};
    load_k(&k, node->n_embd_k, t->kt, node->k_type);
    scores(t->q + (first_query(t, head) + begin * t->group) * t->q_stride, t->q_stride, t->kt, node->n_embd_k,
           t->s + begin * t->group * CELLS, n_queries);
    weigh(t, head, first, n, begin, end);
    /* Few queries read V once: converting it on the way is cheaper than through scratch. */
    const int whole = node->n_embd_v == t->o_stride;
    if (whole && (node->v_type == F32 || (node->v_type == F16 && n_queries <= DIRECT_QUERIES))) {
        add_values(t, &v, node->v_type, head, first, n, begin, end);
        return;
    }
    const char *converted[CELLS];
    for (int c = 0; c < n; c++)
        converted[c] = (const char *)(t->v + c * t->o_stride);
    load_v(&v, n, node->n_embd_v, t->v, node->v_type);
    add_values(t, &(block_source){converted, NULL, 0}, F32, head, first, n, begin, end);
}

/* All heads of a block before the next: they lie beside each other in memory. */
static void attend_blocks(const attention_tile *t) {
    const attention_step *step = t->node->step;
    const int is_last = t->unit == &step->units[step->n_units - 1];
    block_rows rows[2];
    find_rows(t->node, t->unit, 0, &rows[0]);
    for (int first = 0, parity = 0; first < t->unit->n_cells; first += CELLS, parity ^= 1) {
        const int n = min_int(t->unit->n_cells - first, CELLS), more = first + CELLS < t->unit->n_cells;
        int begin = t->n_rows, end = 0;
        for (int r = 0; r < t->n_rows; r++) {
            int lo, hi;
            seen(&t->entries[r], first, n, &lo, &hi);
            if (lo < hi) {
                begin = min_int(begin, r);
                end = r + 1;
            }
        }
        if (more)
            find_rows(t->node, t->unit, first + CELLS, &rows[parity ^ 1]);
        else if (!is_last)
            find_rows(t->node, t->unit + 1, 0, &rows[parity ^ 1]); /* most often this thread's next block */
        if (begin < end)
            for (int head = t->head; head < t->head_end; head++)
                attend_head(t, &rows[parity], more || !is_last ? &rows[parity ^ 1] : NULL, head, first, n, begin, end);
    }
}

/* What a sink makes of a head's weighted sums: they and their weights' sum relative to the larger maximum. */
typedef struct { float factor, sum; } sink_share;

INLINE float exp_one(float x) {
    float lanes[VL];
    v_store(lanes, v_exp(v_set1(x)));
    return lanes[0];
}

static sink_share share_with_sink(const attention_node *node, int64_t head, float max, float sum) {
    if (!node->sinks)
        return (sink_share){1.0f, sum};
    const float sink = node->sinks[head], top = fmaxf(max, sink), factor = exp_one(max - top);
    return (sink_share){factor, sum * factor + exp_one(sink - top)};
}

/* Done rows go to the output, the others to their partials: V sums, max, sum. */
static void finish_tile(const attention_tile *t) {
    const attention_node *node = t->node;
    const int64_t n_embd = node->n_embd_v, size = padded(n_embd) + PAD;
    int m = 0;
    for (int head = t->head; head < t->head_end; head++)
        for (int r = 0; r < t->n_rows; r++)
            for (int i = 0; i < t->group; i++, m++) {
                const int query_head = head * t->group + i;
                const attention_entry *e = &t->entries[r];
                const float *o = t->o + m * t->o_stride;
                const float sum = v_sum(v_load(t->sum + m * PAD));
                if (e->partial < 0) {
                    float *out = node->out + e->row * node->out_stride + query_head * n_embd;
                    const sink_share share = share_with_sink(node, query_head, t->max[m], sum);
                    for (int64_t d = 0; d < n_embd; d++)
                        out[d] = o[d] * share.factor / share.sum;
                } else if ((e->partial + 1) * node->n_head * size <= node->step->partials_len) {
                    float *out = node->step->partials + ((int64_t)e->partial * node->n_head + query_head) * size;
                    memcpy(out, o, (size_t)t->o_stride * sizeof(float));
                    out[t->o_stride] = t->max[m];
                    out[t->o_stride + 1] = sum;
                }
            }
}

/* The K/V heads [head, head_end) of a unit, as many query heads at a time as the scratch holds. */
static void attend_unit(const attention_node *node, const attention_unit *unit, int head, int head_end,
                        float *scratch) {
    attention_tile t = {.node = node, .unit = unit, .group = node->n_head / node->n_head_kv};
    t.q_stride = padded(node->n_embd_k);
    t.o_stride = padded(node->n_embd_v);
    t.q = scratch;
    t.o = t.q + MAX_QUERIES * t.q_stride;
    t.s = t.o + MAX_QUERIES * t.o_stride;
    t.sum = t.s + MAX_QUERIES * CELLS;
    t.max = t.sum + MAX_QUERIES * PAD;
    t.kt = t.max + MAX_QUERIES * PAD;
    t.v = t.kt + t.q_stride * CELLS;
    const int most_rows = MAX_QUERIES / t.group;
    for (int row = 0; row < unit->n_entries; row += t.n_rows) {
        t.entries = node->step->entries + unit->first_entry + row;
        t.n_rows = min_int(unit->n_entries - row, most_rows);
        const int most_heads = MAX_QUERIES / (t.n_rows * t.group);
        for (t.head = head; t.head < head_end; t.head = t.head_end) {
            t.head_end = min_int(t.head + most_heads, head_end);
            start_tile(&t);
            attend_blocks(&t);
            finish_tile(&t);
        }
    }
}

/* Each thread takes one piece of the line of (unit, K/V head) items, laid end to end by cost. */
static void attend(const attention_node *node, int ith, int nth) {
    const attention_step *step = node->step;
    const int64_t group = node->n_head / node->n_head_kv, n_heads = node->n_head_kv;
    nth = min_int(nth, step->n_scratch);
    if (ith >= nth)
        return;
    const int64_t total = (step->cells_total * CELL_COST + step->seen_total * group) * n_heads;
    const int64_t begin = total * ith / nth, end = total * (ith + 1) / nth;
    float *scratch = step->scratch + ith * step->scratch_stride;
    for (int u = 0; u < step->n_units; u++) {
        const attention_unit *unit = &step->units[u];
        const int last = u + 1 == step->n_units;
        const int64_t cells = (last ? step->cells_total : unit[1].cells_before) - unit->cells_before;
        const int64_t pairs = (last ? step->seen_total : unit[1].seen_before) - unit->seen_before;
        const int64_t cost = cells * CELL_COST + pairs * group;
        const int64_t start = (unit->cells_before * CELL_COST + unit->seen_before * group) * n_heads + cost / 2;
        int head = 0, head_end = 0; /* an item belongs to the thread in whose piece its middle lies */
        while (head < n_heads && start + head * cost < begin)
            head++;
        for (head_end = head; head_end < n_heads && start + head_end * cost < end;)
            head_end++;
        if (head < head_end)
            attend_unit(node, unit, head, head_end, scratch);
    }
}

/* One query head's partials, in the order of its chunks. */
static void reduce_head(const attention_node *node, int64_t row, int64_t head) {
    const attention_step *step = node->step;
    const int64_t n_embd = node->n_embd_v, o_stride = padded(n_embd), size = o_stride + PAD;
    const int64_t begin = step->partial_ptr[row], end = step->partial_ptr[row + 1];
    float *out = node->out + row * node->out_stride + head * n_embd;
    if (begin == end)
        return;
    if (end * node->n_head * size > step->partials_len) {
        for (int64_t d = 0; d < n_embd; d++)
            out[d] = NAN;
        return;
    }
    const float *first = step->partials + (begin * node->n_head + head) * size;
    float max = node->sinks ? node->sinks[head] : -INFINITY, buffer[PAD];
    for (int64_t i = 0; i < end - begin; i++)
        max = fmaxf(max, first[i * node->n_head * size + o_stride]);
    vf sum = v_set1(0.0f);
    for (int64_t i = 0; i < end - begin; i++) {
        const float *stats = first + i * node->n_head * size + o_stride;
        sum = v_fma(v_exp(v_set1(stats[0] - max)), v_set1(stats[1]), sum);
    }
    if (node->sinks)
        sum = v_add(sum, v_exp(v_set1(node->sinks[head] - max)));
    for (int64_t d = 0; d < n_embd; d += VL) {
        vf acc = v_set1(0.0f);
        for (int64_t i = 0; i < end - begin; i++) {
            const float *part = first + i * node->n_head * size;
            acc = v_fma(v_exp(v_set1(part[o_stride] - max)), v_load(part + d), acc);
        }
        v_store(buffer, acc / sum);
        memcpy(out + d, buffer, (size_t)min_i64(VL, n_embd - d) * sizeof(float));
    }
}

static void reduce(const attention_node *node, int ith, int nth) {
    const int64_t n = (int64_t)node->step->n_rows * node->n_head;
    for (int64_t item = n * ith / nth; item < n * (ith + 1) / nth; item++)
        reduce_head(node, item / node->n_head, item % node->n_head);
}
#endif
