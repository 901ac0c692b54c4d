"""Handlers of the program's actions (forward, backward, send, recv, recompute, offload ...), by kind: `HANDLERS`; results of a step.

In: an executor and one action of its program. Out: a function of the running step, with everything that does not change from step to
step looked up beforehand. A new kind of action is a new function here (or in a file of its own) and a line in `HANDLERS`. A forward whose
activations are to be recomputed saves none.

Not supported: recomputing a stage that reads a buffer which the model writes; it would read later values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwise.errors import ProgramError
from shardwise.plan.ir.program import Action, Compute, ComputeOp, Manage, ManageOp, Recv, Send, Value
from shardwise.plan.ir.timeline import Span
from shardwise.run.residency.layer_modules import reads_written_buffer
from shardwise.run.residency.recompute import mark_recomputing
from shardwise.run.step.stage_runner import SavedActivations
from shardwise.run.step.transfers import PendingReceive
from shardwise.world.world import CollectiveWork

if TYPE_CHECKING:
    from shardwise.run.step.executor import Executor


Forward = Callable[..., SavedActivations]


def choose_forward(executor: Executor, action: Compute) -> Forward:
    """Return the forward function of a stage and microbatch: plain, recorded for offload, or without saved activations for recompute."""
    runner = executor.runner(action)
    residency_ops = {
        a.op
        for a in executor.program.actions[executor.rank]
        if isinstance(a, Manage) and (a.stage, a.microbatch) == (action.stage, action.microbatch)
    }
    if ManageOp.DROP in residency_ops:
        if reads_written_buffer(runner.local):
            raise ProgramError(
                f"{executor.program.name} recomputes stage {action.stage}, which reads a buffer that the model writes: the recompute "
                "would read what later microbatches wrote; offload it, or cut the model elsewhere"
            )

        def forward_without_saving(*args: Any) -> SavedActivations:
            with torch.no_grad():
                return runner.forward(*args)

        return forward_without_saving
    if ManageOp.OFFLOAD in residency_ops:

        def forward_recorded(*args: Any) -> SavedActivations:
            if not torch.is_grad_enabled():
                return runner.forward(*args)
            with executor.host.record_saved() as offloaded:
                state = runner.forward(*args)
            state.offloaded = offloaded
            return state

        return forward_recorded
    return runner.forward


def offload_saved(executor: Executor, action: Manage, step: int) -> ActionRunner:
    return _transfer_runner(executor.host.offload, *_slots_of(executor, action, "saved", "host"))


def load_saved(executor: Executor, action: Manage, step: int) -> ActionRunner:
    return _transfer_runner(executor.host.load, *_slots_of(executor, action, "host", "saved"))


def _transfer_runner(move: Callable[[Any], object], source: int, target: int) -> ActionRunner:
    """Return a function that transfers saved activations from slot `source` to slot `target`."""

    def run(running: StepState) -> None:
        state: SavedActivations = running.slots[source]
        assert state.offloaded is not None
        move(state.offloaded)
        running.slots[target] = state

    return run


def drop_saved(executor: Executor, action: Manage, step: int) -> ActionRunner:
    saved, inputs = _slots_of(executor, action, "saved", "inputs")

    def run(running: StepState) -> None:
        state: SavedActivations = running.slots[saved]
        running.slots[inputs] = [x.detach() for x in state.received]

    return run


def recompute(executor: Executor, action: Compute, step: int) -> ActionRunner:
    s, m = action.stage, action.microbatch
    saved, inputs = executor.slot(Value("saved", (s, m))), executor.slot(Value("inputs", (s, m)))
    runner, draw = executor.runner(action), executor.draw

    def run(running: StepState) -> None:
        draw.microbatch = m
        received: list[Tensor] = running.slots[inputs]
        with mark_recomputing(draw, runner.memory), torch.enable_grad() if running.is_training else nullcontext():
            running.slots[saved] = runner.forward(running.inputs[m], received, running.wants_input_gradients)

    return run


def unshard_weights(executor: Executor, action: Manage, step: int) -> ActionRunner:
    return lambda running: executor.gathered.unshard(action.stage)


def reshard_weights(executor: Executor, action: Manage, step: int) -> ActionRunner:
    return lambda running: executor.gathered.reshard(action.stage)


def reduce_gradients(executor: Executor, action: Manage, step: int) -> ActionRunner:
    """Reduce gradients over data replicas; buckets with complete gradients are being reduced already."""
    names = executor.trainable_by_stage[action.stage]

    def run(running: StepState) -> None:
        if executor.gradients is not None:
            executor.gradients.reduce(names)

    return run


def _slots_of(executor: Executor, action: Manage, *names: str) -> tuple[int, ...]:
    assert action.microbatch is not None  # of a stage and a microbatch
    return tuple(executor.slot(Value(name, (action.stage, action.microbatch))) for name in names)


@dataclass
class RunResult:
    """Result of running a program: this rank's loss summands by microbatch, spans, and input gradients if requested."""

    losses: list[Tensor] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)  # of each of `losses` in the batch's loss
    spans: list[Span] = field(default_factory=list)
    input_gradients: list[dict[str, Tensor]] = field(default_factory=list)
    gradient_microbatches: list[int] = field(default_factory=list)  # the microbatch of each entry of `input_gradients`
    loss_summand: Tensor | None = None  # this rank's part of the loss
    pending_loss: tuple[Tensor, CollectiveWork] | None = None  # loss over the batch and all ranks, and its pending all-reduce


