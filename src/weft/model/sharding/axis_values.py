"""The values of a graph along one axis: how they may be sharded, their initial placements, and the costs of redistribution and storage.

Redistributing R to D is free forward and an all-reduce backward (Megatron's f); P to R is its dual (g). A parameter that is read as D
everywhere needs no operator at all: its gradient is reduced once a step.

Not modeled: overlap, memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cached_property

from weft.model.dims.labels import channels, positions
from weft.model.dims.rows import ordered_rows, ragged
from weft.model.dims.runs import Fused
from weft.model.dims.sequences import Run, heads, in_zigzag, sequences
from weft.model.gradients import needs_gradient
from weft.model.graph import Graph, copied_into, written_buffers
from weft.model.sharding.sharding import Prices, transfer_s
from weft.model.work import batched, differentiable
from weft.plan.axis import ULYSSES, axis_of
from weft.plan.choice import AUTO
from weft.plan.placement import D, P, Placement, R, Shard, Strided, dual, in_runs, is_cut, is_piece, is_shard, shard
from weft.plan.transition import allowed, transition

GATHERED = 1 + 1 / 16  # weight of a gather before a later tensor axis: more than of equally cheap alternatives


@dataclass(frozen=True, slots=True)
class Given:
    """The part of a plan about an axis: by value the sharded dimension of parameters and buffers, and by site the name of an operator's
    strategy. `dims` is None where sharding of parameters is searched as well. `attention`: how ranks of a context axis attend to each
    other's positions (`weft.plan.layout`)."""

    dims: Mapping[str, int] | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    attention: str = AUTO


@dataclass(frozen=True, slots=True)
class Others:
    """Constraints from other axes: decisions of earlier ones, and what must be left to later ones."""

    taken: Mapping[str, Set[int]] = field(default_factory=dict)  # value -> dims that other axes shard
    inside: Mapping[str, Mapping[int, int]] = field(default_factory=dict)  # value -> {dim: shards of another axis to be nested}
    kernels: frozenset[tuple[str, str]] = frozenset()  # (operator, label) of another axis whose kernel takes one group
    sliced: frozenset[str] = frozenset()  # values sharded again only where they are read
    pinned: Mapping[str, Placement] = field(default_factory=dict)  # variable -> the placement in which it must be read
    more: bool = False  # whether other tensor axes follow
    ranks: int = 1  # along earlier axes, to scale bytes and FLOPs of values that follow the samples
    replicas: int = 1  # of these, those that each have all values that do not follow the samples
    again: bool = False  # whether an axis shards weights' shards again


