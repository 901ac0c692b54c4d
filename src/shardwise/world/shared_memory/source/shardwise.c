/* Collectives and messages between processes of one host, through a segment that all of them have mapped.
 *
 * In: the segment, zeroed, and tensors as addresses. Out: results in the caller's memory. Every operation is a state machine that never
 * blocks; a waiting rank advances all operations of its process, so that no order of waits among groups can deadlock two ranks.
 *
 * Three methods, by the place of the data:
 *   stream    a rank copies its data chunk by chunk into slots of its own; the others read them. Any private tensor.
 *   job       the tensor is in a buffer that all have mapped: any waiting rank reduces a piece of all ranks' tensors and writes it to all.
 *   ring      a message between two ranks, one byte ring buffer for each direction.
 *
 * Summands are added in the order of ranks, bfloat16 and float16 in float32, so that all ranks get the same bits, in every run.
 * Only single-writer counters and the claims of jobs are shared; a store of a counter releases what was written before it.
 *
 * Not modelled: NUMA nodes, and threads within a rank. One lock per process serialises the threads of one rank.
 */
#define _GNU_SOURCE
#include "channel.h"

#include "arithmetic.h"
#include "job.h"
#include "message.h"
#include "past_caches.h"
#include "stream.h"

/* Bytes of the segment of n ranks, with `chunk` bytes a slot and `ring` bytes of messages for every ordered pair. */
uint64_t shardwise_segment_bytes(int n, uint64_t chunk, uint64_t ring) { return layout(n, chunk, ring).total; }

Engine *shardwise_engine(double spin_s) {
    Engine *e = calloc(1, sizeof *e);
    if (e) e->spin_ns = (int64_t)(spin_s * 1e9);
    return e;
}

static void lock(Engine *e) {
    while (atomic_flag_test_and_set_explicit(&e->lock, memory_order_acquire)) sched_yield();
}
static void unlock(Engine *e) { atomic_flag_clear_explicit(&e->lock, memory_order_release); }

/* Returns this rank's view of a mapped segment. `pidfds`: a descriptor for each rank's process, -1 for this one. NULL without memory. */
Channel *shardwise_open(Engine *e, char *base, int n, int me, uint64_t chunk, uint64_t ring, const int *pidfds) {
    Layout l = layout(n, chunk, ring);
    Channel *c = calloc(1, sizeof *c);
    if (!c) return NULL;
    c->engine = e, c->n = n, c->me = me, c->culprit = -1;
    c->head = (Head *)base;
    c->written = (Counter *)(base + l.written), c->reduced = (Counter *)(base + l.reduced), c->left = (Counter *)(base + l.left);
    c->core = (Counter *)(base + l.core), c->gone = (Counter *)(base + l.gone);
    c->sent = (Counter *)(base + l.sent), c->taken = (Counter *)(base + l.taken);
    c->consumed = (_Atomic uint64_t *)(base + l.consumed), c->consumed_stride = l.consumed_stride / 8;
    c->descriptors = (Descriptor *)(base + l.descriptors), c->job = (Job *)(base + l.job);
    c->slots = base + l.slots, c->rings = base + l.rings;
    c->chunk = chunk, c->chunk_head = l.chunk_head, c->slot_bytes = l.slot_bytes, c->ring = ring;
    c->read = calloc(n, sizeof *c->read), c->peers = calloc(n, sizeof *c->peers), c->pidfds = calloc(n, sizeof *c->pidfds);
    if (!c->read || !c->peers || !c->pidfds) return NULL;
    memcpy(c->pidfds, pidfds, sizeof(int) * n);
    lock(e); /* another thread may be iterating over them */
    Channel **more = realloc(e->channels, sizeof(Channel *) * (e->num_channels + 1));
    if (more) e->channels = more, e->channels[e->num_channels++] = c;
    unlock(e);
    return more ? c : NULL;
}

/* Announces that this rank leaves the group. Ranks that need it fail as if its process had ended. */
void shardwise_leave(Channel *c) {
    lock(c->engine);
    put(&c->gone[c->me], 1);
    notify(c);
    unlock(c->engine);
}

static void drop(Op *op) {
    for (Op *next; op; op = next) next = op->next, free(op);
}

/* Frees the channel after shardwise_leave, when no thread waits: pending operations are dropped, and the segment may be unmapped. */
void shardwise_close(Channel *c) {
    Engine *e = c->engine;
    lock(e);
    for (int i = 0; i < e->num_channels; i++)
        if (e->channels[i] == c) e->channels[i--] = e->channels[--e->num_channels];
    unlock(e);
    drop(c->stream), drop(c->running);
    for (int r = 0; r < c->n; r++) {
        Peer *p = &c->peers[r];
        drop(p->sends), drop(p->receives);
        free(p->inside ? p->op : NULL);
        for (Unexpected *next; p->early; p->early = next) next = p->early->next, free(p->early->claimed), free(p->early);
        if (c->pidfds[r] >= 0) close(c->pidfds[r]);
    }
    for (int i = 0; i < c->num_buffers; i++) free(c->buffers[i]);
    free(c->buffers), free(c->read), free(c->peers), free(c->pidfds), free(c);
}

