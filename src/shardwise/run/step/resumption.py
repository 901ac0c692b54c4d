"""Snapshot accumulated gradients between microbatches, and resume an interrupted step from them. In: an executor at a step. Out: the
executor of the remaining microbatches, the results of the completed ones, and callbacks after its actions.

Each gradient is copied when it contains exactly the microbatches below `k`: gradients of different stages, and those of split backwards, at
different times. Losses are copied with them. Everything else that a microbatch depends on follows from the state before the step, its
number and the batch: weights, random numbers, the loss scale, loss divisors.

Not supported, so that the step is rerun in full: see `why_not_resumable`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from weakref import WeakKeyDictionary

import torch

from shardwise.errors import ProgramError
from shardwise.model.graph import written_buffers
from shardwise.plan.ir.program import Compute, ComputeOp
from shardwise.plan.ir.step_remainder import (
    INPUT_GRADIENT_OPS,
    MAX_COPY_BANDWIDTH,
    MAX_COPY_FRACTION,
    MIN_STEP_S,
    NEVER,
    WEIGHT_GRADIENT_OPS,
    GradientSubset,
    min_snapshot_spacing,
    snapshot_interval,
    snapshot_microbatches,
    snapshot_step,
    snapshot_step_ranges,
)
from shardwise.plan.layout import Layout
from shardwise.run.gradients.gradient_reducer import GradientReducer
from shardwise.run.parts.rank_model import RankModel
from shardwise.run.recovery.gradient_snapshots import (
    MAX_MICROBATCHES,
    GradientSnapshots,
    agree_on_mark,
    decode_mark,
    encode_mark,
    region_bytes,
)
from shardwise.run.step.dispatch import ActionRunner, RunResult, StepState
from shardwise.run.step.executor import Executor
from shardwise.world.world import World

TRIAL_COPY_BYTES = 8 << 20  # copied to measure the copy rate
NUM_RECENT_STEPS = 3  # steps over which the minimum time is taken


def why_not_resumable(layout: Layout, rank_model: RankModel) -> str:
    """Return why an interrupted step must be rerun in full; empty if it can be resumed."""
    if rank_model.lowering is None:
        return "the model is not captured, and may have hidden state"
    if written := written_buffers(rank_model.graph):
        names = sorted(v.name for v in rank_model.graph.buffers if v.value in written)
        return f"forward writes {', '.join(names)}, which later microbatches read"
    if layout.scatters_last:
        return "gradients are whole until the last microbatch (scatter=last, or branches)"
    if layout.staleness or layout.servers:
        return "updates are asynchronous, or made by parameter servers"
    return ""


@dataclass(frozen=True)
class _GradientSet:
    """Gradients in one contiguous buffer, by the name of one of them. `contributors`: computes that accumulate into them."""

    name: str
    contributors: GradientSubset


@dataclass(frozen=True)
class _SnapshotPlan:
    """Snapshots of one executor's step that are possible on all ranks, at intervals of `min_interval` microbatches or more."""

    gradient_sets: tuple[_GradientSet, ...]
    loss_microbatches: tuple[int, ...]  # microbatches whose losses this rank computes, in order
    valid_counts: tuple[int, ...]
    min_interval: int