@dataclass(slots=True)
class StepState:
    """State of a running step. `slots`: values held by this rank, by the executor's slot numbers."""

    slots: list[Any]
    inputs: Sequence[Mapping[str, Tensor]]  # [microbatch]
    is_training: bool
    wants_input_gradients: bool
    is_last_program: bool = True  # no later program of the same step accumulates gradients
    result: RunResult = field(default_factory=RunResult)
    sends: deque[CollectiveWork] = field(default_factory=deque)
    pending_receives: dict[int, PendingReceive] = field(default_factory=dict)  # by the slot of the value

    def release_sent(self) -> None:
        """Release the buffers of completed sends."""
        while self.sends and self.sends[0].is_done:
            self.sends.popleft().wait()


NO_PARAMETERS: frozenset[str] = frozenset()
ActionRunner = Callable[[StepState], None]
Handler = Callable[["Executor", Any, int], ActionRunner]  # executor, action, its index on this rank


def action_kind(action: Action) -> str:
    """Return the key of an action in `HANDLERS`: the operation's name, "send" or "recv"."""
    if isinstance(action, Send):
        return "send"
    return "recv" if isinstance(action, Recv) else action.op.value


def forward_runner(executor: Executor, action: Compute, step: int) -> ActionRunner:
    s, m, program = action.stage, action.microbatch, executor.program
    runner, draw, slot = executor.runner(action), executor.draw, executor.slot
    source_of = {c.value: (slot(Value("x", (p, s, m))), i) for p in program.predecessors[s] for i, c in enumerate(executor.crossings[p, s])}
    sources = [source_of[value] for value in runner.local.received]
    position = {value: i for i, value in enumerate(runner.local.sent)}
    outputs = [(slot(Value("x", (s, q, m))), [position[c.value] for c in executor.crossings[s, q]]) for q in program.successors[s]]
    saved = slot(Value("saved", (s, m)))
    has_loss, weight = bool(runner.local.results), executor.by_microbatch[m].loss_weight
    forward, is_last = choose_forward(executor, action), step == executor.last_forward_step

    def run(running: StepState) -> None:
        if running.sends:
            running.release_sent()
        draw.microbatch = m
        slots = running.slots
        received = [slots[slot_index][i] for slot_index, i in sources] if sources else ()
        state = forward(running.inputs[m], received, running.wants_input_gradients)
        for slot_index, places in outputs:
            slots[slot_index] = [state.sent[i] for i in places]
        state.sent = []
        if has_loss:
            running.result.losses.append(state.results[0].detach())
            running.result.weights.append(weight)
        if running.is_training:
            slots[saved] = state
        if is_last and (after_forwards := executor.after_forwards) is not None:
            executor.after_forwards = None
            after_forwards(running.result)

    return run


