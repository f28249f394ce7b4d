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

INLINE vf weights_at(const vector_window *w, const float *x, int what) {
    const vf l = v_load(x);
    vf scaled = l;
    if (what & SHIFTS_FIRST)
        scaled = v_add(l, w->max) / w->temperature;
    else if (what & DIVIDES)
        scaled = v_add(l / w->temperature, w->max);
    else
        scaled = v_add(l, w->max);
    return what & WINDOWED ? v_between(v_exp(scaled), l, w->lo, w->hi) : v_exp(scaled);
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

/* exp(x) for -87 <= x <= 0 within 1e-12 of it: x = n ln 2 + r, Taylor's series for r. */
INLINE vd exp_wide(vd x) {
    static const double terms[] = {1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120,
                                   1.0 / 24,     1.0 / 6,     0.5,        1,         1};
    /* n gets a whole number in the low bits */
    const vd n = v_wide_fma(x, wide_set1(0x1.71547652b82fep0), wide_set1(0x1.8p52));
    const vd r = v_wide_fma(n - 0x1.8p52, wide_set1(-0x1.62e42fefa39efp-1), x);
    vd p = wide_set1(1.0 / 3628800);
    for (int i = 0; i < 10; i++)
        p = v_wide_fma(p, r, wide_set1(terms[i]));
    return (vd)((vl)p + ((vl)n << 52));
}

/* expf of glibc and musl is within 0.502 of the last bit, so it rounds as exp does unless that lies next to the middle
 * of two floats: there, and where floats are denormal, expf is asked. */
enum { MIDDLE = 1 << 28, NEAR_MIDDLE = 1610612 /* 0.003 of the last bit */ };

/* wide[VL / 2] from exponents[VL / 2], and what is not 0 where expf is to be asked. */
INLINE vl exp_half(vd exponents, double *wide) {
    const vl normal = exponents > wide_set1(-87.0);
    const vd y = exp_wide((vd)((vl)exponents & normal));
    const vl off = ((vl)y & (2 * MIDDLE - 1)) - MIDDLE;
    const vd kept = (vd)((vl)y & normal);
    memcpy(wide, &kept, sizeof kept);
    const vl doubtful = (off < NEAR_MIDDLE) & (off > -NEAR_MIDDLE);
    return (normal & doubtful) | (~normal & (vl)(exponents > wide_set1(-104.0))); /* below, expf is 0 */
}

static void exact_weights(const row_window *w, const float *x, int64_t n, float *out) {
    const float top = w->max / w->temperature;
    for (int64_t i = 0; i < n; i += SCAN_BLOCK) {
        float from[SCAN_BLOCK];
        double wide[SCAN_BLOCK];
        int64_t doubtful[SCAN_BLOCK];
        vl any = {0};
        for (int j = 0; j < SCAN_BLOCK; j++) {
            const float e = exponent_of(w, top, x[i + j]);
            from[j] = inside(w, x[i + j]) ? e : -1000.0f;
        }
        for (int j = 0; j < SCAN_BLOCK; j += VL) {
            const vf e = v_load(from + j);
            const vl low = exp_half(v_low(e), wide + j), high = exp_half(v_high(e), wide + j + VL / 2);
            memcpy(doubtful + j, &low, sizeof low);
            memcpy(doubtful + j + VL / 2, &high, sizeof high);
            any |= low | high;
        }
        for (int j = 0; j < SCAN_BLOCK; j++)
            out[i + j] = (float)wide[j];
        int64_t some = 0;
        for (int j = 0; j < VL / 2; j++)
            some |= any[j];
        for (int j = 0; some && j < SCAN_BLOCK; j++)
            if (doubtful[j])
                out[i + j] = expf(from[j]);
    }
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

static double sum(const row_window *window, const float *x, int64_t n) {
    const vector_window w = vectors_of(window);
    const int windowed = window->lo != -INFINITY || window->hi != INFINITY; /* -inf itself weighs exp(-80) */
    if (w.shifts_first)
        return sum_weights(&w, x, n, WINDOWED | SHIFTS_FIRST);
    if (windowed)
        return w.divides ? sum_weights(&w, x, n, WINDOWED | DIVIDES) : sum_weights(&w, x, n, WINDOWED);
    return w.divides ? sum_weights(&w, x, n, DIVIDES) : sum_weights(&w, x, n, 0);
}

static void split(const row_window *window, float outer_lo, const float *x, int64_t n, double *out) {
    const vector_window w = vectors_of(window);
    const vf outer = v_set1(outer_lo), end = v_set1(INFINITY);
    wide_sum some = {0}, all = {0};
    for (int64_t i = 0; i < n; i += TREE * VL) {
        vf within[TREE], every[TREE];
        for (int j = 0; j < TREE; j++) {
            const vf l = v_load(x + i + j * VL), weight = weights_at(&w, x + i + j * VL, 0);
            within[j] = v_between(weight, l, w.lo, w.hi);
            every[j] = v_between(weight, l, outer, end);
        }
        some = wide_add(some, tree_sum(within));
        all = wide_add(all, tree_sum(every));
    }
    out[0] += wide_total(some);
    out[1] += wide_total(all);
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

static void means(const row_window *window, const float *x, int64_t n, double *out) {
    const vector_window w = vectors_of(window);
    const vf max = v_set1(-window->max);
    wide_sum mass = {0}, moment = {0};
    for (int64_t i = 0; i < n; i += TREE * VL) {
        vf weight[TREE], weighted[TREE];
        for (int j = 0; j < TREE; j++) {
            const vf l = v_load(x + i + j * VL);
            weight[j] = weights_at(&w, x + i + j * VL, WINDOWED);
            weighted[j] = v_mul(weight[j], v_between(v_add(l, max), l, w.lo, w.hi));
        }
        mass = wide_add(mass, tree_sum(weight));
        moment = wide_add(moment, tree_sum(weighted));
    }
    out[0] += wide_total(mass);
    out[1] += wide_total(moment);
}
