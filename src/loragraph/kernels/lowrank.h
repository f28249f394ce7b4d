/* The low-rank part of a linear layer, y[row] += s * B (A x[row]), routed per row to resident adapters.
 *
 * Two custom nodes of a ggml graph, since no barrier exists inside a node: shrink (or gather, for the
 * token table) writes h = s * A x to scratch, expand adds B h to y. Every backend thread calls the
 * function with (dst, ith, nth, userdata); dst is not read. No ggml header is needed.
 *
 * Determinism: a row's result depends on its own groups alone. Each dot product over n_in has one
 * accumulator vector whatever tile it is computed in; each output column sums over the rank in order;
 * groups are added in the order of the step. So other rows, nth and tiling cannot change a bit.
 *
 * build.py hands this file to cffi without its preprocessor lines.
 */
#ifndef LORAGRAPH_LOWRANK_H
#define LORAGRAPH_LOWRANK_H
#include <stdint.h>

struct ggml_tensor;

/* One adapter's pair for one target. All memory is the caller's. */
typedef struct {
    const void *a;         /* [n_in, rank] of a_type; gather: [rank, n_in], a row per token id; NULL: target untouched */
    const void *bt;        /* lora_b transposed, [n_out, rank] of b_type; Q8_0: the int8 values alone */
    const void *bt_scales; /* Q8_0: F16 [n_out, rank / 32]; else NULL */
    int32_t a_type;        /* ggml numbers: F32 0, F16 1, Q8_0 8 (blocks along ne[0]), BF16 30 */
    int32_t b_type;
    int32_t rank;
    float scale;           /* alpha / rank */
} lora_pair;

/* One row set of a step, rewritten before each compute; the graph keeps its address. */
typedef struct {
    int32_t n_groups;
    int32_t n_entries;
    const int32_t *group_slot; /* [n_groups] in the order of summation */
    const int32_t *group_ptr;  /* [n_groups + 1] into the entries */
    const int32_t *entry_row;  /* [n_entries] row of x and y, ascending within a group */
    const int32_t *entry_token; /* [n_entries] row of an x that a token's experts share; plain steps: entry_row */
    const float *entry_scale;  /* [n_entries] user scale */
    float *scratch;            /* h; a shrink node needs sum over targets, groups of n_entries(group) * rank(pair) floats */
    int64_t scratch_len;       /* floats; if too small nothing is written out of bounds and y becomes NaN */
} lowrank_step;

typedef struct {
    const lora_pair *pairs; /* [n_slots], or experts: [n_slots * n_expert] */
    int32_t n_in;
    int32_t n_out;
} lowrank_target;

/* Targets that read the same x share one node: each distinct A is read once. */
typedef struct {
    const lowrank_step *step;
    const float *x;   /* F32 [n_in, n_rows]; unused by gather */
    int64_t x_stride; /* floats between rows */
    int32_t n_in;
    int32_t n_targets;
    const lowrank_target *const *targets;
    int32_t x_by_token; /* experts: x has one row a token (entry_token), else one an expert of a token (entry_row) */
} lowrank_shrink_node;

/* Adds what `shrink` (or the gather over it) left in scratch. */
typedef struct {
    const lowrank_shrink_node *shrink;
    int32_t target; /* index in shrink->targets */
    float *y;       /* F32 [n_out, n_rows] */
    int64_t y_stride;
} lowrank_expand_node;

/* Token table: h = s * a[:, token] for the one target of `shrink`, whose n_in is n_vocab. */
typedef struct {
    const lowrank_shrink_node *shrink;
    const int32_t *tokens; /* [n_rows] token ids; one outside [0, n_vocab) makes its row NaN */
} lowrank_gather_node;

/* A step of products with chosen experts, made at run time by a route node: a group is an (adapter, expert), its slot
 * adapter slot * n_expert + expert, an entry's row the token's row * n_used + the expert's place in the token. */
typedef struct {
    lowrank_step step; /* its pointers are the arrays below */
    int32_t *group_slot, *group_ptr, *entry_row, *entry_token;
    float *entry_scale;
    int32_t *counts;     /* [n_expert] */
    int64_t max_entries; /* room in every array, at least 1; if too small y's first row becomes NaN */
} lowrank_expert_step;

/* Splits the groups of `from` by the experts that the graph has chosen. Shrink and expand nodes over `to` follow. */
typedef struct {
    const lowrank_step *from; /* rows are tokens */
    lowrank_expert_step *to;
    const int32_t *ids; /* I32 [n_used, n_rows]; an id outside [0, n_expert) is skipped */
    int64_t ids_stride; /* ids between rows */
    int32_t n_used;
    int32_t n_expert;
} lowrank_route_node;

void loragraph_lowrank_route(struct ggml_tensor *dst, int ith, int nth, void *userdata);
void loragraph_lowrank_shrink(struct ggml_tensor *dst, int ith, int nth, void *userdata);
void loragraph_lowrank_expand(struct ggml_tensor *dst, int ith, int nth, void *userdata);
void loragraph_lowrank_gather(struct ggml_tensor *dst, int ith, int nth, void *userdata);

/* Instruction sets: number 0 is portable C, higher numbers are preferred. */
int loragraph_isa_count(void);
const char *loragraph_isa_name(int isa);
int loragraph_isa_supported(int isa);
int loragraph_isa_active(void);
int loragraph_isa_select(int isa); /* -1: the best supported; returns the one now active, -1 if unsupported */
#endif
