"""Expert parallelism: values that are dispatched to the ranks of experts and combined back, by operator."""

from __future__ import annotations

from shardwise.cost.memory.memory import Inventory
from shardwise.model.dims.labels import expert_weights
from shardwise.model.graph import Operator
from shardwise.ops import record_of
from shardwise.ops.experts import experts_and_top_k
from shardwise.ops.vocabulary import LoweringKind

RoutedExperts = tuple[int, int]  # number of experts, and experts per token (top-k)
ANY_EXPERTS: RoutedExperts = (0, 0)


def dispatched_values(inventory: Inventory) -> dict[str, tuple[str, RoutedExperts]]:
    """Return the dispatched or combined value by operator, each once. For ragged rows also the experts: a token is sent once to each rank
    that has any of its experts (`ops.experts.ranks_reached`)."""
    by_expert, sent = set(expert_weights(inventory.graph).values()), set[str]()
    values: dict[str, tuple[str, RoutedExperts]] = {}
    for op in inventory.graph.operators:
        value = _dispatched_value(inventory, op, op.name in by_expert)
        if value and value not in sent:
            sent.add(value)
            values[op.name] = value, experts_and_top_k(op, inventory.graph.tensors) if record_of(op).expert_stage else ANY_EXPERTS
    return values


def _dispatched_value(inventory: Inventory, op: Operator, by_expert: bool) -> str:
    """Return the value that an operator dispatches or combines, "" for none: for expert products the narrower of operand and result, for
    ragged rows those of the first and last operator."""
    if ragged := record_of(op).expert_stage:
        return op.outputs[0] if ragged == LoweringKind.EXPERT_DISPATCH else op.inputs[0] if ragged == LoweringKind.EXPERT_COMBINE else ""
    if not by_expert:
        return ""
    operands = [v for v in (*op.inputs, op.outputs[0]) if v in inventory.batched]
    return min(operands, key=lambda v: inventory.graph.tensors[v].size, default="")
