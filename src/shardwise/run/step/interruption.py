"""Interruptions of a step (Ctrl-C, a signal's exception): never half of an update. In: the sections of a step. Out: a refusal to go on.

An update is not interrupted by signals: they come behind it. An exception that comes by other ways leaves a mark, with which every later
use is refused by name until a checkpoint is loaded. So does an interruption of forward or backward where other ranks or buffers may have
gone on. Signals are deferred in the main thread only, where Python runs their handlers.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from shardwise.errors import RunError

_DEFERRED = (signal.SIGINT, signal.SIGTERM)


class WholeSteps:
    """Guard of a state of whole steps. `is_shared`: forward and backward change more than gradients of this rank."""

    def __init__(self, is_shared: bool) -> None:
        self._is_shared = is_shared
        self._half_of = ""  # of what an interruption left a half

    def check(self) -> None:
        """Raise RunError if an interruption has left half a step."""
        if self._half_of:
            raise RunError(
                f"{self._half_of} was interrupted, so that the state may be that of half a step, or of another step than on other ranks: "
                "load a checkpoint (engine.load), or make the engine anew"
            )

    def mark_whole(self) -> None:
        """Forget interruptions, since the whole state was loaded."""
        self._half_of = ""

    @contextmanager
    def guard_computation(self) -> Iterator[None]:
        """Context of forward and backward."""
        self.check()
        try:
            yield
        except Exception:
            raise
        except BaseException:
            if self._is_shared:
                self._half_of = "forward or backward"
            raise

    @contextmanager
    def guard_update(self) -> Iterator[None]:
        """Context of an update."""
        self.check()
        self._half_of = "an update"
        with deferred_signals():
            yield
            self._half_of = ""


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Context in which SIGINT and SIGTERM wait, if their handlers are Python's."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def record_signal(number: int, frame: FrameType | None) -> None:
        came.append(number)

    handlers = {number: handler for number in _DEFERRED if callable(handler := signal.getsignal(number))}
    try:
        for number in handlers:
            signal.signal(number, record_signal)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])
