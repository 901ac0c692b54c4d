/* Collectives on private memory: chunk by chunk through slots that their writer owns. */

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

#ifdef SHARDWISE_TWIN_SKIPS_THE_BARRIER /* a bug that a test must detect */
static int arrived(Channel *c, int r, uint64_t number) { return get(&c->written[r]) <= number || 1; }
#else
static int arrived(Channel *c, int r, uint64_t number) { return get(&c->written[r]) > number; }
#endif

/* Returns whether the chunk belongs to the call that this rank made; breaks the group otherwise. */
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

/* Returns whether chunk `index` of this operation has arrived from all ranks, and matches. */
static int all_there(Channel *c, Op *op, uint64_t index) {
    for (int r = 0; r < c->n; r++)
        if (r != c->me && (!arrived(c, r, op->begin[r] + index) || !fits(c, op, r, op->begin[r] + index))) return 0;
    return 1;
}

static uint64_t cut(uint64_t count, int n, int r) { return count / n * r + least(count % n, r); }

/* Returns the start of rank r's shard of a chunk, in bytes; for r = n the end of the last. */
static uint64_t border(Channel *c, Op *op, uint64_t index, int r) {
    return cut(least(c->chunk, op->bytes - index * c->chunk) / op->item, c->n, r) * op->item;
}

static void write_reduce(Channel *c, Op *op) {
    while (op->wrote < op->total && op->wrote - op->read < AHEAD && has_room(c)) {
        char *room = begin_chunk(c, op), *from = op->in + op->wrote * c->chunk;
        uint64_t size = border(c, op, op->wrote, c->n);
        if (op->phases == 1) {
            memcpy(room, from, size);
        } else { /* no other rank needs the shard that this rank reduces */
            uint64_t start = border(c, op, op->wrote, c->me), stop = border(c, op, op->wrote, c->me + 1);
            memcpy(room, from, start);
            memcpy(room + stop, from + stop, size - stop);
        }
        end_chunk(c, op);
    }
}

/* Every rank reduces the whole tensor: one wait, and the fewest bytes for two ranks. */
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

/* Each rank reduces its shard of the chunk, into its result and its slot; then all copy the others' shards. Fewer bytes for many ranks. */
static int all_reduce_pieces(Channel *c, Op *op) {
    char *from[c->n];
    for (int again = 1; again;) {
        again = 0;
        write_reduce(c, op);
        if (op->reduced < op->wrote && all_there(c, op, op->reduced)) {
            uint64_t start = border(c, op, op->reduced, c->me), stop = border(c, op, op->reduced, c->me + 1);
            for (int r = 0; r < c->n; r++) from[r] = payload(c, r, op->begin[r] + op->reduced) + start;
            char *to[2] = {op->out + op->reduced * c->chunk + start, from[c->me]};
            from[c->me] = op->in + op->reduced * c->chunk + start;
            if (stop > start) add(to, 2, from, c->n, stop - start, op->item, op->dtype, op->reduce);
            op->reduced++;
            put(&c->reduced[c->me], op->first_reduced + op->reduced);
            c->changed = again = 1;
        }
        int ready = op->read < op->reduced;
        for (int r = 0; ready && r < c->n; r++) ready = r == c->me || get(&c->reduced[r]) > op->first_reduced + op->read;
        if (ready) {
            char *out = op->out + op->read * c->chunk;
            for (int r = 0; r < c->n; r++) {
                uint64_t start = border(c, op, op->read, r), stop = border(c, op, op->read, r + 1);
                if (r != c->me) memcpy(out + start, payload(c, r, op->begin[r] + op->read) + start, stop - start);
            }
            op->read++;
            for (int r = 0; r < c->n; r++)
                if (r != c->me) consume(c, r, op->begin[r] + op->read);
            again = 1;
        }
    }
    return op->read == op->total;
}

/* GATHER and BROADCAST: a rank writes the same data for all others. */
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

/* GATHER, EXCHANGE, BROADCAST: each other rank's chunks are read as they arrive, until its last. */
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
        /* The positions of the other ranks' streams after the last operation are known only now. */
        memcpy(op->begin, c->read, 8 * c->n);
        op->begin[c->me] = c->my_written;
        op->first_reduced = c->total_reduced;
        op->posted = 1;
    }
    if (op->kind == ALL_REDUCE) return op->phases == 1 ? all_reduce_direct(c, op) : all_reduce_pieces(c, op);
    return op->kind == REDUCE_SCATTER ? reduce_scatter(c, op) : take(c, op);
}

/* Whether an operation may write before earlier ones have ended: all are all-reduces that every rank adds whole, of other memory. */
static int writes_ahead(Channel *c, Op *op) {
    if (op->kind != ALL_REDUCE || op->phases != 1) return 0;
    for (Op *early = c->stream; early != op; early = early->next) {
        if (early->kind != ALL_REDUCE || early->phases != 1 || early->wrote < early->total) return 0;
        if (early->out < op->in + op->bytes && op->in < early->out + early->bytes) return 0; /* it reads what an earlier one adds */
    }
    return 1;
}

/* Publishes what operations behind the first one send, so that the other ranks need not wait until this one runs again. */
static void write_ahead(Channel *c) {
    for (Op *op = c->stream ? c->stream->next : NULL; op && writes_ahead(c, op); op = op->next) write_reduce(c, op);
}
