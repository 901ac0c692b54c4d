"""The cores of attention that keeps its scores, which selective recomputation repeats (Korthikanti et al. 2022, section 5).

In: operators of any kind (a graph's, or the nodes of a lowered stage) and how to go from one to the next. Out: for every core its
operators: from the product that makes the scores, over softmax and dropout, to the product that reads them. Attention that is one fused
kernel keeps no scores; with dropout there is no such kernel on processors, and it is a core by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

from weft.model.graph import Graph
from weft.ops import Op, record_of_target
from weft.ops.attention import drops_scores

KEEPS_SCORES = "attention"  # `lower.kernels.randomness.attention`: with dropout

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True)
class CoreAttention(Generic[T]):
    """`operators` in order. `makers` and `readers`: those right before and after one. `part`: of which layer's run one is; a core
    lies within one. `outside`: those that no core may have."""

    operators: Sequence[T]
    name: Callable[[T], str]
    makers: Callable[[T], Iterable[T]]
    readers: Callable[[T], Iterable[T]]
    part: Callable[[T], object]
    outside: Callable[[T], bool]

    def find(self) -> list[list[T]]:
        """The operators of each core, in order; nothing outside lies on a path between two of one core."""
        regions: list[list[T]] = []
        taken: set[T] = set()
        for one in self.operators:
            core = set[T]()
            if self.name(one) == KEEPS_SCORES:
                core = {one}
            elif self._record(one).normalises:
                core = self._around(one)
            if core and core.isdisjoint(taken) and not any(map(self.outside, core)):
                taken |= core
                regions.append(sorted(core, key=self._order.__getitem__))
        return regions

    def _record(self, one: T) -> Op:
        return record_of_target(f"aten.{self.name(one)}")

    @cached_property
    def _order(self) -> dict[T, int]:
        return {one: i for i, one in enumerate(self.operators)}

    def _around(self, softmax: T) -> set[T]:
        """All on the way from the products of two activations that make the scores to those that read the weights."""
        makers, readers = self._nearest(softmax, self.makers), self._nearest(softmax, self.readers)
        if not makers or not readers:
            return set()
        part = self.part(softmax)
        return self._closure(makers, self.readers, part) & self._closure(readers, self.makers, part)

    def _nearest(self, start: T, step: Callable[[T], Iterable[T]]) -> set[T]:
        """The nearest products of `start`'s layer in one direction; nothing where a product with a weight comes first."""
        nearest: set[T] = set()
        seen: set[T] = set()
        todo = [start]
        while todo:
            for one in step(todo.pop()):
                if one in seen or self.part(one) != self.part(start):
                    continue
                seen.add(one)
                product = self._record(one).product
                if product == "stacked":
                    nearest.add(one)
                elif product not in ("linear", "weight"):
                    todo.append(one)
        return nearest

    def _closure(self, start: set[T], step: Callable[[T], Iterable[T]], part: object) -> set[T]:
        seen, todo = set(start), list(start)
        while todo:
            for one in step(todo.pop()):
                if one not in seen and self.part(one) == part:
                    seen.add(one)
                    todo.append(one)
        return seen


def core_numbers(graph: Graph, blocks: Sequence[str]) -> tuple[int, ...]:
    """By operator of a graph: the number of the core that it is of, -1 for none. `blocks`: the block that each stands in."""
    runs, writers = [0] * len(blocks), {value: i for i, op in enumerate(graph.operators) for value in op.outputs}
    for i in range(1, len(blocks)):
        runs[i] = runs[i - 1] + (blocks[i] != blocks[i - 1])
    makers = [tuple(dict.fromkeys(writers[v] for v in op.inputs if v in writers)) for op in graph.operators]
    readers: list[list[int]] = [[] for _ in makers]
    for i, those in enumerate(makers):
        for maker in those:
            readers[maker].append(i)
    operators = range(len(makers))
    names = [KEEPS_SCORES if drops_scores(op) else op.target.split(".")[1] for op in graph.operators]
    there = CoreAttention(operators, names.__getitem__, makers.__getitem__, readers.__getitem__, runs.__getitem__, lambda _: False)
    numbers = [-1] * len(operators)
    for number, core in enumerate(there.find()):
        for i in core:
            numbers[i] = number
    return tuple(numbers)
