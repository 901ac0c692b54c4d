"""One group's collectives through the C library. In: contiguous tensors on the host. Out: results in place, or `NativeWork` to wait for.

The rules of `Group` apply: all members call the same collectives in the same order. A mismatched call breaks the group on every member.
Tensors are referenced until their operations end.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from ctypes import byref, c_int, c_int64, c_void_p
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.world.recorder import process_state
from shardwise.world.shared_memory import segment

CHUNK_BYTES = 256 << 10
RING_BYTES = 16 << 20
ALL_RINGS_BYTES = 8 << 30  # addresses, not memory
DIRECT_BYTES = 32 << 10
JOB_BYTES = 64 << 10  # below, agreeing on a job costs more than the copies that it saves
SPIN_S = 50e-6
_DTYPES = {
    dtype: code
    for code, dtype in enumerate(
        (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    )
}
_OTHER_DTYPE = 31  # any other type, which can be moved but not reduced
_OPS = {"sum": 0, "max": 1, "min": 2}
_ALL_REDUCE, _GATHER, _REDUCE_SCATTER, _EXCHANGE, _BROADCAST = range(5)
_JOB = 5
_DONE, _PENDING, _TIMED_OUT, _DEAD, _MISMATCH, _LEFT = range(6)


class _BufferCollective(NamedTuple):
    """A collective on a shared buffer, in the order of the library's arguments; addresses are 0 if there is no such tensor."""

    kind: int
    dtype: int
    op: int
    root: int
    buffer: int
    offset: int
    data: int
    out: int
    size: int
    item: int
    pieces: Any


class NativeEngine:
    """The C library's state in this process, which waiting ranks advance. `crowded`: ranks outnumber cores, so waiting must not spin."""

    def __init__(self, library: ctypes.CDLL, crowded: bool) -> None:
        self.library = library
        self.handle = library.shardwise_engine(0.0 if crowded else SPIN_S)

    def segment_bytes(self, size: int) -> int:
        """Return the bytes of the segment of a group of `size`."""
        return int(self.library.shardwise_segment_bytes(size, CHUNK_BYTES, ring_bytes(size)))


