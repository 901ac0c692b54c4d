"""Networks with parallel branches, for layouts whose ranks own branches. Each function gives a model and its batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

N = 8


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _classes(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(1))


def _conv(source: int, width: int, kernel: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(source, width, kernel, padding=kernel // 2, bias=False), nn.BatchNorm2d(width), nn.ReLU())


class _Module(nn.Module):
    """An Inception module (Szegedy et al. 2015): four branches of unlike work, which a concatenation joins."""

    def __init__(self, source: int, width: int = 4) -> None:
        super().__init__()
        self.one = _conv(source, width, 1)
        self.three = nn.Sequential(_conv(source, width, 1), _conv(width, 2 * width, 3))
        self.five = nn.Sequential(_conv(source, width, 1), _conv(width, width, 3), _conv(width, width, 3))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), _conv(source, width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], 1)


class Inception(nn.Module):
    def __init__(self, modules: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = _conv(3, 8, 3)
        self.layers = nn.ModuleList(_Module(8 if i == 0 else 20) for i in range(modules))
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(20, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.dropout(x.mean((2, 3)))), y)


def inception() -> Any:
    return Inception(), {"x": _normal(N, 3, 8, 8), "y": _classes(5, N)}


def inception_of_three() -> Any:
    return Inception(3, 0.3), {"x": _normal(N, 3, 8, 8), "y": _classes(5, N)}


class _Block(nn.Module):
    """Attention and a feed-forward layer of one width."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.before, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
        x = x + F.dropout(self.out(mixed), self.dropout, self.training)
        return x + self.down(F.gelu(self.up(self.before(x))))


class Branched(nn.Module):
    """Layers of which each is several transformer blocks side by side, whose results are added: SUPER's network of four branches."""

    def __init__(self, branches: int = 4, layers: int = 2, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, width)
        self.layers = nn.ModuleList(nn.ModuleList(_Block(width, 2, dropout) for _ in range(branches)) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 31)

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            total = x
            for branch in layer:
                total = total + branch(x)
            x = total
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), y.flatten())


def branched() -> Any:
    return Branched(), {"ids": _classes(31, N, 6), "y": _classes(31, N, 6)}


def branched_drawing() -> Any:
    return Branched(3, 2, 16, 0.2), {"ids": _classes(31, N, 6), "y": _classes(31, N, 6)}


class Towers(nn.Module):
    """An encoder of text beside one of images, as in CLIP (Radford et al. 2021): unlike work, nothing shared, one loss over all pairs."""

    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(31, 16)
        self.text = nn.ModuleList(_Block(16, 2) for _ in range(3))
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.image = nn.ModuleList(_Block(16, 2) for _ in range(2))
        self.to_text, self.to_image = nn.Linear(16, 8), nn.Linear(16, 8)
        if shared:
            self.to_image = self.to_text

    def forward(self, ids: Tensor, pixels: Tensor) -> Tensor:
        text = self.words(ids)
        for block in self.text:
            text = block(text)
        image = self.patches(pixels).flatten(2).transpose(1, 2)
        for block in self.image:
            image = block(image)
        a, b = F.normalize(self.to_text(text.mean(1)), dim=-1), F.normalize(self.to_image(image.mean(1)), dim=-1)
        scores = 5 * a @ b.T
        target = torch.arange(len(scores), device=scores.device)
        return (F.cross_entropy(scores, target) + F.cross_entropy(scores.T, target)) / 2


def towers() -> Any:
    return Towers(), {"ids": _classes(31, N, 6), "pixels": _normal(N, 3, 8, 8)}


def towers_that_share() -> Any:
    return Towers(True), {"ids": _classes(31, N, 6), "pixels": _normal(N, 3, 8, 8)}


class Paths(nn.Module):
    """Paths that a product gates, a stack mixes and a residual passes by (ResNeXt as it is written out)."""

    def __init__(self, paths: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 16)
        self.paths = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(paths))
        self.gates = nn.ModuleList(nn.Linear(16, 8) for _ in range(paths))
        self.mix, self.head = nn.Linear(paths * 8, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        parts = x.chunk(len(self.paths), -1)
        found = [path(part) * torch.sigmoid(gate(x)) for path, gate, part in zip(self.paths, self.gates, parts, strict=True)]
        x = x + self.mix(torch.stack(found, 1).flatten(1))
        return F.cross_entropy(self.head(x), y)


def paths() -> Any:
    return Paths(), {"x": _normal(N, 6), "y": _classes(3, N)}


class Twins(nn.Module):
    """Two inputs through one encoder, beside a third through its own: weights that two branches share."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 8))
        self.own = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 8))
        self.head = nn.Linear(24, 3)

    def forward(self, a: Tensor, b: Tensor, c: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(torch.cat([self.both(a), self.own(c), self.both(b)], -1)), y)


def twins() -> Any:
    return Twins(), {"a": _normal(N, 6), "b": _normal(N, 6, seed=2), "c": _normal(N, 6, seed=3), "y": _classes(3, N)}


class TwinsWithStatistics(Twins):
    """Twins whose encoder counts running statistics: two branches write the same buffers, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 8))


def twins_with_statistics() -> Any:
    return TwinsWithStatistics(), twins()[1]
