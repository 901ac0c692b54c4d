"""torch.distributed.pipelining: GPipe and 1F1B of one stage a rank, interleaved 1F1B and zero bubble of several.

Both ends have a copy of the embedding, whose gradients are summed by hand, as its users do.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble

from bench.common.case import Case
from bench.peers.common import Step, adamw, model_of
from shardwise.zoo import gpt

SINGLE = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
SEVERAL = {
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
    "ZBVZeroBubble": ScheduleZBVZeroBubble,
}


class Part(nn.Module):
    """Some layers; with the embeddings where `first`, with the last norm and the head where `last`."""

    def __init__(self, model: gpt.GPT, start: int, stop: int, first: bool, last: bool) -> None:
        super().__init__()
        self.layers = model.layers[start:stop]
        self.tokens: nn.Module | None = model.tokens if first else None
        self.positions: nn.Module | None = model.positions if first else None
        self.norm: nn.Module | None = model.norm if last else None
        self.head: nn.Module | None = model.head if last else None

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None and self.positions is not None:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.layers:
            x = block(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def stages_of(rank: int, num_ranks: int, chunks: int, schedule: str) -> list[int]:
    """This rank's stages: round and round, or down and up again."""
    if schedule == "ZBVZeroBubble":
        return [rank, 2 * num_ranks - 1 - rank]
    return [rank + i * num_ranks for i in range(chunks)]


def build(case: Case, rank: int, num_ranks: int, schedule: str, chunks: int = 1) -> Step:
    whole = model_of(case)
    # Two stages of one rank, too, have a copy each: with the parameter itself, backward in two parts makes other gradients.
    whole.head.weight = nn.Parameter(whole.tokens.weight.detach().clone())
    num_stages = num_ranks * chunks
    layers = len(whole.layers)
    cuts = [layers * i // num_stages for i in range(num_stages + 1)]
    mine = stages_of(rank, num_ranks, chunks, schedule)
    parts = [Part(whole, cuts[i], cuts[i + 1], i == 0, i == num_stages - 1) for i in mine]
    stages: list[Any] = [PipelineStage(part, i, num_stages, torch.device("cpu")) for part, i in zip(parts, mine, strict=True)]

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return gpt.compute_loss(logits, {"labels": labels})

    pipeline = (
        SINGLE[schedule](stages[0], case.microbatches, loss_fn=loss)
        if schedule in SINGLE
        else SEVERAL[schedule](stages, case.microbatches, loss_fn=loss)
    )
    is_first, is_last = 0 in mine, num_stages - 1 in mine
    ends = [*([whole.tokens.weight] if is_first else []), *([whole.head.weight] if is_last else [])]
    del whole
    optimizer = adamw({p: None for part in parts for p in part.parameters()}, case)

    def step(tokens: Tensor) -> Tensor | None:
        losses: list[Tensor] = []
        inputs = (tokens[:, :-1].contiguous(),) if is_first else ()
        target: dict[str, Any] = {"target": tokens[:, 1:].contiguous(), "losses": losses} if is_last else {}
        pipeline.step(*inputs, **target)
        gradients = [weight.grad for weight in ends if weight.grad is not None]
        if len(gradients) == 2:
            gradients[0] += gradients[1]
            gradients[1].copy_(gradients[0])
        for gradient in gradients if len(gradients) == 1 else ():
            dist.all_reduce(gradient)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().detach() if losses else None

    return step
