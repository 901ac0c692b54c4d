"""The values of a graph along one axis: how they may be sharded, their initial placements, and the costs of redistribution and storage.

Redistributing R to D is free forward and an all-reduce backward (Megatron's f); P to R is its dual (g). A parameter that is read as D
everywhere needs no operator at all: its gradient is reduced once a step.

Not modeled: overlap, memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cached_property

from shardwise.model.dims.expert_rows import expert_row_dims, replicated_expert_rows
from shardwise.model.dims.fused_dims import FusedDimensions, find_fused_dims
from shardwise.model.dims.labels import image_channels, image_positions, num_units_by_dim
from shardwise.model.dims.sequence_dims import PositionRun, can_use_zigzag, find_sequence_dims, head_dims
from shardwise.model.gradients import differentiable_values, values_needing_gradient
from shardwise.model.graph import Graph, buffers_written_in_place, written_buffers
from shardwise.model.sharding.sharding import Prices, transfer_s
from shardwise.model.work import values_following_batch
from shardwise.plan.ir.axis import ULYSSES, axis_of
from shardwise.plan.ir.choice import AUTO
from shardwise.plan.ir.placement import (
    D,
    P,
    Placement,
    R,
    Shard,
    Strided,
    dual_of,
    is_disjoint_shard,
    is_shard,
    is_sharded,
    shard,
    shard_of_runs,
)
from shardwise.plan.ir.transition import is_allowed_in_forward, transition_between

GATHER_WEIGHT = 1 + 1 / 16  # weight of a gather before a later tensor axis: more than of equally cheap alternatives


@dataclass(frozen=True, slots=True)
class FixedShards:
    """The part of a plan about an axis: by value the sharded dimension of parameters and buffers, and by site the name of an operator's
    strategy. `dims` is None where sharding of parameters is searched as well. `attention`: how ranks of a context axis attend to each
    other's positions (`shardwise.plan.layout`)."""

    dims: Mapping[str, int] | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    attention: str = AUTO


@dataclass(frozen=True, slots=True)
class OtherAxes:
    """Constraints from other axes: decisions of earlier ones, and what must be left to later ones."""

    taken_dims: Mapping[str, Set[int]] = field(default_factory=dict)  # value -> dims that other axes shard
    nested_shards: Mapping[str, Mapping[int, int]] = field(default_factory=dict)  # value -> {dim: shards of another axis to be nested}
    kernel_labels: frozenset[tuple[str, str]] = frozenset()  # (operator, label) of another axis whose kernel takes one group
    sliced_values: frozenset[str] = frozenset()  # values sharded again only where they are read
    pinned_placements: Mapping[str, Placement] = field(default_factory=dict)  # variable -> the placement in which it must be read
    has_later_axes: bool = False  # whether other tensor axes follow
    num_ranks: int = 1  # along earlier axes, to scale bytes and FLOPs of values that follow the samples
    num_replicas: int = 1  # of these, those that each have all values that do not follow the samples
    has_resharding_axis: bool = False  # whether an axis shards weights' shards again
    sent_operators: frozenset[str] = frozenset()  # of experts, to whose ranks an earlier axis sends tokens


