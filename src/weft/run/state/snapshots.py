"""A rank's state after the last step, in memory that outlives it. In: tensors of the state. Out: the same tensors, in whoever replaces it.

Two sides take turns: the state is written beside the one before it, and a header, one store, then says of which step it is. A side is
written only when all ranks have finished the step whose state the other side holds (a step ends with a sum over all), so the newest step
that all ranks have is the last one finished, wherever one of them died. Processors that reorder stores would need a fence before a header.

Of what several ranks hold alike each keeps a part, where all can read all: replicas together keep one state, not each its own. Weights are
left out of that: replicas' fingerprints tell who has others than it had, which two ranks know only if each has kept its own.

Not modelled: updates that come late (`staleness`), whose gradients wait outside of these tensors.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.run.state.fingerprints import fingerprint
from weft.world.kept import ALIGNED, Kept, copy, padded
from weft.world.world import World

NOTE_BYTES = 1024  # of what a step told, as JSON, beside its state
_LENGTH = struct.Struct("<I")
_WHERE = struct.Struct("<QQQ")  # whose parts, and where they begin on either side


class State(NamedTuple):
    """What a rank holds: the memory itself, in one order for a plan. `changed` by steps; what they leave `fixed`; and, by its number in
    `changed`, the ranks that hold a tensor alike, in order, of which each keeps a part."""

    changed: Sequence[Tensor]
    fixed: Sequence[Tensor] = ()
    shared_by: Mapping[int, tuple[int, ...]] = {}


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


def vote(world: World) -> int | None:
    """The step that all ranks restore; every rank calls it. None where there is none."""
    said = world.gathered_numbers([0 if step is None else step + 1 for step in _steps(world)])
    return newest_common([[n - 1 if n else None for n in sides] for sides in said])


def _steps(world: World) -> tuple[int | None, int | None]:
    return world.recorder.snapshots()[world.recorder.index]


def kept_as(state: State, memory: Kept) -> State:
    """A state as `memory` keeps it: where others cannot read that, each rank keeps all that it holds."""
    return state if memory.outlives else state._replace(shared_by={})


def room_bytes(state: State) -> int:
    """Bytes of memory for a state, twice, and of what does not change."""
    alone = (x.nbytes for number, x in enumerate(state.changed) if number not in state.shared_by)
    parts = (_part(state.changed[number], 0, len(ranks)).nbytes for number, ranks in state.shared_by.items())  # no other is larger
    table = (len(set(state.shared_by.values())) + 1) * ALIGNED
    return table + sum(padded(x.nbytes) for x in state.fixed) + 2 * (NOTE_BYTES + sum(map(padded, (*alone, *parts))))


class Snapshots:
    """The snapshots of one rank. Where others cannot read its memory, it keeps all that it holds.

    Raises OSError where there is no memory for them.
    """

    def __init__(self, world: World, state: State) -> None:
        assert world.survivor is not None
        self._world, self._held = world, world.survivor.memory
        self.pinned: int | None = None  # the state after so many steps stays
        self.adds, self.sums = False, dict[int, int]()  # whether fingerprints are taken; of the last state, modulo 2^64, by a tensor's id
        self._state = state = kept_as(state, self._held)
        if self._held.size() != (size := room_bytes(state)):
            self.forget()
        self._memory = _Memory(self._held.memory(size))
        sets = sorted(set(state.shared_by.values()))
        # By set of ranks, where its parts begin on either side; at the start, for the others to find.
        starts: dict[tuple[int, ...], list[int]] = {ranks: [] for ranks in sets}
        self._memory.take((len(sets) + 1) * ALIGNED)
        self._fixed = [(self._memory.room(x), x) for x in state.fixed]
        self._sides: list[list[_Room]] = []
        self._notes: list[memoryview] = []
        for _ in range(2):
            self._notes.append(self._memory.take(NOTE_BYTES))
            side = [_Room(n, 0, self._memory.room(x), x) for n, x in enumerate(state.changed) if n not in state.shared_by]
            for ranks in sets:
                starts[ranks].append(self._memory.at)
                side += self._memory.parts(self._shared(ranks), ranks.index(world.rank), len(ranks))
            self._sides.append(side)
        for place, (ranks, at) in enumerate(starts.items()):
            self._memory.write(place * ALIGNED, _WHERE.pack(_name(ranks), *at))

    def _shared(self, ranks: tuple[int, ...]) -> list[tuple[int, Tensor]]:
        """What these ranks hold alike, by number."""
        return [(number, self._state.changed[number]) for number, those in sorted(self._state.shared_by.items()) if those == ranks]

    @property
    def steps(self) -> tuple[int | None, int | None]:
        """What the two sides hold the state after; None: nothing."""
        return _steps(self._world)

    def forget(self) -> None:
        """There is no snapshot."""
        for side in range(2):
            self._world.recorder.snapshot(side, None)

    def has(self, step: int) -> bool:
        """Whether the state after `step` steps is there."""
        return step in self.steps

    def changed(self, step: int, others: bool = False) -> tuple[int, int] | None:
        """(tensor, element) of the first that is not what it was after `step` steps, bit for bit; None: all are that this rank keeps, and
        with `others` what they keep of it. What does not change is counted behind what does."""
        fixed = (_Room(len(self._state.changed) + n, 0, room, x) for n, (room, x) in enumerate(self._fixed))
        rooms = [*self._sides[self.steps.index(step)], *fixed, *(self._of_others(step) if others else ())]
        for room in sorted(rooms, key=lambda one: (one.number, one.start)):
            now = room.of.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            other = (room.room.reshape(-1).view(torch.uint8) != now).nonzero()
            if other.numel():
                return room.number, room.start + int(other[0]) // room.of.element_size()
        return None

    @torch.no_grad()
    def take(self, step: int, note: Mapping[str, Any]) -> None:
        """Keep the state after `step` steps, and what the last of them told."""
        a, b = self.steps
        if (a, b) == (None, None):
            for room, x in self._fixed:
                room.copy_(x)
        # The step before may be the newest that all have, also where this rank had one more before a loss.
        side = 1 if a == step - 1 or (a is not None and b != step - 1 and (b is None or b < a)) else 0
        if self.pinned is not None and self.steps[side] == self.pinned:
            side = 1 - side
        self._world.recorder.snapshot(side, None)
        self.sums.clear()
        for one in self._sides[side]:
            added = copy(one.room, one.of)
            if added is not None and self.adds:
                x = self._state.changed[one.number]
                self.sums[id(x)] = added + sum(int(fingerprint(rest)) for rest in _around(x, one))
        data = json.dumps(note).encode()
        if len(data) > NOTE_BYTES - _LENGTH.size:
            raise ValueError(f"a note of {len(data)} bytes; there are {NOTE_BYTES - _LENGTH.size:,}")
        self._notes[side][: _LENGTH.size + len(data)] = _LENGTH.pack(len(data)) + data
        self._world.recorder.snapshot(side, step)

    @torch.no_grad()
    def restore(self, step: int) -> dict[str, Any]:
        """Give the tensors their values after `step` steps; returns what that step told. Every rank calls it, none of which takes the next
        but one before all have: a step ends with a sum."""
        side = self.steps.index(step)
        for room, x in self._fixed:
            x.copy_(room)
        for one in (*self._sides[side], *self._of_others(step)):
            one.of.copy_(one.room)
        note = self._notes[side]
        (length,) = _LENGTH.unpack_from(note)
        return json.loads(bytes(note[_LENGTH.size : _LENGTH.size + length]))  # type: ignore[no-any-return]

    def _of_others(self, step: int) -> Iterator[_Room]:
        """What other ranks keep of what this one holds, too."""
        others = {rank for ranks in self._state.shared_by.values() for rank in ranks} - {self._world.rank}
        for rank in sorted(others):
            memory, side = _Memory(self._held.of(rank)), self._world.recorder.snapshots()[rank].index(step)
            for ranks in sorted({those for those in self._state.shared_by.values() if rank in those}):
                memory.at = memory.start_of(_name(ranks), side)
                yield from memory.parts(self._shared(ranks), ranks.index(rank), len(ranks))


class _Room(NamedTuple):
    """Where a tensor, or from its element `start` on a part `of` it, is kept."""

    number: int
    start: int
    room: Tensor
    of: Tensor


class _Memory:
    """A rank's memory, given out from its start on; `at`: what comes next."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._bytes, self._tensor, self.at = memoryview(mapping), torch.frombuffer(mapping, dtype=torch.uint8), 0

    def take(self, size: int) -> memoryview:
        start, self.at = self.at, self.at + padded(size)
        return self._bytes[start : start + size]

    def room(self, x: Tensor) -> Tensor:
        """For a tensor like this one."""
        start, self.at = self.at, self.at + padded(x.nbytes)
        return self._tensor[start : start + x.nbytes].view(x.dtype).view(x.shape)

    def parts(self, tensors: Sequence[tuple[int, Tensor]], index: int, count: int) -> Iterator[_Room]:
        """For the parts that the one at `index` of `count` ranks keeps."""
        for number, x in tensors:
            start, part = self.at, _part(x, index, count)
            yield _Room(number, int(part.storage_offset() - x.storage_offset()), self.room(part), part)
            self.at = start + padded(_part(x, 0, count).nbytes)

    def write(self, at: int, data: bytes) -> None:
        self._bytes[at : at + len(data)] = data

    def start_of(self, name: int, side: int) -> int:
        """Where the parts of a set of ranks begin."""
        at = 0
        while (entry := _WHERE.unpack_from(self._bytes, at))[0] != name:
            assert entry[0], "ranks that hold a tensor alike say so alike"
            at += ALIGNED
        return int(entry[1 + side])


def _part(x: Tensor, index: int, count: int) -> Tensor:
    """What one of `count` ranks keeps of a tensor that all of them hold."""
    aligned = max(1, ALIGNED // x.element_size())
    size = -(-x.numel() // (count * aligned)) * aligned
    return x.detach().view(-1)[index * size : (index + 1) * size]


def _around(x: Tensor, one: _Room) -> list[Tensor]:
    """What is left of a tensor but for a part of it."""
    flat, end = x.detach().view(-1) if one.of.numel() < x.numel() else x.new_empty(0), one.start + one.of.numel()
    return [rest for rest in (flat[: one.start], flat[end:]) if rest.numel()]


def _name(ranks: tuple[int, ...]) -> int:
    return 1 + int.from_bytes(hashlib.sha256(repr(ranks).encode()).digest()[:7], "little")
