"""The serial reference: the user's unchanged module, trained in one process by plain PyTorch, and its rounding noise.

A run takes a model, a batch (at once or in microbatches), a precision and an optimizer, and returns loss, gradients and weights of each
step by name. The rounding noise of each value is measured by perturbed runs. Not modelled: random draws that are not declared in the
traits; a model that draws otherwise is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from shardwise.capture.capture import Loss, call_with_loss
from shardwise.capture.modes import set_modes, training_modes
from shardwise.capture.module_state import set_state, state_of
from shardwise.capture.nesting import batch_size_of, named_leaves, replace_leaves
from shardwise.lower.float64_mode import cast_to_float64, compute_in_float64, is_float64
from shardwise.lower.kernels.sample_positions import MicrobatchSamples
from shardwise.lower.kernels.scaled import scaled_linear, supports_scaled_product
from shardwise.model.batch.random_draws import SampleFold
from shardwise.plan.ir.placement import even_shard_ranges
from shardwise.plan.ir.precision import PRECISIONS, Precision
from shardwise.plan.plan import Plan
from shardwise.run.state.optimizer import OptimizerSpec
from shardwise.run.state.precision import autocast_dtype_of
from shardwise.run.uncaptured.eager_draws import ReproducibleDraws
from shardwise.run.verify.shard_differences import comparable_slot

StepValues = Mapping[str, Mapping[str, Tensor]]  # the compared values: kind -> name -> value

EPSILON = {
    name: 2.0**-p.fraction_bits if p.fraction_bits else torch.finfo(getattr(torch, p.rounding_dtype)).eps for name, p in PRECISIONS.items()
}
LOSS_SCALE = 4096.0  # loss scale of float16: near overflow, two runs that sum in different orders might not skip the same steps
_NUM_RUNS = 4  # perturbed runs: a single one can round the same way by chance


@dataclass(frozen=True)
class SerialTraits:
    """Properties of a model that a serial run needs.

    `fills_missing_gradients`: parameters that a step does not use have a zero gradient instead of none. `unbatched_inputs`: tensors of the
    batch without a sample dimension, though as long. `num_draws`: random draws of a call of the model; `sample_folds`: where samples are in
    each. `microbatch_sizes`: their losses are weighted by samples; empty: the whole batch is computed at once. `num_replicas`: shards of
    a microbatch with batch norm statistics of their own. `narrow_parameters`: names of parameters that are held in 16 bits, of which the
    optimizer updates main weights. `is_float64`: whether it is in float64 as written; None: as its parameters say.
    """

    fills_missing_gradients: bool = False
    unbatched_inputs: frozenset[str] = frozenset()
    non_differentiable_inputs: frozenset[str] = frozenset()
    num_draws: int = 0
    sample_folds: Sequence[SampleFold | None] = ()
    microbatch_sizes: tuple[int, ...] = ()
    num_replicas: int = 1
    narrow_parameters: frozenset[str] = frozenset()
    is_float64: bool | None = None


class _LocalBatchNorm(TorchFunctionMode):
    """Compute batch norm statistics over each of `count` shards of the samples separately, in order, within a block."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        named = dict(kwargs or {})
        is_training = args[5] if len(args) > 5 else named.get("training", False)
        if func not in (functional.batch_norm, torch.batch_norm) or not is_training or self._count == 1:
            return func(*args, **named)
        x, *remaining = args
        return torch.cat([func(x[start:stop], *remaining, **named) for start, stop in even_shard_ranges(len(x), self._count)])


class _EightBitLinears(TorchFunctionMode):
    """Round the operands of linear layers to 8 bits within a block, as `lower/kernels/scaled` does, if a precision says so."""

    def __init__(self, precision: Precision) -> None:
        super().__init__()
        self._enabled, self._scales_tensors = bool(precision.linear_dtype), precision.scales_tensors

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is not functional.linear or not self._enabled:
            return func(*args, **dict(kwargs or {}))
        named = dict(zip(("input", "weight", "bias"), args, strict=False)) | dict(kwargs or {})
        x, weight, bias = named["input"], named["weight"], named.get("bias")
        if not supports_scaled_product(weight.shape):
            return functional.linear(x, weight, bias)
        return scaled_linear((), (), x, weight, bias, scales_tensors=self._scales_tensors)


