"""Seconds of one operator on one rank, and what else follows from its kind: processors and GPUs, behind `Devices`."""

from __future__ import annotations

from weft.cluster.cluster import Cluster
from weft.cost.calibration.efficiency import EAGER, Stack, stack_of
from weft.cost.devices.card import of_card
from weft.cost.devices.devices import Devices
from weft.cost.devices.gpus import AutocastGpus, Gpus
from weft.cost.devices.processors import Processors


def devices_of(cluster: Cluster, stack: Stack | None = None, busy: tuple[int, int] | None = None) -> Devices:
    """Those of a cluster. `stack`: an efficiency set in place of its own; `busy`: ranks that work at once, and threads of each."""
    if cluster.kind.shares_hosts:
        return Processors(cluster, busy)
    if stack is None and cluster.speeds:
        stack = of_card(stack_of(cluster.device, cluster.stack or EAGER), cluster.device, cluster.speed(1))
    stack = stack or stack_of(cluster.device, cluster.stack)
    return (AutocastGpus if stack.autocast else Gpus)(cluster, busy, stack)
