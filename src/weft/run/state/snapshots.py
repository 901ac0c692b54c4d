"""In-memory snapshots of a rank's state in persistent memory, restored by the rank that replaces it after a failure.

A double buffer: the state is written next to the previous one, then a header says, in one store, of which step it is. A half is overwritten
only when all ranks have completed the step in the other half (a step ends with an all-reduce over all ranks), so the newest common step is
the last completed one, wherever a rank died. CPUs that reorder stores would need a memory fence before the header.

Replicated state is stored as one shard per replica if ranks can read each other's memory: replicas together store one copy. Weights are
excepted: replicas compare fingerprints to find a corrupted one, which of two ranks is known only if each has stored its own.

Not modelled: asynchronous updates (`staleness`), whose pending gradients lie outside of these tensors.
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

NOTE_BYTES = 1024  # of a step's result as JSON, next to its state
_LENGTH = struct.Struct("<I")
_WHERE = struct.Struct("<QQQ")  # rank set id, and the offsets of its shards in both halves


class State(NamedTuple):
    """Tensors of a rank's state (not copies), in an order that depends on the plan alone. `mutable`: changed by steps; `constant`: not;
    `replicated_on`: by index in `mutable`, the ranks with the same tensor, in order, each of which stores a shard of it."""

    changed: Sequence[Tensor]
    fixed: Sequence[Tensor] = ()
    shared_by: Mapping[int, tuple[int, ...]] = {}


def all_common(sides: Sequence[Sequence[int | None]]) -> list[int]:
    """Return the steps of which every rank has a snapshot, newest first.

    >>> all_common([(4, 3), (3, 4)]), all_common([(1, None), (None, None)]), all_common([])
    ([4, 3], [], [])
    """
    common = set[int | None].intersection(*(set(pair) for pair in sides)) if sides else set[int | None]()
    return sorted((step for step in common if step is not None), reverse=True)


def newest_common(sides: Sequence[Sequence[int | None]]) -> int | None:
    """Return the newest step of which every rank has a snapshot; None if there is none.

    >>> newest_common([(4, 3), (4, 5)]), newest_common([(4, 3), (None, 3)]), newest_common([(1, None), (None, None)])
    (4, 3, None)
    """
    return next(iter(all_common(sides)), None)


def vote(world: World) -> int | None:
    """Agree on the step that all ranks restore; every rank calls it. None if there is none."""
    steps_by_rank = world.gathered_numbers([0 if step is None else step + 1 for step in _steps(world)])
    return newest_common([[n - 1 if n else None for n in sides] for sides in steps_by_rank])


def _steps(world: World) -> tuple[int | None, int | None]:
    return world.recorder.snapshots()[world.recorder.index]


def kept_as(state: State, memory: Kept) -> State:
    """Return the state as stored in `memory`: without sharding of replicated tensors if other ranks cannot read it."""
    return state if memory.outlives else state._replace(shared_by={})


def room_bytes(state: State) -> int:
    """Bytes of memory for a double buffer of the mutable state, and for the constant state."""
    unsharded = (x.nbytes for number, x in enumerate(state.changed) if number not in state.shared_by)
    shards = (_part(state.changed[number], 0, len(ranks)).nbytes for number, ranks in state.shared_by.items())  # the largest shard
    table = (len(set(state.shared_by.values())) + 1) * ALIGNED
    return table + sum(padded(x.nbytes) for x in state.fixed) + 2 * (NOTE_BYTES + sum(map(padded, (*unsharded, *shards))))


class Snapshots:
    """Snapshots of one rank. Replicated tensors are sharded only if other ranks can read its memory.

    Raises OSError without enough memory.
    """

    def __init__(self, world: World, state: State) -> None:
        assert world.survivor is not None
        self._world, self._held = world, world.survivor.memory
        self.pinned: int | None = None  # the snapshot of this step is not overwritten
        self.adds, self.sums = False, dict[int, int]()  # of the last state, modulo 2^64, by tensor id
        self._state = state = kept_as(state, self._held)
        if self._held.size() != (size := room_bytes(state)):
            self.forget()
        self._memory = _Memory(self._held.memory(size))
        sets = sorted(set(state.shared_by.values()))
        # Offsets of each rank set's shards in both halves; stored at the start, for other ranks to find.
        offsets: dict[tuple[int, ...], list[int]] = {ranks: [] for ranks in sets}
        self._memory.take((len(sets) + 1) * ALIGNED)
        self._fixed = [(self._memory.room(x), x) for x in state.fixed]
        self._sides: list[list[_Room]] = []
        self._notes: list[memoryview] = []
        for _ in range(2):
            self._notes.append(self._memory.take(NOTE_BYTES))
            buffers = [_Room(n, 0, self._memory.room(x), x) for n, x in enumerate(state.changed) if n not in state.shared_by]
            for ranks in sets:
                offsets[ranks].append(self._memory.at)
                buffers += self._memory.parts(self._shared(ranks), ranks.index(world.rank), len(ranks))
            self._sides.append(buffers)
        for entry, (ranks, entry_offsets) in enumerate(offsets.items()):
            self._memory.write(entry * ALIGNED, _WHERE.pack(_name(ranks), *entry_offsets))

    def _shared(self, ranks: tuple[int, ...]) -> list[tuple[int, Tensor]]:
        """Return the tensors replicated on these ranks, with their indices."""
        return [(number, self._state.changed[number]) for number, replicas in sorted(self._state.shared_by.items()) if replicas == ranks]

    @property
    def steps(self) -> tuple[int | None, int | None]:
        """Steps of the two halves; None: empty."""
        return _steps(self._world)

    def forget(self) -> None:
        """Discard both snapshots."""
        for side in range(2):
            self._world.recorder.snapshot(side, None)

    def has(self, step: int) -> bool:
        """Return whether there is a snapshot after `step` steps."""
        return step in self.steps

    def changed(self, step: int, others: bool = False) -> tuple[int, int] | None:
        """Return (tensor, element) of the first bitwise difference from the snapshot after `step` steps; None if there is none. Compares
        what this rank stores, and with `includes_peers` what its replicas store. Constant tensors are numbered after mutable ones."""
        constant = (_Room(len(self._state.changed) + n, 0, buffer, x) for n, (buffer, x) in enumerate(self._fixed))
        buffers = [*self._sides[self.steps.index(step)], *constant, *(self._of_others(step) if others else ())]
        for buffer in sorted(buffers, key=lambda entry: (entry.number, entry.start)):
            current = buffer.of.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            other = (buffer.room.reshape(-1).view(torch.uint8) != current).nonzero()
            if other.numel():
                return buffer.number, buffer.start + int(other[0]) // buffer.of.element_size()
        return None

    @torch.no_grad()
    def take(self, step: int, note: Mapping[str, Any]) -> None:
        """Store the state after `step` steps, and a note on the last of them."""
        a, b = self.steps
        if (a, b) == (None, None):
            for buffer, x in self._fixed:
                buffer.copy_(x)
        # The previous step may be the newest common one, even if this rank had a later one before a peer failed.
        target = 1 if a == step - 1 or (a is not None and b != step - 1 and (b is None or b < a)) else 0
        if self.pinned is not None and self.steps[target] == self.pinned:
            target = 1 - target
        self._world.recorder.snapshot(target, None)
        self.sums.clear()
        for entry in self._sides[target]:
            words_sum = copy(entry.room, entry.of)
            if words_sum is not None and self.adds:
                x = self._state.changed[entry.number]
                self.sums[id(x)] = words_sum + sum(int(fingerprint(rest)) for rest in _around(x, entry))
        data = json.dumps(note).encode()
        if len(data) > NOTE_BYTES - _LENGTH.size:
            raise ValueError(f"a note of {len(data)} bytes; there are {NOTE_BYTES - _LENGTH.size:,}")
        self._notes[target][: _LENGTH.size + len(data)] = _LENGTH.pack(len(data)) + data
        self._world.recorder.snapshot(target, step)

    @torch.no_grad()
    def restore(self, step: int) -> dict[str, Any]:
        """Restore the tensors to their values after `step` steps; returns the note. Every rank calls it; since a step ends with an
        all-reduce, no rank takes the next but one snapshot before all have restored."""
        source = self.steps.index(step)
        for buffer, x in self._fixed:
            x.copy_(buffer)
        for entry in (*self._sides[source], *self._of_others(step)):
            entry.of.copy_(entry.room)
        note = self._notes[source]
        (length,) = _LENGTH.unpack_from(note)
        return json.loads(bytes(note[_LENGTH.size : _LENGTH.size + length]))  # type: ignore[no-any-return]

    def _of_others(self, step: int) -> Iterator[_Room]:
        """Return the buffers in which replicas store shards of this rank's tensors."""
        peers = {rank for ranks in self._state.shared_by.values() for rank in ranks} - {self._world.rank}
        for rank in sorted(peers):
            memory, half = _Memory(self._held.of(rank)), self._world.recorder.snapshots()[rank].index(step)
            for ranks in sorted({replicas for replicas in self._state.shared_by.values() if rank in replicas}):
                memory.at = memory.start_of(_name(ranks), half)
                yield from memory.parts(self._shared(ranks), ranks.index(rank), len(ranks))


