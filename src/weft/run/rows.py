"""Which rows of a batch are a rank's. In: a plan, the rank's stage, its number among the replicas. Out: `Replica`, and of a batch `Rows`.

A batch is given whole, the same on every rank, or each rank is given its own rows: its part of every microbatch, one after another.
Replicas have the parts that the plan says; or, where they are given other ones or some have none, each computes as if all had as many
samples as it has, one at least, which differs in nothing where no sample meets another in the model.
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
    """Replica `index` of a stage that is arranged by `layout`."""

    plan: Plan
    layout: Layout
    index: int
    cache: Recent[Rows] = field(default_factory=lambda: Recent(MOST_SIZES), compare=False)

    def of(self, size: int) -> tuple[int, int]:
        """(the first, how many) of the rows of a microbatch of `size` samples that this replica has."""
        return replica_rows(size, self.layout, self.index)

    @cached_property
    def each(self) -> list[int]:
        """Rows of every replica in a batch of the plan."""
        return [sum(sizes) for sizes in zip(*(replica_sizes(size, self.layout) for size in self.plan.microbatch_sizes), strict=True)]

    def rows(self, sizes: tuple[int, ...], is_global: bool) -> Rows:
        """Those of microbatches of these sizes."""

        def made() -> Rows:
            table = tuple(replica_sizes(size, self.layout) for size in sizes)
            return Rows(table, self.index, is_global, planned=all(map(all, table)))

        return self.cache.of((sizes, is_global), made)

    def given(self, rows: Sequence[int], count: int, one_form: bool) -> Rows:
        """Those of replicas that were given so many `rows` each, in `count` microbatches; `one_form`: of tensors of the same shapes."""
        return Rows(rows_by_replica(rows, count), self.index, False, planned=False, one_form=one_form)


@dataclass(frozen=True)
class Rows:
    """By microbatch and replica, how many samples: `table[m][i]`. `index`: this replica.

    `is_global`: whether batches hold all. `planned`: whether these are the parts that the plan says, none of them empty. `one_form`:
    whether what replicas have of a batch is of one form. `all_samples`: of a batch of which these are a part, behind `before` others.
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
        """Of the whole batch."""
        return self.all_samples or sum(map(sum, self.table))

    @property
    def counts_all(self) -> bool:
        """Whether every rank counts what all have."""
        return self.is_global and self.planned

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Of each microbatch, all replicas together; of what is not planned as if all had what this one has, 0 where it has none."""
        return tuple(sum(row) if self.planned else len(row) * row[self.index] for row in self.table)

    @cached_property
    def _begins(self) -> tuple[int, ...]:
        """Samples of all microbatches before each."""
        return tuple(accumulate(map(sum, self.table), initial=0))

    @cached_property
    def _replica_begins(self) -> tuple[int, ...]:
        """This replica's among them."""
        return tuple(accumulate((row[self.index] for row in self.table), initial=0))

    def share(self, m: int) -> float:
        """Of the batch's samples, what microbatch `m` has, as this rank computes it; the mean over replicas is what it has."""
        return self.sizes[m] / self.samples

    def of_replica(self, x: Tensor, m: int) -> Tensor:
        """This rank's rows of what microbatch `m` has of a batch's tensor; of none a row that stands in."""
        first = self._begins[m] + sum(self.table[m][: self.index]) if self.is_global else self._replica_begins[m]
        if count := self.table[m][self.index]:
            return x.narrow(0, first, count)
        return x[:1] if len(x) else torch.zeros((1, *x.shape[1:]), dtype=x.dtype, device=x.device)

    def of_all(self, x: Tensor, m: int) -> Tensor:
        """All rows of microbatch `m`, of a batch's tensor that holds them."""
        return x.narrow(0, self._begins[m], sum(self.table[m]))

    @cached_property
    def drawn(self) -> tuple[Samples, ...]:
        """By microbatch, which samples it has as computed on this rank (`lower/kernels/sample_positions`); its own shard is its samples."""
        if self.planned:
            begins = (self.before + begin for begin in self._begins)
            return tuple(Samples.range(begin, sum(row), self.samples) for begin, row in zip(begins, self.table, strict=False))
        drawn = []
        for begin, row in zip(self._begins, self.table, strict=False):
            before, count = sum(row[: self.index]), max(1, row[self.index])
            drawn.append(Samples(begin + before - self.index * count, self.samples, ((count * len(row), 1),)))
        return tuple(drawn)
