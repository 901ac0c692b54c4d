"""Which rows of a batch are a rank's. In: a plan, the rank's stage and its number among the replicas. Out: `Rows`.

A batch is given whole, the same on every rank, or each rank is given its own rows: its part of every microbatch, one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.errors import Infeasible
from weft.lower.kernels.place import Samples
from weft.plan.layout import Layout
from weft.plan.microbatches import replica_rows
from weft.plan.plan import Plan


@dataclass(frozen=True)
class Rows:
    """Of replica `index` of a stage that is arranged by `layout`."""

    plan: Plan
    layout: Layout
    index: int

    def of(self, size: int, index: int | None = None) -> tuple[int, int]:
        """(the first, how many) of the rows of a microbatch of `size` samples that this replica has, or that of `index`."""
        return replica_rows(size, self.layout, self.index if index is None else index)

    def number(self, sizes: Sequence[int], index: int) -> int:
        """Rows of a replica in microbatches of these sizes."""
        return sum(self.of(size, index)[1] for size in sizes)

    def samples(self, rows: int, whole: bool | None) -> tuple[bool, int]:
        """(whether a batch of so many rows is that of all replicas, its samples of all replicas together). `whole`: which it is, if told.

        Raises:
            Infeasible: more than the plan is for; some of the rows of a replica whose part is not that of the others.
        """
        plan, data = self.plan, self.layout.replicas
        each = [self.number(plan.microbatch_sizes, i) for i in range(data)]
        own, alike = each[self.index], len(set(each)) == 1
        is_global = rows > max(each) if whole is None else whole
        if is_global and rows <= plan.batch_size:
            return True, rows
        if not is_global and (rows == own or (alike and rows < own)):
            return False, rows * data if alike else plan.batch_size
        said = f"{own} for each of data={data}" if alike else f"{'/'.join(map(str, each))} for the ranks of data={data}"
        raise Infeasible(f"the batch has {rows} samples; the plan is for {plan.batch_size} in all, which is {said}")

    def drawn(self, sizes: Sequence[int], is_global: bool) -> list[Samples]:
        """Of every microbatch which samples of the batch it has, as far as what this replica draws for them follows from it."""
        samples, data = sum(sizes), self.layout.replicas
        before = sum(self.number(sizes, i) for i in range(self.index))
        found, begin = [], 0
        for size in sizes:
            first, own = self.of(size)
            if is_global:
                found.append(Samples.range(begin, size, samples))
            elif any(size % data for size in sizes) or self.layout.shares:  # of which only this replica's lie so
                found.append(Samples.range(before + begin - first, size, samples))
            else:
                found.append(Samples(begin, samples, ((data, samples // data), (own, 1))))
            begin += size if is_global else own
        return found
