"""Build one rank's model from a plan: capture the graph, shard it, cut it into stages, lower this rank's, initialise its parameters.

In: a plan, a model (deferred, real, or a factory), the batch and the loss. Out: the `RankModel` that the engine runs. Every rank does
this by itself from the same inputs (SPMD), so that only gradients and activations are ever sent.
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
    """A model under deferred initialisation (`deferred`), which has no memory yet, or a real one (`deferred` is None).

    `prices`: cost model that chooses the sharding of what the plan leaves open; None: the default prices; `FREE_LINKS` shards wherever the
    rules allow. Without `has_values` parameters and buffers are allocated but not initialised; the caller fills them.
    """

    model: nn.Module
    deferred: Deferred | None
    prices: Prices | None = None
    has_values: bool = True

    @classmethod
    def of(cls, model: nn.Module | Callable[[], nn.Module]) -> Self:
        """Wrap a module as it is, or call a factory under deferred initialisation."""
        if isinstance(model, nn.Module):
            refuse_scripts(model)
            return cls(model, None)
        with uncollected(), Deferred() as deferred:
            built = model()
        refuse_scripts(built)
        return cls(built, deferred)

    def loss_of(self, loss: Loss | None) -> Loss | None:
        """Return the loss that belongs to this model, materialised if it was built under deferred initialisation too."""
        criterion = loss_of(loss, self.model)
        return criterion if criterion is None or self.deferred is None else realize_loss(self.deferred, criterion, self.model)

    def capture(self, batch: Any, loss: Loss | None, batch_size: int | None, outputs: bool = False, modes: Modes | None = None) -> Captured:
        """Capture the model on a batch of `batch_size` samples, in training mode or in other `modes`.

        Raises:
            ModelError: it cannot be captured.
        """
        refuse_hooks(self.model)
        loss = self.loss_of(loss)
        modes = training_modes(self.model) if modes is None else modes
        with in_modes(self.model, modes):
            cache_key = (modes, batch_size, outputs, self.deferred is None)
            return kept(self.model, loss, batch, cache_key, lambda: self._capture(batch, loss, batch_size, outputs))

    def _capture(self, batch: Any, loss: Loss | None, batch_size: int | None, outputs: bool) -> Captured:
        if self.deferred is not None:
            deferred = self.deferred
            captured = capture(self.model, batch, loss, batch_size=batch_size, fake_mode=deferred.fake_mode, outputs=outputs)
            # A tensor that is a plain attribute of the module is captured as a fake tensor; replace it by its value.
            constants = {v: deferred.value(t) if deferred.is_fake(t) else t for v, t in captured.constants.items()}
            return replace(captured, constants=constants)
        mode, originals = fake_mode(), dict[int, Tensor]()
        captured = capture(fake_copy(self.model, mode, originals), batch, loss, batch_size=batch_size, fake_mode=mode, outputs=outputs)
        return replace(captured, constants={v: originals.get(id(t), t) for v, t in captured.constants.items()})

    def part(self, plan: Plan, batch: Any, loss: Loss | None, size: int, samples: int, modes: Modes | None = None) -> Part:
        """Capture a microbatch of `size` samples of a batch of `samples`, in the precision of a plan; `modes` as for `capture`."""
        captured = self.capture(batch, loss, size, modes=modes)
        graph = in_precision(captured.graph, plan)
        if plan.layout.replicas * plan.layout.microbatches == 1:
            return Part(Normalised(graph), captured.constants, captured.graph, structure=captured.structure)
        captured_part = replace(captured, graph=graph)

        def capture_size(count: int) -> Captured:
            if count == size:
                return captured_part
            captured_other = self.capture(batch, loss, count, modes=modes)
            return replace(captured_other, graph=in_precision(captured_other.graph, plan))

        full = capture_size(plan.batch_size)
        step = full if samples == plan.batch_size or takes_no_numbers(captured_part, full) else capture_size(samples)
        part = part_of(captured_part, full, step, plan.layout.microbatches == 1)
        return replace(part, captured=captured.graph)

    def sharding(self, plan: Plan, graph: Graph) -> Sharding:
        """Return the complete sharding of a graph under a plan."""
        return shard_of(plan, graph, self.prices)

    def take(self, take: Callable[[str, Tensor], Tensor | None], dtype: torch.dtype | None) -> dict[str, Tensor]:
        """Materialise initial values, one tensor at a time; return what `select(name, tensor)` returns, by name."""
        if self.deferred is not None:
            return materialize(self.deferred, self.model, take, dtype)
        return materialize_real(self.model, take, dtype)

    def initial(self, initial: Initial) -> dict[str, Tensor]:
        """Initialise this rank's parameters in place and return its buffers; only allocate the buffers if there are no values."""
        return self.take(initial.take, None) if self.has_values else initial.rooms()


