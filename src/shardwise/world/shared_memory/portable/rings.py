"""Messages between two members in Python: a byte ring buffer for each direction, matched by tag, then by order.

In: bytes of contiguous tensors. Out: `send`, a generator that yields the member it waits for, and receives that end as messages arrive.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shardwise.world.shared_memory.portable.segment import RING_BYTES, AwaitedMembers, SegmentView

HEAD_BYTES = 64  # of a message: bytes, tag


class MessageRings:
    """The messages of one group."""

    def __init__(self, memory: SegmentView) -> None:
        self._memory = memory
        self._posted_receives: list[list[tuple[int, Tensor, Callable[[], None]]]] = [[] for _ in range(memory.size)]
        self._unexpected: list[list[_UnexpectedMessage]] = [[] for _ in range(memory.size)]
        self._incoming: list[AwaitedMembers | None] = [None] * memory.size

    @property
    def is_busy(self) -> bool:
        """True if a receive is pending."""
        return any(self._posted_receives) or any(self._incoming)

    def receive(self, out: Tensor, source: int, tag: int, done: Callable[[], None]) -> None:
        """Receive the oldest message of `tag` from `source` into the bytes `out`; then call `done()`."""
        early = next((message for message in self._unexpected[source] if message.tag == tag and message.done is None), None)
        if early is None:
            self._posted_receives[source].append((tag, out, done))
        elif early.data.numel() != out.numel():
            raise self._memory.mismatch_error(source)
        else:
            early.done, early.out = done, out
            early.deliver(self._unexpected[source])

    def send(self, x: Tensor, to: int, tag: int, number: int) -> AwaitedMembers:
        """Send the bytes `x` to member `to`."""
        pair = self._memory.index * self._memory.size + to
        ring = self._memory.at.rings + pair * RING_BYTES
        head = torch.tensor([x.numel(), tag, *[0] * 6], dtype=torch.int64).view(torch.uint8)
        for data in (head, x):
            moved = 0
            while moved < data.numel():
                at = self._memory.words[self._memory.at.sent + pair]
                size = min(
                    data.numel() - moved,
                    RING_BYTES - at % RING_BYTES,
                    RING_BYTES - (at - self._memory.read_counter(self._memory.at.taken + pair)),
                )
                if size == 0:
                    yield to
                    continue
                start = ring + at % RING_BYTES
                self._memory.data[start : start + size].copy_(data[moved : moved + size])
                moved += size
                self._memory.publish(self._memory.at.sent + pair, at + -(-size // HEAD_BYTES) * HEAD_BYTES)

    def progress(self, source: int) -> bool:
        """Receive the bytes that have arrived from `source`; return whether there were any."""
        moved = False
        while True:
            if self._incoming[source] is None:
                pair = source * self._memory.size + self._memory.index
                # Messages without a posted receive stay in the ring: they would be copied twice.
                if (
                    not self._posted_receives[source]
                    or self._memory.read_counter(self._memory.at.sent + pair) == self._memory.words[self._memory.at.taken + pair]
                ):
                    return moved
                self._incoming[source] = self._receive_next(source, pair)
            steps = self._incoming[source]
            assert steps is not None
            moved = True
            if next(steps, None) is not None:
                return moved
            self._incoming[source] = None

    def _from_ring(self, pair: int, out: Tensor) -> AwaitedMembers:
        ring, moved = self._memory.at.rings + pair * RING_BYTES, 0
        while moved < out.numel():
            at = self._memory.words[self._memory.at.taken + pair]
            size = min(out.numel() - moved, RING_BYTES - at % RING_BYTES, self._memory.read_counter(self._memory.at.sent + pair) - at)
            if size == 0:
                yield pair // self._memory.size
                continue
            start = ring + at % RING_BYTES
            out[moved : moved + size].copy_(self._memory.data[start : start + size])
            moved += size
            self._memory.publish(self._memory.at.taken + pair, at + -(-size // HEAD_BYTES) * HEAD_BYTES)

    def _receive_next(self, source: int, pair: int) -> AwaitedMembers:
        head = torch.empty(HEAD_BYTES, dtype=torch.uint8)
        yield from self._from_ring(pair, head)
        size, tag = (int(x) for x in head.view(torch.int64)[:2])
        wanted = self._posted_receives[source]
        index = next((i for i, (wants, _, _) in enumerate(wanted) if wants == tag), -1)
        if index < 0:
            early = _UnexpectedMessage(tag, torch.empty(size, dtype=torch.uint8))
            self._unexpected[source].append(early)
            yield from self._from_ring(pair, early.data)
            early.is_complete = True
            early.deliver(self._unexpected[source])
            return
        _, out, done = wanted.pop(index)
        if out.numel() != size:
            raise self._memory.mismatch_error(source)
        yield from self._from_ring(pair, out)
        done()


class _UnexpectedMessage:
    """A message that arrived before its receive was posted."""

    def __init__(self, tag: int, data: Tensor) -> None:
        self.tag, self.data = tag, data
        self.is_complete = False
        self.done: Callable[[], None] | None = None
        self.out = data

    def deliver(self, waiting: list[_UnexpectedMessage]) -> None:
        """Copy it into the receiver's tensor, once both are there."""
        if self.is_complete and self.done is not None:
            self.out.copy_(self.data)
            self.done()
            waiting.remove(self)
