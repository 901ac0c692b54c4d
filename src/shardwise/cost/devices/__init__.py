"""Device models: seconds of one operator on one rank, and other properties of CPUs and GPUs, behind the interface `Devices`."""

from __future__ import annotations

from shardwise.cluster.cluster import Cluster
from shardwise.cost.calibration.efficiency import EAGER, EfficiencySet, stack_of
from shardwise.cost.devices.devices import Devices
from shardwise.cost.devices.gpus import AutocastGpus, Gpus, with_measured_rates
from shardwise.cost.devices.processors import Processors


def devices_of(cluster: Cluster, stack: EfficiencySet | None = None, busy: tuple[int, int] | None = None) -> Devices:
    """Return the device model of a cluster. `stack`: another efficiency set; `busy`: (concurrent ranks, threads of each)."""
    if cluster.kind.shares_hosts:
        return Processors(cluster, busy)
    if stack is None and cluster.speeds:
        stack = with_measured_rates(stack_of(cluster.device, cluster.stack or EAGER), cluster.device, cluster.speed(1))
    stack = stack or stack_of(cluster.device, cluster.stack)
    return (AutocastGpus if stack.autocast else Gpus)(cluster, busy, stack)