/* Registers buffer number `number`: `bases[r]` is the address of rank r's here. NULL removes it. Returns 0 without memory. */
int shardwise_buffer(Channel *c, int number, char **bases) {
    char **kept = bases ? malloc(sizeof(char *) * c->n) : NULL;
    if (bases && !kept) return 0;
    if (bases) memcpy(kept, bases, sizeof(char *) * c->n);
    lock(c->engine); /* another thread may be in a job */
    if (number >= c->num_buffers) {
        char ***more = realloc(c->buffers, sizeof(char **) * (number + 1));
        if (more) {
            memset(more + c->num_buffers, 0, sizeof(char **) * (number + 1 - c->num_buffers));
            c->buffers = more, c->num_buffers = number + 1;
        }
    }
    int known = number < c->num_buffers;
    if (known) {
        free(c->buffers[number]);
        c->buffers[number] = kept;
    } else {
        free(kept);
    }
    unlock(c->engine);
    return known;
}

/* Advances all operations of a channel; returns whether anything progressed. */
static int progress(Channel *c) {
    while (c->stream && run_stream(c, c->stream)) {
        Op *op = c->stream;
        if (op->kind == ALL_REDUCE && op->phases == 2) c->total_reduced += op->total;
        c->stream = op->next;
        op->state = DONE;
    }
    write_ahead(c);
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
    int moved = c->changed;
    if (moved) notify(c);
    return moved;
}

static int busy(Channel *c) {
    if (c->stream || c->running) return 1;
    for (int r = 0; r < c->n; r++)
        if (c->peers[r].sends || c->peers[r].receives) return 1;
    return 0;
}

/* Returns whether `op` depends on work that rank r has not done yet: MISSING if r has not joined, NEEDED if it has and may itself wait
 * for a third rank. */
static int needs(Channel *c, Op *op, int r) {
    if (op->kind == SEND || op->kind == RECEIVE) return r == op->peer ? NEEDED : 0;
    if (op->kind >= JOB_ALL_REDUCE) {
        Op *first = c->running;
        return first && atomic_load_explicit(&descriptor(c, first->number, r)->posted, memory_order_acquire) <= first->number ? MISSING : NEEDED;
    }
    Op *first = c->stream;
    if (!first) return 0;
    int adds = first->kind == ALL_REDUCE || first->kind == REDUCE_SCATTER;
    if (adds ? !arrived(c, r, first->begin[r] + first->read) : !first->ended[r] && !arrived(c, r, c->read[r]))
        return arrived(c, r, first->begin[r]) ? NEEDED : MISSING;
    uint64_t consumed = atomic_load_explicit(c->consumed + r * c->consumed_stride + c->me, memory_order_acquire);
    if (first->wrote < first->total && c->my_written >= consumed + DEPTH) return NEEDED;
    return adds && first->phases == 2 && get(&c->reduced[r]) <= first->first_reduced + first->read ? NEEDED : 0;
}

/* Returns a rank that `op` needs and that has ended, or left the group; -1 if there is none. */
static int dead_peer(Channel *c, Op *op) {
    for (int r = 0; r < c->n; r++) {
        struct pollfd p = {c->pidfds[r], POLLIN, 0};
        if (c->pidfds[r] >= 0 && (get(&c->gone[r]) || poll(&p, 1, 0) > 0) && needs(c, op, r)) return r;
    }
    return -1;
}

/* Returns DEAD, LEFT, MISMATCH or TIMED_OUT once any rank has detected that; PENDING before. */
static int broken(Channel *c) {
    uint64_t who = atomic_load_explicit(&c->head->broken, memory_order_acquire);
    if (!who) return PENDING;
    c->culprit = (int)(uint32_t)who - 1;
    return who & GONE ? DEAD : who & OUT ? LEFT : who & LATE ? TIMED_OUT : MISMATCH;
}

/* Advances all channels: MOVED if an operation of `c` progressed, OTHERS if other groups have pending operations. */
static int step(Engine *e, Channel *c) {
    int what = progress(c) ? MOVED : 0;
    for (int i = 0; i < e->num_channels; i++)
        if (e->channels[i] != c && busy(e->channels[i])) {
            what |= OTHERS;
            progress(e->channels[i]);
        }
    return what;
}

