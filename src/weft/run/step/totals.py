"""What a loss divides by, counted over the whole batch before the step: over all microbatches and all data ranks.

In: every microbatch's tensors, the whole ones where the batch is the same on every rank, else this rank's rows. Out: the totals by graph
value. Of a whole batch every rank counts by itself; of rows what all ranks counted is summed while the step begins, and waited for where
it is first read (`lower/arrival`). Where updates come late nobody waits for that: what a loss is divided by as a whole is summed beside it,
and divides gradients when they are applied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from weft.errors import Infeasible
from weft.lower.arrival import Arrival
from weft.lower.local import LocalStage, lower
from weft.model.batch.normalise import Normalised, Total
from weft.model.sharding.sharding import Sharding
from weft.model.stages.stages import Stage
from weft.plan.axis import axis_of
from weft.plan.placement import P, R, is_shard
from weft.run.resized import Sized
from weft.run.training_parts import Parts
from weft.world.world import Group

T = TypeVar("T")


@dataclass(frozen=True)
class _Level:
    """Totals that can be counted together: `of_microbatch` counts a whole microbatch, `of_rows` a rank's rows of it, in the same order."""

    totals: tuple[Total, ...]
    of_microbatch: LocalStage
    of_rows: LocalStage


@dataclass
class Counter:
    """Counts one microbatch of one size on one rank. `group`: ranks that have other rows of it.

    Raises:
        Infeasible: what the loss divides by is counted from a buffer of which this rank has a part.
    """

    parts: Parts
    sized: Sized
    group: Group
    levels: tuple[_Level, ...] = field(init=False)
    variables: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        normal = self.sized.normal
        read = {value for local in self.sized.lowered.values() for value in local.variables}
        totals = tuple(t for t in normal.totals if t.variable in read)
        levels: list[_Level] = []
        left = list(totals)
        while left:
            waiting = {t.variable for t in left}
            now = [t for t in left if not any(waiting.intersection(op.inputs) for op in normal.counting((t,)))]
            levels.append(self._level(normal, tuple(now)))
            left = [t for t in left if t not in now]
        self.levels = tuple(levels)
        self.variables = frozenset(v for level in levels for v in level.of_rows.variables)

    def _level(self, normal: Normalised, totals: tuple[Total, ...]) -> _Level:
        lowering, operators = self.parts.lowering, normal.counting(totals)
        assert lowering is not None
        inputs = {v for op in operators for v in op.inputs}
        variables = tuple(v.value for v in normal.graph.variables if v.value in inputs)
        stage = Stage(0, operators, variables, (), (), tuple(t.value for t in totals))
        forms, from_batch = (
            lowering.sharding.forms,
            {v.value for v in normal.graph.inputs},
        )  # inputs are counted from as they are given, whole
        counted = [v for v in variables if v not in from_batch]
        cut = [v for v in counted if any(is_shard(form) and not axis_of(axis).cuts_samples for axis, form in forms[v].items())]
        if cut:
            raise Infeasible(f"the loss divides by what is counted from {cut[0]}, of which each tensor rank has a part; use tensor=1")
        local = [
            lower(stage, replace(lowering, graph=normal.graph, sharding=_along(self.sized.sharding, axes), awaited=frozenset(), rows={}))
            for axes in ((), lowering.sharding.sample_axes)
        ]
        return _Level(totals, *local)

    def named(self, totals: Sequence[Tensor]) -> dict[str, Tensor]:
        """Totals in the order of their levels, or the first of them, by graph value as this capture has it."""
        return dict(zip((total.variable for level in self.levels for total in level.totals), totals, strict=False))

    def run(self, level: int, tensors: Mapping[str, Tensor], is_global: bool) -> list[Tensor]:
        """What one microbatch adds to the totals of a level."""
        local = self.levels[level].of_microbatch if is_global else self.levels[level].of_rows
        held = {**self.parts.variables, **self.sized.constants}
        totals = local.module(*(tensors[v] if v in tensors else held[v] for v in local.variables))
        lowering = self.parts.lowering
        if is_global or lowering is None:
            return list(totals)
        # What every rank along an axis has whole counts once.
        later = [axis for axis in lowering.sharding.sample_axes if lowering.groups[axis].index]
        once = [all(local.forms[v].get(axis, R) is P for axis in later) for v in local.results]
        return [x if counts else torch.zeros_like(x) for x, counts in zip(totals, once, strict=True)]


def _along(sharding: Sharding, axes: tuple[str, ...]) -> Sharding:
    """A sharding along some of its axes alone."""

    def some(of: Mapping[str, T]) -> dict[str, T]:
        return {axis: x for axis, x in of.items() if axis in axes}

    return replace(
        sharding,
        sizes={axis: n for axis, n in sharding.sizes.items() if axis in axes},
        ops={name: some(by) for name, by in sharding.ops.items()},
        forms={value: some(by) for value, by in sharding.forms.items()},
        needs={name: tuple(some(row) for row in rows) for name, rows in sharding.needs.items()},
        regions=(),
    )


def count(
    microbatches: Sequence[tuple[Counter, Mapping[str, Tensor], bool]], is_global: bool, arrival: Arrival, alone: bool = False
) -> list[Tensor]:
    """The totals of a batch, which `arrival` waits for where they are still to come; those of this rank's rows where it is `alone`.

    `microbatches`: with whether this rank has rows of it; what stands in for none is not counted. They may be of several captures.

    Raises:
        Infeasible: captures that count something else.
    """
    arrival.wait()
    first = microbatches[0][0]
    totals: list[Tensor] = []
    if any([len(level.totals) for level in other.levels] != [len(level.totals) for level in first.levels] for other, _, _ in microbatches):
        raise Infeasible("the loss divides by something else in one microbatch than in another of the same step; make them of one kind")
    with torch.no_grad():
        for number in range(len(first.levels)):
            arrival.wait()
            parts = [one.run(number, {**tensors, **one.named(totals)}, is_global) for one, tensors, has_rows in microbatches if has_rows]
            if not parts:
                counter, tensors, _ = microbatches[0]
                parts = [[torch.zeros_like(x) for x in counter.run(number, {**tensors, **counter.named(totals)}, is_global)]]
            sums = [torch.stack(one).sum(0, dtype=one[0].dtype) for one in zip(*parts, strict=True)]
            totals += sums
            if not (is_global or alone) and first.group.size > 1:
                arrival.finish = _summing(sums, first.group)
    return totals


def _summing(sums: Sequence[Tensor], group: Group) -> Callable[[], None]:
    """Sum over ranks in one message; what it returns waits, and writes what was summed."""
    flat = torch.cat([x.double().reshape(-1) for x in sums])
    work = group.all_reduce(flat, wait=False)

    def finish() -> None:
        work.wait()
        for x, piece in zip(sums, torch.split(flat, [x.numel() for x in sums]), strict=True):
            x.copy_(piece.view_as(x))

    return finish
