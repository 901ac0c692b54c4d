"""Verification of a plan: a parallel run is compared with a serial one, from the same weights and data, step by step.

Every rank runs the engine; rank 0 also runs the user's own module, eagerly in one process, on the whole batch with the same optimizer, and
compares the loss, every gradient (of parameters and of floating-point inputs) and every updated weight and buffer. Then every rank compares
its own gradients, weights and optimizer state (`run/proof/shard_differences`).
In float64 both sides compute in float64 throughout: casts to float32 inside the model would hide errors.

If the model couples samples (batch norm), microbatches change what is trained: the serial run then has the same microbatches, whose losses
are weighted by samples, and its distance from the whole batch is measured as well.

A difference is relative to the largest magnitude of its own tensor. Some tensors are zero but for rounding (the gradient of a bias before
batch norm, or of attention keys); only there is the difference compared with the rounding noise of the serial run, which is measured
(`run/proof/serial`), not assumed. In 16 bits the serial run has the same precision, and every difference is compared with that noise.

If gradients are compressed, their sums before compression are compared with the serial run's, the received gradients with an emulated
exchange, and the weights with the serial model's after an update with the emulated gradients (`run/proof/compressed_gradients`). If updates
are stale, the serial model's are too.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.capture.capture import Loss
from weft.errors import ModelError, WeftError
from weft.lower.kernels.draws import SUPPORTED
from weft.model.batch.additive import coupling_words, local_statistics
from weft.model.derivatives import without_gradient
from weft.model.sharding.sharding import FREE_LINKS
from weft.ops import draws
from weft.plan.beside import LENGTHS
from weft.plan.compression import Compression
from weft.plan.layout import Layout
from weft.plan.plan import Plan
from weft.plan.precision import PRECISIONS
from weft.run.build import Source, Traced
from weft.run.engine import Engine, OnDevice
from weft.run.forms import of_every_split
from weft.run.proof.division import division_of, warnings
from weft.run.proof.eight_bits import wrong_product
from weft.run.proof.everywhere import distances, farthest
from weft.run.proof.lossy import Lossy
from weft.run.proof.serial import EPSILON, SCALE, Noise, Serial, Traits, Values
from weft.run.proof.verification import Verification
from weft.run.sharded_state import full_state, gradient_pieces
from weft.run.state.optimizer import OptimizerSpec
from weft.run.step.dispatch import Result
from weft.world.launch import launch
from weft.world.world import World

# With products that round their operands, these hold if no noise can be measured.
TOLERANCE = {"float64": 1e-9, "float32": 1e-3, "tf32": 5e-2, "bfloat16": 5e-2, "float16": 5e-2, "float8": 0.2}
# In 16 bits differences are multiples of the noise: at most 1.7 in 31,000 tensors of five networks, two precisions and four layouts.
_NARROW_FACTOR = 4.0
# A parallel run rounds where no serial run does. Its distance was at most 1.6 times that of the perturbed serial runs over 30 models; of a
# tensor with one element all perturbed runs may by chance be close.
_NOISE_FACTOR = 16


def relative_error(got: Tensor, want: Tensor, floor: float = 0.0) -> float:
    """Return the largest difference over the largest finite magnitude (of the tensor, at least `floor`).

    Infinite for NaN, another shape, or an infinity in one of the two only; equal infinities (of a mask) are no difference.
    """
    return _over(farthest(got, want), want, floor)


def _over(difference: float, want: Tensor, floor: float) -> float:
    if not difference or difference == float("inf"):
        return difference
    bound = max(_finite_largest(want), floor)
    return difference / bound if bound else difference


def _finite_largest(x: Tensor) -> float:
    x = torch.view_as_real(x.resolve_conj()).double() if x.is_complex() else x.double()
    return float(torch.where(x.isfinite(), x, 0.0).abs().max())


@dataclass
class Comparison:
    """Collects errors step by step. `noise(kind, name, reference, step)`: `RoundingNoise.max_distance`; called only above the tolerance.

    `below_float64`: AdamW then makes full steps of gradients that are rounding noise, whereas in float64 its epsilon keeps them small; so
    weights are relative to the largest weight. `rounding`: the unit of rounding of 16 bits, where differences are compared with the noise
    itself, and `tolerance` and errors are multiples of it; else 0. `optimizer_gain`: by which it propagates a difference of a gradient to
    the weights; 0 if unknown.
    """

    tolerance: float
    noise: Callable[[str, str, Tensor, int], float]
    narrow: bool = False
    rounding: float = 0.0
    gain: float = 0.0
    full_step: float = 0.0  # the noise of the noisiest weight
    gradients: dict[str, float] = field(default_factory=dict)  # by parameter, the largest difference of its gradient so far
    worst: dict[str, float] = field(default_factory=dict)
    first: str | None = None

    def step(self, step: int, got: Values, want: Values) -> None:
        """Compare all tensors that both runs have; a gradient that only the serial run has is a difference."""
        if self.rounding:  # AdamW makes full steps of gradients that are noise, for any parameter
            weights = {name: x.cpu() for name, x in want["weights"].items() if x.numel()}
            self.full_step = max((self.noise("weights", name, x, step) for name, x in weights.items()), default=0.0)
        for kind, tensors in want.items():
            largest = _largest_of(kind, want)
            for name, tensor in tensors.items():
                value = got.get(kind, {}).get(name)
                if value is not None or kind == "gradients":
                    self._add(kind, name, float("inf") if value is None else farthest(value.cpu(), tensor.cpu()), tensor, largest, step)

    def everywhere(self, step: int, kind: str, far: Mapping[str, Sequence[float]], want: Values) -> None:
        """Compare the shards of every rank. `differences`: by name, those of each rank, see `run/proof/shard_differences`."""
        largest = _largest_of(kind, want)
        for name, rank_differences in far.items():
            for rank, difference in enumerate(rank_differences):
                self._add(kind, name, difference, want[kind][name], largest, step, f" on rank {rank}")

    def exchanged(self, step: int, error: float) -> None:
        """Record the error of received compressed gradients relative to the emulated exchange."""
        self.worst["exchange"] = max(self.worst.get("exchange", 0.0), error)
        if self.first is None and not error <= self.tolerance:
            self.first = f"what arrived of compressed gradients in step {step + 1}: relative error {error:.1e}"

    def _add(self, kind: str, name: str, difference: float, want: Tensor, largest: float, step: int, where: str = "") -> None:
        explanation, want = "", want.cpu()
        if kind == "gradients":
            self.gradients[name] = max(self.gradients.get(name, 0.0), difference)
        error = _over(difference, want, largest if self.narrow and kind == "weights" else 0.0)
        if self.rounding:
            error = self._in_noise(kind, name, difference, want, step)
        elif self.tolerance < error < float("inf"):
            # Noise excuses at most the tolerance of the largest tensor of its kind: more than that is not rounding. A weight may differ by
            # its gradient's differences so far too, propagated by the updates, since those were judged themselves.
            noise = _NOISE_FACTOR * self.noise(kind, name, want, step)
            propagated = self.gain * (step + 1) * self.gradients.get(name, 0.0) if kind == "weights" else 0.0
            error = _over(difference, want, min(noise / self.tolerance, max(largest, propagated / self.tolerance)))
            if error > self.tolerance and _over(difference, want, noise / self.tolerance) <= self.tolerance:
                explanation = (
                    f"; serial runs whose weights differ by one unit of rounding do so too ({noise / _NOISE_FACTOR:.1e}), so the "
                    "model is ill-conditioned here: batch norm over two or three values, for example"
                )
        if kind == "loss" and not torch.isfinite(want).all():
            explanation = f"; the serial run's is {float(want)}, so there is nothing to compare: verify on a batch where it is a number"
        self._tell(kind, name, error, step, where, explanation)

    def _in_noise(self, kind: str, name: str, difference: float, want: Tensor, step: int) -> float:
        """Return a difference in multiples of the noise, which is at least one rounding of the largest element over the tolerance."""
        if not difference or difference == float("inf"):
            return difference
        noise = self.full_step if kind == "weights" else self.noise(kind, name, want, step)
        noise = max(noise, self.rounding * _finite_largest(want) / self.tolerance)
        return difference / noise if noise else float("inf")

    def _tell(self, kind: str, name: str, error: float, step: int, where: str, why: str = "") -> None:
        self.worst[kind] = max(self.worst.get(kind, 0.0), error)
        if self.first is None and not error <= self.tolerance:
            unit = "times the rounding noise" if self.rounding else ""
            subject = f"{kind} of {name}{where}" if name else f"{kind}{where}"
            self.first = f"{subject} in step {step + 1}: {'relative error ' if name and not unit else ''}{error:.1e} {unit}".rstrip() + why


def _largest_of(kind: str, values: Values) -> float:
    """Return the largest magnitude of this kind of tensor; gradients of parameters and of inputs are one kind."""
    kinds = ("gradients", "input_gradients") if "gradients" in kind else (kind,)
    tensors = [x for kind in kinds for x in values[kind].values() if x.numel() and x.is_floating_point()]
    return max((_finite_largest(x) for x in tensors), default=0.0)


@dataclass(frozen=True)
class Options:
    """Options of a verification.

    `tolerance`: None for that of the precision. `sabotage`: factors by which the run multiplies the gradients of named parameters, to show
    that the comparison finds it. `device_memory`: see `Engine`.
    """

    steps: int = 2
    seed: int = 0
    tolerance: float | None = None
    optimizer: OptimizerSpec | str | Mapping[str, Any] = "adamw"
    sabotage: Mapping[str, float] | None = None
    device_memory: float = 0.0


class _Run:
    """A rank's engine and, on rank 0, the serial run; every rank makes the same steps."""

    def __init__(self, world: World, plan: Plan, make: Any, batch: Any, loss: Loss | None, source: Source | None, options: Options) -> None:
        self.world, self.plan, self.options = world, plan, options
        self.batch = of_every_split(batch, plan.layout) if plan.layout.split == LENGTHS else batch
        self.spec = OptimizerSpec.of(options.optimizer)
        model = source or (copy.deepcopy(make) if isinstance(make, nn.Module) else make)
        device = OnDevice(memory=options.device_memory, scale=SCALE)
        self.engine = Engine(plan, model, batch, loss, world, self.spec, seed=options.seed, device=device)
        self.coupled = self._coupled()  # why microbatches may train something else than the whole batch; empty if they do not
        self._traits = self._seen_by_capture()
        self._new = partial(Serial, make, options.seed, batch, loss, plan, self.spec, world.device)
        self.serial = self.new_serial() if world.rank == 0 else None
        self._noise = Noise(self.new_serial)
        compression = Compression.parse(plan.layout.compress)
        self.lossy = Lossy(self.engine.gradients, compression) if compression.kind != "none" else None
        measured = options.tolerance is None and self.lossy is None and PRECISIONS[plan.layout.precision].rounds
        default_tolerance = _NARROW_FACTOR if measured else TOLERANCE[plan.layout.precision]
        self.bound = default_tolerance if options.tolerance is None else options.tolerance
        rounding = EPSILON[plan.layout.precision] if measured else 0.0
        narrow = plan.layout.precision != "float64"
        self.seen = Comparison(self.bound, self._noise_of, narrow, rounding, 0.0 if narrow else self.spec.gain)
        self.whole_batch: dict[str, float] = {}  # distance of the first step from that on the whole batch

    def _coupled(self) -> str:
        layout = self.plan.layout
        if layout.microbatches == 1 and layout.batch_norm == "exact":
            return ""
        if self.plan.uncaptured:
            return "the model was not captured, so it is unknown whether they do"
        return coupling_words(self.engine.parts.coupled or local_statistics(self.engine.parts.graph))

    def _seen_by_capture(self) -> Traits:
        """Return traits of the captured model. Raises ModelError if it draws random numbers that a serial run cannot reproduce."""
        plan, parts = self.plan, self.engine.parts
        random = [op for op in parts.graph.operators if draws(op)]
        unsupported = [op.site for op in random if op.target.split(".")[1] not in SUPPORTED]
        if unsupported:
            raise _drawing(plan, f" at {', '.join(unsupported[:3])}{' ...' if len(unsupported) > 3 else ''}")
        inputs, non_differentiable = parts.graph.inputs, without_gradient(parts.graph) | parts.counted
        return Traits(
            every=bool(plan.uncaptured),
            without_samples=frozenset(v.name for v in inputs if not v.batched),
            # Input gradients of uncaptured models are not compared: some inputs may have none (a loss's targets).
            closed=frozenset(v.name for v in inputs if v.value in non_differentiable or plan.uncaptured),
            draws=len(random),
            folds=parts.folds,
            sizes=plan.microbatch_sizes if self.coupled else (),
            replicas=plan.layout.data if plan.layout.local_statistics else 1,
        )

    def new_serial(self, at_once: bool = False) -> Serial:
        """Build a serial run, on request without microbatches, even if they train something else."""
        return self._new(replace(self._traits, sizes=(), replicas=1) if at_once else self._traits)

    def _noise_of(self, kind: str, name: str, reference: Tensor, step: int) -> float:
        # The perturbed runs are not compressed, so their weights differ.
        return 0.0 if self.lossy is not None and kind in ("weights", "optimizer") else self._noise.of(kind, name, reference, step)

    def step(self, step: int) -> bool:
        """Run and compare one step of both runs; return whether another step is worthwhile."""
        engine, graph, everyone = self.engine, self.engine.parts.graph, self.world.everyone
        result = self._forward_backward()
        if self.lossy is not None:
            exchange_error = _over_ranks(self.lossy.compare(), self.world)
            if self.serial is not None:
                self.seen.exchanged(step, exchange_error)
            self.lossy.show("summed")
        for name, factor in (self.options.sabotage or {}).items():
            if (gradient := engine.gradient(name)) is not None:
                gradient.mul_(factor)
        loss = engine.loss_of(result)
        gradients, emulated = engine.full_gradients(), self._emulated()
        comparable = not self.plan.uncaptured and self.plan.layout.split != LENGTHS  # else they are those of the last microbatch
        inputs = engine.full_input_gradients(result) if comparable else {}
        expected = self._serial_step(emulated)
        differences = {"gradients": distances(graph.parameters, gradient_pieces(engine.parts), expected.get("gradients"), everyone)}
        losses = everyone.all_gather(torch.tensor([loss], dtype=torch.float64, device=self.world.device))
        if self.lossy is not None:
            self.lossy.show("arrived")
        engine.update()
        pieces = engine.pieces(drain=False)
        state = full_state(engine.parts, pieces, everyone, every=True)
        differences["weights"] = distances((*graph.parameters, *graph.buffers), pieces, expected.get("weights"), everyone)
        of_slots = [distances(graph.parameters, pieces, expected.get("optimizer"), everyone, slot) or {} for slot in self.spec.slots]
        differences["optimizer"] = {name: each for of_slot in of_slots for name, each in of_slot.items()}
        if self.serial is not None:
            assert gradients is not None
            assert state is not None
            assert inputs is not None
            differences["loss"] = {"": [farthest(x, expected["loss"][""]) for x in losses.cpu()]}
            total = {"": torch.tensor(loss, dtype=torch.float64)}
            self._compare(step, {"loss": total, "gradients": gradients, "input_gradients": inputs, "weights": state}, differences, expected)
        return not math.isnan(loss)  # with NaN weights further steps show nothing, and a model may raise; all ranks agree

    def _forward_backward(self) -> Result:
        try:
            with _explained(self.plan):
                return self.engine.forward_backward(self.batch, want_inputs=not self.plan.uncaptured)
        except WeftError:
            raise
        except Exception:
            # It may be the model's own mistake (an index out of range, mismatched dtypes), which a serial step shows.
            with _in_one_process(self.plan):
                self.new_serial().step()
            raise

    def _emulated(self) -> dict[str, Tensor] | None:
        """Return the gradients of the emulated exchange on rank 0; None if gradients are not compressed."""
        if self.lossy is None:
            return None
        self.lossy.show("emulated")
        gradients = self.engine.full_gradients()
        self.lossy.show("summed")
        return gradients

    def _serial_step(self, gradients: Mapping[str, Tensor] | None) -> Values:
        if self.serial is None:
            return {}
        generator_states = _random_state(self.world.device)
        with _explained(self.plan), _in_one_process(self.plan):
            expected = self.serial.step(gradients)
        if self.serial.drew_otherwise or not torch.equal(generator_states, _random_state(self.world.device)):
            raise _drawing(self.plan)
        return expected

    def _compare(self, step: int, got: Values, far: Mapping[str, Mapping[str, Sequence[float]] | None], wanted: Values) -> None:
        """Compare one step. `differences`: by kind and name, of each rank's shards from the serial run's."""
        if self.engine.scale.scaled and not all(x.isfinite().all() for x in wanted["gradients"].values()):
            # Both skip the step, as their weights show; which gradients overflow depends on the order of summation.
            wanted = {kind: values for kind, values in wanted.items() if "gradients" not in kind}
            far = {kind: of_kind for kind, of_kind in far.items() if "gradients" not in kind}
        self.seen.step(step, got, wanted)
        for kind, of_kind in far.items():
            self.seen.everywhere(step, kind, of_kind or {}, wanted)
        if self.coupled and not step:
            with _explained(self.plan), _in_one_process(self.plan):
                self.whole_batch = _apart(got, self.new_serial(at_once=True).step())

    def verification(self, source: Source | None) -> Verification | None:
        """Return the result on rank 0, None elsewhere."""
        memory = self.engine.fullest_memory()
        if self.serial is None:
            return None
        plan, layout, comparison = self.plan, self.plan.layout, self.seen
        shares = division_of(plan, self.engine.parts)
        texts = warnings(plan, shares, source is not None and source.prices == FREE_LINKS)
        return Verification(
            comparison.first is None, comparison.worst, comparison.first, plan.replicated_operators, self.bound, memory,
            str(replace(layout, precision="float32")), self.options.steps, layout.precision, shares,
            (*texts, *_apart_words(layout, self.coupled, self.whole_batch, TOLERANCE[layout.precision])), whole_batch=self.whole_batch,
            in_noise=bool(comparison.rounding),
        )  # fmt: skip


