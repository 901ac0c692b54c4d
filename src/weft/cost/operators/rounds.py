"""Costs of ring attention (`weft.lower.kernels.ring`) and of Ulysses' head exchange (`weft.lower.kernels.exchanged`), alone or combined.

In: an inventory, a sharding, an operator. Out: collectives, memory traffic of merging softmax blocks, and buffers of blocks in transit.
Not modelled: causal or windowed blocks that need not be sent or computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from weft.cost.memory.memory import Inventory
from weft.cost.memory.places import Places, Stored
from weft.cost.pieces import pieces, tensor_axes
from weft.model.graph import Operator
from weft.model.sharding.sharding import Sharding, exchanged, passed_round
from weft.ops.attention import is_causal, mask_of
from weft.plan.placement import is_shard

ROUND = "ring"  # the collective that passes keys and values on while attention computes
# Memory traffic of merging a block, forward and backward, over the accumulator's bytes: it is scaled and added to in float32 (8 + 10 bytes
# per 16-bit element, 8 + 12 per 32-bit element), gradients are accumulated (10 and 12).
MERGING, MERGING_WIDE = (9.0, 5.0), (5.0, 3.0)
WIDE = 2.0  # float32 against 16 bits


def rounds(inventory: Inventory, sharding: Sharding | None, op: Operator) -> dict[str, tuple[str, ...]]:
    """Return an operator's keys and values by axis over which ring attention passes them."""
    if sharding is None or inventory.works[op.name].kind != "attention":
        return {}
    values_by_axis = {axis: passed_round(sharding, op, inventory.graph.rules[op.name], axis) for axis in tensor_axes(sharding)}
    return {axis: values for axis, values in values_by_axis.items() if values}


Span = tuple[int, int] | None  # number of ranks of an axis, and their stride along it


class Sets(NamedTuple):
    """Sizes of combined ring and Ulysses attention: `ulysses_size` adjacent ranks of an axis exchange heads, and keys go round a ring of
    `ring_size` such groups. `key_repeats`: number of times that a key head is sent, since several ranks read it."""

    beside: int
    apart: int
    repeats: float


