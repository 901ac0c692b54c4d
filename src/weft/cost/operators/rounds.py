"""What attention costs besides where keys and values go round the ranks (`weft.lower.kernels.ring`). In: an inventory, a sharding, an
operator. Out: what goes round, bytes of memory that move to merge its blocks, and that those take which are on their way.

Not modelled: that a block goes no further than it is seen, and blocks of windows that nobody computes.
"""

from __future__ import annotations

from weft.cost.memory.memory import Inventory
from weft.cost.pieces import pieces, tensor_axes
from weft.model.graph import Operator
from weft.model.sharding.sharding import Sharding, passed_round
from weft.ops.attention import is_causal

ROUND = "ring"  # the collective of what goes round while an operator computes
# Times through memory of what a block is added to, forward and backward, over its bytes: it is scaled and added to in float32 (8 + 10 bytes
# an element of 16 bits, 8 + 12 of 32), gradients are added to (10 and 12).
MERGING, MERGING_WIDE = (9.0, 5.0), (5.0, 3.0)
WIDE = 2.0  # float32 against 16 bits


def rounds(inventory: Inventory, sharding: Sharding | None, op: Operator) -> dict[str, tuple[str, ...]]:
    """By axis whose ranks pass them round, an operator's keys and values."""
    if sharding is None or inventory.works[op.name].kind != "attention":
        return {}
    by_axis = {axis: passed_round(sharding, op, inventory.graph.rules[op.name], axis) for axis in tensor_axes(sharding)}
    return {axis: values for axis, values in by_axis.items() if values}


def merged(inventory: Inventory, sharding: Sharding | None, op: Operator) -> tuple[float, float]:
    """Bytes that move, forward and backward, to merge an operator's blocks: one a rank and step; of causal ones half see one another."""
    tensors, forward, backward = inventory.graph.tensors, 0.0, 0.0
    for axis, values in rounds(inventory, sharding, op).items():
        assert sharding is not None
        blocks = sharding.sizes[axis] * (0.75 if is_causal(op) else 1.0)
        there, back = MERGING if inventory.kernels.is_half else MERGING_WIDE
        forward += there * blocks * tensors[op.outputs[0]].size_bytes
        backward += back * blocks * sum(tensors[v].size_bytes for v in (op.inputs[0], *values))
    return forward, backward


def on_the_way(inventory: Inventory, sharding: Sharding | None, op: Operator) -> float:
    """Bytes of a block of keys and values that is here and of one on its way, and in float32 of gradients: of this rank's own block and of
    the one that is here; of more than two ranks also of what comes from those before and of what goes on."""
    tensors, amount = inventory.graph.tensors, 0.0
    for axis, values in rounds(inventory, sharding, op).items():
        assert sharding is not None
        wide = (WIDE if inventory.kernels.is_half else 1.0) * (2 if sharding.sizes[axis] == 2 else 4)
        amount += sum((2 + wide) * tensors[v].size_bytes / pieces(sharding, v) for v in dict.fromkeys(values))
    return amount
