"""Ulysses plus ring attention: groups of adjacent ranks exchange positions for heads, then keys go around a ring of such groups (Fang and
Zhao 2024, arXiv 2405.07719).

Each rank of a group gets some of the heads of all positions of the group; keys of those heads go around from group to group (`ring`);
results are returned. Heads of keys that queries of several ranks read go to each of these. With q bytes of queries and as many of results
per rank, p of keys and values, groups of u ranks and rings of n/u groups, a rank sends (u-1)/u (2q + p) forward and as much backward, and
(n/u-1)p around the ring forward, twice that backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardwise.lower.kernels.randomness import DrawSite
from shardwise.lower.kernels.ring import Ranges, Ring, ring_attention
from shardwise.lower.kernels.sample_positions import DrawnShard
from shardwise.lower.kernels.second_derivatives import refuse_second_derivatives
from shardwise.plan.ir.placement import Range, even_shard_ranges
from shardwise.world.comm.group import Group


def shared_heads(x: Tensor, first: int, count: int, num_query_heads: int) -> Tensor:
    """Return, of keys or values [..., heads, positions, width], those that query heads `first` to `first + count` of `of` read: each once
    where equally many queries read it, else one per query head."""
    group_size = num_query_heads // x.shape[-3]
    heads = [(first + i) // group_size for i in range(count)]
    num_heads = heads[-1] + 1 - heads[0]
    if heads == [heads[0] + i * num_heads // count for i in range(count)]:
        return x.narrow(-3, heads[0], num_heads)
    return x.index_select(-3, torch.tensor(heads, device=x.device))


@dataclass(frozen=True)
class HeadExchange:
    """`group`: the ranks of a group. `queries` and `keys`: positions that each of them has. `ring`: the ring attention that follows, among
    the ranks of all groups with the same heads. `has_mask_rows`: a mask has one row per query rather than one for all."""

    group: Group
    queries: tuple[Ranges, ...]
    keys: tuple[Ranges, ...]
    ring: Ring
    has_mask_rows: bool


def head_exchange_of(inner_group: Group, outer_group: Group, ring: Ring, has_mask_rows: bool) -> HeadExchange:
    """Return the exchange for a ring where ranks of the inner group `beside` exchange heads, and keys go around those `apart`."""
    assert ring.group is not None
    indices = [ring.group.ranks.index(rank) for rank in inner_group.ranks]
    first, n = indices[0], len(indices)
    sets = [range(start, start + n) for start in range(0, ring.size, n)]
    queries, keys = (tuple(merge_ranges([at[i] for i in ranks]) for ranks in sets) for at in (ring.queries, ring.keys))
    drawing = ring.drawing
    if drawing is not None:
        drawing = drawing[0], _draw_site_of_set(drawing[1], queries[first // n], inner_group)
    group = outer_group if outer_group.size > 1 else None
    group_ring = replace(ring, group=group, queries=queries, keys=keys, drawing=drawing)
    places_of = [tuple(at[i] for i in indices) for at in (ring.queries, ring.keys)]
    return HeadExchange(inner_group, places_of[0], places_of[1], group_ring, has_mask_rows)


def _draw_site_of_set(where: DrawSite, at: Ranges, inner_group: Group) -> DrawSite:
    """Return the draw site of scores [..., heads, queries, keys] for all queries of a group and this rank's part of the heads."""
    place = where.shard
    dim = len(place.shape) - 2
    ((start, stop),) = at  # draws need positions in order
    cuts = [(cut[0], start, stop - start) if cut[0] == dim else cut for cut in place.cuts]
    heads = DrawnShard(place.shape, tuple(cuts)).local_shape[dim - 1]
    first, last = even_shard_ranges(heads, inner_group.size)[inner_group.index]
    return replace(where, shard=replace(place, cuts=(*cuts, (dim - 1, first, last - first))))


def merge_ranges(members: Sequence[Ranges]) -> Ranges:
    """Return the positions that the ranks of a group have together.

    >>> merge_ranges((((0, 2), (6, 8)), ((2, 4), (4, 6)))), merge_ranges((((0, 2), (14, 16)), ((2, 4), (12, 14))))
    (((0, 8),), ((0, 4), (12, 16)))
    """
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(range_ for ranges in members for range_ in ranges):
        if merged and merged[-1][1] == start:
            merged[-1] = merged[-1][0], stop
        else:
            merged.append((start, stop))
    return tuple(merged)


