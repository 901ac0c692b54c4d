"""In-memory snapshots of a rank's state in persistent memory, restored by the rank that replaces it after a failure.

A double buffer: the state is written next to the previous one, then a header says, in one store, of which step it is. A half is overwritten
only when all ranks have completed the step in the other half (a step ends with an all-reduce over all ranks), so the newest common step is
the last completed one, wherever a rank died. CPUs that reorder stores would need a memory fence before the header.

The header also has digests of the half and of the constant state, the sums of their 64-bit words, which are compared before a restore.

Replicated state is stored as one shard per replica if ranks can read each other's memory: replicas together store one copy. Weights are
excepted: replicas compare fingerprints to find a corrupted one, which of two ranks is known only if each has stored its own.

On a GPU the state crosses the host's link: memory is pinned, copies have a stream of their own, and a snapshot is taken only so often that
it costs at most `MAX_TIME_SHARE` of the time. A recovery then repeats the steps since the last one.

Not modelled: asynchronous updates (`staleness`), whose pending gradients lie outside of these tensors.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.errors import RunError
from shardwise.run.recovery.fingerprints import fingerprint_of
from shardwise.world.persistent_memory import ALIGNMENT_BYTES, PersistentMemory, copy_past_caches, padded_size
from shardwise.world.world import World

MAX_TIME_SHARE = 0.02  # largest share of the time that copying may take
MAX_INTERVAL_S = 3600.0  # if copies would be farther apart there are none: checkpoints are written more often
MICROSECONDS = 1e-6
_WORDS = 1 << 64
NOTE_BYTES = 1024  # of a step's result as JSON, next to its state
_HEADER = struct.Struct("<IQQ")  # bytes of the note; digests of this half with its note, and of the constant state
_RANGES_ENTRY = struct.Struct("<QQQ")  # rank set id, and the offsets of its shards in both halves


class RankState(NamedTuple):
    """Tensors of a rank's state (not copies), in an order that depends on the plan alone. `mutable`: changed by steps; `constant`: not;
    `replicated_on`: by index in `mutable`, the ranks with the same tensor, in order, each of which stores a shard of it."""

    mutable: Sequence[Tensor]
    constant: Sequence[Tensor] = ()
    replicated_on: Mapping[int, tuple[int, ...]] = {}


def common_steps(steps_by_rank: Sequence[Sequence[int | None]]) -> list[int]:
    """Return the steps of which every rank has a snapshot, newest first.

    >>> common_steps([(4, 3), (3, 4)]), common_steps([(1, None), (None, None)]), common_steps([])
    ([4, 3], [], [])
    """
    common = set[int | None].intersection(*(set(pair) for pair in steps_by_rank)) if steps_by_rank else set[int | None]()
    return sorted((step for step in common if step is not None), reverse=True)


def newest_common_step(steps_by_rank: Sequence[Sequence[int | None]]) -> int | None:
    """Return the newest step of which every rank has a snapshot; None if there is none.

    >>> newest_common_step([(4, 3), (4, 5)]), newest_common_step([(4, 3), (None, 3)]), newest_common_step([(1, None), (None, None)])
    (4, 3, None)
    """
    return next(iter(common_steps(steps_by_rank)), None)


def agree_on_step(world: World) -> int | None:
    """Agree on the step that all ranks restore; every rank calls it. None if there is none."""
    return newest_common_step(_gather_steps(world))


def _gather_steps(world: World) -> list[list[int | None]]:
    steps_by_rank = world.all_gather_ints([0 if step is None else step + 1 for step in _snapshot_steps(world)])
    return [[n - 1 if n else None for n in sides] for sides in steps_by_rank]


def agree_on_intact_step(world: World, snapshots: Snapshots) -> tuple[int | None, str]:
    """Agree on the newest step that no rank's memory has damaged; every rank calls it. Return it, None if there is none, and which were
    left out."""
    damaged: list[str] = []
    for step in common_steps(_gather_steps(world)):
        ranks = [rank for rank, (is_damaged,) in enumerate(world.all_gather_ints([int(bool(snapshots.find_damage(step)))])) if is_damaged]
        if not ranks:
            return step, "; ".join(damaged)
        damaged.append(_describe_damage(step, ranks))
    return None, "; ".join(damaged)


def _describe_damage(step: int, ranks: Sequence[int]) -> str:
    rank_list = ", ".join(map(str, ranks))
    return f"the state after step {step} in the memory of rank {rank_list} has another digest than when it was stored: a bit was flipped"


def _snapshot_steps(world: World) -> tuple[int | None, int | None]:
    return world.recorder.snapshot_steps()[world.recorder.index]


def state_for_memory(state: RankState, memory: PersistentMemory) -> RankState:
    """Return the state as stored in `memory`: without sharding of replicated tensors if other ranks cannot read it."""
    return state if memory.survives_rank else state._replace(replicated_on={})


def copy_interval_steps(copy_s: float, step_s: float) -> int:
    """Number of steps from one copy to the next.

    >>> copy_interval_steps(0.001, 0.1), copy_interval_steps(0.05, 0.1)
    (1, 25)
    """
    return max(1, ceil(copy_s / (MAX_TIME_SHARE * step_s))) if step_s > 0 else 1


def required_bytes(state: RankState) -> int:
    """Bytes of memory for a double buffer of the mutable state, and for the constant state."""
    unsharded = (x.nbytes for number, x in enumerate(state.mutable) if number not in state.replicated_on)
    shards = (
        _shard_of_tensor(state.mutable[number], 0, len(ranks)).nbytes for number, ranks in state.replicated_on.items()
    )  # the largest shard
    table = (len(set(state.replicated_on.values())) + 1) * ALIGNMENT_BYTES
    return table + sum(padded_size(x.nbytes) for x in state.constant) + 2 * (NOTE_BYTES + sum(map(padded_size, (*unsharded, *shards))))


class Snapshots:
    """Snapshots of one rank. Replicated tensors are sharded only if other ranks can read its memory.

    Raises OSError without enough memory.
    """

    def __init__(self, world: World, state: RankState, is_paced: bool | None = None) -> None:
        """`is_paced`: taken only so often that copies cost little; by default on all devices but processors."""
        assert world.recovery is not None
        self._world, self._persistent_memory = world, world.recovery.memory
        self.pinned_step: int | None = None  # the snapshot of this step is not overwritten
        self.takes_fingerprints, self.fingerprints = False, dict[int, int]()  # of the last state, modulo 2^64, by tensor id
        self._copier = StateCopier(world.device)
        self._pace = SnapshotPace(world) if (world.device.type != "cpu" if is_paced is None else is_paced) else None
        self._state = state = state_for_memory(state, self._persistent_memory)
        if self._persistent_memory.size() != (size := required_bytes(state)):
            self.forget()
        self._memory = _BufferAllocator(self._persistent_memory.memory(size))
        self._copier.pin_memory(self._memory.all_bytes)
        sets = sorted(set(state.replicated_on.values()))
        # Offsets of each rank set's shards in both halves; stored at the start, for other ranks to find.
        offsets: dict[tuple[int, ...], list[int]] = {ranks: [] for ranks in sets}
        self._memory.take_bytes((len(sets) + 1) * ALIGNMENT_BYTES)
        self._constant_digest: int | None = None
        self._constant = [(self._memory.buffer_like(x), x) for x in state.constant]
        self._double_buffer: list[list[TensorBuffer]] = []
        self._notes: list[memoryview] = []
        for _ in range(2):
            self._notes.append(self._memory.take_bytes(NOTE_BYTES))
            buffers = [
                TensorBuffer(n, 0, self._memory.buffer_like(x), x) for n, x in enumerate(state.mutable) if n not in state.replicated_on
            ]
            for ranks in sets:
                offsets[ranks].append(self._memory.offset)
                buffers += self._memory.shard_buffers(self._replicated_tensors(ranks), ranks.index(world.rank), len(ranks))
            self._double_buffer.append(buffers)
        for entry, (ranks, entry_offsets) in enumerate(offsets.items()):
            self._memory.write(entry * ALIGNMENT_BYTES, _RANGES_ENTRY.pack(_rank_set_id(ranks), *entry_offsets))

    def _replicated_tensors(self, ranks: tuple[int, ...]) -> list[tuple[int, Tensor]]:
        """Return the tensors replicated on these ranks, with their indices."""
        return [
            (number, self._state.mutable[number]) for number, replicas in sorted(self._state.replicated_on.items()) if replicas == ranks
        ]

    @property
    def steps(self) -> tuple[int | None, int | None]:
        """Steps of the two halves; None: empty."""
        return _snapshot_steps(self._world)

    def forget(self) -> None:
        """Discard both snapshots."""
        for side in range(2):
            self._world.recorder.publish_snapshot(side, None)

    def has(self, step: int) -> bool:
        """Return whether there is a snapshot after `step` steps."""
        return step in self.steps

    def first_difference(self, step: int, includes_peers: bool = False) -> tuple[int, int] | None:
        """Return (tensor, element) of the first bitwise difference from the snapshot after `step` steps; None if there is none. Compares
        what this rank stores, and with `includes_peers` what its replicas store. Constant tensors are numbered after mutable ones."""
        constant = (TensorBuffer(len(self._state.mutable) + n, 0, buffer, x) for n, (buffer, x) in enumerate(self._constant))
        buffers = [*self._double_buffer[self.steps.index(step)], *constant, *(self._peer_buffers(step) if includes_peers else ())]
        for buffer in sorted(buffers, key=lambda entry: (entry.number, entry.start)):
            current = buffer.source.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            other = (buffer.buffer.reshape(-1).view(torch.uint8) != current).nonzero()
            if other.numel():
                return buffer.number, buffer.start + int(other[0]) // buffer.source.element_size()
        return None

    @torch.no_grad()
    def take(self, step: int, note: Mapping[str, Any]) -> bool:
        """Store the state after `step` steps, and a note on the last of them. Return False where it is paced and none was due."""
        if self._pace is None:
            self._take(step, note, step - 1)
            return True
        if not self._pace.is_due(step):
            return False
        with self._pace.time_copy(step):
            self._take(step, note, self._pace.last_step)
        if self._pace.is_off:
            self.forget()
        return not self._pace.is_off

    def _take(self, step: int, note: Mapping[str, Any], previous: int) -> None:
        """Store the state next to the snapshot after `previous` steps."""
        a, b = self.steps
        if (a, b) == (None, None):
            for buffer, x in self._constant:
                buffer.copy_(x)
            self._constant_digest = None
        if self._constant_digest is None:
            self._constant_digest = sum(int(fingerprint_of(buffer)) for buffer, _ in self._constant) % _WORDS
        # The previous step may be the newest common one, even if this rank had a later one before a peer failed.
        target = 1 if a == previous or (a is not None and b != previous and (b is None or b < a)) else 0
        if self.pinned_step is not None and self.steps[target] == self.pinned_step:
            target = 1 - target
        self._world.recorder.publish_snapshot(target, None)
        self.fingerprints.clear()
        data = json.dumps(note).encode()
        if len(data) > NOTE_BYTES - _HEADER.size:
            raise ValueError(f"a note of {len(data)} bytes; there are {NOTE_BYTES - _HEADER.size:,}")
        digest = _digest_of_note(data)
        entries = self._double_buffer[target]
        for entry, words_sum in zip(entries, self._copier.copy_state(entries), strict=True):
            digest += words_sum if words_sum is not None else int(fingerprint_of(entry.buffer))
            if words_sum is not None and self.takes_fingerprints and self._pace is None:
                x = self._state.mutable[entry.number]
                self.fingerprints[id(x)] = words_sum + sum(int(fingerprint_of(rest)) for rest in _outside_of(x, entry))
        header = _HEADER.pack(len(data), digest % _WORDS, self._constant_digest)
        self._notes[target][: _HEADER.size + len(data)] = header + data
        self._world.recorder.publish_snapshot(target, step)

    @torch.no_grad()
    def find_damage(self, step: int) -> str:
        """Return what is wrong with what this rank's memory has of the state after `step` steps; empty if it is as it was stored."""
        half = self.steps.index(step)
        length, digest, constant_digest = _HEADER.unpack_from(self._notes[half])
        data = bytes(self._notes[half][_HEADER.size : _HEADER.size + length])
        current = _digest_of_note(data) + sum(int(fingerprint_of(entry.buffer)) for entry in self._double_buffer[half])
        constant = sum(int(fingerprint_of(buffer)) for buffer, _ in self._constant)
        is_intact = (current % _WORDS, constant % _WORDS) == (digest, constant_digest)
        return "" if is_intact else _describe_damage(step, [self._world.rank])

    @torch.no_grad()
    def restore(self, step: int) -> dict[str, Any]:
        """Restore the tensors to their values after `step` steps; returns the note. Every rank calls it; since a step ends with an
        all-reduce, no rank takes the next but one snapshot before all have restored. Raises RunError if this rank's memory is damaged."""
        if damage := self.find_damage(step):
            raise RunError(f"{damage}; go on from the last checkpoint")
        source = self.steps.index(step)
        for buffer, x in self._constant:
            x.copy_(buffer)
        for entry in (*self._double_buffer[source], *self._peer_buffers(step)):
            entry.source.copy_(entry.buffer)
        if self._pace is not None:
            self._pace.last_step = step
        note = self._notes[source]
        length, _, self._constant_digest = _HEADER.unpack_from(note)
        return json.loads(bytes(note[_HEADER.size : _HEADER.size + length]))  # type: ignore[no-any-return]

    def _peer_buffers(self, step: int) -> Iterator[TensorBuffer]:
        """Return the buffers in which replicas store shards of this rank's tensors."""
        peers = {rank for ranks in self._state.replicated_on.values() for rank in ranks} - {self._world.rank}
        for rank in sorted(peers):
            memory, half = _BufferAllocator(self._persistent_memory.of_rank(rank)), self._world.recorder.snapshot_steps()[rank].index(step)
            for ranks in sorted({replicas for replicas in self._state.replicated_on.values() if rank in replicas}):
                memory.offset = memory.start_of(_rank_set_id(ranks), half)
                yield from memory.shard_buffers(self._replicated_tensors(ranks), ranks.index(rank), len(ranks))


