"""Storages of values on one tensor rank. In: an inventory, a sharding. Out: for every value the storage in which its operator leaves it,
and the one in which another operator reads it.

An operand that is redistributed before it is read is a separate tensor (`shardwise.lower.redistribute`), and its views are views of that.
So a product that reads all-gathered columns saves those, and not the shards from which they came.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from math import inf
from typing import NamedTuple

from shardwise.cost.memory.block_runs import BatchBytes
from shardwise.cost.memory.memory import Inventory
from shardwise.cost.shard_counts import is_sharded_over_data, num_shards
from shardwise.model.graph import Operator
from shardwise.model.sharding.sharding import Sharding, shard_length
from shardwise.plan.ir.axis import DATA, axis_of
from shardwise.plan.ir.placement import P, Placement, R, has_single_owner, is_fully_replicated, is_halo, is_shard, is_sharded


class SavedStorage(NamedTuple):
    """A storage that is saved for backward, with its bytes on one tensor rank."""

    root: str
    size_bytes: float
    batched: bool
    data_sharded: bool
    is_float: bool
    copy: str  # name of a copy in another dtype, under autocast
    is_persistent: bool  # a parameter or an input: only its copies count

    @property
    def amount(self) -> BatchBytes:
        if not self.batched:
            return BatchBytes(fixed=self.size_bytes)
        return BatchBytes(data_sharded=self.size_bytes) if self.data_sharded else BatchBytes(batched=self.size_bytes)


@dataclass
class StorageMap:
    """Storages by value (`storages`), filled operator by operator in the graph's order."""

    inventory: Inventory
    sharding: Sharding | None
    storages: dict[str, SavedStorage] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._inputs = {v.value for v in self.inventory.graph.inputs}
        self._as_read: dict[tuple[Hashable, int], SavedStorage | None] = {}
        self._axes = [] if self.sharding is None else list(self.sharding.sizes)
        self._num_shards = cache(partial(num_shards, self.sharding))
        for value in self.inventory.persistent_values:
            self.storages[value] = self.storage_of(value)

    def operand_storages(self, op: Operator, key: Hashable) -> dict[str, SavedStorage]:
        """Return the storages of an operator's operands, by value. `key`: equal for operators with equally placed operands."""
        arriving = {}
        for at, value in enumerate(op.inputs):
            if (key, at) not in self._as_read:
                self._as_read[key, at] = self._redistributed_operand(op, at, value)
            copy = self._as_read[key, at]
            arriving[value] = self.storages[value] if copy is None else copy._replace(root=f"{value}{copy.root}")
        return arriving

    def num_shards_read(self, op: Operator, at: int) -> float:
        """Return the number of shards along the inner axes of an operand as the operator reads it; for overlapping windows the full length
        over the longest window."""
        count = inf if self.sharding is not None and op.name in self.sharding.off_rank else 1.0
        for axis, (_, need) in self._operand_placements(op, at).items():
            if self.sharding is not None and not axis_of(axis).has_replicas and is_sharded(need):
                n = self.sharding.sizes[axis]
                count *= need.size / shard_length(need, need.size, n) if is_halo(need) else need.split_factor(n) if is_shard(need) else n
        return count

    def add_outputs(self, op: Operator, read: Mapping[str, SavedStorage]) -> None:
        """Record the storages of an operator's outputs."""
        inventory = self.inventory
        for i, value in enumerate(op.outputs):
            if inventory.storage_root[value] == value or not op.inputs:
                self.storages[value] = self.storage_of(value)
            else:
                is_elementwise = len(op.outputs) == len(op.inputs)  # a view of each
                self.storages[value] = read[op.inputs[i if is_elementwise else 0]]

    def saved_storage(self, op: Operator, operands: Mapping[str, SavedStorage], value: str, copy: str, times: float) -> SavedStorage:
        """Return the storage that an operator saves of an operand or output: its own, or a `copy` of `times` its bytes in another dtype."""
        storage = operands.get(value) or self.storages[value]
        if not copy:
            return storage
        count = 0 if value in self.inventory.persistent_values else self.num_shards_read(op, op.inputs.index(value))
        stored = self.storage_of(value, count)
        return stored._replace(root=f"{storage.root} {value}", size_bytes=times * stored.size_bytes, copy=copy)

    def padded_inputs(self, op: Operator) -> Iterator[SavedStorage]:
        """Yield the storages saved of batch inputs that an operator reads with a halo: padded at the image's edge, they are copies."""
        for at, value in enumerate(op.inputs):
            if value not in self._inputs or value not in self.inventory.works[op.name].saved:
                continue
            is_copied = any(value == saved for saved, *_ in self.inventory.saved[op.name].storages)
            if not is_copied and any(is_halo(need) for _, need in self._operand_placements(op, at).values()):
                yield self.storage_of(value, self.num_shards_read(op, at))._replace(root=f"{value} for {op.name}", is_persistent=False)

    def storage_of(self, value: str, num_pieces: float = 0) -> SavedStorage:
        """Return a separate storage for a value in `num_pieces` shards, by default in those of its own placement."""
        inventory, tensor = self.inventory, self.inventory.graph.tensors[value]
        shared = is_sharded_over_data(self.sharding, value)
        return SavedStorage(
            value,
            tensor.size_bytes / (num_pieces or self._num_shards(value)),
            value in inventory.batched,
            shared,
            tensor.is_float,
            "",
            value in inventory.persistent_values,
        )

    def _redistributed_operand(self, op: Operator, at: int, value: str) -> SavedStorage | None:
        """Return the storage of a redistributed operand (its root without the value's name), or None if it is read where it is."""
        placements = self._operand_placements(op, at)
        axes = [axis for axis, (source, need) in placements.items() if need is not source and (is_sharded(need) or is_sharded(source))]
        moved = "".join(f" {axis}={placements[axis][1]}" for axis in axes)
        shared = is_sharded(placements.get(DATA, (R, R))[1])
        if moved and any(is_halo(need) for _, need in placements.values()):  # the shard and its halo are copied into a separate tensor
            return self.storage_of(value, self.num_shards_read(op, at))._replace(root=moved, data_sharded=shared, is_persistent=False)
        owned = any(has_single_owner(need) for _, need in placements.values())
        # On GPUs linear layers gather again in backward (`lower/column_linears`).
        is_scattered = any(source is P and is_sharded(need) for source, need in placements.values())
        crosses_sequences = any(axis_of(axis).shards_sequences for axis in axes)
        is_separate = self.inventory.kernel_memory.saves_as_read or owned or is_scattered or crosses_sequences
        if not moved or value in self.inventory.persistent_values or not is_separate:
            return None
        if all(is_fully_replicated(placements[axis][0]) and _is_leading_shard(placements[axis][1]) for axis in axes):
            return None  # a view, with which the whole storage is saved
        return self.storage_of(value, self.num_shards_read(op, at))._replace(root=moved, data_sharded=shared)

    def _operand_placements(self, op: Operator, at: int) -> dict[str, tuple[Placement, Placement]]:
        """Return (placement as produced, placement as read) of an operand, by axis."""
        if self.sharding is None or not self._axes:
            return {}
        source, need = self.sharding.placements[op.inputs[at]], self.sharding.input_placements[op.name][at]
        return {axis: (source.get(axis, R), need.get(axis) or source.get(axis, R)) for axis in self._axes}


def _is_leading_shard(placement: Placement) -> bool:
    """Return whether a slice of a whole tensor is contiguous, so that it is not copied."""
    return is_shard(placement) and placement.dim == 0 and not placement.runs
