"""Runs one rank's actions of a pipeline `Program`. In: the program, the stages of this rank and their local microbatches.
Out: gradients in the parameters' hooks, the loss, and, where asked for, the measured spans.

What is simulated is what runs: actions are taken in the program's order. Sends are posted; receives are posted `ahead` computes
early, so that transfers go on beside the compute. A value is dropped as soon as `effects` frees it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weft.errors import ProgramError
from weft.lower.kernels.randomness import Draw
from weft.model.stages import Stage
from weft.plan.program import Action, Compute, Op, Program, Recv, Send, Value, effects
from weft.plan.timeline import Span
from weft.run.gradients import Gradients
from weft.run.stage import Kept, StageRunner
from weft.world.world import Group, Work

_AHEAD = 2  # computes ahead of which receives are posted


@dataclass(frozen=True)
class Crossing:
    """One tensor that crosses between stages: its graph value, local shape and dtype, and whether a gradient comes back."""

    value: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    has_gradient: bool


@dataclass
class Result:
    """What a step leaves: the rank's summand of the loss by microbatch, spans, and gradients of the inputs where asked for."""

    losses: list[Tensor] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    input_gradients: list[dict[str, Tensor]] = field(default_factory=list)
    order: list[int] = field(default_factory=list)  # the microbatch of each entry of `input_gradients`
    mean: tuple[Tensor, Work] | None = None  # the loss over microbatches and ranks, and its sum under way


