"""Count loss divisors (tokens, samples) over the whole batch before the step: over all microbatches and all data ranks.

In: every microbatch's tensors, full ones if the batch is global, else this rank's rows. Out: the divisors by graph value. With a global
batch every rank counts by itself; counts over local rows are all-reduced asynchronously and waited for where they are first read
(`lower/lowering`). With asynchronous updates nothing waits: the divisor is reduced along with the loss, and divides gradients when
they are applied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from shardwise.errors import Infeasible
from shardwise.lower.local import LocalStage, lower
from shardwise.lower.lowering import PendingConstants
from shardwise.model.batch.summable_loss import BatchTotal, SummableLossGraph
from shardwise.model.sharding.sharding import Sharding
from shardwise.model.stages.stages import Stage
from shardwise.plan.ir.axis import axis_of
from shardwise.plan.ir.placement import P, R, is_shard
from shardwise.run.parts.microbatch_variants import MicrobatchVariant
from shardwise.run.parts.rank_model import RankModel
from shardwise.world.world import Group

T = TypeVar("T")


@dataclass(frozen=True)
class _CountLevel:
    """Divisors that can be counted together: `of_microbatch` counts a full microbatch, `of_rows` a rank's rows of it, in the same order."""

    totals: tuple[BatchTotal, ...]
    of_microbatch: LocalStage
    of_rows: LocalStage


@dataclass
class DivisorCounter:
    """Counts the divisors of one microbatch size on one rank. `group`: ranks with other rows of the microbatch.

    Raises:
        Infeasible: a divisor is counted from a buffer that is sharded.
    """

    rank_model: RankModel
    variant: MicrobatchVariant
    group: Group
    levels: tuple[_CountLevel, ...] = field(init=False)
    variables: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        normal = self.variant.loss_graph
        read = {value for local in self.variant.lowered.values() for value in local.variables}
        totals = tuple(t for t in normal.totals if t.variable in read)
        levels: list[_CountLevel] = []
        remaining = list(totals)
        while remaining:
            waiting = {t.variable for t in remaining}
            ready = [t for t in remaining if not any(waiting.intersection(op.inputs) for op in normal.total_operators((t,)))]
            levels.append(self._lower_level(normal, tuple(ready)))
            remaining = [t for t in remaining if t not in ready]
        self.levels = tuple(levels)
        self.variables = frozenset(v for level in levels for v in level.of_rows.variables)

    def _lower_level(self, normal: SummableLossGraph, totals: tuple[BatchTotal, ...]) -> _CountLevel:
        lowering, operators = self.rank_model.lowering, normal.total_operators(totals)
        assert lowering is not None
        inputs = {v for op in operators for v in op.inputs}
        variables = tuple(v.value for v in normal.graph.variables if v.value in inputs)
        stage = Stage(0, operators, variables, (), (), tuple(t.value for t in totals))
        placements, from_batch = (
            lowering.sharding.placements,
            {v.value for v in normal.graph.inputs},
        )  # inputs are given in full
        buffers = [v for v in variables if v not in from_batch]
        sharded = [v for v in buffers if any(is_shard(form) and not axis_of(axis).shards_samples for axis, form in placements[v].items())]
        if sharded:
            raise Infeasible(f"the loss divides by a count over {sharded[0]}, which is sharded over tensor ranks; use tensor=1")
        unrestricted = replace(lowering, graph=normal.graph, awaited_constants=frozenset(), output_sample_dims={})
        of_microbatch, of_rows = (
            lower(stage, replace(unrestricted, sharding=_restrict_to_axes(self.variant.sharding, axes)))
            for axes in ((), lowering.sharding.sample_axes)
        )
        return _CountLevel(totals, of_microbatch, of_rows)

    def by_graph_value(self, totals: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return divisors, given in the order of the levels (or a prefix of it), by this capture's graph values."""
        return dict(zip((total.variable for level in self.levels for total in level.totals), totals, strict=False))

    def count_level(self, level: int, tensors: Mapping[str, Tensor], is_global_batch: bool) -> list[Tensor]:
        """Count one microbatch's summands of a level's divisors."""
        local = self.levels[level].of_microbatch if is_global_batch else self.levels[level].of_rows
        constants = {**self.rank_model.variables, **self.variant.constants}
        totals = local.module(*(tensors[v] if v in tensors else constants[v] for v in local.variables))
        lowering = self.rank_model.lowering
        if is_global_batch or lowering is None:
            return list(totals)
        # A count that is replicated along an axis counts once.
        axes_not_first = [axis for axis in lowering.sharding.sample_axes if lowering.groups[axis].index]
        is_counted = [all(local.placements[v].get(axis, R) is P for axis in axes_not_first) for v in local.results]
        return [x if counts else torch.zeros_like(x) for x, counts in zip(totals, is_counted, strict=True)]


def _restrict_to_axes(sharding: Sharding, axes: tuple[str, ...]) -> Sharding:
    """Restrict a sharding to some of its axes."""

    def restrict(of: Mapping[str, T]) -> dict[str, T]:
        return {axis: x for axis, x in of.items() if axis in axes}

    return replace(
        sharding,
        sizes={axis: n for axis, n in sharding.sizes.items() if axis in axes},
        labels={name: restrict(by) for name, by in sharding.labels.items()},
        placements={value: restrict(by) for value, by in sharding.placements.items()},
        input_placements={name: tuple(restrict(row) for row in rows) for name, rows in sharding.input_placements.items()},
        regions=(),
    )


def count_divisors(
    microbatches: Sequence[tuple[DivisorCounter, Mapping[str, Tensor], bool]],
    is_global_batch: bool,
    pending_constants: PendingConstants,
    is_local: bool = False,
) -> list[Tensor]:
    """Count the divisors of a batch; `pending_constants` waits for those still being reduced. `is_local`: of this rank's rows only.

    `microbatches`: (counter, tensors, whether this rank has rows of it); placeholder rows are not counted. Several captures may be mixed.

    Raises:
        Infeasible: captures count different divisors.
    """
    pending_constants.wait()
    first = microbatches[0][0]
    totals: list[Tensor] = []
    if any([len(level.totals) for level in other.levels] != [len(level.totals) for level in first.levels] for other, _, _ in microbatches):
        raise Infeasible("the loss divides by something else in one microbatch than in another of the same step; make them of one kind")
    with torch.no_grad():
        for index in range(len(first.levels)):
            pending_constants.wait()
            summands = [
                c.count_level(index, {**tensors, **c.by_graph_value(totals)}, is_global_batch)
                for c, tensors, has_rows in microbatches
                if has_rows
            ]
            if not summands:
                counter, tensors, _ = microbatches[0]
                summands = [
                    [
                        torch.zeros_like(x)
                        for x in counter.count_level(index, {**tensors, **counter.by_graph_value(totals)}, is_global_batch)
                    ]
                ]
            level_sums = [torch.stack(counter_).sum(0, dtype=counter_[0].dtype) for counter_ in zip(*summands, strict=True)]
            totals += level_sums
            if not (is_global_batch or is_local) and first.group.size > 1:
                pending_constants.finish = _start_sum(level_sums, first.group)
    return totals


def _start_sum(sums: Sequence[Tensor], group: Group) -> Callable[[], None]:
    """Start one all-reduce of all counts; return a function that waits and writes the results."""
    flat = torch.cat([x.double().reshape(-1) for x in sums])
    work = group.all_reduce(flat, wait=False)

    def finish() -> None:
        work.wait()
        for x, count_sum in zip(sums, torch.split(flat, [x.numel() for x in sums]), strict=True):
            x.copy_(count_sum.view_as(x))

    return finish
