"""Verification of a plan: a parallel run is compared with a serial one, from the same weights and data, step by step.

Every rank runs the engine; rank 0 also runs the user's own module, eagerly in one process, on the whole batch with the same optimizer, and
compares the loss, every gradient (of parameters and of floating-point inputs) and every updated weight and buffer. Then every rank compares
its own gradients, weights and optimizer state (`run/verify/shard_differences`). In float64 both sides compute in float64 throughout: casts
to float32 inside the model would hide errors. If the model couples samples (batch norm), microbatches change what is trained: the serial
run then has the same microbatches, whose losses are weighted by samples, and its distance from the whole batch is measured as well.

A difference is relative to the largest magnitude of its own tensor. Some tensors are zero but for rounding (the gradient of a bias before
batch norm, or of attention keys); only there is the difference compared with the rounding noise of the serial run, which is measured
(`run/verify/serial`), not assumed. In 16 bits the serial run has the same precision, and every difference is compared with that noise.

If gradients are compressed, their sums before compression are compared with the serial run's, the received gradients with an emulated
exchange, and the weights with the serial model's after an update with the emulated gradients (`run/verify/compressed_gradients`). If
updates are stale, the serial model's are too.
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

from shardwise.capture.capture import Loss
from shardwise.errors import ModelError, ShardwiseError
from shardwise.lower.kernels.random_operators import SUPPORTED
from shardwise.model.batch.additive import describe_couplings, local_statistics_couplings
from shardwise.model.gradients import undifferentiable_inputs
from shardwise.model.sharding.sharding import FREE_LINKS
from shardwise.model.strides.autocast_dtypes import narrow_parameters
from shardwise.ops import is_random
from shardwise.plan.compatibility import SPLIT_BY_LENGTH
from shardwise.plan.ir.compression import Compression
from shardwise.plan.ir.precision import MIXED, PRECISIONS
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.run.engine import DeviceOptions, Engine
from shardwise.run.rank_model.capture_cache import one_microbatch_per_split
from shardwise.run.rank_model.model_source import CachedModelSource, ModelSource
from shardwise.run.sharded_state import full_state, gradient_shards
from shardwise.run.state.optimizer import OptimizerSpec
from shardwise.run.step.dispatch import RunResult
from shardwise.run.verify.compressed_gradients import CompressedGradientCheck
from shardwise.run.verify.eight_bit_products import find_wrong_product
from shardwise.run.verify.serial import EPSILON, LOSS_SCALE, RoundingNoise, SerialRun, SerialTraits, StepValues
from shardwise.run.verify.shard_differences import differences_by_rank, finite_largest, max_difference, relative_difference
from shardwise.run.verify.sharded_shares import shares_by_axis, unproven_axes
from shardwise.run.verify.verification import Verification
from shardwise.world.launch.launch import launch
from shardwise.world.world import World

# With products that round their operands, these hold if no noise can be measured.
TOLERANCE = {"float64": 1e-9, "float32": 1e-3, "tf32": 5e-2, "bfloat16": 5e-2, MIXED: 5e-2, "float16": 5e-2}
TOLERANCE |= {"float8": 0.2, "float8-rows": 0.2}
# In 16 bits differences are multiples of the noise: at most 1.7 in 31,000 tensors of five networks, two precisions and four layouts.
_NARROW_FACTOR = 4.0
# A parallel run rounds where no serial run does. Its distance was at most 1.6 times that of the perturbed serial runs over 30 models; of a
# tensor with one element all perturbed runs may by chance be close.
_NOISE_FACTOR = 16


@dataclass
class StepComparison:
    """Collects errors step by step. `noise(kind, name, reference, step)`: `RoundingNoise.max_distance`; called only above the tolerance.

    `below_float64`: AdamW then makes full steps of gradients that are rounding noise, whereas in float64 its epsilon keeps them small; so
    weights are relative to the largest weight. `rounding`: the unit of rounding of 16 bits, where differences are compared with the noise
    itself, and `tolerance` and errors are multiples of it; else 0. `optimizer_gain`: by which it propagates a difference of a gradient to
    the weights; 0 if unknown.
    """

    tolerance: float
    noise: Callable[[str, str, Tensor, int], float]
    below_float64: bool = False
    rounding: float = 0.0
    optimizer_gain: float = 0.0
    max_weight_noise: float = 0.0  # the noise of the noisiest weight
    gradient_differences: dict[str, float] = field(default_factory=dict)  # by parameter, the largest difference of its gradient so far
    worst: dict[str, float] = field(default_factory=dict)
    first_difference: str | None = None

    def compare_step(self, step: int, actual: StepValues, expected: StepValues) -> None:
        """Compare all tensors that both runs have; a gradient that only the serial run has is a difference."""
        if self.rounding:  # AdamW makes full steps of gradients that are noise, for any parameter
            weights = {name: x.cpu() for name, x in expected["weights"].items() if x.numel()}
            self.max_weight_noise = max((self.noise("weights", name, x, step) for name, x in weights.items()), default=0.0)
        for kind, tensors in expected.items():
            largest = _largest_of(kind, expected)
            for name, tensor in tensors.items():
                value = actual.get(kind, {}).get(name)
                if value is not None or kind == "gradients":
                    self._add_difference(
                        kind, name, float("inf") if value is None else max_difference(value.cpu(), tensor.cpu()), tensor, largest, step
                    )

    def compare_shards(self, step: int, kind: str, differences: Mapping[str, Sequence[float]], expected: StepValues) -> None:
        """Compare the shards of every rank. `differences`: by name, those of each rank, see `run/verify/shard_differences`."""
        largest = _largest_of(kind, expected)
        for name, rank_differences in differences.items():
            for rank, difference in enumerate(rank_differences):
                self._add_difference(kind, name, difference, expected[kind][name], largest, step, f" on rank {rank}")

    def add_exchange_error(self, step: int, error: float) -> None:
        """Record the error of received compressed gradients relative to the emulated exchange."""
        self.worst["exchange"] = max(self.worst.get("exchange", 0.0), error)
        if self.first_difference is None and not error <= self.tolerance:
            self.first_difference = f"what arrived of compressed gradients in step {step + 1}: relative error {error:.1e}"

    def _add_difference(
        self, kind: str, name: str, difference: float, expected: Tensor, largest: float, step: int, where: str = ""
    ) -> None:
        explanation, expected = "", expected.cpu()
        if kind == "gradients":
            self.gradient_differences[name] = max(self.gradient_differences.get(name, 0.0), difference)
        error = relative_difference(difference, expected, largest if self.below_float64 and kind == "weights" else 0.0)
        if self.rounding:
            error = self._in_noise(kind, name, difference, expected, step)
        elif self.tolerance < error < float("inf"):
            # Noise excuses at most the tolerance of the largest tensor of its kind: more than that is not rounding. A weight may differ by
            # its gradient's differences so far too, propagated by the updates, since those were judged themselves.
            noise = _NOISE_FACTOR * self.noise(kind, name, expected, step)
            propagated = self.optimizer_gain * (step + 1) * self.gradient_differences.get(name, 0.0) if kind == "weights" else 0.0
            error = relative_difference(difference, expected, min(noise / self.tolerance, max(largest, propagated / self.tolerance)))
            if error > self.tolerance and relative_difference(difference, expected, noise / self.tolerance) <= self.tolerance:
                explanation = (
                    f"; serial runs whose weights differ by one unit of rounding do so too ({noise / _NOISE_FACTOR:.1e}), so the "
                    "model is ill-conditioned here: batch norm over two or three values, for example"
                )
        if kind == "loss" and not torch.isfinite(expected).all():
            explanation = f"; the serial run's is {float(expected)}, so there is nothing to compare: verify on a batch where it is a number"
        self._record_error(kind, name, error, step, where, explanation)

    def _in_noise(self, kind: str, name: str, difference: float, expected: Tensor, step: int) -> float:
        """Return a difference in multiples of the noise, which is at least one rounding of the largest element over the tolerance."""
        if not difference or difference == float("inf"):
            return difference
        noise = self.max_weight_noise if kind == "weights" else self.noise(kind, name, expected, step)
        noise = max(noise, self.rounding * finite_largest(expected) / self.tolerance)
        return difference / noise if noise else float("inf")

    def _record_error(self, kind: str, name: str, error: float, step: int, where: str, why: str = "") -> None:
        self.worst[kind] = max(self.worst.get(kind, 0.0), error)
        if self.first_difference is None and not error <= self.tolerance:
            unit = "times the rounding noise" if self.rounding else ""
            subject = f"{kind} of {name}{where}" if name else f"{kind}{where}"
            self.first_difference = (
                f"{subject} in step {step + 1}: {'relative error ' if name and not unit else ''}{error:.1e} {unit}".rstrip() + why
            )


def _largest_of(kind: str, values: StepValues) -> float:
    """Return the largest magnitude of this kind of tensor; gradients of parameters and of inputs are one kind."""
    kinds = ("gradients", "input_gradients") if "gradients" in kind else (kind,)
    tensors = [x for kind in kinds for x in values[kind].values() if x.numel() and x.is_floating_point()]
    return max((finite_largest(x) for x in tensors), default=0.0)


@dataclass(frozen=True)
class Options:
    """Options of a verification.

    `tolerance`: None for that of the precision. `sabotage`: factors by which the run multiplies the gradients of named parameters, to show
    that the comparison finds it. `device_memory`: see `Engine`. `repeats_step`: one more step, not compared, shows training's memory.
    """

    steps: int = 2
    seed: int = 0
    tolerance: float | None = None
    optimizer: OptimizerSpec | str | Mapping[str, Any] = "adamw"
    sabotage: Mapping[str, float] | None = None
    device_memory: float = 0.0
    repeats_step: bool = False


def find_coupling(engine: Engine) -> str:
    """Return why microbatches may train something else than the whole batch; empty if they do not."""
    layout = engine.plan.layout
    if layout.microbatches == 1 and layout.batch_norm == "exact":
        return ""
    if engine.plan.uncaptured:
        return "the model was not captured, so it is unknown whether they do"
    return describe_couplings(engine.rank_model.couplings or local_statistics_couplings(engine.rank_model.graph))


def serial_traits(engine: Engine) -> SerialTraits:
    """Return traits of the captured model. Raises ModelError if it draws random numbers that a serial run cannot reproduce."""
    plan, parts = engine.plan, engine.rank_model
    random = [op for op in parts.graph.operators if is_random(op)]
    unsupported = [op.site for op in random if op.target.split(".")[1] not in SUPPORTED]
    if unsupported:
        raise _random_draws_error(plan, f" at {', '.join(unsupported[:3])}{' ...' if len(unsupported) > 3 else ''}")
    inputs, non_differentiable = parts.graph.inputs, undifferentiable_inputs(parts.graph) | parts.divisor_inputs
    return SerialTraits(
        fills_missing_gradients=bool(plan.uncaptured),
        unbatched_inputs=frozenset(v.name for v in inputs if not v.batched),
        # Input gradients of uncaptured models are not compared: some inputs may have none (a loss's targets).
        non_differentiable_inputs=frozenset(v.name for v in inputs if v.value in non_differentiable or plan.uncaptured),
        num_draws=len(random),
        sample_folds=parts.sample_folds,
        microbatch_sizes=plan.microbatch_sizes if find_coupling(engine) else (),
        num_replicas=plan.layout.data if plan.layout.local_statistics_axes else 1,
        narrow_parameters=narrow_parameters(parts.graph) if PRECISIONS[plan.layout.precision].held_dtype else frozenset(),
    )


class _VerificationRun:
    """A rank's engine and, on rank 0, the serial run; every rank makes the same steps."""

    def __init__(
        self, world: World, plan: Plan, make: Any, batch: Any, loss: Loss | None, source: ModelSource | None, options: Options
    ) -> None:
        self.world, self.plan, self.options = world, plan, options
        self.batch = one_microbatch_per_split(batch, plan.layout) if plan.layout.split == SPLIT_BY_LENGTH else batch
        self.optimizer_spec = OptimizerSpec.of(options.optimizer)
        model = source or (copy.deepcopy(make) if isinstance(make, nn.Module) else make)
        device = DeviceOptions(memory_limit_bytes=options.device_memory, initial_loss_scale=LOSS_SCALE)
        self.engine = Engine(plan, model, batch, loss, world, self.optimizer_spec, seed=options.seed, device=device)
        self.coupling = find_coupling(self.engine)  # why microbatches may train something else than the whole batch; empty if they do not
        self._traits = serial_traits(self.engine)
        self._make_serial = partial(SerialRun, make, options.seed, batch, loss, plan, self.optimizer_spec, world.device)
        self.serial = self.new_serial() if world.rank == 0 else None
        self._noise = RoundingNoise(self.new_serial)
        compression = Compression.parse(plan.layout.compress)
        self.compressed_check = CompressedGradientCheck(self.engine.gradients, compression) if compression.kind != "none" else None
        measured = options.tolerance is None and self.compressed_check is None and PRECISIONS[plan.layout.precision].rounds_operands
        default_tolerance = _NARROW_FACTOR if measured else TOLERANCE[plan.layout.precision]
        self.tolerance = default_tolerance if options.tolerance is None else options.tolerance
        rounding = EPSILON[plan.layout.precision] if measured else 0.0
        narrow = plan.layout.precision != "float64"
        self.comparison = StepComparison(
            self.tolerance, self._noise_of, narrow, rounding, 0.0 if narrow else self.optimizer_spec.rounding_gain
        )
        self.whole_batch: dict[str, float] = {}  # distance of the first step from that on the whole batch

    def new_serial(self, without_microbatches: bool = False) -> SerialRun:
        """Build a serial run, on request without microbatches, even if they train something else."""
        return self._make_serial(replace(self._traits, microbatch_sizes=(), num_replicas=1) if without_microbatches else self._traits)

    def _noise_of(self, kind: str, name: str, reference: Tensor, step: int) -> float:
        # The perturbed runs are not compressed, so their weights differ.
        return (
            0.0
            if self.compressed_check is not None and kind in ("weights", "optimizer")
            else self._noise.max_distance(kind, name, reference, step)
        )

    def step(self, step: int) -> bool:
        """Run and compare one step of both runs; return whether another step is worthwhile."""
        engine, graph, everyone = self.engine, self.engine.rank_model.graph, self.world.world_group
        result = self._forward_backward()
        if self.compressed_check is not None:
            exchange_error = _max_over_ranks(self.compressed_check.compare(), self.world)
            if self.serial is not None:
                self.comparison.add_exchange_error(step, exchange_error)
            self.compressed_check.set_gradients("summed")
        for name, factor in (self.options.sabotage or {}).items():
            if (gradient := engine.gradient(name)) is not None:
                gradient.mul_(factor)
        loss = engine.loss_of(result)
        gradients, emulated = engine.full_gradients(), self._emulated_gradients()
        comparable = not self.plan.uncaptured and self.plan.layout.split != SPLIT_BY_LENGTH  # else they are those of the last microbatch
        inputs = engine.full_input_gradients(result) if comparable else {}
        expected = self._serial_step(emulated)
        differences = {
            "gradients": differences_by_rank(graph.parameters, gradient_shards(engine.rank_model), expected.get("gradients"), everyone)
        }
        losses = everyone.all_gather(torch.tensor([loss], dtype=torch.float64, device=self.world.device))
        if self.compressed_check is not None:
            self.compressed_check.set_gradients("arrived")
        engine.update()
        pieces = engine.state_shards(drain=False)
        state = full_state(engine.rank_model, pieces, everyone, includes_all_buffers=True)
        differences["weights"] = differences_by_rank((*graph.parameters, *graph.buffers), pieces, expected.get("weights"), everyone)
        of_slots = [
            differences_by_rank(graph.parameters, pieces, expected.get("optimizer"), everyone, slot) or {}
            for slot in self.optimizer_spec.slots
        ]
        differences["optimizer"] = {name: each for of_slot in of_slots for name, each in of_slot.items()}
        if self.serial is not None:
            assert gradients is not None
            assert state is not None
            assert inputs is not None
            differences["loss"] = {"": [max_difference(x, expected["loss"][""]) for x in losses.cpu()]}
            total = {"": torch.tensor(loss, dtype=torch.float64)}
            self._compare(step, {"loss": total, "gradients": gradients, "input_gradients": inputs, "weights": state}, differences, expected)
        return not math.isnan(loss)  # with NaN weights further steps show nothing, and a model may raise; all ranks agree

    def _forward_backward(self) -> RunResult:
        try:
            with _explain_missing_float64(self.plan):
                return self.engine.forward_backward(self.batch, wants_input_gradients=not self.plan.uncaptured)
        except ShardwiseError:
            raise
        except Exception:
            # It may be the model's own mistake (an index out of range, mismatched dtypes), which a serial step shows.
            with _in_one_process(self.plan):
                self.new_serial().step()
            raise

    def _emulated_gradients(self) -> dict[str, Tensor] | None:
        """Return the gradients of the emulated exchange on rank 0; None if gradients are not compressed."""
        if self.compressed_check is None:
            return None
        self.compressed_check.set_gradients("emulated")
        gradients = self.engine.full_gradients()
        self.compressed_check.set_gradients("summed")
        return gradients

    def _serial_step(self, gradients: Mapping[str, Tensor] | None) -> StepValues:
        if self.serial is None:
            return {}
        generator_states = _random_state(self.world.device)
        with _explain_missing_float64(self.plan), _in_one_process(self.plan):
            expected = self.serial.step(gradients)
        if self.serial.drew_differently or not torch.equal(generator_states, _random_state(self.world.device)):
            raise _random_draws_error(self.plan)
        return expected

    def _compare(
        self, step: int, actual: StepValues, differences: Mapping[str, Mapping[str, Sequence[float]] | None], expected: StepValues
    ) -> None:
        """Compare one step. `differences`: by kind and name, of each rank's shards from the serial run's."""
        if self.engine.loss_scale.is_scaled and not all(x.isfinite().all() for x in expected["gradients"].values()):
            # Both skip the step, as their weights show; which gradients overflow depends on the order of summation.
            expected = {kind: values for kind, values in expected.items() if "gradients" not in kind}
            differences = {kind: of_kind for kind, of_kind in differences.items() if "gradients" not in kind}
        self.comparison.compare_step(step, actual, expected)
        for kind, of_kind in differences.items():
            self.comparison.compare_shards(step, kind, of_kind or {}, expected)
        if self.coupling and not step:
            with _explain_missing_float64(self.plan), _in_one_process(self.plan):
                self.whole_batch = _relative_distances(actual, self.new_serial(without_microbatches=True).step())

    def measure_memory(self) -> dict[str, float]:
        """Return the peak bytes of training by part: of one more step where inputs have gradients, which only the comparison keeps, but of
        none of ranks that differ, which an engine may find: it would end the run without the comparison's result."""
        differs = self.engine.world.all_reduce_max([int(self.comparison.first_difference is not None)])[0]
        if not differs and self.options.repeats_step and any(v.tensor.is_float for v in self.engine.rank_model.graph.inputs):
            self.engine.memory.reset_peak()
            self.engine.step(self.batch)
        return self.engine.peak_memory_over_ranks()

    def verification(self, source: ModelSource | None, memory: dict[str, float]) -> Verification | None:
        """Return the result on rank 0, None elsewhere."""
        if self.serial is None:
            return None
        plan, layout, comparison = self.plan, self.plan.layout, self.comparison
        shares = shares_by_axis(plan, self.engine.rank_model)
        texts = unproven_axes(plan, shares, source is not None and source.prices == FREE_LINKS)
        return Verification(
            comparison.first_difference is None, comparison.worst, comparison.first_difference, plan.replicated_operators,
                self.tolerance, memory,
            str(replace(layout, precision="float32", gradients="float32")), self.options.steps, layout.precision, shares,
            (*texts, *_coupling_warnings(layout, self.coupling, self.whole_batch, TOLERANCE[layout.precision])),
            whole_batch=self.whole_batch,
            in_noise=bool(comparison.rounding),
        )  # fmt: skip


