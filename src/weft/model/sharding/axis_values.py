"""The values of a graph along one axis: how they may be cut there, where they begin, and what it costs to move them or to store them.

In: a graph, the axis with its size and prices, what a plan says of it, and what other axes have decided. Out: `AxisValues`.

Getting D from R costs nothing forward and an all-reduce backward (Megatron's f); P to R is its dual (g). A parameter that is needed as D
everywhere needs no operator at all: its gradient is summed once a step.

Not modelled: overlap, memory.
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

GATHERED = 1 + 1 / 16  # what putting pieces together weighs where another axis of a grid is still to cut: more than what else is as cheap


@dataclass(frozen=True, slots=True)
class Given:
    """What a plan says of an axis: by value where parameters and buffers are cut, and by site the label that an operator is cut on, in
    the word of its choice. `dims` is None where cuts of parameters are searched as well. `attention`: how ranks that share sequences attend
    to one another's positions (`weft.plan.layout`)."""

    dims: Mapping[str, int] | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    attention: str = AUTO


@dataclass(frozen=True, slots=True)
class Others:
    """What an axis takes from the others: what those before it have decided, and what it must leave to those after it."""

    taken: Mapping[str, Set[int]] = field(default_factory=dict)  # value -> dims that other axes cut
    inside: Mapping[str, Mapping[int, int]] = field(default_factory=dict)  # value -> {dim: pieces of another axis that may be cut again}
    kernels: frozenset[tuple[str, str]] = frozenset()  # (operator, label) that another axis cuts, which takes a kernel of one group
    sliced: frozenset[str] = frozenset()  # values whose pieces are cut once more where they are read, and not where they are made
    pinned: Mapping[str, Placement] = field(default_factory=dict)  # variable -> the form that it is read in, whatever else would be cheaper
    more: bool = False  # whether other tensor axes come after this one
    ranks: int = 1  # along the axes before, to scale bytes and FLOPs of what follows the samples
    replicas: int = 1  # of these ranks, those that each have all of what does not follow the samples
    again: bool = False  # whether an axis of the grid cuts pieces of weights once more


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
        # Statistics are written by the operator that reads them: what is moved is a copy, in which the write would be lost.
        self.still = written_buffers(graph) - self.copied_into
        self.row = axis_of(axis)
        self.cuts_weights, self.cuts_positions = self.row.cuts_weights, self.row.cuts_positions  # asked often
        # Where ranks cut pieces once more, dimensions have no runs.
        self.fused = graph.fused if self.cuts_weights and not others.again else Fused(graph.rules)
        self.rules = self.fused.rules
        self.ragged = ragged(graph, self.rules)
        self.ordered_rows = ordered_rows(graph, self.rules, self.ragged)
        self._moves: dict[tuple[str, Placement, Placement], float] = {}
        self._shards: dict[tuple[str, int], Shard | Strided] = {}
        if self.row.follows:
            # Every operator that can follow does, whatever its latency: that is what the axis is for.
            self.prices = replace(prices, latency_s=0.0)

    def cuttable(self, value: str, dim: int) -> bool:
        """Whether every rank gets a piece of a dimension; pieces of another axis' pieces must be equal."""
        if (value, dim) in self.ragged:  # as many rows as follow from data
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
        """How a dimension is cut: at borders of what stays together wherever it goes (heads), if that is not equal pieces anyway; positions
        of a sequence as they lie there."""
        key = (value, dim)
        if key not in self._shards:
            again = dim in self.inside.get(value, ()) or key in self.ragged
            length, unit = self.graph.tensors[value].shape[dim], self._unit(value, dim)
            run = self.sequences.get(key) if self.row.cuts_sequences else None
            if runs := [] if again else self._runs(value, dim):
                self._shards[key] = in_runs(dim, [shard(0, size, self.n, offset).sizes(size, self.n) for size, offset in runs])
            elif run is not None and (run.length < length or self.zigzag):
                self._shards[key] = Strided(dim, run.size, run.inner, self.zigzag)
            else:
                self._shards[key] = Shard(dim) if again else shard(dim, length, self.n, unit if run is None else run.inner)
        return self._shards[key]

    def _unit(self, value: str, dim: int) -> int:
        """Entries of a dimension that stay together; 1 where equal pieces do that, and where there are too few units for all ranks."""
        length = self.graph.tensors[value].shape[dim]
        return self._unit_of(length, self.graph.granules[self.cuts_weights].get((value, dim), length))

    def _unit_of(self, length: int, count: int) -> int:
        return 1 if count % self.n == 0 or count < self.n or length % count else length // count

    def _runs(self, value: str, dim: int) -> list[tuple[int, int]]:
        """Of a dimension that is runs, or is joined with such a one, (length, entries that stay together) of each; nothing where one of
        them is too short for all ranks."""
        key = (value, dim)
        if self.fused.least.get(key, 0) < self.n:
            return []
        return [(length, self._unit_of(length, count)) for length, count in self.fused.of[key]]

    def _shares_positions(self, value: str, dim: int, size: int) -> bool:
        """Whether ranks can have a piece each of the positions of a dimension of `size`, of which samples may be cut already."""
        run = self.sequences.get((value, dim))
        if run is None and (value, dim) in self.heads:
            return size >= self.n and dim not in self.taken.get(value, ())
        if run is None or run.size < self.n:
            return False
        return dim not in self.taken.get(value, ()) or size > run.length

    @cached_property
    def sequences(self) -> Mapping[tuple[str, int], Run]:
        """Which dimensions are positions of a sequence, and how these lie."""
        return sequences(self.graph, self.rules)

    @cached_property
    def zigzag(self) -> bool:
        """Whether a rank has positions of the front and of the back, so that all have as much to do."""
        return self.attention != ULYSSES and in_zigzag(self.graph, self.rules, self.sequences)

    @cached_property
    def heads(self) -> Set[tuple[str, int]]:
        """Dimensions that are heads of attention, where it reads and makes them; none where these are no positions' other side."""
        return heads(self.graph, self.rules) if self.row.cuts_sequences else set()

    @cached_property
    def positions(self) -> Mapping[tuple[str, int], frozenset[str]]:
        """Which dimensions are positions of an image, and which."""
        return positions(self.graph, self.rules)

    @cached_property
    def channels(self) -> Set[tuple[str, int]]:
        """Which dimensions are channels of an image."""
        return channels(self.graph, self.rules)

    @cached_property
    def follows(self) -> set[str]:
        """Values whose size follows the samples."""
        return batched(self.graph)

    def share(self, amount: float, value: str) -> float:
        """Of an amount that goes with a value at the graph's batch: one rank's along the other axes, for the samples that are weighed.

        Whole numbers are scaled as such, so that the same samples a rank weigh the same, however many the graph has.
        """
        if value not in self.follows:
            return amount / self.divide_fixed
        amount_of = int(amount) if amount == int(amount) else amount
        return amount_of * (self.prices.samples or self.graph.batch_size) / (self.graph.batch_size * self.divide)

    def _bytes(self, value: str) -> float:
        size = self.graph.tensors[value].size_bytes
        return float(size) if value in self.placed else self.share(size, value)

    def move_s(self, value: str, source: Placement, target: Placement) -> float:
        """Seconds of a redistribution, forward and (where training asks for the value's gradient) backward; each question once."""
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
        # What lies in pieces here and whole there leaves the dimension to no later axis; sums, which move as many bytes, do.
        return cost * GATHERED if self.more and is_piece(source) and not is_piece(target) else cost

    def _barred(self, value: str, source: Placement, target: Placement) -> bool:
        lost = not allowed(source, target) or value in self.still
        ragged = any(is_cut(form) and (value, form.dim) in self.ragged for form in (source, target))
        return lost or ragged or (is_cut(target) and not self.cuttable(value, target.dim))

    @cached_property
    def asked(self) -> set[str]:
        """Values whose gradient training asks for: not those of the batch."""
        return differentiable(self.graph)

    def exact_s(self, value: str, source: Placement, target: Placement) -> float:
        """`move_s` with the copies around collectives as well.

        What decides between forms to move from, which collectives alone leave equal: S to + and R to + move as many bytes.
        """
        if source == target or self._barred(value, source, target):
            return 0.0 if source == target else float("inf")
        size = self._bytes(value)
        inner = any(is_cut(form) and form.dim for form in (source, target))
        ways = [(source, target), (dual(target), dual(source))] if value in self.asked else [(source, target)]
        return sum(transfer_s(a, b, size, self.n, self.prices) + self._copied_s(transition(a, b).collective, size, inner) for a, b in ways)

    def _copied_s(self, name: str, size: float, inner: bool) -> float:
        """Seconds of reading and writing memory around a collective: pieces of inner dimensions do not lie together."""
        n = self.n
        parts = {"all_reduce": 2.0, "all_gather": 2.0 * inner, "reduce_scatter": 2.0 * inner, "slice": 2.0 / n * inner}
        parts |= {"pad": 1.0 + 2.0 / n, "all_to_all": 4.0 / n, "halo_exchange": 2.0 / n, "halo_add": 2.0 / n}
        return parts.get(name, 0.0) * size / self.prices.memory_bytes_per_s

    def place(self, value: str, need: Placement) -> tuple[Placement, float] | None:
        """A parameter or buffer met for the first time, free to lie as it is needed: (stored form, seconds a step)."""
        size = self.graph.tensors[value].size_bytes
        touched = size * 8 / self.prices.memory_bytes_per_s  # gradient and optimizer states, read and written
        if is_shard(need):
            return (need, touched / need.ways(self.n)) if self.cuttable(value, need.dim) else None
        # Gradients are summed many in one bucket: their bytes count, a latency of their own does not.
        summed = need is D and value in self.grads
        return R, touched + (transfer_s(P, R, size, self.n, replace(self.prices, latency_s=0.0)) if summed else 0.0)

    def start(self, value: str) -> tuple[Placement, ...] | None:
        """Forms in which a variable is there at the beginning; None for a parameter that may still lie anywhere."""
        if value in self.copied_into:  # what is written is the whole buffer
            return (R,)
        if value in self.placed:
            if self.fixed is None or value in self.still:  # statistics lie as the operator has them that writes them
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
                    return (R, *(self.shard(value, d) for d in dims))  # a rank reads its piece from what it is given
                cut = v.batched and self.row.cuts_samples and (not self.row.owns or self.cuttable(value, 0))
                return (self.shard(value, 0),) if cut else (R,)
        return (R,)
