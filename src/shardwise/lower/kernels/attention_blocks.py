"""Blockwise attention with online softmax: attention of some queries to some keys, merged block by block, and its gradients.

Rows carry the largest score so far and the sum of weights relative to it (Milakov and Gimelshein 2018, arXiv 1805.02867; Dao 2023, arXiv
2307.08691): exact also where a mask is the most negative number instead of minus infinity. Backward recomputes weights from these two. One
of torch's fused kernels computes a block if it supports it, else products of as many rows at once as fit into `SCORES` scores. Not modeled:
second derivatives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from shardwise.lower.kernels.random_stream import DropoutDraw, apply_dropout_
from shardwise.lower.kernels.sample_positions import narrow_box
from shardwise.world import private
from shardwise.world.attention_backend import use_attention_backend

SCORES = 2**24  # scores in memory at once


@dataclass(frozen=True)
class AttentionBlock:
    """Queries q [..., rows, width] and keys k, values v [..., columns, width], of which there may be fewer heads. `mask`: boolean, or added
    to the scores, [..., rows or 1, columns or 1]. `causal`: each query sees keys up to its own index. `dropout`: of the weights."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None
    causal: bool = False
    scale: float | None = None
    dropout: DropoutDraw | None = None

    @property
    def has_fused_kernel(self) -> bool:
        """Flag: torch has a fused kernel for the block."""
        hides = self.mask is None or (self.mask.dtype is torch.bool and self.mask.dim() in (2, 4))
        ordinary = self.dropout is None and hides and self.q.dim() == 4 and self.q.shape[-1] == self.v.shape[-1]
        return ordinary and self.q.shape[0] == self.k.shape[0] and private.has_fused_attention(self.q, self.mask is not None)

    @property
    def scale_factor(self) -> float:
        return float(self.q.shape[-1] ** -0.5) if self.scale is None else self.scale


class SoftmaxState:
    """Online softmax state of query rows. `out` [..., rows, width]: sum of values times weights relative to the largest score `max_score`
    [..., rows]; the weights sum to `weight_sum`."""

    def __init__(self, q: Tensor, width: int) -> None:
        wide = _accumulation_dtype(q)
        self.out = q.new_zeros((*q.shape[:-1], width), dtype=wide)
        self.max_score = q.new_full(q.shape[:-1], torch.finfo(wide).min, dtype=wide)
        self.weight_sum = q.new_zeros(q.shape[:-1], dtype=wide)

    def add(self, start: int, out: Tensor, max_score: Tensor, weight_sum: Tensor) -> None:
        """Merge the result of a block into the rows from `start` on."""
        count = max_score.shape[-1]
        old_out, old_top, old_total = (
            x.narrow(dim, start, count) for x, dim in ((self.out, -2), (self.max_score, -1), (self.weight_sum, -1))
        )
        higher = torch.maximum(old_top, max_score)
        fade, new = (old_top - higher).exp_(), (max_score - higher).exp_()
        old_out.mul_(fade.unsqueeze(-1)).addcmul_(out.to(old_out.dtype), new.unsqueeze(-1))
        old_total.mul_(fade).addcmul_(weight_sum, new)
        old_top.copy_(higher)

    def normalized(self, dtype: torch.dtype) -> Tensor:
        """Return the attention output of all blocks added; zeros for a row without visible keys."""
        return (self.out / self.weight_sum.masked_fill(self.weight_sum == 0, 1.0).unsqueeze(-1)).to(dtype)


def attend_block(rows: SoftmaxState, start: int, block: AttentionBlock) -> None:
    """Add a block to the rows from `start` on."""
    if block.has_fused_kernel:
        with use_attention_backend(block.q, block.k):
            out, top = private.fused_attention(block.q, block.k, block.v, _additive_mask(block), block.causal, block.scale_factor)
        total = torch.ones_like(top)
        if block.mask is not None:  # the kernel returns 0 for rows without visible keys
            is_fully_masked = ~block.mask.any(-1)
            top, total = top.masked_fill(is_fully_masked, torch.finfo(top.dtype).min), total.masked_fill(is_fully_masked, 0.0)
        rows.add(start, out, top, total)
        return
    for first, part in _row_tiles(block):
        scores = _masked_scores(part)
        top = scores.amax(-1).clamp_(min=torch.finfo(scores.dtype).min)
        weights = scores.sub_(top.unsqueeze(-1)).exp_()
        total = weights.sum(-1)
        if part.dropout is not None:
            weights = apply_dropout_(weights, part.dropout)
        rows.add(start + first, weights @ _repeat_heads(part.v, part.q).to(weights.dtype), top, total)


@dataclass(frozen=True)
class AttentionOutput:
    """Final state of rows, for backward: `out` and its gradient [..., rows, width]; `max_score` and `weight_sum` as in `SoftmaxState`."""

    out: Tensor
    grad: Tensor
    max_score: Tensor
    weight_sum: Tensor

    def narrow(self, start: int, count: int) -> AttentionOutput:
        out, grad = (x.narrow(-2, start, count) for x in (self.out, self.grad))
        return AttentionOutput(out, grad, self.max_score.narrow(-1, start, count), self.weight_sum.narrow(-1, start, count))