def verify_on_rank(
    world: World, plan: Plan, make: Any, batch: Any, loss: Loss | None, source: ModelSource | None = None, options: Options | None = None
) -> Verification | None:
    """Verify a plan, called on every rank; return the result on rank 0, None elsewhere.

    `source`: the model built with the options' seed before the ranks were forked, which spares each of them the tracing.
    """
    exact, eight_bits = None, bool(PRECISIONS[plan.layout.precision].linear_dtype)
    if eight_bits:  # its noise hides errors: verify the same layout in float64, and each product against its bound
        wide = replace(plan, layout=replace(plan.layout, precision="float64", gradients="float32"))
        exact = verify_on_rank(world, wide, make, batch, loss, source, replace(options or Options(), tolerance=None))
    run = _VerificationRun(world, plan, make, batch, loss, source, options or Options())
    wrong = find_wrong_product(run.engine.rank_model, world) if eight_bits else ""
    # Enough steps to compute on weights with a stale update.
    is_finite = all(map(run.step, range(max(run.options.steps, plan.layout.staleness + 2 if plan.layout.staleness else 0))))
    result = run.verification(source, run.measure_memory() if is_finite else run.engine.peak_memory_over_ranks())
    if result is None or not result.ok or (not wrong and (exact is None or exact.ok)):
        return result
    return replace(result, ok=False, first_difference=wrong or f"the same layout in float64: {exact.first_difference if exact else ''}")


