/* The passes over a row for one instruction set; simd_*.h is included before. */
#include "sampling_impl.h"
#include "simd_exp.h"

#include <math.h>

enum { PER_BLOCK = SCAN_BLOCK / VL };

static int maxima(const float *x, int64_t n_blocks, float *out) {
    const vf zero = v_set1(0.0f);
    vf bad = zero; /* stays 0 while every value times 0 is 0 */
    for (int64_t b = 0; b < n_blocks; b++, x += SCAN_BLOCK) {
        vf top = v_load(x);
        bad = v_fma(top, zero, bad);
        for (int i = 1; i < PER_BLOCK; i++) {
            const vf v = v_load(x + i * VL);
            bad = v_fma(v, zero, bad);
            top = v_max(top, v);
        }
        out[b] = v_top(top);
    }
    return v_sum(bad) == 0.0f;
}

/* exponent_of, in vectors. */
typedef struct {
    vf lo, hi, max, temperature;
    int divides, shifts_first;
} vector_window;

INLINE vector_window vectors_of(const row_window *w) {
    const float top = w->max / w->temperature;
    const int overflows = top - top != 0.0f;
    return (vector_window){v_set1(w->lo),          v_set1(w->hi),           v_set1(overflows ? -w->max : -top),
                           v_set1(w->temperature), w->temperature != 1.0f, overflows};
}

/* What a pass has to do, known when it is compiled. */
enum { DIVIDES = 1, SHIFTS_FIRST = 2, WINDOWED = 4 };

INLINE vf exponents_of(const vector_window *w, vf l, int what) {
    if (what & SHIFTS_FIRST)
        return v_add(l, w->max) / w->temperature;
    if (what & DIVIDES)
        l = l / w->temperature;
    return v_add(l, w->max);
}

INLINE vf weights_at(const vector_window *w, const float *x, int what) {
    const vf l = v_load(x), weight = v_exp(exponents_of(w, l, what));
    return what & WINDOWED ? v_between(weight, l, w->lo, w->hi) : weight;
}

INLINE void fill_weights(const vector_window *w, const float *x, int64_t n, float *out, int what) {
    for (int64_t i = 0; i < n; i += VL)
        v_store(out + i, weights_at(w, x + i, what));
}

static void weights(const row_window *window, const float *x, int64_t n, float *out) {
    const vector_window w = vectors_of(window);
    if (w.shifts_first)
        fill_weights(&w, x, n, out, WINDOWED | SHIFTS_FIRST);
    else
        fill_weights(&w, x, n, out, WINDOWED | DIVIDES);
}

typedef int64_t vl __attribute__((vector_size(sizeof(vd))));

INLINE vd wide_set1(double value) { return (vd){0} + value; }

/* exp(x) for -87 <= x <= 0 within 1e-11 of it: x = n ln 2 + r, Taylor's series for r in pairs of pairs, as one term
 * after another would wait for each other. */
INLINE vd exp_wide(vd x) {
    static const double terms[] = {1, 1, 0.5, 1.0 / 6, 1.0 / 24, 1.0 / 120, 1.0 / 720, 1.0 / 5040, 1.0 / 40320,
                                   1.0 / 362880};
    /* n gets a whole number in the low bits */
    const vd n = v_wide_fma(x, wide_set1(0x1.71547652b82fep0), wide_set1(0x1.8p52));
    const vd r = v_wide_fma(n - 0x1.8p52, wide_set1(-0x1.62e42fefa39efp-1), x);
    const vd r2 = r * r, r4 = r2 * r2;
    vd pairs[5];
    for (int i = 0; i < 5; i++)
        pairs[i] = v_wide_fma(wide_set1(terms[2 * i + 1]), r, wide_set1(terms[2 * i]));
    const vd low = v_wide_fma(pairs[1], r2, pairs[0]), high = v_wide_fma(pairs[3], r2, pairs[2]);
    const vd p = v_wide_fma(v_wide_fma(pairs[4], r4, high), r4, low);
    return (vd)((vl)p + ((vl)n << 52));
}

/* expf of glibc and musl is within 0.502 of the last bit, so it rounds as exp does unless that lies next to the middle
 * of two floats: there, and where floats are denormal, expf is asked. */
