"""`Sharding`: the placement of every value of a graph along every mesh axis, and what moves where placements differ."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, prod

from weft.errors import LayoutError
from weft.ops import Rule
from weft.ops.attention import heads_dim
from weft.ops.operator import Operator
from weft.ops.rule import KEYS, QUERIES
from weft.plan.axis import BOTH, RING, axis_of, exchanging, sample_axes
from weft.plan.choice import AUTO
from weft.plan.placement import Halo, Placement, R, Shard, Strided, dual, is_cut, is_halo, is_piece, is_shard, piece
from weft.plan.transition import LOCAL, allowed, sent_part, transition

Shards = tuple[tuple[str, int], ...]  # (parameter or buffer name, dim that is cut)


@dataclass(frozen=True, slots=True)
class Prices:
    """What the search weighs against each other, per rank: FLOP/s, bytes/s of memory and of the axis' links, seconds of latency.

    `samples`: of the microbatch that the search weighs, all replicas together; 0 for the graph's batch.
    """

    flops_per_s: float = 1e9
    memory_bytes_per_s: float = 1e10
    link_bytes_per_s: float = 1e9
    latency_s: float = 2e-4
    samples: int = 0


@dataclass(frozen=True, slots=True)
class Owners:
    """A region of parallel branches along `axis`. `ranks`: by operator its owner. `leaves`: what is read outside of it, and in which pieces
    of the samples it lies there. `elsewhere`: the operators, and what they alone make or read, of other ranks than the busiest one."""

    axis: str
    ranks: Mapping[str, int]
    leaves: Mapping[str, Shard]
    elsewhere: frozenset[str] = frozenset()


# Where links cost nothing and compute is dear, everything is cut that the rules allow: what small models would not be by any other prices.
FREE_LINKS = Prices(flops_per_s=1e3, memory_bytes_per_s=1e3, link_bytes_per_s=1e15, latency_s=0.0)


def weighed(samples: int) -> int:
    """For how many samples of a rank's microbatch operators are placed: of 4, 16 and 64 the largest that it has.

    Planning and running ask for the same, so that what was priced is what runs; they are few, since placing takes time.

    >>> [weighed(n) for n in (1, 4, 15, 32, 1000)]
    [4, 4, 4, 16, 64]
    """
    return next((n for n in (64, 16) if samples >= n), 4)


@dataclass(frozen=True, slots=True)
class Move:
    """One redistribution. `forward` and `backward` name collectives ("" = none), on the value's tensor along `axis`."""

    value: str
    op: str  # the operator that needs it first
    axis: str
    source: Placement
    target: Placement
    forward: str
    backward: str


@dataclass(frozen=True)
class Sharding:
    """The complete sharding of one graph.

    `ops[name][axis]`: label that is cut, "" where the operator is replicated. `forms[value][axis]`: as made.
    `needs[name][i][axis]`: the form in which input i is read (None: any). `gradients[value]`: axes over which the
    gradient of this parameter, buffer or input must still be summed.
    """

    sizes: Mapping[str, int]
    ops: Mapping[str, Mapping[str, str]]
    forms: Mapping[str, Mapping[str, Placement]]
    needs: Mapping[str, tuple[Mapping[str, Placement | None], ...]]
    gradients: Mapping[str, tuple[str, ...]]
    moves: tuple[Move, ...]
    replicated: tuple[str, ...]  # sites of operators that have no rule
    shards: Mapping[str, Shards] = field(default_factory=dict)  # by axis; of one that owns, (name, owner)
    regions: tuple[Owners, ...] = ()
    attention: str = AUTO  # how ranks that share sequences attend to one another's positions (`weft.plan.axis`)

    def shape(
        self, value: str, shape: tuple[int, ...], forms: Mapping[str, Placement] | None = None, at: Mapping[str, int] | None = None
    ) -> tuple[int, ...]:
        """The shape of a rank's part of a value of global `shape`, as it lies or in the given placements; `at`: the rank's place along each
        axis, by default one that has most."""
        local = list(shape)
        for axis, form in (self.forms[value] if forms is None else forms).items():
            if is_cut(form):
                local[form.dim] = part_length(form, local[form.dim], self.sizes[axis], None if at is None else at[axis])
        return tuple(local)

    def ways(self, op: Operator, axis: str) -> int | float:
        """An operator's work over that of the rank of an axis that has most of it; 1 where it is not cut there."""
        if not self.ops[op.name].get(axis):
            return 1
        forms = (*(self.forms[value][axis] for value in op.outputs), *(row[axis] for row in self.needs[op.name]))
        return next((form.ways(self.sizes[axis]) for form in forms if is_piece(form)), self.sizes[axis])

    @cached_property
    def inner_axes(self) -> tuple[str, ...]:
        """Axes whose ranks share their samples: all but data."""
        return tuple(axis for axis in self.sizes if not axis_of(axis).replicas)

    @cached_property
    def pieces(self) -> Mapping[str, int | float]:
        """By value: the pieces that it is cut into along those; where they are unequal, the whole over the longest. Of what ranks own that
        counts which the busiest one has: there is nothing of the rest, in as many pieces as one likes."""
        axes = [(axis, self.sizes[axis]) for axis in self.inner_axes]
        return {
            value: inf if value in self.elsewhere else prod(form.ways(n) for axis, n in axes if is_piece(form := forms.get(axis, R)))
            for value, forms in self.forms.items()
        }

    @property
    def sample_axes(self) -> tuple[str, ...]:
        """Axes along which ranks have other samples."""
        return sample_axes(self.sizes)

    def rows(self, value: str, shape: tuple[int, ...], at: Mapping[str, int] | None = None) -> tuple[int, ...]:
        """The shape of a value of global `shape` for the samples of the rank at `at`, by default one that has most; all else is whole."""
        return self.shape(value, shape, {axis: form for axis, form in self.forms[value].items() if axis_of(axis).cuts_samples}, at)

    @cached_property
    def elsewhere(self) -> frozenset[str]:
        """Operators and values that another rank of their region has than the busiest one."""
        return frozenset().union(*(region.elsewhere for region in self.regions))

    def lies(self, value: str) -> Mapping[str, Placement]:
        """The placements of a value where it is read: those in which it is made, and behind a region those in which it has left that."""
        left = {region.axis: region.leaves[value] for region in self.regions if value in region.leaves}
        return {**self.forms[value], **left} if left else self.forms[value]

    def held(self, value: str, shape: tuple[int, ...], at: Mapping[str, int], but: Collection[str] = ()) -> list[tuple[int, int, int]]:
        """(dimension, start in what the axes before leave of it, length) of the part that the rank at `at` holds of a value of `shape`, cut
        over all axes `but` some.

        What a graph is given does not lie in several parts (`weft.model.sharding.propagate`).
        """
        pieces, left = [], list(shape)
        for axis, form in self.forms[value].items():
            if axis not in but and (is_shard(form) or is_halo(form)):  # pieces of a dimension may be cut once more
                start, left[form.dim] = part_of(form, left[form.dim], self.sizes[axis], at[axis])
                pieces.append((form.dim, start, left[form.dim]))
        return pieces


