/* Strings of a GGUF array, copied one after another: a call from Python for each would take a
 * third of the time in which a model loads.
 *
 * build.py hands this file to cffi without its preprocessor lines.
 */
#ifndef LORAGRAPH_STRINGS_H
#define LORAGRAPH_STRINGS_H
#include <stddef.h>
#include <stdint.h>

/* gguf_get_arr_str: the NUL-terminated string at `index` of the array under `key_id`. */
typedef const char *(*loragraph_get_string)(const void *ctx, int64_t key_id, size_t index);

/* lengths[n]: bytes of each string, without its NUL. */
void loragraph_strings_measure(loragraph_get_string get, const void *ctx, int64_t key_id,
                               size_t n, int64_t *lengths);

/* The strings and their NULs one after another; `out` has room for sum(lengths) + n bytes. */
void loragraph_strings_pack(loragraph_get_string get, const void *ctx, int64_t key_id, size_t n,
                            const int64_t *lengths, char *out);

/* The end of n strings as a file has them, each behind its length (u64), the first at data[at] with at <= size;
 * -1 where they reach behind data[size]. */
int64_t loragraph_strings_skip(const char *data, int64_t size, int64_t at, uint64_t n);
#endif
