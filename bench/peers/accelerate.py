"""Hugging Face Accelerate on processors, with the same options for its DistributedDataParallel."""

from __future__ import annotations

from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor

from bench.common.case import Case
from bench.peers.common import Step, adamw, loss_of, model_of, my_rows


def build(case: Case, rank: int, num_ranks: int) -> Step:
    options = DistributedDataParallelKwargs(gradient_as_bucket_view=True, static_graph=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[options])
    plain = model_of(case)
    model, optimizer = accelerator.prepare(plain, adamw(plain.parameters(), case))

    def step(tokens: Tensor) -> Tensor:
        loss = loss_of(model, my_rows(tokens, rank, num_ranks))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
