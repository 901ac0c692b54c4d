"""Sources of a model: a module under deferred initialisation or a real one, with its captures and shardings, cached on request.

In: a module, or a factory of one. Out: captures of batches of any size, normalised graphs of microbatches, the sharding of a graph under a
plan, and initial values of parameters and buffers, one tensor at a time.

The graph of a microbatch is normalised for gradient accumulation, from captures of a microbatch, of the plan's whole batch and of a step's
batch (the last of an epoch may be smaller), so that microbatch losses add up to the loss of the whole batch. If samples interact,
microbatch losses are weighted by their samples, and the coupling is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, Self

import torch
from torch import Tensor, nn

from shardwise.capture.attribute_reads import AttributeRead
from shardwise.capture.cache import cached_capture
from shardwise.capture.capture import CapturedGraph, Loss, capture
from shardwise.capture.fakes import fake_copy, fake_mode
from shardwise.capture.initialization import DeferredInit, loss_of, materialize_loss, materialize_shards, take_real_shards
from shardwise.capture.modes import Modes, in_modes, training_modes
from shardwise.capture.unsupported_models import refuse_hooks, refuse_scripts
from shardwise.errors import LayoutError
from shardwise.model.batch.additive import SampleCoupling, analyze_additivity
from shardwise.model.batch.random_draws import SampleFold, find_sample_folds
from shardwise.model.batch.summable_loss import SummableLossGraph, matches_full_batch, normalize_loss, with_counted_means
from shardwise.model.gc_pause import gc_paused
from shardwise.model.graph import Graph, Operator
from shardwise.model.sharding.propagate import propagate
from shardwise.model.sharding.sample_shards import resize_sample_shards
from shardwise.model.sharding.sharding import Prices, Sharding, priced_num_samples, refuse_idle_axes
from shardwise.plan.ir.axis import axis_of
from shardwise.plan.ir.grid import GRID_AXES, TENSOR
from shardwise.plan.ir.patterns import expand_shards
from shardwise.plan.plan import Plan
from shardwise.run.parts.local_blocks import InitialValues
from shardwise.run.parts.microbatch_variants import sample_shares
from shardwise.run.parts.runnable_sharding import shard_runnable
from shardwise.run.state.precision import DTYPES


@dataclass(frozen=True)
class CapturedMicrobatch:
    """`loss_graph`: normalised graph of a microbatch; `captured`: original graph; `couplings`: where it differs from the whole batch."""

    loss_graph: SummableLossGraph
    constants: Mapping[str, Tensor]
    captured: Graph
    couplings: tuple[SampleCoupling, ...] = ()
    structure: Any = None


def normalise_microbatch(
    microbatch: CapturedGraph, full: CapturedGraph, step: CapturedGraph, is_only_microbatch: bool
) -> CapturedMicrobatch:
    """Normalise a microbatch of a batch like `step`; `full` has at least two samples. `is_only_microbatch`: there are no others.

    If samples interact, the graph stays as captured, and losses are weighted by their samples.
    """
    first_difference = _first_difference(microbatch.graph, full.graph) or _first_difference(microbatch.graph, step.graph)
    if first_difference is not None:
        coupled = (SampleCoupling(first_difference, "computes something else on the whole batch than on a microbatch"),)
        return CapturedMicrobatch(
            SummableLossGraph(microbatch.graph), microbatch.constants, microbatch.graph, coupled, microbatch.structure
        )
    additive_values = analyze_additivity(with_counted_means(full.graph), with_counted_means(microbatch.graph))
    if additive_values.coupled and not is_only_microbatch:
        return CapturedMicrobatch(
            SummableLossGraph(microbatch.graph), microbatch.constants, microbatch.graph, additive_values.coupled, microbatch.structure
        )
    constants = {v: _constant_of_batch(x, step.constants[v]) for v, x in microbatch.constants.items()}
    loss_graph = normalize_loss(with_counted_means(microbatch.graph), with_counted_means(step.graph), additive_values)
    return CapturedMicrobatch(loss_graph, constants, microbatch.graph, additive_values.coupled, microbatch.structure)


def depends_on_sizes_only(microbatch: CapturedGraph, full: CapturedGraph) -> bool:
    """Return whether only sizes, but no other constants of a graph, depend on the number of samples."""
    if microbatch.graph.batch_size == full.graph.batch_size or _first_difference(microbatch.graph, full.graph) is not None:
        return False
    constants = [(x, full.constants[v]) for v, x in microbatch.constants.items()]
    pairs = zip(microbatch.graph.operators, full.graph.operators, strict=True)
    return all(x.shape != y.shape or x.equal(y) for x, y in constants) and all(matches_full_batch(op, full_op) for op, full_op in pairs)


def _constant_of_batch(of_microbatch: Tensor, of_batch: Tensor) -> Tensor:
    """Return the whole batch's constant, unless its shape depends on the number of samples."""
    return of_batch if of_microbatch.shape == of_batch.shape else of_microbatch


