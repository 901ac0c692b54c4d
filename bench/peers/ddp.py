"""DistributedDataParallel: buckets that are views of the gradients, which its documentation recommends, a fixed graph."""

from __future__ import annotations

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from bench.case import Case
from bench.peers.common import Step, adamw, autocast_if, loss_of, model_of, my_rows


def build(case: Case, rank: int, num_ranks: int, autocast: bool = False) -> Step:
    model = DistributedDataParallel(model_of(case), gradient_as_bucket_view=True, static_graph=True)
    optimizer = adamw(model.parameters(), case)

    def step(tokens: Tensor) -> Tensor:
        with autocast_if(autocast):
            loss = loss_of(model, my_rows(tokens, rank, num_ranks))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
