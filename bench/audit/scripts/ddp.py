"""Plain PyTorch: serial, or DistributedDataParallel (or FSDP1, or by hand) under torchrun; --bug plants a fault."""

import contextlib

import torch
import torch.nn.functional as F
from common import DIM, GPT, VOCAB, Block, arguments, loss_fn, samples, world
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

a = arguments(accum=1, compile=0, fsdp1=0, rows=64, bn=0, tied=0, dropout=0.0, zero=0, clip=0.0)
rank, size = world()
torch.manual_seed(a.seed + (rank if a.bug == "seed" else 0))
UNEVEN = ("tokens", "tokens_fixed", "accum_tokens")
BY_HAND = ("seed", "sum", "zero_broadcast", "by_hand", "clip_first", "left_out", "stale", "half")  # gradients are reduced by the script


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, VOCAB)

    def forward(self, x):
        return self.head(F.relu(self.norm(self.conv(x))).mean((2, 3)))[:, None]


def wrap(model):
    if a.fsdp1:
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        policy = ModuleWrapPolicy({Block})
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=a.fsdp1 == 2, auto_wrap_policy=policy)
    if a.bug in ("nowrap", *BY_HAND):
        return model
    return DistributedDataParallel(model, find_unused_parameters=a.bug == "outside")


class Tracked(GPT):
    """With a running mean of a weight, which every rank must keep alike."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(DIM))

    def forward(self, x):
        if a.bug != "stale" or rank == 0:
            self.mean.lerp_(self.emb.weight.detach().mean(0), 0.1)
        return super().forward(x)


if a.bn:
    g = torch.Generator().manual_seed(a.seed + 1)
    x, y = torch.randn(64, 3, 8, 8, generator=g), torch.randint(0, VOCAB, (64,), generator=g)
    model = Net()
    model.norm.momentum = 0.3 if a.bug == "momentum" and size > 1 else 0.1
else:
    model = Tracked() if a.bug == "stale" else GPT(tied=bool(a.tied), dropout=a.dropout)
    x, y = samples(a, a.rows, uneven=a.bug in UNEVEN)
head = nn.Linear(VOCAB, VOCAB) if a.bug == "outside" else nn.Identity()  # a layer that is not in the wrapped module
plain, params = model, [*model.parameters(), *head.parameters()]
if a.compile:
    model = torch.compile(model, backend="aot_eager")
if size > 1:
    model = wrap(model)
    params = [*model.parameters(), *head.parameters()]
lr = 1e-3 * (2 if a.bug == "lr" and size > 1 else 1)
decay = 0.3 if a.bug == "decay" and size > 1 else 0.1
if a.zero and size > 1:
    opt = ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=lr, weight_decay=decay)
else:
    own = params[rank::2] if a.bug == "zero_broadcast" and size > 1 else params
    own = params[:-1] if a.bug == "left_out" and rank == 1 else own
    betas = (0.9, 0.95) if a.bug == "betas" and size > 1 else (0.9, 0.999)
    opt = torch.optim.AdamW(own, lr=lr, weight_decay=decay, betas=betas)
schedule = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5) if a.bug == "schedule" else None
sampler = DistributedSampler(range(len(x)), size, 0 if a.bug == "samedata" else rank, seed=3)
if a.bug == "momentum":  # every rank reads the whole batch
    sampler = DistributedSampler(range(len(x)), 1, 0, seed=3)
loader = DataLoader(TensorDataset(x, y), batch_size=a.batch, sampler=sampler)


def micro_loss(xm, ym, ys):
    if a.bug == "tokens_fixed":
        count = (ys != -100).sum()
        if size > 1:
            torch.distributed.all_reduce(count)
        return F.cross_entropy(model(xm).flatten(0, 1), ym.flatten(), ignore_index=-100, reduction="sum") * size / count
    if a.bug == "targets" and rank == 1:
        ym = (ym + 1) % VOCAB
    if a.bug == "smoothing" and size > 1:
        return F.cross_entropy(head(model(xm)).flatten(0, 1), ym.flatten(), label_smoothing=0.1)
    return loss_fn(head(model(xm)), ym) / (1 if a.bug == "accum" and size > 1 else a.accum)


def reduce_by_hand():
    for p in params:
        sums = p.grad.bfloat16() if a.bug == "half" else p.grad
        torch.distributed.all_reduce(sums)
        p.grad = sums.float()
        p.grad /= 1 if a.bug == "sum" else size


step = 0
for epoch in range(100):
    if a.bug != "setepoch" or size == 1:
        sampler.set_epoch(epoch)
    for xs, ys in loader:
        parts = list(zip(xs.chunk(a.accum), ys.chunk(a.accum), strict=True))
        for i, (xm, ym) in enumerate(parts):
            waits = size > 1 and a.accum > 1 and (i < len(parts) - 1 or a.bug == "no_sync")
            with model.no_sync() if waits else contextlib.nullcontext():
                micro_loss(xm, ym, ys).backward()
        if a.bug == "clip_first" and size > 1:
            torch.nn.utils.clip_grad_norm_(params, 0.1)
        if size > 1 and a.bug in BY_HAND:
            reduce_by_hand()
        if a.clip and not (a.bug == "clip_first" and size > 1):
            torch.nn.utils.clip_grad_norm_(params, a.clip)
        opt.step()
        if schedule is not None:
            for _ in range(size):
                schedule.step()
        if a.bug != "zero_grad" or size == 1:
            opt.zero_grad()
        step += 1
        if step == a.steps:
            raise SystemExit
