"""Efficiency set of a locally measured GPU: its `Speed` (`shardwise.cluster.probe`) replaces the rates of the framework's set.

Its peak and bandwidth are the rates that products and additions reached, so that fractions of them are 1.
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.cluster.cluster import Device, Speed
from shardwise.cost.calibration.efficiency import EfficiencySet

OPTIMIZER_BYTES = 28.0  # a float32 weight, its gradient and two states are read, all but the gradient written
CONVOLUTION = "convolution."
MEASURED = ("activation", "norm", "batch_norm", "softmax", "cast")


def with_measured_rates(stack: EfficiencySet, device: Device, speed: Speed) -> EfficiencySet:
    """Return `stack` with the rates that were measured on this GPU."""
    rates, bandwidth = dict(speed.rates), speed.memory_bandwidth_bytes_per_s
    moves = {"elementwise": 1.0, **{kind: rates[kind] / bandwidth for kind in MEASURED if kind in rates}}
    convolutions = {key.removeprefix(CONVOLUTION): rate for key, rate in rates.items() if key.startswith(CONVOLUTION)}
    return replace(
        stack, device=device.name, source="measured here", matmul=1.0, sustained=1.0, bandwidth=1.0, moves=tuple(moves.items()),
        convolution=tuple(convolutions.items()), optimizer_bytes=OPTIMIZER_BYTES, launch_s=speed.launch_s,
    )  # fmt: skip
