"""Random small models, each by its number: networks of images of any rank, and transformers with any mask, experts of any load.

Numbers give the same model.
"""

from __future__ import annotations

import random
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.capture.experts import from_experts, of_experts, to_experts
from shardwise.plan.ir.grid import grids_of
from shardwise.plan.layout import Layout

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
SPREAD = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
MAX, MEAN = ({1: f"{kind}Pool1d", 2: f"{kind}Pool2d", 3: f"{kind}Pool3d"} for kind in ("Max", "Avg"))
BATCH_NORM = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
INSTANCE_NORM = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}
DROP_CHANNELS = {1: nn.Dropout1d, 2: nn.Dropout2d, 3: nn.Dropout3d}
ACTIVATIONS = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh)


class Around(nn.Module):
    """A layer, and what goes round it."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Beside(nn.Module):
    """Layers beside one another, joined by channels."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], 1)


class Images(nn.Module):
    """Random layers one after another; then a class of each place, or one of the image."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.dims = rng.choice([1, 2, 2, 2, 3])
        self.sizes = [rng.randint(6, 9) if self.dims == 3 else rng.randint(9, 23) for _ in range(self.dims)]
        self.image = list(self.sizes)
        self.channels, self.dense = rng.randint(1, 4), rng.random() < 0.4
        made, self.given = [], self.channels
        for _ in range(rng.randint(2, 6)):
            layer = self._layer(rng)
            with torch.no_grad():
                out = layer.eval()(torch.zeros(2, self.channels, *self.sizes))
            self.channels, self.sizes = out.shape[1], list(out.shape[2:])
            made.append(layer.train())
        self.body = nn.Sequential(*made)
        self.head = CONV[self.dims](self.channels, 3, 1) if self.dense else nn.Linear(self.channels, 3)

    def _layer(self, rng: random.Random) -> nn.Module:
        c, dims = self.channels, self.dims
        kind = rng.choice(["conv", "conv", "conv", "pool", "norm", "act", "around", "beside", "beside", "up", "spread", "drop"])
        least = min(self.sizes)
        if kind == "pool" and least >= 4:
            k = rng.randint(2, 3)
            s, p = rng.randint(1, k), rng.randint(0, k // 2)
            if rng.random() < 0.5:
                return getattr(nn, MAX[dims])(k, s, p)
            return getattr(nn, MEAN[dims])(k, s, p, count_include_pad=rng.random() < 0.5)
        if kind == "norm" and prod(self.sizes) >= 9:  # statistics of two or three values amplify rounding
            group = next(g for g in (3, 2, 1) if c % g == 0)
            return rng.choice([BATCH_NORM[dims](c), INSTANCE_NORM[dims](c, affine=True), nn.GroupNorm(group, c)])
        if kind == "act":
            return rng.choice(ACTIVATIONS)()
        if kind == "drop":
            return rng.choice([nn.Dropout, DROP_CHANNELS[dims]])(0.2)
        if kind == "around":
            k = rng.choice([1, 3, 5])
            return Around(nn.Sequential(CONV[dims](c, c, k, padding=k // 2), rng.choice(ACTIVATIONS)()))
        if kind == "beside":
            return Beside(*(CONV[dims](c, rng.randint(1, 4), k, padding=k // 2) for k in rng.sample([1, 3, 5], 2)))
        if kind == "up" and max(self.sizes) <= 24:
            return nn.Upsample(scale_factor=2, mode="nearest")
        if kind == "spread" and max(self.sizes) <= 20:
            k = rng.randint(2, 4)
            return SPREAD[dims](c, rng.randint(1, 4), k, stride=rng.randint(1, 2), padding=rng.randint(0, (k - 1) // 2))
        return self._conv(rng)

    def _conv(self, rng: random.Random) -> nn.Module:
        c, least = self.channels, min(self.sizes)
        k = rng.randint(1, min(5, least))
        d = rng.randint(1, 2) if (k - 1) * 2 < least else 1
        groups = rng.choice([g for g in (1, 1, 2, c) if c % g == 0])
        out = groups * rng.randint(1, 4)
        stride = rng.randint(1, 3) if least > 6 else 1
        mode = "zeros" if rng.random() < 0.8 else "reflect"
        padding = rng.randint(0, min(k * d // 2, least - 1))
        return CONV[self.dims](c, out, k, stride, padding, d, groups, bias=rng.random() < 0.7, padding_mode=mode)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.body(x)
        if self.dense:
            return F.mse_loss(self.head(x), torch.zeros((), dtype=x.dtype).expand(x.shape[0], 3, *x.shape[2:]))
        return F.cross_entropy(self.head(x.mean(tuple(range(2, x.dim())))), y)


class Attention(nn.Module):
    """Heads that share keys in groups, under a mask of any kind."""

    def __init__(self, rng: random.Random, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads, self.width = heads, hidden // heads
        self.kv = rng.choice([g for g in range(1, heads + 1) if heads % g == 0])
        self.mask = rng.choice(["causal", "none", "padding", "window"])
        self.dropout = rng.choice([0.0, 0.0, 0.2])
        bias = rng.random() < 0.5
        self.q, self.k = nn.Linear(hidden, hidden, bias=bias), nn.Linear(hidden, self.kv * self.width, bias=bias)
        self.v, self.o = nn.Linear(hidden, self.kv * self.width, bias=bias), nn.Linear(hidden, hidden, bias=bias)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (f(x).view(b, s, -1, self.width).transpose(1, 2) for f in (self.q, self.k, self.v))
        mask = None
        if self.mask == "padding":
            mask = (ids != 0)[:, None, None, :] | torch.eye(s, dtype=torch.bool)
        if self.mask == "window":
            at = torch.arange(s)
            mask = (at[:, None] - at[None, :]).abs() <= 2
        k, v = (t.repeat_interleave(self.heads // self.kv, 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, mask, self.dropout, self.mask == "causal")
        return self.o(y.transpose(1, 2).reshape(b, s, -1))


class Mixture(nn.Module):
    """Each token through some of the experts: of any number, of which some have most tokens and some have none, with room or without."""

    def __init__(self, rng: random.Random, hidden: int) -> None:
        super().__init__()
        self.experts = rng.randint(2, 9)
        self.top = rng.randint(1, min(3, self.experts))
        inner = rng.randint(2, 2 * hidden)
        self.gate = nn.Linear(hidden, self.experts)
        self.up, self.down = (nn.Parameter(0.3 * torch.randn(self.experts, *shape)) for shape in ((inner, hidden), (hidden, inner)))
        with torch.no_grad():  # the first have most
            self.gate.bias += rng.choice([0.0, 0.5, 5.0]) * torch.linspace(1, -1, self.experts)
        self.bias = nn.Parameter(torch.randn(self.experts, inner)) if rng.random() < 0.5 else None
        self.dense = rng.random() < 0.3
        self.act = rng.choice(ACTIVATIONS)()
        self.between = rng.choice(["", "", "", "norm", "heads", "mean", "sum", "running"])  # what is done to rows of experts

    def _rows(self, rows: Tensor) -> Tensor:
        """Each by itself, or with all others."""
        if self.between == "norm":
            return rows * rows.square().mean(-1, keepdim=True).add(1e-3).rsqrt().expand(rows.shape)
        if self.between == "heads":
            return rows.unflatten(-1, (1, -1)).softmax(-1).flatten(1)
        of_all = {"mean": lambda: rows.mean(0), "sum": lambda: rows.sum(0) / 64, "running": lambda: rows.cumsum(0) / 64}
        return rows - of_all[self.between]() if self.between else rows

    def forward(self, x: Tensor) -> Tensor:
        best, which = self.gate(x).softmax(-1).flatten(0, -2).topk(self.top, -1)
        rows = x.flatten(0, -2)
        if self.dense:  # every expert has all tokens, and a mask
            weight = torch.zeros(len(rows), self.experts, dtype=x.dtype).scatter(1, which, best)
            inner = self.act(torch.bmm(rows.expand(self.experts, -1, -1), self.up.transpose(1, 2)))
            made = (torch.bmm(inner, self.down.transpose(1, 2)) * weight.t().unsqueeze(-1)).sum(0)
        else:
            sent, ids, order = to_experts(rows, which, self.experts)
            inner = self._rows(self.act(of_experts(sent, ids, self.up, self.bias, False)))
            made = from_experts(of_experts(inner, ids, self.down, None, False), order, best, self.experts)
        y: Tensor = made.view_as(x)
        return y


class Text(nn.Module):
    """Blocks of attention and of products of any width, before or behind norms, or of experts."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.length, self.words = rng.randint(5, 17), rng.randint(11, 40)
        heads = rng.randint(1, 6)
        hidden = heads * rng.choice([2, 3, 4, 8])
        norm = rng.choice([nn.LayerNorm, nn.RMSNorm])
        self.tokens = nn.Embedding(self.words, hidden)
        self.places = nn.Embedding(self.length, hidden) if rng.random() < 0.7 else None
        self.attention, self.mlp, self.norms = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for _ in range(rng.randint(1, 3)):
            inner = rng.randint(3, 3 * hidden)
            self.attention.append(Attention(rng, hidden, heads))
            drop, mixed = rng.choice([0.0, 0.0, 0.2]), rng.random() < 0.4
            plain = nn.Sequential(nn.Linear(hidden, inner), rng.choice(ACTIVATIONS)(), nn.Linear(inner, hidden), nn.Dropout(drop))
            self.mlp.append(Mixture(rng, hidden) if mixed else plain)
            self.norms.append(nn.ModuleList([norm(hidden), norm(hidden)]))
        self.head = nn.Linear(hidden, self.words, bias=rng.random() < 0.3)
        if rng.random() < 0.5:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids)
        if self.places is not None:
            x = x + self.places(torch.arange(ids.shape[1]))
        for attention, mlp, norms in zip(self.attention, self.mlp, self.norms, strict=True):
            x = x + attention(norms[0](x), ids)
            x = x + mlp(norms[1](x))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-100)


