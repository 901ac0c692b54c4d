"""Ring attention among sets of ranks that lie side by side and exchange positions for heads (Fang and Zhao 2024, arXiv 2405.07719).

In: this rank's positions of queries, keys and values, of all heads. Out: attention of its queries to all keys. Each rank of a set gets some
of the heads of all positions of the set; keys of those heads go round from set to set (`ring`); results go back. Heads of keys that queries
of several ranks read go to each of these. Where a rank has q bytes of queries and as many of results, p of keys and values, u ranks are a
set and n/u sets a ring, a rank sends (u-1)/u (2q + p) forward and as much backward, and (n/u-1)p round forward, twice that backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from weft.lower.kernels.heads import shared_heads
from weft.lower.kernels.randomness import Where
from weft.lower.kernels.ring import Ranges, Ring, ring_attention
from weft.lower.kernels.sample_positions import Place
from weft.plan.placement import Range, pieces
from weft.world.group import Group


@dataclass(frozen=True)
class Exchange:
    """`group`: the ranks of a set. `queries` and `keys`: the positions that each of them has. `ring`: what follows, among the ranks of all
    sets that have the same heads. `masks_rows`: whether a mask has a row for each query, and not one for all."""

    group: Group
    queries: tuple[Ranges, ...]
    keys: tuple[Ranges, ...]
    ring: Ring
    masks_rows: bool


def exchange_of(beside: Group, apart: Group, ring: Ring, masks_rows: bool) -> Exchange:
    """What a ring of all ranks becomes where those `beside` one another exchange heads, and keys go round those `apart`."""
    assert ring.group is not None
    places = [ring.group.ranks.index(rank) for rank in beside.ranks]
    first, n = places[0], len(places)
    sets = [range(start, start + n) for start in range(0, ring.size, n)]
    queries, keys = (tuple(joined([at[i] for i in one]) for one in sets) for at in (ring.queries, ring.keys))
    drawing = ring.drawing
    if drawing is not None:
        drawing = drawing[0], _of_set(drawing[1], queries[first // n], beside)
    group = apart if apart.size > 1 else None
    round_ = replace(ring, group=group, queries=queries, keys=keys, drawing=drawing)
    places_of = [tuple(at[i] for i in places) for at in (ring.queries, ring.keys)]
    return Exchange(beside, places_of[0], places_of[1], round_, masks_rows)


def _of_set(where: Where, at: Ranges, beside: Group) -> Where:
    """Where what is drawn for scores [..., heads, queries, keys] lies, of all queries of a set and of this rank's part of the heads."""
    place = where.place
    dim = len(place.shape) - 2
    ((start, stop),) = at  # what draws keeps positions in order
    cuts = [(cut[0], start, stop - start) if cut[0] == dim else cut for cut in place.cuts]
    heads = Place(place.shape, tuple(cuts)).local[dim - 1]
    first, last = pieces(heads, beside.size)[beside.index]
    return replace(where, place=replace(place, cuts=(*cuts, (dim - 1, first, last - first))))


def joined(members: Sequence[Ranges]) -> Ranges:
    """The positions that the ranks of a set have together.

    >>> joined((((0, 2), (6, 8)), ((2, 4), (4, 6)))), joined((((0, 2), (14, 16)), ((2, 4), (12, 14))))
    (((0, 8),), ((0, 4), (12, 16)))
    """
    pieces: list[tuple[int, int]] = []
    for start, stop in sorted(both for one in members for both in one):
        if pieces and pieces[-1][1] == start:
            pieces[-1] = pieces[-1][0], stop
        else:
            pieces.append((start, stop))
    return tuple(pieces)


