"""The transformer layers that the probe times whole, by their sizes; what they cost operator by operator is `weft.cost.devices.compute`'s.

Operators one by one do not show what a step does to caches, to memory and to the threads that wait for one another.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Block:
    """Layers of a GPT without dropout. `sequences`: in a batch, for each thread of the rank; a thread of `FEW` has all of them."""

    name: str
    layers: int
    hidden: int
    heads: int
    sequence: int
    sequences: int

    def rate(self, precision: str) -> str:
        """Under which name of `Speed.rates` the blocks/s of one thread's batch are kept: two threads have twice the batch in a block."""
        return f"{self.name}.{precision}"


TRANSFORMER = Block("block", layers=2, hidden=384, heads=6, sequence=256, sequences=2)
FEW = Block("few", layers=2, hidden=64, heads=2, sequence=16, sequences=1)  # of which nearly all is the beginning of its operators
