"""Execute one rank's actions of a pipeline-parallel `Program`. In: the program, this rank's stages and their local microbatches.
Out: gradients in the parameters' hooks, the loss, and, on request, the measured spans.

The simulator and this executor run the same program, in the same order. Sends are asynchronous; receives are posted a few computes early,
so that transfers overlap with compute. A value is released as soon as `effects_of` frees it. Stages on the same rank exchange values
without
a copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardwise.errors import ProgramError
from shardwise.lower.kernels.randomness import DrawState
from shardwise.plan.ir.program import Action, Compute, ComputeOp, Program, Recv, Send, Value, effects_of
from shardwise.plan.ir.step_remainder import remaining_program
from shardwise.plan.ir.timeline import COMPUTE_LANE, Span
from shardwise.run.gradients.gradient_reducer import GradientReducer
from shardwise.run.residency.host_store import HostStore
from shardwise.run.residency.weight_gatherer import WeightGatherer
from shardwise.run.step.dispatch import HANDLERS, ActionRunner, RunResult, StepState, action_kind
from shardwise.run.step.stage_runner import StageRunner
from shardwise.run.step.transfers import Crossings, PendingReceive, ReshardingTransfers, Transfers, receives_posted_before
from shardwise.world.world import Group

__all__ = ["Executor", "MicrobatchRunners", "RankResources", "RunResult"]
_AS_IT_IS = nullcontext()


@dataclass(frozen=True)
class MicrobatchRunners:
    """What runs microbatches of one size: this rank's stages by index, tensors between stages, and the weight of a microbatch's loss."""

    runners: Mapping[int, StageRunner]
    crossings: Crossings
    loss_weight: float


@dataclass(frozen=True, slots=True)
class RankResources:
    """Resources of a rank that actions use besides its stages.

    `gradients`: reducer, None without backward. `trainable_by_stage`: names of the trainable parameters that each stage reads.
    `gathered`: ZeRO-3 weight gatherer. `host`: buffers for offloaded activations.
    """

    gradients: GradientReducer | None
    trainable_by_stage: Mapping[int, frozenset[str]]
    gathered: WeightGatherer
    host: HostStore


@dataclass(frozen=True, slots=True)
class _PreparedAction:
    """One prepared action: the receives that are posted before it, and the slots that are freed after it."""

    action: Action
    receives: tuple[tuple[int, Callable[[], PendingReceive]], ...]
    run: ActionRunner
    freed_slots: tuple[int, ...]


class Executor:
    """Executor of one pipeline rank. `by_microbatch`: what runs each microbatch; `group`: pipeline group, in pipeline order.

    `threads_by_step`: thread counts of the training computes that get more threads than this rank has.
    """

    def __init__(
        self,
        program: Program,
        by_microbatch: Mapping[int, MicrobatchRunners],
        group: Group,
        device: torch.device,
        draw: DrawState,
        resources: RankResources,
        resharding: ReshardingTransfers | None = None,
        threads_by_step: Mapping[int, int] | None = None,
    ) -> None:
        self.program, self.by_microbatch = program, by_microbatch
        first = by_microbatch[program.microbatches[0]]  # all sizes have the same stages and the same transfers but for their shapes
        self.runners, self.crossings = first.runners, first.crossings
        self.rank, self.draw = group.index if resharding is None else resharding.pipeline_index, draw
        self.gradients, self.trainable_by_stage, self.gathered, self.host = (
            resources.gradients,
            resources.trainable_by_stage,
            resources.gathered,
            resources.host,
        )
        self._group, self._device, self._resources, self._resharding = group, device, resources, resharding
        self.transfers = Transfers(program, {m: runners_of.crossings for m, runners_of in by_microbatch.items()}, group, device, resharding)
        self._slots: dict[Value, int] = {}
        actions = program.actions[self.rank]
        unhandled = next((a for a in actions if action_kind(a) not in HANDLERS), None)
        if unhandled is not None:
            raise ProgramError(f"{program.name}: rank {self.rank} has {unhandled}, which cannot be run; these can: {', '.join(HANDLERS)}")
        self.last_forward_step = max((i for i, a in enumerate(actions) if isinstance(a, Compute) and a.op is ComputeOp.F), default=-1)
        self.after_forwards: Callable[[RunResult], None] | None = None  # called once, when all losses of the next run are known
        self.completed_parameters = self._completed_parameters(actions, resources.trainable_by_stage)
        self._train_actions = self._prepare(list(enumerate(actions)))
        threads, self.threads_by_step = torch.get_num_threads(), threads_by_step or {}
        for step, num_threads in self.threads_by_step.items():
            self._train_actions[step] = replace(
                self._train_actions[step], run=_with_threads(num_threads, threads, self._train_actions[step].run)
            )
        self._forward_actions: list[_PreparedAction] | None = None
        self.on_action: Callable[[Action, list[object]], None] | None = None  # called after every action with the slots; for tests

    def slot(self, value: Value) -> int:
        """Return the slot number of a value of this rank."""
        return self._slots.setdefault(value, len(self._slots))

    def runner(self, action: Compute) -> StageRunner:
        """Return the stage runner of an action, for the size of its microbatch."""
        return self.by_microbatch[action.microbatch].runners[action.stage]

    def remaining(self, k: int) -> Executor:
        """Return the executor of microbatches `k` and later, with the same threads. Raises ProgramError if that program is not proven."""
        program = remaining_program(self.program, k, self._device.type == "cuda")
        threads = {self.program.actions[self.rank][step]: num_threads for step, num_threads in self.threads_by_step.items()}
        lent = {step: threads[action] for step, action in enumerate(program.actions[self.rank]) if action in threads}
        return Executor(program, self.by_microbatch, self._group, self._device, self.draw, self._resources, self._resharding, lent)

    def _completed_parameters(self, actions: Sequence[Action], trainable_by_stage: Mapping[int, frozenset[str]]) -> list[frozenset[str]]:
        """Return [step] -> the parameters whose gradient is complete after it."""
        last_step: dict[str, int] = {}
        for step, action in enumerate(actions):
            if isinstance(action, Compute) and action.op in (ComputeOp.B, ComputeOp.I, ComputeOp.W):
                delayed = self.runners[action.stage].delayed_gradients
                names = trainable_by_stage[action.stage]
                if action.op is ComputeOp.W:
                    names = names & delayed.names if delayed is not None else frozenset()
                last_step.update(dict.fromkeys(names, step))
        completed: list[set[str]] = [set() for _ in actions]
        for name, step in last_step.items():
            completed[step].add(name)
        return [frozenset(names) for names in completed]

    def _prepare(self, numbered: Sequence[tuple[int, Action]]) -> list[_PreparedAction]:
        actions = [action for _, action in numbered]
        steps = []
        for (number, action), posts in zip(numbered, receives_posted_before(actions), strict=True):
            receives = [a for a in (actions[i] for i in posts) if isinstance(a, Recv) and a.value.name in ("x", "g")]
            steps.append(
                _PreparedAction(
                    action,
                    tuple((self.slot(a.value), self.transfers.receiver(a.value, a.source)) for a in receives),
                    HANDLERS[action_kind(action)](self, action, number),
                    tuple(self.slot(value) for value in effects_of(action, self.program).frees),
                )
            )
        return steps

    def run(
        self,
        inputs: Sequence[Mapping[str, Tensor]],
        *,
        is_training: bool = True,
        record: bool = False,
        wants_input_gradients: bool = False,
        is_last_program: bool = True,
        run_after: Mapping[int, ActionRunner] | None = None,
        result: RunResult | None = None,
    ) -> RunResult:
        """Run every action once. `inputs[m]`: this rank's batch tensors of microbatch m by value name. `is_last_program`: none follows in
        this step. `run_after`: callbacks by index of the action that they follow. `result`: of earlier microbatches.

        Without `is_training` only forwards and the transfers of activations run.
        """
        if not is_training and self._forward_actions is None:
            self._forward_actions = self._prepare([(i, a) for i, a in enumerate(self.program.actions[self.rank]) if _is_forward(a)])
        if not is_training:
            self.gathered.deferred.wait()  # no action of these does
        steps = self._train_actions if is_training else self._forward_actions
        assert steps is not None
        self.host.set_inputs(inputs)
        if run_after:
            steps = [replace(step, run=_run_in_order(step.run, run_after[i])) if i in run_after else step for i, step in enumerate(steps)]
        state = StepState([None] * len(self._slots), inputs, is_training, wants_input_gradients, is_last_program, result or RunResult())
        with _AS_IT_IS if torch.is_grad_enabled() is is_training else torch.set_grad_enabled(is_training):
            if record or self.on_action is not None:
                self._run_recorded(steps, state)
            else:
                slots, pending = state.slots, state.pending_receives
                for step in steps:
                    for slot, post in step.receives:
                        pending[slot] = post()
                    step.run(state)
                    for slot in step.freed_slots:
                        slots[slot] = None
        for work in state.sends:
            work.wait()
        return state.result

    def _run_recorded(self, steps: Sequence[_PreparedAction], running: StepState) -> None:
        clock = time.perf_counter
        first_s = clock()
        for step in steps:
            start_s = clock()
            for slot, post in step.receives:
                running.pending_receives[slot] = post()
            step.run(running)
            for slot in step.freed_slots:
                running.slots[slot] = None
            kind = action_kind(step.action)
            lane = COMPUTE_LANE if isinstance(step.action, Compute) else kind
            running.result.spans.append(Span(self.rank, lane, str(step.action), start_s - first_s, clock() - first_s, kind))
            if self.on_action is not None:
                self.on_action(step.action, running.slots)


def _with_threads(num_threads: int, rank_threads: int, run: ActionRunner) -> ActionRunner:
    def run_with_threads(running: StepState) -> None:
        torch.set_num_threads(num_threads)
        try:
            run(running)
        finally:
            torch.set_num_threads(rank_threads)

    return run_with_threads


def _run_in_order(run: ActionRunner, run_after: ActionRunner) -> ActionRunner:
    def both(running: StepState) -> None:
        run(running)
        run_after(running)

    return both


def _is_forward(action: Action) -> bool:
    if isinstance(action, Compute):
        return action.op is ComputeOp.F
    return isinstance(action, Send | Recv) and action.value.name == "x"