def move_collectives(source: Placement, target: Placement) -> tuple[str, str]:
    """(forward, backward) collectives of a redistribution: a collective and its dual. `slice` and "" move no bytes.

    >>> from weft.errors import LayoutError
    >>> move_collectives(P, R), move_collectives(R, D), move_collectives(Shard(1), D)
    (('all_reduce', ''), ('', 'all_reduce'), ('all_gather', 'reduce_scatter'))
    """
    if not allowed(source, target):
        raise LayoutError(f"no redistribution from {source} to {target}")
    return transition(source, target).collective, transition(dual(target), dual(source)).collective


def passed_round(sharding: Sharding, op: Operator, rule: Rule | None, axis: str) -> tuple[str, ...]:
    """The keys and values of attention that go round the ranks of an axis: those that lie in pieces there, as its queries do."""
    if rule is None or rule.kernels.get(sharding.ops[op.name].get(axis, "")) != QUERIES:
        return ()
    read = zip(op.inputs, rule.inputs, (row[axis] for row in sharding.needs[op.name]), strict=True)
    return tuple(value for value, row, need in read if row and is_piece(need) and rule.kernels.get(row[need.dim]) == KEYS)


def exchanged(sharding: Sharding, op: Operator, rule: Rule | None, axis: str, shape: tuple[int, ...]) -> int:
    """Ranks of an axis, side by side, that exchange positions of attention for its heads before keys go round among such sets of ranks;
    1 where none do. Where the layout does not say how many, as many as divide the axis and have a head each. `shape`: of its queries.

    Raises:
        LayoutError: fewer heads than the layout exchanges among so many ranks.
    """
    n = sharding.sizes.get(axis, 1)
    said = exchanging(sharding.attention, n)
    if said == 1 or rule is None or not passed_round(sharding, op, rule, axis):
        return 1
    at, heads = heads_dim(rule), 1
    if at is not None:
        heads = shape[at]
        for other, form in sharding.needs[op.name][0].items():
            if is_shard(form) and form.dim == at:
                heads = min(form.sizes(heads, sharding.sizes[other]))
    if said > heads:
        raise LayoutError(
            f"attention={sharding.attention} exchanges heads among {said} ranks, and a rank has {heads} heads of {op.site}; "
            f"use attention={BOTH}, which takes as many as there are, or attention={RING}"
        )
    return said or max(count for count in range(1, n + 1) if n % count == 0 and count <= heads)


def part_of(form: Shard | Halo, length: int, n: int, index: int) -> tuple[int, int]:
    """(start, length) of what rank `index` of n holds of a dimension of `length`."""
    if isinstance(form, Shard):
        return form.part(length, n, index)
    start, stop = form.windows[index]
    return start, stop - start


def part_length(form: Shard | Strided | Halo, length: int, n: int, index: int | None = None) -> int:
    """Entries that a rank of n holds of a dimension of `length`; without an index, those of a rank that has most."""
    if isinstance(form, Strided):
        return length // form.size * piece(form.size, n, index or 0)[1]  # `inner` entries each, in runs of `size * inner`
    if isinstance(form, Shard):
        if form.lengths:
            return max(form.lengths) if index is None else form.lengths[index]
        return piece(length, n, index or 0)[1]  # the first pieces are the longer ones
    return max(part_of(form, length, n, i)[1] for i in (range(n) if index is None else (index,)))


def transfer_s(source: Placement, target: Placement, size_bytes: float, n: int, prices: Prices) -> float:
    """Seconds to bring a value of `size_bytes` (the whole) to another placement over n ranks: what a rank sends, and latency.

    An all-reduce is two collectives in a row, a reduce-scatter and an all-gather: of each of these the latency is half of its.
    """
    collective = transition(source, target).collective
    if collective in LOCAL:
        return 0.0
    latency = prices.latency_s * (1.0 if collective == "all_reduce" else 0.5)
    return sent_part(source, target, n) * size_bytes / prices.link_bytes_per_s + latency
