/* Cuts a step's stretches into units of work, once for all layers. */
#include "attention_impl.h"

/* Chunks begin at fixed ordinals of a stretch, so that a row's partials do not depend on other rows. Far ones are
 * larger: a long stretch has work for many threads anyway, and partials cost memory. */
enum { CHUNK = 256, N_SMALL = 8, LARGE_CHUNK = 1024, SMALL_END = N_SMALL * CHUNK };

static int64_t chunk_of(int64_t ordinal) {
    return ordinal < SMALL_END ? ordinal / CHUNK : N_SMALL + (ordinal - SMALL_END) / LARGE_CHUNK;
}

static int64_t chunk_begin(int64_t chunk) {
    return chunk < N_SMALL ? chunk * CHUNK : SMALL_END + (chunk - N_SMALL) * LARGE_CHUNK;
}

static int64_t count_chunks(int64_t begin, int64_t end) { return chunk_of(end - 1) - chunk_of(begin) + 1; }

/* Cells of a stretch, -1 if a run leaves the cache. */
static int64_t stretch_cells(const attention_lists *lists, int stretch) {
    int64_t n = 0;
    for (int i = lists->run_ptr[stretch]; i < lists->run_ptr[stretch + 1]; i++) {
        const int64_t start = lists->run_start[i], length = lists->run_length[i];
        if (start < 0 || length < 0 || start + length > lists->n_cells)
            return -1;
        n += length;
    }
    return n;
}

/* Whether ptr rises from 0 to n. */
static int is_csr(const int32_t *ptr, int32_t n_lists, int32_t n) {
    for (int32_t i = 0; i < n_lists; i++)
        if (ptr[i] > ptr[i + 1])
            return 0;
    return n_lists >= 0 && ptr[0] == 0 && ptr[n_lists] == n;
}

/* Checks the lists, counts what they need; partial_ptr[row + 1] = chunks of the row. */
static int measure(attention_step *step, const attention_lists *lists) {
    step->need_cells = step->need_units = step->need_entries = step->need_partials = 0;
    if (!is_csr(lists->run_ptr, lists->n_stretches, lists->n_runs) ||
        !is_csr(lists->row_ptr, lists->n_stretches, lists->n_seen))
        return -5;
    if (lists->n_rows > step->max_rows)
        return 1;
    for (int r = 0; r <= lists->n_rows; r++)
        step->partial_ptr[r] = 0;
    for (int s = 0; s < lists->n_stretches; s++) {
        const int64_t n = stretch_cells(lists, s), n_rows = lists->row_ptr[s + 1] - lists->row_ptr[s];
        if (n < 0)
            return -1;
        step->need_cells += n;
        if (n > 0)
            step->need_units += count_chunks(0, n) * ((n_rows + TILE_ROWS - 1) / TILE_ROWS);
        for (int j = lists->row_ptr[s]; j < lists->row_ptr[s + 1]; j++) {
            if (lists->row[j] < 0 || lists->row[j] >= lists->n_rows)
                return -2;
            if (lists->row_begin[j] < 0 || lists->row_begin[j] >= lists->row_end[j] || lists->row_end[j] > n)
                return -3;
            const int64_t chunks = count_chunks(lists->row_begin[j], lists->row_end[j]);
            step->partial_ptr[lists->row[j] + 1] += (int32_t)chunks;
            step->need_entries += chunks;
        }
    }
    for (int r = 0; r < lists->n_rows; r++) {
        const int32_t chunks = step->partial_ptr[r + 1];
        if (chunks == 0)
            return -4;
        step->cursor[r] = chunks == 1 ? -1 : step->partial_ptr[r];
        step->partial_ptr[r + 1] = step->partial_ptr[r] + (chunks == 1 ? 0 : chunks);
    }
    step->need_partials = step->partial_ptr[lists->n_rows];
    return step->need_cells > step->max_cells || step->need_units > step->max_units ||
           step->need_entries > step->max_entries;
}

/* A unit over [begin, end) of stretch s for the next rows from *seen on that see some of it. */
static void add_unit(attention_step *step, const attention_lists *lists, int s, int *seen, int64_t begin, int64_t end,
                     int64_t first_cell, int64_t *n_entries) {
    attention_unit *unit = &step->units[step->n_units];
    *unit = (attention_unit){first_cell + begin, (int32_t)(end - begin), (int32_t)*n_entries, 0, step->cells_total,
                             step->seen_total};
    int j = *seen;
    for (; j < lists->row_ptr[s + 1] && unit->n_entries < TILE_ROWS; j++) {
        const int64_t lo = lists->row_begin[j] > begin ? lists->row_begin[j] : begin;
        const int64_t hi = lists->row_end[j] < end ? lists->row_end[j] : end;
        if (lo >= hi)
            continue;
        int32_t *cursor = &step->cursor[lists->row[j]];
        const int32_t partial = *cursor < 0 ? -1 : (*cursor)++;
        step->entries[(*n_entries)++] =
            (attention_entry){lists->row[j], (int32_t)(lo - begin), (int32_t)(hi - begin), partial};
        unit->n_entries++;
        step->seen_total += hi - lo;
    }
    *seen = j;
    if (unit->n_entries > 0) {
        step->cells_total += end - begin;
        step->n_units++;
    }
}

int loragraph_attention_plan(attention_step *step, const attention_lists *lists) {
    step->n_rows = step->n_units = 0;
    step->cells_total = step->seen_total = 0;
    const int status = measure(step, lists);
    if (status != 0)
        return status;
    int64_t first_cell = 0, n_entries = 0;
    for (int s = 0; s < lists->n_stretches; s++) {
        int64_t n = 0;
        for (int i = lists->run_ptr[s]; i < lists->run_ptr[s + 1]; i++)
            for (int32_t c = 0; c < lists->run_length[i]; c++)
                step->cells[first_cell + n++] = lists->run_start[i] + c;
        for (int64_t begin = 0, end; begin < n; begin = end) {
            end = chunk_begin(chunk_of(begin) + 1);
            end = end < n ? end : n;
            for (int seen = lists->row_ptr[s]; seen < lists->row_ptr[s + 1];)
                add_unit(step, lists, s, &seen, begin, end, first_cell, &n_entries);
        }
        first_cell += n;
    }
    step->n_rows = lists->n_rows;
    return 0;
}
