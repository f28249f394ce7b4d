/* Choosing a token from a row of logits without an array of candidates: scan, best k, masses, draws.
 *
 * A draw is libllama's: p = expf(l / T - max / T) in F32, sums in F64 in the order of the ids, the first token whose
 * sum reaches u times the whole. Vectors find it from exponentials within DRAW_ERROR of expf; where that does not
 * settle the choice, expf itself does. So a token never depends on the instruction set.
 *
 * build.py hands this file to cffi without its preprocessor lines.
 */
#ifndef LORAGRAPH_SAMPLING_H
#define LORAGRAPH_SAMPLING_H
#include <stdint.h>

/* One pass over a row. */
typedef struct {
    float max;
    int32_t best;   /* the lowest id of the largest value */
    int32_t finite; /* 0: some value is infinite or not a number, and `best` means nothing */
} row_scan;

/* The tokens of a row with lo < l < hi, as weights exp(l / temperature - max / temperature). */
typedef struct {
    const float *x; /* n values */
    int64_t n;
    float lo, hi;
    float max;      /* the largest of those tokens */
    float temperature;
} row_window;

/* A std::mt19937. */
typedef struct {
    uint32_t state[624];
    int32_t next;
} mt_state;

/* llama_token_data */
typedef struct {
    int32_t id;
    float logit;
    float p;
} row_candidate;

/* Blocks of a row of n values, each of which has a maximum in `maxima`. */
int64_t loragraph_row_blocks(int64_t n);

/* maxima[loragraph_row_blocks(n)] of x[n], and what the pass found. */
void loragraph_row_scan(const float *x, int64_t n, float *maxima, row_scan *out);

/* The same of the rows x + rows[i] * stride, out[n_rows]; `maxima` is scratch for one row. */
void loragraph_rows_scan(const float *x, int64_t stride, const int64_t *rows, int64_t n_rows, int64_t n, float *maxima,
                         row_scan *out);

/* Brings `maxima`, max and best up to date after x[ids[n_ids]] were changed. */
void loragraph_row_rescan(const float *x, int64_t n, const int64_t *ids, int64_t n_ids, float *maxima, row_scan *out);

/* ids[k] of the k <= n largest values, best first, the lower id among equals; heap[k] is scratch. Gives their number:
 * k, unless some values are not finite. */
int64_t loragraph_row_top(const float *x, int64_t n, const float *maxima, int64_t k, row_candidate *heap, int64_t *ids);

/* Sum of the window's weights, within DRAW_ERROR of it; with `exact`, by expf. */
double loragraph_row_mass(const row_window *window, int exact);

/* The sum over a sample of the row, times what it is a sample of. */
double loragraph_row_estimate(const row_window *window);

/* For a window of temperature 1: to out[0] its mass, and that of those on its edges (l = lo, l = hi) with an id below
 * `id`; to out[1] that of all above outer_lo. Ends early once out[0] >= most or out[1] - out[0] >= rest. */
void loragraph_row_split(const row_window *window, int64_t id, float outer_lo, double most, double rest, int exact,
                         double *out);

/* Sums of weight and of weight * (l - max) over a window of temperature 1, to out[2]. */
void loragraph_row_means(const row_window *window, double *out);

/* The largest value below `hi`; -inf if there is none. */
float loragraph_row_max_below(const float *x, int64_t n, float hi);

/* n, sum and sum of squares of l - max over the window, to out[3]. */
void loragraph_row_moments(const row_window *window, double *out);

/* Relative error of the masses that are not exact. */
double loragraph_row_mass_error(void);

/* sums[loragraph_draw_blocks(n)] is scratch; `mass` gets that of the window, within the error of loragraph_row_mass.
 * Gives an id, or -1 where the window is empty. */
int64_t loragraph_draw_blocks(int64_t n);
int64_t loragraph_row_draw(const row_window *window, double u, double *sums, double *mass);

/* A token of the window's typical set, by its weight; -1 where the window is empty. The row is read several times, and
 * stays in the caches meanwhile. */
int64_t loragraph_row_typical(const row_window *window, double typical_p, double *sums, mt_state *random);

/* What a row_call does: one of the passes above over one row, or another function. */
enum {
    ROW_SCAN,      /* maxima, scan */
    ROW_RESCAN,    /* maxima and scan, after x[ids[n_ids]] were changed */
    ROW_TOP,       /* ids[n_ids], the best; n_ids becomes what is found */
    ROW_MASS,      /* found[0] */
    ROW_ESTIMATE,  /* found[0] */
    ROW_SPLIT,     /* found[0] and [1] */
    ROW_MOMENTS,   /* found[0], [1] and [2] */
    ROW_DRAW,      /* id, for u; the window's mass in found[0] */
    ROW_TYPICAL,   /* id, for a typical_p of u and the twister `first` */
    ROW_OTHER,     /* other(first, second) */
};

/* A pass with what it reads, and where it writes. */
typedef struct {
    int32_t what, exact;
    row_window window;
    float *maxima;
    double *sums;
    row_candidate *heap;
    int64_t *ids;
    int64_t n_ids, id;
    double u, most, rest;
    float outer_lo;
    row_scan scan;
    double found[3];
    void (*other)(void *first, void *second);
    void *first, *second;
} row_call;

/* The userdata of loragraph_row_calls_run. `next` has to be 0 before each compute. */
typedef struct {
    row_call **calls;
    int64_t n, next;
} row_calls;

void loragraph_row_call(row_call *call);

struct ggml_tensor;

/* A ggml custom node: each thread takes the next call until all are done. Reads and writes no tensor. */
void loragraph_row_calls_run(struct ggml_tensor *dst, int ith, int nth, void *userdata);

/* The index that libllama's dist sampler chooses for u among n >= 1 candidates. */
int64_t loragraph_candidates_draw(const row_candidate *data, int64_t n, double u);

/* std::mt19937(seed), and a std::uniform_real_distribution<double>(0, 1) over it (libstdc++'s, libc++'s). */
void loragraph_mt_seed(mt_state *state, uint32_t seed);
double loragraph_mt_uniform(mt_state *state);
#endif
