/* The exponential of all kernels. One simd_*.h is included before. */
#ifndef LORAGRAPH_SIMD_EXP_H
#define LORAGRAPH_SIMD_EXP_H

typedef int32_t vi __attribute__((vector_size(VL * 4)));

/* exp(x) for x <= 0 within 2e-7 of it; what lies below exp(-80) is that. x = n ln 2 + r, Cephes' polynomial for r. */
INLINE vf v_exp(vf x) {
    const vf magic = v_set1(0x1.8p23f); /* adding it rounds to a whole number, which then stands in the low bits */
    x = v_max(v_set1(-80.0f), x); /* in this order NaN stays NaN */
    vf n = v_fma(x, v_set1(1.44269504f), magic);
    const vi exponent = (vi)n << 23;
    n = v_add(n, v_set1(-0x1.8p23f));
    vf r = v_fma(n, v_set1(-0.693359375f), x);
    r = v_fma(n, v_set1(2.12194440e-4f), r);
    vf p = v_fma(v_set1(1.9875691500e-4f), r, v_set1(1.3981999507e-3f));
    p = v_fma(p, r, v_set1(8.3334519073e-3f));
    p = v_fma(p, r, v_set1(4.1665795894e-2f));
    p = v_fma(p, r, v_set1(1.6666665459e-1f));
    p = v_fma(p, r, v_set1(5.0000001201e-1f));
    p = v_add(v_fma(p, v_mul(r, r), r), v_set1(1.0f));
    return (vf)((vi)p + exponent);
}
#endif
