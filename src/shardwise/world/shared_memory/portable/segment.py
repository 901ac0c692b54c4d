"""The Python transport's segment layout: counters in words of 8 bytes, then slots and rings. In: a mapping. Out: reads and writes.

Every counter has one writer, is aligned, and is written after the data that it announces. x86 keeps that order; elsewhere acquiring
a lock, before the store and after the load, is the barrier.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from shardwise.world.shared_memory.timeouts import format_member, timeout_message

CHUNK_BYTES = 1 << 20
RING_BYTES = 4 << 20
DEPTH = 2
JOBS = 64
WORDS = 8  # of a chunk's header before the sizes, and of a job's descriptor
OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
KINDS = ("all_reduce", "gather", "reduce_scatter", "exchange", "broadcast")
_NARROW = (torch.bfloat16, torch.float16)

AwaitedMembers = Iterator[int]  # over the members waited for


class SegmentLayout:
    """Offsets in a segment: counters in words of 8 bytes first, then slots and rings in bytes."""

    def __init__(self, size: int) -> None:
        n = size
        self.written = 8  # word 0: 1 + the rank whose call did not match, or minus (1 + the rank that has ended)
        self.consumed = self.written + 8 * n
        self.done = self.consumed + n * n
        self.sent = self.done + 8 * n
        self.taken = self.sent + n * n
        self.gone = self.taken + n * n  # 1 once that member has closed the group
        self.descriptors = self.gone + n
        self.heads = self.descriptors + JOBS * n * WORDS
        self.head_words = WORDS + n
        self.slots = -(-8 * (self.heads + n * DEPTH * self.head_words) // 4096) * 4096
        self.rings = self.slots + n * DEPTH * CHUNK_BYTES
        self.total = self.rings + n * n * RING_BYTES


class SegmentView:
    """One member's view of a group's segment; this process is member `index`. `pids` are the members' processes."""

    def __init__(self, mapping: mmap.mmap, index: int, ranks: Sequence[int], pids: Sequence[int]) -> None:
        self.index, self.size = index, len(ranks)
        self.peers = [i for i in range(self.size) if i != index]
        self.at = SegmentLayout(self.size)
        self.words = memoryview(mapping).cast("q")
        self.data = torch.frombuffer(mapping, dtype=torch.uint8)
        self._ranks, self._pids = tuple(ranks), tuple(pids)
        self._barrier = threading.Lock()

    def publish(self, at: int, value: int) -> None:
        """Write a counter, which publishes all earlier writes."""
        with self._barrier:
            pass
        self.words[at] = value

    def read_counter(self, at: int) -> int:
        """Read another member's counter; the data that it announces may be read afterwards."""
        value = self.words[at]
        with self._barrier:
            pass
        return value

    def slot(self, rank: int, number: int) -> tuple[int, Tensor]:
        """Return (index of the first header word, bytes) of chunk `number` of `rank`'s stream."""
        index = rank * DEPTH + number % DEPTH
        start = self.at.slots + index * CHUNK_BYTES
        return self.at.heads + index * self.at.head_words, self.data[start : start + CHUNK_BYTES]

    def format_member(self, index: int) -> str:
        """Return the name of a member in messages."""
        return format_member(self._ranks, self._pids, index) if index >= 0 else "another rank"

    def leave(self) -> None:
        """Announce that this member leaves the group."""
        self.publish(self.at.gone + self.index, 1)

    def has_left(self, index: int) -> bool:
        """Return whether a member has left the group."""
        return self.read_counter(self.at.gone + index) == 1

    def mismatch_error(self, index: int) -> RuntimeError:
        """Break the group on all members since the call of `index` does not match; return the error to raise."""
        self.words[0] = index + 1
        return self.broken_error()

    def exited_error(self, index: int) -> RuntimeError:
        """Break the group on all members since `index` has ended; return the error to raise."""
        self.words[0] = -1 - index
        return self.broken_error()

    def timeout_error(self, index: int, timeout_s: float) -> RuntimeError:
        """Return the error to raise when `index` is late."""
        return RuntimeError(timeout_message(timeout_s, self._ranks, self._pids, self.index, index))

    def broken_error(self) -> RuntimeError:
        """Return the error that says why the group is broken."""
        who = self.format_member(abs(self.words[0]) - 1)
        if self.words[0] < 0:
            has_left = self.has_left(abs(self.words[0]) - 1)
            return RuntimeError(f"connection closed by {who}" if has_left else f"remote process exited: {who}")
        return RuntimeError(f"the call of {who} differs from another rank's in collective, size, type, order or shared buffers")


def byte_view(x: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor: one of a single element may have any stride, which a plain view refuses."""
    return x.detach().as_strided((x.numel(),), (1,)).view(torch.uint8)


def piece_starts(sizes: Sequence[int]) -> list[int]:
    """Return the start offsets of consecutive pieces."""
    return [sum(sizes[:i]) for i in range(len(sizes))]


def reduce_tensors(parts: Sequence[Tensor], op: str) -> Tensor:
    """Return the reduction in the order of `parts`, of narrow types in float32; the caller's copy rounds it."""
    narrow = parts[0].dtype in _NARROW
    total = parts[0].float() if narrow else parts[0]
    for part in parts[1:]:
        total = OPS[op](total, part.float() if narrow else part)
    return total