def _first_difference(first: Graph, other: Graph) -> str | None:
    """Return the site of the first operator in which two graphs differ; None if they agree but for sizes."""
    for op, other_op in zip_longest(first.operators, other.operators):
        if op is None or other_op is None or _operator_key(op) != _operator_key(other_op):
            return (op or other_op).site
        if any(len(first.tensors[v].shape) != len(other.tensors[v].shape) for v in op.outputs):
            return op.site
    return None


def _operator_key(op: Operator) -> tuple[object, ...]:
    return op.name, op.target, op.inputs, op.outputs


@dataclass(frozen=True)
class ModelSource:
    """A model under deferred initialisation (`deferred`), which has no memory yet, or a real one (`deferred` is None).

    `prices`: cost model that chooses the sharding of what the plan leaves open; None: the default prices; `FREE_LINKS` shards wherever the
    rules allow. Without `has_values` parameters and buffers are allocated but not initialised; the caller fills them.
    """

    model: nn.Module
    deferred: DeferredInit | None
    prices: Prices | None = None
    has_values: bool = True

    @classmethod
    def from_model(cls, model: nn.Module | Callable[[], nn.Module]) -> Self:
        """Wrap a module as it is, or call a factory under deferred initialisation."""
        if isinstance(model, nn.Module):
            refuse_scripts(model)
            return cls(model, None)
        with gc_paused(), DeferredInit() as deferred:
            built = model()
        refuse_scripts(built)
        return cls(built, deferred)

    @property
    def attribute_reads(self) -> frozenset[AttributeRead]:
        """Attributes of modules that the captures of a caching source read."""
        return frozenset()

    def loss_of(self, loss: Loss | None) -> Loss | None:
        """Return the loss that belongs to this model, materialised if it was built under deferred initialisation too."""
        criterion = loss_of(loss, self.model)
        return criterion if criterion is None or self.deferred is None else materialize_loss(self.deferred, criterion, self.model)

    def capture(
        self, batch: Any, loss: Loss | None, batch_size: int | None, outputs: bool = False, modes: Modes | None = None
    ) -> CapturedGraph:
        """Capture the model on a batch of `batch_size` samples, in training mode or in other `modes`.

        Raises:
            ModelError: it cannot be captured.
        """
        refuse_hooks(self.model)
        loss = self.loss_of(loss)
        modes = training_modes(self.model) if modes is None else modes
        with in_modes(self.model, modes):
            cache_key = (modes, batch_size, outputs, self.deferred is None)
            return cached_capture(self.model, loss, batch, cache_key, lambda: self._capture(batch, loss, batch_size, outputs))

    def _capture(self, batch: Any, loss: Loss | None, batch_size: int | None, outputs: bool) -> CapturedGraph:
        if self.deferred is not None:
            deferred = self.deferred
            captured = capture(self.model, batch, loss, batch_size=batch_size, fake_mode=deferred.fake_mode, outputs=outputs)
            # A tensor that is a plain attribute of the module is captured as a fake tensor; replace it by its value.
            constants = {v: deferred.real_value(t) if deferred.is_fake(t) else t for v, t in captured.constants.items()}
            return replace(captured, constants=constants)
        mode, originals = fake_mode(), dict[int, Tensor]()
        captured = capture(fake_copy(self.model, mode, originals), batch, loss, batch_size=batch_size, fake_mode=mode, outputs=outputs)
        return replace(captured, constants={v: originals.get(id(t), t) for v, t in captured.constants.items()})

    def capture_microbatch(
        self, plan: Plan, batch: Any, loss: Loss | None, size: int, samples: int, modes: Modes | None = None
    ) -> CapturedMicrobatch:
        """Capture a microbatch of `size` samples of a batch of `samples`, in the precision of a plan; `modes` as for `capture`."""
        captured = self.capture(batch, loss, size, modes=modes)
        graph = cast_to_precision(captured.graph, plan)
        if plan.layout.replicas * plan.layout.microbatches == 1:
            return CapturedMicrobatch(SummableLossGraph(graph), captured.constants, captured.graph, structure=captured.structure)
        captured_part = replace(captured, graph=graph)

        def capture_size(count: int) -> CapturedGraph:
            if count == size:
                return captured_part
            captured_other = self.capture(batch, loss, count, modes=modes)
            return replace(captured_other, graph=cast_to_precision(captured_other.graph, plan))

        full = capture_size(plan.batch_size)
        step = full if samples == plan.batch_size or depends_on_sizes_only(captured_part, full) else capture_size(samples)
        part = normalise_microbatch(captured_part, full, step, plan.layout.microbatches == 1)
        return replace(part, captured=captured.graph)

    def sharding(self, plan: Plan, graph: Graph) -> Sharding:
        """Return the complete sharding of a graph under a plan."""
        return shard_graph(plan, graph, self.prices)

    def materialize_tensors(self, select: Callable[[str, Tensor], Tensor | None], dtype: torch.dtype | None) -> dict[str, Tensor]:
        """Materialise initial values, one tensor at a time; return what `select(name, tensor)` returns, by name."""
        if self.deferred is not None:
            return materialize_shards(self.deferred, self.model, select, dtype)
        return take_real_shards(self.model, select, dtype)

    def initial_buffers(self, initial: InitialValues) -> dict[str, Tensor]:
        """Initialise this rank's parameters in place and return its buffers; only allocate the buffers if there are no values."""
        return self.materialize_tensors(initial.take_local, None) if self.has_values else initial.allocate_buffers()


