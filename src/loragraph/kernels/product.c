/* Entry points of the product nodes; the instruction set is chosen in lowrank.c for all kernels. */
#include "product_impl.h"

#include "lowrank.h"

#ifdef LORAGRAPH_X86
static const product_kernels avx2 = {
    {[LORAGRAPH_Q4_0X8] = 2, [LORAGRAPH_Q8_0] = 2, [LORAGRAPH_F16] = 2, [LORAGRAPH_Q4_1] = 2},
    {[LORAGRAPH_Q4_0X8] = 1, [LORAGRAPH_Q8_0] = 2, [LORAGRAPH_Q4_1] = 1},
    loragraph_product_input_avx2,
    loragraph_product_avx2,
    loragraph_product_f16_avx2,
};

static const product_kernels avx512 = {
    {[LORAGRAPH_Q4_0X8] = 2, [LORAGRAPH_Q8_0] = 2, [LORAGRAPH_F16] = 2, [LORAGRAPH_Q4_1] = 2},
    {[LORAGRAPH_Q4_0X8] = 1, [LORAGRAPH_Q8_0] = 2, [LORAGRAPH_Q4_1] = 1},
    loragraph_product_input_avx2,
    loragraph_product_avx2,
    loragraph_product_f16_avx512,
};

static const product_kernels vnni = {
    {[LORAGRAPH_Q4_0X8] = 3, [LORAGRAPH_Q8_0] = 3, [LORAGRAPH_F16] = 2, [LORAGRAPH_Q4_1] = 2},
    {[LORAGRAPH_Q4_0X8] = 1, [LORAGRAPH_Q8_0] = 1, [LORAGRAPH_Q4_1] = 1},
    loragraph_product_input_vnni,
    loragraph_product_vnni,
    loragraph_product_f16_avx512,
};

/* In the order of lowrank.c. The portable set has no products: no node of theirs is made (min_rows). */
static const product_kernels *kernels(void) {
    if (loragraph_isa_active() < 2)
        return &avx2;
    return __builtin_cpu_supports("avx512vnni") ? &vnni : &avx512;
}
#else
static const product_kernels none;
static const product_kernels *kernels(void) { return &none; }
#endif

int loragraph_product_min_rows(int layout) {
    return loragraph_isa_active() > 0 && layout >= 0 && layout < LORAGRAPH_LAYOUTS ? kernels()->min_rows[layout] : 0;
}

int64_t loragraph_quantized_size(int64_t n_in, int64_t n_rows, int layout) {
    return n_rows * (n_in / QK) * record(kernels()->value_bytes[layout]);
}

const void *loragraph_product_kernels(void) { return kernels(); }

void loragraph_product_input(struct ggml_tensor *dst, int ith, int nth, void *userdata) {
    (void)dst;
    const product_input_node *node = userdata;
    ((const product_kernels *)node->kernels)->input(node, ith, nth);
}

void loragraph_product(struct ggml_tensor *dst, int ith, int nth, void *userdata) {
    (void)dst;
    const product_node *node = userdata;
    ((const product_kernels *)node->input->kernels)->multiply(node, ith, nth);
}

void loragraph_product_f16(struct ggml_tensor *dst, int ith, int nth, void *userdata) {
    (void)dst;
    const product_f16_node *node = userdata;
    ((const product_kernels *)node->kernels)->multiply_f16(node, ith, nth);
}