def exchanged_attention(to: Exchange, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """The operator on this rank's positions. `mask`: rows of its queries or one, of all heads or one."""
    if torch.is_autocast_enabled(q.device.type):
        narrow = torch.get_autocast_dtype(q.device.type)
        with torch.autocast(q.device.type, enabled=False):
            return exchanged_attention(to, q.to(narrow), k.to(narrow), v.to(narrow), mask)
    heads = [(start, stop - start) for start, stop in pieces(q.shape[-3], to.group.size)]
    here, rows, columns = to.group.index, [_length(one) for one in to.queries], [_length(one) for one in to.keys]
    read = [[q.narrow(-3, *some), *(shared_heads(x, *some, q.shape[-3]) for x in (k, v))] for some in heads]
    shapes = [
        [(*x.shape[:-2], length, x.shape[-1]) for x, length in zip(read[here], (a, b, b), strict=True)]
        for a, b in zip(rows, columns, strict=True)
    ]
    arrived = zip(*_exchanged(to.group, read, shapes), strict=True)
    q, k, v = (_in_order(list(x), at) for x, at in zip(arrived, (to.queries, to.keys, to.keys), strict=True))
    if mask is not None:
        mask = _of_heads(to, mask, heads)
    out = ring_attention(to.ring, q, k, v, mask)
    sent = [[part] for part in _by_rank(out, to.queries)]
    back = [[(*out.shape[:-3], count, rows[here], out.shape[-1])] for _, count in heads]
    return torch.cat([one for (one,) in _exchanged(to.group, sent, back)], -3)


def _of_heads(to: Exchange, mask: Tensor, heads: list[tuple[int, int]]) -> Tensor:
    """A mask of this rank's heads, and of the queries of all ranks of the set."""
    parts = [mask.narrow(-3, *some) if mask.dim() > 2 and mask.shape[-3] > 1 else mask for some in heads]
    mine = parts[to.group.index]
    if not to.masks_rows:
        return mine
    shapes = [[(*mine.shape[:-2], _length(at), mine.shape[-1])] for at in to.queries]
    if mask.dtype is not torch.bool:
        return _in_order([one for (one,) in _exchanged(to.group, [[part] for part in parts], shapes)], to.queries)
    arrived = _exchanged(to.group, [[part.to(torch.uint8)] for part in parts], shapes)
    return _in_order([one for (one,) in arrived], to.queries).to(torch.bool)


def _length(at: Ranges) -> int:
    return sum(stop - start for start, stop in at)


def _in_order(members: list[Tensor], at: Sequence[Ranges]) -> Tensor:
    """Rows that each rank of a set had, in the order of their positions."""
    parts: dict[Range, Tensor] = {}
    for x, ranges in zip(members, at, strict=True):
        parts |= dict(zip(ranges, torch.split(x, [b - a for a, b in ranges], -2), strict=True))
    return torch.cat([parts[one] for one in sorted(parts)], -2)


def _by_rank(x: Tensor, at: Sequence[Ranges]) -> list[Tensor]:
    """Of rows in the order of their positions those of each rank."""
    order = sorted(one for ranges in at for one in ranges)
    parts = dict(zip(order, torch.split(x, [b - a for a, b in order], -2), strict=True))
    return [torch.cat([parts[one] for one in ranges], -2) for ranges in at]


Shapes = Sequence[Sequence[tuple[int, ...]]]


def _exchanged(group: Group, sent: Sequence[Sequence[Tensor]], shapes: Shapes) -> list[list[Tensor]]:
    """`sent[i]` to rank i of the group, and what rank i sent here, of `shapes[i]`, in one message each; differentiable."""
    sizes = [[torch.Size(shape).numel() for shape in row] for row in shapes]
    flat = _Exchanged.apply(group, [sum(row) for row in sizes], *(torch.cat([x.reshape(-1) for x in row]) for row in sent))  # type: ignore[no-untyped-call]
    return [
        [part.view(shape) for part, shape in zip(torch.split(x, size), row, strict=True)]
        for x, size, row in zip(flat, sizes, shapes, strict=True)
    ]


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, sizes: list[int], *sent: Tensor) -> tuple[Tensor, ...]:
        ctx.back = group, [x.numel() for x in sent]
        return tuple(group.exchange(sent, [(size,) for size in sizes]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        group, sizes = ctx.back
        return None, None, *group.exchange(grads, [(size,) for size in sizes])