/* Returns DONE, or PENDING. */
int shardwise_test(Op *op) {
    Engine *e = op->channel->engine;
    lock(e);
    if (op->state != DONE) step(e, op->channel);
    int state = op->state == DONE ? DONE : PENDING;
    unlock(e);
    return state;
}

/* Returns whether another rank of the group last ran on this core: it cannot run while this one spins. Publishes this rank's core. */
static int shares_core(Channel *c) {
    uint64_t core = (uint64_t)sched_getcpu() + 1;
    if (get(&c->core[c->me]) != core) put(&c->core[c->me], core);
    for (int r = 0; r < c->n; r++)
        if (r != c->me && get(&c->core[r]) == core) return 1;
    return 0;
}

/* Waits until the operation has ended: DONE, TIMED_OUT, DEAD, LEFT or MISMATCH, with the rank at fault in shardwise_culprit. */
int shardwise_wait(Op *op, double timeout_s) {
    Channel *c = op->channel;
    Engine *e = c->engine;
    if (op->state == DONE) return DONE;
    int64_t begin = 0, checked = 0;
    for (int round = 0;; round++) {
        lock(e);
        int what = step(e, c), state = op->state;
        if (state != DONE) state = broken(c);
        unlock(e);
        if (state != PENDING) return state;
        int64_t now = 0;
        if (what & MOVED) { /* the other ranks are active too: worth spinning for */
            begin = 0;
            round = 0;
        }
        if (round % 16 == 0) {
            now = now_ns();
            if (!begin) begin = checked = now;
        }
        if (!now || (now - begin < e->spin_ns && !shares_core(c))) {
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
                    breaks(c, dead, get(&c->gone[dead]) ? OUT : GONE); /* ranks that wait for this one get the same culprit */
                    return broken(c);
                }
            }
            if (now - begin > timeout_s * 1e9) {
                int late = -1, most = 0;
                for (int r = 0; r < c->n; r++) {
                    int need = r == c->me ? 0 : needs(c, op, r);
                    if (need > most) most = need, late = r;
                }
                c->culprit = late;
                if (most < MISSING) return TIMED_OUT;
                breaks(c, late, LATE); /* ranks that wait for this one get the same culprit */
                return broken(c);
            }
        }
        atomic_fetch_add(&c->head->sleepers, 1);
        uint32_t event = atomic_load(&c->head->event);
        lock(e);
        step(e, c);
        state = op->state;
        unlock(e);
        if (state != DONE && broken(c) == PENDING) {
            struct timespec until = {0, what & OTHERS ? 200000 : 20000000};
            syscall(SYS_futex, &c->head->event, FUTEX_WAIT, event, &until, NULL, 0);
        }
        atomic_fetch_sub(&c->head->sleepers, 1);
        round = -1;
    }
}

int shardwise_culprit(Channel *c) { return c->culprit; }

/* Frees an operation after shardwise_wait or shardwise_test has returned DONE. */
void shardwise_free(Op *op) { free(op); }

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

/* Returns the pending operation in *made; if `timeout_s` is above zero, waits for its end, frees it and sets *made to NULL. */
static int ended(Op *op, double timeout_s, Op **made) {
    *made = op;
    if (timeout_s <= 0) return PENDING;
    int state = shardwise_wait(op, timeout_s);
    if (state == DONE) {
        shardwise_free(op);
        *made = NULL;
    }
    return state;
}

/* Starts a collective on private memory. `bytes`: of the whole (ALL_REDUCE, BROADCAST); `sizes`: of the pieces, one for each rank;
 * `arriving`: received from each rank (EXCHANGE). Waits for it, frees it and sets *made to NULL if `timeout_s` is above zero. */
int shardwise_start(Channel *c, int kind, int dtype, int reduce, int root, int phases, char *in, char *out, uint64_t bytes, uint64_t item,
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
    return ended(op, timeout_s, made);
}

/* A blocking all-reduce in place: the same with fewer arguments, which cost a small one more than the sum itself.
 * `how`: the type, the operation above 8 bits, the phases above 16. */
int shardwise_all_reduce(Channel *c, char *data, uint64_t bytes, uint64_t item, int how, double timeout_s) {
    Op *op;
    return shardwise_start(c, ALL_REDUCE, how & 255, how >> 8 & 255, 0, how >> 16, data, data, bytes, item, NULL, NULL, timeout_s, &op);
}

/* As shardwise_start, on buffer `buffer` from `offset` on, which has the whole; `in` or `out` is the private shard. */
int shardwise_start_job(Channel *c, int kind, int dtype, int reduce, int root, int buffer, uint64_t offset, char *in, char *out, uint64_t bytes,
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
    return ended(op, timeout_s, made);
}

/* Starts a message of `bytes` to (or, with `receive`, from) rank `peer`. */
Op *shardwise_message(Channel *c, int receive, int peer, char *data, uint64_t bytes, uint64_t tag) {
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
