"""One step in plain PyTorch; on several ranks DistributedDataParallel, started by torchrun."""

import os

import torch
from model import GPT, batch
from torch.nn.functional import cross_entropy

torch.manual_seed(0)
x, y = batch()
net = GPT()
ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
if ranks > 1:
    torch.distributed.init_process_group("gloo")
    net = torch.nn.parallel.DistributedDataParallel(net)
    x, y = x.chunk(ranks)[rank], y.chunk(ranks)[rank]
opt = torch.optim.AdamW(net.parameters())
loss = cross_entropy(net(x).flatten(0, 1), y.flatten())
loss.backward()
opt.step()
print(f"step {loss.item():.6f}", flush=True)
if ranks > 1:
    torch.distributed.destroy_process_group()
