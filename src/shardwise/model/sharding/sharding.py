"""`Sharding`: the placement of every value of a graph along every mesh axis, and the redistributions where placements differ."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, prod

from shardwise.errors import LayoutError
from shardwise.ops import Rule
from shardwise.ops.attention import heads_dim
from shardwise.ops.operator import Operator
from shardwise.ops.rule import KEYS, QUERIES
from shardwise.plan.ir.axis import RING, ULYSSES_RING, axis_of, layout_word, sample_axes, ulysses_group_size
from shardwise.plan.ir.choice import AUTO
from shardwise.plan.ir.placement import (
    Halo,
    Placement,
    R,
    Shard,
    Strided,
    dual_of,
    even_shard_range,
    has_single_owner,
    is_disjoint_shard,
    is_halo,
    is_shard,
    is_sharded,
)
from shardwise.plan.ir.transition import LOCAL_COLLECTIVES, is_allowed_in_forward, sent_fraction, transition_between

Shards = tuple[tuple[str, int], ...]  # (parameter or buffer name, sharded dim)


@dataclass(frozen=True, slots=True)
class Prices:
    """Rates of one rank that the search weighs: FLOP/s, bytes/s of memory and of the axis' links, seconds of latency.

    `samples`: of the microbatch that the search prices, all replicas together; 0 for the graph's batch.
    """

    flops_per_s: float = 1e9
    memory_bytes_per_s: float = 1e10
    link_bytes_per_s: float = 1e9
    latency_s: float = 2e-4
    samples: int = 0


@dataclass(frozen=True, slots=True)
class BranchOwners:
    """A region of parallel branches along `axis`. `rank_of`: owner of each operator. `exit_shards`: values read outside of it, and their
    sample shards there. `off_rank`: operators of other ranks than the busiest one, and the values that only these compute or read."""

    axis: str
    rank_of: Mapping[str, int]
    exit_shards: Mapping[str, Shard]
    off_rank: frozenset[str] = frozenset()


# With free links and expensive compute everything is sharded that the rules allow; small models would not be at any other prices.
FREE_LINKS = Prices(flops_per_s=1e3, memory_bytes_per_s=1e3, link_bytes_per_s=1e15, latency_s=0.0)


def priced_num_samples(samples: int) -> int:
    """Return the number of samples for which operators are priced: the largest of 4, 16 and 64 that a rank's microbatch has.

    Planning and running ask for the same number, so that what was priced is what runs; there are few, since propagation takes time.

    >>> [priced_num_samples(n) for n in (1, 4, 15, 32, 1000)]
    [4, 4, 4, 16, 64]
    """
    return next((n for n in (64, 16) if samples >= n), 4)


@dataclass(frozen=True, slots=True)
class Redistribution:
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

    `labels[name][axis]`: the sharded label, "" where the operator is replicated. `placements[value][axis]`: as computed.
    `input_placements[name][i][axis]`: in which input i is read (None: any). `gradient_axes[value]`: axes over which the gradient of this
    parameter, buffer or input must still be reduced.
    """

    sizes: Mapping[str, int]
    labels: Mapping[str, Mapping[str, str]]
    placements: Mapping[str, Mapping[str, Placement]]
    input_placements: Mapping[str, tuple[Mapping[str, Placement | None], ...]]
    gradient_axes: Mapping[str, tuple[str, ...]]
    redistributions: tuple[Redistribution, ...]
    replicated_sites: tuple[str, ...]  # sites of operators that have no rule
    shards: Mapping[str, Shards] = field(default_factory=dict)  # by axis; of one that owns operators, (name, owner)
    regions: tuple[BranchOwners, ...] = ()
    promoted: frozenset[str] = frozenset()  # operators that take operands of one dtype only, which autocast may give several
    attention: str = AUTO  # context parallelism: how ranks attend to each other's positions (`shardwise.plan.ir.axis`)

    def local_shape(
        self,
        value: str,
        shape: tuple[int, ...],
        placements: Mapping[str, Placement] | None = None,
        coordinates: Mapping[str, int] | None = None,
    ) -> tuple[int, ...]:
        """Return the local shape of a value of global `local_shape`, in its own or in the given placements; `coordinates`: the rank's
        coordinate along each axis, by default a rank with the largest shard."""
        local = list(shape)
        for axis, form in (self.placements[value] if placements is None else placements).items():
            if is_sharded(form):
                local[form.dim] = shard_length(form, local[form.dim], self.sizes[axis], None if coordinates is None else coordinates[axis])
        return tuple(local)

    def work_split(self, op: Operator, axis: str) -> int | float:
        """Return an operator's work over that of the rank of an axis with most of it; 1 where it is not sharded there."""
        if not self.labels[op.name].get(axis):
            return 1
        forms = (*(self.placements[value][axis] for value in op.outputs), *(row[axis] for row in self.input_placements[op.name]))
        return next((form.split_factor(self.sizes[axis]) for form in forms if is_disjoint_shard(form)), self.sizes[axis])

    @cached_property
    def inner_axes(self) -> tuple[str, ...]:
        """Axes whose ranks share their samples: all but data."""
        return tuple(axis for axis in self.sizes if not axis_of(axis).has_replicas)

    @cached_property
    def num_shards(self) -> Mapping[str, int | float]:
        """Number of shards of each value along those; for unequal shards, the total over the longest. For values owned by single ranks,
        those of the busiest one count; the others' have infinitely many."""
        axes = [(axis, self.sizes[axis]) for axis in self.inner_axes]
        return {
            value: inf
            if value in self.off_rank
            else prod(form.split_factor(n) for axis, n in axes if is_disjoint_shard(form := forms.get(axis, R)))
            for value, forms in self.placements.items()
        }

    @property
    def sample_axes(self) -> tuple[str, ...]:
        """Axes along which ranks have different samples."""
        return sample_axes(self.sizes)

    def sample_shape(self, value: str, shape: tuple[int, ...], coordinates: Mapping[str, int] | None = None) -> tuple[int, ...]:
        """Return the shape of a value sharded by samples only, for the rank at `at`, by default one with most samples."""
        return self.local_shape(
            value, shape, {axis: form for axis, form in self.placements[value].items() if axis_of(axis).shards_samples}, coordinates
        )

    @cached_property
    def off_rank(self) -> frozenset[str]:
        """Operators and values of other ranks of their region than the busiest one."""
        return frozenset().union(*(region.off_rank for region in self.regions))

    def read_placements(self, value: str) -> Mapping[str, Placement]:
        """Return the placements in which a value is read: as computed, or, after a region, as it leaves that."""
        region_exits = {region.axis: region.exit_shards[value] for region in self.regions if value in region.exit_shards}
        return {**self.placements[value], **region_exits} if region_exits else self.placements[value]

    def stored(
        self, value: str, shape: tuple[int, ...], coordinates: Mapping[str, int], excluded_axes: Collection[str] = ()
    ) -> list[tuple[int, int, int]]:
        """Return (dimension, start within the shard of earlier axes, length) of the shard of a value of `local_shape` that the rank at `at`
        stores, sharded over all axes except `but`.

        Inputs of a graph are never stored in several parts (`shardwise.model.sharding.propagate`).
        """
        shards, lengths = [], list(shape)
        for axis, form in self.placements[value].items():
            if axis not in excluded_axes and (is_shard(form) or is_halo(form)):  # shards of a dimension may be sharded again
                start, lengths[form.dim] = shard_range(form, lengths[form.dim], self.sizes[axis], coordinates[axis])
                shards.append((form.dim, start, lengths[form.dim]))
        return shards


