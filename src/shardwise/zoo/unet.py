"""U-Net (Ronneberger et al. 2015) for segmentation, with padded convolutions and batch norm. Input: `pixels` BCHW. Output: logits BVHW.

The batch has `labels` BHW as well: the class of every pixel.

Shape letters: B batch, C channels, H and W image, V classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.errors import ModelError
from shardwise.zoo import shared_layers
from shardwise.zoo.resnet import ConvNorm


@dataclass(frozen=True, slots=True)
class UNetConfig:
    """Sizes. `base` channels at the top, doubled at each of `depth` levels below."""

    base: int = 64
    depth: int = 4
    image: int = 512
    colours: int = 1
    classes: int = 2

    def __post_init__(self) -> None:
        shared_layers.check_sizes(self)
        if self.image % 2**self.depth:
            raise ModelError(f"image = {self.image} must divide by {2**self.depth} to be halved depth = {self.depth} times")


def _conv_pair(channels: int, out: int) -> nn.Sequential:
    return nn.Sequential(ConvNorm(channels, out, 3), ConvNorm(out, out, 3))


class UNetUpBlock(nn.Module):
    """Upsample by 2, concatenate the skip connection, convolve: half-sized B(2C)HW and the skip BCHW -> BCHW."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.grow = nn.ConvTranspose2d(2 * channels, channels, 2, stride=2)
        self.convs = _conv_pair(2 * channels, channels)

    def forward(self, x: Tensor, skip_BCHW: Tensor) -> Tensor:
        y_BCHW: Tensor = self.convs(torch.cat((skip_BCHW, self.grow(x)), dim=1))
        return y_BCHW


class UNet(nn.Module):
    """Map `pixels` BCHW to logits BVHW; `labels` are read by the loss only."""

    def __init__(self, config: UNetConfig) -> None:
        super().__init__()
        self.config = config
        widths = [config.base * 2**level for level in range(config.depth + 1)]
        self.down = nn.ModuleList(_conv_pair(c, out) for c, out in zip([config.colours, *widths[:-2]], widths[:-1], strict=True))
        self.bottom = _conv_pair(widths[-2], widths[-1])
        self.up = nn.ModuleList(UNetUpBlock(width) for width in reversed(widths[:-1]))
        self.head = nn.Conv2d(config.base, config.classes, 1)

    def forward(self, pixels: Tensor, labels: Tensor | None = None) -> Tensor:
        x, skips = pixels, []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for up, skip in zip(self.up, reversed(skips), strict=True):
            x = up(x, skip)
        logits_BVHW: Tensor = self.head(x)
        return logits_BVHW


SIZES = {
    "unet-tiny": UNetConfig(base=8, depth=2, image=16, classes=4),
    "unet-31m": UNetConfig(),  # Ronneberger et al. 2015, figure 1
}


def example_batch(config: UNetConfig, batch_size: int, seed: int = 0) -> dict[str, Tensor]:
    """Return random images, and classes that follow their brightness: `pixels` BCHW, `labels` BHW."""
    batch = shared_layers.draw_image_batch(config, batch_size, seed)
    rank_BHW = batch["pixels"].mean(1).sigmoid()
    return {"pixels": batch["pixels"], "labels": (rank_BHW * config.classes).long().clamp_(max=config.classes - 1)}


def compute_loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy of the pixels' classes, in nats."""
    return F.cross_entropy(output.permute(0, 2, 3, 1).flatten(0, 2), batch["labels"].flatten())
