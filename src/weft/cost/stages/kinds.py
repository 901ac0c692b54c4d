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

from weft.cost.memory.memory import Inventory
from weft.cost.memory.runs import Runs, starts_of
from weft.cost.operators.parts import Parts, held_parameters
from weft.cost.pieces import pieces
from weft.cost.stages.equal_stages import firsts, operator_kinds, parameter_kinds
from weft.cost.stages.sections import Section, grouped, section
from weft.model.sharding.sharding import Sharding
from weft.model.stages.stages import Stage


@dataclass(frozen=True)
class Kinds:
    """One graph under one sharding, with class numbers that are equal for operators and parameters of equal cost."""

    inventory: Inventory
    sharding: Sharding | None
    parts: Parts
    experts: frozenset[str]
    weighted: NDArray[np.bool_]

    @cached_property
    def place(self) -> dict[str, int]:
        """Number of each operator in the graph, by name."""
        return {op.name: i for i, op in enumerate(self.inventory.graph.operators)}

    @cached_property
    def parameters(self) -> dict[str, int]:
        """Class numbers of parameters, by value."""
        return parameter_kinds({v.value: v for v in self.inventory.graph.parameters}, self.sharding, self.experts)

    @cached_property
    def operators(self) -> NDArray[np.intp]:
        """Class numbers of operators, in the graph's order."""
        return operator_kinds(self.inventory, self.parts, self.weighted, self.parameters)


@dataclass(frozen=True)
class Sections:
    """Sections of `stages`. `half`: every float tensor is 16-bit."""

    kinds: Kinds
    stages: Sequence[Stage]
    half: bool
    _cache: dict[int, Section] = field(default_factory=dict)

    @cached_property
    def first(self) -> tuple[int, ...]:
        """[stage] -> the first equal stage."""
        kinds = self.kinds
        if len(self.stages) == 1:
            return (0,)
        return firsts(kinds.inventory, kinds.parts, kinds.operators, kinds.parameters, self.stages, self._numbers)

    def of(self, stage: int) -> Section:
        """Return the section of a stage."""
        if stage not in self._cache:
            first = self.first[stage]
            if first == stage:
                self._cache[stage] = self._made(stage)
            else:
                numbers = self._numbers[stage]
                groups, staying = grouped(self.kinds.parts, numbers.tolist(), self.half)
                self._cache[stage] = replace(self.of(first), operators=numbers, groups=groups, staying=staying)
        return self._cache[stage]

    @cached_property
    def _numbers(self) -> list[NDArray[np.intp]]:
        place = self.kinds.place
        return [np.array([place[op.name] for op in stage.operators], dtype=np.intp) for stage in self.stages]

    @cached_property
    def _readers(self) -> Mapping[str, int]:
        return Counter(value for stage in self.stages for value in stage.variables)

    def _made(self, number: int) -> Section:
        parts, sharding, experts = self.kinds.parts, self.kinds.sharding, self.kinds.experts
        stage, numbers, readers = self.stages[number], self._numbers[number], self._readers
        parameters = {v.value: v for v in self.kinds.inventory.graph.parameters}
        counts = held_parameters(parameters, sharding, stage.variables, readers, experts)
        # Parameters that several stages share are not sharded by ZeRO.
        sizes = {
            v: parameters[v].tensor.size / pieces(sharding, v)
            for v in stage.variables if v in parameters and parameters[v].trainable and readers[v] == 1
        }  # fmt: skip
        starts = starts_of([parts.blocks[i] for i in numbers])
        runs = cache(partial(Runs.of, stage.operators, starts, sizes, experts, self.kinds.inventory.grads))
        return section(parts, numbers, counts, self.half, runs)
