/* Masses and draws of rows; the instruction set is chosen in lowrank.c for all kernels. */
#include "sampling_impl.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

enum { SAMPLED = 8 }; /* of the blocks of a row, every so many stand for all */

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

const sampling_kernels *loragraph_sampling_active(void) { return sets[loragraph_isa_active()]; }

static const sampling_kernels *kernels(void) { return loragraph_sampling_active(); }

int64_t loragraph_draw_blocks(int64_t n) { return (n + DRAW_BLOCK - 1) / DRAW_BLOCK; }
double loragraph_row_mass_error(void) { return DRAW_ERROR; }

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
    closed.lo = fmaxf(nextafterf(w->lo, -INFINITY), outer_lo); /* not what stands on that one */
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
    enum { LANES = 8 }; /* for the compiler's vectors */
    float lanes[LANES], max = -INFINITY;
    for (int j = 0; j < LANES; j++)
        lanes[j] = -INFINITY;
    for (int64_t i = 0; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++) {
            const float l = x[i + j] < hi ? x[i + j] : -INFINITY;
            lanes[j] = l > lanes[j] ? l : lanes[j];
        }
    for (int64_t i = n - n % LANES; i < n; i++)
        max = x[i] < hi && x[i] > max ? x[i] : max;
    for (int j = 0; j < LANES; j++)
        max = lanes[j] > max ? lanes[j] : max;
    return max;
}

/* The sums of a window's blocks, from which any number of tokens is drawn. */
typedef struct {
    row_window window;
    double *sums, mass;
    int exact;
} summed_window;

static void sum_window(summed_window *s, int exact) {
    s->mass = block_sums(&s->window, s->sums, exact);
    s->exact = exact;
}

