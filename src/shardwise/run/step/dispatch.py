"""Handlers of the program's actions (forward, backward, send, recv, recompute, offload ...), by kind: `HANDLERS`.

In: an executor and one action of its program. Out: a function of the running step, with everything that does not change from step to
step looked up beforehand. A new kind of action is a new function here (or in a file of its own) and a line in `HANDLERS`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shardwise.plan.ir.program import Action, Compute, ComputeOp, Recv, Send, Value
from shardwise.plan.ir.timeline import Span
from shardwise.run.step import residency_actions
from shardwise.run.step.residency_actions import choose_forward
from shardwise.run.step.stage_runner import SavedActivations
from shardwise.run.step.transfers import PendingReceive
from shardwise.world.world import CollectiveWork

if TYPE_CHECKING:
    from shardwise.run.step.executor import Executor


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
    forward = choose_forward(executor, action)

    def run(running: StepState) -> None:
        running.release_sent()
        draw.microbatch = m
        slots = running.slots
        state = forward(running.inputs[m], [slots[slot_index][i] for slot_index, i in sources], running.wants_input_gradients)
        for slot_index, places in outputs:
            slots[slot_index] = [state.sent[i] for i in places]
        state.sent = []
        if has_loss:
            running.result.losses.append(state.results[0].detach())
            running.result.weights.append(weight)
        if running.is_training:
            slots[saved] = state

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
    "R": residency_actions.recompute,
    "send": send_runner,
    "recv": receive_runner,
    "UNSHARD": residency_actions.unshard_weights,
    "RESHARD": residency_actions.reshard_weights,
    "REDUCE_GRAD": residency_actions.reduce_gradients,
    "OFFLOAD": residency_actions.offload_saved,
    "LOAD": residency_actions.load_saved,
    "DROP": residency_actions.drop_saved,
}
