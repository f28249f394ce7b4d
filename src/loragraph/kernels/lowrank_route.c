/* Groups of tokens by adapter become groups by (adapter, expert), once the graph has chosen the experts. */
#include "lowrank.h"

#include <string.h>

/* One adapter's tokens, in their order, into a group an expert: a counting sort. Gives the next entry. */
static int32_t route_group(const lowrank_route_node *node, int32_t group, int32_t first) {
    const lowrank_step *from = node->from;
    lowrank_expert_step *to = node->to;
    const int32_t begin = from->group_ptr[group], end = from->group_ptr[group + 1];
    memset(to->counts, 0, (size_t)node->n_expert * sizeof *to->counts);
    for (int32_t i = begin; i < end; i++) {
        const int32_t *ids = node->ids + from->entry_row[i] * node->ids_stride;
        for (int32_t u = 0; u < node->n_used; u++)
            if (ids[u] >= 0 && ids[u] < node->n_expert)
                to->counts[ids[u]]++;
    }
    for (int32_t expert = 0; expert < node->n_expert; expert++) {
        const int32_t n = to->counts[expert];
        if (!n)
            continue;
        to->group_slot[to->step.n_groups] = from->group_slot[group] * node->n_expert + expert;
        to->counts[expert] = first; /* from here on where the next entry goes */
        first += n;
        to->group_ptr[++to->step.n_groups] = first;
    }
    for (int32_t i = begin; i < end; i++) {
        const int32_t token = from->entry_row[i];
        const int32_t *ids = node->ids + token * node->ids_stride;
        for (int32_t u = 0; u < node->n_used; u++)
            if (ids[u] >= 0 && ids[u] < node->n_expert) {
                const int32_t entry = to->counts[ids[u]]++;
                to->entry_row[entry] = token * node->n_used + u;
                to->entry_token[entry] = token;
                to->entry_scale[entry] = from->entry_scale[i];
            }
    }
    return first;
}

void loragraph_lowrank_route(struct ggml_tensor *dst, int ith, int nth, void *userdata) {
    (void)dst, (void)nth;
    const lowrank_route_node *node = userdata;
    lowrank_expert_step *to = node->to;
    if (ith != 0)
        return; /* microseconds, and what follows needs all of it */
    to->step.n_groups = to->step.n_entries = 0;
    int32_t n_entries = 0;
    to->group_ptr[0] = 0;
    if ((int64_t)node->from->n_entries * node->n_used > to->max_entries) { /* a fault of the caller: shown in row 0 */
        to->group_slot[0] = to->entry_row[0] = to->entry_token[0] = 0;
        to->group_ptr[1] = to->step.n_groups = to->step.n_entries = 1;
        to->step.scratch_len = -1;
        return;
    }
    for (int32_t group = 0; group < node->from->n_groups; group++)
        n_entries = route_group(node, group, n_entries);
    to->step.n_entries = n_entries;
}
