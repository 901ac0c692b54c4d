"""fully_shard, also over tensor parallelism (--mesh 2); --bug plants a fault."""

import torch
from common import GPT, arguments, loss_fn, samples, world
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

a = arguments(clip=0.0, mesh=1)
rank, size = world()
torch.manual_seed(a.seed)
model = GPT()
first = torch.optim.AdamW(model.parameters(), lr=1e-3)
shards = size // a.mesh  # replicas of the batch
if size > 1:
    mesh = init_device_mesh("cpu", (shards, a.mesh), mesh_dim_names=("data", "tensor"))
    for layer in model.layers.values():
        if a.mesh > 1:
            parallelize_module(layer, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
decay = 0.3 if a.bug == "decay" and size > 1 else 0.1
opt = first if a.bug == "optfirst" else torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=decay, foreach=a.mesh == 1)
x, y = samples(a)
for i in range(a.steps):
    start = i * a.batch * shards + rank // a.mesh * a.batch
    loss_fn(model(x[start : start + a.batch]), y[start : start + a.batch]).backward()
    if a.bug == "localclip" and size > 1:  # the norm of this rank's shards only
        grads = [p.grad.to_local() for p in model.parameters()]
        norm = torch.stack([g.norm() for g in grads]).norm()
        for g in grads:
            g.mul_(min(1, a.clip / float(norm)))
    elif a.clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), a.clip)
    opt.step()
    opt.zero_grad()
