"""The transport in Python and torch, for machines without a C compiler. The calls of `native`, a layout of its own, no atomic operations.

In: contiguous tensors on the host. Out: results in place, or `PortableWork` to wait for. Each operation is a generator that yields the
member it waits for; a waiting rank runs all generators of its process. Waiting sleeps longer and longer, to a millisecond, and never spins.

Every counter has one writer, is aligned, and is written after the data that it announces. x86 keeps that order; elsewhere taking a
lock, before the store and after the load, is the barrier. Not modelled: two calls that match by chance.
"""

from __future__ import annotations

import mmap
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from weft.world.shared_memory import segment

CHUNK_BYTES = 1 << 20
RING_BYTES = 4 << 20
DEPTH = 2
JOBS = 64
HEAD_BYTES = 64  # of a message: bytes, tag
CHECK_S = 0.02
LONGEST_SLEEP_S = 1e-3
_WORDS = 8  # of a chunk's head before the sizes, and of a job's descriptor
_OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
_KINDS = ("all_reduce", "gather", "reduce_scatter", "exchange", "broadcast")
_DTYPES = {
    dtype: code
    for code, dtype in enumerate(
        (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    )
}
_NARROW = (torch.bfloat16, torch.float16)

Steps = Iterator[int]  # of the members waited for


class PortableEngine:
    """What a waiting rank drives: all channels of this process."""

    def __init__(self) -> None:
        self.channels: list[PortableChannel] = []
        self.lock = threading.RLock()

    def segment_bytes(self, size: int) -> int:
        """Bytes of the segment of a group of `size`."""
        return _Layout(size).total

    def open(self, mapping: mmap.mmap, index: int, ranks: Sequence[int], pids: Sequence[int], timeout_s: float) -> PortableChannel:
        """The group of `ranks` on a segment that all of them have mapped."""
        channel = PortableChannel(self, mapping, index, ranks, pids, timeout_s)
        self.channels.append(channel)
        return channel

    def progress(self) -> bool:
        """Moves everything that can move; whether anything did."""
        with self.lock:
            moved = [channel.progress() for channel in self.channels if channel.busy]
            return any(moved)


class PortableWork:
    """An operation under way."""

    __slots__ = ("_channel", "blocked", "done", "keep")

    def __init__(self, channel: PortableChannel, keep: object) -> None:
        self._channel = channel
        self.keep = keep
        self.done = False
        self.blocked = -1

    def wait(self) -> None:
        """Returns when it has ended. Raises RuntimeError where a rank is gone, late, or called something else."""
        if not self.done:
            self._channel.finish(self)

    def is_completed(self) -> bool:
        """Whether it has ended; moves what can move."""
        if not self.done:
            self._channel.engine.progress()
        return self.done


class _Layout:
    """Where things lie in a segment: counters in words of 8 bytes first, then slots and rings in bytes."""

    def __init__(self, size: int) -> None:
        n = size
        self.written = 8  # word 0: 1 + the rank whose call did not match, or minus (1 + the rank that is gone)
        self.consumed = self.written + 8 * n
        self.done = self.consumed + n * n
        self.sent = self.done + 8 * n
        self.taken = self.sent + n * n
        self.descriptors = self.taken + n * n
        self.heads = self.descriptors + JOBS * n * _WORDS
        self.head_words = _WORDS + n
        self.slots = -(-8 * (self.heads + n * DEPTH * self.head_words) // 4096) * 4096
        self.rings = self.slots + n * DEPTH * CHUNK_BYTES
        self.total = self.rings + n * n * RING_BYTES


class PortableChannel:
    """One group of ranks; made by `PortableEngine.open`."""

    def __init__(
        self, engine: PortableEngine, mapping: mmap.mmap, index: int, ranks: Sequence[int], pids: Sequence[int], timeout_s: float
    ) -> None:
        self.engine = engine
        self.size, self.index = len(ranks), index
        self.shared_buffer: Callable[[int, torch.dtype], Tensor]  # set by who has the store
        self._ranks, self._pids, self._timeout_s = tuple(ranks), tuple(pids), timeout_s
        self._at = _Layout(self.size)
        self._words = memoryview(mapping).cast("q")
        self._memory = torch.frombuffer(mapping, dtype=torch.uint8)
        self._exits = {i: os.pidfd_open(pid) for i, pid in enumerate(pids) if i != index}
        self._others = [i for i in range(self.size) if i != index]
        self._barrier = threading.Lock()
        self._my_written, self._number, self._num_jobs = 0, 0, 0
        self._read = [0] * self.size
        self._streams: deque[tuple[Steps, PortableWork]] = deque()
        self._jobs: deque[tuple[Steps, PortableWork]] = deque()
        self._sends: list[deque[tuple[Steps, PortableWork]]] = [deque() for _ in ranks]
        self._wanted: list[list[tuple[int, Tensor, PortableWork]]] = [[] for _ in ranks]
        self._early: list[list[_Early]] = [[] for _ in ranks]
        self._taking: list[Steps | None] = [None] * self.size
        self._buffers: dict[int, list[Tensor]] = {}
        self._mine: list[tuple[int, int, int]] = []
        self._num_buffers = 0

    def widens(self, dtype: torch.dtype) -> bool:
        """Whether tensors of this type can be added here, narrow ones in float32."""
        return dtype in _DTYPES

    def all_reduce(self, x: Tensor, op: str, wait: bool = True) -> PortableWork | None:
        """Replaces `x` by the sum (maximum, minimum) over the members."""
        kind = self._kind("all_reduce", x, list(_OPS).index(op))
        found = self._find(x)
        if found is not None:
            return self._begin(self._jobs, partial(self._job, "all_reduce", kind, found, x, x, [], op), x, wait)
        return self._begin(self._streams, partial(self._all_reduce, kind, x.reshape(-1), op), x, wait)

    def broadcast(self, x: Tensor, root: int, wait: bool = True) -> PortableWork | None:
        """Replaces `x` by that of member `root`."""
        kind, sizes = self._kind("broadcast", x, root), [x.nbytes if i == root else 0 for i in range(self.size)]
        steps = partial(self._gather, kind, _flat(x), _flat(x), sizes, [0] * self.size, [root])
        return self._begin(self._streams, steps, x, wait)

    def all_gather(self, out: Tensor, x: Tensor, sizes: Sequence[int], wait: bool = True) -> PortableWork | None:
        """`x` of every member, of `sizes` elements, into flat `out`, member after member."""
        kind, pieces = self._kind("gather", x), [size * x.element_size() for size in sizes]
        found = self._find(out)
        if found is not None:
            return self._begin(self._jobs, partial(self._job, "gather", kind, found, out, x, pieces, ""), (out, x), wait)
        steps = partial(self._gather, kind, _flat(x), _flat(out), pieces, _starts(pieces), list(range(self.size)))
        return self._begin(self._streams, steps, (out, x), wait)

    def reduce_scatter(self, out: Tensor, x: Tensor, sizes: Sequence[int], wait: bool = True) -> PortableWork | None:
        """This member's piece of the sum of flat `x` into `out`; pieces of `sizes` elements lie in the members' order."""
        kind, pieces = self._kind("reduce_scatter", x), [size * x.element_size() for size in sizes]
        found = self._find(x)
        if found is not None:
            return self._begin(self._jobs, partial(self._job, "reduce_scatter", kind, found, x, out, pieces, "sum"), (out, x), wait)
        return self._begin(self._streams, partial(self._reduce_scatter, kind, out.reshape(-1), _flat(x), pieces), (out, x), wait)

    def exchange(self, out: Tensor, x: Tensor, arriving: Sequence[int], sizes: Sequence[int], wait: bool = True) -> PortableWork | None:
        """`sizes[r]` elements of flat `x` to member r, `arriving[r]` from it into flat `out`."""
        kind, item = self._kind("exchange", x), x.element_size()
        steps = partial(self._exchange, kind, _flat(x), _flat(out), [n * item for n in sizes], [n * item for n in arriving])
        return self._begin(self._streams, steps, (out, x), wait)

    def send(self, x: Tensor, to: int, tag: int) -> PortableWork:
        """Starts a message to member `to`."""
        work = self._begin(self._sends[to], partial(self._send, _flat(x), to, tag), x, False)
        assert work is not None
        return work

    def receive(self, x: Tensor, source: int, tag: int) -> PortableWork:
        """Starts to receive a message from member `source`: the oldest of that tag."""
        with self.engine.lock:
            work = PortableWork(self, x)
            work.blocked = source
            early = next((one for one in self._early[source] if one.tag == tag and one.work is None), None)
            if early is None:
                self._wanted[source].append((tag, _flat(x), work))
            else:
                early.work, early.out = work, _flat(x)
                early.deliver(self._early[source])
            self.progress()
        return work

    def add_buffer(self, own: mmap.mmap, all_mappings: Sequence[mmap.mmap]) -> None:
        """Makes known a buffer of which member i's is mapped at `all_mappings[i]`. It is forgotten when `own` is freed."""
        number = self._num_buffers
        self._num_buffers += 1
        # A tensor on `own` would keep it: the channel has only an address of this member's.
        self._buffers[number] = [_bytes_at(one) for i, one in enumerate(all_mappings) if i != self.index]
        start = segment.address(own)
        entry = (start, start + len(own), number)
        self._mine.append(entry)
        weakref.finalize(own, partial(_forget, self._buffers, self._mine, entry)).atexit = False

    # What follows runs under the engine's lock.

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        return bool(self._streams or self._jobs or any(self._sends) or any(self._wanted) or any(self._taking))

    def progress(self) -> bool:
        """Moves what can move; whether anything did."""
        moved = [_run(self._streams), *(_run(queue) for queue in self._sends if queue)]
        moved.append(self._run_jobs())
        return any([*moved, *(self._run_receives(source) for source in self._others)])

    def finish(self, work: PortableWork) -> None:
        """Waits for `work`."""
        began = checked = time.monotonic()
        pause = 0.0
        while not work.done:
            moved = self.engine.progress()
            if work.done:
                break
            if self._words[0]:
                raise self._broken()
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
        """Raises for a member that is waited for and gone, or late."""
        blocked = work.blocked
        who = f"rank {self._ranks[blocked]} (process {self._pids[blocked]})" if blocked >= 0 else "another rank"
        if blocked >= 0:
            poll = select.poll()
            poll.register(self._exits[blocked], select.POLLIN)
            # It may have done its part before it ended.
            if poll.poll(0) and not (self.engine.progress() or work.done) and work.blocked == blocked:
                self._words[0] = -1 - blocked  # who waits for this rank is told of that one
                raise self._broken()
        if waited_s > self._timeout_s:
            raise RuntimeError(f"Timed out after {self._timeout_s:g} s waiting for {who}")

    def _broken(self) -> RuntimeError:
        culprit = abs(self._words[0]) - 1
        who = f"rank {self._ranks[culprit]} (process {self._pids[culprit]})"
        if self._words[0] < 0:
            return RuntimeError(f"remote process exited: {who}")
        return RuntimeError(f"the call of {who} differs from another rank's in collective, size, type, order or shared buffers")

    def _begin(
        self, queue: deque[tuple[Steps, PortableWork]], make: Callable[[PortableWork, int], Steps], keep: object, wait: bool
    ) -> PortableWork | None:
        with self.engine.lock:
            work = PortableWork(self, keep)
            number = 0
            if queue is self._streams:
                number, self._number = self._number, self._number + 1
            elif queue is self._jobs:
                number, self._num_jobs = self._num_jobs, self._num_jobs + 1
            queue.append((make(work, number), work))
            self.progress()
        if wait:
            work.wait()
            return None
        return work

    def _kind(self, name: str, x: Tensor, detail: int = 0) -> int:
        return _KINDS.index(name) | _DTYPES.get(x.dtype, 31) << 8 | detail << 16

    def _put(self, at: int, value: int) -> None:
        with self._barrier:
            pass
        self._words[at] = value

    def _get(self, at: int) -> int:
        value = self._words[at]
        with self._barrier:
            pass
        return value

    def _find(self, x: Tensor) -> tuple[int, int] | None:
        start = x.data_ptr()
        for first, stop, number in self._mine:
            if first <= start and start + x.nbytes <= stop:
                return number, start - first
        return None

    def _slot(self, rank: int, number: int) -> tuple[int, Tensor]:
        """The words and the bytes of chunk `number` of `rank`'s stream."""
        index = rank * DEPTH + number % DEPTH
        start = self._at.slots + index * CHUNK_BYTES
        return self._at.heads + index * self._at.head_words, self._memory[start : start + CHUNK_BYTES]

    def _room(self) -> int:
        """A member that has not yet taken what this one wrote into the next slot; -1 where there is room."""
        lowest = self._my_written - DEPTH
        return next((r for r in self._others if self._get(self._at.consumed + r * self.size + self.index) < lowest + 1), -1)

    def _write(self, work: PortableWork, head: Sequence[int], parts: Sequence[tuple[int, Tensor]]) -> Iterator[int]:
        while (blocked := self._room()) >= 0:
            yield blocked
        at, room = self._slot(self.index, self._my_written)
        for start, data in parts:
            room[start : start + data.numel()].copy_(data)
        for i, word in enumerate(head):
            self._words[at + i] = word
        self._my_written += 1
        self._put(self._at.written + 8 * self.index, self._my_written)

    def _arrived(self, rank: int, kind: int, number: int, size: int) -> tuple[bool, bool, Tensor] | None:
        """(fits, is the last, bytes) of the next chunk of `rank`, if it is there; `size` is what its head must say."""
        if self._get(self._at.written + 8 * rank) <= self._read[rank]:
            return None
        at, data = self._slot(rank, self._read[rank])
        said = self._words[at + 2] if kind & 255 != _KINDS.index("exchange") else self._words[at + _WORDS + self.index]
        if (self._words[at], self._words[at + 1], said) != (number, kind, size):
            self._words[0] = rank + 1
            raise self._broken()
        return True, bool(self._words[at + 3]), data

    def _consume(self, rank: int) -> None:
        self._read[rank] += 1
        self._put(self._at.consumed + self.index * self.size + rank, self._read[rank])

    def _together(self, kind: int, number: int, size: int) -> Iterator[int]:
        for r in self._others:
            while self._arrived(r, kind, number, size) is None:
                yield r

    def _all_reduce(self, kind: int, x: Tensor, op: str, work: PortableWork, number: int) -> Steps:
        step = CHUNK_BYTES // x.element_size()
        for start in range(0, max(1, x.numel()), step):
            own = x[start : start + step]
            head = (number, kind, x.nbytes, int(start + step >= x.numel()))
            yield from self._write(work, head, [(0, _flat(own))])
            yield from self._together(kind, number, x.nbytes)
            if own.numel():
                parts = [own if r == self.index else self._slot(r, self._read[r])[1][: own.nbytes].view(x.dtype) for r in range(self.size)]
                own.copy_(_added(parts, op))
            for r in self._others:
                self._consume(r)

    def _gather(
        self, kind: int, x: Tensor, out: Tensor, sizes: list[int], starts: list[int], roots: list[int], work: PortableWork, number: int
    ) -> Steps:
        total, mine = sum(sizes), sizes[self.index]
        own = out[starts[self.index] : starts[self.index] + mine]
        if self.index in roots and own.data_ptr() != x.data_ptr():
            own.copy_(x)
        chunks = max(1, -(-mine // CHUNK_BYTES)) if self.index in roots else 0
        wrote, arrived = 0, dict.fromkeys((r for r in roots if r != self.index), 0)
        while wrote < chunks or arrived:
            moved = False
            if wrote < chunks and self._room() < 0:
                part = x[wrote * CHUNK_BYTES : min(mine, (wrote + 1) * CHUNK_BYTES)]
                wrote += 1
                yield from self._write(work, (number, kind, total, int(wrote == chunks)), [(0, part)])
                moved = True
            for r in list(arrived):
                found = self._arrived(r, kind, number, total)
                if found is not None:
                    size = min(CHUNK_BYTES, sizes[r] - arrived[r])
                    out[starts[r] + arrived[r] : starts[r] + arrived[r] + size].copy_(found[2][:size])
                    arrived[r] += size
                    self._consume(r)
                    if found[1]:
                        del arrived[r]
                    moved = True
            if not moved:
                yield next(iter(arrived), self._room())

    def _part_bytes(self) -> int:
        return CHUNK_BYTES // self.size // 64 * 64

    def _write_parts(self, kind: int, x: Tensor, sizes: list[int], index: int, total: int, work: PortableWork, number: int) -> Steps:
        width = self._part_bytes()
        parts, start = [], 0
        for r, size in enumerate(sizes):
            low, high = min(size, index * width), min(size, (index + 1) * width)
            if r != self.index and high > low:
                parts.append((r * width, x[start + low : start + high]))
            start += size
        chunks = max(1, -(-max(sizes) // width))
        yield from self._write(work, (number, kind, total, int(index + 1 == chunks), 0, 0, 0, 0, *sizes), parts)

    def _reduce_scatter(self, kind: int, out: Tensor, x: Tensor, sizes: list[int], work: PortableWork, number: int) -> Steps:
        width, mine, first = self._part_bytes(), sizes[self.index], sum(sizes[: self.index])
        for index in range(max(1, -(-max(sizes) // width))):
            yield from self._write_parts(kind, x, sizes, index, x.numel(), work, number)
            yield from self._together(kind, number, x.numel())
            low, high = min(mine, index * width), min(mine, (index + 1) * width)
            if high > low:
                at, item = self.index * width, out.element_size()
                parts = [
                    (x[first + low : first + high] if r == self.index else self._slot(r, self._read[r])[1][at : at + high - low]).view(
                        out.dtype
                    )
                    for r in range(self.size)
                ]
                out[low // item : high // item].copy_(_added(parts, "sum"))
            for r in self._others:
                self._consume(r)

    def _exchange(self, kind: int, x: Tensor, out: Tensor, sizes: list[int], arriving: list[int], work: PortableWork, number: int) -> Steps:
        width, here, there = self._part_bytes(), _starts(sizes), _starts(arriving)
        me = self.index
        out[there[me] : there[me] + arriving[me]].copy_(x[here[me] : here[me] + sizes[me]])
        chunks, wrote, arrived = max(1, -(-max(sizes) // width)), 0, dict.fromkeys(self._others, 0)
        while wrote < chunks or arrived:
            moved = False
            if wrote < chunks and self._room() < 0:
                yield from self._write_parts(kind, x, sizes, wrote, 0, work, number)
                wrote += 1
                moved = True
            for r in list(arrived):
                found = self._arrived(r, kind, number, arriving[r])
                if found is not None:
                    size = max(0, min(width, arriving[r] - arrived[r]))
                    start = there[r] + arrived[r]
                    out[start : start + size].copy_(found[2][me * width : me * width + size])
                    arrived[r] += size
                    self._consume(r)
                    if found[1]:
                        del arrived[r]
                    moved = True
            if not moved:
                yield next(iter(arrived), self._room())

    def _job(
        self,
        name: str,
        kind: int,
        found: tuple[int, int],
        whole: Tensor,
        private: Tensor,
        pieces: list[int],
        op: str,
        work: PortableWork,
        number: int,
    ) -> Steps:
        """A collective on a shared buffer: each member adds its piece of all members' tensors, or writes its piece to all."""
        done = self._at.done

        def at(r: int) -> int:
            return self._at.descriptors + (number % JOBS * self.size + r) * _WORDS

        for r in self._others:
            while self._get(done + 8 * r) <= number - JOBS:
                yield r
        for i, word in enumerate((kind, whole.nbytes, *found), 1):
            self._words[at(self.index) + i] = word
        self._put(at(self.index), number + 1)
        for r in self._others:
            while self._get(at(r)) != number + 1:
                yield r
            if (self._words[at(r) + 1], self._words[at(r) + 2]) != (kind, whole.nbytes) or self._words[at(r) + 3] not in self._buffers:
                self._words[0] = r + 1
                raise self._broken()
        while self._words[done + 8 * self.index] < number:  # an earlier job's part of this member
            yield self._others[0]
        views, others = [], iter(range(self.size - 1))
        for r in range(self.size):
            start = self._words[at(r) + 4]
            views.append(
                _flat(whole) if r == self.index else self._buffers[self._words[at(r) + 3]][next(others)][start : start + whole.nbytes]
            )
        if name == "all_reduce":
            item, count = whole.element_size(), whole.numel()
            low, high = (count * (self.index + k) // self.size * item for k in (0, 1))
            if high > low:
                parts = [view[low:high].view(whole.dtype) for view in views]
                total = _added(parts, op)
                for part in parts:
                    part.copy_(total)
        elif name == "gather":
            start = sum(pieces[: self.index])
            for view in views:
                if view.data_ptr() + start != private.data_ptr():
                    view[start : start + pieces[self.index]].copy_(_flat(private))
        elif pieces[self.index]:
            start = sum(pieces[: self.index])
            stop = start + pieces[self.index]
            private.reshape(-1).copy_(_added([view[start:stop].view(whole.dtype) for view in views], op))
        self._put(done + 8 * self.index, number + 1)
        for r in self._others:
            while self._get(done + 8 * r) <= number:
                yield r

    def _run_jobs(self) -> bool:
        # They are posted in order and end in order; each can do its part while an earlier one waits for others.
        moved = [_advance(steps, work) for steps, work in list(self._jobs) if not work.done]
        while self._jobs and self._jobs[0][1].done:
            self._jobs.popleft()
        return any(moved)

    def _send(self, x: Tensor, to: int, tag: int, work: PortableWork, number: int) -> Steps:
        pair = self.index * self.size + to
        ring = self._at.rings + pair * RING_BYTES
        head = torch.tensor([x.numel(), tag, *[0] * 6], dtype=torch.int64).view(torch.uint8)
        for data in (head, x):
            moved = 0
            while moved < data.numel():
                at = self._words[self._at.sent + pair]
                size = min(data.numel() - moved, RING_BYTES - at % RING_BYTES, RING_BYTES - (at - self._get(self._at.taken + pair)))
                if size == 0:
                    yield to
                    continue
                start = ring + at % RING_BYTES
                self._memory[start : start + size].copy_(data[moved : moved + size])
                moved += size
                self._put(self._at.sent + pair, at + -(-size // HEAD_BYTES) * HEAD_BYTES)

    def _run_receives(self, source: int) -> bool:
        moved = False
        while True:
            if self._taking[source] is None:
                pair = source * self.size + self.index
                # What nobody has asked for yet stays in the ring: it would be copied twice.
                if not self._wanted[source] or self._get(self._at.sent + pair) == self._words[self._at.taken + pair]:
                    return moved
                self._taking[source] = self._take(source, pair)
            steps = self._taking[source]
            assert steps is not None
            moved = True
            if next(steps, None) is not None:
                for _, _, work in self._wanted[source]:
                    work.blocked = source
                return moved
            self._taking[source] = None

    def _from_ring(self, pair: int, out: Tensor) -> Iterator[int]:
        ring, moved = self._at.rings + pair * RING_BYTES, 0
        while moved < out.numel():
            at = self._words[self._at.taken + pair]
            size = min(out.numel() - moved, RING_BYTES - at % RING_BYTES, self._get(self._at.sent + pair) - at)
            if size == 0:
                yield pair // self.size
                continue
            start = ring + at % RING_BYTES
            out[moved : moved + size].copy_(self._memory[start : start + size])
            moved += size
            self._put(self._at.taken + pair, at + -(-size // HEAD_BYTES) * HEAD_BYTES)

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
        _, out, work = wanted.pop(index)
        if out.numel() != size:
            self._words[0] = source + 1
            raise self._broken()
        work.blocked = source
        yield from self._from_ring(pair, out)
        work.done = True


class _Early:
    """A message that came before it was asked for."""

    def __init__(self, tag: int, data: Tensor) -> None:
        self.tag, self.data = tag, data
        self.full = False
        self.work: PortableWork | None = None
        self.out = data

    def deliver(self, waiting: list[_Early]) -> None:
        """Into the tensor of who asked for it, once both are there."""
        if self.full and self.work is not None:
            self.out.copy_(self.data)
            self.work.done = True
            waiting.remove(self)


def _flat(x: Tensor) -> Tensor:
    """The bytes of a contiguous tensor."""
    return x.detach().reshape(-1).view(torch.uint8)


def _starts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:i]) for i in range(len(sizes))]


def _added(parts: Sequence[Tensor], op: str) -> Tensor:
    """The sum in the order of `parts`, of narrow types in float32; rounded by who copies it."""
    narrow = parts[0].dtype in _NARROW
    total = parts[0].float() if narrow else parts[0]
    for part in parts[1:]:
        total = _OPS[op](total, part.float() if narrow else part)
    return total


def _bytes_at(mapping: mmap.mmap) -> Tensor:
    return torch.frombuffer(mapping, dtype=torch.uint8)


def _forget(buffers: dict[int, list[Tensor]], mine: list[tuple[int, int, int]], entry: tuple[int, int, int]) -> None:
    mine.remove(entry)
    buffers.pop(entry[2], None)


def _advance(steps: Steps, work: PortableWork) -> bool:
    """Runs an operation until it waits for somebody; whether it ended."""
    blocked = next(steps, None)
    if blocked is None:
        work.done = True
        work.keep = None
        return True
    work.blocked = blocked
    return False


def _run(queue: deque[tuple[Steps, PortableWork]]) -> bool:
    moved = False
    while queue:
        if not _advance(*queue[0]):
            for _, work in queue:
                work.blocked = queue[0][1].blocked
            return moved
        queue.popleft()
        moved = True
    return moved
