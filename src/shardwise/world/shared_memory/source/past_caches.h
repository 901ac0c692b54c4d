/* Streaming memory access: a copy by non-temporal stores, whose target is not read soon, and the sum of memory.
 *
 * Four pages at a time: each is a stream of its own for the processor, which prefetches only within a page. */
#if defined(__AVX512F__) || defined(__AVX__) || defined(__SSE2__)
#include <immintrin.h>
#endif

enum { PAGE = 4096, LINE = 64, PAGES = 4 };

/* Writes one line by non-temporal stores: a line that is written whole need not be read before. `to` is aligned to 64 bytes. */
static inline void put_line(char *to, const char *from) {
#if defined(__AVX512F__)
    _mm512_stream_si512((void *)to, _mm512_loadu_si512(from));
#elif defined(__AVX__)
    for (int i = 0; i < LINE; i += 32) _mm256_stream_si256((void *)(to + i), _mm256_loadu_si256((const void *)(from + i)));
#elif defined(__SSE2__)
    for (int i = 0; i < LINE; i += 16) _mm_stream_si128((void *)(to + i), _mm_loadu_si128((const void *)(from + i)));
#else
    memcpy(to, from, LINE);
#endif
}

/* Returns the sum of 64-bit words modulo 2^64, plus the bytes behind the last whole word. */
int64_t shardwise_sum_of_words(const char *from, uint64_t bytes) {
    enum { WORDS = LINE / 8 };
    uint64_t sums[PAGES][WORDS] = {{0}}, word, total = 0, at = 0;
    for (; at + PAGES * PAGE <= bytes; at += PAGES * PAGE)
        for (int line = 0; line < PAGE; line += LINE)
            for (int page = 0; page < PAGES; page++)
                for (int i = 0; i < WORDS; i++) {
                    memcpy(&word, from + at + page * PAGE + line + 8 * i, 8);
                    sums[page][i] += word;
                }
    for (; at + 8 <= bytes; at += 8) memcpy(&word, from + at, 8), total += word;
    for (; at < bytes; at++) total += (uint8_t)from[at];
    for (int page = 0; page < PAGES; page++)
        for (int i = 0; i < WORDS; i++) total += sums[page][i];
    return (int64_t)total;
}

/* memcpy with release order: later stores become visible after it. Returns shardwise_sum_of_words of the copied memory. */
int64_t shardwise_put(char *to, const char *from, uint64_t bytes) {
    enum { WORDS = LINE / 8 };
    if ((uintptr_t)to % LINE) { /* not aligned to lines */
        memcpy(to, from, bytes);
        return shardwise_sum_of_words(from, bytes);
    }
    uint64_t sums[WORDS] = {0}, line[WORDS], total = 0, at = 0;
    for (; at + PAGES * PAGE <= bytes; at += PAGES * PAGE)
        for (int in_page = 0; in_page < PAGE; in_page += LINE)
            for (int page = 0; page < PAGES; page++) {
                const uint64_t here = at + page * PAGE + in_page;
                __builtin_prefetch(from + here + 8 * LINE);
                memcpy(line, from + here, LINE);
                for (int i = 0; i < WORDS; i++) sums[i] += line[i];
                put_line(to + here, from + here);
            }
    for (; at + LINE <= bytes; at += LINE) {
        memcpy(line, from + at, LINE);
        for (int i = 0; i < WORDS; i++) sums[i] += line[i];
        put_line(to + at, from + at);
    }
    memcpy(to + at, from + at, bytes - at);
#if defined(__SSE2__)
    _mm_sfence();
#else
    atomic_thread_fence(memory_order_release);
#endif
    for (int i = 0; i < WORDS; i++) total += sums[i];
    return (int64_t)total + shardwise_sum_of_words(from + at, bytes - at);
}
