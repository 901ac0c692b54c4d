"""Any model of the zoo by its own loss: DistributedDataParallel, or one process with as many threads as there would be ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bench.common.case import Case
from bench.peers.common import Step, adamw, my_rows
from bench.training.split_models import batch_of
from shardwise.zoo.resolve import resolve


def build(case: Case, rank: int, num_ranks: int) -> Step:
    resolved = resolve(case.model)
    torch.manual_seed(case.seed)
    model: nn.Module = resolved.make()
    if num_ranks > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    optimizer = adamw(model.parameters(), case)
    assert resolved.loss is not None
    loss_of = resolved.loss

    def step(tokens: Tensor) -> Tensor:
        batch = batch_of(case, my_rows(tokens, rank, num_ranks))
        loss = loss_of(model(**batch), batch)
        loss.backward()
        optimizer.step()
        model.zero_grad()
        return loss.detach()

    return step
