/* The shared data of a group's ranks, a rank's private state of a group, and signalling. */
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

#define AHEAD 2 /* chunks that a rank writes before it reduces the first of them, which is still in its cache then */
#define GONE (1ull << 32)
#define OUT (1ull << 33) /* the rank has left the group, without ending */
#define LATE (1ull << 34) /* the rank has timed out */
#define DEPTH 4   /* slots of each rank's stream */
#define JOBS 64   /* pending jobs in one group */
#define BLOCK 2048 /* elements reduced at a time: they stay in the first-level cache */
#define PIECE (128u << 10) /* bytes of a job that one rank claims at a time */
#define PART (256u << 10)  /* bytes of a message published at a time, so that the receiver's copy overlaps the sender's */

enum { F32, F64, BF16, F16, I64, I32, I16, I8, U8 };
enum { SUM, MAX, MIN };
enum { ALL_REDUCE, GATHER, REDUCE_SCATTER, EXCHANGE, BROADCAST, JOB_ALL_REDUCE, JOB_REDUCE_SCATTER, JOB_GATHER, JOB_BROADCAST, SEND, RECEIVE };
enum { MOVED = 1, OTHERS = 2 };
enum { NEEDED = 1, MISSING = 2 };
enum { DONE, PENDING, TIMED_OUT, DEAD, MISMATCH, LEFT };

typedef struct {
    _Alignas(64) _Atomic uint64_t v;
} Counter;

typedef struct {
    _Alignas(64) _Atomic uint32_t event;
    _Alignas(64) _Atomic uint32_t sleepers;
    _Alignas(64) _Atomic uint64_t broken; /* 0, or GONE, OUT or LATE (or none of them: a mismatched call) and 1 + the rank at fault */
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
    uint64_t *sizes, *starts, *arriving, *arrival, *begin; /* n each: sent pieces, received pieces, start of each rank's stream */
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
    Counter *written, *reduced, *left, *core, *gone, *sent, *taken; /* gone: 1 once that rank has closed the group */
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

typedef struct {
    uint64_t written, reduced, left, core, gone, sent, taken, consumed, consumed_stride, descriptors, job, slots, rings, chunk_head, slot_bytes, total;
} Layout;

static Layout layout(int n, uint64_t chunk, uint64_t ring) {
    Layout l;
    uint64_t at = 4096, counters = (uint64_t)n * sizeof(Counter);
    l.written = at, at += counters;
    l.reduced = at, at += counters;
    l.left = at, at += counters;
    l.core = at, at += counters;
    l.gone = at, at += counters;
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
