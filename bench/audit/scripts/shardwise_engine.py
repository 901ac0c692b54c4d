"""shardwise's engine, which owns the step; the serial run is plain PyTorch."""

import torch
from common import GPT, arguments, loss_fn, samples, world

import shardwise

a = arguments(layout="data=2")
rank, size = world(connect=False)
torch.manual_seed(a.seed)
model = GPT()
x, y = samples(a)
if size == 1:
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    for i in range(a.steps):
        loss_fn(model(x[i * 8 : i * 8 + 8]), y[i * 8 : i * 8 + 8]).backward()
        opt.step()
        opt.zero_grad()
else:
    optimizer = {"name": "adamw", "lr": 1e-3, "weight_decay": 0.01}
    engine = shardwise.parallelize(
        model, (x[:8], y[:8]), loss=lambda out, batch: loss_fn(out, batch[1]), optimizer=optimizer, plan=a.layout
    )
    for i in range(a.steps):
        engine.step((x[i * 8 : i * 8 + 8], y[i * 8 : i * 8 + 8]))
