"""Copies of activations to the host and back beside compute. In: bytes, seconds of compute. Out: seconds of both.

On GPUs copies run on a lane of their own in each direction: out during forward, back during backward, so that a pass takes as long as the
longer of its compute and its copies (KARMA: Wahib et al., SC 2020; vDNN: Rhu et al. 2016). On processors they take the compute's
time. Not modelled: the first copy, which waits for the first layer, and the last, for which the backward may wait.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.cost.devices.compute import Seconds

HOST_BYTES_PER_S = 12e9  # to the host's memory and back, a GPU: half of PCIe 4 x16, shared by two; assumed
HOST_SLOWS = 0.1  # part of the seconds of copies to the host and back that computation is slower by while they run; assumed
COPY_MOVES = 3.0  # bytes that a processor's copy into new memory moves for each: read, written, and cleared by the system before


@dataclass(frozen=True, slots=True)
class Copies:
    """`seconds_per_byte`, one way. `beside`: whether they run beside the compute.

    >>> Copies(1.0, beside=False).around(Seconds(4.0, 8.0), 2.0)
    Seconds(forward=6.0, backward=10.0)
    >>> Copies(1.0, beside=True).around(Seconds(4.0, 8.0), 5.0)
    Seconds(forward=5.0, backward=8.5)
    """

    seconds_per_byte: float
    beside: bool

    def around(self, compute: Seconds, moved_bytes: float) -> Seconds:
        """Forward and backward of one microbatch of which `moved_bytes` go to the host and come back."""
        moving = moved_bytes * self.seconds_per_byte
        if not self.beside:
            return compute + Seconds(moving, moving)
        return Seconds(max(compute.forward + HOST_SLOWS * moving, moving), max(compute.backward + HOST_SLOWS * moving, moving))
