"""Keeps a step's gradients between microbatches, and goes on from them where the step was interrupted. In: an executor at a step. Out: the
executor of what is left, what its microbatches before left, and what is to be done after its actions.

A gradient is kept at its own moment, when it has the microbatches below `k` and no other: those of one stage, and those that a split
backward makes later, at moments of their own. Losses go with them. Everything else that a microbatch depends on follows from the
state before the step, its number and the batch: weights, random numbers, the scale of the loss, what is counted over all microbatches.

Not modelled, and made whole again: see `refused`.
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

TRIED_BYTES = 8 << 20  # that are copied to see how fast that is
RECENT = 3  # steps, of which the shortest counts


def refused(layout: Layout, parts: Parts) -> str:
    """Why a step is only made whole; empty where it can be gone on with."""
    if parts.lowering is None:
        return "the model runs whole, and may keep what nobody sees"
    if written := written_buffers(parts.graph):
        names = sorted(v.name for v in parts.graph.buffers if v.value in written)
        return f"forward writes {', '.join(names)}, of microbatches that are still to come"
    if layout.staleness or layout.servers:
        return "updates come late, or from servers"
    return ""


@dataclass(frozen=True)
class _Item:
    """Gradients that lie together, by the name of one of them. `part`: what adds to them."""

    name: str
    part: Part


@dataclass(frozen=True)
class _Copied:
    """What is kept of a step of one executor, and where all ranks can: `every` so many microbatches at least."""

    items: tuple[_Item, ...]
    losses: tuple[int, ...]  # the microbatches whose losses this rank has, in order
    possible: tuple[int, ...]
    every: int


@dataclass
class Finishing:
    """Of one rank. `every`: microbatches between two copies, the same on all ranks; 0: none. `copy_s`: what one took, where it is known.
    `share`: of the time of microbatches, that copies may take; `worth_s`: of steps that last longer."""

    world: World
    parts: Parts
    layout: Layout
    gradients: Gradients
    every: int = 0
    copy_s: float = 0.0
    share: float = SHARE
    worth_s: float = WORTH_S
    resume: int = 0  # the mark of what all ranks have kept
    reruns: int = 0  # microbatches of the last step that were gone on from
    memory: KeptGradients | None = None
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _plans: WeakKeyDictionary[Executor, _Copied] = field(default_factory=WeakKeyDictionary)

    @cached_property
    def refused(self) -> str:
        """Why this rank's steps are only made whole."""
        return refused(self.layout, self.parts)

    @cached_property
    def _groups(self) -> list[tuple[str, ...]]:
        """Names of gradients that lie together."""
        return self.gradients.lying_together({name for names in self._learned().values() for name in names})

    @cached_property
    def _sizes(self) -> list[int]:
        return [self.gradients.like(names[0]).nbytes for names in self._groups] + [8 * self.layout.microbatches]

    @property
    def size_bytes(self) -> int:
        """Of host memory that keeps them twice."""
        return region_bytes(self._sizes)

    def _learned(self) -> Mapping[int, frozenset[str]]:
        read = {v.value: v.name for v in self.parts.graph.parameters if v.name in self.parts.parameters}
        learned = {value: name for value, name in read.items() if self.parts.parameters[name].requires_grad}
        return {s: frozenset(learned[v] for v in local.variables if v in learned) for s, local in self.parts.lowered.items()}

    def timed(self, seconds: float) -> None:
        """A step's program took so long."""
        self._seconds.append(seconds / max(1, self.layout.microbatches - self.reruns))

    def wants(self) -> int:
        """Microbatches between two copies, by what this rank has measured."""
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
        """From now on; every rank calls it with the same."""
        self.every = every if every < NEVER else 0
        if self.every and self.memory is None:
            self.memory = KeptGradients(self.world, self._sizes)

    def vote(self, step: int) -> None:
        """In a new generation, which has the state after `step` steps: what all ranks have of the next; every rank calls it."""
        self.resume = vote(self.world, step)
        self.keep(parts_of(self.resume)[2] or NEVER)

    def forget(self) -> None:
        """What was kept of this step is in doubt."""
        self.resume = 0
        if self.memory is not None:
            self.memory.forget()

    @property
    def resumes(self) -> tuple[int, int]:
        """(a step, how many of its microbatches are in); 0 of these for none."""
        return parts_of(self.resume)[:2]

    def begin(self, executor: Executor, step: int, trains: bool) -> tuple[Executor, Result, Mapping[int, Run]]:
        """After `Gradients.start`: what runs a step, what it has already, and what follows its actions."""
        result = Result()
        if not trains:  # alone, as one program
            return executor, result, {}
        mark, self.resume, self.reruns = self.resume, 0, 0
        of, k, _ = parts_of(mark)
        if self.memory is None or self.refused:
            return executor, result, {}
        copied = self._plans.get(executor)
        if copied is None:
            copied = self._plans[executor] = self._plan(executor)
        full = executor
        if of == step and k in copied.possible:
            try:
                executor = full.rest(k)
            except ProgramError:  # on every rank: it is the same program
                return full, result, self._following(full, copied, step, 0)
            self._restore(copied, full, mark, result)
            self.reruns = k
        return executor, result, self._following(executor, copied, step, self.reruns)

    def _plan(self, executor: Executor) -> _Copied:
        """Made by all ranks at once."""
        row, microbatches = executor.program.actions[executor.rank], len(executor.sizes)
        items = [self._item(names, executor) for names in self._groups]
        forwards = [a for a in row if isinstance(a, Compute) and a.op is Op.F and executor.runners[a.stage].local.results]
        losses = tuple(a.microbatch for a in forwards)
        moments = spans(row, {item.part for item in items}, microbatches)
        cannot = [int(k not in moments or not _begins(losses, k)) for k in range(1, self.layout.microbatches)]
        *cannot, every = self.world.maximum([*cannot, apart(moments)])
        return _Copied(tuple(items), losses, tuple(k for k, no in enumerate(cannot, 1) if not no), every)

    def _item(self, names: tuple[str, ...], executor: Executor) -> _Item:
        """Of gradients that lie together."""
        stages = frozenset(s for s, learned in executor.learned.items() if not learned.isdisjoint(names))
        later = {name in delayed.names for name in names for s in stages if (delayed := executor.runners[s].delayed) is not None}
        ops = INPUT | WEIGHT if len(later) > 1 or len(stages) > 1 else WEIGHT if True in later else INPUT
        return _Item(names[0], Part(stages, ops))

    def _restore(self, copied: _Copied, full: Executor, mark: int, result: Result) -> None:
        assert self.memory is not None
        _, k, _ = parts_of(mark)
        for room, item in enumerate(copied.items):
            data, how = self.memory.get(mark, room)
            if not how:
                continue
            like = self.gradients.like(item.name)
            self.gradients.put_back(item.name, data.view(like.dtype).view(like.shape), how == 2)
        those = [m for m in copied.losses if m < k]
        data, _ = self.memory.get(mark, len(copied.items))
        result.losses += data.view(torch.float64)[: len(those)].to(self.world.device).unbind()
        result.weights += [full.sizes[m].weight for m in those]

    def _following(self, executor: Executor, copied: _Copied, of: int, after: int) -> dict[int, Run]:
        """What follows the actions of step `of`."""
        row, then = executor.program.actions[executor.rank], dict[int, list[Run]]()
        for k in kept_at(copied.possible, max(self.every, copied.every), after) if self.every else ():
            at = [step for item in copied.items if (step := moment(row, item.part, k)) is not None]
            copy = _Copy(self, mark_of(of, k, self.every))
            for room, (item, place) in enumerate(zip(copied.items, at, strict=True)):
                then.setdefault(place, []).append(partial(copy.put, room, item.name))
            then[max(at)].append(partial(copy.end, len(at), sum(m < k for m in copied.losses)))
        return {place: partial(_all, runs) for place, runs in then.items()}