class SnapshotPace:
    """When a snapshot is due where copies cost time. Every rank decides alike, by the slowest copy and step."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.last_step, self.next_step = -1, 0
        self.is_off = False  # copies would be too far apart
        self._ended_s: float | None = None

    def is_due(self, step: int) -> bool:
        return not self.is_off and step >= self.next_step

    @contextmanager
    def time_copy(self, step: int) -> Iterator[None]:
        """Time a copy, and agree on the step of the next."""
        began = time.perf_counter()
        step_s = (began - self._ended_s) / max(1, step - self.last_step) if self._ended_s is not None else 0.0
        yield
        copy_s = time.perf_counter() - began
        times = self._world.all_reduce_max([round(copy_s / MICROSECONDS), round(step_s / MICROSECONDS)])
        copy_s, step_s = (x * MICROSECONDS for x in times)
        interval = copy_interval_steps(copy_s, step_s)
        self.last_step, self.next_step, self.is_off = step, step + interval, interval * step_s > MAX_INTERVAL_S
        self._ended_s = time.perf_counter()


class StateCopier:
    """Copies a rank's state into host memory: from processors past the caches, from a GPU on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def pin_memory(self, memory: Tensor) -> None:
        """Pin memory for copies from a GPU. Where the driver refuses, copies are slower and right."""
        if self._stream is not None and memory.numel():
            torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)  # type: ignore[no-untyped-call]

    def copy_state(self, entries: Sequence[TensorBuffer]) -> list[int | None]:
        """Copy, and wait for the copies. Return for each the sum of its words, None where it is not known."""
        if self._stream is None:
            return [copy_past_caches(entry.buffer, entry.source) for entry in entries]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            sums = []
            for entry in entries:
                entry.buffer.copy_(entry.source, non_blocking=True)
                sums.append(fingerprint_of(entry.source) if _has_order_of_copy(entry.source) else None)
        self._stream.synchronize()
        return [None if words_sum is None else int(words_sum) for words_sum in sums]


