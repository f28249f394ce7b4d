/* Rows of a weight from one number format through F32 into another, a low-rank change added in between.
 *
 * The formats are ggml's and known by its functions alone, so the bytes are ggml's whatever this CPU is.
 *
 * build.py hands this file to cffi without its preprocessor lines.
 */
#ifndef LORAGRAPH_REWRITE_H
#define LORAGRAPH_REWRITE_H
#include <stddef.h>
#include <stdint.h>

/* `to_float` of ggml's type traits. */
typedef void (*loragraph_to_float)(const void *x, float *y, int64_t n);

/* ggml_quantize_chunk. */
typedef size_t (*loragraph_quantize)(int type, const float *x, void *y, int64_t start, int64_t n_rows, int64_t n_in,
                                     const float *weights);

/* How the rows are read and stored. */
typedef struct {
    loragraph_to_float to_float; /* NULL: the rows are F32 */
    loragraph_quantize quantize;
    int type;                       /* to store as */
    int64_t n_in;                   /* values of a row */
    int64_t source_row, stored_row; /* bytes of a row */
    const float *weights;           /* [n_in] of the columns, NULL: ggml's own rule */
    float bound;                    /* the largest magnitude that may be stored */
} rewrite_format;

/* (1 + gain) W + left right, for consecutive rows of one matrix. */
typedef struct {
    const float *left;        /* [rank] a row, from the first row on */
    const float *right;       /* [n_in] a rank */
    int64_t rank;             /* 0: nothing is added */
    const float *row_gain;    /* one a row, or NULL */
    const float *column_gain; /* one a column, or NULL */
} rewrite_change;

/* Rows that are turned at once: as many as fit the second cache. `values` has room for them. */
int64_t loragraph_rewrite_rows(int64_t n_in);

/* Turns n_rows rows and gives their number; less where the following rows, as many as are turned at once, hold a
 * value beyond the bound or NaN: they stand in `values` then. */
int64_t loragraph_rewrite(const rewrite_format *format, const rewrite_change *change, int64_t n_rows,
                          const char *source, float *values, char *stored);
#endif
