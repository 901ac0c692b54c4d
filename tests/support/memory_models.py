"""Models whose memory was predicted wrong once, by what they hold: complex numbers, running products, values that follow no samples,
casts, look-ups. Every factory returns (module, batch) and draws from its own generator only."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

N = 8  # samples


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _ids(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


class _StateSpace(nn.Module):
    """A diagonal state space (Gu et al. 2022): its kernel is complex and of parameters alone, and applied by Fourier transforms."""

    def __init__(self, width: int = 64, states: int = 16) -> None:
        super().__init__()
        self.step = nn.Parameter(_normal(width) * 0.1 - 4)
        self.decay, self.turn = (
            nn.Parameter(_normal(width, states) * 0.1),
            nn.Parameter(torch.arange(float(states)).repeat(width, 1) * math.pi),
        )
        self.weight = nn.Parameter(_normal(width, states, 2, seed=1) * 0.3)
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        rate = (1j * self.turn - self.decay.exp()) * self.step.exp()[:, None]
        powers = torch.exp(rate[..., None] * torch.arange(length))
        kernel = 2 * torch.einsum("hn,hnl->hl", torch.view_as_complex(self.weight), powers).real
        signal = self.norm(x).transpose(1, 2)
        made = torch.fft.irfft(torch.fft.rfft(signal, n=2 * length) * torch.fft.rfft(kernel, n=2 * length), n=2 * length)[..., :length]
        return x + self.out(F.gelu(made).transpose(1, 2))


class _Layers(nn.Module):
    def __init__(self, layers: list[nn.Module], width: int) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(width, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(self.head(x.mean(1))[:, 0], y)


def state_space() -> Any:
    return _Layers([_StateSpace() for _ in range(2)], 64), {"x": _normal(N, 128, 64), "y": _normal(N)}


class _Rays(nn.Module):
    """What is seen along rays (Mildenhall et al. 2020): transmittance is a running product, depth a running sum."""

    def __init__(self, width: int = 8, points: int = 512) -> None:
        super().__init__()
        self.body, self.points = nn.Linear(3, width), points
        self.density, self.colour = nn.Linear(width, 1), nn.Linear(width, 3)

    def forward(self, at: Tensor, to: Tensor, seen: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(at[:, None] + to[:, None] * torch.linspace(0.0, 1.0, self.points)[:, None]))
        passes = torch.exp(-F.softplus(self.density(hidden)[..., 0]) / self.points)
        weight = (1 - passes) * torch.cumprod(passes, -1)
        colour = (weight[..., None] * torch.sigmoid(self.colour(hidden))).sum(1)
        return F.mse_loss(colour, seen) + weight.cumsum(-1).abs().mean()


def rays() -> Any:
    return _Rays(), {"at": _normal(128, 3), "to": _normal(128, 3, seed=1), "seen": _normal(128, 3, seed=2)}


class _Latents(nn.Module):
    """Latents that start alike for all samples (Jaegle et al. 2021) look at them: replicas compute what comes before they do alike."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.start, self.enter = nn.Parameter(_normal(48, width)), nn.Linear(16, width)
        self.first, self.look = nn.Linear(width, width), nn.MultiheadAttention(width, 4, batch_first=True)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(3)
        )
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found, seen = self.first(self.start.expand(x.shape[0], -1, -1)), self.enter(x)
        found = found + self.look(found, seen, seen, need_weights=False)[0]
        for layer in self.layers:
            found = found + layer(found)
        return F.cross_entropy(self.head(found.mean(1)), y)


def latents() -> Any:
    return _Latents(), {"x": _normal(N, 128, 16), "y": _ids(5, N)}


