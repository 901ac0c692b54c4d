"""Mixtures of experts without a limit of tokens: rows sorted by their experts, products of each expert with its own rows, and back.

In: tokens ND, the experts NT that each is sent to, weights of experts. Out: operators `weft.to_experts`, `weft.of_experts` and
`weft.from_experts`, in plain torch, so that every dtype works; their work is that of T experts a token. How many rows an expert has follows
from data; all rows together are M = N x T. Who has some of the experts takes their rows alone.

Shape letters: N tokens, T experts of a token, M rows, E experts, D model, I inputs, O outputs.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("weft::to_experts", mutates_args=())
def to_experts(x: Tensor, which: Tensor, experts: int, first: int = 0, number: int = -1) -> tuple[Tensor, Tensor, Tensor]:
    """(rows MD sorted by expert, expert of each, its place among the choices of all tokens): of one expert tokens stay in their order.
    Where `number` says so, those of as many experts from `first` on."""
    ids_M, order_M = torch.sort(which.reshape(-1), stable=True)
    if number >= 0:
        spans = _spans(ids_M, first, number)
        start, stop = spans[0][0], spans[-1][1]
        ids_M, order_M = ids_M[start:stop].clone(), order_M[start:stop].clone()
    return x[order_M // which.shape[1]], ids_M, order_M


@torch.library.custom_op("weft::of_experts", mutates_args=())
def of_experts(rows: Tensor, ids: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, first: int = 0) -> Tensor:
    """Each row MI times its expert's matrix (OI, or IO where `transposed`), plus its bias EO. `first`: whose matrix is the first."""
    matrices = weight if transposed else weight.transpose(1, 2)
    spans = _spans(ids, first, len(weight))
    out_MO = rows.new_empty((len(rows), matrices.shape[2]))
    out_MO[: spans[0][0]], out_MO[spans[-1][1] :] = 0, 0  # of experts that are not here
    with torch.autocast(rows.device.type, enabled=False):
        for expert, (start, stop) in enumerate(spans):
            if stop > start:
                torch.mm(rows[start:stop], matrices[expert], out=out_MO[start:stop])
                if bias is not None:
                    out_MO[start:stop] += bias[expert]
    return out_MO


@torch.library.custom_op("weft::from_experts", mutates_args=())
def from_experts(rows: Tensor, order: Tensor, weight: Tensor, experts: int) -> Tensor:
    """What the experts of each token made, summed with their weights NT: ND."""
    return (_unsorted(rows, order, weight.shape) * weight.unsqueeze(-1)).sum(1)


@to_experts.register_fake
def _(x: Tensor, which: Tensor, experts: int, first: int = 0, number: int = -1) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty((which.numel(), x.shape[1])), which.new_empty(which.numel()), which.new_empty(which.numel())


@of_experts.register_fake
def _(rows: Tensor, ids: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, first: int = 0) -> Tensor:
    return rows.new_empty((rows.shape[0], weight.shape[2 if transposed else 1]))


@from_experts.register_fake
def _(rows: Tensor, order: Tensor, weight: Tensor, experts: int) -> Tensor:
    return rows.new_empty((weight.shape[0], rows.shape[1]), dtype=torch.result_type(rows, weight))


def _spans(ids_M: Tensor, first: int, number: int) -> list[tuple[int, int]]:
    """(start, stop) of the rows of each of `number` experts from `first` on."""
    ends = torch.searchsorted(ids_M, torch.arange(first, first + number + 1, device=ids_M.device)).tolist()
    return list(pairwise(ends))


def _unsorted(rows_MD: Tensor, order_M: Tensor, tokens: torch.Size) -> Tensor:
    """Rows where the tokens NT chose them, NTD; zero where they are somebody else's."""
    out = rows_MD.new_zeros((tokens.numel(), *rows_MD.shape[1:]))
    out[order_M] = rows_MD
    return out.view(*tokens, *rows_MD.shape[1:])


def _keep_sent(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(output[2])
    ctx.tokens = inputs[1].shape
    ctx.mark_non_differentiable(*output[1:])


def _sent_gradient(ctx: Any, grad: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    return _unsorted(grad, ctx.saved_tensors[0], ctx.tokens).sum(1), None, None, None, None


def _keep_product(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, ids, weight, bias, ctx.transposed, ctx.first = inputs
    ctx.save_for_backward(rows, ids, weight)
    ctx.has_bias = bias is not None


def _product_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, ids, weight = ctx.saved_tensors
    grad = grad.to(rows.dtype)
    of_rows = torch.zeros_like(rows) if ctx.needs_input_grad[0] else None
    of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[2] else None
    of_bias = grad.new_zeros((len(weight), grad.shape[1])) if ctx.has_bias else None
    with torch.autocast(rows.device.type, enabled=False):
        for expert, (start, stop) in enumerate(_spans(ids, ctx.first, len(weight))):
            if stop == start:
                continue
            mine = grad[start:stop]
            if of_rows is not None:
                torch.mm(mine, weight[expert].t() if ctx.transposed else weight[expert], out=of_rows[start:stop])
            if of_weight is not None:
                left, right = (rows[start:stop], mine) if ctx.transposed else (mine, rows[start:stop])
                torch.mm(left.t(), right, out=of_weight[expert])
            if of_bias is not None:
                of_bias[expert] = mine.sum(0)
    return of_rows, None, of_weight, of_bias, None, None


def _keep_back(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])


def _back_gradient(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
    rows, order, weight_NT = ctx.saved_tensors
    of_rows = (grad_ND.unsqueeze(1) * weight_NT.unsqueeze(-1)).flatten(0, 1)[order].to(rows.dtype)
    of_weight = (grad_ND.unsqueeze(1) * _unsorted(rows, order, weight_NT.shape)).sum(-1).to(weight_NT.dtype)
    return of_rows, None, of_weight, None


to_experts.register_autograd(_sent_gradient, setup_context=_keep_sent)
of_experts.register_autograd(_product_gradient, setup_context=_keep_product)
from_experts.register_autograd(_back_gradient, setup_context=_keep_back)


def experts_forward(experts: Any, x_ND: Tensor, which_NT: Tensor, weight_NT: Tensor) -> Tensor:
    """The forward pass of a module of stacked experts of `transformers`; `experts` has what the library's own implementations read."""
    up, up_bias = ("gate_up_proj", "gate_up_proj_bias") if experts.has_gate else ("up_proj", "up_proj_bias")
    rows_MD, ids_M, order_M = torch.ops.weft.to_experts(x_ND, which_NT, experts.num_experts)
    inner_MI = _linear(experts, rows_MD, ids_M, up, up_bias)
    inner_MI = experts._apply_gate(inner_MI) if experts.has_gate else experts.act_fn(inner_MI)
    y_MD = _linear(experts, inner_MI, ids_M, "down_proj", "down_proj_bias")
    if getattr(experts, "has_post_expert_norm", False):
        y_MD = experts.post_expert_norm(y_MD)
    y_ND: Tensor = torch.ops.weft.from_experts(y_MD, order_M, weight_NT, experts.num_experts)
    return y_ND.to(x_ND.dtype)


def _linear(experts: Any, rows: Tensor, ids: Tensor, weight: str, bias: str) -> Tensor:
    product: Tensor = torch.ops.weft.of_experts(
        rows, ids, getattr(experts, weight), getattr(experts, bias) if experts.has_bias else None, experts.is_transposed
    )
    return product
