#include "strings.h"

#include <string.h>

void loragraph_strings_measure(loragraph_get_string get, const void *ctx, int64_t key_id,
                               size_t n, int64_t *lengths) {
    for (size_t i = 0; i < n; i++)
        lengths[i] = (int64_t)strlen(get(ctx, key_id, i));
}

void loragraph_strings_pack(loragraph_get_string get, const void *ctx, int64_t key_id, size_t n,
                            const int64_t *lengths, char *out) {
    for (size_t i = 0; i < n; i++) {
        memcpy(out, get(ctx, key_id, i), (size_t)lengths[i] + 1);
        out += lengths[i] + 1;
    }
}

int64_t loragraph_strings_skip(const char *data, int64_t size, int64_t at, uint64_t n) {
    for (uint64_t i = 0; i < n; i++) {
        uint64_t length; /* little endian, as all that runs this is */
        if (size - at < 8)
            return -1;
        memcpy(&length, data + at, 8);
        at += 8;
        if (length > (uint64_t)(size - at))
            return -1;
        at += (int64_t)length;
    }
    return at;
}
