"""Messages between two members in Python: a byte ring buffer for each direction, matched by tag, then by order.

In: bytes of contiguous tensors. Out: `send`, a generator that yields the member it waits for, and receives that end as messages arrive.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from weft.world.shared_memory.portable.segment import RING_BYTES, Memory, Steps

HEAD_BYTES = 64  # of a message: bytes, tag


class Messages:
    """The messages of one group."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._wanted: list[list[tuple[int, Tensor, Callable[[], None]]]] = [[] for _ in range(memory.size)]
        self._early: list[list[_Early]] = [[] for _ in range(memory.size)]
        self._taking: list[Steps | None] = [None] * memory.size

    @property
    def busy(self) -> bool:
        """True if a receive is pending."""
        return any(self._wanted) or any(self._taking)

    def receive(self, out: Tensor, source: int, tag: int, done: Callable[[], None]) -> None:
        """Receive the oldest message of `tag` from `source` into the bytes `out`; then call `done()`."""
        early = next((message for message in self._early[source] if message.tag == tag and message.done is None), None)
        if early is None:
            self._wanted[source].append((tag, out, done))
        elif early.data.numel() != out.numel():
            raise self._memory.mismatch(source)
        else:
            early.done, early.out = done, out
            early.deliver(self._early[source])

    def send(self, x: Tensor, to: int, tag: int, number: int) -> Steps:
        """Send the bytes `x` to member `to`."""
        pair = self._memory.index * self._memory.size + to
        ring = self._memory.at.rings + pair * RING_BYTES
        head = torch.tensor([x.numel(), tag, *[0] * 6], dtype=torch.int64).view(torch.uint8)
        for data in (head, x):
            moved = 0
            while moved < data.numel():
                at = self._memory.words[self._memory.at.sent + pair]
                size = min(
                    data.numel() - moved, RING_BYTES - at % RING_BYTES, RING_BYTES - (at - self._memory.get(self._memory.at.taken + pair))
                )
                if size == 0:
                    yield to
                    continue
                start = ring + at % RING_BYTES
                self._memory.data[start : start + size].copy_(data[moved : moved + size])
                moved += size
                self._memory.put(self._memory.at.sent + pair, at + -(-size // HEAD_BYTES) * HEAD_BYTES)

    def progress(self, source: int) -> bool:
        """Receive the bytes that have arrived from `source`; return whether there were any."""
        moved = False
        while True:
            if self._taking[source] is None:
                pair = source * self._memory.size + self._memory.index
                # Messages without a posted receive stay in the ring: they would be copied twice.
                if (
                    not self._wanted[source]
                    or self._memory.get(self._memory.at.sent + pair) == self._memory.words[self._memory.at.taken + pair]
                ):
                    return moved
                self._taking[source] = self._take(source, pair)
            steps = self._taking[source]
            assert steps is not None
            moved = True
            if next(steps, None) is not None:
                return moved
            self._taking[source] = None

    def _from_ring(self, pair: int, out: Tensor) -> Steps:
        ring, moved = self._memory.at.rings + pair * RING_BYTES, 0
        while moved < out.numel():
            at = self._memory.words[self._memory.at.taken + pair]
            size = min(out.numel() - moved, RING_BYTES - at % RING_BYTES, self._memory.get(self._memory.at.sent + pair) - at)
            if size == 0:
                yield pair // self._memory.size
                continue
            start = ring + at % RING_BYTES
            out[moved : moved + size].copy_(self._memory.data[start : start + size])
            moved += size
            self._memory.put(self._memory.at.taken + pair, at + -(-size // HEAD_BYTES) * HEAD_BYTES)

    def _take(self, source: int, pair: int) -> Steps:
        head = torch.empty(HEAD_BYTES, dtype=torch.uint8)
        yield from self._from_ring(pair, head)
        size, tag = (int(x) for x in head.view(torch.int64)[:2])
        wanted = self._wanted[source]
        index = next((i for i, (wants, _, _) in enumerate(wanted) if wants == tag), -1)
        if index < 0:
            early = _Early(tag, torch.empty(size, dtype=torch.uint8))
            self._early[source].append(early)
            yield from self._from_ring(pair, early.data)
            early.full = True
            early.deliver(self._early[source])
            return
        _, out, done = wanted.pop(index)
        if out.numel() != size:
            raise self._memory.mismatch(source)
        yield from self._from_ring(pair, out)
        done()


class _Early:
    """A message that arrived before its receive was posted."""

    def __init__(self, tag: int, data: Tensor) -> None:
        self.tag, self.data = tag, data
        self.full = False
        self.done: Callable[[], None] | None = None
        self.out = data

    def deliver(self, waiting: list[_Early]) -> None:
        """Copy it into the receiver's tensor, once both are there."""
        if self.full and self.done is not None:
            self.out.copy_(self.data)
            self.done()
            waiting.remove(self)
