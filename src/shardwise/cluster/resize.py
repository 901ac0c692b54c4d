"""Resizing of a cluster. In: a cluster, a number of devices. Out: a cluster of that many devices of the same machines.

Not modelled: heterogeneous clusters, for which the number does not determine the kinds.
"""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod

from shardwise.cluster.cluster import Cluster
from shardwise.errors import ShardwiseError, UsageError


def resize_cluster(cluster: Cluster, num_devices: int) -> Cluster:
    """Return `cluster` with `num_devices` devices: whole machines, or a part of one at its share of the price.

    >>> resize_cluster(Cluster.parse("8xp3.16xlarge"), 16).name, resize_cluster(Cluster.parse("2xdgx-a100-80"), 1).name
    ('2xp3.16xlarge', '1 device of dgx-a100-80')

    Raises:
        UsageError: below 1, a heterogeneous cluster, or a number that is no whole number of machines.
    """
    if num_devices < 1:
        raise UsageError(f"gpus={num_devices}: a cluster has at least 1 device")
    if cluster.parts:
        raise UsageError(
            f"gpus={num_devices}: {cluster.name} has several kinds of machines; name the cluster that you mean, cluster=4xdgx-h100"
        )
    if part := re.fullmatch(r"\d+ devices? of (.+)", cluster.source_text):
        cluster = _with_settings_of(cluster, Cluster.parse(part[1]))  # the machine that they belong to
    origin = f"{num_devices} device{'s' if num_devices > 1 else ''} of {cluster.origin}" if cluster.origin else ""
    size, inner = cluster.node_size, cluster.levels[0]
    if num_devices < size:
        share = num_devices / cluster.num_devices
        kind = re.sub(r"^\d+x", "", cluster.name)
        name = f"{num_devices} device{'s' if num_devices > 1 else ''} of {kind}"
        return replace(
            cluster, name=name, levels=(replace(inner, size=num_devices),),
            price_per_hour=cluster.price_per_hour * share, power_w=cluster.power_w * share, origin=origin,
        )  # fmt: skip
    if num_devices == cluster.num_devices:
        return cluster
    unit = prod(level.size for level in cluster.levels[:-1]) if len(cluster.levels) > 2 else size
    if num_devices % unit:
        near = num_devices // unit * unit
        fits = f"{near} or {near + unit}" if near else f"{unit}, or at most {size}"
        raise UsageError(f"gpus={num_devices} is no whole number of machines of {unit} devices; use {fits}")
    by_name = re.fullmatch(r"(?:(\d+)x)?(.+)", cluster.name)
    if by_name is not None and len(cluster.levels) <= 2 and not cluster.origin:
        try:
            return _with_settings_of(cluster, Cluster.parse(f"{num_devices // size}x{by_name[2]}"))
        except ShardwiseError:
            pass  # a user's cluster: not in the catalogue
    if len(cluster.levels) == 1 and num_devices != size:
        raise UsageError(
            f"gpus={num_devices}: {cluster.name} is one machine of {size} devices, and its file has no network to join several"
        )
    levels = cluster.levels if len(cluster.levels) == 1 else (*cluster.levels[:-1], replace(cluster.levels[-1], size=num_devices // unit))
    factor = num_devices / cluster.num_devices
    return replace(
        cluster, name=f"{cluster.name} with {num_devices} devices", levels=levels,
        price_per_hour=cluster.price_per_hour * factor, power_w=cluster.power_w * factor, origin=origin,
    )  # fmt: skip


def _with_settings_of(cluster: Cluster, other: Cluster) -> Cluster:
    """Return `other` with the memory limit and the efficiency set of `cluster`."""
    return replace(other, memory_limit_bytes=cluster.memory_limit_bytes, stack=cluster.stack or other.stack)
