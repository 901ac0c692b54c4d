"""Checkpointing of a run: when to save, synchronously or asynchronously, and the cost of it.

With `run.save = "async"` training waits only for the copy of the state; files are written during the next steps. A save by the clock is not
due while another is being written; a save by step number waits for it. Training waits for the last save, also when it is stopped.
The file format is that of `run/checkpoint`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import median
from typing import Any

from shardwise.errors import CheckpointError
from shardwise.run import checkpoint
from shardwise.run.checkpoint import BackgroundSaver, SaveTiming, StateShard
from shardwise.train.config import TrainingConfig
from shardwise.train.recovery.anomalies import describe_memory_shortage
from shardwise.world.world import World

_NUM_MEDIAN_STEPS = 50  # last steps whose median a step during a save is compared with

CheckpointState = Callable[[int], tuple[list[StateShard], dict[str, Any]]]


@dataclass
class SavingCosts:
    """Cost of a run's saves on this rank. Seconds: `waited_s` of training waiting; `writing_s` of asynchronous writing (`num_async` saves);
    `slowdown_s` of steps during it, each minus the median of earlier steps, so that noise has either sign. `size_bytes`: of all files of
    all ranks, on rank 0."""

    num_saves: int = 0
    size_bytes: int = 0
    waited_s: float = 0.0
    num_async: int = 0
    writing_s: float = 0.0
    slowdown_s: float = 0.0


class CheckpointSaver:
    """Saves the checkpoints of one attempt at a run; every rank makes the same calls. `state`: returns shards and metadata after a step.
    `step_times` grows as the run proceeds. `is_clocked`: whether a clock may decide when to save."""

    def __init__(
        self,
        world: World,
        folder: Path,
        config: TrainingConfig,
        state: CheckpointState,
        step_times: Sequence[float],
        say: Callable[[str], None],
        is_clocked: bool = True,
    ) -> None:
        self.world, self.folder, self._state, self._step_times, self._say = world, folder, state, step_times, say
        every, self._keep, self._mode = config.train.checkpoint_every, config.train.keep, config.run.save
        self._every = 0 if every == "auto" else every
        self._interval = SaveInterval(world.num_ranks, time.perf_counter()) if every == "auto" and is_clocked else None
        self._writer: BackgroundSaver | None = None
        self._save_start = 0, 0.0, 0.0  # of the current save: number of steps before it, clock after its copy, seconds that training waited
        self._has_explained = False
        self.saved_step = -1
        self.token = 0  # claim of this run on its checkpoint folder
        self.costs = SavingCosts()

    def is_due(self, num_done: int | None = None) -> bool:
        """Return whether to save: by step number after `num_done` steps, or, without it, by the clock."""
        if num_done is not None:
            return self._every > 0 and num_done % self._every == 0
        return self._interval is not None and not self._is_writing and self._interval.is_due(time.perf_counter())

    @property
    def _is_writing(self) -> bool:
        return self._writer is not None and self._writer.step is not None

    def pending_status(self) -> tuple[int, int]:
        """Return the status of the current save, whose maximum over ranks `apply_status` takes."""
        return self._writer.vote() if self._writer is not None else (0, 0)

    def apply_status(self, failed: int, goes_on: int) -> None:
        """Apply the all-reduced status of the current save. Raises `Replaced` or `Removed` if the run must end."""
        if self._writer is not None:
            self._collect_result(lambda writer: writer.apply_vote(failed, goes_on))

    def finish(self) -> None:
        """Wait for the current save. Raises as `apply_status`."""
        if self._writer is not None:
            began = time.perf_counter()
            with self.world.pace.untimed():
                self._collect_result(BackgroundSaver.finish)
            self.costs.waited_s += time.perf_counter() - began

    def save(self, step: int) -> None:
        """Save a checkpoint of the state after `step` steps; a failure is only logged, since the next save tries again."""
        self.finish()
        if step == self.saved_step:
            return
        began = time.perf_counter()
        try:
            with self.world.pace.untimed("save"):
                pieces, extra = self._state(step)
                if (writer := self._async_writer(pieces)) is not None:
                    writer.begin(step, pieces, extra)
                else:
                    with self.world.pace.untimed("synchronous save"):  # lasts longer than the begin of an asynchronous one
                        self._write(step, pieces, extra)
        except CheckpointError as error:
            self._handle_failure(error)
        now = time.perf_counter()
        self.costs.waited_s += now - began
        self._save_start = len(self._step_times), now, now - began
        if self._interval is not None and not self._is_writing:
            self._interval.record_save(now - began, now)

    def last(self, step: int) -> None:
        """Save the last checkpoint synchronously. Raises CheckpointError if that fails."""
        self.finish()
        if step == self.saved_step:
            return
        began = time.perf_counter()
        with self.world.pace.untimed("synchronous save"):
            self._write(step, *self._state(step))
        self.costs.waited_s += time.perf_counter() - began

    def abandon(self, waits: bool) -> None:
        """Abandon the current save when the run fails or its generation ends; with `waits` it is given time to complete."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with self.world.pace.untimed():
                writer.abandon(waits)

    def _async_writer(self, pieces: Sequence[StateShard]) -> BackgroundSaver | None:
        """Return the asynchronous writer; None if saves are synchronous or a copy of the state does not fit in memory."""
        if self._mode == "async" and self._writer is None:
            if words := describe_memory_shortage(self.world, checkpoint.host_copy_bytes(pieces)):
                if not self._has_explained:
                    self._say(f"checkpoints are written synchronously, while training waits: {words}")
                self._has_explained = True
                return None
            self._writer = BackgroundSaver(self.folder, self.world, keep=self._keep, token=self.token, warn=self._say)
        return self._writer

    def _write(self, step: int, pieces: Sequence[StateShard], extra: dict[str, Any]) -> None:
        path = checkpoint.save(self.folder, step, pieces, extra, self.world, keep=self._keep, token=self.token, warn=self._say)
        self.saved_step = step
        self.costs.num_saves += 1
        self.costs.size_bytes += checkpoint.size_of(path) if self.world.rank == 0 else 0

    def _collect_result(self, collect: Callable[[BackgroundSaver], SaveTiming | None]) -> None:
        assert self._writer is not None
        if not self._is_writing:
            return
        number, since, waited_s = self._save_start
        try:
            written = collect(self._writer)
        except CheckpointError as error:
            self._handle_failure(error)
        else:
            if written is None:
                return
            self.saved_step = written.step
            self.costs.num_saves += 1
            self.costs.size_bytes += written.size_bytes
            self.costs.num_async += 1
            self.costs.writing_s += written.seconds
            self.costs.slowdown_s += slowdown_s(self._step_times, number, written.seconds)
        if self._interval is not None:
            self._interval.record_save(waited_s + max(0.0, self.costs.slowdown_s) / max(1, self.costs.num_async), since)

    def _handle_failure(self, error: CheckpointError) -> None:
        if isinstance(error, checkpoint.WriterReplaced | checkpoint.FolderRemoved):
            raise error
        self._say(f"{error}; training goes on, and step {max(0, self.saved_step)} is the newest checkpoint")

    def report(self) -> dict[str, Any]:
        """Return the cost of saving, and the mean time that a failure loses: half an interval plus the time until files are written."""
        costs = self.costs
        every_s = (
            self._interval.chosen_s if self._interval is not None else self._every * (median(self._step_times) if self._step_times else 0.0)
        )
        return {
            "saves": costs.num_saves,
            "bytes": costs.size_bytes,
            "waited_s": costs.waited_s,
            "beside": costs.num_async,
            "writing_s": costs.writing_s,
            "slower_s": max(0.0, costs.slowdown_s),
            "every_s": every_s or None,
            "failure_loses_s": every_s / 2 + costs.writing_s / max(1, costs.num_async) if every_s else None,
        }


