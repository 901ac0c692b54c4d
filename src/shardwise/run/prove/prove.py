"""Proof of a plan without tolerance: every rank's engine and the serial model run on numbers of a finite field, and must be equal.

The engine, the executor, the kernels and the collectives are those that train (`run/engine`); only elements are other numbers
(`field_tensor`), and ranks are threads of this process (`rank_threads`). Every shard of loss, gradients, updated weights and optimizer
state on every rank is compared with the serial run (`run/verify/serial`), at several random points.

Not proven: what rounds (precision, overflow, order of sums), which `verify` measures, and operators without an exact form, which are named.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.capture.capture import Loss
from shardwise.capture.nesting import named_leaves, replace_leaves
from shardwise.lower.float64_mode import cast_to_float64, is_float64
from shardwise.model.graph import Graph, Variable
from shardwise.model.sharding.sharding import FREE_LINKS
from shardwise.plan.compatibility import SPLIT_BY_LENGTH
from shardwise.plan.ir.choice import AUTO, AllReduceChoices
from shardwise.plan.ir.precision import PRECISIONS
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.run.checkpoint import StateShard
from shardwise.run.engine import DeviceOptions, Engine
from shardwise.run.prove import (  # noqa: F401 - they register rules, and what stands for operators without one, in order
    complex_rules,
    ctc_rules,
    derived_backward,
    fourier_rules,
    fused_rules,
    order_rules,
    rules,
    unknown_operators,
    window_rules,
)
from shardwise.run.prove.degrees import CERTAINTY, CONSTANT, HIGH_LEVEL, LINEAR
from shardwise.run.prove.field_tensor import (
    ComplexFieldTensor,
    FieldMode,
    FieldTensor,
    NotProvable,
    degree_of,
    have_equal_values,
    lift_constants,
    random_like,
    random_numbers,
)
from shardwise.run.prove.locate import Values, WrongValue, first_wrong_value, place_of, record_values
from shardwise.run.prove.proof import Difference, Proof
from shardwise.run.prove.rank_threads import Exchange, thread_world
from shardwise.run.rank_model.model_source import CachedModelSource
from shardwise.run.state.optimizer import OptimizerSpec
from shardwise.run.verify.serial import SerialRun, StepValues
from shardwise.run.verify.verify import serial_traits
from shardwise.world.world import World

MAX_REDRAWN = 8  # points with a zero divisor, which show nothing
_MAX_CHANCE = 0.3  # of a point, above which too many would be needed


class DegreeTooHighError(NotProvable):
    """A random point shows too little, since polynomials of the model's degree may be zero at many of them."""


@dataclass(frozen=True)
class ProofOptions:
    """Options of a proof. `max_error_probability`: that a wrong plan passes; points are added until it is met. `steps`: at each point."""

    max_error_probability: float = 1e-12
    steps: int = 1
    seed: int = 0
    optimizer: OptimizerSpec | str | Mapping[str, Any] = "adamw"


@dataclass
class RankStep:
    """What one rank has after a step: shards of gradients, and of weights and optimizer state after the update."""

    gradients: list[StateShard]
    state: list[StateShard]
    loss: Tensor


@dataclass(frozen=True)
class ProofSubject:
    """A plan, its model and batch, as the ranks and the serial run get them. `scales_loss`: the ranks scale the loss, and their gradients
    back; the serial run does not."""

    plan: Plan
    make: Any
    batch: Any
    loss: Loss | None
    source: CachedModelSource
    options: ProofOptions
    scales_loss: bool


def prove_plan(
    plan: Plan, make: Any, batch: Any, loss: Loss | None, source: CachedModelSource, options: ProofOptions = ProofOptions(),
    cut_everything: bool = False, locates_difference: bool = True,
) -> Proof:  # fmt: skip
    """Prove a plan, or name what differs first; the first operator that does only with `locates_difference`, which runs all again.

    Raises:
        NotProvable: an operator has no exact form.
    """
    _refuse_approximate(plan.layout)
    options = replace(options, steps=max(options.steps, plan.layout.staleness + 2 if plan.layout.staleness else 0))
    precision = plan.layout.precision
    plan = replace(plan, layout=replace(plan.layout, precision="float64", gradients="float32", all_reduce=AUTO), sums=AllReduceChoices())
    if cut_everything:
        plan, source = replace(plan, shards=()), replace(source, prices=FREE_LINKS)
    source = replace(source, has_values=False)
    source.capture_all(plan, batch, loss)
    subject = ProofSubject(plan, make, batch, loss, source, options, PRECISIONS[precision].scales_loss)
    try:
        found = _compare_points(subject, locates_difference)
    except DegreeTooHighError as error:
        found = _compare_with_random_reciprocals(subject, error)
    shown = replace(plan.layout, precision=precision if subject.scales_loss else "float32", gradients="float32")
    return replace(found, layout=str(shown))


