/* The first pass over a row, which finds maxima of blocks, and its best k by those. */
#include "sampling_impl.h"

#include <math.h>

enum {
    N_BINS = 1024,    /* of maxima: a count each fits the first cache */
    SMALL_HEAP = 64,  /* up to here a heap is faster than bins */
    MAX_SPREAD = 100, /* what lies further below the best goes into the last bin */
};

int64_t loragraph_row_blocks(int64_t n) { return (n + SCAN_BLOCK - 1) / SCAN_BLOCK; }

/* The last n < SCAN_BLOCK values, filled up with `fill`. */
static void copy_tail(const float *x, int64_t n, float fill, float *tail) {
    for (int64_t i = 0; i < SCAN_BLOCK; i++)
        tail[i] = i < n ? x[i] : fill;
}

static void find_best(const float *x, int64_t n, const float *maxima, row_scan *out) {
    const int64_t n_blocks = loragraph_row_blocks(n);
    float max = maxima[0];
    for (int64_t b = 1; b < n_blocks; b++)
        max = maxima[b] > max ? maxima[b] : max;
    int64_t block = 0;
    while (block < n_blocks - 1 && maxima[block] != max)
        block++;
    int64_t best = block * SCAN_BLOCK;
    while (best < n - 1 && x[best] != max)
        best++;
    out->max = max;
    out->best = (int32_t)best;
}

void loragraph_row_scan(const float *x, int64_t n, float *maxima, row_scan *out) {
    const int64_t n_whole = n / SCAN_BLOCK, rest = n % SCAN_BLOCK;
    out->finite = loragraph_sampling_active()->maxima(x, n_whole, maxima);
    if (rest) {
        float tail[SCAN_BLOCK];
        copy_tail(x + n - rest, rest, x[n - rest], tail);
        out->finite &= loragraph_sampling_active()->maxima(tail, 1, maxima + n_whole);
    }
    find_best(x, n, maxima, out);
}

void loragraph_rows_scan(const float *x, int64_t stride, const int64_t *rows, int64_t n_rows, int64_t n, float *maxima,
                         row_scan *out) {
    for (int64_t i = 0; i < n_rows; i++)
        loragraph_row_scan(x + rows[i] * stride, n, maxima, out + i);
}

void loragraph_row_rescan(const float *x, int64_t n, const int64_t *ids, int64_t n_ids, float *maxima, row_scan *out) {
    for (int64_t i = 0; i < n_ids; i++) {
        const int64_t block = ids[i] / SCAN_BLOCK, begin = block * SCAN_BLOCK;
        const int64_t end = begin + SCAN_BLOCK < n ? begin + SCAN_BLOCK : n;
        float max = x[begin];
        for (int64_t j = begin + 1; j < end; j++)
            max = x[j] > max ? x[j] : max;
        maxima[block] = max;
    }
    find_best(x, n, maxima, out);
}

/* A heap of the best so far; its root is the worst of them. */
static int worse(row_candidate a, row_candidate b) { return a.logit < b.logit || (a.logit == b.logit && a.id > b.id); }

static void sift_down(row_candidate *heap, int64_t n, row_candidate value) {
    int64_t at = 0;
    for (int64_t child = 1; child < n; child = 2 * at + 1) {
        if (child + 1 < n && worse(heap[child + 1], heap[child]))
            child++;
        if (!worse(heap[child], value))
            break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = value;
}

static void sift_up(row_candidate *heap, int64_t at, row_candidate value) {
    for (int64_t parent; at > 0 && worse(value, heap[parent = (at - 1) / 2]); at = parent)
        heap[at] = heap[parent];
    heap[at] = value;
}

/* Of x[begin, end), what is at least `least`. Ids ascend: an equal value with a higher id is worse than all in the
 * heap. */
static int64_t keep_best(const float *x, int64_t begin, int64_t end, float least, int64_t k, row_candidate *heap,
                         int64_t size) {
    for (int64_t i = begin; i < end; i++) {
        if (!(x[i] >= least))
            continue;
        const row_candidate value = {(int32_t)i, x[i], 0.0f};
        if (size < k)
            sift_up(heap, size++, value);
        else if (value.logit > heap[0].logit)
            sift_down(heap, k, value);
    }
    return size;
}

/* A maximum that k of the n >= k >= 1 maxima reach, and not many more: the least in the bins that hold the k
 * largest. */
static float kth_maximum(const float *maxima, int64_t n, int64_t k) {
    int32_t bins[N_BINS] = {0};
    float hi = maxima[0], lo = maxima[0];
    for (int64_t i = 1; i < n; i++) {
        hi = maxima[i] > hi ? maxima[i] : hi;
        lo = maxima[i] < lo ? maxima[i] : lo;
    }
    lo = lo > hi - MAX_SPREAD ? lo : hi - MAX_SPREAD; /* forbidden tokens are -inf */
    const float scale = (N_BINS - 1) / (hi - lo);
    for (int64_t i = 0; i < n; i++) {
        const float bin = (hi - maxima[i]) * scale;
        bins[bin < N_BINS - 1 ? (int)bin : N_BINS - 1]++; /* what is not a number goes last */
    }
    int last = 0;
    for (int64_t held = bins[0]; held < k; held += bins[last])
        last++;
    float least = hi;
    for (int64_t i = 0; i < n; i++) {
        const float bin = (hi - maxima[i]) * scale;
        if ((bin < N_BINS - 1 ? (int)bin : N_BINS - 1) <= last)
            least = maxima[i] < least ? maxima[i] : least;
    }
    return least;
}

int64_t loragraph_row_top(const float *x, int64_t n, const float *maxima, int64_t k, row_candidate *heap,
                          int64_t *ids) {
    const int64_t n_blocks = loragraph_row_blocks(n);
    if (k <= 0)
        return 0;
    /* k values are at least as large as the k-th largest maximum: what is smaller is none of the best. */
    float least = -INFINITY;
    if (k <= SMALL_HEAP && k <= n_blocks) {
        keep_best(maxima, 0, n_blocks, least, k, heap, 0);
        least = heap[0].logit;
    } else if (k <= n_blocks)
        least = kth_maximum(maxima, n_blocks, k);
    int64_t size = 0;
    for (int64_t b = 0; b < n_blocks; b++) {
        const int64_t begin = b * SCAN_BLOCK, end = begin + SCAN_BLOCK < n ? begin + SCAN_BLOCK : n;
        if (maxima[b] >= least && (size < k || maxima[b] > heap[0].logit))
            size = keep_best(x, begin, end, least, k, heap, size);
    }
    for (int64_t left = size; left > 0; left--) { /* the worst goes last */
        ids[left - 1] = heap[0].id;
        sift_down(heap, left - 1, heap[left - 1]);
    }
    return size;
}
