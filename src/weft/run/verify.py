"""The proof: a parallel run against the serial one, from the same weights and data. In: a model, a plan, steps. Out: `Verification`.

Every rank runs the engine; rank 0 also runs the user's own module, eagerly and alone, over the same microbatches with the same
optimizer, and compares the loss, every gradient (of parameters and of floating-point inputs) and every updated weight and buffer.
In float64 both sides compute in float64 throughout: casts to float32 inside the model would hide what is looked for.

A difference counts against the largest magnitude of its own tensor. Some tensors are zero but for rounding (the gradient of a bias before
batch norm, or of attention keys), so that nothing they hold means anything; there, and only there, what is left is compared with the
rounding noise of the serial run, which is measured (`run/serial`), not assumed.

Where gradients are compressed, their sums before that are compared with the serial run's, what arrived with an emulation of the exchange,
and the weights with the serial model's after an update with the emulated gradients (`run/lossy`). Where updates come late, those of the
serial model do too.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import ModelError, WeftError
from weft.lower.kernels.alike import SUPPORTED
from weft.model.capture import Loss
from weft.model.derivatives import without_gradient
from weft.model.stages import draws
from weft.plan.compression import Compression
from weft.plan.plan import Plan
from weft.run.build import Source
from weft.run.engine import Engine
from weft.run.lossy import Lossy
from weft.run.optimizer import OptimizerSpec
from weft.run.serial import Noise, Serial, Values
from weft.run.state import full_state
from weft.world.world import World

TOLERANCE = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 5e-2}
# A parallel run rounds in places where no serial run does. Its distance was at most 1.6 times that of the perturbed serial runs over 30
# models; where a tensor has one element, all of those may by chance lie close together.
_NOISE_FACTOR = 16


@dataclass(frozen=True)
class Verification:
    """The result: worst relative error by what was compared, and the first tensor above the tolerance.

    `memory`: bytes that the fullest device held at most, by part and in `total`; empty where nothing counts them.
    """

    ok: bool
    worst: dict[str, float]
    first_difference: str | None
    replicated_operators: tuple[str, ...]
    tolerance: float
    memory: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        errors = ", ".join(f"{name} {error:.1e}" for name, error in self.worst.items())
        return f"{'equal' if self.ok else f'differs first in {self.first_difference}'} ({errors}; tolerance {self.tolerance:.0e})"


def relative_error(got: Tensor, want: Tensor, floor: float = 0.0) -> float:
    """Largest difference over the largest finite magnitude (of the tensor, at least `floor`).

    Infinite for NaN, another shape, or an infinity that only one has; what both have alike (a mask's) is no difference.
    """
    if got.shape != want.shape:
        return float("inf")
    if not want.numel():
        return 0.0
    got, want = (torch.view_as_real(x.resolve_conj()).double() if x.is_complex() else x.double() for x in (got, want))
    difference = torch.where(got == want, 0.0, got - want).abs().max().item()
    if not math.isfinite(difference):
        return float("inf")
    bound = max(_finite_largest(want), floor)
    return difference / bound if bound else difference


def _finite_largest(x: Tensor) -> float:
    return float(torch.where(x.isfinite(), x, 0.0).abs().max())


@dataclass
class Comparison:
    """Collects errors, step by step. `noise(kind, name, reference, step)`: see `run.serial.Noise.of`; asked only above the tolerance.

    `narrow`: computed in less than float64. AdamW then makes full steps of gradients that are rounding noise, up or down, where in float64
    its epsilon keeps them small; so weights are measured against the largest weight.
    """

    tolerance: float
    noise: Callable[[str, str, Tensor, int], float]
    narrow: bool = False
    worst: dict[str, float] = field(default_factory=dict)
    first: str | None = None

    def step(self, step: int, got: Values, want: Values) -> None:
        """Compare everything that both have; what the serial run has of gradients and the parallel run lacks is a difference."""
        for kind, tensors in want.items():
            largest = _largest(want, ("gradients", "input_gradients") if "gradients" in kind else (kind,))
            for name, tensor in tensors.items():
                if name in got[kind] or kind == "gradients":
                    self._add(kind, name, got[kind].get(name), tensor.cpu(), largest, step)

    def exchanged(self, step: int, error: float) -> None:
        """How far what arrived of compressed gradients is from what should have."""
        self.worst["exchange"] = max(self.worst.get("exchange", 0.0), error)
        if self.first is None and not error <= self.tolerance:
            self.first = f"what arrived of compressed gradients in step {step + 1}: relative error {error:.1e}"

    def _add(self, kind: str, name: str, got: Tensor | None, want: Tensor, largest: float, step: int) -> None:
        why = ""
        least = largest if self.narrow and kind == "weights" else 0.0
        error = float("inf") if got is None else relative_error(got.cpu(), want, least)
        if self.tolerance < error < float("inf") and got is not None:
            # What noise excuses stays under the tolerance of the largest tensor of its kind: more than that is not rounding.
            noise = _NOISE_FACTOR * self.noise(kind, name, want, step)
            error = relative_error(got.cpu(), want, min(noise / self.tolerance, largest))
            if error > self.tolerance and relative_error(got.cpu(), want, noise / self.tolerance) <= self.tolerance:
                why = (
                    f"; serial runs whose weights differ by one unit of rounding do so too ({noise / _NOISE_FACTOR:.1e}), so the "
                    "model is ill-conditioned here: batch norm over two or three values, for example"
                )
        if kind == "loss" and not torch.isfinite(want).all():
            why = f"; the serial run's is {float(want)}, so there is nothing to compare: verify on a batch where it is a number"
        self.worst[kind] = max(self.worst.get(kind, 0.0), error)
        if self.first is None and not error <= self.tolerance:
            self.first = (
                f"{kind} of {name} in step {step + 1}: relative error {error:.1e}" if name else f"{kind} in step {step + 1}: {error:.1e}"
            ) + why


def _largest(values: Values, kinds: tuple[str, ...]) -> float:
    found = [x for kind in kinds for x in values[kind].values() if x.numel() and x.is_floating_point()]
    return max((_finite_largest(x) for x in found), default=0.0)


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
    sabotage: Mapping[str, float] | None = None,
    source: Source | None = None,
    device_memory: float = 0.0,
) -> Verification | None:
    """Run on every rank; the verification on rank 0, None elsewhere.

    `sabotage`: parameters whose gradients this run multiplies by a number, to show that the comparison finds it. `source`: the model as
    it was made with `seed` before the ranks were forked, which saves each of them from tracing it. `device_memory`: see
    `Engine`.
    """
    spec = OptimizerSpec.of(optimizer)
    bound = TOLERANCE[plan.layout.precision] if tolerance is None else tolerance

    model = copy.deepcopy(make) if isinstance(make, nn.Module) else make
    engine = Engine(plan, model, batch, loss, world, spec, seed=seed, source=source, device_memory=device_memory)
    graph = engine.parts.graph
    closed = without_gradient(graph)

    def new_serial() -> Serial:
        whole = frozenset(v.name for v in graph.inputs if not v.batched)
        # Gradients of inputs are not compared where the model runs whole, and some of its operators may have none (a loss's targets).
        names = frozenset(v.name for v in graph.inputs if v.value in closed or plan.uncaptured)
        return Serial(make, seed, batch, loss, plan, spec, world.device, bool(plan.uncaptured), whole, names, len(random))

    random = [op for op in graph.operators if draws(op)]
    otherwise = [op.site for op in random if op.target.split(".")[1] not in SUPPORTED]
    if otherwise:
        raise _drawing(plan, f" at {', '.join(otherwise[:3])}{' ...' if len(otherwise) > 3 else ''}")
    engine.parts.draw.alike = bool(random)
    serial = new_serial() if world.rank == 0 else None
    noise = Noise(new_serial)
    how = Compression.parse(plan.layout.compress)
    lossy = Lossy(engine.gradients, how) if how.kind != "none" else None

    def noise_of(kind: str, name: str, reference: Tensor, step: int) -> float:
        # Runs that differ by rounding are not compressed: their weights are other ones.
        return 0.0 if lossy is not None and kind == "weights" else noise.of(kind, name, reference, step)

    seen = Comparison(bound, noise_of, plan.layout.precision != "float64")
    # As many steps as it takes to compute on weights whose update came late.
    for step in range(max(steps, plan.layout.staleness + 2 if plan.layout.staleness else 0)):
        try:
            with _explained(plan):
                result = engine.forward_backward(batch, want_inputs=not plan.uncaptured)
        except WeftError:
            raise
        except Exception:
            # Whether it is the model's own mistake: a look-up of a row that there is not, types that do not go together.
            with _in_plain_pytorch(plan):
                new_serial().step()
            raise
        off = 0.0
        if lossy is not None:
            off = _over_ranks(lossy.compare(), world)
            lossy.show("summed")
        for name, factor in (sabotage or {}).items():
            if (spoiled := engine.gradient(name)) is not None:
                spoiled.mul_(factor)
        loss_value = engine.loss_of(result)
        gradients, instead = engine.full_gradients(), None
        if lossy is not None:
            lossy.show("emulated")
            instead = engine.full_gradients()
            lossy.show("arrived")
        inputs = engine.full_input_gradients(result) if not plan.uncaptured else {}
        engine.update()
        state = full_state(engine.parts, engine.pieces(drain=False), world.everyone, every=True)
        if serial is not None:
            assert gradients is not None
            assert state is not None
            assert inputs is not None
            got = {"loss": {"": torch.tensor(loss_value)}, "gradients": gradients, "input_gradients": inputs, "weights": state}
            drawn = _random_state(world.device)
            with _explained(plan), _in_plain_pytorch(plan):
                wanted = serial.step(instead)
            if serial.drew_otherwise or not torch.equal(drawn, _random_state(world.device)):
                raise _drawing(plan)
            if lossy is not None:
                seen.exchanged(step, off)
            seen.step(step, got, wanted)
        if math.isnan(loss_value):
            break  # weights that are no numbers tell nothing more, and a model may raise at them; all ranks have the same loss
    memory = engine.fullest_memory()
    if serial is None:
        return None
    return Verification(seen.first is None, seen.worst, seen.first, plan.replicated_operators, bound, memory)


def _random_state(device: torch.device) -> Tensor:
    """Of torch's own generators, of the host and of the device."""
    of_host = torch.random.get_rng_state()
    return torch.cat([of_host, torch.cuda.get_rng_state(device)]) if device.type == "cuda" else of_host


def _over_ranks(value: float, world: World) -> float:
    """The largest that any rank has."""
    largest = torch.tensor(value, dtype=torch.float64, device=world.device)
    world.everyone.all_reduce(largest, op="max")
    return float(largest)


def _drawing(plan: Plan, where: str = "") -> ModelError:
    return ModelError(
        f"{plan.model} draws random numbers{where}, which a serial run draws differently, so there is nothing to compare; verify it "
        "without what draws: dropout 0, or noise that comes with the batch"
    )


@contextmanager
def _in_plain_pytorch(plan: Plan) -> Iterator[None]:
    """Raise ModelError where the model cannot be trained in one process either."""
    try:
        yield
    except WeftError:
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and _of_width(plan, error):
            raise
        said = str(error).partition("\n")[0]
        parts = sorted(set(plan.microbatch_sizes))
        remedy = "make it train there first"
        if len(plan.microbatch_sizes) > 1:
            remedy += f", on {' and '.join(map(str, parts))} of the batch's {sum(plan.microbatch_sizes)} samples too, or use microbatches=1"
        raise ModelError(f"{plan.model} raises when plain PyTorch trains it in one process: {said}; {remedy}") from error


def _of_width(plan: Plan, error: Exception) -> bool:
    """Whether an operator says that it has no float64."""
    said = str(error).partition("\n")[0]
    told = any(word in said for word in ("Double", "float64", "double")) and "modified by an inplace operation" not in said
    told = told and not any(f"got {kind} " in said for kind in ("Long", "Int", "Bool"))  # whole numbers where a product is asked for
    return told and plan.layout.precision == "float64"


@contextmanager
def _explained(plan: Plan) -> Iterator[None]:
    """Raise ModelError where an operator of the model has no float64."""
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        if not _of_width(plan, error):
            raise
        said = str(error).partition("\n")[0]
        raise ModelError(
            f"an operator of {plan.model} cannot compute in float64 ({said}); verify it with dtype=float32 (--dtype float32)"
        ) from error