def _compare_points(subject: ProofSubject, locates_difference: bool) -> Proof:
    """Return what as many random points show as the wanted probability needs."""
    options = subject.options
    differences, wrong, run = list[Difference](), None, None
    probability, points, redrawn, seed = 1.0, 0, 0, options.seed
    while not differences and probability > options.max_error_probability:
        run = run or _ProofRun(subject)
        differences, seed = run.compare_point(seed), seed + 1
        if CERTAINTY.zero_divisors:
            if redrawn == MAX_REDRAWN:
                raise NotProvable(f"a divisor was zero at each of {redrawn + 1} random points, which shows nothing; use verify")
            redrawn, differences, run = redrawn + 1, [], None  # what the optimizer has after such a point shows nothing either
            continue
        points += 1
        chance = CERTAINTY.wrong_point_probability(run.degree)
        if chance > _MAX_CHANCE and not differences:
            raise DegreeTooHighError(
                f"the model's degree is too high for a proof: a point would miss an error with a chance of {chance:.2g}"
            )
        probability *= chance
        wrong = run.locate() if differences and locates_difference else None
    return Proof(
        str(subject.plan.layout), subject.plan.model, points, redrawn, 1.0 if differences else probability, tuple(differences), wrong,
        unknown_operators=tuple(sorted(CERTAINTY.unknown_operators)),
    )  # fmt: skip


def _compare_with_random_reciprocals(subject: ProofSubject, too_high: DegreeTooHighError) -> Proof:
    """Return a proof with random functions in place of reciprocals of divisors that themselves hold many. Raises `too_high` where that does
    not show equality, which may be for want of what reciprocals have and random functions have not."""
    CERTAINTY.max_level = HIGH_LEVEL
    try:
        found = _compare_points(subject, locates_difference=False)
    finally:
        CERTAINTY.max_level = None
    if not found.ok:
        raise too_high
    return found


def _refuse_approximate(layout: Layout) -> None:
    """Raise NotProvable for layouts that train something else than the serial model, or whose ranks have threads of their own."""
    if layout.compress != "none":
        raise NotProvable(f"compress={layout.compress} exchanges rounded gradients, which no serial run has; leave it out, or use verify")
    if layout.servers:
        raise NotProvable(
            f"servers={layout.servers} has threads beside the ranks, which a proof does not order; leave it out, or use verify"
        )
    if layout.split == SPLIT_BY_LENGTH:
        raise NotProvable("split=lengths has microbatches of other shapes than the serial run; leave it out, or use verify")


