/* Products of F16 weights in F32, without rounding x: the function of one instruction set.
 *
 * A tile is some rows of x with some rows of w, each sum a vector over the positions of n_in that are equal mod VL.
 * Weights become F32 as they are loaded, on pipes that the multiplications leave free, so nothing is unpacked to memory.
 * A sum's order is the same in every tile: one fma for each VL positions, then reduce_8's tree.
 *
 * Included after simd_*.h and rows.h, F16_TOKENS and F16_SUMS, next_tokens, tile_rows and reduce_8. `rows` and `tokens` are
 * constants in every caller.
 */

enum {
    STRIP_BYTES = 65536, /* of w that meet all rows of x, one tile after another, from the second cache */
    STRIP_ROWS = 24,     /* at least: a multiple of every tile's */
};

INLINE vf load(const char *row, int64_t k, int n, int type) {
    return n < VL ? row_load_tail(row, k, n, type) : row_load(row, k, type);
}

/* n positions, VL of them or the last ones. What is fewer is held, what is more streams past. */
INLINE void multiply_step(const product_f16_node *node, const char *w, const char *x, int64_t k, int n, vf *acc, int rows,
                          int tokens) {
    const int64_t w_stride = 2 * node->n_in, x_stride = 4 * node->x_stride;
    vf v[F16_TOKENS];
    if (rows <= tokens) {
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
            v[r] = load(w + r * w_stride, k, n, F16);
#pragma GCC unroll 8
        for (int t = 0; t < tokens; t++) {
            const vf value = load(x + t * x_stride, k, n, F32);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
                acc[r * tokens + t] = v_fma(v[r], value, acc[r * tokens + t]);
        }
    } else {
#pragma GCC unroll 8
        for (int t = 0; t < tokens; t++)
            v[t] = load(x + t * x_stride, k, n, F32);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const vf weight = load(w + r * w_stride, k, n, F16);
#pragma GCC unroll 8
            for (int t = 0; t < tokens; t++)
                acc[r * tokens + t] = v_fma(weight, v[t], acc[r * tokens + t]);
        }
    }
}

/* `rows` rows of w with `tokens` rows of x. */
INLINE void multiply_tile(const product_f16_node *node, int64_t row, int64_t token, int rows, int tokens) {
    const int64_t n_in = node->n_in;
    const char *w = (const char *)(node->w + row * n_in), *x = (const char *)(node->x + token * node->x_stride);
    vf acc[F16_SUMS];
#pragma GCC unroll 24
    for (int i = 0; i < F16_SUMS; i++)
        acc[i] = v_set1(0.0f);
    int64_t k = 0;
    for (; k + VL <= n_in; k += VL) {
        /* The next tile's weights, in the order in which they lie: the processor goes on from there. Never faults. */
#pragma GCC unroll 8
        for (int i = 0; i < rows * VL * 2; i += LINE)
            __builtin_prefetch(w + 2 * rows * (n_in + k) + i, 0, 3);
        multiply_step(node, w, x, k, VL, acc, rows, tokens);
    }
    if (k < n_in)
        multiply_step(node, w, x, k, (int)(n_in - k), acc, rows, tokens);
    float sums[F16_SUMS];
#pragma GCC unroll 3
    for (int i = 0; i < rows * tokens; i += 8)
        reduce_8(acc + i, sums + i);
    float *y = node->y + token * node->y_stride + row;
#pragma GCC unroll 8
    for (int t = 0; t < tokens; t++)
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
            y[t * node->y_stride + r] = sums[r * tokens + t];
}

/* All rows of a strip with one tile's rows of x. */
INLINE void multiply_strip(const product_f16_node *node, int64_t begin, int64_t end, int64_t token, int tokens) {
    const int rows = tile_rows(tokens);
    int64_t row = begin;
    for (; row + rows <= end; row += rows)
        multiply_tile(node, row, token, rows, tokens);
    for (; row < end; row++)
        multiply_tile(node, row, token, 1, tokens);
}

static void multiply_f16(const product_f16_node *node, int ith, int nth) {
    const int64_t last = node->n_out * (ith + 1) / nth;
    const int64_t strip = (STRIP_BYTES / (2 * node->n_in) / STRIP_ROWS + 1) * STRIP_ROWS;
    for (int64_t begin = node->n_out * ith / nth; begin < last; begin += strip) {
        const int64_t end = min_i64(begin + strip, last);
        for (int64_t token = 0; token < node->n_rows;) {
            const int tokens = next_tokens(node->n_rows - token);
            switch (tokens) {
            case 1: multiply_strip(node, begin, end, token, 1); break;
            case 2: multiply_strip(node, begin, end, token, 2); break;
            case 3: multiply_strip(node, begin, end, token, 3); break;
            case 4: multiply_strip(node, begin, end, token, 4); break;
#if F16_TOKENS > 4
            case 5: multiply_strip(node, begin, end, token, 5); break;
            case 6: multiply_strip(node, begin, end, token, 6); break;
            case 7: multiply_strip(node, begin, end, token, 7); break;
            default: multiply_strip(node, begin, end, token, 8); break;
#endif
            }
            token += tokens;
        }
    }
}