def verify_on_rank(
    world: World, plan: Plan, make: Any, batch: Any, loss: Loss | None, source: Source | None = None, options: Options | None = None
) -> Verification | None:
    """Verify a plan, called on every rank; return the result on rank 0, None elsewhere.

    `source`: the model built with the options' seed before the ranks were forked, which spares each of them the tracing.
    """
    exact, eight_bits = None, bool(PRECISIONS[plan.layout.precision].linears)
    if eight_bits:  # its noise hides errors: verify the same layout in float64, and each product against its bound
        wide = replace(plan, layout=replace(plan.layout, precision="float64"))
        exact = verify_on_rank(world, wide, make, batch, loss, source, replace(options or Options(), tolerance=None))
    run = _Run(world, plan, make, batch, loss, source, options or Options())
    wrong = wrong_product(run.engine.parts, world) if eight_bits else ""
    # Enough steps to compute on weights with a stale update.
    for step in range(max(run.options.steps, plan.layout.staleness + 2 if plan.layout.staleness else 0)):
        if not run.step(step):
            break
    result = run.verification(source)
    if result is None or not result.ok or (not wrong and (exact is None or exact.ok)):
        return result
    return replace(result, ok=False, first_difference=wrong or f"the same layout in float64: {exact.first_difference if exact else ''}")


