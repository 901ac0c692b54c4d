"""Costs of ring attention (`shardwise.lower.kernels.ring`) and of Ulysses' head exchange (`shardwise.lower.kernels.ulysses_ring`), alone
or combined.

In: an inventory, a sharding, an operator. Out: collectives, memory traffic of merging softmax blocks, and buffers of blocks in transit.
Not modelled: causal or windowed blocks that need not be sent or computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from shardwise.cost.memory.memory import Inventory
from shardwise.cost.memory.storages import SavedStorage, StorageMap
from shardwise.cost.shard_counts import num_shards, tensor_axes
from shardwise.model.graph import Operator
from shardwise.model.sharding.sharding import Sharding, num_exchanging_ranks, ring_operands
from shardwise.ops.attention import attention_mask_of, is_causal
from shardwise.plan.ir.placement import is_shard

RING = "ring"  # the collective that passes keys and values on while attention computes
# Memory traffic of merging a block, forward and backward, over the accumulator's bytes: it is scaled and added to in float32 (8 + 10 bytes
# per 16-bit element, 8 + 12 per 32-bit element), gradients are accumulated (10 and 12).
MERGE_TRAFFIC, MERGE_TRAFFIC_FLOAT32 = (9.0, 5.0), (5.0, 3.0)
WIDE = 2.0  # float32 against 16 bits


def ring_values(inventory: Inventory, sharding: Sharding | None, op: Operator) -> dict[str, tuple[str, ...]]:
    """Return an operator's keys and values by axis over which ring attention passes them."""
    if sharding is None or inventory.works[op.name].kind != "attention":
        return {}
    values_by_axis = {axis: ring_operands(sharding, op, inventory.graph.rules[op.name], axis) for axis in tensor_axes(sharding)}
    return {axis: values for axis, values in values_by_axis.items() if values}


SubgroupSpan = tuple[int, int] | None  # number of ranks of an axis, and their stride along it


class RingUlyssesSizes(NamedTuple):
    """Sizes of combined ring and Ulysses attention: `ulysses_size` adjacent ranks of an axis exchange heads, and keys go round a ring of
    `ring_size` such groups. `key_repeats`: number of times that a key head is sent, since several ranks read it."""

    ulysses_size: int
    ring_size: int
    key_repeats: float


