"""How far convolutions fill a processor's blocks of channels, against multiplications counted with channels that are filled up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.capture.capture import Graph, capture
from shardwise.cluster.cluster import Cluster
from shardwise.cost.devices.convolutions import NO_PADDING, ChannelPadding, channel_padding
from shardwise.cost.step import Pricer
from shardwise.model.gradients import differentiable_values
from shardwise.model.work import operator_work
from shardwise.plan.layout import Layout


class Net(nn.Module):
    """`conv` behind a gain, so that what it reads has a gradient, or of the image itself."""

    def __init__(self, conv: nn.Module, learns: bool = True) -> None:
        super().__init__()
        self.conv = conv
        self.gain = nn.Parameter(torch.ones(())) if learns else 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x * self.gain).square().mean()


def found(net: Net, *shape: int) -> tuple[Graph, Any, ChannelPadding]:
    graph = capture(net, (torch.randn(*shape),)).graph
    (op,) = (one for one in graph.operators if "conv" in one.target)
    return graph, op, channel_padding(op, graph.tensors, None, differentiable_values(graph))


def blocks(channels: int) -> int:
    return next(n for n in range(0, 10_000, 16) if n >= channels)


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize(("into", "out"), [(64, 64), (64, 3), (3, 64), (8, 24), (20, 20), (40, 100), (1, 6)])
@pytest.mark.parametrize("transposed", [False, True])
def test_whole_blocks_are_computed(transposed: bool, into: int, out: int, learns: bool) -> None:
    """Forward, for the input and for the weights: channels each way filled up, but few that are read; transposed, forward is another's
    gradient for its input."""
    make = nn.ConvTranspose2d if transposed else nn.Conv2d
    graph, op, told = found(Net(make(into, out, 3, padding=1, bias=False), learns), 4, into, 8, 8)
    read, made = (out, into) if transposed else (into, out)
    plain = (blocks(read) if read > 8 else read) * blocks(made)
    whole = blocks(read) * blocks(made)
    passes = {"forward": plain, "input": whole, "weights": plain}
    if transposed:
        passes["forward"], passes["input"] = passes["input"], passes["forward"]
    work_of = operator_work(graph)[op.name]
    per_channels = work_of.flops / (into * out)
    assert told.forward * work_of.flops == pytest.approx(per_channels * passes["forward"])
    backward = passes["weights"] + (passes["input"] if learns else 0)
    assert told.backward * work_of.backward_flops == pytest.approx(per_channels * backward)


@pytest.mark.parametrize(
    ("conv", "told"),
    [
        (nn.Conv2d(32, 32, 3, groups=32), NO_PADDING),
        (nn.Conv2d(32, 32, 7, groups=32), ChannelPadding(channels=1.0)),
        (nn.Conv1d(32, 32, 31, groups=32), ChannelPadding(channels=1.0)),
        (nn.Conv2d(32, 64, 3, groups=32), ChannelPadding(channels=2**0.5)),
        (nn.Conv2d(32, 32, 3, groups=8), ChannelPadding(channels=4.0)),
        (nn.Conv2d(32, 32, 3, groups=2), NO_PADDING),
        (nn.Conv2d(40, 40, 3, groups=2), ChannelPadding(2.56, 2.56)),
        (nn.Conv2d(20, 20, 1), NO_PADDING),
        (nn.Conv3d(20, 20, (1, 3, 3)), ChannelPadding(2.56, 2.56)),
    ],
)
def test_groups_of_few_channels_have_a_rate_of_their_own(conv: nn.Module, told: ChannelPadding) -> None:
    places = {"Conv1d": (64,), "Conv2d": (12, 12), "Conv3d": (4, 12, 12)}[type(conv).__name__]
    _, _, filled = found(Net(conv), 4, conv.in_channels, *places)
    assert (filled.forward, filled.backward, filled.channels) == pytest.approx((told.forward, told.backward, told.channels))


def test_an_unbatched_image_has_its_channels_first() -> None:
    assert found(Net(nn.Conv2d(40, 40, 3, groups=2)), 40, 12, 12)[2] == found(Net(nn.Conv2d(40, 40, 3, groups=2)), 1, 40, 12, 12)[2]


def test_channels_that_ranks_divide_fill_less() -> None:
    """24 channels on each of two ranks are computed as 32, and 32 as they are."""
    for channels, more in ((48, 4 / 3), (64, 1.0)):
        graph = capture(Net(nn.Conv2d(64, channels, 3, padding=1)), (torch.randn(8, 64, 8, 8),)).graph
        pricer, layout = Pricer(graph, Cluster.parse("cpu-2"), 8), Layout.parse("tensor=2")
        kernels = [one.kernel for one in pricer.sharded_inventory(layout).compute if one.kernel.kind == "convolution"]
        assert kernels
        assert {round(kernel.channel_padding.forward, 9) for kernel in kernels} == {round(more, 9)}
