/* Random numbers as the C++ standard has them, and the draw among a few candidates. */
#include "sampling.h"

#include <math.h>

int64_t loragraph_candidates_draw(const row_candidate *data, int64_t n, double u) {
    float max = data[0].logit;
    for (int64_t i = 1; i < n; i++)
        max = data[i].logit > max ? data[i].logit : max;
    double sum = 0, run = 0;
    for (int64_t i = 0; i < n; i++)
        sum += expf(data[i].logit - max);
    const double target = sum * u;
    for (int64_t i = 0; i < n; i++) {
        run += expf(data[i].logit - max);
        if (run >= target)
            return i;
    }
    return n - 1;
}

void loragraph_mt_seed(mt_state *mt, uint32_t seed) {
    mt->state[0] = seed;
    for (uint32_t i = 1; i < 624; i++)
        mt->state[i] = 1812433253u * (mt->state[i - 1] ^ mt->state[i - 1] >> 30) + i;
    mt->next = 624;
}

/* Matsumoto and Nishimura, "Mersenne Twister", 1998, as the C++ standard fixes it. */
static uint32_t mt_word(mt_state *mt) {
    uint32_t *s = mt->state;
    if (mt->next >= 624) {
        for (int i = 0; i < 624; i++) {
            const uint32_t y = (s[i] & 0x80000000u) | (s[(i + 1) % 624] & 0x7fffffffu);
            s[i] = s[(i + 397) % 624] ^ y >> 1 ^ (y & 1 ? 0x9908b0dfu : 0);
        }
        mt->next = 0;
    }
    uint32_t y = s[mt->next++];
    y ^= y >> 11;
    y ^= y << 7 & 0x9d2c5680u;
    y ^= y << 15 & 0xefc60000u;
    return y ^ y >> 18;
}

double loragraph_mt_uniform(mt_state *mt) {
    const double low = mt_word(mt), high = mt_word(mt);
    const double u = (low + high * 0x1p32) / 0x1p64;
    return u < 1.0 ? u : 0x1.fffffffffffffp-1;
}
