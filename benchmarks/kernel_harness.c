/* Threads for kernel_lowrank.py: they call nodes one after another with a barrier between, as ggml does.
 *
 * A pass takes the sum over its nodes of the slowest thread's processor time, waiting left out: on an idle machine
 * the time between two barriers, on a busy one what it would be without the other processes' turns.
 */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct { size_t function, userdata; } bench_node;
typedef void (*node_function)(void *dst, int ith, int nth, void *userdata);

typedef struct {
    const bench_node *nodes; /* NULL: read the blocks */
    int n_nodes, n_blocks, nth;
    const size_t *blocks;
    const int64_t *n_bytes;
    atomic_int arrived, round;
    atomic_ullong sum;
    double *seconds; /* [n_nodes or n_blocks][nth] */
} bench_job;

typedef struct { bench_job *job; int ith; } bench_thread;

static void barrier(bench_job *job) {
    int round = atomic_load(&job->round);
    if (atomic_fetch_add(&job->arrived, 1) == job->nth - 1) {
        atomic_store(&job->arrived, 0);
        atomic_store(&job->round, round + 1);
        return;
    }
    for (int spin = 0; atomic_load(&job->round) == round; spin++)
        if (spin > 10000)
            sched_yield(); /* another process may hold the other core */
}

static uint64_t read_all(const char *p, int64_t n) {
    uint64_t sum[8] = {0}, part[8];
    for (int64_t i = 0; i + 64 <= n; i += 64) {
        memcpy(part, p + i, 64);
        for (int j = 0; j < 8; j++)
            sum[j] += part[j];
    }
    return sum[0] + sum[1] + sum[2] + sum[3] + sum[4] + sum[5] + sum[6] + sum[7];
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void *work(void *argument) {
    bench_thread *self = argument;
    bench_job *job = self->job;
    for (int i = 0; i < (job->nodes ? job->n_nodes : job->n_blocks); i++) {
        barrier(job);
        double start = now();
        if (job->nodes) {
            ((node_function)job->nodes[i].function)(NULL, self->ith, job->nth, (void *)job->nodes[i].userdata);
        } else {
            int64_t part = job->n_bytes[i] / job->nth;
            atomic_fetch_add(&job->sum, read_all((const char *)job->blocks[i] + part * self->ith, part));
        }
        job->seconds[i * job->nth + self->ith] = now() - start;
    }
    return NULL;
}

static double run(bench_job *job) {
    const int n = job->nodes ? job->n_nodes : job->n_blocks;
    pthread_t *threads = calloc((size_t)job->nth, sizeof *threads);
    bench_thread *parts = calloc((size_t)job->nth, sizeof *parts);
    job->seconds = calloc((size_t)n * (size_t)job->nth, sizeof *job->seconds);
    for (int i = 0; i < job->nth; i++) {
        parts[i] = (bench_thread){job, i};
        if (i > 0)
            pthread_create(&threads[i], NULL, work, &parts[i]);
    }
    work(&parts[0]);
    for (int i = 1; i < job->nth; i++)
        pthread_join(threads[i], NULL);
    double total = 0;
    for (int i = 0; i < n; i++) {
        double slowest = 0;
        for (int t = 0; t < job->nth; t++)
            slowest = job->seconds[i * job->nth + t] > slowest ? job->seconds[i * job->nth + t] : slowest;
        total += slowest;
    }
    free(job->seconds);
    free(parts);
    free(threads);
    return total;
}

double bench_nodes(const bench_node *nodes, int n_nodes, int nth) {
    bench_job job = {.nodes = nodes, .n_nodes = n_nodes, .nth = nth};
    return run(&job);
}

double bench_read(const size_t *blocks, const int64_t *n_bytes, int n_blocks, int nth) {
    bench_job job = {.blocks = blocks, .n_bytes = n_bytes, .n_blocks = n_blocks, .nth = nth};
    return run(&job);
}

/* FLOP/s of independent FMAs in registers on one thread; `width` is 16 (AVX-512) or 8 floats. */
#if defined(__x86_64__)
#include <immintrin.h>
#define PEAK(name, target_name, vector, set1, fma, store)                                            \
    __attribute__((target(target_name))) static double name(int64_t n) {                             \
        vector a = set1(0), b = set1(1), c = set1(2), d = set1(3), e = set1(4), f = set1(5);         \
        vector g = set1(6), h = set1(7), i = set1(8), j = set1(9), m = set1(0.999f), k = set1(.1f);  \
        float sink[16];                                                                              \
        double start = now();                                                                       \
        for (int64_t r = 0; r < n; r++) {                                                            \
            a = fma(a, m, k), b = fma(b, m, k), c = fma(c, m, k), d = fma(d, m, k);                  \
            e = fma(e, m, k), f = fma(f, m, k), g = fma(g, m, k), h = fma(h, m, k);                  \
            i = fma(i, m, k), j = fma(j, m, k);                                                      \
        }                                                                                            \
        double seconds = now() - start;                                                             \
        store(sink, ((a + b) + (c + d)) + ((e + f) + (g + h)) + (i + j));                            \
        __asm__ volatile("" : : "m"(sink));                                                          \
        return (double)n * 10 * 2 * (double)(sizeof(vector) / 4) / seconds;                          \
    }
PEAK(peak_512, "avx512f", __m512, _mm512_set1_ps, _mm512_fmadd_ps, _mm512_storeu_ps)
PEAK(peak_256, "avx2,fma", __m256, _mm256_set1_ps, _mm256_fmadd_ps, _mm256_storeu_ps)
double bench_fma(int64_t n, int width) { return width == 16 ? peak_512(n) : peak_256(n); }
#else
double bench_fma(int64_t n, int width) { return (void)n, (void)width, 0.0; }
#endif
