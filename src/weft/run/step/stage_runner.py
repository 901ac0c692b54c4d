"""One of a rank's stages at work: forward and backward of one microbatch at a time, with what backward needs kept in between.

In: a lowered stage, its parameters and buffers, and the local microbatches. Out: tensors for other stages, gradients in the
parameters' hooks, the loss. Where backward is split, its input part leaves a note for every weight gradient that is still to come.

Of what comes from other stages and goes to them only what operators keep is there until backward: `_Entering` and `_Leaving` stand in
for the rest, and a gradient that came from another stage is gone as soon as the operator that it is for has read it. They take some 20
microseconds each way, so what is small is held by name instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from weft.lower.kernels.randomness import Draw
from weft.lower.local import LocalStage
from weft.lower.split_backward import DelayedWeightGradients, Note
from weft.run.residency.host import Moved
from weft.run.state.precision import LossScale
from weft.run.step.compiling import compiled
from weft.world.memory import Accounts

SMALL_BYTES = 64 << 10  # that a stage receives, or sends, of a microbatch; its compute then takes less than a millisecond


class _Entering(torch.autograd.Function):
    """What other stages sent, as it is; backward puts its gradients into a list."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor | None], anchor: Tensor, *received: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.gradients = gradients
        return tuple(x.detach() for x in received)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.gradients[:] = gradients
        return (None,) * (2 + len(gradients))