@dataclass(frozen=True)
class CachedModelSource(ModelSource):
    """A source that caches captures and shardings. Ranks forked from this process inherit the caches and need not trace again."""

    captures: dict[tuple[int | None, bool, Modes], CapturedGraph] = field(default_factory=dict)
    shardings: dict[tuple[object, ...], Sharding] = field(default_factory=dict)
    microbatches: dict[tuple[object, ...], CapturedMicrobatch] = field(default_factory=dict)

    @property
    def attribute_reads(self) -> frozenset[AttributeRead]:
        """Attributes of modules that the captures read."""
        return frozenset().union(*(captured.attribute_reads for captured in self.captures.values()))

    def capture(
        self, batch: Any, loss: Loss | None, batch_size: int | None, outputs: bool = False, modes: Modes | None = None
    ) -> CapturedGraph:
        """Return `ModelSource.capture`, cached by number of samples and modes; the batch and the loss must stay the same."""
        modes = training_modes(self.model) if modes is None else modes
        key = (batch_size, outputs, modes)
        if key not in self.captures:
            self.captures[key] = super().capture(batch, loss, batch_size, outputs, modes)
        return self.captures[key]

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
            self.shardings[key] = shard_graph(plan, graph, self.prices)
        return self.shardings[key]

    def capture_microbatch(
        self, plan: Plan, batch: Any, loss: Loss | None, size: int, samples: int, modes: Modes | None = None
    ) -> CapturedMicrobatch:
        """Return `ModelSource.capture_microbatch`, cached by microbatch size, batch size, precision and modes."""
        layout = plan.layout
        modes = training_modes(self.model) if modes is None else modes
        key = (modes, size, samples, plan.batch_size, DTYPES[layout.precision], layout.replicas == 1, layout.microbatches == 1)
        if key not in self.microbatches:
            self.microbatches[key] = super().capture_microbatch(plan, batch, loss, size, samples, modes)
        return self.microbatches[key]

    def capture_all(self, plan: Plan, batch: Any, loss: Loss | None, modes: Modes | None = None) -> None:
        """Fill the caches with everything that the ranks of a plan will capture, in training or in other `modes`.

        Raises:
            ModelError: the model cannot be captured so.
        """
        if plan.uncaptured:
            return
        first, *other_sizes = plan.microbatch_sizes
        part = self.capture_microbatch(plan, batch, loss, first, plan.batch_size, modes)
        if modes is None:
            graph = part.loss_graph.graph
            refuse_idle_axes(self.sharding(plan, graph), graph.parameter_shapes)
        for size in other_sizes:
            self.capture_microbatch(plan, batch, loss, size, plan.batch_size, modes)
        sample_folds(plan, self, part.captured, batch, loss, modes)