def verify_plan(
    plan: Plan,
    make: Any,
    batch: Any,
    loss: Loss | None,
    source: Traced,
    *,
    device: str = "cpu",
    timeout_s: float | None = None,
    cut_everything: bool = False,
    **options: Any,
) -> Verification:
    """Launch the plan's ranks, which inherit the captures of `source`, and verify them; `options`: the fields of `Options`.

    `cut_everything`: shard wherever the rules allow, instead of the plan's own shards.

    Raises:
        RankError: a rank failed.
    """
    if cut_everything:
        plan, source = replace(plan, shards=()), replace(source, prices=FREE_LINKS)
    source.prepare(plan, batch, loss)
    chosen = Options(**options)

    def on_rank(world: World) -> dict[str, Any] | None:
        verification = verify_on_rank(world, plan, make, batch, loss, source, chosen)
        return None if verification is None else vars(verification)

    return Verification(**launch(on_rank, plan.layout.num_ranks, device=device, timeout_s=timeout_s, show=False)[0])


def _apart(got: Values, want: Values) -> dict[str, float]:
    """Return the distances of loss and gradients, each as the norm of the difference over the norm of the expected values."""
    errors = {}
    for kind in ("loss", "gradients"):
        squared_distance = sum(float((got[kind][name].cpu().double() - x.cpu().double()).square().sum()) for name, x in want[kind].items())
        size = sum(float(x.double().square().sum()) for x in want[kind].values())
        errors[kind] = math.sqrt(squared_distance / size) if size else math.sqrt(squared_distance)
    return errors


