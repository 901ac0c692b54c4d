"""Models of noise, points, graphs, speech and tags. Each factory returns (module, batch); the module's output is its loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SAMPLES = 8
CLASSES = 10

Made = tuple[nn.Module, dict[str, Tensor]]


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers, the same at every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def integers(below: int, *shape: int, seed: int = 0) -> Tensor:
    """Integers from 0, the same at every call."""
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


class TimedBlock(nn.Module):
    """Two convolutions, told the time between them (Ho et al. 2020)."""

    def __init__(self, inputs: int, outputs: int, time: int) -> None:
        super().__init__()
        self.first_norm, self.first = nn.GroupNorm(8, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.second_norm, self.second = nn.GroupNorm(8, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time, self.dropout = nn.Linear(time, outputs), nn.Dropout(0.1)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.first(F.silu(self.first_norm(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.second(self.dropout(F.silu(self.second_norm(h))))


class PlaceAttention(nn.Module):
    """Attention over the places of an image, by letters."""

    def __init__(self, channels: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.query_key_value, self.output = (
            nn.GroupNorm(8, channels),
            nn.Conv2d(channels, 3 * channels, 1),
            nn.Conv2d(channels, channels, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query_key_value(self.norm(x)).flatten(2).unflatten(1, (3, self.heads, -1)).unbind(1)
        weights = torch.softmax(torch.einsum("bhcn,bhcm->bhnm", q, k) * q.shape[2] ** -0.5, -1)
        return x + self.output(torch.einsum("bhnm,bhcm->bhcn", weights, v).reshape(x.shape))


class Denoiser(nn.Module):
    """A U-Net that finds the noise in an image."""

    def __init__(self, width: int = 32, time: int = 64) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(32, time), nn.SiLU(), nn.Linear(time, time))
        self.stem, self.shrink = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.down, self.middle, self.up = (
            TimedBlock(width, width, time),
            TimedBlock(2 * width, 2 * width, time),
            TimedBlock(3 * width, width, time),
        )
        self.attention, self.norm, self.output = PlaceAttention(2 * width), nn.GroupNorm(8, width), nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, images: Tensor, times: Tensor, noise: Tensor) -> Tensor:
        angles = times[:, None] * torch.exp(-torch.arange(16) * 0.6)
        time = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        early = self.down(self.stem(images + 0.3 * noise), time)
        deep = self.attention(self.middle(self.shrink(early), time))
        x = self.up(torch.cat([F.interpolate(deep, scale_factor=2.0, mode="nearest"), early], 1), time)
        return F.mse_loss(self.output(F.silu(self.norm(x))), noise)


def diffusion() -> Made:
    """Denoising diffusion."""
    return Denoiser(), {"images": normal(SAMPLES, 3, 40, 40), "times": torch.rand(SAMPLES), "noise": normal(SAMPLES, 3, 40, 40, seed=1)}


class EdgeConvolution(nn.Module):
    """A maximum over the edges to the nearest points (Wang et al. 2019)."""

    def __init__(self, inputs: int, outputs: int, near: int = 8) -> None:
        super().__init__()
        self.near = near
        self.edges = nn.Sequential(nn.Conv2d(2 * inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs), nn.LeakyReLU(0.2))

    def forward(self, x: Tensor) -> Tensor:
        places = x.transpose(1, 2)
        near = torch.cdist(places, places).detach().topk(self.near, -1, largest=False).indices
        found = torch.gather(x[:, :, None].expand(-1, -1, x.shape[-1], -1), 3, near[:, None].expand(-1, x.shape[1], -1, -1))
        own = x[..., None].expand_as(found)
        return self.edges(torch.cat([found - own, own], 1)).amax(-1)


class PointGraph(nn.Module):
    """Two edge convolutions, and a head over both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.joined = EdgeConvolution(3, 32), EdgeConvolution(32, 64), nn.Conv1d(96, 256, 1)
        self.head = nn.Sequential(nn.Linear(256, 128), nn.LeakyReLU(0.2), nn.Dropout(0.5), nn.Linear(128, CLASSES))

    def forward(self, points: Tensor, labels: Tensor) -> Tensor:
        first = self.first(points)
        joined = self.joined(torch.cat([first, self.second(first)], 1))
        return F.cross_entropy(self.head(F.leaky_relu(joined, 0.2).amax(-1)), labels)


def dgcnn() -> Made:
    """Dynamic graph of points."""
    return PointGraph(), {"points": normal(SAMPLES, 3, 192), "labels": integers(CLASSES, SAMPLES)}


