"""torch.distributed.pipelining with two stages: GPipe or 1F1B. The embedding that both ends share is summed by hand, as its users do."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from bench.case import Case
from bench.peers.common import Step, adamw, model_of
from weft.zoo import gpt

SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}


class First(nn.Module):
    """Embeddings and the first half of the layers."""

    def __init__(self, model: gpt.Model, layers: int) -> None:
        super().__init__()
        self.tokens, self.positions, self.layers = model.tokens, model.positions, model.layers[:layers]

    def forward(self, input_ids: Tensor) -> Tensor:
        x: Tensor = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1]))
        for block in self.layers:
            x = block(x)
        return x


class Second(nn.Module):
    """The other half, the last norm, and the head with a copy of the embedding."""

    def __init__(self, model: gpt.Model, layers: int) -> None:
        super().__init__()
        self.layers, self.norm, self.head = model.layers[layers:], model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build(case: Case, rank: int, num_ranks: int, schedule: str) -> Step:
    whole = model_of(case)
    half = len(whole.layers) // 2
    part = First(whole, half) if rank == 0 else Second(whole, half)
    shared = whole.tokens.weight
    del whole
    stage = PipelineStage(part, rank, num_ranks, torch.device("cpu"))
    pipeline = SCHEDULES[schedule](stage, case.microbatches, loss_fn=lambda logits, labels: gpt.loss(logits, {"labels": labels}))
    optimizer = adamw(part.parameters(), case)

    def step(tokens: Tensor) -> Tensor | None:
        losses: list[Tensor] = []
        if rank == 0:
            pipeline.step(tokens[:, :-1].contiguous())
        else:
            pipeline.step(target=tokens[:, 1:].contiguous(), losses=losses)
        assert shared.grad is not None
        dist.all_reduce(shared.grad)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().detach() if losses else None

    return step