class AxisValues:
    """The values along one axis of `n` ranks."""

    def __init__(self, graph: Graph, axis: str, n: int, prices: Prices, fixed: Given, others: Others):
        self.graph, self.axis, self.n, self.prices, self.others = graph, axis, n, prices, others
        self.fixed, self.attention = fixed.dims, fixed.attention
        self.divide, self.divide_fixed = others.ranks, others.ranks // others.replicas
        self.taken, self.inside, self.more = others.taken, others.inside, others.more
        self.grads = needs_gradient(graph)
        self.placed = {v.value: v for v in (*graph.parameters, *graph.buffers)}
        self.copied_into = copied_into(graph)
        # Statistics are written by the operator that reads them: a redistribution is a copy, in which the write would be lost.
        self.still = written_buffers(graph) - self.copied_into
        self.row = axis_of(axis)
        self.cuts_weights, self.cuts_positions = self.row.cuts_weights, self.row.cuts_positions  # read often
        # Where shards are sharded again, dimensions have no runs.
        self.fused = graph.fused if self.cuts_weights and not others.again else Fused(graph.rules)
        self.rules = self.fused.rules
        self.ragged = ragged(graph, self.rules)
        self.ordered_rows = ordered_rows(graph, self.rules, self.ragged)
        self._moves: dict[tuple[str, Placement, Placement], float] = {}
        self._shards: dict[tuple[str, int], Shard | Strided] = {}
        if self.row.follows:
            # Every operator that can be sharded is, whatever its latency: that is the purpose of the axis.
            self.prices = replace(prices, latency_s=0.0)

    def cuttable(self, value: str, dim: int) -> bool:
        """Return whether every rank gets a shard of a dimension; shards of another axis' shards must be equal."""
        if (value, dim) in self.ragged:  # data-dependent length
            return (value, dim) not in self.ordered_rows
        size, ways = self.graph.tensors[value].shape[dim], self.inside.get(value, {}).get(dim, 0)
        if self.row.cuts_sequences:
            return self._shares_positions(value, dim, size)
        if ways:
            return size // ways % self.n == 0
        if runs := self._runs(value, dim):
            return dim not in self.taken.get(value, ()) and all(length // unit >= self.n for length, unit in runs)
        return dim not in self.taken.get(value, ()) and size // self._unit(value, dim) >= self.n

    def shard(self, value: str, dim: int) -> Shard | Strided:
        """Return the shard placement of a dimension: at borders of indivisible units (heads) unless equal shards are; positions by their
        arrangement."""
        key = (value, dim)
        if key not in self._shards:
            is_nested = dim in self.inside.get(value, ()) or key in self.ragged
            length, unit = self.graph.tensors[value].shape[dim], self._unit(value, dim)
            run = self.sequences.get(key) if self.row.cuts_sequences else None
            if runs := [] if is_nested else self._runs(value, dim):
                self._shards[key] = in_runs(dim, [shard(0, size, self.n, offset).sizes(size, self.n) for size, offset in runs])
            elif run is not None and (run.length < length or self.zigzag):
                self._shards[key] = Strided(dim, run.size, run.inner, self.zigzag)
            else:
                self._shards[key] = Shard(dim) if is_nested else shard(dim, length, self.n, unit if run is None else run.inner)
        return self._shards[key]

    def _unit(self, value: str, dim: int) -> int:
        """Return the entries of an indivisible unit; 1 where equal shards respect units, and where there are fewer units than ranks."""
        length = self.graph.tensors[value].shape[dim]
        return self._unit_of(length, self.graph.granules[self.cuts_weights].get((value, dim), length))

    def _unit_of(self, length: int, count: int) -> int:
        return 1 if count % self.n == 0 or count < self.n or length % count else length // count

    def _runs(self, value: str, dim: int) -> list[tuple[int, int]]:
        """Return (length, unit size) of each run of a dimension in runs or joined with such; nothing where a run is too short for all
        ranks."""
        key = (value, dim)
        if self.fused.least.get(key, 0) < self.n:
            return []
        return [(length, self._unit_of(length, count)) for length, count in self.fused.of[key]]

    def _shares_positions(self, value: str, dim: int, size: int) -> bool:
        """Return whether each rank gets a shard of the positions of a dimension of `size`, whose samples may be sharded already."""
        run = self.sequences.get((value, dim))
        if run is None and (value, dim) in self.heads:
            return size >= self.n and dim not in self.taken.get(value, ())
        if run is None or run.size < self.n:
            return False
        return dim not in self.taken.get(value, ()) or size > run.length

    @cached_property
    def sequences(self) -> Mapping[tuple[str, int], Run]:
        """Dimensions that are positions of a sequence, and their arrangement."""
        return sequences(self.graph, self.rules)

    @cached_property
    def zigzag(self) -> bool:
        """Flag: a rank has positions from the front and the back, to balance work."""
        return self.attention != ULYSSES and in_zigzag(self.graph, self.rules, self.sequences)

    @cached_property
    def heads(self) -> Set[tuple[str, int]]:
        """Dimensions that are heads of attention; none where the axis does not shard sequences."""
        return heads(self.graph, self.rules) if self.row.cuts_sequences else set()

    @cached_property
    def positions(self) -> Mapping[tuple[str, int], frozenset[str]]:
        """Dimensions that are positions of an image, and which."""
        return positions(self.graph, self.rules)

    @cached_property
    def channels(self) -> Set[tuple[str, int]]:
        """Dimensions that are channels of an image."""
        return channels(self.graph, self.rules)

    @cached_property
    def follows(self) -> set[str]:
        """Values whose size follows the samples."""
        return batched(self.graph)

    def share(self, amount: float, value: str) -> float:
        """Return one rank's part, along the other axes and for the priced samples, of an amount that belongs to a value at the graph's
        batch.

        Whole numbers are scaled as such, so that equal samples per rank cost the same, however many the graph has.
        """
        if value not in self.follows:
            return amount / self.divide_fixed
        amount_of = int(amount) if amount == int(amount) else amount
        return amount_of * (self.prices.samples or self.graph.batch_size) / (self.graph.batch_size * self.divide)

    def _bytes(self, value: str) -> float:
        size = self.graph.tensors[value].size_bytes
        return float(size) if value in self.placed else self.share(size, value)

    def move_s(self, value: str, source: Placement, target: Placement) -> float:
        """Seconds of a redistribution, forward and (where training needs the value's gradient) backward; cached."""
        key = (value, source, target)
        if key not in self._moves:
            self._moves[key] = self._move_s(value, source, target)
        return self._moves[key]

    def _move_s(self, value: str, source: Placement, target: Placement) -> float:
        if source == target:
            return 0.0
        if self._barred(value, source, target):
            return float("inf")
        size = self._bytes(value)
        cost = transfer_s(source, target, size, self.n, self.prices)
        if value in self.asked:
            cost += transfer_s(dual(target), dual(source), size, self.n, self.prices)
        # A gather leaves the dimension to no later axis; reductions, which move as many bytes, do.
        return cost * GATHERED if self.more and is_piece(source) and not is_piece(target) else cost

    def _barred(self, value: str, source: Placement, target: Placement) -> bool:
        is_disallowed = not allowed(source, target) or value in self.still
        ragged = any(is_cut(form) and (value, form.dim) in self.ragged for form in (source, target))
        return is_disallowed or ragged or (is_cut(target) and not self.cuttable(value, target.dim))

    @cached_property
    def asked(self) -> set[str]:
        """Values whose gradient training needs: not those of the batch."""
        return differentiable(self.graph)

    def exact_s(self, value: str, source: Placement, target: Placement) -> float:
        """Seconds as of `redistribute_s`, with the copies around collectives.

        Decides between sources that collectives alone leave equal: S to + and R to + move as many bytes.
        """
        if source == target or self._barred(value, source, target):
            return 0.0 if source == target else float("inf")
        size = self._bytes(value)
        inner = any(is_cut(form) and form.dim for form in (source, target))
        ways = [(source, target), (dual(target), dual(source))] if value in self.asked else [(source, target)]
        return sum(transfer_s(a, b, size, self.n, self.prices) + self._copied_s(transition(a, b).collective, size, inner) for a, b in ways)

    def _copied_s(self, name: str, size: float, inner: bool) -> float:
        """Seconds of memory copies around a collective: shards of inner dimensions are not contiguous."""
        n = self.n
        parts = {"all_reduce": 2.0, "all_gather": 2.0 * inner, "reduce_scatter": 2.0 * inner, "slice": 2.0 / n * inner}
        parts |= {"pad": 1.0 + 2.0 / n, "all_to_all": 4.0 / n, "halo_exchange": 2.0 / n, "halo_add": 2.0 / n}
        return parts.get(name, 0.0) * size / self.prices.memory_bytes_per_s

    def place(self, value: str, need: Placement) -> tuple[Placement, float] | None:
        """Return (stored placement, seconds a step) of a parameter or buffer first read here; None where it cannot be stored as needed."""
        size = self.graph.tensors[value].size_bytes
        update_s = size * 8 / self.prices.memory_bytes_per_s  # gradient and optimizer states, read and written
        if is_shard(need):
            return (need, update_s / need.ways(self.n)) if self.cuttable(value, need.dim) else None
        # Gradients are reduced in buckets: their bytes count, their latency does not.
        is_reduced = need is D and value in self.grads
        return R, update_s + (transfer_s(P, R, size, self.n, replace(self.prices, latency_s=0.0)) if is_reduced else 0.0)

    def start(self, value: str) -> tuple[Placement, ...] | None:
        """Return the initial placements of a variable; None for a parameter whose placement is still open."""
        if value in self.copied_into:  # all of the buffer is written
            return (R,)
        if value in self.placed:
            if self.fixed is None or value in self.still:  # statistics are placed by the operator that writes them
                return None
            dim = self.fixed.get(value)
            return (R,) if dim is None else (self.shard(value, dim),)
        for v in self.graph.inputs:
            if v.value == value:
                if self.row.cuts_sequences:
                    return (R, *(self.shard(value, d) for d in range(len(v.tensor.shape)) if self.cuttable(value, d)))
                if self.cuts_positions:
                    shape = range(len(v.tensor.shape))
                    dims = (d for d in shape if self.row.cuts & self.positions.get((value, d), frozenset()) and self.cuttable(value, d))
                    return (R, *(self.shard(value, d) for d in dims))  # a rank reads its shard from its input
                is_sharded = v.batched and self.row.cuts_samples and (not self.row.owns or self.cuttable(value, 0))
                return (self.shard(value, 0),) if is_sharded else (R,)
        return (R,)
