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

from shardwise.plan.ir.axis import DATA
from shardwise.plan.layout import Layout
from shardwise.run.gradients.gradient_reducer import GradientReducer
from shardwise.run.state.optimizer import Optimizer, OptimizerSpec
from shardwise.run.state.parameters import FlatGroup
from shardwise.world.comm.worker import BackgroundWorker, WorkerJob
from shardwise.world.world import CollectiveWork, Group, World

PROGRESS_TIMEOUT_S = 10.0  # during which an idle server polls its pending sends


@dataclass
class _JobThread:
    """Runs jobs in order, on its own connections. After a failure these are closed, so that waiting peers fail too, and no job runs."""

    groups: Sequence[Group]
    worker: BackgroundWorker = field(default_factory=BackgroundWorker)
    num_submitted: int = 0
    num_ended: int = 0
    failure: BaseException | None = None

    def submit(self, work: Callable[[], None]) -> WorkerJob:
        def run() -> None:
            try:
                if self.failure is not None:
                    raise self.failure
                work()
            except BaseException as error:
                if self.failure is None:
                    self.failure = error
                    for link in self.groups:
                        link.close()
                raise
            finally:
                self.num_ended += 1

        self.num_submitted += 1
        return self.worker.submit(run)


def _run_after(first: WorkerJob | None, work: Callable[[], None]) -> Callable[[], None]:
    """Return a function that waits for job `first` and then does `work`."""

    def run() -> None:
        if first is not None:
            first.wait()
        work()

    return run


@dataclass(frozen=True)
class ServerState:
    """The servers, and this rank's state: `server_shards` of the groups, which `optimizer` updates. `replica_groups`: the ranks of its
    replica with partial gradients, by group of parameters; `replica_group`: all ranks of its replica."""

    server_ranks: tuple[int, ...]
    server_shards: list[FlatGroup]
    optimizer: Optimizer
    links: list[Group]  # connections by server
    replica_groups: list[Group | None]
    replica_group: Group | None

    @classmethod
    def connect(cls, spec: OptimizerSpec, groups: Sequence[FlatGroup], layout: Layout, world: World) -> ServerState:
        """Build the state and connect its groups; every rank calls it, with the groups that are sharded over servers."""
        ranks, data_group = layout.server_ranks, world.group(layout.mesh.group(world.rank, DATA))
        server_shards = [
            replace(g, data=g.data.new_zeros(sum(length for _, _, length in g.shard_ranges())), is_gathered=True) for g in groups
        ]
        links = [data_group.side_group("server") for _ in ranks]
        serving = tuple(sorted({server for rank in range(world.num_ranks) for server in layout.servers_of(rank)}))
        norm = world.group(serving).side_group("norm") if world.rank in serving else data_group
        for link in links:
            link.connect()
        if data_group.index in ranks:
            norm.connect()
        replica = layout.replica_of(world.rank)
        sums = [tuple(rank for rank in group.sum_ranks if rank in replica) for group in groups]
        replica_groups = {over: world.group(over).side_group("replica") for over in sorted({*sums, replica}) if len(over) > 1}
        for replica_group in replica_groups.values():
            replica_group.connect()
        optimizer = Optimizer(spec, server_shards, [data_group] * len(server_shards), norm, uses_zero=True)
        return cls(ranks, server_shards, optimizer, links, [replica_groups.get(over) for over in sums], replica_groups.get(replica))


