"""Resumption of steps that a peer loss interrupts, from gradients of microbatches saved in persistent memory; how often to save them."""

from __future__ import annotations

from collections.abc import Callable

from weft.plan.finish import NEVER
from weft.run.engine import Engine
from weft.train.doubts import short_of
from weft.world.world import World


class Interrupted:
    """The step resumption of one rank; every rank calls its methods in the same order."""

    def __init__(self, world: World, engine: Engine, say: Callable[[str], None]) -> None:
        self._world, self._engine, self._say = world, engine, say
        self._no_room, self._begun = False, -1

    def wants(self, protected: bool) -> int:
        """Return the microbatches between gradient snapshots that this rank's measurements suggest; NEVER if its state is unprotected."""
        if not protected or self._no_room:
            return NEVER
        if "program" in self._engine.seconds:  # a new generation may report the time of the step before its first one
            self._engine.finishing.timed(self._engine.seconds["program"])
        return self._engine.finishing.wants()

    def keep(self, every: int) -> None:
        """Set the interval of gradient snapshots to what the slowest rank can do, if they fit in memory."""
        if self._world.survivor is None:
            return
        if every < NEVER and self._engine.finishing.memory is None and not self._no_room:
            words = short_of(self._world, self._engine.finishing.size_bytes)
            self._no_room = bool(words)
            if words:
                self._say(f"gradients between microbatches are not in persistent memory: {words}; if a rank fails, its step is rerun")
        self._engine.finishing.keep(NEVER if self._no_room else every)

    def vote(self, step: int) -> None:
        """Find, in a new generation, the gradient snapshots of the next step that all ranks have."""
        self._engine.finishing.vote(step)

    def begin(self, step: int) -> None:
        """Start a step; if it is rerun, discard its gradient snapshots, which may be corrupted."""
        if self._world.survivor is None:
            return
        if step == self._begun:
            self._engine.finishing.forget()
        self._begun = step
        resumed_step, num_done = self._engine.finishing.resumes
        if num_done and resumed_step == step:
            self._say(f"step {step + 1} goes on after {num_done} of its microbatches")
