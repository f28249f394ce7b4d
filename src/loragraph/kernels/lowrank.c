/* Entry points of the low-rank nodes and the choice of the instruction set at run time. */
#include "lowrank_impl.h"

#include <stdatomic.h>
#include <stddef.h>

#ifdef LORAGRAPH_X86
#include <cpuid.h>
#endif

static const lowrank_kernels *const sets[] = {
    &loragraph_lowrank_portable,
#ifdef LORAGRAPH_X86
    &loragraph_lowrank_avx2,
    &loragraph_lowrank_avx512,
#endif
#ifdef LORAGRAPH_NEON
    &loragraph_lowrank_neon,
#endif
};

enum { N_SETS = sizeof sets / sizeof sets[0] };

static atomic_int active = -1;

#ifdef LORAGRAPH_X86
/* clang before 18 does not know "f16c" in __builtin_cpu_supports. */
static int has_f16c(void) {
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx >> 29 & 1);
}
#endif

int loragraph_isa_count(void) { return N_SETS; }

const char *loragraph_isa_name(int isa) { return isa < 0 || isa >= N_SETS ? NULL : sets[isa]->name; }

int loragraph_isa_supported(int isa) {
    if (isa < 0 || isa >= N_SETS)
        return 0;
#ifdef LORAGRAPH_X86
    __builtin_cpu_init();
    if (isa >= 1 && !(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c()))
        return 0;
    if (isa == 2 && !(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")))
        return 0;
#endif
    return 1;
}

int loragraph_isa_select(int isa) {
    if (isa == -1)
        for (isa = N_SETS - 1; !loragraph_isa_supported(isa);)
            isa--;
    if (!loragraph_isa_supported(isa))
        return -1;
    atomic_store_explicit(&active, isa, memory_order_relaxed);
    return isa;
}

int loragraph_isa_active(void) {
    int isa = atomic_load_explicit(&active, memory_order_relaxed);
    return isa >= 0 ? isa : loragraph_isa_select(-1); /* threads that race here agree */
}

void loragraph_lowrank_shrink(struct ggml_tensor *dst, int ith, int nth, void *userdata) {
    (void)dst;
    const lowrank_shrink_node *node = userdata;
    if (node->step->n_groups > 0)
        sets[loragraph_isa_active()]->shrink(node, ith, nth);
}

void loragraph_lowrank_expand(struct ggml_tensor *dst, int ith, int nth, void *userdata) {
    (void)dst;
    const lowrank_expand_node *node = userdata;
    if (node->shrink->step->n_groups > 0)
        sets[loragraph_isa_active()]->expand(node, ith, nth);
}

void loragraph_lowrank_gather(struct ggml_tensor *dst, int ith, int nth, void *userdata) {
    (void)dst;
    const lowrank_gather_node *node = userdata;
    if (node->shrink->step->n_groups > 0)
        sets[loragraph_isa_active()]->gather(node, ith, nth);
}
