"""Memory of a rank that outlives it. In: a size. Out: a mapping, the predecessor's where this rank replaces one.

It is an anonymous file (memfd) of which the process that forks ranks holds a descriptor; whoever is forked next inherits it. Nothing has a
name, so nothing is left when that process ends. Not modelled: several sizes; a launch has one plan, and a rank one state.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

LARGEST = 256


@dataclass
class Kept:
    """The memory of `rank`; `inherited`: (descriptor, bytes) of its predecessor's. Whoever holds it is told over `holder`; None: nobody
    does, and it ends with the rank."""

    holder: socket.socket | None
    rank: int
    inherited: tuple[int, int] | None = None
    _mapping: mmap.mmap | None = field(default=None, init=False)

    def memory(self, size: int) -> tuple[mmap.mmap, bool]:
        """(memory of `size` bytes, whether it was there before), the same at every call. Raises OSError."""
        if self._mapping is not None and len(self._mapping) == size:
            return self._mapping, True
        if self._mapping is None and self.inherited is not None and self.inherited[1] == size:
            self._mapping = mmap.mmap(self.inherited[0], size)
            return self._mapping, True
        descriptor = os.memfd_create("weft-state", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, size)  # now, and not as a SIGBUS in a step
            self._mapping = mmap.mmap(descriptor, size)
            if self.holder is not None:
                socket.send_fds(self.holder, [json.dumps([self.rank, size]).encode()], [descriptor])
        finally:
            os.close(descriptor)
        return self._mapping, False


class Held:
    """What the process that forks ranks holds of them: by rank, a descriptor and its bytes."""

    def __init__(self) -> None:
        self.socket, self.ranks_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.setblocking(False)
        self._by_rank: dict[int, tuple[int, int]] = {}

    def take(self) -> None:
        """Take what ranks have sent."""
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(self.socket, LARGEST, 1)
            except BlockingIOError:
                return
            rank, size = json.loads(data)
            before, self._by_rank[rank] = self._by_rank.get(rank), (descriptors[0], size)
            if before is not None:
                os.close(before[0])

    def of(self, rank: int) -> Kept:
        """In a rank that was forked: its memory; the descriptors of the others are closed."""
        for other, (descriptor, _) in self._by_rank.items():
            if other != rank:
                os.close(descriptor)
        self.socket.close()
        return Kept(self.ranks_end, rank, self._by_rank.get(rank))


def available_bytes() -> float:
    """Memory of this host that processes may still take; infinite where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return inf
