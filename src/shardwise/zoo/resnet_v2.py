"""ResNet with norms and activations before the convolutions (He et al. 2016), as deep as in HyPar-Flow and GEMS.

Input: `pixels` BCHW. Output: logits BV. The batch has `labels` B as well. Depth is 3 stages x 3 convolutions x `blocks`, plus two layers.

Shape letters: B batch, C channels, H and W image, V classes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.zoo import shared_layers


@dataclass(frozen=True, slots=True)
class ResNetV2Config:
    """Sizes. `blocks` in each of the three stages; `base` channels of the first convolution."""

    blocks: int = 111
    base: int = 16
    image: int = 224
    colours: int = 3
    classes: int = 10

    def __post_init__(self) -> None:
        shared_layers.check_sizes(self)


class NormConv(nn.Module):
    """Batch norm, ReLU, convolution without bias: BCHW -> BCHW, the image downsampled by `stride`."""

    def __init__(self, channels: int, out: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.conv = _make_conv(channels, out, kernel, stride)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y_BCHW: Tensor = self.conv(F.relu(self.norm(x_BCHW)))
        return y_BCHW


def _make_conv(channels: int, out: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    conv = nn.Conv2d(channels, out, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


class ResNetV2Block(nn.Module):
    """A bottleneck and a shortcut, projected where shapes differ: BCHW -> BCHW."""

    def __init__(self, channels: int, inner: int, out: int, stride: int) -> None:
        super().__init__()
        self.convs = nn.Sequential(NormConv(channels, inner, 1, stride), NormConv(inner, inner, 3), NormConv(inner, out, 1))
        self.shortcut = _make_conv(channels, out, 1, stride) if stride != 1 or channels != out else nn.Identity()

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y_BCHW: Tensor = self.convs(x_BCHW) + self.shortcut(x_BCHW)
        return y_BCHW


class ResNetV2(nn.Module):
    """Map `pixels` BCHW to logits BV; `labels` are read by the loss only."""

    def __init__(self, config: ResNetV2Config) -> None:
        super().__init__()
        self.config = config
        self.stem = _make_conv(config.colours, config.base, 3)
        layers, channels = [], config.base
        for stage in range(3):
            inner = channels
            out = inner * (2 if stage else 4)
            for i in range(config.blocks):
                layers.append(ResNetV2Block(channels, inner, out, stride=2 if stage and not i else 1))
                channels = out
        self.layers = nn.Sequential(*layers)
        self.norm = nn.BatchNorm2d(channels)
        self.head = nn.Linear(channels, config.classes)

    def forward(self, pixels: Tensor, labels: Tensor | None = None) -> Tensor:
        x_BCHW = F.relu(self.norm(self.layers(self.stem(pixels))))
        logits_BV: Tensor = self.head(x_BCHW.mean((2, 3)))
        return logits_BV


SIZES = {
    "resnet-v2-tiny": ResNetV2Config(blocks=2, image=16, classes=16),
    "resnet-1k": ResNetV2Config(),  # ResNet-1001-v2: Awan et al. 2020 (HyPar-Flow), Jain et al. 2020 (GEMS)
}
