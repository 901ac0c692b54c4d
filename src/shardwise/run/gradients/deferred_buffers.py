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

from shardwise.errors import Infeasible
from shardwise.lower.kernels.randomness import DeferredBufferWrites
from shardwise.model.graph import Operator, writes_buffer, written_buffers
from shardwise.model.stages.stages import Stage
from shardwise.ops import record_of
from shardwise.plan.ir.mesh import Mesh
from shardwise.plan.ir.program import Compute, ComputeOp, Program
from shardwise.run.parts.rank_model import RankModel
from shardwise.world.world import Group, World


@dataclass(frozen=True)
class _DeferredBuffer:
    """One buffer, with its deferred writes."""

    buffer: Tensor
    later: DeferredBufferWrites


class DeferredBufferUpdates:
    """The buffers of one rank that are updated after a step. `start` before it, `finish` after it.

    Raises:
        Infeasible: a stage has writes that cannot be deferred.
    """

    def __init__(self, rank_model: RankModel, mesh: Mesh, world: World) -> None:
        coordinates = mesh.coordinates(world.rank)
        local_statistics = rank_model.lowering.local_statistics if rank_model.lowering is not None else ()
        replicas = mesh.group(world.rank, *local_statistics)
        self._replica, self._num_replicas = replicas.index(world.rank), len(replicas)
        by_ranks: dict[tuple[int, ...], list[_DeferredBuffer]] = defaultdict(list)
        buffers = {v.value: v.name for v in (*rank_model.graph.buffers, *rank_model.graph.parameters)}
        # Checked for every stage, so that all ranks refuse together; this rank records writes of its own stages.
        written = {
            s: _deferred_values(stage, rank_model, buffers)
            for s, stage in enumerate(rank_model.stages)
            if runs_out_of_order(rank_model.program, s)
        }
        if local_statistics:
            written = {s: list(_running_statistics(stage, rank_model)) for s, stage in enumerate(rank_model.stages)} | written
        for stage in rank_model.lowered:
            for value in written.get(stage, ()):
                if value not in rank_model.variables:  # owned by another rank
                    continue
                buffer = rank_model.variables[value]
                holders = (mesh.rank_at({**coordinates, "pipeline": holder}) for holder in rank_model.pipeline_ranks_reading(value))
                ranks = tuple(sorted(rank for holder in holders for rank in mesh.group(holder, *local_statistics)))
                rank_model.draw.deferred_writes[id(buffer)] = later = DeferredBufferWrites()
                by_ranks[ranks].append(_DeferredBuffer(buffer, later))
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

    def finish(self, microbatches: Sequence[int]) -> None:
        """Apply the writes of these microbatches after their step."""
        if self._by_group:
            self._apply_writes(microbatches)

    @torch.no_grad()
    def _apply_writes(self, microbatches: Sequence[int]) -> None:
        for group, shared in self._by_group:
            for deferred in shared:
                writes = next(iter(deferred.later.writes.values()), [])
                for _ in microbatches:
                    for write in writes:
                        write()
            with_statistics = [deferred for deferred in shared if deferred.later.statistics]
            tables = [self._statistics_table(deferred, microbatches) for deferred in with_statistics]
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

    def _statistics_table(self, deferred: _DeferredBuffer, microbatches: Sequence[int]) -> Tensor:
        """Return statistics [microbatch, occurrence in it, *buffer], zero for other ranks' microbatches; of several replicas, scaled by the
        decay of the replicas applied after it."""
        num_occurrences = len(next(iter(deferred.later.statistics.values())))
        table = deferred.buffer.new_zeros((len(microbatches), num_occurrences, *deferred.buffer.shape))
        num_later = self._num_replicas - 1 - self._replica
        for row, m in zip(table, microbatches, strict=True):
            for place, (momentum, value) in zip(row, deferred.later.statistics.get(m, []), strict=False):
                place.add_(value, alpha=(1 - momentum) ** num_later)
        return table


def runs_out_of_order(program: Program, stage: int) -> bool:
    """Return whether a stage's forwards run on several ranks, or not in the microbatches' order.

    >>> runs_out_of_order(Program.parse("rank 0: 0F0 0B0 0F1 0B1"), 0), runs_out_of_order(Program.parse("rank 0: 0F1 0B1 0F0 0B0"), 0)
    (False, True)
    """
    rows = [[a.microbatch for a in row if isinstance(a, Compute) and a.op is ComputeOp.F and a.stage == stage] for row in program.actions]
    rows = [row for row in rows if row]
    return len(rows) > 1 or any(row != sorted(row) for row in rows)


def _running_statistics(stage: Stage, rank_model: RankModel) -> dict[str, None]:
    """Return graph values of the running statistics over samples that a stage writes."""
    written = written_buffers(rank_model.graph)
    return {v: None for op in stage.operators if record_of(op).statistics.over_samples for v in op.inputs if v in written}


def _deferred_values(stage: Stage, rank_model: RankModel, buffers: Mapping[str, str]) -> list[str]:
    """Return graph values of the buffers whose writes are deferred. Raises Infeasible for other writes."""
    variables = {v.value: v for v in (*rank_model.graph.parameters, *rank_model.graph.buffers)}
    written = written_buffers(rank_model.graph)
    statistics = _running_statistics(stage, rank_model)
    for op in stage.operators:
        used = [value for value in op.inputs if value in buffers]
        if record_of(op).statistics.over_samples:
            continue
        if writes_buffer(op, variables) and len(op.inputs) == 1:
            statistics.update(dict.fromkeys(used))
        elif writes_buffer(op, variables) or written.intersection(used):
            raise Infeasible(_unsupported_write(op, [value for value in used if value in written], buffers, rank_model.program))
    return list(statistics)


def _unsupported_write(op: Operator, used: Sequence[str], buffers: Mapping[str, str], program: Program) -> str:
    names = ", ".join(buffers[value] for value in used) or "a buffer"
    return (
        f"{op.site} reads or writes {names} while the model runs, and {program.name} runs its microbatches on several ranks or in another "
        "order than the serial model; use schedule=1f1b, gpipe, interleaved or zb-h1"
    )
