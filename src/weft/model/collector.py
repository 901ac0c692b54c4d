"""Python's collector of cyclic garbage, left alone for a while. In: nothing. Out: a context manager.

Tracing and planning make hundreds of thousands of objects that all stay; every few thousand of them the collector looks at all those
before, and finds nothing. Without it both take a fifth less time, and a few tens of megabytes more until they end.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Without the collector; as it was afterwards, also after an error.

    >>> with uncollected():
    ...     gc.isenabled()
    False
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
