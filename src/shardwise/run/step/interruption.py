"""Interruptions of a step (Ctrl-C, a signal's exception): never half of an update. In: the sections of a step. Out: a refusal to go on.

An update is not interrupted by signals: they come behind it. An exception that comes by other ways leaves a mark, with which every later
use is refused by name until a checkpoint is loaded. So does an interruption of forward or backward where other ranks or buffers may have
gone on. Signals are deferred in the main thread only, where Python runs their handlers.
"""

from __future__ import annotations

import signal
import threading
from importlib import import_module
from types import FrameType, TracebackType
from typing import Any

from shardwise.errors import RunError

_DEFERRED = (signal.SIGINT, signal.SIGTERM)
# The functions behind those of `signal`, which look every result up among its enumerations: some 15 us an update.
_signals: Any = import_module("_signal")


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
        """Mark the state as that of whole steps: an update has ended, or a checkpoint was loaded."""
        self._half_of = ""

    def mark_half(self, error: BaseException) -> None:
        """Mark forward or backward as interrupted by `error`, where other ranks or buffers may have gone on."""
        if self._is_shared and not isinstance(error, Exception):
            self._half_of = "forward or backward"

    def guard_update(self) -> _UpdateGuard:
        """Context of an update."""
        return _UpdateGuard(self)

    def begin_update(self) -> None:
        """Mark an update as begun, until `mark_whole`."""
        self.check()
        self._half_of = "an update"


class _UpdateGuard:
    """Context of an update, in which SIGINT and SIGTERM wait, if their handlers are Python's. Generators take three times as long."""

    __slots__ = ("_came", "_handlers", "_steps")

    def __init__(self, steps: WholeSteps) -> None:
        self._steps, self._handlers = steps, dict[int, Any]()
        self._came: list[int] = []

    def __enter__(self) -> None:
        self._steps.begin_update()
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: handler for number in _DEFERRED if callable(handler := _signals.getsignal(number))}
            try:
                for number in self._handlers:
                    _signals.signal(number, self._record_signal)
            except BaseException:  # of a handler that was still in place
                self._restore_handlers()
                raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if kind is None:
            self._steps.mark_whole()
        self._restore_handlers()
        if self._came:
            signal.raise_signal(self._came[0])

    def _restore_handlers(self) -> None:
        for number, handler in self._handlers.items():
            _signals.signal(number, handler)

    def _record_signal(self, number: int, frame: FrameType | None) -> None:
        self._came.append(number)
