"""Expert parallelism: all-to-all dispatch of tokens to the ranks of their experts, and combine; message sizes depend on data.

Dispatch returns the rows of this rank's experts, of all ranks' tokens, sorted by expert, and the routes by which combine returns them. A
token is sent once to each rank with any of its experts; their outputs are summed there with the token's weights, so that it returns once.
Counts are exchanged first; they stay on the device but for one read a layer, of all sizes together. Backward takes the same routes, and
reads nothing.

Shape letters: N tokens of this rank, T experts of a token, M rows of this rank's experts, U tokens received, V tokens sent, C choices of
this rank's tokens, D model, E experts, R ranks.

In the field's terms: expert dispatch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.capture.experts import note_spans
from shardwise.lower.kernels.second_derivatives import refuse_second_derivatives
from shardwise.plan.ir.placement import even_shard_range
from shardwise.world.comm.group import Group


@dataclass(frozen=True)
class _TokenRoutes:
    """`token_V`: index of each sent token; `num_tokens_sent` and `num_tokens_received`: by rank. `choice_C`: choices sorted by expert;
    `num_choices_sent` and `num_choices_received`: choices of each rank's experts, and of this rank's in each rank's tokens. Of the local
    rows: `row_M` is the received token, `sort_M` the choice."""

    token_V: Tensor
    choice_C: Tensor
    row_M: Tensor
    sort_M: Tensor
    num_tokens_sent: list[int]
    num_tokens_received: list[int]
    num_choices_sent: list[int]
    num_choices_received: list[int]

    def pack(self, sizes: Tensor) -> Tensor:
        """Return the routes as one tensor, which is passed along with the rows. `sizes`: the number of tokens sent, and the four lists.

        The lists are noted on the tensor too, so that `unpack` reads nothing."""
        packed = torch.cat((self.choice_C, self.token_V, self.row_M, self.sort_M, sizes))
        by_rank = (*self.num_tokens_sent, *self.num_tokens_received, *self.num_choices_sent, *self.num_choices_received)
        vars(packed)["sizes"] = [len(self.token_V), *by_rank]
        return packed

    @classmethod
    def unpack(cls, packed: Tensor, choices: int, rows: int, ranks: int) -> _TokenRoutes:
        """Return the routes from what `pack` returned, of so many choices, rows and ranks."""
        body, sizes = packed[: -4 * ranks - 1], vars(packed).get("sizes")
        if sizes is None:  # a copy of the tensor came here
            sizes = packed[-4 * ranks - 1 :].tolist()
        choice, token, row, sort = torch.split(body, [choices, sizes[0], rows, rows])
        return cls(token, choice, row, sort, *(sizes[1 + i * ranks : 1 + (i + 1) * ranks] for i in range(4)))


def _exchange_rows(group: Group, x: Tensor, sent: list[int], came: list[int]) -> Tensor:
    return torch.cat(group.exchange(torch.split(x.contiguous(), sent), [(n, *x.shape[1:]) for n in came]))


def _sum_by_index(x: Tensor, at: Tensor, size: int) -> Tensor:
    """Return the sums of rows by index, of `size` indices."""
    return x.new_zeros((size, *x.shape[1:])).index_add_(0, at, x)


class _DispatchTokens(torch.autograd.Function):
    """Send tokens ND to the ranks of their experts, with a row MD for each expert there."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, way: _TokenRoutes, group: Group) -> Tensor:
        ctx.way, ctx.group, ctx.tokens = way, group, len(x_ND)
        return _exchange_rows(group, x_ND[way.token_V], way.num_tokens_sent, way.num_tokens_received)[way.row_M]

    @staticmethod
    @refuse_second_derivatives("the dispatch of tokens to experts", "expert")
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor | None, ...]:
        way = ctx.way
        grad_VD = _exchange_rows(
            ctx.group, _sum_by_index(grad_MD, way.row_M, sum(way.num_tokens_received)), way.num_tokens_received, way.num_tokens_sent
        )
        return _sum_by_index(grad_VD, way.token_V, ctx.tokens), None, None


class _CombineTokens(torch.autograd.Function):
    """Sum weighted rows MD for each token on the expert's rank, then for each token on its own rank, ND."""

    @staticmethod
    def forward(ctx: Any, rows_MD: Tensor, weight_NT: Tensor, way: _TokenRoutes, group: Group) -> Tensor:
        weight_M = _exchange_rows(group, weight_NT.reshape(-1)[way.choice_C], way.num_choices_sent, way.num_choices_received)[way.sort_M]
        ctx.save_for_backward(rows_MD, weight_M)
        ctx.way, ctx.group, ctx.shape = way, group, weight_NT.shape
        sums_UD = _sum_by_index(rows_MD * weight_M.unsqueeze(-1), way.row_M, sum(way.num_tokens_received))
        sums_VD = _exchange_rows(group, sums_UD.to(rows_MD.dtype), way.num_tokens_received, way.num_tokens_sent)
        return _sum_by_index(sums_VD.to(torch.result_type(rows_MD, weight_NT)), way.token_V, len(weight_NT))

    @staticmethod
    @refuse_second_derivatives("the sum of what experts return", "expert")
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
        (rows_MD, weight_M), way, group = ctx.saved_tensors, ctx.way, ctx.group
        grad_MD = _exchange_rows(group, grad_ND[way.token_V].to(rows_MD.dtype), way.num_tokens_sent, way.num_tokens_received)[way.row_M]
        of_weight_M = (grad_MD * rows_MD).sum(-1).to(weight_M.dtype)
        of_weight_C = _exchange_rows(
            group, torch.empty_like(of_weight_M).index_copy_(0, way.sort_M, of_weight_M), way.num_choices_received, way.num_choices_sent
        )
        of_weight = torch.empty_like(of_weight_C).index_copy_(0, way.choice_C, of_weight_C)
        return (grad_MD * weight_M.unsqueeze(-1)).to(rows_MD.dtype), of_weight.view(ctx.shape), None, None


