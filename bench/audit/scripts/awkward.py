"""Scripts that hooks find hard: --case lazy, two (optimizers), amp (bfloat16 autocast), recompute, scaler."""

import torch
from common import GPT, VOCAB, arguments, loss_fn, samples, world
from torch import nn
from torch.utils.checkpoint import checkpoint

a = arguments(case="")
rank, size = world()
torch.manual_seed(a.seed)
model = GPT()
if a.case == "lazy":
    model.head = nn.LazyLinear(VOCAB)
    if size > 1:
        model(samples(a)[0][:1])
if a.case == "recompute":
    for block in model.layers.values():
        block.inner, block.forward = block.forward, lambda x, b=block: checkpoint(b.inner, x, use_reentrant=False)
if size > 1:
    model = nn.parallel.DistributedDataParallel(model)
p = list(model.parameters())
opts = [torch.optim.SGD(p[:5], lr=0.1), torch.optim.AdamW(p[5:], lr=1e-3)] if a.case == "two" else [torch.optim.AdamW(p, lr=1e-3)]
scaler = torch.amp.GradScaler("cpu", enabled=a.case == "scaler")
x, y = samples(a)
for i in range(a.steps):
    rows = slice(i * 8 + rank * a.batch, i * 8 + (rank + 1) * a.batch)
    with torch.autocast("cpu", torch.bfloat16, enabled=a.case == "amp"):
        loss = loss_fn(model(x[rows]).float(), y[rows])
    scaler.scale(loss).backward()
    if a.bug == "amp" and size > 1:
        for q in p:
            q.grad.mul_(1.5)
    for o in opts:
        scaler.step(o)
    scaler.update()
    for o in opts:
        o.zero_grad()
