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

from weft.lower.kernels.sample_positions import Samples
from weft.plan.layout import Layout
from weft.plan.microbatches import replica_rows, replica_sizes, rows_by_replica
from weft.plan.plan import Plan
from weft.run.recent import MOST_SIZES, Recent


@dataclass(frozen=True)
class Replica:
    """Data-parallel replica `index` of a stage whose mesh is that of `layout`."""

    plan: Plan
    layout: Layout
    index: int
    cache: Recent[Rows] = field(default_factory=lambda: Recent(MOST_SIZES), compare=False)

    def of(self, size: int) -> tuple[int, int]:
        """Return (first row, number of rows) of this replica in a microbatch of `size` samples."""
        return replica_rows(size, self.layout, self.index)

    @cached_property
    def each(self) -> list[int]:
        """Number of rows of every replica in a full batch of the plan."""
        return [sum(sizes) for sizes in zip(*(replica_sizes(size, self.layout) for size in self.plan.microbatch_sizes), strict=True)]

    def rows(self, sizes: tuple[int, ...], is_global: bool) -> Rows:
        """Assign microbatches of these sizes by the plan's shares."""

        def build() -> Rows:
            table = tuple(replica_sizes(size, self.layout) for size in sizes)
            return Rows(table, self.index, is_global, planned=all(map(all, table)))

        return self.cache.of((sizes, is_global), build)

    def given(self, rows: Sequence[int], count: int, one_form: bool) -> Rows:
        """Assign `rows` per replica to `count` microbatches; `same_shapes`: all replicas have tensors of the same shapes."""
        return Rows(rows_by_replica(rows, count), self.index, False, planned=False, one_form=one_form)


@dataclass(frozen=True)
class Rows:
    """Number of samples by microbatch and replica: `table[m][i]`. `index`: this replica.

    `is_global_batch`: whether tensors hold all rows. `is_planned`: shares are the plan's, none of them empty. `same_shapes`: replicas have
    tensors of the same shapes. `batch_size`, `num_before`: of the whole batch if these rows are part of one, and the rows before them.
    """

    table: tuple[tuple[int, ...], ...]
    index: int
    is_global: bool
    planned: bool
    one_form: bool = True
    all_samples: int = 0
    before: int = 0

    @cached_property
    def samples(self) -> int:
        """Number of samples in the whole batch."""
        return self.all_samples or sum(map(sum, self.table))

    @property
    def counts_all(self) -> bool:
        """Return whether every rank counts loss divisors over the whole batch by itself."""
        return self.is_global and self.planned

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Size of each microbatch over all replicas; if not planned, as if all had this replica's rows, 0 if it has none."""
        return tuple(sum(row) if self.planned else len(row) * row[self.index] for row in self.table)

    @cached_property
    def _begins(self) -> tuple[int, ...]:
        """First sample of each microbatch in the batch."""
        return tuple(accumulate(map(sum, self.table), initial=0))

    @cached_property
    def _replica_begins(self) -> tuple[int, ...]:
        """First row of each microbatch among this replica's rows."""
        return tuple(accumulate((row[self.index] for row in self.table), initial=0))

    def share(self, m: int) -> float:
        """Return microbatch `m`'s share of the batch's samples as computed by this rank; its mean over replicas is the true share."""
        return self.sizes[m] / self.samples

    def of_replica(self, x: Tensor, m: int) -> Tensor:
        """Slice this replica's rows of microbatch `m` out of a batch tensor; one placeholder row if there are none."""
        first = self._begins[m] + sum(self.table[m][: self.index]) if self.is_global else self._replica_begins[m]
        if count := self.table[m][self.index]:
            return x.narrow(0, first, count)
        return x[:1] if len(x) else torch.zeros((1, *x.shape[1:]), dtype=x.dtype, device=x.device)

    def of_all(self, x: Tensor, m: int) -> Tensor:
        """Slice all rows of microbatch `m` out of a global batch tensor."""
        return x.narrow(0, self._begins[m], sum(self.table[m]))

    @cached_property
    def drawn(self) -> tuple[Samples, ...]:
        """Positions in the batch of each microbatch's samples as computed by this rank (`lower/kernels/sample_positions`)."""
        if self.planned:
            starts = (self.before + start for start in self._begins)
            return tuple(Samples.range(start, sum(row), self.samples) for start, row in zip(starts, self.table, strict=False))
        positions = []
        for start, row in zip(self._begins, self.table, strict=False):
            preceding, count = sum(row[: self.index]), max(1, row[self.index])
            positions.append(Samples(start + preceding - self.index * count, self.samples, ((count * len(row), 1),)))
        return tuple(positions)
