"""A segment as the Python transport sees it: counters in words of 8 bytes, then slots and rings. In: a mapping. Out: reads and writes.

Every counter has one writer, is aligned, and is written after the data that it announces. x86 keeps that order; elsewhere taking a
lock, before the store and after the load, is the barrier.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from weft.world.shared_memory.timeouts import named, timeout_message

CHUNK_BYTES = 1 << 20
RING_BYTES = 4 << 20
DEPTH = 2
JOBS = 64
WORDS = 8  # of a chunk's head before the sizes, and of a job's descriptor
OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
KINDS = ("all_reduce", "gather", "reduce_scatter", "exchange", "broadcast")
_NARROW = (torch.bfloat16, torch.float16)

Steps = Iterator[int]  # of the members waited for


class Layout:
    """Where things lie in a segment: counters in words of 8 bytes first, then slots and rings in bytes."""

    def __init__(self, size: int) -> None:
        n = size
        self.written = 8  # word 0: 1 + the rank whose call did not match, or minus (1 + the rank that is gone)
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


class Memory:
    """A group's segment; this process is member `index`. `pids` are the members' processes."""

    def __init__(self, mapping: mmap.mmap, index: int, ranks: Sequence[int], pids: Sequence[int]) -> None:
        self.index, self.size = index, len(ranks)
        self.others = [i for i in range(self.size) if i != index]
        self.at = Layout(self.size)
        self.words = memoryview(mapping).cast("q")
        self.data = torch.frombuffer(mapping, dtype=torch.uint8)
        self._ranks, self._pids = tuple(ranks), tuple(pids)
        self._barrier = threading.Lock()

    def put(self, at: int, value: int) -> None:
        """Announces what was written before."""
        with self._barrier:
            pass
        self.words[at] = value

    def get(self, at: int) -> int:
        """A counter of another member; what it announces may be read afterwards."""
        value = self.words[at]
        with self._barrier:
            pass
        return value

    def slot(self, rank: int, number: int) -> tuple[int, Tensor]:
        """The words and the bytes of chunk `number` of `rank`'s stream."""
        index = rank * DEPTH + number % DEPTH
        start = self.at.slots + index * CHUNK_BYTES
        return self.at.heads + index * self.at.head_words, self.data[start : start + CHUNK_BYTES]

    def who(self, index: int) -> str:
        """A member, for people."""
        return named(self._ranks, self._pids, index) if index >= 0 else "another rank"

    def leave(self) -> None:
        """This member takes part in nothing more."""
        self.put(self.at.gone + self.index, 1)

    def left(self, index: int) -> bool:
        """Whether that member has said so."""
        return self.get(self.at.gone + index) == 1

    def mismatch(self, index: int) -> RuntimeError:
        """Breaks the group on all members, since the call of `index` is not this one's; the error to raise."""
        self.words[0] = index + 1
        return self.broken()

    def gone(self, index: int) -> RuntimeError:
        """Breaks the group on all members, since `index` is gone; the error to raise."""
        self.words[0] = -1 - index
        return self.broken()

    def timeout_error(self, index: int, timeout_s: float) -> RuntimeError:
        """`index` has not come in time; the error to raise."""
        return RuntimeError(timeout_message(timeout_s, self._ranks, self._pids, self.index, index))

    def broken(self) -> RuntimeError:
        """Why the group is broken."""
        who = self.who(abs(self.words[0]) - 1)
        if self.words[0] < 0:
            left = self.left(abs(self.words[0]) - 1)
            return RuntimeError(f"connection closed by {who}" if left else f"remote process exited: {who}")
        return RuntimeError(f"the call of {who} differs from another rank's in collective, size, type, order or shared buffers")


def flat(x: Tensor) -> Tensor:
    """The bytes of a contiguous tensor: one of a single element is that with any stride, and no view of bytes."""
    return x.detach().as_strided((x.numel(),), (1,)).view(torch.uint8)


def starts(sizes: Sequence[int]) -> list[int]:
    """Where pieces begin that lie one after the other."""
    return [sum(sizes[:i]) for i in range(len(sizes))]


def added(parts: Sequence[Tensor], op: str) -> Tensor:
    """The sum in the order of `parts`, of narrow types in float32; rounded by who copies it."""
    narrow = parts[0].dtype in _NARROW
    total = parts[0].float() if narrow else parts[0]
    for part in parts[1:]:
        total = OPS[op](total, part.float() if narrow else part)
    return total
