"""Two-level compressed all-reduce: a bucket of gradients is compressed between hosts only, and replaced by the reduced one.

The ranks of a host first reduce-scatter the bucket, uncompressed through shared memory; each shard is all-reduced in compressed form
between its ranks on all hosts, and all-gathered inside each host. With k ranks per host the network carries 1/k of the bytes, and a rank
stores 1/k of the residuals, of a flat exchange. Not modelled: hosts with different numbers of ranks, where all ranks compress.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from weft.plan.compression import Compression
from weft.plan.placement import piece
from weft.run.reduce.compressed import Compressed
from weft.world import recorder
from weft.world.group import Boxes
from weft.world.levels import Levels
from weft.world.pending import Work
from weft.world.runner import Call, Note
from weft.world.world import Group


class BetweenHosts:
    """A `CompressedBucket` in two levels; each phase runs in the thread of the group's runner."""

    def __init__(
        self, how: Compression, name: str, size: int, place: Callable[[], Tensor], over: Group, levels: Levels, sharded: bool, early: bool
    ) -> None:
        assert levels.rail is not None
        self.name, self.over, self.sharded, self.early = name, over, sharded, early
        self._place, self._levels, self._rail = place, levels, levels.rail
        self._summed = place()[:0]  # this rank's shard of its host's sum, during the exchange
        _, length = piece(size, levels.box.size, levels.box.index)
        self._between = Compressed(how, name, length, lambda: self._summed, levels.rail, sharded, early)
        self._works: list[Work] = []

    @property
    def boxes(self) -> Boxes:
        """The members by host."""
        return self.over.boxes

    @property
    def residuals(self) -> dict[str, Tensor]:
        """See `CompressedBucket`."""
        return self._between.residuals

    @property
    def flat(self) -> Tensor:
        """The bucket's flat gradients."""
        return self._place()

    def start(self) -> None:
        """Reduce inside the host and send this rank's shard of the sum, in the runner's thread."""
        self._do(recorder.REDUCE_SCATTER, self._scatter)

    def meet(self) -> None:
        """Reduce the shards received from other hosts, and send the sum."""
        self._do(recorder.ALL_REDUCE, self._meet)

    def finish(self) -> None:
        """Write the received sums into the bucket."""
        self._do(recorder.ALL_GATHER, self._gather)
        for work in self._works:
            work.wait()
        self._works.clear()
        self._summed = self._summed[:0]

    def _do(self, op: int, work: Callable[[Note], None]) -> None:
        flat = self.flat
        call = Call(op, "compressed", 0, (flat.numel(),))
        self._works.append(self._levels.runner.start(call, flat, lambda note, _: work(note), wait=False))

    def _scatter(self, note: Note) -> None:
        levels, flat = self._levels, self.flat
        note(1, levels.one(levels.box))
        shards = flat.view(self.over.size, -1)[levels.order].view(-1) if self.sharded else flat
        self._summed = levels.box.reduce_scatter(shards)
        self._between.start()

    def _meet(self, note: Note) -> None:
        note(2, self._levels.one(self._rail))
        self._between.meet()

    def _gather(self, note: Note) -> None:
        levels, flat = self._levels, self.flat
        note(3, levels.one(self._rail))
        self._between.finish()
        if self.sharded:
            flat.view(self.over.size, -1)[self.over.index].copy_(self._summed.view(self._rail.size, -1)[self._rail.index])
            return
        note(4, levels.one(levels.box))
        flat.copy_(levels.box.all_gather(self._summed, length=flat.numel()))


def compressed(
    how: Compression, name: str, size: int, place: Callable[[], Tensor], over: Group, sharded: bool, early: bool
) -> Compressed | BetweenHosts:
    """Build one bucket's exchange, in two levels if the group spans hosts evenly; see `CompressedBucket` for the arguments."""
    levels = over.levels
    if levels is None or not levels.even or levels.rail is None or levels.rail.size == 1:
        return Compressed(how, name, size, place, over, sharded, early)
    return BetweenHosts(how, name, size, place, over, levels, sharded, early)
