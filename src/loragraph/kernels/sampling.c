/* Scans, masses and draws of rows; the instruction set is chosen in lowrank.c for all kernels. */
#include "sampling_impl.h"

#include <math.h>
#include <string.h>

enum {
    SAMPLED = 8,      /* of the blocks of a row, every so many stand for all */
    N_BINS = 1024,    /* of maxima: a count each fits the first cache */
    SMALL_HEAP = 64,  /* up to here a heap is faster than bins */
    MAX_SPREAD = 100, /* what lies further below the best goes into the last bin */
};

/* In the order of lowrank.c. */
static const sampling_kernels *const sets[] = {
    &loragraph_sampling_portable,
#ifdef LORAGRAPH_X86
    &loragraph_sampling_avx2,
    &loragraph_sampling_avx512,
#endif
#ifdef LORAGRAPH_NEON
    &loragraph_sampling_neon,
#endif
};

static const sampling_kernels *kernels(void) { return sets[loragraph_isa_active()]; }

int64_t loragraph_row_blocks(int64_t n) { return (n + SCAN_BLOCK - 1) / SCAN_BLOCK; }
int64_t loragraph_draw_blocks(int64_t n) { return (n + DRAW_BLOCK - 1) / DRAW_BLOCK; }
double loragraph_row_mass_error(void) { return DRAW_ERROR; }

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
    out->finite = kernels()->maxima(x, n_whole, maxima);
    if (rest) {
        float tail[SCAN_BLOCK];
        copy_tail(x + n - rest, rest, x[n - rest], tail);
        out->finite &= kernels()->maxima(tail, 1, maxima + n_whole);
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

static float exact_weight(const row_window *w, float l) {
    return expf(exponent_of(w, w->max / w->temperature, l));
}

/* As libllama does it. `before` each block is the sum of all weights in front of it, so that only one block is walked
 * through twice. */
static int64_t literal_draw(const row_window *w, double u, double *before) {
    const int64_t n_blocks = loragraph_draw_blocks(w->n);
    double sum = 0;
    for (int64_t i = 0; i < w->n; i++) {
        if (i % DRAW_BLOCK == 0)
            before[i / DRAW_BLOCK] = sum;
        if (inside(w, w->x[i]))
            sum += exact_weight(w, w->x[i]);
    }
    const double target = sum * u;
    int64_t block = 0, last = -1;
    while (block < n_blocks - 1 && before[block + 1] < target)
        block++;
    double run = before[block];
    for (int64_t i = block * DRAW_BLOCK; i < w->n; i++)
        if (inside(w, w->x[i])) {
            run += exact_weight(w, w->x[i]);
            last = i;
            if (run >= target)
                break;
        }
    return last;
}

/* Values outside of the window add nothing; -inf always is. */
static int64_t draw_block(const row_window *w, int64_t block, float *tail, const float **x) {
    const int64_t begin = block * DRAW_BLOCK, n = w->n - begin < DRAW_BLOCK ? w->n - begin : DRAW_BLOCK;
    *x = w->x + begin;
    if (n % SCAN_BLOCK == 0)
        return n;
    for (int64_t i = 0; i < DRAW_BLOCK; i++)
        tail[i] = i < n ? w->x[begin + i] : -INFINITY;
    *x = tail;
    return (n + SCAN_BLOCK - 1) / SCAN_BLOCK * SCAN_BLOCK;
}

/* Sums of the weights of each block, and their sum; by expf if `exact`, else within DRAW_ERROR. */
static double block_sum(const row_window *w, const float *x, int64_t n, int exact) {
    if (!exact)
        return kernels()->sum(w, x, n);
    float weights[DRAW_BLOCK];
    kernels()->exact_weights(w, x, n, weights);
    double lanes[8] = {0};
    for (int64_t i = 0; i < n; i += 8)
        for (int j = 0; j < 8; j++)
            lanes[j] += weights[i + j];
    return ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) + ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
}

static double block_sums(const row_window *w, double *sums, int exact) {
    const int64_t n_blocks = loragraph_draw_blocks(w->n);
    float tail[DRAW_BLOCK];
    double total = 0;
    for (int64_t b = 0; b < n_blocks; b++) {
        const float *x;
        const int64_t n = draw_block(w, b, tail, &x);
        const double sum = block_sum(w, x, n, exact);
        if (sums)
            sums[b] = sum;
        total += sum;
    }
    return total;
}

double loragraph_row_mass(const row_window *w, int exact) { return block_sums(w, NULL, exact); }

