"""Cache of batch-independent stage data. In: the inventory of a graph under a sharding, stages. Out: a `StageSection` of each.

A section is computed on first use, and once for structurally equal stages (`equal_stages`): a search needs only the first stage of many
pipelines, and in a deep model most others are equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial

import numpy as np
from numpy.typing import NDArray

from shardwise.cost.memory.block_runs import BlockRuns, run_starts
from shardwise.cost.memory.memory import Inventory
from shardwise.cost.memory.storages import SavedStorage
from shardwise.cost.operators.sharded_inventory import ShardedInventory, stage_parameters
from shardwise.cost.shard_counts import num_shards
from shardwise.cost.stages.sections import StageSection, build_section, group_by_block
from shardwise.model.graph import Variable
from shardwise.model.sharding.sharding import Sharding
from shardwise.model.stages.stages import Stage, batch_only_operators


@dataclass(frozen=True)
class CostClasses:
    """One graph under one sharding, with class numbers that are equal for operators and parameters of equal cost."""

    inventory: Inventory
    sharding: Sharding | None
    parts: ShardedInventory
    experts: frozenset[str]
    weighted: NDArray[np.bool_]

    @cached_property
    def place(self) -> dict[str, int]:
        """Number of each operator in the graph, by name."""
        return {op.name: i for i, op in enumerate(self.inventory.graph.operators)}

    @cached_property
    def parameters(self) -> dict[str, int]:
        """Class numbers of parameters, by value."""
        return parameter_cost_classes({v.value: v for v in self.inventory.graph.parameters}, self.sharding, self.experts)

    @cached_property
    def operators(self) -> NDArray[np.intp]:
        """Class numbers of operators, in the graph's order."""
        return operator_cost_classes(self.inventory, self.parts, self.weighted, self.parameters)


@dataclass(frozen=True)
class SectionCache:
    """Sections of `stages`. `half`: every float tensor is 16-bit."""

    kinds: CostClasses
    stages: Sequence[Stage]
    half: bool
    _cache: dict[int, StageSection] = field(default_factory=dict)

    @cached_property
    def first_equal(self) -> tuple[int, ...]:
        """[stage] -> the first equal stage."""
        kinds = self.kinds
        if len(self.stages) == 1:
            return (0,)
        return first_equal_stages(kinds.inventory, kinds.parts, kinds.operators, kinds.parameters, self.stages, self._numbers)

    def section_of(self, stage: int) -> StageSection:
        """Return the section of a stage."""
        if stage not in self._cache:
            first = self.first_equal[stage]
            if first == stage:
                self._cache[stage] = self._build_section(stage)
            else:
                numbers = self._numbers[stage]
                groups, staying = group_by_block(self.kinds.parts, numbers.tolist(), self.half)
                self._cache[stage] = replace(self.section_of(first), operators=numbers, groups=groups, residency_bytes=staying)
        return self._cache[stage]

    @cached_property
    def _numbers(self) -> list[NDArray[np.intp]]:
        place = self.kinds.place
        return [np.array([place[op.name] for op in stage.operators], dtype=np.intp) for stage in self.stages]

    @cached_property
    def _readers(self) -> Mapping[str, int]:
        return Counter(value for stage in self.stages for value in stage.variables)

    def _build_section(self, number: int) -> StageSection:
        parts, sharding, experts = self.kinds.parts, self.kinds.sharding, self.kinds.experts
        stage, numbers, readers = self.stages[number], self._numbers[number], self._readers
        graph = self.kinds.inventory.graph
        parameters = {v.value: v for v in graph.parameters}
        counts = stage_parameters(graph, sharding, stage.variables, readers, experts)
        # Parameters that several stages share are not sharded by ZeRO.
        sizes = {
            v: parameters[v].tensor.size / num_shards(sharding, v)
            for v in stage.variables if v in parameters and parameters[v].trainable and readers[v] == 1
        }  # fmt: skip
        starts = run_starts([parts.blocks[i] for i in numbers])
        runs = cache(partial(BlockRuns.of, stage.operators, starts, sizes, experts, self.kinds.inventory.grads))
        return build_section(parts, numbers, counts, self.half, runs)


IndexArray = NDArray[np.intp]


def parameter_cost_classes(parameters: Mapping[str, Variable], sharding: Sharding | None, experts: frozenset[str]) -> dict[str, int]:
    """Return a class number for every parameter, equal for parameters of equal size whose gradients are reduced equally."""
    kinds: dict[Hashable, int] = {}
    gradients = {} if sharding is None else sharding.gradient_axes
    return {
        value: kinds.setdefault(
            (v.tensor.size, num_shards(sharding, value), v.trainable, tuple(gradients.get(value, ())), value in experts), len(kinds)
        )
        for value, v in parameters.items()
    }


