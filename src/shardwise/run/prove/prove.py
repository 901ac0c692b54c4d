"""Proof of a plan without tolerance: every rank's engine and the serial model run on numbers of a finite field, and must be equal.

The engine, the executor, the kernels and the collectives are those that train (`run/engine`); only elements are other numbers
(`field_tensor`), and ranks are threads of this process (`rank_threads`). Every shard of loss, gradients, updated weights and optimizer
state on every rank is compared with the serial run (`run/verify/serial`), at several random points.

Not proven: what rounds (precision, overflow, order of sums), which `verify` measures, and operators without an exact form, which are named.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardwise.capture.nesting import named_leaves, replace_leaves
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
    lookup_rules,
    matrix_rules,
    order_rules,
    rules,
    unknown_operators,
    window_rules,
)
from shardwise.run.prove.degrees import CERTAINTY, HIGH_LEVEL, LINEAR, Degree
from shardwise.run.prove.field_tensor import (
    FieldMode,
    FieldTensor,
    NotProvable,
    degree_of,
    have_equal_values,
    random_like,
    random_numbers,
)
from shardwise.run.prove.locate import Values, WrongValue, first_wrong_value, list_comparable_values, place_of, record_values
from shardwise.run.prove.proof import Difference, Proof
from shardwise.run.prove.rank_threads import Exchange, thread_world
from shardwise.run.prove.serial_points import ProofModel, ProofOptions, SerialPoints, constant_buffers, copy_of, refill_tensor
from shardwise.run.verify.serial import StepValues
from shardwise.run.verify.verify import serial_traits
from shardwise.world.world import World

MAX_REDRAWN = 8  # points with a zero divisor, which show nothing
_MAX_CHANCE = 0.3  # of a point, above which too many would be needed


class DegreeTooHighError(NotProvable):
    """A random point shows too little, since polynomials of the model's degree may be zero at many of them."""


@dataclass
class RankStep:
    """What one rank has after a step: shards of gradients, and of weights and optimizer state after the update."""

    gradients: list[StateShard]
    state: list[StateShard]
    loss: Tensor


@dataclass(frozen=True)
class ProofSubject:
    """A plan and its model. `scales_loss`: the ranks scale the loss, and their gradients back; the serial run does not."""

    plan: Plan
    model: ProofModel
    options: ProofOptions
    scales_loss: bool


