"""The transport in Python and torch, for machines without a C compiler: the interface of `native`, its own layout, no atomic operations.

In: contiguous tensors on the host. Out: results in place, or `PortableWork` to wait for. Each operation is a generator that yields the
member it waits for; a waiting rank runs all generators of its process. Waits sleep with back-off, up to a millisecond, and never spin.

Not modelled: two calls that match by chance.
"""

from __future__ import annotations

import mmap
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from shardwise.world.shared_memory.portable.job import BufferCollectives
from shardwise.world.shared_memory.portable.rings import MessageRings
from shardwise.world.shared_memory.portable.segment import KINDS, OPS, AwaitedMembers, SegmentLayout, SegmentView, byte_view, piece_starts
from shardwise.world.shared_memory.portable.slots import ChunkStreams

CHECK_S = 0.02
LONGEST_SLEEP_S = 1e-3
_DTYPES = {
    dtype: code
    for code, dtype in enumerate(
        (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    )
}
_OTHER_DTYPE = 31  # any other type, which can be moved but not reduced


class PortableEngine:
    """All channels of this process, which a waiting rank advances."""

    def __init__(self) -> None:
        self.channels: weakref.WeakSet[PortableChannel] = weakref.WeakSet()
        self.lock = threading.RLock()

    def segment_bytes(self, size: int) -> int:
        """Return the bytes of the segment of a group of `size`."""
        return SegmentLayout(size).total

    def open(self, mapping: mmap.mmap, index: int, ranks: Sequence[int], pids: Sequence[int], timeout_s: float) -> PortableChannel:
        """Return the channel of `ranks` on a segment that all of them have mapped."""
        channel = PortableChannel(self, mapping, index, ranks, pids, timeout_s)
        with self.lock:
            self.channels.add(channel)
        return channel

    def progress(self) -> bool:
        """Advance all channels; return whether anything progressed."""
        with self.lock:
            moved = [channel.progress() for channel in self.channels if channel.is_busy]
            return any(moved)


class PortableWork:
    """A pending operation."""

    __slots__ = ("_channel", "blocked", "done", "keep")

    def __init__(self, channel: PortableChannel, keep: object) -> None:
        self._channel = channel
        self.keep = keep
        self.done = False
        self.blocked = -1

    def wait(self) -> None:
        """Return when it has ended. Raises RuntimeError if a rank has ended, is late, or made a mismatched call."""
        if not self.done:
            self._channel.finish(self)

    def end(self) -> None:
        """Mark it as ended."""
        self.done = True
        self.keep = None

    def is_completed(self) -> bool:
        """Advance all operations; return whether this one has ended."""
        if not self.done:
            self._channel.engine.progress()
        return self.done


class PortableChannel:
    """One group of ranks; created by `PortableEngine.open`."""

    def __init__(
        self, engine: PortableEngine, mapping: mmap.mmap, index: int, ranks: Sequence[int], pids: Sequence[int], timeout_s: float
    ) -> None:
        self.engine = engine
        self.size, self.index = len(ranks), index
        self.shared_buffer: Callable[[int, torch.dtype], Tensor]  # set by `setup`, which has the store
        self._timeout_s = timeout_s
        self._memory = SegmentView(mapping, index, ranks, pids)
        self._stream, self._job, self._message = ChunkStreams(self._memory), BufferCollectives(self._memory), MessageRings(self._memory)
        self._exits = {i: os.pidfd_open(pid) for i, pid in enumerate(pids) if i != index}
        weakref.finalize(self, _leave_group, self._memory, tuple(self._exits.values())).atexit = False
        self._number, self._num_jobs = 0, 0
        self._streams: deque[tuple[AwaitedMembers, PortableWork]] = deque()
        self._jobs: deque[tuple[AwaitedMembers, PortableWork]] = deque()
        self._sends: list[deque[tuple[AwaitedMembers, PortableWork]]] = [deque() for _ in ranks]

    def widens(self, dtype: torch.dtype) -> bool:
        """Return whether tensors of this type can be reduced here, narrow ones in float32."""
        return dtype in _DTYPES

    def all_reduce(self, x: Tensor, op: str, wait: bool = True) -> PortableWork | None:
        """Replace `x` by the sum (maximum, minimum) over the members."""
        if x.dtype not in _DTYPES:
            raise RuntimeError(f"{x.dtype} cannot be added in shared memory")
        kind = self._kind("all_reduce", x, list(OPS).index(op))
        place = self._job.find(x)
        if place is not None:
            return self._begin(self._jobs, partial(self._job.run, "all_reduce", kind, place, x, x, [], op), x, wait)
        return self._begin(self._streams, partial(self._stream.all_reduce, kind, x.reshape(-1), op), x, wait)

    def broadcast(self, x: Tensor, root: int, wait: bool = True) -> PortableWork | None:
        """Replace `x` by that of member `root`."""
        kind, sizes = self._kind("broadcast", x, root), [x.nbytes if i == root else 0 for i in range(self.size)]
        steps = partial(self._stream.gather, kind, byte_view(x), byte_view(x), sizes, [0] * self.size, [root])
        return self._begin(self._streams, steps, x, wait)

    def all_gather(self, out: Tensor, x: Tensor, sizes: Sequence[int], wait: bool = True) -> PortableWork | None:
        """Gather `x` of every member, of `sizes` elements, into flat `out`, member after member."""
        kind, pieces = self._kind("gather", x), [size * x.element_size() for size in sizes]
        place = self._job.find(out)
        if place is not None:
            return self._begin(self._jobs, partial(self._job.run, "gather", kind, place, out, x, pieces, ""), (out, x), wait)
        steps = partial(self._stream.gather, kind, byte_view(x), byte_view(out), pieces, piece_starts(pieces), list(range(self.size)))
        return self._begin(self._streams, steps, (out, x), wait)

    def reduce_scatter(self, out: Tensor, x: Tensor, sizes: Sequence[int], wait: bool = True) -> PortableWork | None:
        """Reduce-scatter flat `x` into `out`, this member's shard of the sum; shards have `sizes` elements in the members' order."""
        kind, pieces = self._kind("reduce_scatter", x), [size * x.element_size() for size in sizes]
        place = self._job.find(x)
        if place is not None:
            return self._begin(self._jobs, partial(self._job.run, "reduce_scatter", kind, place, x, out, pieces, "sum"), (out, x), wait)
        return self._begin(self._streams, partial(self._stream.reduce_scatter, kind, out.reshape(-1), byte_view(x), pieces), (out, x), wait)

    def exchange(self, out: Tensor, x: Tensor, arriving: Sequence[int], sizes: Sequence[int], wait: bool = True) -> PortableWork | None:
        """Send `sizes[r]` elements of flat `x` to member r, and receive `arriving[r]` from it into flat `out`."""
        kind, item = self._kind("exchange", x), x.element_size()
        steps = partial(self._stream.exchange, kind, byte_view(x), byte_view(out), [n * item for n in sizes], [n * item for n in arriving])
        return self._begin(self._streams, steps, (out, x), wait)

    def send(self, x: Tensor, to: int, tag: int) -> PortableWork:
        """Start sending a message to member `to`."""
        work = self._begin(self._sends[to], partial(self._message.send, byte_view(x), to, tag), x, False)
        assert work is not None
        return work

    def close(self) -> None:
        """Announce that this member leaves the group."""
        self._memory.leave()

    def add_buffer(self, own_mapping: mmap.mmap, all_mappings: Sequence[mmap.mmap]) -> None:
        """Register a buffer of which member i's is mapped at `all_mappings[i]`, until `own_mapping` is freed."""
        self._job.add_buffer(own_mapping, all_mappings)

    def receive(self, x: Tensor, source: int, tag: int) -> PortableWork:
        """Start receiving a message from member `source`: the oldest of that tag."""
        with self.engine.lock:
            work = PortableWork(self, x)
            work.blocked = source
            self._message.receive(byte_view(x), source, tag, work.end)
            self.progress()
        return work

    # The methods below run under the engine's lock.

    @property
    def is_busy(self) -> bool:
        """True if an operation is pending."""
        return bool(self._streams or self._jobs or any(self._sends) or self._message.is_busy)

    def progress(self) -> bool:
        """Advance all operations; return whether anything progressed."""
        moved = [_advance_queue(self._streams), *(_advance_queue(queue) for queue in self._sends if queue)]
        moved.append(self._run_jobs())
        return any([*moved, *(self._message.progress(source) for source in self._memory.peers)])

    def finish(self, work: PortableWork) -> None:
        """Wait for `work`."""
        began = checked = time.monotonic()
        pause = 0.0
        while not work.done:
            moved = self.engine.progress()
            if work.done:
                break
            if self._memory.words[0]:
                raise self._memory.broken_error()
            now = time.monotonic()
            if now - checked > CHECK_S:
                checked = now
                self._check(work, now - began)
            if moved:
                pause = 0.0
            else:
                time.sleep(pause)
                pause = min(LONGEST_SLEEP_S, pause * 1.3 + 2e-6)

    def _check(self, work: PortableWork, waited_s: float) -> None:
        """Raise for an awaited member that has ended, left the group, or is late."""
        blocked = work.blocked
        if blocked >= 0:
            poll = select.poll()
            poll.register(self._exits[blocked], select.POLLIN)
            # It may have done its part before it ended.
            if (self._memory.has_left(blocked) or poll.poll(0)) and not (self.engine.progress() or work.done) and work.blocked == blocked:
                raise self._memory.exited_error(blocked)  # ranks that wait for this one get the same culprit
        if waited_s > self._timeout_s:
            raise self._memory.timeout_error(blocked, self._timeout_s)

    def _begin(
        self, queue: deque[tuple[AwaitedMembers, PortableWork]], make: Callable[[int], AwaitedMembers], keep: object, wait: bool
    ) -> PortableWork | None:
        with self.engine.lock:
            work = PortableWork(self, keep)
            number = 0
            if queue is self._streams:
                number, self._number = self._number, self._number + 1
            elif queue is self._jobs:
                number, self._num_jobs = self._num_jobs, self._num_jobs + 1
            queue.append((make(number), work))
            self.progress()
        if wait:
            work.wait()
            return None
        return work

    def _kind(self, name: str, x: Tensor, detail: int = 0) -> int:
        return KINDS.index(name) | _DTYPES.get(x.dtype, _OTHER_DTYPE) << 8 | detail << 16

    def _run_jobs(self) -> bool:
        # Jobs are posted in order and end in order; each can do its part while an earlier one waits for peers.
        moved = [_advance_operation(steps, work) for steps, work in list(self._jobs) if not work.done]
        while self._jobs and self._jobs[0][1].done:
            self._jobs.popleft()
        return any(moved)


def _leave_group(memory: SegmentView, exits: Sequence[int]) -> None:
    memory.leave()
    for descriptor in exits:
        os.close(descriptor)


def _advance_operation(steps: AwaitedMembers, work: PortableWork) -> bool:
    """Run an operation until it waits for a member; return whether it ended."""
    blocked = next(steps, None)
    if blocked is None:
        work.end()
        return True
    work.blocked = blocked
    return False


def _advance_queue(queue: deque[tuple[AwaitedMembers, PortableWork]]) -> bool:
    moved = False
    while queue:
        if not _advance_operation(*queue[0]):
            for _, work in queue:
                work.blocked = queue[0][1].blocked
            return moved
        queue.popleft()
        moved = True
    return moved
