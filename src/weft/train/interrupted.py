"""Steps that a lost rank interrupts: gone on with where ranks have kept gradients of their microbatches. In: an engine. Out: what it keeps.
"""

from __future__ import annotations

from collections.abc import Callable

from weft.plan.finish import NEVER
from weft.run.engine import Engine
from weft.train.doubts import short_of
from weft.world.world import World


class Interrupted:
    """Of one rank; every rank calls its methods in the same order."""

    def __init__(self, world: World, engine: Engine, say: Callable[[str], None]) -> None:
        self._world, self._engine, self._say = world, engine, say
        self._no_room, self._begun = False, -1

    def wants(self, protected: bool) -> int:
        """Microbatches between two copies of the gradients, by what this rank has measured. `protected`: whether its state is kept."""
        if not protected or self._no_room:
            return NEVER
        if "program" in self._engine.seconds:  # a new generation may tell of the step before its first one
            self._engine.finishing.timed(self._engine.seconds["program"])
        return self._engine.finishing.wants()

    def keep(self, every: int) -> None:
        """Keep them as often as the slowest rank can, where there is room for them."""
        if self._world.survivor is None:
            return
        if every < NEVER and self._engine.finishing.memory is None and not self._no_room:
            words = short_of(self._world, self._engine.finishing.size_bytes)
            self._no_room = bool(words)
            if words:
                self._say(f"gradients between microbatches are not kept in memory: {words}; where a rank is lost its step is made again")
        self._engine.finishing.keep(NEVER if self._no_room else every)

    def vote(self, step: int) -> None:
        """In a new generation: what all ranks have kept of the step that follows."""
        self._engine.finishing.vote(step)

    def begin(self, step: int) -> None:
        """Before a step is made; where it is made again, what was kept of it is in doubt."""
        if self._world.survivor is None:
            return
        if step == self._begun:
            self._engine.finishing.forget()
        self._begun = step
        of, k = self._engine.finishing.resumes
        if k and of == step:
            self._say(f"step {step + 1} goes on after {k} of its microbatches")