def slowdown_s(times: Sequence[float], number: int, seconds: float) -> float:
    """Seconds that steps during a save took beyond the median before it: those after the first `number` that began within `seconds`.

    >>> slowdown_s([2.0, 2.0, 2.0, 3.0, 2.5, 2.0, 9.0], 3, 5.0)
    1.5
    """
    earlier = times[max(0, number - _NUM_MEDIAN_STEPS) : number]
    extra, began = 0.0, 0.0
    for time_s in times[number:]:
        if began >= seconds or not earlier:
            break
        extra, began = extra + time_s - median(earlier), began + time_s
    return extra


FIRST_SAVE_S = 60.0  # until the first save, before its cost is known
RUN_MTBF_S = 24 * 3600.0  # a process is killed, a machine is taken away, a disk is full
# 419 interruptions of 16,384 H100 in 54 days (Grattafiori et al. 2024, table 5).
RANK_MTBF_S = 54 * 24 * 3600.0 * 16384 / 419


def interval_s(save_s: float, mtbf_s: float) -> float:
    """Seconds from the end of a save to the next, for a save of `save_s` and the given mean time between failures.

    >>> round(interval_s(1.0, 86400.0)), round(interval_s(60.0, 3600.0))
    (415, 618)
    """
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    return sqrt(2 * save_s * mtbf_s) * (1 + sqrt(ratio) / 3 + ratio / 9) - save_s


def mean_time_between_failures_s(num_ranks: int) -> float:
    """Mean time between failures of a run, in seconds, by number of ranks.

    >>> round(mean_time_between_failures_s(1) / 3600, 2), round(mean_time_between_failures_s(16384) / 3600, 2)
    (23.99, 2.74)
    """
    return 1 / (1 / RUN_MTBF_S + num_ranks / RANK_MTBF_S)


class SaveInterval:
    """Decides when a save is due, from the cost of the last save. `now_s`: seconds of any monotonic clock. `chosen_s`: from one save to the
    next."""

    def __init__(self, num_ranks: int, now_s: float) -> None:
        self._mtbf_s = mean_time_between_failures_s(num_ranks)
        self.chosen_s = FIRST_SAVE_S
        self._next_save_s = now_s + FIRST_SAVE_S

    def is_due(self, now_s: float) -> bool:
        return now_s >= self._next_save_s

    def record_save(self, save_s: float, now_s: float) -> None:
        """Record a save that cost training `save_s` and ended at `now_s`."""
        self.chosen_s = interval_s(save_s, self._mtbf_s)
        self._next_save_s = now_s + self.chosen_s
