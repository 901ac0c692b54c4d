"""The proof of a run that compresses its gradients. In: what every rank had before an exchange. Out: what they must have after it.

The gradients themselves are compared before they are compressed: their sums are the serial model's. The exchange is compared with the same
algorithm over all ranks in one place, written down once more without messages, pieces on the way or anything at once; and the serial
model is updated with what that gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Literal

import torch
from torch import Tensor

from weft.plan.compression import BLOCK, Compression
from weft.run.reduce.overlapped import Gradients


class _Between:
    """One bucket's exchange between `num` that compress, step after step. `sharded`: nobody gathers the sums."""

    def __init__(self, how: Compression, num: int, sharded: bool) -> None:
        self._how, self._num, self._sharded = how, num, sharded
        self._residuals: list[Tensor] = []
        self._residuals_of_sums: list[Tensor] = []

    def exchange(self, gradients: Sequence[Tensor]) -> Tensor:
        """The sum that arrives of flat gradients, one tensor each."""
        size = gradients[0].numel()
        by_bucket = self._how.kind == "topk" and not self._sharded
        length = size if by_bucket else -(-size // self._num)
        starts = range(0, length * (1 if by_bucket else self._num), length)
        wanted = [torch.cat([g, g.new_zeros(len(starts) * length - size)]) for g in gradients]
        if self._how.keeps:
            wanted = [g + rest for g, rest in zip(wanted, self._residuals, strict=True)] if self._residuals else wanted
        sent = [torch.cat([self._arriving(g[at : at + length]) for at in starts]) for g in wanted]
        self._residuals = [g - s for g, s in zip(wanted, sent, strict=True)]
        total = torch.zeros_like(sent[0])
        for s in sent:
            total = total + s
        if not (by_bucket or self._sharded):
            sums = [total[at : at + length] for at in starts]
            if self._how.keeps and self._residuals_of_sums:
                sums = [s + rest for s, rest in zip(sums, self._residuals_of_sums, strict=True)]
            arrived = [self._arriving(s) for s in sums]
            self._residuals_of_sums = [s - a for s, a in zip(sums, arrived, strict=True)]
            total = torch.cat(arrived)
        return total[:size]

    def _arriving(self, x: Tensor) -> Tensor:
        if self._how.kind == "bfloat16":
            return x.bfloat16().to(x.dtype)
        if self._how.kind == "topk":
            order = torch.sort(x.abs(), descending=True, stable=True).indices[: self._how.sent(x.numel())]
            return torch.zeros_like(x).index_copy(0, order, x[order])
        arriving = []
        for block in torch.split(x, BLOCK):
            scale = (block.abs().max() / 127).float().to(x.dtype) if block.numel() else x.new_zeros(())
            arriving.append(torch.round(block / scale if scale > 0 else block).clamp(-127, 127) * scale)
        return torch.cat(arriving)


class Emulated:
    """One bucket's exchange between members in `boxes` (their indices) of one size, of which each sums first. `sharded`: as there."""

    def __init__(self, how: Compression, boxes: Sequence[Sequence[int]], sharded: bool) -> None:
        self._boxes, self._sharded = boxes, sharded
        self._rails = [_Between(how, len(boxes), sharded) for _ in boxes[0]]  # of the members with the same place in their boxes

    def exchange(self, gradients: Sequence[Tensor]) -> Tensor:
        """The sum that arrives of flat gradients, one tensor a member."""
        sums = [reduce(torch.add, [gradients[i] for i in box]) for box in self._boxes]  # in the members' order
        if not self._sharded:
            each = zip(self._rails, zip(*(torch.tensor_split(s, len(self._rails)) for s in sums), strict=True), strict=True)
            return torch.cat([rail.exchange(parts) for rail, parts in each])
        rows = [s.view(len(gradients), -1) for s in sums]
        out = torch.empty_like(rows[0])
        for rail, members in zip(self._rails, zip(*self._boxes, strict=True), strict=True):
            of_rail = list(members)
            out[of_rail] = rail.exchange([row[of_rail].view(-1) for row in rows]).view(len(members), -1)
        return out.view(-1)


class Lossy:
    """All compressed buckets of one rank, whose gradients it lets be shown as the run has them, summed as they were, or emulated.

    Every rank of a run makes one before the first step.
    """

    def __init__(self, gradients: Gradients, how: Compression) -> None:
        self._gradients = gradients
        gradients.before = {}
        # In one order on all ranks, as groups are connected.
        self._order = sorted(gradients.compressed, key=lambda k: (gradients.compressed[k].over.ranks, k))
        self._emulated = {
            k: Emulated(how, [[one.over.ranks.index(rank) for rank in box] for box in one.boxes], one.sharded)
            for k, one in gradients.compressed.items()
        }
        self._exchanged: dict[int, dict[str, Tensor]] = {}

    def compare(self) -> float:
        """After the gradients of a step: how far what arrived is from the emulation, relative to the largest of each bucket."""
        worst = 0.0
        for k in self._order:
            one = self._gradients.compressed[k]
            gathered = one.over.all_gather((self._gradients.before or {})[k][None])
            arrived, emulated = one.flat.clone(), self._emulated[k].exchange(gathered.unbind())
            self._exchanged[k] = {"arrived": arrived, "emulated": emulated, "summed": gathered.sum(0)}
            if one.sharded:
                arrived, emulated = (x.view(one.over.size, -1)[one.over.index] for x in (arrived, emulated))
            off = (arrived - emulated).abs().max() / emulated.abs().max().clamp(min=torch.finfo(emulated.dtype).tiny)
            worst = max(worst, float(off.nan_to_num(nan=float("inf"))))
        return worst

    def show(self, which: Literal["arrived", "emulated", "summed"]) -> None:
        """Let the gradients be these."""
        for k, exchanged in self._exchanged.items():
            self._gradients.compressed[k].flat.copy_(exchanged[which])