def prove_plan(
    plan: Plan, model: ProofModel, options: ProofOptions, cut_everything: bool = False, locates_difference: bool = True
) -> Proof:
    """Prove a plan, or name what differs first; the first operator that does only with `locates_difference`, which runs all again.

    Raises:
        NotProvable: an operator has no exact form.
    """
    _refuse_approximate(plan.layout)
    options = replace(options, steps=max(options.steps, plan.layout.staleness + 2 if plan.layout.staleness else 0))
    precision = plan.layout.precision
    plan = replace(plan, layout=replace(plan.layout, precision="float64", gradients="float32", all_reduce=AUTO), sums=AllReduceChoices())
    source = model.source
    if cut_everything:
        plan, source = replace(plan, shards=()), replace(source, prices=FREE_LINKS)
    source = replace(source, has_values=False)
    source.capture_all(plan, model.batch, model.loss)
    subject = ProofSubject(plan, replace(model, source=source), options, PRECISIONS[precision].scales_loss)
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
        module, self.is_float64 = subject.model.build_module(self.seed)
        self.buffers = constant_buffers(module)
        wide = [name for name, x in self.buffers.items() if x.dtype is torch.complex128]
        if wide:
            raise NotProvable(f"buffer {wide[0]} is complex128, which no checkpoint stores; make it complex64")
        self.batch = subject.model.batch
        self.steps: list[list[RankStep]] = []  # by step and rank
        self.traits: Any = None
        self.graph: Graph | None = None
        self.degree = LINEAR  # the largest of compared values
        self._joined: dict[int, Degree] = {}  # what it is the largest of, by identity
        self._weights: dict[str, FieldTensor] = {}  # this point's, of which every rank takes its shards
        self._engines: dict[int, Engine] = {}
        self._serial: SerialPoints | None = None
        self._num_points = 0
        self._room = Exchange(subject.plan.layout.num_ranks)

    def _draw_batch(self) -> Any:
        """Return the batch with random numbers in place of its floating-point ones."""
        leaves = dict(named_leaves(self.subject.model.batch))
        drawn = {
            path: random_like(x, f"batch {path}", self.seed) if isinstance(x, Tensor) and _has_numbers(x) else x
            for path, x in leaves.items()
        }
        return replace_leaves(self.subject.model.batch, drawn)

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
        return first_wrong_value(list_comparable_values(graph), whole, places, recorded)

    def _build_engine(self, world: World, plan: Plan) -> Engine:
        subject = self.subject
        optimizer, device = subject.options.optimizer, DeviceOptions(scales_loss=subject.scales_loss)
        model, seed = subject.model, subject.options.seed
        engine = Engine(plan, model.source, self.batch, model.loss, world, optimizer, seed=seed, device=device)
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
                state = engine.state_shards(drain=False)
                is_last = step == subject.options.steps - 1  # compared before anything writes them again
                self.steps[step][rank] = RankStep(gradients, state if is_last else _copy_shards(state), loss)

    def _fill_shards(self, engine: Engine, graph: Graph) -> None:
        """Write this point's weights, and the model's buffers, into a rank's shards."""
        variables = {v.name: v for v in (*graph.parameters, *graph.buffers)}
        for shard in engine.state_shards(drain=False):
            if shard.slot or shard.name not in variables or shard.kind not in ("parameter", "buffer"):
                continue
            refill_tensor(shard.tensor, _part_of(self._value_of(shard.kind, variables[shard.name]), shard))
        engine.refresh_parameter_copies()

    def _value_of(self, kind: str, v: Variable) -> Tensor:
        if kind == "buffer":
            return next(self.buffers[name] for name in (v.name, *v.aliases) if name in self.buffers)
        if v.name not in self._weights:
            self._weights[v.name] = random_numbers(v.tensor.shape, v.name, self.seed)
        return self._weights[v.name]

    def _serial_steps(self) -> list[StepValues]:
        if self._serial is None:
            assert self.graph is not None
            plan, options = self.subject.plan, self.subject.options
            self._serial = self.subject.model.serial_points_of(plan, options, self.seed, self.traits, self.graph)
        self._num_points += 1
        return self._serial.values_at(self._num_points - 1, self.seed, self.batch)

    def _join_degrees(self, *tensors: Tensor) -> None:
        """Take note of the degrees of compared tensors, of which many have the same one."""
        for x in tensors:
            degree = degree_of(x)
            if id(degree) not in self._joined:
                self._joined[id(degree)] = degree
                self.degree = self.degree | degree

    def _compare(self, step: int, rank: int, actual: RankStep, expected: StepValues) -> Iterator[Difference]:
        assert self.graph is not None
        names = {v.name: (v.name, *v.aliases) for v in (*self.graph.parameters, *self.graph.buffers)}
        loss = expected["loss"][""]
        self._join_degrees(actual.loss, loss)
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
                self._join_degrees(value, full)
                if not _is_part(value, full, shard):
                    yield Difference(step, rank, shard.slot or kind, shard.name)


def _is_part(value: Tensor, full: Tensor, shard: StateShard) -> bool:
    """Return whether a shard's value is its part of a full tensor."""
    if isinstance(value, FieldTensor) and isinstance(full, FieldTensor) and value.hidden is None and full.hidden is None:
        return torch.equal(value.a, _part_of(full.a, shard))
    return have_equal_values(value, _part_of(full, shard))


def _part_of(full: Tensor, shard: StateShard) -> Tensor:
    """Return the part of a full tensor that a shard holds."""
    shape = shard.tensor.shape if shard.block is None else shard.block
    part = full[tuple(slice(o, o + n) for o, n in zip(shard.offsets, shape, strict=True))]
    return part if shard.flat is None else part.reshape(-1)[shard.flat[0] : shard.flat[1]]


def _has_numbers(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _copy_shards(shards: Sequence[StateShard]) -> list[StateShard]:
    return [replace(shard, tensor=copy_of(shard.tensor)) for shard in shards]
