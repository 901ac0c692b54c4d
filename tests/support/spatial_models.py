"""Networks of images, volumes and sequences of images, for layouts that cut positions. Each function gives a model and its batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

N = 4


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _classes(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(1))


def _conv(dims: int) -> Any:
    return {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]


class _Double(nn.Module):
    def __init__(self, dims: int, source: int, width: int, norm: str) -> None:
        super().__init__()
        norms = {"batch": {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dims], "group": lambda n: nn.GroupNorm(2, n)}
        norms["instance"] = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}[dims]
        layers: list[nn.Module] = []
        for inner in (source, width):
            layers += [_conv(dims)(inner, width, 3, padding=1, bias=False), norms[norm](width), nn.ReLU()]
        self.body = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class UNet(nn.Module):
    """U-Net (Ronneberger et al. 2015) in one to three dimensions: skips beside transposed convolutions or interpolation."""

    def __init__(self, dims: int, norm: str = "batch", width: int = 4, up: str = "transposed", classes: int = 3) -> None:
        super().__init__()
        self.first, self.second = _Double(dims, 2, width, norm), _Double(dims, width, 2 * width, norm)
        self.bottom, self.last = _Double(dims, 2 * width, 4 * width, norm), _Double(dims, 3 * width, width, norm)
        self.middle = _Double(dims, 6 * width, 2 * width, norm)
        self.pool = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}[dims](2)
        spread = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}[dims]
        self.ups = nn.ModuleList([spread(4 * width, 4 * width, 2, 2), spread(2 * width, 2 * width, 2, 2)] if up == "transposed" else [])
        self.head = _conv(dims)(width, classes, 1)
        self.mode = {1: "linear", 2: "bilinear", 3: "trilinear"}[dims] if up == "linear" else "nearest"

    def _up(self, x: Tensor, level: int, like: Tensor) -> Tensor:
        return self.ups[level](x) if len(self.ups) else F.interpolate(x, like.shape[2:], mode=self.mode)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        one = self.first(x)
        two = self.second(self.pool(one))
        below = self.bottom(self.pool(two))
        two = self.middle(torch.cat([self._up(below, 0, two), two], 1))
        one = self.last(torch.cat([self._up(two, 1, one), one], 1))
        return F.cross_entropy(self.head(one), y, ignore_index=0)


def unet() -> Any:
    return UNet(2), {"x": _normal(N, 2, 20, 24), "y": _classes(3, N, 20, 24)}


def unet_volume() -> Any:
    return UNet(3, "group", up="linear"), {"x": _normal(2, 2, 12, 9, 10), "y": _classes(3, 2, 12, 9, 10)}


def unet_line() -> Any:
    return UNet(1, "instance", up="nearest"), {"x": _normal(N, 2, 38), "y": _classes(3, N, 38)}


class _Cell(nn.Module):
    """A cell as evolution found them: separable and pooled branches side by side (Real et al. 2019)."""

    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        self.deep = nn.Sequential(
            nn.Conv2d(width, width, 5, stride, 2, groups=width, bias=False),
            nn.Conv2d(width, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        )
        self.thin = nn.Sequential(
            nn.Conv2d(width, width, (1, 7), (1, stride), (0, 3)), nn.Conv2d(width, width, (7, 1), (stride, 1), (3, 0))
        )
        self.dilated = nn.Conv2d(width, width, 3, stride, 2, dilation=2)
        self.largest, self.average = nn.MaxPool2d(3, stride, 1), nn.AvgPool2d(3, stride, 1, count_include_pad=False)
        self.join = nn.Conv2d(5 * width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.deep(x), self.thin(x), self.dilated(x), self.largest(x), self.average(x)]
        return F.silu(self.join(torch.cat(parts, 1)))


class Cells(nn.Module):
    """Cells with squeeze and excitation (Hu et al. 2018) between, dropout, a global pool and a classifier."""

    def __init__(self, width: int = 4, classes: int = 5) -> None:
        super().__init__()
        self.stem, self.cells = nn.Conv2d(3, width, 3, 2, 1), nn.ModuleList([_Cell(width, 1), _Cell(width, 2)])
        self.squeeze, self.excite = nn.Linear(width, 2), nn.Linear(2, width)
        self.drop, self.pool, self.head = nn.Dropout(0.1), nn.AdaptiveAvgPool2d(1), nn.Linear(width, classes)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.stem(x)
        for cell in self.cells:
            x = cell(x)
            weight = torch.sigmoid(self.excite(F.relu(self.squeeze(x.mean((2, 3))))))
            x = self.drop(x * weight[:, :, None, None])
        return F.cross_entropy(self.head(self.pool(x).flatten(1)), y, label_smoothing=0.1)


def cells() -> Any:
    return Cells(), {"x": _normal(N, 3, 27, 22), "y": _classes(5, N)}


class ConvLSTM(nn.Module):
    """A recurrence of convolutions over a sequence of images (Shi et al. 2015)."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.gates, self.out = nn.Conv2d(2 + width, 4 * width, 5, padding=2), nn.Conv2d(width, 2, 1)
        self.width = width

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], self.width, *x.shape[3:])
        c = torch.zeros_like(h)
        for step in range(x.shape[1]):
            i, f, o, g = self.gates(torch.cat([x[:, step], h], 1)).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return F.mse_loss(self.out(h), y)


def conv_lstm() -> Any:
    return ConvLSTM(), {"x": _normal(N, 3, 2, 11, 13), "y": _normal(N, 2, 11, 13)}


class Flat(nn.Module):
    """Where the image ends: what is flattened comes whole, and the loss is another one. Its positions are learned."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(_normal(1, 3, 13, 8) * 0.1)
        self.body = nn.Sequential(nn.ZeroPad2d((1, 2, 0, 3)), nn.Conv2d(3, 4, 3, 2), nn.PReLU(), nn.LocalResponseNorm(3))
        self.head = nn.Linear(4 * 7 * 5, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.smooth_l1_loss(self.head(self.body((x - 0.5) / 0.2 + self.place).flatten(1)), y)


def flat() -> Any:
    return Flat(), {"x": _normal(N, 3, 13, 8), "y": _normal(N, 6)}
