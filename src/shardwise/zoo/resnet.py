"""ResNet (He et al. 2015) with batch norm, the stride in the 3x3 convolution; ResNeXt (Xie et al. 2017); Wide ResNet (Zagoruyko & Komodakis
2016) as Alpa trains it: a ResNet with more channels and a wider 3x3 convolution.

Input: `pixels` BCHW. Output: logits BV. The batch has `labels` B as well.

Shape letters: B batch, C channels, H and W image, V classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.errors import ModelError
from shardwise.zoo import shared_layers


@dataclass(frozen=True, slots=True)
class ResNetConfig:
    """Sizes. `blocks` of each stage; `base` channels in the first; `width` widens the 3x3 convolution of a bottleneck,
    `groups` divides it."""

    blocks: tuple[int, ...] = (3, 4, 6, 3)
    bottleneck: bool = True
    base: int = 64
    width: int = 1
    groups: int = 1
    image: int = 224
    colours: int = 3
    classes: int = 1000

    def __post_init__(self) -> None:
        shared_layers.check_sizes(self)
        if self.width != 1 and not self.bottleneck:
            raise ModelError(f"width = {self.width} widens bottlenecks only; use bottleneck=true")
        if self.base * self.width % self.groups or (self.groups > 1 and not self.bottleneck):
            raise ModelError(f"groups = {self.groups} must divide base x width = {self.base * self.width} channels of a bottleneck")


class ConvNorm(nn.Module):
    """Convolution without bias and batch norm; then ReLU if `relu`. BCHW -> BCHW, the image downsampled by `stride`."""

    def __init__(self, channels: int, out: int, kernel: int, stride: int = 1, relu: bool = True, groups: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(out)
        self.relu = relu
        nn.init.kaiming_normal_(self.conv.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BCHW = self.norm(self.conv(x_BCHW))
        return F.relu(x_BCHW) if self.relu else x_BCHW


class ResNetBlock(nn.Module):
    """Convolutions and a shortcut, projected where shapes differ: BCHW -> BCHW."""

    def __init__(self, config: ResNetConfig, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        out = inner * (4 if config.bottleneck else 1)
        if config.bottleneck:
            into = inner * config.width if config.groups > 1 else inner  # a grouped convolution has as many input as output channels
            convs = [
                ConvNorm(channels, into, 1),
                ConvNorm(into, inner * config.width, 3, stride, groups=config.groups),
                ConvNorm(inner * config.width, out, 1, relu=False),
            ]
        else:
            convs = [ConvNorm(channels, inner, 3, stride), ConvNorm(inner, out, 3, relu=False)]
        self.convs = nn.Sequential(*convs)
        self.shortcut = ConvNorm(channels, out, 1, stride, relu=False) if stride != 1 or channels != out else nn.Identity()

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return F.relu(self.convs(x_BCHW) + self.shortcut(x_BCHW))


class ResNet(nn.Module):
    """Map `pixels` BCHW to logits BV; `labels` are read by the loss only."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        self.stem = ConvNorm(config.colours, config.base, 7, stride=2)
        layers, channels = [], config.base
        for stage, count in enumerate(config.blocks):
            inner = config.base * 2**stage
            for i in range(count):
                layers.append(ResNetBlock(config, channels, inner, stride=2 if stage and not i else 1))
                channels = inner * (4 if config.bottleneck else 1)
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(channels, config.classes)

    def forward(self, pixels: Tensor, labels: Tensor | None = None) -> Tensor:
        x_BCHW = self.layers(F.max_pool2d(self.stem(pixels), 3, stride=2, padding=1))
        logits_BV: Tensor = self.head(x_BCHW.mean((2, 3)))
        return logits_BV


# He et al. 2015, table 1; Xie et al. 2017, table 1 and section 5.
SIZES = {
    "resnet-tiny": ResNetConfig(blocks=(1, 1, 1, 1), bottleneck=False, base=16, image=32, classes=16),
    "resnet-18": ResNetConfig(blocks=(2, 2, 2, 2), bottleneck=False),
    "resnet-34": ResNetConfig(blocks=(3, 4, 6, 3), bottleneck=False),
    "resnet-50": ResNetConfig(blocks=(3, 4, 6, 3)),
    "resnet-101": ResNetConfig(blocks=(3, 4, 23, 3)),
    "resnet-152": ResNetConfig(blocks=(3, 8, 36, 3)),
    "resnext-tiny": ResNetConfig(blocks=(1, 1), base=8, width=2, groups=4, image=32, classes=16),
    "resnext-50": ResNetConfig(blocks=(3, 4, 6, 3), width=2, groups=32),
    "resnext-101": ResNetConfig(blocks=(3, 4, 23, 3), width=2, groups=32),
}

example_batch = shared_layers.draw_image_batch
compute_loss = shared_layers.compute_class_loss


WideResNetConfig = partial(ResNetConfig, base=160, width=2)
_DEPTHS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}


def _wide_size(depth: int, base: int, width: int) -> ResNetConfig:
    """Return a size of the table of Wide-ResNet models of Zheng et al. 2022 (Alpa): depth, channels of the first stage, width factor."""
    return ResNetConfig(blocks=_DEPTHS[depth], base=base, width=width)


WIDE_SIZES = {
    "wide-resnet-tiny": ResNetConfig(blocks=(1, 1, 1, 1), base=16, width=2, image=32, classes=16),
    "wide-resnet-250m": _wide_size(50, 160, 2),
    "wide-resnet-500m": _wide_size(50, 224, 2),
    "wide-resnet-1b": _wide_size(50, 320, 2),
    "wide-resnet-2b": _wide_size(50, 448, 2),
    "wide-resnet-4b": _wide_size(50, 640, 2),
    "wide-resnet-6.8b": _wide_size(50, 320, 16),
    "wide-resnet-13b": _wide_size(101, 320, 16),
}