def ring_ulysses_sizes(inventory: Inventory, sharding: Sharding, op: Operator, axis: str) -> RingUlyssesSizes:
    """Return the ring and Ulysses sizes of an axis."""
    graph, axis_size = inventory.graph, sharding.sizes[axis]
    rule, queries, keys = graph.rules[op.name], *(graph.tensors[v].shape for v in op.inputs[:2])
    ulysses_size = num_exchanging_ranks(sharding, op, rule, axis, queries)
    heads = keys[-3] / num_head_shards(sharding, op, len(queries) - 3) if ulysses_size > 1 else 1
    return RingUlyssesSizes(ulysses_size, axis_size // ulysses_size, max(1.0, ulysses_size / heads))


def num_head_shards(sharding: Sharding, op: Operator, dim: int) -> float:
    """Return the number of shards of query heads over other axes."""
    forms = sharding.input_placements[op.name][0].items()
    return prod(form.split_factor(sharding.sizes[axis]) for axis, form in forms if is_shard(form) and form.dim == dim)


def exchanged_values(inventory: Inventory, op: Operator, sets: RingUlyssesSizes) -> Iterator[tuple[str, float]]:
    """Yield (value, multiple of its bytes) exchanged between heads and positions, each way; of a mask only its rows."""
    tensors, mask = inventory.graph.tensors, attention_mask_of(op)
    yield from ((value, 1.0) for value in (op.inputs[0], op.outputs[0]))
    yield from ((value, sets.key_repeats) for value in op.inputs[1:3])
    if mask is not None and tensors[mask].shape[-2] > 1:
        for_all = len(tensors[mask].shape) < 3 or tensors[mask].shape[-3] == 1
        yield mask, float(sets.ulysses_size if for_all else 1)


class AttentionCollective(NamedTuple):
    """A collective of an operator with its counts in forward and backward, `subgroup` a subgroup of an axis. `num_shards`: divisor of the
    value's bytes; `size_bytes`: bytes instead, of float32 data whatever the value's dtype."""

    name: str
    value: str
    forward: int
    backward: int
    subgroup: SubgroupSpan
    num_shards: float
    size_bytes: float | None = None


def attention_collectives(inventory: Inventory, sharding: Sharding, op: Operator, axis: str) -> Iterator[AttentionCollective]:
    """Yield the ring passes of keys and values, both ways, and of their float32 gradients; and the all-to-alls of heads, both ways."""
    values = ring_values(inventory, sharding, op).get(axis)
    if not values:
        return
    tensors, sizes = inventory.graph.tensors, ring_ulysses_sizes(inventory, sharding, op, axis)
    has_gradient = op.outputs[0] in inventory.grads
    for value in values if sizes.ring_size > 1 else ():
        divisor, subgroup = (
            num_shards(sharding, value, axis) * sizes.ulysses_size / sizes.key_repeats,
            (sizes.ring_size, sizes.ulysses_size),
        )
        yield AttentionCollective(RING, value, 1, has_gradient, subgroup, divisor)
        if has_gradient:
            yield AttentionCollective(RING, value, 0, 1, subgroup, 1.0, tensors[value].size_bytes / divisor)
    for value, times in exchanged_values(inventory, op, sizes) if sizes.ulysses_size > 1 else ():
        divisor = num_shards(sharding, value, axis) * sizes.ring_size / times
        yield AttentionCollective("all_to_all", value, 1, value in inventory.grads, (sizes.ulysses_size, 1), divisor)


def saved_by_exchange(places: StorageMap, op: Operator) -> Iterator[SavedStorage]:
    """Yield storages that backward saves additionally after a head exchange: the result before it is exchanged back, key heads that several
    ranks read, a mask's rows."""
    inventory, sharding = places.inventory, places.sharding
    for axis in ring_values(inventory, sharding, op):
        assert sharding is not None
        sizes = ring_ulysses_sizes(inventory, sharding, op, axis)
        for value, times in exchanged_values(inventory, op, sizes) if sizes.ulysses_size > 1 else ():
            extra_copies = times - (value in op.inputs[:3])
            if extra_copies > 0:
                stored = places.storage_of(value)
                yield stored._replace(
                    root=f"{value} by heads for {op.name}", size_bytes=extra_copies * stored.size_bytes, is_persistent=False
                )


def merge_bytes(inventory: Inventory, sharding: Sharding | None, op: Operator) -> tuple[float, float]:
    """Return the memory traffic, forward and backward, of merging an operator's blocks: one per rank and step; half of causal ones."""
    tensors, forward, backward = inventory.graph.tensors, 0.0, 0.0
    for axis, values in ring_values(inventory, sharding, op).items():
        assert sharding is not None
        sizes = ring_ulysses_sizes(inventory, sharding, op, axis)
        blocks = sizes.ring_size * (0.75 if is_causal(op) else 1.0)
        forward_ratio, backward_ratio = MERGE_TRAFFIC if inventory.kernel_memory.is_half else MERGE_TRAFFIC_FLOAT32
        forward += forward_ratio * blocks * tensors[op.outputs[0]].size_bytes
        backward += backward_ratio * blocks * sum(tensors[v].size_bytes for v in (op.inputs[0], *values))
    return forward, backward


def in_transit_bytes(inventory: Inventory, sharding: Sharding | None, op: Operator) -> float:
    """Return the bytes of the current and the next block of keys and values, and of float32 gradients: of this rank's own block and the
    current one; with more than two ranks also of those received and sent on."""
    tensors, amount = inventory.graph.tensors, 0.0
    for axis, values in ring_values(inventory, sharding, op).items():
        assert sharding is not None
        sizes = ring_ulysses_sizes(inventory, sharding, op, axis)
        num_gradients = 0 if sizes.ring_size == 1 else 2 if sizes.ring_size == 2 else 4
        gradient_blocks = (WIDE if inventory.kernel_memory.is_half else 1.0) * num_gradients
        blocks = sizes.key_repeats * (2 * (num_gradients > 0) + gradient_blocks)
        amount += sum(blocks * tensors[v].size_bytes / num_shards(sharding, v) for v in dict.fromkeys(values))
        if sizes.ulysses_size > 1:  # an all-to-all has a separate result
            pairs = exchanged_values(inventory, op, sizes)
            amount += max(times * tensors[v].size_bytes / num_shards(sharding, v) for v, times in pairs)
    return amount
