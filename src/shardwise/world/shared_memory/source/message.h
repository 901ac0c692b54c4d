/* Messages between two ranks, matched by tag, then by order. */

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
            /* Messages without a posted receive stay in the ring: they would be copied twice. */
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