@dataclass
class StepResumption:
    """Gradient snapshots of one rank. `interval`: microbatches between two, the same on all ranks; 0: none. `copy_s`: measured copy time.
    `max_time_share`: of the step time, for copies; `min_step_time_s`: no snapshots of shorter steps."""

    world: World
    rank_model: RankModel
    layout: Layout
    gradients: GradientReducer
    interval: int = 0
    copy_s: float = 0.0
    max_time_share: float = MAX_COPY_FRACTION
    min_step_time_s: float = MIN_STEP_S
    resume_mark: int = 0  # mark of the newest snapshot that all ranks have
    num_resumed: int = 0  # microbatches of the last step that were not rerun
    snapshots: GradientSnapshots | None = None
    _microbatch_times_s: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_RECENT_STEPS))
    _plans: WeakKeyDictionary[Executor, _SnapshotPlan] = field(default_factory=WeakKeyDictionary)

    @cached_property
    def why_not_resumable(self) -> str:
        """Why this rank's steps cannot be resumed; empty if they can."""
        return why_not_resumable(self.layout, self.rank_model)

    @cached_property
    def _gradient_names(self) -> list[tuple[str, ...]]:
        """Names of the gradients in each contiguous buffer."""
        return self.gradients.scatter_sets({name for names in self._trainable_by_stage().values() for name in names})

    @cached_property
    def _buffer_sizes(self) -> list[int]:
        return [self.gradients.buffer_like(names[0]).nbytes for names in self._gradient_names] + [8 * self.layout.microbatches]

    @property
    def size_bytes(self) -> int:
        """Bytes of host memory for the double buffer."""
        return region_bytes(self._buffer_sizes)

    def _trainable_by_stage(self) -> Mapping[int, frozenset[str]]:
        read = {v.value: v.name for v in self.rank_model.graph.parameters if v.name in self.rank_model.parameters}
        trainable = {value: name for value, name in read.items() if self.rank_model.parameters[name].requires_grad}
        return {s: frozenset(trainable[v] for v in local.variables if v in trainable) for s, local in self.rank_model.lowered.items()}

    def record_time(self, seconds: float) -> None:
        """Record the duration of a step's program."""
        self._microbatch_times_s.append(seconds / max(1, self.layout.microbatches - self.num_resumed))

    def preferred_interval(self) -> int:
        """Return the interval between snapshots, in microbatches, by this rank's measurements."""
        microbatches = self.layout.microbatches
        if self.why_not_resumable or self.world.recovery is None or self.world.recovery.make_world is None or not self._microbatch_times_s:
            return NEVER
        half, shortest = self.size_bytes // 2, min(self._microbatch_times_s)
        if not 1 < microbatches < MAX_MICROBATCHES or shortest * microbatches < self.min_step_time_s:
            return NEVER
        if not self.copy_s and snapshot_interval(half / MAX_COPY_BANDWIDTH, shortest, self.max_time_share) < microbatches:
            self.copy_s = half / TRIAL_COPY_BYTES * _copy_time_s()
        every = snapshot_interval(self.copy_s or half / MAX_COPY_BANDWIDTH, shortest, self.max_time_share)
        return every if every < microbatches else NEVER

    def set_interval(self, interval: int) -> None:
        """Set the interval from now on; every rank passes the same."""
        self.interval = interval if interval < NEVER else 0
        if self.interval and self.snapshots is None:
            self.snapshots = GradientSnapshots(self.world, self._buffer_sizes)

    def vote(self, step: int) -> None:
        """Agree, in a new generation with the state after `step` steps, on the snapshot to resume from; every rank calls it."""
        self.resume_mark = agree_on_mark(self.world, step)
        self.set_interval(decode_mark(self.resume_mark)[2] or NEVER)

    def forget(self) -> None:
        """Discard the snapshots of this step, which are suspect."""
        self.resume_mark = 0
        if self.snapshots is not None:
            self.snapshots.forget()

    @property
    def resume_point(self) -> tuple[int, int]:
        """(step, number of its completed microbatches) to resume from; 0 microbatches for none."""
        return decode_mark(self.resume_mark)[:2]

    def begin(self, executor: Executor, step: int, runs_backward: bool) -> tuple[Executor, RunResult, Mapping[int, ActionRunner]]:
        """Return the executor of a step, its results so far, and callbacks after its actions; call it after `GradientReducer.start`."""
        result = RunResult()
        if not runs_backward:  # not a training step of one program
            return executor, result, {}
        mark, self.resume_mark, self.num_resumed = self.resume_mark, 0, 0
        marked_step, k, _ = decode_mark(mark)
        if self.snapshots is None or self.why_not_resumable:
            return executor, result, {}
        plan = self._plans.get(executor)
        if plan is None:
            plan = self._plans[executor] = self._plan_snapshots(executor)
        full_executor = executor
        if marked_step == step and k in plan.valid_counts:
            try:
                executor = full_executor.remaining(k)
            except ProgramError:  # raised on every rank, since the program is the same
                return full_executor, result, self._runs_after(full_executor, plan, step, 0)
            self._restore(plan, full_executor, mark, result)
            self.num_resumed = k
        return executor, result, self._runs_after(executor, plan, step, self.num_resumed)

    def _plan_snapshots(self, executor: Executor) -> _SnapshotPlan:
        """Plan the snapshots of an executor; all ranks call it at once."""
        row, microbatches = executor.program.actions[executor.rank], len(executor.by_microbatch)
        items = [self._gradient_set(names, executor) for names in self._gradient_names]
        forwards = [a for a in row if isinstance(a, Compute) and a.op is ComputeOp.F and executor.runners[a.stage].local.results]
        losses = tuple(a.microbatch for a in forwards)
        moments = snapshot_step_ranges(row, {item.contributors for item in items}, microbatches)
        is_impossible = [int(k not in moments or not _losses_come_first(losses, k)) for k in range(1, self.layout.microbatches)]
        *is_impossible, every = self.world.all_reduce_max([*is_impossible, min_snapshot_spacing(moments)])
        return _SnapshotPlan(tuple(items), losses, tuple(k for k, impossible in enumerate(is_impossible, 1) if not impossible), every)

    def _gradient_set(self, names: tuple[str, ...], executor: Executor) -> _GradientSet:
        """Return the gradient set of names that share a buffer."""
        stages = frozenset(s for s, learned in executor.trainable_by_stage.items() if not learned.isdisjoint(names))
        is_delayed = {
            name in delayed.names for name in names for s in stages if (delayed := executor.runners[s].delayed_gradients) is not None
        }
        ops = (
            INPUT_GRADIENT_OPS | WEIGHT_GRADIENT_OPS
            if len(is_delayed) > 1 or len(stages) > 1
            else WEIGHT_GRADIENT_OPS
            if True in is_delayed
            else INPUT_GRADIENT_OPS
        )
        return _GradientSet(names[0], GradientSubset(stages, ops))

    def _restore(self, plan: _SnapshotPlan, full: Executor, mark: int, result: RunResult) -> None:
        assert self.snapshots is not None
        _, k, _ = decode_mark(mark)
        for index, item in enumerate(plan.gradient_sets):
            data, flag = self.snapshots.read(mark, index)
            if not flag:
                continue
            like = self.gradients.buffer_like(item.name)
            self.gradients.restore(item.name, data.view(like.dtype).view(like.shape), flag == 2)
        restored = [m for m in plan.loss_microbatches if m < k]
        data, _ = self.snapshots.read(mark, len(plan.gradient_sets))
        result.losses += data.view(torch.float64)[: len(restored)].to(self.world.device).unbind()
        result.weights += [full.by_microbatch[m].loss_weight for m in restored]

    def _runs_after(self, executor: Executor, plan: _SnapshotPlan, of_step: int, after: int) -> dict[int, ActionRunner]:
        """Return the snapshot callbacks after the actions of a step."""
        row, runs_by_action = executor.program.actions[executor.rank], dict[int, list[ActionRunner]]()
        for k in snapshot_microbatches(plan.valid_counts, max(self.interval, plan.min_interval), after) if self.interval else ():
            moments = [step for item in plan.gradient_sets if (step := snapshot_step(row, item.contributors, k)) is not None]
            snapshot = _SnapshotInProgress(self, encode_mark(of_step, k, self.interval))
            for index, (item, action_index) in enumerate(zip(plan.gradient_sets, moments, strict=True)):
                runs_by_action.setdefault(action_index, []).append(partial(snapshot.copy_gradients, index, item.name))
            runs_by_action[max(moments)].append(partial(snapshot.copy_losses, len(moments), sum(m < k for m in plan.loss_microbatches)))
        return {action_index: partial(_run_all, runs) for action_index, runs in runs_by_action.items()}