class ParameterServers:
    """One rank, as a worker and possibly a server. In every step `start` before backward, `begin_update` after it, then `push`."""

    def __init__(
        self, staleness: int, gradients: GradientReducer, state: ServerState, groups: Sequence[FlatGroup], data_group: Group
    ) -> None:
        self._staleness, self._gradients, self._state, self._groups, self._data_group = (
            staleness,
            gradients,
            state,
            list(groups),
            data_group,
        )
        self._server_index = state.server_ranks.index(data_group.index) if data_group.index in state.server_ranks else -1
        self._other_ranks = [rank for rank in range(data_group.size) if rank != data_group.index]
        self._client = _JobThread([link for server, link in enumerate(state.links) if server != self._server_index])
        self._server = _JobThread([state.links[self._server_index]] if self._server_index >= 0 else [])
        self._replica_thread = _JobThread([lane for lane in {*state.replica_groups, state.replica_group} if lane is not None])
        self._buckets = gradients.ordered_buckets
        self._starts = [[bucket.start for bucket in group.buckets] for group in self._groups]
        self._buffer = self._pushed = self._current = self._requested = 0
        self._jobs: dict[int, list[WorkerJob]] = {turn: [] for turn in range(staleness + 1)}  # pushes and reductions, by gradient buffer
        self._counted: Tensor | None = None
        self._is_synchronized = True
        self._pull = WorkerJob(lambda: None)
        self._updates: dict[int, WorkerJob] = {}  # by version of this server's shard
        self._norms: dict[int, Tensor] = {}
        self._pending_sends: deque[list[CollectiveWork]] = deque()
        self.waited_s = 0.0  # in the last `push`
        self._allocate()
        gradients.on_bucket = self._push_bucket
        self.load()

    def _allocate(self) -> None:
        shard_sizes = [self._shard_of_server(number, start, stop, 0).numel() for number, start, stop in self._ranges()]
        like = self._groups[0].data if self._groups else torch.empty(0)
        serves = self._server_index >= 0
        self._receive_buffers = like.new_empty((len(self._other_ranks) if serves else 0, max(shard_sizes, default=0)))
        num_versions = self._staleness + 1 if serves and self._staleness else 0
        self._versions = [[torch.zeros_like(m.data) for m in self._state.server_shards] for _ in range(num_versions)]
        self._staging = [torch.zeros_like(g.data) for g in self._groups] if self._staleness else [g.data for g in self._groups]

    def _ranges(self) -> list[tuple[int, int, int]]:
        """Return (group, start, stop) of every bucket, in the order of their reduction."""
        return [(number, bucket.start, bucket.stop) for number, bucket in self._buckets]

    def _shard_of_server(self, number: int, start: int, stop: int, server: int, flat: Tensor | None = None) -> Tensor:
        """Return a server's shard of a bucket, in `flat` or in the weights."""
        flat_data = (self._groups[number].data if flat is None else flat)[start:stop]
        return flat_data.view(len(self._state.server_ranks), -1)[server]

    def _local_shard(self, at: int, flats: Sequence[Tensor]) -> Tensor:
        """Return this server's shard of bucket `at`, in flat tensors of its shards."""
        number, bucket = self._buckets[at]
        _, first, length = self._state.server_shards[number].shard_ranges()[self._starts[number].index(bucket.start)]
        return flats[number][first : first + length]

    @property
    def weights(self) -> list[Tensor]:
        """Weights stored besides the model's own."""
        masters = [m.data for m in self._state.server_shards]
        return [*masters, *(self._staging if self._staleness else ()), *(x for version in self._versions for x in version)]

    @property
    def receive_buffers(self) -> list[Tensor]:
        """Receive buffers for workers' gradients."""
        return [self._receive_buffers]

    def load(self) -> None:
        """Copy the model's weights to the servers' shards, after they were written from outside."""
        for group, master in zip(self._groups, self._state.server_shards, strict=True):
            for start, offset, length in master.shard_ranges():
                master.data[offset : offset + length].copy_(group.data[start : start + length])

    def start(self) -> None:
        """Accumulate gradients in buffers that no pending job reads."""
        for job in self._jobs[self._buffer]:
            job.wait()
        self._jobs[self._buffer] = []
        self._gradients.use_buffer(self._buffer)

    def _push_bucket(self, at: int, bucket: Tensor) -> None:
        """Push the shards of a complete bucket to their servers; on a server, reduce its own shard."""
        parts = bucket.view(len(self._state.server_ranks), -1)
        first = self._reduce_in_replica(self._state.replica_groups[self._buckets[at][0]], bucket)
        if self._client.groups:
            self._jobs[self._buffer].append(self._client.submit(_run_after(first, lambda: self._send(at, parts))))
        if self._server_index >= 0:
            self._jobs[self._buffer].append(
                self._server.submit(_run_after(first, lambda: self._reduce_on_server(at, parts[self._server_index])))
            )

    def _reduce_in_replica(self, over: Group | None, summands: Tensor) -> WorkerJob | None:
        """Start the reduction of partial gradients inside of this replica; return its job, for later jobs to wait for."""
        if over is None:
            return None
        job = self._replica_thread.submit(lambda: over.all_reduce(summands).wait())
        self._jobs[self._buffer].append(job)
        return job

    def _send(self, tag: int, parts: Sequence[Tensor] | Tensor) -> None:
        works = [
            link.isend(parts[server], self._state.server_ranks[server], tag)
            for server, link in enumerate(self._state.links)
            if server != self._server_index
        ]
        for work in works:
            work.wait()

    def _reduce_on_server(self, tag: int, local_shard: Tensor) -> None:
        """Add all workers' gradients to `local_shard`, in the order of ranks."""
        link = self._state.links[self._server_index]
        buffers = (
            self._receive_buffers[:, : local_shard.numel()]
            if local_shard.dtype is self._receive_buffers.dtype
            else local_shard.new_empty((len(self._other_ranks), local_shard.numel()))
        )
        receives = [(rank, buffer, link.irecv(buffer, rank, tag)) for rank, buffer in zip(self._other_ranks, buffers, strict=True)]
        total: Tensor | None = None
        for rank, buffer, work in receives:
            work.wait()
            if total is None:
                total = local_shard.add_(buffer) if rank > self._data_group.index else buffer
            else:
                if rank == self._data_group.index + 1:
                    total = local_shard.add_(total)
                total.add_(buffer)
        if total is not None and total.data_ptr() != local_shard.data_ptr():  # this rank is the last
            local_shard.add_(total)

    def begin_update(self, loss_work: CollectiveWork, divisor: Tensor | None = None, local_divisor: Tensor | None = None) -> None:
        """Begin the update after all gradients were pushed. `local_divisor`: this rank's summand of the gradients' divisor, if that is not
        known before; `divisor` is its sum."""
        self._is_synchronized = False
        if divisor is None or local_divisor is None:
            return
        tag, counts = len(self._buckets), local_divisor.clone().view(1)
        first = self._reduce_in_replica(self._state.replica_group, counts)
        if self._client.groups:
            self._jobs[self._buffer].append(
                self._client.submit(_run_after(first, lambda: self._send(tag, [counts] * len(self._state.server_ranks))))
            )
        if self._server_index >= 0:
            turn = self._buffer
            self._jobs[turn].append(self._server.submit(_run_after(first, lambda: self._divide(tag, counts.clone(), turn))))

    def _divide(self, tag: int, counts: Tensor, buffer: int) -> None:
        self._reduce_on_server(tag, counts)
        for group, master in zip(self._groups, self._state.server_shards, strict=True):
            for start, _, length in master.shard_ranges():
                group.step_buffers[buffer][start : start + length].div_(counts.to(group.data.dtype))

    def synchronize_gradients(self) -> None:
        """Broadcast the reduced gradients of the unpushed step from the servers, so that they can be read. Every rank calls it."""
        if self._is_synchronized:
            return
        for job in self._jobs[self._buffer]:
            job.wait()
        for number, start, stop in self._ranges():
            for server, rank in enumerate(self._state.server_ranks):
                self._data_group.broadcast(
                    self._shard_of_server(number, start, stop, server, self._groups[number].step_buffers[self._buffer]), rank
                )
        self._is_synchronized = True

    def push(self, lr: float | None) -> float | None:
        """End a step and pull the weights that are due; return the gradient norm of their last update if it is clipped."""
        self._pushed += 1
        if self._server_index >= 0:
            version, turn = self._pushed, self._buffer
            self._norms[version] = torch.zeros(1, dtype=torch.float64)
            self._updates[version] = self._server.submit(lambda: self._update(version, turn, lr))
            self._server.submit(self._progress_sends)
        self._buffer = self._pushed % (self._staleness + 1)
        self._is_synchronized = True
        norm = self._advance_to(self._pushed - self._staleness)
        if self._staleness and self._requested == self._current < self._pushed:
            self._request_update()  # received while the next step computes
        return norm

    def drain(self) -> None:
        """Pull the weights of all pushed steps, and deliver all sends."""
        self._advance_to(self._pushed)
        if self._server_index >= 0:
            self._server.submit(self._wait_for_sends).wait()

    def _wait_for_sends(self) -> None:
        while self._pending_sends:
            for work in self._pending_sends.popleft():
                work.wait()

    def discard_pending(self) -> None:
        """Reload replaced weights; nothing is pending after `drain`."""
        self.load()

    def _update(self, version: int, buffer: int, lr: float | None) -> None:
        """Update this server's shard and send it to the workers."""
        while len(self._pending_sends) > self._staleness:
            for work in self._pending_sends.popleft():
                work.wait()
        optimizer, link = self._state.optimizer, self._state.links[self._server_index]
        optimizer.use_gradients([group.step_buffers[buffer] for group in self._groups])
        norm = optimizer.step(lr)
        self._norms[version].fill_(0.0 if norm is None else norm)
        shards = [master.data for master in self._state.server_shards]
        if self._staleness:
            version_data = self._versions[version % len(self._versions)]
            for source, target in zip(shards, version_data, strict=True):
                target.copy_(source)
            shards = version_data
        sending = [(index, self._local_shard(index, shards)) for index in range(len(self._buckets))]
        if optimizer.spec.clip and self._server_index == 0:
            sending.append((len(self._buckets) + 1, self._norms[version]))
        self._pending_sends.append([link.isend(x, rank, tag) for tag, x in sending for rank in self._other_ranks])

    def _progress_sends(self) -> None:
        """Poll pending sends of an idle server: large shared-memory messages make progress only when polled."""
        until, link = time.monotonic() + PROGRESS_TIMEOUT_S, self._state.links[self._server_index]
        while link.shares_memory and self._server.num_submitted == self._server.num_ended + 1 and time.monotonic() < until:
            if all(work.is_done for works in self._pending_sends for work in works):
                return
            time.sleep(2e-4)

    def _request_update(self) -> None:
        self._requested += 1
        version = self._requested
        if self._state.optimizer.spec.clip:
            self._norms.setdefault(version, torch.zeros(1, dtype=torch.float64))
        self._pull = self._client.submit(lambda: self._receive(version)) if self._client.groups else WorkerJob(lambda: None)
        if not self._client.groups:
            self._pull.run()

    def _receive(self, version: int) -> None:
        works = []
        for server, link in enumerate(self._state.links):
            if server == self._server_index:
                continue
            rank = self._state.server_ranks[server]
            for index, (number, start, stop) in enumerate(self._ranges()):
                works.append(link.irecv(self._shard_of_server(number, start, stop, server, self._staging[number]), rank, index))
            if self._state.optimizer.spec.clip and server == 0:
                works.append(link.irecv(self._norms[version], rank, len(self._buckets) + 1))
        for work in works:
            work.wait()

    def _advance_to(self, version: int) -> float | None:
        """Wait for the updates up to a version and copy each into the weights."""
        start_s, norm = time.perf_counter(), None
        while self._current < version:
            if self._requested == self._current:
                self._request_update()
            self._pull.wait()
            self._current += 1
            if self._server_index >= 0:
                self._updates.pop(self._current).wait()
            self._copy_update(self._current)
            squared = self._norms.pop(self._current, None)
            norm = float(squared) if squared is not None and self._state.optimizer.spec.clip else None
        self.waited_s = time.perf_counter() - start_s
        return norm

    def _copy_update(self, version: int) -> None:
        """Copy the received shards, and this server's own, into the weights."""
        shards = self._versions[version % len(self._versions)] if self._versions else [m.data for m in self._state.server_shards]
        for index, (number, start, stop) in enumerate(self._ranges()):
            for server in range(len(self._state.server_ranks)):
                if server == self._server_index:
                    self._shard_of_server(number, start, stop, server).copy_(self._local_shard(index, shards))
                elif self._staleness:
                    self._shard_of_server(number, start, stop, server).copy_(
                        self._shard_of_server(number, start, stop, server, self._staging[number])
                    )
