"""Inventory of a loss in chunks of rows (`loss_chunks`), from the one of the loss as a whole.

What lies between the head's input and the loss saves nothing: backward computes the logits of a chunk again. So each of these operators
runs on the rows of a chunk, `loss_chunks` times forward and twice as often in backward, and so do their collectives. Backward's workspace
is that of one chunk, besides the gradient of the head's input and the sum of its weight's gradient over chunks, which is no narrower than
float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from shardwise.cost.memory.block_runs import BatchBytesColumns
from shardwise.cost.memory.memory import Inventory
from shardwise.cost.operators.build_inventory import OperatorFacts
from shardwise.cost.operators.sharded_inventory import Collective, ShardedInventory
from shardwise.cost.shard_counts import num_shards
from shardwise.errors import LayoutError
from shardwise.model.chunked_loss import ChunkableLoss, find_chunkable_losses, refuse_sharded_rows
from shardwise.model.graph import DTYPE_BYTES, Graph
from shardwise.model.sharding.sharding import Sharding

Entries = tuple[NDArray[np.intp], NDArray[np.intp]]
NARROW_BYTES, WIDE_BYTES = 2.0, 4.0  # of logits and of what their loss saves, under 16-bit products
LOGIT_COPIES = 3.0  # logarithms of the softmax, their gradient, and the logits' own


@dataclass(frozen=True)
class _ChunkedOperators:
    """Numbers of a loss's operators in the graph."""

    loss: ChunkableLoss
    linear: int
    between: tuple[int, ...]
    last: int

    @classmethod
    def of(cls, loss: ChunkableLoss, position: dict[str, int]) -> _ChunkedOperators:
        linear, *between, last = (position[op.name] for op in loss.operators)
        return cls(loss, linear, tuple(between), last)

    @property
    def numbers(self) -> tuple[int, ...]:
        return (self.linear, *self.between, self.last)


def chunk_inventory(
    parts: ShardedInventory, facts: OperatorFacts, sharding: Sharding | None, num_chunks: int, is_half: bool
) -> ShardedInventory:
    """Return the inventory with the losses of the graph in `num_chunks` chunks. `is_half`: the inventory's float32 tensors are 16-bit.

    Raises:
        LayoutError: the graph has no such loss, or ranks exchange rows of its logits under this sharding.
    """
    losses = find_chunkable_losses(facts.inventory.graph)
    for loss in losses:
        if reason := refuse_sharded_rows(loss, sharding):
            raise LayoutError(reason)
    chunked = [_ChunkedOperators.of(loss, facts.position) for loss in losses]
    parts = _with_chunked_bytes(parts, facts.inventory, sharding, chunked, num_chunks, is_half)
    return _with_chunked_collectives(_with_chunked_kernels(parts, chunked, num_chunks), chunked, num_chunks)


def is_weight_gradient_immediate(graph: Graph, position: dict[str, int]) -> NDArray[np.bool_]:
    """[operator] -> whether its weight gradient is computed with its input's, whatever the schedule: the head's of a loss in chunks."""
    flags = np.zeros(len(graph.operators), dtype=bool)
    flags[[position[loss.linear.name] for loss in find_chunkable_losses(graph)]] = True
    return flags


def _with_chunked_kernels(parts: ShardedInventory, losses: Sequence[_ChunkedOperators], num_chunks: int) -> ShardedInventory:
    """Return the inventory with operators of their own for the chunks."""
    compute, index = list(parts.compute), parts.index.copy()
    for i in (i for loss in losses for i in loss.numbers):
        index[i] = len(compute)
        compute.append(replace(parts.compute[parts.index[i]], num_chunks=num_chunks))
    return replace(parts, compute=tuple(compute), index=index)