def sets(inventory: Inventory, sharding: Sharding, op: Operator, axis: str) -> Sets:
    """Return the ring and Ulysses sizes of an axis."""
    graph, axis_size = inventory.graph, sharding.sizes[axis]
    rule, queries, keys = graph.rules[op.name], *(graph.tensors[v].shape for v in op.inputs[:2])
    ulysses_size = exchanged(sharding, op, rule, axis, queries)
    heads = keys[-3] / pieces_of_heads(sharding, op, len(queries) - 3) if ulysses_size > 1 else 1
    return Sets(ulysses_size, axis_size // ulysses_size, max(1.0, ulysses_size / heads))


def pieces_of_heads(sharding: Sharding, op: Operator, dim: int) -> float:
    """Return the number of shards of query heads over other axes."""
    forms = sharding.needs[op.name][0].items()
    return prod(form.ways(sharding.sizes[axis]) for axis, form in forms if is_shard(form) and form.dim == dim)


def exchanges(inventory: Inventory, op: Operator, sets: Sets) -> Iterator[tuple[str, float]]:
    """Yield (value, multiple of its bytes) exchanged between heads and positions, each way; of a mask only its rows."""
    tensors, mask = inventory.graph.tensors, mask_of(op)
    yield from ((value, 1.0) for value in (op.inputs[0], op.outputs[0]))
    yield from ((value, sets.repeats) for value in op.inputs[1:3])
    if mask is not None and tensors[mask].shape[-2] > 1:
        for_all = len(tensors[mask].shape) < 3 or tensors[mask].shape[-3] == 1
        yield mask, float(sets.beside if for_all else 1)


class Around(NamedTuple):
    """A collective of an operator with its counts in forward and backward, `subgroup` a subgroup of an axis. `num_shards`: divisor of the
    value's bytes; `size_bytes`: bytes instead, of float32 data whatever the value's dtype."""

    name: str
    value: str
    forward: int
    backward: int
    among: Span
    ways: float
    size_bytes: float | None = None


def around(inventory: Inventory, sharding: Sharding, op: Operator, axis: str) -> Iterator[Around]:
    """Yield the ring passes of keys and values, both ways, and of their float32 gradients; and the all-to-alls of heads, both ways."""
    values = rounds(inventory, sharding, op).get(axis)
    if not values:
        return
    tensors, sizes = inventory.graph.tensors, sets(inventory, sharding, op, axis)
    has_gradient = op.outputs[0] in inventory.grads
    for value in values if sizes.apart > 1 else ():
        divisor, subgroup = pieces(sharding, value, axis) * sizes.beside / sizes.repeats, (sizes.apart, sizes.beside)
        yield Around(ROUND, value, 1, has_gradient, subgroup, divisor)
        if has_gradient:
            yield Around(ROUND, value, 0, 1, subgroup, 1.0, tensors[value].size_bytes / divisor)
    for value, times in exchanges(inventory, op, sizes) if sizes.beside > 1 else ():
        divisor = pieces(sharding, value, axis) * sizes.apart / times
        yield Around("all_to_all", value, 1, value in inventory.grads, (sizes.beside, 1), divisor)


def kept(places: Places, op: Operator) -> Iterator[Stored]:
    """Yield storages that backward saves additionally after a head exchange: the result before it is exchanged back, key heads that several
    ranks read, a mask's rows."""
    inventory, sharding = places.inventory, places.sharding
    for axis in rounds(inventory, sharding, op):
        assert sharding is not None
        sizes = sets(inventory, sharding, op, axis)
        for value, times in exchanges(inventory, op, sizes) if sizes.beside > 1 else ():
            extra_copies = times - (value in op.inputs[:3])
            if extra_copies > 0:
                stored = places.storage_of(value)
                yield stored._replace(root=f"{value} by heads for {op.name}", size_bytes=extra_copies * stored.size_bytes, held=False)


def merged(inventory: Inventory, sharding: Sharding | None, op: Operator) -> tuple[float, float]:
    """Return the memory traffic, forward and backward, of merging an operator's blocks: one per rank and step; half of causal ones."""
    tensors, forward, backward = inventory.graph.tensors, 0.0, 0.0
    for axis, values in rounds(inventory, sharding, op).items():
        assert sharding is not None
        sizes = sets(inventory, sharding, op, axis)
        blocks = sizes.apart * (0.75 if is_causal(op) else 1.0)
        forward_ratio, backward_ratio = MERGING if inventory.kernels.is_half else MERGING_WIDE
        forward += forward_ratio * blocks * tensors[op.outputs[0]].size_bytes
        backward += backward_ratio * blocks * sum(tensors[v].size_bytes for v in (op.inputs[0], *values))
    return forward, backward


def on_the_way(inventory: Inventory, sharding: Sharding | None, op: Operator) -> float:
    """Return the bytes of the current and the next block of keys and values, and of float32 gradients: of this rank's own block and the
    current one; with more than two ranks also of those received and sent on."""
    tensors, amount = inventory.graph.tensors, 0.0
    for axis, values in rounds(inventory, sharding, op).items():
        assert sharding is not None
        sizes = sets(inventory, sharding, op, axis)
        num_gradients = 0 if sizes.apart == 1 else 2 if sizes.apart == 2 else 4
        gradient_blocks = (WIDE if inventory.kernels.is_half else 1.0) * num_gradients
        blocks = sizes.repeats * (2 * (num_gradients > 0) + gradient_blocks)
        amount += sum(blocks * tensors[v].size_bytes / pieces(sharding, v) for v in dict.fromkeys(values))
        if sizes.beside > 1:  # an all-to-all has a separate result
            pairs = exchanges(inventory, op, sizes)
            amount += max(times * tensors[v].size_bytes / pieces(sharding, v) for v, times in pairs)
    return amount