def _apart_words(layout: Layout, why: str, whole_batch: Mapping[str, float], bound: float) -> tuple[str, ...]:
    """Return a warning that microbatches or per-replica statistics change what is trained, with the amount; empty if they do not."""
    if all(x <= bound for x in whole_batch.values()):
        return ()
    cause = "microbatches change" if layout.batch_norm == "exact" else "batch_norm=local changes"
    by = " and ".join(f"{kind} by {100 * x:.3g} %" for kind, x in whole_batch.items())
    return (
        f"{cause} what is trained: {why}; so the serial run has the same, and the first step differs from that on the whole batch in {by}",
    )


def _random_state(device: torch.device) -> Tensor:
    """Return the states of torch's generators on host and device."""
    of_host = torch.random.get_rng_state()
    return torch.cat([of_host, torch.cuda.get_rng_state(device)]) if device.type == "cuda" else of_host


def _over_ranks(value: float, world: World) -> float:
    """Return the maximum over ranks."""
    largest = torch.tensor(value, dtype=torch.float64, device=world.device)
    world.everyone.all_reduce(largest, op="max")
    return float(largest)


def _drawing(plan: Plan, where: str = "") -> ModelError:
    return ModelError(
        f"{plan.model} draws random numbers{where}, which a serial run draws differently, so there is nothing to compare; verify it "
        "without what draws: dropout 0, or noise that comes with the batch"
    )


