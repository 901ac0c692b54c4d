"""The proof: a parallel run against the serial one, from the same weights and data. In: a model, a plan, steps. Out: `Verification`.

Every rank runs the engine; rank 0 also runs the user's own module, eagerly and alone, on the whole batch with the same
optimizer, and compares the loss, every gradient (of parameters and of floating-point inputs) and every updated weight and buffer; then
every rank compares its own gradients, weights and optimizer state (`run/proof/everywhere`).
In float64 both sides compute in float64 throughout: casts to float32 inside the model would hide what is looked for.

Where the model couples samples (batch norm), microbatches change what is trained: then the serial run has the same microbatches, whose
losses count by their samples, and how far that is from the whole batch is measured beside it.

A difference counts against the largest magnitude of its own tensor. Some tensors are zero but for rounding (the gradient of a bias before
batch norm, or of attention keys), so that nothing they hold means anything; there, and only there, what is left is compared with the
rounding noise of the serial run, which is measured (`run/proof/serial`), not assumed. In 16 bits the serial run has the same precision,
and every difference is compared with that noise.

Where gradients are compressed, their sums before that are compared with the serial run's, what arrived with an emulation of the exchange,
and the weights with the serial model's after an update with the emulated gradients (`run/proof/lossy`). Where updates come late, those of
the serial model do too.
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

# Of products that round their operands where no noise can be measured.
TOLERANCE = {"float64": 1e-9, "float32": 1e-3, "tf32": 5e-2, "bfloat16": 5e-2, "float16": 5e-2, "float8": 0.2}
# In 16 bits a difference is told in multiples of the noise. It was 1.7 times at most in 31,000 tensors of five networks, two precisions and
# four layouts.
_NARROW_FACTOR = 4.0
# A parallel run rounds in places where no serial run does. Its distance was at most 1.6 times that of the perturbed serial runs over 30
# models; where a tensor has one element, all of those may by chance lie close together.
_NOISE_FACTOR = 16


def relative_error(got: Tensor, want: Tensor, floor: float = 0.0) -> float:
    """Largest difference over the largest finite magnitude (of the tensor, at least `floor`).

    Infinite for NaN, another shape, or an infinity that only one has; what both have alike (a mask's) is no difference.
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
    """Collects errors, step by step. `noise(kind, name, reference, step)`: see `run/proof/serial.Noise.of`; asked only above the tolerance.

    `narrow`: computed in less than float64. AdamW then makes full steps of gradients that are rounding noise, up or down, where in float64
    its epsilon keeps them small; so weights are measured against the largest weight. `rounding`: the unit of rounding of 16 bits, in which
    a difference is compared with the noise itself, and `tolerance` and errors are multiples of that; 0 elsewhere. `gain`: the optimizer's,
    by which it hands on a gradient's difference; 0 where nothing is known.
    """

    tolerance: float
    noise: Callable[[str, str, Tensor, int], float]
    narrow: bool = False
    rounding: float = 0.0
    gain: float = 0.0
    full_step: float = 0.0  # the noise of the noisiest weight
    gradients: dict[str, float] = field(default_factory=dict)  # by parameter, how far its gradient was from the serial run's at most
    worst: dict[str, float] = field(default_factory=dict)
    first: str | None = None

    def step(self, step: int, got: Values, want: Values) -> None:
        """Compare everything that both have; what the serial run has of gradients and the parallel run lacks is a difference."""
        if self.rounding:  # AdamW makes full steps of gradients that are noise, of whatever parameter
            weights = {name: x.cpu() for name, x in want["weights"].items() if x.numel()}
            self.full_step = max((self.noise("weights", name, x, step) for name, x in weights.items()), default=0.0)
        for kind, tensors in want.items():
            largest = _largest_of(kind, want)
            for name, tensor in tensors.items():
                there = got.get(kind, {}).get(name)
                if there is not None or kind == "gradients":
                    self._add(kind, name, float("inf") if there is None else farthest(there.cpu(), tensor.cpu()), tensor, largest, step)

    def everywhere(self, step: int, kind: str, far: Mapping[str, Sequence[float]], want: Values) -> None:
        """Compare what every rank has: `far`, by name how far each rank's pieces are from the serial run's, see `run/proof/everywhere`."""
        largest = _largest_of(kind, want)
        for name, of_ranks in far.items():
            for rank, difference in enumerate(of_ranks):
                self._add(kind, name, difference, want[kind][name], largest, step, f" on rank {rank}")

    def exchanged(self, step: int, error: float) -> None:
        """How far what arrived of compressed gradients is from what should have."""
        self.worst["exchange"] = max(self.worst.get("exchange", 0.0), error)
        if self.first is None and not error <= self.tolerance:
            self.first = f"what arrived of compressed gradients in step {step + 1}: relative error {error:.1e}"

    def _add(self, kind: str, name: str, difference: float, want: Tensor, largest: float, step: int, where: str = "") -> None:
        why, want = "", want.cpu()
        if kind == "gradients":
            self.gradients[name] = max(self.gradients.get(name, 0.0), difference)
        error = _over(difference, want, largest if self.narrow and kind == "weights" else 0.0)
        if self.rounding:
            error = self._in_noise(kind, name, difference, want, step)
        elif self.tolerance < error < float("inf"):
            # What noise excuses stays under the tolerance of the largest tensor of its kind: more than that is not rounding. Of a weight it
            # may be what the updates so far make of its gradient's difference, which was judged as such.
            noise = _NOISE_FACTOR * self.noise(kind, name, want, step)
            moved = self.gain * (step + 1) * self.gradients.get(name, 0.0) if kind == "weights" else 0.0
            error = _over(difference, want, min(noise / self.tolerance, max(largest, moved / self.tolerance)))
            if error > self.tolerance and _over(difference, want, noise / self.tolerance) <= self.tolerance:
                why = (
                    f"; serial runs whose weights differ by one unit of rounding do so too ({noise / _NOISE_FACTOR:.1e}), so the "
                    "model is ill-conditioned here: batch norm over two or three values, for example"
                )
        if kind == "loss" and not torch.isfinite(want).all():
            why = f"; the serial run's is {float(want)}, so there is nothing to compare: verify on a batch where it is a number"
        self._tell(kind, name, error, step, where, why)

    def _in_noise(self, kind: str, name: str, difference: float, want: Tensor, step: int) -> float:
        """A difference in multiples of the noise; of that no less than what makes the tolerance one rounding of the largest element."""
        if not difference or difference == float("inf"):
            return difference
        noise = self.full_step if kind == "weights" else self.noise(kind, name, want, step)
        noise = max(noise, self.rounding * _finite_largest(want) / self.tolerance)
        return difference / noise if noise else float("inf")

    def _tell(self, kind: str, name: str, error: float, step: int, where: str, why: str = "") -> None:
        self.worst[kind] = max(self.worst.get(kind, 0.0), error)
        if self.first is None and not error <= self.tolerance:
            unit = "times the rounding noise" if self.rounding else ""
            of = f"{kind} of {name}{where}" if name else f"{kind}{where}"
            self.first = f"{of} in step {step + 1}: {'relative error ' if name and not unit else ''}{error:.1e} {unit}".rstrip() + why


def _largest_of(kind: str, values: Values) -> float:
    """The largest magnitude of this kind; gradients of parameters and of inputs are one."""
    kinds = ("gradients", "input_gradients") if "gradients" in kind else (kind,)
    tensors = [x for kind in kinds for x in values[kind].values() if x.numel() and x.is_floating_point()]
    return max((_finite_largest(x) for x in tensors), default=0.0)


@dataclass(frozen=True)
class Options:
    """How a plan is verified.

    `tolerance`: that of the precision where None. `sabotage`: parameters whose gradients the run multiplies by a number, to show that the
    comparison finds it. `device_memory`: see `Engine`.
    """

    steps: int = 2
    seed: int = 0
    tolerance: float | None = None
    optimizer: OptimizerSpec | str | Mapping[str, Any] = "adamw"
    sabotage: Mapping[str, float] | None = None
    device_memory: float = 0.0


class _Run:
    """A rank's engine and, on rank 0, the serial run beside it; every rank makes the same steps."""

    def __init__(
        self, world: World, plan: Plan, make: Any, batch: Any, loss: Loss | None, source: Source | None, options: Options
    ) -> None:
        self.world, self.plan, self.options = world, plan, options
        self.batch = of_every_split(batch, plan.layout) if plan.layout.split == LENGTHS else batch
        self.spec = OptimizerSpec.of(options.optimizer)
        model = source or (copy.deepcopy(make) if isinstance(make, nn.Module) else make)
        device = OnDevice(memory=options.device_memory, scale=SCALE)
        self.engine = Engine(plan, model, batch, loss, world, self.spec, seed=options.seed, device=device)
        self.coupled = self._coupled()  # why microbatches may train something else than the whole batch; empty where they do not
        self._traits = self._seen_by_capture()
        self._new = partial(Serial, make, options.seed, batch, loss, plan, self.spec, world.device)
        self.serial = self.new_serial() if world.rank == 0 else None
        self._noise = Noise(self.new_serial)
        how = Compression.parse(plan.layout.compress)
        self.lossy = Lossy(self.engine.gradients, how) if how.kind != "none" else None
        measured = options.tolerance is None and self.lossy is None and PRECISIONS[plan.layout.precision].rounds
        usual = _NARROW_FACTOR if measured else TOLERANCE[plan.layout.precision]
        self.bound = usual if options.tolerance is None else options.tolerance
        rounding = EPSILON[plan.layout.precision] if measured else 0.0
        narrow = plan.layout.precision != "float64"
        self.seen = Comparison(self.bound, self._noise_of, narrow, rounding, 0.0 if narrow else self.spec.gain)
        self.whole_batch: dict[str, float] = {}  # how far the first step is from that on the whole batch

    def _coupled(self) -> str:
        layout = self.plan.layout
        if layout.microbatches == 1 and layout.batch_norm == "exact":
            return ""
        if self.plan.uncaptured:
            return "the model is no graph, in which it could be seen whether they do"
        return coupling_words(self.engine.parts.coupled or local_statistics(self.engine.parts.graph))

    def _seen_by_capture(self) -> Traits:
        """Raises ModelError where the model draws what a serial run cannot draw alike."""
        plan, parts = self.plan, self.engine.parts
        random = [op for op in parts.graph.operators if draws(op)]
        otherwise = [op.site for op in random if op.target.split(".")[1] not in SUPPORTED]
        if otherwise:
            raise _drawing(plan, f" at {', '.join(otherwise[:3])}{' ...' if len(otherwise) > 3 else ''}")
        inputs, closed = parts.graph.inputs, without_gradient(parts.graph) | parts.counted
        return Traits(
            every=bool(plan.uncaptured),
            without_samples=frozenset(v.name for v in inputs if not v.batched),
            # Gradients of inputs are not compared where the model runs whole, and some of its operators may have none (a loss's targets).
            closed=frozenset(v.name for v in inputs if v.value in closed or plan.uncaptured),
            draws=len(random),
            folds=parts.folds,
            sizes=plan.microbatch_sizes if self.coupled else (),
            replicas=plan.layout.data if plan.layout.local_statistics else 1,
        )

    def new_serial(self, at_once: bool = False) -> Serial:
        """A serial run; `at_once`: of the whole batch even where microbatches train something else."""
        return self._new(replace(self._traits, sizes=(), replicas=1) if at_once else self._traits)

    def _noise_of(self, kind: str, name: str, reference: Tensor, step: int) -> float:
        # Runs that differ by rounding are not compressed: their weights are other ones.
        return 0.0 if self.lossy is not None and kind in ("weights", "optimizer") else self._noise.of(kind, name, reference, step)

    def step(self, step: int) -> bool:
        """One step of both runs, compared. Returns whether another can tell more."""
        engine, graph, everyone = self.engine, self.engine.parts.graph, self.world.everyone
        result = self._forward_backward()
        if self.lossy is not None:
            off = _over_ranks(self.lossy.compare(), self.world)
            if self.serial is not None:
                self.seen.exchanged(step, off)
            self.lossy.show("summed")
        for name, factor in (self.options.sabotage or {}).items():
            if (spoiled := engine.gradient(name)) is not None:
                spoiled.mul_(factor)
        loss = engine.loss_of(result)
        gradients, emulated = engine.full_gradients(), self._emulated()
        comparable = not self.plan.uncaptured and self.plan.layout.split != LENGTHS  # else those of the last microbatch
        inputs = engine.full_input_gradients(result) if comparable else {}
        wanted = self._serial_step(emulated)
        far = {"gradients": distances(graph.parameters, gradient_pieces(engine.parts), wanted.get("gradients"), everyone)}
        losses = everyone.all_gather(torch.tensor([loss], dtype=torch.float64, device=self.world.device))
        if self.lossy is not None:
            self.lossy.show("arrived")
        engine.update()
        pieces = engine.pieces(drain=False)
        state = full_state(engine.parts, pieces, everyone, every=True)
        far["weights"] = distances((*graph.parameters, *graph.buffers), pieces, wanted.get("weights"), everyone)
        of_slots = [distances(graph.parameters, pieces, wanted.get("optimizer"), everyone, slot) or {} for slot in self.spec.slots]
        far["optimizer"] = {name: each for of_slot in of_slots for name, each in of_slot.items()}
        if self.serial is not None:
            assert gradients is not None
            assert state is not None
            assert inputs is not None
            far["loss"] = {"": [farthest(x, wanted["loss"][""]) for x in losses.cpu()]}
            total = {"": torch.tensor(loss, dtype=torch.float64)}
            self._compare(step, {"loss": total, "gradients": gradients, "input_gradients": inputs, "weights": state}, far, wanted)
        return not math.isnan(loss)  # weights that are no numbers tell nothing more, and a model may raise at them; all ranks have the same

    def _forward_backward(self) -> Result:
        try:
            with _explained(self.plan):
                return self.engine.forward_backward(self.batch, want_inputs=not self.plan.uncaptured)
        except WeftError:
            raise
        except Exception:
            # Whether it is the model's own mistake: a look-up of a row that there is not, types that do not go together.
            with _in_one_process(self.plan):
                self.new_serial().step()
            raise

    def _emulated(self) -> dict[str, Tensor] | None:
        """On rank 0, the gradients that an emulated exchange gives, where they are compressed."""
        if self.lossy is None:
            return None
        self.lossy.show("emulated")
        gradients = self.engine.full_gradients()
        self.lossy.show("summed")
        return gradients

    def _serial_step(self, gradients: Mapping[str, Tensor] | None) -> Values:
        if self.serial is None:
            return {}
        before = _random_state(self.world.device)
        with _explained(self.plan), _in_one_process(self.plan):
            wanted = self.serial.step(gradients)
        if self.serial.drew_otherwise or not torch.equal(before, _random_state(self.world.device)):
            raise _drawing(self.plan)
        return wanted

    def _compare(self, step: int, got: Values, far: Mapping[str, Mapping[str, Sequence[float]] | None], wanted: Values) -> None:
        """`far`: by kind and name, how far each rank's pieces are from the serial run's."""
        if self.engine.scale.scaled and not all(x.isfinite().all() for x in wanted["gradients"].values()):
            # Both skip the step, as their weights show; what has overflowed depends on the order of sums.
            wanted = {kind: values for kind, values in wanted.items() if "gradients" not in kind}
            far = {kind: of_kind for kind, of_kind in far.items() if "gradients" not in kind}
        self.seen.step(step, got, wanted)
        for kind, of_kind in far.items():
            self.seen.everywhere(step, kind, of_kind or {}, wanted)
        if self.coupled and not step:
            with _explained(self.plan), _in_one_process(self.plan):
                self.whole_batch = _apart(got, self.new_serial(at_once=True).step())

    def verification(self, source: Source | None) -> Verification | None:
        """What was found, on rank 0."""
        memory = self.engine.fullest_memory()
        if self.serial is None:
            return None
        plan, layout, seen = self.plan, self.plan.layout, self.seen
        shares = division_of(plan, self.engine.parts)
        said = warnings(plan, shares, source is not None and source.prices == FREE_LINKS)
        return Verification(
            seen.first is None, seen.worst, seen.first, plan.replicated_operators, self.bound, memory,
            str(replace(layout, precision="float32")), self.options.steps, layout.precision, shares,
            (*said, *_apart_words(layout, self.coupled, self.whole_batch, TOLERANCE[layout.precision])), whole_batch=self.whole_batch,
            in_noise=bool(seen.rounding),
        )  # fmt: skip


def verify_on_rank(
    world: World, plan: Plan, make: Any, batch: Any, loss: Loss | None, source: Source | None = None, options: Options | None = None
) -> Verification | None:
    """Run on every rank; the verification on rank 0, None elsewhere.

    `source`: the model as it was made with the options' seed before the ranks were forked, which saves each of them from tracing it.
    """
    exact, eight_bits = None, bool(PRECISIONS[plan.layout.precision].linears)
    if eight_bits:  # whose own noise hides what is wrong: the same layout where it does not, and each product against its bound
        wide = replace(plan, layout=replace(plan.layout, precision="float64"))
        exact = verify_on_rank(world, wide, make, batch, loss, source, replace(options or Options(), tolerance=None))
    run = _Run(world, plan, make, batch, loss, source, options or Options())
    wrong = wrong_product(run.engine.parts, world) if eight_bits else ""
    # As many steps as it takes to compute on weights whose update came late.
    for step in range(max(run.options.steps, plan.layout.staleness + 2 if plan.layout.staleness else 0)):
        if not run.step(step):
            break
    checked = run.verification(source)
    if checked is None or not checked.ok or (not wrong and (exact is None or exact.ok)):
        return checked
    return replace(checked, ok=False, first_difference=wrong or f"the same layout in float64: {exact.first_difference if exact else ''}")


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
    """Start the plan's ranks, which inherit what `source` has traced, and compare them; `options`: the fields of `Options`.

    `cut_everything`: in the place of the plan's own cuts, cut wherever the rules allow.

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
    """How far loss and gradients are from others, each as the norm of the difference over that of the others."""
    errors = {}
    for kind in ("loss", "gradients"):
        apart = sum(float((got[kind][name].cpu().double() - x.cpu().double()).square().sum()) for name, x in want[kind].items())
        size = sum(float(x.double().square().sum()) for x in want[kind].values())
        errors[kind] = math.sqrt(apart / size) if size else math.sqrt(apart)
    return errors


def _apart_words(layout: Layout, why: str, whole_batch: Mapping[str, float], bound: float) -> tuple[str, ...]:
    """That microbatches, or statistics of each replica, change what is trained, and by how much; empty where they do not."""
    if all(x <= bound for x in whole_batch.values()):
        return ()
    cause = "microbatches change" if layout.batch_norm == "exact" else "batch_norm=local changes"
    far = " and ".join(f"{kind} by {100 * x:.3g} %" for kind, x in whole_batch.items())
    return (
        f"{cause} what is trained: {why}; so the serial run has the same, and the first step differs from that on the whole batch "
        f"in {far}",
    )


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
def _in_one_process(plan: Plan) -> Iterator[None]:
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
