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

from weft.world.recorder import Recorder

STEPS = 10.0
LEAST, KEPT = 3, 50


class Pace:
    """The step time limits of one rank. `is_regular`: False if a step may compile, for an unknown time.

    >>> pace = Pace(Recorder())
    >>> [pace.announced(s) for s in (0.5, 0.1, 0.1, 0.1)]
    [inf, inf, 1.0, 1.0]
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self.regular = recorder, True
        self._seconds: deque[float] = deque(maxlen=KEPT)
        self._lasts_s, self._keeps = inf, False
        self._inside = 0  # number of enclosing `untimed` contexts

    def announced(self, seconds: float) -> float:
        """Return the time limit of the next step in seconds, after one of `seconds`."""
        self._seconds.append(seconds)
        if len(self._seconds) >= LEAST and self.regular:
            self._lasts_s = STEPS * median(self._seconds)
        return self._lasts_s

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context of a step."""
        began = time.monotonic()
        self._announce(self._lasts_s)
        yield
        self.announced(time.monotonic() - began)
        self._between()

    def keep(self) -> None:
        """Apply the limit to the time between steps too from now on, for loops that mark all other work by `untimed`."""
        self._keeps = True

    @contextmanager
    def long(self) -> Iterator[None]:
        """Context of work of unknown duration; may be nested."""
        self._recorder.patience(inf)
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
        self._between()

    def _between(self) -> None:
        self._announce(self._lasts_s if self._keeps else inf)

    def _announce(self, seconds: float) -> None:
        self._recorder.patience(inf if self._inside else seconds)