def operator_cost_classes(
    inventory: Inventory, parts: ShardedInventory, weighted: NDArray[np.bool_], of_parameters: Mapping[str, int]
) -> IndexArray:
    """Return a class number for every operator of the graph, equal for operators of equal cost.

    Distances count operators that belong to a stage: those that depend on the batch's shape alone save nothing.
    """
    forward, backward = _entries_by_operator(parts.forward), _entries_by_operator(parts.backward)
    gradients = parts.waiting_gradients
    waiting = list(zip(*(column.tolist() for column in (gradients.data_sharded, gradients.batched, gradients.fixed)), strict=True))
    kinds: dict[Hashable, int] = {}
    met_at: dict[str, int] = {}
    read_at: dict[str, int] = {}
    made_at: list[int] = []
    free, position, numbers = batch_only_operators(inventory.graph), 0, []

    def met(item: SavedStorage) -> Hashable:
        back = _distance_back(met_at, f"{item.root} {item.copy}", position)
        return back, item.size_bytes, item.batched, item.data_sharded, item.is_float, bool(item.copy), item.is_persistent

    for i, op in enumerate(inventory.graph.operators):
        made_at.append(position)
        entered = tuple([(position - made_at[maker], met(item)) for maker, item in parts.reads[i]])
        saved_keys, makes, arrived = (tuple([met(item) for item in items[i]]) for items in (parts.saved, parts.outputs, parts.arrivals))
        read = []
        for value in op.inputs:
            if value in of_parameters:
                read.append((_distance_back(read_at, value, position), of_parameters[value]))
        position += op.name not in free
        key = (
            parts.index[i], forward.get(i), backward.get(i), entered, saved_keys, makes, tuple(read), parts.extra_bytes[i],
            parts.working_bytes[i], parts.torch_bytes[i], *waiting[i], parts.weight_bytes[i], parts.data_sharded[i], parts.attention[i],
            bool(parts.blocks[i]), weighted[i], op.name in free, parts.cheap[i], arrived,
        )  # fmt: skip
        numbers.append(kinds.setdefault(key, len(kinds)))
    return np.array(numbers, dtype=np.intp)


def _distance_back(last: dict[str, int], thing: str, place: int) -> int:
    """Return the distance to the last occurrence of a key, -1 if there is none, and record this one."""
    distance = place - last[thing] if thing in last else -1
    last[thing] = place
    return distance


def _entries_by_operator(operators_and_entries: tuple[IndexArray, IndexArray]) -> dict[int, tuple[int, ...]]:
    entries: dict[int, list[int]] = {}
    for i, entry in zip(*(numbers.tolist() for numbers in operators_and_entries), strict=True):
        entries.setdefault(i, []).append(entry)
    return {i: tuple(values) for i, values in entries.items()}


def first_equal_stages(
    inventory: Inventory,
    parts: ShardedInventory,
    kinds: IndexArray,
    of_parameters: Mapping[str, int],
    stages: Sequence[Stage],
    numbers: Sequence[IndexArray],
) -> tuple[int, ...]:
    """[stage] -> the first equal stage. `numbers`: of the stages' operators; `kinds`: from `operator_cost_classes`.

    Equal stages send and receive equal bytes, read parameters with equal numbers of readers and buffers of equal bytes, and have blocks at
    equal positions.
    """
    readers = Counter(value for stage in stages for value in stage.variables)
    tensors, batched = inventory.graph.tensors, inventory.batched
    buffers = {v.value for v in inventory.graph.buffers}

    def crossing(links: Sequence[tuple[int, Sequence[str]]]) -> tuple[tuple[tuple[int, bool], ...], ...]:
        return tuple(tuple((tensors[v].size_bytes, v in batched) for v in values) for _, values in links)

    first_of_key: dict[Hashable, int] = {}
    first = []
    for i, (stage, operators) in enumerate(zip(stages, numbers, strict=True)):
        blocks = np.unique(parts.block_numbers[operators], return_inverse=True)[1]
        parameters = tuple([(of_parameters[v], readers[v] > 1) for v in stage.variables if v in of_parameters])
        held = tuple([tensors[v].size_bytes for v in stage.variables if v in buffers])
        key = (kinds[operators].tobytes(), blocks.tobytes(), parameters, held, crossing(stage.receives), crossing(stage.sends))
        first.append(first_of_key.setdefault(key, i))
    return tuple(first)
