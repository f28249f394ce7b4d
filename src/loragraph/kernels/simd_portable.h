/* Vector primitives in the compiler's own vector type; halves are converted bit by bit.
 *
 * Every simd_*.h defines the same names: VL lanes of `vf`, loads of the four storage types, v_fma(a, b, c) =
 * a * b + c, v_sum in one fixed order, v_max, v_top (the largest lane), v_transpose (VL vectors as a square), the
 * row counts of the register tiles, v_low and v_high (half of the lanes each, as doubles), v_narrow (both back),
 * v_wide_fma, v_between (value where lo < x < hi, else 0). A file includes one of them.
 */
#include <stdint.h>
#include <string.h>

#define VL 4
#define SHRINK_ROWS 2
#define EXPAND_ROWS 2
#define SCORE_ROWS 2
#define VALUE_ROWS 2
#define VALUE_VECTORS 2
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(16)));

INLINE float half_to_float(uint16_t half) {
    /* Shifting exponent and mantissa in place leaves the value 2^112 too small, subnormals included;
     * all-ones exponents (infinity, NaN) are set by hand. */
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, bits = (uint32_t)(half & 0x7fff) << 13;
    float value;
    if (bits >= 0x0f800000u) {
        bits |= 0x7f800000u;
    } else {
        memcpy(&value, &bits, 4);
        value *= 0x1p112f;
        memcpy(&bits, &value, 4);
    }
    bits |= sign;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE vf v_set1(float s) { return (vf){s, s, s, s}; }
INLINE vf v_load(const void *p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}
INLINE void v_store(float *p, vf v) { memcpy(p, &v, sizeof v); }
INLINE vf v_load_f16(const void *p) {
    uint16_t h[VL];
    memcpy(h, p, sizeof h);
    return (vf){half_to_float(h[0]), half_to_float(h[1]), half_to_float(h[2]), half_to_float(h[3])};
}
INLINE vf v_load_bf16(const void *p) {
    uint16_t h[VL];
    uint32_t w[VL];
    memcpy(h, p, sizeof h);
    for (int i = 0; i < VL; i++)
        w[i] = (uint32_t)h[i] << 16;
    return v_load(w);
}
INLINE vf v_load_i8(const void *p) {
    int8_t q[VL];
    memcpy(q, p, sizeof q);
    return (vf){q[0], q[1], q[2], q[3]};
}
INLINE vf v_add(vf a, vf b) { return a + b; }
INLINE vf v_mul(vf a, vf b) { return a * b; }
INLINE vf v_fma(vf a, vf b, vf c) { return a * b + c; }
INLINE float v_sum(vf v) { return (v[0] + v[2]) + (v[1] + v[3]); }
INLINE vf v_max(vf a, vf b) {
    typedef int32_t vi __attribute__((vector_size(16)));
    vi larger = a > b;
    return (vf)((larger & (vi)a) | (~larger & (vi)b));
}
INLINE float v_top(vf v) {
    float a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
    return a > b ? a : b;
}
typedef double vd __attribute__((vector_size(16)));
INLINE vd v_wide_fma(vd a, vd b, vd c) { return a * b + c; }
INLINE vd v_low(vf v) { return (vd){v[0], v[1]}; }
INLINE vd v_high(vf v) { return (vd){v[2], v[3]}; }
INLINE vf v_narrow(vd low, vd high) { return (vf){(float)low[0], (float)low[1], (float)high[0], (float)high[1]}; }
INLINE vf v_between(vf value, vf x, vf lo, vf hi) {
    typedef int32_t vi __attribute__((vector_size(16)));
    return (vf)((vi)value & (x > lo) & (x < hi));
}
INLINE void v_transpose(vf m[VL]) {
    vf t[VL] = {m[0], m[1], m[2], m[3]};
    for (int i = 0; i < VL; i++)
        m[i] = (vf){t[0][i], t[1][i], t[2][i], t[3][i]};
}
