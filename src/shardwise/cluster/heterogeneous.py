"""Heterogeneous clusters. In: parts, each of one kind of device, and the link between them. Out: one `Cluster`.

Its own device and levels are lower bounds that hold for every part: the minimum of each figure. Plans whose stages are each on
one part are priced part by part (`shardwise.cost.step_time.heterogeneous`). Not modelled: parts joined by links of different speeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd

from shardwise.cluster.cluster import Cluster, ClusterLevel, Device, NetworkLink
from shardwise.errors import UsageError


def mix_clusters(name: str, parts: Sequence[Cluster], between: NetworkLink) -> Cluster:
    """Return one cluster of `parts`, with ranks numbered through them in order.

    >>> mix_clusters("both", [Cluster.parse("dgx-h100"), Cluster.parse("2xdgx-a100-80")], NetworkLink(1e-5, 25e9)).num_devices
    24

    Raises:
        UsageError: fewer than two parts, a nested heterogeneous part, GPUs with CPUs, no common precision.
    """
    if len(parts) < 2:
        raise UsageError(f"cluster {name} has {len(parts)} part; a mixed cluster needs 2 or more")
    for part in parts:
        if part.parts:
            raise UsageError(f"cluster {name}: its part {part.name} is mixed itself; name its parts one by one")
    if len({part.device.kind for part in parts}) > 1:
        kinds = " and ".join(f"{part.name} ({part.device.kind})" for part in parts)
        raise UsageError(f"cluster {name}: {kinds} do not mix; plan each kind of device alone")
    size = 0
    for part in parts:
        size = gcd(size, part.node_size)
    inner = min((part.levels[0].link for part in parts), key=_link_bandwidth)
    outer = min((between, *(part.levels[-1].link for part in parts if len(part.levels) > 1)), key=_link_bandwidth)
    number = sum(part.num_devices for part in parts)
    levels = (ClusterLevel("node", size, inner), ClusterLevel("cluster", number // size, outer))
    price, power = sum(p.price_per_hour for p in parts), sum(p.power_w for p in parts)
    if parts[0].kind.shares_hosts:
        parts = [replace(part, part_of=number) for part in parts]
    return Cluster(name, _weakest_device([part.device for part in parts]), levels, price, power, parts=tuple(parts), between=between)


def reorder_parts(cluster: Cluster, order: Sequence[int]) -> Cluster:
    """Return the cluster with its parts in another order, and with the new order in its name or source if the old one had it."""
    parts = [cluster.parts[i] for i in order]
    words = "+".join(part.name for part in parts)
    ordered_already = "+".join(part.name for part in cluster.parts) == cluster.name
    origin = f"{cluster.origin.partition('.toml')[0]}.toml:{words}" if cluster.origin and parts != list(cluster.parts) else cluster.origin
    return replace(cluster, name=words if ordered_already else cluster.name, parts=tuple(parts), origin=origin)


def order_parts(cluster: Cluster, names: Sequence[str]) -> Cluster:
    """Return the cluster with its parts in the order of these names.

    Raises:
        UsageError: the names are no permutation of its parts' names.
    """
    part_names = [part.name for part in cluster.parts]
    if sorted(names) != sorted(part_names):
        raise UsageError(f"{'+'.join(names)} is no order of the parts of {cluster.name}, which are {', '.join(part_names) or 'none'}")
    remaining, order = list(enumerate(part_names)), []
    for name in names:
        next_part = next(item for item in remaining if item[1] == name)
        remaining.remove(next_part)
        order.append(next_part[0])
    return reorder_parts(cluster, order)


def _link_bandwidth(link: NetworkLink) -> float:
    return link.bandwidth_bytes_per_s * link.efficiency * link.ports


def _weakest_device(devices: Sequence[Device]) -> Device:
    first = devices[0]
    common = [p for p, _ in first.peak_flops if all(p in dict(d.peak_flops) for d in devices)]
    if not common:
        raise UsageError(f"{' and '.join(d.name for d in devices)} have no precision in common; plan them apart")
    names = list(dict.fromkeys(d.name for d in devices))
    return Device(
        " and ".join(names),
        first.kind,
        tuple((p, min(dict(d.peak_flops)[p] for d in devices)) for p in common),
        min(d.memory_bytes for d in devices),
        min(d.memory_bandwidth_bytes_per_s for d in devices),
        min(d.matmul_efficiency for d in devices),
        max(d.launch_s for d in devices),
        max(d.scratch_bytes for d in devices),
        source="the least of each figure",
    )
