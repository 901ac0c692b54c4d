"""Properties of kinds of devices (cpu, gpu, tpu), by the name in cluster files. `shardwise.cost.devices` prices operators on each kind."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """Properties of a kind of device. `noun`: plural of its unit. `torch`: device type in torch. `library`: collective library, overriding
    the links'.

    `shares_hosts`: ranks are spread evenly over hosts and share their cores (as threads) and memory; there may be more ranks than
    cores. On other kinds every rank has a device, and ranks fill hosts in order.
    `prices_programs`: the cost of messages of shardwise's own programs is known, so that they compete with the library's collectives.
    `substitutes_precisions`: an unmeasured precision costs as much as its substitute (`plan/ir/precision`). `splits_backward`:
    splitting backward into input and weight gradients costs less than the bubble that it fills.
    """

    noun: str
    torch: str
    library: str = ""
    shares_hosts: bool = False
    prices_programs: bool = False
    substitutes_precisions: bool = False
    splits_backward: bool = False


_PROCESSORS = DeviceKind("cores", "cpu", "gloo", shares_hosts=True, prices_programs=True, substitutes_precisions=True)
_ACCELERATORS = DeviceKind("devices", "cuda", splits_backward=True)

KINDS = {"cpu": _PROCESSORS, "gpu": _ACCELERATORS, "tpu": _ACCELERATORS}
