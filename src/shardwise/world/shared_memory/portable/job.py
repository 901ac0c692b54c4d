"""Collectives on shared buffers in Python: each member reduces its shard of all members' tensors, or writes its shard to all.

In: tensors that lie in buffers which all members have mapped. Out: generators that yield the member they wait for.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from shardwise.world.shared_memory import segment
from shardwise.world.shared_memory.portable.segment import JOBS, WORDS, AwaitedMembers, SegmentView, byte_view, reduce_tensors


class BufferCollectives:
    """The shared buffers of one group and the collectives on them."""

    def __init__(self, memory: SegmentView) -> None:
        self._memory = memory
        self._buffers: dict[int, list[Tensor]] = {}
        self._local_buffers: list[tuple[int, int, int]] = []  # first address, end, number
        self._count = 0

    def add_buffer(self, own_mapping: mmap.mmap, all_mappings: Sequence[mmap.mmap]) -> None:
        """Register a buffer of which member i's is mapped at `all_mappings[i]`, until `own_mapping` is freed."""
        number = self._count
        self._count += 1
        # A tensor on `own_mapping` would keep it alive: only its address is stored.
        self._buffers[number] = [torch.frombuffer(m, dtype=torch.uint8) for i, m in enumerate(all_mappings) if i != self._memory.index]
        start = segment.mapping_address(own_mapping)
        entry = (start, start + len(own_mapping), number)
        self._local_buffers.append(entry)
        weakref.finalize(own_mapping, partial(_forget_local_buffer, self._buffers, self._local_buffers, entry)).atexit = False

    def find(self, x: Tensor) -> tuple[int, int] | None:
        """Return (number, offset) of the buffer that contains `x`."""
        start = x.data_ptr()
        for first, stop, number in self._local_buffers:
            if first <= start and start + x.nbytes <= stop:
                return number, start - first
        return None

    def run(
        self,
        name: str,
        kind: int,
        place: tuple[int, int],
        full: Tensor,
        private: Tensor,
        pieces: list[int],
        op: str,
        number: int,
    ) -> AwaitedMembers:
        """Run a collective on a shared buffer: each member reduces its shard of all members' tensors, or writes its shard to all."""
        memory, done = self._memory, self._memory.at.done
        yield from self._announce(kind, place, full.nbytes, number)
        views, peer_indices = [], iter(range(memory.size - 1))
        for r in range(memory.size):
            start = memory.words[self._descriptor_at(r, number) + 4]
            views.append(
                byte_view(full)
                if r == memory.index
                else self._buffers[memory.words[self._descriptor_at(r, number) + 3]][next(peer_indices)][start : start + full.nbytes]
            )
        if name == "all_reduce":
            self._reduce_share(full, views, op)
        else:
            start = sum(pieces[: memory.index])
            stop = start + pieces[memory.index]
            if name == "gather":
                for view in views:
                    if view.data_ptr() + start != private.data_ptr():
                        view[start:stop].copy_(byte_view(private))
            elif stop > start:
                private.reshape(-1).copy_(reduce_tensors([view[start:stop].view(full.dtype) for view in views], op))
        memory.publish(done + 8 * memory.index, number + 1)
        for r in memory.peers:
            while memory.read_counter(done + 8 * r) <= number:
                yield r

    def _descriptor_at(self, r: int, number: int) -> int:
        """Return the index of the word at which member r's descriptor of job `number` begins."""
        return self._memory.at.descriptors + (number % JOBS * self._memory.size + r) * WORDS

    def _announce(self, kind: int, place: tuple[int, int], size: int, number: int) -> AwaitedMembers:
        """Publish this member's job, and wait until all have published an equal one and this member's earlier jobs are done."""
        memory, done = self._memory, self._memory.at.done
        for r in memory.peers:
            while memory.read_counter(done + 8 * r) <= number - JOBS:
                yield r
        own = self._descriptor_at(memory.index, number)
        for i, word in enumerate((kind, size, *place), 1):
            memory.words[own + i] = word
        memory.publish(own, number + 1)
        for r in memory.peers:
            at = self._descriptor_at(r, number)
            while memory.read_counter(at) != number + 1:
                yield r
            if (memory.words[at + 1], memory.words[at + 2]) != (kind, size) or memory.words[at + 3] not in self._buffers:
                raise memory.mismatch_error(r)
        while memory.words[done + 8 * memory.index] < number:  # an earlier job's part of this member
            yield memory.peers[0]

    def _reduce_share(self, full: Tensor, views: list[Tensor], op: str) -> None:
        """Reduce this member's shard, into all members' tensors."""
        item, count = full.element_size(), full.numel()
        low, high = (count * (self._memory.index + k) // self._memory.size * item for k in (0, 1))
        if high > low:
            parts = [view[low:high].view(full.dtype) for view in views]
            total = reduce_tensors(parts, op)
            for part in parts:
                part.copy_(total)


def _forget_local_buffer(buffers: dict[int, list[Tensor]], local_buffers: list[tuple[int, int, int]], entry: tuple[int, int, int]) -> None:
    local_buffers.remove(entry)
    buffers.pop(entry[2], None)
