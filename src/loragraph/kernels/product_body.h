/* Who computes what of the products in int8: the functions of one instruction set.
 *
 * Included after COLUMNS, K_BLOCKS and ROW_BLOCK, `unpacked` (K_BLOCKS blocks of bytes of COLUMNS columns), value_bytes (of
 * quantised x for a layout), quantize_block, unpack and multiply_tile. `layout` is a constant in every caller, so that each becomes its own loop.
 */

/* Into the tiles that product_impl.h describes. */
INLINE void quantize_rows(const product_input_node *node, int ith, int nth, int layout) {
    const int64_t values = QK * value_bytes(layout), size_of = record(value_bytes(layout));
    const int64_t n_blocks = node->n_in / QK, end = node->n_rows * (ith + 1) / nth;
    int64_t row = node->n_rows * ith / nth;
    for (int64_t first = 0; first < end;) {
        const int size = tile_size(node->n_rows - first);
        char *tile = (char *)node->quantized + first * n_blocks * size_of;
        for (; row < min_i64(end, first + size); row++) {
            const int64_t j = row - first;
            const float *x = node->x + row * node->x_stride;
            char *block = tile;
            for (int64_t b = 0; b < n_blocks; b++, block += size * size_of)
                quantize_block(x + b * QK, block + j * values, (float *)(block + size * values) + j,
                               (int32_t *)(block + size * (values + 4)) + j, layout);
        }
        first += size;
    }
}

INLINE void multiply_rows(const product_node *node, const unpacked *w, int64_t begin, int64_t n, int64_t first,
                          int64_t end, int64_t column, int layout) {
    const int64_t n_blocks = node->input->n_in / QK, size_of = record(value_bytes(layout));
    for (int64_t row = first; row < end;) {
        const int size = tile_size(node->input->n_rows - row);
        const char *x = (const char *)node->input->quantized + (row * n_blocks + begin * size) * size_of;
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
    const int64_t k_blocks = K_BLOCKS / value_bytes(layout);
    unpacked w;
    for (int64_t first = 0; first < node->input->n_rows; first += ROW_BLOCK) {
        const int64_t end = min_i64(first + ROW_BLOCK, node->input->n_rows);
        for (int64_t tile = n_tiles * ith / nth; tile < n_tiles * (ith + 1) / nth; tile++)
            for (int64_t begin = 0; begin < n_blocks; begin += k_blocks) {
                const int64_t n = min_i64(k_blocks, n_blocks - begin);
                unpack(node->w, n_blocks, tile, begin, n, &w, layout);
                multiply_rows(node, &w, begin, n, first, end, tile * COLUMNS, layout);
            }
    }
}