class AxisValues:
    """The values along one axis of `n` ranks."""

    def __init__(self, graph: Graph, axis: str, n: int, prices: Prices, fixed_shards: FixedShards, other_axes: OtherAxes):
        self.graph, self.axis, self.n, self.prices, self.other_axes = graph, axis, n, prices, other_axes
        self.planned_dims, self.attention = fixed_shards.dims, fixed_shards.attention
        self.sample_divisor, self.fixed_divisor = other_axes.num_ranks, other_axes.num_ranks // other_axes.num_replicas
        self.taken_dims, self.nested_shards, self.has_later_axes = (
            other_axes.taken_dims,
            other_axes.nested_shards,
            other_axes.has_later_axes,
        )
        self.grads, self.state = values_needing_gradient(graph), graph.state
        self.written_in_place = buffers_written_in_place(graph)
        # Statistics are written by the operator that reads them: a redistribution is a copy, in which the write would be lost.
        self.statistics_buffers = written_buffers(graph) - self.written_in_place
        self.axis_record = axis_of(axis)
        self.cuts_weights, self.cuts_positions = self.axis_record.shards_weights, self.axis_record.shards_positions  # read often
        has_runs = self.cuts_weights and not other_axes.has_resharding_axis  # where shards are sharded again, dimensions have no runs
        self.fused_dims = find_fused_dims(graph) if has_runs else FusedDimensions(graph.rules)
        self.rules, self.num_units = self.fused_dims.rules, num_units_by_dim(graph, self.cuts_weights)
        self.expert_rows = expert_row_dims(graph, self.rules)
        self.replicated_expert_rows = replicated_expert_rows(graph, self.rules, self.expert_rows)
        self._redistribute_cache: dict[tuple[str, Placement, Placement], float] = {}
        self._shards: dict[tuple[str, int], Shard | Strided] = {}
        if self.axis_record.always_shards:
            # Every operator that can be sharded is, whatever its latency: that is the purpose of the axis.
            self.prices = replace(prices, latency_s=0.0)

    def can_shard(self, value: str, dim: int) -> bool:
        """Return whether every rank gets a shard of a dimension; shards of another axis' shards must be equal."""
        if (value, dim) in self.expert_rows:  # data-dependent length
            return (value, dim) not in self.replicated_expert_rows
        size, ways = self.graph.tensors[value].shape[dim], self.nested_shards.get(value, {}).get(dim, 0)
        if self.axis_record.shards_sequences:
            return self._can_shard_positions(value, dim, size)
        if ways:
            return size // ways % self.n == 0
        if runs := self._run_units(value, dim):
            return dim not in self.taken_dims.get(value, ()) and all(length // unit >= self.n for length, unit in runs)
        return dim not in self.taken_dims.get(value, ()) and size // self._unit_size(value, dim) >= self.n

    def shard(self, value: str, dim: int) -> Shard | Strided:
        """Return the shard placement of a dimension: at borders of indivisible units (heads) unless equal shards are; positions by their
        arrangement."""
        key = (value, dim)
        if key not in self._shards:
            is_nested = dim in self.nested_shards.get(value, ()) or key in self.expert_rows
            length, unit = self.graph.tensors[value].shape[dim], self._unit_size(value, dim)
            run = self.sequence_dims.get(key) if self.axis_record.shards_sequences else None
            if runs := [] if is_nested else self._run_units(value, dim):
                self._shards[key] = shard_of_runs(dim, [shard(0, size, self.n, offset).local_sizes(size, self.n) for size, offset in runs])
            elif run is not None and (run.length < length or self.zigzag):
                self._shards[key] = Strided(dim, run.size, run.inner, self.zigzag)
            else:
                self._shards[key] = Shard(dim) if is_nested else shard(dim, length, self.n, unit if run is None else run.inner)
        return self._shards[key]

    def _unit_size(self, value: str, dim: int) -> int:
        """Return the entries of an indivisible unit; 1 where equal shards respect units, and where there are fewer units than ranks."""
        length = self.graph.tensors[value].shape[dim]
        return self._unit_size_of(length, self.num_units.get((value, dim), length))

    def _unit_size_of(self, length: int, count: int) -> int:
        return 1 if count % self.n == 0 or count < self.n or length % count else length // count

    def _run_units(self, value: str, dim: int) -> list[tuple[int, int]]:
        """Return (length, unit size) of each run of a dimension in runs or joined with such; nothing where a run is too short for all
        ranks."""
        key = (value, dim)
        if self.fused_dims.shortest_run.get(key, 0) < self.n:
            return []
        return [(length, self._unit_size_of(length, count)) for length, count in self.fused_dims.runs_of[key]]

    def _can_shard_positions(self, value: str, dim: int, size: int) -> bool:
        """Return whether each rank gets a shard of the positions of a dimension of `size`, whose samples may be sharded already."""
        run = self.sequence_dims.get((value, dim))
        if run is None and (value, dim) in self.head_dims:
            return size >= self.n and dim not in self.taken_dims.get(value, ())
        if run is None or run.size < self.n:
            return False
        return dim not in self.taken_dims.get(value, ()) or size > run.length

    @cached_property
    def sequence_dims(self) -> Mapping[tuple[str, int], PositionRun]:
        """Dimensions that are positions of a sequence, and their arrangement."""
        return find_sequence_dims(self.graph, self.rules)

    @cached_property
    def zigzag(self) -> bool:
        """Flag: a rank has positions from the front and the back, to balance work."""
        return self.attention != ULYSSES and can_use_zigzag(self.graph, self.rules, self.sequence_dims)

    @cached_property
    def head_dims(self) -> Set[tuple[str, int]]:
        """Dimensions that are heads of attention; none where the axis does not shard sequences."""
        return head_dims(self.graph, self.rules) if self.axis_record.shards_sequences else set()

    @cached_property
    def image_positions(self) -> Mapping[tuple[str, int], frozenset[str]]:
        """Dimensions that are positions of an image, and which."""
        return image_positions(self.graph, self.rules)

    @cached_property
    def image_channels(self) -> Set[tuple[str, int]]:
        """Dimensions that are channels of an image."""
        return image_channels(self.graph, self.rules)

    @cached_property
    def batch_values(self) -> set[str]:
        """Values whose size follows the samples."""
        return values_following_batch(self.graph)

    def rank_amount(self, amount: float, value: str) -> float:
        """Return one rank's part, along the other axes and for the priced samples, of an amount that belongs to a value at the graph's
        batch.

        Whole numbers are scaled as such, so that equal samples per rank cost the same, however many the graph has.
        """
        if value not in self.batch_values:
            return amount / self.fixed_divisor
        amount_of = int(amount) if amount == int(amount) else amount
        return amount_of * (self.prices.samples or self.graph.batch_size) / (self.graph.batch_size * self.sample_divisor)

    def _size_bytes(self, value: str) -> float:
        size = self.graph.tensors[value].size_bytes
        return float(size) if value in self.state else self.rank_amount(size, value)

    def redistribute_s(self, value: str, source: Placement, target: Placement) -> float:
        """Seconds of a redistribution, forward and (where training needs the value's gradient) backward; cached."""
        key = (value, source, target)
        if key not in self._redistribute_cache:
            self._redistribute_cache[key] = self._redistribute_s(value, source, target)
        return self._redistribute_cache[key]

    def _redistribute_s(self, value: str, source: Placement, target: Placement) -> float:
        if source == target:
            return 0.0
        if self._is_forbidden(value, source, target):
            return float("inf")
        size = self._size_bytes(value)
        cost = transfer_s(source, target, size, self.n, self.prices)
        if value in self.differentiable:
            cost += transfer_s(dual_of(target), dual_of(source), size, self.n, self.prices)
        # A gather leaves the dimension to no later axis; reductions, which move as many bytes, do.
        return cost * GATHER_WEIGHT if self.has_later_axes and is_disjoint_shard(source) and not is_disjoint_shard(target) else cost

    def _is_forbidden(self, value: str, source: Placement, target: Placement) -> bool:
        is_disallowed = not is_allowed_in_forward(source, target) or value in self.statistics_buffers
        ragged = any(is_sharded(form) and (value, form.dim) in self.expert_rows for form in (source, target))
        return is_disallowed or ragged or (is_sharded(target) and not self.can_shard(value, target.dim))

    @cached_property
    def differentiable(self) -> set[str]:
        """Values whose gradient training needs: not those of the batch."""
        return differentiable_values(self.graph)

    def redistribute_with_copies_s(self, value: str, source: Placement, target: Placement) -> float:
        """Seconds as of `redistribute_s`, with the copies around collectives.

        Decides between sources that collectives alone leave equal: S to + and R to + move as many bytes.
        """
        if source == target or self._is_forbidden(value, source, target):
            return 0.0 if source == target else float("inf")
        size = self._size_bytes(value)
        inner = any(is_sharded(form) and form.dim for form in (source, target))
        ways = [(source, target), (dual_of(target), dual_of(source))] if value in self.differentiable else [(source, target)]
        return sum(
            transfer_s(a, b, size, self.n, self.prices) + self._copy_s(transition_between(a, b).collective, size, inner) for a, b in ways
        )

    def _copy_s(self, name: str, size: float, inner: bool) -> float:
        """Seconds of memory copies around a collective: shards of inner dimensions are not contiguous."""
        n = self.n
        parts = {"all_reduce": 2.0, "all_gather": 2.0 * inner, "reduce_scatter": 2.0 * inner, "slice": 2.0 / n * inner}
        parts |= {"pad": 1.0 + 2.0 / n, "all_to_all": 4.0 / n, "halo_exchange": 2.0 / n, "halo_add": 2.0 / n}
        return parts.get(name, 0.0) * size / self.prices.memory_bytes_per_s

    def stored_placement(self, value: str, needed: Placement) -> tuple[Placement, float] | None:
        """Return (stored placement, seconds a step) of a parameter or buffer first read here; None where it cannot be stored as needed."""
        size = self.graph.tensors[value].size_bytes
        update_s = size * 8 / self.prices.memory_bytes_per_s  # gradient and optimizer states, read and written
        if is_shard(needed):
            return (needed, update_s / needed.split_factor(self.n)) if self.can_shard(value, needed.dim) else None
        # Gradients are reduced in buckets: their bytes count, their latency does not.
        is_reduced = needed is D and value in self.grads
        return R, update_s + (transfer_s(P, R, size, self.n, replace(self.prices, latency_s=0.0)) if is_reduced else 0.0)

    def initial_placements(self, value: str) -> tuple[Placement, ...] | None:
        """Return the initial placements of a variable; None for a parameter whose placement is still open."""
        if value in self.written_in_place:  # all of the buffer is written
            return (R,)
        if value in self.state:
            if self.planned_dims is None or value in self.statistics_buffers:  # statistics are placed by the operator that writes them
                return None
            dim = self.planned_dims.get(value)
            return (R,) if dim is None else (self.shard(value, dim),)
        for v in self.graph.inputs:
            if v.value == value:
                if self.axis_record.shards_sequences:
                    return (R, *(self.shard(value, d) for d in range(len(v.tensor.shape)) if self.can_shard(value, d)))
                if self.cuts_positions:
                    shards, positions = self.axis_record.shards, self.image_positions
                    dims = (d for d in range(len(v.tensor.shape)) if shards & positions.get((value, d), frozenset()))
                    return (R, *(self.shard(value, d) for d in dims if self.can_shard(value, d)))  # a rank reads its shard from its input
                is_sharded = (
                    v.batched and self.axis_record.shards_samples and (not self.axis_record.owns_operators or self.can_shard(value, 0))
                )
                return (self.shard(value, 0),) if is_sharded else (R,)
        return (R,)
