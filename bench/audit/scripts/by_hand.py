"""Tensor and sequence parallelism by hand, as Megatron does it: plain tensors, no annotation; --bug plants a fault."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import DIM, GPT, Block, arguments, loss_fn, samples, world
from torch import nn

a = arguments(dropout=0.0)
rank, size = world()


class Gather(torch.autograd.Function):  # sequence -> whole; backward reduce-scatter
    @staticmethod
    def forward(ctx, x):
        out = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(out, x.contiguous())
        return torch.cat(out, 1)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous()
        dist.all_reduce(g)
        return g.chunk(size, 1)[rank]


class Scatter(torch.autograd.Function):  # partial -> sequence, summed; backward all-gather
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        dist.all_reduce(x)
        return x.chunk(size, 1)[rank].contiguous()

    @staticmethod
    def backward(ctx, g):
        return Gather.forward(None, g)


class ShardedBlock(Block):
    def forward(self, x):
        h = Gather.apply(self.ln1(x))
        x = x + Scatter.apply(self.attn(h)) + self.attn_bias
        h = Gather.apply(self.ln2(x))
        h = self.down(self.drop(F.gelu(self.up(h)))) if a.bug != "replicas" else self.down(F.gelu(self.up(self.drop(h))))
        if a.bug == "bias":  # added by every rank, before the sum
            return x + Scatter.apply(h + self.down_bias)
        return x + Scatter.apply(h) + self.down_bias


class SerialBlock(Block):
    def forward(self, x):
        x = x + self.attn(self.ln1(x)) + self.attn_bias
        h = self.ln2(x)
        h = self.down(self.drop(F.gelu(self.up(h)))) if a.bug != "replicas" else self.down(F.gelu(self.up(self.drop(h))))
        return x + h + self.down_bias


torch.manual_seed(a.seed)
model = GPT(dropout=a.dropout)
for block in model.layers.values():
    block.attn.o, block.down = nn.Linear(DIM, DIM, bias=False), nn.Linear(4 * DIM, DIM, bias=False)
    block.attn_bias, block.down_bias = nn.Parameter(torch.zeros(DIM)), nn.Parameter(torch.full((DIM,), 0.1))
    block.__class__ = ShardedBlock if size > 1 else SerialBlock
shared = []


def shard(p, dim):
    return nn.Parameter(p.detach().chunk(size, dim)[rank].clone())


if size > 1:
    for block in model.layers.values():
        for m in (block.attn.q, block.attn.k, block.attn.v, block.up):
            m.weight, m.bias = shard(m.weight, 0), shard(m.bias, 0)
        for m in (block.attn.o, block.down):
            m.weight = shard(m.weight, 1)
        shared += [*block.ln1.parameters(), *block.ln2.parameters(), block.attn_bias, block.down_bias]
    shared += list(model.norm.parameters())
    model.pos = shard(model.pos, 0)
    # The same state on every rank draws the same masks where the hidden units are divided.
    torch.manual_seed(7 if a.bug == "mask" else 7 + rank)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
x, y = samples(a)
for i in range(a.steps):
    xs, ys = x[i * a.batch : (i + 1) * a.batch], y[i * a.batch : (i + 1) * a.batch]
    if size > 1:
        xs, ys = xs.chunk(size, 1)[rank], ys.chunk(size, 1)[rank]
    (loss_fn(model(xs), ys) / size).backward()
    if size > 1:
        for p in shared * (a.bug != "ln") + [model.emb.weight, model.head.weight]:
            dist.all_reduce(p.grad)
    opt.step()
    opt.zero_grad()
