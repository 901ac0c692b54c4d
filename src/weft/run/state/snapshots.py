"""A rank's state after the last step, in memory that outlives it. In: tensors of the state. Out: the same tensors, in whoever replaces it.

Two sides take turns: the state is written beside the one before it, and a header, one store, then says of which step it is. A side is
written only when all ranks have finished the step whose state the other side holds (a step ends with a sum over all), so the newest step
that all ranks have is the last one finished, wherever one of them died. Processors that reorder stores would need a fence before a header.

Not modelled: updates that come late (`staleness`), whose gradients wait outside of these tensors.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.world.world import World

ALIGNED = 64
NOTE_BYTES = 1024  # of what a step told, as JSON, beside its state
_LENGTH = struct.Struct("<I")


def all_common(sides: Sequence[Sequence[int | None]]) -> list[int]:
    """The steps of which every rank has a snapshot, the newest first.

    >>> all_common([(4, 3), (3, 4)]), all_common([(1, None), (None, None)]), all_common([])
    ([4, 3], [], [])
    """
    common = set[int | None].intersection(*(set(pair) for pair in sides)) if sides else set[int | None]()
    return sorted((step for step in common if step is not None), reverse=True)


def newest_common(sides: Sequence[Sequence[int | None]]) -> int | None:
    """The newest step of which every rank has a snapshot; None where there is none.

    >>> newest_common([(4, 3), (4, 5)]), newest_common([(4, 3), (None, 3)]), newest_common([(1, None), (None, None)])
    (4, 3, None)
    """
    return next(iter(all_common(sides)), None)


def room_bytes(tensors: Sequence[Tensor], fixed: Sequence[Tensor] = ()) -> int:
    """Bytes of memory for the state of `tensors`, twice, and of what does not change."""
    return sum(map(_padded, fixed)) + 2 * (NOTE_BYTES + sum(map(_padded, tensors)))


class Snapshots:
    """The snapshots of one rank. `tensors`: its state, in an order that depends on the plan alone; `fixed`: of it what never changes.

    Raises OSError where there is no memory for them.
    """

    def __init__(self, world: World, tensors: Sequence[Tensor], fixed: Sequence[Tensor] = ()) -> None:
        assert world.survivor is not None
        self._world, self._tensors, self._fixed = world, list(tensors), list(fixed)
        self.pinned: int | None = None  # the state after so many steps stays
        mapping, was_there = world.survivor.memory.memory(room_bytes(tensors, fixed))
        memory = torch.frombuffer(mapping, dtype=torch.uint8)
        at = 0

        def room(x: Tensor) -> Tensor:
            nonlocal at
            start, at = at, at + _padded(x)
            return memory[start : start + x.nbytes].view(x.dtype).view(x.shape)

        self._fixed_rooms = [room(x) for x in self._fixed]
        self._sides, self._notes = [], []
        for _ in range(2):
            self._sides.append([room(x) for x in self._tensors])
            self._notes.append(memoryview(mapping)[at : at + NOTE_BYTES])
            at += NOTE_BYTES
        if not was_there:
            self.forget()

    @property
    def steps(self) -> tuple[int | None, int | None]:
        """What the two sides hold the state after; None: nothing."""
        recorder = self._world.recorder
        return recorder.snapshots()[recorder.index]

    def forget(self) -> None:
        """There is no snapshot."""
        for side in range(2):
            self._world.recorder.snapshot(side, None)

    def vote(self) -> int | None:
        """The step that all ranks restore; every rank calls it."""
        world = self._world
        mine = [0 if step is None else step + 1 for step in self.steps]
        said = world.maximum([n for rank in range(world.num_ranks) for n in (mine if rank == world.rank else (0, 0))])
        return newest_common([(a - 1 if a else None, b - 1 if b else None) for a, b in zip(said[::2], said[1::2], strict=True)])

    def has(self, step: int) -> bool:
        """Whether the state after `step` steps is there."""
        return step in self.steps

    def changed(self, step: int) -> tuple[int, int] | None:
        """(tensor, element) of the first that is not what it was after `step` steps, bit for bit; None: all are. What does not change is
        counted behind what does."""
        rooms = [*self._sides[self.steps.index(step)], *self._fixed_rooms]
        for number, (room, x) in enumerate(zip(rooms, [*self._tensors, *self._fixed], strict=True)):
            now = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            other = (room.reshape(-1).view(torch.uint8) != now).nonzero()
            if other.numel():
                return number, int(other[0]) // x.element_size()
        return None

    @torch.no_grad()
    def take(self, step: int, note: Mapping[str, Any]) -> None:
        """Keep the state after `step` steps, and what the last of them told."""
        a, b = self.steps
        if (a, b) == (None, None):
            for room, x in zip(self._fixed_rooms, self._fixed, strict=True):
                room.copy_(x)
        side = 0 if a is None or (b is not None and a < b) else 1
        if self.pinned is not None and self.steps[side] == self.pinned:
            side = 1 - side
        self._world.recorder.snapshot(side, None)
        for room, x in zip(self._sides[side], self._tensors, strict=True):
            room.copy_(x)
        data = json.dumps(note).encode()
        if len(data) > NOTE_BYTES - _LENGTH.size:
            raise ValueError(f"a note of {len(data)} bytes; there are {NOTE_BYTES - _LENGTH.size:,}")
        self._notes[side][: _LENGTH.size + len(data)] = _LENGTH.pack(len(data)) + data
        self._world.recorder.snapshot(side, step)

    @torch.no_grad()
    def restore(self, step: int) -> dict[str, Any]:
        """Give the tensors their values after `step` steps; returns what that step told."""
        side = self.steps.index(step)
        for room, x in zip((*self._fixed_rooms, *self._sides[side]), (*self._fixed, *self._tensors), strict=True):
            x.copy_(room)
        note = self._notes[side]
        (length,) = _LENGTH.unpack_from(note)
        return json.loads(bytes(note[_LENGTH.size : _LENGTH.size + length]))  # type: ignore[no-any-return]


def _padded(x: Tensor) -> int:
    return -(-x.nbytes // ALIGNED) * ALIGNED
