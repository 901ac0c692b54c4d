"""Activation offload: host copies and how they overlap with compute. In: bytes, seconds of compute. Out: seconds of both.

On GPUs copies have a stream in each direction: offload during forward, load during backward, so that a pass takes as long as the
longer of its compute and its copies (KARMA: Wahib et al., SC 2020; vDNN: Rhu et al. 2016). On CPUs they add to the compute's
time. Not modelled: the first copy, which waits for the first layer, and the last, for which backward may wait.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.cost.devices.compute import Seconds

HOST_BYTES_PER_S = 12e9  # host copies of one GPU: half of PCIe 4 x16, shared by two; assumed
HOST_SLOWS = 0.1  # slowdown of compute as a fraction of the seconds of concurrent host copies; assumed
COPY_MOVES = 3.0  # bytes moved per byte that a CPU copies into new memory: read, written, and cleared by the system before


@dataclass(frozen=True, slots=True)
class HostCopies:
    """Cost of host copies: `seconds_per_byte`, one way, and whether they run concurrently with compute (`overlap_compute`).

    >>> HostCopies(1.0, overlap_compute=False).with_copies(Seconds(4.0, 8.0), 2.0)
    Seconds(forward=6.0, backward=10.0)
    >>> HostCopies(1.0, overlap_compute=True).with_copies(Seconds(4.0, 8.0), 5.0)
    Seconds(forward=5.0, backward=8.5)
    """

    seconds_per_byte: float
    overlap_compute: bool

    def with_copies(self, compute: Seconds, moved_bytes: float) -> Seconds:
        """Return forward and backward of one microbatch that offloads and loads `moved_bytes`."""
        copy_s = moved_bytes * self.seconds_per_byte
        if not self.overlap_compute:
            return compute + Seconds(copy_s, copy_s)
        return Seconds(max(compute.forward + HOST_SLOWS * copy_s, copy_s), max(compute.backward + HOST_SLOWS * copy_s, copy_s))
