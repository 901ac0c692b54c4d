"""From a plan to this rank's parts: captured graph, sharding, program, stages, parameters with their initial values.

In: a plan, a model (deferred, real, or a function that makes one), the batch and the loss. Out: `Parts`, from which the engine runs.
Every rank does this by itself from the same inputs, so nothing but gradients and activations is ever sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Self

import torch
from torch import Tensor, nn

from weft.capture.capture import Captured, Loss, capture
from weft.capture.fakes import fake_mode
from weft.capture.init import Deferred, fake_copy, loss_of, materialize, materialize_real, realize_loss
from weft.capture.kept import kept
from weft.capture.modes import Modes, in_modes, training_modes
from weft.capture.refused import refuse_hooks, refuse_scripts
from weft.errors import Infeasible, LayoutError, ModelError
from weft.lower.arrival import Arrival
from weft.lower.groups import groups_of
from weft.lower.kernels.randomness import Draw
from weft.lower.local import Lowering, layer_of, lower
from weft.model.batch.drawn import Fold, folds_of
from weft.model.batch.normalise import Normalised
from weft.model.batch.samples import check_samples
from weft.model.collector import uncollected
from weft.model.gradients import learned
from weft.model.graph import Graph
from weft.model.sharding.propagate import propagate
from weft.model.sharding.sample_pieces import with_samples_of
from weft.model.sharding.sharding import Prices, Sharding, weighed
from weft.plan.axis import axis_of, sample_axes
from weft.plan.grid import AXES, TENSOR
from weft.plan.layout import Layout
from weft.plan.mesh import Mesh
from weft.plan.patterns import expand_all
from weft.plan.placement import is_shard
from weft.plan.plan import Plan
from weft.plan.precision import PRECISIONS
from weft.run.blocks import Blocks, Initial, in_pieces, zero_pieces
from weft.run.meshes import always_summed, between_meshes, entering_always, from_other_meshes, shares_of, stage_shardings
from weft.run.microbatch import Part, part_of, takes_no_numbers
from weft.run.recent import MOST_SIZES
from weft.run.reduce.summing import choose_sums
from weft.run.residency.layer_modules import layers_of
from weft.run.resized import Sized, constants_of, shares_of_samples, sized
from weft.run.state.optimizer import OptimizerSpec
from weft.run.state.parameters import build_groups
from weft.run.state.precision import DTYPES
from weft.run.training_parts import Parts, program_of
from weft.world.world import World


@dataclass(frozen=True)
class Source:
    """A model that has not taken memory yet (`deferred` made it), or a real one (`deferred` is None).

    `prices`: by which what a plan does not say is cut, the usual ones where None; `FREE_LINKS` cuts wherever the rules allow. Without
    `has_values` parameters and buffers have memory only, which whoever builds fills.
    """

    model: nn.Module
    deferred: Deferred | None
    prices: Prices | None = None
    has_values: bool = True

    @classmethod
    def of(cls, model: nn.Module | Callable[[], nn.Module]) -> Self:
        """A module as it is; a function is called under deferred construction."""
        if isinstance(model, nn.Module):
            refuse_scripts(model)
            return cls(model, None)
        with uncollected(), Deferred() as deferred:
            built = model()
        refuse_scripts(built)
        return cls(built, deferred)

    def loss_of(self, loss: Loss | None) -> Loss | None:
        """The loss that belongs to this model, with real tensors where it was made without memory beside it."""
        criterion = loss_of(loss, self.model)
        return criterion if criterion is None or self.deferred is None else realize_loss(self.deferred, criterion, self.model)

    def capture(
        self, batch: Any, loss: Loss | None, batch_size: int | None, outputs: bool = False, modes: Modes | None = None
    ) -> Captured:
        """Capture the model on a batch of `batch_size` samples, as it trains or in other `modes`.

        Raises:
            ModelError: it cannot be followed.
        """
        refuse_hooks(self.model)
        loss = self.loss_of(loss)
        modes = training_modes(self.model) if modes is None else modes
        with in_modes(self.model, modes):
            asked = (modes, batch_size, outputs, self.deferred is None)
            return kept(self.model, loss, batch, asked, lambda: self._capture(batch, loss, batch_size, outputs))

    def _capture(self, batch: Any, loss: Loss | None, batch_size: int | None, outputs: bool) -> Captured:
        if self.deferred is not None:
            deferred = self.deferred
            captured = capture(self.model, batch, loss, batch_size=batch_size, fake_mode=deferred.fake_mode, outputs=outputs)
            # A tensor that is a plain attribute of the module comes out as the fake that it is here.
            constants = {v: deferred.value(t) if deferred.is_fake(t) else t for v, t in captured.constants.items()}
            return replace(captured, constants=constants)
        mode, originals = fake_mode(), dict[int, Tensor]()
        captured = capture(fake_copy(self.model, mode, originals), batch, loss, batch_size=batch_size, fake_mode=mode, outputs=outputs)
        return replace(captured, constants={v: originals.get(id(t), t) for v, t in captured.constants.items()})

    def part(self, plan: Plan, batch: Any, loss: Loss | None, size: int, samples: int, modes: Modes | None = None) -> Part:
        """A microbatch of `size` samples of a batch of `samples`, in the precision of a plan; `modes` as for `capture`."""
        captured = self.capture(batch, loss, size, modes=modes)
        graph = in_precision(captured.graph, plan)
        if plan.layout.replicas * plan.layout.microbatches == 1:
            return Part(Normalised(graph), captured.constants, captured.graph, structure=captured.structure)
        captured_part = replace(captured, graph=graph)

        def of(count: int) -> Captured:
            if count == size:
                return captured_part
            other = self.capture(batch, loss, count, modes=modes)
            return replace(other, graph=in_precision(other.graph, plan))

        full = of(plan.batch_size)
        step = full if samples == plan.batch_size or takes_no_numbers(captured_part, full) else of(samples)
        part = part_of(captured_part, full, step, plan.layout.microbatches == 1)
        return replace(part, captured=captured.graph)

    def sharding(self, plan: Plan, graph: Graph) -> Sharding:
        """The complete sharding that a plan means for a graph."""
        return shard_of(plan, graph, self.prices)

    def take(self, take: Callable[[str, Tensor], Tensor | None], dtype: torch.dtype | None) -> dict[str, Tensor]:
        """Initial values, one tensor at a time: what `take(name, tensor)` returns is kept."""
        if self.deferred is not None:
            return materialize(self.deferred, self.model, take, dtype)
        return materialize_real(self.model, take, dtype)

    def initial(self, initial: Initial) -> dict[str, Tensor]:
        """The buffers, and parameters where they lie, with their values; without them where there are none."""
        return self.take(initial.take, None) if self.has_values else initial.rooms()


@dataclass(frozen=True)
class Traced(Source):
    """A source that captures and shards once. Ranks that are forked from this process inherit what it knows, and need not trace again."""

    captured: dict[tuple[int | None, bool, Modes], Captured] = field(default_factory=dict)
    shardings: dict[tuple[object, ...], Sharding] = field(default_factory=dict)
    parts: dict[tuple[object, ...], Part] = field(default_factory=dict)

    def capture(
        self, batch: Any, loss: Loss | None, batch_size: int | None, outputs: bool = False, modes: Modes | None = None
    ) -> Captured:
        """As `Source.capture`, once for each number of samples and modes; the batch and the loss must stay the same."""
        modes = training_modes(self.model) if modes is None else modes
        key = (batch_size, outputs, modes)
        if key not in self.captured:
            self.captured[key] = super().capture(batch, loss, batch_size, outputs, modes)
        return self.captured[key]

    def sharding(self, plan: Plan, graph: Graph) -> Sharding:
        """As `Source.sharding`, once for each way of cutting."""
        layout = plan.layout
        key = (
            layout.axes[1:],
            layout.sequence_parallel,
            layout.sample_parallel,
            layout.shares,
            layout.attention,
            plan.shards,
            graph.batch_size,
            layout.precision,
            self.prices,
            len(graph.operators),  # a part of a batch has some more than one that is whole
        )
        if key not in self.shardings:
            self.shardings[key] = shard_of(plan, graph, self.prices)
        return self.shardings[key]

    def part(self, plan: Plan, batch: Any, loss: Loss | None, size: int, samples: int, modes: Modes | None = None) -> Part:
        """As `Source.part`, once for each division of a batch and modes."""
        layout = plan.layout
        modes = training_modes(self.model) if modes is None else modes
        key = (modes, size, samples, plan.batch_size, DTYPES[layout.precision], layout.replicas == 1, layout.microbatches == 1)
        if key not in self.parts:
            self.parts[key] = super().part(plan, batch, loss, size, samples, modes)
        return self.parts[key]

    def prepare(self, plan: Plan, batch: Any, loss: Loss | None, modes: Modes | None = None) -> None:
        """Capture what the ranks of a plan will ask for, in training, whose sharding others have, or in other modes.

        Raises:
            ModelError: the model cannot be followed so.
        """
        if plan.uncaptured:
            return
        first, *others = plan.microbatch_sizes
        part = self.part(plan, batch, loss, first, plan.batch_size, modes)
        if modes is None:
            self.sharding(plan, part.normal.graph)
        for size in others:
            self.part(plan, batch, loss, size, plan.batch_size, modes)
        folds(plan, self, part.captured, batch, loss, modes)


def shard_of(plan: Plan, graph: Graph, prices: Prices | None = None) -> Sharding:
    """The complete sharding that a plan means for a graph, with what it does not say cut by `prices`.

    Raises:
        LayoutError: cuts over an axis of tensor ranks that the layout does not have, or that the graph cannot have.
    """
    cuts = expand_all(plan.shards, (v.name for v in (*graph.parameters, *graph.buffers)))
    sizes = {axis: n for axis, n in plan.layout.axes if axis_of(axis).cuts}
    lost = [axis for axis in cuts if axis in (TENSOR, *AXES) and axis not in sizes]
    if lost and plan.layout.tensor > 1:
        have = ", ".join(axis for axis, _ in plan.layout.tensor_axes)
        raise LayoutError(
            f"the plan cuts parameters over {', '.join(lost)}, and the tensor ranks of {plan.layout} lie along {have}; "
            f"leave [shards.{lost[0]}] out, or name it after one of these"
        )
    layout = plan.layout
    sequence, samples = layout.sequence_parallel == "on", layout.sample_parallel == "on"
    each = weighed(-(-plan.batch_size // (layout.data * layout.microbatches)))
    prices = prices or Prices(samples=each * layout.data)
    sharding = propagate(graph, sizes, cuts, prices=prices, sequence=sequence, samples=samples, attention=layout.attention)
    return with_samples_of(sharding, graph, shares_of_samples(layout)) if layout.shares else sharding


def build(
    plan: Plan, source: Source, batch: Any, loss: Loss | None, world: World, optimizer: OptimizerSpec, seed: int, outputs: bool = False
) -> Parts:
    """Capture, shard, cut into stages, lower those that the program gives this rank, and give them their initial values.

    Raises:
        Infeasible: the world has another number of ranks than the layout, or the batch does not divide.
        ModelError: the model cannot be captured. LayoutError: a choice that is planned, but not built for running.
        ProgramError: a schedule of the user's own that is for other links between stages, or is refuted.
    """
    layout = plan.layout
    mesh = _mesh_of(layout, world)
    first, dtype = plan.microbatch_sizes[0], DTYPES[layout.precision]
    part = outputs_of(source, plan, batch, first) if outputs else source.part(plan, batch, loss, first, plan.batch_size)
    graph, normal = part.normal.graph, part.normal
    _check_dtypes(graph, layout.precision)
    check_samples(graph, layout)
    stages = normal.stages(plan.stages)
    layout.residency.check([list(dict.fromkeys(filter(None, (layer_of(op.site) for op in s.operators)))) or [""] for s in stages])
    program = program_of(plan, stages, world)
    at = mesh.coordinates(world.rank)
    shardings = stage_shardings(plan, source, graph, stages)
    sharding = shardings[at["pipeline"]]  # of all stages of a rank
    mine, draw = [stages[s] for s in program.stages_of[at["pipeline"]]], Draw(seed=seed)
    groups = groups_of(graph, sharding, mesh, world)
    rows, arriving = rows_of_outputs(source, batch, graph, sharding) if outputs else {}, frozenset(t.variable for t in normal.totals)
    across = between_meshes(layout, stages) & {v.value for v in graph.parameters}
    shares, apart = shares_of(across, sharding, mesh), from_other_meshes(layout, mine)
    arrival, samples_at = Arrival(), folds(plan, source, part.captured, batch, loss)
    how = layout.local_statistics, PRECISIONS[layout.precision], entering_always(layout, graph, sharding, mesh)
    lowering = Lowering(graph, sharding, groups, world.device, draw, rows, shares, apart, samples_at, arriving, arrival, *how)
    lowered = {stage.index: lower(stage, lowering) for stage in mine}
    lowered_like = Sized(normal, lowered, {}, shardings, sharding)

    def other(size: int, samples: int) -> Sized:
        if (size, samples) == (first, plan.batch_size):
            return lowered_like
        that = outputs_of(source, plan, batch, size) if outputs else source.part(plan, batch, loss, size, samples)
        # Outputs are of whole batches.
        placed = lowering if outputs else replace(lowering, folds=samples_at or folds(plan, source, that.captured, batch, loss))
        return sized(lowered_like, placed, that.normal, plan, constants_of(that.constants, world.device, dtype))

    # What a plain loop's outputs do not depend on its loss may: a weight for each of several losses, a temperature.
    trainable = {v.value for v in graph.parameters if v.trainable} if outputs else learned(graph)
    pieces = zero_pieces(graph, sharding) if outputs and layout.zero else {}
    always, updates_apart = sample_axes(mesh.inside) if outputs else always_summed(layout), layout.servers > 0 or layout.staleness > 0
    blocks = Blocks(mesh, at, in_pieces(sharding, graph, pieces), stages, program, across, always, updates_apart)
    specs, zero = blocks.specs(graph, trainable, optimizer, dtype, layers_of(lowered)), 0 if outputs else layout.zero
    flat, parameters = build_groups(list(specs.values()), world.device, zero, world.rank, plan.bucket_bytes, layout.servers_of(world.rank))
    choose_sums(plan, world, flat)
    of_buffers = {v.name: (v, blocks.of(v)) for v in graph.buffers if blocks.holds(v)}
    buffers = source.initial(Initial(specs, parameters, flat, of_buffers, world.device, dtype))
    used, held = {value for stage in mine for value in stage.variables}, {**parameters, **buffers}
    variables: dict[str, Tensor] = {v: t for v, t in constants_of(part.constants, world.device, dtype).items() if v in used}
    variables |= {v.value: held[v.name] for v in (*graph.parameters, *graph.buffers) if v.value in used and v.name in held}
    return Parts(
        graph, sharding, stages, program, lowered, parameters, specs, flat, buffers, of_buffers, variables, draw, part.structure,
        frozenset(source.model.state_dict(keep_vars=True)), lru_cache(MOST_SIZES)(other), samples_at, shardings, lowering, part.coupled,
        normal.counted_from, arrival, pieces,
    )  # fmt: skip


def _mesh_of(layout: Layout, world: World) -> Mesh:
    """The mesh of a layout that runs in this world."""
    mesh = layout.mesh_of(world.rank)
    if mesh.num_ranks != world.num_ranks:
        raise Infeasible(f"the layout {layout} needs {mesh.num_ranks} ranks, {world.num_ranks} were started")
    return mesh


def folds(
    plan: Plan, source: Source, graph: Graph, batch: Any, loss: Loss | None, modes: Modes | None = None
) -> tuple[Fold | None, ...]:
    """Where the samples lie in what a model draws, draw by draw; nothing where a microbatch is the whole batch."""
    sizes = {*plan.microbatch_sizes, plan.batch_size} - {graph.batch_size}
    if not sizes:
        return ()
    other = min(sizes)
    return folds_of(graph, lambda: source.capture(batch, loss, other, modes=modes).graph)


def _check_dtypes(graph: Graph, precision: str) -> None:
    """Raise ModelError for a trainable parameter of another dtype than that of the weights that `precision` trains."""
    want = str(DTYPES[precision]).removeprefix("torch.")
    for v in graph.parameters:
        if v.trainable and v.tensor.dtype.startswith("complex"):
            raise ModelError(
                f"parameter {v.name} is complex, and the model writes it while it runs, which is not supported yet; keep its real and its "
                "imaginary part as two parameters, and join them with torch.complex in forward"
            )
        if v.trainable and v.tensor.dtype != want:
            other = next((name for name, dtype in DTYPES.items() if str(dtype).removeprefix("torch.") == v.tensor.dtype), None)
            keeps = f"precision={other} trains it as it is, or " if other is not None else ""
            raise ModelError(
                f"parameter {v.name} is {v.tensor.dtype}, and precision={precision} trains weights of {want}; {keeps}make the model in "
                "float32 (model.float()), and choose how it computes by precision=bfloat16"
            )


def rows_of_outputs(source: Source, batch: Any, graph: Graph, sharding: Sharding, modes: Modes | None = None) -> dict[str, int]:
    """Which dimension of each output follows the samples: the one that ranks with other samples have a part of; of an output that is whole,
    as a capture with twice as many shows, since another may be as long by accident."""
    axes = sharding.sample_axes
    if not axes:  # every rank has all of them
        return {}
    forms = {v: [form for axis in axes if is_shard(form := sharding.forms[v][axis])] for v in graph.outputs}
    dims = {v: those[0].dim for v, those in forms.items() if those}
    if all(v in dims or not graph.tensors[v].shape for v in graph.outputs):
        return dims
    try:
        twice = source.capture(batch, None, 2 * graph.batch_size, outputs=True, modes=modes).graph
    except ModelError:  # the model knows its number of samples
        return {v: 0 for v in graph.outputs if graph.tensors[v].shape[:1] == (graph.batch_size,)}
    for value, other in zip(graph.outputs, twice.outputs, strict=True):
        shape = graph.tensors[value].shape
        grown = [dim for dim, (n, m) in enumerate(zip(shape, twice.tensors[other].shape, strict=True)) if n != m]
        if grown:
            dims[value] = grown[0]
    return dims


def outputs_of(source: Source, plan: Plan, batch: Any, size: int, modes: Modes | None = None) -> Part:
    """Of a model without a loss, whose outputs are handed out as they are."""
    captured = source.capture(batch, None, size, True, modes)
    return Part(Normalised(in_precision(captured.graph, plan)), captured.constants, captured.graph, structure=captured.structure)


def in_precision(graph: Graph, plan: Plan) -> Graph:
    """The graph in the dtype that a plan computes in."""
    return graph.cast("float64") if DTYPES[plan.layout.precision] is torch.float64 else graph