def ulysses_ring_attention(exchange: HeadExchange, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Run the operator on this rank's positions. `mask`: rows of its queries or one, of all heads or one."""
    if torch.is_autocast_enabled(q.device.type):
        autocast_dtype = torch.get_autocast_dtype(q.device.type)
        with torch.autocast(q.device.type, enabled=False):
            return ulysses_ring_attention(exchange, q.to(autocast_dtype), k.to(autocast_dtype), v.to(autocast_dtype), mask)
    heads = [(start, stop - start) for start, stop in even_shard_ranges(q.shape[-3], exchange.group.size)]
    own_index = exchange.group.index
    rows, columns = ([_num_positions(item) for item in at] for at in (exchange.queries, exchange.keys))
    read = [[q.narrow(-3, first, n), *(shared_heads(x, first, n, q.shape[-3]) for x in (k, v))] for first, n in heads]
    shapes = [
        [(*x.shape[:-2], length, x.shape[-1]) for x, length in zip(read[own_index], (a, b, b), strict=True)]
        for a, b in zip(rows, columns, strict=True)
    ]
    received = zip(*_exchange_tensors(exchange.group, read, shapes), strict=True)
    q, k, v = (_sort_positions(list(x), at) for x, at in zip(received, (exchange.queries, exchange.keys, exchange.keys), strict=True))
    if mask is not None:
        mask = _mask_of_heads(exchange, mask, heads)
    out = ring_attention(exchange.ring, q, k, v, mask)
    sent = [[part] for part in _split_by_rank(out, exchange.queries)]
    return_shapes = [[(*out.shape[:-3], count, rows[own_index], out.shape[-1])] for _, count in heads]
    return torch.cat([item for (item,) in _exchange_tensors(exchange.group, sent, return_shapes)], -3)


def _mask_of_heads(exchange: HeadExchange, mask: Tensor, heads: list[tuple[int, int]]) -> Tensor:
    """Return the mask of this rank's heads, and of the queries of all ranks of the group."""
    parts = [mask.narrow(-3, *head_range) if mask.dim() > 2 and mask.shape[-3] > 1 else mask for head_range in heads]
    own_part = parts[exchange.group.index]
    if not exchange.has_mask_rows:
        return own_part
    shapes = [[(*own_part.shape[:-2], _num_positions(at), own_part.shape[-1])] for at in exchange.queries]
    sent_dtype = torch.uint8 if mask.dtype is torch.bool else mask.dtype
    received = _exchange_tensors(exchange.group, [[part.to(sent_dtype)] for part in parts], shapes)
    return _sort_positions([item for (item,) in received], exchange.queries).to(mask.dtype)


def _num_positions(at: Ranges) -> int:
    return sum(stop - start for start, stop in at)


def _sort_positions(members: list[Tensor], at: Sequence[Ranges]) -> Tensor:
    """Sort rows of each rank of a group by position."""
    parts: dict[Range, Tensor] = {}
    for x, ranges in zip(members, at, strict=True):
        parts |= dict(zip(ranges, torch.split(x, [b - a for a, b in ranges], -2), strict=True))
    return torch.cat([parts[range_] for range_ in sorted(parts)], -2)


def _split_by_rank(x: Tensor, at: Sequence[Ranges]) -> list[Tensor]:
    """Split rows in position order into those of each rank."""
    order = sorted(range_ for ranges in at for range_ in ranges)
    parts = dict(zip(order, torch.split(x, [b - a for a, b in order], -2), strict=True))
    return [torch.cat([parts[range_] for range_ in ranges], -2) for ranges in at]


Shapes = Sequence[Sequence[tuple[int, ...]]]


def _exchange_tensors(group: Group, sent: Sequence[Sequence[Tensor]], shapes: Shapes) -> list[list[Tensor]]:
    """Send `sent[i]` to rank i of the group; return what rank i sent, of `shapes[i]`, in one message each; differentiable."""
    sizes = [[torch.Size(shape).numel() for shape in row] for row in shapes]
    flat = _ExchangeHeads.apply(group, [sum(row) for row in sizes], *(torch.cat([x.reshape(-1) for x in row]) for row in sent))  # type: ignore[no-untyped-call]
    return [
        [part.view(shape) for part, shape in zip(torch.split(x, size), row, strict=True)]
        for x, size, row in zip(flat, sizes, shapes, strict=True)
    ]


class _ExchangeHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, sizes: list[int], *sent: Tensor) -> tuple[Tensor, ...]:
        ctx.reverse = group, [x.numel() for x in sent]
        return tuple(group.exchange(sent, [(size,) for size in sizes]))

    @staticmethod
    @refuse_second_derivatives("attention", "context")
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        group, sizes = ctx.reverse
        return None, None, *group.exchange(grads, [(size,) for size in sizes])
