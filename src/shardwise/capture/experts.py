"""Dropless mixture of experts (MoE): dispatch sorts rows by expert, a grouped matmul, and combine, as operators in plain torch.

`shardwise.to_experts` (dispatch), `shardwise.of_experts` (grouped matmul) and `shardwise.from_experts` (combine) work in every dtype, and
cost T experts a token. The number of rows of an expert depends on data; the total is M = N x T. Under expert parallelism a rank dispatches
only to its own experts. A capacity limit is left out.

Nothing is read on the host where torch's grouped products take the operands (bfloat16 on a GPU); elsewhere how many rows each expert has is
read once for all products of a dispatch.

Shape letters: N tokens, T experts of a token, M rows, E experts, D model, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor


def dispatch_rows(x: Tensor, which: Tensor, experts: int, first: int = 0, number: int = -1) -> tuple[Tensor, Tensor, Tensor]:
    """Dispatch: return rows MD sorted by expert (stable), the expert id of each, its index in the flattened choices NT.
    With `number` >= 0, only the rows of `number` experts from `first` on."""
    ids_M, order_M = torch.sort(which.reshape(-1), stable=True)
    if number >= 0:
        spans = _rows_by_expert(ids_M, first, number)
        start, stop = spans[0][0], spans[-1][1]
        ids_M, order_M = ids_M[start:stop].clone(), order_M[start:stop].clone()
        note_spans(ids_M, first, [end - begin for begin, end in spans])
    return x[order_M // which.shape[1]], ids_M, order_M


def multiply_by_experts(rows: Tensor, ids: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, first: int = 0) -> Tensor:
    """Grouped matmul: rows MI times their expert's matrix (OI, or IO if `transposed`), plus bias EO. `first`: expert of the first one."""
    matrices = weight if transposed else weight.transpose(1, 2)
    if takes_grouped_products(rows, weight):
        return _multiply_groups(rows, ids, matrices, bias, first)
    spans = _rows_by_expert(ids, first, len(weight))
    out_MO = rows.new_empty((len(rows), matrices.shape[2]))
    out_MO[: spans[0][0]], out_MO[spans[-1][1] :] = 0, 0  # rows of experts on other ranks
    with torch.autocast(rows.device.type, enabled=False):
        for expert, (start, stop) in enumerate(spans):
            if stop > start:
                torch.mm(rows[start:stop], matrices[expert], out=out_MO[start:stop])
                if bias is not None:
                    out_MO[start:stop] += bias[expert]
    return out_MO


def combine_rows(rows: Tensor, order: Tensor, weight: Tensor, experts: int) -> Tensor:
    """Combine: sum the outputs of each token's experts with their weights NT, to ND."""
    return (_scatter_to_tokens(rows, order, weight.shape) * weight.unsqueeze(-1)).sum(1)


to_experts = torch.library.custom_op("shardwise::to_experts", dispatch_rows, mutates_args=())
of_experts = torch.library.custom_op("shardwise::of_experts", multiply_by_experts, mutates_args=())
from_experts = torch.library.custom_op("shardwise::from_experts", combine_rows, mutates_args=())


@to_experts.register_fake
def _shapes_to_experts(x: Tensor, which: Tensor, experts: int, first: int = 0, number: int = -1) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty((which.numel(), x.shape[1])), which.new_empty(which.numel()), which.new_empty(which.numel())


@of_experts.register_fake
def _shape_of_experts(rows: Tensor, ids: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, first: int = 0) -> Tensor:
    return rows.new_empty((rows.shape[0], weight.shape[2 if transposed else 1]))


@from_experts.register_fake
def _shape_from_experts(rows: Tensor, order: Tensor, weight: Tensor, experts: int) -> Tensor:
    return rows.new_empty((weight.shape[0], rows.shape[1]), dtype=torch.result_type(rows, weight))