def make(seed: int) -> nn.Module:
    """The model of a number."""
    torch.manual_seed(seed)
    return (Images if seed % 2 else Text)(seed)


def batch_of(seed: int) -> tuple[Tensor, Tensor]:
    """What it is called with."""
    rng, generator = random.Random(seed + 1), torch.Generator().manual_seed(seed)
    size, model = rng.choice([4, 6, 8, 8, 12]), make(seed)
    if isinstance(model, Images):
        x = torch.randn((size, model.given, *model.image), generator=generator)
        return x, torch.randint(3, (size,), generator=generator)
    assert isinstance(model, Text)
    ids = torch.randint(model.words, (size, model.length), generator=generator)
    ids[:, model.length - 2 :] *= torch.randint(2, (size, 1), generator=generator)  # padded with word 0
    labels = torch.where(torch.rand(ids.shape, generator=generator) < 0.2, -100, ids)
    labels[0, 0] = 1
    return ids, labels


def layout_of(seed: int, ranks: int, variant: int = 0) -> Layout:
    """A layout of so many ranks, every key drawn by itself; it may be one that shardwise refuses. Raises LayoutError for words that exclude
    each other. `variant`: which of many layouts of one model."""
    drawn = seed + (variant << 40)
    rng = random.Random(drawn + 2)
    axes: dict[str, Any] = dict.fromkeys(("data", "tensor", "pipeline", "spatial", "channel", "branch", "expert"), 1)
    images = ["data", "tensor", "pipeline", "spatial", "spatial", "channel", "branch"]
    text = ["data", "tensor", "tensor", "pipeline", "branch"]
    mixed = seed % 2 == 0 and any(isinstance(part, Mixture) for part in make(seed).modules())
    for prime in _primes(ranks):
        axis = rng.choice(images if seed % 2 else [*text, *(["expert"] * 3 if mixed else [])])
        for name in ("data", "expert") if axis == "expert" else (axis,):
            axes[name] *= prime
    context, attention = _context_of(drawn, axes)
    spatial, tensor = axes["spatial"], axes["tensor"]
    where = rng.choice([f"{spatial}", f"{spatial}x1", f"1x{spatial}"]) if spatial > 1 else "1"
    by_samples = random.Random(drawn + 4).random() < 0.25 and tensor > 1
    return Layout(
        axes["data"], tensor, axes["pipeline"], rng.choice([1, 2, 4]) if axes["pipeline"] > 1 else rng.choice([1, 1, 2]),
        rng.choice(["1f1b", "gpipe", "zb-h1"]) if axes["pipeline"] > 1 else "1f1b", rng.randrange(4), rng.choice(["none", "none", "full"]),
        "float64", sequence_parallel=rng.choice(["off", "on"]) if tensor > 1 else "off", spatial=where,
        context=context, attention=attention, channel=axes["channel"], branch=axes["branch"], expert=axes["expert"],
        grid=rng.choice(["", *grids_of(tensor)]) if rng.random() < 0.5 else "", sample_parallel="on" if by_samples else "off",
    )  # fmt: skip


def _primes(number: int) -> list[int]:
    found = []
    for prime in (2, 3, 5, 7):
        while number % prime == 0:
            found.append(prime)
            number //= prime
    return found


def _context_of(seed: int, axes: dict[str, int]) -> tuple[int, str]:
    """Ranks that share a sequence, in place of some along another axis: of half of the transformers."""
    rng = random.Random(seed + 3)
    free = [axis for axis, n in axes.items() if n > 1 and not (axis in ("data", "expert") and axes["expert"] > 1)]
    if seed % 2 or not free or rng.random() < 0.5:
        return 1, "auto"
    taken = rng.choice(free)
    context = rng.choice([_primes(axes[taken])[0], axes[taken]])
    axes[taken] //= context
    return context, rng.choice(["ring", "ring", "ulysses", "gather", "auto"])
