/* Collectives and messages between processes of one host, through a segment that all of them have mapped.
 *
 * In: the segment, zeroed, and tensors as addresses. Out: results in the caller's memory. Every operation is a state machine that never
 * blocks; a waiting rank drives all operations of its process, so that no order of waiting among groups can stop two ranks for ever.
 *
 * Three ways, by where the data lie:
 *   stream    a rank copies its data chunk by chunk into slots of its own; the others read them. Any private tensor.
 *   job       the tensor lies in a buffer that all have mapped: whoever has time adds a piece of all ranks' tensors and writes it to all.
 *   ring      a message between two ranks, one ring of bytes for each direction.
 *
 * Summands are added in the order of ranks, bfloat16 and float16 in float32, so that all ranks hold the same bits, in every run.
 * Only single-writer counters and the claims of jobs are shared; a store of a counter releases what was written before it.
 *
 * Not modelled: NUMA nodes, and threads within a rank. One lock per process keeps threads of one rank apart.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define GONE (1ull << 32)
#define DEPTH 4   /* slots of each rank's stream */
#define JOBS 64   /* jobs under way in one group */
#define BLOCK 2048 /* elements added at a time: they stay in the first-level cache */
#define PIECE (128u << 10) /* bytes of a job that one rank claims at a time */
#define PART (256u << 10)  /* bytes of a message published at a time, so that the receiver copies beside the sender */

enum { F32, F64, BF16, F16, I64, I32, I16, I8, U8 };
enum { SUM, MAX, MIN };
enum { ALL_REDUCE, GATHER, REDUCE_SCATTER, EXCHANGE, BROADCAST, JOB_ALL_REDUCE, JOB_REDUCE_SCATTER, JOB_GATHER, JOB_BROADCAST, SEND, RECEIVE };
enum { DONE, PENDING, TIMED_OUT, DEAD, MISMATCH };

typedef struct {
    _Alignas(64) _Atomic uint64_t v;
} Counter;

typedef struct {
    _Alignas(64) _Atomic uint32_t event;
    _Alignas(64) _Atomic uint32_t sleepers;
    _Alignas(64) _Atomic uint64_t broken; /* GONE, and 1 + the rank that is gone or whose call did not match, once one was seen */
} Head;

typedef struct {
    uint64_t number, kind, bytes, last;
    uint64_t sizes[]; /* EXCHANGE: bytes for each rank */
} Chunk;

typedef struct {
    _Alignas(64) _Atomic uint64_t posted; /* 1 + the job's number */
    uint64_t kind, bytes, buffer, offset;
} Descriptor;

typedef struct {
    Counter next, done; /* the job's number above 24 bits that count pieces */
} Job;

typedef struct {
    uint64_t bytes, tag;
} Message;

typedef struct Op Op;
typedef struct Channel Channel;
typedef struct Engine Engine;

struct Op {
    Channel *channel;
    Op *next;
    int kind, dtype, reduce, root, peer, phases, state, posted, mine, ran;
    char *in, *out;
    uint64_t bytes, item, number, total, wrote, reduced, read, first_reduced, buffer, offset, tag, moved;
    uint64_t *sizes, *starts, *arriving, *arrival, *begin; /* n each: leaving pieces, arriving pieces, where each rank's stream stood */
    unsigned char *ended;
};

typedef struct Unexpected Unexpected;
struct Unexpected {
    Unexpected *next;
    uint64_t tag, bytes, moved;
    Op *claimed;
    char data[];
};

typedef struct {
    Op *sends, *last_send, *receives;
    Unexpected *early;
    int inside; /* a message is being received */
    uint64_t left;
    Op *op;
    Unexpected *kept;
} Peer;

struct Channel {
    Engine *engine;
    int n, me, culprit;
    Head *head;
    Counter *written, *reduced, *left, *sent, *taken;
    _Atomic uint64_t *consumed;
    uint64_t consumed_stride, slot_bytes, chunk, chunk_head, ring, number, jobs, jobs_left, total_reduced, my_written, room;
    Descriptor *descriptors;
    Job *job;
    char *slots, *rings;
    uint64_t *read;
    Op *stream, *stream_last, *running, *running_last;
    Peer *peers;
    int *pidfds;
    char ***buffers;
    int num_buffers, changed;
};

struct Engine {
    atomic_flag lock;
    Channel **channels;
    int num_channels;
    int64_t spin_ns;
};

static uint64_t up(uint64_t x, uint64_t to) { return (x + to - 1) / to * to; }
static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }
static uint64_t get(Counter *c) { return atomic_load_explicit(&c->v, memory_order_acquire); }
static void put(Counter *c, uint64_t v) { atomic_store_explicit(&c->v, v, memory_order_release); }

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