def attend_block_backward(
    block: AttentionBlock, output: AttentionOutput, of_q: Tensor, of_k: Tensor, of_v: Tensor, of_mask: Tensor | None
) -> None:
    """Add a block's gradients to those of its queries, keys, values and (added to the scores) mask.

    Weights w are those of the full row, and the gradient of a score is w (gradient · value - gradient · out) (Dao et al. 2022).
    """
    if block.has_fused_kernel:
        total = output.weight_sum.masked_fill(output.weight_sum == 0, 1.0).log_().add_(output.max_score)
        with use_attention_backend(block.q, block.k):
            gradients = private.fused_attention_backward(
                output.grad, (block.q, block.k, block.v), output.out, total, _additive_mask(block), block.causal, block.scale_factor
            )
        for into, block_gradient in zip((of_q, of_k, of_v), gradients, strict=True):
            into.add_(block_gradient)
        return
    wide, factor = _accumulation_dtype(block.q), block.scale_factor
    for first, part in _row_tiles(block):
        count, row_state = part.q.shape[-2], output.narrow(first, part.q.shape[-2])
        q, k, v, grad = (x.to(wide) for x in (part.q, _repeat_heads(part.k, part.q), _repeat_heads(part.v, part.q), row_state.grad))
        weight_sums = row_state.weight_sum.masked_fill(row_state.weight_sum == 0, 1.0).unsqueeze(-1)
        weights = _masked_scores(part).sub_(row_state.max_score.unsqueeze(-1)).exp_().div_(weight_sums)
        of_weights = grad @ v.mT
        of_v.add_(_sum_repeated_heads((apply_dropout_(weights.clone(), part.dropout) if part.dropout else weights).mT @ grad, of_v))
        if part.dropout is not None:
            of_weights = apply_dropout_(of_weights, part.dropout)
        of_scores = of_weights.sub_((grad * row_state.out).sum(-1, keepdim=True)).mul_(weights)
        if of_mask is not None:
            mask_rows = of_mask if of_mask.shape[-2] == 1 else of_mask.narrow(-2, first, count)
            mask_rows.add_(of_scores.sum_to_size(mask_rows.shape))
        of_q.narrow(-2, first, count).add_(of_scores @ k, alpha=factor)
        of_k.add_(_sum_repeated_heads(of_scores.mT @ q, of_k), alpha=factor)


def _accumulation_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _row_tiles(block: AttentionBlock) -> Iterator[tuple[int, AttentionBlock]]:
    """Yield (first row, block) of as many rows at once as fit."""
    rows, columns = block.q.shape[-2], block.k.shape[-2]
    each = max(1, SCORES // max(1, prod(block.q.shape[:-2]) * columns))
    for first in range(0, rows, each):
        count = min(each, rows - first)
        mask, dropping = block.mask, block.dropout
        if block.causal:
            places = torch.arange(first, first + count, device=block.q.device).unsqueeze(-1)
            mask = places >= torch.arange(columns, device=block.q.device)
        elif mask is not None and mask.shape[-2] > 1:
            mask = mask.narrow(-2, first, count)
        if dropping is not None:
            dropping = dropping._replace(box=narrow_box(dropping.box, -2, first, count))
        yield first, replace(block, q=block.q.narrow(-2, first, count), mask=mask, causal=False, dropout=dropping)


def _masked_scores(block: AttentionBlock) -> Tensor:
    wide = _accumulation_dtype(block.q)
    scores = (block.q.to(wide) @ _repeat_heads(block.k, block.q).to(wide).mT).mul_(block.scale_factor)
    if block.mask is None:
        return scores
    return scores.masked_fill_(~block.mask, -torch.inf) if block.mask.dtype is torch.bool else scores + block.mask.to(wide)


def _additive_mask(block: AttentionBlock) -> Tensor | None:
    """Return a boolean mask as an additive one."""
    if block.mask is None:
        return None
    return torch.zeros_like(block.mask, dtype=block.q.dtype).masked_fill_(~block.mask, -torch.inf)


def _repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    """Repeat heads of keys or values to as many as of queries."""
    return x if x.dim() < 4 or x.shape[-3] == q.shape[-3] else x.repeat_interleave(q.shape[-3] // x.shape[-3], -3)


def _sum_repeated_heads(x: Tensor, like: Tensor) -> Tensor:
    """Sum gradients of repeated heads, and over broadcast dimensions."""
    if x.dim() > 3 and x.shape[-3] != like.shape[-3]:
        x = x.view(*x.shape[:-3], like.shape[-3], x.shape[-3] // like.shape[-3], *x.shape[-2:]).sum(-3)
    return x.sum_to_size(like.shape)