class MessagePassing(nn.Module):
    """Messages along edges, added up and taken in by a gated cell (Gilmer et al. 2017)."""

    def __init__(self, hidden: int = 96, rounds: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(16, hidden)
        self.messages = nn.ModuleList(nn.Linear(2 * hidden, hidden) for _ in range(rounds))
        self.cells = nn.ModuleList(nn.GRUCell(hidden, hidden) for _ in range(rounds))
        self.head = nn.Linear(hidden, 1)
        edges = integers(200, 2, 1200)
        self.register_buffer("source", edges[0])
        self.register_buffer("target", edges[1])

    def forward(self, nodes: Tensor, values: Tensor) -> Tensor:
        h = self.first(nodes)
        for message, cell in zip(self.messages, self.cells, strict=True):
            sent = F.relu(message(torch.cat([h[:, self.source], h[:, self.target]], -1)))
            arrived = torch.zeros_like(h).index_add(1, self.target, sent)
            h = cell(arrived.flatten(0, 1), h.flatten(0, 1)).view(h.shape)
        return F.mse_loss(self.head(h).mean((1, 2)), values)


def message_passing() -> Made:
    """Message passing."""
    return MessagePassing(), {"nodes": normal(SAMPLES, 200, 16), "values": normal(SAMPLES)}


class FeedForward(nn.Sequential):
    """Norm, up, SiLU, down, with dropout."""

    def __init__(self, hidden: int) -> None:
        super().__init__(
            nn.LayerNorm(hidden), nn.Linear(hidden, 4 * hidden), nn.SiLU(), nn.Dropout(0.1), nn.Linear(4 * hidden, hidden), nn.Dropout(0.1)
        )


class ConformerBlock(nn.Module):
    """Attention and a depthwise convolution between two halves of an MLP (Gulati et al. 2020)."""

    def __init__(self, hidden: int, window: int = 15) -> None:
        super().__init__()
        self.before, self.after, self.norm = FeedForward(hidden), FeedForward(hidden), nn.LayerNorm(hidden)
        self.attention_norm, self.attention = nn.LayerNorm(hidden), nn.MultiheadAttention(hidden, 4, dropout=0.1, batch_first=True)
        self.wide_norm, self.wide = nn.LayerNorm(hidden), nn.Conv1d(hidden, 2 * hidden, 1)
        self.depthwise = nn.Conv1d(hidden, hidden, window, padding=window // 2, groups=hidden)
        self.narrow = nn.Sequential(nn.BatchNorm1d(hidden), nn.SiLU(), nn.Conv1d(hidden, hidden, 1), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.before(x)
        y = self.attention_norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.narrow(self.depthwise(F.glu(self.wide(self.wide_norm(x).transpose(1, 2)), 1))).transpose(1, 2)
        return self.norm(x + 0.5 * self.after(x))


class SpeechRecogniser(nn.Module):
    """Spectra, made fewer by convolutions, to a letter each."""

    def __init__(self, hidden: int = 96, depth: int = 3, letters: int = 32) -> None:
        super().__init__()
        self.fewer = nn.Sequential(nn.Conv2d(1, 24, 3, 2, 1), nn.ReLU(), nn.Conv2d(24, 24, 3, 2, 1), nn.ReLU())
        self.first, self.head = nn.Linear(24 * 20, hidden), nn.Linear(hidden, letters)
        self.blocks = nn.ModuleList(ConformerBlock(hidden) for _ in range(depth))

    def forward(self, spectra: Tensor, labels: Tensor) -> Tensor:
        x = self.first(self.fewer(spectra[:, None]).transpose(1, 2).flatten(2))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def conformer() -> Made:
    """Conformer."""
    return SpeechRecogniser(), {"spectra": normal(SAMPLES, 320, 80), "labels": integers(32, SAMPLES, 80)}


class Tagger(nn.Module):
    """A recurrence of two layers both ways, a tag for each word."""

    def __init__(self, hidden: int = 96, words: int = 500, tags: int = 20) -> None:
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(words, hidden), nn.Dropout(0.3)
        self.lstm = nn.LSTM(hidden, hidden, 2, batch_first=True, bidirectional=True, dropout=0.2)
        self.norm, self.head = nn.LayerNorm(2 * hidden), nn.Linear(2 * hidden, tags)

    def forward(self, words: Tensor, tags: Tensor) -> Tensor:
        h = self.lstm(self.dropout(self.embedding(words)))[0]
        return F.cross_entropy(self.head(self.norm(h)).transpose(1, 2), tags)


def tagger() -> Made:
    """Tagger."""
    return Tagger(), {"words": integers(500, SAMPLES, 160), "tags": integers(20, SAMPLES, 160)}


FACTORIES = (diffusion, dgcnn, message_passing, conformer, tagger)