/* The token at share u; -1 where the sums' errors leave it open. */
static int64_t find_token(const summed_window *s, double u) {
    const row_window *w = &s->window;
    const double error = s->exact ? 0 : DRAW_ERROR, total = s->mass, target = total * u;
    const int64_t n_blocks = loragraph_draw_blocks(w->n);
    double run = 0;
    int64_t block = 0;
    while (block < n_blocks - 1 && run + s->sums[block] < target)
        run += s->sums[block++];
    float tail[DRAW_BLOCK], weights[DRAW_BLOCK];
    const float *x;
    const int64_t n = draw_block(w, block, tail, &x);
    (s->exact ? kernels()->exact_weights : kernels()->weights)(w, x, n, weights);
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

static int64_t draw_token(summed_window *s, double u) {
    int64_t id = find_token(s, u);
    if (id < 0 && !s->exact) {
        sum_window(s, 1);
        id = find_token(s, u);
    }
    if (id < 0) {
        id = literal_draw(&s->window, u, s->sums);
        sum_window(s, 1); /* which were its scratch */
    }
    return id;
}

int64_t loragraph_row_draw(const row_window *w, double u, double *sums, double *mass) {
    summed_window all = {*w, sums, 0, 0};
    sum_window(&all, 0);
    const int64_t id = draw_token(&all, u);
    *mass = all.mass;
    return id;
}

static row_window between(const row_window *w, float lo, float hi) {
    row_window near = *w;
    near.temperature = 1.0f;
    near.lo = fmaxf(lo, w->lo);
    near.hi = hi;
    return near;
}

/* The tokens nearer to the mean logit than x[id]; on its edges are those as far as it. */
static row_window nearer_than(const row_window *w, int64_t id, double mean) {
    const float logit = w->x[id], other = (float)(2 * mean - logit);
    return between(w, logit < mean ? logit : other, logit < mean ? other : logit);
}

static row_window with_edges(const row_window *w, const row_window *near) {
    return between(w, nextafterf(near->lo, -INFINITY), nextafterf(near->hi, INFINITY));
}

/* Brings both windows around the mean together: `in` has no more mass than is wanted, `out` has more. Between them are
 * then those of one distance. */
static void close_in(const row_window *w, double mean, double wanted, row_window *in, row_window *out) {
    const double far = fmax(mean - out->lo, out->hi - mean);
    int64_t least = 0, most; /* distances, as the bits of doubles, which are in the same order */
    memcpy(&most, &far, sizeof far);
    *in = between(w, (float)mean, (float)mean);
    while (most - least > 1 && (in->lo != out->lo || in->hi != out->hi)) {
        const int64_t bits = least + (most - least) / 2;
        double d;
        memcpy(&d, &bits, sizeof d);
        const row_window near = between(w, (float)(mean - d), (float)(mean + d));
        if (loragraph_row_mass(&near, 0) <= wanted) {
            least = bits;
            *in = near;
        } else {
            most = bits;
            *out = near;
        }
        if (nextafterf(in->lo, -INFINITY) <= out->lo && nextafterf(in->hi, INFINITY) >= out->hi)
            break;
    }
}

/* Among the tokens of `in`, and of those of `out` besides the ones with the lowest ids, until they have more than
 * `wanted`: with many equal tokens, drawing until one is among these might take as many draws. */
static int64_t draw_with_edges(const row_window *w, const row_window *in, const row_window *out, double wanted,
                               double u) {
    double mass = loragraph_row_mass(in, 0);
    int64_t last = -1;
    for (int64_t i = 0; i < w->n && mass <= wanted; i++)
        if (inside(out, w->x[i]) && !inside(in, w->x[i])) {
            mass += exact_weight(in, w->x[i]);
            last = i;
        }
    row_window kept = *w;
    double run = 0, target = 0;
    for (int pass = 0; pass < 3; pass++) { /* their best, their sum, their token */
        kept.max = pass ? kept.max : -INFINITY;
        run = 0;
        for (int64_t i = 0; i < w->n; i++) {
            const float l = w->x[i];
            if (!inside(in, l) && !(i <= last && inside(out, l)))
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

/* Draws until a token lies in the set. The mass nearer than one of its tokens is at most typical_p: libllama takes
 * tokens in until they are more. -log p - entropy is the mean logit minus the token's. */
int64_t loragraph_row_typical(const row_window *w, double typical_p, double *sums, mt_state *random) {
    enum { REFUSED = 2, MISSED = 16 }; /* draws, before the window is made smaller */
    enum { NARROWED = 6 };             /* times, before the set is looked for: what is likely may all be far from it */
    row_window all = *w, near = *w;
    double found[2];
    all.temperature = 1.0f;
    loragraph_row_means(&all, found);
    const double mass = found[0], wanted = typical_p * mass, mean = w->max + found[1] / mass;
    const double others = CERTAIN * (mass - wanted), most = wanted > 0 ? CERTAIN * wanted : INFINITY;
    summed_window left = {*w, sums, 0, 0};
    sum_window(&left, 0);
    for (int refused = 0, missed = 0, narrowed = 0;;) {
        const int64_t id = draw_token(&left, loragraph_mt_uniform(random));
        if (id < 0)
            return id;
        if (w->x[id] < near.lo || w->x[id] > near.hi) /* further than one that was refused */
            missed++;
        else {
            near = nearer_than(w, id, mean);
            loragraph_row_split(&near, id, w->lo, most, others, 0, found);
            if (found[0] <= wanted || found[1] - found[0] >= others)
                return id;
            refused++;
        }
        if (refused < REFUSED && missed < MISSED)
            continue;
        row_window out = with_edges(w, &near);
        if (++narrowed == NARROWED)
            close_in(w, mean, wanted, &near, &out);
        if (loragraph_row_mass(&near, 0) <= wanted) /* some on its edges are in */
            return draw_with_edges(w, &near, &out, wanted, loragraph_mt_uniform(random));
        left.window.lo = near.lo;
        left.window.hi = near.hi;
        if (near.hi <= left.window.max)
            left.window.max = loragraph_row_max_below(w->x, w->n, near.hi);
        sum_window(&left, 0);
        refused = missed = 0;
    }
}
