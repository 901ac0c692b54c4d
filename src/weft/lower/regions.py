"""Regions of parallel branches on one rank: in which order operators stand, and the exchanges by which values enter and leave.

In: a stage's operators and the regions of its sharding. Out: runs of operators, each of one region or of none, in a legal order; and
`exchanged`, which takes values from pieces of the samples to their owners or back, all in one collective, whose backward is the same the
other way round. A rank has an empty tensor in place of what another owns, so that autograd comes to both exchanges on every rank alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from weft.model.graph import Operator
from weft.model.sharding.sharding import Owners
from weft.plan.placement import Shard
from weft.world.world import Group

Run = tuple[Owners | None, list[Operator]]


def runs(operators: Sequence[Operator], regions: Iterable[Owners]) -> list[Run]:
    """The operators, those of a region together: behind all that the region reads, before all that reads what leaves it."""
    of = {name: region for region in regions for name in region.ranks}
    producer = {value: op for op in operators for value in op.outputs}
    members: dict[int, list[Operator]] = {}
    for op in operators:
        if op.name in of:
            members.setdefault(id(of[op.name]), []).append(op)
    in_order: list[Run] = []
    done: set[str] = set()

    def place(op: Operator) -> None:
        todo = [op]
        while todo:
            at = todo[-1]
            region = of.get(at.name)
            unit = [at] if region is None else members[id(region)]
            names = {one.name for one in unit}
            first = next((p for one in unit for v in one.inputs if (p := producer.get(v)) and p.name not in done | names), None)
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
class Way:
    """One value on its way: its whole shape on a rank, in which pieces of the samples it lies outside, its owner, its dtype."""

    shape: tuple[int, ...]
    form: Shard
    owner: int
    dtype: torch.dtype
    learns: bool  # whether its gradient travels back

    def piece(self, n: int, index: int) -> tuple[int, ...]:
        """The shape of the piece of rank `index` of n."""
        dim = self.form.dim
        return (*self.shape[:dim], self.form.part(self.shape[dim], n, index)[1], *self.shape[dim + 1 :])


def _exchange(enters: bool, xs: Sequence[Tensor | None], ways: Sequence[Way], group: Group) -> list[Tensor]:
    """From pieces (None: zeros) to whole values on their owners, empty on other ranks; or the other way."""
    received = [torch.empty(0, dtype=way.dtype, device=group.device) for way in ways]
    for dtype in dict.fromkeys(way.dtype for way in ways):
        mine = {i: way for i, way in enumerate(ways) if way.dtype is dtype}
        for i, x in (_to_owners if enters else _from_owners)(xs, mine, dtype, group).items():
            received[i] = x
    return received


def _to_owners(xs: Sequence[Tensor | None], ways: Mapping[int, Way], dtype: torch.dtype, group: Group) -> dict[int, Tensor]:
    """From pieces to whole values, of those that this rank owns."""
    n, me = group.size, group.index
    sent: list[list[Tensor]] = [[] for _ in range(n)]
    for i, way in ways.items():
        sent[way.owner].append(_given(xs[i], way.piece(n, me), dtype, group))
    owned = {i: way for i, way in ways.items() if way.owner == me}
    arrived = _sent(sent, [[way.piece(n, j) for way in owned.values()] for j in range(n)], dtype, group)
    return {i: torch.cat([parts[k] for parts in arrived], way.form.dim) for k, (i, way) in enumerate(owned.items())}


def _from_owners(xs: Sequence[Tensor | None], ways: Mapping[int, Way], dtype: torch.dtype, group: Group) -> dict[int, Tensor]:
    """From whole values on their owners to pieces."""
    n, me = group.size, group.index
    sent: list[list[Tensor]] = [[] for _ in range(n)]
    for i, way in ways.items():
        if way.owner == me:
            value = _given(xs[i], way.shape, dtype, group)
            for j, (start, stop) in enumerate(way.form.ranges(way.shape[way.form.dim], n)):
                sent[j].append(value.narrow(way.form.dim, start, stop - start))
    of = [[i for i, way in ways.items() if way.owner == j] for j in range(n)]
    arrived = _sent(sent, [[ways[i].piece(n, me) for i in those] for those in of], dtype, group)
    return {i: part for those, parts in zip(of, arrived, strict=True) for i, part in zip(those, parts, strict=True)}


def _given(x: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, group: Group) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=group.device) if x is None else x.to(dtype)


def _sent(
    sent: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]], dtype: torch.dtype, group: Group
) -> list[list[Tensor]]:
    """`sent[j]` to rank j, all in one; from every rank tensors of `shapes`."""
    flat = [torch.cat([x.reshape(-1) for x in those]) if those else torch.empty(0, dtype=dtype, device=group.device) for those in sent]
    arrived = group.exchange(flat, [[sum(prod(shape) for shape in those)] for those in shapes])
    by_rank = []
    for x, those in zip(arrived, shapes, strict=True):
        parts = torch.split(x, [prod(shape) for shape in those]) if those else ()
        by_rank.append([part.view(shape) for part, shape in zip(parts, those, strict=True)])
    return by_rank


class _Exchanged(torch.autograd.Function):
    """Values that enter a region, or leave it. `anchor`: what is kept of a pass, so that layers that are computed again are so on all ranks
    at one time; with a gradient of its own it brings autograd here on ranks that own nothing."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, enters: bool, ways: Sequence[Way], group: Group, *xs: Tensor | None) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.enters, ctx.ways, ctx.group, ctx.beside = enters, ways, group, len(xs) - len(ways)
        ctx.save_for_backward(anchor)
        received = _exchange(enters, xs[: len(ways)], ways, group)
        ctx.mark_non_differentiable(*(x for x, way in zip(received, ways, strict=True) if not way.learns))
        return tuple(received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        # What enters is alike on every rank; of what leaves the owner alone has more than a place.
        asked = [i for i, way in enumerate(ctx.ways) if way.learns and (ctx.needs_input_grad[4 + i] or not ctx.enters)]
        gradients: list[Tensor | None] = [None] * (len(ctx.ways) + ctx.beside)
        back = _exchange(not ctx.enters, [grads[i] for i in asked], [ctx.ways[i] for i in asked], ctx.group)
        for i, x in zip(asked, back, strict=True):
            gradients[i] = x if ctx.enters or ctx.ways[i].owner == ctx.group.index else None
        return None, None, None, None, *gradients


def exchanged(enters: bool, ways: Sequence[Way], group: Group, *xs: Tensor | None) -> tuple[Tensor, ...]:
    """From pieces to owners where values enter a region, from owners (None elsewhere) to pieces where they leave it. What comes behind the
    values of `ways` is not sent: it binds this exchange to another."""
    anchor = torch.empty(0, requires_grad=not enters)
    outputs: tuple[Tensor, ...] = _Exchanged.apply(anchor, enters, ways, group, *xs)  # type: ignore[no-untyped-call]
    return outputs
