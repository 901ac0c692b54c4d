"""The serial reference: the user's module as it is, trained in one process by plain PyTorch, and how exact it is itself.

In: a model, a batch, a plan's microbatches and precision, an optimizer. Out: per step loss, gradients and weights by name; and for each
of them the rounding noise that a serial run has, measured by running it again.

Not modelled: random draws; a model that draws is refused before it is compared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from weft.model.capture import Loss, call
from weft.model.nesting import batch_size_of, leaves, rebuild
from weft.plan.plan import Plan
from weft.run.optimizer import OptimizerSpec
from weft.world import private

Values = Mapping[str, Mapping[str, Tensor]]  # what is compared: kind -> name -> value

_EPSILON = {name: torch.finfo(getattr(torch, name)).eps for name in ("float64", "float32", "bfloat16")}
_RUNS = 4  # perturbed runs: one alone can round the same way by chance


class Double(private.DispatchMode):  # type: ignore[no-untyped-call]
    """Casts to float32 become casts to float64, and so do constants that the model's code makes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        try:
            made = func(*args, **kwargs)
        except RuntimeError:
            if func.__name__ not in ("full.default", "scalar_tensor.default") or "dtype" in kwargs:
                raise
            # A mask's least number, which is float64's, in a tensor of float32.
            return func(*args, **{**kwargs, "dtype": torch.float64})
        if isinstance(made, Tensor) and made.dtype is torch.float32:
            if not any(isinstance(x, Tensor) for x in args):
                return func(*args, **{**kwargs, "dtype": torch.float64})
            if func is torch.ops.aten.lift_fresh.default:
                return made.double()
        return made


class Serial:
    """One model in training.

    `every`: a parameter that a step does not use has a gradient of zero in it, instead of none. `whole`: tensors of the batch that are no
    samples, though they are as long. `closed`: those that can have no gradient.
    """

    def __init__(
        self,
        make: nn.Module | Callable[[], nn.Module],
        seed: int,
        batch: Any,
        loss: Loss | None,
        plan: Plan,
        spec: OptimizerSpec,
        device: torch.device,
        every: bool = False,
        whole: frozenset[str] = frozenset(),
        closed: frozenset[str] = frozenset(),
    ) -> None:
        self._whole, self._closed = whole, closed
        torch.manual_seed(seed)
        self.model: nn.Module = copy.deepcopy(make) if isinstance(make, nn.Module) else make()
        self._double = plan.layout.precision == "float64"
        if self._double:
            self.model = self.model.double()
        self.model = self.model.to(device)
        self.model.train()
        self._loss, self._plan, self._device, self._every = loss, plan, device, every
        self._batch = {path: self._input(x) for path, x in leaves(batch) if isinstance(x, Tensor)}
        self._nesting = batch
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self._optimizer = spec.build([(p, spec.decays(p.shape)) for p in trained])
        self._clip = spec.clip
        self._late: list[list[Tensor | None]] = []  # gradients of steps whose update is not due yet, the oldest first

    def _input(self, x: Tensor) -> Tensor:
        x = x.to(self._device)
        return x.double() if self._double and x.is_floating_point() else x.clone()

    def step(self, instead: Mapping[str, Tensor] | None = None) -> Values:
        """One step. Loss, gradients (before clipping), gradients of floating-point inputs, and the updated weights and buffers.

        Weights are the model's own tensors: the next step writes them. With staleness=K they are updated with the gradients of the step
        K before. `instead`: gradients that update them in the place of its own.
        """
        with Double() if self._double else nullcontext():  # type: ignore[no-untyped-call]  # torch's own constructor has no types
            total, inputs = self._forward_backward()
        found: dict[str, Tensor] = {}
        for name, p in self.model.named_parameters():
            if p.requires_grad:
                if p.grad is None and self._every:
                    p.grad = torch.zeros_like(p)
                found[name] = torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
        for name, p in self.model.named_parameters():
            if instead is not None and p.grad is not None and name in instead:
                p.grad.copy_(instead[name])
        self._late.append([p.grad for p in self.model.parameters()])
        if len(self._late) > self._plan.layout.staleness:
            for p, grad in zip(self.model.parameters(), self._late.pop(0), strict=True):
                p.grad = grad
            if self._clip:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
            self._optimizer.step()
        weights = {name: x.detach() for name, x in (*self.model.named_parameters(), *self.model.named_buffers())}
        return {"loss": {"": torch.tensor(total)}, "gradients": found, "input_gradients": inputs, "weights": weights}

    def _forward_backward(self) -> tuple[float, dict[str, Tensor]]:
        samples, start = batch_size_of(self._nesting), 0
        self._optimizer.zero_grad(set_to_none=True)  # those that wait for their update keep their tensors
        leaves_now = {
            path: x.detach().requires_grad_(x.is_floating_point() and path not in self._closed) for path, x in self._batch.items()
        }
        total = 0.0
        for length in self._plan.microbatch_sizes:
            samples_in = {p for p, x in leaves_now.items() if x.dim() and x.shape[0] == samples and p not in self._whole}
            cut = {p: x.narrow(0, start, length) if p in samples_in else x for p, x in leaves_now.items()}
            whole = {p: cut.get(p, leaf) for p, leaf in leaves(self._nesting)}
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self._plan.layout.precision == "bfloat16"):
                value = call(self.model, rebuild(self._nesting, whole), self._loss) * (length / samples)
            if value.requires_grad:
                torch.autograd.backward(value)
            total += float(value.detach())
            start += length
        return total, {path: x.grad for path, x in leaves_now.items() if x.grad is not None}

    def perturb(self, seed: int) -> None:
        """Move every parameter by one unit of rounding, up or down at random."""
        generator = torch.Generator().manual_seed(seed)
        epsilon = _EPSILON[self._plan.layout.precision]
        with torch.no_grad():
            for p in self.model.parameters():
                if p.is_floating_point():
                    signs = torch.randint(0, 2, p.shape, generator=generator).to(p) * 2 - 1
                    p.mul_(1 + epsilon * signs)


class Noise:
    """How far serial runs lie from one another that differ by one unit of rounding in every parameter.

    That is what rounding does to a value: it measures the terms that cancel in a sum (noise over the unit of rounding is the sum of their
    magnitudes), and how ill-conditioned the value is besides. Runs are made when they are first asked for.
    """

    def __init__(self, make: Callable[[], Serial]) -> None:
        self._make = make
        self._runs: list[Serial] = []
        self._at = -1
        self._values: list[Values] = []

    def of(self, kind: str, name: str, reference: Tensor, step: int) -> float:
        """The largest distance from `reference`, which the unperturbed run has in this step, that any perturbed run has."""
        if not self._runs:
            self._runs = [self._make() for _ in range(_RUNS)]
            for seed, run in enumerate(self._runs):
                run.perturb(seed)
        while self._at < step:
            self._values = [run.step() for run in self._runs]
            self._at += 1
        return max(float((values[kind][name].double() - reference.double()).abs().max()) for values in self._values)
