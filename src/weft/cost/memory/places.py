"""Where values lie on one tensor rank. In: an inventory, a sharding. Out: for every value the storage in which it lies as it is made, and
as an operator reads it.

What an operator reads in other pieces than its maker left is a tensor of its own (`weft.lower.redistribute`), and a view of it is a view of
that. So a product that reads gathered columns keeps those, and not the pieces from which they came.
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
    """A storage that backward keeps: its bytes after the tensor axis."""

    root: str
    size_bytes: float
    batched: bool
    shared: bool
    is_float: bool
    copy: str  # which copy in another dtype, under autocast
    held: bool  # a parameter or an input: only such a copy counts

    @property
    def amount(self) -> Amount:
        if not self.batched:
            return Amount(fixed=self.size_bytes)
        return Amount(shared=self.size_bytes) if self.shared else Amount(batched=self.size_bytes)


@dataclass
class Places:
    """`storages`: by value. It is filled operator by operator, in the graph's order."""

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
        """By value that an operator reads. `key`: the same for operators that read alike."""
        arriving = {}
        for at, value in enumerate(op.inputs):
            if (key, at) not in self._as_read:
                self._as_read[key, at] = self._apart(op, at, value)
            apart = self._as_read[key, at]
            arriving[value] = self.storages[value] if apart is None else apart._replace(root=f"{value}{apart.root}")
        return arriving

    def ways_read(self, op: Operator, at: int) -> float:
        """Pieces along the inner axes into which an operator's operand is cut where the operator reads it; of windows, which overlap, the
        whole over the widest."""
        ways = inf if self.sharding is not None and op.name in self.sharding.elsewhere else 1.0
        for axis, (_, need) in self._forms(op, at).items():
            if self.sharding is not None and not axis_of(axis).replicas and is_cut(need):
                n = self.sharding.sizes[axis]
                ways *= need.size / part_length(need, need.size, n) if is_halo(need) else need.ways(n) if is_shard(need) else n
        return ways

    def add(self, op: Operator, read: Mapping[str, Stored]) -> None:
        """Note where what an operator makes lies."""
        inventory = self.inventory
        for i, value in enumerate(op.outputs):
            if inventory.root[value] == value or not op.inputs:
                self.storages[value] = self.storage_of(value)
            else:
                apart = len(op.outputs) == len(op.inputs)  # a view of each
                self.storages[value] = read[op.inputs[i if apart else 0]]

    def kept(self, op: Operator, arriving: Mapping[str, Stored], value: str, copy: str, times: float) -> Stored:
        """What an operator keeps of a value that it reads or makes: it, or a `copy` of so many `times` its bytes in another dtype."""
        place = arriving.get(value) or self.storages[value]
        if not copy:
            return place
        ways = 0 if value in self.inventory.held else self.ways_read(op, op.inputs.index(value))
        stored = self.storage_of(value, ways)
        return stored._replace(root=f"{place.root} {value}", size_bytes=times * stored.size_bytes, copy=copy)

    def padded(self, op: Operator) -> Iterator[Stored]:
        """What an operator keeps of an input of the batch whose windows it reads: padded at the image's edge, it is a tensor of its own."""
        for at, value in enumerate(op.inputs):
            if value not in self._inputs or value not in self.inventory.works[op.name].keeps:
                continue
            copied = any(value == saved for saved, *_ in self.inventory.kept[op.name].storages)
            if not copied and any(is_halo(need) for _, need in self._forms(op, at).values()):
                yield self.storage_of(value, self.ways_read(op, at))._replace(root=f"{value} for {op.name}", held=False)

    def storage_of(self, value: str, ways: float = 0) -> Stored:
        """A storage of a value's own, in so many pieces, by default in those in which it is made."""
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
        """What an operand is as it is read where that is a tensor of its own, whose root is behind the value's name; None elsewhere."""
        forms = self._forms(op, at)
        axes = [axis for axis, (source, need) in forms.items() if need is not source and (is_cut(need) or is_cut(source))]
        moved = "".join(f" {axis}={forms[axis][1]}" for axis in axes)
        shared = is_cut(forms.get(DATA, (R, R))[1])
        if moved and any(is_halo(need) for _, need in forms.values()):  # what a rank has, and what it fetched, in a tensor of its own
            return self.storage_of(value, self.ways_read(op, at))._replace(root=moved, shared=shared, held=False)
        owned = any(is_owned(need) for _, need in forms.values())
        # On GPUs as in the measured runs of others, which gather again in backward what tensor ranks gather.
        apart = self.inventory.kernels.keeps_as_read or owned or any(axis_of(axis).cuts_sequences for axis in axes)
        if not moved or value in self.inventory.held or not apart:
            return None
        if self.inventory.works[op.name].kind == "convolution" and self.ways_read(op, at) > self._ways(value):
            return None  # measured on grids: what a convolution reads a slice of stays whole
        return self.storage_of(value, self.ways_read(op, at))._replace(root=moved, shared=shared)

    def _forms(self, op: Operator, at: int) -> dict[str, tuple[Placement, Placement]]:
        """By axis: the form in which an operand is made, and that in which it is read."""
        if self.sharding is None or not self._axes:
            return {}
        source, need = self.sharding.forms[op.inputs[at]], self.sharding.needs[op.name][at]
        return {axis: (source.get(axis, R), need.get(axis) or source.get(axis, R)) for axis in self._axes}
