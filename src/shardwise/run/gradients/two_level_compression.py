"""Two-level compressed all-reduce: a bucket of gradients is compressed between hosts only, and replaced by the reduced one.

The ranks of a host first reduce-scatter the bucket, uncompressed through shared memory; each shard is all-reduced in compressed form
between its ranks on all hosts, and all-gathered inside each host. With k ranks per host the network carries 1/k of the bytes, and a rank
stores 1/k of the residuals, of a flat exchange. Not modelled: hosts with different numbers of ranks, where all ranks compress.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from shardwise.plan.ir.compression import Compression
from shardwise.plan.ir.placement import even_shard_range
from shardwise.run.gradients.compressed import CompressedBucket
from shardwise.world import recorder
from shardwise.world.comm.group import RanksByHost
from shardwise.world.comm.levels import HierarchicalReducer
from shardwise.world.comm.pending import CollectiveWork
from shardwise.world.comm.runner import CollectiveSignature, ReportWait
from shardwise.world.world import Group


class TwoLevelCompressedBucket:
    """A `CompressedBucket` in two levels; each phase runs in the thread of the group's runner."""

    def __init__(
        self,
        compression: Compression,
        name: str,
        size: int,
        get_gradients: Callable[[], Tensor],
        group: Group,
        levels: HierarchicalReducer,
        sharded: bool,
        overlaps_backward: bool,
    ) -> None:
        assert levels.rail is not None
        self.name, self.group, self.sharded, self.overlaps_backward = name, group, sharded, overlaps_backward
        self._get_gradients, self._levels, self._rail = get_gradients, levels, levels.rail
        self._host_sum = get_gradients()[:0]  # this rank's shard of its host's sum, during the exchange
        _, length = even_shard_range(size, levels.host_group.size, levels.host_group.index)
        self._across_hosts = CompressedBucket(compression, name, length, lambda: self._host_sum, levels.rail, sharded, overlaps_backward)
        self._works: list[CollectiveWork] = []

    @property
    def ranks_by_host(self) -> RanksByHost:
        """The members by host."""
        return self.group.ranks_by_host

    @property
    def residuals(self) -> dict[str, Tensor]:
        """See `CompressedBucket`."""
        return self._across_hosts.residuals

    @property
    def flat_gradients(self) -> Tensor:
        """The bucket's flat gradients."""
        return self._get_gradients()

    def start(self) -> None:
        """Reduce inside the host and send this rank's shard of the sum, in the runner's thread."""
        self._submit(recorder.REDUCE_SCATTER, self._scatter)

    def reduce_received(self) -> None:
        """Reduce the shards received from other hosts, and send the sum."""
        self._submit(recorder.ALL_REDUCE, self._reduce_received)

    def finish(self) -> None:
        """Write the received sums into the bucket."""
        self._submit(recorder.ALL_GATHER, self._gather)
        for work in self._works:
            work.wait()
        self._works.clear()
        self._host_sum = self._host_sum[:0]

    def _submit(self, op: int, work: Callable[[ReportWait], None]) -> None:
        flat = self.flat_gradients
        call = CollectiveSignature(op, "compressed", 0, (flat.numel(),))
        self._works.append(self._levels.runner.start(call, flat, lambda note, _: work(note), wait=False))

    def _scatter(self, note: ReportWait) -> None:
        levels, flat = self._levels, self.flat_gradients
        note(1, levels.awaited_member(levels.host_group))
        shards = flat.view(self.group.size, -1)[levels.piece_order].view(-1) if self.sharded else flat
        self._host_sum = levels.host_group.reduce_scatter(shards)
        self._across_hosts.start()

    def _reduce_received(self, note: ReportWait) -> None:
        note(2, self._levels.awaited_member(self._rail))
        self._across_hosts.reduce_received()

    def _gather(self, note: ReportWait) -> None:
        levels, flat = self._levels, self.flat_gradients
        note(3, levels.awaited_member(self._rail))
        self._across_hosts.finish()
        if self.sharded:
            flat.view(self.group.size, -1)[self.group.index].copy_(self._host_sum.view(self._rail.size, -1)[self._rail.index])
            return
        note(4, levels.awaited_member(levels.host_group))
        flat.copy_(levels.host_group.all_gather(self._host_sum, length=flat.numel()))


def build_compressed_bucket(
    compression: Compression,
    name: str,
    size: int,
    get_gradients: Callable[[], Tensor],
    group: Group,
    sharded: bool,
    overlaps_backward: bool,
) -> CompressedBucket | TwoLevelCompressedBucket:
    """Build one bucket's exchange, in two levels if the group spans hosts evenly; see `CompressedBucket` for the arguments."""
    levels = group.hierarchical
    if levels is None or not levels.has_equal_hosts or levels.rail is None or levels.rail.size == 1:
        return CompressedBucket(compression, name, size, get_gradients, group, sharded, overlaps_backward)
    return TwoLevelCompressedBucket(compression, name, size, get_gradients, group, levels, sharded, overlaps_backward)
