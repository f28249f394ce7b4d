/* Attention over cells for 64-bit Arm. */
#include "attention_impl.h"
#ifdef LORAGRAPH_NEON
#include "simd_neon.h"

#include "attention_body.h"

const attention_kernels loragraph_attention_neon = {attend, reduce};
#else
typedef int loragraph_no_attention_neon; /* ISO C wants a declaration in every file */
#endif