enum { MIDDLE = 1 << 28, NEAR_MIDDLE = 1610612 /* 0.003 of the last bit */ };
#define LEAST_NORMAL (-87.0f)
#define LEAST_WEIGHT (-104.0f) /* expf of less is 0 */

INLINE vl near_middle(vd y) { return (((vl)y + (NEAR_MIDDLE - MIDDLE)) & (2 * MIDDLE - 1)) < 2 * NEAR_MIDDLE; }

/* Asks expf about the flagged ones of one block. */
static void ask_expf(const row_window *w, const float *x, const int64_t *flags, float *out) {
    const float top = w->max / w->temperature;
    for (int j = 0; j < SCAN_BLOCK; j++)
        if (flags[j] && inside(w, x[j]))
            out[j] = expf(exponent_of(w, top, x[j]));
}

static void flag_denormal(const row_window *w, const float *x, int64_t *flags) {
    const float top = w->max / w->temperature;
    for (int j = 0; j < SCAN_BLOCK; j++) {
        const float e = exponent_of(w, top, x[j]);
        flags[j] |= e <= LEAST_NORMAL && e > LEAST_WEIGHT;
    }
}

INLINE int any_of(vl flags) {
    int64_t any = 0;
    for (int i = 0; i < VL / 2; i++)
        any |= flags[i];
    return any != 0;
}

INLINE void fill_exact(const row_window *window, const vector_window *w, const float *x, int64_t n, float *out,
                       int what) {
    const vf normal = v_set1(LEAST_NORMAL), end = v_set1(INFINITY), least = v_set1(LEAST_WEIGHT);
    const vf normal_too = v_set1(nextafterf(LEAST_NORMAL, 0.0f));
    for (int64_t i = 0; i < n; i += SCAN_BLOCK) {
        int64_t flags[SCAN_BLOCK];
        vl doubts = {0}, denormal = {0};
        for (int j = 0; j < SCAN_BLOCK; j += VL) {
            const vf l = v_load(x + i + j), e = exponents_of(w, l, what);
            const vf c = v_max(normal, v_between(e, l, w->lo, w->hi)); /* outside, it may be anything */
            const vd low = exp_wide(v_low(c)), high = exp_wide(v_high(c));
            const vf weight = v_between(v_narrow(low, high), e, normal, end);
            v_store(out + i + j, v_between(weight, l, w->lo, w->hi));
            const vl near[2] = {near_middle(low), near_middle(high)};
            memcpy(flags + j, near, sizeof near);
            doubts |= near[0] | near[1];
            denormal |= (vl)v_between(e, e, least, normal_too);
        }
        if (any_of(denormal))
            flag_denormal(window, x + i, flags);
        if (any_of(doubts | denormal))
            ask_expf(window, x + i, flags, out + i);
    }
}

static void exact_weights(const row_window *window, const float *x, int64_t n, float *out) {
    const vector_window w = vectors_of(window);
    if (w.shifts_first)
        fill_exact(window, &w, x, n, out, SHIFTS_FIRST);
    else if (w.divides)
        fill_exact(window, &w, x, n, out, DIVIDES);
    else
        fill_exact(window, &w, x, n, out, 0);
}

/* A sum in F64, half of the lanes in each. */
typedef struct {
    vd low, high;
} wide_sum;

INLINE wide_sum wide_add(wide_sum s, vf v) { return (wide_sum){s.low + v_low(v), s.high + v_high(v)}; }

INLINE double wide_total(wide_sum s) {
    const vd both = s.low + s.high;
    double total = 0;
    for (int i = 0; i < VL / 2; i++)
        total += both[i];
    return total;
}

/* Four vectors are added in F32, the rest in F64. */
enum { TREE = 4 };

INLINE vf tree_sum(const vf v[TREE]) { return v_add(v_add(v[0], v[1]), v_add(v[2], v[3])); }

INLINE double sum_weights(const vector_window *w, const float *x, int64_t n, int what) {
    wide_sum all = {0};
    for (int64_t i = 0; i < n; i += TREE * VL) {
        vf v[TREE];
        for (int j = 0; j < TREE; j++)
            v[j] = weights_at(w, x + i + j * VL, what);
        all = wide_add(all, tree_sum(v));
    }
    return wide_total(all);
}

