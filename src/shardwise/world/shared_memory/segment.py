"""Shared-memory segments of processes on one host. In: a size, or the handle of another process's segment. Out: a mapping.

A segment is an anonymous file of its creator (memfd): it has no name in /dev/shm, so nothing remains when its processes end, however they
end, and the size of /dev/shm does not limit it. Others open it through the creator's descriptor in /proc, as the same user may.
Pages use memory when they are first touched. Not modelled: systems other than Linux, whose ranks use gloo.
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
class SegmentHandle:
    """The handle of a segment: its creator's process and descriptor, and its bytes."""

    pid: int
    descriptor: int
    size: int

    def __str__(self) -> str:
        return f"{self.pid}:{self.descriptor}:{self.size}"

    @staticmethod
    def parse(text: str) -> SegmentHandle:
        """Return the handle that `str` wrote."""
        pid, descriptor, size = map(int, text.split(":"))
        return SegmentHandle(pid, descriptor, size)


def host_identity() -> str:
    """Return an identity that is equal in processes that can map each other's segments: boot, process and user name spaces, and user.

    If they are unavailable: `CANNOT`, the reason and the machine's name.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "user")]
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:
        return f"{CANNOT}: {error} on {platform.node()}"
    return "/".join([boot, *spaces, str(os.getuid())])


def create_segment(size: int) -> tuple[mmap.mmap, SegmentHandle]:
    """Return a zeroed segment and its handle. The descriptor stays open until `close_handle`. Raises OSError."""
    descriptor = os.memfd_create("shardwise", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        return mmap.mmap(descriptor, size), SegmentHandle(os.getpid(), descriptor, size)
    except OSError:
        os.close(descriptor)
        raise


def attach_segment(handle: SegmentHandle) -> mmap.mmap:
    """Map the segment of another process. Raises OSError if that process has ended, is another user's, or forbids it."""
    descriptor = os.open(f"/proc/{handle.pid}/fd/{handle.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(descriptor, handle.size)
    finally:
        os.close(descriptor)


def close_handle(handle: SegmentHandle) -> None:
    """Close the descriptor after all have attached: the memory then lives as long as its mappings."""
    os.close(handle.descriptor)


def mapping_address(mapping: mmap.mmap) -> int:
    """Return the address of a mapping, which is fixed as long as the object lives."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))