double loragraph_row_estimate(const row_window *w) {
    const int64_t n_blocks = loragraph_draw_blocks(w->n);
    float tail[DRAW_BLOCK];
    double total = 0;
    for (int64_t b = 0; b < n_blocks; b += SAMPLED) {
        const float *x;
        const int64_t n = draw_block(w, b, tail, &x);
        total += kernels()->sum(w, x, n);
    }
    return total * (double)n_blocks / (double)((n_blocks + SAMPLED - 1) / SAMPLED);
}

static void split_block(const row_window *w, float outer_lo, const float *x, int64_t n, int exact, double *out) {
    if (!exact) {
        kernels()->split(w, outer_lo, x, n, out);
        return;
    }
    row_window outer = *w;
    outer.lo = outer_lo;
    outer.hi = INFINITY;
    out[0] += block_sum(w, x, n, 1);
    out[1] += block_sum(&outer, x, n, 1);
}

void loragraph_row_split(const row_window *w, int64_t id, float outer_lo, double most, double rest, int exact,
                         double *out) {
    row_window closed = *w;
    closed.lo = nextafterf(w->lo, -INFINITY);
    closed.hi = nextafterf(w->hi, INFINITY);
    const int64_t n_blocks = loragraph_draw_blocks(w->n), own = id / DRAW_BLOCK;
    float tail[DRAW_BLOCK];
    out[0] = out[1] = 0;
    for (int64_t b = 0; b < n_blocks && out[0] < most && out[1] - out[0] < rest; b++) {
        const float *x;
        const int64_t n = draw_block(w, b, tail, &x);
        if (b != own) {
            split_block(b < own ? &closed : w, outer_lo, x, n, exact, out);
            continue;
        }
        /* Which of the edges count depends on the id: those that do not are left out of the first sum by hand. */
        float part[DRAW_BLOCK];
        double sums[2] = {0}, unused[2] = {0};
        for (int64_t i = 0; i < n; i++)
            part[i] = b * DRAW_BLOCK + i < id || inside(w, x[i]) ? x[i] : -INFINITY;
        split_block(&closed, outer_lo, part, n, exact, sums);
        split_block(&closed, outer_lo, x, n, exact, unused);
        out[0] += sums[0];
        out[1] += unused[1];
    }
}

static void over_blocks(const row_window *w, void (*add)(const row_window *, const float *, int64_t, double *),
                        double *out) {
    const int64_t n_blocks = loragraph_draw_blocks(w->n);
    float tail[DRAW_BLOCK];
    for (int64_t b = 0; b < n_blocks; b++) {
        const float *x;
        const int64_t n = draw_block(w, b, tail, &x);
        add(w, x, n, out);
    }
}

void loragraph_row_moments(const row_window *w, double *out) {
    out[0] = out[1] = out[2] = 0;
    over_blocks(w, kernels()->moments, out);
}

void loragraph_row_means(const row_window *w, double *out) {
    out[0] = out[1] = 0;
    over_blocks(w, kernels()->means, out);
}

float loragraph_row_max_below(const float *x, int64_t n, float hi) {
    float max = -INFINITY;
    for (int64_t i = 0; i < n; i++)
        max = x[i] < hi && x[i] > max ? x[i] : max;
    return max;
}

/* The draw by sums in vectors; -1 where their errors leave it open. */
static int64_t draw_by_sums(const row_window *w, double u, double *sums, int exact, double *mass) {
    const double error = exact ? 0 : DRAW_ERROR;
    const int64_t n_blocks = loragraph_draw_blocks(w->n);
    const double total = *mass = block_sums(w, sums, exact), target = total * u;
    double run = 0;
    int64_t block = 0;
    while (block < n_blocks - 1 && run + sums[block] < target)
        run += sums[block++];
    float tail[DRAW_BLOCK], weights[DRAW_BLOCK];
    const float *x;
    const int64_t n = draw_block(w, block, tail, &x);
    (exact ? kernels()->exact_weights : kernels()->weights)(w, x, n, weights);
    for (int64_t i = 0; i < n; i++) {
        const double before = run;
        run += weights[i];
        if (run < target || !inside(w, x[i]))
            continue;
        /* What the errors of all weights can move run - u * total by. */
        const double slack = error * (run * (1 - u) + (total - before) * u) + ORDER_ERROR * total;
        return target - before > slack && run - target > slack ? block * DRAW_BLOCK + i : -1;
    }
    return -1;
}

int64_t loragraph_row_draw(const row_window *w, double u, double *sums, double *mass) {
    int64_t id = draw_by_sums(w, u, sums, 0, mass);
    if (id < 0)
        id = draw_by_sums(w, u, sums, 1, mass);
    return id < 0 ? literal_draw(w, u, sums) : id;
}

/* The tokens nearer to the mean logit than x[id], and as far as it. */
static row_window nearer_than(const row_window *w, int64_t id, double mean) {
    const float logit = w->x[id], other = (float)(2 * mean - logit);
    row_window near = *w;
    near.temperature = 1.0f;
    near.lo = fmaxf(logit < mean ? logit : other, w->lo);
    near.hi = logit < mean ? other : logit;
    return near;
}

