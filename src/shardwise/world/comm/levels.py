"""Hierarchical all-reduce: inside hosts through shared memory, between them over the network. In: tensors. Out: `CollectiveWork`.

Hosts with equal numbers of ranks: reduce-scatter inside the host, all-reduce of each shard with its peers in the other hosts (a rail),
all-gather. Between hosts go 2M(b-1)/(k·b) bytes a rank, of b hosts of k ranks. Unequal hosts: all-reduce inside hosts, all-reduce between
their leaders, broadcast. Large tensors are pipelined in parts: inside hosts and over the network. Not modelled: more than two levels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.world import recorder
from shardwise.world.comm.connection import INTRA_HOST
from shardwise.world.comm.group import Group
from shardwise.world.comm.pending import NARROW, CollectiveWork
from shardwise.world.comm.runner import CollectiveRunner, CollectiveSignature, ReportWait

PART_BYTES = 4 << 20
HIERARCHICAL = "hierarchical"


class HierarchicalReducer:
    """Two-level reductions of the runner's group, which has several members on at least one host."""

    def __init__(self, runner: CollectiveRunner) -> None:
        group, hosts = runner.group, runner.group.ranks_by_host
        me = group.ranks[group.index]
        self.runner, self._group = runner, group
        self.has_equal_hosts = len({len(host) for host in hosts}) == 1
        host_ranks = next(host for host in hosts if me in host)
        self.host_group = group.side_group(INTRA_HOST, host_ranks)
        position = host_ranks.index(me)
        across = tuple(host[position] for host in hosts) if self.has_equal_hosts else tuple(host[0] for host in hosts)
        self.rail = group.side_group("rail", across) if me in across else None
        # Shards of the full tensor, first those of the members that are first on their hosts: what a host scatters to each of its members.
        index = {rank: i for i, rank in enumerate(group.ranks)}
        self.piece_order = torch.tensor([index[host[j]] for j in range(len(host_ranks)) for host in hosts] if self.has_equal_hosts else [])

    def connect(self) -> None:
        """Connect now; all members must call it."""
        for part in (self.host_group, self.rail):
            if part is not None:
                part.connect()

    def shared_buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return memory that the members of a host map, see `Group.shared_buffer`."""
        return self.host_group.shared_buffer(numel, dtype)

    def all_reduce(self, x: Tensor, wait: bool = True) -> CollectiveWork:
        """Replace `x` by the sum over the members."""

        def work(note: ReportWait, tag: int) -> None:
            flat = x.detach().reshape(-1).contiguous()  # a view of every other element is flat and has gaps
            wide = flat.float() if flat.dtype in NARROW else flat
            (self._reduce_along_rails if self.has_equal_hosts else self._reduce_between_leaders)(wide, note)
            if wide.data_ptr() != x.data_ptr():
                x.detach().copy_(wide.view(x.shape))

        return self.runner.start(CollectiveSignature(recorder.ALL_REDUCE, HIERARCHICAL, 0, (x.numel(),)), x, work, wait)

    def reduce_scatter_into(self, out: Tensor, x: Tensor, wait: bool = True) -> CollectiveWork:
        """Reduce-scatter flat `x` into flat `out`, this member's shard of the sum; shards are equal. Only for hosts of equal size."""

        def work(note: ReportWait, tag: int) -> None:
            assert self.rail is not None
            rows = x.detach().view(self._group.size, -1)[self.piece_order]
            rows = rows.float() if rows.dtype in NARROW else rows
            half = rows.new_empty(rows.numel() // self.host_group.size)
            note(1, self.awaited_member(self.host_group))
            self.host_group.reduce_scatter_into(half, rows.view(-1))
            piece = half.new_empty(out.numel())
            note(2, self.awaited_member(self.rail))
            self.rail.reduce_scatter_into(piece, half)
            out.detach().copy_(piece)

        return self.runner.start(CollectiveSignature(recorder.REDUCE_SCATTER, HIERARCHICAL, 0, (x.numel(),)), x, work, wait)

    def all_gather_into(self, out: Tensor, x: Tensor, wait: bool = True) -> CollectiveWork:
        """Gather flat `x` of every member into flat `out`, member after member. Only for hosts of equal size."""

        def work(note: ReportWait, tag: int) -> None:
            assert self.rail is not None
            half = x.new_empty(x.numel() * self.rail.size)
            note(1, self.awaited_member(self.rail))
            self.rail.all_gather_into(half, x)
            rows = x.new_empty((self._group.size, x.numel()))
            note(2, self.awaited_member(self.host_group))
            self.host_group.all_gather_into(rows.view(-1), half)
            out.detach().view(self._group.size, -1)[self.piece_order] = rows

        return self.runner.start(CollectiveSignature(recorder.ALL_GATHER, HIERARCHICAL, 0, (out.numel(),)), x, work, wait)

    def _reduce_along_rails(self, flat: Tensor, note: ReportWait) -> None:
        host, rail = self.host_group, self.rail
        assert rail is not None
        in_flight: list[tuple[Tensor, Tensor, CollectiveWork]] = []
        tail = flat.numel() % host.size
        body = flat[: flat.numel() - tail]
        width = max(1, PART_BYTES // flat.element_size() // host.size) * host.size
        for part in torch.split(body, width):
            if part.numel():
                shard = part.view(host.size, -1)[host.index]
                note(1, self.awaited_member(host))
                host.reduce_scatter_into(shard, part)
                in_flight.append((part, shard, rail.all_reduce(shard, wait=False)))
        if tail:
            host.all_reduce(flat[body.numel() :])
            rail.all_reduce(flat[body.numel() :])
        for part, shard, work in in_flight:
            note(2, self.awaited_member(rail))
            work.wait()
            note(3, self.awaited_member(host))
            host.all_gather_into(part, shard)

    def _reduce_between_leaders(self, flat: Tensor, note: ReportWait) -> None:
        in_flight: list[tuple[Tensor, CollectiveWork | None]] = []
        for part in torch.split(flat, max(1, PART_BYTES // flat.element_size())):
            note(1, self.awaited_member(self.host_group))
            self.host_group.all_reduce(part)
            in_flight.append((part, self.rail.all_reduce(part, wait=False) if self.rail is not None else None))
        for part, work in in_flight:
            if work is not None:
                note(2, self.awaited_member(self.rail))
                work.wait()
            note(3, self.awaited_member(self.host_group))
            self.host_group.broadcast(part)

    def awaited_member(self, among: Group | None) -> int:
        """Return the awaited member if there is only one; else -1: the transport's own error must do."""
        if among is None or among.size != 2:
            return -1
        return self._group.ranks.index(among.ranks[1 - among.index])