class _Room(NamedTuple):
    """Buffer in which a tensor, or a shard of it from element `start` on, is stored."""

    number: int
    start: int
    room: Tensor
    of: Tensor


class _Memory:
    """Allocator of buffers in a rank's memory, in order; `offset`: of the next one."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._bytes, self._tensor, self.at = memoryview(mapping), torch.frombuffer(mapping, dtype=torch.uint8), 0

    def take(self, size: int) -> memoryview:
        start, self.at = self.at, self.at + padded(size)
        return self._bytes[start : start + size]

    def room(self, x: Tensor) -> Tensor:
        """Allocate a buffer like a tensor."""
        start, self.at = self.at, self.at + padded(x.nbytes)
        return self._tensor[start : start + x.nbytes].view(x.dtype).view(x.shape)

    def parts(self, tensors: Sequence[tuple[int, Tensor]], index: int, count: int) -> Iterator[_Room]:
        """Allocate buffers for the shards that rank `index` of `count` stores."""
        for number, x in tensors:
            start, shard = self.at, _part(x, index, count)
            yield _Room(number, int(shard.storage_offset() - x.storage_offset()), self.room(shard), shard)
            self.at = start + padded(_part(x, 0, count).nbytes)

    def write(self, at: int, data: bytes) -> None:
        self._bytes[at : at + len(data)] = data

    def start_of(self, name: int, side: int) -> int:
        """Return the offset of a rank set's shards."""
        at = 0
        while (entry := _WHERE.unpack_from(self._bytes, at))[0] != name:
            assert entry[0], "replicas agree on which tensors are replicated"
            at += ALIGNED
        return int(entry[1 + side])


def _part(x: Tensor, index: int, count: int) -> Tensor:
    """Return the shard that one of `count` replicas stores of a tensor."""
    aligned = max(1, ALIGNED // x.element_size())
    size = -(-x.numel() // (count * aligned)) * aligned
    return x.detach().view(-1)[index * size : (index + 1) * size]


def _around(x: Tensor, one: _Room) -> list[Tensor]:
    """Return the rest of a tensor outside of a shard."""
    flat, end = x.detach().view(-1) if one.of.numel() < x.numel() else x.new_empty(0), one.start + one.of.numel()
    return [rest for rest in (flat[: one.start], flat[end:]) if rest.numel()]


def _name(ranks: tuple[int, ...]) -> int:
    return 1 + int.from_bytes(hashlib.sha256(repr(ranks).encode()).digest()[:7], "little")
