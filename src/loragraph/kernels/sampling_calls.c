/* Passes over rows as data, so that those of many rows run on the threads of one ggml compute. */
#include "sampling.h"

void loragraph_row_call(row_call *call) {
    const row_window *w = &call->window;
    switch (call->what) {
    case ROW_SCAN:
        loragraph_row_scan(w->x, w->n, call->maxima, &call->scan);
        break;
    case ROW_RESCAN:
        loragraph_row_rescan(w->x, w->n, call->ids, call->n_ids, call->maxima, &call->scan);
        break;
    case ROW_TOP:
        call->n_ids = loragraph_row_top(w->x, w->n, call->maxima, call->n_ids, call->heap, call->ids);
        break;
    case ROW_MASS:
        call->found[0] = loragraph_row_mass(w, call->exact);
        break;
    case ROW_ESTIMATE:
        call->found[0] = loragraph_row_estimate(w);
        break;
    case ROW_SPLIT:
        loragraph_row_split(w, call->id, call->outer_lo, call->most, call->rest, call->exact, call->found);
        break;
    case ROW_MOMENTS:
        loragraph_row_moments(w, call->found);
        break;
    case ROW_DRAW:
        call->id = loragraph_row_draw(w, call->u, call->sums, call->found);
        break;
    case ROW_TYPICAL:
        call->id = loragraph_row_typical(w, call->u, call->sums, call->first);
        break;
    default:
        call->other(call->first, call->second);
    }
}

void loragraph_row_calls_run(struct ggml_tensor *dst, int ith, int nth, void *userdata) {
    (void)dst, (void)ith, (void)nth; /* rows take unlike times: no fixed shares */
    row_calls *todo = userdata;
    for (;;) {
        const int64_t i = __atomic_fetch_add(&todo->next, 1, __ATOMIC_RELAXED);
        if (i >= todo->n)
            break;
        loragraph_row_call(todo->calls[i]);
    }
}