class _Tables(nn.Module):
    """Look-ups of many tables (Naumov et al. 2019), into which no gradient goes further."""

    def __init__(self, rows: int = 3000, width: int = 16) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(6))
        self.body = nn.Sequential(nn.Linear(6 * width, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.body(torch.cat([table(ids[:, i]) for i, table in enumerate(self.tables)], 1))[:, 0], y)


def tables() -> Any:
    return _Tables(), {"ids": _ids(3000, 64, 6, 5), "y": _normal(64)}


class _Gate(nn.Module):
    """Halves of which one gates the other, over positions (Liu et al. 2021): tensor ranks gather what they read."""

    def __init__(self, positions: int = 64, width: int = 64) -> None:
        super().__init__()
        self.norm, self.inner, self.mix = nn.LayerNorm(width), nn.LayerNorm(2 * width), nn.Conv1d(positions, positions, 1)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        one, other = F.gelu(self.up(self.norm(x))).chunk(2, -1)
        return x + self.down(one * self.mix(self.inner(other)))


def gated() -> Any:
    return _Layers([_Gate() for _ in range(3)], 64), {"x": _normal(N, 64, 64), "y": _normal(N)}


class _Block(nn.Module):
    """Convolutions, norms, joined branches."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.norm, self.other = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.GroupNorm(4, width)
        self.one, self.two, self.last = (
            nn.Conv2d(width, width, 1),
            nn.Conv2d(width, width, 3, padding=2, dilation=2),
            nn.Conv2d(2 * width, width, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(self.norm(self.first(x)))
        return x + F.relu(self.other(self.last(torch.cat([self.one(hidden), self.two(hidden)], 1))))


class _Images(nn.Module):
    """Blocks, and pooling in three dimensions, which autocast leaves in float32."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = (
            nn.Conv2d(3, width, 3, padding=1),
            nn.Sequential(*(_Block(width) for _ in range(3))),
            nn.Linear(width * 2, 5),
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        pooled = F.max_pool3d(self.blocks(self.stem(x)), 2)
        return F.cross_entropy(self.head(F.adaptive_avg_pool2d(pooled, 2).flatten(1)), y)


def images() -> Any:
    return _Images(), {"x": _normal(N, 3, 32, 32), "y": _ids(5, N)}


class _Heads(nn.Module):
    """Attention whose mask learns, by products, exponentials and norms that are written out."""

    def __init__(self, width: int = 64, heads: int = 4, positions: int = 64) -> None:
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads
        self.places, self.scale = nn.Parameter(_normal(heads, positions, positions) * 0.1), nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        kept = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(kept).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, self.places).transpose(1, 2).flatten(2))


def heads() -> Any:
    return _Layers([_Heads() for _ in range(3)], 64), {"x": _normal(N, 64, 64), "y": _normal(N)}


class _Ways(nn.Module):
    """A recurrent layer that goes both ways."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.words, self.both = nn.Embedding(64, width), nn.LSTM(width, width, 1, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, 64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.both(self.words(x))[0]).flatten(0, 1), y.flatten())


def both_ways() -> Any:
    return _Ways(), {"x": _ids(64, N, 64), "y": _ids(64, N, 64, seed=1)}


class _Slots(nn.Module):
    """Experts by products that change the order of their letters, around GELU: its gradient comes in another order than it lies in."""

    def __init__(self, width: int = 48, experts: int = 4) -> None:
        super().__init__()
        self.up = nn.Parameter(_normal(experts, width, 4 * width) * 0.1)
        self.down = nn.Parameter(_normal(experts, 4 * width, width, seed=1) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.einsum("bteh,ehd->bted", F.gelu(torch.einsum("btd,edh->bteh", x, self.up)), self.down).mean(2)


def slots() -> Any:
    return _Layers([_Slots() for _ in range(2)], 48), {"x": _normal(N, 64, 48), "y": _normal(N)}


class _Points(nn.Module):
    """Convolutions that are products, of so many samples that oneDNN makes them."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(3, width, 1), nn.Conv1d(width, 2 * width, 1), nn.Conv1d(2 * width, 2 * width, 1))
        self.head = nn.Linear(2 * width, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(x).mean(-1)), y)


def points() -> Any:
    return _Points(), {"x": _normal(4 * N, 3, 256), "y": _ids(5, 4 * N)}


