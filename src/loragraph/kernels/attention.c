/* Entry points of the attention nodes; the instruction set is chosen in lowrank.c for all kernels. */
#include "attention_impl.h"

/* In the order of lowrank.c. */
static const attention_kernels *const sets[] = {
    &loragraph_attention_portable,
#ifdef LORAGRAPH_X86
    &loragraph_attention_avx2,
    &loragraph_attention_avx512,
#endif
#ifdef LORAGRAPH_NEON
    &loragraph_attention_neon,
#endif
};

/* q, max and sum, V sums, scores of MAX_QUERIES query heads; a block of K and of V. */
int64_t loragraph_attention_scratch_floats(int n_embd_k, int n_embd_v) {
    const int64_t k = padded(n_embd_k), v = padded(n_embd_v);
    return MAX_QUERIES * (k + v + CELLS + 2 * PAD) + CELLS * (k + v);
}

int64_t loragraph_attention_partial_floats(int n_head, int n_embd_v) { return n_head * (padded(n_embd_v) + PAD); }

int loragraph_attention_max_group(void) { return MAX_QUERIES; }

void loragraph_attention_attend(struct ggml_tensor *dst, int ith, int nth, void *userdata) {
    (void)dst;
    const attention_node *node = userdata;
    sets[loragraph_isa_active()]->attend(node, ith, nth);
}

void loragraph_attention_reduce(struct ggml_tensor *dst, int ith, int nth, void *userdata) {
    (void)dst;
    const attention_node *node = userdata;
    sets[loragraph_isa_active()]->reduce(node, ith, nth);
}
