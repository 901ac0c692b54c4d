"""ConvLSTM (Shi et al. 2015): the next frames of a sequence of images. Input: `video` BTCHW. Output: logits BNCHW.

An encoder of ConvLSTM layers reads the frames; a forecaster starts from its states, in the opposite order, without input. A 1x1 convolution
of all hidden states of the forecaster makes a frame. The batch has `labels` BNCHW as well: the frames that follow.

Shape letters: B batch, T input frames, N predicted frames, C channels, H and W image.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.zoo import shared_layers

LayerState = tuple[Tensor, Tensor]  # hidden BCHW, cell BCHW


@dataclass(frozen=True, slots=True)
class ConvLSTMConfig:
    """Sizes. `hidden` channels of each layer of the encoder; `steps` frames are read and as many predicted; `colours`: 4 x 4 pixels."""

    hidden: tuple[int, ...] = (128, 64, 64)
    kernel: int = 5
    steps: int = 10
    image: int = 16
    colours: int = 16

    def __post_init__(self) -> None:
        shared_layers.check_sizes(self)

    @property
    def classes(self) -> int:
        """Number of classes of a label: a pixel is zero or one."""
        return 2


class ConvLSTMCell(nn.Module):
    """One step of a layer: input, forget, cell and output gates, three with peephole connections to the cell, by channel."""

    def __init__(self, channels: int, hidden: int, kernel: int) -> None:
        super().__init__()
        self.gates = nn.Conv2d(channels + hidden, 4 * hidden, kernel, padding=kernel // 2)
        self.peep = nn.Parameter(torch.zeros(3, hidden, 1, 1))

    def forward(self, x_BCHW: Tensor | None, state: LayerState) -> LayerState:
        hidden, cell = state
        gates = self.gates(hidden if x_BCHW is None else torch.cat((x_BCHW, hidden), 1))
        enter, forget, new, leave = gates.chunk(4, 1)
        remembered = torch.sigmoid(forget + self.peep[0] * cell) * cell
        cell = remembered + torch.sigmoid(enter + self.peep[1] * cell) * torch.tanh(new)
        return torch.sigmoid(leave + self.peep[2] * cell) * torch.tanh(cell), cell


class ConvLSTM(nn.Module):
    """Map `video` BTCHW to logits BNCHW; `labels` are read by the loss only."""

    def __init__(self, config: ConvLSTMConfig) -> None:
        super().__init__()
        self.config = config
        up, down = config.hidden, config.hidden[::-1]
        self.encoder = nn.ModuleList(ConvLSTMCell(c, h, config.kernel) for c, h in pairwise((config.colours, *up)))
        self.forecaster = nn.ModuleList(ConvLSTMCell(c, h, config.kernel) for c, h in pairwise((0, *down)))
        self.head = nn.Conv2d(sum(config.hidden), config.colours, 1)

    def forward(self, video: Tensor, labels: Tensor | None = None) -> Tensor:
        batch, _, _, height, width = video.shape
        states: list[LayerState] = []
        for h in self.config.hidden:
            zero = video.new_zeros((batch, h, height, width))
            states.append((zero, zero))
        for x in video.unbind(1):
            for i, cell in enumerate(self.encoder):
                states[i] = cell(x, states[i])
                x = states[i][0]
        states.reverse()
        predictions = []
        for _ in range(self.config.steps):
            layer_input: Tensor | None = None
            for i, cell in enumerate(self.forecaster):
                states[i] = cell(layer_input, states[i])
                layer_input = states[i][0]
            predictions.append(self.head(torch.cat([hidden for hidden, _ in states], 1)))
        return torch.stack(predictions, 1)


SIZES = {
    "convlstm-tiny": ConvLSTMConfig(hidden=(8, 8), kernel=3, steps=2, image=8, colours=4),
    "convlstm-7.6m": ConvLSTMConfig(),  # Shi et al. 2015, table 1: 7,585,296 parameters
}


def example_batch(config: ConvLSTMConfig, batch_size: int, seed: int = 0) -> dict[str, Tensor]:
    """Return random frames of zeros and ones, which repeat: `video` BTCHW, `labels` BNCHW."""
    draw = torch.Generator().manual_seed(seed)
    video = torch.rand((batch_size, config.steps, config.colours, config.image, config.image), generator=draw).round()
    return {"video": video, "labels": video.clone()}


def compute_loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Mean binary cross-entropy of the pixels, in nats."""
    return F.binary_cross_entropy_with_logits(output, batch["labels"])