def redistribution_collectives(source: Placement, target: Placement) -> tuple[str, str]:
    """Return (forward, backward) collectives of a redistribution: a collective and its dual. `slice` and "" move no bytes.

    >>> from shardwise.plan.ir.placement import D, P
    >>> redistribution_collectives(P, R), redistribution_collectives(R, D), redistribution_collectives(Shard(1), D)
    (('all_reduce', ''), ('', 'all_reduce'), ('all_gather', 'reduce_scatter'))
    """
    if not is_allowed_in_forward(source, target):
        raise LayoutError(f"no redistribution from {source} to {target}")
    return transition_between(source, target).collective, transition_between(dual_of(target), dual_of(source)).collective


def ring_operands(sharding: Sharding, op: Operator, rule: Rule | None, axis: str) -> tuple[str, ...]:
    """Return the keys and values of attention that are passed around the ring of an axis: those sharded there like the queries."""
    if rule is None or rule.kernels.get(sharding.labels[op.name].get(axis, "")) != QUERIES:
        return ()
    read = zip(op.inputs, rule.inputs, (row[axis] for row in sharding.input_placements[op.name]), strict=True)
    return tuple(value for value, row, need in read if row and is_disjoint_shard(need) and rule.kernels.get(row[need.dim]) == KEYS)


