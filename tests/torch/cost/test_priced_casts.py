"""Prices under autocast: every operator moves the bytes of the dtypes it has there, and casts move what they read and write."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from shardwise.capture.capture import capture
from shardwise.cluster.cluster import Cluster, ClusterLevel, Device, NetworkLink, Speed
from shardwise.cost.step import Pricer
from shardwise.plan.layout import Layout

# A byte takes a second, a cast's byte a hundred; FLOPs nothing.
SPEED = Speed(1, 1, (("float32", 1e30), ("bfloat16", 1e30)), 1.0, 0.0, (("cast", 0.01),))
HERE = Cluster("c", Device("core", "cpu", SPEED.flops, 1e12, 1.0), (ClusterLevel("node", 1, NetworkLink(1e-6, 1e9)),), speeds=(SPEED,))


class Net(nn.Module):
    """A residual branch behind a norm, and one image's convolution with a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(8), nn.Linear(8, 8, bias=False)
        self.conv, self.batch = nn.Conv1d(4, 4, 3, padding=1, bias=False), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.up(self.norm(x))
        return torch.relu(self.batch(self.conv(y))).square().mean()


def seconds(precision: str) -> dict[str, tuple[float, float]]:
    graph = capture(Net(), (torch.randn(2, 4, 8),)).graph
    forward, backward, _, _ = Pricer(graph, HERE, 2).operator_seconds(Layout.parse(f"data=1 threads=1 precision={precision}"))
    return {op.target.split(".")[1]: (float(a), float(b)) for op, a, b in zip(graph.operators, forward, backward, strict=True)}


def test_each_operator_moves_the_bytes_that_it_has() -> None:
    x, weight, filters = 2 * 4 * 8, 8 * 8, 4 * 4 * 3  # elements
    found = seconds("bfloat16")
    assert found["layer_norm"][0] == pytest.approx(4 * (2 * x + 2 * 8))  # float32 in, out, and its weights
    # The norm's float32 result and the weight are cast, 4 bytes read and 2 written; the product reads and writes bfloat16.
    assert found["linear"][0] == pytest.approx(2 * (2 * x + weight) + 100 * 6 * (x + weight))
    assert found["add"][0] == pytest.approx((4 + 2 + 4) * x)  # float32 and bfloat16 come to float32
    assert found["conv1d"][0] == pytest.approx(2 * (2 * x + filters) + 100 * 6 * (x + filters))
    assert found["relu"] == (pytest.approx(2 * 2 * x), pytest.approx(2 * 3 * x))  # backward: its output, and both gradients
    batch = 2 * 2 * x + 4 * (4 * 4)  # bfloat16 in and out, four rows of statistics and weights in float32
    assert batch <= found["batch_norm"][0] <= batch + 4 * 4 * 4


def test_nothing_is_cast_in_float32() -> None:
    x, weight = 2 * 4 * 8, 8 * 8
    assert seconds("float32")["linear"][0] == pytest.approx(4 * (2 * x + weight))


def test_broken_twin_a_cast_that_is_not_counted_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.cost.memory import memory

    counted = memory.operator_work
    monkeypatch.setattr(
        memory, "operator_work", lambda graph, cast: {name: replace(w, cast_bytes=0.0) for name, w in counted(graph, cast).items()}
    )
    with pytest.raises(AssertionError):
        test_each_operator_moves_the_bytes_that_it_has()
