/* Collectives on buffers that all ranks have mapped: waiting ranks claim the next piece (work stealing). */

static Descriptor *descriptor(Channel *c, uint64_t number, int r) { return c->descriptors + (number % JOBS) * c->n + r; }

static int post(Channel *c, Op *op) {
    if (op->number >= JOBS)
        for (int r = 0; r < c->n; r++)
            if (get(&c->left[r]) <= op->number - JOBS) return 0;
    Descriptor *d = descriptor(c, op->number, c->me);
    d->kind = op->kind | op->dtype << 8 | op->reduce << 16 | (uint64_t)op->root << 24;
    d->bytes = op->bytes, d->buffer = op->buffer, d->offset = op->offset;
    if (c->me == 0) { /* no rank accesses the job before rank 0 has posted it */
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
            for (int k = 1; k <= c->n; k++) { /* each starts at a different rank, so that not all write to one at a time */
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
