"""Plausibility checks of a cluster's figures. In: a cluster. Out: warnings, each with the key and a typical value.

Impossible figures are refused when a file is read; these checks find mistakes of units and of order.
"""

from __future__ import annotations

from shardwise.cluster.cluster import Cluster
from shardwise.units import format_bytes, format_seconds


def implausible_figures(cluster: Cluster) -> tuple[str, ...]:
    """Return one sentence for each figure that is far from existing hardware.

    >>> implausible_figures(Cluster.parse("8xdgx-h100"))
    ()
    """
    if cluster.parts:
        return tuple(f"{part.name}: {words}" for part in cluster.parts for words in implausible_figures(part))
    device, doubtful = cluster.device, []
    if device.memory_bytes < 100e6:
        doubtful.append(f"memory_bytes = {device.memory_bytes:g} is {format_bytes(device.memory_bytes)} a device; it is in bytes: 80e9")
    if device.memory_bandwidth_bytes_per_s < 1e9:
        doubtful.append(
            f"memory_bandwidth_bytes_per_s = {device.memory_bandwidth_bytes_per_s:g} is slow for a memory; it is in bytes/s: 2e12"
        )
    for precision, flops in device.peak_flops:
        if not 1e9 <= flops <= 1e17:
            doubtful.append(f"peak_flops.{precision} = {flops:g} FLOP/s is out of what devices reach; 312 TFLOP/s are 312e12")
    previous = None
    for level in cluster.levels:
        link = level.link
        if link.bandwidth_bytes_per_s < 1e6:
            doubtful.append(f"level {level.name}: bandwidth_bytes_per_s = {link.bandwidth_bytes_per_s:g}; 100 Gbit/s are 12.5e9 bytes/s")
        if link.latency_s > 0.1:
            doubtful.append(
                f"level {level.name}: latency_s = {link.latency_s:g} is {format_seconds(link.latency_s)}; 5 microseconds are 5e-6"
            )
        if previous is not None and link.bandwidth_bytes_per_s > previous.size * previous.link.bandwidth_bytes_per_s:
            doubtful.append(
                f"level {level.name} is faster than all devices of {previous.name} together "
                f"({link.bandwidth_bytes_per_s:g} bytes/s against {previous.size} x {previous.link.bandwidth_bytes_per_s:g}); "
                "levels go from the innermost outwards"
            )
        previous = level
    if cluster.price_per_hour and not cluster.priced:
        doubtful.append('price_per_hour has no date; prices change: priced = "our contract, 2026-10"')
    return tuple(doubtful)
