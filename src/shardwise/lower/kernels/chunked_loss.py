"""Linear layer and cross-entropy in chunks of rows: the logits of one chunk exist at a time, forward and backward (`loss_chunks`).

Forward adds up the losses of the chunks and saves the layer's input only. Backward computes the logits of a chunk again, their gradient
from them, and adds its share of the weight's gradient to one sum. Gradients are not computed in forward, as Liger's kernel does to save
that product: those of the weight would be held by every microbatch that waits for its backward, and a loss scale would come too late for
gradients of 16 bits.

    N rows (tokens), H features, V classes, those of this rank where ranks share them
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.lower.kernels.second_derivatives import refuse_second_derivatives
from shardwise.lower.kernels.vocabulary import NARROW, start_count, sum_cross_entropies
from shardwise.plan.ir.placement import even_shard_ranges
from shardwise.world.world import Group

Step = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ChunkedLossCall:
    """`row_steps`: what rearranges the rows of the layer's input as the model does those of its output, `class_dim`: where features are
    then. `logit_steps`: what acts on the logits of some rows. The rest as of `vocabulary.cross_entropy`."""

    num_chunks: int
    row_steps: tuple[Step, ...]
    class_dim: int
    logit_steps: tuple[Step, ...]
    ignore: int
    rows: tuple[Group, ...]
    class_shard: tuple[int, Group] | None
    smoothing: float
    mean: bool

    def loss_of(self, logits_NV: Tensor, target_N: Tensor, class_weight: Tensor | None) -> Tensor:
        """Return the sum of the losses of some rows."""
        for step in self.logit_steps:
            logits_NV = step(logits_NV)
        return sum_cross_entropies(logits_NV, target_N, self.ignore, self.class_shard, self.smoothing, class_weight)

    def ranges(self, num_rows: int) -> Iterator[slice]:
        """Yield the rows of each chunk: as many as there are, none empty."""
        for start, stop in even_shard_ranges(num_rows, max(1, min(self.num_chunks, num_rows))):
            yield slice(start, stop)


def compute_chunked_loss(
    call: ChunkedLossCall, x: Tensor, weight_VH: Tensor, bias_V: Tensor | None, target: Tensor, class_weight: Tensor | None
) -> Tensor:
    """Return the mean or sum of the cross-entropies of `linear(x, weight, bias)`, its logits computed chunk by chunk."""
    for step in call.row_steps:
        x = step(x)
    x_NH, target_N = x.movedim(call.class_dim, -1).reshape(-1, x.shape[call.class_dim]), target.reshape(-1)
    device = x.device.type
    if torch.is_autocast_enabled(device):  # once for all chunks
        dtype = torch.get_autocast_dtype(device)
        x_NH, weight_VH = _narrow_operand(x_NH, dtype), _narrow_operand(weight_VH, dtype)
        bias_V = None if bias_V is None else _narrow_operand(bias_V, dtype)
    loss_dtype = torch.float32 if x_NH.dtype in NARROW else x_NH.dtype
    count = start_count(target_N, call.ignore, call.rows, loss_dtype, class_weight) if call.mean else None
    loss: Tensor = _ChunkedLoss.apply(x_NH, weight_VH, bias_V, target_N, class_weight, call)  # type: ignore[no-untyped-call]
    return loss if count is None else loss / count()


def _narrow_operand(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.dtype in (torch.float32, *NARROW) else x


class _ChunkedLoss(torch.autograd.Function):
    """Sum of the losses of all chunks."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        target_N: Tensor,
        class_weight: Tensor | None,
        call: ChunkedLossCall,
    ) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(x_NH, weight_VH, bias_V, target_N, class_weight)
        total: Tensor | None = None
        with torch.autocast(x_NH.device.type, enabled=False):
            for rows in call.ranges(len(x_NH)):
                loss = call.loss_of(F.linear(x_NH[rows], weight_VH, bias_V), target_N[rows], class_weight)
                total = loss if total is None else total + loss
        assert total is not None
        return total

    @staticmethod
    @refuse_second_derivatives("cross entropy in chunks", "loss_chunks")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_NH, weight_VH, bias_V, target_N, class_weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        x_grad = torch.empty_like(x_NH) if needs_x else None
        weight_grad: Tensor | None = None
        bias_grad: Tensor | None = None
        with torch.autocast(x_NH.device.type, enabled=False):
            for rows in ctx.call.ranges(len(x_NH)):
                logits_grad = _logits_gradient(ctx.call, (x_NH[rows], weight_VH, bias_V, target_N[rows], class_weight), grad)
                if x_grad is not None:
                    x_grad[rows] = logits_grad @ weight_VH
                if needs_weight:
                    weight_grad = _add_product(weight_grad, logits_grad.t(), x_NH[rows])
                if needs_bias:
                    chunk_sum = logits_grad.sum(0)
                    bias_grad = chunk_sum if bias_grad is None else bias_grad + chunk_sum
                del logits_grad
        return x_grad, None if weight_grad is None else weight_grad.to(weight_VH.dtype), bias_grad, None, None, None


def _logits_gradient(call: ChunkedLossCall, operands: tuple[Any, ...], grad: Tensor) -> Tensor:
    """Return the gradient of a chunk's logits, which are computed again."""
    x_NH, weight_VH, bias_V, target_N, class_weight = operands
    logits_NV = F.linear(x_NH, weight_VH, bias_V).requires_grad_()
    with torch.enable_grad():
        loss = call.loss_of(logits_NV, target_N, class_weight)
    return torch.autograd.grad(loss, logits_NV, grad)[0]


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Return `total + a @ b`, in place; sums over chunks are no narrower than float32."""
    if a.dtype in NARROW:
        product = (a @ b).float()
        return product if total is None else total.add_(product)
    return a @ b if total is None else total.addmm_(a, b)
