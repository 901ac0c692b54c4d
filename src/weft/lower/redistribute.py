"""Redistribution of a local tensor from one placement to another along a mesh axis; differentiable.

One autograd function serves all rows of the table of transitions: its backward is the transition between the duals (`plan/transition.py`),
so that communication in backward is correct by construction, whatever the model does in between.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.plan.placement import (
    Deferred,
    Halo,
    HaloPartial,
    Partial,
    Placement,
    Range,
    Replicate,
    Shard,
    Strided,
    dual,
    piece,
    pieces,
    shard,
    zigzag,
)
from weft.plan.transition import transition
from weft.world.world import Group


class _Counted(torch.autograd.Function):
    """Identity forward; scales the gradient backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float) -> Tensor:
        ctx.share = share
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.share, None


def counted(x: Tensor, share: float) -> Tensor:
    """Return `x`, with its gradient scaled by this rank's share where several ranks that sum it have the same."""
    return _Counted.apply(x, share) if x.is_floating_point() else x  # type: ignore[no-untyped-call]


class _Redistributed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Placement, target: Placement, group: Group) -> Tensor:
        ctx.duals, ctx.group = (dual(target), dual(source)), group
        return moved(x, source, target, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        source, target = ctx.duals
        return moved(grad, source, target, ctx.group), None, None, None


def moved(x: Tensor, source: Placement, target: Placement, group: Group) -> Tensor:
    """Redistribute by one transition, forward only. Shards without lengths are equal."""
    if any(isinstance(form, Strided) for form in (source, target)):
        return _in_positions(x, source, target, group)
    if any(isinstance(form, Shard) and form.runs for form in (source, target)):
        return _in_runs(x, source, target, group)
    return _in_order(x, source, target, group)


def _in_order(x: Tensor, source: Placement, target: Placement, group: Group) -> Tensor:
    """Apply a transition where shards are in rank order."""
    match transition(source, target).collective, source, target:
        case "", Replicate() | Deferred(), Partial():
            return x / group.size
        case "", _, _:
            return x.view_as(x)
        case "all_reduce", HaloPartial(), _:
            return _summed(_among_zeros(x, source.dim, source.size, source.windows[group.index]), group)
        case "all_reduce", _, _:
            return _summed(x, group)
        case "slice", _, Shard(dim):
            return x.narrow(dim, *target.part(x.shape[dim], group.size, group.index)).contiguous()
        case "slice", _, Halo(dim, _, windows):
            start, stop = windows[group.index]
            return x.narrow(dim, start, stop - start).contiguous()
        case "all_gather", Shard(dim), _:
            return group.all_gather(x.contiguous(), dim, source.lengths or None)
        case "reduce_scatter", _, Shard(dim):
            return group.reduce_scatter(x, dim, target.lengths)
        case "pad", HaloPartial(dim, size, windows), _:
            return _among_zeros(x, dim, size, windows[group.index])
        case "pad", Shard(dim), _:
            extent = sum(source.lengths) or x.shape[dim] * group.size
            return _among_zeros(x, dim, extent, source.ranges(extent, group.size)[group.index])
        case "all_to_all", Shard(dim), Shard(other):
            return group.all_to_all(x, other, dim, source.lengths or None, target.lengths)
        case "halo_exchange", Shard(dim), Halo(_, size, windows):
            return _fetched(x, dim, pieces(size, group.size), windows, group)
        case "halo_add", HaloPartial(dim, size, windows), _:
            return _fetched(x, dim, windows, pieces(size, group.size), group)
    raise AssertionError(f"no redistribution from {source} to {target}")


def _in_runs(x: Tensor, source: Placement, target: Placement, group: Group) -> Tensor:
    """Apply a transition where ranks have a shard of each of several runs: that of plain shards, on a tensor where each rank's shards are
    contiguous."""
    plain = [Shard(form.dim, form.lengths) if isinstance(form, Shard) else form for form in (source, target)]
    if isinstance(target, Shard) and target.runs:
        x = torch.cat([x.narrow(target.dim, a, b - a) for spans in _spans(target, group.size) for a, b in spans], target.dim)
    out = _in_order(x, plain[0], plain[1], group)
    if isinstance(source, Shard) and source.runs:
        starts, start = [], 0
        for spans in _spans(source, group.size):
            for a, b in spans:
                starts.append((a, start, b - a))
                start += b - a
        out = torch.cat([out.narrow(source.dim, at, size) for _, at, size in sorted(starts)], source.dim)
    return out


def _spans(form: Shard, num_ranks: int) -> list[tuple[Range, ...]]:
    return [form.spans(0, num_ranks, i) for i in range(num_ranks)]


def _in_positions(x: Tensor, source: Placement, target: Placement, group: Group) -> Tensor:
    """Apply a transition where positions of runs are sharded: that of plain shards, on a tensor with runs, positions and inner entries as
    separate dimensions, positions in rank order."""
    strided, is_target = (source, False) if isinstance(source, Strided) else (target, True)
    assert isinstance(strided, Strided)
    num_positions = strided.size if is_target else piece(strided.size, group.size, group.index)[1]
    positions = shard(strided.dim + 1, strided.size, group.size)
    x = x.reshape(*x.shape[: strided.dim], -1, num_positions, strided.inner, *x.shape[strided.dim + 1 :])
    if is_target:
        x = _ordered(x, strided, group.size, by_rank=True)
        out = moved(x, _behind(source, strided), positions, group)
    else:
        out = moved(x, positions, _behind(target, strided), group)
        out = _ordered(out, strided, group.size, by_rank=False)
    return out.reshape(*out.shape[: strided.dim], -1, *out.shape[strided.dim + 3 :])


def _behind(placement: Placement, cut: Strided) -> Placement:
    """Return a placement of the tensor in which the sharded dimension has become three."""
    match placement:
        case Shard(dim, lengths, runs) if dim > cut.dim:
            return Shard(dim + 2, lengths, runs)
        case Strided(dim, size, inner, order) if dim > cut.dim:
            return Strided(dim + 2, size, inner, order)
    return placement


def _ordered(x: Tensor, cut: Strided, num_ranks: int, by_rank: bool) -> Tensor:
    """Reorder positions from their own order to that of the ranks that hold them (zigzag), or back."""
    if not cut.zigzag:
        return x
    ranges = [(a, b) for halves in zigzag(cut.size, num_ranks) for a, b in halves if a < b]
    if not by_rank:
        starts, start = {}, 0
        for a, b in ranges:
            starts[a, b], start = start, start + b - a
        ranges = [(starts[r], starts[r] + r[1] - r[0]) for r in sorted(ranges)]
    return torch.cat([x.narrow(cut.dim + 1, a, b - a) for a, b in ranges], cut.dim + 1)


def _summed(x: Tensor, group: Group) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    group.all_reduce(out)
    return out


def _among_zeros(x: Tensor, dim: int, size: int, window: Range) -> Tensor:
    """Return a window of a dimension of `size`, zero elsewhere."""
    out = x.new_zeros((*x.shape[:dim], size, *x.shape[dim + 1 :]))
    out.narrow(dim, window[0], window[1] - window[0]).copy_(x)
    return out


def _fetched(x: Tensor, dim: int, held: tuple[Range, ...], wanted: tuple[Range, ...], group: Group) -> Tensor:
    """Return the sum, over ranks, of the entries of `dim` that this rank wants; `held`: by rank, the entries it holds."""

    def overlap(a: Range, b: Range) -> Range:
        start = max(a[0], b[0])
        return start, max(start, min(a[1], b[1]))

    own_range, wanted_range = held[group.index], wanted[group.index]
    sent, shapes = [], []
    for rank in range(group.size):
        start, stop = (0, 0) if rank == group.index else overlap(own_range, wanted[rank])
        sent.append(x.narrow(dim, min(max(start - own_range[0], 0), x.shape[dim]), stop - start))
        start, stop = (0, 0) if rank == group.index else overlap(held[rank], wanted_range)
        shapes.append([*x.shape[:dim], stop - start, *x.shape[dim + 1 :]])
    received = group.exchange(sent, shapes)
    spans = [overlap(range_, wanted_range) for range_ in held]
    start, stop = spans[group.index]
    received[group.index] = x.narrow(dim, min(max(start - own_range[0], 0), x.shape[dim]), stop - start)
    filled = [span for span in spans if span[0] < span[1]]
    if [wanted_range[0], *(stop for _, stop in filled)] == [*(start for start, _ in filled), wanted_range[1]]:  # consecutive, as shards are
        return torch.cat(received, dim)
    out = x.new_zeros((*x.shape[:dim], wanted_range[1] - wanted_range[0], *x.shape[dim + 1 :]))
    for (start, stop), part in zip(spans, received, strict=True):
        if stop > start:
            out.narrow(dim, start - wanted_range[0], stop - start).add_(part)
    return out


def redistribute(x: Tensor, source: Placement, target: Placement, group: Group) -> Tensor:
    """Return `x`, placed as `source` over `group`, placed as `target`.

    Integers and other tensors without a gradient take the same path forward.
    """
    if x.is_complex():  # gloo does not support complex numbers; send pairs of reals
        pairs = redistribute(torch.view_as_real(x.resolve_conj()), source, target, group)
        return torch.view_as_complex(pairs.contiguous())
    return _Redistributed.apply(x, source, target, group)  # type: ignore[no-any-return,no-untyped-call]
