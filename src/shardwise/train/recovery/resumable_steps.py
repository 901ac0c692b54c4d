"""Resumption of steps that a peer loss interrupts, from gradients of microbatches saved in persistent memory; how often to save them."""

from __future__ import annotations

from collections.abc import Callable

from shardwise.plan.ir.step_remainder import NEVER
from shardwise.run.engine import Engine
from shardwise.train.recovery.anomalies import describe_memory_shortage
from shardwise.world.world import World


class ResumableSteps:
    """The step resumption of one rank; every rank calls its methods in the same order."""

    def __init__(self, world: World, engine: Engine, say: Callable[[str], None]) -> None:
        self._world, self._engine, self._say = world, engine, say
        self._lacks_memory, self._started_step = False, -1

    def preferred_interval(self, is_protected: bool) -> int:
        """Return the microbatches between gradient snapshots that this rank's measurements suggest; NEVER if its state is unprotected."""
        if not is_protected or self._lacks_memory:
            return NEVER
        if "program" in self._engine.phase_times_s:  # a new generation may report the time of the step before its first one
            self._engine.resumption.record_time(self._engine.phase_times_s["program"])
        return self._engine.resumption.preferred_interval()

    def set_interval(self, interval: int) -> None:
        """Set the interval of gradient snapshots to what the slowest rank can do, if they fit in memory."""
        if self._world.recovery is None:
            return
        if interval < NEVER and self._engine.resumption.snapshots is None and not self._lacks_memory:
            words = describe_memory_shortage(self._world, self._engine.resumption.size_bytes)
            self._lacks_memory = bool(words)
            if words:
                self._say(f"gradients between microbatches are not in persistent memory: {words}; if a rank fails, its step is rerun")
        self._engine.resumption.set_interval(NEVER if self._lacks_memory else interval)

    def vote(self, step: int) -> None:
        """Find, in a new generation, the gradient snapshots of the next step that all ranks have."""
        self._engine.resumption.vote(step)

    def start_step(self, step: int) -> None:
        """Start a step; if it is rerun, discard its gradient snapshots, which may be corrupted."""
        if self._world.recovery is None:
            return
        if step == self._started_step:
            self._engine.resumption.forget()
        self._started_step = step
        resumed_step, num_done = self._engine.resumption.resume_point
        if num_done and resumed_step == step:
            self._say(f"step {step + 1} goes on after {num_done} of its microbatches")
