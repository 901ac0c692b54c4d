"""Vocabulary parallelism: look-ups and cross-entropy with sharded rows (samples, over `data`) and a sharded class dimension (over
`tensor`).

Each rank has the classes [start, start + length) of its placement (Megatron-LM, Shoeybi et al. 2019); the mean is over all rows that count,
on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.lower.kernels.second_derivatives import refuse_second_derivatives
from shardwise.world.world import Group

NARROW = (torch.bfloat16, torch.float16)


def embedding(weight: Tensor, ids: Tensor, padding: int, start: int) -> Tensor:
    """Look up rows of a sharded table: `weight_vE` local, from row `start` on, `ids` replicated. A partial sum: zero for other rows."""
    local = ids - start
    is_off_rank = (local < 0) | (local >= weight.shape[0])
    local = local.masked_fill(is_off_rank, 0)
    rows = F.embedding(local, weight)
    if padding >= 0:
        # The padding row is read like any other, only its gradient is dropped. The same operators run on every rank, whichever has it,
        # so that their backward passes are in the same order.
        rows = torch.where((ids == padding).unsqueeze(-1), rows.detach(), rows)
    return rows.masked_fill(is_off_rank.unsqueeze(-1), 0.0)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    ignore: int,
    rows: tuple[Group, ...],
    class_shard: tuple[int, Group] | None,
    smoothing: float = 0.0,
    weight: Tensor | None = None,
    mean: bool = True,
) -> Tensor:
    """Return the mean (or sum) of the cross-entropies of `logits_NC` against `target_N`; rows are sharded over the groups `rows`.

    `classes`: the first class of this rank, and the group over which they are sharded. With `rows` the mean is this rank's partial sum of
    the mean over all rows; otherwise it is the mean.
    """
    dtype = torch.float32 if logits.dtype in NARROW else logits.dtype
    total = start_count(target, ignore, rows, dtype, None if class_shard is not None else weight) if mean else None
    loss = sum_cross_entropies(logits, target, ignore, class_shard, smoothing, weight)
    return loss if total is None else loss / total()


def start_count(
    target: Tensor, ignore: int, rows: tuple[Group, ...], dtype: torch.dtype, weight: Tensor | None = None
) -> Callable[[], Tensor]:
    """Start to count the rows that count, or their weights, over the groups `rows`; the result waits for the number. It is known before the
    loss, so its all-reduce overlaps with the loss."""
    counted, pending = target != ignore, None
    if weight is None:
        count = counted.sum().to(dtype)
    else:
        count = weight[target.masked_fill(~counted, 0)].masked_fill(~counted, 0.0).sum()
    for group in rows[:-1]:
        group.all_reduce(count)
    if rows:
        pending = rows[-1].all_reduce(count, wait=False)

    def finish() -> Tensor:
        if pending is not None:
            pending.wait()
        return count

    return finish


def sum_cross_entropies(
    logits: Tensor,
    target: Tensor,
    ignore: int,
    class_shard: tuple[int, Group] | None,
    smoothing: float = 0.0,
    weight: Tensor | None = None,
) -> Tensor:
    """Return the sum of the cross-entropies of this rank's rows, no narrower than float32; arguments as of `cross_entropy`."""
    is_narrow = logits.dtype in NARROW
    logits = logits.float() if is_narrow else logits
    if class_shard is not None:
        loss: Tensor = _VocabularyParallelLoss.apply(logits, target, target != ignore, *class_shard, is_narrow)  # type: ignore[no-untyped-call]
        return loss
    return F.cross_entropy(logits, target, weight=weight, ignore_index=ignore, reduction="sum", label_smoothing=smoothing)


class _VocabularyParallelLoss(torch.autograd.Function):
    """Sum over rows of log-sum-exp minus the target's logit, with max, sum and target logit each reduced over the classes' group.

    `is_copy`: whether nothing else reads the logits, whose memory the probabilities then have.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, counted: Tensor, start: int, group: Group, is_copy: bool) -> Tensor:
        top = logits.amax(dim=-1)
        group.all_reduce(top, op="max")
        local = target - start
        is_off_rank = (local < 0) | (local >= logits.shape[-1])
        local = local.masked_fill(is_off_rank, 0)
        shifted = logits.sub_(top.unsqueeze(-1)) if is_copy else logits - top.unsqueeze(-1)
        at_target = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(is_off_rank, 0.0)
        probabilities = shifted.exp_()
        # One all-reduce for both sums: latency counts, the bytes do not.
        sums = torch.stack((probabilities.sum(dim=-1), at_target))
        group.all_reduce(sums)
        total, at_target = sums[0], sums[1]
        probabilities.div_(total.unsqueeze(-1))
        ctx.save_for_backward(probabilities, local, is_off_rank, counted)
        return (total.log() - at_target).masked_fill(~counted, 0.0).sum()

    @staticmethod
    @refuse_second_derivatives("cross entropy over classes", "tensor")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        probabilities, local, is_off_rank, counted = ctx.saved_tensors
        target_mask = (~is_off_rank).to(probabilities.dtype).unsqueeze(-1)
        out = probabilities.scatter_add(-1, local.unsqueeze(-1), -target_mask)
        out *= counted.unsqueeze(-1)
        return out.mul_(grad), None, None, None, None, None


def nll(
    rows: tuple[Group, ...], log_probabilities: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1, ignore: int = -100
) -> Tensor:
    """Return this rank's partial sum of the mean over all rows, sharded over the groups `rows`, of targets that count."""
    loss = torch.nn.functional.nll_loss(log_probabilities, target, weight, ignore_index=ignore, reduction="sum")
    count = (target != ignore).sum().to(loss.dtype)
    for group in rows:
        group.all_reduce(count)
    return loss / count
