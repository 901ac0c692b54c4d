"""The training loop that every rank runs: steps, evaluation, checkpoints, metrics, recovery from snapshots after a peer loss.

A run that is killed and started again computes the same losses, bit for bit under the same layout: the data and the learning
rate are functions of the step, everything else is in the checkpoint. Choosing a plan and launching ranks are in `train/flow`.
"""

from __future__ import annotations

import gc
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch

from weft.capture.modes import evaluation_modes
from weft.errors import ConfigError, ModelError, RunError
from weft.model.batch.additive import microbatch_words
from weft.plan.beside import LENGTHS
from weft.plan.plan import Plan
from weft.run.build import Traced
from weft.run.engine import Engine, OnDevice
from weft.run.state import checkpoint
from weft.run.state.snapshots import Snapshots, kept_as, room_bytes, vote
from weft.run.step.result import StepResult
from weft.train import artifacts
from weft.train.components import NANOSECONDS, Components
from weft.train.config import Config
from weft.train.corpus import Corpus
from weft.train.data import Batch
from weft.train.display import Display, display
from weft.train.doubts import doubt, no_room
from weft.train.evaluation import Evaluation
from weft.train.interrupted import Interrupted
from weft.train.learning_rate import learning_rate
from weft.train.loader import Loader, rows_of_part
from weft.train.metrics import FILE, Metrics, Row, last_step, read_metrics
from weft.train.saving import Saving
from weft.train.stragglers import Stragglers
from weft.train.subject import Subject, subject_of
from weft.train.trackers import tracking
from weft.train.trust import Trust
from weft.train.updates import optimizer_of
from weft.units import parse_bytes
from weft.world.current import set_world
from weft.world.memory import PARTS
from weft.world.world import World

CHECKPOINTS = "checkpoints"
DIGESTS = ".digests.json"  # digests of the plan and of the data description, as they were written
_AGREE_S = 0.5
_TYPICAL = 50
_RECORDED = 10  # last steps whose time is measured by component


@dataclass(frozen=True)
class Job:
    """A training job. `folder`: the run folder. `peak_flops`: FLOP/s of all devices together in the plan's precision, 0 if unknown."""

    config: Config
    plan: Plan
    folder: Path
    corpus: Corpus | None = None
    peak_flops: float = 0.0


MakeEngine = Callable[[World, Job, Subject], Engine]
MakeSnapshots = Callable[..., Snapshots]  # called with a world and `Engine.state()`
Summary = dict[str, Any]


def make_engine(world: World, job: Job, subject: Subject) -> Engine:
    """Build the engine of one rank."""
    section = job.config.train
    limit = parse_bytes(job.config.plan.device_memory or 0)
    torch.manual_seed(section.seed)
    model = subject.captured or subject.make
    if subject.captured is not None and is_kept(world, job) and vote(world) is not None:
        model = replace(subject.captured, has_values=False)  # the snapshot provides the values
    spec, device = optimizer_of(section), OnDevice(memory=limit)
    return Engine(job.plan, model, subject.example, subject.loss, world, spec, seed=section.seed, device=device)


def is_kept(world: World, job: Job) -> bool:
    """Return whether ranks of a new generation restore their state from snapshots in persistent memory, if there are any."""
    has_memory = world.survivor is not None and world.survivor.memory.outlives
    return bool(world.generation) and has_memory and job.config.run.protect != "none" and not job.plan.layout.staleness


def train(world: World, job: Job, make: MakeEngine = make_engine) -> Summary:
    """Train to the last step, or until a stop is requested; every rank calls it. Return the summary that `weft train` prints.

    Raises:
        RunError: a loss that is not finite, with the step and the last complete checkpoint.
        CheckpointError: a checkpoint of another model, or a folder that another run has taken over.
        ConfigError: token ids beyond the model's vocabulary.
    """
    ready = ready_for(world)
    task = ready.subject if ready is not None else subject_of(job.config, job.corpus)
    while True:
        try:
            return Run(world, job, task, make(world, job, task)).run()
        except Exception as error:
            failure = error
        set_world(world := world.regrouped(failure))
        del failure  # and with it the frames that refer to the engine
        gc.collect()


@dataclass(frozen=True)
class Ready:
    """A job and its training task, as ranks inherit them from the fork server."""

    job: Job
    subject: Subject


