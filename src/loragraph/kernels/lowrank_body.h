/* What the low-rank kernels share: sizes of tiles and the layout of h. One simd_*.h is included before.
 *
 * Functions marked INLINE take `type` and tile sizes as constants, so that each caller becomes its own loop.
 */
#ifndef LORAGRAPH_LOWRANK_BODY_H
#define LORAGRAPH_LOWRANK_BODY_H
#include "lowrank_impl.h"
#include "rows.h"

#include <math.h>
#include <stddef.h>

enum {
    RANKS = 4,       /* rank rows of a shrink tile */
    ROW_BLOCK = 16,  /* rows of a unit of shrink work */
    COLUMNS = 16,    /* floats of y in a cache line: threads never share one of an aligned y */
    AHEAD = 2,       /* tiles of A or B between a prefetch and its use */
};

/* ---- the layout of h: target after target, group after group, entry after entry, rank floats each ---- */

INLINE const lora_pair *pair_of(const lowrank_shrink_node *node, int target, int group) {
    return &node->targets[target]->pairs[node->step->group_slot[group]];
}

/* Rank of a pair that this step applies, 0 where the adapter leaves the target alone. */
INLINE int64_t pair_rank(const lora_pair *pair) { return pair->a ? pair->rank : 0; }

INLINE int64_t group_size(const lowrank_step *step, int group) {
    return step->group_ptr[group + 1] - step->group_ptr[group];
}

/* Floats of h before `target`; for n_targets: all that the node needs. */
static int64_t scratch_offset(const lowrank_shrink_node *node, int target) {
    int64_t offset = 0;
    for (int t = 0; t < target; t++)
        for (int g = 0; g < node->step->n_groups; g++)
            offset += group_size(node->step, g) * pair_rank(pair_of(node, t, g));
    return offset;
}

INLINE int scratch_fits(const lowrank_shrink_node *node) {
    return scratch_offset(node, node->n_targets) <= node->step->scratch_len;
}
#endif