/* Without bounds -inf itself is inside, and weighs exp(-80). */
INLINE int is_windowed(const row_window *w) { return w->lo != -INFINITY || w->hi != INFINITY; }

static double sum(const row_window *window, const float *x, int64_t n) {
    const vector_window w = vectors_of(window);
    if (w.shifts_first)
        return sum_weights(&w, x, n, WINDOWED | SHIFTS_FIRST);
    if (is_windowed(window))
        return w.divides ? sum_weights(&w, x, n, WINDOWED | DIVIDES) : sum_weights(&w, x, n, WINDOWED);
    return w.divides ? sum_weights(&w, x, n, DIVIDES) : sum_weights(&w, x, n, 0);
}

INLINE void split_weights(const row_window *window, float outer_lo, const float *x, int64_t n, double *out,
                          int bounded) {
    const vector_window w = vectors_of(window);
    const vf outer = v_set1(outer_lo), end = v_set1(INFINITY);
    wide_sum some = {0}, all = {0};
    for (int64_t i = 0; i < n; i += TREE * VL) {
        vf within[TREE], every[TREE];
        for (int j = 0; j < TREE; j++) {
            const vf l = v_load(x + i + j * VL), weight = weights_at(&w, x + i + j * VL, 0);
            within[j] = v_between(weight, l, w.lo, w.hi);
            every[j] = bounded ? v_between(weight, l, outer, end) : weight;
        }
        some = wide_add(some, tree_sum(within));
        all = wide_add(all, tree_sum(every));
    }
    out[0] += wide_total(some);
    out[1] += wide_total(all);
}

static void split(const row_window *window, float outer_lo, const float *x, int64_t n, double *out) {
    if (outer_lo == -INFINITY) /* as in `sum` */
        split_weights(window, outer_lo, x, n, out, 0);
    else
        split_weights(window, outer_lo, x, n, out, 1);
}

static void moments(const row_window *window, const float *x, int64_t n, double *out) {
    const vf lo = v_set1(window->lo), hi = v_set1(window->hi), max = v_set1(-window->max), one = v_set1(1.0f);
    wide_sum count = {0}, sums = {0}, squares = {0};
    for (int64_t i = 0; i < n; i += TREE * VL) {
        vf c[TREE], d[TREE], q[TREE];
        for (int j = 0; j < TREE; j++) {
            const vf l = v_load(x + i + j * VL);
            c[j] = v_between(one, l, lo, hi);
            d[j] = v_between(v_add(l, max), l, lo, hi);
            q[j] = v_mul(d[j], d[j]);
        }
        count = wide_add(count, tree_sum(c));
        sums = wide_add(sums, tree_sum(d));
        squares = wide_add(squares, tree_sum(q));
    }
    out[0] += wide_total(count);
    out[1] += wide_total(sums);
    out[2] += wide_total(squares);
}

INLINE void weigh(const row_window *window, const float *x, int64_t n, double *out, int windowed) {
    const vf max = v_set1(-window->max), lo = v_set1(window->lo), hi = v_set1(window->hi);
    wide_sum mass = {0}, moment = {0};
    for (int64_t i = 0; i < n; i += TREE * VL) {
        vf weight[TREE], moments = v_set1(0.0f);
        for (int j = 0; j < TREE; j++) {
            const vf l = v_load(x + i + j * VL), d = v_exp_range(v_add(l, max)); /* -inf times 0 is not a number */
            weight[j] = v_exp_within(d);
            if (windowed)
                weight[j] = v_between(weight[j], l, lo, hi);
            moments = v_fma(weight[j], d, moments);
        }
        mass = wide_add(mass, tree_sum(weight));
        moment = wide_add(moment, moments);
    }
    out[0] += wide_total(mass);
    out[1] += wide_total(moment);
}

static void means(const row_window *window, const float *x, int64_t n, double *out) {
    if (is_windowed(window))
        weigh(window, x, n, out, 1);
    else
        weigh(window, x, n, out, 0);
}
