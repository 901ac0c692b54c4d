"""Verification of compressed gradients by an emulation of their exchange.

Gradients are compared before compression: their sums are the serial model's. The exchange is compared with an independent, sequential
emulation of the same algorithm over all ranks in one process; and the serial model is updated with the emulated gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Literal

import torch
from torch import Tensor

from shardwise.plan.ir.compression import BLOCK, Compression
from shardwise.run.gradients.gradient_reducer import GradientReducer


class _EmulatedExchange:
    """Emulated exchange of one bucket between members that compress, step after step. `sharded`: the sums are not gathered."""

    def __init__(self, compression: Compression, num_members: int, sharded: bool) -> None:
        self._how, self._num_members, self._sharded = compression, num_members, sharded
        self._residuals: list[Tensor] = []
        self._residuals_of_sums: list[Tensor] = []

    def exchange(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the received sum of flat gradients, one tensor per member."""
        size = gradients[0].numel()
        by_bucket = self._how.kind == "topk" and not self._sharded
        length = size if by_bucket else -(-size // self._num_members)
        starts = range(0, length * (1 if by_bucket else self._num_members), length)
        compensated = [torch.cat([g, g.new_zeros(len(starts) * length - size)]) for g in gradients]
        if self._how.has_error_feedback:
            compensated = [g + rest for g, rest in zip(compensated, self._residuals, strict=True)] if self._residuals else compensated
        sent = [torch.cat([self._decode_sent(g[at : at + length]) for at in starts]) for g in compensated]
        self._residuals = [g - s for g, s in zip(compensated, sent, strict=True)]
        total = torch.zeros_like(sent[0])
        for s in sent:
            total = total + s
        if not (by_bucket or self._sharded):
            sums = [total[at : at + length] for at in starts]
            if self._how.has_error_feedback and self._residuals_of_sums:
                sums = [s + rest for s, rest in zip(sums, self._residuals_of_sums, strict=True)]
            arrived = [self._decode_sent(s) for s in sums]
            self._residuals_of_sums = [s - a for s, a in zip(sums, arrived, strict=True)]
            total = torch.cat(arrived)
        return total[:size]

    def _decode_sent(self, x: Tensor) -> Tensor:
        if self._how.kind == "bfloat16":
            return x.bfloat16().to(x.dtype)
        if self._how.kind == "topk":
            order = torch.sort(x.abs(), descending=True, stable=True).indices[: self._how.num_sent(x.numel())]
            return torch.zeros_like(x).index_copy(0, order, x[order])
        arriving = []
        for block in torch.split(x, BLOCK):
            scale = (block.abs().max() / 127).float().to(x.dtype) if block.numel() else x.new_zeros(())
            arriving.append(torch.round(block / scale if scale > 0 else block).clamp(-127, 127) * scale)
        return torch.cat(arriving)


class EmulatedHostExchange:
    """Emulated exchange of one bucket between hosts with equally many members, each of which first reduces inside. `sharded`: as above."""

    def __init__(self, compression: Compression, members_by_host: Sequence[Sequence[int]], sharded: bool) -> None:
        self._members_by_host, self._sharded = members_by_host, sharded
        self._rails = [
            _EmulatedExchange(compression, len(members_by_host), sharded) for _ in members_by_host[0]
        ]  # of the members with equal index on their hosts

    def exchange(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the received sum of flat gradients, one tensor per member."""
        sums = [reduce(torch.add, [gradients[i] for i in box]) for box in self._members_by_host]  # in the members' order
        if not self._sharded:
            each = zip(self._rails, zip(*(torch.tensor_split(s, len(self._rails)) for s in sums), strict=True), strict=True)
            return torch.cat([rail.exchange(parts) for rail, parts in each])
        rows = [s.view(len(gradients), -1) for s in sums]
        out = torch.empty_like(rows[0])
        for rail, members in zip(self._rails, zip(*self._members_by_host, strict=True), strict=True):
            of_rail = list(members)
            out[of_rail] = rail.exchange([row[of_rail].view(-1) for row in rows]).view(len(members), -1)
        return out.view(-1)


class CompressedGradientCheck:
    """All compressed buckets of one rank; sets their gradients to the received, the exactly summed or the emulated ones.

    Every rank of a run builds one before the first step.
    """

    def __init__(self, gradients: GradientReducer, compression: Compression) -> None:
        self._gradients = gradients
        gradients.uncompressed = {}
        # In the same order on all ranks, since groups connect in it.
        self._order = sorted(gradients.compressed, key=lambda k: (gradients.compressed[k].group.ranks, k))
        self._emulated = {
            k: EmulatedHostExchange(
                compression, [[bucket.group.ranks.index(rank) for rank in box] for box in bucket.ranks_by_host], bucket.sharded
            )
            for k, bucket in gradients.compressed.items()
        }
        self._exchanged: dict[int, dict[str, Tensor]] = {}

    def compare(self) -> float:
        """Return the largest difference of a step's received gradients from the emulation, relative to each bucket's maximum."""
        worst = 0.0
        for k in self._order:
            bucket = self._gradients.compressed[k]
            gathered = bucket.group.all_gather((self._gradients.uncompressed or {})[k][None])
            arrived, emulated = bucket.flat_gradients.clone(), self._emulated[k].exchange(gathered.unbind())
            self._exchanged[k] = {"arrived": arrived, "emulated": emulated, "summed": gathered.sum(0)}
            if bucket.sharded:
                arrived, emulated = (x.view(bucket.group.size, -1)[bucket.group.index] for x in (arrived, emulated))
            error = (arrived - emulated).abs().max() / emulated.abs().max().clamp(min=torch.finfo(emulated.dtype).tiny)
            worst = max(worst, float(error.nan_to_num(nan=float("inf"))))
        return worst

    def set_gradients(self, which: Literal["arrived", "emulated", "summed"]) -> None:
        """Set the gradients to one of the three."""
        for k, exchanged in self._exchanged.items():
            self._gradients.compressed[k].flat_gradients.copy_(exchanged[which])
