"""GoogLeNet (Szegedy et al. 2015): Inception modules, each of four branches. Input: `pixels` BCHW. Output: logits BV.

Batch norm follows every convolution (Ioffe and Szegedy 2015); the two auxiliary classifiers are left out. The batch has `labels` B
as well.

Shape letters: B batch, C channels, H and W image, V classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.zoo import shared_layers
from shardwise.zoo.resnet import ConvNorm

# Szegedy et al. 2015, table 1: filters of 1x1; of the 1x1 before 3x3, and of 3x3; of the 1x1 before 5x5, and of 5x5; after the pool.
MODULES = (
    (64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64),
    (192, 96, 208, 16, 48, 64), (160, 112, 224, 24, 64, 64), (128, 128, 256, 24, 64, 64), (112, 144, 288, 32, 64, 64),
    (256, 160, 320, 32, 128, 128), (256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128),
)  # fmt: skip
POOLED_MODULES = (2, 7)  # modules before which the image is halved


@dataclass(frozen=True, slots=True)
class GoogLeNetConfig:
    """Sizes. `modules`: the number used of the published nine. `thinner`: divisor of every number of filters."""

    modules: int = 9
    thinner: int = 1
    image: int = 224
    colours: int = 3
    classes: int = 1000

    def __post_init__(self) -> None:
        shared_layers.check_sizes(self)


class InceptionModule(nn.Module):
    """Four parallel branches, concatenated: BCHW -> BCHW."""

    def __init__(self, channels: int, filters: tuple[int, ...]) -> None:
        super().__init__()
        one, before3, three, before5, five, pooled = filters
        self.one = ConvNorm(channels, one, 1)
        self.three = nn.Sequential(ConvNorm(channels, before3, 1), ConvNorm(before3, three, 3))
        self.five = nn.Sequential(ConvNorm(channels, before5, 1), ConvNorm(before5, five, 5))
        self.pooled = ConvNorm(channels, pooled, 1)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return torch.cat([self.one(x_BCHW), self.three(x_BCHW), self.five(x_BCHW), self.pooled(F.max_pool2d(x_BCHW, 3, 1, 1))], 1)


class GoogLeNet(nn.Module):
    """Map `pixels` BCHW to logits BV; `labels` are read by the loss only."""

    def __init__(self, config: GoogLeNetConfig) -> None:
        super().__init__()
        self.config = config
        few, channels = 64 // config.thinner, 192 // config.thinner
        self.stem = ConvNorm(config.colours, few, 7, stride=2)
        self.before = nn.Sequential(ConvNorm(few, few, 1), ConvNorm(few, channels, 3))
        layers = []
        for filters in MODULES[: config.modules]:
            widths = tuple(max(1, n // config.thinner) for n in filters)
            layers.append(InceptionModule(channels, widths))
            channels = widths[0] + widths[2] + widths[4] + widths[5]
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(channels, config.classes)

    def forward(self, pixels: Tensor, labels: Tensor | None = None) -> Tensor:
        x_BCHW = _halve_image(self.before(_halve_image(self.stem(pixels))))
        for i, layer in enumerate(self.layers):
            x_BCHW = layer(_halve_image(x_BCHW) if i in POOLED_MODULES else x_BCHW)
        logits_BV: Tensor = self.head(x_BCHW.mean((2, 3)))
        return logits_BV


def _halve_image(x_BCHW: Tensor) -> Tensor:
    return F.max_pool2d(x_BCHW, 3, stride=2, padding=1)


SIZES = {
    "inception-tiny": GoogLeNetConfig(modules=3, thinner=16, image=64, classes=16),
    "inception-v1": GoogLeNetConfig(),
}

example_batch = shared_layers.draw_image_batch
compute_loss = shared_layers.compute_class_loss