def ring_bytes(size: int) -> int:
    """Bytes of messages that can be in flight between two ranks of a group."""
    return max(1 << 20, min(RING_BYTES, ALL_RINGS_BYTES // (size * size))) // 4096 * 4096


class NativeWork:
    """A pending operation."""

    __slots__ = ("_channel", "_handle")

    def __init__(self, channel: NativeChannel, handle: int) -> None:
        self._channel = channel
        self._handle = handle

    def wait(self) -> None:
        """Return when it has ended. Raises RuntimeError if a rank has ended, is late, or made a mismatched call."""
        if self._handle:
            self._channel.finish(self._handle)
            self._handle = 0

    def is_completed(self) -> bool:
        """Advance all operations; return whether this one has ended."""
        if self._handle and self._channel.library.shardwise_test(self._handle) == _DONE:
            self.wait()
        return not self._handle


class NativeChannel:
    """One group of ranks, on a segment that all of them have mapped."""

    def __init__(
        self, engine: NativeEngine, mapping: mmap.mmap, index: int, ranks: Sequence[int], pids: Sequence[int], timeout_s: float
    ) -> None:
        self.library = engine.library
        self.size, self.index = len(ranks), index
        self.shared_buffer: Callable[[int, torch.dtype], Tensor]  # set by `setup`, which has the store
        self._ranks, self._pids, self._mapping = tuple(ranks), tuple(pids), mapping
        self._timeout_s = timeout_s
        descriptors = [os.pidfd_open(pid) if i != index else -1 for i, pid in enumerate(pids)]
        self._channel = c_void_p(
            self.library.shardwise_open(
                engine.handle,
                segment.mapping_address(mapping),
                self.size,
                index,
                CHUNK_BYTES,
                ring_bytes(self.size),
                (c_int * self.size)(*descriptors),
            )
        )
        if not self._channel:
            raise MemoryError("no memory for a group")
        # Holds the mapping, which must exist as long as the library may access it.
        weakref.finalize(self, _close_channel, self.library, self._channel, mapping).atexit = False
        self._operands: dict[int, object] = {}
        self._buffers: list[tuple[int, int, int]] = []  # first address, end, number
        self._num_buffers = 0

    def widens(self, dtype: torch.dtype) -> bool:
        """Return whether tensors of this type can be reduced here, narrow ones in float32."""
        return dtype in _DTYPES and bool(self.library.shardwise_adds(_DTYPES[dtype]))

    def all_reduce(self, x: Tensor, op: str, wait: bool = True) -> NativeWork | None:
        """Replace `x` by the sum (maximum, minimum) over the members."""
        code, data, size = self._reduction_code(x), x.data_ptr(), x.nbytes
        if self._buffers and size > JOB_BYTES and (place := self._find_buffer(data, size)) is not None:
            return self._start_job(
                _BufferCollective(_JOB, code, _OPS[op], 0, place[0], place[1], 0, 0, size, x.element_size(), None), wait, x
            )
        phases = 1 if self.size == 2 or size <= DIRECT_BYTES else 2
        if wait:
            state = self.library.shardwise_all_reduce(
                self._channel, data, size, x.element_size(), code | _OPS[op] << 8 | phases << 16, self._timeout_s
            )
            if state != _DONE:
                self._operands[data] = x  # the operation stays pending in a broken group
                raise self._error(state)
            return None
        return self._start(_ALL_REDUCE, code, _OPS[op], 0, phases, data, data, size, x.element_size(), None, None, wait, x)

    def broadcast(self, x: Tensor, root: int, wait: bool = True) -> NativeWork | None:
        """Replace `x` by that of member `root`."""
        code, data, size = _DTYPES.get(x.dtype, _OTHER_DTYPE), x.data_ptr(), x.nbytes
        if self._buffers and (place := self._find_buffer(data, size)) is not None:
            return self._start_job(
                _BufferCollective(_JOB + 3, code, 0, root, place[0], place[1], 0, 0, size, x.element_size(), None), wait, x
            )
        return self._start(_BROADCAST, code, 0, root, 1, data, data, size, x.element_size(), None, None, wait, x)

    def all_gather(self, out: Tensor, x: Tensor, sizes: Sequence[int], wait: bool = True) -> NativeWork | None:
        """Gather `x` of every member, of `sizes` elements, into flat `out`, member after member."""
        code, item, data = _DTYPES.get(x.dtype, _OTHER_DTYPE), x.element_size(), out.data_ptr()
        pieces = self._byte_sizes(sizes, item)
        if self._buffers and (place := self._find_buffer(data, out.nbytes)) is not None:
            job = _BufferCollective(_JOB + 2, code, 0, 0, place[0], place[1], x.data_ptr(), 0, out.nbytes, item, pieces)
            return self._start_job(job, wait, (out, x))
        return self._start(_GATHER, code, 0, 0, 1, x.data_ptr(), data, out.nbytes, item, pieces, None, wait, (out, x))

    def reduce_scatter(self, out: Tensor, x: Tensor, sizes: Sequence[int], wait: bool = True) -> NativeWork | None:
        """Reduce-scatter flat `x` into `out`, this member's shard of the sum; shards have `sizes` elements in the members' order."""
        code, item, data = self._reduction_code(x), x.element_size(), x.data_ptr()
        pieces = self._byte_sizes(sizes, item)
        if self._buffers and (place := self._find_buffer(data, x.nbytes)) is not None:
            job = _BufferCollective(_JOB + 1, code, 0, 0, place[0], place[1], 0, out.data_ptr(), x.nbytes, item, pieces)
            return self._start_job(job, wait, (out, x))
        return self._start(_REDUCE_SCATTER, code, 0, 0, 1, data, out.data_ptr(), x.nbytes, item, pieces, None, wait, (out, x))

    def exchange(self, out: Tensor, x: Tensor, arriving: Sequence[int], sizes: Sequence[int], wait: bool = True) -> NativeWork | None:
        """Send `sizes[r]` elements of flat `x` to member r, and receive `arriving[r]` from it into flat `out`."""
        code, item = _DTYPES.get(x.dtype, _OTHER_DTYPE), x.element_size()
        sent, received = self._byte_sizes(sizes, item), self._byte_sizes(arriving, item)
        return self._start(_EXCHANGE, code, 0, 0, 1, x.data_ptr(), out.data_ptr(), 0, item, sent, received, wait, (out, x))

    def send(self, x: Tensor, to: int, tag: int) -> NativeWork:
        """Start sending a message to member `to`."""
        return self._message(0, x, to, tag)

    def receive(self, x: Tensor, source: int, tag: int) -> NativeWork:
        """Start receiving a message from member `source`: the oldest of that tag."""
        return self._message(1, x, source, tag)

    def finish(self, handle: int) -> None:
        """Wait for an operation and free it."""
        state = self.library.shardwise_wait(handle, self._timeout_s)
        if state != _DONE:
            raise self._error(state)
        self.library.shardwise_free(handle)
        del self._operands[handle]

    def close(self) -> None:
        """Announce that this member leaves the group; the memory is freed with the last operation's `NativeWork`."""
        self.library.shardwise_leave(self._channel)

    def add_buffer(self, own_mapping: mmap.mmap, all_mappings: Sequence[mmap.mmap]) -> None:
        """Register a buffer of which member i's is mapped at `all_mappings[i]`, until `own_mapping` is freed."""
        number = self._num_buffers
        self._num_buffers += 1
        bases = (c_void_p * self.size)(*(segment.mapping_address(mapping) for mapping in all_mappings))
        if not self.library.shardwise_buffer(self._channel, number, bases):
            raise MemoryError("no memory for a shared buffer")
        start = segment.mapping_address(own_mapping)
        self._buffers.append((start, start + len(own_mapping), number))
        peers = [mapping for i, mapping in enumerate(all_mappings) if i != self.index]
        weakref.finalize(
            own_mapping, partial(_forget_buffer, self.library, self._channel, self._buffers, self._buffers[-1], peers)
        ).atexit = False

    def _reduction_code(self, x: Tensor) -> int:
        code = _DTYPES.get(x.dtype)
        if code is None:
            raise RuntimeError(f"{x.dtype} cannot be added in shared memory")
        return code

    def _find_buffer(self, data: int, size: int) -> tuple[int, int] | None:
        """Return (number, offset) of the buffer that contains these bytes."""
        for start, stop, number in self._buffers:
            if start <= data and data + size <= stop:
                return number, data - start
        return None

    def _byte_sizes(self, sizes: Sequence[int], item: int) -> Any:
        return (c_int64 * self.size)(*(size * item for size in sizes))

    def _start(self, *args: Any) -> NativeWork | None:
        *arguments, wait, keep = args
        handle = c_void_p()
        state = self.library.shardwise_start(self._channel, *arguments, self._timeout_s if wait else 0.0, byref(handle))
        return self._track(state, handle, keep) if handle.value is not None else None

    def _start_job(self, job: _BufferCollective, wait: bool, keep: object) -> NativeWork | None:
        handle = c_void_p()
        timeout_s = self._timeout_s if wait else 0.0
        state = self.library.shardwise_start_job(self._channel, *job, timeout_s, byref(handle))
        return self._track(state, handle, keep) if handle.value is not None else None

    def _message(self, receive: int, x: Tensor, peer: int, tag: int) -> NativeWork:
        return self._track(_PENDING, c_void_p(self.library.shardwise_message(self._channel, receive, peer, x.data_ptr(), x.nbytes, tag)), x)

    def _track(self, state: int, handle: c_void_p, keep: object) -> NativeWork:
        assert handle.value is not None
        self._operands[handle.value] = keep
        if state not in (_DONE, _PENDING):
            raise self._error(state)
        return NativeWork(self, handle.value)

    def _error(self, state: int) -> RuntimeError:
        culprit = self.library.shardwise_culprit(self._channel)
        who = format_member(self._ranks, self._pids, culprit) if culprit >= 0 else "another rank"
        if state == _DEAD:
            return RuntimeError(f"remote process exited: {who}")
        if state == _LEFT:
            return RuntimeError(f"connection closed by {who}")
        if state == _TIMED_OUT:
            return RuntimeError(timeout_message(self._timeout_s, self._ranks, self._pids, self.index, culprit))
        return RuntimeError(f"the call of {who} differs from another rank's in collective, size, type, order or shared buffers")


def _forget_buffer(
    library: ctypes.CDLL,
    channel: c_void_p,
    buffers: list[tuple[int, int, int]],
    entry: tuple[int, int, int],
    peer_mappings: list[mmap.mmap],
) -> None:
    buffers.remove(entry)
    if channel:
        library.shardwise_buffer(channel, entry[2], None)
    peer_mappings.clear()


def _close_channel(library: ctypes.CDLL, channel: c_void_p, mapping: mmap.mmap) -> None:
    library.shardwise_leave(channel)
    library.shardwise_close(channel)
    channel.value = None  # a buffer may live longer than its group
    del mapping


def timeout_message(timeout_s: float, ranks: Sequence[int], pids: Sequence[int], index: int, awaited: int) -> str:
    """Return why member `index` timed out; `awaited`: the member that it waited for, -1 if unknown, or `index` itself if all others
    waited for it. That member may itself wait for another; all processes of the host can see one that is stopped (SIGSTOP, a debugger).

    >>> import os
    >>> timeout_message(2, [4, 5], [os.getpid(), os.getpid()], 1, 1)
    'Timed out after 2 s: the other ranks waited for this one, and gave up'
    """
    if awaited == index:
        return f"Timed out after {timeout_s:g} s: the other ranks waited for this one, and gave up"
    who = format_member(ranks, pids, awaited) if awaited >= 0 else "another rank"
    stopped = [format_member(ranks, pids, i) for i, pid in enumerate(pids) if i != index and process_state(pid) in ("T", "t")]
    return f"Timed out after {timeout_s:g} s waiting for {who}" + (f"; stopped: {', '.join(stopped)}" if stopped else "")


def format_member(ranks: Sequence[int], pids: Sequence[int], index: int) -> str:
    """Return the name of a member in messages."""
    return f"rank {ranks[index]} (process {pids[index]})"
