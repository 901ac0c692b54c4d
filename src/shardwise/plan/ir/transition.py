"""Redistribution between placements along an axis: the one table of transitions, each with its collective and the traffic of a rank.

The gradient of a value that was redistributed from `a` to `b` goes from `dual(b)` to `dual(a)`, which is a row of the same table: no
collective is paired with its dual by hand, and the bytes of backward are the same look-up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from shardwise.errors import LayoutError
from shardwise.plan.ir.placement import (
    DeferredReduce,
    Halo,
    HaloPartial,
    Partial,
    Placement,
    Range,
    Replicate,
    Shard,
    SingleOwner,
    Strided,
    even_shard_ranges,
)


@dataclass(frozen=True, slots=True)
class Transition:
    """Redistribution of a value from `source` to `target`.

    `collective`: the collective, or a local operation (`LOCAL_COLLECTIVES`). `is_allowed_in_forward`: whether a forward pass may do this;
    the others are only for backward.
    """

    source: type[Placement]
    target: type[Placement]
    collective: str
    is_allowed_in_forward: bool = True


LOCAL_COLLECTIVES = ("", "slice", "pad")  # nothing is sent

TRANSITIONS = {
    (row.source, row.target): row
    for row in (
        Transition(Replicate, DeferredReduce, ""),
        Transition(Replicate, Partial, ""),  # each rank has an equal fraction
        Transition(DeferredReduce, Partial, ""),
        Transition(Partial, Replicate, "all_reduce"),
        Transition(Partial, DeferredReduce, "all_reduce"),
        Transition(Replicate, Shard, "slice"),
        Transition(DeferredReduce, Shard, "slice"),
        Transition(Shard, Replicate, "all_gather"),
        Transition(Shard, DeferredReduce, "all_gather"),
        Transition(Partial, Shard, "reduce_scatter"),
        Transition(Shard, Shard, "all_to_all"),
        Transition(Replicate, Strided, "slice"),
        Transition(DeferredReduce, Strided, "slice"),
        Transition(Strided, Replicate, "all_gather"),
        Transition(Strided, DeferredReduce, "all_gather"),
        Transition(Partial, Strided, "reduce_scatter"),
        Transition(Strided, Strided, "all_to_all"),
        Transition(Strided, Shard, "all_to_all"),
        Transition(Shard, Strided, "all_to_all"),
        Transition(Shard, Halo, "halo_exchange"),
        Transition(Replicate, Halo, "slice"),
        Transition(DeferredReduce, Halo, "slice"),
        Transition(DeferredReduce, Replicate, "", is_allowed_in_forward=False),  # a gradient that all ranks hold is complete
        Transition(Shard, Partial, "pad", is_allowed_in_forward=False),  # among zeros
        Transition(Strided, Partial, "pad", is_allowed_in_forward=False),
        Transition(HaloPartial, Shard, "halo_add", is_allowed_in_forward=False),
        Transition(HaloPartial, Replicate, "all_reduce", is_allowed_in_forward=False),
        Transition(HaloPartial, Partial, "pad", is_allowed_in_forward=False),
        Transition(Replicate, SingleOwner, ""),  # the owner alone reads it
        Transition(DeferredReduce, SingleOwner, ""),
        Transition(SingleOwner, Replicate, "broadcast", is_allowed_in_forward=False),
        Transition(SingleOwner, Partial, "", is_allowed_in_forward=False),  # the others' summands are zero, and are left out
        Transition(Shard, SingleOwner, "gather"),
        Transition(SingleOwner, Shard, "scatter"),
    )
}


def transition_between(source: Placement, target: Placement) -> Transition:
    """Return the row from `source` to `target`.

    Raises:
        LayoutError: the table has none.
    """
    row = TRANSITIONS.get((type(source), type(target)))
    if row is None:
        raise LayoutError(f"no redistribution from {source} to {target}")
    return row


def is_allowed_in_forward(source: Placement, target: Placement) -> bool:
    """Return whether a value may be redistributed from `source` to `target` in a forward pass."""
    row = TRANSITIONS.get((type(source), type(target)))
    return row is not None and row.is_allowed_in_forward


def is_gathered_for_columns(source: Placement, target: Placement) -> bool:
    """Return whether ranks gather shards of a value, and reduce what each adds to its gradient: as column-cut linear layers read it."""
    return isinstance(source, Shard) and isinstance(target, DeferredReduce)


@cache
def sent_fraction(source: Placement, target: Placement, n: int) -> float:
    """Fraction of the whole tensor that the busiest of n ranks sends.

    An all-reduce is a reduce-scatter and an all-gather (Patarasuk and Yuan 2009), which take as long as the longest shard; in an
    all-to-all a rank keeps a shard of its shard; of windows it sends what others read of its entries.

    >>> from shardwise.plan.ir.placement import P, R
    >>> sent_fraction(P, R, 4), sent_fraction(Shard(0), R, 4), sent_fraction(Shard(2), Halo(2, 8, ((0, 5), (3, 8))), 2)
    (1.5, 0.75, 0.125)
    """
    match transition_between(source, target).collective, source, target:
        case "all_reduce", _, _:
            return 2 * (n - 1) / n
        case "all_gather", Shard() | Strided(), _:
            return (n - 1) / source.split_factor(n)
        case "reduce_scatter", _, Shard() | Strided():
            return (n - 1) / target.split_factor(n)
        case "all_to_all", Shard() | Strided(), Shard() | Strided():
            source_lengths, target_lengths = _unequal_lengths(source, n), _unequal_lengths(target, n)
            return _all_to_all_fraction(source_lengths, target_lengths, n) if source_lengths or target_lengths else (n - 1) / n / n
        case "broadcast", _, _:
            return 1.0
        case "gather", _, _:
            return 1 / n  # to each owner, so that what all ranks own together goes as in an all-gather
        case "scatter", _, _:
            return (n - 1) / n
        case "halo_exchange", _, Halo(_, size, windows):
            return _max_sent_entries(even_shard_ranges(size, n), windows) / size
        case "halo_add", HaloPartial(_, size, windows), _:
            return _max_sent_entries(windows, even_shard_ranges(size, n)) / size
    return 0.0


def _unequal_lengths(placement: Shard | Strided, n: int) -> tuple[int, ...]:
    """Return the lengths of shards, in positions; () where they are equal."""
    return placement.lengths if isinstance(placement, Shard) else placement.run_shard(n).lengths


def _all_to_all_fraction(source: tuple[int, ...], target: tuple[int, ...], n: int) -> float:
    """Fraction sent in an all-to-all of unequal shards: of its shard of one dimension what is not in its shard of the other."""
    source_parts, target_parts = ([size / sum(lengths) for size in lengths] for lengths in (one or (1,) * n for one in (source, target)))
    return max(a * (1 - b) for a, b in zip(source_parts, target_parts, strict=True))


def _max_sent_entries(held: tuple[Range, ...], wanted: tuple[Range, ...]) -> int:
    """Number of entries that the rank sends that sends most."""
    return max(
        sum(max(0, min(b, d) - max(a, c)) for other, (c, d) in enumerate(wanted) if other != rank) for rank, (a, b) in enumerate(held)
    )
