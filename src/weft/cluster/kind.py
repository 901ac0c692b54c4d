"""What follows from the kind of a cluster's devices, asked by name. In: a kind, as files of clusters have it. Out: its `Kind`.

Seconds and bytes of an operator on each kind are `weft.cost.devices`'.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """`noun`: what a cluster has many of. `torch`: the device's type in torch. `library`: of collectives, whatever the links say.

    `shares_hosts`: ranks are spread evenly over hosts and divide their cores (as threads) and memory; there may be more of them than
    cores. Others have a device each, and fill hosts in order.
    `times_programs`: what messages of weft's own programs cost is known, so that they are weighed against the library's collectives.
    `computes_elsewhere`: a precision that was not measured takes as long as what it is elsewhere (`plan/precision`). `splits_backward`:
    what a backward in two parts costs is less than the idle time that it fills.
    """

    noun: str
    torch: str
    library: str = ""
    shares_hosts: bool = False
    times_programs: bool = False
    computes_elsewhere: bool = False
    splits_backward: bool = False


_PROCESSORS = Kind("cores", "cpu", "gloo", shares_hosts=True, times_programs=True, computes_elsewhere=True)
_ACCELERATORS = Kind("devices", "cuda", splits_backward=True)

KINDS = {"cpu": _PROCESSORS, "gpu": _ACCELERATORS, "tpu": _ACCELERATORS}
