"""3D U-Net (Çiçek et al. 2016) for segmentation of volumes, with padded convolutions. Input: `voxels` BCZHW. Output: logits BVZHW.

Norms have no parameters and convolutions have biases, as in the authors' framework. The batch has `labels` BZHW as well: the class
of every voxel.

Shape letters: B batch, C channels, Z, H and W volume, V classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.errors import ModelError
from shardwise.zoo import shared_layers


@dataclass(frozen=True, slots=True)
class UNet3DConfig:
    """Sizes. `base` channels of the first convolution, doubled by the second and at each of `depth` levels below."""

    base: int = 32
    depth: int = 3
    planes: int = 64
    image: int = 128
    colours: int = 3
    classes: int = 3

    def __post_init__(self) -> None:
        shared_layers.check_sizes(self)
        for name in ("planes", "image"):
            if getattr(self, name) % 2**self.depth:
                raise ModelError(f"{name} = {getattr(self, name)} must divide by {2**self.depth} to be halved depth = {self.depth} times")


def _conv_pair(channels: int, inner: int, out: int) -> nn.Sequential:
    parts: list[nn.Module] = []
    for in_channels, out_channels in ((channels, inner), (inner, out)):
        parts += [nn.Conv3d(in_channels, out_channels, 3, padding=1), nn.BatchNorm3d(out_channels, affine=False), nn.ReLU()]
    return nn.Sequential(*parts)


class UNet3DUpBlock(nn.Module):
    """Upsample by 2, concatenate the skip connection, convolve."""

    def __init__(self, channels: int, skipped: int) -> None:
        super().__init__()
        self.grow = nn.ConvTranspose3d(channels, channels, 2, stride=2, bias=False)
        self.convs = _conv_pair(channels + skipped, skipped, skipped)

    def forward(self, x: Tensor, skip_BCZHW: Tensor) -> Tensor:
        y_BCZHW: Tensor = self.convs(torch.cat((skip_BCZHW, self.grow(x)), dim=1))
        return y_BCZHW


class UNet3D(nn.Module):
    """Map `voxels` BCZHW to logits BVZHW; `labels` are read by the loss only."""

    def __init__(self, config: UNet3DConfig) -> None:
        super().__init__()
        self.config = config
        widths = [2 * config.base * 2**level for level in range(config.depth + 1)]
        pairs = [(config.colours, config.base, widths[0]), *((c, c, 2 * c) for c in widths[:-1])]
        *down, bottom = (_conv_pair(channels, inner, out) for channels, inner, out in pairs)
        self.down, self.bottom = nn.ModuleList(down), bottom
        self.up = nn.ModuleList(UNet3DUpBlock(2 * width, width) for width in reversed(widths[:-1]))
        self.head = nn.Conv3d(widths[0], config.classes, 1)

    def forward(self, voxels: Tensor, labels: Tensor | None = None) -> Tensor:
        x, skips = voxels, []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = F.max_pool3d(x, 2)
        x = self.bottom(x)
        for up, skip in zip(self.up, reversed(skips), strict=True):
            x = up(x, skip)
        logits_BVZHW: Tensor = self.head(x)
        return logits_BVZHW


SIZES = {
    "unet3d-tiny": UNet3DConfig(base=4, depth=2, planes=8, image=8),
    "unet3d-19m": UNet3DConfig(),  # Çiçek et al. 2016, section 3: 19,069,955 parameters
}


def example_batch(config: UNet3DConfig, batch_size: int, seed: int = 0) -> dict[str, Tensor]:
    """Return random volumes, and classes that follow their brightness: `voxels` BCZHW, `labels` BZHW."""
    draw = torch.Generator().manual_seed(seed)
    voxels = torch.randn((batch_size, config.colours, config.planes, config.image, config.image), generator=draw)
    classes = (voxels.mean(1).sigmoid() * config.classes).long().clamp_(max=config.classes - 1)
    return {"voxels": voxels, "labels": classes}


compute_loss = shared_layers.compute_class_loss
