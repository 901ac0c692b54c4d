"""Rows of tokens sent to the ranks that have their experts, and back; as many to each as the tokens ask for.

In: this rank's tokens and which experts each is sent to. Out: the rows of this rank's experts, of all ranks' tokens, sorted by expert; and
what of it brings them back. Counts are exchanged first. Backward takes the same way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.plan.placement import piece
from weft.world.world import Group


class _Exchanged(torch.autograd.Function):
    """Rows in order of their experts to the ranks of these, where they are sorted again (`there`), or back. `sort`: where each of the rows
    there lies among those that came, rank after rank."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sort: Tensor, sent: list[int], arrived: list[int], group: Group, there: bool) -> Tensor:
        ctx.save_for_backward(sort)
        ctx.way = sent, arrived, group, there
        return _exchange(rows, sort, sent, arrived, group, there)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (sort,), (sent, arrived, group, there) = ctx.saved_tensors, ctx.way
        return _exchange(grad, sort, sent, arrived, group, not there), None, None, None, None, None


def _exchange(rows: Tensor, sort: Tensor, sent: list[int], arrived: list[int], group: Group, there: bool) -> Tensor:
    behind = rows.shape[1:]
    if there:
        parts = group.exchange(torch.split(rows.contiguous(), sent), [(n, *behind) for n in arrived])
        return torch.cat(parts)[sort]
    came = torch.empty_like(rows, memory_format=torch.contiguous_format)
    came[sort] = rows
    return torch.cat(group.exchange(torch.split(came, arrived), [(n, *behind) for n in sent]))


def to_ranks(group: Group, x_ND: Tensor, which_NT: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(rows MD of this rank's experts, the expert of each, the way back): how many rows there are follows from all ranks' tokens."""
    rows, ids, order = torch.ops.weft.to_experts(x_ND, which_NT, experts)
    counts = torch.bincount(ids, minlength=experts)
    parts = [piece(experts, group.size, rank) for rank in range(group.size)]
    first, mine = parts[group.index]
    here = torch.stack(group.exchange([counts[start : start + n] for start, n in parts], [(mine,)] * group.size))  # [rank, expert]
    sent, arrived = [int(counts[start : start + n].sum()) for start, n in parts], here.sum(1).tolist()
    numbers = torch.arange(first, first + mine, device=ids.device).repeat(group.size)
    ids, sort = torch.sort(numbers.repeat_interleave(here.reshape(-1)), stable=True)
    rows = _Exchanged.apply(rows, sort, sent, arrived, group, True)  # type: ignore[no-untyped-call]
    return rows, ids, torch.cat((order, sort, order.new_tensor([*sent, *arrived])))


def from_ranks(group: Group, rows_MD: Tensor, way: Tensor, weight_NT: Tensor, experts: int) -> Tensor:
    """What this rank's tokens got from the experts of all ranks, ND. `way`: of `to_ranks`."""
    order, sort, counts = torch.split(way, [weight_NT.numel(), len(rows_MD), 2 * group.size])
    sent, arrived = counts.view(2, -1).tolist()
    rows = _Exchanged.apply(rows_MD, sort, sent, arrived, group, False)  # type: ignore[no-untyped-call]
    rows_out: Tensor = torch.ops.weft.from_experts(rows, order, weight_NT, experts)
    return rows_out


def product(rows: Tensor, ids: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, first: int, shares: int) -> Tensor:
    """The products of a rank's experts, `first` of them the first. `shares`: of ranks that each make a summand, which share the bias."""
    device = rows.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        rows, weight = rows.to(dtype), weight.to(dtype)
    if bias is not None:
        bias = (bias / shares if shares > 1 else bias).to(rows.dtype)
    out: Tensor = torch.ops.weft.of_experts(rows, ids, weight, bias, transposed, first)
    return out
