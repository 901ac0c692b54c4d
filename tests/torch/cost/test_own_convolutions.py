"""Which convolutions torch makes itself, in place of oneDNN: what is told beside the kernels that torch's own profiler sees."""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from shardwise.capture.capture import capture
from shardwise.cost.devices.convolutions import TorchKernel, torch_kernel
from shardwise.model.sharding.propagate import propagate

PLAIN = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
WINDOWS: dict[int, list[tuple[int, ...]]] = {
    1: [(1,), (3,), (5,)],
    2: [(1, 1), (3, 1), (1, 3), (5, 5), (3, 5)],
    3: [(1, 1, 1), (3, 1, 1), (1, 3, 3), (3, 5, 5)],
}
# Sides of maps below and above what torch calls small, by dimensions, of 16 channels.
SIDES: dict[int, list[tuple[int, ...]]] = {1: [(64,), (1300,)], 2: [(12, 12), (40, 40)], 3: [(6, 6, 40), (20, 70, 6)]}


def by_torch(conv: nn.Module, x: torch.Tensor) -> bool:
    """Whether a kernel of torch's own runs it, whose names begin so."""
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU]) as seen:
        conv(x)
    names = {event.key for event in seen.key_averages()}
    assert any("conv" in name for name in names)
    return any("slow_conv" in name for name in names)


def told(conv: nn.Module, x: torch.Tensor, sharding: Any = None) -> TorchKernel:
    graph = capture(Net(conv), (x,)).graph
    (op,) = (one for one in graph.operators if "conv" in one.target)
    return torch_kernel(op, graph.tensors, propagate(graph, sharding) if sharding else None)


class Net(nn.Module):
    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).square().mean()


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_who_makes_a_convolution_is_told_as_torch_decides_it(dims: int, transposed: bool) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = set()
        for window, sides, (stride, groups) in product(WINDOWS[dims], SIDES[dims], ((1, 1), (2, 1), (1, 2))):
            conv = (TRANSPOSED if transposed else PLAIN)[dims](16, 8, window, stride=stride, groups=groups)
            when = told(conv, torch.randn(1, 16, *sides))
            for samples in (1, 2, 16):
                seen = by_torch(conv, torch.randn(samples, 16, *sides))
                assert when.applies(Fraction(samples), 1) == seen, (samples, sides, conv)
                found.add((samples, seen))
        assert found == {(1, True), (1, False), (2, True), (2, False), (16, False)}
    finally:
        torch.set_num_threads(threads)


def test_maps_are_a_rank_s_own_and_samples_of_all_replicas() -> None:
    conv, x = nn.Conv2d(16, 64, 3, padding=1), torch.randn(8, 16, 48, 48)
    assert not told(conv, x).alone  # 16 x 48 x 48 are more than 20,480
    one = told(conv, x, {"data": 8})
    assert one.samples == 8
    small = told(conv, x[..., :24], {"data": 8})
    assert small.alone
    assert small.applies(Fraction(1, 8), 2)
    assert not small.applies(Fraction(1, 4), 2)


def test_columns_are_as_many_as_windows_have_places() -> None:
    """64 x 64 places of 16 channels' windows of 3 x 3, four samples, in float32; moved as often as is told of one place."""
    square = told(nn.Conv2d(16, 8, 3, padding=1), torch.randn(4, 16, 64, 64))
    row = told(nn.Conv2d(16, 8, (3, 1), padding=(1, 0)), torch.randn(4, 16, 64, 64))
    assert square.columns_bytes == pytest.approx(3 * row.columns_bytes)
    assert row.columns_bytes > 0
    assert told(nn.Conv2d(16, 8, 1), torch.randn(4, 16, 64, 64)).columns_bytes == 0
