"""What attention costs besides where keys and values go round the ranks (`weft.lower.kernels.ring`), and where sets of these exchange heads
before (`weft.lower.kernels.exchanged`). In: an inventory, a sharding, an operator. Out: what goes round and what is exchanged, bytes of
memory that move to merge its blocks, and that those take which are on their way.

Not modelled: that a block goes no further than it is seen, and blocks of windows that nobody computes.
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


Span = tuple[int, int] | None  # of how many ranks of an axis, and how far apart along it


class Sets(NamedTuple):
    """`beside` ranks of an axis, side by side, exchange heads, and keys go round `apart` such sets. `repeats`: how many times a head of
    keys is sent, since several ranks read it."""

    beside: int
    apart: int
    repeats: float


def sets(inventory: Inventory, sharding: Sharding, op: Operator, axis: str) -> Sets:
    """How the ranks of an axis that pass keys round are arranged."""
    graph, n = inventory.graph, sharding.sizes[axis]
    rule, queries, keys = graph.rules[op.name], *(graph.tensors[v].shape for v in op.inputs[:2])
    count = exchanged(sharding, op, rule, axis, queries)
    heads = keys[-3] / pieces_of_heads(sharding, op, len(queries) - 3) if count > 1 else 1
    return Sets(count, n // count, max(1.0, count / heads))


def pieces_of_heads(sharding: Sharding, op: Operator, dim: int) -> float:
    """Pieces into which other axes cut the heads of queries."""
    forms = sharding.needs[op.name][0].items()
    return prod(form.ways(sharding.sizes[axis]) for axis, form in forms if is_shard(form) and form.dim == dim)


def exchanges(inventory: Inventory, op: Operator, sets: Sets) -> Iterator[tuple[str, float]]:
    """What of attention is exchanged for heads, each way: values, and how many times their bytes; of a mask its rows, not those of all."""
    tensors, mask = inventory.graph.tensors, mask_of(op)
    yield from ((value, 1.0) for value in (op.inputs[0], op.outputs[0]))
    yield from ((value, sets.repeats) for value in op.inputs[1:3])
    if mask is not None and tensors[mask].shape[-2] > 1:
        for_all = len(tensors[mask].shape) < 3 or tensors[mask].shape[-3] == 1
        yield mask, float(sets.beside if for_all else 1)


class Around(NamedTuple):
    """A collective of an operator, so many times in its forward and its backward, `among` some ranks of an axis. `ways`: what the value's
    bytes are divided by; `size_bytes`: bytes instead, of what is float32 whatever the value is."""

    name: str
    value: str
    forward: int
    backward: int
    among: Span
    ways: float
    size_bytes: float | None = None


def around(inventory: Inventory, sharding: Sharding, op: Operator, axis: str) -> Iterator[Around]:
    """What goes round the ranks of an axis, both ways, and its gradients, which are float32; and what is exchanged for heads, both ways."""
    values = rounds(inventory, sharding, op).get(axis)
    if not values:
        return
    tensors, among = inventory.graph.tensors, sets(inventory, sharding, op, axis)
    learns = op.outputs[0] in inventory.grads
    for value in values if among.apart > 1 else ():
        ways, sides = pieces(sharding, value, axis) * among.beside / among.repeats, (among.apart, among.beside)
        yield Around(ROUND, value, 1, learns, sides, ways)
        if learns:
            yield Around(ROUND, value, 0, 1, sides, 1.0, tensors[value].size_bytes / ways)
    for value, times in exchanges(inventory, op, among) if among.beside > 1 else ():
        ways = pieces(sharding, value, axis) * among.apart / times
        yield Around("all_to_all", value, 1, value in inventory.grads, (among.beside, 1), ways)


def kept(places: Places, op: Operator) -> Iterator[Stored]:
    """What backward keeps of heads that were exchanged, besides as much as it keeps of what is: the result before it goes back, heads of
    keys that several ranks read, a mask's rows."""
    inventory, sharding = places.inventory, places.sharding
    for axis in rounds(inventory, sharding, op):
        assert sharding is not None
        among = sets(inventory, sharding, op, axis)
        for value, times in exchanges(inventory, op, among) if among.beside > 1 else ():
            more = times - (value in op.inputs[:3])
            if more > 0:
                stored = places.storage_of(value)
                yield stored._replace(root=f"{value} by heads for {op.name}", size_bytes=more * stored.size_bytes, held=False)


def merged(inventory: Inventory, sharding: Sharding | None, op: Operator) -> tuple[float, float]:
    """Bytes that move, forward and backward, to merge an operator's blocks: one a rank and step; of causal ones half see one another."""
    tensors, forward, backward = inventory.graph.tensors, 0.0, 0.0
    for axis, values in rounds(inventory, sharding, op).items():
        assert sharding is not None
        arranged = sets(inventory, sharding, op, axis)
        blocks = arranged.apart * (0.75 if is_causal(op) else 1.0)
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
        arranged = sets(inventory, sharding, op, axis)
        around = 0 if arranged.apart == 1 else 2 if arranged.apart == 2 else 4
        wide = (WIDE if inventory.kernels.is_half else 1.0) * around
        each = arranged.repeats * (2 * (around > 0) + wide)
        amount += sum(each * tensors[v].size_bytes / pieces(sharding, v) for v in dict.fromkeys(values))
        if arranged.beside > 1:  # what one way brings lies beside what it was made of
            both = exchanges(inventory, op, arranged)
            amount += max(times * tensors[v].size_bytes / pieces(sharding, v) for v, times in both)
    return amount