class SerialRun:
    """A serial training run of one model."""

    def __init__(
        self,
        make: nn.Module | Callable[[], nn.Module],
        seed: int,
        batch: Any,
        loss: Loss | None,
        plan: Plan,
        spec: OptimizerSpec,
        device: torch.device,
        traits: SerialTraits = SerialTraits(),
    ) -> None:
        self._microbatch_sizes = traits.microbatch_sizes or (batch_size_of(batch),)
        self._unbatched_inputs, self._non_differentiable_inputs, self._fills_missing_gradients = (
            traits.unbatched_inputs,
            traits.non_differentiable_inputs,
            traits.fills_missing_gradients,
        )
        self._num_replicas = traits.num_replicas
        self._num_draws, self._step = traits.num_draws, 0
        self._random = ReproducibleDraws(seed, plan.layout.precision == "float64", traits.sample_folds)
        self.drew_differently = False
        torch.manual_seed(seed)
        self.model: nn.Module = copy.deepcopy(make) if isinstance(make, nn.Module) else make()
        set_modes(self.model, training_modes(self.model))
        self._in_float64 = plan.layout.precision == "float64"
        self._is_double = is_float64(self.model) if traits.is_float64 is None else traits.is_float64
        if self._in_float64:
            self.model = cast_to_float64(self.model)
        self.model = self.model.to(device)
        self._loss, self._plan, self._device = loss, plan, device
        self.set_batch(batch)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self._trained = {name for name, p in self.model.named_parameters() if p.requires_grad}  # not parameters that a call creates
        self._main = _hold_main_weights(self.model, traits.narrow_parameters, plan)
        self._optimizer = spec.build([(self._main.get(p, p), spec.decays(p.shape)) for p in trained])
        self._clip, self._slots = spec.clip, spec.slots
        # torch's own loss scaling, one factor for all microbatches of a step; disabled in other precisions.
        self._scaler = torch.amp.GradScaler(device.type, init_scale=LOSS_SCALE, enabled=PRECISIONS[plan.layout.precision].scales_loss)
        self._autocast_dtype, self._precision = autocast_dtype_of(plan.layout.precision), PRECISIONS[plan.layout.precision]
        if self._buffers_carry_inputs():
            self._non_differentiable_inputs = frozenset(self._batch)
        self._pending: list[list[Tensor | None]] = []  # gradients of steps whose update is not due yet, the oldest first

    def set_batch(self, batch: Any) -> None:
        """Take the batch of the steps from now on."""
        self._batch = {path: self._to_device(x) for path, x in named_leaves(batch) if isinstance(x, Tensor)}
        self._nesting = batch

    def _to_device(self, x: Tensor) -> Tensor:
        x = x.to(self._device)
        return x.double() if self._in_float64 and x.is_floating_point() else x.clone()

    def step(self, gradients: Mapping[str, Tensor] | None = None) -> StepValues:
        """Run one step; return loss, gradients (before clipping), gradients of floating-point inputs, updated weights, and optimizer state.

        Weights (and buffers) are the model's own tensors, which the next step overwrites. With staleness=K they are updated with the
        gradients of K steps before. `gradients`: used for the update in place of its own.
        """
        generator_state = torch.random.get_rng_state()
        with compute_in_float64(self._in_float64, self._is_double):
            try:
                total, inputs = self._forward_backward()
            except RuntimeError as error:
                # A model that sets requires_grad of its own input (wav2vec) cannot if the input already requires a gradient.
                if "requires_grad flags" not in str(error) or len(self._non_differentiable_inputs) == len(self._batch):
                    raise
                self._non_differentiable_inputs = frozenset(self._batch)
                total, inputs = self._forward_backward()
        self._scaler.unscale_(self._optimizer)
        self._step += 1
        if self._num_draws:
            torch.random.set_rng_state(generator_state)
        values: dict[str, Tensor] = {}
        for name, p in self.model.named_parameters():
            if p.requires_grad and name in self._trained:
                if p.grad is None and self._fills_missing_gradients:
                    p.grad = torch.zeros_like(p)
                if p.grad is not None and p.grad.is_sparse:
                    p.grad = p.grad.to_dense()
                values[name] = torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
        for name, p in self.model.named_parameters():
            if gradients is not None and p.grad is not None and name in gradients:
                p.grad.copy_(gradients[name])
        self._pending.append([p.grad for p in self.model.parameters()])
        if len(self._pending) > self._plan.layout.staleness:
            for p, grad in zip(self.model.parameters(), self._pending.pop(0), strict=True):
                p.grad = grad
            for weight, main in self._main.items():
                main.grad = None if weight.grad is None else weight.grad.to(main.dtype)
            if self._clip:
                torch.nn.utils.clip_grad_norm_([self._main.get(p, p) for p in self.model.parameters()], self._clip)
            self._scaler.step(self._optimizer)
            self._scaler.update()
            self._cast_main_weights()
        parameters = {name: self._main.get(p, p) for name, p in self.model.named_parameters()}
        weights = {name: x.detach() for name, x in (*parameters.items(), *self.model.named_buffers())}
        optimizer_state = self._optimizer_state()
        return {"loss": {"": total}, "gradients": values, "input_gradients": inputs, "weights": weights, "optimizer": optimizer_state}

    def _optimizer_state(self) -> dict[str, Tensor]:
        """Return the optimizer state of every updated parameter, by "name slot"."""
        states = {name: self._optimizer.state.get(self._main.get(p, p), {}) for name, p in self.model.named_parameters()}
        return {
            f"{name} {slot}": comparable_slot(slot, state[slot])
            for name, state in states.items()
            for slot in self._slots
            if state.get(slot) is not None
        }

    @torch.no_grad()
    def _cast_main_weights(self) -> None:
        for p, main in self._main.items():
            p.copy_(main)

    def _forward_backward(self) -> tuple[Tensor, dict[str, Tensor]]:
        samples, start = batch_size_of(self._nesting), 0
        self.model.zero_grad(set_to_none=True)  # pending updates keep their tensors
        leaves_now = {
            path: x.detach().requires_grad_(x.is_floating_point() and path not in self._non_differentiable_inputs)
            for path, x in self._batch.items()
        }
        total = torch.zeros((), dtype=torch.float64)
        for length in self._microbatch_sizes:
            samples_in = {p for p, x in leaves_now.items() if x.dim() and x.shape[0] == samples and p not in self._unbatched_inputs}
            cut = {p: x.narrow(0, start, length) if p in samples_in else x for p, x in leaves_now.items()}
            all_leaves = {p: cut.get(p, leaf) for p, leaf in named_leaves(self._nesting)}
            narrow = torch.autocast(self._device.type, self._autocast_dtype, enabled=self._autocast_dtype is not None)
            self._random.start_call(self._step, MicrobatchSamples.contiguous(start, length, samples))
            with (
                self._random if self._num_draws else nullcontext(),
                _LocalBatchNorm(self._num_replicas),
                _EightBitLinears(self._precision),
            ):
                with narrow:
                    value = call_with_loss(self.model, replace_leaves(self._nesting, all_leaves), self._loss) * (length / samples)
                if value.requires_grad:
                    torch.autograd.backward(self._scaler.scale(value))
            self.drew_differently |= not self._random.drew_exactly(self._num_draws)
            total = total + value.detach().double().cpu().reshape(())
            start += length
        inputs = {path: x.grad for path, x in leaves_now.items() if x.grad is not None}
        return total, {path: x / self._scaler.get_scale() for path, x in inputs.items()} if self._scaler.is_enabled() else inputs

    def _buffers_carry_inputs(self) -> bool:
        """Return whether a buffer (a running mean of the batch) would keep an input's autograd graph from step to step.

        Training needs no gradients of its batch, so it does not show there.
        """
        if not any(b.is_floating_point() for b in self.model.buffers()):
            return False
        buffers = {(path, key): b for path, m in self.model.named_modules() for key, b in m._buffers.items() if b is not None}
        values, attributes = {at: b.clone() for at, b in buffers.items()}, state_of(self.model)
        modules = dict(self.model.named_modules())
        parameters = [(p, p.requires_grad, p.detach().clone()) for p in self.model.parameters()]  # a model may write or replace them
        tables = [(m._parameters, dict(m._parameters)) for m in self.model.modules()]
        try:
            for p, _, _ in parameters:
                p.requires_grad_(False)
            with compute_in_float64(self._in_float64, self._is_double):
                inputs = {path: x.detach().clone().requires_grad_(x.is_floating_point()) for path, x in self._batch.items()}
                call_with_loss(
                    self.model,
                    replace_leaves(self._nesting, {p: inputs.get(p, leaf) for p, leaf in named_leaves(self._nesting)}),
                    self._loss,
                )
            return any(b.requires_grad for b in self.model.buffers())
        except Exception:
            return False  # the step itself will raise
        finally:
            set_state(self.model, attributes)
            with torch.no_grad():
                for p, requires_grad, value in parameters:
                    p.requires_grad_(requires_grad).copy_(value)
                for table, original in tables:
                    table.update(original)
                for (path, key), b in buffers.items():
                    # A buffer may be a view (a mask that was reshaped), which cannot be detached in place.
                    modules[path]._buffers[key] = (b.detach() if b.requires_grad else b).copy_(values[path, key])

    def perturb(self, seed: int) -> None:
        """Perturb every parameter by one unit of rounding, up or down at random."""
        generator = torch.Generator().manual_seed(seed)
        epsilon = EPSILON[self._plan.layout.precision]
        with torch.no_grad():
            for p in self.model.parameters():
                if p.is_floating_point():
                    signs = torch.randint(0, 2, p.shape, generator=generator).to(p) * 2 - 1
                    self._main.get(p, p).mul_(1 + epsilon * signs)
        self._cast_main_weights()


