"""Memory of a rank that outlives it. In: a name and a size. Out: a mapping, the predecessor's where this rank replaces one.

It is an anonymous file (memfd) of which the process that forks ranks holds a descriptor; whoever is forked next inherits it. Nothing has a
name, so nothing is left when that process ends. Not modelled: several sizes of a name; a launch has one plan, and a rank one state.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

LARGEST = 256
STATE, GRADIENTS = "state", "gradients"  # names of memory
Inherited = Mapping[str, tuple[int, int]]  # by name, a descriptor and its bytes


@dataclass
class Kept:
    """The memory of `rank`; `inherited`: its predecessor's. Whoever holds it is told over `holder`; None: nobody does, and it ends with the
    rank."""

    holder: socket.socket | None
    rank: int
    inherited: Inherited = field(default_factory=dict)
    _mappings: dict[str, mmap.mmap] = field(default_factory=dict, init=False)

    def memory(self, size: int, name: str = STATE) -> tuple[mmap.mmap, bool]:
        """(memory of `size` bytes, whether it was there before), the same at every call. Raises OSError."""
        if self.size(name) == size:
            if name not in self._mappings:
                self._mappings[name] = mmap.mmap(self.inherited[name][0], size)
            return self._mappings[name], True
        descriptor = os.memfd_create(f"weft-{name}", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, size)  # now, and not as a SIGBUS in a step
            self._mappings[name] = mmap.mmap(descriptor, size)
            if self.holder is not None:
                socket.send_fds(self.holder, [json.dumps([self.rank, size, name]).encode()], [descriptor])
        finally:
            os.close(descriptor)
        return self._mappings[name], False

    def size(self, name: str) -> int:
        """Bytes of the memory of that name; 0 where there is none."""
        return len(self._mappings[name]) if name in self._mappings else self.inherited.get(name, (0, 0))[1]


class Held:
    """What the process that forks ranks holds of them: by rank and name, a descriptor and its bytes."""

    def __init__(self) -> None:
        self.socket, self.ranks_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.setblocking(False)
        self._by_rank: dict[int, dict[str, tuple[int, int]]] = {}

    def take(self) -> None:
        """Take what ranks have sent."""
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(self.socket, LARGEST, 1)
            except BlockingIOError:
                return
            rank, size, name = json.loads(data)
            named = self._by_rank.setdefault(rank, {})
            before, named[name] = named.get(name), (descriptors[0], size)
            if before is not None:
                os.close(before[0])

    def of(self, rank: int) -> Kept:
        """In a rank that was forked: its memory; the descriptors of the others are closed."""
        for other, named in self._by_rank.items():
            for descriptor, _ in named.values() if other != rank else ():
                os.close(descriptor)
        self.socket.close()
        return Kept(self.ranks_end, rank, self._by_rank.get(rank, {}))


def available_bytes() -> float:
    """Memory of this host that processes may still take; infinite where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return inf
