"""Parameter servers: some replicas store the weights and update them for all (Li et al., OSDI 2014; Ho et al., NIPS 2013).

Before step t a rank has the servers' weights with the updates of steps 0 to t - 1 - staleness. Every bucket of gradients is sharded over
the servers. A worker pushes each shard to its server, which reduces the workers' gradients in the order of their ranks, updates its shard
of the weights when it has them all, and sends it to every worker: for M bytes of weights 2 M (n - 1) bytes a step.

With staleness=K a server updates as soon as it has all gradients, whatever its own rank is computing, and a worker waits for the update of
step t - K at the end of step t. So no rank is more than K steps ahead of the slowest, and every run is bitwise equal. A server stores the
last K + 1 versions of its weights, since a slow worker receives them late.

A replica may be several ranks (tensor, pipeline): each has servers for its own shards, the ranks with equal index in the servers'
replicas. Partial gradients inside of a replica are reduced there first.

A rank has a thread for pushes and pulls, one for reductions inside of its replica and, if it is a server, one for serving; each with
connections of its own. Not modelled: servers that compute no gradients; sharded gradients.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from weft.plan.axis import DATA
from weft.plan.layout import Layout
from weft.run.reduce.overlapped import Gradients
from weft.run.state.optimizer import Optimizer, OptimizerSpec
from weft.run.state.parameters import FlatGroup
from weft.world.worker import Job, Worker
from weft.world.world import Group, Work, World

PATIENCE_S = 10.0  # during which an idle server polls its pending sends


@dataclass
class _Thread:
    """Runs jobs in order, on its own connections. After a failure these are closed, so that waiting peers fail too, and no job runs."""

    groups: Sequence[Group]
    worker: Worker = field(default_factory=Worker)
    submitted: int = 0
    ended: int = 0
    broken: BaseException | None = None

    def do(self, work: Callable[[], None]) -> Job:
        def run() -> None:
            try:
                if self.broken is not None:
                    raise self.broken
                work()
            except BaseException as error:
                if self.broken is None:
                    self.broken = error
                    for link in self.groups:
                        link.close()
                raise
            finally:
                self.ended += 1

        self.submitted += 1
        return self.worker.do(run)


def _after(first: Job | None, work: Callable[[], None]) -> Callable[[], None]:
    """Return a function that waits for job `first` and then does `work`."""

    def run() -> None:
        if first is not None:
            first.wait()
        work()

    return run


@dataclass(frozen=True)
class Served:
    """The servers, and this rank's state: `server_shards` of the groups, which `optimizer` updates. `replica_groups`: the ranks of its
    replica with partial gradients, by group of parameters; `replica_group`: all ranks of its replica."""

    ranks: tuple[int, ...]
    masters: list[FlatGroup]
    optimizer: Optimizer
    groups: list[Group]  # connections by server
    inside: list[Group | None]
    replica: Group | None

    @classmethod
    def of(cls, spec: OptimizerSpec, groups: Sequence[FlatGroup], layout: Layout, world: World) -> Served:
        """Build the state and connect its groups; every rank calls it, with the groups that are sharded over servers."""
        ranks, data_group = layout.server_ranks, world.group(layout.mesh.group(world.rank, DATA))
        server_shards = [replace(g, data=g.data.new_zeros(sum(length for _, _, length in g.pieces())), gathered=True) for g in groups]
        links = [data_group.apart("server") for _ in ranks]
        serving = tuple(sorted({server for rank in range(world.num_ranks) for server in layout.servers_of(rank)}))
        norm = world.group(serving).apart("norm") if world.rank in serving else data_group
        for link in links:
            link.connect()
        if data_group.index in ranks:
            norm.connect()
        replica = layout.replica_of(world.rank)
        sums = [tuple(rank for rank in group.sum_ranks if rank in replica) for group in groups]
        replica_groups = {over: world.group(over).apart("replica") for over in sorted({*sums, replica}) if len(over) > 1}
        for replica_group in replica_groups.values():
            replica_group.connect()
        optimizer = Optimizer(spec, server_shards, [data_group] * len(server_shards), norm, sharded=True)
        return cls(ranks, server_shards, optimizer, links, [replica_groups.get(over) for over in sums], replica_groups.get(replica))


class Servers:
    """One rank, as a worker and possibly a server. In every step `start` before backward, `begin_update` after it, then `push`."""

    def __init__(self, staleness: int, gradients: Gradients, served: Served, groups: Sequence[FlatGroup], everyone: Group) -> None:
        self._staleness, self._gradients, self._served, self._groups, self._everyone = staleness, gradients, served, list(groups), everyone
        self._mine = served.ranks.index(everyone.index) if everyone.index in served.ranks else -1
        self._others = [rank for rank in range(everyone.size) if rank != everyone.index]
        self._client = _Thread([link for server, link in enumerate(served.groups) if server != self._mine])
        self._server = _Thread([served.groups[self._mine]] if self._mine >= 0 else [])
        self._inside = _Thread([lane for lane in {*served.inside, served.replica} if lane is not None])
        self._buckets = gradients.order
        self._starts = [[bucket.start for bucket in group.buckets] for group in self._groups]
        self._turn = self._pushed = self._current = self._asked = 0
        self._jobs: dict[int, list[Job]] = {turn: [] for turn in range(staleness + 1)}  # pushes and reductions, by gradient buffer
        self._counted: Tensor | None = None
        self._settled = True
        self._pull = Job(lambda: None)
        self._updates: dict[int, Job] = {}  # by version of this server's shard
        self._norms: dict[int, Tensor] = {}
        self._sent: deque[list[Work]] = deque()
        self.waited_s = 0.0  # in the last `push`
        self._allocate()
        gradients.push = self._push_bucket
        self.load()

    def _allocate(self) -> None:
        shard_sizes = [self._part(number, start, stop, 0).numel() for number, start, stop in self._ranges()]
        like = self._groups[0].data if self._groups else torch.empty(0)
        serves = self._mine >= 0
        self._rooms = like.new_empty((len(self._others) if serves else 0, max(shard_sizes, default=0)))
        num_versions = self._staleness + 1 if serves and self._staleness else 0
        self._versions = [[torch.zeros_like(m.data) for m in self._served.masters] for _ in range(num_versions)]
        self._staging = [torch.zeros_like(g.data) for g in self._groups] if self._staleness else [g.data for g in self._groups]

    def _ranges(self) -> list[tuple[int, int, int]]:
        """Return (group, start, stop) of every bucket, in the order of their reduction."""
        return [(number, bucket.start, bucket.stop) for number, bucket in self._buckets]

    def _part(self, number: int, start: int, stop: int, server: int, flat: Tensor | None = None) -> Tensor:
        """Return a server's shard of a bucket, in `flat` or in the weights."""
        flat_data = (self._groups[number].data if flat is None else flat)[start:stop]
        return flat_data.view(len(self._served.ranks), -1)[server]

    def _owned_part(self, at: int, flats: Sequence[Tensor]) -> Tensor:
        """Return this server's shard of bucket `at`, in flat tensors of its shards."""
        number, bucket = self._buckets[at]
        _, first, length = self._served.masters[number].pieces()[self._starts[number].index(bucket.start)]
        return flats[number][first : first + length]

    @property
    def weights(self) -> list[Tensor]:
        """Weights stored besides the model's own."""
        masters = [m.data for m in self._served.masters]
        return [*masters, *(self._staging if self._staleness else ()), *(x for version in self._versions for x in version)]

    @property
    def rooms(self) -> list[Tensor]:
        """Receive buffers for workers' gradients."""
        return [self._rooms]

    def load(self) -> None:
        """Copy the model's weights to the servers' shards, after they were written from outside."""
        for group, master in zip(self._groups, self._served.masters, strict=True):
            for start, offset, length in master.pieces():
                master.data[offset : offset + length].copy_(group.data[start : start + length])

    def start(self) -> None:
        """Accumulate gradients in buffers that no pending job reads."""
        for job in self._jobs[self._turn]:
            job.wait()
        self._jobs[self._turn] = []
        self._gradients.turn(self._turn)

    def _push_bucket(self, at: int, bucket: Tensor) -> None:
        """Push the shards of a complete bucket to their servers; on a server, reduce its own shard."""
        parts = bucket.view(len(self._served.ranks), -1)
        first = self._add_inside(self._served.inside[self._buckets[at][0]], bucket)
        if self._client.groups:
            self._jobs[self._turn].append(self._client.do(_after(first, lambda: self._send(at, parts))))
        if self._mine >= 0:
            self._jobs[self._turn].append(self._server.do(_after(first, lambda: self._add_up(at, parts[self._mine]))))

    def _add_inside(self, over: Group | None, summands: Tensor) -> Job | None:
        """Start the reduction of partial gradients inside of this replica; return its job, for later jobs to wait for."""
        if over is None:
            return None
        job = self._inside.do(lambda: over.all_reduce(summands).wait())
        self._jobs[self._turn].append(job)
        return job

    def _send(self, tag: int, parts: Sequence[Tensor] | Tensor) -> None:
        works = [
            link.isend(parts[server], self._served.ranks[server], tag)
            for server, link in enumerate(self._served.groups)
            if server != self._mine
        ]
        for work in works:
            work.wait()

    def _add_up(self, tag: int, mine: Tensor) -> None:
        """Add all workers' gradients to `local_shard`, in the order of ranks."""
        link = self._served.groups[self._mine]
        buffers = self._rooms[:, : mine.numel()] if mine.dtype is self._rooms.dtype else mine.new_empty((len(self._others), mine.numel()))
        receives = [(rank, buffer, link.irecv(buffer, rank, tag)) for rank, buffer in zip(self._others, buffers, strict=True)]
        total: Tensor | None = None
        for rank, buffer, work in receives:
            work.wait()
            if total is None:
                total = mine.add_(buffer) if rank > self._everyone.index else buffer
            else:
                if rank == self._everyone.index + 1:
                    total = mine.add_(total)
                total.add_(buffer)
        if total is not None and total.data_ptr() != mine.data_ptr():  # this rank is the last
            mine.add_(total)

    def take(self, loss: Work, divisor: Tensor | None = None, counted: Tensor | None = None) -> None:
        """Begin the update after all gradients were pushed. `local_divisor`: this rank's summand of the gradients' divisor, if that is not
        known before; `divisor` is its sum."""
        self._settled = False
        if divisor is None or counted is None:
            return
        tag, counts = len(self._buckets), counted.clone().view(1)
        first = self._add_inside(self._served.replica, counts)
        if self._client.groups:
            self._jobs[self._turn].append(self._client.do(_after(first, lambda: self._send(tag, [counts] * len(self._served.ranks)))))
        if self._mine >= 0:
            turn = self._turn
            self._jobs[turn].append(self._server.do(_after(first, lambda: self._divide(tag, counts.clone(), turn))))

    def _divide(self, tag: int, counts: Tensor, turn: int) -> None:
        self._add_up(tag, counts)
        for group, master in zip(self._groups, self._served.masters, strict=True):
            for start, _, length in master.pieces():
                group.turns[turn][start : start + length].div_(counts.to(group.data.dtype))

    def settle(self) -> None:
        """Broadcast the reduced gradients of the unpushed step from the servers, so that they can be read. Every rank calls it."""
        if self._settled:
            return
        for job in self._jobs[self._turn]:
            job.wait()
        for number, start, stop in self._ranges():
            for server, rank in enumerate(self._served.ranks):
                self._everyone.broadcast(self._part(number, start, stop, server, self._groups[number].turns[self._turn]), rank)
        self._settled = True

    def push(self, lr: float | None) -> float | None:
        """End a step and pull the weights that are due; return the gradient norm of their last update if it is clipped."""
        self._pushed += 1
        if self._mine >= 0:
            version, turn = self._pushed, self._turn
            self._norms[version] = torch.zeros(1, dtype=torch.float64)
            self._updates[version] = self._server.do(lambda: self._update(version, turn, lr))
            self._server.do(self._look_after)
        self._turn = self._pushed % (self._staleness + 1)
        self._settled = True
        norm = self._advance(self._pushed - self._staleness)
        if self._staleness and self._asked == self._current < self._pushed:
            self._ask()  # received while the next step computes
        return norm

    def drain(self) -> None:
        """Pull the weights of all pushed steps, and deliver all sends."""
        self._advance(self._pushed)
        if self._mine >= 0:
            self._server.do(self._deliver).wait()

    def _deliver(self) -> None:
        while self._sent:
            for work in self._sent.popleft():
                work.wait()

    def forget(self) -> None:
        """Reload replaced weights; nothing is pending after `drain`."""
        self.load()

    def _update(self, version: int, turn: int, lr: float | None) -> None:
        """Update this server's shard and send it to the workers."""
        while len(self._sent) > self._staleness:
            for work in self._sent.popleft():
                work.wait()
        optimizer, link = self._served.optimizer, self._served.groups[self._mine]
        optimizer.read([group.turns[turn] for group in self._groups])
        norm = optimizer.step(lr)
        self._norms[version].fill_(norm or 0.0)
        shards = [master.data for master in self._served.masters]
        if self._staleness:
            version_data = self._versions[version % len(self._versions)]
            for source, target in zip(shards, version_data, strict=True):
                target.copy_(source)
            shards = version_data
        sending = [(index, self._owned_part(index, shards)) for index in range(len(self._buckets))]
        if optimizer.spec.clip and self._mine == 0:
            sending.append((len(self._buckets) + 1, self._norms[version]))
        self._sent.append([link.isend(x, rank, tag) for tag, x in sending for rank in self._others])

    def _look_after(self) -> None:
        """Poll pending sends of an idle server: large shared-memory messages make progress only when polled."""
        until, link = time.monotonic() + PATIENCE_S, self._served.groups[self._mine]
        while link.shares_memory and self._server.submitted == self._server.ended + 1 and time.monotonic() < until:
            if all(work.done for works in self._sent for work in works):
                return
            time.sleep(2e-4)

    def _ask(self) -> None:
        self._asked += 1
        version = self._asked
        if self._served.optimizer.spec.clip:
            self._norms.setdefault(version, torch.zeros(1, dtype=torch.float64))
        self._pull = self._client.do(lambda: self._receive(version)) if self._client.groups else Job(lambda: None)
        if not self._client.groups:
            self._pull.run()

    def _receive(self, version: int) -> None:
        works = []
        for server, link in enumerate(self._served.groups):
            if server == self._mine:
                continue
            rank = self._served.ranks[server]
            for index, (number, start, stop) in enumerate(self._ranges()):
                works.append(link.irecv(self._part(number, start, stop, server, self._staging[number]), rank, index))
            if self._served.optimizer.spec.clip and server == 0:
                works.append(link.irecv(self._norms[version], rank, len(self._buckets) + 1))
        for work in works:
            work.wait()

    def _advance(self, version: int) -> float | None:
        """Wait for the updates up to a version and copy each into the weights."""
        start_s, norm = time.perf_counter(), None
        while self._current < version:
            if self._asked == self._current:
                self._ask()
            self._pull.wait()
            self._current += 1
            if self._mine >= 0:
                self._updates.pop(self._current).wait()
            self._copy(self._current)
            squared = self._norms.pop(self._current, None)
            norm = float(squared) if squared is not None and self._served.optimizer.spec.clip else None
        self.waited_s = time.perf_counter() - start_s
        return norm

    def _copy(self, version: int) -> None:
        """Copy the received shards, and this server's own, into the weights."""
        shards = self._versions[version % len(self._versions)] if self._versions else [m.data for m in self._served.masters]
        for index, (number, start, stop) in enumerate(self._ranges()):
            for server in range(len(self._served.ranks)):
                if server == self._mine:
                    self._part(number, start, stop, server).copy_(self._owned_part(index, shards))
                elif self._staleness:
                    self._part(number, start, stop, server).copy_(self._part(number, start, stop, server, self._staging[number]))
