"""The proof: a parallel run against the serial one, from the same weights and data. In: a model, a plan, steps. Out: `Verification`.

Every rank runs the engine; rank 0 also runs the user's own module, eagerly and alone, over the same microbatches with the same
optimizer, and compares the loss, every gradient (of parameters and of floating-point inputs) and every updated weight and buffer.
In float64 both sides compute in float64 throughout: casts to float32 inside the model would hide what is looked for.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import ModelError
from weft.model.capture import Loss, batch_size_of, call, leaves, rebuild
from weft.model.stages import draws
from weft.plan.placement import piece
from weft.plan.plan import Plan
from weft.run.build import Source
from weft.run.engine import Engine
from weft.run.optimizer import OptimizerSpec
from weft.run.state import full_state
from weft.world import private
from weft.world.world import World

TOLERANCE = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 5e-2}
# A gradient that is zero but for rounding (of a bias before batch norm, or of attention keys) is a sum that cancels; what is left means
# nothing. Gradients are measured against this share of the largest one at least: times the tolerance that is 50 to 100 units of rounding.
# Weights are measured against the largest weight, since AdamW makes steps of rounding noise as well.
_FLOOR = {"float64": 1e-5, "float32": 1e-2, "bfloat16": 1e-1}


@dataclass(frozen=True)
class Verification:
    """The result: worst relative error by what was compared, and the first tensor above the tolerance."""

    ok: bool
    worst: dict[str, float]
    first_difference: str | None
    replicated_operators: tuple[str, ...]
    tolerance: float

    def __str__(self) -> str:
        errors = ", ".join(f"{name} {error:.1e}" for name, error in self.worst.items())
        return f"{'equal' if self.ok else f'differs first in {self.first_difference}'} ({errors}; tolerance {self.tolerance:.0e})"


class _Double(private.DispatchMode):  # type: ignore[no-untyped-call]
    """Casts to float32 become casts to float64, and so do constants that the model's code makes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        made = func(*args, **kwargs)
        if isinstance(made, Tensor) and made.dtype is torch.float32:
            if not any(isinstance(x, Tensor) for x in args):
                return func(*args, **{**kwargs, "dtype": torch.float64})
            if func is torch.ops.aten.lift_fresh.default:
                return made.double()
        return made


def relative_error(got: Tensor, want: Tensor, floor: float) -> float:
    """Largest difference over the largest magnitude (of the tensor, at least `floor`); infinite for NaN or another shape."""
    if got.shape != want.shape:
        return float("inf")
    if not want.numel():
        return 0.0
    difference = (got.double() - want.double()).abs().max().item()
    bound = max(want.double().abs().max().item(), floor)
    if not torch.isfinite(torch.tensor(difference)):
        return float("inf")
    return difference / bound if bound else difference


class _Comparison:
    """Collects errors, step by step."""

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance
        self.worst: dict[str, float] = {}
        self.first: str | None = None

    def add(self, kind: str, name: str, got: Tensor | None, want: Tensor, floor: float, step: int) -> None:
        error = float("inf") if got is None else relative_error(got.cpu(), want.cpu(), floor)
        self.worst[kind] = max(self.worst.get(kind, 0.0), error)
        if self.first is None and not error <= self.tolerance:
            self.first = (
                f"{kind} of {name} in step {step + 1}: relative error {error:.1e}" if name else f"{kind} in step {step + 1}: {error:.1e}"
            )


class _Serial:
    """The user's module as it is, trained in one process by plain PyTorch."""

    def __init__(self, make: Any, seed: int, batch: Any, loss: Loss | None, plan: Plan, spec: OptimizerSpec, device: torch.device) -> None:
        torch.manual_seed(seed)
        self.model: nn.Module = copy.deepcopy(make) if isinstance(make, nn.Module) else make()
        self.double = plan.layout.precision == "float64"
        if self.double:
            self.model = self.model.double()
        self.model = self.model.to(device)
        self.model.train()
        self.loss_function, self.plan, self.device = loss, plan, device
        self.batch = {path: self._input(x, device) for path, x in leaves(batch) if isinstance(x, Tensor)}
        self.nesting = batch
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = spec.build([(p, spec.decays(p.shape)) for p in trained])
        self.clip = spec.clip

    def _input(self, x: Tensor, device: torch.device) -> Tensor:
        x = x.to(device)
        return x.double() if self.double and x.is_floating_point() else x.clone()

    def step(self) -> tuple[float, dict[str, Tensor]]:
        """Loss and input gradients of one step over all microbatches; gradients stay on the parameters."""
        num = self.plan.layout.microbatches
        samples = batch_size_of(self.nesting)
        self.optimizer.zero_grad()
        leaves_now = {path: x.detach().requires_grad_(x.is_floating_point()) for path, x in self.batch.items()}
        total = 0.0
        for m in range(num):
            start, length = piece(samples, num, m)
            cut = {p: x.narrow(0, start, length) if x.dim() and x.shape[0] == samples else x for p, x in leaves_now.items()}
            whole = {p: cut.get(p, leaf) for p, leaf in leaves(self.nesting)}
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.plan.layout.precision == "bfloat16"):
                value = call(self.model, rebuild(self.nesting, whole), self.loss_function) / num
            if value.requires_grad:
                torch.autograd.backward(value)
            total += float(value.detach())
        return total, {path: x.grad for path, x in leaves_now.items() if x.grad is not None}

    def update(self) -> None:
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()


