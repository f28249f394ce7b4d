/* The quantised x, and what one instruction set provides to product.c. */
#ifndef LORAGRAPH_PRODUCT_IMPL_H
#define LORAGRAPH_PRODUCT_IMPL_H
#include "product.h"

#if defined(__x86_64__) || defined(__i386__)
#define LORAGRAPH_X86 1
#endif

/* Rows stand in tiles of 16, the rest in tiles of 8, 4, 2 and 1; a tile begins after the records of the rows before it,
 * n_blocks each. In a tile of T rows, block after block: T times 32 values, T floats d, T int32 of the values' negated
 * sums (in AVX2's products times 8, the offset of Q4_0). Values are int8, for some products int16. */
enum { QK = 32, MAX_TILE = 16 };

/* Bytes of a block of one row of x. */
static inline int64_t record(int value_bytes) { return QK * value_bytes + 8; }

static inline int tile_size(int64_t n_rows) {
    return n_rows >= 16 ? 16 : n_rows >= 8 ? 8 : n_rows >= 4 ? 4 : n_rows >= 2 ? 2 : 1;
}

/* min_rows: from how many rows on a layout's kernel is faster than ggml's product (measured), 0 where there is none. */
typedef struct {
    int min_rows[LORAGRAPH_LAYOUTS];
    int value_bytes[LORAGRAPH_LAYOUTS]; /* of quantised x */
    void (*input)(const product_input_node *node, int ith, int nth);
    void (*multiply)(const product_node *node, int ith, int nth);
    void (*multiply_f16)(const product_f16_node *node, int ith, int nth);
} product_kernels;

#ifdef LORAGRAPH_X86
void loragraph_product_input_vnni(const product_input_node *node, int ith, int nth);
void loragraph_product_vnni(const product_node *node, int ith, int nth);
void loragraph_product_input_avx2(const product_input_node *node, int ith, int nth);
void loragraph_product_avx2(const product_node *node, int ith, int nth);
void loragraph_product_f16_avx512(const product_f16_node *node, int ith, int nth);
void loragraph_product_f16_avx2(const product_f16_node *node, int ith, int nth);
#endif
#endif
