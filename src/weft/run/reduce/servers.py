"""Parameter servers: some replicas hold the weights and update them for all (Li et al., OSDI 2014; Ho et al., NIPS 2013).

In: step after step, this rank's gradients, bucket by bucket. Out: before step t the servers' weights with the updates of steps 0 to
t - 1 - staleness. Every bucket is cut among the servers. A worker pushes each part to its server, which adds the workers' gradients in the
order of their ranks, updates its part when it has them all, and sends it to every worker: of M bytes of weights 2 M (n - 1) bytes a step.

With staleness=K a server updates as soon as it has everyone's gradients, whatever its own rank is doing, and a worker waits for the update
of step t - K at the end of step t. So nobody is more than K steps ahead of the slowest, and every run has the same bits. A server keeps the
last K + 1 versions, since a slow worker takes them late.

A replica may be several ranks, of tensor and pipeline: each has servers for what it holds, the ranks with the same place in the servers'
replicas. Summands of a gradient inside of a replica are added up there first.

A rank has a thread for what it pushes and pulls, one for sums inside of its replica and, where it is a server, one for what it serves; each
has connections of its own. Not modelled: servers that compute no gradients; gradients that are pieces.
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

PATIENCE_S = 10.0  # in which an idle server looks after what it has sent


@dataclass
class _Thread:
    """Jobs in order, on connections of their own. After one failed, the others that wait for this rank are told, and nothing more runs."""

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
    """`work`, once another job has ended."""

    def both() -> None:
        if first is not None:
            first.wait()
        work()

    return both


@dataclass(frozen=True)
class Served:
    """Who holds the weights, and what this rank holds of them: `masters` are its parts of the groups, which `optimizer` updates.
    `inside`: by group of parameters the ranks of its replica that have summands of its gradients; and all of them."""

    ranks: tuple[int, ...]
    masters: list[FlatGroup]
    optimizer: Optimizer
    groups: list[Group]  # by server
    inside: list[Group | None]
    replica: Group | None

    @classmethod
    def of(cls, spec: OptimizerSpec, groups: Sequence[FlatGroup], layout: Layout, world: World) -> Served:
        """Every rank calls it, with the groups that are cut among servers. Connects them."""
        ranks, everyone = layout.server_ranks, world.group(layout.mesh.group(world.rank, DATA))
        masters = [replace(g, data=g.data.new_zeros(sum(length for _, _, length in g.pieces())), gathered=True) for g in groups]
        links = [everyone.apart("server") for _ in ranks]
        serving = tuple(sorted({server for rank in range(world.num_ranks) for server in layout.servers_of(rank)}))
        norm = world.group(serving).apart("norm") if world.rank in serving else everyone
        for link in links:
            link.connect()
        if everyone.index in ranks:
            norm.connect()
        replica = layout.replica_of(world.rank)
        sums = [tuple(rank for rank in group.sum_ranks if rank in replica) for group in groups]
        lanes = {over: world.group(over).apart("replica") for over in sorted({*sums, replica}) if len(over) > 1}
        for lane in lanes.values():
            lane.connect()
        optimizer = Optimizer(spec, masters, [everyone] * len(masters), norm, sharded=True)
        return cls(ranks, masters, optimizer, links, [lanes.get(over) for over in sums], lanes.get(replica))


class Servers:
    """One rank's part, as a worker and perhaps as a server. In every step `start` before backward, `take` after it, then `push`."""

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
        self._jobs: dict[int, list[Job]] = {turn: [] for turn in range(staleness + 1)}  # pushes and sums, by buffer of gradients
        self._counted: Tensor | None = None
        self._settled = True
        self._pull = Job(lambda: None)
        self._updates: dict[int, Job] = {}  # by version of this rank's part
        self._norms: dict[int, Tensor] = {}
        self._sent: deque[list[Work]] = deque()
        self.waited_s = 0.0  # by the last `push`
        self._allocate()
        gradients.push = self._push_bucket
        self.load()

    def _allocate(self) -> None:
        part = [self._part(number, start, stop, 0).numel() for number, start, stop in self._ranges()]
        like = self._groups[0].data if self._groups else torch.empty(0)
        serves = self._mine >= 0
        self._rooms = like.new_empty((len(self._others) if serves else 0, max(part, default=0)))
        num_versions = self._staleness + 1 if serves and self._staleness else 0
        self._versions = [[torch.zeros_like(m.data) for m in self._served.masters] for _ in range(num_versions)]
        self._staging = [torch.zeros_like(g.data) for g in self._groups] if self._staleness else [g.data for g in self._groups]

    def _ranges(self) -> list[tuple[int, int, int]]:
        """(group, start, stop) of every bucket, in the order in which they are exchanged."""
        return [(number, bucket.start, bucket.stop) for number, bucket in self._buckets]

    def _part(self, number: int, start: int, stop: int, server: int, flat: Tensor | None = None) -> Tensor:
        """What a server has of a bucket, in `flat` or where weights are."""
        flat_data = (self._groups[number].data if flat is None else flat)[start:stop]
        return flat_data.view(len(self._served.ranks), -1)[server]

    def _owned_part(self, at: int, flats: Sequence[Tensor]) -> Tensor:
        """This server's part of the bucket at place `at`, in flat tensors of its parts."""
        number, bucket = self._buckets[at]
        _, first, length = self._served.masters[number].pieces()[self._starts[number].index(bucket.start)]
        return flats[number][first : first + length]

    @property
    def weights(self) -> list[Tensor]:
        """Those that are held beside the model's own."""
        masters = [m.data for m in self._served.masters]
        return [*masters, *(self._staging if self._staleness else ()), *(x for version in self._versions for x in version)]

    @property
    def rooms(self) -> list[Tensor]:
        """Where workers' gradients arrive."""
        return [self._rooms]

    def load(self) -> None:
        """After weights were written from outside: the servers take them over."""
        for group, master in zip(self._groups, self._served.masters, strict=True):
            for start, at, length in master.pieces():
                master.data[at : at + length].copy_(group.data[start : start + length])

    def start(self) -> None:
        """Collect in buffers that nobody reads any more."""
        for job in self._jobs[self._turn]:
            job.wait()
        self._jobs[self._turn] = []
        self._gradients.turn(self._turn)

    def _push_bucket(self, at: int, bucket: Tensor) -> None:
        """The gradients of a bucket are there: push its parts; where this rank is a server, add up its own."""
        parts = bucket.view(len(self._served.ranks), -1)
        first = self._add_inside(self._served.inside[self._buckets[at][0]], bucket)
        if self._client.groups:
            self._jobs[self._turn].append(self._client.do(_after(first, lambda: self._send(at, parts))))
        if self._mine >= 0:
            self._jobs[self._turn].append(self._server.do(_after(first, lambda: self._add_up(at, parts[self._mine]))))

    def _add_inside(self, over: Group | None, summands: Tensor) -> Job | None:
        """Add up summands that ranks of this replica have; what follows waits for it."""
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
        """Add everyone's to `mine`, in the order of ranks."""
        link = self._served.groups[self._mine]
        rooms = self._rooms[:, : mine.numel()] if mine.dtype is self._rooms.dtype else mine.new_empty((len(self._others), mine.numel()))
        arriving = [(rank, room, link.irecv(room, rank, tag)) for rank, room in zip(self._others, rooms, strict=True)]
        total: Tensor | None = None
        for rank, room, work in arriving:
            work.wait()
            if total is None:
                total = mine.add_(room) if rank > self._everyone.index else room
            else:
                if rank == self._everyone.index + 1:
                    total = mine.add_(total)
                total.add_(room)
        if total is not None and total.data_ptr() != mine.data_ptr():  # all others come before this rank
            mine.add_(total)

    def take(self, loss: Work, divisor: Tensor | None = None, counted: Tensor | None = None) -> None:
        """All gradients of the step are on their way. `counted`: this rank's summand of what they are divided by, where that is not known
        before; `divisor` is its sum."""
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
        """Bring the sums of the step that is not pushed yet to every rank, so that its gradients can be read. Every rank calls it."""
        if self._settled:
            return
        for job in self._jobs[self._turn]:
            job.wait()
        for number, start, stop in self._ranges():
            for server, rank in enumerate(self._served.ranks):
                self._everyone.broadcast(self._part(number, start, stop, server, self._groups[number].turns[self._turn]), rank)
        self._settled = True

    def push(self, lr: float | None) -> float | None:
        """End a step; take the weights that are due. Returns the gradient norm of their last update where it is clipped."""
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
            self._ask()  # on its way while the next step computes
        return norm

    def drain(self) -> None:
        """Take the weights of all steps made, and let the others have theirs."""
        self._advance(self._pushed)
        if self._mine >= 0:
            self._server.do(self._deliver).wait()

    def _deliver(self) -> None:
        while self._sent:
            for work in self._sent.popleft():
                work.wait()

    def forget(self) -> None:
        """The weights have become others: nothing waits, after `drain`."""
        self.load()

    def _update(self, version: int, turn: int, lr: float | None) -> None:
        """Update this server's part, and send it to the workers."""
        while len(self._sent) > self._staleness:
            for work in self._sent.popleft():
                work.wait()
        optimizer, link = self._served.optimizer, self._served.groups[self._mine]
        optimizer.read([group.turns[turn] for group in self._groups])
        norm = optimizer.step(lr)
        self._norms[version].fill_(norm or 0.0)
        flats = [master.data for master in self._served.masters]
        if self._staleness:
            version_data = self._versions[version % len(self._versions)]
            for source, target in zip(flats, version_data, strict=True):
                target.copy_(source)
            flats = version_data
        sending = [(at, self._owned_part(at, flats)) for at in range(len(self._buckets))]
        if optimizer.spec.clip and self._mine == 0:
            sending.append((len(self._buckets) + 1, self._norms[version]))
        self._sent.append([link.isend(x, rank, tag) for tag, x in sending for rank in self._others])

    def _look_after(self) -> None:
        """Large messages between ranks of a host move when they are looked at, which nobody does while there is nothing to serve."""
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
            for at, (number, start, stop) in enumerate(self._ranges()):
                works.append(link.irecv(self._part(number, start, stop, server, self._staging[number]), rank, at))
            if self._served.optimizer.spec.clip and server == 0:
                works.append(link.irecv(self._norms[version], rank, len(self._buckets) + 1))
        for work in works:
            work.wait()

    def _advance(self, version: int) -> float | None:
        """Wait until the weights are those of a version, one after another."""
        began, norm = time.perf_counter(), None
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
        self.waited_s = time.perf_counter() - began
        return norm

    def _copy(self, version: int) -> None:
        """What has arrived, and this server's own part, into the weights."""
        flats = self._versions[version % len(self._versions)] if self._versions else [m.data for m in self._served.masters]
        for at, (number, start, stop) in enumerate(self._ranges()):
            for server in range(len(self._served.ranks)):
                if server == self._mine:
                    self._part(number, start, stop, server).copy_(self._owned_part(at, flats))
                elif self._staleness:
                    self._part(number, start, stop, server).copy_(self._part(number, start, stop, server, self._staging[number]))
