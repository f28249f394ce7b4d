/* Vector primitives for 64-bit Arm, whose baseline has the half conversion; contract in simd_portable.h. */
#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

#define VL 4
#define SHRINK_ROWS 4
#define EXPAND_ROWS 4
#define SCORE_ROWS 8
#define VALUE_ROWS 6
#define VALUE_VECTORS 4
#define INLINE static inline __attribute__((always_inline))

typedef float32x4_t vf;

INLINE uint16x4_t load_u16(const void *p) {
    uint16_t h[VL];
    memcpy(h, p, sizeof h);
    return vld1_u16(h);
}
INLINE vf v_set1(float s) { return vdupq_n_f32(s); }
INLINE vf v_load(const void *p) {
    float f[VL];
    memcpy(f, p, sizeof f);
    return vld1q_f32(f);
}
INLINE void v_store(float *p, vf v) { vst1q_f32(p, v); }
INLINE vf v_load_f16(const void *p) { return vcvt_f32_f16(vreinterpret_f16_u16(load_u16(p))); }
INLINE float half_to_float(uint16_t half) {
    return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(half))), 0);
}
INLINE vf v_load_bf16(const void *p) { return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(load_u16(p)), 16)); }
INLINE vf v_load_i8(const void *p) {
    int8_t q[8] = {0};
    memcpy(q, p, VL);
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vld1_s8(q)))));
}
INLINE vf v_add(vf a, vf b) { return vaddq_f32(a, b); }
INLINE vf v_mul(vf a, vf b) { return vmulq_f32(a, b); }
INLINE vf v_fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
INLINE float v_sum(vf v) { return vaddvq_f32(v); }
INLINE vf v_max(vf a, vf b) { return vmaxq_f32(a, b); }
INLINE float v_top(vf v) { return vmaxvq_f32(v); }
typedef float64x2_t vd;
INLINE vd v_wide_fma(vd a, vd b, vd c) { return vfmaq_f64(c, a, b); }
INLINE vd v_low(vf v) { return vcvt_f64_f32(vget_low_f32(v)); }
INLINE vd v_high(vf v) { return vcvt_high_f64_f32(v); }
INLINE vf v_narrow(vd low, vd high) { return vcvt_high_f32_f64(vcvt_f32_f64(low), high); }
INLINE vf v_between(vf value, vf x, vf lo, vf hi) {
    const uint32x4_t inside = vandq_u32(vcgtq_f32(x, lo), vcltq_f32(x, hi));
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(value), inside));
}
INLINE void v_transpose(vf m[VL]) {
    float32x4x2_t a = vtrnq_f32(m[0], m[1]), b = vtrnq_f32(m[2], m[3]);
    m[0] = vcombine_f32(vget_low_f32(a.val[0]), vget_low_f32(b.val[0]));
    m[1] = vcombine_f32(vget_low_f32(a.val[1]), vget_low_f32(b.val[1]));
    m[2] = vcombine_f32(vget_high_f32(a.val[0]), vget_high_f32(b.val[0]));
    m[3] = vcombine_f32(vget_high_f32(a.val[1]), vget_high_f32(b.val[1]));
}
