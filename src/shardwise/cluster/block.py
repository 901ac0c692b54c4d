"""Sizes of the transformer layers that the probe times as a whole; `shardwise.cost.devices.compute` prices them operator by operator.

Operators timed one by one miss the effects of a step on caches, memory and waiting threads.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProbeBlock:
    """Layers of a GPT without dropout. `sequences`: per batch and thread of the rank; `SMALL_BLOCK` has them on one thread."""

    name: str
    layers: int
    hidden: int
    heads: int
    sequence: int
    sequences: int

    def rate_key(self, precision: str) -> str:
        """Return the key in `Speed.rates` of the blocks/s of one thread's batch: two threads have twice the batch in a block."""
        return f"{self.name}.{precision}"


LARGE_BLOCK = ProbeBlock("block", layers=2, hidden=384, heads=6, sequence=256, sequences=2)
SMALL_BLOCK = ProbeBlock("few", layers=2, hidden=64, heads=2, sequence=16, sequences=1)  # dominated by launch times
