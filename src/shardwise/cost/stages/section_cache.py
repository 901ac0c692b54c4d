"""Cache of batch-independent stage data. In: the inventory of a graph under a sharding, stages. Out: a `StageSection` of each.

A section is computed on first use, and once for structurally equal stages (`equal_stages`): a search needs only the first stage of many
pipelines, and in a deep model most others are equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial

import numpy as np
from numpy.typing import NDArray

from shardwise.cost.memory.block_runs import BlockRuns, run_starts
from shardwise.cost.memory.memory import Inventory
from shardwise.cost.operators.sharded_inventory import ShardedInventory, stage_parameters
from shardwise.cost.shard_counts import num_shards
from shardwise.cost.stages.equal_stages import first_equal_stages, operator_cost_classes, parameter_cost_classes
from shardwise.cost.stages.sections import StageSection, build_section, group_by_block
from shardwise.model.sharding.sharding import Sharding
from shardwise.model.stages.stages import Stage


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
        parameters = {v.value: v for v in self.kinds.inventory.graph.parameters}
        counts = stage_parameters(parameters, sharding, stage.variables, readers, experts)
        # Parameters that several stages share are not sharded by ZeRO.
        sizes = {
            v: parameters[v].tensor.size / num_shards(sharding, v)
            for v in stage.variables if v in parameters and parameters[v].trainable and readers[v] == 1
        }  # fmt: skip
        starts = run_starts([parts.blocks[i] for i in numbers])
        runs = cache(partial(BlockRuns.of, stage.operators, starts, sizes, experts, self.kinds.inventory.grads))
        return build_section(parts, numbers, counts, self.half, runs)