class Executor:
    """One rank of a pipeline. `stages`: this rank's stages by number; `group`: its pipeline group, by position."""

    def __init__(
        self,
        program: Program,
        stages: Mapping[int, tuple[Stage, StageRunner]],
        crossings: Mapping[tuple[int, int], Sequence[Crossing]],
        group: Group,
        device: torch.device,
        gradients: Gradients | None,
        draw: Draw,
    ) -> None:
        self.program, self.stages, self.crossings = program, dict(stages), dict(crossings)
        self.group, self.device, self.gradients, self.draw = group, device, gradients, draw
        self.actions = program.actions[group.index]
        self.frees = [effects(action, program).frees for action in self.actions]
        self.last_backward = {a.stage: i for i, a in enumerate(self.actions) if isinstance(a, Compute) and a.op is Op.B}
        if any(isinstance(a, Compute) and a.op in (Op.I, Op.W) for a in self.actions):
            raise ProgramError(f"{program.name} splits backward into I and W, which the executor cannot run yet")
        self._width = max((len(c) for c in self.crossings.values()), default=1)

    def run(
        self,
        inputs: Sequence[Mapping[str, Tensor]],
        *,
        train: bool = True,
        record: bool = False,
        want_inputs: bool = False,
    ) -> Result:
        """Run every action once. `inputs[m]`: this rank's batch tensors of microbatch m by value name.

        Without `train` only forwards and activations' transfers run.
        """
        held: dict[Value, object] = {}
        result = Result()
        sends: list[Work] = []
        posted: dict[Value, tuple[list[Tensor], list[Work]]] = {}
        actions = self.actions if train else [a for a in self.actions if not _is_backward(a)]
        frees = self.frees if train else [effects(a, self.program).frees for a in actions]
        num = len(self.program.microbatches)
        self._posted_until = 0
        clock = time.perf_counter
        began = clock()
        for step, action in enumerate(actions):
            at = clock() if record else 0.0
            if isinstance(action, Compute):
                self._post(actions, step, posted)
                if action.op is Op.F:
                    self._forward(action, inputs, held, result, train, want_inputs)
                else:
                    if self.gradients is not None:
                        self.gradients.begin(step == self.last_backward[action.stage])
                    self._backward(action, held, result, num, want_inputs)
            elif isinstance(action, Send):
                sends += self._send(action, held)
            else:
                self._post(actions, step, posted)
                tensors, works = posted.pop(action.value)
                for work in works:
                    work.wait()
                held[action.value] = tensors
            for value in frees[step]:
                held.pop(value, None)
            if record:
                kind = action.op.value if isinstance(action, Compute) else "send" if isinstance(action, Send) else "recv"
                lane = "compute" if isinstance(action, Compute) else kind
                result.spans.append(Span(self.group.index, lane, str(action), at - began, clock() - began, kind))
        for work in sends:
            work.wait()
        return result

    def _forward(
        self,
        action: Compute,
        inputs: Sequence[Mapping[str, Tensor]],
        held: dict[Value, object],
        result: Result,
        train: bool,
        want_inputs: bool,
    ) -> None:
        _, runner = self.stages[action.stage]
        m = action.microbatch
        received: dict[str, Tensor] = {}
        for p in self.program.predecessors[action.stage]:
            for crossing, tensor in zip(self.crossings[p, action.stage], held[Value("x", (p, action.stage, m))], strict=True):  # type: ignore[call-overload]
                received[crossing.value] = tensor
        self.draw.microbatch = m
        kept = runner.forward(inputs[m], received, train, want_inputs)
        for q in self.program.successors[action.stage]:
            held[Value("x", (action.stage, q, m))] = [kept.sent[c.value] for c in self.crossings[action.stage, q]]
        loss = next((x for x in kept.results.values()), None)
        if loss is not None:
            result.losses.append(loss.detach())
        if train:
            held[Value("saved", (action.stage, m))] = kept

    def _backward(self, action: Compute, held: dict[Value, object], result: Result, num: int, want_inputs: bool) -> None:
        _, runner = self.stages[action.stage]
        s, m = action.stage, action.microbatch
        kept = held[Value("saved", (s, m))]
        assert isinstance(kept, Kept)
        gradients: dict[str, Tensor] = {}
        for q in self.program.successors[s]:
            back = [c for c in self.crossings[s, q] if c.has_gradient]
            for crossing, tensor in zip(back, held[Value("g", (q, s, m))], strict=True):  # type: ignore[call-overload]
                seen = gradients.get(crossing.value)
                gradients[crossing.value] = tensor if seen is None else seen + tensor
        self.draw.microbatch = m
        out = runner.backward(kept, gradients, 1.0 / num)
        for p in self.program.predecessors[s]:
            held[Value("g", (s, p, m))] = [out[c.value] for c in self.crossings[p, s] if c.has_gradient]
        if want_inputs:
            result.order.append(m)
            result.input_gradients.append(
                {v: x.grad if x.grad is not None else torch.zeros_like(x) for v, x in kept.inputs.items() if x.is_floating_point()}
            )

    def _tag(self, value: Value, i: int) -> int:
        """One tag a tensor: what it is, between which stages, of which microbatch."""
        a, b, m = value.index
        stages = self.program.num_stages
        return (((m * 2 + (value.name == "g")) * stages + a) * stages + b) * self._width + i

    def _messages(self, value: Value) -> Sequence[Crossing]:
        a, b, _ = value.index
        return self.crossings[a, b] if value.name == "x" else [c for c in self.crossings[b, a] if c.has_gradient]

    def _send(self, action: Send, held: dict[Value, object]) -> list[Work]:
        tensors: list[Tensor] = held[action.value]  # type: ignore[assignment]
        return [self.group.isend(t.detach().contiguous(), action.to, tag=self._tag(action.value, i)) for i, t in enumerate(tensors)]

    def _post(self, actions: Sequence[Action], step: int, posted: dict[Value, tuple[list[Tensor], list[Work]]]) -> None:
        """Post the receives up to `_AHEAD` computes after `step`."""
        at, computes = max(self._posted_until, step), 0
        for i in range(step, at):
            computes += isinstance(actions[i], Compute)
        while at < len(actions) and computes <= _AHEAD:
            action = actions[at]
            if isinstance(action, Recv):
                tensors = [torch.empty(c.shape, dtype=c.dtype, device=self.device) for c in self._messages(action.value)]
                works = [self.group.irecv(t, action.source, tag=self._tag(action.value, i)) for i, t in enumerate(tensors)]
                posted[action.value] = (tensors, works)
            computes += isinstance(action, Compute)
            at += 1
        self._posted_until = at


def _is_backward(action: Action) -> bool:
    if isinstance(action, Compute):
        return action.op is not Op.F
    return action.value.name == "g"
