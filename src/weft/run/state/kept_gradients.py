"""A rank's gradients of the first microbatches of a step, in memory that outlives it. In: rooms' sizes, and what is copied into them.
Out: the same, in whoever replaces the rank.

Two sides, each with a mark in the record that all ranks of the launch read: of which step, and of how many microbatches; one store, when
all of it is there. A rank writes a side only where all ranks have the other, or nobody can come to have this one (`plan/finish.writable`):
the newest that all have is never lost. What is in a side follows from step and microbatches alone, whichever attempt wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.plan.finish import writable
from weft.world.kept import GRADIENTS, padded
from weft.world.world import World

MOST_MICROBATCHES = 1 << 16  # of a step


def mark_of(step: int, k: int = 0, every: int = 0) -> int:
    """Of the gradients of microbatches below `k` of a step, which are kept `every` so many.

    >>> parts_of(mark_of(7, 12, 4))
    (7, 12, 4)
    """
    return (step * MOST_MICROBATCHES + k) * MOST_MICROBATCHES + every


def parts_of(mark: int) -> tuple[int, int, int]:
    """(step, k, every) of a mark."""
    both, every = divmod(mark, MOST_MICROBATCHES)
    return (*divmod(both, MOST_MICROBATCHES), every)


def region_bytes(rooms: Sequence[int]) -> int:
    """Bytes of memory for rooms of these sizes, twice, and of what says which of them hold something."""
    return 2 * (padded(len(rooms)) + sum(map(padded, rooms)))


class KeptGradients:
    """Those of one rank. `rooms`: bytes of each, in an order that depends on the plan alone. Raises OSError where there is no memory."""

    def __init__(self, world: World, rooms: Sequence[int]) -> None:
        assert world.survivor is not None
        self._world = world
        outliving = world.survivor.memory
        if outliving.size(GRADIENTS) != (size_bytes := region_bytes(rooms)):
            self.forget()
        memory, at = torch.frombuffer(outliving.memory(size_bytes, GRADIENTS), dtype=torch.uint8), 0
        self._sides: list[tuple[Tensor, list[Tensor]]] = []
        for _ in range(2):
            there, at = memory[at : at + len(rooms)], at + padded(len(rooms))
            side = []
            for size in rooms:
                side.append(memory[at : at + size])
                at += padded(size)
            self._sides.append((there, side))

    def forget(self) -> None:
        """Nothing is kept."""
        for side in range(2):
            self._world.recorder.mark(side, 0)

    def begin(self, step: int) -> int | None:
        """A side to be written in this step, now empty; None: none is free."""
        recorder = self._world.recorder
        side = writable(recorder.marks(), recorder.index, mark_of(step))
        if side is not None:
            recorder.mark(side, 0)
            self._sides[side][0].zero_()
        return side

    @torch.no_grad()
    def put(self, side: int, room: int, value: Tensor, how: int = 1) -> None:
        """Copy `value` into a room; `how`, not 0, is kept with it."""
        there, rooms = self._sides[side]
        rooms[room][: value.nbytes].view(value.dtype).view(value.shape).copy_(value)
        there[room] = how

    def end(self, side: int, mark: int) -> None:
        """All that a mark says is in `side`."""
        self._world.recorder.mark(side, mark)

    def get(self, mark: int, room: int) -> tuple[Tensor, int]:
        """The bytes of a room in the side of a mark, and how they were; 0: there is nothing."""
        recorder = self._world.recorder
        there, rooms = self._sides[recorder.marks()[recorder.index].index(mark)]
        return rooms[room], int(there[room])


def vote(world: World, step: int) -> int:
    """The newest mark of this step that all ranks have, 0 for none; every rank calls it."""
    recorder = world.recorder
    mine = recorder.marks()[recorder.index] if world.survivor is not None and world.survivor.memory.size(GRADIENTS) else (0, 0)
    common = set(mine).intersection(*world.gathered_numbers(mine))
    return max((mark for mark in common if mark > mark_of(step)), default=0)