@contextmanager
def _in_one_process(plan: Plan) -> Iterator[None]:
    """Raise ModelError if the model cannot be trained in one process either."""
    try:
        yield
    except WeftError:
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and _of_width(plan, error):
            raise
        message = str(error).partition("\n")[0]
        parts = sorted(set(plan.microbatch_sizes))
        remedy = "make it train there first"
        if len(plan.microbatch_sizes) > 1:
            remedy += f", on {' and '.join(map(str, parts))} of the batch's {sum(plan.microbatch_sizes)} samples too, or use microbatches=1"
        raise ModelError(f"{plan.model} raises when plain PyTorch trains it in one process: {message}; {remedy}") from error


def _of_width(plan: Plan, error: Exception) -> bool:
    """Return whether the error says that an operator has no float64 kernel."""
    message = str(error).partition("\n")[0]
    matches = any(word in message for word in ("Double", "float64", "double")) and "modified by an inplace operation" not in message
    matches = matches and not any(f"got {kind} " in message for kind in ("Long", "Int", "Bool"))  # integers in a matrix product
    return matches and plan.layout.precision == "float64"


@contextmanager
def _explained(plan: Plan) -> Iterator[None]:
    """Raise ModelError if an operator of the model has no float64 kernel."""
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        if not _of_width(plan, error):
            raise
        message = str(error).partition("\n")[0]
        raise ModelError(
            f"an operator of {plan.model} cannot compute in float64 ({message}); verify it with dtype=float32 (--dtype float32)"
        ) from error
