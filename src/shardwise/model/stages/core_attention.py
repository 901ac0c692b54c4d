"""Cores of attention that saves its scores, which selective recompute recomputes (Korthikanti et al. 2022, section 5).

Works on operators of any kind (of a graph, or nodes of a lowered stage). A core has the operators from the product that computes the
scores, over softmax and dropout, to the product that reads them. Fused attention saves no scores; with dropout CPUs have no fused kernel,
and it is a core by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

from shardwise.model.dataflow import reachable_elements
from shardwise.model.graph import Graph
from shardwise.ops import Op, record_of_target
from shardwise.ops.attention import has_score_dropout
from shardwise.ops.vocabulary import MatmulKind

KEEPS_SCORES = "attention"  # `lower.kernels.randomness.attention`: with dropout

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True)
class CoreAttention(Generic[T]):
    """`operators` in order. `producers` and `consumers`: adjacent operators. `layer_run`: the layer's run an operator is in; a core is
    within one. `is_excluded`: operators that no core may contain."""

    operators: Sequence[T]
    operator_name: Callable[[T], str]
    producers: Callable[[T], Iterable[T]]
    consumers: Callable[[T], Iterable[T]]
    layer_run: Callable[[T], object]
    is_excluded: Callable[[T], bool]

    def find(self) -> list[list[T]]:
        """Return the operators of each core, in order; nothing outside is on a path between two of one core."""
        regions: list[list[T]] = []
        taken: set[T] = set()
        for op in self.operators:
            core = set[T]()
            if self.operator_name(op) == KEEPS_SCORES:
                core = {op}
            elif self._record(op).output.is_probability:
                core = self._core_around(op)
            if core and core.isdisjoint(taken) and not any(map(self.is_excluded, core)):
                taken |= core
                regions.append(sorted(core, key=self._order.__getitem__))
        return regions

    def _record(self, one: T) -> Op:
        return record_of_target(f"aten.{self.operator_name(one)}")

    @cached_property
    def _order(self) -> dict[T, int]:
        return {op: i for i, op in enumerate(self.operators)}

    def _core_around(self, softmax: T) -> set[T]:
        """Return all operators between the products of activations that compute the scores and those that read the weights."""
        makers, readers = self._nearest_products(softmax, self.producers), self._nearest_products(softmax, self.consumers)
        if not makers or not readers:
            return set()
        after_makers = reachable_elements(makers, self._within_layer(softmax, self.consumers))
        before_readers = reachable_elements(readers, self._within_layer(softmax, self.producers))
        return after_makers & before_readers

    def _nearest_products(self, start: T, step: Callable[[T], Iterable[T]]) -> set[T]:
        """Return the nearest products of `start`'s layer in one direction; nothing where a product with a weight comes first."""
        neighbors = self._within_layer(start, step)

        def beyond(op: T) -> list[T]:
            is_product = self._record(op).product.kind in (MatmulKind.BATCHED, MatmulKind.LINEAR, MatmulKind.WEIGHT)
            return [] if is_product else neighbors(op)

        return {op for op in reachable_elements([start], beyond) if self._record(op).product.kind == MatmulKind.BATCHED}

    def _within_layer(self, start: T, step: Callable[[T], Iterable[T]]) -> Callable[[T], list[T]]:
        """Return `step` to operators of the layer of `start` only."""
        layer = self.layer_run(start)
        return lambda op: [other for other in step(op) if self.layer_run(other) == layer]


def core_attention_numbers(graph: Graph, blocks: Sequence[str]) -> tuple[int, ...]:
    """Return, by operator of a graph, the number of its core, -1 for none. `blocks`: the block of each operator."""
    runs, writers = [0] * len(blocks), graph.producer_index
    for i in range(1, len(blocks)):
        runs[i] = runs[i - 1] + (blocks[i] != blocks[i - 1])
    makers = [tuple(dict.fromkeys(writers[v] for v in op.inputs if v in writers)) for op in graph.operators]
    readers: list[list[int]] = [[] for _ in makers]
    for i, ops_before in enumerate(makers):
        for maker in ops_before:
            readers[maker].append(i)
    operators = range(len(makers))
    names = [KEEPS_SCORES if has_score_dropout(op) else op.target.split(".")[1] for op in graph.operators]
    cores = CoreAttention(operators, names.__getitem__, makers.__getitem__, readers.__getitem__, runs.__getitem__, lambda _: False)
    numbers = [-1] * len(operators)
    for number, core in enumerate(cores.find()):
        for i in core:
            numbers[i] = number
    return tuple(numbers)
