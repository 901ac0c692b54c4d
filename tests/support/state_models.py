"""Models whose forward writes their own state: parameters that follow others, queues, codebooks, weights that are held in bounds.

Every factory returns (module, batch), 8 samples in dimension 0. `shardwise verify tests/support/state_models.py:NAME`.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

N = 8  # samples


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _ids(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def _encoder() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8))


class _Contrast(nn.Module):
    """A queue of keys by an encoder that follows the trained one (He et al. 2020): its parameters are assigned through `.data`."""

    queue: Tensor
    pointer: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.queries = _encoder()
        self.keys = deepcopy(self.queries).requires_grad_(False)
        self.register_buffer("queue", F.normalize(_normal(8, 32, seed=3), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.int64))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        query = F.normalize(self.queries(a), dim=1)
        with torch.no_grad():
            for p, k in zip(self.queries.parameters(), self.keys.parameters(), strict=True):
                k.data = k.data * 0.9 + p.data * 0.1
            key = F.normalize(self.keys(b), dim=1)
        alike = torch.einsum("nc,nc->n", query, key).unsqueeze(-1)
        others = torch.einsum("nc,ck->nk", query, self.queue.clone().detach())
        with torch.no_grad():
            self.queue[:, (self.pointer + torch.arange(len(a))) % 32] = key.T
            self.pointer.copy_((self.pointer + len(a)) % 32)
        return F.cross_entropy(torch.cat((alike, others), 1) / 0.07, torch.zeros(len(a), dtype=torch.int64))


def contrast() -> Any:
    return _Contrast(), (_normal(N, 6), _normal(N, 6, seed=1))


class _Bootstrap(nn.Module):
    """A target network that follows by `lerp_`, its batch norm's weights too (Grill et al. 2020); each is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
        self.target = deepcopy(self.online).requires_grad_(False)
        self.predictor = _encoder_of(8)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        with torch.no_grad():
            for p, t in zip(self.online.parameters(), self.target.parameters(), strict=True):
                t.lerp_(p, 0.1)
        loss = torch.zeros(())
        for x, y in ((a, b), (b, a)):
            predicted = F.normalize(self.predictor(self.online(x)), dim=-1)
            with torch.no_grad():
                wanted = F.normalize(self.target(y), dim=-1)
            loss = loss + 2 - 2 * (predicted * wanted).sum(-1).mean()
        return loss


def _encoder_of(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, width))


def bootstrap() -> Any:
    return _Bootstrap(), (_normal(N, 6), _normal(N, 6, seed=1))


class _Teacher(nn.Module):
    """A teacher's parameters moved at once, at the end (Tarvainen and Valpola 2017), and its centre by the batch (Caron et al. 2021)."""

    centre: Tensor
    step: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.student = _encoder()
        self.teacher = deepcopy(self.student).requires_grad_(False)
        self.register_buffer("centre", torch.zeros(1, 8))
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        own = self.student(a)
        with torch.no_grad():
            taught = self.teacher(b)
            wanted = F.softmax((taught - self.centre) / 0.1, -1)
        loss = -(wanted * F.log_softmax(own, -1)).sum(-1).mean()
        with torch.no_grad():
            self.step += 1
            self.centre.mul_(0.9).add_(taught.mean(0, keepdim=True), alpha=0.1)
            theirs, ours = list(self.teacher.parameters()), list(self.student.parameters())
            torch._foreach_mul_(theirs, 0.9)
            torch._foreach_add_(theirs, ours, alpha=0.1)
            for t, p in zip(theirs, ours, strict=True):
                t.copy_(torch.where(self.step % 2 == 0, p, t))  # and every second step it is the student
        return loss


def teacher() -> Any:
    return _Teacher(), (_normal(N, 6), _normal(N, 6, seed=1))


class _Codebook(nn.Module):
    """Codes that follow the mean of what they are chosen for (van den Oord et al. 2017): as parameters that are replaced, as one that is
    written through `.data`, and counts in a buffer. Of divided samples the counts must be those of all."""

    sizes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 8), nn.Linear(8, 6)
        codes = _normal(12, 8, seed=5)
        self.codes, self.sums = nn.Embedding.from_pretrained(codes.clone(), freeze=False), nn.Parameter(codes.clone())
        self.second = nn.Parameter(codes[:4] * 2, requires_grad=False)
        self.register_buffer("sizes", torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        z = self.encode(x)
        flat = z.reshape(-1, 8)
        nearest = torch.cdist(flat, self.codes.weight.detach()).argmin(1)
        chosen = torch.zeros(len(nearest), 12).scatter_(1, nearest[:, None], 1)
        found = torch.matmul(chosen, self.codes.weight.detach()).view_as(z)
        self.sizes = self.sizes * 0.9 + 0.1 * chosen.sum(0)
        total = self.sizes.sum()
        self.sizes = (self.sizes + 1e-5) / (total + 12e-5) * total
        self.sums = nn.Parameter(self.sums * 0.9 + 0.1 * (chosen.t() @ flat))
        self.codes.weight = nn.Parameter(self.sums / self.sizes.unsqueeze(1))
        rest = z - found
        second = self.second[torch.cdist(rest.detach(), self.second).argmin(-1)]
        with torch.no_grad():
            self.second.data.mul_(0.9).add_(rest.mean((0, 1)), alpha=0.1)
        loss = 0.25 * F.mse_loss((found + second).detach(), z)
        return loss + F.mse_loss(self.decode(z + (found + second - z).detach()), x)


def codebook() -> Any:
    return _Codebook(), (_normal(N, 4, 6),)


class _Bounded(nn.Module):
    """Trained weights that are held in bounds while the model runs: by rows, by clipping, by norm, and a table's rows as they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 6, max_norm=1.0)
        self.rows, self.clipped = nn.Linear(6, 16), nn.Linear(16, 16)
        self.prototypes = nn.Linear(16, 5, bias=False)

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        self.rows.weight.data = torch.renorm(self.rows.weight.data, 2, 0, 0.5)
        self.clipped.weight.data.clamp_(-0.1, 0.1)
        hidden = self.clipped(F.relu(self.rows(self.table(ids).mean(1))))
        with torch.no_grad():
            self.prototypes.weight.copy_(F.normalize(self.prototypes.weight, dim=1))
        return F.cross_entropy(self.prototypes(F.normalize(hidden, dim=1)) / 0.1, y)


def bounded() -> Any:
    return _Bounded(), {"ids": _ids(10, N, 3), "y": _ids(5, N)}


class _Parts(nn.Module):
    """Parts in bfloat16 and float16, a block of autocast: in float64 all of it is float64. A number that is written into a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 8).to(torch.bfloat16).requires_grad_(False)
        self.narrow, self.wide = nn.Linear(6, 8).to(torch.float16), nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.frozen(x.to(torch.bfloat16)).float() + self.narrow(x.half()).float()
        with torch.autocast("cpu", torch.bfloat16):
            hidden = F.relu(self.wide(hidden))
        weights = torch.ones(4)
        weights[-1] = 0.1
        return F.cross_entropy(self.head(hidden.float()), y, weight=weights)


def parts() -> Any:
    return _Parts(), {"x": _normal(N, 6), "y": _ids(4, N)}


MODELS = {make.__name__: make for make in (contrast, bootstrap, teacher, codebook, bounded, parts)}
