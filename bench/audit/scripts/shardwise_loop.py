"""shardwise's plain loop, with the layout --layout or its own plan."""

import torch
from common import GPT, arguments, loss_fn, samples, world

import shardwise

a = arguments(layout="")
rank, size = world(connect=False)
x, y = samples(a)
data = [(x[i * 8 : i * 8 + 8], y[i * 8 : i * 8 + 8]) for i in range(a.steps)]
torch.manual_seed(a.seed)
model = GPT()
if size > 1:
    model = shardwise.auto_parallelize(model, data[0], plan=a.layout or None)
opt = torch.optim.AdamW(model.parameters(), lr=2e-3 if a.bug == "lr" and size > 1 else 1e-3)
for xs, ys in shardwise.shard(data) if size > 1 else data:
    loss_fn(model(xs), ys).backward()
    opt.step()
    opt.zero_grad()
