"""AmoebaNet-D (Real et al. 2018) as GPipe trained it (Huang et al. 2019, table 1). Input: `pixels` BCHW. Output: logits BV.

A cell reads the two previous cells and sums five pairs of operations; normal cells concatenate states 0, 3, 4 and 6, as in the authors'
code (the paper has 4, 5 and 6): with these the number of parameters is GPipe's. The batch has `labels` B as well.

Shape letters: B batch, C channels, H and W image, V classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.errors import ModelError
from shardwise.zoo import shared_layers


@dataclass(frozen=True, slots=True)
class AmoebaNetConfig:
    """Sizes. `layers` normal cells in three groups, with reduction cells between them; `filters` as GPipe counts them."""

    layers: int = 18
    filters: int = 208
    image: int = 224
    colours: int = 3
    classes: int = 1000

    def __post_init__(self) -> None:
        shared_layers.check_sizes(self)
        for name, by in (("layers", 3), ("filters", 16)):
            if getattr(self, name) % by:
                raise ModelError(f"{name} = {getattr(self, name)} must divide by {by}")


def _conv_stack(channels: int, *kernels: tuple[int, int], out: int = 0, stride: int = 1) -> nn.Sequential:
    """Stack activation, convolution and norm for each kernel; several kernels use a bottleneck of a quarter of the channels."""
    inner, parts = channels // 4 if len(kernels) > 1 else channels, list[nn.Module]()
    for i, (height, width) in enumerate(kernels):
        last = i == len(kernels) - 1
        out_channels = (out or channels) if last else inner
        down, right = (stride if k > 1 or len(kernels) == 1 else 1 for k in (height, width))
        conv = nn.Conv2d(
            channels if i == 0 else inner, out_channels, (height, width), (down, right), (height // 2, width // 2), bias=False
        )  # fmt: skip
        parts += [nn.ReLU(), conv, nn.BatchNorm2d(out_channels)]
    return nn.Sequential(*parts)


class FactorizedReduction(nn.Module):
    """Factorized reduction: even and odd pixels through half of the channels each, BCHW -> BCHW of half the size."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(channels, out // 2, 1, 2, bias=False)
        self.odd = nn.Conv2d(channels, out // 2, 1, 2, bias=False)
        self.norm = nn.BatchNorm2d(out)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BCHW = F.relu(x_BCHW)
        y_BCHW: Tensor = self.norm(torch.cat([self.even(x_BCHW), self.odd(F.pad(x_BCHW[:, :, 1:, 1:], (0, 1, 0, 1)))], 1))
        return y_BCHW


_OPERATIONS: dict[str, Callable[[int, int], nn.Module]] = {
    "same": lambda c, stride: nn.Identity() if stride == 1 else FactorizedReduction(c, c),
    "mean 3": lambda c, stride: nn.AvgPool2d(3, stride, 1, count_include_pad=False),
    "max 3": lambda c, stride: nn.MaxPool2d(3, stride, 1),
    "max 2": lambda c, stride: nn.MaxPool2d(2, stride),
    "conv 1": lambda c, stride: _conv_stack(c, (1, 1), stride=stride),
    "conv 3": lambda c, stride: _conv_stack(c, (1, 1), (3, 3), (1, 1), stride=stride),
    "conv 7": lambda c, stride: _conv_stack(c, (1, 1), (1, 7), (7, 1), (1, 1), stride=stride),
}
# Pairs of (input state, operation); then the states that are concatenated. Real et al. 2018, figure 5.
_NORMAL_CELL = (
    ((1, "conv 1"), (1, "max 3")), ((1, "same"), (0, "conv 7")), ((0, "conv 1"), (0, "conv 7")), ((2, "max 3"), (2, "same")),
    ((1, "mean 3"), (5, "conv 1")),
)  # fmt: skip
_REDUCTION_CELL = (
    ((0, "max 2"), (0, "max 3")), ((2, "same"), (1, "conv 3")), ((2, "conv 7"), (2, "max 3")), ((3, "same"), (1, "max 2")),
    ((2, "mean 3"), (3, "conv 1")),
)  # fmt: skip
_JOINED, _JOINED_SMALLER = (0, 3, 4, 6), (4, 5, 6)


class AmoebaNetCell(nn.Module):
    """(last state, previous state) -> (next state, last state). `smaller`: a reduction cell; `was_smaller`: the previous cell was one."""

    def __init__(self, before: int, channels: int, out: int, smaller: bool, was_smaller: bool) -> None:
        super().__init__()
        self.pairs = _REDUCTION_CELL if smaller else _NORMAL_CELL
        self.joined: tuple[int, ...] = _JOINED_SMALLER if smaller else _JOINED
        self.last = _conv_stack(channels, (1, 1), out=out)
        self.before = (
            FactorizedReduction(before, out) if was_smaller else _conv_stack(before, (1, 1), out=out) if before != out else nn.Identity()
        )
        operands = [operand for pair in self.pairs for operand in pair]
        self.operations = nn.ModuleList(_OPERATIONS[name](out, 2 if smaller and state < 2 else 1) for state, name in operands)

    def forward(self, last_BCHW: Tensor, before_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        states = [self.last(last_BCHW), self.before(before_BCHW)]
        for i, ((first, _), (second, _)) in enumerate(self.pairs):
            states.append(self.operations[2 * i](states[first]) + self.operations[2 * i + 1](states[second]))
        return torch.cat([states[i] for i in self.joined], 1), last_BCHW


class AmoebaNet(nn.Module):
    """Map `pixels` BCHW to logits BV; `labels` are read by the loss only."""

    def __init__(self, config: AmoebaNetConfig) -> None:
        super().__init__()
        self.config = config
        out = before = channels = config.filters // 4
        self.stem = nn.Conv2d(config.colours, channels, 3, 2, 1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        group = [False] * (config.layers // 3)
        cells, was_smaller = [], False
        for smaller in (True, True, *group, True, *group, True, *group):
            out = 2 * out if smaller else out
            cells.append(AmoebaNetCell(before, channels, out, smaller, was_smaller))
            before, channels, was_smaller = channels, out * len(cells[-1].joined), smaller
        self.layers = nn.ModuleList(cells)
        self.head = nn.Linear(channels, config.classes)

    def forward(self, pixels: Tensor, labels: Tensor | None = None) -> Tensor:
        last = before = self.norm(self.stem(F.relu(pixels)))
        for cell in self.layers:
            last, before = cell(last, before)
        logits_BV: Tensor = self.head(last.mean((2, 3)))
        return logits_BV


# Huang et al. 2019 (GPipe), table 1: 82, 318, 542, 1,050 and 1,800 million parameters.
SIZES = {
    "amoebanet-d-tiny": AmoebaNetConfig(layers=3, filters=16, image=64, classes=16),
    "amoebanet-d-82m": AmoebaNetConfig(),
    "amoebanet-d-318m": AmoebaNetConfig(filters=416),
    "amoebanet-d-542m": AmoebaNetConfig(filters=544),
    "amoebanet-d-1b": AmoebaNetConfig(layers=36, filters=544),
    "amoebanet-d-1.8b": AmoebaNetConfig(layers=72, filters=512),
}

example_batch = shared_layers.draw_image_batch
compute_loss = shared_layers.compute_class_loss
