"""Deferred buffer updates (running statistics) of stages whose microbatches run on several ranks or out of order.

After each step the buffers are as if one rank had run every microbatch in order: the writes of a microbatch are recorded, all-reduced after
the step over the ranks that hold the stage, and applied in order by each of them. If data replicas compute their own statistics, those of
all replicas are applied, one after another.

Not modelled: writes other than the running statistics of batch norm and counts; a stage with such writes is refused by name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.errors import Infeasible
from weft.lower.kernels.statistics import Later
from weft.model.graph import Operator, writes_buffer, written_buffers
from weft.model.stages.stages import Stage
from weft.ops import record_of
from weft.plan.mesh import Mesh
from weft.plan.program import Compute, Op, Program
from weft.run.training_parts import Parts
from weft.world.world import Group, World


@dataclass(frozen=True)
class _Shared:
    """One buffer, with its deferred writes."""

    buffer: Tensor
    later: Later


class Replicas:
    """The buffers of one rank that are updated after a step. `start` before it, `finish` after it.

    Raises:
        Infeasible: a stage has writes that cannot be deferred.
    """

    def __init__(self, parts: Parts, mesh: Mesh, world: World) -> None:
        coordinates = mesh.coordinates(world.rank)
        local_statistics = parts.lowering.local_statistics if parts.lowering is not None else ()
        replicas = mesh.group(world.rank, *local_statistics)
        self._replica, self._num_replicas = replicas.index(world.rank), len(replicas)
        by_ranks: dict[tuple[int, ...], list[_Shared]] = defaultdict(list)
        buffers = {v.value: v.name for v in (*parts.graph.buffers, *parts.graph.parameters)}
        # Checked for every stage, so that all ranks refuse together; this rank records writes of its own stages.
        written = {s: _written_later(stage, parts, buffers) for s, stage in enumerate(parts.stages) if out_of_order(parts.program, s)}
        if local_statistics:
            written = {s: list(_statistics(stage, parts)) for s, stage in enumerate(parts.stages)} | written
        for stage in parts.lowered:
            for value in written.get(stage, ()):
                if value not in parts.variables:  # owned by another rank
                    continue
                buffer = parts.variables[value]
                holders = (mesh.rank({**coordinates, "pipeline": holder}) for holder in parts.holders(value))
                ranks = tuple(sorted(rank for holder in holders for rank in mesh.group(holder, *local_statistics)))
                parts.draw.later[id(buffer)] = later = Later()
                by_ranks[ranks].append(_Shared(buffer, later))
        # All ranks go through their groups in the same order, or they would deadlock.
        self._by_group = [(world.group(ranks), by_ranks[ranks]) for ranks in sorted(by_ranks)]

    @property
    def groups(self) -> list[Group]:
        """The groups that communicate."""
        return [group for group, _ in self._by_group if group.size > 1]

    def start(self) -> None:
        """Clear the recorded writes before a step."""
        for _, shared in self._by_group:
            for deferred in shared:
                deferred.later.clear()

    @torch.no_grad()
    def finish(self, microbatches: Sequence[int]) -> None:
        """Apply the writes of these microbatches after their step."""
        for group, shared in self._by_group:
            for deferred in shared:
                writes = next(iter(deferred.later.writes.values()), [])
                for _ in microbatches:
                    for write in writes:
                        write()
            with_statistics = [deferred for deferred in shared if deferred.later.statistics]
            tables = [self._table(deferred, microbatches) for deferred in with_statistics]
            for dtype in dict.fromkeys(table.dtype for table in tables):
                of_dtype = [table for table in tables if table.dtype is dtype]
                flat = torch.cat([table.view(-1) for table in of_dtype])
                group.all_reduce(flat)
                for table, total in zip(of_dtype, torch.split(flat, [table.numel() for table in of_dtype]), strict=True):
                    table.copy_(total.view_as(table))
            for deferred, table in zip(with_statistics, tables, strict=True):
                momenta = [momentum for momentum, _ in next(iter(deferred.later.statistics.values()))]
                for of_microbatch in table:
                    for momentum, value in zip(momenta, of_microbatch, strict=True):
                        deferred.buffer.mul_((1 - momentum) ** self._num_replicas).add_(value, alpha=momentum)

    def _table(self, one: _Shared, microbatches: Sequence[int]) -> Tensor:
        """Return statistics [microbatch, occurrence in it, *buffer], zero for other ranks' microbatches; of several replicas, scaled by the
        decay of the replicas applied after it."""
        num_occurrences = len(next(iter(one.later.statistics.values())))
        table = one.buffer.new_zeros((len(microbatches), num_occurrences, *one.buffer.shape))
        num_later = self._num_replicas - 1 - self._replica
        for row, m in zip(table, microbatches, strict=True):
            for place, (momentum, value) in zip(row, one.later.statistics.get(m, []), strict=False):
                place.add_(value, alpha=(1 - momentum) ** num_later)
        return table


def out_of_order(program: Program, stage: int) -> bool:
    """Return whether a stage's forwards run on several ranks, or not in the microbatches' order.

    >>> out_of_order(Program.parse("rank 0: 0F0 0B0 0F1 0B1"), 0), out_of_order(Program.parse("rank 0: 0F1 0B1 0F0 0B0"), 0)
    (False, True)
    """
    rows = [[a.microbatch for a in row if isinstance(a, Compute) and a.op is Op.F and a.stage == stage] for row in program.actions]
    rows = [row for row in rows if row]
    return len(rows) > 1 or any(row != sorted(row) for row in rows)


def _statistics(stage: Stage, parts: Parts) -> dict[str, None]:
    """Return graph values of the running statistics over samples that a stage writes."""
    written = written_buffers(parts.graph)
    return {v: None for op in stage.operators if record_of(op).over_samples for v in op.inputs if v in written}


def _written_later(stage: Stage, parts: Parts, buffers: Mapping[str, str]) -> list[str]:
    """Return graph values of the buffers whose writes are deferred. Raises Infeasible for other writes."""
    variables = {v.value: v for v in (*parts.graph.parameters, *parts.graph.buffers)}
    written = written_buffers(parts.graph)
    statistics = _statistics(stage, parts)
    for op in stage.operators:
        used = [value for value in op.inputs if value in buffers]
        if record_of(op).over_samples:
            continue
        if writes_buffer(op, variables) and len(op.inputs) == 1:
            statistics.update(dict.fromkeys(used))
        elif writes_buffer(op, variables) or written.intersection(used):
            raise Infeasible(_cannot(op, [value for value in used if value in written], buffers, parts.program))
    return list(statistics)


def _cannot(op: Operator, used: Sequence[str], buffers: Mapping[str, str], program: Program) -> str:
    names = ", ".join(buffers[value] for value in used) or "a buffer"
    return (
        f"{op.site} reads or writes {names} while the model runs, and {program.name} runs its microbatches on several ranks or in another "
        "order than the serial model; use schedule=1f1b, gpipe, interleaved or zb-h1"
    )
