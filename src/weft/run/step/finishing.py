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

from weft.errors import ProgramError
from weft.model.graph import written_buffers
from weft.plan.finish import FASTEST, INPUT, NEVER, SHARE, WEIGHT, WORTH_S, Part, apart, keeps_every, kept_at, moment, spans
from weft.plan.layout import Layout
from weft.plan.program import Compute, Op
from weft.run.reduce.overlapped import Gradients
from weft.run.state.kept_gradients import MOST_MICROBATCHES, KeptGradients, mark_of, parts_of, region_bytes, vote
from weft.run.step.dispatch import Result, Run, Running
from weft.run.step.executor import Executor
from weft.run.training_parts import Parts
from weft.world.world import World

TRIED_BYTES = 8 << 20  # copied to measure the copy rate
RECENT = 3  # steps over which the minimum time is taken


def refused(layout: Layout, parts: Parts) -> str:
    """Return why an interrupted step must be rerun in full; empty if it can be resumed."""
    if parts.lowering is None:
        return "the model is not captured, and may have hidden state"
    if written := written_buffers(parts.graph):
        names = sorted(v.name for v in parts.graph.buffers if v.value in written)
        return f"forward writes {', '.join(names)}, which later microbatches read"
    if layout.staleness or layout.servers:
        return "updates are asynchronous, or made by parameter servers"
    return ""


@dataclass(frozen=True)
class _Item:
    """Gradients in one contiguous buffer, by the name of one of them. `contributors`: computes that accumulate into them."""

    name: str
    part: Part


@dataclass(frozen=True)
class _Copied:
    """Snapshots of one executor's step that are possible on all ranks, at intervals of `min_interval` microbatches or more."""

    items: tuple[_Item, ...]
    losses: tuple[int, ...]  # microbatches whose losses this rank computes, in order
    possible: tuple[int, ...]
    every: int


