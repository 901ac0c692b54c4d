"""Announce time limits of a rank's steps to the launcher. In: steps as they begin and end. Out: seconds, into the record.

A step may last ten times the median of the last ones; before three steps, while a model is captured or compiled, and in other work of
unknown duration (evaluation, a checkpoint), no limit is announced.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from statistics import median

from shardwise.world.recorder import CollectiveRecorder

LIMIT_IN_STEPS = 10.0
LEAST, KEPT = 3, 50


class StepPace:
    """The step time limits of one rank. `is_regular`: False if a step may compile, for an unknown time.

    >>> pace = StepPace(CollectiveRecorder())
    >>> [pace.next_limit_s(s) for s in (0.5, 0.1, 0.1, 0.1)]
    [inf, inf, 1.0, 1.0]
    """

    def __init__(self, recorder: CollectiveRecorder) -> None:
        self._recorder, self.is_regular = recorder, True
        self._seconds: deque[float] = deque(maxlen=KEPT)
        self._limit_s, self._includes_gaps = inf, False
        self._num_untimed_blocks = 0  # number of enclosing `untimed` contexts

    def next_limit_s(self, seconds: float) -> float:
        """Return the time limit of the next step in seconds, after one of `seconds`."""
        self._seconds.append(seconds)
        if len(self._seconds) >= LEAST and self.is_regular:
            self._limit_s = LIMIT_IN_STEPS * median(self._seconds)
        return self._limit_s

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context of a step."""
        began = time.monotonic()
        self._announce(self._limit_s)
        yield
        self.next_limit_s(time.monotonic() - began)
        self._announce_gap()

    def include_gaps(self) -> None:
        """Apply the limit to the time between steps too from now on, for loops that mark all other work by `untimed`."""
        self._includes_gaps = True

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """Context of work of unknown duration; may be nested."""
        self._recorder.announce_limit(inf)
        self._num_untimed_blocks += 1
        try:
            yield
        finally:
            self._num_untimed_blocks -= 1
        self._announce_gap()

    def _announce_gap(self) -> None:
        self._announce(self._limit_s if self._includes_gaps else inf)

    def _announce(self, seconds: float) -> None:
        self._recorder.announce_limit(inf if self._num_untimed_blocks else seconds)
