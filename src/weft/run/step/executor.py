"""Execute one rank's actions of a pipeline-parallel `Program`. In: the program, this rank's stages and their local microbatches.
Out: gradients in the parameters' hooks, the loss, and, on request, the measured spans.

The simulator and this executor run the same program, in the same order. Sends are asynchronous; receives are posted a few computes early,
so that transfers overlap with compute. A value is released as soon as `effects` frees it. Stages on the same rank exchange values without
a copy.
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
    """What runs microbatches of one size: this rank's stages by index, tensors between stages, and the weight of a microbatch's loss."""

    runners: Mapping[int, StageRunner]
    crossings: Crossings
    weight: float


@dataclass(frozen=True, slots=True)
class Held:
    """Resources of a rank that actions use besides its stages.

    `gradients`: reducer, None without backward. `trainable_by_stage`: names of the trainable parameters that each stage reads.
    `gathered`: ZeRO-3 weight gatherer. `host`: buffers for offloaded activations.
    """

    gradients: Gradients | None
    learned: Mapping[int, frozenset[str]]
    gathered: Gathered
    host: HostStore


@dataclass(frozen=True, slots=True)
class _Step:
    """One prepared action: the receives that are posted before it, and the slots that are freed after it."""

    action: Action
    posts: tuple[tuple[int, Callable[[], Arriving]], ...]
    run: Run
    frees: tuple[int, ...]


class Executor:
    """Executor of one pipeline rank. `by_microbatch`: what runs each microbatch; `group`: pipeline group, in pipeline order.

    `threads_by_step`: thread counts of the training computes that get more threads than this rank has.
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
        first = sizes[program.microbatches[0]]  # all sizes have the same stages and the same transfers but for their shapes
        self.runners, self.crossings = first.runners, first.crossings
        self.rank, self.draw = group.index if between is None else between.place, draw
        self.gradients, self.learned, self.gathered, self.host = held.gradients, held.learned, held.gathered, held.host
        self._group, self._device, self._resources, self._resharding = group, device, held, between
        self.transfers = Transfers(program, {m: runners_of.crossings for m, runners_of in sizes.items()}, group, device, between)
        self._slots: dict[Value, int] = {}
        actions = program.actions[self.rank]
        unhandled = next((a for a in actions if kind_of(a) not in HANDLERS), None)
        if unhandled is not None:
            raise ProgramError(f"{program.name}: rank {self.rank} has {unhandled}, which cannot be run; these can: {', '.join(HANDLERS)}")
        self.completes = self._complete(actions, held.learned)
        self._train = self._prepare(list(enumerate(actions)))
        threads, self.lent = torch.get_num_threads(), lent or {}
        for step, num_threads in self.lent.items():
            self._train[step] = replace(self._train[step], run=_with_threads(num_threads, threads, self._train[step].run))
        self._forward: list[_Step] | None = None
        self.watch: Callable[[Action, list[object]], None] | None = None  # called after every action with the slots; for tests

    def slot(self, value: Value) -> int:
        """Return the slot number of a value of this rank."""
        return self._slots.setdefault(value, len(self._slots))

    def runner(self, action: Compute) -> StageRunner:
        """Return the stage runner of an action, for the size of its microbatch."""
        return self.sizes[action.microbatch].runners[action.stage]

    def rest(self, k: int) -> Executor:
        """Return the executor of microbatches `k` and later, with the same threads. Raises ProgramError if that program is not proven."""
        program = rest_of(self.program, k, self._device.type == "cuda")
        threads = {self.program.actions[self.rank][step]: num_threads for step, num_threads in self.lent.items()}
        lent = {step: threads[action] for step, action in enumerate(program.actions[self.rank]) if action in threads}
        return Executor(program, self.sizes, self._group, self._device, self.draw, self._resources, self._resharding, lent)

    def _complete(self, actions: Sequence[Action], learned: Mapping[int, frozenset[str]]) -> list[frozenset[str]]:
        """Return [step] -> the parameters whose gradient is complete after it."""
        last_step: dict[str, int] = {}
        for step, action in enumerate(actions):
            if isinstance(action, Compute) and action.op in (Op.B, Op.I, Op.W):
                delayed = self.runners[action.stage].delayed
                names = learned[action.stage]
                if action.op is Op.W:
                    names = names & delayed.names if delayed is not None else frozenset()
                last_step.update(dict.fromkeys(names, step))
        completed: list[set[str]] = [set() for _ in actions]
        for name, step in last_step.items():
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
        """Run every action once. `inputs[m]`: this rank's batch tensors of microbatch m by value name. `is_last_program`: none follows in
        this step. `run_after`: callbacks by index of the action that they follow. `result`: of earlier microbatches.

        Without `is_training` only forwards and the transfers of activations run.
        """
        if not train and self._forward is None:
            self._forward = self._prepare([(i, a) for i, a in enumerate(self.program.actions[self.rank]) if _is_forward(a)])
        steps = self._train if train else self._forward
        assert steps is not None
        self.host.begin(x for tensors in inputs for x in tensors.values())
        if after:
            steps = [replace(step, run=_followed(step.run, after[i])) if i in after else step for i, step in enumerate(steps)]
        state = Running([None] * len(self._slots), inputs, train, want_inputs, ends, result or Result())
        with torch.set_grad_enabled(train):
            if record or self.watch is not None:
                self._run_recorded(steps, state)
            else:
                slots, pending = state.held, state.arriving
                for step in steps:
                    for slot, post in step.posts:
                        pending[slot] = post()
                    step.run(state)
                    for slot in step.frees:
                        slots[slot] = None
        for work in state.sends:
            work.wait()
        return state.result

    def _run_recorded(self, steps: Sequence[_Step], running: Running) -> None:
        clock = time.perf_counter
        first_s = clock()
        for step in steps:
            start_s = clock()
            for slot, post in step.posts:
                running.arriving[slot] = post()
            step.run(running)
            for slot in step.frees:
                running.held[slot] = None
            kind = kind_of(step.action)
            lane = COMPUTE_LANE if isinstance(step.action, Compute) else kind
            running.result.spans.append(Span(self.rank, lane, str(step.action), start_s - first_s, clock() - first_s, kind))
            if self.watch is not None:
                self.watch(step.action, running.held)


def _with_threads(more: int, rank_threads: int, run: Run) -> Run:
    def run_with_threads(running: Running) -> None:
        torch.set_num_threads(more)
        try:
            run(running)
        finally:
            torch.set_num_threads(rank_threads)

    return run_with_threads


def _followed(run: Run, then: Run) -> Run:
    def both(running: Running) -> None:
        run(running)
        then(running)

    return both


def _is_forward(action: Action) -> bool:
    if isinstance(action, Compute):
        return action.op is Op.F
    return isinstance(action, Send | Recv) and action.value.name == "x"
