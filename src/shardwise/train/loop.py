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
from typing import Any

import torch

from shardwise.capture.modes import evaluation_modes
from shardwise.errors import ConfigError, ModelError, RunError
from shardwise.model.batch.additive import describe_microbatch_couplings
from shardwise.plan.compatibility import SPLIT_BY_LENGTH
from shardwise.plan.ir.metric_lines import Row
from shardwise.plan.plan import Plan
from shardwise.run import checkpoint
from shardwise.run.engine import DeviceOptions, Engine
from shardwise.run.rank_model.model_source import CachedModelSource
from shardwise.run.recovery.snapshots import Snapshots, agree_on_intact_step, agree_on_step, required_bytes, state_for_memory
from shardwise.run.step.dispatch import StepResult
from shardwise.train import artifacts
from shardwise.train.checkpoint_saver import CheckpointSaver
from shardwise.train.components import NANOSECONDS, StepComponents
from shardwise.train.config import TrainingConfig
from shardwise.train.corpus import Corpus, is_unchanged
from shardwise.train.data.loader import Loader, rows_of_partial_batch
from shardwise.train.data.sources import Batch
from shardwise.train.display import Display, open_display
from shardwise.train.evaluation import Evaluation
from shardwise.train.learning_rate import learning_rate
from shardwise.train.metrics import METRICS_FILE, MetricsFile, last_step, read_metrics
from shardwise.train.optimizers import optimizer_of
from shardwise.train.recovery.anomalies import explain_unprotected_state, loss_anomaly
from shardwise.train.recovery.resumable_steps import ResumableSteps
from shardwise.train.recovery.step_guard import StepGuard
from shardwise.train.recovery.stragglers import StragglerMonitor
from shardwise.train.trackers import open_trackers
from shardwise.train.training_task import TrainingTask, training_task_of
from shardwise.units import parse_bytes
from shardwise.world.launch.current import set_world
from shardwise.world.memory import PARTS
from shardwise.world.world import World

CHECKPOINTS = "checkpoints"
DIGESTS = ".digests.json"  # digests of the plan and of the data description, as they were written
_AGREE_S = 0.5
_NUM_MEDIAN_STEPS = 50
_NUM_RECORDED_STEPS = 10  # last steps whose time is measured by component


@dataclass(frozen=True)
class TrainingJob:
    """A training job. `folder`: the run folder. `peak_flops`: FLOP/s of all devices together in the plan's precision, 0 if unknown."""

    config: TrainingConfig
    plan: Plan
    folder: Path
    corpus: Corpus | None = None
    peak_flops: float = 0.0


MakeEngine = Callable[[World, TrainingJob, TrainingTask], Engine]
MakeSnapshots = Callable[..., Snapshots]  # called with a world and `Engine.state()`
Summary = dict[str, Any]


def make_engine(world: World, job: TrainingJob, task: TrainingTask) -> Engine:
    """Build the engine of one rank."""
    section = job.config.train
    limit = parse_bytes(job.config.plan.device_memory or 0)
    torch.manual_seed(section.seed)
    model = task.captured or task.make
    if task.captured is not None and recovers_from_memory(world, job) and agree_on_step(world) is not None:
        model = replace(task.captured, has_values=False)  # the snapshot provides the values
    spec, device = optimizer_of(section), DeviceOptions(memory_limit_bytes=limit)
    return Engine(job.plan, model, task.example, task.loss, world, spec, seed=section.seed, device=device)


def recovers_from_memory(world: World, job: TrainingJob) -> bool:
    """Return whether ranks of a new generation restore their state from snapshots in persistent memory, if there are any."""
    has_memory = world.recovery is not None and world.recovery.memory.survives_rank
    return bool(world.generation) and has_memory and job.config.run.protect != "none" and not job.plan.layout.staleness


def train(world: World, job: TrainingJob, make: MakeEngine = make_engine) -> Summary:
    """Train to the last step, or until a stop is requested; every rank calls it. Return the summary that `shardwise train` prints.

    Raises:
        RunError: a loss that is not finite, with the step and the last complete checkpoint.
        CheckpointError: a checkpoint of another model, or a folder that another run has taken over.
        ConfigError: token ids beyond the model's vocabulary.
    """
    ready = inherited_job(world)
    task = ready.task if ready is not None else training_task_of(job.config, job.corpus)
    while True:
        try:
            return TrainingRun(world, job, task, make(world, job, task)).run()
        except Exception as error:
            failure = error
        set_world(world := world.next_generation(failure))
        del failure  # and with it the frames that refer to the engine
        gc.collect()