class _Leaving(torch.autograd.Function):
    """One root of backward for all that is sent; its gradients are those that lie in a list by then, which is emptied."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor | None], *sent: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (None, *ctx.gradients)
        ctx.gradients.clear()
        return gradients


def _are_small(tensors: Sequence[Tensor]) -> bool:
    return sum(x.nbytes for x in tensors) < SMALL_BYTES


@dataclass(slots=True)
class Kept:
    """What one microbatch leaves between forward and backward.

    `sent`: until it is handed on. `root`: of what was sent and has a gradient, at `learning` in the order of the lowered stage's own list;
    backward finds its gradients in `leaving`, and puts those of what was received into `entering`. `received`: of a forward that keeps
    nothing, to run it again. What is small is held as `roots` and `leaves` of backward in place of that.
    """

    sent: list[Tensor]
    results: list[Tensor]
    inputs: dict[str, Tensor]
    received: list[Tensor] = field(default_factory=list)
    root: Tensor | None = None
    roots: list[Tensor] = field(default_factory=list)
    leaves: list[Tensor] = field(default_factory=list)
    learning: list[int] = field(default_factory=list)
    leaving: list[Tensor | None] = field(default_factory=list)
    entering: list[Tensor | None] = field(default_factory=list)
    rooms: list[tuple[torch.Size, torch.dtype]] = field(default_factory=list)  # of what was received
    notes: list[Note] = field(default_factory=list)  # weight gradients that backward's input part has left for later
    moved: Moved | None = None  # where it can lie on the host


@dataclass(frozen=True, slots=True)
class Computing:
    """How stages compute on a rank's device. `memory`: told what forward is for. `autocast`: its dtype, None where it is off.
    `scale`: of the loss."""

    device: torch.device
    memory: Accounts
    autocast: torch.dtype | None
    compile: bool
    scale: LossScale


class StageRunner:
    """Runs one lowered stage, in the gradient mode that is set.

    `grads`: values whose gradient travels. `closed`: inputs that can have none. `dtypes`: dtype in which a value crosses to another stage.
    `delayed`: the weight gradients that a split backward computes later, where it is split.
    """

    def __init__(
        self,
        local: LocalStage,
        variables: Mapping[str, Tensor],
        grads: set[str],
        dtypes: Mapping[str, torch.dtype],
        draw: Draw,
        computing: Computing,
        closed: frozenset[str],
        delayed: DelayedWeightGradients | None,
    ) -> None:
        self.closed, self.memory = closed, computing.memory
        self.local, self.draw, self.delayed = local, draw, delayed
        self._learns = [value in grads for value in local.received]
        self._dtypes = [dtypes[value] for value in local.sent]
        self._args: list[Tensor | None] = [variables.get(value) for value in local.variables]
        self._inputs = [(i, value) for i, value in enumerate(local.variables) if value not in variables]
        self._autocast, self._device, self._scale = computing.autocast, computing.device, computing.scale
        self.module: Callable[..., Any] = compiled(local) if computing.compile else local.module

    def forward(self, inputs: Mapping[str, Tensor], received: Sequence[Tensor], input_gradients: bool = False) -> Kept:
        """Run forward. `inputs`: local batch tensors by value name; `received`: in the order of `local.received`."""
        train = torch.is_grad_enabled()
        saved = Kept([], [], {}, rooms=[(x.shape, x.dtype) for x in received])
        held = self._entered(saved, received) if train else list(received)
        args = self._args.copy()
        for i, value in self._inputs:
            args[i] = inputs[value]
        if input_gradients:
            for i, value in self._inputs:
                x = inputs[value]
                args[i] = saved.inputs[value] = x.detach().requires_grad_(x.is_floating_point() and value not in self.closed)
        if self.delayed is not None:
            self.delayed.notes = saved.notes
        if not train:
            saved.received = held.copy()
        args += held
        del held, received
        self.memory.part("activations")
        if self._autocast is None:
            out = self.module(*args)
        else:
            with torch.autocast(self._device.type, dtype=self._autocast):
                out = self.module(*args)
        self.memory.part("buffers")
        num_sent = len(self._dtypes)
        saved.sent = [x if x.dtype is dtype else x.to(dtype) for x, dtype in zip(out, self._dtypes, strict=False)]
        saved.results = list(out[num_sent:])
        saved.learning = [i for i, x in enumerate(saved.sent) if x.requires_grad]
        if saved.learning:
            leave = [saved.sent[i] for i in saved.learning]
            if _are_small(leave):
                saved.roots = leave
            else:
                saved.root = _Leaving.apply(saved.leaving, *leave)  # type: ignore[no-untyped-call]
        return saved

    def _entered(self, saved: Kept, received: Sequence[Tensor]) -> list[Tensor]:
        detached = [x.detach() for x in received]  # another stage of this rank may have made it
        learn = [x for x, learns in zip(detached, self._learns, strict=True) if learns]
        if _are_small(learn):
            saved.leaves = [x.requires_grad_() for x in learn]
            return detached
        anchor = torch.empty(0, requires_grad=True)  # so that autograd comes to the function, whose tensors have no gradient themselves
        entered = iter(_Entering.apply(saved.entering, anchor, *learn))  # type: ignore[no-untyped-call]
        return [next(entered) if learns else x for x, learns in zip(detached, self._learns, strict=True)]

    def backward(self, saved: Kept, gradients: list[Tensor | None], scale: float) -> list[Tensor | None]:
        """Run backward from the gradients of what was sent (in the order of `local.sent`; the list is emptied) and from the loss times
        `scale`.

        Returns the gradients of what was received, in the order of `local.received`; None where none travels.
        """
        scale *= self._scale.factor
        roots = [x for x in saved.results if x.requires_grad]
        seeds: list[Tensor | None] = [torch.full_like(x, scale) for x in roots]
        for x, i in zip(saved.roots, saved.learning, strict=False):
            if gradients[i] is not None:
                roots.append(x)
                seeds.append(gradients[i])
        if saved.root is not None and any(gradients[i] is not None for i in saved.learning):
            saved.leaving += [gradients[i] for i in saved.learning]
            roots.append(saved.root)
            seeds.append(torch.zeros_like(saved.root))
        gradients.clear()
        if roots:
            torch.autograd.backward(roots, seeds)
        saved.entering += [x.grad for x in saved.leaves]
        entering, none = iter(saved.entering), any(self._learns) and not saved.entering
        gradients_in: list[Tensor | None] = []
        for (shape, dtype), learns in zip(saved.rooms, self._learns, strict=True):
            gradient = next(entering) if learns and not none else None
            gradients_in.append(torch.zeros(shape, dtype=dtype, device=self._device) if learns and gradient is None else gradient)
        saved.entering.clear()
        return gradients_in

    def input_gradients(self, saved: Kept) -> dict[str, Tensor]:
        """After backward: the gradients of the batch's floating-point tensors, where forward was asked for them."""
        by_value = {v: torch.zeros_like(x) if x.grad is None else x.grad for v, x in saved.inputs.items() if x.is_floating_point()}
        return {v: x / self._scale.factor for v, x in by_value.items()} if self._scale.scaled else by_value