def _with_chunked_collectives(parts: ShardedInventory, losses: Sequence[_ChunkedOperators], num_chunks: int) -> ShardedInventory:
    """Return the inventory with a collective for each chunk where there is one for all rows, and those of forward in backward as well."""
    collectives, chunked = list(parts.collectives), {i for loss in losses for i in (*loss.between, loss.last)}
    numbers: dict[int, int] = {}

    def chunks_of(pairs: Entries) -> Iterator[tuple[int, int]]:
        for i, entry in zip(*(column.tolist() for column in pairs), strict=True):
            if i in chunked:
                if entry not in numbers:
                    numbers[entry] = len(collectives)
                    collectives.append(_chunk_of(parts.collectives[entry], num_chunks))
                yield from [(i, numbers[entry])] * num_chunks

    def rest_of(pairs: Entries) -> list[tuple[int, int]]:
        return [pair for pair in zip(*(column.tolist() for column in pairs), strict=True) if pair[0] not in chunked]

    again, back = list(chunks_of(parts.forward)), list(chunks_of(parts.backward))
    forward, backward = [*rest_of(parts.forward), *again], [*rest_of(parts.backward), *again, *back]
    return replace(
        parts, collectives=tuple(collectives), forward=_to_columns(forward), backward=_to_columns(backward),
        column_gathers=parts.column_gathers.without_layers([loss.linear for loss in losses]),
    )  # fmt: skip


def _chunk_of(collective: Collective, num_chunks: int) -> Collective:
    return replace(collective, size_bytes=collective.size_bytes / num_chunks)


def _to_columns(pairs: Sequence[tuple[int, int]]) -> Entries:
    table = np.array(pairs, dtype=np.intp).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _with_chunked_bytes(
    parts: ShardedInventory, inventory: Inventory, sharding: Sharding | None, losses: Sequence[_ChunkedOperators], num_chunks: int,
    is_half: bool,
) -> ShardedInventory:  # fmt: skip
    saved, extra = list(parts.saved), parts.extra_bytes.copy()
    columns = {name: getattr(parts, name).copy() for name in ("working_bytes", "torch_bytes", "weight_bytes")}
    for loss in losses:
        for i in loss.between:
            saved[i], extra[i] = (), 0.0
        saved[loss.last], extra[loss.last] = tuple(item for item in saved[loss.last] if not item.is_float), 0.0
        chunk, entering, weight = _transient_bytes(inventory, sharding, loss.loss, num_chunks, is_half)
        for i in loss.numbers:
            for name in ("working_bytes", "torch_bytes"):
                columns[name][i] = entering if i == loss.linear else entering + chunk
            columns["weight_bytes"][i] = weight
    waiting = _without_logits(parts, losses)
    return replace(parts, saved=tuple(saved), extra_bytes=extra, waiting_gradients=waiting, **columns)


def _without_logits(parts: ShardedInventory, losses: Sequence[_ChunkedOperators]) -> BatchBytesColumns:
    """Return the gradients alive during each operator's backward without those of logits: of the whole none exists."""
    waiting = parts.waiting_gradients
    columns = waiting.data_sharded.copy(), waiting.batched.copy(), waiting.fixed.copy()
    for loss in losses:
        numbers = loss.numbers
        for maker, reader in pairwise(numbers):
            for column, size in zip(columns, parts.outputs[maker][0].amount, strict=True):
                column[maker + 1 : reader] -= size
    return BatchBytesColumns(*(np.maximum(column, 0.0) for column in columns))


def _transient_bytes(
    inventory: Inventory, sharding: Sharding | None, loss: ChunkableLoss, num_chunks: int, is_half: bool
) -> tuple[float, float, float]:
    """Return the bytes of one chunk's logits with what their loss and its backward make of them, of the gradient of the head's input, and
    of that of its weight; on one tensor rank. In sizes that `is_half` halves later."""
    tensors, (x, weight) = inventory.graph.tensors, loss.linear.inputs[:2]
    logits = loss.linear.outputs[0]
    local_logits = min(tensors[v].size / num_shards(sharding, v) for v in (logits, loss.loss.inputs[0]))
    width = float(DTYPE_BYTES[tensors[logits].dtype])
    is_narrow, halved = is_half or width < WIDE_BYTES, 2.0 if is_half else 1.0
    each = NARROW_BYTES + LOGIT_COPIES * WIDE_BYTES if is_narrow else (1 + LOGIT_COPIES) * width
    weights = (NARROW_BYTES + WIDE_BYTES if is_narrow else width) * tensors[weight].size / num_shards(sharding, weight)
    entering = tensors[x].size_bytes / num_shards(sharding, x)
    return halved * each * local_logits / num_chunks, entering, halved * weights