@dataclass(frozen=True)
class Traced(Source):
    """A source that caches captures and shardings. Ranks forked from this process inherit the caches and need not trace again."""

    captured: dict[tuple[int | None, bool, Modes], Captured] = field(default_factory=dict)
    shardings: dict[tuple[object, ...], Sharding] = field(default_factory=dict)
    parts: dict[tuple[object, ...], Part] = field(default_factory=dict)

    def capture(self, batch: Any, loss: Loss | None, batch_size: int | None, outputs: bool = False, modes: Modes | None = None) -> Captured:
        """Return `ModelSource.capture`, cached by number of samples and modes; the batch and the loss must stay the same."""
        modes = training_modes(self.model) if modes is None else modes
        key = (batch_size, outputs, modes)
        if key not in self.captured:
            self.captured[key] = super().capture(batch, loss, batch_size, outputs, modes)
        return self.captured[key]

    def sharding(self, plan: Plan, graph: Graph) -> Sharding:
        """Return `ModelSource.sharding`, cached by what of the plan it depends on."""
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
            len(graph.operators),  # a microbatch has a few more than a whole batch
        )
        if key not in self.shardings:
            self.shardings[key] = shard_of(plan, graph, self.prices)
        return self.shardings[key]

    def part(self, plan: Plan, batch: Any, loss: Loss | None, size: int, samples: int, modes: Modes | None = None) -> Part:
        """Return `ModelSource.capture_microbatch`, cached by microbatch size, batch size, precision and modes."""
        layout = plan.layout
        modes = training_modes(self.model) if modes is None else modes
        key = (modes, size, samples, plan.batch_size, DTYPES[layout.precision], layout.replicas == 1, layout.microbatches == 1)
        if key not in self.parts:
            self.parts[key] = super().part(plan, batch, loss, size, samples, modes)
        return self.parts[key]

    def prepare(self, plan: Plan, batch: Any, loss: Loss | None, modes: Modes | None = None) -> None:
        """Fill the caches with everything that the ranks of a plan will capture, in training or in other `modes`.

        Raises:
            ModelError: the model cannot be captured so.
        """
        if plan.uncaptured:
            return
        first, *other_sizes = plan.microbatch_sizes
        part = self.part(plan, batch, loss, first, plan.batch_size, modes)
        if modes is None:
            self.sharding(plan, part.normal.graph)
        for size in other_sizes:
            self.part(plan, batch, loss, size, plan.batch_size, modes)
        folds(plan, self, part.captured, batch, loss, modes)