def note_spans(ids_M: Tensor, first: int, counts: Sequence[int]) -> None:
    """Note on the tensor of ids how many rows each expert from `first` on has, so that no product reads it."""
    vars(ids_M)["spans"] = (first, list(pairwise(accumulate(counts, initial=0))))


def _rows_by_expert(ids_M: Tensor, first: int, number: int) -> list[tuple[int, int]]:
    """Return (start, stop) of the rows of each of `number` experts from `first` on; read once for all products of the same ids."""
    spans: list[tuple[int, int]]
    noted, spans = vars(ids_M).get("spans", (-1, []))
    if (noted, len(spans)) != (first, number):
        ends = torch.searchsorted(ids_M, torch.arange(first, first + number + 1, device=ids_M.device)).tolist()
        spans = list(pairwise(ends))
        vars(ids_M)["spans"] = (first, spans)
    return spans


def takes_grouped_products(rows: Tensor, weight: Tensor) -> bool:
    """Return whether torch's grouped product takes these operands: with offsets on the device, so that nothing is read on the host."""
    aligned = all(size % 8 == 0 for size in weight.shape[1:])  # 16 bytes
    return rows.device.type == "cuda" and rows.dtype == weight.dtype == torch.bfloat16 and aligned and len(rows) > 0


def _local_rows(ids_M: Tensor, first: int, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (the end of each expert's rows, each row's expert from 0 on, whether it is one of this rank's, M1), all on the device."""
    ends_E = torch.searchsorted(ids_M, torch.arange(first + 1, first + number + 1, device=ids_M.device)).int()
    expert_M = ids_M - first
    return ends_E, expert_M.clamp(0, number - 1), ((expert_M >= 0) & (expert_M < number)).unsqueeze(1)


def _multiply_groups(rows: Tensor, ids: Tensor, matrices: Tensor, bias: Tensor | None, first: int) -> Tensor:
    """`multiply_by_experts` as one product. Rows before `first` fall to the first group, those behind to none: both become zero."""
    ends_E, expert_M, is_local_M1 = _local_rows(ids, first, len(matrices))
    with torch.autocast(rows.device.type, enabled=False):
        out_MO = torch.nn.functional.grouped_mm(rows, matrices, offs=ends_E)
    return torch.where(is_local_M1, out_MO if bias is None else out_MO + bias[expert_M], 0)


def _group_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """`_matmul_backward` by grouped products."""
    rows, ids, weight = ctx.saved_tensors
    ends_E, expert_M, is_local_M1 = _local_rows(ids, ctx.first, len(weight))
    grad, of_rows, of_weight, of_bias = torch.where(is_local_M1, grad, 0), None, None, None
    with torch.autocast(rows.device.type, enabled=False):
        if ctx.needs_input_grad[0]:
            product = torch.nn.functional.grouped_mm(grad, weight.transpose(1, 2) if ctx.transposed else weight, offs=ends_E)
            of_rows = torch.where(is_local_M1, product, 0)
        if ctx.needs_input_grad[2]:
            a, b = (rows, grad) if ctx.transposed else (grad, rows)
            of_weight = torch.nn.functional.grouped_mm(a.t(), b, offs=ends_E)
        if ctx.has_bias:
            is_of_EM = expert_M == torch.arange(len(weight), device=ids.device).unsqueeze(1)
            of_bias = is_of_EM.to(grad.dtype) @ grad
    return of_rows, None, of_weight, of_bias, None, None


def _scatter_to_tokens(rows_MD: Tensor, order_M: Tensor, tokens: torch.Size) -> Tensor:
    """Scatter rows back to the choices NT of the tokens, NTD; zero for experts on other ranks."""
    out = rows_MD.new_zeros((tokens.numel(), *rows_MD.shape[1:]))
    out[order_M] = rows_MD
    return out.view(*tokens, *rows_MD.shape[1:])


def _save_for_dispatch_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(output[2])
    ctx.tokens = inputs[1].shape
    ctx.mark_non_differentiable(*output[1:])


def _dispatch_backward(ctx: Any, grad: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    return _scatter_to_tokens(grad, ctx.saved_tensors[0], ctx.tokens).sum(1), None, None, None, None


def _save_for_matmul_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, ids, weight, bias, ctx.transposed, ctx.first = inputs
    ctx.save_for_backward(rows, ids, weight)
    ctx.has_bias, ctx.spans = bias is not None, vars(ids).get("spans")


def _matmul_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, ids, weight = ctx.saved_tensors
    grad = grad.to(rows.dtype)
    if takes_grouped_products(rows, weight):
        return _group_gradients(ctx, grad)
    if ctx.spans is not None:
        vars(ids)["spans"] = ctx.spans
    of_rows = torch.zeros_like(rows) if ctx.needs_input_grad[0] else None
    of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[2] else None
    of_bias = grad.new_zeros((len(weight), grad.shape[1])) if ctx.has_bias else None
    with torch.autocast(rows.device.type, enabled=False):
        for expert, (start, stop) in enumerate(_rows_by_expert(ids, ctx.first, len(weight))):
            if stop == start:
                continue
            expert_grad = grad[start:stop]
            if of_rows is not None:
                torch.mm(expert_grad, weight[expert].t() if ctx.transposed else weight[expert], out=of_rows[start:stop])
            if of_weight is not None:
                a, b = (rows[start:stop], expert_grad) if ctx.transposed else (expert_grad, rows[start:stop])
                torch.mm(a.t(), b, out=of_weight[expert])
            if of_bias is not None:
                of_bias[expert] = expert_grad.sum(0)
    return of_rows, None, of_weight, of_bias, None, None


def _save_for_combine_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])


def _combine_backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
    rows, order, weight_NT = ctx.saved_tensors
    of_rows = (grad_ND.unsqueeze(1) * weight_NT.unsqueeze(-1)).flatten(0, 1)[order].to(rows.dtype)
    of_weight = (grad_ND.unsqueeze(1) * _scatter_to_tokens(rows, order, weight_NT.shape)).sum(-1).to(weight_NT.dtype)
    return of_rows, None, of_weight, None


to_experts.register_autograd(_dispatch_backward, setup_context=_save_for_dispatch_backward)
of_experts.register_autograd(_matmul_backward, setup_context=_save_for_matmul_backward)
from_experts.register_autograd(_combine_backward, setup_context=_save_for_combine_backward)


def experts_forward(experts: Any, x_ND: Tensor, which_NT: Tensor, weight_NT: Tensor) -> Tensor:
    """Forward pass of a `transformers` module of stacked experts; `experts` has the attributes that the library's implementations read."""
    up, up_bias = ("gate_up_proj", "gate_up_proj_bias") if experts.has_gate else ("up_proj", "up_proj_bias")
    rows_MD, ids_M, order_M = torch.ops.shardwise.to_experts(x_ND, which_NT, experts.num_experts)
    inner_MI = _expert_linear(experts, rows_MD, ids_M, up, up_bias)
    inner_MI = experts._apply_gate(inner_MI) if experts.has_gate else experts.act_fn(inner_MI)
    y_MD = _expert_linear(experts, inner_MI, ids_M, "down_proj", "down_proj_bias")
    if getattr(experts, "has_post_expert_norm", False):
        y_MD = experts.post_expert_norm(y_MD)
    y_ND: Tensor = torch.ops.shardwise.from_experts(y_MD, order_M, weight_NT, experts.num_experts)
    return y_ND.to(x_ND.dtype)


def _expert_linear(experts: Any, rows: Tensor, ids: Tensor, weight: str, bias: str) -> Tensor:
    product: Tensor = torch.ops.shardwise.of_experts(
        rows, ids, getattr(experts, weight), getattr(experts, bias) if experts.has_bias else None, experts.is_transposed
    )
    return product