def shard_graph(plan: Plan, graph: Graph, prices: Prices | None = None) -> Sharding:
    """Return the complete sharding of a graph under a plan; what the plan leaves open is chosen by `prices`.

    Raises:
        LayoutError: shards over a tensor axis that the layout does not have, or that the graph does not allow.
    """
    cuts = expand_shards(plan.shards, (v.name for v in (*graph.parameters, *graph.buffers)))
    sizes = {axis: n for axis, n in plan.layout.axes if axis_of(axis).shards}
    missing_axes = [axis for axis in cuts if axis in (TENSOR, *GRID_AXES) and axis not in sizes]
    if missing_axes and plan.layout.tensor > 1:
        axis_names = ", ".join(axis for axis, _ in plan.layout.tensor_axes)
        raise LayoutError(
            f"the plan cuts parameters over {', '.join(missing_axes)}, and the tensor ranks of {plan.layout} lie along {axis_names}; "
            f"leave [shards.{missing_axes[0]}] out, or name it after one of these"
        )
    layout = plan.layout
    sequence, samples = layout.sequence_parallel == "on", layout.sample_parallel == "on"
    samples_per_rank = priced_num_samples(-(-plan.batch_size // (layout.data * layout.microbatches)))
    prices = prices or Prices(samples=samples_per_rank * layout.data)

    def shard_with_labels(labels: Mapping[str, Mapping[str, str]]) -> Sharding:
        found = propagate(
            graph, sizes, cuts, prices=prices, sequence=sequence, samples=samples, labels=labels or None, attention=layout.attention
        )
        return resize_sample_shards(found, graph, sample_shares(layout)) if layout.shares else found

    return shard_runnable(graph, layout, shard_with_labels)


def sample_folds(
    plan: Plan, source: ModelSource, graph: Graph, batch: Any, loss: Loss | None, modes: Modes | None = None
) -> tuple[SampleFold | None, ...]:
    """Return how samples lie in each random tensor of the model, draw by draw; nothing if a microbatch is the whole batch."""
    sizes = {*plan.microbatch_sizes, plan.batch_size} - {graph.batch_size}
    if not sizes:
        return ()
    other_size = min(sizes)
    return find_sample_folds(graph, lambda: source.capture(batch, loss, other_size, modes=modes).graph)


def cast_to_precision(graph: Graph, plan: Plan) -> Graph:
    """Return the graph in the dtype that a plan computes in."""
    return graph.cast("float64") if DTYPES[plan.layout.precision] is torch.float64 else graph
