"""Persistent memory of a rank, which survives its process. In: a name and a size. Out: a mapping, the predecessor's if this rank replaces
a failed one; those of other ranks.

It is an anonymous file (memfd) for each rank and name; the fork server holds their descriptors, which all forked ranks inherit. They have
no names in a file system, so nothing remains when the fork server ends. Not modelled: several sizes of one; a launch has one plan, and a
rank one state.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import inf
from pathlib import Path

import torch
from torch import Tensor

from shardwise.world.shared_memory import library

ALIGNMENT_BYTES = 64  # bytes of a cache line: alignment of tensors in shared memory
NAMES = STATE, GRADIENTS = "state", "gradients"  # of memories
MemoryFiles = Mapping[str, Sequence[int]]  # by name, a descriptor for each rank


@dataclass
class PersistentMemory:
    """The persistent memory of `rank`. `create_memory_files`: the memory of all ranks; None: the memory ends with the rank."""

    rank: int
    files: MemoryFiles | None = None
    _mappings: dict[str, mmap.mmap] = field(default_factory=dict, init=False)

    @property
    def survives_rank(self) -> bool:
        """True if it survives the rank and other ranks can read it."""
        return self.files is not None

    def size(self, name: str = STATE) -> int:
        """Bytes of the memory; 0 before the first call of `memory` by this rank or its predecessor."""
        if self.files is not None:
            return os.fstat(self.files[name][self.rank]).st_size
        return len(self._mappings[name]) if name in self._mappings else 0

    def memory(self, size: int, name: str = STATE) -> mmap.mmap:
        """Return memory of `size` bytes, the same at every call; zeros if there was none of this size. Raises OSError."""
        if name in self._mappings and len(self._mappings[name]) == size:
            return self._mappings[name]
        descriptor = self.files[name][self.rank] if self.files is not None else _create_memory_file(name)
        try:
            if os.fstat(descriptor).st_size != size:
                os.ftruncate(descriptor, 0)
                os.posix_fallocate(descriptor, 0, size)  # now, and not as a SIGBUS in a step
            self._mappings[name] = mmap.mmap(descriptor, size)
        finally:
            if self.files is None:
                os.close(descriptor)
        return self._mappings[name]

    def of_rank(self, rank: int, name: str = STATE) -> mmap.mmap:
        """Return the memory of another rank, for reading."""
        assert self.files is not None
        return mmap.mmap(self.files[name][rank], 0)


def create_memory_files(num_ranks: int) -> MemoryFiles:
    """Return empty memory files of each name for so many ranks."""
    return {name: [_create_memory_file(name) for _ in range(num_ranks)] for name in NAMES}


def _create_memory_file(name: str) -> int:
    return os.memfd_create(f"shardwise-{name}", os.MFD_CLOEXEC)


def padded_size(size: int) -> int:
    """Return `size` rounded up to the alignment.

    >>> padded_size(0), padded_size(1), padded_size(64)
    (0, 64, 64)
    """
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def available_bytes() -> float:
    """Bytes of this host's memory available to processes; infinite where the system does not report it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return inf


def copy_past_caches(to: Tensor, source: Tensor) -> int | None:
    """Copy like `to.copy_(source)` into memory that is not read soon; with one thread by non-temporal stores, so that lines need not be
    read before they are written (130 MB beside a second rank: 13 ms instead of 23). Return its `sum_of_words`, which is free then."""
    native = _native_library() if _is_simple(to) and _is_simple(source) and to.dtype is source.dtype else None
    if native is None:
        to.copy_(source)
        return None
    assert to.shape == source.shape
    return int(native.shardwise_put(to.data_ptr(), source.data_ptr(), source.nbytes))


def sum_of_words(x: Tensor) -> int | None:
    """Return the sum of a tensor's 64-bit words and of its remaining bytes, as int64; None if torch has to add them."""
    native = _native_library() if _is_simple(x) else None
    return None if native is None else int(native.shardwise_sum_of_words(x.data_ptr(), x.nbytes))


def _is_simple(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.is_contiguous() and torch.get_num_threads() == 1


@cache
def _native_library() -> ctypes.CDLL | None:
    loaded = library.load()
    return None if isinstance(loaded, str) else loaded
