"""When and how a run saves, and what that costs it. In: the state after a step, a clock, what ranks agree about. Out: checkpoints, numbers.

With `run.save = "async"` only the copy of the state is waited for; files are written beside the next steps. A save that is due by the clock
is not due while another is under way; one that is due by its step waits for that. The last save, or the one before a run stops, is waited
for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from weft.errors import CheckpointError
from weft.run.state import checkpoint
from weft.run.state.checkpoint import Beside, Piece, Written
from weft.train.config import Config
from weft.train.doubts import short_of
from weft.train.interval import Interval
from weft.world.world import World

_USUAL = 50  # last steps whose median a step beside a save is compared with

State = Callable[[int], tuple[list[Piece], dict[str, Any]]]


@dataclass
class Costs:
    """What a run's saves took on this rank. Seconds: that training waited; that files were written behind it, of so many `beside` it; that
    steps took longer beside that, each less the median of those before, so that noise is added up with either sign. `size_bytes`: of all
    files of all ranks, on rank 0."""

    saves: int = 0
    size_bytes: int = 0
    waited_s: float = 0.0
    beside: int = 0
    writing_s: float = 0.0
    slower_s: float = 0.0


class Saving:
    """The checkpoints of one attempt at a run; every rank has one, and calls the same. `state`: the pieces after a step, and what is saved
    with them. `step_times` grows as the run goes on. `clocked`: whether a clock may decide when to save."""

    def __init__(
        self,
        world: World,
        folder: Path,
        config: Config,
        state: State,
        step_times: Sequence[float],
        say: Callable[[str], None],
        clocked: bool = True,
    ) -> None:
        self.world, self.folder, self._state, self._times, self._say = world, folder, state, step_times, say
        every, self._keep, self._mode = config.train.checkpoint_every, config.train.keep, config.run.save
        self._every = 0 if every == "auto" else every
        self._interval = Interval(world.num_ranks, time.perf_counter()) if every == "auto" and clocked else None
        self._beside: Beside | None = None
        self._began = 0, 0.0, 0.0  # of the save under way: the steps before it, the clock after its copy, what training waited for that
        self._said_why = False
        self.saved_step = -1
        self.token = 0  # of this run, in its folder
        self.costs = Costs()

    def due(self, done: int | None = None) -> bool:
        """Whether to save: after `done` steps by their number, and without by the clock."""
        if done is not None:
            return self._every > 0 and done % self._every == 0
        return self._interval is not None and not self._under_way and self._interval.due(time.perf_counter())

    @property
    def _under_way(self) -> bool:
        return self._beside is not None and self._beside.step is not None

    def mark(self) -> tuple[int, int]:
        """What `heed` needs the maximum over ranks of."""
        return self._beside.mark() if self._beside is not None else (0, 0)

    def heed(self, failed: int, goes_on: int) -> None:
        """Learn what became of the save under way. Raises `Replaced` or `Removed`, where the run must end."""
        if self._beside is not None:
            self._learn(lambda beside: beside.heed(failed, goes_on))

    def finish(self) -> None:
        """Wait for the save under way. Raises as `heed`."""
        if self._beside is not None:
            began = time.perf_counter()
            with self.world.pace.long():
                self._learn(Beside.finish)
            self.costs.waited_s += time.perf_counter() - began

    def save(self, step: int) -> None:
        """A checkpoint of the state after `step` steps. One that fails is told of and tried again at the next."""
        self.finish()
        if step == self.saved_step:
            return
        began = time.perf_counter()
        try:
            with self.world.pace.long():
                pieces, extra = self._state(step)
                if (beside := self._aside(pieces)) is not None:
                    beside.begin(step, pieces, extra)
                else:
                    self._write(step, pieces, extra)
        except CheckpointError as error:
            self._failed(error)
        now = time.perf_counter()
        self.costs.waited_s += now - began
        self._began = len(self._times), now, now - began
        if self._interval is not None and not self._under_way:
            self._interval.saved(now - began, now)

    def last(self, step: int) -> None:
        """The last checkpoint, written when this returns. Raises CheckpointError where it cannot be."""
        self.finish()
        if step == self.saved_step:
            return
        began = time.perf_counter()
        with self.world.pace.long():
            self._write(step, *self._state(step))
        self.costs.waited_s += time.perf_counter() - began

    def leave(self, wait: bool) -> None:
        """The run ends by an error, or leaves a lost step; with `wait` the save under way has time to become a checkpoint."""
        beside, self._beside = self._beside, None
        if beside is not None:
            with self.world.pace.long():
                beside.leave(wait)

    def _aside(self, pieces: Sequence[Piece]) -> Beside | None:
        """What writes `pieces` beside training; None where that is not to be, or has no room."""
        if self._mode == "async" and self._beside is None:
            if words := short_of(self.world, checkpoint.copy_bytes(pieces)):
                if not self._said_why:
                    self._say(f"checkpoints are written while training waits, not beside it: {words}")
                self._said_why = True
                return None
            self._beside = Beside(self.folder, self.world, keep=self._keep, token=self.token, warn=self._say)
        return self._beside

    def _write(self, step: int, pieces: Sequence[Piece], extra: dict[str, Any]) -> None:
        path = checkpoint.save(self.folder, step, pieces, extra, self.world, keep=self._keep, token=self.token, warn=self._say)
        self.saved_step = step
        self.costs.saves += 1
        self.costs.size_bytes += checkpoint.size_of(path) if self.world.rank == 0 else 0

    def _learn(self, how: Callable[[Beside], Written | None]) -> None:
        assert self._beside is not None
        if not self._under_way:
            return
        number, since, waited_s = self._began
        try:
            written = how(self._beside)
        except CheckpointError as error:
            self._failed(error)
        else:
            if written is None:
                return
            self.saved_step = written.step
            self.costs.saves += 1
            self.costs.size_bytes += written.size_bytes
            self.costs.beside += 1
            self.costs.writing_s += written.seconds
            self.costs.slower_s += slower_s(self._times, number, written.seconds)
        if self._interval is not None:
            self._interval.saved(waited_s + max(0.0, self.costs.slower_s) / max(1, self.costs.beside), since)

    def _failed(self, error: CheckpointError) -> None:
        if isinstance(error, checkpoint.Replaced | checkpoint.Removed):
            raise error
        self._say(f"{error}; training goes on, and step {max(0, self.saved_step)} is the newest checkpoint")

    def report(self) -> dict[str, Any]:
        """What saving cost, and what a failure loses on average: half of what lies between two saves, and what is not on the disk yet."""
        costs = self.costs
        every_s = self._interval.chosen_s if self._interval is not None else self._every * (median(self._times) if self._times else 0.0)
        return {
            "saves": costs.saves,
            "bytes": costs.size_bytes,
            "waited_s": costs.waited_s,
            "beside": costs.beside,
            "writing_s": costs.writing_s,
            "slower_s": max(0.0, costs.slower_s),
            "every_s": every_s or None,
            "failure_loses_s": every_s / 2 + costs.writing_s / max(1, costs.beside) if every_s else None,
        }


def slower_s(times: Sequence[float], number: int, seconds: float) -> float:
    """Seconds that the steps after the first `number` took longer, as many as began in `seconds`, than the median of those before.

    >>> slower_s([2.0, 2.0, 2.0, 3.0, 2.5, 2.0, 9.0], 3, 5.0)
    1.5
    """
    before = times[max(0, number - _USUAL) : number]
    extra, began = 0.0, 0.0
    for time_s in times[number:]:
        if began >= seconds or not before:
            break
        extra, began = extra + time_s - median(before), began + time_s
    return extra