@dataclass
class _SnapshotInProgress:
    """One snapshot in progress, into buffer `buffer_index`; None: abandoned."""

    resumption: StepResumption
    mark: int
    buffer_index: int | None = None
    is_begun: bool = False
    seconds: float = 0.0

    def copy_gradients(self, index: int, name: str, running: StepState) -> None:
        """Copy the current gradients of a set."""
        began, memory = time.perf_counter(), self.resumption.snapshots
        assert memory is not None
        if not self.is_begun:
            self.is_begun, self.buffer_index = True, memory.begin(decode_mark(self.mark)[0])
        if self.buffer_index is None:
            return
        try:
            accumulated = self.resumption.gradients.accumulated(name)
        except ValueError:
            self.buffer_index = None
            return
        if accumulated is not None:
            memory.write(self.buffer_index, index, accumulated[0], 1 + accumulated[1])
        self.seconds += time.perf_counter() - began

    def copy_losses(self, index: int, count: int, running: StepState) -> None:
        """Copy the first `count` losses after everything else, and commit the snapshot."""
        memory = self.resumption.snapshots
        if self.buffer_index is None or memory is None:
            return
        if count:
            memory.write(self.buffer_index, index, torch.stack([x.double() for x in running.result.losses[:count]]))
        memory.commit(self.buffer_index, self.mark)
        self.resumption.copy_s = self.seconds


def _losses_come_first(losses: Sequence[int], k: int) -> bool:
    """Return whether the losses below `k` are a proper prefix, or there are no losses."""
    count = sum(m < k for m in losses)
    return not losses or (0 < count < len(losses) and max(losses[:count]) < k)


def _run_all(runs: list[ActionRunner], running: StepState) -> None:
    for run in runs:
        run(running)


def _copy_time_s() -> float:
    """Seconds to copy `TRIAL_COPY_BYTES`."""
    source, target = (torch.ones(TRIAL_COPY_BYTES, dtype=torch.uint8) for _ in range(2))
    began = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - began
