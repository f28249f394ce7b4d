/* Attention of a step's tokens over lists of KV cells: no mask, any cell in any place, shared cells read once.
 *
 * A stretch is a piece of a path of the prefix tree: cells in order, and for each row (query token) that sees it a
 * half-open range of them. A row sees the union over its stretches, in their order.
 *
 * Two custom nodes of a ggml graph, since no barrier exists inside a node: attend computes, for every chunk of a
 * stretch and every row that sees some of it, softmax and weighted V; a row with one chunk is then done, the others
 * leave partials (max, sum, V) in scratch that reduce combines. Every backend thread calls the functions with (dst,
 * ith, nth, userdata); dst is not read. No ggml header is needed.
 *
 * Determinism: a row's chunks depend on its own ranges alone (fixed ordinals of the stretch), scores sum over the
 * head in order, V sums over the cells in order. So other rows, tiling and nth cannot change a bit.
 *
 * build.py hands this file to cffi without its preprocessor lines.
 */
#ifndef LORAGRAPH_ATTENTION_H
#define LORAGRAPH_ATTENTION_H
#include <stdint.h>

struct ggml_tensor;

/* What a step's rows see; read by plan alone. */
typedef struct {
    int32_t n_rows;
    int32_t n_stretches;
    int32_t n_cells;           /* of the cache: no run reaches beyond */
    int32_t n_runs;
    int32_t n_seen;
    const int32_t *run_ptr;    /* [n_stretches + 1] into the runs */
    const int32_t *run_start;  /* [n_runs] first cell */
    const int32_t *run_length; /* [n_runs] */
    const int32_t *row_ptr;    /* [n_stretches + 1] into the next three */
    const int32_t *row;        /* [n_seen] row that sees the stretch */
    const int32_t *row_begin;  /* [n_seen] range of the stretch's cells, by ordinal */
    const int32_t *row_end;
} attention_lists;

/* One row's share of a unit. */
typedef struct {
    int32_t row;
    int32_t begin;   /* range of the unit's cells, by ordinal */
    int32_t end;
    int32_t partial; /* where it leaves its result; -1: the row is done, in the output */
} attention_entry;

/* A chunk of a stretch and a tile of the rows that see it. */
typedef struct {
    int64_t first_cell;  /* in attention_step.cells */
    int32_t n_cells;
    int32_t first_entry;
    int32_t n_entries;
    int64_t cells_before; /* sums over the units before, for the sharing out among threads */
    int64_t seen_before;  /* (row, cell) pairs */
} attention_unit;

/* The plan of a step, rewritten before each compute; the graph keeps its address. All memory is the caller's. */
typedef struct {
    int32_t n_rows;
    int32_t n_units;
    int64_t cells_total;
    int64_t seen_total;
    int32_t *cells;           /* all stretches one after another */
    attention_unit *units;
    attention_entry *entries;
    int32_t *partial_ptr;     /* [n_rows + 1] a row's partials in the order of its chunks; none: no reduction */
    int32_t *cursor;          /* [n_rows] of plan */
    float *partials;
    float *scratch;           /* [n_scratch][scratch_stride]; threads beyond n_scratch do nothing */
    int64_t scratch_stride;   /* floats */
    int32_t n_scratch;
    int64_t max_cells;        /* room in the arrays above */
    int64_t max_units;
    int64_t max_entries;
    int64_t max_rows;
    int64_t partials_len;     /* floats; if too small reduce writes NaN and nothing is written out of bounds */
    int64_t need_cells;       /* what the lists last seen by plan need */
    int64_t need_units;
    int64_t need_entries;
    int64_t need_partials;    /* partials, each of loragraph_attention_partial_floats */
} attention_step;

/* One layer. */
typedef struct {
    const attention_step *step;
    const float *q;        /* F32 [n_embd_k, n_head, n_rows] */
    int64_t q_head_stride; /* floats */
    int64_t q_row_stride;
    const void *k;         /* [n_embd_k * n_head_kv, n_cells] of k_type, rows k_stride bytes apart */
    const void *v;         /* [n_embd_v * n_head_kv, n_cells] */
    int64_t k_stride;
    int64_t v_stride;
    int32_t k_type;        /* ggml numbers: F32 0, F16 1, Q8_0 8, BF16 30 */
    int32_t v_type;
    int32_t n_head;
    int32_t n_head_kv;
    int32_t n_embd_k;      /* head sizes, multiples of 8; of 32 for Q8_0 */
    int32_t n_embd_v;
    float scale;
    float softcap;         /* c * tanh(s / c); 0: none */
    const float *sinks;    /* [n_head] a score that takes its share of the weights and adds nothing; or NULL */
    float *out;            /* F32 [n_embd_v * n_head, n_rows] */
    int64_t out_stride;    /* floats */
} attention_node;

/* Makes the plan. 0: done; 1: room is lacking, need_* say how much; -1 a run leaves the cache, -2 no such row,
 * -3 a range leaves its stretch or is empty, -4 a row sees nothing, -5 pointers do not fit their lists. After
 * anything but 0 the plan is empty. */
int loragraph_attention_plan(attention_step *step, const attention_lists *lists);

int64_t loragraph_attention_scratch_floats(int n_embd_k, int n_embd_v); /* of one thread */
int64_t loragraph_attention_partial_floats(int n_head, int n_embd_v);   /* of one partial */
int loragraph_attention_max_group(void); /* most query heads that share a K/V head */

void loragraph_attention_attend(struct ggml_tensor *dst, int ith, int nth, void *userdata);
void loragraph_attention_reduce(struct ggml_tensor *dst, int ith, int nth, void *userdata);
#endif
