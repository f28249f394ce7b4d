/* The exponential of all kernels. One simd_*.h is included before. */
#ifndef LORAGRAPH_SIMD_EXP_H
#define LORAGRAPH_SIMD_EXP_H

typedef int32_t vi __attribute__((vector_size(VL * 4)));

/* What v_exp takes exponents for: below, exp(-80) stands for all. */
INLINE vf v_exp_range(vf x) { return v_max(v_set1(-80.0f), x); } /* in this order NaN stays NaN */

/* x = n ln 2 + r: n as a float, and in the bits where a float has its exponent. */
typedef struct {
    vf whole;
    vi exponent;
} v_power;

INLINE v_power v_power_of(vf x) {
    const vf sum = v_fma(x, v_set1(1.44269504f), v_set1(0x1.8p23f)); /* rounds to a whole number, in the low bits */
    return (v_power){v_add(sum, v_set1(-0x1.8p23f)), (vi)sum << 23};
}

INLINE vf v_scaled(vf p, v_power n) { return (vf)((vi)p + n.exponent); }

/* exp(x) for -80 <= x <= 0 within 2e-7 of it. The polynomial of degree 6 with the least largest relative error for r,
 * 4e-9; in pairs, as one term after another would wait for each other. */
INLINE vf v_exp_within(vf x) {
    const v_power n = v_power_of(x);
    const vf r = v_fma(n.whole, v_set1(2.12194440e-4f), v_fma(n.whole, v_set1(-0.693359375f), x)), r2 = v_mul(r, r);
    const vf high = v_fma(v_set1(8.368745213e-3f), r, v_set1(4.166839079e-2f));
    const vf low = v_fma(v_set1(1.666652040e-1f), r, v_set1(4.999999343e-1f));
    const vf p = v_fma(v_fma(v_fma(v_set1(1.381454008e-3f), r2, high), r2, low), r2, r);
    return v_scaled(v_add(p, v_set1(1.0f)), n);
}

/* exp(x) for x <= 0 within 2e-7 of it; what lies below exp(-80) is that. */
INLINE vf v_exp(vf x) { return v_exp_within(v_exp_range(x)); }
#endif
