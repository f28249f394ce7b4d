/* The quantised x, and what product.c asks of an instruction set. */
#ifndef LORAGRAPH_PRODUCT_IMPL_H
#define LORAGRAPH_PRODUCT_IMPL_H
#include "product.h"

#if defined(__x86_64__) || defined(__i386__)
#define LORAGRAPH_X86 1
#endif

/* Rows stand in tiles of 16, the rest in tiles of 8, 4, 2 and 1; a tile begins at its first row's n_blocks * RECORD
 * bytes. In a tile of T rows, block after block: T times 32 int8, T floats d, T int32 of the negated sums of int8. */
enum { QK = 32, RECORD = QK + 8, MAX_TILE = 16 };

static inline int tile_size(int64_t n_rows) {
    return n_rows >= 16 ? 16 : n_rows >= 8 ? 8 : n_rows >= 4 ? 4 : n_rows >= 2 ? 2 : 1;
}

#ifdef LORAGRAPH_X86
void loragraph_product_input_vnni(const product_input_node *node, int ith, int nth);
void loragraph_product_vnni(const product_node *node, int ith, int nth);
void loragraph_product_f16_avx512(const product_f16_node *node, int ith, int nth);
#endif
#endif
