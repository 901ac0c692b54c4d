"""torch.distributed.pipelining, two stages, GPipe; the second stage counts its own layers from 0."""

import torch
from common import GPT, arguments, loss_fn, samples, world
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

a = arguments(tied=0)
rank, size = world()
torch.manual_seed(a.seed)
model = GPT(layers=4, tied=bool(a.tied))
x, y = samples(a)
if size == 1:
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for i in range(a.steps):
        loss_fn(model(x[i * 8 : i * 8 + 8]), y[i * 8 : i * 8 + 8]).backward()
        opt.step()
        opt.zero_grad()
    raise SystemExit


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.pos, self.layers = model.emb, model.pos, nn.ModuleList(list(model.layers.values())[:2])

    def forward(self, x):
        x = self.emb(x) + self.pos
        for layer in self.layers:
            x = layer(x)
        return x


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.norm, self.head = nn.ModuleList(list(model.layers.values())[2:]), model.norm, model.head

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


part = First() if rank == 0 else Last()
stage = PipelineStage(part, rank, size, torch.device("cpu"))
schedule = ScheduleGPipe(stage, 4, loss_fn=loss_fn, scale_grads=a.bug != "scale")
opt = torch.optim.AdamW(part.parameters(), lr=1e-3)
for i in range(a.steps):
    if rank == 0:
        schedule.step(x[i * 8 : i * 8 + 8])
    else:
        schedule.step(target=y[i * 8 : i * 8 + 8])
    if a.tied and a.bug != "tied":  # the shared embedding: both ends' gradients are summed
        g = part.emb.weight.grad if rank == 0 else part.head.weight.grad
        torch.distributed.all_reduce(g)
    opt.step()
    opt.zero_grad()
