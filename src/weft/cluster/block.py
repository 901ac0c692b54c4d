"""The transformer layers that the probe times whole, by their sizes; what they cost operator by operator is `weft.cost.compute`'s.

Operators one by one do not show what a step does to caches, to memory and to the threads that wait for one another.
"""

from __future__ import annotations

LAYERS, HIDDEN, HEADS, SEQUENCE = 2, 384, 6, 256
SEQUENCES = 2  # in a batch, for each thread of the rank


def rate_name(precision: str) -> str:
    """Under which name of `Speed.rates` the blocks/s of one thread's batch are kept: a rank of 2 threads has twice the batch in a block."""
    return f"block.{precision}"
