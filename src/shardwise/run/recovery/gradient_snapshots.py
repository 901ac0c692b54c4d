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

from shardwise.errors import RunError
from shardwise.plan.ir.step_remainder import writable_buffer
from shardwise.run.recovery.fingerprints import fingerprint_of
from shardwise.world.persistent_memory import GRADIENTS, padded_size
from shardwise.world.world import World

MAX_MICROBATCHES = 1 << 16  # of a step


def encode_mark(step: int, k: int = 0, interval: int = 0) -> int:
    """Encode a mark: gradients of the microbatches below `k` of a step, taken at an interval of so many microbatches.

    >>> decode_mark(encode_mark(7, 12, 4))
    (7, 12, 4)
    """
    return (step * MAX_MICROBATCHES + k) * MAX_MICROBATCHES + interval


def decode_mark(mark: int) -> tuple[int, int, int]:
    """Return (step, k, interval) of a mark."""
    both, every = divmod(mark, MAX_MICROBATCHES)
    return (*divmod(both, MAX_MICROBATCHES), every)


def region_bytes(buffer_sizes: Sequence[int]) -> int:
    """Bytes of memory for a double buffer of these sizes, its flags, which say which buffers are filled, and their digests."""
    return 2 * (padded_size(len(buffer_sizes)) + padded_size(8 * len(buffer_sizes)) + sum(map(padded_size, buffer_sizes)))


class GradientSnapshots:
    """Snapshots of one rank. `buffer_sizes`: bytes, in an order that depends on the plan alone. Raises OSError without enough memory."""

    def __init__(self, world: World, buffer_sizes: Sequence[int]) -> None:
        assert world.recovery is not None
        self._world = world
        persistent = world.recovery.memory
        if persistent.size(GRADIENTS) != (size_bytes := region_bytes(buffer_sizes)):
            self.forget()
        memory, at = torch.frombuffer(persistent.memory(size_bytes, GRADIENTS), dtype=torch.uint8), 0
        self._double_buffer: list[tuple[Tensor, list[Tensor]]] = []
        self._digests: list[Tensor] = []  # sums of 64-bit words of what was written, by half
        for _ in range(2):
            flags, at = memory[at : at + len(buffer_sizes)], at + padded_size(len(buffer_sizes))
            self._digests.append(memory[at : at + 8 * len(buffer_sizes)].view(torch.int64))
            at += padded_size(8 * len(buffer_sizes))
            buffers = []
            for size in buffer_sizes:
                buffers.append(memory[at : at + size])
                at += padded_size(size)
            self._double_buffer.append((flags, buffers))

    def forget(self) -> None:
        """Discard all snapshots."""
        for buffer_index in range(2):
            self._world.recorder.publish_gradient_mark(buffer_index, 0)

    def begin(self, step: int) -> int | None:
        """Return the buffer to write in this step, emptied; None if none is free."""
        recorder = self._world.recorder
        free_index = writable_buffer(recorder.gradient_marks(), recorder.index, encode_mark(step))
        if free_index is not None:
            recorder.publish_gradient_mark(free_index, 0)
            self._double_buffer[free_index][0].zero_()
        return free_index

    @torch.no_grad()
    def write(self, buffer_index: int, index: int, value: Tensor, flag: int = 1) -> None:
        """Copy `value` into a buffer; `flag`, not 0, is stored with it."""
        flags, buffers = self._double_buffer[buffer_index]
        buffers[index][: value.nbytes].view(value.dtype).view(value.shape).copy_(value)
        buffers[index][value.nbytes :].zero_()
        self._digests[buffer_index][index] = fingerprint_of(buffers[index])
        flags[index] = flag

    def commit(self, buffer_index: int, mark: int) -> None:
        """Mark a buffer as complete."""
        self._world.recorder.publish_gradient_mark(buffer_index, mark)

    def read(self, mark: int, index: int) -> tuple[Tensor, int]:
        """Return the bytes of a buffer in the snapshot of a mark, and its flag; 0: empty. Raises RunError if they are not as written."""
        recorder = self._world.recorder
        half = recorder.gradient_marks()[recorder.index].index(mark)
        flags, buffers = self._double_buffer[half]
        if flags[index] and fingerprint_of(buffers[index]) != self._digests[half][index]:
            raise RunError(
                f"the gradients of step {decode_mark(mark)[0] + 1} in the memory of rank {self._world.rank} have another digest than when "
                "they were stored: a bit was flipped; go on from the last checkpoint"
            )
        return buffers[index], int(flags[index])


def agree_on_mark(world: World, step: int) -> int:
    """Return the newest mark of this step that all ranks have, 0 for none; every rank calls it."""
    recorder = world.recorder
    local_marks = (
        recorder.gradient_marks()[recorder.index] if world.recovery is not None and world.recovery.memory.size(GRADIENTS) else (0, 0)
    )
    common = set(local_marks).intersection(*world.all_gather_ints(local_marks))
    return max((mark for mark in common if mark > encode_mark(step)), default=0)
