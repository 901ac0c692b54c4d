"""One of a rank's stages at work: forward and backward of one microbatch at a time, with what backward needs kept in between.

In: a lowered stage, its parameters and buffers, and the local microbatches. Out: tensors for other stages, gradients in the
parameters' hooks, the loss. Where backward is split, its input part leaves a note for every weight gradient that is still to come.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from weft.lower.kernels.randomness import Draw
from weft.lower.late import Late, Note
from weft.lower.local import LocalStage
from weft.run.host import Moved
from weft.world.memory import Accounts


@dataclass(slots=True)
class Kept:
    """What one microbatch leaves between forward and backward: tensors in the order of the lowered stage's own lists."""

    received: list[Tensor]
    sent: list[Tensor]
    results: list[Tensor]
    inputs: dict[str, Tensor]
    notes: list[Note] = field(default_factory=list)  # weight gradients that backward's input part has left for later
    moved: Moved | None = None  # where it can lie on the host


class StageRunner:
    """Runs one lowered stage, in the gradient mode that is set.

    `grads`: values whose gradient travels. `closed`: inputs that can have none. `dtypes`: dtype in which a value crosses to another stage.
    `late`: the weight gradients that a split backward computes later, where it is split. `memory`: told what forward is for.
    """

    def __init__(
        self,
        local: LocalStage,
        variables: Mapping[str, Tensor],
        grads: set[str],
        dtypes: Mapping[str, torch.dtype],
        draw: Draw,
        autocast: torch.dtype | None,
        device: torch.device,
        compile: bool = False,
        closed: frozenset[str] = frozenset(),
        late: Late | None = None,
        memory: Accounts | None = None,
    ) -> None:
        self.closed, self.memory = closed, memory or Accounts()
        self.local, self.draw, self.late = local, draw, late
        self._learns = [value in grads for value in local.received]
        self._dtypes = [dtypes[value] for value in local.sent]
        self._args: list[Tensor | None] = [variables.get(value) for value in local.variables]
        self._given = [(i, value) for i, value in enumerate(local.variables) if value not in variables]
        self._autocast, self._device = autocast, device
        self.module: Callable[..., Any] = torch.compile(local.module) if compile else local.module

    def forward(self, inputs: Mapping[str, Tensor], received: Sequence[Tensor], input_gradients: bool = False) -> Kept:
        """Run forward. `inputs`: local batch tensors by value name; `received`: in the order of `local.received`."""
        train = torch.is_grad_enabled()
        held = [x.detach().requires_grad_() if train and learns else x for x, learns in zip(received, self._learns, strict=True)]
        args = self._args.copy()
        for i, value in self._given:
            args[i] = inputs[value]
        given: dict[str, Tensor] = {}
        if input_gradients:
            for i, value in self._given:
                x = inputs[value]
                args[i] = given[value] = x.detach().requires_grad_(x.is_floating_point() and value not in self.closed)
        kept = Kept(held, [], [], given)
        if self.late is not None:
            self.late.notes = kept.notes
        self.memory.part("activations")
        if self._autocast is None:
            out = self.module(*args, *held)
        else:
            with torch.autocast(self._device.type, dtype=self._autocast):
                out = self.module(*args, *held)
        self.memory.part("buffers")
        num_sent = len(self._dtypes)
        kept.sent = [x if x.dtype is dtype else x.to(dtype) for x, dtype in zip(out, self._dtypes, strict=False)]
        kept.results = list(out[num_sent:])
        return kept

    def backward(self, kept: Kept, gradients: Sequence[Tensor | None], scale: float) -> list[Tensor | None]:
        """Run backward from the gradients of what was sent (in the order of `local.sent`) and from the loss times `scale`.

        Returns the gradients of what was received, in the order of `local.received`; None where none travels.
        """
        roots: list[Tensor] = []
        seeds: list[Tensor | None] = []
        for x, gradient in zip(kept.sent, gradients, strict=True):
            if gradient is not None and x.requires_grad:
                roots.append(x)
                seeds.append(gradient)
        for x in kept.results:
            if x.requires_grad:
                roots.append(x)
                seeds.append(torch.full_like(x, scale))
        if roots:
            torch.autograd.backward(roots, seeds)
        return [
            None if not learns else torch.zeros_like(x) if x.grad is None else x.grad
            for x, learns in zip(kept.received, self._learns, strict=True)
        ]

    def input_gradients(self, kept: Kept) -> dict[str, Tensor]:
        """After backward: the gradients of the batch's floating-point tensors, where forward was asked for them."""
        return {v: torch.zeros_like(x) if x.grad is None else x.grad for v, x in kept.inputs.items() if x.is_floating_point()}
