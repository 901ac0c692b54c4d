"""A terminal, or a pipe, that may go away while a run goes on. In: a descriptor. Out: a text stream that then writes nothing.

A closed window asks the run to stop, and must not end what saves because of it. Not modelled: input.
"""

from __future__ import annotations

import errno
import io
import signal
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

ASKING = (signal.SIGHUP, signal.SIGUSR1)  # to stop, beside SIGTERM and Ctrl-C: the terminal is gone, a batch system's time is up
_GONE = (errno.EIO, errno.EPIPE, errno.ENXIO)


class _Lasting(io.FileIO):
    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            return memoryview(data).nbytes


def lasting(descriptor: int) -> TextIO:
    """A stream to `descriptor`, which stays open; what is written when nobody reads there any more is dropped."""
    raw = _Lasting(descriptor, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding=sys.stdout.encoding, errors="replace", line_buffering=True)
