/* Entry points of the product nodes. */
#include "product_impl.h"

int loragraph_product_supported(void) {
#ifdef LORAGRAPH_X86
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
#else
    return 0;
#endif
}

int loragraph_product_f16_supported(void) {
#ifdef LORAGRAPH_X86
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
    return 0;
#endif
}

int64_t loragraph_quantized_size(int64_t n_in, int64_t n_rows) { return n_rows * (n_in / QK) * RECORD; }

void loragraph_product_input(struct ggml_tensor *dst, int ith, int nth, void *userdata) {
    (void)dst;
#ifdef LORAGRAPH_X86
    loragraph_product_input_vnni(userdata, ith, nth);
#else
    (void)ith, (void)nth, (void)userdata;
#endif
}

void loragraph_product(struct ggml_tensor *dst, int ith, int nth, void *userdata) {
    (void)dst;
#ifdef LORAGRAPH_X86
    loragraph_product_vnni(userdata, ith, nth);
#else
    (void)ith, (void)nth, (void)userdata;
#endif
}

void loragraph_product_f16(struct ggml_tensor *dst, int ith, int nth, void *userdata) {
    (void)dst;
#ifdef LORAGRAPH_X86
    loragraph_product_f16_avx512(userdata, ith, nth);
#else
    (void)ith, (void)nth, (void)userdata;
#endif
}