def ready_for(world: World) -> Ready | None:
    """Return the job that this rank inherited from the fork server; None if there is none."""
    inherited: Ready | None = world.survivor.prepared if world.survivor is not None else None
    return inherited


def prepared(job: Job) -> Ready:
    """Capture the model of a job once for all of its ranks, in the fork server."""
    task = subject_of(job.config, job.corpus)
    if job.plan.uncaptured:
        return Ready(job, task)
    torch.manual_seed(job.config.train.seed)
    captured = Traced.of(task.make)
    captured.prepare(job.plan, task.example, task.loss)
    with suppress(ModelError):  # the ranks then meet the same error, and report it
        captured.prepare(job.plan, task.example, task.loss, evaluation_modes(captured.model))
    return Ready(job, replace(task, captured=captured))


class _Told(Protocol):
    """Anything with the loss of a step."""

    @property
    def loss(self) -> float: ...


@dataclass(frozen=True)
class _Loss:
    loss: float


class Run:
    """One attempt at a job. `row`: metrics of the last step before it, if they may not have been written. `make_snapshots`: a factory."""

    def __init__(self, world: World, job: Job, subject: Subject, engine: Engine, row: Row | None = None) -> None:
        self.world, self.job, self.subject, self.engine = world, job, subject, engine
        self.keep: MakeSnapshots = Snapshots
        self.section, self._row = job.config.train, row
        self.checkpoints = job.folder / CHECKPOINTS
        layout = job.plan.layout
        self.rows = rows_of_part(self.section.batch, engine)
        # With all rows a rank computes the divisor of the loss without waiting for late ranks; balancing by length moves rows to any rank.
        needs_all = layout.staleness or layout.split == LENGTHS
        self.of_step = list(range(self.section.batch)) if needs_all else self.rows
        self.losses: list[float] = []
        self.done = 0
        self.snapshots: Snapshots | None = None
        self.trust: Trust | None = None
        self.interrupted = Interrupted(world, engine, lambda words: self.show.say(words))
        self._unprotected = ""  # why the state is not in persistent memory, although it should be
        self.step_times: list[float] = []
        self.waited_s: list[float] = []  # seconds of waiting for the batch of each step
        self.eval_loss: float | None = None
        self._evaluation = Evaluation(engine, subject, world, self.section.batch, self.section.evaluate_batches, self.rows)
        self.components = Components(world, layout.mesh_of(world.rank))
        self.stragglers = Stragglers(world, layout.mesh_of(world.rank)) if not layout.staleness else None
        self.measured: dict[str, float] | None = None
        self.memory: dict[str, float] = {}
        self.show: Display
        self._agree_at, self._agree_every = 0, 1
        # With stale updates a save drains the pipeline and so changes the result: only step numbers may decide, no clock.
        clocked = not layout.staleness
        self.saving = Saving(world, self.checkpoints, job.config, self._state, self.step_times, lambda words: self.show.say(words), clocked)
        self.data_wait_s = 0.0  # of the rank that waited longest, without the first batch
        self._stamp = job.corpus.stamp() if job.corpus and world.rank == 0 else None
        self._place = _place(job.folder) if world.rank == 0 else None
        self._untold: deque[tuple[Row, _Told]] = deque()

    def run(self) -> Summary:
        try:
            return self._run()
        except BaseException as error:
            self.saving.leave(wait=isinstance(error, Exception) and not self.world.is_lost_in(error))
            raise

    def _run(self) -> Summary:
        _ = self.world.stopping  # from here on SIGTERM is handled between steps
        start, row = self._begin()
        layout, self.done = self.job.plan.layout, start
        with display(self.world.rank, self.section.steps, start) as self.show, self._metrics(start) as write:
            if start and not self.world.generation:
                self.show.say(f"resuming after step {start}")
            if self._unprotected:
                self.show.say(self._unprotected)
            if layout.microbatches > 1 and (words := microbatch_words(self.engine.parts.coupled)):
                self.show.say(words)
            if self.snapshots is not None:
                self.trust = Trust(self.world, self.engine, self.snapshots, self.losses, self._unstable)
            stopped = self._steps(start, row, write)
            self.measured = self.components.gather()
            self.data_wait_s = self.world.maximum([round(NANOSECONDS * sum(self.waited_s[1:]))])[0] / NANOSECONDS
            self.memory = self.engine.fullest_memory()
            self.saving.last(self.done)
            if not stopped and (self.losses or not artifacts.complete(self.job.folder, self.world)):
                with self.world.pace.long():
                    artifacts.write(self.engine, self.job, self.subject, self.world, self.show.say)
        self.world.everyone.barrier()  # a rank that fails up to here is replaced
        return self._summary(self.done, stopped)

    def _begin(self) -> tuple[int, Row | None]:
        """Restore the state: after a peer loss from snapshots that all ranks have, else from the newest checkpoint. Return the number of
        steps done and the metrics row of the last, if it may not have been written. Recovering ranks keep their checkpoint token."""
        self.snapshots = self._protected()
        if self.snapshots is not None and self.world.generation:
            step = vote(self.world)
            if step is not None:
                row = self.snapshots.restore(step)
                self.interrupted.vote(step)
                self.saving.token = row.pop("token")
                committed = checkpoint.committed(self.checkpoints)
                self.saving.saved_step = checkpoint.from_first(self.world, committed[-1].step + 1 if committed else 0) - 1
                path = self.job.folder / FILE
                is_written = self.world.rank == 0 and last_step(path) >= step
                return step, None if checkpoint.from_first(self.world, int(is_written or not row)) else row
            self.snapshots.forget()
        assert not is_kept(self.world, self.job) or self.engine.source.has_values, "the snapshot that was voted for exists"
        self.saving.token = checkpoint.from_first(self.world, checkpoint.claim(self.checkpoints) if self.world.rank == 0 else 0)
        start = self._resume()
        if self.snapshots is not None:
            self.snapshots.take(start, {"token": self.saving.token})
        return start, self._row if self._row is not None and self._row["step"] == start else None

    def _protected(self) -> Snapshots | None:
        """Create the snapshots of this rank in persistent memory; return None if they are disabled or do not fit."""
        if self.world.survivor is None or self.job.config.run.protect == "none" or self.job.plan.layout.staleness:
            return None
        state = kept_as(self.engine.state(), self.world.survivor.memory)
        self._unprotected = no_room(self.world, room_bytes(state))
        return self.keep(self.world, state) if not self._unprotected else None

    def _resume(self) -> int:
        """Load the newest good checkpoint. Return the number of steps done."""
        if not self.job.config.run.resume:
            return 0
        if not checkpoint.from_first(self.world, len(checkpoint.committed(self.checkpoints))):
            return 0
        extra = self.engine.load(self.checkpoints)
        if extra.get("text") != _digest(self.job):
            raise ConfigError(
                f"the text has changed since the checkpoint of step {extra['step']} in {self.checkpoints} was saved, so the run "
                "cannot go on as it was; restore the text, or train into another run.folder"
            )
        step: int = extra["step"]
        self.saving.saved_step = step
        return step

    @contextmanager
    def _metrics(self, start: int) -> Iterator[Callable[[Row], None]]:
        """Yield a function that writes a row to file, trackers and display on rank 0, and does nothing on other ranks."""
        if self.world.rank:
            yield lambda row: None
            return
        config, folder, say = self.job.config, self.job.folder, self.show.say
        anew = self.world.joined is not None and self.world.generation > 0  # a rank that was given up may still be alive
        with Metrics(folder / FILE, start, say, anew) as metrics, tracking(config, folder, start, say) as track:

            def write(row: Row) -> None:
                metrics.write(row)
                track(row)
                self.show.row(row)

            yield write

    def _steps(self, start: int, untold: Row | None, write: Callable[[Row], None]) -> bool:
        """Train from step `start`. Return whether a stop was requested before the last step."""
        make = partial(self.subject.source.train, rows=self.of_step)
        self.world.pace.keep()
        if untold is not None:
            self.step_times.append(float(untold["step_time_s"] or 0.0))
            if self._after(untold, _Loss(float(untold["loss"] or 0.0)), write):
                return self.done < self.section.steps
        pin, workers = self.world.device.type == "cuda", self.job.config.run.workers
        with Loader(make, start, self.section.steps, pin, workers) as loader:
            for step in range(start, self.section.steps):
                began, waited = time.perf_counter(), loader.waited_s  # a step's time includes waiting for data
                batch = next(loader)
                self.waited_s.append(loader.waited_s - waited)
                row, result = self._trusted(step, batch, began)
                row["data_wait_s"] = self.waited_s[-1]
                self.done = step + 1
                if self.snapshots is not None:
                    self.snapshots.take(self.done, {**row, "loss": result.loss, "token": self.saving.token})
                if self.trust is not None:
                    self.trust.kept()
                if self._after(row, result, write):
                    return self.done < self.section.steps
        self._tell(write)
        return False

    def _trusted(self, step: int, batch: Batch, began: float) -> tuple[Row, StepResult]:
        """Run a step; run it once more from the snapshot before it if its loss or gradients look corrupted."""
        record = step + _RECORDED >= self.section.steps

        def make() -> tuple[Row, StepResult]:
            self.interrupted.begin(step)
            return self._step(step, batch, began, record)

        def doubt_of(outcome: tuple[Row, StepResult]) -> str:
            return doubt(outcome[1].loss, outcome[0]["grad_norm"], outcome[0]["loss_scale"] is not None, self.losses)

        return make() if self.trust is None else self.trust.step(step, make, doubt_of, self.show.say)

    def _after(self, row: Row, result: _Told, write: Callable[[Row], None]) -> bool:
        """Finish a step: evaluate, write its row, save a checkpoint if due. Return whether a stop was requested."""
        done = self.done
        self._untold.append((row, result))
        if self._every(self.section.evaluate_every, done) or done == self.section.steps:
            with self.world.pace.long():
                self.eval_loss = self._evaluation.loss(self.show.say)
            if self.eval_loss is not None:
                row["eval_loss"] = self.eval_loss
        # With stale updates a loss is known only when all ranks have run the step, and no rank waits for that before its update is due.
        self._tell(write, self.job.plan.layout.staleness)
        stopping, due = self._agree(done)
        if (due or self.saving.due(done)) and not stopping and done < self.section.steps:  # the last step is saved in any case
            self._tell(write)
            self.saving.save(done)
        if stopping:
            self._tell(write)
            self.show.say(f"told to stop: saving after step {done}")
        return stopping

    def _tell(self, write: Callable[[Row], None], but: int = 0) -> None:
        """Write the pending rows, except those of the last `num_unwritten` steps."""
        while len(self._untold) > but:
            row, result = self._untold.popleft()
            row["loss"] = result.loss
            if not isfinite(result.loss):  # on every rank
                self.saving.finish()
                raise RunError(f"the loss is {result.loss} at step {row['step']}; {self._unstable()}")
            self.losses.append(result.loss)
            write(row)

    def _every(self, period: int, done: int) -> bool:
        return bool(period) and done % period == 0

    def _step(self, step: int, batch: Batch, began: float, record: bool) -> tuple[Row, StepResult]:
        rate = learning_rate(step, self.section)
        self.components.before()
        try:
            result = self.engine.step(batch, lr=rate, record=record, samples=self.section.batch)
        except IndexError as error:
            if self.job.corpus is None:
                raise
            have = self.job.corpus.vocabulary
            raise ConfigError(
                f"step {step + 1}: {error}; tokens go from 0 to {have - 1}, so use a model with a vocabulary of at least {have}"
            ) from error
        self.world.synchronize()  # kernels run asynchronously on a GPU
        seconds = time.perf_counter() - began
        self.step_times.append(seconds)
        if record:
            self.components.after(self.engine, seconds)
        return {
            "step": step + 1,
            "loss": None,  # filled in when it is known
            "lr": rate,
            "grad_norm": result.grad_norm,
            "loss_scale": result.loss_scale,
            "tokens_per_s": self.subject.tokens_per_step / seconds,
            "step_time_s": seconds,
            "mfu": self._mfu(seconds),
        }, result

    def _mfu(self, seconds: float) -> float | None:
        """Model FLOP/s divided by the peak of all devices (Chowdhery et al. 2022, appendix B: recomputation does not count)."""
        return self.engine.model_flops / seconds / self.job.peak_flops if self.job.peak_flops else None

    def _agree(self, done: int) -> tuple[bool, bool]:
        """Return whether a stop was requested on any rank, and whether a save is due by any rank's clock. Ranks agree about twice a second,
        not at every step, since it costs a collective."""
        if done < self._agree_at:
            return False, False
        self._check_text(done)
        if self._place is not None and _place(self.job.folder) != self._place:
            raise checkpoint.Removed(self.job.folder)
        period = max(1, int(_AGREE_S / max(1e-9, self.step_times[-1])))
        local_status = [int(self.world.stopping), int(self.saving.due()), min(period, 2 * self._agree_every), *self.saving.mark()]
        local_status.append(self.interrupted.wants(self.snapshots is not None))
        work = self.stragglers.mark() if self.stragglers else []
        stopping, due, self._agree_every, failed, goes_on, interval, *work = self.world.maximum([*local_status, *work])
        self.saving.heed(failed, goes_on)
        self.interrupted.keep(interval)
        if self.stragglers is not None and (words := self.stragglers.add(work)):
            self.show.say(words)
        self._agree_at = done + self._agree_every
        return bool(stopping), bool(due)

    def _check_text(self, done: int) -> None:
        """Raise RunError if the data files change while they are read; checked on rank 0, which ends the run for all ranks."""
        if self.job.corpus is None or self._stamp is None or (now := self.job.corpus.stamp()) == self._stamp:
            return
        (size, _), (size_now, _) = next((a, b) for a, b in zip(self._stamp, now, strict=True) if a != b)
        grew = f"from {size:,} to {size_now:,} bytes" if size_now != size else "written anew"
        raise RunError(
            f"the text {self.job.corpus.path} has changed while it was trained on ({grew}), before step {done}; what the last steps saw "
            f"is not known; {self._last_good()}restore the text and run the same command, or train on a copy that nobody writes to"
        )

    def _state(self, step: int) -> tuple[list[checkpoint.Piece], dict[str, Any]]:
        return self.engine.pieces(), extra_of(self.job, step)

    def _unstable(self) -> str:
        """Describe what to do when loss or gradients are not finite."""
        return f"{self._last_good()}lower learning_rate = {self.section.learning_rate:g}, raise warmup_steps or set clip, and run again"

    def _last_good(self) -> str:
        if self.saving.saved_step < 0:
            return "there is no checkpoint yet; "
        return f"the checkpoint of step {self.saving.saved_step} in {self.checkpoints} is whole; "

    def _summary(self, step: int, stopped: bool) -> Summary:
        # From the metrics file if this process has run no step, since the run was already complete.
        path = self.job.folder / FILE
        rows = read_metrics(path) if path.exists() and not self.losses else []
        times = self.step_times or [float(row["step_time_s"] or 0.0) for row in rows if row.get("step_time_s")]
        seconds = float(median(times[-_TYPICAL:])) if times else 0.0
        predicted = self.job.plan.prediction
        return {
            "run_folder": str(self.job.folder),
            "step": step,
            "loss": self.losses[-1] if self.losses else _last(rows, "loss"),
            "eval_loss": self.eval_loss if self.losses else _last(rows, "eval_loss"),
            "byte_frequency_loss": self.subject.byte_frequency_loss or None,
            "tokens_per_s": self.subject.tokens_per_step / seconds if seconds else None,
            "step_time_s": seconds or None,
            "predicted_step_time_s": predicted.step_time_s if predicted else None,
            "predicted_parts_s": dict(predicted.parts) if predicted else None,
            "measured_parts_s": self.measured,
            "memory_bytes": self.memory or None,
            "predicted_memory_bytes": {part: getattr(predicted.memory, part) for part in PARTS} if predicted else None,
            "mfu": self._mfu(seconds) if seconds else None,
            "layout": str(self.job.plan.layout),
            "num_parameters": self.engine.num_parameters,
            "stopped": stopped,
            "saving_s": self.saving.costs.waited_s,
            "saving": self.saving.report(),
            "waited_for": {str(rank): share for rank, share in (self.stragglers.shares() if self.stragglers else {}).items()},
            "data_wait_s": self.data_wait_s,
        }


def _digest(job: Job) -> str:
    return job.corpus.digest if job.corpus else ""


def extra_of(job: Job, step: int) -> dict[str, Any]:
    """Return the metadata that a checkpoint stores with its tensors."""
    config, files = job.config.model_dump(mode="json"), {}
    with suppress(OSError, ValueError):
        files = json.loads((job.folder / DIGESTS).read_text(encoding="utf-8"))
    samples, layout = step * job.config.train.batch, str(job.plan.layout)
    return {"text": _digest(job), "samples": samples, "config": config, "layout": layout, "files": files}


def _place(folder: Path) -> tuple[int, int] | None:
    """Device and inode of a folder, which tell it from a new folder of the same name; None if it does not exist."""
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _last(rows: Sequence[Row], key: str) -> float | None:
    return next((row[key] for row in reversed(rows) if key in row), None)
