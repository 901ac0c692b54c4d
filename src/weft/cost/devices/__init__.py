"""Device models: seconds of one operator on one rank, and other properties of CPUs and GPUs, behind the interface `Devices`."""

from __future__ import annotations

from weft.cluster.cluster import Cluster
from weft.cost.calibration.efficiency import EAGER, Stack, stack_of
from weft.cost.devices.card import of_card
from weft.cost.devices.devices import Devices
from weft.cost.devices.gpus import AutocastGpus, Gpus
from weft.cost.devices.processors import Processors


def devices_of(cluster: Cluster, stack: Stack | None = None, busy: tuple[int, int] | None = None) -> Devices:
    """Return the device model of a cluster. `stack`: another efficiency set; `busy`: (concurrent ranks, threads of each)."""
    if cluster.kind.shares_hosts:
        return Processors(cluster, busy)
    if stack is None and cluster.speeds:
        stack = of_card(stack_of(cluster.device, cluster.stack or EAGER), cluster.device, cluster.speed(1))
    stack = stack or stack_of(cluster.device, cluster.stack)
    return (AutocastGpus if stack.autocast else Gpus)(cluster, busy, stack)