@dataclass(frozen=True)
class PreparedJob:
    """A job and its training task, as ranks inherit them from the fork server."""

    job: TrainingJob
    task: TrainingTask


def inherited_job(world: World) -> PreparedJob | None:
    """Return the job that this rank inherited from the fork server; None if there is none."""
    inherited: PreparedJob | None = world.recovery.prepared if world.recovery is not None else None
    return inherited


def prepare_job(job: TrainingJob) -> PreparedJob:
    """Capture the model of a job once for all of its ranks, in the fork server."""
    task = training_task_of(job.config, job.corpus)
    if job.plan.uncaptured:
        return PreparedJob(job, task)
    torch.manual_seed(job.config.train.seed)
    captured = CachedModelSource.from_model(task.make)
    captured.capture_all(job.plan, task.example, task.loss)
    with suppress(ModelError):  # the ranks then meet the same error, and report it
        captured.capture_all(job.plan, task.example, task.loss, evaluation_modes(captured.model))
    return PreparedJob(job, replace(task, captured=captured))


class TrainingRun:
    """One attempt at a job. `row`: metrics of the last step before it, if they may not have been written. `make_snapshots`: a factory."""

    def __init__(self, world: World, job: TrainingJob, task: TrainingTask, engine: Engine, row: Row | None = None) -> None:
        self.world, self.job, self.task, self.engine = world, job, task, engine
        self.make_snapshots: MakeSnapshots = Snapshots
        self.section, self._resumed_row = job.config.train, row
        self.checkpoints = job.folder / CHECKPOINTS
        layout = job.plan.layout
        self.rows = rows_of_partial_batch(self.section.batch, engine)
        # With all rows a rank computes the divisor of the loss without waiting for late ranks; balancing by length moves rows to any rank.
        needs_all = layout.staleness or layout.split == SPLIT_BY_LENGTH
        self.batch_rows = list(range(self.section.batch)) if needs_all else self.rows
        self.losses: list[float] = []
        self.num_done = 0
        self.snapshots: Snapshots | None = None
        self.step_guard: StepGuard | None = None
        self.resumable_steps = ResumableSteps(world, engine, lambda words: self.display.say(words))
        self._damage = ""  # of snapshots that were not restored
        self._unprotected_reason = ""  # why the state is not in persistent memory, although it should be
        self.step_times: list[float] = []
        self.data_waits_s: list[float] = []  # seconds of waiting for the batch of each step
        self.eval_loss: float | None = None
        self._evaluation = Evaluation(engine, task, world, self.section.batch, self.section.evaluate_batches, self.rows)
        self.components = StepComponents(world, layout.mesh_of(world.rank))
        self.stragglers = StragglerMonitor(world, layout.mesh_of(world.rank)) if not layout.staleness else None
        self.measured_parts_s: dict[str, float] | None = None
        self.memory_bytes: dict[str, float] = {}
        self.display: Display
        self._agree_at, self._agree_every = 0, 1
        # With stale updates a save drains the pipeline and so changes the result: only step numbers may decide, no clock.
        clocked = not layout.staleness
        self.saving = CheckpointSaver(
            world, self.checkpoints, job.config, self._checkpoint_state, self.step_times, lambda words: self.display.say(words), clocked
        )
        self.data_wait_s = 0.0  # of the rank that waited longest, without the first batch
        self._text_stamp = job.corpus.stamp() if job.corpus and world.rank == 0 else None
        self._folder_inode = _folder_inode(job.folder) if world.rank == 0 else None
        self._pending_rows: deque[tuple[Row, StepResult | None]] = deque()

    def run(self) -> Summary:
        try:
            return self._run_to_end()
        except BaseException as error:
            self.saving.abandon(waits=isinstance(error, Exception) and not self.world.is_peer_loss(error))
            raise

    def _run_to_end(self) -> Summary:
        _ = self.world.stopping  # from here on SIGTERM is handled between steps
        start, row = self._restore()
        layout, self.num_done = self.job.plan.layout, start
        with open_display(self.world.rank, self.section.steps, start) as self.display, self._open_metrics(start) as write:
            if start and not self.world.generation:
                self.display.say(f"resuming after step {start}")
            for words in filter(None, (self._unprotected_reason, self._damage, self.engine.tensor_collectives_notice)):
                self.display.say(words)
            if layout.microbatches > 1 and (words := describe_microbatch_couplings(self.engine.rank_model.couplings)):
                self.display.say(words)
            if self.snapshots is not None:
                self.step_guard = StepGuard(self.world, self.engine, self.snapshots, self.losses, self._instability_remedy)
            stopped = self._train_steps(start, row, write)
            self.measured_parts_s = self.components.gather()
            self.data_wait_s = self.world.all_reduce_max([round(NANOSECONDS * sum(self.data_waits_s[1:]))])[0] / NANOSECONDS
            self.memory_bytes = self.engine.peak_memory_over_ranks()
            self.saving.last(self.num_done)
            if not stopped and (self.losses or not artifacts.is_export_complete(self.job.folder, self.world)):
                with self.world.pace.untimed():
                    artifacts.write_artifacts(self.engine, self.job, self.task, self.world, self.display.say)
        self.world.world_group.barrier()  # a rank that fails up to here is replaced
        return self._summary(self.num_done, stopped)

    def _restore(self) -> tuple[int, Row | None]:
        """Restore the state: after a peer loss from snapshots that all ranks have, else from the newest checkpoint. Return the number of
        steps done and the metrics row of the last, if it may not have been written. Recovering ranks keep their checkpoint token."""
        self.snapshots = self._create_snapshots()
        if self.snapshots is not None and self.world.generation:
            step, self._damage = agree_on_intact_step(self.world, self.snapshots)
            if step is not None:
                row = self.snapshots.restore(step)
                self.resumable_steps.vote(step)
                self.saving.token = row.pop("token")
                committed = checkpoint.committed_checkpoints(self.checkpoints)
                self.saving.saved_step = checkpoint.broadcast_from_first(self.world, committed[-1].step + 1 if committed else 0) - 1
                is_written = self.world.rank == 0 and last_step(self.job.folder / METRICS_FILE) >= step
                return step, None if checkpoint.broadcast_from_first(self.world, int(is_written or not row)) else row
            self.snapshots.forget()
        has_values = not recovers_from_memory(self.world, self.job) or self.engine.source.has_values
        if not has_values and not (self.job.config.run.resume and checkpoint.committed_checkpoints(self.checkpoints)):
            raise RunError(f"{self._damage}, and there is no checkpoint yet; run the same command again")
        self.saving.token = checkpoint.broadcast_from_first(
            self.world, checkpoint.claim_folder(self.checkpoints) if self.world.rank == 0 else 0
        )
        start = self._load_checkpoint()
        if self.snapshots is not None:
            self.snapshots.take(start, {"token": self.saving.token})
        return start, self._resumed_row if self._resumed_row is not None and self._resumed_row["step"] == start else None

    def _create_snapshots(self) -> Snapshots | None:
        """Create the snapshots of this rank in persistent memory; return None if they are disabled or do not fit."""
        if self.world.recovery is None or self.job.config.run.protect == "none" or self.job.plan.layout.staleness:
            return None
        state = state_for_memory(self.engine.state(), self.world.recovery.memory)
        self._unprotected_reason = explain_unprotected_state(self.world, required_bytes(state))
        return self.make_snapshots(self.world, state) if not self._unprotected_reason else None

    def _load_checkpoint(self) -> int:
        """Load the newest good checkpoint. Return the number of steps done."""
        if not self.job.config.run.resume:
            return 0
        if not checkpoint.broadcast_from_first(self.world, len(checkpoint.committed_checkpoints(self.checkpoints))):
            return 0
        extra = self.engine.load(self.checkpoints)
        if extra.get("text") != _text_digest(self.job):
            raise ConfigError(
                f"the text has changed since the checkpoint of step {extra['step']} in {self.checkpoints} was saved, so the run "
                "cannot go on as it was; restore the text, or train into another run.folder"
            )
        step: int = extra["step"]
        self.saving.saved_step = step
        return step

    @contextmanager
    def _open_metrics(self, start: int) -> Iterator[Callable[[Row], None]]:
        """Yield a function that writes a row to file, trackers and display on rank 0, and does nothing on other ranks."""
        if self.world.rank:
            yield lambda row: None
            return
        config, folder, say = self.job.config, self.job.folder, self.display.say
        anew = self.world.rendezvous is not None and self.world.generation > 0  # a rank that was given up may still be alive
        with (
            MetricsFile(folder / METRICS_FILE, start, say, anew, not self.world.generation) as metrics,
            open_trackers(config, folder, start, say) as track,
        ):

            def write(row: Row) -> None:
                metrics.write(row)
                track(row)
                self.display.show_row(row)

            yield write

    def _train_steps(self, start: int, unwritten_row: Row | None, write: Callable[[Row], None]) -> bool:
        """Train from step `start`. Return whether a stop was requested before the last step."""
        make = partial(self.task.source.train, rows=self.batch_rows)
        self.world.pace.include_gaps()
        if unwritten_row is not None:
            self.step_times.append(float(unwritten_row["step_time_s"] or 0.0))
            if self._finish_step(unwritten_row, None, write):
                return self.num_done < self.section.steps
        pin, workers = self.world.device.type == "cuda", self.job.config.run.workers
        with Loader(make, start, self.section.steps, pin, workers) as loader:
            for step in range(start, self.section.steps):
                began, waited = time.perf_counter(), loader.waited_s  # a step's time includes waiting for data
                batch = next(loader)
                self.data_waits_s.append(loader.waited_s - waited)
                row, result = self._run_guarded_step(step, batch, began)
                row["data_wait_s"] = self.data_waits_s[-1]
                self.num_done = step + 1
                if self.snapshots is not None:
                    self.snapshots.take(self.num_done, {**row, "loss": result.loss, "token": self.saving.token})
                if self.step_guard is not None:
                    self.step_guard.record_state()
                if self._finish_step(row, result, write):
                    return self.num_done < self.section.steps
        self._flush_rows(write)
        return False

    def _run_guarded_step(self, step: int, batch: Batch, began: float) -> tuple[Row, StepResult]:
        """Run a step; run it once more from the snapshot before it if its loss or gradients look corrupted."""
        record = step + _NUM_RECORDED_STEPS >= self.section.steps

        def make() -> tuple[Row, StepResult]:
            self.resumable_steps.start_step(step)
            return self._run_step(step, batch, began, record)

        def doubt_of(outcome: tuple[Row, StepResult]) -> str:
            return loss_anomaly(outcome[1].loss, outcome[0]["grad_norm"], outcome[0]["loss_scale"] is not None, self.losses)

        return make() if self.step_guard is None else self.step_guard.run_step(step, make, doubt_of, self.display.say)

    def _finish_step(self, row: Row, result: StepResult | None, write: Callable[[Row], None]) -> bool:
        """Finish a step: evaluate, write its row, save a checkpoint if due. Return whether a stop was requested. Without a `result` the row
        has the loss."""
        done = self.num_done
        self._pending_rows.append((row, result))
        if self._is_due(self.section.evaluate_every, done) or done == self.section.steps:
            with self.world.pace.untimed("evaluation"):
                self.eval_loss = self._evaluation.loss(self.display.say)
            if self.eval_loss is not None:
                row["eval_loss"] = self.eval_loss
        # With stale updates a loss is known only when all ranks have run the step, and no rank waits for that before its update is due.
        self._flush_rows(write, self.job.plan.layout.staleness)
        stopping, due = self._agree(done)
        if (due or self.saving.is_due(done)) and not stopping and done < self.section.steps:  # the last step is saved in any case
            self._flush_rows(write)
            self.saving.save(done)
        if stopping:
            self._flush_rows(write)
            self.display.say(f"told to stop: saving after step {done}")
        return stopping

    def _flush_rows(self, write: Callable[[Row], None], num_unwritten: int = 0) -> None:
        """Write the pending rows, except those of the last `num_unwritten` steps."""
        while len(self._pending_rows) > num_unwritten:
            row, result = self._pending_rows.popleft()
            row["loss"] = loss = result.loss if result is not None else float(row["loss"] or 0.0)
            if not isfinite(loss):  # on every rank
                self.saving.finish()
                raise RunError(f"the loss is {loss} at step {row['step']}; {self._instability_remedy()}")
            self.losses.append(loss)
            write(row)

    def _is_due(self, period: int, done: int) -> bool:
        return bool(period) and done % period == 0

    def _run_step(self, step: int, batch: Batch, began: float, record: bool) -> tuple[Row, StepResult]:
        rate = learning_rate(step, self.section)
        self.components.start_step()
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
            self.components.record_step(self.engine, seconds)
        return {
            "step": step + 1,
            "loss": None,  # filled in when it is known
            "lr": rate,
            "grad_norm": result.grad_norm,
            "loss_scale": result.loss_scale,
            "tokens_per_s": self.task.tokens_per_step / seconds,
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
        if self._folder_inode is not None and _folder_inode(self.job.folder) != self._folder_inode:
            raise checkpoint.FolderRemoved(self.job.folder)
        period = max(1, int(_AGREE_S / max(1e-9, self.step_times[-1])))
        local_status = [
            int(self.world.stopping),
            int(self.saving.is_due()),
            min(period, 2 * self._agree_every),
            *self.saving.pending_status(),
        ]
        local_status.append(self.resumable_steps.preferred_interval(self.snapshots is not None))
        work = self.stragglers.measure_window() if self.stragglers else []
        stopping, due, self._agree_every, failed, goes_on, interval, *work = self.world.all_reduce_max([*local_status, *work])
        self.saving.apply_status(failed, goes_on)
        self.resumable_steps.set_interval(interval)
        if self.stragglers is not None and (words := self.stragglers.add_window(work)):
            self.display.say(words)
        self._agree_at = done + self._agree_every
        return bool(stopping), bool(due)

    def _check_text(self, done: int) -> None:
        """Raise RunError if the data files change while they are read; checked on rank 0, which ends the run for all ranks."""
        if self.job.corpus is None or self._text_stamp is None or (now := self.job.corpus.stamp()) == self._text_stamp:
            return
        with self.world.pace.untimed("check of the data files"):
            if is_unchanged(self.job.corpus):  # touched, or copied over itself
                self._text_stamp = now
                return
        (size, _), (size_now, _) = next((a, b) for a, b in zip(self._text_stamp, now, strict=True) if a != b)
        grew = f"from {size:,} to {size_now:,} bytes" if size_now != size else "written anew"
        raise RunError(
            f"the text {self.job.corpus.path} has changed while it was trained on ({grew}), before step {done}; what the last steps saw "
            f"is not known; {self._describe_last_checkpoint()}restore the text and run the same command, or train on a copy that nobody "
            f"writes to"
        )

    def _checkpoint_state(self, step: int) -> tuple[list[checkpoint.StateShard], dict[str, Any]]:
        return self.engine.state_shards(), checkpoint_metadata(self.job, step)

    def _instability_remedy(self) -> str:
        """Describe what to do when loss or gradients are not finite."""
        return f"{self._describe_last_checkpoint()}lower learning_rate = {self.section.learning_rate:g}, raise warmup_steps or set clip, and run again"  # noqa: E501

    def _describe_last_checkpoint(self) -> str:
        if self.saving.saved_step < 0:
            return "there is no checkpoint yet; "
        return f"the checkpoint of step {self.saving.saved_step} in {self.checkpoints} is whole; "

    def _summary(self, step: int, stopped: bool) -> Summary:
        # From the metrics file if this process has run no step, since the run was already complete.
        path = self.job.folder / METRICS_FILE
        rows = read_metrics(path) if path.exists() and not self.losses else []
        times = self.step_times or [float(row["step_time_s"] or 0.0) for row in rows if row.get("step_time_s")]
        seconds = float(median(times[-_NUM_MEDIAN_STEPS:])) if times else 0.0
        predicted = self.job.plan.prediction
        return {
            "run_folder": str(self.job.folder),
            "step": step,
            "loss": self.losses[-1] if self.losses else _last_value(rows, "loss"),
            "eval_loss": self.eval_loss if self.losses else _last_value(rows, "eval_loss"),
            "byte_frequency_loss": self.task.byte_frequency_loss or None,
            "tokens_per_s": self.task.tokens_per_step / seconds if seconds else None,
            "step_time_s": seconds or None,
            "predicted_step_time_s": predicted.step_time_s if predicted else None,
            "predicted_parts_s": dict(predicted.parts) if predicted else None,
            "measured_parts_s": self.measured_parts_s,
            "memory_bytes": self.memory_bytes or None,
            "predicted_memory_bytes": {part: getattr(predicted.memory, part) for part in PARTS} if predicted else None,
            "mfu": self._mfu(seconds) if seconds else None,
            "layout": str(self.job.plan.layout),
            "num_parameters": self.engine.num_parameters,
            "stopped": stopped,
            "saving_s": self.saving.costs.waited_s,
            "saving": self.saving.report(),
            "waited_for": {str(rank): share for rank, share in (self.stragglers.wait_shares() if self.stragglers else {}).items()},
            "data_wait_s": self.data_wait_s,
        }


def _text_digest(job: TrainingJob) -> str:
    return job.corpus.digest if job.corpus else ""


def checkpoint_metadata(job: TrainingJob, step: int) -> dict[str, Any]:
    """Return the metadata that a checkpoint stores with its tensors."""
    config, files = job.config.model_dump(mode="json"), {}
    with suppress(OSError, ValueError):
        files = json.loads((job.folder / DIGESTS).read_text(encoding="utf-8"))
    samples, layout = step * job.config.train.batch, str(job.plan.layout)
    return {"text": _text_digest(job), "samples": samples, "config": config, "layout": layout, "files": files}


def _folder_inode(folder: Path) -> tuple[int, int] | None:
    """Device and inode of a folder, which tell it from a new folder of the same name; None if it does not exist."""
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _last_value(rows: Sequence[Row], key: str) -> float | None:
    return next((row[key] for row in reversed(rows) if key in row), None)