def num_exchanging_ranks(sharding: Sharding, op: Operator, rule: Rule | None, axis: str, shape: tuple[int, ...]) -> int:
    """Return the number of adjacent ranks of an axis that exchange attention positions for heads (Ulysses) before keys go around the ring
    of such groups; 1 for none. Where the layout does not say, the most that divide the axis and have a head each. `local_shape`: of the
    queries.

    Raises:
        LayoutError: fewer heads than the layout exchanges among so many ranks.
    """
    n = sharding.sizes.get(axis, 1)
    given = ulysses_group_size(sharding.attention, n)
    if given == 1 or rule is None or not ring_operands(sharding, op, rule, axis):
        return 1
    at, heads = heads_dim(rule), 1
    if at is not None:
        heads = shape[at]
        for other, form in sharding.input_placements[op.name][0].items():
            if is_shard(form) and form.dim == at:
                heads = min(form.local_sizes(heads, sharding.sizes[other]))
    if given > heads:
        raise LayoutError(
            f"attention={sharding.attention} exchanges heads among {given} ranks, and a rank has {heads} heads of {op.site}; "
            f"use attention={ULYSSES_RING}, which takes as many as there are, or attention={RING}"
        )
    return given or max(count for count in range(1, n + 1) if n % count == 0 and count <= heads)


def shard_range(placement: Shard | Halo, length: int, n: int, index: int) -> tuple[int, int]:
    """Return (start, length) of the shard of rank `index` of n in a dimension of `length`."""
    if isinstance(placement, Shard):
        return placement.local_range(length, n, index)
    start, stop = placement.windows[index]
    return start, stop - start


def shard_length(placement: Shard | Strided | Halo, length: int, n: int, index: int | None = None) -> int:
    """Return the entries of a dimension of `length` that a rank of n holds; without an index, those of a rank with most."""
    if isinstance(placement, Strided):
        return length // placement.size * even_shard_range(placement.size, n, index or 0)[1]  # in runs of `size * inner` entries
    if isinstance(placement, Shard):
        if placement.lengths:
            lengths = placement.lengths_within(length)
            return max(lengths) if index is None else lengths[index]
        return even_shard_range(length, n, index or 0)[1]  # the first shards are the longer ones
    return max(shard_range(placement, length, n, i)[1] for i in (range(n) if index is None else (index,)))


def transfer_s(source: Placement, target: Placement, size_bytes: float, n: int, prices: Prices) -> float:
    """Seconds to redistribute a value of `size_bytes` (global) over n ranks: the bytes that a rank sends, and latency.

    An all-reduce is a reduce-scatter and an all-gather, each with half of its latency.
    """
    collective = transition_between(source, target).collective
    if collective in LOCAL_COLLECTIVES:
        return 0.0
    latency = prices.latency_s * (1.0 if collective == "all_reduce" else 0.5)
    return sent_fraction(source, target, n) * size_bytes / prices.link_bytes_per_s + latency


def refuse_idle_axes(sharding: Sharding, shapes: Iterable[Sequence[int]]) -> None:
    """Refuse an axis that divides weights where none of a model's, of these shapes, has an entry for each rank, and nothing is divided.

    Raises:
        LayoutError: always then; it names the key.
    """
    used = {axis for by_axis in sharding.labels.values() for axis, label in by_axis.items() if label}
    used.update(
        axis for by_axis in sharding.placements.values() for axis, one in by_axis.items() if is_sharded(one) or has_single_owner(one)
    )
    longest = max((length for shape in shapes for length in shape), default=0)
    idle = [axis for axis, n in sharding.sizes.items() if axis_of(axis).shards_weights and axis not in used and longest < n]
    if idle:
        words = " ".join(dict.fromkeys(layout_word(axis, sharding.sizes) for axis in idle))
        raise LayoutError(
            f"{words} shares the weights of products, and no weight of this model has an entry for each of these ranks; leave it out, use "
            "fewer ranks there, or use data for them"
        )
