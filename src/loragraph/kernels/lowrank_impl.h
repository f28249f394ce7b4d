/* What one instruction set provides to lowrank.c. */
#ifndef LORAGRAPH_LOWRANK_IMPL_H
#define LORAGRAPH_LOWRANK_IMPL_H
#include "lowrank.h"

typedef struct {
    const char *name;
    void (*shrink)(const lowrank_shrink_node *node, int ith, int nth);
    void (*expand)(const lowrank_expand_node *node, int ith, int nth);
    void (*gather)(const lowrank_gather_node *node, int ith, int nth);
} lowrank_kernels;

#if defined(__x86_64__) || defined(__i386__)
#define LORAGRAPH_X86 1
#elif defined(__aarch64__)
#define LORAGRAPH_NEON 1
#endif

extern const lowrank_kernels loragraph_lowrank_portable;
#ifdef LORAGRAPH_X86
extern const lowrank_kernels loragraph_lowrank_avx2;
extern const lowrank_kernels loragraph_lowrank_avx512;
#endif
#ifdef LORAGRAPH_NEON
extern const lowrank_kernels loragraph_lowrank_neon;
#endif
#endif
