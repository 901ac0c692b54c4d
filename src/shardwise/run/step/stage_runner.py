"""Run forward and backward of one pipeline stage, one microbatch at a time, with the activations saved in between.

In: a lowered stage, its parameters and buffers, and the local microbatches. Out: tensors for other stages, gradients in the parameters'
hooks, the loss. In a split backward (zero bubble) the input part leaves a note for every weight gradient that is computed later.

Tensors received from and sent to other stages stay alive until backward only if operators saved them: `_StageInput` and `_StageOutput`
take their place in the autograd graph, and a received gradient is freed as soon as its operator has read it. They take some 20
microseconds each way, so small tensors are referenced directly instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwise.lower.kernels.randomness import DrawState
from shardwise.lower.local import LocalStage
from shardwise.lower.split_backward import DelayedWeightGradients, WeightGradientNote
from shardwise.run.residency.host_store import OffloadedActivations
from shardwise.run.state.precision import LossScale
from shardwise.world import private
from shardwise.world.memory import Accounts

SMALL_BYTES = 64 << 10  # received or sent per microbatch; the stage's compute then takes less than a millisecond


class _StageInput(torch.autograd.Function):
    """Identity on received tensors, without keeping them; backward puts their gradients into a list."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor | None], anchor: Tensor, *received: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.gradients = gradients
        return tuple(x.detach() for x in received)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.gradients[:] = gradients
        return (None,) * (2 + len(gradients))


class _StageOutput(torch.autograd.Function):
    """Single root of backward for all sent tensors; takes their gradients from a list, which it empties."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor | None], *sent: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (None, *ctx.gradients)
        ctx.gradients.clear()
        return gradients


def _widen_sent(x: Tensor, dtype: torch.dtype) -> Tensor:
    assert dtype.itemsize > x.dtype.itemsize, f"{x.dtype} would be sent as {dtype}, which loses bits"
    return x.to(dtype)


def _are_small(tensors: Sequence[Tensor]) -> bool:
    return sum(x.nbytes for x in tensors) < SMALL_BYTES


@dataclass(slots=True)
class SavedActivations:
    """Saved activations of one microbatch between forward and backward.

    `sent`: until it is sent. `root`: of sent tensors with a gradient, whose positions are `sent_with_gradient`; backward takes their
    gradients from `output_gradients` and puts those of received tensors into `input_gradients`. `received`: stage inputs for recompute, of
    a forward without saved activations. Small tensors are `roots` and `leaves` of backward directly.
    """

    sent: list[Tensor] = field(default_factory=list)
    results: Sequence[Tensor] = ()
    inputs: dict[str, Tensor] = field(default_factory=dict)
    received: Sequence[Tensor] = ()
    root: Tensor | None = None
    roots: Sequence[Tensor] = ()
    leaves: Sequence[Tensor] = ()
    sent_with_gradient: Sequence[int] = ()
    output_gradients: list[Tensor | None] = field(default_factory=list)
    input_gradients: list[Tensor | None] = field(default_factory=list)
    received_specs: Sequence[tuple[torch.Size, torch.dtype]] = ()  # of received tensors
    notes: list[WeightGradientNote] = field(default_factory=list)  # weight gradients that a split backward computes later
    offloaded: OffloadedActivations | None = None  # host copy, if it can be offloaded


@dataclass(frozen=True, slots=True)
class StageRunnerOptions:
    """Options shared by a rank's stages. `memory`: accounts that attribute allocations. `autocast`: its dtype, None: off."""

    device: torch.device
    memory: Accounts
    autocast: torch.dtype | None
    scale: LossScale