def backward_runner(executor: Executor, action: Compute, step: int) -> ActionRunner:
    """Return the runner of a full backward, or of the input part (I) of a split one, which notes the weight gradients for later.

    In a program with split backwards every backward notes them, and a full one computes them at once."""
    s, m, program = action.stage, action.microbatch, executor.program
    runner, draw, slot = executor.runner(action), executor.draw, executor.slot
    position = {value: i for i, value in enumerate(runner.local.sent)}
    sources = [
        (slot(Value("g", (q, s, m))), [position[c.value] for c in executor.crossings[s, q] if c.has_gradient])
        for q in program.successors[s]
    ]
    place = {value: i for i, value in enumerate(runner.local.received)}
    outputs = [
        (slot(Value("g", (s, p, m))), [place[c.value] for c in executor.crossings[p, s] if c.has_gradient]) for p in program.predecessors[s]
    ]
    saved, half = slot(Value("saved", (s, m))), slot(Value("half", (s, m))) if action.op is ComputeOp.I else None
    completes, weight, num_sent = executor.completed_parameters[step], executor.by_microbatch[m].loss_weight, len(runner.local.sent)
    delayed = runner.delayed_gradients if half is None else None

    def run(running: StepState) -> None:
        if running.sends:
            running.release_sent()
        if executor.gradients is not None:
            executor.gradients.begin(completes if running.is_last_program else NO_PARAMETERS)
        draw.microbatch = m
        slots = running.slots
        state: SavedActivations = slots[saved]
        gradients: list[Tensor | None] = [None] * num_sent
        for slot_index, places in sources:
            for i, x in zip(places, slots[slot_index], strict=True):
                gradient = gradients[i]
                gradients[i] = x if gradient is None else gradient + x
            slots[slot_index] = x = gradient = None  # released as soon as backward has read it
        out = runner.backward(state, gradients, weight)
        if delayed is not None and executor.gradients is not None:
            delayed.deliver(state.notes, executor.gradients)
        for slot_index, places in outputs:
            slots[slot_index] = [out[i] for i in places]
        if half is not None:
            slots[half] = state.notes
        if running.wants_input_gradients:
            running.result.gradient_microbatches.append(m)
            running.result.input_gradients.append(runner.input_gradients(state))

    return run


def weight_gradient_runner(executor: Executor, action: Compute, step: int) -> ActionRunner:
    delayed, half = executor.runner(action).delayed_gradients, executor.slot(Value("half", (action.stage, action.microbatch)))
    completes = executor.completed_parameters[step]

    def run(running: StepState) -> None:
        if running.sends:
            running.release_sent()
        if executor.gradients is not None and delayed is not None:
            executor.gradients.begin(completes if running.is_last_program else NO_PARAMETERS)
            delayed.deliver(running.slots[half], executor.gradients)

    return run


def send_runner(executor: Executor, action: Send, step: int) -> ActionRunner:
    if action.value.name not in ("x", "g"):
        return do_nothing
    slot_index, send = executor.slot(action.value), executor.transfers.sender(action.value, action.to)

    def run(running: StepState) -> None:
        running.sends += send(running.slots[slot_index])

    return run


def receive_runner(executor: Executor, action: Recv, step: int) -> ActionRunner:
    if action.value.name not in ("x", "g"):
        return do_nothing
    slot_index = executor.slot(action.value)

    def run(running: StepState) -> None:
        running.slots[slot_index] = running.pending_receives.pop(slot_index)()

    return run


def do_nothing(running: StepState) -> None:
    """Do nothing: gradients between replicas of a stage are reduced in buckets, as soon as each is complete."""


HANDLERS: dict[str, Handler] = {
    "F": forward_runner,
    "B": backward_runner,
    "I": backward_runner,
    "W": weight_gradient_runner,
    "R": recompute,
    "send": send_runner,
    "recv": receive_runner,
    "UNSHARD": unshard_weights,
    "RESHARD": reshard_weights,
    "REDUCE_GRAD": reduce_gradients,
    "OFFLOAD": offload_saved,
    "LOAD": load_saved,
    "DROP": drop_saved,
}


StepCheck = Callable[[RunResult, Sequence[float]], str]  # (result, each rank's gradient norm) -> why a step is suspect, or empty


@dataclass(frozen=True, slots=True)
class StepResult:
    """Loss over the whole batch, gradient norm if clipped, and time of one step.

    `grad_norm` belongs to the update that this step applied: with staleness=K of the step K before it, and None before there is one.
    """

    norm: Tensor | float | None = field(repr=False)
    step_time_s: float
    total: Tensor = field(repr=False)
    reduction: CollectiveWork = field(repr=False)
    loss_scale: float | None = None  # of the next step, in float16

    @property
    def grad_norm(self) -> float | None:
        """Gradient norm before clipping; reading it waits for the device."""
        return self.norm.item() if isinstance(self.norm, Tensor) else self.norm

    @property
    def loss(self) -> float:
        """Loss at the weights before the update. With staleness it waits until all ranks have completed the step."""
        self.reduction.wait()
        return mean_loss(self.total)


def mean_loss(total: Tensor) -> float:
    """Return a reduced loss, divided by its divisor if that was reduced with it."""
    return float(total[0] / total[1]) if total.dim() else float(total)
