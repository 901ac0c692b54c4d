"""Tensor parallelism by DTensor, with sequence-parallel norms."""

import torch
from common import GPT, SEQ, arguments, loss_fn, samples, world
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module

a = arguments()
rank, size = world()
torch.manual_seed(a.seed)
model = GPT()
if size > 1:
    mesh = init_device_mesh("cpu", (size,))
    for layer in model.layers.values():
        plan = {
            "ln1": SequenceParallel(),
            "ln2": SequenceParallel(),
            "attn": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            "attn.q": ColwiseParallel(),
            "attn.k": ColwiseParallel(),
            "attn.v": ColwiseParallel(),
            "attn.o": RowwiseParallel(output_layouts=Shard(1)),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(layer, mesh, plan)
    outer = {
        "emb": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, outer)
    half = SEQ // size
    model.pos = nn.Parameter(model.pos.detach()[rank * half : (rank + 1) * half].clone())
opt = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
x, y = samples(a)
for i in range(a.steps):
    rows = slice(i * a.batch, (i + 1) * a.batch)
    loss_fn(model(x[rows]), y[rows]).backward()
    opt.step()
    opt.zero_grad()
