"""Storages of values on one tensor rank. In: an inventory, a sharding. Out: for every value the storage in which its operator leaves it,
and the one in which another operator reads it.

An operand that is redistributed before it is read is a separate tensor (`weft.lower.redistribute`), and its views are views of that.
So a product that reads all-gathered columns saves those, and not the shards from which they came.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from math import inf
from typing import NamedTuple

from weft.cost.memory.memory import Inventory
from weft.cost.memory.runs import Amount
from weft.cost.pieces import pieces, shared_by_data
from weft.model.graph import Operator
from weft.model.sharding.sharding import Sharding, part_length
from weft.plan.axis import DATA, axis_of
from weft.plan.placement import Placement, R, is_cut, is_halo, is_owned, is_shard


class Stored(NamedTuple):
    """A storage that is saved for backward, with its bytes on one tensor rank."""

    root: str
    size_bytes: float
    batched: bool
    shared: bool
    is_float: bool
    copy: str  # name of a copy in another dtype, under autocast
    held: bool  # a parameter or an input: only its copies count

    @property
    def amount(self) -> Amount:
        if not self.batched:
            return Amount(fixed=self.size_bytes)
        return Amount(shared=self.size_bytes) if self.shared else Amount(batched=self.size_bytes)


@dataclass
class Places:
    """Storages by value (`storages`), filled operator by operator in the graph's order."""

    inventory: Inventory
    sharding: Sharding | None
    storages: dict[str, Stored] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._inputs = {v.value for v in self.inventory.graph.inputs}
        self._as_read: dict[tuple[Hashable, int], Stored | None] = {}
        self._axes = [] if self.sharding is None else list(self.sharding.sizes)
        self._ways = cache(partial(pieces, self.sharding))
        for value in self.inventory.held:
            self.storages[value] = self.storage_of(value)

    def read(self, op: Operator, key: Hashable) -> dict[str, Stored]:
        """Return the storages of an operator's operands, by value. `key`: equal for operators with equally placed operands."""
        arriving = {}
        for at, value in enumerate(op.inputs):
            if (key, at) not in self._as_read:
                self._as_read[key, at] = self._apart(op, at, value)
            copy = self._as_read[key, at]
            arriving[value] = self.storages[value] if copy is None else copy._replace(root=f"{value}{copy.root}")
        return arriving

    def ways_read(self, op: Operator, at: int) -> float:
        """Return the number of shards along the inner axes of an operand as the operator reads it; for overlapping windows the full length
        over the longest window."""
        count = inf if self.sharding is not None and op.name in self.sharding.elsewhere else 1.0
        for axis, (_, need) in self._forms(op, at).items():
            if self.sharding is not None and not axis_of(axis).replicas and is_cut(need):
                n = self.sharding.sizes[axis]
                count *= need.size / part_length(need, need.size, n) if is_halo(need) else need.ways(n) if is_shard(need) else n
        return count

    def add(self, op: Operator, read: Mapping[str, Stored]) -> None:
        """Record the storages of an operator's outputs."""
        inventory = self.inventory
        for i, value in enumerate(op.outputs):
            if inventory.root[value] == value or not op.inputs:
                self.storages[value] = self.storage_of(value)
            else:
                is_elementwise = len(op.outputs) == len(op.inputs)  # a view of each
                self.storages[value] = read[op.inputs[i if is_elementwise else 0]]

    def kept(self, op: Operator, arriving: Mapping[str, Stored], value: str, copy: str, times: float) -> Stored:
        """Return the storage that an operator saves of an operand or output: its own, or a `copy` of `times` its bytes in another dtype."""
        storage = arriving.get(value) or self.storages[value]
        if not copy:
            return storage
        count = 0 if value in self.inventory.held else self.ways_read(op, op.inputs.index(value))
        stored = self.storage_of(value, count)
        return stored._replace(root=f"{storage.root} {value}", size_bytes=times * stored.size_bytes, copy=copy)

    def padded(self, op: Operator) -> Iterator[Stored]:
        """Yield the storages saved of batch inputs that an operator reads with a halo: padded at the image's edge, they are copies."""
        for at, value in enumerate(op.inputs):
            if value not in self._inputs or value not in self.inventory.works[op.name].keeps:
                continue
            is_copied = any(value == saved for saved, *_ in self.inventory.kept[op.name].storages)
            if not is_copied and any(is_halo(need) for _, need in self._forms(op, at).values()):
                yield self.storage_of(value, self.ways_read(op, at))._replace(root=f"{value} for {op.name}", held=False)

    def storage_of(self, value: str, ways: float = 0) -> Stored:
        """Return a separate storage for a value in `num_pieces` shards, by default in those of its own placement."""
        inventory, tensor = self.inventory, self.inventory.graph.tensors[value]
        shared = shared_by_data(self.sharding, value)
        return Stored(
            value,
            tensor.size_bytes / (ways or self._ways(value)),
            value in inventory.batched,
            shared,
            tensor.is_float,
            "",
            value in inventory.held,
        )

    def _apart(self, op: Operator, at: int, value: str) -> Stored | None:
        """Return the storage of a redistributed operand (its root without the value's name), or None if it is read where it is."""
        placements = self._forms(op, at)
        axes = [axis for axis, (source, need) in placements.items() if need is not source and (is_cut(need) or is_cut(source))]
        moved = "".join(f" {axis}={placements[axis][1]}" for axis in axes)
        shared = is_cut(placements.get(DATA, (R, R))[1])
        if moved and any(is_halo(need) for _, need in placements.values()):  # the shard and its halo are copied into a separate tensor
            return self.storage_of(value, self.ways_read(op, at))._replace(root=moved, shared=shared, held=False)
        owned = any(is_owned(need) for _, need in placements.values())
        # On GPUs as in published measurements, which repeat tensor-parallel all-gathers in backward.
        is_separate = self.inventory.kernels.keeps_as_read or owned or any(axis_of(axis).cuts_sequences for axis in axes)
        if not moved or value in self.inventory.held or not is_separate:
            return None
        if self.inventory.works[op.name].kind == "convolution" and self.ways_read(op, at) > self._ways(value):
            return None  # measured on grids: an operand that a convolution reads a slice of is saved unsliced
        return self.storage_of(value, self.ways_read(op, at))._replace(root=moved, shared=shared)

    def _forms(self, op: Operator, at: int) -> dict[str, tuple[Placement, Placement]]:
        """Return (placement as produced, placement as read) of an operand, by axis."""
        if self.sharding is None or not self._axes:
            return {}
        source, need = self.sharding.forms[op.inputs[at]], self.sharding.needs[op.name][at]
        return {axis: (source.get(axis, R), need.get(axis) or source.get(axis, R)) for axis in self._axes}
