"""DistributedDataParallel: buckets that are views of the gradients, which its documentation recommends, a fixed graph.

`plain`: as its tutorials write it, with AdamW's own defaults. `exchange` False: gradients stay where they are. `zero`: with
ZeroRedundancyOptimizer, PyTorch's own ZeRO-1.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from bench.common.case import Case
from bench.peers.common import Step, adamw, autocast_if, loss_of, model_of, my_rows


def build(
    case: Case, rank: int, num_ranks: int, autocast: bool = False, plain: bool = False, exchange: bool = True, zero: bool = False
) -> Step:
    settings = {} if plain else {"gradient_as_bucket_view": True, "static_graph": exchange}  # a static graph cannot leave its sums out
    model = DistributedDataParallel(model_of(case), **settings)
    if zero:
        optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=case.lr, fused=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=case.lr) if plain else adamw(model.parameters(), case)

    def step(tokens: Tensor) -> Tensor:
        with contextlib.nullcontext() if exchange else model.no_sync():
            with autocast_if(autocast):
                loss = loss_of(model, my_rows(tokens, rank, num_ranks))
            loss.backward()
        optimizer.step()
        model.zero_grad()  # the optimizer with pieces only clears its own
        return loss.detach()

    return step