def verify_on_rank(
    world: World,
    plan: Plan,
    make: Any,
    batch: Any,
    loss: Loss | None,
    *,
    steps: int = 2,
    seed: int = 0,
    tolerance: float | None = None,
    optimizer: OptimizerSpec | str | Mapping[str, Any] = "adamw",
    sabotage: str = "",
    source: Source | None = None,
) -> Verification | None:
    """Run on every rank; the verification on rank 0, None elsewhere.

    `sabotage`: a parameter whose gradient this run spoils on purpose, to show that the comparison finds it. `source`: the model as it
    was made with `seed` before the ranks were forked, which saves each of them from tracing it.
    """
    spec = OptimizerSpec.of(optimizer)
    bound = TOLERANCE[plan.layout.precision] if tolerance is None else tolerance
    # First: the engine of a model that was not captured takes the module's own tensors.
    serial = _Serial(make, seed, batch, loss, plan, spec, world.device) if world.rank == 0 else None
    engine = Engine(plan, copy.deepcopy(make) if isinstance(make, nn.Module) else make, batch, loss, world, spec, seed=seed, source=source)
    random = [op.site for op in engine.parts.graph.operators if draws(op)]
    if random:
        raise ModelError(
            f"{plan.model} draws random numbers at {', '.join(random[:3])}{' ...' if len(random) > 3 else ''}, which a serial run draws "
            "differently, so there is nothing to compare; verify it with dropout 0"
        )
    seen = _Comparison(bound)
    for step in range(steps):
        result = engine.forward_backward(batch, want_inputs=not plan.uncaptured)
        if sabotage and (spoiled := engine.gradient(sabotage)) is not None:
            spoiled.mul_(1.001)
        loss_value = engine.loss_of(result)
        gradients = engine.full_gradients()
        inputs = engine.full_input_gradients(result) if not plan.uncaptured else {}
        engine.update()
        state = full_state(engine.parts, engine.pieces(), world.everyone)
        if serial is None:
            continue
        assert gradients is not None
        assert state is not None
        assert inputs is not None
        if serial.double:
            with _Double():  # type: ignore[no-untyped-call]  # torch's own constructor has no types
                want, want_inputs = serial.step()
        else:
            want, want_inputs = serial.step()
        seen.add("loss", "", torch.tensor(loss_value), torch.tensor(want), abs(want), step)
        trained = {name: p for name, p in serial.model.named_parameters() if p.requires_grad}
        largest = max((p.grad.abs().max().item() for p in trained.values() if p.grad is not None and p.numel()), default=0.0)
        floor = largest * _FLOOR[plan.layout.precision]
        for name, p in trained.items():
            seen.add("gradients", name, gradients.get(name), torch.zeros_like(p) if p.grad is None else p.grad, floor, step)
        for path, gradient in want_inputs.items():
            if inputs:
                seen.add("input_gradients", path, inputs.get(path), gradient, floor, step)
        if plan.uncaptured:
            # Which parameters a step uses is not known before it: the engine gives each a gradient, zero where it is not used.
            for p in trained.values():
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
        serial.update()
        heaviest = max((p.abs().max().item() for p in serial.model.parameters() if p.numel()), default=0.0)
        for name, tensor in (*serial.model.named_parameters(), *serial.model.named_buffers()):
            if name in state:
                seen.add("weights", name, state[name], tensor.detach(), heaviest, step)
    if serial is None:
        return None
    return Verification(seen.first is None, seen.worst, seen.first, plan.replicated_operators, bound)
