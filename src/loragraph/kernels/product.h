/* Products of base weights, faster than ggml's.
 *
 * Quantised weights with many rows, in int8: two custom nodes. The first quantises x as ggml does for its Q8_0 (blocks
 * of 32, d = max|x| / 127 rounded to F16), and serves every product that reads the same x. The second multiplies: a
 * block's integer sum is exact, blocks are added in their order in F32 with one fma by (d of the weight * d of x). That
 * is the order of ggml's product of repacked Q4_0, so the bits are ggml's too. Q4_1 has a second fma a block, by (minimum
 * of the weight) * (d of x * sum of its integers), which ggml rounds to F16 first. For CPUs with AVX512-VNNI or AVX2;
 * ggml's own products serve the others.
 *
 * F16 weights: one custom node, in F32 throughout. ggml rounds x to F16 first. For CPUs with AVX-512 or AVX2.
 *
 * build.py hands this file to cffi without its preprocessor lines.
 */
#ifndef LORAGRAPH_PRODUCT_H
#define LORAGRAPH_PRODUCT_H
#include <stdint.h>

struct ggml_tensor;

/* Layouts of w. Q4_0X8: ggml's repacked Q4_0, eight rows interleaved by eight bytes; the others: ggml's plain rows. */
enum { LORAGRAPH_Q4_0X8 = 0, LORAGRAPH_Q8_0 = 1, LORAGRAPH_F16 = 2, LORAGRAPH_Q4_1 = 3, LORAGRAPH_LAYOUTS };

/* x, quantised once for every product that reads it. */
typedef struct {
    const float *x;   /* n_rows rows of n_in floats, x_stride floats apart */
    int64_t x_stride;
    int64_t n_in;     /* multiple of 32 */
    int64_t n_rows;
    int32_t layout;   /* of the products that read it */
    const void *kernels; /* loragraph_product_kernels() when the node was made; its products use them too */
    void *quantized;  /* loragraph_quantized_size(n_in, n_rows, layout) bytes */
} product_input_node;

/* y = w x. */
typedef struct {
    const product_input_node *input; /* of the same layout */
    const void *w;
    int32_t layout;
    int64_t n_out;    /* multiple of 16 */
    float *y;         /* n_rows rows of n_out floats, y_stride floats apart */
    int64_t y_stride;
} product_node;

/* y = w x with F16 weights; x stays F32. Any sizes. */
typedef struct {
    const float *x;    /* n_rows rows of n_in floats, x_stride floats apart */
    int64_t x_stride;
    int64_t n_in;
    int64_t n_rows;
    const void *kernels; /* loragraph_product_kernels() when the node was made */
    const uint16_t *w; /* n_out rows of n_in F16, one after the other */
    int64_t n_out;
    float *y;          /* n_rows rows of n_out floats, y_stride floats apart */
    int64_t y_stride;
} product_f16_node;

/* Those of the dispatch. A node keeps them, since the size of the quantised x is theirs. */
const void *loragraph_product_kernels(void);
/* From how many rows on the kernel is faster than ggml's product (measured), 0 where there is none; by dispatch. */
int loragraph_product_min_rows(int layout);
int64_t loragraph_quantized_size(int64_t n_in, int64_t n_rows, int layout);
void loragraph_product_input(struct ggml_tensor *dst, int ith, int nth, void *userdata);
void loragraph_product(struct ggml_tensor *dst, int ith, int nth, void *userdata);
void loragraph_product_f16(struct ggml_tensor *dst, int ith, int nth, void *userdata);
#endif