@dataclass
class Finishing:
    """Gradient snapshots of one rank. `interval`: microbatches between two, the same on all ranks; 0: none. `copy_s`: measured copy time.
    `max_time_share`: of the step time, for copies; `min_step_time_s`: no snapshots of shorter steps."""

    world: World
    parts: Parts
    layout: Layout
    gradients: Gradients
    every: int = 0
    copy_s: float = 0.0
    share: float = SHARE
    worth_s: float = WORTH_S
    resume: int = 0  # mark of the newest snapshot that all ranks have
    reruns: int = 0  # microbatches of the last step that were not rerun
    memory: KeptGradients | None = None
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _plans: WeakKeyDictionary[Executor, _Copied] = field(default_factory=WeakKeyDictionary)

    @cached_property
    def refused(self) -> str:
        """Why this rank's steps cannot be resumed; empty if they can."""
        return refused(self.layout, self.parts)

    @cached_property
    def _groups(self) -> list[tuple[str, ...]]:
        """Names of the gradients in each contiguous buffer."""
        return self.gradients.lying_together({name for names in self._learned().values() for name in names})

    @cached_property
    def _sizes(self) -> list[int]:
        return [self.gradients.like(names[0]).nbytes for names in self._groups] + [8 * self.layout.microbatches]

    @property
    def size_bytes(self) -> int:
        """Bytes of host memory for the double buffer."""
        return region_bytes(self._sizes)

    def _learned(self) -> Mapping[int, frozenset[str]]:
        read = {v.value: v.name for v in self.parts.graph.parameters if v.name in self.parts.parameters}
        trainable = {value: name for value, name in read.items() if self.parts.parameters[name].requires_grad}
        return {s: frozenset(trainable[v] for v in local.variables if v in trainable) for s, local in self.parts.lowered.items()}

    def timed(self, seconds: float) -> None:
        """Record the duration of a step's program."""
        self._seconds.append(seconds / max(1, self.layout.microbatches - self.reruns))

    def wants(self) -> int:
        """Return the interval between snapshots, in microbatches, by this rank's measurements."""
        microbatches = self.layout.microbatches
        if self.refused or self.world.survivor is None or self.world.survivor.make is None or not self._seconds:
            return NEVER
        half, shortest = self.size_bytes // 2, min(self._seconds)
        if not 1 < microbatches < MOST_MICROBATCHES or shortest * microbatches < self.worth_s:
            return NEVER
        if not self.copy_s and keeps_every(half / FASTEST, shortest, self.share) < microbatches:
            self.copy_s = half / TRIED_BYTES * _copying_s()
        every = keeps_every(self.copy_s or half / FASTEST, shortest, self.share)
        return every if every < microbatches else NEVER

    def keep(self, every: int) -> None:
        """Set the interval from now on; every rank passes the same."""
        self.every = every if every < NEVER else 0
        if self.every and self.memory is None:
            self.memory = KeptGradients(self.world, self._sizes)

    def vote(self, step: int) -> None:
        """Agree, in a new generation with the state after `step` steps, on the snapshot to resume from; every rank calls it."""
        self.resume = vote(self.world, step)
        self.keep(parts_of(self.resume)[2] or NEVER)

    def forget(self) -> None:
        """Discard the snapshots of this step, which are suspect."""
        self.resume = 0
        if self.memory is not None:
            self.memory.forget()

    @property
    def resumes(self) -> tuple[int, int]:
        """(step, number of its completed microbatches) to resume from; 0 microbatches for none."""
        return parts_of(self.resume)[:2]

    def begin(self, executor: Executor, step: int, trains: bool) -> tuple[Executor, Result, Mapping[int, Run]]:
        """Return the executor of a step, its results so far, and callbacks after its actions; call it after `GradientReducer.start`."""
        result = Result()
        if not trains:  # not a training step of one program
            return executor, result, {}
        mark, self.resume, self.reruns = self.resume, 0, 0
        marked_step, k, _ = parts_of(mark)
        if self.memory is None or self.refused:
            return executor, result, {}
        plan = self._plans.get(executor)
        if plan is None:
            plan = self._plans[executor] = self._plan(executor)
        full_executor = executor
        if marked_step == step and k in plan.possible:
            try:
                executor = full_executor.rest(k)
            except ProgramError:  # raised on every rank, since the program is the same
                return full_executor, result, self._following(full_executor, plan, step, 0)
            self._restore(plan, full_executor, mark, result)
            self.reruns = k
        return executor, result, self._following(executor, plan, step, self.reruns)

    def _plan(self, executor: Executor) -> _Copied:
        """Plan the snapshots of an executor; all ranks call it at once."""
        row, microbatches = executor.program.actions[executor.rank], len(executor.sizes)
        items = [self._item(names, executor) for names in self._groups]
        forwards = [a for a in row if isinstance(a, Compute) and a.op is Op.F and executor.runners[a.stage].local.results]
        losses = tuple(a.microbatch for a in forwards)
        moments = spans(row, {item.part for item in items}, microbatches)
        is_impossible = [int(k not in moments or not _begins(losses, k)) for k in range(1, self.layout.microbatches)]
        *is_impossible, every = self.world.maximum([*is_impossible, apart(moments)])
        return _Copied(tuple(items), losses, tuple(k for k, impossible in enumerate(is_impossible, 1) if not impossible), every)

    def _item(self, names: tuple[str, ...], executor: Executor) -> _Item:
        """Return the gradient set of names that share a buffer."""
        stages = frozenset(s for s, learned in executor.learned.items() if not learned.isdisjoint(names))
        is_delayed = {name in delayed.names for name in names for s in stages if (delayed := executor.runners[s].delayed) is not None}
        ops = INPUT | WEIGHT if len(is_delayed) > 1 or len(stages) > 1 else WEIGHT if True in is_delayed else INPUT
        return _Item(names[0], Part(stages, ops))

    def _restore(self, copied: _Copied, full: Executor, mark: int, result: Result) -> None:
        assert self.memory is not None
        _, k, _ = parts_of(mark)
        for index, item in enumerate(copied.items):
            data, flag = self.memory.get(mark, index)
            if not flag:
                continue
            like = self.gradients.like(item.name)
            self.gradients.put_back(item.name, data.view(like.dtype).view(like.shape), flag == 2)
        restored = [m for m in copied.losses if m < k]
        data, _ = self.memory.get(mark, len(copied.items))
        result.losses += data.view(torch.float64)[: len(restored)].to(self.world.device).unbind()
        result.weights += [full.sizes[m].weight for m in restored]

    def _following(self, executor: Executor, copied: _Copied, of: int, after: int) -> dict[int, Run]:
        """Return the snapshot callbacks after the actions of a step."""
        row, runs_by_action = executor.program.actions[executor.rank], dict[int, list[Run]]()
        for k in kept_at(copied.possible, max(self.every, copied.every), after) if self.every else ():
            moments = [step for item in copied.items if (step := moment(row, item.part, k)) is not None]
            snapshot = _Copy(self, mark_of(of, k, self.every))
            for index, (item, action_index) in enumerate(zip(copied.items, moments, strict=True)):
                runs_by_action.setdefault(action_index, []).append(partial(snapshot.put, index, item.name))
            runs_by_action[max(moments)].append(partial(snapshot.end, len(moments), sum(m < k for m in copied.losses)))
        return {action_index: partial(_all, runs) for action_index, runs in runs_by_action.items()}


@dataclass
class _Copy:
    """One snapshot in progress, into buffer `buffer_index`; None: abandoned."""

    of: Finishing
    mark: int
    side: int | None = None
    begun: bool = False
    seconds: float = 0.0

    def put(self, room: int, name: str, running: Running) -> None:
        """Copy the current gradients of a set."""
        began, memory = time.perf_counter(), self.of.memory
        assert memory is not None
        if not self.begun:
            self.begun, self.side = True, memory.begin(parts_of(self.mark)[0])
        if self.side is None:
            return
        try:
            accumulated = self.of.gradients.collected(name)
        except ValueError:
            self.side = None
            return
        if accumulated is not None:
            memory.put(self.side, room, accumulated[0], 1 + accumulated[1])
        self.seconds += time.perf_counter() - began

    def end(self, room: int, count: int, running: Running) -> None:
        """Copy the first `count` losses after everything else, and commit the snapshot."""
        memory = self.of.memory
        if self.side is None or memory is None:
            return
        if count:
            memory.put(self.side, room, torch.stack([x.double() for x in running.result.losses[:count]]))
        memory.end(self.side, self.mark)
        self.of.copy_s = self.seconds


def _begins(losses: Sequence[int], k: int) -> bool:
    """Return whether the losses below `k` are a proper prefix, or there are no losses."""
    count = sum(m < k for m in losses)
    return not losses or (0 < count < len(losses) and max(losses[:count]) < k)


def _all(runs: list[Run], running: Running) -> None:
    for run in runs:
        run(running)


def _copying_s() -> float:
    """Seconds to copy `TRIAL_COPY_BYTES`."""
    source, target = (torch.ones(TRIED_BYTES, dtype=torch.uint8) for _ in range(2))
    began = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - began
