/* Attention over cells without any instruction set beyond the compiler's baseline. */
#include "attention_impl.h"
#include "simd_portable.h"

#include "attention_body.h"

const attention_kernels loragraph_attention_portable = {attend, reduce};
