/* values = (1 + gain) values + left right, written once over the primitives of a simd_*.h, which is included before.
 *
 * A tile of columns of `right` is packed for RANKS ranks, so that it stays in the first cache while all rows of the
 * block pass by; a register tile sums VALUE_ROWS x VALUE_VECTORS products up before they are added to the weight.
 */

enum { TILE = VL * VALUE_VECTORS, RANKS = 64 };

/* Adds left right to n_columns <= TILE columns of n_rows rows; n_rows is a constant in every caller. The order of a
 * value's sum is the same whatever n_rows is. */
INLINE void add_product(const float *left, int64_t left_stride, const float *right, int64_t n_ranks, int n_rows,
                        float *values, int64_t n_in, int64_t n_columns) {
    vf sum[VALUE_ROWS][VALUE_VECTORS];
#pragma GCC unroll 6
    for (int r = 0; r < n_rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VALUE_VECTORS; v++)
            sum[r][v] = v_set1(0.0f);
    for (int64_t k = 0; k < n_ranks; k++) {
        vf b[VALUE_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VALUE_VECTORS; v++)
            b[v] = v_load(right + k * TILE + v * VL);
#pragma GCC unroll 6
        for (int r = 0; r < n_rows; r++) {
            const vf a = v_set1(left[r * left_stride + k]);
#pragma GCC unroll 4
            for (int v = 0; v < VALUE_VECTORS; v++)
                sum[r][v] = v_fma(a, b[v], sum[r][v]);
        }
    }
    if (n_columns == TILE) {
#pragma GCC unroll 6
        for (int r = 0; r < n_rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < VALUE_VECTORS; v++) {
                float *to = values + r * n_in + v * VL;
                v_store(to, v_add(v_load(to), sum[r][v]));
            }
        return;
    }
#pragma GCC unroll 6
    for (int r = 0; r < n_rows; r++) {
        float tail[TILE];
#pragma GCC unroll 4
        for (int v = 0; v < VALUE_VECTORS; v++)
            v_store(tail + v * VL, sum[r][v]);
        for (int64_t c = 0; c < n_columns; c++)
            values[r * n_in + c] += tail[c];
    }
}

static void pack(const float *right, int64_t n_in, int64_t n_ranks, int64_t n_columns, float *packed) {
    for (int64_t k = 0; k < n_ranks; k++) {
        memcpy(packed + k * TILE, right + k * n_in, (size_t)n_columns * sizeof(float));
        memset(packed + k * TILE + n_columns, 0, (size_t)(TILE - n_columns) * sizeof(float));
    }
}

static void gain(const rewrite_change *change, int64_t n_rows, int64_t n_in, float *values) {
    for (int64_t r = 0; r < n_rows; r++) {
        float *row = values + r * n_in;
        for (int64_t c = 0; c < n_in; c++)
            row[c] += row[c] * (change->row_gain ? change->row_gain[r] : change->column_gain[c]);
    }
}

static void add_change(const rewrite_change *change, int64_t n_rows, int64_t n_in, float *values) {
    _Alignas(64) float packed[RANKS * TILE];
    if (change->row_gain || change->column_gain)
        gain(change, n_rows, n_in, values);
    for (int64_t k = 0; k < change->rank; k += RANKS)
        for (int64_t c = 0; c < n_in; c += TILE) {
            const int64_t n_ranks = change->rank - k < RANKS ? change->rank - k : RANKS;
            const int64_t n_columns = n_in - c < TILE ? n_in - c : TILE;
            pack(change->right + k * n_in + c, n_in, n_ranks, n_columns, packed);
            int64_t r = 0;
            for (; r + VALUE_ROWS <= n_rows; r += VALUE_ROWS)
                add_product(change->left + r * change->rank + k, change->rank, packed, n_ranks, VALUE_ROWS,
                            values + r * n_in + c, n_in, n_columns);
            for (; r < n_rows; r++)
                add_product(change->left + r * change->rank + k, change->rank, packed, n_ranks, 1,
                            values + r * n_in + c, n_in, n_columns);
        }
}

static float squares(const float *x, int64_t n) {
    vf sum[4] = {v_set1(0.0f), v_set1(0.0f), v_set1(0.0f), v_set1(0.0f)};
    int64_t i = 0;
    for (; i + 4 * VL <= n; i += 4 * VL)
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) {
            const vf one = v_load(x + i + v * VL);
            sum[v] = v_fma(one, one, sum[v]);
        }
    float rest = 0.0f;
    for (; i < n; i++)
        rest += x[i] * x[i];
    return rest + v_sum(v_add(v_add(sum[0], sum[1]), v_add(sum[2], sum[3])));
}
