"""AxoNN: its data parallelism (tensor=1), or its tensor-parallel linear layers in every block, in its faster expert mode (tensor=2).

AxoNN names CUDA and NCCL outright; on processors its groups are made over gloo. The head shares the embedding's weight and stays plain.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from axonn import axonn
from axonn.intra_layer import Linear, fully_connected, sync_gradients
from torch import Tensor, nn

from bench.common.case import Case
from bench.peers.common import Step, adamw, loss_of, model_of, my_rows


def _start(num_ranks: int, tensor: int) -> None:
    new_group = dist.new_group

    def over_gloo(*args: Any, backend: str | None = None, **more: Any) -> Any:
        return new_group(*args, backend="gloo", **more)

    dist.new_group = over_gloo
    torch.cuda.set_device = lambda device: None
    fully_connected.initialize_params = partial(fully_connected.initialize_params, init_device="cpu")
    axonn.init(G_inter=1, G_data=num_ranks // tensor, G_intra_r=tensor, G_intra_c=1, gpus_per_node=num_ranks)
    dist.new_group = new_group


def _swapped(plain: nn.Linear, transpose: bool) -> Linear:
    made = Linear(plain.in_features, plain.out_features, transpose=transpose, init_method=lambda w: w.copy_(plain.weight), expert_mode=True)
    with torch.no_grad():
        made.bias.copy_(plain.bias.chunk(dist.get_world_size(made.outer_group))[dist.get_rank(made.outer_group)])
    return made


def build(case: Case, rank: int, num_ranks: int, tensor: int) -> Step:
    _start(num_ranks, tensor)
    model = model_of(case)
    if tensor > 1:
        for block in model.layers:
            attention, mlp = block.attention, block.mlp
            attention.q, attention.k, attention.v = (_swapped(x, False) for x in (attention.q, attention.k, attention.v))
            mlp.up = _swapped(mlp.up, False)
            attention.o, mlp.down = _swapped(attention.o, True), _swapped(mlp.down, True)
            attention.heads //= tensor
            attention.kv_heads //= tensor
    optimizer = adamw(model.parameters(), case)

    def step(tokens: Tensor) -> Tensor:
        loss = loss_of(model, tokens if tensor > 1 else my_rows(tokens, rank, num_ranks))
        loss.backward()
        sync_gradients(model, mean=True, expert_mode=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
