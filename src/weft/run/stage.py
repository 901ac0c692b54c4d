"""One rank's stage at work: forward and backward of one microbatch at a time, with what backward needs kept in between.

In: a lowered stage, its parameters and buffers, and the local microbatches. Out: tensors for other stages, gradients in the
parameters' hooks, the loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from weft.lower.kernels.randomness import Draw
from weft.lower.local import LocalStage


@dataclass
class Kept:
    """What one microbatch leaves between forward and backward."""

    received: dict[str, Tensor]
    sent: dict[str, Tensor]
    results: dict[str, Tensor]
    inputs: dict[str, Tensor] = field(default_factory=dict)


class StageRunner:
    """Runs one lowered stage.

    `grads`: values whose gradient travels. `closed`: inputs that can have none. `dtypes`: dtype in which a value crosses to another stage.
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
    ) -> None:
        self.closed = closed
        self.local, self.grads, self.dtypes, self.draw = local, grads, dtypes, draw
        self._fixed = dict(variables)
        self._autocast, self._device = autocast, device
        self.module: Callable[..., Any] = torch.compile(local.module) if compile else local.module

    def _context(self) -> contextlib.AbstractContextManager[Any]:
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=self._autocast)

    def forward(self, inputs: Mapping[str, Tensor], received: Mapping[str, Tensor], want_grad: bool, input_gradients: bool = False) -> Kept:
        """Run forward. `inputs`: local batch tensors by value name; `received`: by value name, from other stages."""
        held: dict[str, Tensor] = {}
        for value in self.local.received:
            x = received[value]
            held[value] = x.detach().requires_grad_(want_grad and value in self.grads)
        given: dict[str, Tensor] = dict(inputs)
        if input_gradients:
            given = {v: x.detach().requires_grad_(x.is_floating_point() and v not in self.closed) for v, x in inputs.items()}
        args = [self._fixed[v] if v in self._fixed else given[v] for v in self.local.variables]
        with torch.set_grad_enabled(want_grad), self._context():
            out = self.module(*args, *(held[v] for v in self.local.received))
        num_sent = len(self.local.sent)
        sent = dict(zip(self.local.sent, out[:num_sent], strict=True))
        for value, x in sent.items():
            dtype = self.dtypes[value]
            if x.dtype != dtype:
                sent[value] = x.to(dtype)
        results = dict(zip(self.local.results, out[num_sent:], strict=True))
        return Kept(held, sent, results, given if input_gradients else {})

    def backward(self, kept: Kept, gradients: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
        """Run backward from the gradients of what was sent and from the loss times `scale`; gradients of what was received."""
        roots: list[Tensor] = []
        seeds: list[Tensor | None] = []
        for value, x in kept.sent.items():
            if value in gradients and x.requires_grad:
                roots.append(x)
                seeds.append(gradients[value])
        for x in kept.results.values():
            if x.requires_grad:
                roots.append(x)
                seeds.append(torch.full_like(x, scale))
        if roots:
            torch.autograd.backward(roots, seeds)
        out = {}
        for value, x in kept.received.items():
            if value in self.grads:
                out[value] = x.grad if x.grad is not None else torch.zeros_like(x)
        return out
