"""Redistribution of a local tensor from one placement to another along a mesh axis; differentiable.

One autograd function serves all rows of the table of transitions: its backward is the transition between the duals
(`plan/ir/transition.py`),
so that communication in backward is correct by construction, whatever the model does in between.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.plan.ir.placement import (
    DeferredReduce,
    Halo,
    HaloPartial,
    Partial,
    Placement,
    Range,
    Replicate,
    Shard,
    Strided,
    dual_of,
    even_shard_range,
    even_shard_ranges,
    shard,
    zigzag_ranges,
)
from shardwise.plan.ir.transition import transition_between
from shardwise.world.world import Group


class _ScaleGradient(torch.autograd.Function):
    """Identity forward; scales the gradient backward. The gradient of that gradient is not scaled: ranks that sum gradients each hold
    `share` of them, and second derivatives enter and leave as first ones do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float) -> Tensor:
        ctx.share = share
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        scaled = grad * ctx.share
        return (scale_gradient(scaled, 1.0 / ctx.share) if torch.is_grad_enabled() and ctx.share else scaled), None


def scale_gradient(x: Tensor, share: float) -> Tensor:
    """Return `x`, with its gradient scaled by this rank's share where several ranks that sum it have the same."""
    return _ScaleGradient.apply(x, share) if x.is_floating_point() else x  # type: ignore[no-untyped-call]


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Placement, target: Placement, group: Group) -> Tensor:
        ctx.duals, ctx.group = (dual_of(target), dual_of(source)), group
        return redistribute_forward(x, source, target, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        source, target = ctx.duals
        if torch.is_grad_enabled():  # create_graph=True: the gradient has a gradient, by the duals of the duals
            return redistribute(grad, source, target, ctx.group), None, None, None
        return redistribute_forward(grad, source, target, ctx.group), None, None, None


def redistribute_forward(x: Tensor, source: Placement, target: Placement, group: Group) -> Tensor:
    """Redistribute by one transition, forward only. Shards without lengths are equal."""
    if any(isinstance(form, Strided) for form in (source, target)):
        return _redistribute_strided(x, source, target, group)
    if any(isinstance(form, Shard) and form.runs for form in (source, target)):
        return _redistribute_runs(x, source, target, group)
    return _redistribute_in_rank_order(x, source, target, group)


def _redistribute_in_rank_order(x: Tensor, source: Placement, target: Placement, group: Group) -> Tensor:
    """Apply a transition where shards are in rank order."""
    match transition_between(source, target).collective, source, target:
        case "", Replicate() | DeferredReduce(), Partial():
            return x / group.size
        case "", _, _:
            return x.view_as(x)
        case "all_reduce", HaloPartial(), _:
            return _all_reduced_copy(_pad_with_zeros(x, source.dim, source.size, source.windows[group.index]), group)
        case "all_reduce", _, _:
            return _all_reduced_copy(x, group)
        case "slice", _, Shard(dim):
            return x.narrow(dim, *target.local_range(x.shape[dim], group.size, group.index)).contiguous()
        case "slice", _, Halo(dim, _, windows):
            start, stop = windows[group.index]
            return x.narrow(dim, start, stop - start).contiguous()
        case "all_gather", Shard(dim), _:
            return group.all_gather(x.contiguous(), dim, _lengths_of_shards(source, x, group) or None)
        case "reduce_scatter", _, Shard(dim):
            return group.reduce_scatter(x, dim, target.lengths_within(x.shape[dim]))
        case "pad", HaloPartial(dim, size, windows), _:
            return _pad_with_zeros(x, dim, size, windows[group.index])
        case "pad", Shard(dim), _:
            extent = sum(_lengths_of_shards(source, x, group)) or x.shape[dim] * group.size
            return _pad_with_zeros(x, dim, extent, source.ranges(extent, group.size)[group.index])
        case "all_to_all", Shard(dim), Shard(other):
            return group.all_to_all(x, other, dim, _lengths_of_shards(source, x, group) or None, target.lengths_within(x.shape[other]))
        case "halo_exchange", Shard(dim), Halo(_, size, windows):
            return _fetch_overlaps(x, dim, even_shard_ranges(size, group.size), windows, group)
        case "halo_add", HaloPartial(dim, size, windows), _:
            return _fetch_overlaps(x, dim, windows, even_shard_ranges(size, group.size), group)
    raise AssertionError(f"no redistribution from {source} to {target}")


def _lengths_of_shards(form: Shard, x: Tensor, group: Group) -> tuple[int, ...]:
    """Return the lengths of the members' shards, given this rank's `x`, of which another axis may have a fraction; () where equal."""
    own, length = x.shape[form.dim], form.lengths[group.index] if form.lengths else 0
    return form.lengths if own == length or not form.lengths else form.lengths_within(own * sum(form.lengths) // length)


def _redistribute_runs(x: Tensor, source: Placement, target: Placement, group: Group) -> Tensor:
    """Apply a transition where ranks have a shard of each of several runs: that of plain shards, on a tensor where each rank's shards are
    contiguous."""
    plain = [Shard(form.dim, form.lengths) if isinstance(form, Shard) else form for form in (source, target)]
    if isinstance(target, Shard) and target.runs:
        x = torch.cat([x.narrow(target.dim, a, b - a) for spans in _rank_spans(target, group.size) for a, b in spans], target.dim)
    out = _redistribute_in_rank_order(x, plain[0], plain[1], group)
    if isinstance(source, Shard) and source.runs:
        starts, start = [], 0
        for spans in _rank_spans(source, group.size):
            for a, b in spans:
                starts.append((a, start, b - a))
                start += b - a
        out = torch.cat([out.narrow(source.dim, at, size) for _, at, size in sorted(starts)], source.dim)
    return out


def _rank_spans(form: Shard, num_ranks: int) -> list[tuple[Range, ...]]:
    return [form.spans(0, num_ranks, i) for i in range(num_ranks)]


def _redistribute_strided(x: Tensor, source: Placement, target: Placement, group: Group) -> Tensor:
    """Apply a transition where positions of runs are sharded: that of plain shards, on a tensor with runs, positions and inner entries as
    separate dimensions, positions in rank order."""
    strided, is_target = (source, False) if isinstance(source, Strided) else (target, True)
    assert isinstance(strided, Strided)
    num_positions = strided.size if is_target else even_shard_range(strided.size, group.size, group.index)[1]
    positions = shard(strided.dim + 1, strided.size, group.size)
    x = x.reshape(*x.shape[: strided.dim], -1, num_positions, strided.inner, *x.shape[strided.dim + 1 :])
    if is_target:
        x = _reorder_zigzag(x, strided, group.size, by_rank=True)
        out = redistribute_forward(x, _after_dim_split(source, strided), positions, group)
    else:
        out = redistribute_forward(x, positions, _after_dim_split(target, strided), group)
        out = _reorder_zigzag(out, strided, group.size, by_rank=False)
    return out.reshape(*out.shape[: strided.dim], -1, *out.shape[strided.dim + 3 :])


def _after_dim_split(placement: Placement, cut: Strided) -> Placement:
    """Return a placement of the tensor in which the sharded dimension has become three."""
    match placement:
        case Shard(dim, lengths, runs) if dim > cut.dim:
            return Shard(dim + 2, lengths, runs)
        case Strided(dim, size, inner, order) if dim > cut.dim:
            return Strided(dim + 2, size, inner, order)
    return placement


def _reorder_zigzag(x: Tensor, cut: Strided, num_ranks: int, by_rank: bool) -> Tensor:
    """Reorder positions from their own order to that of the ranks that hold them (zigzag), or back."""
    if not cut.zigzag:
        return x
    ranges = [(a, b) for halves in zigzag_ranges(cut.size, num_ranks) for a, b in halves if a < b]
    if not by_rank:
        starts, start = {}, 0
        for a, b in ranges:
            starts[a, b], start = start, start + b - a
        ranges = [(starts[r], starts[r] + r[1] - r[0]) for r in sorted(ranges)]
    return torch.cat([x.narrow(cut.dim + 1, a, b - a) for a, b in ranges], cut.dim + 1)


def _all_reduced_copy(x: Tensor, group: Group) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    group.all_reduce(out)
    return out


def _pad_with_zeros(x: Tensor, dim: int, size: int, window: Range) -> Tensor:
    """Return a window of a dimension of `size`, zero elsewhere."""
    out = x.new_zeros((*x.shape[:dim], size, *x.shape[dim + 1 :]))
    out.narrow(dim, window[0], window[1] - window[0]).copy_(x)
    return out


def _fetch_overlaps(x: Tensor, dim: int, held: tuple[Range, ...], wanted: tuple[Range, ...], group: Group) -> Tensor:
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
    return _Redistribute.apply(x, source, target, group)  # type: ignore[no-any-return,no-untyped-call]
