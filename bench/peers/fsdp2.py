"""FSDP2: `fully_shard` on every block and on the whole, parameters, gradients and optimizer state in pieces.

`keep`: weights that were gathered stay until backward, which is ZeRO-2 as far as bytes go.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bench.common.case import Case
from bench.peers.common import Step, adamw, loss_of, model_of, my_rows


def build(case: Case, rank: int, num_ranks: int, keep: bool = False) -> Step:
    mesh = init_device_mesh("cpu", (num_ranks,))
    model = model_of(case)
    for block in model.layers:
        fully_shard(block, mesh=mesh, reshard_after_forward=not keep)
    fully_shard(model, mesh=mesh, reshard_after_forward=not keep)
    optimizer = adamw(model.parameters(), case)

    def step(tokens: Tensor) -> Tensor:
        loss = loss_of(model, my_rows(tokens, rank, num_ranks))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
