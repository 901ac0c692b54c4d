"""Collectives on private tensors in Python: chunk by chunk through slots that their writer owns, each read by all others in order.

In: contiguous tensors. Out: generators that yield the member they wait for and end when the result is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from shardwise.world.shared_memory.portable.segment import (
    CHUNK_BYTES,
    DEPTH,
    KINDS,
    WORDS,
    AwaitedMembers,
    SegmentView,
    byte_view,
    piece_starts,
    reduce_tensors,
)


class ChunkStreams:
    """The members' streams of chunks in one group. All operations of a group run in sequence."""

    def __init__(self, memory: SegmentView) -> None:
        self._memory = memory
        self._written = 0
        self._read = [0] * memory.size

    def _blocking_member(self) -> int:
        """Return a member that has not yet read this member's previous chunk in the next slot; -1 if the slot is free."""
        lowest = self._written - DEPTH
        return next(
            (
                r
                for r in self._memory.peers
                if self._memory.read_counter(self._memory.at.consumed + r * self._memory.size + self._memory.index) < lowest + 1
            ),
            -1,
        )

    def _write(self, head: Sequence[int], parts: Sequence[tuple[int, Tensor]]) -> AwaitedMembers:
        while (blocked := self._blocking_member()) >= 0:
            yield blocked
        at, buffer = self._memory.slot(self._memory.index, self._written)
        for start, data in parts:
            buffer[start : start + data.numel()].copy_(data)
        for i, word in enumerate(head):
            self._memory.words[at + i] = word
        self._written += 1
        self._memory.publish(self._memory.at.written + 8 * self._memory.index, self._written)

    def _next_chunk(self, rank: int, kind: int, number: int, size: int) -> tuple[bool, Tensor] | None:
        """Return (is the last, bytes) of the next chunk of `rank`, if it has arrived; its header must have this `size`."""
        if self._memory.read_counter(self._memory.at.written + 8 * rank) <= self._read[rank]:
            return None
        at, data = self._memory.slot(rank, self._read[rank])
        sent = self._memory.words[at + 2] if kind & 255 != KINDS.index("exchange") else self._memory.words[at + WORDS + self._memory.index]
        if (self._memory.words[at], self._memory.words[at + 1], sent) != (number, kind, size):
            raise self._memory.mismatch_error(rank)
        return bool(self._memory.words[at + 3]), data

    def _consume(self, rank: int) -> None:
        self._read[rank] += 1
        self._memory.publish(self._memory.at.consumed + self._memory.index * self._memory.size + rank, self._read[rank])

    def _wait_for_all(self, kind: int, number: int, size: int) -> AwaitedMembers:
        for r in self._memory.peers:
            while self._next_chunk(r, kind, number, size) is None:
                yield r

    def all_reduce(self, kind: int, x: Tensor, op: str, number: int) -> AwaitedMembers:
        """Reduce all members' chunks on every member, chunk by chunk, in the members' order."""
        step = CHUNK_BYTES // x.element_size()
        for start in range(0, max(1, x.numel()), step):
            own_view = x[start : start + step]
            head = (number, kind, x.nbytes, int(start + step >= x.numel()))
            yield from self._write(head, [(0, byte_view(own_view))])
            yield from self._wait_for_all(kind, number, x.nbytes)
            if own_view.numel():
                parts = [
                    own_view if r == self._memory.index else self._memory.slot(r, self._read[r])[1][: own_view.nbytes].view(x.dtype)
                    for r in range(self._memory.size)
                ]
                own_view.copy_(reduce_tensors(parts, op))
            for r in self._memory.peers:
                self._consume(r)

    def gather(
        self, kind: int, x: Tensor, out: Tensor, sizes: list[int], starts: list[int], roots: list[int], number: int
    ) -> AwaitedMembers:
        """Gather the bytes `x` of each of `roots`, of `sizes`, into `out` at `piece_starts`; with one root a broadcast."""
        total, own_size = sum(sizes), sizes[self._memory.index]
        own_view = out[starts[self._memory.index] : starts[self._memory.index] + own_size]
        if self._memory.index in roots and own_view.data_ptr() != x.data_ptr():
            own_view.copy_(x)
        chunks = max(1, -(-own_size // CHUNK_BYTES)) if self._memory.index in roots else 0

        def write(index: int) -> AwaitedMembers:
            part = x[index * CHUNK_BYTES : min(own_size, (index + 1) * CHUNK_BYTES)]
            return self._write((number, kind, total, int(index + 1 == chunks)), [(0, part)])

        def take(r: int, done: int, data: Tensor) -> int:
            size = min(CHUNK_BYTES, sizes[r] - done)
            out[starts[r] + done : starts[r] + done + size].copy_(data[:size])
            return size

        yield from self._write_and_read(chunks, write, [r for r in roots if r != self._memory.index], lambda r: (kind, number, total), take)

    def _write_and_read(
        self,
        chunks: int,
        write: Callable[[int], AwaitedMembers],
        sources: Sequence[int],
        head: Callable[[int], tuple[int, int, int]],
        take: Callable[[int, int, Tensor], int],
    ) -> AwaitedMembers:
        """Write `chunks` chunks as slots become free, and read those of `sources` by `take(member, bytes so far, chunk)` -> bytes."""
        num_written, num_read = 0, dict.fromkeys(sources, 0)
        while num_written < chunks or num_read:
            progressed = False
            if num_written < chunks and self._blocking_member() < 0:
                yield from write(num_written)
                num_written += 1
                progressed = True
            for r in list(num_read):
                message = self._next_chunk(r, *head(r))
                if message is not None:
                    num_read[r] += take(r, num_read[r], message[1])
                    self._consume(r)
                    if message[0]:
                        del num_read[r]
                    progressed = True
            if not progressed:
                yield next(iter(num_read), self._blocking_member())

    def _part_bytes(self) -> int:
        return CHUNK_BYTES // self._memory.size // 64 * 64

    def _write_parts(self, kind: int, x: Tensor, sizes: list[int], index: int, total: int, number: int) -> AwaitedMembers:
        width = self._part_bytes()
        parts, start = [], 0
        for r, size in enumerate(sizes):
            low, high = min(size, index * width), min(size, (index + 1) * width)
            if r != self._memory.index and high > low:
                parts.append((r * width, x[start + low : start + high]))
            start += size
        chunks = max(1, -(-max(sizes) // width))
        yield from self._write((number, kind, total, int(index + 1 == chunks), 0, 0, 0, 0, *sizes), parts)

    def reduce_scatter(self, kind: int, out: Tensor, x: Tensor, sizes: list[int], number: int) -> AwaitedMembers:
        """Reduce this member's shard into `out`; `sizes` are the bytes of the shards."""
        width, own_size, first = self._part_bytes(), sizes[self._memory.index], sum(sizes[: self._memory.index])
        for index in range(max(1, -(-max(sizes) // width))):
            yield from self._write_parts(kind, x, sizes, index, x.numel(), number)
            yield from self._wait_for_all(kind, number, x.numel())
            low, high = min(own_size, index * width), min(own_size, (index + 1) * width)
            if high > low:
                at, item = self._memory.index * width, out.element_size()
                parts = [
                    (
                        x[first + low : first + high]
                        if r == self._memory.index
                        else self._memory.slot(r, self._read[r])[1][at : at + high - low]
                    ).view(out.dtype)
                    for r in range(self._memory.size)
                ]
                out[low // item : high // item].copy_(reduce_tensors(parts, "sum"))
            for r in self._memory.peers:
                self._consume(r)

    def exchange(self, kind: int, x: Tensor, out: Tensor, sizes: list[int], arriving: list[int], number: int) -> AwaitedMembers:
        """Send `sizes[r]` bytes to member r and receive `arriving[r]` from it, in the members' order."""
        width, sent_at, received_at = self._part_bytes(), piece_starts(sizes), piece_starts(arriving)
        me = self._memory.index
        out[received_at[me] : received_at[me] + arriving[me]].copy_(x[sent_at[me] : sent_at[me] + sizes[me]])
        chunks = max(1, -(-max(sizes) // width))

        def take(r: int, done: int, data: Tensor) -> int:
            size = max(0, min(width, arriving[r] - done))
            out[received_at[r] + done : received_at[r] + done + size].copy_(data[me * width : me * width + size])
            return size

        yield from self._write_and_read(
            chunks,
            lambda index: self._write_parts(kind, x, sizes, index, 0, number),
            self._memory.peers,
            lambda r: (kind, number, arriving[r]),
            take,
        )
