"""Memory that several processes of one host have mapped. In: a size, or where another process keeps one. Out: a mapping.

A segment is an anonymous file of its maker (memfd): it has no name in /dev/shm, so nothing is left when its processes are gone, however
they end, and the size of /dev/shm does not limit it. Others open it through the maker's descriptor in /proc, as the same user may.
Pages cost memory when they are first touched. Not modelled: systems other than Linux, whose ranks use gloo.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from dataclasses import dataclass
from pathlib import Path

CANNOT = "no shared memory"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a segment is found: the maker's process and descriptor, and its bytes."""

    pid: int
    descriptor: int
    size: int

    def __str__(self) -> str:
        return f"{self.pid}:{self.descriptor}:{self.size}"

    @staticmethod
    def parse(text: str) -> Place:
        """The place that `str` wrote."""
        pid, descriptor, size = map(int, text.split(":"))
        return Place(pid, descriptor, size)


def host() -> str:
    """What two processes have in common that can map each other's segments: boot, process and user name spaces, and user.

    Where there is no such thing, the name of the machine and a word that says so.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "user")]
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:
        return f"{CANNOT}: {error} on {platform.node()}"
    return "/".join([boot, *spaces, str(os.getuid())])


def create(size: int) -> tuple[mmap.mmap, Place]:
    """A zeroed segment and its place. The descriptor stays open until `close_place`. Raises OSError."""
    descriptor = os.memfd_create("weft", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        return mmap.mmap(descriptor, size), Place(os.getpid(), descriptor, size)
    except OSError:
        os.close(descriptor)
        raise


def attach(place: Place) -> mmap.mmap:
    """The segment of another process. Raises OSError where that process is gone, is another user's, or forbids it."""
    descriptor = os.open(f"/proc/{place.pid}/fd/{place.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(descriptor, place.size)
    finally:
        os.close(descriptor)


def close_place(place: Place) -> None:
    """After all have attached: the memory then lives as long as its mappings."""
    os.close(place.descriptor)


def address(mapping: mmap.mmap) -> int:
    """Where the mapping begins. It stays there as long as the object lives."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))