class TensorBuffer(NamedTuple):
    """Buffer in which a tensor, or a shard of it from element `start` on, is stored."""

    number: int
    start: int
    buffer: Tensor
    source: Tensor


class _BufferAllocator:
    """Allocator of buffers in a rank's memory, in order; `offset`: of the next one."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._bytes, self._tensor, self.offset = memoryview(mapping), torch.frombuffer(mapping, dtype=torch.uint8), 0

    @property
    def all_bytes(self) -> Tensor:
        return self._tensor

    def take_bytes(self, size: int) -> memoryview:
        start, self.offset = self.offset, self.offset + padded_size(size)
        return self._bytes[start : start + size]

    def buffer_like(self, x: Tensor) -> Tensor:
        """Allocate a buffer like a tensor."""
        start, self.offset = self.offset, self.offset + padded_size(x.nbytes)
        return self._tensor[start : start + x.nbytes].view(x.dtype).view(x.shape)

    def shard_buffers(self, tensors: Sequence[tuple[int, Tensor]], index: int, count: int) -> Iterator[TensorBuffer]:
        """Allocate buffers for the shards that rank `index` of `count` stores."""
        for number, x in tensors:
            start, shard = self.offset, _shard_of_tensor(x, index, count)
            yield TensorBuffer(number, int(shard.storage_offset() - x.storage_offset()), self.buffer_like(shard), shard)
            self.offset = start + padded_size(_shard_of_tensor(x, 0, count).nbytes)

    def write(self, at: int, data: bytes) -> None:
        self._bytes[at : at + len(data)] = data

    def start_of(self, name: int, side: int) -> int:
        """Return the offset of a rank set's shards."""
        at = 0
        while (entry := _RANGES_ENTRY.unpack_from(self._bytes, at))[0] != name:
            assert entry[0], "replicas agree on which tensors are replicated"
            at += ALIGNMENT_BYTES
        return int(entry[1 + side])


def _has_order_of_copy(x: Tensor) -> bool:
    """Return whether the words of a tensor on a GPU are those of its copy."""
    return x.is_contiguous() and x.data_ptr() % 8 == 0 and x.storage_offset() * x.element_size() % 8 == 0


def _digest_of_note(data: bytes) -> int:
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little")


def _shard_of_tensor(x: Tensor, index: int, count: int) -> Tensor:
    """Return the shard that one of `count` replicas stores of a tensor."""
    aligned = max(1, ALIGNMENT_BYTES // x.element_size())
    size = -(-x.numel() // (count * aligned)) * aligned
    return x.detach().view(-1)[index * size : (index + 1) * size]


def _outside_of(x: Tensor, buffer: TensorBuffer) -> list[Tensor]:
    """Return the rest of a tensor outside of a shard."""
    flat, end = x.detach().view(-1) if buffer.source.numel() < x.numel() else x.new_empty(0), buffer.start + buffer.source.numel()
    return [rest for rest in (flat[: buffer.start], flat[end:]) if rest.numel()]


def _rank_set_id(ranks: tuple[int, ...]) -> int:
    return 1 + int.from_bytes(hashlib.sha256(repr(ranks).encode()).digest()[:7], "little")