class _Depthwise(nn.Module):
    """A depthwise convolution of a large window whose channels lie innermost."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.wide, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(self.wide(x).permute(0, 2, 3, 1))))).permute(0, 3, 1, 2)


class _Tiles(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(3, width, 4, 4), nn.ModuleList(_Depthwise(width) for _ in range(3))
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), y)


def tiles() -> Any:
    return _Tiles(), {"x": _normal(N, 3, 64, 64), "y": _ids(5, N)}


class _Written(nn.Module):
    """Attention that is written out, which selective recomputation repeats."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.qkv, self.out, self.heads, self.norm = nn.Linear(width, 3 * width), nn.Linear(width, width), heads, nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        weights = (q @ k.transpose(-1, -2) * 0.25).softmax(-1)
        return x + self.out((weights @ v).transpose(1, 2).flatten(2))


def written() -> Any:
    return _Layers([_Written() for _ in range(3)], 64), {"x": _normal(N, 128, 64), "y": _normal(N)}


class _Wide(nn.Module):
    """What a stage hands to the next is large beside what it keeps."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return F.mse_loss(x.mean((1, 2)), y)


def wide() -> Any:
    return _Wide(), {"x": _normal(N, 512, 256), "y": _normal(N)}


class _Tagger(nn.Module):
    """Two layers both ways: the second reads twice what a direction's state is wide."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(width, width, 2, batch_first=True, bidirectional=True, dropout=0.2), nn.Linear(2 * width, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.lstm(x)[0]).flatten(0, 1), y.flatten())


def tagger() -> Any:
    return _Tagger(), {"x": _normal(N, 96, 64), "y": _ids(5, N, 96)}


class _Letters(nn.Module):
    """Attention over an image's places by letters: the gradient of its weights comes turned."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.qkv, self.out = nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = self.qkv(x).flatten(2).unflatten(1, (3, 2, -1)).unbind(1)
        weights = torch.softmax(torch.einsum("bhcn,bhcm->bhnm", q, k) * 0.3, -1)
        return F.mse_loss(x + self.out(torch.einsum("bhnm,bhcm->bhcn", weights, v).reshape(x.shape)), y)


def letters() -> Any:
    return _Letters(), {"x": _normal(N, 16, 16, 16), "y": _normal(N, 16, 16, 16, seed=1)}


def dropping() -> Any:
    """Attention with dropout, composed for want of a kernel: it keeps copies of queries and keys beside one tensor of all three."""
    return _Layers([nn.TransformerEncoderLayer(96, 4, 256, dropout=0.1, batch_first=True) for _ in range(3)], 96), {
        "x": _normal(N, 96, 96),
        "y": _normal(N),
    }


class _Neighbours(nn.Module):
    """Edges to the nearest points: the gradient of what is gathered is added up in float32 whatever its dtype."""

    def __init__(self, width: int = 16, near: int = 4) -> None:
        super().__init__()
        self.first, self.edges, self.near = nn.Conv1d(3, width, 1), nn.Conv2d(2 * width, width, 1), near

    def forward(self, points: Tensor, y: Tensor) -> Tensor:
        x = self.first(points)
        places = x.transpose(1, 2)
        near = torch.cdist(places, places).detach().topk(self.near, -1, largest=False).indices
        found = torch.gather(x[:, :, None].expand(-1, -1, x.shape[-1], -1), 3, near[:, None].expand(-1, x.shape[1], -1, -1))
        edges = self.edges(torch.cat([found, x[..., None].expand_as(found) - found], 1))
        return F.mse_loss(edges.amax(-1).mean((1, 2)), y)


def neighbours() -> Any:
    return _Neighbours(), {"points": _normal(N, 3, 128), "y": _normal(N)}


class _Cells(nn.Module):
    """Steps of a recurrence one by one: under autocast the state stays as narrow as it was."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first, self.cell, self.head = nn.Linear(16, width), nn.GRUCell(width, width), nn.Linear(width, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x).flatten(0, 1)
        for _ in range(4):
            h = self.cell(F.relu(h), h)
        return F.mse_loss(self.head(h).unflatten(0, x.shape[:2]).mean((1, 2)), y)