class StageRunner:
    """Runs one lowered stage, in the current gradient mode.

    `values_with_gradient`: values whose gradient is sent between stages. `non_differentiable_inputs`: inputs without gradient. `dtypes`:
    dtype in which a value is sent. `delayed_gradients`: weight gradients that a split backward computes later, if any.
    """

    def __init__(
        self,
        local: LocalStage,
        variables: Mapping[str, Tensor],
        values_with_gradient: set[str],
        dtypes: Mapping[str, torch.dtype],
        draw: DrawState,
        options: StageRunnerOptions,
        non_differentiable_inputs: frozenset[str],
        delayed_gradients: DelayedWeightGradients | None,
    ) -> None:
        self.non_differentiable_inputs, self.memory = non_differentiable_inputs, options.memory
        self.local, self.draw, self.delayed_gradients = local, draw, delayed_gradients
        self._received_gradients = [value in values_with_gradient for value in local.received]
        self._dtypes = [dtypes[value] for value in local.sent]
        self._args: list[Tensor | None] = [variables.get(value) for value in local.variables]
        self._inputs = [(i, value) for i, value in enumerate(local.variables) if value not in variables]
        self._autocast, self._device, self._scale = options.autocast, options.device, options.scale
        self._seed: tuple[Tensor | None, float] = (None, 0.0)
        self.module: Callable[..., Any] = local.module

    def forward(self, inputs: Mapping[str, Tensor], received: Sequence[Tensor], wants_input_gradients: bool = False) -> SavedActivations:
        """Run forward. `inputs`: local batch tensors by value name; `received`: in the order of `local.received`."""
        saved = SavedActivations()
        args = self._args.copy()
        for i, value in self._inputs:
            args[i] = inputs[value]
        if wants_input_gradients:
            for i, value in self._inputs:
                x = inputs[value]
                args[i] = saved.inputs[value] = x.detach().requires_grad_(
                    x.is_floating_point() and value not in self.non_differentiable_inputs
                )
        if self.delayed_gradients is not None:
            self.delayed_gradients.notes = saved.notes
        if received:
            args += self._enter(saved, received) if torch.is_grad_enabled() else self._enter_without_gradients(saved, received)
        del received
        self.memory.set_part("activations")
        if self._autocast is None:
            out = self.module(*args)
        else:
            with torch.autocast(self._device.type, dtype=self._autocast):
                out = self.module(*args)
        self.memory.set_part("buffers")
        num_sent = len(self._dtypes)
        saved.results = out[num_sent:]
        if num_sent:
            saved.sent = [x if x.dtype is dtype else _widen_sent(x, dtype) for x, dtype in zip(out, self._dtypes, strict=False)]
            saved.sent_with_gradient = [i for i, x in enumerate(saved.sent) if x.requires_grad]
        if saved.sent_with_gradient:
            differentiable = [saved.sent[i] for i in saved.sent_with_gradient]
            if _are_small(differentiable):
                saved.roots = differentiable
            else:
                saved.root = _StageOutput.apply(saved.output_gradients, *differentiable)  # type: ignore[no-untyped-call]
        return saved

    def _enter_without_gradients(self, saved: SavedActivations, received: Sequence[Tensor]) -> Sequence[Tensor]:
        saved.received, saved.received_specs = list(received), [(x.shape, x.dtype) for x in received]
        return received

    def _enter(self, saved: SavedActivations, received: Sequence[Tensor]) -> list[Tensor]:
        saved.received_specs = [(x.shape, x.dtype) for x in received]
        detached = [x.detach() for x in received]  # another stage of this rank may have produced it
        differentiable = [x for x, has_gradient in zip(detached, self._received_gradients, strict=True) if has_gradient]
        if _are_small(differentiable):
            saved.leaves = [x.requires_grad_() for x in differentiable]
            return detached
        anchor = torch.empty(0, requires_grad=True)  # makes autograd call the function, since its inputs are detached
        replaced = iter(_StageInput.apply(saved.input_gradients, anchor, *differentiable))  # type: ignore[no-untyped-call]
        return [next(replaced) if has_gradient else x for x, has_gradient in zip(detached, self._received_gradients, strict=True)]

    def backward(self, saved: SavedActivations, gradients: list[Tensor | None], scale: float) -> list[Tensor | None]:
        """Run backward from the gradients of sent tensors (in the order of `local.sent`; emptied) and from the loss times `scale`.

        Returns the gradients of received tensors, in the order of `local.received`; None for those without one.
        """
        scale *= self._scale.factor
        roots = [x for x in saved.results if x.requires_grad]
        seeds: list[Tensor | None] = [self._seed_of(x, scale) for x in roots]
        for x, i in zip(saved.roots, saved.sent_with_gradient, strict=False):
            if gradients[i] is not None:
                roots.append(x)
                seeds.append(gradients[i])
        if saved.root is not None and any(gradients[i] is not None for i in saved.sent_with_gradient):
            saved.output_gradients += [gradients[i] for i in saved.sent_with_gradient]
            roots.append(saved.root)
            seeds.append(torch.zeros_like(saved.root))
        gradients.clear()
        if roots:
            private.run_backward(roots, seeds)
        if not saved.received_specs:
            return []
        saved.input_gradients += [x.grad for x in saved.leaves]
        incoming, has_none = iter(saved.input_gradients), any(self._received_gradients) and not saved.input_gradients
        gradients_in: list[Tensor | None] = []
        for (shape, dtype), has_gradient in zip(saved.received_specs, self._received_gradients, strict=True):
            gradient = next(incoming) if has_gradient and not has_none else None
            gradients_in.append(torch.zeros(shape, dtype=dtype, device=self._device) if has_gradient and gradient is None else gradient)
        saved.input_gradients.clear()
        return gradients_in

    def _seed_of(self, loss: Tensor, scale: float) -> Tensor:
        """Return the gradient of a loss: that of the last step, unless it is another one or has been written to."""
        seed, seed_scale = self._seed
        is_same = seed is not None and seed_scale == scale and type(loss) is Tensor and not private.version_of(seed)
        if seed is None or not is_same or seed.shape != loss.shape or seed.dtype is not loss.dtype or seed.device != loss.device:
            seed = torch.full_like(loss, scale)
            self._seed = (seed if type(seed) is Tensor else None), scale
        return seed

    def input_gradients(self, saved: SavedActivations) -> dict[str, Tensor]:
        """Return the gradients of the batch's floating-point tensors after backward, if forward was called with them on."""
        by_value = {v: torch.zeros_like(x) if x.grad is None else x.grad for v, x in saved.inputs.items() if x.is_floating_point()}
        return {v: x / self._scale.factor for v, x in by_value.items()} if self._scale.is_scaled else by_value