class _ProofRun:
    """The ranks' engines and the serial run, which make steps from the same random weights and inputs: another point each time.

    The optimizer's state goes on from point to point: it was equal at the end of the last one.
    """

    def __init__(self, subject: ProofSubject) -> None:
        self.subject, self.seed = subject, subject.options.seed
        self.model = self._build_model()
        self.buffers = {
            name: lift_constants(x.clone()) if x.is_floating_point() else x.clone()
            for name, x in self.model.named_buffers(remove_duplicate=False)
        }
        wide = [name for name, x in self.buffers.items() if x.dtype is torch.complex128]
        if wide:
            raise NotProvable(f"buffer {wide[0]} is complex128, which no checkpoint stores; make it complex64")
        self.batch = subject.batch
        self.steps: list[list[RankStep]] = []  # by step and rank
        self.traits: Any = None
        self.graph: Graph | None = None
        self.degree = LINEAR  # the largest of compared values
        self._weights: dict[str, FieldTensor] = {}  # this point's, of which every rank takes its shards
        self._engines: dict[int, Engine] = {}
        self._serial: SerialRun | None = None
        self._room = Exchange(subject.plan.layout.num_ranks)

    def _build_model(self) -> nn.Module:
        torch.manual_seed(self.subject.options.seed)
        make = self.subject.make
        model = copy.deepcopy(make) if isinstance(make, nn.Module) else make()
        self.is_float64 = is_float64(model)  # else torch.finfo, by which masks are filled, is float32's on both sides
        return cast_to_float64(model)

    def _draw_batch(self) -> Any:
        """Return the batch with random numbers in place of its floating-point ones."""
        leaves = dict(named_leaves(self.subject.batch))
        drawn = {
            path: random_like(x, f"batch {path}", self.seed) if isinstance(x, Tensor) and _has_numbers(x) else x
            for path, x in leaves.items()
        }
        return replace_leaves(self.subject.batch, drawn)

    def compare_point(self, seed: int) -> list[Difference]:
        """Run all ranks and the serial model from a point; return what differs."""
        CERTAINTY.reset(self.subject.options.steps)
        self.seed, self.batch = seed, None
        self.batch = self._draw_batch()
        self._weights.clear()
        options, num_ranks = self.subject.options, self.subject.plan.layout.num_ranks
        self.steps = [[None] * num_ranks for _ in range(options.steps)]  # type: ignore[list-item]
        self._room.run_ranks(self._run_rank)
        return [
            difference
            for step, expected in enumerate(self._serial_steps())
            for rank, actual in enumerate(self.steps[step])
            for difference in self._compare(step, rank, actual, expected)
        ]

    def locate(self) -> WrongValue | None:
        """Return the first operator whose value differs in forward; None if all agree, as where only gradients differ."""
        layout = self.subject.plan.layout
        serial_plan = replace(self.subject.plan, layout=Layout.parse(f"microbatches={layout.microbatches} precision=float64"), stages=())
        serial, graph = Values(), self.graph
        recorded: list[Values] = [Values() for _ in range(layout.num_ranks)]
        places: list[Any] = [None] * layout.num_ranks

        def run_rank(world: World, plan: Plan, values: list[Values]) -> None:
            with FieldMode():  # type: ignore[no-untyped-call]
                engine = self._build_engine(world, plan)
                values[world.rank] = record_values(engine)
                if plan is self.subject.plan:
                    places[world.rank] = place_of(engine)
                engine.forward_backward(self.batch)

        run_rank(World(), serial_plan, one := [serial])
        whole = {(m, value): x for (m, value, _), x in one[0].items()}
        room = Exchange(layout.num_ranks)
        room.run_ranks(lambda rank: run_rank(thread_world(room, rank, layout.num_ranks), self.subject.plan, recorded))
        assert graph is not None
        order = [(op.site, value) for op in graph.operators for value in op.outputs]
        return first_wrong_value(order, whole, places, recorded)

    def _build_engine(self, world: World, plan: Plan) -> Engine:
        subject = self.subject
        optimizer, device = subject.options.optimizer, DeviceOptions(scales_loss=subject.scales_loss)
        engine = Engine(plan, subject.source, self.batch, subject.loss, world, optimizer, seed=subject.options.seed, device=device)
        with torch.no_grad():
            self._fill_shards(engine, engine.rank_model.graph)
        return engine

    def _run_rank(self, rank: int) -> None:
        subject = self.subject
        with FieldMode():  # type: ignore[no-untyped-call]
            engine = self._engines.get(rank)
            if engine is None:
                world = thread_world(self._room, rank, subject.plan.layout.num_ranks)
                engine = self._engines[rank] = self._build_engine(world, subject.plan)
                if rank == 0:
                    self.graph, self.traits = engine.rank_model.graph, replace(serial_traits(engine), is_float64=self.is_float64)
            else:
                with torch.no_grad():
                    self._fill_shards(engine, engine.rank_model.graph)
            for step in range(subject.options.steps):
                result = engine.forward_backward(self.batch, wants_input_gradients=False)
                total, work = result.pending_loss or (torch.zeros(()), None)
                if work is not None:
                    work.wait()
                gradients = _copy_shards(engine.local_gradients())
                engine.update()
                loss = total[0] / total[1] if total.dim() else total
                self.steps[step][rank] = RankStep(gradients, _copy_shards(engine.state_shards(drain=False)), loss)

    def _fill_shards(self, engine: Engine, graph: Graph) -> None:
        """Write this point's weights, and the model's buffers, into a rank's shards."""
        variables = {v.name: v for v in (*graph.parameters, *graph.buffers)}
        for shard in engine.state_shards(drain=False):
            if shard.slot or shard.name not in variables or shard.kind not in ("parameter", "buffer"):
                continue
            _refill_tensor(shard.tensor, _part_of(self._value_of(shard.kind, variables[shard.name]), shard))
        engine.refresh_parameter_copies()

    def _value_of(self, kind: str, v: Variable) -> Tensor:
        if kind == "buffer":
            return next(self.buffers[name] for name in (v.name, *v.aliases) if name in self.buffers)
        if v.name not in self._weights:
            self._weights[v.name] = random_numbers(v.tensor.shape, v.name, self.seed)
        return self._weights[v.name]

    def _serial_steps(self) -> list[StepValues]:
        subject = self.subject
        with FieldMode():  # type: ignore[no-untyped-call]
            if self._serial is None:
                spec, seed = OptimizerSpec.of(subject.options.optimizer), subject.options.seed
                self._serial = SerialRun(
                    self._field_model, seed, self.batch, subject.loss, subject.plan, spec, torch.device("cpu"), self.traits
                )
            else:
                self._refill_serial(self._serial)
            steps: list[StepValues] = []
            for _ in range(subject.options.steps):
                values = self._serial.step()
                if self._serial.drew_differently:
                    raise NotProvable("the model draws random numbers by operators without a reproducible stream; prove it without them")
                steps.append({kind: {name: _copy_of(x) for name, x in tensors.items()} for kind, tensors in values.items()})
        return steps

    def _refill_serial(self, serial: SerialRun) -> None:
        """Give the serial run this point's weights, buffers and inputs."""
        assert self.graph is not None
        names = {name: v.name for v in self.graph.parameters for name in (v.name, *v.aliases)}
        serial.set_batch(self.batch)
        with torch.no_grad():
            for path, p in serial.model.named_parameters():
                _refill_tensor(p, random_like(p, names.get(path, path), self.seed))
            for path, b in serial.model.named_buffers():
                _refill_tensor(b, self.buffers[path])

    def _field_model(self) -> nn.Module:
        """Return the user's module with this point's weights."""
        assert self.graph is not None
        names = {name: v.name for v in self.graph.parameters for name in (v.name, *v.aliases)}
        replaced: dict[int, nn.Parameter] = {}
        for path, p in self.model.named_parameters():
            value = random_like(p, names.get(path, path), self.seed)
            replaced[id(p)] = nn.Parameter(value, requires_grad=p.requires_grad)
        buffers = {id(b): lift_constants(b) for b in self.model.buffers() if b.is_floating_point()}
        for module in self.model.modules():
            module._parameters.update({key: replaced[id(p)] for key, p in module._parameters.items() if p is not None})
            module._buffers.update({key: buffers[id(b)] for key, b in module._buffers.items() if b is not None and id(b) in buffers})
        return self.model

    def _compare(self, step: int, rank: int, actual: RankStep, expected: StepValues) -> Iterator[Difference]:
        assert self.graph is not None
        names = {v.name: (v.name, *v.aliases) for v in (*self.graph.parameters, *self.graph.buffers)}
        loss = expected["loss"][""]
        self.degree = self.degree | degree_of(actual.loss) | degree_of(loss)
        if not have_equal_values(actual.loss, loss):
            yield Difference(step, rank, "loss", "the batch")
        for kind, shards in (("gradient", actual.gradients), ("weight", actual.state)):
            for shard in shards:
                if shard.kind not in ("parameter", "buffer", "optimizer"):
                    continue
                table = expected["gradients" if kind == "gradient" else "optimizer" if shard.slot else "weights"]
                keys = [f"{name} {shard.slot}" if shard.slot else name for name in names.get(shard.name, (shard.name,))]
                full = next((table[key] for key in keys if key in table), None)
                if full is None:
                    continue
                full = torch.view_as_real(full) if full.is_complex() and not shard.tensor.is_complex() else full  # parameters are pairs
                value = shard.tensor.sqrt() if shard.slot == "exp_avg_sq" else shard.tensor
                self.degree = self.degree | degree_of(value) | degree_of(full)
                if not have_equal_values(value, _part_of(full, shard)):
                    yield Difference(step, rank, shard.slot or kind, shard.name)


def _refill_tensor(x: Tensor, value: Tensor) -> None:
    """Write a point's numbers over those that a step has left."""
    numbers = x.pair if isinstance(x, ComplexFieldTensor) else x
    if isinstance(numbers, FieldTensor) and numbers.degree is not None:
        numbers.degree[0] = CONSTANT
    x.copy_(value)


def _part_of(full: Tensor, shard: StateShard) -> Tensor:
    """Return the part of a full tensor that a shard holds."""
    shape = shard.tensor.shape if shard.block is None else shard.block
    part = full[tuple(slice(o, o + n) for o, n in zip(shard.offsets, shape, strict=True))]
    return part if shard.flat is None else part.reshape(-1)[shard.flat[0] : shard.flat[1]]


def _has_numbers(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _copy_of(x: Tensor) -> Tensor:
    return x.detach().clone()


def _copy_shards(shards: Sequence[StateShard]) -> list[StateShard]:
    return [replace(shard, tensor=_copy_of(shard.tensor)) for shard in shards]
