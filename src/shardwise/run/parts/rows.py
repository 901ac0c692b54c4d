"""Assign the rows of a batch to data-parallel replicas and microbatches.

In: a plan, the rank's stage, its replica index. Out: `StageReplica`, and for a batch `BatchRows`. A batch is either the global one, the
same on every rank, or each rank passes its own rows, microbatch after microbatch. Replicas have the shares of the plan; with other or
empty shares, each computes as if every replica had as many samples as itself (one at least), which is exact if samples do not interact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from shardwise.lower.kernels.sample_positions import MicrobatchSamples
from shardwise.plan.layout import Layout
from shardwise.plan.microbatches import replica_rows, replica_sizes, rows_by_replica
from shardwise.plan.plan import Plan
from shardwise.run.parts.lru_cache import MAX_MICROBATCH_SIZES, LRUCache


@dataclass(frozen=True)
class StageReplica:
    """Data-parallel replica `index` of a stage whose mesh is that of `layout`."""

    plan: Plan
    layout: Layout
    index: int
    cache: LRUCache[BatchRows] = field(default_factory=lambda: LRUCache(MAX_MICROBATCH_SIZES), compare=False)

    def row_range(self, size: int) -> tuple[int, int]:
        """Return (first row, number of rows) of this replica in a microbatch of `size` samples."""
        return replica_rows(size, self.layout, self.index)

    @cached_property
    def rows_per_replica(self) -> list[int]:
        """Number of rows of every replica in a full batch of the plan."""
        return [sum(sizes) for sizes in zip(*(replica_sizes(size, self.layout) for size in self.plan.microbatch_sizes), strict=True)]

    def assign_planned(self, sizes: tuple[int, ...], is_global_batch: bool) -> BatchRows:
        """Assign microbatches of these sizes by the plan's shares."""

        def build() -> BatchRows:
            table = tuple(replica_sizes(size, self.layout) for size in sizes)
            return BatchRows(table, self.index, is_global_batch, is_planned=all(map(all, table)))

        return self.cache.get_or_build((sizes, is_global_batch), build)

    def assign_unplanned(self, rows: Sequence[int], count: int, same_shapes: bool) -> BatchRows:
        """Assign `assign_planned` per replica to `count` microbatches; `same_shapes`: all replicas have tensors of the same shapes."""
        return BatchRows(rows_by_replica(rows, count), self.index, False, is_planned=False, same_shapes=same_shapes)


@dataclass(frozen=True)
class BatchRows:
    """Number of samples by microbatch and replica: `table[m][i]`. `index`: this replica.

    `is_global_batch`: whether tensors hold all rows. `is_planned`: shares are the plan's, none of them empty. `same_shapes`: replicas have
    tensors of the same shapes. `batch_size`, `num_before`: of the whole batch if these rows are part of one, and the rows before them.
    """

    table: tuple[tuple[int, ...], ...]
    index: int
    is_global_batch: bool
    is_planned: bool
    same_shapes: bool = True
    batch_size: int = 0
    num_before: int = 0

    @cached_property
    def num_samples(self) -> int:
        """Number of samples in the whole batch."""
        return self.batch_size or sum(map(sum, self.table))

    @property
    def counts_whole_batch(self) -> bool:
        """Return whether every rank counts loss divisors over the whole batch by itself."""
        return self.is_global_batch and self.is_planned

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Size of each microbatch over all replicas; if not planned, as if all had this replica's rows, 0 if it has none."""
        return tuple(sum(row) if self.is_planned else len(row) * row[self.index] for row in self.table)

    @cached_property
    def _microbatch_starts(self) -> tuple[int, ...]:
        """First sample of each microbatch in the batch."""
        return tuple(accumulate(map(sum, self.table), initial=0))

    @cached_property
    def _replica_starts(self) -> tuple[int, ...]:
        """First row of each microbatch among this replica's rows."""
        return tuple(accumulate((row[self.index] for row in self.table), initial=0))

    def share(self, m: int) -> float:
        """Return microbatch `m`'s share of the batch's samples as computed by this rank; its mean over replicas is the true share."""
        return self.sizes[m] / self.num_samples

    def replica_range(self, m: int) -> tuple[int, int]:
        """Return (first row in a batch tensor, number of rows) of this replica in microbatch `m`."""
        first = self._microbatch_starts[m] + sum(self.table[m][: self.index]) if self.is_global_batch else self._replica_starts[m]
        return first, self.table[m][self.index]

    def slice_replica(self, x: Tensor, m: int) -> Tensor:
        """Slice this replica's rows of microbatch `m` out of a batch tensor; one placeholder row if there are none."""
        first, count = self.replica_range(m)
        if count:
            return x.narrow(0, first, count)
        return x[:1] if len(x) else torch.zeros((1, *x.shape[1:]), dtype=x.dtype, device=x.device)

    def slice_microbatch(self, x: Tensor, m: int) -> Tensor:
        """Slice all rows of microbatch `m` out of a global batch tensor."""
        return x.narrow(0, self._microbatch_starts[m], sum(self.table[m]))

    @cached_property
    def sample_positions(self) -> tuple[MicrobatchSamples, ...]:
        """Positions in the batch of each microbatch's samples as computed by this rank (`lower/kernels/sample_positions`)."""
        if self.is_planned:
            starts = (self.num_before + start for start in self._microbatch_starts)
            return tuple(
                MicrobatchSamples.contiguous(start, sum(row), self.num_samples) for start, row in zip(starts, self.table, strict=False)
            )
        positions = []
        for start, row in zip(self._microbatch_starts, self.table, strict=False):
            preceding, count = sum(row[: self.index]), max(1, row[self.index])
            positions.append(MicrobatchSamples(start + preceding - self.index * count, self.num_samples, ((count * len(row), 1),)))
        return tuple(positions)


@dataclass
class CallConvention:
    """How ranks call the module. `is_global_batch`: every rank passes the same global batch."""

    is_global_batch: bool = False
