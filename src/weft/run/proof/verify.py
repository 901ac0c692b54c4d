"""The proof: a parallel run against the serial one, from the same weights and data. In: a model, a plan, steps. Out: `Verification`.

Every rank runs the engine; rank 0 also runs the user's own module, eagerly and alone, on the whole batch with the same
optimizer, and compares the loss, every gradient (of parameters and of floating-point inputs) and every updated weight and buffer; then
every rank compares its own gradients, weights and optimizer state (`run/proof/everywhere`).
In float64 both sides compute in float64 throughout: casts to float32 inside the model would hide what is looked for.

Where the model couples samples (batch norm), microbatches change what is trained: then the serial run has the same microbatches, whose
losses count by their samples, and how far that is from the whole batch is measured beside it.

A difference counts against the largest magnitude of its own tensor. Some tensors are zero but for rounding (the gradient of a bias before
batch norm, or of attention keys), so that nothing they hold means anything; there, and only there, what is left is compared with the
rounding noise of the serial run, which is measured (`run/proof/serial`), not assumed.

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
from typing import Any

import torch
from torch import Tensor, nn

from weft.capture.capture import Loss
from weft.errors import ModelError, WeftError
from weft.lower.kernels.draws import SUPPORTED
from weft.model.additive import coupling_words
from weft.model.derivatives import without_gradient
from weft.model.sharding import FREE_LINKS
from weft.ops import draws
from weft.plan.compression import Compression
from weft.plan.plan import Plan
from weft.run.build import Source, Traced
from weft.run.engine import Engine
from weft.run.pieces import full_state, gradient_pieces
from weft.run.proof.division import divided, warnings
from weft.run.proof.everywhere import distances, farthest
from weft.run.proof.lossy import Lossy
from weft.run.proof.serial import Noise, Serial, Values
from weft.run.proof.verification import Verification
from weft.run.state.optimizer import OptimizerSpec
from weft.world.launch import launch
from weft.world.world import World

TOLERANCE = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 5e-2}
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
        error = _over(difference, want, largest if self.narrow and kind == "weights" else 0.0)
        if self.tolerance < error < float("inf"):
            # What noise excuses stays under the tolerance of the largest tensor of its kind: more than that is not rounding.
            noise = _NOISE_FACTOR * self.noise(kind, name, want, step)
            error = _over(difference, want, min(noise / self.tolerance, largest))
            if error > self.tolerance and _over(difference, want, noise / self.tolerance) <= self.tolerance:
                why = (
                    f"; serial runs whose weights differ by one unit of rounding do so too ({noise / _NOISE_FACTOR:.1e}), so the "
                    "model is ill-conditioned here: batch norm over two or three values, for example"
                )
        if kind == "loss" and not torch.isfinite(want).all():
            why = f"; the serial run's is {float(want)}, so there is nothing to compare: verify on a batch where it is a number"
        self.worst[kind] = max(self.worst.get(kind, 0.0), error)
        if self.first is None and not error <= self.tolerance:
            of = f"{kind} of {name}{where}" if name else f"{kind}{where}"
            self.first = f"{of} in step {step + 1}: {'relative error ' if name else ''}{error:.1e}{why}"


def _largest_of(kind: str, values: Values) -> float:
    """The largest magnitude of this kind; gradients of parameters and of inputs are one."""
    kinds = ("gradients", "input_gradients") if "gradients" in kind else (kind,)
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
    closed = without_gradient(graph) | engine.parts.counted

    def new_serial(sizes: tuple[int, ...] | None = None) -> Serial:
        sizes = reference if sizes is None else sizes
        whole = frozenset(v.name for v in graph.inputs if not v.batched)
        # Gradients of inputs are not compared where the model runs whole, and some of its operators may have none (a loss's targets).
        names = frozenset(v.name for v in graph.inputs if v.value in closed or plan.uncaptured)
        return Serial(
            make, seed, batch, loss, plan, spec, world.device, bool(plan.uncaptured), whole, names, len(random),
            engine.parts.folds, sizes,
        )

    random = [op for op in graph.operators if draws(op)]
    otherwise = [op.site for op in random if op.target.split(".")[1] not in SUPPORTED]
    if otherwise:
        raise _drawing(plan, f" at {', '.join(otherwise[:3])}{' ...' if len(otherwise) > 3 else ''}")
    why = coupling_words(engine.parts.coupled) if plan.layout.microbatches > 1 else ""
    if plan.uncaptured and plan.layout.microbatches > 1:
        why = "the model is no graph, in which it could be seen whether they do"
    reference = plan.microbatch_sizes if why else ()
    whole_batch: dict[str, float] = {}
    serial = new_serial() if world.rank == 0 else None
    noise = Noise(new_serial)
    how = Compression.parse(plan.layout.compress)
    lossy = Lossy(engine.gradients, how) if how.kind != "none" else None

    def noise_of(kind: str, name: str, reference: Tensor, step: int) -> float:
        # Runs that differ by rounding are not compressed: their weights are other ones.
        return 0.0 if lossy is not None and kind in ("weights", "optimizer") else noise.of(kind, name, reference, step)

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
            lossy.show("summed")
        inputs = engine.full_input_gradients(result) if not plan.uncaptured else {}
        wanted: Values = {}
        if serial is not None:
            drawn = _random_state(world.device)
            with _explained(plan), _in_plain_pytorch(plan):
                wanted = serial.step(instead)
            if serial.drew_otherwise or not torch.equal(drawn, _random_state(world.device)):
                raise _drawing(plan)
        of_ranks = {"gradients": distances(graph.parameters, gradient_pieces(engine.parts), wanted.get("gradients"), world.everyone)}
        losses = world.everyone.all_gather(torch.tensor([loss_value], dtype=torch.float64, device=world.device))
        if lossy is not None:
            lossy.show("arrived")
        engine.update()
        pieces = engine.pieces(drain=False)
        state = full_state(engine.parts, pieces, world.everyone, every=True)
        of_ranks["weights"] = distances((*graph.parameters, *graph.buffers), pieces, wanted.get("weights"), world.everyone)
        kept = [distances(graph.parameters, pieces, wanted.get("optimizer"), world.everyone, slot) or {} for slot in spec.slots]
        of_ranks["optimizer"] = {name: far for of_slot in kept for name, far in of_slot.items()}
        if serial is not None:
            assert gradients is not None
            assert state is not None
            assert inputs is not None
            of_ranks["loss"] = {"": [farthest(x, wanted["loss"][""]) for x in losses.cpu()]}
            if lossy is not None:
                seen.exchanged(step, off)
            total = {"": torch.tensor(loss_value, dtype=torch.float64)}
            got = {"loss": total, "gradients": gradients, "input_gradients": inputs, "weights": state}
            seen.step(step, got, wanted)
            for kind, far in of_ranks.items():
                seen.everywhere(step, kind, far or {}, wanted)
            if why and not step:
                with _explained(plan), _in_plain_pytorch(plan):
                    whole_batch = _apart(got, new_serial(()).step())
        if math.isnan(loss_value):
            break  # weights that are no numbers tell nothing more, and a model may raise at them; all ranks have the same loss
    memory = engine.fullest_memory()
    if serial is None:
        return None
    shares, layout = divided(plan, engine.parts), plan.layout
    said = warnings(plan, shares, source is not None and source.prices == FREE_LINKS)
    return Verification(
        seen.first is None, seen.worst, seen.first, plan.replicated_operators, bound, memory,
        str(replace(layout, precision="float32")), steps, layout.precision, shares, (*said, *_apart_words(why, whole_batch, bound)),
        whole_batch=whole_batch,
    )  # fmt: skip


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
    """Start the plan's ranks, which inherit what `source` has traced, and compare them; `options` are those of `verify_on_rank`.

    `cut_everything`: in the place of the plan's own cuts, cut wherever the rules allow.

    Raises:
        RankError: a rank failed.
    """
    if cut_everything:
        plan, source = replace(plan, shards=()), replace(source, prices=FREE_LINKS)
    source.prepare(plan, batch, loss)

    def on_rank(world: World) -> dict[str, Any] | None:
        found = verify_on_rank(world, plan, make, batch, loss, source=source, **options)
        return None if found is None else vars(found)

    return Verification(**launch(on_rank, plan.layout.num_ranks, device=device, timeout_s=timeout_s, show=False)[0])


def _apart(got: Values, want: Values) -> dict[str, float]:
    """How far loss and gradients are from others, each as the norm of the difference over that of the others."""
    found = {}
    for kind in ("loss", "gradients"):
        apart = sum(float((got[kind][name].cpu().double() - x.cpu().double()).square().sum()) for name, x in want[kind].items())
        size = sum(float(x.double().square().sum()) for x in want[kind].values())
        found[kind] = math.sqrt(apart / size) if size else math.sqrt(apart)
    return found


def _apart_words(why: str, whole_batch: Mapping[str, float], bound: float) -> tuple[str, ...]:
    """That microbatches change what is trained, and by how much; empty where they do not."""
    if all(x <= bound for x in whole_batch.values()):
        return ()
    far = " and ".join(f"{kind} by {100 * x:.3g} %" for kind, x in whole_batch.items())
    return (
        f"microbatches change what is trained: {why}; so the serial run has the same microbatches, and the first step differs from "
        f"that on the whole batch in {far}",
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
