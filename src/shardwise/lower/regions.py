"""Regions of parallel branches on one rank: the order of operators, and the exchanges by which values enter and leave.

Operators are grouped into runs, each of one region or of none, in topological order. `exchange_region_values` sends values from sample
shards to their owners or back in one collective, whose backward is the reverse. A rank has an empty tensor in place of a value that another
owns, so that autograd reaches both exchanges on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwise.lower.kernels.second_derivatives import refuse_second_derivatives
from shardwise.model.graph import Operator
from shardwise.model.sharding.sharding import BranchOwners
from shardwise.plan.ir.placement import Shard
from shardwise.world.world import Group

RegionRun = tuple[BranchOwners | None, list[Operator]]


def group_by_region(operators: Sequence[Operator], regions: Iterable[BranchOwners]) -> list[RegionRun]:
    """Return the operators with those of a region together: after all inputs of the region, before all readers of its outputs."""
    of = {name: region for region in regions for name in region.rank_of}
    producer = {value: op for op in operators for value in op.outputs}
    members: dict[int, list[Operator]] = {}
    for op in operators:
        if op.name in of:
            members.setdefault(id(of[op.name]), []).append(op)
    in_order: list[RegionRun] = []
    done: set[str] = set()

    def place(op: Operator) -> None:
        todo = [op]
        while todo:
            at = todo[-1]
            region = of.get(at.name)
            unit = [at] if region is None else members[id(region)]
            names = {member.name for member in unit}
            first = next((p for member in unit for v in member.inputs if (p := producer.get(v)) and p.name not in done | names), None)
            if at.name in done:
                todo.pop()
            elif first is not None:
                todo.append(first)
            else:
                in_order.append((region, unit))
                done.update(names)
                todo.pop()

    for op in operators:
        if op.name not in done:
            place(op)
    return in_order


@dataclass(frozen=True)
class BranchTransfer:
    """The transfer of one value: its full local shape, its sample shards outside the region, its owner, its dtype."""

    shape: tuple[int, ...]
    shard: Shard
    owner: int
    dtype: torch.dtype
    requires_grad: bool  # whether its gradient is sent back

    def shard_shape(self, n: int, index: int) -> tuple[int, ...]:
        """Return the shape of the shard of rank `index` of n."""
        dim = self.shard.dim
        return (*self.shape[:dim], self.shard.local_range(self.shape[dim], n, index)[1], *self.shape[dim + 1 :])


def _exchange_values(enters: bool, xs: Sequence[Tensor | None], ways: Sequence[BranchTransfer], group: Group) -> list[Tensor]:
    """Send shards (None: zeros) to full values on their owners, empty on other ranks; or the reverse."""
    received = [torch.empty(0, dtype=way.dtype, device=group.device) for way in ways]
    for dtype in dict.fromkeys(way.dtype for way in ways):
        of_dtype = {i: way for i, way in enumerate(ways) if way.dtype is dtype}
        for i, x in (_to_owners if enters else _from_owners)(xs, of_dtype, dtype, group).items():
            received[i] = x
    return received


def _to_owners(xs: Sequence[Tensor | None], ways: Mapping[int, BranchTransfer], dtype: torch.dtype, group: Group) -> dict[int, Tensor]:
    """Send shards; return full values that this rank owns."""
    n, own_rank = group.size, group.index
    sent: list[list[Tensor]] = [[] for _ in range(n)]
    for i, way in ways.items():
        sent[way.owner].append(_or_zeros(xs[i], way.shard_shape(n, own_rank), dtype, group))
    owned = {i: way for i, way in ways.items() if way.owner == own_rank}
    received = _exchange_flat(sent, [[way.shard_shape(n, j) for way in owned.values()] for j in range(n)], dtype, group)
    return {i: torch.cat([parts[k] for parts in received], way.shard.dim) for k, (i, way) in enumerate(owned.items())}


def _from_owners(xs: Sequence[Tensor | None], ways: Mapping[int, BranchTransfer], dtype: torch.dtype, group: Group) -> dict[int, Tensor]:
    """Send full values from their owners; return shards."""
    n, own_rank = group.size, group.index
    sent: list[list[Tensor]] = [[] for _ in range(n)]
    for i, way in ways.items():
        if way.owner == own_rank:
            value = _or_zeros(xs[i], way.shape, dtype, group)
            for j, (start, stop) in enumerate(way.shard.ranges(way.shape[way.shard.dim], n)):
                sent[j].append(value.narrow(way.shard.dim, start, stop - start))
    values_of_rank = [[i for i, way in ways.items() if way.owner == j] for j in range(n)]
    received = _exchange_flat(sent, [[ways[i].shard_shape(n, own_rank) for i in values] for values in values_of_rank], dtype, group)
    return {i: part for values, parts in zip(values_of_rank, received, strict=True) for i, part in zip(values, parts, strict=True)}


def _or_zeros(x: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, group: Group) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=group.device) if x is None else x.to(dtype)


def _exchange_flat(
    sent: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]], dtype: torch.dtype, group: Group
) -> list[list[Tensor]]:
    """Send `sent[j]` to rank j, all in one collective; return tensors of `shapes` from every rank."""
    flat = [torch.cat([x.reshape(-1) for x in items]) if items else torch.empty(0, dtype=dtype, device=group.device) for items in sent]
    received = group.exchange(flat, [[sum(prod(shape) for shape in items)] for items in shapes])
    by_rank = []
    for x, items in zip(received, shapes, strict=True):
        parts = torch.split(x, [prod(shape) for shape in items]) if items else ()
        by_rank.append([part.view(shape) for part, shape in zip(parts, items, strict=True)])
    return by_rank


class _RegionExchange(torch.autograd.Function):
    """Values that enter a region, or leave it. `anchor`: a saved tensor, so that layers are recomputed on all ranks at the same time; its
    own gradient requirement brings autograd here on ranks that own nothing."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, enters: bool, ways: Sequence[BranchTransfer], group: Group, *xs: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.enters, ctx.ways, ctx.group, ctx.num_extra = enters, ways, group, len(xs) - len(ways)
        ctx.save_for_backward(anchor)
        received = _exchange_values(enters, xs[: len(ways)], ways, group)
        ctx.mark_non_differentiable(*(x for x, way in zip(received, ways, strict=True) if not way.requires_grad))
        return tuple(received)

    @staticmethod
    @refuse_second_derivatives("a region of several branches or inner layouts", "branch or inner")
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        # Entering values are the same on every rank; of leaving ones the owner alone has more than an empty tensor.
        indices = [i for i, way in enumerate(ctx.ways) if way.requires_grad and (ctx.needs_input_grad[4 + i] or not ctx.enters)]
        gradients: list[Tensor | None] = [None] * (len(ctx.ways) + ctx.num_extra)
        received = _exchange_values(not ctx.enters, [grads[i] for i in indices], [ctx.ways[i] for i in indices], ctx.group)
        for i, x in zip(indices, received, strict=True):
            gradients[i] = x if ctx.enters or ctx.ways[i].owner == ctx.group.index else None
        return None, None, None, None, *gradients


def exchange_region_values(enters: bool, ways: Sequence[BranchTransfer], group: Group, *xs: Tensor | None) -> tuple[Tensor, ...]:
    """Send values from shards to owners where they enter a region, from owners (None elsewhere) to shards where they leave it. Tensors
    after those of `ways` are not sent: they order this exchange after another."""
    anchor = torch.empty(0, requires_grad=not enters)
    outputs: tuple[Tensor, ...] = _RegionExchange.apply(anchor, enters, ways, group, *xs)  # type: ignore[no-untyped-call]
    return outputs