def shard_of(plan: Plan, graph: Graph, prices: Prices | None = None) -> Sharding:
    """Return the complete sharding of a graph under a plan; what the plan leaves open is chosen by `prices`.

    Raises:
        LayoutError: shards over a tensor axis that the layout does not have, or that the graph does not allow.
    """
    cuts = expand_all(plan.shards, (v.name for v in (*graph.parameters, *graph.buffers)))
    sizes = {axis: n for axis, n in plan.layout.axes if axis_of(axis).cuts}
    missing_axes = [axis for axis in cuts if axis in (TENSOR, *AXES) and axis not in sizes]
    if missing_axes and plan.layout.tensor > 1:
        axis_names = ", ".join(axis for axis, _ in plan.layout.tensor_axes)
        raise LayoutError(
            f"the plan cuts parameters over {', '.join(missing_axes)}, and the tensor ranks of {plan.layout} lie along {axis_names}; "
            f"leave [shards.{missing_axes[0]}] out, or name it after one of these"
        )
    layout = plan.layout
    sequence, samples = layout.sequence_parallel == "on", layout.sample_parallel == "on"
    samples_per_rank = weighed(-(-plan.batch_size // (layout.data * layout.microbatches)))
    prices = prices or Prices(samples=samples_per_rank * layout.data)
    sharding = propagate(graph, sizes, cuts, prices=prices, sequence=sequence, samples=samples, attention=layout.attention)
    return with_samples_of(sharding, graph, shares_of_samples(layout)) if layout.shares else sharding


def build(
    plan: Plan, source: Source, batch: Any, loss: Loss | None, world: World, optimizer: OptimizerSpec, seed: int, outputs: bool = False
) -> Parts:
    """Capture the model, shard it, cut it into stages, lower this rank's stages and initialise their parameters.

    Raises:
        Infeasible: the world has another number of ranks than the layout, or the batch does not divide.
        ModelError: the model cannot be captured. LayoutError: a choice that can be planned, but not run yet.
        ProgramError: a custom schedule for other links between stages, or one that is proven wrong.
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
    sharding = shardings[at["pipeline"]]  # the same for all stages of a rank
    local_stages, draw = [stages[s] for s in program.stages_of[at["pipeline"]]], Draw(seed=seed)
    groups = groups_of(graph, sharding, mesh, world)
    rows, arriving = rows_of_outputs(source, batch, graph, sharding) if outputs else {}, frozenset(t.variable for t in normal.totals)
    across = between_meshes(layout, stages) & {v.value for v in graph.parameters}
    shares, from_other_mesh = shares_of(across, sharding, mesh), from_other_meshes(layout, local_stages)
    arrival, samples_at = Arrival(), folds(plan, source, part.captured, batch, loss)
    lowering = Lowering(
        graph=graph, sharding=sharding, groups=groups, device=world.device, draw=draw, rows=rows, shares=shares, apart=from_other_mesh,
        folds=samples_at, awaited=arriving, arrival=arrival, local_statistics=layout.local_statistics,
        precision=PRECISIONS[layout.precision], entering=entering_always(layout, graph, sharding, mesh),
    )  # fmt: skip
    lowered = {stage.index: lower(stage, lowering) for stage in local_stages}
    full_variant = Sized(normal, lowered, {}, shardings, sharding)

    def build_variant(size: int, samples: int) -> Sized:
        if (size, samples) == (first, plan.batch_size):
            return full_variant
        resized = outputs_of(source, plan, batch, size) if outputs else source.part(plan, batch, loss, size, samples)
        # Outputs are always of whole batches.
        its_lowering = lowering if outputs else replace(lowering, folds=samples_at or folds(plan, source, resized.captured, batch, loss))
        return sized(full_variant, its_lowering, resized.normal, plan, constants_of(resized.constants, world.device, dtype))

    # In a plain loop parameters that the outputs do not depend on may enter the user's loss: loss weights, a temperature.
    trainable = {v.value for v in graph.parameters if v.trainable} if outputs else learned(graph)
    shards_by_name = zero_pieces(graph, sharding) if outputs and layout.zero else {}
    always, per_replica = sample_axes(mesh.inside) if outputs else always_summed(layout), layout.servers > 0 or layout.staleness > 0
    blocks = Blocks(mesh, at, in_pieces(sharding, graph, shards_by_name), stages, program, across, always, per_replica)
    specs, zero = blocks.specs(graph, trainable, optimizer, dtype, layers_of(lowered)), 0 if outputs else layout.zero
    flat, parameters = build_groups(list(specs.values()), world.device, zero, world.rank, plan.bucket_bytes, layout.servers_of(world.rank))
    choose_sums(plan, world, flat)
    buffer_blocks = {v.name: (v, blocks.of(v)) for v in graph.buffers if blocks.holds(v)}
    buffers = source.initial(Initial(specs, parameters, flat, buffer_blocks, world.device, dtype))
    used_values, tensors = {value for stage in local_stages for value in stage.variables}, {**parameters, **buffers}
    variables: dict[str, Tensor] = {v: t for v, t in constants_of(part.constants, world.device, dtype).items() if v in used_values}
    variables |= {v.value: tensors[v.name] for v in (*graph.parameters, *graph.buffers) if v.value in used_values and v.name in tensors}
    return Parts(
        graph=graph, sharding=sharding, stages=stages, program=program, lowered=lowered, parameters=parameters, specs=specs, groups=flat,
        buffers=buffers, blocks=buffer_blocks, variables=variables, draw=draw, structure=part.structure,
        saved=frozenset(source.model.state_dict(keep_vars=True)), sized=lru_cache(MOST_SIZES)(build_variant), folds=samples_at,
        shardings=shardings, lowering=lowering, coupled=part.coupled, counted=normal.counted_from, arrival=arrival, pieces=shards_by_name,
    )  # fmt: skip


def _mesh_of(layout: Layout, world: World) -> Mesh:
    """Return the mesh of a layout, after checking that this world has as many ranks."""
    mesh = layout.mesh_of(world.rank)
    if mesh.num_ranks != world.num_ranks:
        raise Infeasible(f"the layout {layout} needs {mesh.num_ranks} ranks, {world.num_ranks} were started")
    return mesh


def folds(plan: Plan, source: Source, graph: Graph, batch: Any, loss: Loss | None, modes: Modes | None = None) -> tuple[Fold | None, ...]:
    """Return how samples lie in each random tensor of the model, draw by draw; nothing if a microbatch is the whole batch."""
    sizes = {*plan.microbatch_sizes, plan.batch_size} - {graph.batch_size}
    if not sizes:
        return ()
    other_size = min(sizes)
    return folds_of(graph, lambda: source.capture(batch, loss, other_size, modes=modes).graph)


def _check_dtypes(graph: Graph, precision: str) -> None:
    """Raise ModelError for a trainable parameter whose dtype is not that of the weights under `precision`."""
    expected = str(DTYPES[precision]).removeprefix("torch.")
    for v in graph.parameters:
        if v.trainable and v.tensor.dtype.startswith("complex"):
            raise ModelError(
                f"parameter {v.name} is complex, and the model writes it while it runs, which is not supported yet; keep its real and its "
                "imaginary part as two parameters, and join them with torch.complex in forward"
            )
        if v.trainable and v.tensor.dtype != expected:
            other_precision = next((name for name, dtype in DTYPES.items() if str(dtype).removeprefix("torch.") == v.tensor.dtype), None)
            keep = f"precision={other_precision} trains it as it is, or " if other_precision is not None else ""
            raise ModelError(
                f"parameter {v.name} is {v.tensor.dtype}, and precision={precision} trains weights of {expected}; {keep}make the model in "
                "float32 (model.float()), and choose how it computes by precision=bfloat16"
            )


def rows_of_outputs(source: Source, batch: Any, graph: Graph, sharding: Sharding, modes: Modes | None = None) -> dict[str, int]:
    """Return the sample dimension of each output: the one sharded over sample axes; for a replicated output, the one that doubles in a
    capture with twice the samples (another dimension may have the same length by coincidence)."""
    axes = sharding.sample_axes
    if not axes:  # every rank has all samples
        return {}
    forms = {v: [form for axis in axes if is_shard(form := sharding.forms[v][axis])] for v in graph.outputs}
    dims = {v: sharded[0].dim for v, sharded in forms.items() if sharded}
    if all(v in dims or not graph.tensors[v].shape for v in graph.outputs):
        return dims
    try:
        doubled = source.capture(batch, None, 2 * graph.batch_size, outputs=True, modes=modes).graph
    except ModelError:  # the model has a fixed number of samples
        return {v: 0 for v in graph.outputs if graph.tensors[v].shape[:1] == (graph.batch_size,)}
    for value, other_value in zip(graph.outputs, doubled.outputs, strict=True):
        shape = graph.tensors[value].shape
        grown_dims = [dim for dim, (n, m) in enumerate(zip(shape, doubled.tensors[other_value].shape, strict=True)) if n != m]
        if grown_dims:
            dims[value] = grown_dims[0]
    return dims


def outputs_of(source: Source, plan: Plan, batch: Any, size: int, modes: Modes | None = None) -> Part:
    """Capture a microbatch of a model without a loss, whose outputs are returned as they are."""
    captured = source.capture(batch, None, size, True, modes)
    return Part(Normalised(in_precision(captured.graph, plan)), captured.constants, captured.graph, structure=captured.structure)


def in_precision(graph: Graph, plan: Plan) -> Graph:
    """Return the graph in the dtype that a plan computes in."""
    return graph.cast("float64") if DTYPES[plan.layout.precision] is torch.float64 else graph