def _hold_main_weights(model: nn.Module, names: frozenset[str], plan: Plan) -> dict[Tensor, Tensor]:
    """Cast parameters of these names to the dtype in which `plan` holds weights; return what they were, by parameter."""
    main: dict[Tensor, Tensor] = {}
    for name, p in model.named_parameters():
        if name in names:
            main[p] = p.detach().clone().requires_grad_()
            p.data = p.detach().to(getattr(torch, PRECISIONS[plan.layout.precision].held_dtype))
            p.grad_dtype = getattr(torch, plan.layout.gradients)
    return main


class RoundingNoise:
    """Rounding noise: distances of serial runs that differ by one unit of rounding in every parameter.

    It measures the terms that cancel in a sum (noise over the unit of rounding is the sum of their magnitudes), and how ill-conditioned the
    value is. The runs are built at first use.
    """

    def __init__(self, make_run: Callable[[], SerialRun]) -> None:
        self._make_run = make_run
        self._runs: list[SerialRun] = []
        self._step = -1
        self._values: list[StepValues] = []

    def max_distance(self, kind: str, name: str, reference: Tensor, step: int) -> float:
        """Return the largest distance of any perturbed run from `reference`, the unperturbed run's value in this step."""
        if not self._runs:
            self._runs = [self._make_run() for _ in range(_NUM_RUNS)]
            for seed, run in enumerate(self._runs):
                run.perturb(seed)
        while self._step < step:
            self._values = [run.step() for run in self._runs]
            self._step += 1
        runs = (values[kind][name] for values in self._values)
        runs = (x.to(torch.complex128) if x.is_complex() else x.double() for x in runs)
        return max(float((x - reference.to(x)).abs().max()) for x in runs)
