"""Breakdown of the measured step time into the components of the prediction.

The busiest rank counts: `compute` is its forwards and backwards without the collectives inside them, which are `tensor`; `pipeline` other
waiting of its program; `gradients` the reduction that is exposed after the last backward; `overhead` the rest of the step. Not modelled:
devices that run ahead of the host (CUDA), on which a span is a launch; reductions overlapped with backward are part of `compute`.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from shardwise.plan.ir.axis import axis_of
from shardwise.plan.ir.mesh import Mesh
from shardwise.plan.ir.timeline import COMPUTE_LANE
from shardwise.run.engine import Engine
from shardwise.world.world import World

NAMES = ("compute", "tensor", "pipeline", "gradients", "optimizer", "overhead")
NANOSECONDS = 1e9


class StepComponents:
    """Collects recorded steps of one rank: call `start_step()` before a step, `record_step(engine, step_s)` after it."""

    def __init__(self, world: World, mesh: Mesh) -> None:
        self.world = world
        self._tensor_groups = [world.group(mesh.group(world.rank, axis)) for axis in mesh.stage_axes if not axis_of(axis).shards_samples]
        self._collectives_before_s = 0.0
        self.rows: list[tuple[float, ...]] = []

    def start_step(self) -> None:
        """Start a step: exclude the collectives so far."""
        self._collectives_before_s = self._tensor_collectives_s()

    def _tensor_collectives_s(self) -> float:
        """Seconds that this rank has spent in collectives of tensor ranks."""
        return sum(group.total_time_s for group in self._tensor_groups)

    def record_step(self, engine: Engine, step_s: float) -> None:
        """Record the components of the step that has ended."""
        if engine.timeline is None:
            return
        spans = engine.timeline.spans
        busy = sum(span.duration_s for span in spans if span.lane == COMPUTE_LANE)
        tensor = min(busy, self._tensor_collectives_s() - self._collectives_before_s)
        program, gradients, optimizer = (engine.phase_times_s.get(key, 0.0) for key in ("program", "gradients", "optimizer"))
        pipeline = max(0.0, program - busy)
        rest = max(0.0, step_s - program - gradients - optimizer)
        self.rows.append((busy - tensor, tensor, pipeline, gradients, optimizer, rest))

    def gather(self) -> dict[str, float] | None:
        """Return the medians of the busiest rank, the same on every rank; None if nothing was recorded. Every rank calls it."""
        components = component_medians(self.rows)
        busy = round(NANOSECONDS * (components[0] + components[1]))
        most = self.world.all_reduce_max([busy])[0]
        if not most or self.world.device.type != "cpu":
            return None
        longest = self.world.all_reduce_max([round(NANOSECONDS * x) if busy == most else 0 for x in components])
        return {name: value / NANOSECONDS for name, value in zip(NAMES, longest, strict=True)}


def component_medians(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return the median of each component; zeros without rows.

    >>> component_medians([(1, 0, 0, 0, 0, 5), (3, 0, 0, 0, 0, 5), (2, 0, 0, 0, 0, 6)])
    (2.0, 0.0, 0.0, 0.0, 0.0, 5.0)
    """
    return tuple(float(median(column)) for column in zip(*rows, strict=True)) if rows else (0.0,) * len(NAMES)
