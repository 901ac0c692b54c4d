"""Output to a terminal or a pipe that may be closed during a run. In: a descriptor. Out: a text stream that then drops its output.

A closed window asks the run to stop, and must not abort the save that follows. Not modelled: input.
"""

from __future__ import annotations

import errno
import io
import signal
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

STOP_SIGNALS = (signal.SIGHUP, signal.SIGUSR1)  # stop requests besides SIGTERM and Ctrl-C: closed terminal, end of a batch job's time
_CLOSED_ERRORS = (errno.EIO, errno.EPIPE, errno.ENXIO)


class _DurableFile(io.FileIO):
    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _CLOSED_ERRORS:
                raise
            return memoryview(data).nbytes


def open_durable_stream(descriptor: int) -> TextIO:
    """Return a stream to `descriptor`, which stays open; output is dropped once the other end is closed."""
    raw = _DurableFile(descriptor, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding=sys.stdout.encoding, errors="replace", line_buffering=True)