@dataclass
class _Copy:
    """One copy under way, into `side`; None: nowhere."""

    of: Finishing
    mark: int
    side: int | None = None
    begun: bool = False
    seconds: float = 0.0

    def put(self, room: int, name: str, running: Running) -> None:
        """Copy the gradients of a name as they are now."""
        began, memory = time.perf_counter(), self.of.memory
        assert memory is not None
        if not self.begun:
            self.begun, self.side = True, memory.begin(parts_of(self.mark)[0])
        if self.side is None:
            return
        try:
            now = self.of.gradients.collected(name)
        except ValueError:
            self.side = None
            return
        if now is not None:
            memory.put(self.side, room, now[0], 1 + now[1])
        self.seconds += time.perf_counter() - began

    def end(self, room: int, count: int, running: Running) -> None:
        """Copy the first `count` losses, behind everything else."""
        memory = self.of.memory
        if self.side is None or memory is None:
            return
        if count:
            memory.put(self.side, room, torch.stack([x.double() for x in running.result.losses[:count]]))
        memory.end(self.side, self.mark)
        self.of.copy_s = self.seconds


def _begins(losses: Sequence[int], k: int) -> bool:
    """Whether those below `k` come first, and are not all; or there are none."""
    count = sum(m < k for m in losses)
    return not losses or (0 < count < len(losses) and max(losses[:count]) < k)


def _all(runs: list[Run], running: Running) -> None:
    for run in runs:
        run(running)


def _copying_s() -> float:
    """Seconds that copying `TRIED_BYTES` takes."""
    source, target = (torch.ones(TRIED_BYTES, dtype=torch.uint8) for _ in range(2))
    began = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - began
