"""What of tokens goes to the ranks of their experts, and back, where these are spread. In: an inventory. Out: by operator the value."""

from __future__ import annotations

from weft.cost.memory.memory import Inventory
from weft.model.dims.labels import expert_weights
from weft.model.graph import Operator
from weft.ops import record_of
from weft.ops.experts import choices

Choices = tuple[int, int]  # experts, and how many of them a token goes to
ANY: Choices = (0, 0)


def dispatched(inventory: Inventory) -> dict[str, tuple[str, Choices]]:
    """By operator the value that is sent there, each once. Of ragged rows also the experts: a token is sent once to each rank that has any
    of its own (`ops.experts.ranks_reached`)."""
    by_expert, seen = set(expert_weights(inventory.graph).values()), set[str]()
    values: dict[str, tuple[str, Choices]] = {}
    for op in inventory.graph.operators:
        value = _travels(inventory, op, op.name in by_expert)
        if value and value not in seen:
            seen.add(value)
            values[op.name] = value, choices(op, inventory.graph.tensors) if record_of(op).ragged else ANY
    return values


def _travels(inventory: Inventory, op: Operator, by_expert: bool) -> str:
    """Into the first product and out of the last it is the narrower of what that reads and writes; of ragged rows all that begin or end."""
    if ragged := record_of(op).ragged:
        return op.outputs[0] if ragged == "begins" else op.inputs[0] if ragged == "ends" else ""
    if not by_expert:
        return ""
    ends = [v for v in (*op.inputs, op.outputs[0]) if v in inventory.batched]
    return min(ends, key=lambda v: inventory.graph.tensors[v].size, default="")
