"""How an operator gets an operand in the placements in which it reads it: from which placements of the value, axis by axis.

Lowering follows this; prices ask it which operators read one redistribution.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardwise.model.sharding.sharding import redistribution_collectives
from shardwise.plan.ir.axis import axis_of
from shardwise.plan.ir.placement import P, Placement, is_disjoint_shard, is_shard
from shardwise.plan.ir.transition import is_allowed_in_forward

Variant = tuple[Placement, ...]  # a value's placement along every axis
WantedVariant = tuple[Placement | None, ...]  # None: any


def find_available(available: Iterable[Variant], wanted: WantedVariant) -> Variant | None:
    """Return the first of the `available` placements of a value that an operator can read as they are; None if there are none."""
    return next((variant for variant in available if all(w is None or w == v for w, v in zip(wanted, variant, strict=True))), None)


def choose_source(axes: Sequence[str], available: Iterable[Variant], wanted: WantedVariant) -> Variant:
    """Return the `available` placements from which a value is redistributed to `wanted`: with the fewest collectives."""
    return min(available, key=lambda variant: _redistribution_cost(axes, variant, wanted))


def redistribution_steps(axes: Sequence[str], source: Variant, wanted: WantedVariant) -> list[tuple[int, Placement]]:
    """Return (number of the axis, its new placement) of every redistribution from `source` to `wanted`, in order."""
    steps = [(i, target) for i, target in enumerate(wanted) if target is not None and target != source[i]]
    return sorted(steps, key=lambda step: _redistribution_order(axes, step[0], source, wanted))


def crosses_head_shards(axes: Sequence[str], at: Variant, wanted: WantedVariant) -> bool:
    """Return whether head shards of a context axis would be sharded, or gathered, along another axis."""
    pairs = [*zip(at, wanted, strict=True)]
    shards = [a for axis, (a, b) in zip(axes, pairs, strict=True) if axis_of(axis).shards_sequences and is_shard(a) and a == b]
    return any(a != b and b is not None and shard in (a, b) for shard in shards for a, b in pairs)


def _redistribution_order(axes: Sequence[str], i: int, at: Variant, wanted: WantedVariant) -> tuple[int, int]:
    """Return the sort key of an axis for redistribution. Partial sums are reduced first, so that later redistributions move full
    tensors; nested shards are gathered from within. Heads sharded over two axes are tensor ranks' shards, sharded again over a context
    axis: these are made last and gathered first."""
    if axis_of(axes[i]).shards_sequences:
        for placement, rank_in_order in ((wanted[i], 3), (at[i], -1)):
            if is_shard(placement) and at[i] != wanted[i] and any(placement in (at[j], wanted[j]) for j in range(len(at)) if j != i):
                return rank_in_order, i
    own = at[i]
    is_nested = is_shard(own) and any(is_disjoint_shard(form) and form.dim == own.dim for j, form in enumerate(at) if j != i)
    return (0 if at[i] is P else 1 if is_nested else 2), (-i if is_nested else i)


def _redistribution_cost(axes: Sequence[str], variant: Variant, wanted: WantedVariant) -> tuple[int, int]:
    """Return (collectives, redistributions) from one variant to another: the fewest win."""
    num_collectives = num_moves = 0
    if crosses_head_shards(axes, variant, wanted):
        return 1000, 0
    for a, b in zip(variant, wanted, strict=True):
        if b is None or a == b:
            continue
        if not is_allowed_in_forward(a, b):
            return 1000, 0
        forward, backward = redistribution_collectives(a, b)
        num_collectives += (forward not in ("", "slice")) + (backward not in ("", "slice", "pad"))
        num_moves += 1
    return num_collectives, num_moves