def cells() -> Any:
    return _Cells(), {"x": _normal(N, 128, 16), "y": _normal(N)}


class _Masked(nn.Module):
    """Attention under a mask of truths, of which torch makes what is added to the scores."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(3))

    def forward(self, x: Tensor, seen: Tensor, y: Tensor) -> Tensor:
        mask = seen[:, None, None] | torch.eye(x.shape[1], dtype=torch.bool)
        for layer in self.layers:
            q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in layer(x).chunk(3, -1))
            x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        return F.mse_loss(x.mean((1, 2)), y)


def masked() -> Any:
    return _Masked(), {"x": _normal(N, 128, 32), "seen": _ids(2, N, 128).bool(), "y": _normal(N)}


class _Maps(nn.Module):
    """Dropout of channels, which keeps a number a channel."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.dropout2d(F.silu(layer(x)), 0.2)
        return F.mse_loss(x.mean((1, 2, 3)), y)


def maps() -> Any:
    return _Maps(), {"x": _normal(N, 16, 32, 32), "y": _normal(N)}


class _Narrowing(nn.Module):
    """Layers whose results become narrower: what a stage keeps hangs on where it stands."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(a, b), nn.GELU(), nn.LayerNorm(b)) for a, b in pairwise(widths))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x.mean((1, 2)), y)


def narrowing() -> Any:
    return _Narrowing(64, 512, 512, 64, 64, 32, 32, 256, 16), {"x": _normal(N, 128, 64), "y": _normal(N)}


class _Convolved(nn.Module):
    """Convolutions one behind another, each with a norm."""

    def __init__(self, *convolutions: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Sequential(c, nn.GroupNorm(4, c.out_channels), nn.ReLU()) for c in convolutions))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.body(x).flatten(1).mean(1), y)


def volumes() -> Any:
    layers = [nn.Conv3d(a, b, 3, padding=1, bias=False) for a, b in ((1, 16), (16, 32), (32, 32), (32, 32))]
    return _Convolved(*layers), {"x": _normal(N, 1, 8, 16, 16), "y": _normal(N)}


def frames() -> Any:
    windows = [(1, 3, 3), (3, 1, 1), (1, 3, 3), (3, 1, 1)]
    layers = [nn.Conv3d(3 if not i else 32, 32, k, padding=tuple(n // 2 for n in k), bias=False) for i, k in enumerate(windows)]
    return _Convolved(*layers), {"x": _normal(N, 3, 8, 16, 16), "y": _normal(N)}


def waves() -> Any:
    layers = [nn.Conv1d(1, 64, 10, 5, padding=5), nn.Conv1d(64, 64, 3, 2, padding=1), nn.Conv1d(64, 64, 3, 2, padding=1)]
    return _Convolved(*layers), {"x": _normal(N, 1, 4000), "y": _normal(N)}


class _Tuned(nn.Module):
    """Fine tuning: an embedding and half of the layers are frozen, and a large table of positions is a buffer."""

    table: Tensor

    def __init__(self, width: int = 64, words: int = 512, places: int = 2048) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width).requires_grad_(False)
        self.register_buffer("table", torch.zeros(places, width))
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(4))
        self.layers[:2].requires_grad_(False)
        self.head = nn.Linear(width, words)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.embed(x) + self.table[: x.shape[1]]
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), y.flatten())


def tuned() -> Any:
    return _Tuned(), {"x": _ids(512, N, 64), "y": _ids(512, N, 64)}


def normed() -> Any:
    layers = [nn.Conv2d(a, b, 3, padding=1, bias=False) for a, b in ((3, 16), (16, 16), (16, 32), (32, 32))]
    return _Convolved(*layers), {"x": _normal(N, 3, 32, 32), "y": _normal(N)}


def broad() -> Any:
    """Weights of which one is larger than all activations."""
    return _Narrowing(256, 1024, 1024, 256, 16), {"x": _normal(N, 4, 256), "y": _normal(N)}
