"""Look-ups and cross-entropy over cut rows (samples, over `data`) and a cut class dimension (the vocabulary, over `tensor`).

Each rank has the classes [start, start + length) that its placement says. Megatron-LM's vocabulary parallelism (Shoeybi et al. 2019), with
the mean taken over all rows that count, whichever rank they lie on.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.world.world import Group


def embedding(weight: Tensor, ids: Tensor, padding: int, start: int) -> Tensor:
    """Rows of a table whose rows are cut: `weight_vE` local, from row `start` on, `ids` whole. A summand: zero where another has it."""
    local = ids - start
    elsewhere = (local < 0) | (local >= weight.shape[0])
    local = local.masked_fill(elsewhere, 0)
    rows = F.embedding(local, weight)
    if padding >= 0:
        # The padding row is read like any other, only its gradient is dropped. The same operators run on every rank, whoever has it,
        # so that their backwards go in the same order.
        rows = torch.where((ids == padding).unsqueeze(-1), rows.detach(), rows)
    return rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    ignore: int,
    rows: tuple[Group, ...],
    classes: tuple[int, Group] | None,
    smoothing: float = 0.0,
    weight: Tensor | None = None,
    mean: bool = True,
) -> Tensor:
    """Mean (or sum) of the cross-entropies of `logits_NC` against `target_N`; rows over the groups `rows`.

    `classes`: the first that this rank has, and the group that they are cut over. With `rows` the mean is this rank's summand of the mean
    over all rows; otherwise it is the mean.
    """
    logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    counted = target != ignore
    counting = None
    if not mean:
        count = None
    elif classes is not None or weight is None:
        count = counted.sum().to(logits.dtype)
    else:
        count = weight[target.masked_fill(~counted, 0)].masked_fill(~counted, 0.0).sum()
    # How many rows count is known before their loss is: it is summed meanwhile.
    if count is not None and rows:
        for group in rows[:-1]:
            group.all_reduce(count)
        counting = rows[-1].all_reduce(count, wait=False)
    if classes is not None:
        loss: Tensor = _CutClasses.apply(logits, target, counted, *classes)  # type: ignore[no-untyped-call]
    else:
        loss = F.cross_entropy(logits, target, weight=weight, ignore_index=ignore, reduction="sum", label_smoothing=smoothing)
    if counting is not None:
        counting.wait()
    return loss if count is None else loss / count


class _CutClasses(torch.autograd.Function):
    """Sum over rows of log-sum-exp minus the target's logit, with max, sum and target logit each reduced over the classes' group."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, counted: Tensor, start: int, group: Group) -> Tensor:
        top = logits.amax(dim=-1)
        group.all_reduce(top, op="max")
        local = target - start
        elsewhere = (local < 0) | (local >= logits.shape[-1])
        local = local.masked_fill(elsewhere, 0)
        shifted = logits - top.unsqueeze(-1)
        at_target = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0.0)
        probabilities = shifted.exp_()
        # One all-reduce for both sums: latency counts, the bytes do not.
        both = torch.stack((probabilities.sum(dim=-1), at_target))
        group.all_reduce(both)
        total, at_target = both[0], both[1]
        probabilities.div_(total.unsqueeze(-1))
        ctx.save_for_backward(probabilities, local, elsewhere, counted)
        return (total.log() - at_target).masked_fill(~counted, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        probabilities, local, elsewhere, counted = ctx.saved_tensors
        one = (~elsewhere).to(probabilities.dtype).unsqueeze(-1)
        out = probabilities.scatter_add(-1, local.unsqueeze(-1), -one)
        out *= counted.unsqueeze(-1)
        return out.mul_(grad), None, None, None, None


def nll(
    rows: tuple[Group, ...], log_probabilities: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1, ignore: int = -100
) -> Tensor:
    """This rank's summand of the mean over all rows, which lie over the groups `rows`; the targets say how many count."""
    loss = torch.nn.functional.nll_loss(log_probabilities, target, weight, ignore_index=ignore, reduction="sum")
    count = (target != ignore).sum().to(loss.dtype)
    for group in rows:
        group.all_reduce(count)
    return loss / count
