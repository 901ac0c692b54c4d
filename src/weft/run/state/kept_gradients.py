"""Snapshots of a rank's accumulated gradients in persistent memory, for the rank that replaces it. In: buffer sizes, and gradients.
Out: the same gradients, in the replacement.

A double buffer, each half with a mark in the record that all ranks of the launch read: its step and number of microbatches, written in one
store when complete. A rank overwrites a half only if all ranks have the other, or none can complete this one (`plan/finish.writable`), so
that the newest common snapshot is never lost. Contents depend on step and microbatches alone, whichever attempt wrote them.
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
    """Encode a mark: gradients of the microbatches below `k` of a step, taken at an interval of so many microbatches.

    >>> parts_of(mark_of(7, 12, 4))
    (7, 12, 4)
    """
    return (step * MOST_MICROBATCHES + k) * MOST_MICROBATCHES + every


def parts_of(mark: int) -> tuple[int, int, int]:
    """Return (step, k, interval) of a mark."""
    both, every = divmod(mark, MOST_MICROBATCHES)
    return (*divmod(both, MOST_MICROBATCHES), every)


def region_bytes(rooms: Sequence[int]) -> int:
    """Bytes of memory for a double buffer of these sizes and its flags, which say which buffers are filled."""
    return 2 * (padded(len(rooms)) + sum(map(padded, rooms)))


class KeptGradients:
    """Snapshots of one rank. `buffer_sizes`: bytes, in an order that depends on the plan alone. Raises OSError without enough memory."""

    def __init__(self, world: World, rooms: Sequence[int]) -> None:
        assert world.survivor is not None
        self._world = world
        persistent = world.survivor.memory
        if persistent.size(GRADIENTS) != (size_bytes := region_bytes(rooms)):
            self.forget()
        memory, at = torch.frombuffer(persistent.memory(size_bytes, GRADIENTS), dtype=torch.uint8), 0
        self._sides: list[tuple[Tensor, list[Tensor]]] = []
        for _ in range(2):
            flags, at = memory[at : at + len(rooms)], at + padded(len(rooms))
            buffers = []
            for size in rooms:
                buffers.append(memory[at : at + size])
                at += padded(size)
            self._sides.append((flags, buffers))

    def forget(self) -> None:
        """Discard all snapshots."""
        for buffer_index in range(2):
            self._world.recorder.mark(buffer_index, 0)

    def begin(self, step: int) -> int | None:
        """Return the buffer to write in this step, emptied; None if none is free."""
        recorder = self._world.recorder
        free_index = writable(recorder.marks(), recorder.index, mark_of(step))
        if free_index is not None:
            recorder.mark(free_index, 0)
            self._sides[free_index][0].zero_()
        return free_index

    @torch.no_grad()
    def put(self, side: int, room: int, value: Tensor, how: int = 1) -> None:
        """Copy `value` into a buffer; `flag`, not 0, is stored with it."""
        flags, buffers = self._sides[side]
        buffers[room][: value.nbytes].view(value.dtype).view(value.shape).copy_(value)
        flags[room] = how

    def end(self, side: int, mark: int) -> None:
        """Mark a buffer as complete."""
        self._world.recorder.mark(side, mark)

    def get(self, mark: int, room: int) -> tuple[Tensor, int]:
        """Return the bytes of a buffer in the snapshot of a mark, and its flag; 0: empty."""
        recorder = self._world.recorder
        flags, buffers = self._sides[recorder.marks()[recorder.index].index(mark)]
        return buffers[room], int(flags[room])


def vote(world: World, step: int) -> int:
    """Return the newest mark of this step that all ranks have, 0 for none; every rank calls it."""
    recorder = world.recorder
    local_marks = recorder.marks()[recorder.index] if world.survivor is not None and world.survivor.memory.size(GRADIENTS) else (0, 0)
    common = set(local_marks).intersection(*world.gathered_numbers(local_marks))
    return max((mark for mark in common if mark > mark_of(step)), default=0)
