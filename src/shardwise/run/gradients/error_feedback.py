"""Error feedback state of compressed gradients (the residuals not sent yet) as shards of a checkpoint.

A residual belongs to one rank and one layout: the same layout resumes exactly; another one starts without residuals, as at the first step,
and loses them once. Not modelled: conversion of residuals to another layout.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from shardwise.plan.layout import Layout
from shardwise.run.checkpoint.state_shard import StateShard, full_shard
from shardwise.run.gradients.compressed import CompressedBucket
from shardwise.run.gradients.two_level_compression import TwoLevelCompressedBucket


class ErrorFeedbackState:
    """The residuals of one rank's buckets."""

    def __init__(self, compressed: Iterable[CompressedBucket | TwoLevelCompressedBucket], layout: Layout, rank: int) -> None:
        axes = f"data={layout.data} tensor={layout.grid or layout.tensor} pipeline={layout.pipeline}"
        self._name = f"{axes} zero={layout.zero} compress={layout.compress} rank={rank}"
        self._tensors = {(f"{self._name} {b.name} {x.numel()}", slot): x for b in compressed for slot, x in b.residuals.items()}
        self._step = torch.zeros((), dtype=torch.int64)

    @property
    def tensors(self) -> list[Tensor]:
        return list(self._tensors.values())

    def state_shards(self, step: int) -> list[StateShard]:
        """Return the residuals after `step` steps as checkpoint shards, to save or to load into."""
        if not self._tensors:
            return []
        self._step.fill_(step)
        pieces = [full_shard(name, "rest", x, slot) for (name, slot), x in self._tensors.items()]
        return [*pieces, full_shard(self._name, "rest", self._step, "step")]

    def finish_load(self, step: int) -> None:
        """Reset the residuals if the checkpoint of `step` steps, loaded into `state_shards(-1)`, had none of this layout."""
        if int(self._step) != step:
            for x in self._tensors.values():
                x.zero_()