static int on_edge(const row_window *near, float lo, float l) { return l == near->hi || (l == near->lo && l > lo); }

/* Among the tokens of `near`, which have `mass`, and those on its edges with the lowest ids, until they have more than
 * `wanted`: with many equal tokens, drawing until one is among these might take as many draws. */
static int64_t draw_with_edges(const row_window *w, const row_window *near, double mass, double wanted, double u) {
    int64_t last = -1;
    for (int64_t i = 0; i < w->n && mass <= wanted; i++)
        if (on_edge(near, w->lo, w->x[i])) {
            mass += exact_weight(near, w->x[i]);
            last = i;
        }
    row_window kept = *w;
    double run = 0, target = 0;
    for (int pass = 0; pass < 3; pass++) { /* their best, their sum, their token */
        kept.max = pass ? kept.max : -INFINITY;
        run = 0;
        for (int64_t i = 0; i < w->n; i++) {
            const float l = w->x[i];
            if (!inside(near, l) && !(i <= last && on_edge(near, w->lo, l)))
                continue;
            if (pass == 0)
                kept.max = l > kept.max ? l : kept.max;
            else if ((run += exact_weight(&kept, l)) >= target && pass == 2)
                return i;
        }
        target = run * u;
    }
    return last;
}

/* Draws until a token lies in the set. The mass nearer than one of its tokens is at most typical_p: libllama takes tokens
 * in until they are more. -log p - entropy is the mean logit minus the token's. */
int64_t loragraph_row_typical(const row_window *w, double typical_p, double *sums, mt_state *random) {
    row_window all = *w, left = *w;
    double found[2], unused;
    all.temperature = 1.0f;
    loragraph_row_means(&all, found);
    const double mass = found[0], wanted = typical_p * mass, mean = w->max + found[1] / mass;
    const double others = CERTAIN * (mass - wanted), most = wanted > 0 ? CERTAIN * wanted : INFINITY;
    for (;;) {
        const int64_t id = loragraph_row_draw(&left, loragraph_mt_uniform(random), sums, &unused);
        if (id < 0)
            return id;
        const row_window near = nearer_than(w, id, mean);
        loragraph_row_split(&near, id, w->lo, most, others, 0, found);
        if (found[0] <= wanted || found[1] - found[0] >= others)
            return id;
        const double within = loragraph_row_mass(&near, 0);
        if (within <= wanted) /* some that are as far as this one are in */
            return draw_with_edges(w, &near, within, wanted, loragraph_mt_uniform(random));
        left.lo = near.lo;
        left.hi = near.hi;
        left.max = loragraph_row_max_below(w->x, w->n, left.hi);
    }
}

int64_t loragraph_candidates_draw(const row_candidate *data, int64_t n, double u) {
    float max = data[0].logit;
    for (int64_t i = 1; i < n; i++)
        max = data[i].logit > max ? data[i].logit : max;
    double sum = 0, run = 0;
    for (int64_t i = 0; i < n; i++)
        sum += expf(data[i].logit - max);
    const double target = sum * u;
    for (int64_t i = 0; i < n; i++) {
        run += expf(data[i].logit - max);
        if (run >= target)
            return i;
    }
    return n - 1;
}

void loragraph_mt_seed(mt_state *mt, uint32_t seed) {
    mt->state[0] = seed;
    for (uint32_t i = 1; i < 624; i++)
        mt->state[i] = 1812433253u * (mt->state[i - 1] ^ mt->state[i - 1] >> 30) + i;
    mt->next = 624;
}

/* Matsumoto and Nishimura, "Mersenne Twister", 1998, as the C++ standard fixes it. */
static uint32_t mt_word(mt_state *mt) {
    uint32_t *s = mt->state;
    if (mt->next >= 624) {
        for (int i = 0; i < 624; i++) {
            const uint32_t y = (s[i] & 0x80000000u) | (s[(i + 1) % 624] & 0x7fffffffu);
            s[i] = s[(i + 397) % 624] ^ y >> 1 ^ (y & 1 ? 0x9908b0dfu : 0);
        }
        mt->next = 0;
    }
    uint32_t y = s[mt->next++];
    y ^= y >> 11;
    y ^= y << 7 & 0x9d2c5680u;
    y ^= y << 15 & 0xefc60000u;
    return y ^ y >> 18;
}

double loragraph_mt_uniform(mt_state *mt) {
    const double low = mt_word(mt), high = mt_word(mt);
    const double u = (low + high * 0x1p32) / 0x1p64;
    return u < 1.0 ? u : 0x1.fffffffffffffp-1;
}
