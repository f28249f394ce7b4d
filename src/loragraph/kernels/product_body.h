/* Who computes what of the products in int8: the functions of one instruction set.
 *
 * Included after COLUMNS, K_BLOCKS and ROW_BLOCK, `unpacked` (K_BLOCKS blocks of COLUMNS columns), quantize_block, unpack
 * and multiply_tile. `layout` is a constant in every caller, so that each becomes its own loop.
 */

/* Into the tiles that product_impl.h describes. */
static void quantize_rows(const product_input_node *node, int ith, int nth) {
    const int64_t n_blocks = node->n_in / QK, end = node->n_rows * (ith + 1) / nth;
    int64_t row = node->n_rows * ith / nth;
    for (int64_t first = 0; first < end;) {
        const int size = tile_size(node->n_rows - first);
        char *tile = (char *)node->quantized + first * n_blocks * RECORD;
        for (; row < min_i64(end, first + size); row++) {
            const int64_t j = row - first;
            const float *x = node->x + row * node->x_stride;
            char *block = tile;
            for (int64_t b = 0; b < n_blocks; b++, block += size * RECORD)
                quantize_block(x + b * QK, block + j * QK, (float *)(block + size * QK) + j,
                               (int32_t *)(block + size * (QK + 4)) + j);
        }
        first += size;
    }
}

INLINE void multiply_rows(const product_node *node, const unpacked *w, int64_t begin, int64_t n, int64_t first,
                          int64_t end, int64_t column, int layout) {
    const int64_t n_blocks = node->input->n_in / QK;
    for (int64_t row = first; row < end;) {
        const int size = tile_size(node->input->n_rows - row);
        const char *x = (const char *)node->input->quantized + (row * n_blocks + begin * size) * RECORD;
        float *y = node->y + row * node->y_stride + column;
        switch (size) {
        case 16: multiply_tile(w, n, x, y, node->y_stride, 16, layout, begin > 0); break;
        case 8: multiply_tile(w, n, x, y, node->y_stride, 8, layout, begin > 0); break;
        case 4: multiply_tile(w, n, x, y, node->y_stride, 4, layout, begin > 0); break;
        case 2: multiply_tile(w, n, x, y, node->y_stride, 2, layout, begin > 0); break;
        default: multiply_tile(w, n, x, y, node->y_stride, 1, layout, begin > 0); break;
        }
        row += size;
    }
}

INLINE void multiply_layout(const product_node *node, int ith, int nth, int layout) {
    const int64_t n_blocks = node->input->n_in / QK, n_tiles = node->n_out / COLUMNS;
    unpacked w;
    for (int64_t first = 0; first < node->input->n_rows; first += ROW_BLOCK) {
        const int64_t end = min_i64(first + ROW_BLOCK, node->input->n_rows);
        for (int64_t tile = n_tiles * ith / nth; tile < n_tiles * (ith + 1) / nth; tile++)
            for (int64_t begin = 0; begin < n_blocks; begin += K_BLOCKS) {
                const int64_t n = min_i64(K_BLOCKS, n_blocks - begin);
                unpack(node->w, n_blocks, tile, begin, n, &w, layout);
                multiply_rows(node, &w, begin, n, first, end, tile * COLUMNS, layout);
            }
    }
}
