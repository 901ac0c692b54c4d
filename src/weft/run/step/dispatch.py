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

from weft.plan.program import Action, Compute, Op, Recv, Send, Value
from weft.plan.timeline import Span
from weft.run.step import manage
from weft.run.step.manage import forwarding
from weft.run.step.stage_runner import Kept
from weft.run.step.transfers import Arriving
from weft.world.world import Work

if TYPE_CHECKING:
    from weft.run.step.executor import Executor


@dataclass
class Result:
    """Result of running a program: this rank's loss summands by microbatch, spans, and input gradients if requested."""

    losses: list[Tensor] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)  # of each of `losses` in the batch's loss
    spans: list[Span] = field(default_factory=list)
    input_gradients: list[dict[str, Tensor]] = field(default_factory=list)
    order: list[int] = field(default_factory=list)  # the microbatch of each entry of `input_gradients`
    summand: Tensor | None = None  # this rank's part of the loss
    mean: tuple[Tensor, Work] | None = None  # loss over the batch and all ranks, and its pending all-reduce


@dataclass(slots=True)
class Running:
    """State of a running step. `slots`: values held by this rank, by the executor's slot numbers."""

    held: list[Any]
    inputs: Sequence[Mapping[str, Tensor]]  # [microbatch]
    train: bool
    want_inputs: bool
    ends: bool = True  # no later program of the same step accumulates gradients
    result: Result = field(default_factory=Result)
    sends: deque[Work] = field(default_factory=deque)
    arriving: dict[int, Arriving] = field(default_factory=dict)  # by the slot of the value

    def reap(self) -> None:
        """Release the buffers of completed sends."""
        while self.sends and self.sends[0].done:
            self.sends.popleft().wait()


NOTHING: frozenset[str] = frozenset()
Run = Callable[[Running], None]
Handler = Callable[["Executor", Any, int], Run]  # executor, action, its index on this rank


def kind_of(action: Action) -> str:
    """Return the key of an action in `HANDLERS`: the operation's name, "send" or "recv"."""
    if isinstance(action, Send):
        return "send"
    return "recv" if isinstance(action, Recv) else action.op.value


def _forward(executor: Executor, action: Compute, step: int) -> Run:
    s, m, program = action.stage, action.microbatch, executor.program
    runner, draw, slot = executor.runner(action), executor.draw, executor.slot
    source_of = {c.value: (slot(Value("x", (p, s, m))), i) for p in program.predecessors[s] for i, c in enumerate(executor.crossings[p, s])}
    sources = [source_of[value] for value in runner.local.received]
    position = {value: i for i, value in enumerate(runner.local.sent)}
    outputs = [(slot(Value("x", (s, q, m))), [position[c.value] for c in executor.crossings[s, q]]) for q in program.successors[s]]
    saved = slot(Value("saved", (s, m)))
    has_loss, weight = bool(runner.local.results), executor.sizes[m].weight
    forward = forwarding(executor, action)

    def run(running: Running) -> None:
        running.reap()
        draw.microbatch = m
        slots = running.held
        state = forward(running.inputs[m], [slots[slot_index][i] for slot_index, i in sources], running.want_inputs)
        for slot_index, places in outputs:
            slots[slot_index] = [state.sent[i] for i in places]
        state.sent = []
        if has_loss:
            running.result.losses.append(state.results[0].detach())
            running.result.weights.append(weight)
        if running.train:
            slots[saved] = state

    return run


def _backward(executor: Executor, action: Compute, step: int) -> Run:
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
    saved, half = slot(Value("saved", (s, m))), slot(Value("half", (s, m))) if action.op is Op.I else None
    completes, weight, num_sent = executor.completes[step], executor.sizes[m].weight, len(runner.local.sent)
    delayed = runner.delayed if half is None else None

    def run(running: Running) -> None:
        running.reap()
        if executor.gradients is not None:
            executor.gradients.begin(completes if running.ends else NOTHING)
        draw.microbatch = m
        slots = running.held
        state: Kept = slots[saved]
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
        if running.want_inputs:
            running.result.order.append(m)
            running.result.input_gradients.append(runner.input_gradients(state))

    return run


def _weights(executor: Executor, action: Compute, step: int) -> Run:
    delayed, half = executor.runner(action).delayed, executor.slot(Value("half", (action.stage, action.microbatch)))
    completes = executor.completes[step]

    def run(running: Running) -> None:
        running.reap()
        if executor.gradients is not None and delayed is not None:
            executor.gradients.begin(completes if running.ends else NOTHING)
            delayed.deliver(running.held[half], executor.gradients)

    return run


def _send(executor: Executor, action: Send, step: int) -> Run:
    if action.value.name not in ("x", "g"):
        return _nothing
    slot_index, send = executor.slot(action.value), executor.transfers.sender(action.value, action.to)

    def run(running: Running) -> None:
        running.sends += send(running.held[slot_index])

    return run


def _receive(executor: Executor, action: Recv, step: int) -> Run:
    if action.value.name not in ("x", "g"):
        return _nothing
    slot_index = executor.slot(action.value)

    def run(running: Running) -> None:
        running.held[slot_index] = running.arriving.pop(slot_index)()

    return run


def _nothing(running: Running) -> None:
    """Do nothing: gradients between replicas of a stage are reduced in buckets, as soon as each is complete."""


HANDLERS: dict[str, Handler] = {
    "F": _forward,
    "B": _backward,
    "I": _backward,
    "W": _weights,
    "R": manage.again,
    "send": _send,
    "recv": _receive,
    "UNSHARD": manage.unshard,
    "RESHARD": manage.reshard,
    "REDUCE_GRAD": manage.reduce_grad,
    "OFFLOAD": manage.offload,
    "LOAD": manage.load,
    "DROP": manage.drop,
}