static void pause_core(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* ---- arithmetic: d = a op b, where d may be a or b */

#define PAIR(T, NAME, EXPRESSION)                                           \
    static void NAME(T *d, const T *p, const T *q, size_t n) {              \
        _Pragma("GCC ivdep") for (size_t i = 0; i < n; i++) {               \
            T a = p[i], b = q[i];                                           \
            d[i] = EXPRESSION;                                              \
        }                                                                   \
    }
#define KIND(T, U, NAME)                                \
    PAIR(T, NAME##_sum, (T)((U)a + (U)b))               \
    PAIR(T, NAME##_max, a > b ? a : b)                  \
    PAIR(T, NAME##_min, a < b ? a : b)                  \
    static void NAME##_pair(int op, void *d, const void *a, const void *b, size_t n) { \
        (op == SUM ? NAME##_sum : op == MAX ? NAME##_max : NAME##_min)(d, a, b, n);    \
    }
KIND(float, float, f32)
KIND(double, double, f64)
KIND(int64_t, uint64_t, i64) /* sums wrap, which signed ones may not in C */
KIND(int32_t, uint32_t, i32)
KIND(int16_t, uint16_t, i16)
KIND(int8_t, uint8_t, i8)
KIND(uint8_t, uint8_t, u8)

static void widen_bf16(float *d, const uint16_t *s, size_t n) {
    for (size_t i = 0; i < n; i++) {
        uint32_t u = (uint32_t)s[i] << 16;
        memcpy(d + i, &u, 4);
    }
}

static void narrow_bf16(uint16_t *d, const float *s, size_t n) {
    for (size_t i = 0; i < n; i++) {
        uint32_t u;
        memcpy(&u, s + i, 4);
        uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16; /* to nearest, ties to even */
        d[i] = (u & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (uint16_t)rounded;
    }
}

#ifdef __FLT16_MANT_DIG__
static void widen_f16(float *d, const uint16_t *s, size_t n) {
    const _Float16 *h = (const _Float16 *)s;
    for (size_t i = 0; i < n; i++) d[i] = (float)h[i];
}
static void narrow_f16(uint16_t *d, const float *s, size_t n) {
    _Float16 *h = (_Float16 *)d;
    for (size_t i = 0; i < n; i++) h[i] = (_Float16)s[i];
}
#endif

/* Whether this build adds that type. */
int weft_adds(int dtype) {
#ifndef __FLT16_MANT_DIG__
    if (dtype == F16) return 0;
#endif
    return dtype >= F32 && dtype <= U8;
}

static void pair(int dtype, int op, void *d, const void *a, const void *b, size_t n) {
    switch (dtype) {
    case F32: f32_pair(op, d, a, b, n); break;
    case F64: f64_pair(op, d, a, b, n); break;
    case I64: i64_pair(op, d, a, b, n); break;
    case I32: i32_pair(op, d, a, b, n); break;
    case I16: i16_pair(op, d, a, b, n); break;
    case I8: i8_pair(op, d, a, b, n); break;
    default: u8_pair(op, d, a, b, n);
    }
}

/* Adds `bytes` of n sources, in their order, and writes the sum to all destinations; a destination may be a source. */
static void add(char **to, int num_to, char **from, int n, uint64_t bytes, uint64_t item, int dtype, int op) {
    _Alignas(64) char sum[BLOCK * 8];
    _Alignas(64) float wide[BLOCK], next[BLOCK];
    uint64_t step = BLOCK * item;
    int direct = num_to == 1 && n == 2 && dtype != BF16 && dtype != F16;
    if (direct) {
        pair(dtype, op, to[0], from[0], from[1], bytes / item);
        return;
    }
    for (uint64_t at = 0; at < bytes; at += step) {
        uint64_t size = least(step, bytes - at), count = size / item;
        if (dtype == BF16 || dtype == F16) {
            void (*widen)(float *, const uint16_t *, size_t) = widen_bf16;
            void (*narrow)(uint16_t *, const float *, size_t) = narrow_bf16;
#ifdef __FLT16_MANT_DIG__
            if (dtype == F16) widen = widen_f16, narrow = narrow_f16;
#endif
            widen(wide, (uint16_t *)(from[0] + at), count);
            for (int r = 1; r < n; r++) {
                widen(next, (uint16_t *)(from[r] + at), count);
                f32_pair(op, wide, wide, next, count);
            }
            narrow((uint16_t *)sum, wide, count);
        } else if (n == 1) {
            memcpy(sum, from[0] + at, size);
        } else {
            pair(dtype, op, sum, from[0] + at, from[1] + at, count);
            for (int r = 2; r < n; r++) pair(dtype, op, sum, sum, from[r] + at, count);
        }
        for (int k = 0; k < num_to; k++) memcpy(to[k] + at, sum, size);
    }
}

/* ---- the segment */

typedef struct {
    uint64_t written, reduced, left, sent, taken, consumed, consumed_stride, descriptors, job, slots, rings, chunk_head, slot_bytes, total;
} Layout;

static Layout layout(int n, uint64_t chunk, uint64_t ring) {
    Layout l;
    uint64_t at = 4096, counters = (uint64_t)n * sizeof(Counter);
    l.written = at, at += counters;
    l.reduced = at, at += counters;
    l.left = at, at += counters;
    l.sent = at, at += counters * n;
    l.taken = at, at += counters * n;
    l.consumed_stride = up(8 * n, 64);
    l.consumed = at, at += l.consumed_stride * n;
    l.descriptors = at, at += sizeof(Descriptor) * n * JOBS;
    l.job = at, at += sizeof(Job) * JOBS;
    l.chunk_head = up(sizeof(Chunk) + 8 * n, 64);
    l.slot_bytes = up(l.chunk_head + chunk, 4096);
    l.slots = at = up(at, 4096), at += l.slot_bytes * DEPTH * n;
    l.rings = at, at += ring * n * n;
    l.total = at;
    return l;
}

/* Bytes of the segment of n ranks, with `chunk` bytes a slot and `ring` bytes of messages for every ordered pair. */
uint64_t weft_segment_bytes(int n, uint64_t chunk, uint64_t ring) { return layout(n, chunk, ring).total; }

Engine *weft_engine(double spin_s) {
    Engine *e = calloc(1, sizeof *e);
    if (e) e->spin_ns = (int64_t)(spin_s * 1e9);
    return e;
}

/* This rank's view of a mapped segment. `pidfds`: a descriptor for each rank's process, -1 for this one. NULL without memory. */
Channel *weft_open(Engine *e, char *base, int n, int me, uint64_t chunk, uint64_t ring, const int *pidfds) {
    Layout l = layout(n, chunk, ring);
    Channel *c = calloc(1, sizeof *c);
    Channel **more = realloc(e->channels, sizeof(Channel *) * (e->num_channels + 1));
    if (!c || !more) return NULL;
    e->channels = more;
    c->engine = e, c->n = n, c->me = me, c->culprit = -1;
    c->head = (Head *)base;
    c->written = (Counter *)(base + l.written), c->reduced = (Counter *)(base + l.reduced), c->left = (Counter *)(base + l.left);
    c->sent = (Counter *)(base + l.sent), c->taken = (Counter *)(base + l.taken);
    c->consumed = (_Atomic uint64_t *)(base + l.consumed), c->consumed_stride = l.consumed_stride / 8;
    c->descriptors = (Descriptor *)(base + l.descriptors), c->job = (Job *)(base + l.job);
    c->slots = base + l.slots, c->rings = base + l.rings;
    c->chunk = chunk, c->chunk_head = l.chunk_head, c->slot_bytes = l.slot_bytes, c->ring = ring;
    c->read = calloc(n, sizeof *c->read), c->peers = calloc(n, sizeof *c->peers), c->pidfds = calloc(n, sizeof *c->pidfds);
    if (!c->read || !c->peers || !c->pidfds) return NULL;
    memcpy(c->pidfds, pidfds, sizeof(int) * n);
    e->channels[e->num_channels++] = c;
    return c;
}

/* Makes buffer number `number` known: `bases[r]` is where rank r's is mapped here. NULL forgets it. Returns 0 without memory. */
int weft_buffer(Channel *c, int number, char **bases) {
    if (number >= c->num_buffers) {
        char ***more = realloc(c->buffers, sizeof(char **) * (number + 1));
        if (!more) return 0;
        memset(more + c->num_buffers, 0, sizeof(char **) * (number + 1 - c->num_buffers));
        c->buffers = more, c->num_buffers = number + 1;
    }
    free(c->buffers[number]);
    c->buffers[number] = NULL;
    if (!bases) return 1;
    c->buffers[number] = malloc(sizeof(char *) * c->n);
    if (!c->buffers[number]) return 0;
    memcpy(c->buffers[number], bases, sizeof(char *) * c->n);
    return 1;
}

static void notify(Channel *c) {
    c->changed = 0;
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&c->head->sleepers, memory_order_relaxed)) {
        atomic_fetch_add(&c->head->event, 1);
        syscall(SYS_futex, &c->head->event, FUTEX_WAKE, 1 << 30, NULL, NULL, 0);
    }
}

static void breaks(Channel *c, int culprit, uint64_t how) {
    uint64_t none = 0;
    atomic_compare_exchange_strong(&c->head->broken, &none, how | ((uint64_t)culprit + 1));
    atomic_fetch_add(&c->head->event, 1);
    syscall(SYS_futex, &c->head->event, FUTEX_WAKE, 1 << 30, NULL, NULL, 0);
}

/* ---- streams */

static Chunk *slot(Channel *c, int rank, uint64_t number) {
    return (Chunk *)(c->slots + ((uint64_t)rank * DEPTH + number % DEPTH) * c->slot_bytes);
}
static char *payload(Channel *c, int rank, uint64_t number) { return (char *)slot(c, rank, number) + c->chunk_head; }

static int has_room(Channel *c) {
    if (c->my_written < c->room) return 1;
    uint64_t lowest = c->my_written;
    for (int r = 0; r < c->n; r++)
        if (r != c->me) lowest = least(lowest, atomic_load_explicit(c->consumed + r * c->consumed_stride + c->me, memory_order_acquire));
    c->room = lowest + DEPTH;
    return c->my_written < c->room;
}

static char *begin_chunk(Channel *c, Op *op) {
    Chunk *s = slot(c, c->me, c->my_written);
    s->number = op->number, s->kind = op->kind | op->dtype << 8 | op->reduce << 16 | op->phases << 20 | (uint64_t)op->root << 24;
    s->bytes = op->bytes, s->last = op->wrote + 1 == op->total;
    if (op->kind == EXCHANGE) memcpy(s->sizes, op->sizes, 8 * c->n);
    return (char *)s + c->chunk_head;
}
static void end_chunk(Channel *c, Op *op) {
    op->wrote++;
    put(&c->written[c->me], ++c->my_written);
    c->changed = 1;
}

#ifdef WEFT_TWIN_SKIPS_THE_BARRIER /* what a test must find out */
static int arrived(Channel *c, int r, uint64_t number) { return get(&c->written[r]) <= number || 1; }
#else
static int arrived(Channel *c, int r, uint64_t number) { return get(&c->written[r]) > number; }
#endif

/* Whether the chunk belongs to the call that this rank made; breaks the group otherwise. */
static int fits(Channel *c, Op *op, int r, uint64_t number) {
    Chunk *s = slot(c, r, number);
    uint64_t kind = op->kind | op->dtype << 8 | op->reduce << 16 | op->phases << 20 | (uint64_t)op->root << 24;
    int same = s->kind == kind && s->number == op->number;
    same = same && (op->kind == EXCHANGE ? s->sizes[c->me] == op->arriving[r] : s->bytes == op->bytes);
    if (!same) breaks(c, r, 0);
    return same;
}

static void consume(Channel *c, int r, uint64_t upto) {
    c->read[r] = upto;
    atomic_store_explicit(c->consumed + c->me * c->consumed_stride + r, upto, memory_order_release);
    c->changed = 1;
}

/* The chunk `index` of this operation from all ranks is there, and right. */
static int all_there(Channel *c, Op *op, uint64_t index) {
    for (int r = 0; r < c->n; r++)
        if (r != c->me && (!arrived(c, r, op->begin[r] + index) || !fits(c, op, r, op->begin[r] + index))) return 0;
    return 1;
}

static void write_reduce(Channel *c, Op *op) {
    while (op->wrote < op->total && (op->phases == 1 || op->wrote - op->read < DEPTH) && has_room(c)) {
        char *room = begin_chunk(c, op);
        uint64_t at = op->wrote * c->chunk;
        if (at < op->bytes) memcpy(room, op->in + at, least(c->chunk, op->bytes - at));
        end_chunk(c, op);
    }
}

/* Everybody adds everything: one wait, and the fewest bytes for two ranks. */
static int all_reduce_direct(Channel *c, Op *op) {
    char *from[c->n];
    write_reduce(c, op);
    while (op->read < op->wrote && all_there(c, op, op->read)) {
        uint64_t at = op->read * c->chunk, size = at < op->bytes ? least(c->chunk, op->bytes - at) : 0;
        for (int r = 0; r < c->n; r++) from[r] = r == c->me ? op->in + at : payload(c, r, op->begin[r] + op->read);
        char *to = op->out + at;
        if (size) add(&to, 1, from, c->n, size, op->item, op->dtype, op->reduce);
        op->read++;
        for (int r = 0; r < c->n; r++)
            if (r != c->me) consume(c, r, op->begin[r] + op->read);
        write_reduce(c, op);
    }
    return op->read == op->total;
}

static uint64_t cut(uint64_t count, int n, int r) { return count / n * r + least(count % n, r); }

/* Each adds its piece of the chunk in its own slot; then all copy all pieces. */
static int all_reduce_pieces(Channel *c, Op *op) {
    char *from[c->n];
    for (int again = 1; again;) {
        again = 0;
        write_reduce(c, op);
        if (op->reduced < op->wrote && all_there(c, op, op->reduced)) {
            uint64_t at = op->reduced * c->chunk, count = least(c->chunk, op->bytes - at) / op->item;
            uint64_t start = cut(count, c->n, c->me) * op->item, stop = cut(count, c->n, c->me + 1) * op->item;
            for (int r = 0; r < c->n; r++) from[r] = payload(c, r, op->begin[r] + op->reduced) + start;
            char *to = from[c->me];
            if (stop > start) add(&to, 1, from, c->n, stop - start, op->item, op->dtype, op->reduce);
            op->reduced++;
            put(&c->reduced[c->me], op->first_reduced + op->reduced);
            c->changed = again = 1;
        }
        int ready = op->read < op->reduced;
        for (int r = 0; ready && r < c->n; r++) ready = r == c->me || get(&c->reduced[r]) > op->first_reduced + op->read;
        if (ready) {
            uint64_t at = op->read * c->chunk, count = least(c->chunk, op->bytes - at) / op->item;
            for (int r = 0; r < c->n; r++) {
                uint64_t start = cut(count, c->n, r) * op->item, stop = cut(count, c->n, r + 1) * op->item;
                memcpy(op->out + at + start, payload(c, r, op->begin[r] + op->read) + start, stop - start);
            }
            op->read++;
            for (int r = 0; r < c->n; r++)
                if (r != c->me) consume(c, r, op->begin[r] + op->read);
            again = 1;
        }
    }
    return op->read == op->total;
}

/* GATHER and BROADCAST: what a rank writes is the same for all others. */
static void write_whole(Channel *c, Op *op) {
    while (op->wrote < op->total && has_room(c)) {
        char *room = begin_chunk(c, op);
        uint64_t mine = op->kind == GATHER ? op->sizes[c->me] : op->bytes, at = op->wrote * c->chunk;
        uint64_t size = at < mine ? least(c->chunk, mine - at) : 0;
        memcpy(room, op->in + at, size);
        char *own = op->out + (op->kind == GATHER ? op->starts[c->me] : 0) + at;
        if (own != op->in + at) memcpy(own, op->in + at, size);
        end_chunk(c, op);
    }
}

static uint64_t part(Channel *c) { return c->chunk / c->n / 64 * 64; }

/* EXCHANGE and REDUCE_SCATTER: every slot holds a part for each rank. */
static void write_parts(Channel *c, Op *op) {
    uint64_t width = part(c);
    while (op->wrote < op->total && has_room(c)) {
        char *room = begin_chunk(c, op);
        uint64_t at = op->wrote * width;
        for (int r = 0; r < c->n; r++)
            if (r != c->me && at < op->sizes[r]) memcpy(room + r * width, op->in + op->starts[r] + at, least(width, op->sizes[r] - at));
        end_chunk(c, op);
    }
}

static int reduce_scatter(Channel *c, Op *op) {
    char *from[c->n];
    uint64_t width = part(c), mine = op->sizes[c->me];
    write_parts(c, op);
    while (op->read < op->wrote && all_there(c, op, op->read)) {
        uint64_t at = op->read * width, size = at < mine ? least(width, mine - at) : 0;
        for (int r = 0; r < c->n; r++)
            from[r] = r == c->me ? op->in + op->starts[r] + at : payload(c, r, op->begin[r] + op->read) + c->me * width;
        char *to = op->out + at;
        if (size) add(&to, 1, from, c->n, size, op->item, op->dtype, op->reduce);
        op->read++;
        for (int r = 0; r < c->n; r++)
            if (r != c->me) consume(c, r, op->begin[r] + op->read);
        write_parts(c, op);
    }
    return op->read == op->total;
}

/* GATHER, EXCHANGE, BROADCAST: each other rank's chunks are taken as they come, until its last. */
static int take(Channel *c, Op *op) {
    uint64_t width = op->kind == EXCHANGE ? part(c) : c->chunk;
    int open = 0;
    for (int again = 1; again;) {
        again = open = 0;
        if (op->kind == EXCHANGE) write_parts(c, op);
        else if (op->kind == GATHER || c->me == op->root) write_whole(c, op);
        for (int r = 0; r < c->n; r++) {
            if (op->ended[r]) continue;
            uint64_t number = c->read[r];
            open = 1;
            if (!arrived(c, r, number)) continue;
            if (!fits(c, op, r, number)) return 0;
            char *from = payload(c, r, number) + (op->kind == EXCHANGE ? c->me * width : 0);
            uint64_t at = (number - op->begin[r]) * width;
            uint64_t size = op->kind == EXCHANGE ? op->arriving[r] : op->kind == GATHER ? op->sizes[r] : op->bytes;
            uint64_t start = op->kind == EXCHANGE ? op->arrival[r] : op->kind == GATHER ? op->starts[r] : 0;
            if (at < size) memcpy(op->out + start + at, from, least(width, size - at));
            op->ended[r] = slot(c, r, number)->last != 0;
            consume(c, r, number + 1);
            again = 1;
        }
    }
    return !open && op->wrote == op->total;
}

static int run_stream(Channel *c, Op *op) {
    if (!op->posted) {
        /* The streams of others stand where the last operation left them, which is known only now. */
        memcpy(op->begin, c->read, 8 * c->n);
        op->begin[c->me] = c->my_written;
        op->first_reduced = c->total_reduced;
        op->posted = 1;
    }
    if (op->kind == ALL_REDUCE) return op->phases == 1 ? all_reduce_direct(c, op) : all_reduce_pieces(c, op);
    return op->kind == REDUCE_SCATTER ? reduce_scatter(c, op) : take(c, op);
}

/* ---- jobs on buffers that all have mapped */

static Descriptor *descriptor(Channel *c, uint64_t number, int r) { return c->descriptors + (number % JOBS) * c->n + r; }

static int post(Channel *c, Op *op) {
    if (op->number >= JOBS)
        for (int r = 0; r < c->n; r++)
            if (get(&c->left[r]) <= op->number - JOBS) return 0;
    Descriptor *d = descriptor(c, op->number, c->me);
    d->kind = op->kind | op->dtype << 8 | op->reduce << 16 | (uint64_t)op->root << 24;
    d->bytes = op->bytes, d->buffer = op->buffer, d->offset = op->offset;
    if (c->me == 0) { /* nobody touches the job before rank 0 has posted it */
        put(&c->job[op->number % JOBS].next, (op->number + 1) << 24);
        put(&c->job[op->number % JOBS].done, (op->number + 1) << 24);
    }
    atomic_store_explicit(&d->posted, op->number + 1, memory_order_release);
    c->changed = op->posted = 1;
    return 1;
}

static char *place(Channel *c, Op *op, int r) {
    Descriptor *d = descriptor(c, op->number, r);
    return c->buffers[d->buffer][r] + d->offset;
}

static void finished_piece(Channel *c, Job *job) {
    atomic_fetch_add_explicit(&job->done.v, 1, memory_order_acq_rel);
    c->changed = 1;
}

static int run_job(Channel *c, Op *op) {
    if (!op->posted && !post(c, op)) return 0;
    Job *job = &c->job[op->number % JOBS];
    if (op->posted == 1) {
        Descriptor *mine = descriptor(c, op->number, c->me);
        for (int r = 0; r < c->n; r++) {
            Descriptor *d = descriptor(c, op->number, r);
            if (atomic_load_explicit(&d->posted, memory_order_acquire) != op->number + 1) return 0;
            if (d->kind != mine->kind || d->bytes != mine->bytes || d->buffer >= (uint64_t)c->num_buffers || !c->buffers[d->buffer]) {
                breaks(c, r, 0);
                return 0;
            }
        }
        op->posted = 2;
    }
    char *at[c->n];
    for (int r = 0; r < c->n; r++) at[r] = place(c, op, r);
    if (op->kind == JOB_ALL_REDUCE) {
        for (;;) {
            uint64_t claimed = get(&job->next), index = claimed & 0xffffff;
            if (index >= op->total) break;
            if (!atomic_compare_exchange_weak(&job->next.v, &claimed, claimed + 1)) continue;
            char *from[c->n];
            for (int r = 0; r < c->n; r++) from[r] = at[r] + index * PIECE;
            add(from, c->n, from, c->n, least(PIECE, op->bytes - index * PIECE), op->item, op->dtype, op->reduce);
            finished_piece(c, job);
        }
    } else if (!op->mine) {
        op->mine = 1;
        if (op->kind == JOB_REDUCE_SCATTER) {
            for (int r = 0; r < c->n; r++) at[r] += op->starts[c->me];
            if (op->sizes[c->me]) add(&op->out, 1, at, c->n, op->sizes[c->me], op->item, op->dtype, op->reduce);
        } else if (op->kind == JOB_GATHER) {
            for (int k = 1; k <= c->n; k++) { /* each begins with another rank's, so that they do not write to one at a time */
                char *to = at[(c->me + k) % c->n] + op->starts[c->me];
                if (to != op->in) memcpy(to, op->in, op->sizes[c->me]);
            }
        } else if (c->me != op->root) {
            memcpy(at[c->me], at[op->root], op->bytes);
        }
        finished_piece(c, job);
    }
    uint64_t pieces = op->kind == JOB_ALL_REDUCE ? op->total : (uint64_t)c->n;
    return (get(&job->done) & 0xffffff) == pieces;
}

/* ---- messages */

static void ring_write(char *ring, uint64_t size, uint64_t at, const char *from, uint64_t n) {
    uint64_t first = least(n, size - at % size);
    memcpy(ring + at % size, from, first);
    memcpy(ring, from + first, n - first);
}
static void ring_read(const char *ring, uint64_t size, uint64_t at, char *to, uint64_t n) {
    uint64_t first = least(n, size - at % size);
    memcpy(to, ring + at % size, first);
    memcpy(to + first, ring, n - first);
}

static void run_sends(Channel *c, int to) {
    Peer *p = &c->peers[to];
    uint64_t pair = (uint64_t)c->me * c->n + to;
    char *ring = c->rings + pair * c->ring;
    while (p->sends) {
        Op *op = p->sends;
        uint64_t head = get(&c->sent[pair]), room = c->ring - (head - get(&c->taken[pair]));
        if (!op->posted) {
            if (room < 64) return;
            Message m = {op->bytes, op->tag};
            ring_write(ring, c->ring, head, (char *)&m, sizeof m);
            put(&c->sent[pair], head += 64);
            room -= 64;
            c->changed = op->posted = 1;
        }
        while (op->moved < op->bytes) {
            uint64_t size = least(least(op->bytes - op->moved, room), PART);
            if (!size) return;
            ring_write(ring, c->ring, head, op->in + op->moved, size);
            op->moved += size;
            head += up(size, 64), room -= up(size, 64);
            put(&c->sent[pair], head);
            c->changed = 1;
        }
        p->sends = op->next;
        op->state = DONE;
    }
}

static Op *posted_receive(Peer *p, uint64_t tag) {
    for (Op **at = &p->receives; *at; at = &(*at)->next)
        if ((*at)->tag == tag) {
            Op *found = *at;
            *at = found->next;
            return found;
        }
    return NULL;
}

static void deliver(Peer *p, Unexpected *kept) {
    memcpy(kept->claimed->out, kept->data, kept->bytes);
    kept->claimed->state = DONE;
    for (Unexpected **at = &p->early; *at; at = &(*at)->next)
        if (*at == kept) {
            *at = kept->next;
            break;
        }
    free(kept);
}

static void run_receives(Channel *c, int from) {
    Peer *p = &c->peers[from];
    uint64_t pair = (uint64_t)from * c->n + c->me;
    char *ring = c->rings + pair * c->ring;
    for (;;) {
        uint64_t tail = get(&c->taken[pair]), there = get(&c->sent[pair]) - tail;
        if (!p->inside) {
            /* What nobody has asked for yet stays in the ring: it would be copied twice. */
            if (!there || !p->receives) return;
            Message m;
            ring_read(ring, c->ring, tail, (char *)&m, sizeof m);
            p->op = posted_receive(p, m.tag), p->kept = NULL;
            if (p->op && p->op->bytes != m.bytes) {
                breaks(c, from, 0);
                return;
            }
            if (!p->op) {
                p->kept = calloc(1, sizeof(Unexpected) + m.bytes);
                if (!p->kept) abort();
                p->kept->tag = m.tag, p->kept->bytes = m.bytes;
                Unexpected **end = &p->early;
                while (*end) end = &(*end)->next;
                *end = p->kept;
            }
            p->inside = 1, p->left = m.bytes;
            tail += 64, there -= 64;
            put(&c->taken[pair], tail);
            c->changed = 1;
        }
        while (p->left && there) {
            uint64_t size = least(p->left, there);
            uint64_t *moved = p->op ? &p->op->moved : &p->kept->moved;
            ring_read(ring, c->ring, tail, (p->op ? p->op->out : p->kept->data) + *moved, size);
            *moved += size, p->left -= size;
            tail += up(size, 64), there -= up(size, 64);
            put(&c->taken[pair], tail);
            c->changed = 1;
        }
        if (p->left) return;
        p->inside = 0;
        if (p->op) p->op->state = DONE;
        else if (p->kept->claimed) deliver(p, p->kept);
        p->op = NULL, p->kept = NULL;
    }
}

static void start_receive(Channel *c, Op *op) {
    Peer *p = &c->peers[op->peer];
    for (Unexpected *u = p->early; u; u = u->next)
        if (u->tag == op->tag && !u->claimed) {
            if (u->bytes != op->bytes) {
                breaks(c, op->peer, 0);
                return;
            }
            u->claimed = op;
            if (u->moved == u->bytes) deliver(p, u);
            return;
        }
    Op **end = &p->receives;
    while (*end) end = &(*end)->next;
    *end = op;
}

/* ---- progress and waiting */

static void progress(Channel *c) {
    while (c->stream && run_stream(c, c->stream)) {
        Op *op = c->stream;
        if (op->kind == ALL_REDUCE && op->phases == 2) c->total_reduced += op->total;
        c->stream = op->next;
        op->state = DONE;
    }
    for (Op *op = c->running; op; op = op->next) {
        if (!op->ran) op->ran = run_job(c, op);
        if (!op->posted) break; /* they are posted in order */
    }
    while (c->running && c->running->ran) { /* and end in order */
        Op *op = c->running;
        c->running = op->next;
        op->state = DONE;
        put(&c->left[c->me], ++c->jobs_left);
        c->changed = 1;
    }
    for (int r = 0; r < c->n; r++) {
        if (c->peers[r].sends) run_sends(c, r);
        if (r != c->me && c->ring) run_receives(c, r);
    }
    if (c->changed) notify(c);
}

static int busy(Channel *c) {
    if (c->stream || c->running) return 1;
    for (int r = 0; r < c->n; r++)
        if (c->peers[r].sends || c->peers[r].receives) return 1;
    return 0;
}

/* Whether `op` cannot end without something that rank r has not done yet. */
static int needs(Channel *c, Op *op, int r) {
    if (op->kind == SEND || op->kind == RECEIVE) return r == op->peer;
    if (op->kind >= JOB_ALL_REDUCE) return 1;
    Op *first = c->stream;
    if (!first) return 0;
    uint64_t consumed = atomic_load_explicit(c->consumed + r * c->consumed_stride + c->me, memory_order_acquire);
    if (first->wrote < first->total && c->my_written >= consumed + DEPTH) return 1;
    if (first->kind == ALL_REDUCE || first->kind == REDUCE_SCATTER)
        return !arrived(c, r, first->begin[r] + first->read) || (first->phases == 2 && get(&c->reduced[r]) <= first->first_reduced + first->read);
    return !first->ended[r] && !arrived(c, r, c->read[r]);
}

static int dead_peer(Channel *c, Op *op) {
    for (int r = 0; r < c->n; r++) {
        struct pollfd p = {c->pidfds[r], POLLIN, 0};
        if (c->pidfds[r] >= 0 && poll(&p, 1, 0) > 0 && needs(c, op, r)) return r;
    }
    return -1;
}

static void lock(Engine *e) {
    while (atomic_flag_test_and_set_explicit(&e->lock, memory_order_acquire)) sched_yield();
}
static void unlock(Engine *e) { atomic_flag_clear_explicit(&e->lock, memory_order_release); }

/* DEAD or MISMATCH once any rank has seen that; PENDING before. */
static int broken(Channel *c) {
    uint64_t who = atomic_load_explicit(&c->head->broken, memory_order_acquire);
    if (!who) return PENDING;
    c->culprit = (int)(uint32_t)who - 1;
    return who & GONE ? DEAD : MISMATCH;
}

/* Moves everything that can move; whether others than `c` have something under way. */
static int step(Engine *e, Channel *c) {
    int others = 0;
    progress(c);
    for (int i = 0; i < e->num_channels; i++)
        if (e->channels[i] != c && busy(e->channels[i])) {
            others = 1;
            progress(e->channels[i]);
        }
    return others;
}

/* DONE, or PENDING where it is still under way. */
int weft_test(Op *op) {
    Engine *e = op->channel->engine;
    lock(e);
    if (op->state != DONE) step(e, op->channel);
    int state = op->state == DONE ? DONE : PENDING;
    unlock(e);
    return state;
}

/* Waits until the operation has ended: DONE, TIMED_OUT, DEAD or MISMATCH, with the rank of the last two in weft_culprit. */
int weft_wait(Op *op, double timeout_s) {
    Channel *c = op->channel;
    Engine *e = c->engine;
    if (op->state == DONE) return DONE;
    int64_t begin = 0, checked = 0;
    for (int round = 0;; round++) {
        lock(e);
        int others = step(e, c), state = op->state;
        if (state != DONE) state = broken(c);
        unlock(e);
        if (state != PENDING) return state;
        int64_t now = 0;
        if (round % 16 == 0) {
            now = now_ns();
            if (!begin) begin = checked = now;
        }
        if (!now || now - begin < e->spin_ns) {
            pause_core();
            continue;
        }
        if (now - checked > 20000000) {
            checked = now;
            int dead = dead_peer(c, op);
            if (dead >= 0) {
                lock(e);
                step(e, c);
                state = op->state;
                int missing = state != DONE && needs(c, op, dead);
                unlock(e);
                if (state == DONE) return DONE;
                if (missing) {
                    breaks(c, dead, GONE); /* who waits for this rank is told of that one */
                    return broken(c);
                }
            }
            if (now - begin > timeout_s * 1e9) {
                c->culprit = -1;
                for (int r = c->n - 1; r >= 0; r--)
                    if (r != c->me && needs(c, op, r)) c->culprit = r;
                return TIMED_OUT;
            }
        }
        atomic_fetch_add(&c->head->sleepers, 1);
        uint32_t event = atomic_load(&c->head->event);
        lock(e);
        step(e, c);
        state = op->state;
        unlock(e);
        if (state != DONE && broken(c) == PENDING) {
            struct timespec until = {0, others ? 200000 : 20000000};
            syscall(SYS_futex, &c->head->event, FUTEX_WAIT, event, &until, NULL, 0);
        }
        atomic_fetch_sub(&c->head->sleepers, 1);
        round = -1;
    }
}

int weft_culprit(Channel *c) { return c->culprit; }

/* After weft_wait or weft_test has said DONE. */
void weft_free(Op *op) { free(op); }

static Op *new_op(Channel *c, int kind, int dtype, int reduce, int root) {
    int n = c->n;
    Op *op = calloc(1, sizeof *op + 5 * 8 * (uint64_t)n + n);
    if (!op) abort();
    op->channel = c, op->kind = kind, op->dtype = dtype, op->reduce = reduce, op->root = root, op->state = PENDING, op->phases = 1;
    op->sizes = (uint64_t *)(op + 1);
    op->starts = op->sizes + n, op->arriving = op->starts + n, op->arrival = op->arriving + n, op->begin = op->arrival + n;
    op->ended = (unsigned char *)(op->begin + n);
    return op;
}

static void set_pieces(uint64_t *sizes, uint64_t *starts, const int64_t *given, int n) {
    for (uint64_t r = 0, at = 0; r < (uint64_t)n; at += sizes[r++]) sizes[r] = given[r], starts[r] = at;
}

static uint64_t pieces_of(uint64_t bytes, uint64_t width) { return bytes ? (bytes + width - 1) / width : 1; }

/* Starts a collective on private memory. `bytes`: of the whole (ALL_REDUCE, BROADCAST); `sizes`: of the pieces, one for each rank;
 * `arriving`: of what comes from each rank (EXCHANGE). Waits for it, frees it and sets *made to NULL where `timeout_s` is above zero. */
int weft_start(Channel *c, int kind, int dtype, int reduce, int root, int phases, char *in, char *out, uint64_t bytes, uint64_t item,
               const int64_t *sizes, const int64_t *arriving, double timeout_s, Op **made) {
    Op *op = new_op(c, kind, dtype, reduce, root);
    op->in = in, op->out = out, op->bytes = bytes, op->item = item, op->phases = phases;
    if (sizes) set_pieces(op->sizes, op->starts, sizes, c->n);
    if (arriving) set_pieces(op->arriving, op->arrival, arriving, c->n);
    uint64_t widest = bytes, width = c->chunk;
    if (kind == GATHER) widest = op->sizes[c->me];
    if (kind == REDUCE_SCATTER || kind == EXCHANGE) {
        widest = 0, width = part(c);
        for (int r = 0; r < c->n; r++)
            if (op->sizes[r] > widest) widest = op->sizes[r];
    }
    op->total = pieces_of(widest, width);
    if (kind == BROADCAST && c->me != root) op->total = 0;
    for (int r = 0; r < c->n; r++) op->ended[r] = r == c->me || (kind == BROADCAST && r != root);
    if (kind == EXCHANGE) {
        char *own = out + op->arrival[c->me], *mine = in + op->starts[c->me];
        if (own != mine) memcpy(own, mine, op->sizes[c->me]);
    }
    lock(c->engine);
    op->number = c->number++;
    if (c->stream) c->stream_last->next = op;
    else c->stream = op;
    c->stream_last = op;
    progress(c);
    unlock(c->engine);
    *made = op;
    if (timeout_s <= 0) return PENDING;
    int state = weft_wait(op, timeout_s);
    if (state == DONE) {
        weft_free(op);
        *made = NULL;
    }
    return state;
}

/* As weft_start, on buffer `buffer` from `offset` on, which is the whole; `in` or `out` is the private piece. */
int weft_start_job(Channel *c, int kind, int dtype, int reduce, int root, int buffer, uint64_t offset, char *in, char *out, uint64_t bytes,
                   uint64_t item, const int64_t *sizes, double timeout_s, Op **made) {
    Op *op = new_op(c, kind, dtype, reduce, root);
    op->in = in, op->out = out, op->bytes = bytes, op->item = item, op->buffer = buffer, op->offset = offset;
    if (sizes) set_pieces(op->sizes, op->starts, sizes, c->n);
    op->total = pieces_of(bytes, PIECE);
    lock(c->engine);
    op->number = c->jobs++;
    if (c->running) c->running_last->next = op;
    else c->running = op;
    c->running_last = op;
    progress(c);
    unlock(c->engine);
    *made = op;
    if (timeout_s <= 0) return PENDING;
    int state = weft_wait(op, timeout_s);
    if (state == DONE) {
        weft_free(op);
        *made = NULL;
    }
    return state;
}

/* Starts a message of `bytes` to (or, with `receive`, from) rank `peer`. */
Op *weft_message(Channel *c, int receive, int peer, char *data, uint64_t bytes, uint64_t tag) {
    Op *op = new_op(c, receive ? RECEIVE : SEND, 0, 0, 0);
    op->peer = peer, op->in = op->out = data, op->bytes = bytes, op->tag = tag;
    lock(c->engine);
    if (receive) {
        start_receive(c, op);
    } else {
        Peer *p = &c->peers[peer];
        if (p->sends) p->last_send->next = op;
        else p->sends = op;
        p->last_send = op;
    }
    progress(c);
    unlock(c->engine);
    return op;
}

/* Reads and writes `bytes` once, as a measure of the machine. */
void weft_copy(char *to, const char *from, uint64_t bytes) { memcpy(to, from, bytes); }
