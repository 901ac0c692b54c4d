"""One process with all threads: plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from bench.common.case import Case
from bench.peers.common import Step, adamw, autocast_if, loss_of, model_of


def build(case: Case, rank: int, num_ranks: int, autocast: bool = False) -> Step:
    model = model_of(case)
    optimizer = adamw(model.parameters(), case)

    def step(tokens: Tensor) -> Tensor:
        with autocast_if(autocast):
            loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
