/* What one instruction set provides to attention.c, and the sizes that all of them share. */
#ifndef LORAGRAPH_ATTENTION_IMPL_H
#define LORAGRAPH_ATTENTION_IMPL_H
#include "attention.h"
#include "lowrank_impl.h"

typedef struct {
    void (*attend)(const attention_node *node, int ith, int nth);
    void (*reduce)(const attention_node *node, int ith, int nth);
} attention_kernels;

extern const attention_kernels loragraph_attention_portable;
#ifdef LORAGRAPH_X86
extern const attention_kernels loragraph_attention_avx2;
extern const attention_kernels loragraph_attention_avx512;
#endif
#ifdef LORAGRAPH_NEON
extern const attention_kernels loragraph_attention_neon;
#endif

enum {
    CELLS = 32,         /* of a block: one step of the online softmax */
    TILE_ROWS = 64,     /* rows of a unit */
    MAX_QUERIES = 192,  /* query heads that share a pass over a unit's cells; their state fits the second cache */
    PAD = 16,           /* rows of scratch are padded to the widest vector */
    CELL_COST = 3,      /* reading and converting a cell of one head, in units of one (query head, cell) pair */
};

static inline int64_t padded(int64_t n) { return (n + PAD - 1) / PAD * PAD; }
#endif