def dispatch_to_ranks(group: Group, x_ND: Tensor, which_NT: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (rows MD of this rank's experts, the expert of each, the routes); the number of rows depends on all ranks' tokens.

    All sizes are computed on the device, and come to the host in one read of one tensor: an exchange needs them there.
    """
    parts = [even_shard_range(experts, group.size, rank) for rank in range(group.size)]
    (first, num_local), num_tokens = parts[group.index], len(x_ND)
    ids_C, choice_C = torch.sort(which_NT.reshape(-1), stable=True)
    token_C, rank_C = choice_C // which_NT.shape[1], _rank_of_expert(ids_C, experts, group.size)
    counts_E = ids_C.new_zeros(experts).scatter_add_(0, ids_C, torch.ones_like(ids_C))
    is_sent_RN = ids_C.new_zeros((group.size, num_tokens), dtype=torch.bool)
    is_sent_RN[rank_C, token_C] = True
    sent_R = is_sent_RN.sum(1)
    position_RN = is_sent_RN.reshape(-1).cumsum(0).view_as(is_sent_RN) - 1  # among the tokens that are sent to any rank, by rank
    slot_C = (position_RN - (sent_R.cumsum(0) - sent_R).unsqueeze(1))[rank_C, token_C]
    outgoing = [torch.cat((counts_E[start : start + n], sent_R[rank : rank + 1])) for rank, (start, n) in enumerate(parts)]
    received = torch.stack(group.exchange(outgoing, [(num_local + 1,)] * group.size))  # [rank, expert], and tokens
    counts_received, came_R = received[:, :-1], received[:, -1]
    asked_R = counts_E.new_zeros(group.size).scatter_add_(0, rank_C, torch.ones_like(rank_C))
    asks_R = counts_received.sum(1)
    sizes = torch.cat((sent_R.sum(0, keepdim=True), sent_R, came_R, asked_R, asks_R))
    (num_sent, *by_rank), counts = _read_once(sizes, counts_received.sum(0))
    sent, came, asked, asks = (by_rank[i * group.size : (i + 1) * group.size] for i in range(4))
    slot = _exchange_rows(group, slot_C.int(), asked, asks).long() + (came_R.cumsum(0) - came_R).repeat_interleave(
        asks_R, output_size=sum(asks)
    )
    numbers = torch.arange(first, first + num_local, device=ids_C.device).repeat(group.size)
    ids, sort = torch.sort(numbers.repeat_interleave(counts_received.reshape(-1), output_size=sum(asks)), stable=True)
    note_spans(ids, first, counts)
    way = _TokenRoutes(_tokens_in_order(is_sent_RN, position_RN, num_sent), choice_C, slot[sort], sort, sent, came, asked, asks)
    return _DispatchTokens.apply(x_ND, way, group), ids, way.pack(sizes)  # type: ignore[no-untyped-call]


def _rank_of_expert(ids: Tensor, experts: int, ranks: int) -> Tensor:
    """Return the rank of each expert, on the device: the ranks' shards of experts are those of `even_shard_range`, larger ones first."""
    size, larger = divmod(experts, ranks)
    border = larger * (size + 1)
    return torch.where(ids < border, ids // (size + 1), larger + (ids - border) // max(1, size))


def _tokens_in_order(is_sent_RN: Tensor, position_RN: Tensor, num_sent: int) -> Tensor:
    """Return the index of each sent token, by rank; without reading how many they are."""
    target_RN = torch.where(is_sent_RN, position_RN, num_sent)  # what is not sent goes to a place behind, which is cut off
    token_RN = torch.arange(is_sent_RN.shape[1], device=is_sent_RN.device).expand_as(is_sent_RN)
    return token_RN.new_empty(num_sent + 1).scatter_(0, target_RN.reshape(-1), token_RN.reshape(-1))[:num_sent]


def _read_once(sizes: Tensor, counts: Tensor) -> tuple[list[int], list[int]]:
    """Return both on the host: the only read of a layer's dispatch, which on a GPU waits for the router."""
    values: list[int] = torch.cat((sizes, counts)).tolist()
    return values[: len(sizes)], values[len(sizes) :]


def combine_from_ranks(group: Group, rows_MD: Tensor, routes: Tensor, weight_NT: Tensor, experts: int) -> Tensor:
    """Return the outputs of all ranks' experts for this rank's tokens, ND. `way`: of `dispatch_to_ranks`."""
    packed = _TokenRoutes.unpack(routes, weight_NT.numel(), len(rows_MD), group.size)
    out_ND: Tensor = _CombineTokens.apply(rows_MD, weight_NT, packed, group)  # type: ignore[no-untyped-call]
    return out_ND


def expert_matmul(
    rows: Tensor, ids: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, first: int, num_bias_shares: int
) -> Tensor:
    """Return the products of a rank's experts from `first` on. `num_bias_shares`: ranks that share the bias of partial sums."""
    device = rows.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        rows, weight = rows.to(dtype), weight.to(dtype)
    if bias is not None:
        bias = (bias / num_bias_shares if num_bias_shares > 1 else bias).to(rows.dtype)
    out: Tensor = torch.ops.shardwise.of_experts(rows, ids, weight, bias, transposed, first)
    return out
