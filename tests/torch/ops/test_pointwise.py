"""Convolutions over single elements run as products where that pays, and give the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.capture.capture import capture
from shardwise.model.sharding.convolution_as_product import is_product_faster, is_run_as_product


class Net(nn.Module):
    """One convolution of `how`, and a loss."""

    def __init__(self, *sizes: Any, **how: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(*sizes, **how)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).square().mean()


@pytest.mark.parametrize(
    ("how", "size", "product"),
    [
        ({}, (8, 256, 2, 2), True),
        ({"bias": False}, (2, 256, 4, 4), True),
        ({}, (16, 256, 1, 1), True),
        ({}, (8, 256, 5, 5), False),
        ({}, (1, 256, 4, 4), False),
        ({"stride": 2}, (8, 256, 2, 2), False),
        ({"padding": 1}, (8, 256, 2, 2), False),
        ({"groups": 2}, (8, 256, 2, 2), False),
    ],
)
def test_what_runs_as_one_product(how: dict[str, Any], size: tuple[int, ...], product: bool) -> None:
    make, x = lambda: Net(256, 256, 1, **how), torch.randn(*size)
    engine = shardwise.parallelize(make, batch=(x,), plan="data=1 precision=float64", optimizer={"name": "sgd", "lr": 0.1}, seed=0)
    (runner,) = engine.executor.runners.values()
    module: Any = runner.local.module
    targets = {str(node.target) for node in module.graph.nodes}
    assert ("aten.linear.default" in targets, "aten.conv2d.default" in targets) == (product, not product)
    torch.manual_seed(0)
    serial = make().double()
    serial(x.double()).backward()
    engine.forward_backward((x,))
    for name, gradient in (engine.full_gradients() or {}).items():
        torch.testing.assert_close(gradient, serial.get_parameter(name).grad, rtol=1e-11, atol=1e-14)


def test_what_does_not_pay() -> None:
    assert not is_product_faster(8, 1, 1024), "small weights are read again quickly"
    assert is_product_faster(16, 1, 1024), "from 16 samples on torch takes oneDNN"
    assert not is_product_faster(2, 1, 1 << 20), "two rows are no matrix"


def test_an_unbatched_image_is_left() -> None:
    graph = capture(Net(256, 256, 1), (torch.randn(256, 4, 4),)).graph
    assert not any(is_run_as_product(op, graph.tensors, None) for op in graph.operators)
