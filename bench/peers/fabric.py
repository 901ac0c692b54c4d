"""Lightning Fabric on processors, with the same options for its DistributedDataParallel."""

from __future__ import annotations

from lightning_fabric import Fabric
from lightning_fabric.plugins.environments import TorchElasticEnvironment
from lightning_fabric.strategies import DDPStrategy
from torch import Tensor

from bench.common.case import Case
from bench.peers.common import Step, adamw, loss_of, model_of, my_rows


def build(case: Case, rank: int, num_ranks: int) -> Step:
    strategy = DDPStrategy(
        cluster_environment=TorchElasticEnvironment(), process_group_backend="gloo", gradient_as_bucket_view=True, static_graph=True
    )
    fabric = Fabric(accelerator="cpu", devices=num_ranks, strategy=strategy)
    fabric.launch()
    plain = model_of(case)
    model, optimizer = fabric.setup(plain, adamw(plain.parameters(), case))

    def step(tokens: Tensor) -> Tensor:
        loss = loss_of(model, my_rows(tokens, rank, num_ranks))
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
