"""DistributedDataParallel with ZeroRedundancyOptimizer: PyTorch's own ZeRO-1."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from bench.case import Case
from bench.peers.common import Step, loss_of, model_of, my_rows


def build(case: Case, rank: int, num_ranks: int) -> Step:
    model = DistributedDataParallel(model_of(case), gradient_as_bucket_view=True, static_graph=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=case.lr, fused=True)

    def step(tokens: Tensor) -> Tensor:
        loss = loss_of(model, my_rows(tokens, rank, num_ranks))
        loss.backward()
        optimizer.step()
        model.zero_grad()
        return loss.detach()

    return step
