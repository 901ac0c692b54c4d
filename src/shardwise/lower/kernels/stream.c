/* Random numbers as a function of a key and an element's number, and dropout that draws them as it goes.
 *
 * In: a key of two words, the elements' numbers as nested steps, a range of the elements. Out: one word of 64 bits for each element, or
 * x times `scale` where the word's upper 53 bits are below `bound`, and times 0 elsewhere.
 * SplitMix64 (Steele, Lea and Flood 2014) on the element's number, with a second key word between its two products. */
#include <stdint.h>
#include <string.h>

#define GOLDEN 0x9E3779B97F4A7C15ULL
#define MOST 16

typedef struct {
    uint64_t base; /* number of the first element */
    int64_t dims, count[MOST], apart[MOST];
} Numbers;

static inline uint64_t word(uint64_t z, uint64_t second) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ second ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31);
}

/* `body` for each run of elements along the innermost dimension: `at` its place in memory, `run` its length, `z` its first element's
 * input of `word`, `step` what that grows by from element to element. */
#define EACH_RUN(body)                                                                                                                     \
    int64_t place[MOST];                                                                                                                   \
    const int64_t last = d->dims - 1;                                                                                                      \
    for (int64_t i = last, rest = from; i >= 0; i--) {                                                                                     \
        place[i] = rest % d->count[i];                                                                                                     \
        rest /= d->count[i];                                                                                                               \
    }                                                                                                                                      \
    const uint64_t step = (uint64_t)d->apart[last] * GOLDEN;                                                                               \
    for (int64_t at = from; at < to;) {                                                                                                    \
        uint64_t number = d->base;                                                                                                         \
        for (int64_t i = 0; i <= last; i++) number += (uint64_t)(place[i] * d->apart[i]);                                                  \
        int64_t run = d->count[last] - place[last];                                                                                        \
        if (run > to - at) run = to - at;                                                                                                  \
        uint64_t z = number * GOLDEN + first;                                                                                              \
        body at += run;                                                                                                                    \
        place[last] += run;                                                                                                                \
        for (int64_t i = last; i > 0 && place[i] == d->count[i]; i--) {                                                                    \
            place[i] = 0;                                                                                                                  \
            place[i - 1]++;                                                                                                                \
        }                                                                                                                                  \
    }

static inline float wide(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float found;
    memcpy(&found, &bits, 4);
    return found;
}

static inline uint16_t narrow(float x) { /* to the nearest, ties to even */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint16_t rounded = (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
    return (bits & 0x7FFFFFFF) > 0x7F800000 ? (uint16_t)0x7FC0 : rounded;
}

static void words(const Numbers *d, uint64_t first, uint64_t second, int64_t from, int64_t to, uint64_t *restrict out) {
    EACH_RUN({
        uint64_t *restrict o = out + at;
        for (int64_t j = 0; j < run; j++, z += step) o[j] = word(z, second);
    })
}

#define DROP(name, type, number, load, store)                                                                                              \
    static void name(const Numbers *d, uint64_t first, uint64_t second, int64_t from, int64_t to, const type *x, type *y,                  \
                     int64_t bound, double scale) {                                                                                        \
        const number kept = (number)scale;                                                                                                 \
        EACH_RUN({                                                                                                                         \
            const type *in = x + at;                                                                                                       \
            type *out = y + at; /* may be where it comes from */                                                                           \
            _Pragma("GCC ivdep")                                                                                                           \
            for (int64_t j = 0; j < run; j++, z += step) {                                                                                 \
                const int64_t drawn = (int64_t)(word(z, second) >> 11);                                                                    \
                out[j] = store(load(in[j]) * (drawn < bound ? kept : 0));                                                                  \
            }                                                                                                                              \
        })                                                                                                                                 \
    }

#define SAME(x) (x)
DROP(drop64, double, double, SAME, SAME)
DROP(drop32, float, float, SAME, SAME)
DROP(drop16, uint16_t, float, wide, narrow)

typedef struct {
    const Numbers *numbers;
    uint64_t first, second;
    const void *x;
    void *y;
    int64_t total, threads, bound;
    double scale;
    int kind;
    int64_t next;
} Work;

static void part(Work *w, int64_t from, int64_t to) {
    switch (w->kind) {
    case 0: words(w->numbers, w->first, w->second, from, to, w->y); break;
    case 16: drop16(w->numbers, w->first, w->second, from, to, w->x, w->y, w->bound, w->scale); break;
    case 32: drop32(w->numbers, w->first, w->second, from, to, w->x, w->y, w->bound, w->scale); break;
    default: drop64(w->numbers, w->first, w->second, from, to, w->x, w->y, w->bound, w->scale);
    }
}

static void share(void *given) {
    Work *w = given;
    const int64_t i = __atomic_fetch_add(&w->next, 1, __ATOMIC_RELAXED), n = w->threads;
    if (i < n) part(w, w->total / n * i, i == n - 1 ? w->total : w->total / n * (i + 1));
}

/* Of the library that torch has loaded for its own threads; without it one thread does all. */
extern void GOMP_parallel(void (*function)(void *), void *data, unsigned threads, unsigned flags) __attribute__((weak));

/* kind 0: words into y; 16, 32, 64: y = dropout of x in bfloat16, float32, float64. */
void shardwise_draw(const Numbers *numbers, uint64_t first, uint64_t second, int kind, const void *x, void *y, int64_t total, int64_t bound,
               double scale, int64_t threads) {
    Work work = {numbers, first, second, x, y, total, threads, bound, scale, kind, 0};
    if (threads < 2 || !GOMP_parallel) {
        part(&work, 0, total);
        return;
    }
    GOMP_parallel(share, &work, (unsigned)threads, 0);
    while (work.next < threads) share(&work); /* fewer came than were asked for */
}