def verify_plan(
    plan: Plan,
    make: Any,
    batch: Any,
    loss: Loss | None,
    source: CachedModelSource,
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
    source.capture_all(plan, batch, loss)
    chosen = Options(repeats_step=True, **options)

    def on_rank(world: World) -> dict[str, Any] | None:
        verification = verify_on_rank(world, plan, make, batch, loss, source, chosen)
        return None if verification is None else vars(verification)

    return Verification(**launch(on_rank, plan.layout.num_ranks, device=device, timeout_s=timeout_s, show=False)[0])


def _relative_distances(actual: StepValues, expected: StepValues) -> dict[str, float]:
    """Return the distances of loss and gradients, each as the norm of the difference over the norm of the expected values."""
    errors = {}
    for kind in ("loss", "gradients"):
        squared_distance = sum(
            float((actual[kind][name].cpu().double() - x.cpu().double()).square().sum()) for name, x in expected[kind].items()
        )
        size = sum(float(x.double().square().sum()) for x in expected[kind].values())
        errors[kind] = math.sqrt(squared_distance / size) if size else math.sqrt(squared_distance)
    return errors


def _coupling_warnings(layout: Layout, coupling: str, whole_batch: Mapping[str, float], tolerance: float) -> tuple[str, ...]:
    """Return a warning that microbatches or per-replica statistics change what is trained, with the amount; empty if they do not."""
    if all(x <= tolerance for x in whole_batch.values()):
        return ()
    cause = "microbatches change" if layout.batch_norm == "exact" else "batch_norm=local changes"
    by = " and ".join(f"{kind} by {100 * x:.3g} %" for kind, x in whole_batch.items())
    return (
        f"{cause} what is trained: {coupling}; so the serial run has the same, and the first step differs from that on the whole batch "
        f"in {by}",
    )


def _random_state(device: torch.device) -> Tensor:
    """Return the states of torch's generators on host and device."""
    of_host = torch.random.get_rng_state()
    return torch.cat([of_host, torch.cuda.get_rng_state(device)]) if device.type == "cuda" else of_host


def _max_over_ranks(value: float, world: World) -> float:
    """Return the maximum over ranks."""
    largest = torch.tensor(value, dtype=torch.float64, device=world.device)
    world.world_group.all_reduce(largest, op="max")
    return float(largest)


def _random_draws_error(plan: Plan, where: str = "") -> ModelError:
    return ModelError(
        f"{plan.model} draws random numbers{where}, which a serial run draws differently, so there is nothing to compare; verify it "
        "without what draws: dropout 0, or noise that comes with the batch"
    )


@contextmanager
def _in_one_process(plan: Plan) -> Iterator[None]:
    """Raise ModelError if the model cannot be trained in one process either."""
    try:
        yield
    except ShardwiseError:
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and _is_missing_float64(plan, error):
            raise
        message = str(error).partition("\n")[0]
        parts = sorted(set(plan.microbatch_sizes))
        remedy = "make it train there first"
        if len(plan.microbatch_sizes) > 1:
            remedy += f", on {' and '.join(map(str, parts))} of the batch's {sum(plan.microbatch_sizes)} samples too, or use microbatches=1"
        raise ModelError(f"{plan.model} raises when plain PyTorch trains it in one process: {message}; {remedy}") from error


def _is_missing_float64(plan: Plan, error: Exception) -> bool:
    """Return whether the error says that an operator has no float64 kernel."""
    message = str(error).partition("\n")[0]
    matches = any(word in message for word in ("Double", "float64", "double")) and "modified by an inplace operation" not in message
    matches = matches and not any(f"got {kind} " in message for kind in ("Long", "Int", "Bool"))  # integers in a matrix product
    return matches and plan.layout.precision == "float64"


@contextmanager
def _explain_missing_float64(plan: Plan) -> Iterator[None]:
    """Raise ModelError if an operator of the model has no float64 kernel."""
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        if not _is_missing_float64(plan, error):
            raise
        message = str(error).partition("\n")[0]
        raise ModelError(
            f"an operator of {plan.model} cannot compute in float64 ({message}); verify it with dtype=float32 (--dtype float32)"
        ) from error
