"""The same step with shardwise."""

import torch
from model import GPT, batch
from torch.nn.functional import cross_entropy

import shardwise

torch.manual_seed(0)
data = [batch()]
with shardwise.auto_parallelize(batch=data[0]):
    net = GPT()
opt = torch.optim.AdamW(net.parameters())
for x, y in shardwise.shard(data):
    loss = cross_entropy(net(x).flatten(0, 1), y.flatten())
    loss.backward()
    opt.step()
print(f"step {loss.item():.6f}", flush=True)
