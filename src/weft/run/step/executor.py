"""Runs one rank's actions of a pipeline `Program`. In: the program, the stages of this rank and their local microbatches.
Out: gradients in the parameters' hooks, the loss, and, where asked for, the measured spans.

What is simulated is what runs: actions are taken in the program's order. Sends are posted; receives are posted some computes
early, so that transfers go on beside the compute. A value is dropped as soon as `effects` frees it. What two stages of one rank
hand to one another stays where it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weft.errors import ProgramError
from weft.lower.kernels.randomness import Draw
from weft.plan.finish import rest_of
from weft.plan.program import Action, Compute, Op, Program, Recv, Send, Value, effects
from weft.plan.timeline import COMPUTE_LANE, Span
from weft.run.reduce.overlapped import Gradients
from weft.run.residency.gathered import Gathered
from weft.run.residency.host import HostStore
from weft.run.step.dispatch import HANDLERS, Result, Run, Running, kind_of
from weft.run.step.stage_runner import StageRunner
from weft.run.step.transfers import Arriving, Between, Crossings, Transfers, posted_before
from weft.world.world import Group

__all__ = ["Executor", "Held", "Result", "Sizes"]


@dataclass(frozen=True)
class Sizes:
    """How microbatches of one size run: this rank's stages by number, what crosses, and what the loss of one counts in the batch's."""

    runners: Mapping[int, StageRunner]
    crossings: Crossings
    weight: float


@dataclass(frozen=True, slots=True)
class Held:
    """What actions find on a rank beside its stages.

    `gradients`: their sums, None where no backward runs. `learned`: names of the trainable parameters that each of its stages reads.
    `gathered`: weights that come and go. `host`: where what was saved can lie.
    """

    gradients: Gradients | None
    learned: Mapping[int, frozenset[str]]
    gathered: Gathered
    host: HostStore


@dataclass(frozen=True, slots=True)
class _Step:
    """One action, ready to run: the receives that are posted before it, and the slots that are empty after it."""

    action: Action
    posts: tuple[tuple[int, Callable[[], Arriving]], ...]
    run: Run
    frees: tuple[int, ...]


class Executor:
    """One rank of a pipeline. `sizes`: by microbatch, how it runs; `group`: its pipeline group, by position.

    `lent`: threads, by step, of the computes of a training step that get more than this rank has.
    """

    def __init__(
        self,
        program: Program,
        sizes: Mapping[int, Sizes],
        group: Group,
        device: torch.device,
        draw: Draw,
        held: Held,
        between: Between | None = None,
        lent: Mapping[int, int] | None = None,
    ) -> None:
        self.program, self.sizes = program, sizes
        first = sizes[program.microbatches[0]]  # in which all sizes agree: stages, and what crosses but for its shape
        self.runners, self.crossings = first.runners, first.crossings
        self.rank, self.draw = group.index if between is None else between.place, draw
        self.gradients, self.learned, self.gathered, self.host = held.gradients, held.learned, held.gathered, held.host
        self._over = group, device, draw, held, between
        self.transfers = Transfers(program, {m: one.crossings for m, one in sizes.items()}, group, device, between)
        self._slots: dict[Value, int] = {}
        actions = program.actions[self.rank]
        unhandled = next((a for a in actions if kind_of(a) not in HANDLERS), None)
        if unhandled is not None:
            raise ProgramError(f"{program.name}: rank {self.rank} has {unhandled}, which cannot be run; these can: {', '.join(HANDLERS)}")
        self.completes = self._complete(actions, held.learned)
        self._train = self._prepare(list(enumerate(actions)))
        threads, self.lent = torch.get_num_threads(), lent or {}
        for step, more in self.lent.items():
            self._train[step] = replace(self._train[step], run=_with_threads(more, threads, self._train[step].run))
        self._forward: list[_Step] | None = None
        self.watch: Callable[[Action, list[object]], None] | None = None  # called after every action with what is held; for tests

    def slot(self, value: Value) -> int:
        """Where a value of this rank is held."""
        return self._slots.setdefault(value, len(self._slots))

    def runner(self, action: Compute) -> StageRunner:
        """The stage of an action, for microbatches of the size of its own."""
        return self.sizes[action.microbatch].runners[action.stage]

    def rest(self, k: int) -> Executor:
        """What runs the microbatches from `k` on, with as many threads each. Raises ProgramError where that is not proven."""
        _, device, *_ = self._over
        program = rest_of(self.program, k, device.type == "cuda")
        threads = {self.program.actions[self.rank][step]: more for step, more in self.lent.items()}
        lent = {step: threads[action] for step, action in enumerate(program.actions[self.rank]) if action in threads}
        return Executor(program, self.sizes, *self._over, lent)

    def _complete(self, actions: Sequence[Action], learned: Mapping[int, frozenset[str]]) -> list[frozenset[str]]:
        """[step] -> the parameters whose gradient nothing adds to after it."""
        last: dict[str, int] = {}
        for step, action in enumerate(actions):
            if isinstance(action, Compute) and action.op in (Op.B, Op.I, Op.W):
                delayed = self.runners[action.stage].delayed
                names = learned[action.stage]
                if action.op is Op.W:
                    names = names & delayed.names if delayed is not None else frozenset()
                last.update(dict.fromkeys(names, step))
        completed: list[set[str]] = [set() for _ in actions]
        for name, step in last.items():
            completed[step].add(name)
        return [frozenset(names) for names in completed]

    def _prepare(self, numbered: Sequence[tuple[int, Action]]) -> list[_Step]:
        actions = [action for _, action in numbered]
        steps = []
        for (number, action), posts in zip(numbered, posted_before(actions), strict=True):
            receives = [a for a in (actions[i] for i in posts) if isinstance(a, Recv) and a.value.name in ("x", "g")]
            steps.append(
                _Step(
                    action,
                    tuple((self.slot(a.value), self.transfers.receiver(a.value, a.source)) for a in receives),
                    HANDLERS[kind_of(action)](self, action, number),
                    tuple(self.slot(value) for value in effects(action, self.program).frees),
                )
            )
        return steps

    def run(
        self,
        inputs: Sequence[Mapping[str, Tensor]],
        *,
        train: bool = True,
        record: bool = False,
        want_inputs: bool = False,
        ends: bool = True,
        after: Mapping[int, Run] | None = None,
        result: Result | None = None,
    ) -> Result:
        """Run every action once. `inputs[m]`: this rank's batch tensors of microbatch m by value name. `ends`: nothing of the step follows.
        `after`: what else is done, by step of this rank. `result`: of the microbatches before.

        Without `train` only forwards and activations' transfers run.
        """
        if not train and self._forward is None:
            self._forward = self._prepare([(i, a) for i, a in enumerate(self.program.actions[self.rank]) if _is_forward(a)])
        steps = self._train if train else self._forward
        assert steps is not None
        self.host.begin(x for tensors in inputs for x in tensors.values())
        steps = [replace(one, run=_followed(one.run, after[i])) if i in after else one for i, one in enumerate(steps)] if after else steps
        running = Running([None] * len(self._slots), inputs, train, want_inputs, ends, result or Result())
        with torch.set_grad_enabled(train):
            if record or self.watch is not None:
                self._run_recorded(steps, running)
            else:
                held, arriving = running.held, running.arriving
                for step in steps:
                    for slot, post in step.posts:
                        arriving[slot] = post()
                    step.run(running)
                    for slot in step.frees:
                        held[slot] = None
        for work in running.sends:
            work.wait()
        return running.result

    def _run_recorded(self, steps: Sequence[_Step], running: Running) -> None:
        clock = time.perf_counter
        began = clock()
        for step in steps:
            at = clock()
            for slot, post in step.posts:
                running.arriving[slot] = post()
            step.run(running)
            for slot in step.frees:
                running.held[slot] = None
            kind = kind_of(step.action)
            lane = COMPUTE_LANE if isinstance(step.action, Compute) else kind
            running.result.spans.append(Span(self.rank, lane, str(step.action), at - began, clock() - began, kind))
            if self.watch is not None:
                self.watch(step.action, running.held)


def _with_threads(more: int, rank_threads: int, run: Run) -> Run:
    def lent(running: Running) -> None:
        torch.set_num_threads(more)
        try:
            run(running)
        finally:
            torch.set_num_threads(rank_threads)

    return lent


def _followed(run: Run, then: Run) -> Run:
    def both(running: Running) -> None:
        run(running)
        then(running)

    return both


def _is_forward(action: Action) -> bool:
    if isinstance(action, Compute):
        return action.op is Op.F
    return isinstance(action, Send | Recv) and action.value.name == "x"
